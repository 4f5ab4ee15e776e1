// Draft sources: n-gram look-up against a search of the whole text, and a draft model whose state
// must follow what was accepted.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "runtime/draft/model_draft.h"
#include "runtime/draft/ngram_draft.h"
#include "support/model_test.h"
#include "support/rng.h"

namespace replayssm::testing {
namespace {

// ---- n-grams ----

/// The continuation by definition.
Tokens search(const Tokens& text, const NgramOptions& options, std::int64_t limit) {
  const auto size = static_cast<std::int64_t>(text.size());
  for (std::int64_t n = std::min<std::int64_t>(options.longest, size - 1); n >= options.shortest;
       --n) {
    for (std::int64_t end = size - 1; end >= n; --end) {
      if (!std::equal(text.end() - n, text.end(), text.begin() + end - n)) continue;
      Tokens longer = text;
      for (std::int64_t i = 0; i < limit; ++i) {
        longer.push_back(longer[static_cast<std::size_t>(end + i)]);
      }
      return {longer.begin() + size, longer.end()};
    }
  }
  return {};
}

TEST(NgramTest, EqualsSearchOfTheWholeText) {
  for (const NgramOptions& options : {NgramOptions{}, NgramOptions{1, 1}, NgramOptions{1, 3},
                                      NgramOptions{3, 4}, NgramOptions{2, 16}}) {
    for (const int alphabet : {1, 2, 3, 8}) {
      Rng rng(static_cast<std::uint64_t>(10 * alphabet + options.longest));
      NgramIndex index(options);
      Tokens text;
      int found = 0;
      for (int i = 0; i < 400; ++i) {
        text.push_back(static_cast<std::int32_t>(rng.below(alphabet)));
        if (i % 3 == 1) continue;  // text may grow by more than a token between look-ups
        index.extend(text);
        const std::int64_t limit = rng.between(0, 15);
        const Tokens drafted = index.continuation(text, limit);
        ASSERT_EQ(drafted, search(text, options, limit)) << "after " << text.size() << " tokens";
        found += drafted.empty() ? 0 : 1;
      }
      EXPECT_GT(found, 5);
    }
  }
}

TEST(NgramTest, ContinuesRepetitionBeyondTheText) {
  NgramIndex index({});
  const Tokens text = {9, 1, 2, 3, 1, 2, 3, 1, 2};
  index.extend(text);
  EXPECT_EQ(index.continuation(text, 7), (Tokens{3, 1, 2, 3, 1, 2, 3}));
  EXPECT_EQ(index.continuation(text, 0), Tokens());
}

TEST(NgramTest, SequencesAndRefusals) {
  const auto source = NgramDraft::create({});
  ASSERT_TRUE(is_ok(source));
  NgramDraft& drafts = **source;
  const Tokens one = {1, 2, 3, 1, 2};
  const Tokens two = {5, 5, 5, 1, 2};
  ASSERT_TRUE(is_ok(drafts.open(0, one)));
  ASSERT_TRUE(is_ok(drafts.open(7, two)));
  EXPECT_TRUE(refused(drafts.open(7, two), StatusCode::kFailedPrecondition, {"7"}));
  Sampler sampler{SamplingOptions{}};
  std::vector<Draft> out(2);
  ASSERT_TRUE(is_ok(
      drafts.draft(std::vector<DraftRequest>{{0, one, 2, &sampler}, {7, two, 2, &sampler}}, out)));
  EXPECT_EQ(out[0].tokens, (Tokens{3, 1}));
  EXPECT_EQ(out[1].tokens, Tokens()) << "another sequence's text";
  EXPECT_TRUE(out[0].proposals.empty()) << "certain";
  EXPECT_TRUE(refused(
      drafts.draft(std::vector<DraftRequest>{{3, one, 2, &sampler}}, std::span(out).first(1)),
      StatusCode::kFailedPrecondition, {"3"}));
  EXPECT_TRUE(
      refused(drafts.draft(std::vector<DraftRequest>{{0, std::span(one).first(4), 2, &sampler}},
                           std::span(out).first(1)),
              StatusCode::kInvalidArgument, {"4", "5"}));
  ASSERT_TRUE(is_ok(drafts.close(0)));
  EXPECT_TRUE(refused(drafts.close(0), StatusCode::kFailedPrecondition, {"0"}));
  ASSERT_TRUE(is_ok(drafts.open(0, two)));
  EXPECT_EQ(drafts.name(), "ngram");
  EXPECT_EQ((*NgramDraft::create({1, 3}))->name(), "ngram:1-3");
  for (const NgramOptions& bad : {NgramOptions{0, 3}, NgramOptions{4, 3}, NgramOptions{1, 17}}) {
    EXPECT_TRUE(refused(NgramDraft::create(bad), StatusCode::kInvalidArgument,
                        {std::to_string(bad.shortest), std::to_string(bad.longest)}));
  }
}

// ---- A draft model ----

class ModelDraftTest : public ModelTest {
 protected:
  /// The model's own greedy continuation of a text, by decoding in place.
  static Tokens greedy(const Tokens& text, std::int64_t count) {
    const auto e = loaded().engine({.decode = DecodeMode::kPlain, .context = 512});
    const std::int32_t s = open_sequence(*e);
    const auto vocab = static_cast<std::size_t>(e->model().vocab_size);
    Logits logits = prompt_step(*e, s, text);
    Tokens out;
    for (std::int64_t i = 0; i < count; ++i) {
      out.push_back(argmax(std::span(logits).last(vocab)));
      if (i + 1 < count) logits = decode_step(*e, s, out.back());
    }
    return out;
  }

