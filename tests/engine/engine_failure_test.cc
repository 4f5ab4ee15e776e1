// Calls an engine must refuse, failures in the middle of a step, and sizing.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "runtime/generate.h"
#include "support/model_test.h"

namespace replayssm::testing {
namespace {

const LoadedModel& loaded() {
  static const LoadedModel model(parity_folder("nemotron-h-a"));
  return model;
}

EngineOptions options(DecodeMode decode) {
  return {.decode = decode,
          .window = 4,
          .draft_capacity = 3,
          .sequences = 3,
          .context = 24,
          .poison = true};
}

Work work(std::int32_t sequence, Phase phase, const Tokens& tokens, std::int64_t logits = 1) {
  return {.sequence = sequence, .phase = phase, .tokens = tokens, .logits = logits};
}

/// Each refusal names what is wrong and changes nothing: the sequence then goes on as if the call
/// had never been made.
TEST(EngineFailureTest, RefusedStepsChangeNothing) {
  const std::int32_t vocab = static_cast<std::int32_t>(loaded().model->description().vocab_size);
  for (const DecodeMode decode : {DecodeMode::kPlain, DecodeMode::kReplay}) {
    const auto e = loaded().engine(options(decode));
    const auto quiet = loaded().engine(options(decode));
    const std::int32_t s = open_sequence(*e);
    const std::int32_t closed = open_sequence(*e);
    const std::int32_t other = open_sequence(*e);
    ASSERT_TRUE(is_ok(e->close(closed)));
    const std::int32_t q = open_sequence(*quiet);
    const Tokens prompt = {5, 6, 7, 8};
    prompt_step(*e, s, prompt);
    prompt_step(*quiet, q, prompt);

    const Tokens none;
    const Tokens one = {9};
    const Tokens two = {9, 10};
    const Tokens four = {9, 10, 11, 12};
    const Tokens negative = {9, -1};
    const Tokens beyond = {9, vocab};
    const Tokens huge = {std::numeric_limits<std::int32_t>::max()};
    const Tokens many(21, 9);
    struct Case {
      const char* what;
      std::vector<Work> work;
      StatusCode code;
      std::initializer_list<std::string> parts;
    };
    const std::string last = std::to_string(vocab - 1);
    const Case cases[] = {
        {"negative token",
         {work(s, Phase::kPrompt, negative)},
         StatusCode::kInvalidArgument,
         {"-1", last}},
        {"token beyond the vocabulary",
         {work(s, Phase::kVerify, beyond)},
         StatusCode::kInvalidArgument,
         {std::to_string(vocab), last}},
        {"largest token",
         {work(s, Phase::kDecode, huge)},
         StatusCode::kInvalidArgument,
         {"2147483647"}},
        {"a good row before a bad one",
         {work(s, Phase::kDecode, one), work(other, Phase::kPrompt, negative)},
         StatusCode::kInvalidArgument,
         {"row 1", "-1"}},
        {"no tokens", {work(s, Phase::kPrompt, none, 0)}, StatusCode::kInvalidArgument, {"0"}},
        {"no draft", {work(s, Phase::kVerify, none, 0)}, StatusCode::kInvalidArgument, {"0"}},
        {"two tokens decoded", {work(s, Phase::kDecode, two)}, StatusCode::kInvalidArgument, {"2"}},
        {"four drafts of three",
         {work(s, Phase::kVerify, four)},
         StatusCode::kInvalidArgument,
         {"4", "3"}},
        {"more logits than tokens",
         {work(s, Phase::kPrompt, two, 3)},
         StatusCode::kInvalidArgument,
         {"3", "2"}},
        {"negative logits",
         {work(s, Phase::kPrompt, two, -1)},
         StatusCode::kInvalidArgument,
         {"-1"}},
        {"context overflow",
         {work(s, Phase::kPrompt, many)},
         StatusCode::kResourceExhausted,
         {"21", "24", "4"}},
        {"negative sequence",
         {work(-1, Phase::kPrompt, one)},
         StatusCode::kInvalidArgument,
         {"-1"}},
        {"unknown sequence", {work(99, Phase::kPrompt, one)}, StatusCode::kInvalidArgument, {"99"}},
        {"closed sequence",
         {work(closed, Phase::kPrompt, one)},
         StatusCode::kFailedPrecondition,
         {std::to_string(closed)}},
        {"a sequence twice",
         {work(s, Phase::kDecode, one), work(s, Phase::kDecode, one)},
         StatusCode::kInvalidArgument,
         {"row 1", std::to_string(s)}},
    };
    for (const Case& c : cases) {
      EXPECT_TRUE(refused(e->run(c.work), c.code, c.parts)) << c.what;
      EXPECT_TRUE(refused(e->advance(c.work), c.code, c.parts)) << c.what;
      EXPECT_EQ(*e->position(s), 4) << c.what;
    }
    EXPECT_TRUE(refused(e->close(closed), StatusCode::kFailedPrecondition));
    EXPECT_TRUE(refused(e->close(99), StatusCode::kInvalidArgument, {"99"}));
    EXPECT_TRUE(refused(e->close(-1), StatusCode::kInvalidArgument, {"-1"}));
    EXPECT_FALSE(e->position(closed).ok());
    EXPECT_FALSE(e->position(1000).ok());
    // The context holds exactly what it says.
    Logits found;
    Logits want;
    for (std::int32_t t = 4; t < 24; ++t) {
      found = decode_step(*e, s, t);
      want = decode_step(*quiet, q, t);
      ASSERT_TRUE(same_bits(found, want)) << "token " << t;
    }
    EXPECT_TRUE(refused(e->run(std::array{work(s, Phase::kDecode, one)}),
                        StatusCode::kResourceExhausted, {"24"}));
  }
}

TEST(EngineFailureTest, RunAndCommitOnlyInTurn) {
  const auto e = loaded().engine(options(DecodeMode::kReplay));
  const std::int32_t s = open_sequence(*e);
  const std::int32_t p = open_sequence(*e);
  const Tokens drafts = {1, 2, 3};
  const std::array<std::int64_t, 2> all = {3, 3};
  EXPECT_TRUE(refused(e->commit(all), StatusCode::kFailedPrecondition));

  prompt_step(*e, s, drafts);
  const std::vector<Work> step = {work(s, Phase::kVerify, drafts), work(p, Phase::kPrompt, drafts)};
  run_step(*e, step);
  EXPECT_TRUE(refused(e->run(step), StatusCode::kFailedPrecondition, {"commit"}));
  EXPECT_TRUE(refused(e->advance(step), StatusCode::kFailedPrecondition, {"commit"}));
  // Wrong commits leave the step open.
  EXPECT_TRUE(refused(e->commit({}), StatusCode::kInvalidArgument));
  EXPECT_TRUE(refused(e->commit(std::array<std::int64_t, 1>{3}), StatusCode::kInvalidArgument));
  EXPECT_TRUE(refused(e->commit(std::array<std::int64_t, 2>{4, 3}), StatusCode::kInvalidArgument,
                      {"4", "3"}));
  EXPECT_TRUE(
      refused(e->commit(std::array<std::int64_t, 2>{-1, 3}), StatusCode::kInvalidArgument, {"-1"}));
  // A prompt is known text: none of it can be rejected.
  EXPECT_TRUE(
      refused(e->commit(std::array<std::int64_t, 2>{3, 2}), StatusCode::kInvalidArgument, {"2"}));
  EXPECT_EQ(*e->position(s), 3);
  EXPECT_EQ(*e->position(p), 0);
  ASSERT_TRUE(is_ok(e->commit(std::array<std::int64_t, 2>{1, 3})));
  EXPECT_EQ(*e->position(s), 4);
  EXPECT_EQ(*e->position(p), 3);
  EXPECT_TRUE(refused(e->commit(all), StatusCode::kFailedPrecondition));
}

/// Whatever a caller does between run and commit, the engine does not get stuck on the open step.
TEST(EngineFailureTest, ClosingInsideAStepDoesNotLockTheEngine) {
  const auto e = loaded().engine(options(DecodeMode::kReplay));
  const std::int32_t s = open_sequence(*e);
  const std::int32_t p = open_sequence(*e);
  const Tokens tokens = {1, 2, 3};
  prompt_step(*e, s, tokens);
  prompt_step(*e, p, tokens);
  run_step(*e, {work(s, Phase::kVerify, tokens), work(p, Phase::kVerify, tokens)});
  const Status closed = e->close(s);
  const Status committed = e->commit(std::array<std::int64_t, 2>{2, 2});
  EXPECT_TRUE(closed.ok() || committed.ok())
      << "close: " << closed.message() << "; commit: " << committed.message();
  if (!closed.ok()) {
    EXPECT_TRUE(is_ok(e->close(s)));
  }
  const std::int32_t again = open_sequence(*e);
  EXPECT_FALSE(prompt_step(*e, again, tokens).empty());
  // The other sequence either goes on or has lost its place; it does not stay inside the step.
  EXPECT_TRUE(is_ok(e->close(p)));
}

TEST(EngineFailureTest, EmptyStep) {
  const auto e = loaded().engine(options(DecodeMode::kReplay));
  const auto logits = e->advance({});
  if (logits.ok()) {
    EXPECT_TRUE(logits->empty());
  }
  const std::int32_t s = open_sequence(*e);
  EXPECT_FALSE(prompt_step(*e, s, Tokens{1, 2}).empty());
}

TEST(EngineFailureTest, StepWithoutLogits) {
  const auto e = loaded().engine(options(DecodeMode::kPlain));
  const std::int32_t s = open_sequence(*e);
  const Tokens tokens = {1, 2, 3};
  const auto logits = e->advance(std::array{work(s, Phase::kPrompt, tokens, 0)});
  ASSERT_TRUE(is_ok(logits));
  EXPECT_TRUE(logits->empty());
  EXPECT_EQ(*e->position(s), 3);
}

/// A backend whose matrix products fail from the n-th on.
class FailingBackend final : public CpuBackend {
 public:
  using CpuBackend::CpuBackend;

