// The qwen3_5 family against its formulas in fp64: logits and hidden states by every way of
// decoding, and its MTP head, chained drafts included.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>

#include "runtime/draft/mtp_draft.h"
#include "runtime/generate.h"
#include "support/qwen3_5_oracle.h"

namespace replayssm::testing {
namespace {

constexpr double kBound = 2e-5;  // logits are of order 5

Tokens random_tokens(std::int64_t count, std::uint64_t seed) {
  Rng rng(seed);
  Tokens out;
  for (std::int64_t i = 0; i < count; ++i) out.push_back(static_cast<std::int32_t>(rng.below(264)));
  return out;
}

::testing::AssertionResult near(std::span<const float> got, const Doubles& want,
                                double bound = kBound) {
  return testing::near(got, std::vector<float>(want.begin(), want.end()),
                       static_cast<float>(bound));
}

/// A model in a folder of its own, and its oracle.
struct Subject {
  TempDir folder;
  Qwen35Sizes sizes;
  Qwen35Oracle oracle;
  LoadedModel loaded;

  explicit Subject(const Qwen35Sizes& s = {}, std::uint64_t seed = 1)
      : sizes(s),
        oracle(s, (write_qwen3_5(folder, s, seed), read_tensors(folder.path()))),
        loaded(folder.path()) {}
};

const Subject& subject() {
  static const Subject made;
  return made;
}

/// Value heads 1, 2, 3 and 4 times the key heads; one or all KV heads; rotation of a part or of
/// all features; state of any proportion.
std::vector<Qwen35Sizes> shapes() {
  std::vector<Qwen35Sizes> out(4);
  out[1].value_heads = 6;
  out[1].key_dim = 24;
  out[1].value_dim = 8;
  out[1].kv_heads = 1;
  out[1].rotary_dim = 2;
  out[2].key_heads = 3;
  out[2].value_heads = 3;
  out[2].kv_heads = 4;
  out[2].rotary_dim = 16;
  out[2].attention = {true, false};
  out[3].key_heads = 1;
  out[3].query_heads = 6;
  out[3].kv_heads = 3;
  out[3].head_dim = 12;
  out[3].rotary_dim = 6;
  out[3].attention = {false, false, false};
  return out;
}

TEST(Qwen35Test, PromptsAndEveryWayOfDecoding) {
  std::uint64_t seed = 10;
  for (const Qwen35Sizes& sizes : shapes()) {
    const Subject s(sizes, ++seed);
    const Tokens text = random_tokens(40, seed);
    const DoubleRows hidden = s.oracle.hidden(text);
    const auto vocab = static_cast<std::size_t>(sizes.vocab);
    for (const auto& [mode, window, capacity] : {std::tuple{DecodeMode::kPlain, 1, 1},
                                                 {DecodeMode::kReplay, 1, 1},
                                                 {DecodeMode::kReplay, 4, 3},
                                                 {DecodeMode::kReplay, 16, 5},
                                                 {DecodeMode::kSnapshot, 1, 4},
                                                 {DecodeMode::kAuto, 16, 1}}) {
      SCOPED_TRACE(std::string(to_string(mode)) + " " + std::to_string(window));
      const auto e = s.loaded.engine({.decode = mode,
                                      .window = window,
                                      .draft_capacity = capacity,
                                      .kv = DType::kF32,
                                      .context = 64,
                                      .hidden_states = true,
                                      .poison = true});
      const std::int32_t sequence = open_sequence(*e);
      for (std::size_t at = 0; at < text.size();) {
        // A prompt of seven tokens, then rows of every length.
        const std::size_t count =
            at == 0 ? 7
                    : std::min<std::size_t>(1 + at % static_cast<std::size_t>(capacity),
                                            text.size() - at);
        const Phase phase = at == 0 ? Phase::kPrompt : count == 1 ? Phase::kDecode : Phase::kVerify;
        const Logits logits = advance(*e, {{.sequence = sequence,
                                            .phase = phase,
                                            .tokens = std::span(text).subspan(at, count),
                                            .logits = static_cast<std::int64_t>(count)}});
        ASSERT_EQ(logits.size(), count * vocab);
        const auto size = static_cast<std::size_t>(sizes.hidden);
        ASSERT_EQ(e->hidden_states().size(), count * size);
        for (std::size_t t = 0; t < count; ++t) {
          ASSERT_TRUE(near(e->hidden_states().subspan(t * size, size), hidden[at + t]))
              << "hidden state of token " << at + t;
          ASSERT_TRUE(
              near(std::span(logits).subspan(t * vocab, vocab), s.oracle.logits(hidden[at + t])))
              << "logits of token " << at + t;
        }
        at += count;
      }
    }
  }
}

/// Hidden states are what logits are computed from: asking for them changes no bit.
TEST(Qwen35Test, HiddenStatesChangeNothing) {
  const Tokens text = random_tokens(30, 3);
  for (const std::int64_t wanted : {1, 5, 30}) {
    std::array<Logits, 2> logits;
    for (const bool hidden : {false, true}) {
      const auto e = subject().loaded.engine({.context = 64, .hidden_states = hidden});
      logits[hidden ? 1 : 0] = advance(*e, {{.sequence = open_sequence(*e),
                                             .phase = Phase::kPrompt,
                                             .tokens = text,
                                             .logits = wanted}});
      EXPECT_EQ(e->hidden_states().size(), hidden ? 30u * 32u : 0u);
    }
    EXPECT_TRUE(same_bits(logits[0], logits[1]));
  }
}

// ---- The MTP head ----

std::int32_t best(const Doubles& logits) {
  return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

/// Drafts after a text, of which `seen` holds hidden states from some token on.
Tokens oracle_drafts(const Qwen35Oracle& oracle, const Tokens& text, std::int64_t count,
                     std::size_t begin = 0) {
  const Tokens read(text.begin(), text.end() - 1);
  DoubleRows hidden = oracle.hidden(read);
  hidden.erase(hidden.begin(), hidden.begin() + static_cast<std::ptrdiff_t>(begin));
  Tokens after(text.begin() + 1 + static_cast<std::ptrdiff_t>(begin), text.end());
  Tokens drafts;
  while (std::ssize(drafts) < count) {
    const Doubles last = oracle.mtp(hidden, after).back();
    drafts.push_back(best(oracle.logits(last)));
    hidden.push_back(last);
    after.push_back(drafts.back());
  }
  return drafts;
}

std::unique_ptr<MtpDraft> mtp_draft(const LoadedModel& loaded, int tokens,
                                    std::int64_t sequences = 1, std::int64_t context = 128) {
  auto head = loaded.model->load_mtp_head(*loaded.backend);
  EXPECT_TRUE(is_ok(head));
  if (!head.ok()) return nullptr;
  auto source = MtpDraft::create(
      std::move(head).value(), loaded.backend,
      {.draft_tokens = tokens, .sequences = sequences, .context = context, .kv = DType::kF32});
  EXPECT_TRUE(is_ok(source));
  return source.ok() ? std::move(source).value() : nullptr;
}

/// The head alone: every pair of a text as a prompt, in chunks, and as rows that decode.
TEST(MtpHeadTest, PairsOfAText) {
  std::uint64_t seed = 20;
  for (const Qwen35Sizes& sizes : shapes()) {
    const Subject s(sizes, ++seed);
    const Tokens text = random_tokens(24, seed);
    const DoubleRows hidden = s.oracle.hidden(text);
    const Tokens after(text.begin() + 1, text.end());
    const DoubleRows want = s.oracle.mtp(hidden, after);
    const auto head = s.loaded.model->load_mtp_head(*s.loaded.backend);
    ASSERT_TRUE(is_ok(head));
    const auto h = static_cast<std::size_t>(sizes.hidden);
    const auto v = static_cast<std::size_t>(sizes.vocab);
    for (const bool prompt : {true, false}) {
      for (const std::size_t chunk : {1u, 5u, 23u}) {
        auto cache = KvCache::create({.layers = 1,
                                      .slots = 2,
                                      .capacity = 32,
                                      .kv_heads = sizes.kv_heads,
                                      .head_dim = sizes.head_dim});
        ASSERT_TRUE(is_ok(cache));
        for (std::size_t at = 0; at < after.size(); at += chunk) {
          const std::size_t count = std::min(chunk, after.size() - at);
          std::vector<float> in;
          for (std::size_t t = at; t < at + count; ++t) {
            in.insert(in.end(), hidden[t].begin(), hidden[t].end());
          }
          const auto n = static_cast<std::int64_t>(count);
          const ForwardRow row{.slot = 1,
                               .kind = RowKind::kCommitted,
                               .prompt = prompt,
                               .begin = 0,
                               .count = n,
                               .position = static_cast<std::int64_t>(at)};
          std::vector<float> out(count * h);
          std::vector<float> logits(count * v);
          ASSERT_TRUE(is_ok((*head)->forward(
              *s.loaded.backend, *cache,
              {.rows = std::span(&row, 1),
               .tokens = std::span(after).subspan(at, count),
               .logit_counts = std::span(&n, 1)},
              TensorView::contiguous(in.data(), DType::kF32, {n, sizes.hidden}),
              {.logits = TensorView::contiguous(logits.data(), DType::kF32, {n, sizes.vocab}),
               .hidden = TensorView::contiguous(out.data(), DType::kF32, {n, sizes.hidden})})));
          for (std::size_t t = 0; t < count; ++t) {
            ASSERT_TRUE(near(std::span(out).subspan(t * h, h), want[at + t])) << at + t;
            ASSERT_TRUE(near(std::span(logits).subspan(t * v, v), s.oracle.logits(want[at + t])))
                << at + t;
          }
        }
      }
    }
  }
}

/// Asks an MTP source for drafts and compares them with the oracle's after the same text.
class CheckedDraft final : public DraftSource {
 public:
  CheckedDraft(const Subject& subject, int tokens, std::int64_t sequences,
               std::int64_t context = 128)
      : subject_(subject), inner_(mtp_draft(subject.loaded, tokens, sequences, context)) {}

  const std::string& name() const override { return inner_->name(); }
  Status open(std::int32_t sequence, std::span<const std::int32_t> tokens) override {
    begin_.erase(sequence);
    return inner_->open(sequence, tokens);
  }
  Status close(std::int32_t sequence) override { return inner_->close(sequence); }
  bool reads_hidden_states() const override { return true; }
  Status read(std::int32_t sequence, std::int64_t position,
              std::span<const float> hidden) override {
    begin_.try_emplace(sequence, static_cast<std::size_t>(position));
    return inner_->read(sequence, position, hidden);
  }
  Status draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override {
    RSSM_RETURN_IF_ERROR(inner_->draft(requests, drafts));
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const Tokens text(requests[i].tokens.begin(), requests[i].tokens.end());
      const auto begin = begin_.find(requests[i].sequence);
      if (begin == begin_.end()) {
        EXPECT_TRUE(drafts[i].tokens.empty()) << "nothing to draft from";
        continue;
      }
      EXPECT_EQ(drafts[i].tokens,
                oracle_drafts(subject_.oracle, text, requests[i].limit, begin->second))
          << "after " << text.size() << " tokens of sequence " << requests[i].sequence;
      ++checked_;
    }
    return {};
  }

  int checked() const { return checked_; }

 private:
  const Subject& subject_;
  std::unique_ptr<MtpDraft> inner_;
  std::map<std::int32_t, std::size_t> begin_;  // first position read
  int checked_ = 0;
};

EngineOptions mtp_options(DecodeMode mode, int tokens, std::int64_t sequences = 1) {
  return {.decode = mode,
          .window = 16,
          .draft_capacity = tokens + 1,
          .kv = DType::kF32,
          .sequences = sequences,
          .context = 128,
          .hidden_states = true,
          .poison = true};
}

const TokenSink kGo = [](std::int32_t) -> Result<bool> { return true; };

/// Round after round, whatever was accepted of the drafts before: the head's cache holds the pairs
/// of the text and nothing of what was rejected (C19, C28, C35).
TEST(MtpDraftTest, DraftsFollowTheAcceptedText) {
  for (const int tokens : {1, 2, 3, 5, 7}) {
    for (const DecodeMode mode : {DecodeMode::kReplay, DecodeMode::kSnapshot}) {
      const auto e = subject().loaded.engine(mtp_options(mode, tokens));
      CheckedDraft source(subject(), tokens, 1);
      GenerateOptions o;
      o.max_tokens = 40;
      o.drafts = &source;
      o.draft_tokens = tokens;
      const auto generation = generate(*e, random_tokens(9, 30), o, kGo);
      ASSERT_TRUE(is_ok(generation));
      EXPECT_GT(generation->decode.accepted, 0) << tokens;
      EXPECT_LT(generation->decode.accepted, generation->decode.drafted) << tokens;
      EXPECT_GT(source.checked(), 5);
    }
  }
}

/// Many texts in a step, of which some end early or stay out of a step: each drafts as alone.
TEST(MtpDraftTest, ManySequences) {
  constexpr int kTexts = 3;
  const auto e = subject().loaded.engine(mtp_options(DecodeMode::kReplay, 3, kTexts));
  CheckedDraft source(subject(), 3, kTexts);
  Decoder decoder(*e, &source, 3);
  std::vector<Stream> streams(kTexts);
  for (int i = kTexts - 1; i >= 0; --i) {
    Stream& stream = streams[static_cast<std::size_t>(i)];
    stream.sequence = open_sequence(*e);
    stream.tokens = random_tokens(1 + 6 * i, static_cast<std::uint64_t>(40 + i));
    stream.wanted = 30 - 7 * i;
    stream.sink = [](std::int32_t, std::span<const float>) -> Result<bool> { return true; };
    ASSERT_TRUE(is_ok(source.open(stream.sequence, stream.tokens)));
    const auto logits = feed_prompt(*e, stream.sequence, stream.tokens, {}, &source);
    ASSERT_TRUE(is_ok(logits));
    ASSERT_TRUE(is_ok(Decoder::draw(stream, *logits)));
  }
  for (int round = 0;; ++round) {
    std::vector<Stream*> running;
    bool going = false;
    for (int i = 0; i < kTexts; ++i) {
      Stream& stream = streams[static_cast<std::size_t>(i)];
      if (stream.wanted == 0) continue;
      going = true;
      if (round % 4 != i) running.push_back(&stream);
    }
    if (!going) break;
    if (running.empty()) continue;
    ASSERT_TRUE(is_ok(decoder.step(running)));
  }
  EXPECT_GT(source.checked(), 15);
  EXPECT_GT(decoder.counts().accepted, 0);
}

/// A text of many prompt chunks, and one that goes on in further prompts after what was drawn.
TEST(MtpDraftTest, LongPromptsAndFurtherTurns) {
  constexpr std::int64_t kContext = 600;
  const Subject& s = subject();
  EngineOptions options = mtp_options(DecodeMode::kReplay, 2);
  options.context = kContext;
  CheckedDraft patient(s, 2, 1, kContext);
  GenerateOptions o;
  o.max_tokens = 5;
  o.drafts = &patient;
  o.draft_tokens = 2;
  const Tokens prompt = random_tokens(kPromptChunk * 2 + 9, 50);
  const auto with = generate(*s.loaded.engine(options), prompt, o, kGo);
  ASSERT_TRUE(is_ok(with));
  EXPECT_GT(patient.checked(), 0);
  o.drafts = nullptr;
  const auto without = generate(*s.loaded.engine({.context = kContext}), prompt, o, kGo);
  ASSERT_TRUE(is_ok(without));
  EXPECT_EQ(with->tokens, without->tokens);

  CheckedDraft source(s, 3, 1);
  const auto short_engine = s.loaded.engine(mtp_options(DecodeMode::kReplay, 3));
  Conversation conversation{.sequence = open_sequence(*short_engine)};
  o.drafts = &source;
  o.draft_tokens = 3;
  o.max_tokens = 12;
  for (const std::int64_t length : {5, 7, 0}) {  // the last turn only draws on
    ASSERT_TRUE(is_ok(
        continue_conversation(*short_engine, conversation, random_tokens(length, 51), o, kGo)));
  }
  EXPECT_GT(source.checked(), 12);
}

/// A draw that fails costs its text and no other.
TEST(MtpDraftTest, FailedDraw) {
  const auto e = subject().loaded.engine(mtp_options(DecodeMode::kReplay, 3, 2));
  const auto source = mtp_draft(subject().loaded, 3, 2);
  const std::vector<Tokens> texts = {random_tokens(12, 70), random_tokens(9, 71)};
  const auto open = [&](std::size_t i) {
    const std::int32_t sequence = open_sequence(*e);
    ASSERT_TRUE(is_ok(source->open(static_cast<std::int32_t>(i), texts[i])));
    prompt_step(*e, sequence, std::span(texts[i]).first(texts[i].size() - 1));
    ASSERT_TRUE(is_ok(source->read(static_cast<std::int32_t>(i), 0, e->hidden_states())));
    ASSERT_TRUE(is_ok(e->close(sequence)));
  };
  open(0);
  open(1);
  Sampler bad{SamplingOptions{.temperature = -1}};
  Sampler good{SamplingOptions{}};
  std::vector<Draft> drafts(2);
  EXPECT_FALSE(
      source
          ->draft(std::vector<DraftRequest>{{1, texts[1], 3, &good}, {0, texts[0], 3, &bad}},
                  drafts)
          .ok());
  ASSERT_TRUE(is_ok(source->close(0)));
  ASSERT_TRUE(is_ok(source->close(1)));
  open(1);
  drafts.assign(1, {});
  ASSERT_TRUE(is_ok(source->draft(std::vector<DraftRequest>{{1, texts[1], 3, &good}}, drafts)));
  EXPECT_EQ(drafts[0].tokens, oracle_drafts(subject().oracle, texts[1], 3));
}

/// The engine must keep hidden states, texts must fit, and what was not opened is not drafted for.
TEST(MtpDraftTest, Refusals) {
  const LoadedModel& loaded = subject().loaded;
  for (const int tokens : {0, 16}) {
    auto head = loaded.model->load_mtp_head(*loaded.backend);
    ASSERT_TRUE(is_ok(head));
    EXPECT_TRUE(
        refused(MtpDraft::create(std::move(head).value(), loaded.backend, {.draft_tokens = tokens}),
                StatusCode::kInvalidArgument, {std::to_string(tokens), "15"}));
  }
  const auto source = mtp_draft(loaded, 2);
  GenerateOptions o;
  o.drafts = source.get();
  o.draft_tokens = 2;
  auto without = mtp_options(DecodeMode::kReplay, 2);
  without.hidden_states = false;
  EXPECT_TRUE(refused(generate(*loaded.engine(without), random_tokens(3, 1), o, kGo),
                      StatusCode::kInvalidArgument, {"mtp", "hidden states"}));

  const Tokens text = random_tokens(4, 60);
  const std::vector<float> hidden(32 * 3, 0.5f);
  Sampler sampler{SamplingOptions{}};
  std::vector<Draft> out(1);
  const auto draft = [&](std::int32_t sequence, std::int64_t limit, const Tokens& tokens) {
    out[0] = {};
    return source->draft(std::vector<DraftRequest>{{sequence, tokens, limit, &sampler}}, out);
  };
  EXPECT_TRUE(refused(draft(0, 1, text), StatusCode::kFailedPrecondition, {"0"}));
  EXPECT_TRUE(refused(source->read(0, 0, hidden), StatusCode::kFailedPrecondition, {"0"}));
  EXPECT_TRUE(refused(source->close(0), StatusCode::kFailedPrecondition, {"0"}));
  ASSERT_TRUE(is_ok(source->open(0, text)));
  EXPECT_TRUE(refused(source->open(0, text), StatusCode::kFailedPrecondition, {"0"}));
  EXPECT_TRUE(refused(source->open(1, text), StatusCode::kResourceExhausted, {"1"}));
  ASSERT_TRUE(is_ok(draft(0, 2, text)));
  EXPECT_TRUE(out[0].tokens.empty()) << "there is no hidden state yet";
  ASSERT_TRUE(is_ok(source->read(0, 0, hidden)));
  EXPECT_TRUE(refused(source->read(0, 5, hidden), StatusCode::kInvalidArgument, {"5", "3"}));
  EXPECT_TRUE(refused(draft(0, 3, text), StatusCode::kInvalidArgument, {"3", "2"}));
  const Tokens longer = random_tokens(6, 60);
  EXPECT_TRUE(refused(draft(0, 2, longer), StatusCode::kInvalidArgument, {"6", "3"}));
  ASSERT_TRUE(is_ok(draft(0, 2, text)));
  EXPECT_EQ(out[0].tokens.size(), 2u);
  ASSERT_TRUE(is_ok(draft(0, 2, text)));
  EXPECT_TRUE(out[0].tokens.empty()) << "nothing new since";
  ASSERT_TRUE(is_ok(source->close(0)));

  const Tokens many = random_tokens(200, 61);
  ASSERT_TRUE(is_ok(source->open(0, many)));
  EXPECT_TRUE(refused(source->read(0, 0, std::vector<float>(32 * 150, 0.5f)),
                      StatusCode::kResourceExhausted, {"150", "128"}));
}

}  // namespace
}  // namespace replayssm::testing
