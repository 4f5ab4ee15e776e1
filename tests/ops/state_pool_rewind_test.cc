// truncate, materialize and copy: every prefix of every window, then both sequences go on.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ops/mamba2_cases.h"
#include "support/mamba2_harness.h"
#include "support/plain_shadow.h"
#include "support/pool_access.h"
#include "support/rewinds.h"

namespace replayssm::testing {
namespace {

Mamba2Case rewind_case(DType checkpoint, DType activation, int conv_width = 4) {
  Mamba2Case c = small_case(std::string(to_string(checkpoint)) + "_" + to_string(activation) +
                                "_W" + std::to_string(conv_width),
                            6, 3);
  c.checkpoint = checkpoint;
  c.activation = activation;
  c.conv_width = conv_width;
  c.layers = 2;
  c.rewindable = true;
  return c;
}

class Rewind : public ::testing::TestWithParam<Mamba2Case> {};

std::vector<Mamba2Case> rewind_cases() {
  std::vector<Mamba2Case> cases;
  for (const auto& [checkpoint, activation] : kTypePairs) {
    cases.push_back(rewind_case(checkpoint, activation));
  }
  cases.push_back(rewind_case(DType::kF32, DType::kF32, 8));  // taps beyond the window
  cases.push_back(rewind_case(DType::kF32, DType::kF32, 0));
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, Rewind, ::testing::ValuesIn(rewind_cases()),
                         [](const auto& test) { return test.param.name; });

TEST_P(Rewind, C14_MaterializeEveryPrefix) {
  expect_materialize_reaches_every_prefix(Mamba2Model(GetParam()));
}
// C33, C35: drop the tail at every prefix, then go on; position and state change together.
TEST_P(Rewind, C33_TruncateToEveryPrefix) {
  expect_truncate_reaches_every_prefix(Mamba2Model(GetParam()));
}
// Truncation and materialization of a copy and of a truncated sequence, in chains.
TEST_P(Rewind, ChainsOfRewinds) { expect_chains_of_rewinds(Mamba2Model(GetParam())); }

TEST_P(Rewind, C01_CopyMovesRingAndCursor) {
  expect_copy_moves_ring_and_cursor(Mamba2Model(GetParam()));
}

// A copy takes the order to flush along.
TEST(RewindCursor, CopyKeepsForceFlush) {
  const Mamba2Model model(rewind_case(DType::kF32, DType::kF32));
  StatePool pool = model.make_pool(2);
  Mamba2Runner runner(model, pool, {});
  ASSERT_TRUE(is_ok(pool.reset(0)));
  runner.step({tentative(0, names(1, 0, 2), 2)});
  ASSERT_TRUE(is_ok(pool.force_flush(0)));
  ASSERT_TRUE(is_ok(pool.copy(0, 1)));
  EXPECT_EQ(pool.cursor(1).value(), (Cursor{0, 2, true}));
}

// C33: what the ring cannot reach is refused, and the refusal says from where to evaluate again.
TEST(RewindRefusals, C33_OutsideTheRing) {
  const Mamba2Model model(rewind_case(DType::kF32, DType::kF32));
  StatePool pool = model.make_pool(2);
  Mamba2Runner runner(model, pool, {});
  ASSERT_TRUE(is_ok(pool.reset(0)));
  // Ten tokens, four of them live: the last two can go, more than four cannot.
  runner.step({committed(0, names(1, 0, 6))});
  for (int i = 0; i < 4; ++i) runner.step({tentative(0, names(1, 6 + i, 1), 1)});
  const std::vector<std::byte> memory = pool_bytes(pool);
  for (const std::int64_t position : {5, 0, -1, 11, 1000}) {
    EXPECT_TRUE(refused(pool.truncate(0, position), StatusCode::kInvalidArgument,
                        {std::to_string(position), "6", "10"}));
    EXPECT_TRUE(refused(pool.materialize({}, 0, position, 1), StatusCode::kInvalidArgument,
                        {std::to_string(position), "6", "10"}));
  }
  EXPECT_TRUE(refused(pool.materialize({}, 0, 8, 0), StatusCode::kInvalidArgument, {"0"}));
  EXPECT_TRUE(same_bytes(pool_bytes(pool), memory));
  EXPECT_EQ(pool.cursor(0).value(), (Cursor{6, 10, false}));
  EXPECT_FALSE(pool.cursor(1).ok());
  EXPECT_TRUE(is_ok(pool.truncate(0, 8)));
  EXPECT_EQ(pool.cursor(0).value(), (Cursor{6, 8, false}));
}

// A pool that keeps no inputs for the window reaches its position only, and says why.
TEST(RewindRefusals, PlainPoolReachesItsPositionOnly) {
  Mamba2Case c = rewind_case(DType::kF32, DType::kF32);
  c.rewindable = false;
  const Mamba2Model model(c);
  for (const CpuContext& context : Contexts({1})) {
    StatePool pool = model.make_pool(3);
    Mamba2Runner runner(model, pool, context);
    ASSERT_TRUE(is_ok(pool.reset(0)));
    runner.step({committed(0, names(1, 0, 6))});
    for (int i = 0; i < 4; ++i) runner.step({tentative(0, names(1, 6 + i, 1), 1)});
    const std::vector<std::byte> memory = pool_bytes(pool);
    for (const std::int64_t position : {9, 6, 5, 11}) {
      EXPECT_TRUE(refused(pool.truncate(0, position), StatusCode::kUnsupported,
                          {std::to_string(position), "10", "rewindable"}));
      EXPECT_TRUE(refused(pool.materialize(context, 0, position, 1), StatusCode::kUnsupported,
                          {std::to_string(position), "10", "rewindable"}));
    }
    EXPECT_TRUE(same_bytes(pool_bytes(pool), memory));
    EXPECT_TRUE(is_ok(pool.truncate(0, 10)));
    ASSERT_TRUE(is_ok(pool.materialize(context, 0, 10, 1)));
    SequenceOracle oracle(model);
    oracle.run(names(1, 0, 10));
    const OracleOutput want = oracle.run(names(2, 0, 3));
    const StepOutput output =
        runner.step({tentative(0, names(2, 0, 3), 3), tentative(1, names(2, 0, 3), 3)});
    expect_close(output[0], want, c, "source");
    expect_close(output[1], want, c, "materialized");
  }
}

TEST(RewindRefusals, MaterializeNeedsA) {
  const Mamba2Model model(rewind_case(DType::kF32, DType::kF32));
  StatePool trained = model.make_pool(1);
  Mamba2Runner runner(model, trained, {});
  ASSERT_TRUE(is_ok(trained.reset(0)));
  runner.step({tentative(0, names(1, 0, 3), 3)});
  const std::vector<std::byte> image = trained.save(0).value();

  Result<StatePool> pool = StatePool::create(model.test_case().options(2));
  ASSERT_TRUE(is_ok(pool));
  ASSERT_TRUE(is_ok(pool->load({}, 0, image)));
  const std::vector<std::byte> memory = pool_bytes(*pool);
  EXPECT_TRUE(refused(pool->materialize({}, 0, 2, 1), StatusCode::kFailedPrecondition, {"0"}));
  EXPECT_TRUE(same_bytes(pool_bytes(*pool), memory));
  ASSERT_TRUE(is_ok(model.set_a(*pool)));
  EXPECT_TRUE(is_ok(pool->materialize({}, 0, 2, 1)));
}

// C11: snapshots every 8 tokens of a window of 5 (which flushes at other positions).
TEST(RewindSnapshots, C11_SnapshotsBetweenFlushes) {
  Mamba2Case c = rewind_case(DType::kF32, DType::kF32);
  c.limits = {5, 1};
  const Mamba2Model model(c);
  for (const CpuContext& context : Contexts({1})) {
    StatePool pool = model.make_pool(4);
    Mamba2Runner runner(model, pool, context);
    PlainShadow shadow(model, 1, context);
    ASSERT_TRUE(is_ok(pool.reset(0)));
    shadow.reset(0);
    for (std::int64_t i = 0; i < 24; ++i) {
      runner.step({tentative(0, names(1, i, 1), 1)});
      shadow.decode(0, names(1, i, 1));
      if ((i + 1) % 8 != 0) continue;
      const auto snapshot = static_cast<std::int32_t>((i + 1) / 8);
      ASSERT_NE(pool.cursor(0).value().live(), 0);
      ASSERT_TRUE(is_ok(pool.materialize(context, 0, i + 1, snapshot)));
      shadow.expect_checkpoint(pool, snapshot, 0, "snapshot " + std::to_string(snapshot));
    }
    for (std::int32_t snapshot = 1; snapshot <= 3; ++snapshot) {
      SequenceOracle oracle(model);
      oracle.run(names(1, 0, snapshot * 8));
      const std::vector<TokenId> tokens = names(2, 0, 7);
      for (const TokenId token : tokens) {
        const StepOutput output = runner.step({tentative(snapshot, {token}, 1)});
        expect_close(output[0], oracle.run({&token, 1}), c, "snapshot " + std::to_string(snapshot));
      }
    }
  }
}

// C42: a sequence preempted and resumed by evaluating its tokens again computes the same bits, in
// the slot it had and in another, twice, and before any output.
TEST(RewindSnapshots, C42_ResumedSequenceEqualsTheUninterruptedOne) {
  const Mamba2Model model(rewind_case(DType::kF32, DType::kF32));
  for (const CpuContext& context : Contexts({1})) {
    StatePool pool = model.make_pool(3);
    Mamba2Runner runner(model, pool, context);
    ASSERT_TRUE(is_ok(pool.reset(0)));
    runner.step({committed(0, names(1, 0, 20))});
    const StepOutput want = runner.step({committed(0, names(1, 20, 6))});
    for (const std::int64_t preempted_at : {0, 7, 20}) {
      for (const std::int32_t slot : {1, 2, 1}) {
        ASSERT_TRUE(is_ok(pool.reset(slot)));
        if (preempted_at > 0) runner.step({committed(slot, names(1, 0, preempted_at))});
        runner.step({tentative(slot, names(6, 0, 3), 2)});
        ASSERT_TRUE(is_ok(pool.reset(slot)));
        runner.step({committed(slot, names(1, 0, 20))});
        const StepOutput got = runner.step({committed(slot, names(1, 20, 6))});
        for (std::size_t layer = 0; layer < 2; ++layer) {
          EXPECT_TRUE(same_bits(got[0][layer], want[0][layer]));
        }
      }
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