  static std::unique_ptr<ModelDraft> model_draft(int tokens, std::int64_t sequences) {
    auto source = ModelDraft::create(loaded().model, loaded().backend, loaded().context,
                                     {.name = "a",
                                      .draft_tokens = tokens,
                                      .sequences = sequences,
                                      .context = 512,
                                      .poison = true});
    EXPECT_TRUE(is_ok(source));
    return source.ok() ? std::move(source).value() : nullptr;
  }
};

INSTANTIATE_TEST_SUITE_P(Models, ModelDraftTest, ::testing::Values("nemotron-h-a", kRandomQwen35),
                         parameter_name);

/// Whatever is accepted of each draft, nothing to all of it, the next draft is the model's own
/// continuation of the text: what was rejected has left no trace in its state (C29, C33, C35).
TEST_P(ModelDraftTest, FollowsWhatWasAccepted) {
  for (const int tokens : {1, 2, 7, 15}) {
    const auto source = model_draft(tokens, 3);
    Rng rng(static_cast<std::uint64_t>(tokens));
    const auto random = [&] { return static_cast<std::int32_t>(rng.below(259)); };
    std::vector<Tokens> texts(3);
    for (std::size_t i = 0; i < texts.size(); ++i) {
      for (std::size_t t = 0; t < 1 + 5 * i; ++t) texts[i].push_back(random());
      ASSERT_TRUE(is_ok(source->open(static_cast<std::int32_t>(10 + i), texts[i])));
    }
    Sampler sampler{SamplingOptions{}};
    for (int round = 0; round < 25; ++round) {
      std::vector<DraftRequest> requests;
      for (std::size_t i = 0; i < texts.size(); ++i) {
        if (round % 5 == static_cast<int>(i)) continue;  // not every sequence in every step
        const std::int64_t limit = rng.chance(0.5) ? tokens : rng.between(0, tokens);
        requests.push_back({static_cast<std::int32_t>(10 + i), texts[i], limit, &sampler});
      }
      std::vector<Draft> drafts(requests.size());
      ASSERT_TRUE(is_ok(source->draft(requests, drafts)));
      for (std::size_t r = 0; r < requests.size(); ++r) {
        Tokens& text = texts[static_cast<std::size_t>(requests[r].sequence - 10)];
        const Tokens& drafted = drafts[r].tokens;
        ASSERT_EQ(drafted, greedy(text, requests[r].limit))
            << "K " << tokens << ", round " << round << ", sequence " << requests[r].sequence;
        if (rng.chance(0.15)) continue;  // the target's step failed: the text is the same next time
        const auto accepted = rng.between(0, std::ssize(drafted));
        text.insert(text.end(), drafted.begin(), drafted.begin() + accepted);
        // What the target drew instead; now and then much more text than a draft, as a prompt.
        for (int more = rng.chance(0.1) ? 9 : 1; more > 0; --more) text.push_back(random());
      }
    }
  }
}

/// Taking accepted tokens back moves state, convolution and keys together, as far as the ring goes;
/// beyond it the engine says from where the text must be read again (C33, C35, C62).
TEST_P(ModelDraftTest, TruncatedStateAndKeysGoBackTogether) {
  const EngineOptions options{.decode = DecodeMode::kReplay,
                              .window = 8,
                              .context = 64,
                              .rewindable = true,
                              .poison = true};
  const Tokens text = {4, 8, 15, 16, 23, 42, 7, 9, 11, 13};
  for (std::int64_t keep = 4; keep <= 10; ++keep) {
    const auto e = loaded().engine(options);
    const auto straight = loaded().engine(options);
    const std::int32_t s = open_sequence(*e);
    const std::int32_t r = open_sequence(*straight);
    prompt_step(*e, s, std::span(text).first(4));
    prompt_step(*straight, r, std::span(text).first(4));
    for (std::size_t i = 4; i < 10; ++i) {
      decode_step(*e, s, text[i]);
      if (static_cast<std::int64_t>(i) < keep) decode_step(*straight, r, text[i]);
    }
    ASSERT_TRUE(is_ok(e->truncate(s, keep)));
    EXPECT_EQ(*e->position(s), keep);
    for (const std::int32_t token : {1, 2, 3, 1, 2, 3}) {
      ASSERT_TRUE(same_bits(decode_step(*e, s, token), decode_step(*straight, r, token)))
          << "kept " << keep;
    }
  }
  const auto e = loaded().engine(options);
  const std::int32_t s = open_sequence(*e);
  prompt_step(*e, s, text);
  EXPECT_TRUE(refused(e->truncate(s, 9), StatusCode::kInvalidArgument, {"9", "re-evaluation"}));
  EXPECT_TRUE(refused(e->truncate(s, 11), StatusCode::kInvalidArgument, {"11"}));
  EngineOptions fixed = options;
  fixed.rewindable = false;
  const auto f = loaded().engine(fixed);
  const std::int32_t t = open_sequence(*f);
  prompt_step(*f, t, std::span(text).first(4));
  decode_step(*f, t, 5);
  EXPECT_TRUE(refused(f->truncate(t, 4), StatusCode::kUnsupported, {"4", "rewindable"}));
  EXPECT_EQ(*f->position(t), 5);
}

TEST_P(ModelDraftTest, Refusals) {
  for (const int tokens : {0, 16}) {
    EXPECT_TRUE(refused(ModelDraft::create(loaded().model, loaded().backend, loaded().context,
                                           {.name = "a", .draft_tokens = tokens}),
                        StatusCode::kInvalidArgument, {std::to_string(tokens), "15"}));
  }
  const auto source = model_draft(2, 1);
  const Tokens text = {1, 2, 3};
  Sampler sampler{SamplingOptions{}};
  std::vector<Draft> out(1);
  const auto draft = [&](std::int32_t sequence, const Tokens& tokens, std::int64_t limit) {
    return source->draft(std::vector<DraftRequest>{{sequence, tokens, limit, &sampler}}, out);
  };
  EXPECT_TRUE(refused(draft(0, text, 1), StatusCode::kFailedPrecondition, {"0"}));
  ASSERT_TRUE(is_ok(source->open(0, text)));
  EXPECT_TRUE(refused(source->open(0, text), StatusCode::kFailedPrecondition, {"0"}));
  EXPECT_TRUE(refused(source->open(1, text), StatusCode::kResourceExhausted, {"1"}));
  EXPECT_TRUE(refused(draft(0, text, 3), StatusCode::kInvalidArgument, {"3", "2"}));
  EXPECT_TRUE(refused(draft(0, {1}, 1), StatusCode::kInvalidArgument, {"1", "2"}));
  ASSERT_TRUE(is_ok(source->close(0)));
  ASSERT_TRUE(is_ok(source->open(1, text))) << "closing gives the place back";
}

}  // namespace
}  // namespace replayssm::testing
