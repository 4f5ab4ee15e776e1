// Random steps over several sequences that mix committed, tentative and padding rows, with random
// accepted counts and forced flushes, and what the fp64 oracle says of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "support/pool_access.h"
#include "support/step_harness.h"

namespace replayssm::testing {

struct PlannedStep {
  std::vector<std::int32_t> forced;  // slots told to flush before the step
  std::vector<std::int32_t> restarted;
  std::vector<RowSpec> rows;
  std::vector<OracleOutput> expected;  // by row; empty for padding
};

inline constexpr std::int32_t kPlanSlots = 5;

/// How often a sequence's rows are committed ones: never for the first, so that its ring wraps.
inline constexpr double kCommitted[kPlanSlots] = {0.0, 0.1, 0.3, 0.6, 1.0};

template <typename Model>
std::vector<PlannedStep> random_plan(const Model& model, std::uint64_t seed) {
  const auto& c = model.test_case();
  const auto [window, draft] = c.limits;
  Rng rng(seed);
  std::vector<OracleOf<Model>> oracles(kPlanSlots, OracleOf<Model>(model));
  std::uint64_t next_token = seed << 32;

  const std::int64_t work = c.layers * c.shape.state_elements() * (draft + 4);
  const std::int64_t wanted = 8 + 6 * (window + draft) / (draft + 1);
  const std::int64_t steps = std::min(wanted, std::max<std::int64_t>(10, 24'000'000 / work));
  std::vector<PlannedStep> plan(static_cast<std::size_t>(steps));
  for (PlannedStep& step : plan) {
    std::vector<std::int32_t> order(kPlanSlots);
    for (std::int32_t slot = 0; slot < kPlanSlots; ++slot)
      order[static_cast<std::size_t>(slot)] = slot;
    for (std::size_t i = kPlanSlots; i-- > 1;) {
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
        oracles[s] = OracleOf<Model>(model);
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

/// The plan on every instruction set and thread count; thread counts must agree to the bit.
template <typename Model>
void expect_plan_matches_oracle(const Model& model, std::uint64_t seed) {
  const auto& c = model.test_case();
  const std::vector<PlannedStep> steps = random_plan(model, seed);
  const Contexts contexts({1, 2});
  // By instruction set, what one thread computed: more threads must compute the same bits.
  std::vector<std::pair<CpuIsa, std::vector<float>>> outputs;
  std::vector<std::pair<CpuIsa, std::vector<std::byte>>> memories;
  for (const CpuContext& context : contexts) {
    StatePool pool = model.make_pool(kPlanSlots);
    for (std::int32_t slot = 0; slot < kPlanSlots; ++slot) ASSERT_TRUE(is_ok(pool.reset(slot)));
    typename Model::Runner runner(model, pool, context);
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
        if (::testing::Test::HasFatalFailure()) return;
      }
      if (::testing::Test::HasFailure()) return;
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

}  // namespace replayssm::testing
