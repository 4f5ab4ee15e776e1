// Drawing texts with drafts: whatever is drafted, greedy texts are those of plain decoding, sampled
// ones have its distribution, and they end where it would end them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "runtime/draft/model_draft.h"
#include "runtime/draft/ngram_draft.h"
#include "runtime/generate.h"
#include "support/model_folder.h"
#include "support/model_test.h"
#include "support/rng.h"

namespace replayssm::testing {
namespace {

Tokens random_tokens(std::int64_t count, std::uint64_t seed) {
  Rng rng(seed);
  Tokens out;
  for (std::int64_t i = 0; i < count; ++i) out.push_back(static_cast<std::int32_t>(rng.below(259)));
  return out;
}

const TokenSink kGo = [](std::int32_t) -> Result<bool> { return true; };

class DecoderTest : public ModelTest {
 protected:
  /// A model of the same shape that mostly thinks otherwise.
  static const LoadedModel& other_model() {
    static std::map<std::string, std::unique_ptr<LoadedModel>> models;
    auto& model = models[GetParam()];
    if (model == nullptr) {
      const TempDir folder;
      link_files(folder, model_folder(GetParam()));
      StoredTensors tensors = read_tensors(folder.path());
      StoredTensor& head = tensor_named(tensors, "lm_head.weight");
      Rng rng(1);
      for (std::size_t i = 0; i < head.count(); ++i) head.set(i, head.at(i) + 0.3f * rng.normal());
      replace_tensors(folder, tensors);
      model = std::make_unique<LoadedModel>(folder.path());
    }
    return *model;
  }

  static EngineOptions options(DecodeMode decode, int window, int drafts,
                               std::int64_t sequences = 1) {
    return {.decode = decode,
            .window = window,
            .draft_capacity = drafts + 1,
            .sequences = sequences,
            .context = 512,
            .poison = true};
  }
  static std::unique_ptr<Engine> engine(DecodeMode decode, int window, int drafts,
                                        std::int64_t sequences = 1) {
    return loaded().engine(options(decode, window, drafts, sequences));
  }

  /// Prompt and `count` greedy tokens of plain decoding.
  static Tokens plain_text(const Tokens& prompt, std::int64_t count) {
    const auto e = engine(DecodeMode::kPlain, 1, 0);
    GenerateOptions o;
    o.max_tokens = count;
    const auto generation = generate(*e, prompt, o, kGo);
    EXPECT_TRUE(is_ok(generation));
    Tokens text = prompt;
    if (generation.ok()) {
      text.insert(text.end(), generation->tokens.begin(), generation->tokens.end());
    }
    return text;
  }
};

INSTANTIATE_TEST_SUITE_P(Models, DecoderTest, ::testing::Values("nemotron-h-a", kRandomQwen35),
                         parameter_name);

/// Drafts the beginning of what is known to follow, then tokens that are wrong.
class ScriptedDraft final : public DraftSource {
 public:
  enum class Mood { kRandom, kRight, kWrong };

  ScriptedDraft(std::map<std::int32_t, Tokens> texts, Mood mood, std::uint64_t seed = 1)
      : texts_(std::move(texts)), mood_(mood), rng_(seed) {}

  const std::string& name() const override { return name_; }
  Status open(std::int32_t, std::span<const std::int32_t>) override {
    ++open_;
    return {};
  }
  Status close(std::int32_t) override {
    --open_;
    return {};
  }
  Status draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const Tokens& text = texts_.at(requests[i].sequence);
      const std::size_t at = requests[i].tokens.size();
      EXPECT_TRUE(std::equal(requests[i].tokens.begin(), requests[i].tokens.end(), text.begin()));
      const std::int64_t limit = requests[i].limit;
      EXPECT_GE(limit, 0);
      const std::int64_t count = mood_ == Mood::kRandom ? rng_.between(0, limit) : limit;
      const std::int64_t right = mood_ == Mood::kRandom  ? rng_.between(0, count)
                                 : mood_ == Mood::kRight ? count
                                                         : 0;
      for (std::int64_t t = 0; t < count; ++t) {
        const std::int32_t next = text.at(at + static_cast<std::size_t>(t));
        drafts[i].tokens.push_back(t < right ? next : (next + 1) % 259);
      }
      drafted_ += count;
      right_ += right;
    }
    return {};
  }

