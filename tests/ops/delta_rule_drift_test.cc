// Long random histories: nothing may drift, whatever happens to a slot in between.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <tuple>
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

// Both modes over random histories: the fast one within the case's bound of plain decoding.
TEST_P(DeltaDrift, FastFlushes) {
  for (const DeltaDecay decay : {DeltaDecay::kSlow, DeltaDecay::kUsual, DeltaDecay::kMixed}) {
    DeltaCase c = drift_case(GetParam(), decay);
    c.flush = FlushMode::kFast;
    const DeltaModel model(c);
    History history(model, {nullptr, supported_isas().back()}, 5);
    history.run(2'000);
    expect_everything_happened(history.counts(), 2'000);
  }
}

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

/// Relative errors against the oracle, over rounds of four tokens of which 1, 4, 2, 3 are accepted
/// in turn, looked at every 64 rounds.
struct Drift {
  double outputs[2] = {};  // the worst of each half
  double state[2] = {};    // of checkpoints just folded, likewise
};

Drift measure_drift(const DeltaCase& c, int rounds) {
  const DeltaModel model(c);
  StatePool pool = model.make_pool(2);
  const CpuContext context{nullptr, supported_isas().back()};
  DeltaRunner runner(model, pool, context);
  DeltaOracle oracle(model);
  EXPECT_TRUE(is_ok(pool.reset(0)));
  constexpr std::int64_t kAccepted[] = {1, 4, 2, 3};
  Drift drift;
  for (int round = 0; round < rounds; ++round) {
    const std::int64_t accepted = kAccepted[round % 4];
    const std::vector<TokenId> tokens = names(1, 4 * round, 4);
    const StepOutput output = runner.step({tentative(0, tokens, accepted)});
    const OracleOutput want = oracle.run(tokens, static_cast<std::size_t>(accepted));
    if (round % 64 != 0) continue;
    const int half = 2 * round / rounds;
    drift.outputs[half] = std::max(drift.outputs[half], relative_error(output[0][0], want[0]));
    EXPECT_TRUE(is_ok(pool.materialize(context, 0, oracle.position(), 1)));
    // V = 24 is one tile, so the stored order is the oracle's.
    drift.state[half] =
        std::max(drift.state[half], relative_error(checkpoint_values(pool, 0, 1), oracle.state(0)));
  }
  return drift;
}

struct DriftBound {
  DType checkpoint, activation;
  double exact, fast;
};

class DeltaModes : public ::testing::TestWithParam<std::tuple<DeltaFamily, FlushMode>> {};
INSTANTIATE_TEST_SUITE_P(Modes, DeltaModes,
                         ::testing::Combine(::testing::ValuesIn(kDeltaFamilies),
                                            ::testing::Values(FlushMode::kExact, FlushMode::kFast)),
                         [](const auto& test) {
                           return std::string(to_string(std::get<0>(test.param))) + "_" +
                                  to_string(std::get<1>(test.param));
                         });

// C02: |k| = 1, beta 0.9, log-decay -0.01 and harsher. Errors are bounded and the second half's are
// not above the first half's by more than the scatter of a maximum, in either mode. The values are
// recorded for docs/kernels/gdn-cpu.md.
TEST_P(DeltaModes, C02_NoGrowthOverEightThousandRounds) {
  const auto [family, mode] = GetParam();
  for (const DriftBound& types : {DriftBound{DType::kF32, DType::kF32, 1e-5, 1e-5},
                                  {DType::kF32, DType::kF16, 1e-3, 2e-3},
                                  {DType::kF32, DType::kBF16, 8e-3, 1.6e-2},
                                  {DType::kBF16, DType::kF32, 2e-2, 2e-2},
                                  {DType::kBF16, DType::kBF16, 2e-2, 2e-2}}) {
    for (const DeltaDecay decay : {DeltaDecay::kSlow, DeltaDecay::kFast}) {
      DeltaCase c = drift_case(family, decay);
      c.conv_width = 0;
      c.checkpoint = types.checkpoint;
      c.activation = types.activation;
      c.flush = mode;
      // What decays fast forgets fast: fewer rounds show as much.
      const Drift drift = measure_drift(c, decay == DeltaDecay::kSlow ? 8'000 : 2'000);
      const double bound = mode == FlushMode::kFast ? types.fast : types.exact;
      const std::string name = std::string(decay == DeltaDecay::kSlow ? "slow_" : "fast_") +
                               to_string(types.checkpoint) + "_" + to_string(types.activation);
      for (const auto& [what, error] :
           {std::pair{"outputs_", &drift.outputs}, {"state_", &drift.state}}) {
        for (const int half : {0, 1}) {
          EXPECT_LT((*error)[half], bound) << name << " " << what << half;
          EXPECT_GT((*error)[half], 0.0) << name << " " << what << half;
          std::ostringstream value;
          value << (*error)[half];
          RecordProperty(what + name + "_" + std::to_string(half), value.str());
        }
        EXPECT_LT((*error)[1], 1.5 * (*error)[0]) << name << " " << what;
      }
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
