// The exact mode: what a flush stores, bit for bit, and when it happens.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ops/mamba2_cases.h"
#include "support/flush_stream.h"
#include "support/mamba2_harness.h"
#include "support/plain_shadow.h"
#include "support/pool_access.h"
#include "support/step_properties.h"

namespace replayssm::testing {
namespace {

std::vector<Mamba2Case> flush_cases() {
  std::vector<Mamba2Case> cases;
  for (const auto& [checkpoint, activation] : kTypePairs) {
    for (const auto& [window, draft] :
         {std::pair{1, 1}, {2, 2}, {5, 3}, {8, 1}, {16, 4}, {7, 7}, {64, 16}}) {
      Mamba2Case c = small_case(std::string(to_string(checkpoint)) + "_" + to_string(activation) +
                                    "_L" + std::to_string(window) + "_T" + std::to_string(draft),
                                window, draft);
      c.shape.head_dim = window == 5 ? 24 : 8;
      c.shape.state_size = window == 7 ? 48 : 16;
      c.checkpoint = checkpoint;
      c.activation = activation;
      c.dt_type = window == 16 ? activation : DType::kF32;
      c.conv_width = window == 16 || window == 2 ? 4 : 0;
      c.layers = window == 16 ? 2 : 1;
      cases.push_back(std::move(c));
    }
  }
  // Rows of registers' tails: a state whose rows are no multiple of two 512-bit vectors.
  for (const auto& [p, n] : {std::pair{80, 240}, {64, 128}, {128, 64}, {24, 80}}) {
    for (const DType checkpoint : {DType::kF32, DType::kBF16}) {
      Mamba2Case c = small_case(
          std::string(to_string(checkpoint)) + "_P" + std::to_string(p) + "_N" + std::to_string(n),
          4, 2);
      c.shape = {2, p, n, 1};
      c.checkpoint = checkpoint;
      cases.push_back(std::move(c));
    }
  }
  // Decays that no fp32 product of a window's holds.
  for (const auto& [name, decay] :
       {std::pair{"tiny", Decay::kTiny}, {"zero", Decay::kZero}, {"growing", Decay::kGrowing}}) {
    for (const DType checkpoint : {DType::kF32, DType::kBF16}) {
      Mamba2Case c = small_case(std::string(to_string(checkpoint)) + "_" + name, 6, 3);
      c.checkpoint = checkpoint;
      c.decay = decay;
      c.softplus = c.dt_bias = false;
      cases.push_back(std::move(c));
    }
  }
  return cases;
}

class Mamba2Flush : public ::testing::TestWithParam<Mamba2Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, Mamba2Flush, ::testing::ValuesIn(flush_cases()),
                         [](const auto& test) { return test.param.name; });

// After every flush of a random stream, forced ones included, the checkpoint is decode(checkpoint),
// the plain recurrence over the records, one encode. With f32 that is plain decoding's state.
TEST_P(Mamba2Flush, CheckpointIsThePlainRecurrence) {
  expect_flushes_are_plain(Mamba2Model(GetParam()));
}

TEST_P(Mamba2Flush, CommittedRowFoldsLiveRecordsFirst) {
  expect_committed_row_folds_live_records_first(Mamba2Model(GetParam()));
}

TEST(Mamba2ForceFlush, HappensOnceAndOnlyWithLiveRecords) {
  const Mamba2Model model(small_case("force", 8, 2));
  StatePool pool = model.make_pool(1);
  Mamba2Runner runner(model, pool, {});
  ASSERT_TRUE(is_ok(pool.reset(0)));
  // Nothing is live: the step does not flush and forgets the order.
  ASSERT_TRUE(is_ok(pool.force_flush(0)));
  EXPECT_TRUE(pool.cursor(0).value().force_flush);
  runner.step({tentative(0, names(1, 0, 2), 2)});
  EXPECT_EQ(pool.cursor(0).value(), (Cursor{0, 2, false}));
  ASSERT_TRUE(is_ok(pool.force_flush(0)));
  ASSERT_TRUE(is_ok(pool.force_flush(0)));  // twice is once
  runner.step({tentative(0, names(1, 2, 2), 0)});
  EXPECT_EQ(pool.cursor(0).value(), (Cursor{2, 2, false}));
  runner.step({tentative(0, names(1, 2, 2), 1)});
  EXPECT_EQ(pool.cursor(0).value(), (Cursor{2, 3, false}));
  // A committed row clears it too.
  ASSERT_TRUE(is_ok(pool.force_flush(0)));
  runner.step({committed(0, names(1, 3, 2))});
  EXPECT_EQ(pool.cursor(0).value(), (Cursor{5, 5, false}));
}

// Flush twice in a row: a full window, nothing accepted, a full window again.
TEST(Mamba2ForceFlush, WindowEqualToDraftFlushesEveryStep) {
  const Mamba2Case c = small_case("every", 4, 4);
  const Mamba2Model model(c);
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(1);
    Mamba2Runner runner(model, pool, context);
    PlainShadow shadow(model, 1, context);
    SequenceOracle oracle(model);
    ASSERT_TRUE(is_ok(pool.reset(0)));
    shadow.reset(0);
    std::vector<TokenId> live;
    for (int step = 0; step < 12; ++step) {
      const std::vector<TokenId> tokens = names(1, step * 4, 4);
      const std::int64_t accepted = step % 5;
      const bool flushes = !live.empty();
      const StepOutput output = runner.step({tentative(0, tokens, accepted)});
      expect_close(output[0], oracle.run(tokens, static_cast<std::size_t>(accepted)), c,
                   "step " + std::to_string(step));
      if (flushes) {
        shadow.fold(0, live);
        shadow.expect_checkpoint(pool, 0, 0, "step " + std::to_string(step));
      }
      live.assign(tokens.begin(), tokens.begin() + accepted);
      EXPECT_EQ(pool.cursor(0).value().live(), accepted);
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