  std::int64_t drafted() const { return drafted_; }
  std::int64_t right() const { return right_; }
  int open_sequences() const { return open_; }

 private:
  std::string name_ = "scripted";
  std::map<std::int32_t, Tokens> texts_;
  Mood mood_;
  Rng rng_;
  std::int64_t drafted_ = 0;
  std::int64_t right_ = 0;
  int open_ = 0;
};

struct Way {
  DecodeMode decode;
  int window;
  int drafts;
};

const std::vector<Way>& ways() {
  static const std::vector<Way> all{{DecodeMode::kReplay, 2, 1},    {DecodeMode::kReplay, 4, 3},
                                    {DecodeMode::kReplay, 16, 1},   {DecodeMode::kReplay, 16, 4},
                                    {DecodeMode::kReplay, 16, 15},  {DecodeMode::kReplay, 64, 7},
                                    {DecodeMode::kSnapshot, 16, 1}, {DecodeMode::kSnapshot, 1, 4},
                                    {DecodeMode::kSnapshot, 1, 15}, {DecodeMode::kAuto, 16, 5}};
  return all;
}

std::string text_of(const Way& way) {
  return std::string(to_string(way.decode)) + " " + std::to_string(way.window) + ", drafts " +
         std::to_string(way.drafts);
}

/// Many texts in one step, each with a draft of its own length of which it accepts its own part,
/// nothing and everything included: greedy texts are those of plain decoding and the counts add up
/// (C19, C20, C25, C28, C29, C35, C96).
TEST_P(DecoderTest, GreedyTextsOfManySequences) {
  constexpr std::size_t kTexts = 4;
  constexpr std::int64_t kCount = 90;
  std::map<std::int32_t, Tokens> texts;
  std::vector<Tokens> prompts;
  for (std::size_t i = 0; i < kTexts; ++i) {
    prompts.push_back(random_tokens(static_cast<std::int64_t>(1 + 7 * i), 20 + i));
    texts[static_cast<std::int32_t>(i)] = plain_text(prompts[i], kCount);
  }
  for (const Way& way : ways()) {
    SCOPED_TRACE(text_of(way));
    const auto e = engine(way.decode, way.window, way.drafts, kTexts);
    ScriptedDraft source(texts, ScriptedDraft::Mood::kRandom);
    Decoder decoder(*e, &source, way.drafts);
    std::vector<Stream> streams(kTexts);
    for (std::size_t i = 0; i < kTexts; ++i) {
      streams[i].sequence = open_sequence(*e);
      ASSERT_EQ(streams[i].sequence, static_cast<std::int32_t>(i));
      streams[i].tokens = prompts[i];
      // Texts end one after the other.
      streams[i].wanted = kCount - 10 * static_cast<std::int64_t>(i);
      streams[i].sink = [](std::int32_t, std::span<const float>) -> Result<bool> { return true; };
      const auto logits = feed_prompt(*e, streams[i].sequence, prompts[i], {});
      ASSERT_TRUE(is_ok(logits));
      ASSERT_TRUE(is_ok(Decoder::draw(streams[i], *logits)));
    }
    while (true) {
      std::vector<Stream*> running;
      for (Stream& stream : streams) {
        if (stream.wanted > 0) running.push_back(&stream);
      }
      if (running.empty()) break;
      ASSERT_TRUE(is_ok(decoder.step(running)));
      for (const Stream& stream : streams) {
        ASSERT_EQ(*e->position(stream.sequence), std::ssize(stream.tokens) - 1);
      }
    }
    std::int64_t drawn = 0;
    for (std::size_t i = 0; i < kTexts; ++i) {
      const Tokens& text = texts[static_cast<std::int32_t>(i)];
      const auto length = static_cast<std::ptrdiff_t>(prompts[i].size() + kCount - 10 * i);
      EXPECT_EQ(streams[i].tokens, Tokens(text.begin(), text.begin() + length)) << "text " << i;
      drawn += std::ssize(streams[i].tokens) - std::ssize(prompts[i]) - 1;
    }
    const DecodeCounts& counts = decoder.counts();
    EXPECT_EQ(counts.drawn, drawn);
    EXPECT_EQ(counts.drafted, source.drafted());
    EXPECT_EQ(counts.accepted, source.right());
    EXPECT_EQ(counts.drawn, counts.steps + counts.accepted) << "a token per row, and the drafts";
    EXPECT_GT(counts.accepted, 0);
    EXPECT_GT(counts.drafted, counts.accepted);
  }
}

