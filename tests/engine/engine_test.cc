// The engine from its contract: rows of every kind in one step, slots that are used again, drafts
// that are taken back, and calls that must be refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "runtime/generate.h"
#include "support/model_test.h"
#include "support/rng.h"

namespace replayssm::testing {
namespace {

Tokens random_tokens(std::int64_t count, std::uint64_t seed, std::int64_t vocab) {
  Rng rng(seed);
  Tokens out;
  for (std::int64_t i = 0; i < count; ++i) {
    out.push_back(static_cast<std::int32_t>(rng.below(vocab)));
  }
  return out;
}

class EngineTest : public ModelTest {
 protected:
  /// Between runs of different schedules (in place, by replay, in chunks), of logits of order 10. A
  /// bf16 KV cache makes more of a last bit.
  static float schedule_bound() {
    return loaded().model->description().dtype == DType::kF32 ? 1e-4f : 2e-3f;
  }

  Tokens tokens(std::int64_t count, std::uint64_t seed) const {
    return random_tokens(count, seed, vocab());
  }

  std::unique_ptr<Engine> engine(DecodeMode decode, int window, int drafts, std::int64_t sequences,
                                 bool poison = true, DType state = DType::kF32) const {
    return loaded().engine({.decode = decode,
                            .window = window,
                            .draft_capacity = drafts,
                            .state = state,
                            .sequences = sequences,
                            .context = 256,
                            .poison = poison});
  }

  std::span<const float> at(const Logits& logits, std::int64_t index) const {
    return std::span(logits).subspan(static_cast<std::size_t>(index * vocab()),
                                     static_cast<std::size_t>(vocab()));
  }

