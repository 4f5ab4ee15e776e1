// Long random histories: nothing may drift, whatever happens to a slot in between.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "ops/delta_rule_cases.h"
#include "support/delta_rule_harness.h"
#include "support/history.h"

namespace replayssm::testing {
namespace {

/// |k| = 1 and beta 0.9; log-decay -0.01 or harsher.
DeltaCase drift_case(DeltaFamily family, DeltaDecay decay) {
  DeltaCase c = small_delta_case(family, "drift", 16, 4);
  c.conv_width = 4;
  c.rewindable = true;
  c.dt_bias = false;
  c.decay = decay;
  return c;
}

class DeltaDrift : public ::testing::TestWithParam<DeltaFamily> {};
INSTANTIATE_TEST_SUITE_P(Families, DeltaDrift, ::testing::ValuesIn(kDeltaFamilies),
                         [](const auto& test) { return to_string(test.param); });

// f32 checkpoints: bit-equal to plain decoding at every flush, outputs within 1e-5 of the oracle.
TEST_P(DeltaDrift, TwentyThousandSteps) {
  const DeltaModel model(drift_case(GetParam(), DeltaDecay::kSlow));
  History history(model, {nullptr, supported_isas().back()}, 1);
  history.run(20'000);
  expect_everything_happened(history.counts(), 20'000);
}

TEST_P(DeltaDrift, HarsherDecays) {
  for (const DeltaDecay decay :
       {DeltaDecay::kFast, DeltaDecay::kUsual, DeltaDecay::kMixed, DeltaDecay::kNone}) {
    const DeltaModel model(drift_case(GetParam(), decay));
    History history(model, {nullptr, supported_isas().back()}, 4);
    history.run(2'000);
    expect_everything_happened(history.counts(), 2'000);
  }
}

TEST_P(DeltaDrift, EveryInstructionSetAndTwoThreads) {
  const DeltaModel model(drift_case(GetParam(), DeltaDecay::kSlow));
  for (const CpuContext& context : Contexts()) {
    History history(model, context, 2);
    history.run(context.thread_count() == 1 ? 2'000 : 1'000);
    expect_everything_happened(history.counts(), 1'000);
  }
}

TEST_P(DeltaDrift, Bf16) {
  DeltaCase c = drift_case(GetParam(), DeltaDecay::kUsual);
  c.checkpoint = DType::kBF16;
  c.activation = c.gate_type = DType::kBF16;
  const DeltaModel model(c);
  History history(model, {nullptr, supported_isas().back()}, 3);
  history.run(4'000);
  expect_everything_happened(history.counts(), 4'000);
}

double relative_error(const std::vector<float>& got, const std::vector<double>& want) {
  double difference = 0.0;
  double reference = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double d = static_cast<double>(got[i]) - want[i];
    difference += d * d;
    reference += want[i] * want[i];
  }
  return std::sqrt(difference / reference);
}

// C02: 8,000 rounds of four tokens of which 1, 4, 2, 3 are accepted in turn. Every 64 rounds the
// outputs are held against the oracle; the second half's error is not above the first half's by
// more than the scatter of a maximum.
TEST_P(DeltaDrift, C02_NoGrowthOverEightThousandRounds) {
  struct Types {
    DType checkpoint, activation;
    double bound;
  };
  for (const Types& types : {Types{DType::kF32, DType::kF32, 1e-5},
                             {DType::kF32, DType::kBF16, 8e-3},
                             {DType::kBF16, DType::kF32, 2e-2}}) {
    DeltaCase c = drift_case(GetParam(), DeltaDecay::kSlow);
    c.conv_width = 0;
    c.checkpoint = types.checkpoint;
    c.activation = types.activation;
    const DeltaModel model(c);
    StatePool pool = model.make_pool(1);
    DeltaRunner runner(model, pool, {nullptr, supported_isas().back()});
    DeltaOracle oracle(model);
    ASSERT_TRUE(is_ok(pool.reset(0)));
    constexpr std::int64_t kAccepted[] = {1, 4, 2, 3};
    constexpr int kRounds = 8'000;
    double worst[2] = {};  // of each half
    for (int round = 0; round < kRounds; ++round) {
      const std::int64_t accepted = kAccepted[round % 4];
      const std::vector<TokenId> tokens = names(1, 4 * round, 4);
      const StepOutput output = runner.step({tentative(0, tokens, accepted)});
      const OracleOutput want = oracle.run(tokens, static_cast<std::size_t>(accepted));
      if (round % 64 != 0) continue;
      double& half = worst[2 * round / kRounds];
      half = std::max(half, relative_error(output[0][0], want[0]));
    }
    EXPECT_LT(worst[0], types.bound) << to_string(types.checkpoint);
    EXPECT_LT(worst[1], types.bound) << to_string(types.checkpoint);
    EXPECT_GT(worst[0], 0.0);
    EXPECT_LT(worst[1], 1.5 * worst[0])
        << to_string(types.checkpoint) << " " << to_string(types.activation);
  }
}

}  // namespace
}  // namespace replayssm::testing