/// Every source there is, alone, with the same text as plain decoding.
TEST_P(DecoderTest, GreedyTextOfEverySource) {
  const Tokens prompt = random_tokens(9, 30);
  const Tokens text = plain_text(prompt, 120);
  const Tokens expected(text.begin() + 9, text.end());
  for (const Way& way : ways()) {
    std::vector<std::unique_ptr<DraftSource>> sources;
    auto ngram = NgramDraft::create({.shortest = 1, .longest = 3});
    ASSERT_TRUE(is_ok(ngram));
    sources.push_back(std::move(ngram).value());
    for (const LoadedModel* drafter : {&loaded(), &other_model()}) {
      auto source = ModelDraft::create(drafter->model, drafter->backend, drafter->context,
                                       {.name = drafter == &loaded() ? "itself" : "another",
                                        .draft_tokens = way.drafts,
                                        .context = 512,
                                        .poison = true});
      ASSERT_TRUE(is_ok(source));
      sources.push_back(std::move(source).value());
    }
    if (auto mtp = mtp_source(way.drafts)) sources.push_back(std::move(mtp));
    for (const auto& source : sources) {
      SCOPED_TRACE(text_of(way) + ", " + source->name());
      EngineOptions with = options(way.decode, way.window, way.drafts);
      with.hidden_states = source->reads_hidden_states();
      const auto e = loaded().engine(with);
      GenerateOptions o;
      o.max_tokens = 120;
      o.drafts = source.get();
      o.draft_tokens = way.drafts;
      const auto generation = generate(*e, prompt, o, kGo);
      ASSERT_TRUE(is_ok(generation));
      EXPECT_EQ(generation->tokens, expected);
      const DecodeCounts& counts = generation->decode;
      EXPECT_EQ(counts.steps + counts.accepted, 119);
      if (source->name() == "itself") {
        EXPECT_EQ(counts.accepted, counts.drafted);
      }
      if (source->name() == "another" || source->name() == "mtp") {
        EXPECT_LT(counts.accepted, counts.drafted);
      }
      if (source->name() == "mtp") {
        EXPECT_GT(counts.accepted, 0);
      }
    }
  }
}

/// Stop tokens, the reader's end and the most tokens cut an accepted run where plain decoding would
/// have ended: nothing after it is given out or counted, and the sequence goes on from there.
TEST_P(DecoderTest, EndsInsideAnAcceptedRun) {
  const Tokens prompt = random_tokens(5, 40);
  const Tokens text = plain_text(prompt, 80);
  const std::map<std::int32_t, Tokens> texts{{0, text}};
  enum class End { kMaxTokens, kReader, kStopToken };
  for (const DecodeMode decode : {DecodeMode::kReplay, DecodeMode::kSnapshot}) {
    for (const End end : {End::kMaxTokens, End::kReader, End::kStopToken}) {
      for (std::int64_t length = 1; length <= 14; ++length) {
        SCOPED_TRACE(std::to_string(static_cast<int>(end)) + " after " + std::to_string(length));
        const auto e = engine(decode, 16, 6);
        ScriptedDraft source(texts, ScriptedDraft::Mood::kRight);
        GenerateOptions o;
        o.max_tokens = end == End::kMaxTokens ? length : 60;
        o.drafts = &source;
        o.draft_tokens = 6;
        const std::int32_t last = text[static_cast<std::size_t>(4 + length)];
        std::int64_t expected = length;
        if (end == End::kStopToken) {
          o.stop_tokens = {last};
          expected = std::find(text.begin() + 5, text.end(), last) - (text.begin() + 5) + 1;
        }
        Tokens seen;
        const TokenSink reader = [&](std::int32_t token) -> Result<bool> {
          seen.push_back(token);
          return end != End::kReader || std::ssize(seen) < length;
        };
        Conversation conversation{.sequence = open_sequence(*e)};
        const auto generation = continue_conversation(*e, conversation, prompt, o, reader);
        ASSERT_TRUE(is_ok(generation));
        const Tokens whole(text.begin(), text.begin() + 5 + expected);
        EXPECT_EQ(conversation.tokens, whole);
        EXPECT_EQ(generation->tokens, Tokens(whole.begin() + 5, whole.end()));
        EXPECT_EQ(seen, generation->tokens);
        EXPECT_EQ(*e->position(conversation.sequence), std::ssize(whole) - 1);
        EXPECT_EQ(generation->decode.drawn, expected - 1);
        // Rows of 6 drafts and a token of their own; the last one may end before that.
        EXPECT_EQ(generation->decode.steps, (expected - 1 + 6) / 7);
        EXPECT_EQ(generation->decode.accepted,
                  expected - 1 - (expected - 1) / 7 -
                      (end == End::kMaxTokens && (expected - 1) % 7 > 0 ? 1 : 0));
        EXPECT_EQ(source.open_sequences(), 0);
        if (end == End::kMaxTokens) {
          EXPECT_EQ(generation->decode.drafted, generation->decode.accepted)
              << "nothing is drafted that cannot be taken";
        }
        // The state is that after the text and nothing else.
        o.max_tokens = 12;
        o.stop_tokens.clear();
        const auto more = continue_conversation(*e, conversation, {}, o, kGo);
        ASSERT_TRUE(is_ok(more));
        EXPECT_EQ(more->tokens,
                  Tokens(text.begin() + 5 + expected, text.begin() + 5 + expected + 12));
      }
    }
  }
}

