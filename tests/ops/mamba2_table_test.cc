// Every case of the table against the fp64 oracle: random steps over several sequences that mix
// committed, tentative and padding rows, with random accepted counts and forced flushes.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ops/mamba2_cases.h"
#include "support/mamba2_harness.h"
#include "support/mamba2_plan.h"
#include "support/pool_access.h"

namespace replayssm::testing {
namespace {

class Mamba2Table : public ::testing::TestWithParam<Mamba2Case> {};

TEST_P(Mamba2Table, MatchesOracleOnEveryContext) {
  const Mamba2Case& c = GetParam();
  const Mamba2Model model(c, 7);
  const std::vector<PlannedStep> steps = plan_steps(model, 11);
  const Contexts contexts({1, 2});
  // By instruction set, what one thread computed: more threads must compute the same bits.
  std::vector<std::pair<CpuIsa, std::vector<float>>> outputs;
  std::vector<std::pair<CpuIsa, std::vector<std::byte>>> memories;
  for (const CpuContext& context : contexts) {
    StatePool pool = model.make_pool(kPlanSlots);
    for (std::int32_t slot = 0; slot < kPlanSlots; ++slot) ASSERT_TRUE(is_ok(pool.reset(slot)));
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
