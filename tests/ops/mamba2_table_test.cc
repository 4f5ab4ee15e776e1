// Every case of the table against the fp64 oracle: random steps over several sequences that mix
// committed, tentative and padding rows, with random accepted counts and forced flushes.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ops/mamba2_cases.h"
#include "support/mamba2_harness.h"
#include "support/pool_access.h"

namespace replayssm::testing {
namespace {

struct PlannedStep {
  std::vector<std::int32_t> forced;  // slots told to flush before the step
  std::vector<std::int32_t> restarted;
  std::vector<RowSpec> rows;
  std::vector<OracleOutput> expected;  // by row; empty for padding
};

constexpr std::int32_t kSlots = 5;

/// How often a sequence's rows are committed ones: never for the first, so that its ring wraps.
constexpr double kCommitted[kSlots] = {0.0, 0.1, 0.3, 0.6, 1.0};

std::vector<PlannedStep> plan(const Mamba2Model& model, std::uint64_t seed) {
  const Mamba2Case& c = model.test_case();
  const auto [window, draft] = c.limits;
  Rng rng(seed);
  std::vector<SequenceOracle> oracles(kSlots, SequenceOracle(model));
  std::uint64_t next_token = seed << 32;

  const std::int64_t work = c.layers * c.shape.state_elements() * (draft + 4);
  const std::int64_t wanted = 8 + 6 * (window + draft) / (draft + 1);
  const std::int64_t steps = std::min(wanted, std::max<std::int64_t>(10, 24'000'000 / work));
  std::vector<PlannedStep> plan(static_cast<std::size_t>(steps));
  for (PlannedStep& step : plan) {
    std::vector<std::int32_t> order(kSlots);
    for (std::int32_t slot = 0; slot < kSlots; ++slot) order[static_cast<std::size_t>(slot)] = slot;
    for (std::size_t i = kSlots; i-- > 1;) {
      std::swap(order[i], order[static_cast<std::size_t>(rng.below(static_cast<int>(i) + 1))]);
    }
    for (const std::int32_t slot : order) {
      const auto s = static_cast<std::size_t>(slot);
      if (rng.chance(0.15)) {
        step.rows.push_back(padding(rng.between(1, draft),
                                    rng.chance(0.5) ? RowKind::kTentative : RowKind::kCommitted));
        step.expected.emplace_back();
      }
      if (rng.chance(slot == 0 ? 0.05 : 0.25)) continue;
      if (slot > 1 && rng.chance(0.02)) {
        step.restarted.push_back(slot);
        oracles[s] = SequenceOracle(model);
      }
      if (rng.chance(0.1)) step.forced.push_back(slot);
      RowSpec row;
      row.slot = slot;
      row.gap = rng.chance(0.2) ? rng.between(1, 2) : 0;
      const bool is_committed = rng.chance(kCommitted[s]);
      row.kind = is_committed ? RowKind::kCommitted : RowKind::kTentative;
      // A prompt now and then, longer than every ring.
      const std::int64_t longest = rng.chance(0.1) ? window + draft + 9 : 3;
      row.tokens.resize(static_cast<std::size_t>(rng.between(1, is_committed ? longest : draft)));
      for (TokenId& token : row.tokens) token = ++next_token;
      if (!is_committed && rng.chance(0.5)) row.accepted = rng.between(0, row.count());
      step.expected.push_back(oracles[s].run(row.tokens, static_cast<std::size_t>(row.accepts())));
      step.rows.push_back(std::move(row));
    }
    if (step.rows.empty()) {
      step.rows.push_back(padding(1));
      step.expected.emplace_back();
    }
  }
  return plan;
}

class Mamba2Table : public ::testing::TestWithParam<Mamba2Case> {};

TEST_P(Mamba2Table, MatchesOracleOnEveryContext) {
  const Mamba2Case& c = GetParam();
  const Mamba2Model model(c, 7);
  const std::vector<PlannedStep> steps = plan(model, 11);
  const Contexts contexts({1, 2});
  // By instruction set, what one thread computed: more threads must compute the same bits.
  std::vector<std::pair<CpuIsa, std::vector<float>>> outputs;
  std::vector<std::pair<CpuIsa, std::vector<std::byte>>> memories;
  for (const CpuContext& context : contexts) {
    StatePool pool = model.make_pool(kSlots);
    for (std::int32_t slot = 0; slot < kSlots; ++slot) ASSERT_TRUE(is_ok(pool.reset(slot)));
    Mamba2Runner runner(model, pool, context);
    std::vector<float> all;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const PlannedStep& step = steps[i];
      for (const std::int32_t slot : step.restarted) ASSERT_TRUE(is_ok(pool.reset(slot)));
      for (const std::int32_t slot : step.forced) ASSERT_TRUE(is_ok(pool.force_flush(slot)));
      const StepOutput output = runner.step(step.rows);
      for (std::size_t row = 0; row < step.rows.size(); ++row) {
        for (const std::vector<float>& y : output[row]) all.insert(all.end(), y.begin(), y.end());
        if (step.rows[row].slot < 0) continue;
        expect_close(output[row], step.expected[row], c,
                     describe(context) + ", step " + std::to_string(i) + ", slot " +
                         std::to_string(step.rows[row].slot));
        if (HasFatalFailure()) return;
      }
      if (HasFailure()) return;
    }
    std::vector<std::byte> memory = pool_bytes(pool);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].first != context.isa) continue;
      ASSERT_TRUE(same_bits(all, outputs[i].second)) << describe(context);
      ASSERT_TRUE(same_bytes(memory, memories[i].second)) << describe(context);
    }
    outputs.emplace_back(context.isa, std::move(all));
    memories.emplace_back(context.isa, std::move(memory));
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Mamba2Table, ::testing::ValuesIn(mamba2_cases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace replayssm::testing