/// Rejected every time, drafts cost no token and leave no trace.
TEST_P(DecoderTest, WrongDraftsOnly) {
  const Tokens prompt = random_tokens(5, 50);
  const std::map<std::int32_t, Tokens> texts{{0, plain_text(prompt, 80)}};
  for (const Way& way : ways()) {
    SCOPED_TRACE(text_of(way));
    const auto e = engine(way.decode, way.window, way.drafts);
    ScriptedDraft source(texts, ScriptedDraft::Mood::kWrong);
    GenerateOptions o;
    o.max_tokens = 60;
    o.drafts = &source;
    o.draft_tokens = way.drafts;
    const auto generation = generate(*e, prompt, o, kGo);
    ASSERT_TRUE(is_ok(generation));
    EXPECT_EQ(generation->tokens, Tokens(texts.at(0).begin() + 5, texts.at(0).begin() + 5 + 60));
    EXPECT_EQ(generation->decode.accepted, 0);
    EXPECT_EQ(generation->decode.steps, 59);
  }
}

/// A failing reader ends the text with its error; the sequence and the source are free again.
TEST_P(DecoderTest, FailingReader) {
  const Tokens prompt = random_tokens(5, 60);
  const std::map<std::int32_t, Tokens> texts{{0, plain_text(prompt, 80)}};
  for (const DecodeMode decode : {DecodeMode::kReplay, DecodeMode::kSnapshot}) {
    const auto e = engine(decode, 16, 6);
    const std::int64_t free = e->pool().free_slots();
    ScriptedDraft source(texts, ScriptedDraft::Mood::kRight);
    GenerateOptions o;
    o.max_tokens = 40;
    o.drafts = &source;
    o.draft_tokens = 6;
    for (const int fails_at : {1, 2, 5, 8}) {
      int calls = 0;
      EXPECT_TRUE(refused(generate(*e, prompt, o,
                                   [&](std::int32_t) -> Result<bool> {
                                     if (++calls == fails_at) return data_loss("no reader");
                                     return true;
                                   }),
                          StatusCode::kDataLoss, {"no reader"}));
      EXPECT_EQ(calls, fails_at);
      EXPECT_EQ(e->pool().free_slots(), free);
      EXPECT_EQ(source.open_sequences(), 0);
    }
    EXPECT_TRUE(is_ok(generate(*e, prompt, o, kGo)));
  }
}

