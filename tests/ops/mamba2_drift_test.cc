// Long random histories: nothing may drift, whatever happens to a slot in between.
#include <gtest/gtest.h>

#include "ops/mamba2_cases.h"
#include "support/history.h"
#include "support/mamba2_harness.h"

namespace replayssm::testing {
namespace {

Mamba2Case drift_case() {
  Mamba2Case c = small_case("drift", 16, 4);
  c.conv_width = 4;
  c.rewindable = true;
  return c;
}

// f32 checkpoints: bit-equal to plain decoding at every flush, outputs within 1e-5 of the oracle.
TEST(Mamba2Drift, TwentyThousandSteps) {
  const Mamba2Model model(drift_case());
  History history(model, {nullptr, supported_isas().back()}, 1);
  history.run(20'000);
  expect_everything_happened(history.counts(), 20'000);
}

TEST(Mamba2Drift, EveryInstructionSetAndTwoThreads) {
  const Mamba2Model model(drift_case());
  for (const CpuContext& context : Contexts()) {
    History history(model, context, 2);
    history.run(context.thread_count() == 1 ? 2'000 : 1'000);
    expect_everything_happened(history.counts(), 1'000);
  }
}

TEST(Mamba2Drift, Bf16) {
  Mamba2Case c = drift_case();
  c.checkpoint = DType::kBF16;
  c.activation = c.dt_type = DType::kBF16;
  const Mamba2Model model(c);
  History history(model, {nullptr, supported_isas().back()}, 3);
  history.run(4'000);
  expect_everything_happened(history.counts(), 4'000);
}

}  // namespace
}  // namespace replayssm::testing
