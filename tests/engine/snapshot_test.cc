// Verification by token snapshots, the conventional way: the same numbers as plain decoding bit for
// bit, and T + 1 states for what replay does with one.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>

#include "state/token_snapshots.h"
#include "support/model_test.h"
#include "support/rng.h"

namespace replayssm::testing {
namespace {

class SnapshotTest : public ModelTest {
 protected:
  static std::unique_ptr<Engine> engine(DecodeMode decode, int capacity, std::int64_t sequences,
                                        DType state = DType::kF32) {
    return loaded().engine({.decode = decode,
                            .window = 16,
                            .draft_capacity = capacity,
                            .state = state,
                            .sequences = sequences,
                            .context = 256,
                            .poison = true});
  }
  static Tokens tokens(std::int64_t count, std::uint64_t seed) {
    Rng rng(seed);
    Tokens out;
    for (std::int64_t i = 0; i < count; ++i) {
      out.push_back(static_cast<std::int32_t>(rng.below(vocab())));
    }
    return out;
  }
};

/// Rows of every length, of which every number of tokens is accepted, beside rows that decode and
/// prompts: logits are plain decoding's, bit for bit, in every checkpoint format (C38, C19, C25).
TEST_P(SnapshotTest, BitEqualToPlainDecoding) {
  for (const DType state : {DType::kF32, DType::kBF16}) {
    for (const int capacity : {1, 2, 5}) {
      SCOPED_TRACE("T " + std::to_string(capacity) + " " + to_string(state));
      const auto plain = engine(DecodeMode::kPlain, 1, 1, state);
      const auto e = engine(DecodeMode::kSnapshot, capacity, 3, state);
      const Tokens stream = tokens(150, 1);
      const std::int32_t p = open_sequence(*plain);
      const std::int32_t s = open_sequence(*e);
      const std::int32_t beside = open_sequence(*e);
      const Tokens prompt(stream.begin(), stream.begin() + 4);
      prompt_step(*plain, p, prompt);
      prompt_step(*e, s, prompt);
      prompt_step(*e, beside, tokens(3, 2));
      std::vector<Logits> want;  // after each token of the stream
      for (std::size_t i = 4; i < stream.size(); ++i) {
        want.push_back(decode_step(*plain, p, stream[i]));
      }
      Rng rng(3);
      std::size_t at = 4;
      for (int round = 0; at + 6 < stream.size(); ++round) {
        const std::int64_t count = rng.between(1, capacity);
        const std::int64_t accepted = rng.between(0, count);
        Tokens row(stream.begin() + static_cast<std::ptrdiff_t>(at),
                   stream.begin() + static_cast<std::ptrdiff_t>(at) + accepted);
        const Tokens junk = tokens(count - accepted, 100 + static_cast<std::uint64_t>(round));
        row.insert(row.end(), junk.begin(), junk.end());
        const std::int32_t fresh = round % 3 == 0 ? open_sequence(*e) : -1;
        const Tokens one = tokens(1, 200 + static_cast<std::uint64_t>(round));
        const Tokens two = tokens(2, 300 + static_cast<std::uint64_t>(round));
        std::vector<Work> work{
            {.sequence = beside,
             .phase = round % 2 == 0 ? Phase::kDecode : Phase::kVerify,
             .tokens = one,
             .logits = 0},
            {.sequence = s, .phase = Phase::kVerify, .tokens = row, .logits = count}};
        std::vector<std::int64_t> counts{1, accepted};
        if (fresh >= 0) {
          work.push_back({.sequence = fresh, .phase = Phase::kPrompt, .tokens = two, .logits = 0});
          counts.push_back(2);
        }
        const Logits logits = run_step(*e, work);
        ASSERT_EQ(std::ssize(logits), count * vocab());
        for (std::int64_t i = 0; i < accepted; ++i) {
          ASSERT_TRUE(same_bits(std::span(logits).subspan(static_cast<std::size_t>(i * vocab()),
                                                          static_cast<std::size_t>(vocab())),
                                want[at - 4 + static_cast<std::size_t>(i)]))
              << "round " << round << ", token " << i << " of " << count;
        }
        EXPECT_EQ(*e->position(s), static_cast<std::int64_t>(at)) << "before the commit";
        ASSERT_TRUE(is_ok(e->commit(counts)));
        at += static_cast<std::size_t>(accepted);
        ASSERT_EQ(*e->position(s), static_cast<std::int64_t>(at));
        if (fresh >= 0) {
          ASSERT_TRUE(is_ok(e->close(fresh)));
        }
        if (round % 4 == 3) {
          ASSERT_TRUE(same_bits(decode_step(*e, s, stream[at]), want[at - 4]));
          ++at;
        }
      }
    }
  }
}

/// From the very first token, where there is no state to copy yet.
TEST_P(SnapshotTest, FromTheFirstToken) {
  const auto plain = engine(DecodeMode::kPlain, 1, 1);
  const auto e = engine(DecodeMode::kSnapshot, 4, 1);
  const Tokens stream = tokens(4, 4);
  const std::int32_t p = open_sequence(*plain);
  Logits want;
  for (const std::int32_t token : stream) {
    const Logits next = decode_step(*plain, p, token);
    want.insert(want.end(), next.begin(), next.end());
  }
  for (int round = 0; round < 3; ++round) {  // in slots that were used before
    const std::int32_t s = open_sequence(*e);
    const Logits got =
        run_step(*e, {{.sequence = s, .phase = Phase::kVerify, .tokens = stream, .logits = 4}});
    ASSERT_TRUE(same_bits(got, want)) << "round " << round;
    EXPECT_TRUE(refused(e->close(s), StatusCode::kFailedPrecondition, {"0"}));
    ASSERT_TRUE(is_ok(e->commit(std::array<std::int64_t, 1>{4})));
    ASSERT_TRUE(is_ok(e->close(s)));
  }
}

/// T + 1 states per sequence in every size there is, against one for replay (C36, C90).
TEST_P(SnapshotTest, StateMemory) {
  for (const int capacity : {1, 4, 16}) {
    const auto snapshots = engine(DecodeMode::kSnapshot, capacity, 2);
    const auto bytes = snapshots->bytes();
    ASSERT_TRUE(is_ok(bytes));
    EXPECT_EQ(bytes->states, capacity + 1);
    EXPECT_EQ(bytes->total(0), bytes->state.total * static_cast<std::size_t>(capacity + 1));
    EXPECT_EQ(snapshots->pool().options().slots, 2 * (capacity + 1));
    const auto replay = engine(DecodeMode::kReplay, capacity, 2)->bytes();
    ASSERT_TRUE(is_ok(replay));
    EXPECT_EQ(replay->states, 1);
    EngineOptions o{.decode = DecodeMode::kSnapshot,
                    .draft_capacity = capacity,
                    .sequences = 2,
                    .context = 64,
                    .memory = 2 * bytes->total(64)};
    EXPECT_TRUE(is_ok(Engine::create(loaded().model, loaded().backend, loaded().context, o)));
    o.memory -= 1;
    EXPECT_TRUE(refused(Engine::create(loaded().model, loaded().backend, loaded().context, o),
                        StatusCode::kResourceExhausted, {"2 sequences", "1 do"}));
  }
}

TEST_P(SnapshotTest, Refusals) {
  const auto e = engine(DecodeMode::kSnapshot, 2, 2);
  const std::int32_t s = open_sequence(*e);
  open_sequence(*e);
  EXPECT_TRUE(refused(e->open(), StatusCode::kResourceExhausted, {"2"}));
  const Tokens three = tokens(3, 5);
  const Tokens two = tokens(2, 6);
  EXPECT_TRUE(
      refused(e->run(std::array{Work{.sequence = s, .phase = Phase::kVerify, .tokens = three}}),
              StatusCode::kInvalidArgument, {"3", "1..2"}));
  for (const std::int32_t bad : {-1, 2, 99}) {
    EXPECT_FALSE(
        e->run(std::array{Work{.sequence = bad, .phase = Phase::kVerify, .tokens = two}}).ok());
    EXPECT_FALSE(e->close(bad).ok());
    EXPECT_FALSE(e->position(bad).ok());
  }
  // A sequence has one row in a step, whatever the rows are for.
  for (const Phase phase : {Phase::kVerify, Phase::kDecode}) {
    EXPECT_FALSE(
        e->run(std::array{Work{.sequence = s, .phase = phase, .tokens = std::span(two).first(1)},
                          Work{.sequence = s, .phase = Phase::kVerify, .tokens = two}})
            .ok());
    EXPECT_EQ(*e->position(s), 0);
  }
  run_step(*e, {{.sequence = s, .phase = Phase::kVerify, .tokens = two}});
  for (const std::int64_t bad : {-1, 3}) {
    EXPECT_TRUE(refused(e->commit(std::span(&bad, 1)), StatusCode::kInvalidArgument,
                        {std::to_string(bad), "0..2"}));
  }
  EXPECT_TRUE(refused(e->commit({}), StatusCode::kInvalidArgument, {"0", "1"}));
  ASSERT_TRUE(is_ok(e->commit(std::array<std::int64_t, 1>{1}))) << "the step stayed open";
  ASSERT_TRUE(is_ok(e->close(s)));
  EXPECT_FALSE(e->close(s).ok()) << "closed twice";
}

/// What never ran, or failed, left no state behind: its slots are to be reset, whatever position
/// they were given; slots that left the steps before are not touched.
TEST(TokenSnapshotsTest, AbortedSlotsHoldNothing) {
  StatePoolOptions options;
  options.layers = {LayerSpec{Mamba2Shape{2, 16, 16, 1}, {}}};
  options.slots = 5;
  StatePool pool = StatePool::create(options).value();
  for (const std::int32_t slot : {0, 3}) ASSERT_TRUE(is_ok(pool.reset(slot)));
  const auto expect_invalid = [&](std::int32_t slot) {
    EXPECT_TRUE(refused(pool.cursor(slot).status(), StatusCode::kFailedPrecondition,
                        {"slot " + std::to_string(slot), "invalid"}));
  };

  const std::array one{TokenSnapshots::Row{.from = 0, .slots = {1, 2, 4}}};
  TokenSnapshots taken = TokenSnapshots::begin(pool, one).value();
  ASSERT_TRUE(is_ok(pool.reset(4)));
  ASSERT_TRUE(is_ok(taken.abort(pool)));
  for (const std::int32_t slot : {1, 2}) expect_invalid(slot);
  for (const std::int32_t slot : {0, 3, 4}) EXPECT_EQ(pool.cursor(slot).value().position, 0);

  // The second tokens' slots are one: their step cannot begin.
  const std::array twice{TokenSnapshots::Row{.from = 0, .slots = {1, 4}},
                         TokenSnapshots::Row{.from = 3, .token_begin = 2, .slots = {2, 4}}};
  EXPECT_TRUE(refused(TokenSnapshots::begin(pool, twice).status(), StatusCode::kInvalidArgument,
                      {"slot 4"}));
  for (const std::int32_t slot : {1, 2, 4}) expect_invalid(slot);
  for (const std::int32_t slot : {0, 3}) EXPECT_EQ(pool.cursor(slot).value().position, 0);
  ASSERT_TRUE(is_ok(TokenSnapshots::begin(pool, one).value().abort(pool)));
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, SnapshotTest,
                         ::testing::Values("nemotron-h-a", "nemotron-h-b", "nemotron-h-c",
                                           kRandomQwen35),
                         parameter_name);

}  // namespace
}  // namespace replayssm::testing