/// A reader that fails in the middle of a step leaves the step's other texts alone.
TEST_P(DecoderTest, FailingReaderBesideOthers) {
  constexpr std::int64_t kCount = 60;
  const std::vector<Tokens> prompts = {random_tokens(5, 61), random_tokens(3, 62)};
  const std::map<std::int32_t, Tokens> texts{{0, plain_text(prompts[0], kCount)},
                                             {1, plain_text(prompts[1], kCount)}};
  for (const Way& way : ways()) {
    SCOPED_TRACE(text_of(way));
    const auto e = engine(way.decode, way.window, way.drafts, 2);
    ScriptedDraft source(texts, ScriptedDraft::Mood::kRandom);
    Decoder decoder(*e, &source, way.drafts);
    std::vector<Stream> streams(2);
    int calls = 0;
    for (std::size_t i = 0; i < 2; ++i) {
      streams[i].sequence = open_sequence(*e);
      streams[i].tokens = prompts[i];
      streams[i].wanted = kCount;
      const auto logits = feed_prompt(*e, streams[i].sequence, prompts[i], {});
      ASSERT_TRUE(is_ok(logits));
      streams[i].sink = [&calls, i](std::int32_t, std::span<const float>) -> Result<bool> {
        if (i == 0 && ++calls == 9) return data_loss("no reader");
        return true;
      };
      ASSERT_TRUE(is_ok(Decoder::draw(streams[i], *logits)));
    }
    Status status;
    while (status.ok()) {
      status = decoder.step(std::vector<Stream*>{&streams[0], &streams[1]});
    }
    EXPECT_EQ(status.message(), "no reader");
    ASSERT_TRUE(is_ok(e->close(streams[0].sequence)));
    while (streams[1].wanted > 0) {
      ASSERT_EQ(*e->position(streams[1].sequence), std::ssize(streams[1].tokens) - 1);
      ASSERT_TRUE(is_ok(decoder.step(std::vector<Stream*>{&streams[1]})));
    }
    EXPECT_EQ(streams[1].tokens, texts.at(1));
  }
}

// ---- Sampling ----

/// Certain drafts do not even change the random numbers: a seed gives the same text with them.
TEST_P(DecoderTest, SampledTextWithCertainDrafts) {
  const Tokens prompt = {7, 7, 7, 7, 7, 7};
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    GenerateOptions o;
    o.max_tokens = 80;
    o.sampling = {.temperature = 0.8f, .top_k = 3, .seed = seed};
    const auto plain = generate(*engine(DecodeMode::kPlain, 1, 0), prompt, o, kGo);
    ASSERT_TRUE(is_ok(plain));
    for (const Way& way : ways()) {
      const auto source = NgramDraft::create({.shortest = 1, .longest = 2});
      ASSERT_TRUE(is_ok(source));
      o.drafts = source->get();
      o.draft_tokens = way.drafts;
      const auto e = engine(way.decode, way.window, way.drafts);
      const auto generation = generate(*e, prompt, o, kGo);
      ASSERT_TRUE(is_ok(generation));
      EXPECT_EQ(generation->tokens, plain->tokens) << text_of(way);
      EXPECT_GT(generation->decode.accepted, 0) << text_of(way);
    }
    o.drafts = nullptr;
  }
}

