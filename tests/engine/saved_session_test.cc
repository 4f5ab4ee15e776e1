// Saved sessions: going on is as if nothing had happened, and what cannot go on says why.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "runtime/draft/ngram_draft.h"
#include "runtime/saved_session.h"
#include "support/model_folder.h"
#include "support/model_test.h"
#include "support/rng.h"

namespace replayssm::testing {
namespace {

const TokenSink kGo = [](std::int32_t) -> Result<bool> { return true; };

EngineOptions mode(DecodeMode decode, int window, int capacity, DType state = DType::kF32) {
  return {.decode = decode,
          .window = window,
          .draft_capacity = capacity,
          .state = state,
          .context = 256,
          .poison = true};
}

GenerateOptions tokens(std::int64_t count) {
  GenerateOptions o;
  o.max_tokens = count;
  return o;
}

const Tokens kPrompt = {3, 1, 4, 1, 5, 9, 2, 6};

/// A session of `count` tokens after the prompt.
std::vector<std::byte> saved(const LoadedModel& model, const EngineOptions& options,
                             const GenerateOptions& generate, Tokens* drawn = nullptr) {
  const auto e = model.engine(options);
  Conversation conversation{.sequence = open_sequence(*e), .seed = generate.sampling.seed};
  const auto generation = continue_conversation(*e, conversation, kPrompt, generate, kGo);
  EXPECT_TRUE(is_ok(generation));
  if (drawn != nullptr && generation.ok()) *drawn = generation->tokens;
  auto bytes = save_session(*e, conversation);
  EXPECT_TRUE(is_ok(bytes));
  return bytes.ok() ? std::move(bytes).value() : std::vector<std::byte>{};
}

Result<Conversation> restored(Engine& engine, std::span<const std::byte> bytes) {
  RSSM_ASSIGN_OR_RETURN(const SavedSession session, SavedSession::parse(bytes, "F"));
  return session.restore(engine);
}

class SavedSessionTest : public ModelTest {};

INSTANTIATE_TEST_SUITE_P(Models, SavedSessionTest, ::testing::Values("nemotron-h-a", kRandomQwen35),
                         parameter_name);

/// After every number of tokens, inside a window, at its end, by every way of decoding, in every
/// format: the rest comes out as if the process had never stopped, and nothing is read again (C61).
TEST_P(SavedSessionTest, GoesOnWithTheSameTokens) {
  for (const DType state : {DType::kF32, DType::kBF16}) {
    for (const EngineOptions& options :
         {mode(DecodeMode::kPlain, 1, 1, state), mode(DecodeMode::kReplay, 4, 1, state),
          mode(DecodeMode::kReplay, 16, 5, state), mode(DecodeMode::kSnapshot, 1, 3, state)}) {
      const auto uninterrupted = generate(*loaded().engine(options), kPrompt, tokens(40), kGo);
      ASSERT_TRUE(is_ok(uninterrupted));
      for (const std::int64_t count : {1, 2, 3, 4, 5, 9, 16, 17, 18, 39}) {
        const std::vector<std::byte> bytes = saved(loaded(), options, tokens(count));
        const auto e = loaded().engine(options);
        auto conversation = restored(*e, bytes);
        ASSERT_TRUE(is_ok(conversation));
        EXPECT_EQ(std::ssize(conversation->tokens), 8 + count);
        EXPECT_EQ(*e->position(conversation->sequence), 7 + count) << "the state is there";
        const auto rest = continue_conversation(*e, *conversation, {}, tokens(40 - count), kGo);
        ASSERT_TRUE(is_ok(rest));
        EXPECT_EQ(rest->prompt_tokens, 0);
        EXPECT_EQ(rest->tokens,
                  Tokens(uninterrupted->tokens.begin() + count, uninterrupted->tokens.end()))
            << to_string(options.decode) << " " << options.window << ", after " << count;
      }
    }
  }
}

/// By another way of decoding, another window, another draft capacity, with drafts.
TEST_P(SavedSessionTest, GoesOnAnotherWay) {
  const auto expected =
      generate(*loaded().engine(mode(DecodeMode::kPlain, 1, 1)), kPrompt, tokens(60), kGo);
  ASSERT_TRUE(is_ok(expected));
  const EngineOptions modes[] = {
      mode(DecodeMode::kPlain, 1, 1),    mode(DecodeMode::kReplay, 2, 2),
      mode(DecodeMode::kReplay, 16, 1),  mode(DecodeMode::kReplay, 64, 16),
      mode(DecodeMode::kSnapshot, 1, 4),
  };
  for (const EngineOptions& from : modes) {
    const std::vector<std::byte> bytes = saved(loaded(), from, tokens(22));
    for (const EngineOptions& to : modes) {
      std::vector<std::unique_ptr<DraftSource>> sources;
      if (to.draft_capacity == 1) {
        sources.push_back(nullptr);
      } else {
        auto ngram = NgramDraft::create({.shortest = 1, .longest = 3});
        ASSERT_TRUE(is_ok(ngram));
        sources.push_back(std::move(ngram).value());
        // A head that has seen nothing of the text so far drafts from what comes now.
        if (auto mtp = mtp_source(to.draft_capacity - 1)) sources.push_back(std::move(mtp));
      }
      for (const auto& source : sources) {
        EngineOptions options = to;
        options.hidden_states = source != nullptr && source->reads_hidden_states();
        const auto e = loaded().engine(options);
        auto conversation = restored(*e, bytes);
        ASSERT_TRUE(is_ok(conversation));
        GenerateOptions o = tokens(38);
        o.drafts = source.get();
        o.draft_tokens = to.draft_capacity - 1;
        const auto rest = continue_conversation(*e, *conversation, {}, o, kGo);
        ASSERT_TRUE(is_ok(rest));
        EXPECT_EQ(rest->tokens, Tokens(expected->tokens.begin() + 22, expected->tokens.end()))
            << to_string(from.decode) << " " << from.window << " to " << to_string(to.decode) << " "
            << to.window;
        EXPECT_EQ(rest->decode.drafted > 0, source != nullptr);
      }
    }
  }
}

/// Random numbers go on too, and a session can be saved again and again.
TEST_P(SavedSessionTest, SampledTextInManyPieces) {
  GenerateOptions o = tokens(48);
  o.sampling = {.temperature = 0.9f, .top_k = 20, .seed = 11};
  const EngineOptions options = mode(DecodeMode::kReplay, 8, 1);
  const auto whole = generate(*loaded().engine(options), kPrompt, o, kGo);
  ASSERT_TRUE(is_ok(whole));
  o.max_tokens = 6;
  Tokens text;
  std::vector<std::byte> bytes = saved(loaded(), options, o, &text);
  while (text.size() < 48) {
    const auto e = loaded().engine(options);
    auto conversation = restored(*e, bytes);
    ASSERT_TRUE(is_ok(conversation));
    const auto piece = continue_conversation(*e, *conversation, {}, o, kGo);
    ASSERT_TRUE(is_ok(piece));
    text.insert(text.end(), piece->tokens.begin(), piece->tokens.end());
    auto next = save_session(*e, *conversation);
    ASSERT_TRUE(is_ok(next));
    bytes = std::move(next).value();
  }
  EXPECT_EQ(text, whole->tokens);
}

/// New text after a session is text after all of it, its last token included.
TEST_P(SavedSessionTest, TakesMorePrompt) {
  Tokens drawn;
  const EngineOptions options = mode(DecodeMode::kReplay, 16, 1);
  const std::vector<std::byte> bytes = saved(loaded(), options, tokens(10), &drawn);
  const Tokens more = {20, 30, 40};
  Tokens all = kPrompt;
  all.insert(all.end(), drawn.begin(), drawn.end());
  all.insert(all.end(), more.begin(), more.end());
  const auto expected = generate(*loaded().engine(options), all, tokens(20), kGo);
  ASSERT_TRUE(is_ok(expected));
  const auto e = loaded().engine(options);
  auto conversation = restored(*e, bytes);
  ASSERT_TRUE(is_ok(conversation));
  const auto rest = continue_conversation(*e, *conversation, more, tokens(20), kGo);
  ASSERT_TRUE(is_ok(rest));
  EXPECT_EQ(rest->prompt_tokens, 3);
  EXPECT_EQ(rest->tokens, expected->tokens);
}

/// Every byte counts: whatever is changed or cut off is found, and the engine stays as it was.
TEST_P(SavedSessionTest, DamagedBytes) {
  const EngineOptions options = mode(DecodeMode::kReplay, 16, 1);
  const std::vector<std::byte> bytes = saved(loaded(), options, tokens(5));
  const auto e = loaded().engine(options);
  Rng rng(1);
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < 200; ++i) places.push_back(i % bytes.size());
  for (int i = 0; i < 200; ++i) {
    places.push_back(static_cast<std::size_t>(rng.below(std::ssize(bytes))));
  }
  for (const std::size_t at : places) {
    std::vector<std::byte> damaged = bytes;
    damaged[at] ^= static_cast<std::byte>(1 + rng.below(255));
    const auto conversation = restored(*e, damaged);
    ASSERT_FALSE(conversation.ok()) << "byte " << at;
    EXPECT_NE(conversation.status().message().find("F: "), std::string::npos);
  }
  for (std::size_t size = 0; size < bytes.size(); size += size < 40 ? 1 : bytes.size() / 37) {
    EXPECT_TRUE(refused(restored(*e, std::span(bytes).first(size)), StatusCode::kDataLoss, {"F"}))
        << size << " bytes";
  }
  std::vector<std::byte> longer = bytes;
  longer.push_back(std::byte{0});
  EXPECT_TRUE(refused(restored(*e, longer), StatusCode::kDataLoss, {"checksum"}));
  EXPECT_EQ(e->pool().free_slots(), 1);
  EXPECT_TRUE(is_ok(restored(*e, bytes))) << "the engine is as good as new";
}

/// Another model, another type, another version, too long a text: refused by both values.
TEST_P(SavedSessionTest, OfAnotherKind) {
  const EngineOptions options = mode(DecodeMode::kReplay, 16, 1);
  const std::vector<std::byte> bytes = saved(loaded(), options, tokens(5));
  const std::string id = loaded().model->id();
  EXPECT_EQ(id.find(loaded().model->description().model_type + "-"), 0u);

  // The same architecture and shapes with one other weight.
  const TempDir folder;
  link_files(folder, model_folder(GetParam()));
  StoredTensors tensors = read_tensors(model_folder(GetParam()));
  StoredTensor& head = tensor_named(tensors, "lm_head.weight");
  head.set(0, head.at(0) + 1);
  replace_tensors(folder, tensors);
  const LoadedModel other(folder.path());
  EXPECT_TRUE(refused(restored(*other.engine(options), bytes), StatusCode::kInvalidArgument,
                      {"model", id, other.model->id()}));
  const LoadedModel copy(model_folder(GetParam()));
  EXPECT_EQ(copy.model->id(), id) << "the same model, loaded again";

  const auto bf16 = loaded().engine(mode(DecodeMode::kReplay, 16, 1, DType::kBF16));
  EXPECT_TRUE(refused(restored(*bf16, bytes), StatusCode::kInvalidArgument, {"f32", "bf16"}));
  EngineOptions kv = options;
  kv.kv = DType::kF16;
  const auto other_kv = loaded().engine(kv);
  EXPECT_TRUE(refused(restored(*other_kv, bytes), StatusCode::kInvalidArgument,
                      {"keys and values", "f32", "f16"}));
  EngineOptions small = options;
  small.context = 11;  // 8 + 5 tokens, the last one not read
  const auto short_context = loaded().engine(small);
  EXPECT_TRUE(
      refused(restored(*short_context, bytes), StatusCode::kResourceExhausted, {"12", "11"}));
  EXPECT_EQ(short_context->pool().free_slots(), 1);

  std::vector<std::byte> newer = bytes;
  newer[8] = std::byte{2};
  EXPECT_TRUE(
      refused(SavedSession::parse(newer, "F"), StatusCode::kUnsupported, {"version 2", "1"}));
  std::vector<std::byte> foreign(100, std::byte{'x'});
  EXPECT_TRUE(refused(SavedSession::parse(foreign, "F"), StatusCode::kDataLoss, {"RSSMSESS"}));
}

/// A state and keys of different lengths are no sequence, however well each is formed (C62).
TEST_P(SavedSessionTest, StateAndKeysOfOnePosition) {
  const auto e = loaded().engine({.decode = DecodeMode::kReplay, .sequences = 2, .context = 40});
  const std::int32_t s = open_sequence(*e);
  const std::int32_t t = open_sequence(*e);
  prompt_step(*e, s, kPrompt);
  const auto shorter = e->save(s);
  decode_step(*e, s, 5);
  const auto longer = e->save(s);
  ASSERT_TRUE(is_ok(shorter));
  ASSERT_TRUE(is_ok(longer));
  // The state of one (its size in front) with the rest of the other.
  const auto state_end = [](const std::vector<std::byte>& image) {
    std::uint64_t size = 0;
    std::memcpy(&size, image.data(), sizeof size);
    return static_cast<std::ptrdiff_t>(sizeof size + size);
  };
  std::vector<std::byte> mixed(longer->begin(), longer->begin() + state_end(*longer));
  mixed.insert(mixed.end(), shorter->begin() + state_end(*shorter), shorter->end());
  EXPECT_TRUE(refused(e->load(t, mixed), StatusCode::kDataLoss, {"9 tokens", "8"}));
  EXPECT_EQ(*e->position(t), 0);
  ASSERT_TRUE(is_ok(e->load(t, *longer)));
  EXPECT_TRUE(same_bits(decode_step(*e, t, 6), decode_step(*e, s, 6)));
}

/// A position that does not fit to the text is refused, not read past (C62).
TEST_P(SavedSessionTest, ConversationsMustFitTheirSequence) {
  const auto e = loaded().engine(mode(DecodeMode::kReplay, 16, 1));
  Conversation conversation{.sequence = open_sequence(*e)};
  EXPECT_TRUE(refused(continue_conversation(*e, conversation, {}, tokens(4), kGo),
                      StatusCode::kInvalidArgument, {"0 tokens"}));
  prompt_step(*e, conversation.sequence, kPrompt);
  for (const std::size_t size : {0u, 7u, 10u}) {
    conversation.tokens.assign(size, 1);
    EXPECT_TRUE(refused(continue_conversation(*e, conversation, kPrompt, tokens(4), kGo),
                        StatusCode::kInvalidArgument, {std::to_string(size), "8"}));
  }
}

}  // namespace
}  // namespace replayssm::testing