  Status matmul(std::span<const ForwardRow> rows, const TensorView& x, const TensorView& w,
                const TensorView& y) override {
    if (countdown == 0) return Status(StatusCode::kInternal, "the matrix library gave up");
    if (countdown > 0) --countdown;
    return CpuBackend::matmul(rows, x, w, y);
  }

  int countdown = -1;
};

class FailingStepTest : public ModelTest {};

INSTANTIATE_TEST_SUITE_P(Models, FailingStepTest, ::testing::Values("nemotron-h-a", kRandomQwen35),
                         parameter_name);

/// A step that fails at any of its matrix products is over; sequences it could not leave as they
/// were say so, the others continue as if it had not happened, and closed slots are as new.
TEST_P(FailingStepTest, FailureInTheMiddleOfAStep) {
  const LoadedModel& base = loaded();
  const auto backend = std::make_shared<FailingBackend>(base.context);
  auto model = load_model(model_folder(GetParam()), *backend);
  ASSERT_TRUE(is_ok(model));
  const std::shared_ptr<Model> shared = std::move(model).value();
  const Tokens prompt = {5, 6, 7, 8, 9};
  const Tokens drafts = {10, 11, 12};
  const Tokens token = {13};

  // Three sequences that differ in what the failing step asks of them.
  const auto prepare = [&](Engine& e) {
    std::array<std::int32_t, 3> s{};
    for (std::int32_t& sequence : s) sequence = open_sequence(e);
    prompt_step(e, s[0], prompt);
    prompt_step(e, s[1], prompt);
    decode_step(e, s[1], 20);
    prompt_step(e, s[2], prompt);
    return s;
  };
  const auto step = [&](const std::array<std::int32_t, 3>& s) {
    return std::vector<Work>{work(s[0], Phase::kVerify, drafts, 3),
                             work(s[1], Phase::kDecode, token),
                             work(s[2], Phase::kPrompt, drafts, 3)};
  };
  for (const DecodeMode decode : {DecodeMode::kPlain, DecodeMode::kReplay}) {
    const auto healthy = base.engine(options(decode));
    std::array<Logits, 3> want;
    {
      const auto s = prepare(*healthy);
      const std::vector<Work> rows = step(s);
      for (std::size_t i = 0; i < 3; ++i) want[i] = advance(*healthy, {rows[i]});
    }
    int failures = 0;
    int survivors = 0;
    for (int at = 0;; ++at) {
      auto created = Engine::create(shared, backend, base.context, options(decode));
      ASSERT_TRUE(is_ok(created));
      Engine& e = **created;
      backend->countdown = -1;
      const auto s = prepare(e);
      backend->countdown = at;
      const auto result = e.run(step(s));
      backend->countdown = -1;
      if (result.ok()) break;  // more products than the step has
      ++failures;
      ASSERT_TRUE(refused(result, StatusCode::kInternal, {"the matrix library gave up"}));
      ASSERT_FALSE(e.commit(std::array<std::int64_t, 3>{1, 1, 3}).ok()) << "nothing to commit";
      const std::vector<Work> rows = step(s);
      for (std::size_t i = 0; i < 3; ++i) {
        if (e.position(s[i]).ok()) {
          ++survivors;
          ASSERT_TRUE(same_bits(advance(e, {rows[i]}), want[i]))
              << "product " << at << " row " << i;
        } else {
          ASSERT_FALSE(e.run(std::array{rows[i]}).ok());
        }
        ASSERT_TRUE(is_ok(e.close(s[i])));
      }
      const auto again = prepare(e);
      ASSERT_TRUE(same_bits(advance(e, {step(again)[0]}), want[0])) << "slots used again";
    }
    EXPECT_GT(failures, 10);
    EXPECT_GT(survivors, 0);
  }
}

// ---- generate ----

TEST(GenerateTest, RefusalsAndEndsFreeTheSequence) {
  const auto e = loaded().engine(options(DecodeMode::kReplay));
  const Tokens prompt = {3, 4, 5};
  const TokenSink go = [](std::int32_t) -> Result<bool> { return true; };
  GenerateOptions o;
  o.max_tokens = 5;
  EXPECT_TRUE(refused(generate(*e, {}, o, go), StatusCode::kInvalidArgument, {"0 tokens"}));
  o.max_tokens = 0;
  EXPECT_TRUE(refused(generate(*e, prompt, o, go), StatusCode::kInvalidArgument, {"0"}));
  o.max_tokens = 23;  // the last token need not be fed: 3 + 22 = 25 > 24
  EXPECT_TRUE(refused(generate(*e, prompt, o, go), StatusCode::kResourceExhausted,
                      {"3 tokens", "22", "24"}));
  o.max_tokens = std::numeric_limits<std::int64_t>::max();
  EXPECT_TRUE(refused(generate(*e, prompt, o, go), StatusCode::kResourceExhausted, {"24"}));
  o.max_tokens = 22;
  const auto full = generate(*e, prompt, o, go);
  ASSERT_TRUE(is_ok(full));
  EXPECT_EQ(full->tokens.size(), 22u);
  EXPECT_EQ(full->decode.steps, 21);
  EXPECT_EQ(full->prompt_tokens, 3);

  const auto failing = generate(*e, prompt, o, [](std::int32_t) -> Result<bool> {
    return data_loss("the reader went away");
  });
  EXPECT_TRUE(refused(failing, StatusCode::kDataLoss, {"the reader went away"}));
  int calls = 0;
  const auto stopped =
      generate(*e, prompt, o, [&](std::int32_t) -> Result<bool> { return ++calls < 4; });
  ASSERT_TRUE(is_ok(stopped));
  EXPECT_EQ(stopped->tokens.size(), 4u);
  EXPECT_TRUE(std::equal(stopped->tokens.begin(), stopped->tokens.end(), full->tokens.begin()));
  // A stop token ends the text and is part of it.
  o.stop_tokens = {full->tokens[6]};
  const auto first = std::find(full->tokens.begin(), full->tokens.end(), full->tokens[6]);
  const auto ended = generate(*e, prompt, o, go);
  ASSERT_TRUE(is_ok(ended));
  EXPECT_EQ(ended->tokens, Tokens(full->tokens.begin(), first + 1));
  // Nothing above may have kept a sequence.
  EXPECT_EQ(e->pool().free_slots(), 3);
}

// ---- Sizing ----

/// C90: whether the sequences fit is known before anything is allocated, to the byte.
TEST(EngineMemoryTest, ExactNumberThatFits) {
  const LoadedModel& base = loaded();
  EngineOptions o{.decode = DecodeMode::kReplay, .window = 8, .context = 100};
  const auto bytes = sequence_bytes(base.model->description(), o);
  ASSERT_TRUE(is_ok(bytes));
  // Checkpoint a: 3 Mamba-2 layers of 4 x 8 x 16 in f32 with a deferred decay for 8 rows, 96
  // convolution channels of width 4; 2 attention layers of 2 heads of 8 in f32.
  EXPECT_EQ(bytes->state.checkpoint, 3u * 4 * (8 * 16 + 1) * 4);
  EXPECT_EQ(bytes->kv_per_token, 2u * 2 * 2 * 8 * 4);
  EXPECT_EQ(bytes->state.record_ring, 3u * (8 + 1) * (4 * 8 + 2 * 16 + 4) * 4);
  EXPECT_EQ(bytes->state.conv_ring, 3u * (3 + 1) * 96 * 4);
  EXPECT_GE(bytes->state.total,
            bytes->state.checkpoint + bytes->state.record_ring + bytes->state.conv_ring);
  const std::size_t each = bytes->total(100);
  EXPECT_EQ(each, bytes->state.total + 100 * bytes->kv_per_token);

  const auto create = [&](std::int64_t sequences, std::size_t memory) {
    o.sequences = sequences;
    o.memory = memory;
    return Engine::create(base.model, base.backend, base.context, o);
  };
  ASSERT_TRUE(is_ok(create(7, 7 * each)));
  EXPECT_TRUE(refused(create(8, 7 * each), StatusCode::kResourceExhausted,
                      {"8 sequences", std::to_string(each), std::to_string(7 * each), "7 do"}));
  EXPECT_TRUE(refused(create(7, 7 * each - 1), StatusCode::kResourceExhausted, {"6 do"}));
  EXPECT_TRUE(refused(create(1024, 600 * each), StatusCode::kResourceExhausted, {"600 do"}));
  EXPECT_TRUE(refused(create(1, 1), StatusCode::kResourceExhausted, {"0 do"}));
  // As much as no machine has: only arithmetic can have said no.
  o.context = std::int64_t{1} << 40;
  EXPECT_TRUE(
      refused(create(1 << 20, std::size_t{1} << 30), StatusCode::kResourceExhausted, {"0 do"}));
  EXPECT_TRUE(refused(create(1 << 20, 0), StatusCode::kResourceExhausted));
  o.context = 0;
  EXPECT_TRUE(refused(create(1, 0), StatusCode::kInvalidArgument, {"context", "0"}));
  o.context = 100;
  EXPECT_TRUE(refused(create(0, 0), StatusCode::kInvalidArgument, {"sequences", "0"}));
  EXPECT_TRUE(refused(create(-1, 0), StatusCode::kInvalidArgument, {"sequences", "-1"}));
  EXPECT_TRUE(refused(create(std::numeric_limits<std::int64_t>::max(), 0),
                      StatusCode::kInvalidArgument, {"sequences"}));
}

/// A plain engine keeps the smallest ring: what it counts is what it allocates.
TEST(EngineMemoryTest, PlainDecodingNeedsNoWindow) {
  const LoadedModel& base = loaded();
  EngineOptions o{.decode = DecodeMode::kPlain, .window = 64, .sequences = 2, .context = 100};
  EngineOptions smallest = o;
  smallest.window = 1;
  const auto bytes = sequence_bytes(base.model->description(), smallest);
  ASSERT_TRUE(is_ok(bytes));
  o.memory = 2 * bytes->total(100);
  const auto e = Engine::create(base.model, base.backend, base.context, o);
  ASSERT_TRUE(is_ok(e));
  const auto slot = StatePool::bytes_per_slot((*e)->pool().options());
  ASSERT_TRUE(is_ok(slot));
  EXPECT_EQ(slot->total, bytes->state.total);
}

}  // namespace
}  // namespace replayssm::testing