/// Three sampled tokens after a prompt, with a draft model that thinks otherwise and with the
/// model's own head: each of the texts
/// comes as often as plain decoding's logits say. Exact probabilities against 12,000 draws: with at
/// most 26 degrees of freedom a statistic above 64 has probability 1e-4 or less; seeds are fixed.
TEST_P(DecoderTest, SampledTextsKeepTheDistribution) {
  const Tokens prompt = random_tokens(6, 70);
  const SamplingOptions sampling{.temperature = 1.3f, .top_k = 3, .min_p = 0.02f};
  std::map<Tokens, double> expected;
  const auto plain = engine(DecodeMode::kPlain, 1, 0);
  const std::function<void(const Tokens&, double)> expand = [&](const Tokens& text, double p) {
    if (text.size() == 3) {
      expected[text] = p;
      return;
    }
    const std::int32_t s = open_sequence(*plain);
    Tokens all = prompt;
    all.insert(all.end(), text.begin(), text.end());
    const Logits logits = prompt_step(*plain, s, all);
    ASSERT_TRUE(is_ok(plain->close(s)));
    const auto vocab = static_cast<std::size_t>(plain->model().vocab_size);
    const auto next = candidates(std::span(logits).last(vocab), sampling);
    ASSERT_TRUE(is_ok(next));
    for (const auto& [token, probability] : *next) {
      Tokens longer = text;
      longer.push_back(token);
      expand(longer, p * static_cast<double>(probability));
    }
  };
  expand({}, 1);
  ASSERT_GE(expected.size(), 8u);

  std::vector<std::unique_ptr<DraftSource>> sources;
  auto another =
      ModelDraft::create(other_model().model, other_model().backend, other_model().context,
                         {.name = "another", .draft_tokens = 2, .context = 64, .poison = false});
  ASSERT_TRUE(is_ok(another));
  sources.push_back(std::move(another).value());
  if (auto mtp = mtp_source(2)) sources.push_back(std::move(mtp));
  constexpr int kDraws = 12'000;
  for (const auto& source : sources) {
    for (const DecodeMode decode : {DecodeMode::kReplay, DecodeMode::kSnapshot}) {
      // How a row is verified is the same for every source: once is enough at this length.
      if (decode == DecodeMode::kSnapshot && source != sources.front()) continue;
      SCOPED_TRACE(source->name() + ", " + to_string(decode));
      const auto e = loaded().engine({.decode = decode,
                                      .window = 16,
                                      .draft_capacity = 3,
                                      .context = 64,
                                      .hidden_states = source->reads_hidden_states()});
      std::map<Tokens, int> counts;
      std::int64_t drafted = 0;
      std::int64_t accepted = 0;
      GenerateOptions o;
      o.max_tokens = 3;
      o.sampling = sampling;
      o.drafts = source.get();
      o.draft_tokens = 2;
      for (int i = 0; i < kDraws; ++i) {
        o.sampling.seed = static_cast<std::uint64_t>(i);
        const auto generation = generate(*e, prompt, o, kGo);
        ASSERT_TRUE(is_ok(generation));
        ++counts[generation->tokens];
        drafted += generation->decode.drafted;
        accepted += generation->decode.accepted;
      }
      double chi2 = 0;
      int seen = 0;
      for (const auto& [text, p] : expected) {
        const double mean = p * kDraws;
        const int count = counts[text];
        chi2 += (count - mean) * (count - mean) / mean;
        seen += count;
      }
      EXPECT_EQ(seen, kDraws) << "a text that plain decoding cannot draw";
      EXPECT_LT(chi2, 64) << expected.size() << " texts";
      EXPECT_GT(accepted, 0);
      EXPECT_LT(accepted, drafted);
    }
  }
}

// ---- Refusals ----

/// Drafts longer than the pool allows are refused when the engine is made or the text begins, with
/// both values, and nothing is silently shortened (C36, C97).
TEST_P(DecoderTest, Refusals) {
  const auto create = [](DecodeMode decode, int window, int capacity) {
    return Engine::create(loaded().model, loaded().backend, loaded().context,
                          {.decode = decode, .window = window, .draft_capacity = capacity});
  };
  for (const DecodeMode decode : {DecodeMode::kReplay, DecodeMode::kAuto}) {
    EXPECT_TRUE(refused(create(decode, 4, 5), StatusCode::kInvalidArgument, {"5", "window of 4"}));
    EXPECT_TRUE(is_ok(create(decode, 5, 5)));
  }
  EXPECT_TRUE(
      refused(create(DecodeMode::kSnapshot, 1, 17), StatusCode::kInvalidArgument, {"17", "16"}));
  EXPECT_TRUE(refused(create(DecodeMode::kSnapshot, 1, 0), StatusCode::kInvalidArgument, {"0"}));
  EXPECT_TRUE(is_ok(create(DecodeMode::kSnapshot, 1, 16)));

  const auto e = engine(DecodeMode::kReplay, 16, 4);
  const auto source = NgramDraft::create({});
  ASSERT_TRUE(is_ok(source));
  GenerateOptions o;
  o.drafts = source->get();
  for (const int tokens : {0, 5}) {
    o.draft_tokens = tokens;
    EXPECT_TRUE(refused(generate(*e, random_tokens(3, 1), o, kGo), StatusCode::kInvalidArgument,
                        {std::to_string(tokens), "1..4", "5"}));
  }
  EXPECT_EQ(e->pool().free_slots(), 1);
}

}  // namespace
}  // namespace replayssm::testing
