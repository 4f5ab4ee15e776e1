// The exact mode: what a flush stores, bit for bit.
#include <gtest/gtest.h>

#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "ops/delta_rule_cases.h"
#include "support/delta_rule_harness.h"
#include "support/flush_stream.h"
#include "support/pool_access.h"
#include "support/step_properties.h"

namespace replayssm::testing {
namespace {

std::vector<DeltaCase> flush_cases() {
  std::vector<DeltaCase> cases;
  for (const DeltaFamily family : kDeltaFamilies) {
    for (const auto& [checkpoint, activation] : kTypePairs) {
      const std::string types =
          std::string(to_string(checkpoint)) + "_" + to_string(activation) + "_";
      for (const auto& [window, draft] :
           {std::pair{1, 1}, {2, 2}, {5, 3}, {8, 1}, {16, 4}, {7, 7}, {64, 16}}) {
        DeltaCase c = small_delta_case(
            family, types + "L" + std::to_string(window) + "_T" + std::to_string(draft), window,
            draft);
        c.checkpoint = checkpoint;
        c.activation = activation;
        c.gate_type = window == 16 ? activation : DType::kF32;
        c.conv_width = window == 16 || window == 2 ? 4 : 0;
        c.layers = window == 16 ? 2 : 1;
        cases.push_back(std::move(c));
      }
    }
    for (const DType checkpoint : {DType::kF32, DType::kBF16, DType::kF16}) {
      // Every width of the last block of columns, and keys that are no multiple of a vector.
      for (const auto& [k, v] : {std::pair{128, 128}, {24, 72}, {8, 48}, {80, 56}}) {
        DeltaCase c = small_delta_case(family,
                                       std::string(to_string(checkpoint)) + "_K" +
                                           std::to_string(k) + "_V" + std::to_string(v),
                                       4, 2);
        c.shape.key_dim = k;
        c.shape.value_dim = v;
        c.checkpoint = checkpoint;
        cases.push_back(std::move(c));
      }
    }
    // Decays that no fp32 product of a window's holds, and 64 of which leave what is deferred.
    for (const auto& [name, decay, window] : {std::tuple{"fast", DeltaDecay::kFast, 64},
                                              {"steep", DeltaDecay::kSteep, 6},
                                              {"tiny", DeltaDecay::kTiny, 6},
                                              {"zero", DeltaDecay::kZero, 6},
                                              {"mixed", DeltaDecay::kMixed, 16}}) {
      for (const DType checkpoint : {DType::kF32, DType::kBF16}) {
        DeltaCase c = small_delta_case(
            family, std::string(to_string(checkpoint)) + "_decay_" + name, window, 3);
        c.checkpoint = checkpoint;
        c.dt_bias = false;
        c.decay = decay;
        cases.push_back(std::move(c));
      }
    }
  }
  return cases;
}

class DeltaFlush : public ::testing::TestWithParam<DeltaCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, DeltaFlush, ::testing::ValuesIn(flush_cases()),
                         [](const auto& test) { return test.param.name; });

// C04 as well: the folded state is held against plain decoding's, not its outputs.
TEST_P(DeltaFlush, C04_CheckpointIsThePlainRecurrence) {
  expect_flushes_are_plain(DeltaModel(GetParam()));
}

TEST_P(DeltaFlush, CommittedRowFoldsLiveRecordsFirst) {
  expect_committed_row_folds_live_records_first(DeltaModel(GetParam()));
}

// What is deferred leaves [2^-32, 2^32] within windows: plain decoding's state and that of replay
// are equal to the bit (f32), both are the oracle's, and so are their outputs. With kFast a fifth
// of the state outlives the token at which that happens.
TEST(GatedDeferredDecay, FactorsReachTheState) {
  for (const DType checkpoint : {DType::kF32, DType::kBF16}) {
    for (const DeltaDecay decay : {DeltaDecay::kFast, DeltaDecay::kSteep, DeltaDecay::kZero}) {
      DeltaCase c = small_delta_case(DeltaFamily::kGated, "factors", 32, 3);
      c.checkpoint = checkpoint;
      c.dt_bias = false;
      c.decay = decay;
      const DeltaModel model(c);
      for (const CpuContext& context : Contexts({1})) {
        StatePool pool = model.make_pool(3);
        DeltaRunner runner(model, pool, context);
        DeltaOracle oracle(model);
        for (const std::int32_t slot : {0, 1}) ASSERT_TRUE(is_ok(pool.reset(slot)));
        int begun_anew = 0;
        int deferred = 0;
        for (int step = 0; step < 40; ++step) {
          const std::vector<TokenId> tokens = names(1, 3 * step, 3);
          const std::string where = describe(context) + ", step " + std::to_string(step);
          StepOutput plain;
          for (const TokenId token : tokens) {
            plain = runner.step({committed(0, {token})});
            (deferred_decays(pool, 0, 0).front() == 1.0f ? begun_anew : deferred) += 1;
          }
          const StepOutput replayed = runner.step({tentative(1, tokens, 3)});
          const OracleOutput want = oracle.run(tokens);
          expect_close(replayed[0], want, c, where);
          const std::int64_t outputs[] = {4, 24};
          const std::span last = std::span(want[0]).last(4 * 24);
          EXPECT_TRUE(close(plain[0][0], {last.begin(), last.end()}, c.bound(), outputs)) << where;

          ASSERT_TRUE(is_ok(pool.materialize(context, 1, 3 * step + 3, 2)));
          for (const std::int32_t slot : {0, 2}) {  // 24 columns are one tile: the oracle's order
            EXPECT_TRUE(close(checkpoint_values(pool, 0, slot), oracle.state(0), c.bound(),
                              c.state_shape()))
                << where << ", slot " << slot;
          }
          if (checkpoint != DType::kF32) continue;
          EXPECT_TRUE(same_bytes(checkpoint_bytes(pool, 0, 2), checkpoint_bytes(pool, 0, 0)))
              << where;
        }
        EXPECT_GE(begun_anew, 5) << "nothing was left";
        if (checkpoint == DType::kF32 && decay != DeltaDecay::kZero) {
          EXPECT_GE(deferred, 40);
        }
      }
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