  /// Logits after every token of `stream`: a prompt of one token, the rest decoded in place.
  Logits plain_logits(const Tokens& stream) const {
    const auto e = engine(DecodeMode::kPlain, 1, 1, 1);
    const std::int32_t s = open_sequence(*e);
    Logits out = prompt_step(*e, s, std::span(stream).first(1));
    for (std::size_t i = 1; i < stream.size(); ++i) {
      const Logits next = decode_step(*e, s, stream[i]);
      out.insert(out.end(), next.begin(), next.end());
    }
    return out;
  }
};

struct Mode {
  DecodeMode decode;
  int window;
  DType state = DType::kF32;
};

constexpr Mode kModes[] = {{DecodeMode::kPlain, 1},
                           {DecodeMode::kReplay, 4},
                           {DecodeMode::kReplay, 16},
                           {DecodeMode::kReplay, 4, DType::kBF16}};

// ---- Rows of different kinds ----

/// What one sequence does, as steps that can run alone or beside other sequences.
struct Part {
  Phase phase;
  Tokens tokens;
  std::int64_t accepted;
};
using Script = std::vector<Part>;

std::vector<Logits> run_scripts(Engine& engine, const std::vector<Script>& scripts,
                                const std::vector<std::int32_t>& order) {
  std::vector<std::int32_t> sequences;
  for (std::size_t i = 0; i < scripts.size(); ++i) sequences.push_back(open_sequence(engine));
  std::vector<Logits> out(scripts.size());
  for (std::size_t step = 0;; ++step) {
    std::vector<Work> work;
    std::vector<std::int64_t> accepted;
    std::vector<std::size_t> who;
    for (const std::int32_t index : order) {
      const auto i = static_cast<std::size_t>(index);
      if (step >= scripts[i].size()) continue;
      const Part& part = scripts[i][step];
      work.push_back({.sequence = sequences[i],
                      .phase = part.phase,
                      .tokens = part.tokens,
                      .logits = static_cast<std::int64_t>(part.tokens.size())});
      accepted.push_back(part.accepted);
      who.push_back(i);
    }
    if (work.empty()) break;
    const Logits logits = run_step(engine, work);
    EXPECT_TRUE(is_ok(engine.commit(accepted)));
    std::size_t row = 0;
    const auto vocab = static_cast<std::size_t>(engine.model().vocab_size);
    for (std::size_t k = 0; k < who.size(); ++k) {
      const std::size_t count = work[k].tokens.size() * vocab;
      if (logits.size() < row + count) return out;
      out[who[k]].insert(out[who[k]].end(), logits.begin() + static_cast<std::ptrdiff_t>(row),
                         logits.begin() + static_cast<std::ptrdiff_t>(row + count));
      row += count;
    }
  }
  for (const std::int32_t sequence : sequences) EXPECT_TRUE(is_ok(engine.close(sequence)));
  return out;
}

/// C25: every mix of prompt, decode and verify rows in one step (each of the three kinds present or
/// not, in every assignment to sequences), bit for bit what each sequence computes alone.
TEST_P(EngineTest, MixedRowsEqualEachRowAlone) {
  constexpr std::array<Phase, 3> kPhases = {Phase::kPrompt, Phase::kDecode, Phase::kVerify};
  for (const Mode& mode : kModes) {
    SCOPED_TRACE(std::string(to_string(mode.decode)) + " " + std::to_string(mode.window));
    const auto shared = engine(mode.decode, mode.window, 3, 3, true, mode.state);
    const auto alone = engine(mode.decode, mode.window, 3, 3, true, mode.state);
    for (int mix = 0; mix < 27; ++mix) {
      SCOPED_TRACE("mix " + std::to_string(mix));
      std::vector<Script> scripts;
      int rest = mix;
      for (std::uint64_t i = 0; i < 3; ++i, rest /= 3) {
        const Phase phase = kPhases[static_cast<std::size_t>(rest % 3)];
        // Different lengths, so that rings stand at different places.
        Script script{{Phase::kPrompt, tokens(static_cast<std::int64_t>(3 + 4 * i), i), 0},
                      {Phase::kDecode, tokens(1, 10 + i), 1},
                      {phase, tokens(phase == Phase::kDecode ? 1 : 3, 20 + i), 0},
                      {Phase::kDecode, tokens(1, 30 + i), 1}};
        script[0].accepted = static_cast<std::int64_t>(script[0].tokens.size());
        script[2].accepted = phase == Phase::kVerify ? 2 : phase == Phase::kPrompt ? 3 : 1;
        scripts.push_back(std::move(script));
      }
      const std::vector<Logits> together = run_scripts(*shared, scripts, {0, 1, 2});
      const std::vector<Logits> reversed = run_scripts(*shared, scripts, {2, 0, 1});
      for (std::size_t i = 0; i < 3; ++i) {
        const std::vector<Logits> own = run_scripts(*alone, {scripts[i]}, {0});
        ASSERT_FALSE(own[0].empty());
        ASSERT_TRUE(same_bits(together[i], own[0])) << "sequence " << i;
        ASSERT_TRUE(same_bits(reversed[i], own[0])) << "sequence " << i << ", other order";
      }
    }
  }
}

/// C48, C49: four sequences of different prompts, each advancing in its own slot of an interleaved
/// schedule and on more threads, have the logits they have alone.
TEST_P(EngineTest, InterleavedSequencesDoNotSeeEachOther) {
  for (const Mode& mode : kModes) {
    SCOPED_TRACE(std::string(to_string(mode.decode)) + " " + std::to_string(mode.window));
    std::vector<Script> scripts;
    for (std::uint64_t i = 0; i < 4; ++i) {
      Script script;
      const auto length = static_cast<std::int64_t>(1 + 6 * i);
      script.push_back({Phase::kPrompt, tokens(length, 40 + i), length});
      for (std::uint64_t t = 0; t < 24; ++t) {
        script.push_back({Phase::kDecode, tokens(1, 50 + 100 * i + t), 1});
      }
      scripts.push_back(std::move(script));
    }
    const auto shared = loaded(3).engine({.decode = mode.decode,
                                          .window = mode.window,
                                          .state = mode.state,
                                          .sequences = 4,
                                          .context = 64,
                                          .poison = true});
    const std::vector<Logits> together = run_scripts(*shared, scripts, {0, 1, 2, 3});
    // One-token steps of one sequence after the other: slots are data, not something to remember.
    std::vector<Logits> turns(4);
    std::array<std::int32_t, 4> s{};
    for (std::int32_t& sequence : s) sequence = open_sequence(*shared);
    for (std::size_t t = 0; t < scripts[0].size(); ++t) {
      for (const std::size_t i : {2u, 0u, 3u, 1u}) {
        const Part& part = scripts[i][t];
        const Logits logits =
            advance(*shared, {{.sequence = s[i],
                               .phase = part.phase,
                               .tokens = part.tokens,
                               .logits = static_cast<std::int64_t>(part.tokens.size())}});
        turns[i].insert(turns[i].end(), logits.begin(), logits.end());
      }
    }
    const auto alone = engine(mode.decode, mode.window, 1, 1, true, mode.state);
    for (std::size_t i = 0; i < 4; ++i) {
      const std::vector<Logits> own = run_scripts(*alone, {scripts[i]}, {0});
      ASSERT_TRUE(same_bits(together[i], own[0])) << "sequence " << i << " in shared steps";
      ASSERT_TRUE(same_bits(turns[i], own[0])) << "sequence " << i << " in turns";
    }
  }
}

/// C49 for prompts: packed prompt rows of different lengths, and the same prompt with the work
/// spread over other numbers of threads.
TEST_P(EngineTest, PromptRowsDoNotDependOnNeighboursOrThreads) {
  const std::int64_t lengths[] = {5, 1, 16, 33, 11};
  const auto shared = engine(DecodeMode::kPlain, 1, 1, 5);
  std::vector<Tokens> prompts;
  std::vector<Work> work;
  for (std::size_t i = 0; i < std::size(lengths); ++i) {
    prompts.push_back(tokens(lengths[i], 60 + i));
  }
  for (const Tokens& prompt : prompts) {
    work.push_back({.sequence = open_sequence(*shared),
                    .phase = Phase::kPrompt,
                    .tokens = prompt,
                    .logits = static_cast<std::int64_t>(prompt.size())});
  }
  const Logits together = advance(*shared, work);
  ASSERT_FALSE(together.empty());
  for (const int threads : {2, 3}) {
    const LoadedModel other(model_folder(GetParam()), threads);
    std::size_t from = 0;
    for (const Tokens& prompt : prompts) {
      const auto alone = other.engine({.decode = DecodeMode::kPlain, .context = 64});
      const Logits own = prompt_step(*alone, open_sequence(*alone), prompt);
      ASSERT_TRUE(same_bits(std::span(together).subspan(from, own.size()), own))
          << prompt.size() << " tokens, " << threads << " threads";
      from += own.size();
    }
  }
}

/// Rows may ask for logits of their last tokens only, each for another number.
TEST_P(EngineTest, LogitsOfTheLastTokens) {
  const auto e = engine(DecodeMode::kReplay, 4, 3, 3);
  const std::array<Tokens, 3> rows = {tokens(9, 63), tokens(5, 64), tokens(3, 65)};
  const auto step = [&](const std::array<std::int64_t, 3>& counts) {
    std::array<std::int32_t, 3> s{};
    for (std::int32_t& sequence : s) sequence = open_sequence(*e);
    prompt_step(*e, s[2], rows[0]);
    std::vector<Work> work;
    for (std::size_t i = 0; i < 3; ++i) {
      work.push_back({.sequence = s[i],
                      .phase = i == 2 ? Phase::kVerify : Phase::kPrompt,
                      .tokens = rows[i],
                      .logits = counts[i]});
    }
    Logits logits = advance(*e, work);
    for (const std::int32_t sequence : s) EXPECT_TRUE(is_ok(e->close(sequence)));
    return logits;
  };
  const Logits all = step({9, 5, 3});
  for (const std::array<std::int64_t, 3>& counts :
       {std::array<std::int64_t, 3>{1, 1, 1}, {4, 0, 2}, {0, 5, 1}, {8, 2, 0}, {0, 0, 3}}) {
    Logits want;
    for (std::size_t i = 0, row = 0; i < 3; row += rows[i++].size()) {
      for (std::size_t t = rows[i].size() - static_cast<std::size_t>(counts[i]); t < rows[i].size();
           ++t) {
        const auto logits = at(all, static_cast<std::int64_t>(row + t));
        want.insert(want.end(), logits.begin(), logits.end());
      }
    }
    // Near, not equal: the matrix library may add in another order for another number of tokens.
    ASSERT_TRUE(near(step(counts), want, 1e-5f)) << counts[0] << counts[1] << counts[2];
  }
}

/// C96: a verify row is computed as its tokens would be one by one, by the same kernels: the first
/// token bit for bit, later ones, whose records come from other steps, up to the order of sums.
TEST_P(EngineTest, VerifyRowEqualsItsTokensOneByOne) {
  for (const DType state : {DType::kF32, DType::kBF16}) {
    const auto together = engine(DecodeMode::kReplay, 16, 5, 1, true, state);
    const auto single = engine(DecodeMode::kReplay, 16, 5, 1, true, state);
    const std::int32_t t = open_sequence(*together);
    const std::int32_t s = open_sequence(*single);
    prompt_step(*together, t, tokens(12, 66));
    prompt_step(*single, s, tokens(12, 66));
    for (const std::int64_t count : {5, 2, 4}) {  // 11 records, then 5 more would just fit
      const Tokens row = tokens(count, static_cast<std::uint64_t>(67 + count));
      const Logits found = advance(
          *together, {{.sequence = t, .phase = Phase::kVerify, .tokens = row, .logits = count}});
      Logits want;
      for (const std::int32_t token : row) {
        const Logits next = decode_step(*single, s, token);
        want.insert(want.end(), next.begin(), next.end());
      }
      if (*together->position(t) == 12 + count) {  // before the two have met other last bits
        ASSERT_TRUE(same_bits(at(found, 0), at(want, 0))) << count << ", " << to_string(state);
      }
      ASSERT_TRUE(near(found, want, schedule_bound())) << count << ", " << to_string(state);
    }
  }
}

/// C21: a prompt, or the last chunk of one, of exactly T tokens is a prompt, not a verify row.
TEST_P(EngineTest, PromptsOfDraftLengthAreStillPrompts) {
  for (const int drafts : {2, 3, 5}) {
    for (const Mode& mode : kModes) {
      if (mode.window < drafts && mode.decode == DecodeMode::kReplay) continue;
      SCOPED_TRACE("T " + std::to_string(drafts) + ", " + to_string(mode.decode) + " " +
                   std::to_string(mode.window));
      const auto with = engine(mode.decode, mode.window, drafts, 4, true, mode.state);
      const auto without = engine(mode.decode, mode.window, 1, 4, true, mode.state);
      for (const std::vector<std::int64_t>& chunks :
           {std::vector<std::int64_t>{drafts}, {7, drafts}, {drafts, drafts}, {1, drafts}, {1}}) {
        // A batch of such prompts: none of them may be taken for a verify batch either.
        std::array<std::array<std::int32_t, 3>, 2> s{};
        for (std::size_t i = 0; i < 3; ++i) {
          s[0][i] = open_sequence(*with);
          s[1][i] = open_sequence(*without);
        }
        for (std::size_t c = 0; c < chunks.size(); ++c) {
          std::array<Logits, 2> logits;
          std::vector<Tokens> chunk;
          for (std::uint64_t i = 0; i < 3; ++i) chunk.push_back(tokens(chunks[c], 70 + 10 * c + i));
          for (std::size_t e = 0; e < 2; ++e) {
            std::vector<Work> work;
            for (std::size_t i = 0; i < 3; ++i) {
              work.push_back({.sequence = s[e][i],
                              .phase = Phase::kPrompt,
                              .tokens = chunk[i],
                              .logits = chunks[c]});
            }
            logits[e] = advance(e == 0 ? *with : *without, work);
          }
          ASSERT_TRUE(same_bits(logits[0], logits[1])) << "chunk " << c;
        }
        for (std::uint64_t t = 0; t < 20; ++t) {
          const std::int32_t token = tokens(1, 90 + t)[0];
          const Logits a = decode_step(*with, s[0][1], token);
          const Logits b = decode_step(*without, s[1][1], token);
          if (mode.decode == DecodeMode::kPlain) {
            ASSERT_TRUE(same_bits(a, b)) << "decoded token " << t;
          } else if (mode.state == DType::kF32) {
            ASSERT_TRUE(near(a, b, schedule_bound())) << "decoded token " << t;
          }
        }
        for (std::size_t i = 0; i < 3; ++i) {
          ASSERT_TRUE(is_ok(with->close(s[0][i])));
          ASSERT_TRUE(is_ok(without->close(s[1][i])));
        }
      }
    }
  }
}

/// How a prompt is cut does not change what follows beyond rounding.
TEST_P(EngineTest, PromptChunkingStaysWithinRounding) {
  const Tokens stream = tokens(40, 100);
  const Logits reference = plain_logits(stream);
  for (const std::vector<std::size_t>& chunks :
       {std::vector<std::size_t>{40}, {17, 23}, {39, 1}, {1, 39}, {2, 3, 1, 34}}) {
    const auto e = engine(DecodeMode::kPlain, 1, 1, 1);
    const std::int32_t s = open_sequence(*e);
    std::size_t from = 0;
    for (const std::size_t count : chunks) {
      const Logits logits = prompt_step(*e, s, std::span(stream).subspan(from, count));
      const auto size = static_cast<std::size_t>(vocab());
      ASSERT_TRUE(
          near(logits, std::span(reference).subspan(from * size, count * size), schedule_bound()))
          << "chunk of " << count << " at " << from;
      from += count;
    }
    EXPECT_EQ(*e->position(s), 40);
  }
}

// ---- Slots ----

/// C23: a one-token prompt starts from zero whatever the slot's previous owner left, also when it
/// shares its step with rows that decode and verify.
TEST_P(EngineTest, OneTokenPromptInDirtySlot) {
  const Tokens first = tokens(1, 110);
  for (const bool poison : {false, true}) {
    for (const Mode& mode : kModes) {
      const auto fresh = engine(mode.decode, mode.window, 3, 3, poison, mode.state);
      const std::int32_t f = open_sequence(*fresh);
      Logits want = prompt_step(*fresh, f, first);
      for (std::uint64_t t = 0; t < 10; ++t) {
        const Logits next = decode_step(*fresh, f, tokens(1, 111 + t)[0]);
        want.insert(want.end(), next.begin(), next.end());
      }
      const auto e = engine(mode.decode, mode.window, 3, 3, poison, mode.state);
      const std::int32_t other = open_sequence(*e);
      prompt_step(*e, other, tokens(9, 120));
      for (const std::int64_t length : {1, 3, 30}) {
        const std::int32_t dirty = open_sequence(*e);
        prompt_step(*e, dirty, tokens(length, 121));
        for (std::uint64_t t = 0; t < 7; ++t) decode_step(*e, dirty, tokens(1, 122 + t)[0]);
        ASSERT_TRUE(is_ok(e->close(dirty)));
        const std::int32_t s = open_sequence(*e);
        ASSERT_EQ(s, dirty) << "the slot must be used again for this test to mean anything";
        EXPECT_EQ(*e->position(s), 0);
        const Tokens drafts = tokens(3, 130);
        const Logits logits = run_step(
            *e, {{.sequence = other, .phase = Phase::kVerify, .tokens = drafts, .logits = 0},
                 {.sequence = s, .phase = Phase::kPrompt, .tokens = first}});
        ASSERT_TRUE(is_ok(e->commit(std::array<std::int64_t, 2>{1, 1})));
        Logits found = logits;
        for (std::uint64_t t = 0; t < 10; ++t) {
          const Logits next = decode_step(*e, s, tokens(1, 111 + t)[0]);
          found.insert(found.end(), next.begin(), next.end());
        }
        ASSERT_TRUE(same_bits(found, want)) << "after " << length << " dirty tokens";
        ASSERT_TRUE(is_ok(e->close(s)));
      }
    }
  }
}

/// C42: a sequence that is closed, and later continued by a prompt of everything so far, goes on
/// with the same greedy tokens: once, twice, and before there is any output.
TEST_P(EngineTest, PreemptedSequenceResumes) {
  constexpr std::size_t kLength = 40;
  const Tokens prompt = tokens(13, 140);
  for (const Mode& mode : {kModes[0], kModes[1], kModes[2]}) {
    const auto greedy = [&](const std::vector<std::size_t>& interruptions) {
      const auto e = engine(mode.decode, mode.window, 1, 2, false);
      std::int32_t s = open_sequence(*e);
      Tokens text = prompt;
      Logits logits = prompt_step(*e, s, prompt);
      for (std::size_t made = 0; made < kLength; ++made) {
        if (std::find(interruptions.begin(), interruptions.end(), made) != interruptions.end()) {
          EXPECT_TRUE(is_ok(e->close(s)));
          const std::int32_t intruder = open_sequence(*e);
          EXPECT_EQ(intruder, s);
          prompt_step(*e, intruder, tokens(21, 141 + made));
          decode_step(*e, intruder, 5);
          EXPECT_TRUE(is_ok(e->close(intruder)));
          s = open_sequence(*e);
          logits = prompt_step(*e, s, text);
        }
        const auto last = at(logits, static_cast<std::int64_t>(logits.size()) / vocab() - 1);
        const std::int32_t token = argmax(last);
        text.push_back(token);
        logits = decode_step(*e, s, token);
      }
      return text;
    };
    const Tokens uninterrupted = greedy({});
    EXPECT_EQ(greedy({20}), uninterrupted);
    EXPECT_EQ(greedy({0}), uninterrupted);
    EXPECT_EQ(greedy({7, 20}), uninterrupted);
    EXPECT_EQ(greedy({0, 1, 39}), uninterrupted);
  }
}

/// C44, C46, C91: every sequence asked for can be used at once, one more is refused, and closing
/// gives everything back.
TEST_P(EngineTest, SequencesUpToTheCapacity) {
  const auto e = engine(DecodeMode::kReplay, 4, 1, 3);
  for (int round = 0; round < 300; ++round) {
    std::vector<Work> work;
    const Tokens token = tokens(1, 150);
    for (int i = 0; i < 3; ++i) {
      work.push_back({.sequence = open_sequence(*e), .phase = Phase::kPrompt, .tokens = token});
    }
    ASSERT_TRUE(refused(e->open(), StatusCode::kResourceExhausted, {"3"}));
    if (round % 100 == 0) {
      ASSERT_EQ(std::ssize(advance(*e, work)), 3 * vocab());
    }
    for (const Work& w : work) ASSERT_TRUE(is_ok(e->close(w.sequence)));
  }
  EXPECT_EQ(e->pool().free_slots(), 3);
}

// ---- Verify rows ----

/// Every accepted count 0..T, round after round, with junk behind the accepted tokens: logits are
/// those of plain decoding, so state, convolution inputs and keys were all taken back (C19, C20,
/// C28, C29, C35, C38).
TEST_P(EngineTest, RejectedDraftsLeaveNothingBehind) {
  const Tokens stream = tokens(150, 160);
  const Logits reference = plain_logits(stream);
  for (const int drafts : {1, 2, 4, 5}) {
    for (const Mode& mode : {Mode{DecodeMode::kPlain, 1}, Mode{DecodeMode::kReplay, drafts},
                             Mode{DecodeMode::kReplay, 8}, Mode{DecodeMode::kReplay, 16}}) {
      SCOPED_TRACE("T " + std::to_string(drafts) + ", " + to_string(mode.decode) + " " +
                   std::to_string(mode.window));
      const auto e = engine(mode.decode, mode.window, drafts, 1);
      Rng rng(161);
      const std::int32_t s = open_sequence(*e);
      std::size_t at_token = 7;
      prompt_step(*e, s, std::span(stream).first(at_token));
      for (int round = 0; at_token + 6 < stream.size(); ++round) {
        if (round % 4 == 3) {  // a step without drafts in between
          ASSERT_TRUE(near(decode_step(*e, s, stream[at_token]),
                           at(reference, static_cast<std::int64_t>(at_token)), schedule_bound()))
              << "decode at " << at_token;
          ++at_token;
          continue;
        }
        const std::int64_t count = rng.between(1, drafts);
        const std::int64_t accepted = round % (drafts + 1) <= count ? round % (drafts + 1) : count;
        Tokens row(stream.begin() + static_cast<std::ptrdiff_t>(at_token),
                   stream.begin() + static_cast<std::ptrdiff_t>(at_token) + accepted);
        while (std::ssize(row) < count) {
          row.push_back(static_cast<std::int32_t>(rng.below(vocab())));
        }
        const Logits logits = run_step(
            *e, {{.sequence = s, .phase = Phase::kVerify, .tokens = row, .logits = count}});
        ASSERT_EQ(std::ssize(logits), count * vocab());
        for (std::int64_t i = 0; i < accepted; ++i) {
          ASSERT_TRUE(near(at(logits, i), at(reference, static_cast<std::int64_t>(at_token) + i),
                           schedule_bound()))
              << "row at " << at_token << ", token " << i << " of " << count << ", accepted "
              << accepted;
        }
        EXPECT_EQ(*e->position(s), static_cast<std::int64_t>(at_token)) << "before the commit";
        ASSERT_TRUE(is_ok(e->commit(std::span(&accepted, 1))));
        at_token += static_cast<std::size_t>(accepted);
        ASSERT_EQ(*e->position(s), static_cast<std::int64_t>(at_token));
      }
    }
  }
}

/// Rejecting everything, many times over, is as if nothing had run, bit for bit.
TEST_P(EngineTest, RejectedStepsDoNotCount) {
  const auto e = engine(DecodeMode::kReplay, 8, 4, 1);
  const auto quiet = engine(DecodeMode::kReplay, 8, 4, 1);
  const Tokens prompt = tokens(5, 170);
  const std::int32_t s = open_sequence(*e);
  const std::int32_t q = open_sequence(*quiet);
  prompt_step(*e, s, prompt);
  prompt_step(*quiet, q, prompt);
  const std::int64_t none = 0;
  for (std::uint64_t t = 0; t < 12; ++t) {
    // Only while the next row does not flush: a flush moves when it is done on a rejected step.
    if (t % 5 < 4) {
      const Tokens junk = tokens(4, 171 + t);
      run_step(*e, {{.sequence = s, .phase = Phase::kVerify, .tokens = junk, .logits = 4}});
      ASSERT_TRUE(is_ok(e->commit(std::span(&none, 1))));
      run_step(*e, {{.sequence = s, .phase = Phase::kDecode, .tokens = std::span(junk).first(1)}});
      ASSERT_TRUE(is_ok(e->commit(std::span(&none, 1))));
    }
    const std::int32_t token = tokens(1, 190 + t)[0];
    ASSERT_TRUE(same_bits(decode_step(*e, s, token), decode_step(*quiet, q, token))) << t;
  }
}

/// C27: every draft capacity there is works or is refused when the engine is made, as are windows.
TEST_P(EngineTest, LimitsOfWindowAndDrafts) {
  const auto create = [&](DecodeMode decode, int window, int drafts) {
    return Engine::create(loaded().model, loaded().backend, loaded().context,
                          {.decode = decode,
                           .window = window,
                           .draft_capacity = drafts,
                           .context = 64,
                           .poison = true});
  };
  for (int drafts = 1; drafts <= 16; ++drafts) {
    auto e = create(DecodeMode::kReplay, 16, drafts);
    ASSERT_TRUE(is_ok(e)) << drafts;
    const Tokens row = tokens(drafts, 200);
    const std::int32_t s = open_sequence(**e);
    prompt_step(**e, s, row);
    const Logits logits =
        run_step(**e, {{.sequence = s, .phase = Phase::kVerify, .tokens = row, .logits = drafts}});
    EXPECT_EQ(std::ssize(logits), drafts * vocab());
    ASSERT_TRUE(is_ok((*e)->commit(std::array<std::int64_t, 1>{drafts})));
    const Tokens longer = tokens(drafts + 1, 201);
    if (drafts < 16) {
      EXPECT_TRUE(refused(
          (*e)->run(std::array{Work{.sequence = s, .phase = Phase::kVerify, .tokens = longer}}),
          StatusCode::kInvalidArgument, {std::to_string(drafts), std::to_string(drafts + 1)}));
    }
  }
  EXPECT_TRUE(refused(create(DecodeMode::kReplay, 16, 17), StatusCode::kInvalidArgument, {"17"}));
  EXPECT_TRUE(refused(create(DecodeMode::kReplay, 16, 0), StatusCode::kInvalidArgument, {"0"}));
  EXPECT_TRUE(refused(create(DecodeMode::kPlain, 1, -3), StatusCode::kInvalidArgument, {"-3"}));
  EXPECT_TRUE(refused(create(DecodeMode::kReplay, 65, 1), StatusCode::kInvalidArgument, {"65"}));
  EXPECT_TRUE(refused(create(DecodeMode::kReplay, 0, 1), StatusCode::kInvalidArgument, {"0"}));
  EXPECT_TRUE(refused(create(DecodeMode::kReplay, -1, 1), StatusCode::kInvalidArgument, {"-1"}));
  EXPECT_TRUE(is_ok(create(DecodeMode::kReplay, 64, 16)));
}

/// C97: what runs is what the plan says, also when drafts need a longer ring than was asked for.
TEST_P(EngineTest, PlanTellsTheWindow) {
  for (const auto& [window, drafts] : {std::pair{4, 1}, {4, 4}, {2, 5}}) {
    const auto e = Engine::create(
        loaded().model, loaded().backend, loaded().context,
        {.decode = DecodeMode::kReplay, .window = window, .draft_capacity = drafts, .context = 32});
    if (!e.ok()) continue;  // a refusal tells too
    EXPECT_TRUE((*e)->plan().replay);
    EXPECT_EQ((*e)->plan().window, (*e)->pool().options().limits.window);
    EXPECT_EQ((*e)->options().window, (*e)->pool().options().limits.window);
    EXPECT_FALSE((*e)->plan().reason.empty());
  }
  const auto plain = engine(DecodeMode::kPlain, 16, 1, 1);
  EXPECT_FALSE(plain->plan().replay);
  EXPECT_EQ(plain->plan().window, 0);
  const auto automatic = engine(DecodeMode::kAuto, 16, 1, 1);
  EXPECT_EQ(automatic->plan().window > 0, automatic->plan().replay);
  EXPECT_FALSE(automatic->plan().reason.empty());
}

/// State traffic of a decode step in place: the checkpoint once in each direction, no ring read.
TEST_P(EngineTest, DecodeTraffic) {
  const auto bytes = sequence_bytes(loaded().model->description(), {});
  ASSERT_TRUE(is_ok(bytes));
  const auto checkpoint = static_cast<std::int64_t>(bytes->state.checkpoint);
  for (const int window : {0, 4, 16}) {
    const auto e =
        engine(window == 0 ? DecodeMode::kPlain : DecodeMode::kReplay, std::max(1, window), 1, 1);
    const std::int32_t s = open_sequence(*e);
    prompt_step(*e, s, tokens(9, 210));
    EXPECT_EQ(e->take_decode_traffic().checkpoint_written, 0) << "a prompt is not decoding";
    const int steps = 4 * std::max(1, window);
    for (int t = 0; t < steps; ++t) decode_step(*e, s, 3);
    const StateTraffic traffic = e->take_decode_traffic();
    EXPECT_EQ(traffic.checkpoint_read, steps * checkpoint);
    if (window == 0) {
      EXPECT_EQ(traffic.checkpoint_written, steps * checkpoint);
    } else {
      EXPECT_LE(traffic.checkpoint_written, steps / window * checkpoint);
      EXPECT_GE(traffic.checkpoint_written, (steps / window - 1) * checkpoint);
      EXPECT_GT(traffic.ring_written, 0);
    }
    EXPECT_EQ(e->take_decode_traffic().checkpoint_read, 0) << "taken twice";
  }
}

// ---- Rounding ----

double rms_difference(const Logits& a, const Logits& b) {
  EXPECT_EQ(a.size(), b.size());
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    sum += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
  }
  return std::sqrt(sum / static_cast<double>(a.size()));
}

/// C76: one full pass over a text against a pass per token. In fp32 they agree tightly; with bf16
/// states and keys each has its own rounding noise, and cached decoding has no more of it.
TEST_P(EngineTest, FullPassAgainstCachedDecoding) {
  const Tokens stream = tokens(60, 220);
  const auto logits = [&](DecodeMode mode, int window, bool full, DType type) {
    const auto e = loaded().engine({.decode = mode,
                                    .window = window,
                                    .state = type,
                                    .kv = type,
                                    .context = 64,
                                    .poison = true});
    const std::int32_t s = open_sequence(*e);
    if (full) return prompt_step(*e, s, stream);
    Logits out;
    for (const std::int32_t token : stream) {
      const Logits next = decode_step(*e, s, token);
      out.insert(out.end(), next.begin(), next.end());
    }
    return out;
  };
  const Logits exact = logits(DecodeMode::kPlain, 1, true, DType::kF32);
  const double noise = rms_difference(logits(DecodeMode::kPlain, 1, true, DType::kBF16), exact);
  EXPECT_GT(noise, 1e-5) << "nothing was rounded";
  for (const auto& [mode, window] :
       {std::pair{DecodeMode::kPlain, 1}, {DecodeMode::kReplay, 4}, {DecodeMode::kReplay, 16}}) {
    SCOPED_TRACE(std::string(to_string(mode)) + " " + std::to_string(window));
    EXPECT_TRUE(near(logits(mode, window, false, DType::kF32), exact, 1e-4f));
    EXPECT_LE(rms_difference(logits(mode, window, false, DType::kBF16), exact), 1.25 * noise);
  }
}

/// C18: what is copied is the same bits, and 256 folds later replay is as close to plain decoding
/// as after the first ones, whatever order of sums a compiler chose.
TEST_P(EngineTest, ManyFoldsAndCopies) {
  constexpr int kWindow = 2;
  constexpr std::size_t kFolds = 256;
  const Tokens stream = tokens(kFolds * kWindow, 230);
  const auto engine_with = [&](DecodeMode mode) {
    return loaded().engine({.decode = mode,
                            .window = kWindow,
                            .kv = DType::kF32,
                            .sequences = 2,
                            .context = std::ssize(stream) + 1,
                            .poison = true});
  };
  const auto plain = engine_with(DecodeMode::kPlain);
  const auto replay = engine_with(DecodeMode::kReplay);
  const std::int32_t p = open_sequence(*plain);
  std::int32_t r = open_sequence(*replay);
  for (std::size_t i = 0; i < stream.size(); ++i) {
    // Of single tokens that magnify what is rounded elsewhere; the usual difference is 2e-6.
    ASSERT_TRUE(near(decode_step(*replay, r, stream[i]), decode_step(*plain, p, stream[i]), 3e-4f))
        << "token " << i;
    if (i % 97 != 0) continue;
    const auto image = replay->save(r);
    ASSERT_TRUE(is_ok(image));
    const std::int32_t copy = open_sequence(*replay);
    ASSERT_TRUE(is_ok(replay->load(copy, *image)));
    const auto again = replay->save(copy);
    ASSERT_TRUE(is_ok(again));
    ASSERT_EQ(*again, *image);
    ASSERT_TRUE(is_ok(replay->close(r)));
    r = copy;
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, EngineTest,
                         ::testing::Values("nemotron-h-a", "nemotron-h-b", "nemotron-h-c",
                                           kRandomQwen35),
                         parameter_name);

}  // namespace
}  // namespace replayssm::testing
