// Tokenizer on hand-made files (every behaviour and every refusal) and on real ones, against what
// Hugging Face tokenizers makes of the same texts (tests/data/tokenizer).
#include "text/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "engine/tiny_tokenizer.h"

namespace replayssm {
namespace {

using test::added_token;
using test::tiny_tokenizer;
using test::TinyTokenizer;
using Ids = std::vector<std::int32_t>;

Tokenizer parse(const TinyTokenizer& tiny) {
  Result<Tokenizer> tokenizer = Tokenizer::parse(tiny.json());
  if (!tokenizer.ok()) throw std::runtime_error(tokenizer.status().message());
  return std::move(tokenizer).value();
}

Ids encode(const Tokenizer& tokenizer, std::string_view text, bool add_special_tokens = false,
           bool parse_special = true) {
  Result<Ids> ids = tokenizer.encode(text, add_special_tokens, parse_special);
  if (!ids.ok()) throw std::runtime_error(ids.status().message());
  return *ids;
}

/// The tokens' bytes, with bars in between.
std::string bytes_of(const Tokenizer& tokenizer, const Ids& ids) {
  std::string out;
  for (const std::int32_t id : ids) {
    if (!out.empty()) out += '|';
    out += *tokenizer.token_bytes(id);
  }
  return out;
}

std::string load_error(const std::string& json) {
  const Result<Tokenizer> tokenizer = Tokenizer::parse(json);
  return tokenizer.ok() ? "loaded" : tokenizer.status().message();
}

/// A Split pattern.
std::string regex(const std::string& pattern) {
  return "{\"Regex\": " + test::json_string(pattern) + "}";
}

std::string split_json(const std::string& pattern, const std::string& behavior,
                       const std::string& invert = "false") {
  return R"({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": )" + pattern +
         R"(, "behavior": ")" + behavior + R"(", "invert": )" + invert +
         R"(}, {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})";
}

// --- merges ---------------------------------------------------------------------------------

TEST(Merges, LowestRankFirstThenLeftmost) {
  TinyTokenizer tiny;
  tiny.merges = {{"b", "c"}, {"a", "b"}, {"ab", "c"}, {"a", "a"}};
  const Tokenizer tokenizer = parse(tiny);
  EXPECT_EQ(bytes_of(tokenizer, encode(tokenizer, "abc")), "a|bc");  // rank 0 beats rank 1
  EXPECT_EQ(bytes_of(tokenizer, encode(tokenizer, "abab")), "ab|ab");
  EXPECT_EQ(bytes_of(tokenizer, encode(tokenizer, "aaa")), "aa|a");
  EXPECT_EQ(bytes_of(tokenizer, encode(tokenizer, "aaab")), "aa|ab");
}

TEST(Merges, StringsAndPairsAreTheSame) {
  TinyTokenizer tiny = tiny_tokenizer();
  const Ids as_strings = encode(parse(tiny), "hello wor 漢é12");
  tiny.merges_as_pairs = true;
  EXPECT_EQ(encode(parse(tiny), "hello wor 漢é12"), as_strings);
  EXPECT_LT(as_strings.size(), 10u);
}

TEST(Merges, IgnoreMergesTakesWholePieces) {
  TinyTokenizer tiny;
  tiny.merges = {{"b", "c"}};
  tiny.more_vocab = R"(, "abc": 400)";
  EXPECT_EQ(encode(parse(tiny), "abc"), (Ids{'a', 256}));
  tiny.model_options = R"("ignore_merges": true,)";
  EXPECT_EQ(encode(parse(tiny), "abc"), (Ids{400}));
  EXPECT_EQ(encode(parse(tiny), "abcd"), (Ids{'a', 256, 'd'}));
}

/// Straight from the definition.
std::vector<std::string> naive_bpe(const std::string& text,
                                   const std::vector<std::pair<std::string, std::string>>& merges) {
  std::vector<std::string> parts;
  for (const char c : text) parts.emplace_back(1, c);
  while (true) {
    std::size_t best_rank = merges.size();
    std::size_t best = 0;
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      for (std::size_t rank = 0; rank < best_rank; ++rank) {
        if (merges[rank].first == parts[i] && merges[rank].second == parts[i + 1]) {
          best_rank = rank;
          best = i;
        }
      }
    }
    if (best_rank == merges.size()) return parts;
    parts[best] += parts[best + 1];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

TEST(Merges, AgreeWithTheDefinitionAtEveryLength) {
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    TinyTokenizer tiny;
    tiny.pre_tokenizer = R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false})";
    std::vector<std::string> tokens = {"a", "b", "c"};
    std::set<std::pair<std::string, std::string>> seen;
    for (int i = 0; i < 30; ++i) {
      const std::string& left = tokens[random() % tokens.size()];
      const std::string& right = tokens[random() % tokens.size()];
      if (left.size() + right.size() > 12 || !seen.insert({left, right}).second) continue;
      tiny.merges.emplace_back(left, right);
      tokens.push_back(left + right);
    }
    const Tokenizer tokenizer = parse(tiny);
    for (int length = 1; length < 140; length += 1 + static_cast<int>(random() % 4)) {
      std::string text;
      for (int i = 0; i < length; ++i) text += "abc"[random() % 3];
      std::string expected;
      for (const std::string& part : naive_bpe(text, tiny.merges)) {
        expected += (expected.empty() ? "" : "|") + part;
      }
      // Twice: the second time may come from what was remembered.
      EXPECT_EQ(bytes_of(tokenizer, encode(tokenizer, text)), expected);
      EXPECT_EQ(bytes_of(tokenizer, encode(tokenizer, text)), expected);
    }
  }
}

TEST(Merges, AByteWithoutATokenIsAnError) {
  std::string json = TinyTokenizer().json();
  json.replace(json.find("\"z\": 122"), 8, "\"zz\": 122");
  const Result<Tokenizer> tokenizer = Tokenizer::parse(json);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_TRUE(tokenizer->encode("abc").ok());
  const auto ids = tokenizer->encode("fuzz");
  ASSERT_FALSE(ids.ok());
  EXPECT_EQ(ids.status().message(), "tokenizer.json has no token for byte 122 of 'fuzz'");
}

// --- pre-tokenization -----------------------------------------------------------------------

/// The pieces of `text`: every substring of it becomes a token that is taken whole.
std::string pieces(const std::string& pre_tokenizer, const std::string& text) {
  TinyTokenizer tiny;
  tiny.pre_tokenizer = pre_tokenizer;
  tiny.model_options = R"("ignore_merges": true,)";
  std::set<std::string> substrings;
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (std::size_t n = 1; i + n <= text.size(); ++n) {
      substrings.insert(text.substr(i, n));
      substrings.insert(text.substr(i, n).insert(0, 1, ' '));  // a piece may get a space
    }
  }
  int id = 1000;
  for (const std::string& substring : substrings) {
    if (substring.size() < 2) continue;
    tiny.more_vocab +=
        ", " + test::json_string(to_byte_level(substring)) + ": " + std::to_string(id++);
  }
  const Tokenizer tokenizer = parse(tiny);
  return bytes_of(tokenizer, encode(tokenizer, text));
}

TEST(PreTokenizer, Gpt2Pattern) {
  const std::string plain = R"({"type": "ByteLevel", "add_prefix_space": false})";
  EXPECT_EQ(pieces(plain, "Hello I'll  go, 12a"), "Hello| I|'ll| | go|,| 12|a");
  EXPECT_EQ(pieces(plain, "a \n b  "), "a| \n| b|  ");
  const std::string prefixing = R"({"type": "ByteLevel", "add_prefix_space": true})";
  EXPECT_EQ(pieces(prefixing, "Hello go"), " Hello| go");
  EXPECT_EQ(pieces(prefixing, " Hello"), " Hello");
}

TEST(PreTokenizer, PrefixSpaceIsGivenToEveryPiece) {
  const std::string steps =
      R"({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true},)"
      R"({"type": "ByteLevel", "add_prefix_space": true, "use_regex": false}]})";
  EXPECT_EQ(pieces(steps, "ab12"), " ab| 1| 2");
}

TEST(PreTokenizer, Digits) {
  const auto digits = [](const std::string& individual) {
    return R"({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": )" +
           individual +
           R"(}, {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})";
  };
  EXPECT_EQ(pieces(digits("true"), "ab123c"), "ab|1|2|3|c");
  EXPECT_EQ(pieces(digits("false"), "ab123c45"), "ab|123|c|45");
}

TEST(PreTokenizer, SplitBehaviors) {
  const std::string dash = R"({"String": "-"})";
  const std::string text = "the-final--cut-";
  EXPECT_EQ(pieces(split_json(dash, "Removed"), text), "the|final|cut");
  EXPECT_EQ(pieces(split_json(dash, "Isolated"), text), "the|-|final|-|-|cut|-");
  EXPECT_EQ(pieces(split_json(dash, "MergedWithPrevious"), text), "the-|final-|-|cut-");
  EXPECT_EQ(pieces(split_json(dash, "MergedWithNext"), text), "the|-final|-|-cut|-");
  EXPECT_EQ(pieces(split_json(dash, "Contiguous"), text), "the|-|final|--|cut|-");
  EXPECT_EQ(pieces(split_json(dash, "Removed", "true"), text), "-|-|-|-");
  EXPECT_EQ(pieces(split_json(regex("[a-z]+"), "Removed", "true"), text), "the|final|cut");
}

TEST(PreTokenizer, EmptyMatchesSplitBetweenCharacters) {
  EXPECT_EQ(pieces(split_json(regex("(?=é)"), "Isolated"), "aéé"), "a|é|é");
  EXPECT_EQ(pieces(split_json(regex("x*"), "Isolated"), "axxb"), "a|xx|b");
}

TEST(PreTokenizer, StepsSeeThePiecesOfTheOneBefore) {
  const std::string steps =
      R"({"type": "Sequence", "pretokenizers": [)"
      R"({"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}"}, "behavior": "Isolated"},)"
      R"({"type": "Sequence", "pretokenizers": [)"
      R"({"type": "Split", "pattern": {"Regex": "^."}, "behavior": "Isolated"},)"
      R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]}]})";
  EXPECT_EQ(pieces(steps, "1234abc"), "1|23|4|a|bc");
}

TEST(PreTokenizer, OnigurumaDialect) {
  // U+180E is no white space; marks and connectors are word characters.
  EXPECT_EQ(pieces(split_json(regex("\\s+"), "Removed"), "a \xE1\xA0\x8E\xE2\x80\xA8 b"),
            "a|\xE1\xA0\x8E|b");
  EXPECT_EQ(pieces(split_json(regex("[\\s-x]+"), "Removed"), "a -xb"), "a|b");
  EXPECT_EQ(pieces(split_json(regex("\\w+"), "Isolated"), "e\xCC\x81_2-a"), "e\xCC\x81_2|-|a");
  EXPECT_EQ(pieces(split_json(regex("^b"), "Isolated"), "a\nbc"), "a\n|b|c");
  EXPECT_EQ(pieces(split_json(regex("[]x\\]]+"), "Isolated"), "a]xb"), "a|]x|b");
}

TEST(PreTokenizer, RunawayRegexIsAnError) {
  TinyTokenizer tiny;
  tiny.pre_tokenizer = split_json(regex("(?:a|aa)+$"), "Isolated");
  const Tokenizer tokenizer = parse(tiny);
  EXPECT_TRUE(tokenizer.encode("aaaa").ok());
  const auto ids = tokenizer.encode(std::string(100, 'a') + "!");
  ASSERT_FALSE(ids.ok());
  EXPECT_EQ(ids.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(ids.status().message().find("regex '(?:a|aa)+$' failed at byte 0"), std::string::npos)
      << ids.status().message();
}

TEST(PreTokenizer, LongRunsAreFine) {
  TinyTokenizer tiny = tiny_tokenizer();
  tiny.pre_tokenizer = split_json(regex("\\p{L}+|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+|."), "Isolated");
  const Tokenizer tokenizer = parse(tiny);
  const std::string text = std::string(1'200'000, ' ') + "x" + std::string(200'000, 'l');
  EXPECT_EQ(*tokenizer.decode(encode(tokenizer, text)), text);
}

// --- normalization --------------------------------------------------------------------------

TEST(Normalizer, Nfc) {
  for (const char* normalizer :
       {R"({"type": "NFC"})", R"({"type": "Sequence", "normalizers": [{"type": "NFC"}]})"}) {
    TinyTokenizer tiny;
    tiny.normalizer = normalizer;
    const Tokenizer tokenizer = parse(tiny);
    const auto normalized = [&](std::string_view text) {
      return *tokenizer.decode(encode(tokenizer, text));
    };
    EXPECT_EQ(normalized("plain \xC3\xA9"), "plain \xC3\xA9");
    EXPECT_EQ(normalized("e\xCC\x81"), "\xC3\xA9");
    EXPECT_EQ(normalized("\xE1\x84\x80\xE1\x85\xA1"), "\xEA\xB0\x80");  // Hangul
    EXPECT_EQ(normalized("\xE2\x84\xAB"), "\xC3\x85");                  // ANGSTROM SIGN
    EXPECT_EQ(normalized("q\xCC\x87\xCC\xA3"), "q\xCC\xA3\xCC\x87");    // marks in order
    EXPECT_EQ(normalized(std::string_view("\0e\xCC\x81\0", 5)), std::string("\0\xC3\xA9\0", 4));
  }
  TinyTokenizer none;
  none.normalizer = R"({"type": "Sequence", "normalizers": []})";
  const Tokenizer tokenizer = parse(none);
  EXPECT_EQ(*tokenizer.decode(encode(tokenizer, "e\xCC\x81")), "e\xCC\x81");
}

// --- added tokens ---------------------------------------------------------------------------

TEST(AddedTokens, LongestOfThoseThatBeginFirst) {
  const Tokenizer tokenizer = parse(tiny_tokenizer());
  EXPECT_EQ(encode(tokenizer, "a<|end|>b"), (Ids{'a', 300, 'b'}));
  EXPECT_EQ(encode(tokenizer, "<|end|>!<|end|>"), (Ids{302, 300}));
  EXPECT_EQ(encode(tokenizer, "<<think>>"), (Ids{'<', 301, '>'}));
  EXPECT_EQ(encode(tokenizer, "<|en<think>"), (Ids{'<', '|', 'e', 'n', 301}));
}

TEST(AddedTokens, SpecialOnesCanBeOrdinaryText) {
  const Tokenizer tokenizer = parse(tiny_tokenizer());
  const Ids ids = encode(tokenizer, "<|end|>!<think>", false, false);
  EXPECT_EQ(ids.size(), 9u);  // the eight bytes, and <think>, which is not special
  EXPECT_EQ(ids.back(), 301);
  EXPECT_EQ(*tokenizer.decode(ids), "<|end|>!<think>");
}

TEST(AddedTokens, StripFlagsTakeWhiteSpace) {
  TinyTokenizer tiny;
  tiny.added_tokens = added_token(300, "<l>", "\"lstrip\": true, \"normalized\": false") + ", " +
                      added_token(301, "<r>", "\"rstrip\": true, \"normalized\": false");
  const Tokenizer tokenizer = parse(tiny);
  EXPECT_EQ(encode(tokenizer, "a \xE3\x80\x80\n<l> b"), (Ids{'a', 300, ' ', 'b'}));
  EXPECT_EQ(encode(tokenizer, "a <r> \t b"), (Ids{'a', ' ', 301, 'b'}));
  EXPECT_EQ(encode(tokenizer, "<r>  <l>  <r>"), (Ids{301, 300, ' ', ' ', 301}));
}

TEST(AddedTokens, SingleWordIsNotWithinAWord) {
  TinyTokenizer tiny;
  tiny.added_tokens = added_token(300, "cat", "\"single_word\": true, \"normalized\": false");
  const Tokenizer tokenizer = parse(tiny);
  const auto found = [&](std::string_view text) {
    const Ids ids = encode(tokenizer, text);
    return std::count(ids.begin(), ids.end(), 300);
  };
  EXPECT_EQ(found("cat"), 1);
  EXPECT_EQ(found("a cat, (cat)"), 2);
  EXPECT_EQ(found("concat cats cat_ cat9 \xC3\xA9"
                  "cat cat\xCC\x81"),
            0);
}

TEST(AddedTokens, NormalizedOnesAreFoundInNormalizedText) {
  TinyTokenizer tiny;
  tiny.normalizer = R"({"type": "NFC"})";
  tiny.added_tokens = added_token(300, "<e\xCC\x81>", "\"normalized\": true") + ", " +
                      added_token(301, "[e\xCC\x81]", "\"normalized\": false");
  const Tokenizer tokenizer = parse(tiny);
  EXPECT_EQ(encode(tokenizer, "<e\xCC\x81><\xC3\xA9>"), (Ids{300, 300}));
  EXPECT_EQ(encode(tokenizer, "[e\xCC\x81]"), (Ids{301}));
  EXPECT_EQ(encode(tokenizer, "[\xC3\xA9]"), (Ids{'[', 0xC3, 0xA9, ']'}));
}

TEST(AddedTokens, QueriesByTextAndId) {
  const Tokenizer tokenizer = parse(tiny_tokenizer());
  EXPECT_EQ(tokenizer.vocab_size(), 303);
  EXPECT_EQ(tokenizer.token_id("<|end|>"), 300);
  EXPECT_EQ(tokenizer.token_id(" "), ' ');
  EXPECT_EQ(tokenizer.token_id("hello"), tokenizer.encode("hello")->front());
  EXPECT_EQ(tokenizer.token_id("no such"), std::nullopt);
  EXPECT_EQ(tokenizer.token_id(""), std::nullopt);
  EXPECT_TRUE(tokenizer.is_special(300));
  EXPECT_FALSE(tokenizer.is_special(301));
  EXPECT_FALSE(tokenizer.is_special('a'));
  EXPECT_FALSE(tokenizer.is_special(-1));
  EXPECT_FALSE(tokenizer.is_special(1 << 30));
  EXPECT_EQ(*tokenizer.token_bytes(0xE6), "\xE6");
  EXPECT_EQ(*tokenizer.token_bytes(302), "<|end|>!");
}

TEST(AddedTokens, MayBeInTheVocabInPlainText) {
  TinyTokenizer tiny;
  tiny.more_vocab = ", \"<｜bos｜>\": 300";
  EXPECT_EQ(load_error(tiny.json()),
            "tokenizer.json: token '<｜bos｜>' (id 300) is not written in the byte-level alphabet");
  tiny.added_tokens = added_token(300, "<｜bos｜>", "\"special\": true");
  const Tokenizer tokenizer = parse(tiny);
  EXPECT_EQ(encode(tokenizer, "<｜bos｜>a"), (Ids{300, 'a'}));
  EXPECT_EQ(*tokenizer.token_bytes(300), "<｜bos｜>");
}

// --- around the text, and back --------------------------------------------------------------

TEST(PostProcessor, TemplateSurroundsTheText) {
  TinyTokenizer tiny = tiny_tokenizer();
  const std::string surround =
      R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},)"
      R"({"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>"}}], "pair": [],)"
      R"("special_tokens": {"<s>": {"id": "<s>", "ids": [300, 301]}, "</s>": {"ids": [302]}}})";
  for (const std::string& post_processor :
       {surround,
        R"({"type": "Sequence", "processors": [{"type": "ByteLevel"}, )" + surround + "]}"}) {
    tiny.post_processor = post_processor;
    const Tokenizer tokenizer = parse(tiny);
    EXPECT_EQ(encode(tokenizer, "a", true), (Ids{300, 301, 'a', 302}));
    EXPECT_EQ(encode(tokenizer, "", true), (Ids{300, 301, 302}));
    EXPECT_EQ(encode(tokenizer, "a", false), (Ids{'a'}));
  }
  tiny.post_processor = R"({"type": "ByteLevel", "trim_offsets": false})";
  EXPECT_EQ(encode(parse(tiny), "a", true), (Ids{'a'}));
}

TEST(Decode, SkipsSpecialTokensOnRequest) {
  const Tokenizer tokenizer = parse(tiny_tokenizer());
  const Ids ids = encode(tokenizer, "<think>hi<|end|>");
  EXPECT_EQ(*tokenizer.decode(ids), "<think>hi<|end|>");
  EXPECT_EQ(*tokenizer.decode(ids, true), "<think>hi");
}

TEST(Decode, InvalidBytesAreReplacedBySubpart) {
  const Tokenizer tokenizer = parse(TinyTokenizer());
  const auto decode = [&](const Ids& ids) { return *tokenizer.decode(ids); };
  EXPECT_EQ(decode({'a', 0xE6, 0xBC, 0xA2, 'b'}), "a漢b");
  EXPECT_EQ(decode({'a', 0xE6, 0xBC, 'b'}), "a\uFFFDb");
  EXPECT_EQ(decode({0xE6, 0xBC}), "\uFFFD");
  EXPECT_EQ(decode({0xF0, 0x9F, 0x98, 0xF0, 0x9F}), "\uFFFD\uFFFD");
  EXPECT_EQ(decode({0xC0, 0xAF}), "\uFFFD\uFFFD");              // overlong
  EXPECT_EQ(decode({0xED, 0xA0, 0x80}), "\uFFFD\uFFFD\uFFFD");  // a surrogate
  EXPECT_EQ(decode({0xF4, 0x90, 0x80, 0x80, 'x'}), "\uFFFD\uFFFD\uFFFD\uFFFDx");
  EXPECT_EQ(decode({0xFF, 0x80, 0xE6, 0xE6, 0xBC, 0xA2}), "\uFFFD\uFFFD\uFFFD漢");
}

TEST(Decode, IdsThatAreNoTokensAreErrors) {
  const Tokenizer tokenizer = parse(tiny_tokenizer());
  EXPECT_EQ(tokenizer.decode(Ids{303}).status().message(), "token id 303 is not in [0, 303)");
  EXPECT_EQ(tokenizer.decode(Ids{'a', -1}).status().message(), "token id -1 is not in [0, 303)");
  EXPECT_EQ(tokenizer.token_bytes(299).status().message(), "token id 299 of 303 has no token");
}

TEST(Encode, RefusesInvalidUtf8NamingTheByte) {
  const Tokenizer tokenizer = parse(TinyTokenizer());
  const auto error = [&](std::string_view text) {
    return tokenizer.encode(text).status().message();
  };
  EXPECT_EQ(error("0123456789\xFF"
                  "abc"),
            "text is not valid UTF-8 at byte 10 of 14");
  EXPECT_EQ(error("\xE6\xBC"), "text is not valid UTF-8 at byte 0 of 2");
  EXPECT_EQ(error("a\xED\xA0\x80"), "text is not valid UTF-8 at byte 1 of 4");
  EXPECT_EQ(error("ok \xF4\x8F\xBF\xBF"), "");
}

TEST(Encode, FromManyThreads) {
  const Tokenizer tokenizer = parse(tiny_tokenizer());
  std::string text;
  for (int i = 0; i < 500; ++i) text += "hello wor " + std::to_string(i * 7919) + " 漢é<think>";
  const Ids expected = encode(tokenizer, text);
  std::vector<std::thread> threads;
  std::vector<int> same(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 10; ++i) same[t] += *tokenizer.encode(text) == expected;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(same, (std::vector<int>{10, 10, 10, 10}));
}

// --- files that are refused -----------------------------------------------------------------

TEST(Load, RefusesWhatItCannotDoByName) {
  const auto refusal = [](void (*change)(TinyTokenizer&)) {
    TinyTokenizer tiny = tiny_tokenizer();
    change(tiny);
    const Result<Tokenizer> tokenizer = Tokenizer::parse(tiny.json(), "dir/t.json");
    if (tokenizer.ok()) return std::string("loaded");
    EXPECT_EQ(tokenizer.status().code(), StatusCode::kUnsupported);
    return tokenizer.status().message();
  };
  using T = TinyTokenizer;
  EXPECT_EQ(refusal([](T& t) { t.pre_tokenizer = R"({"type": "Metaspace"})"; }),
            "dir/t.json: pre_tokenizer type 'Metaspace' is not supported");
  EXPECT_EQ(refusal([](T& t) { t.pre_tokenizer = "null"; }),
            "dir/t.json: a pre_tokenizer without ByteLevel is not supported");
  EXPECT_EQ(refusal([](T& t) {
              t.pre_tokenizer = R"({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"},)"
                                R"({"type": "Digits"}]})";
            }),
            "dir/t.json: pre_tokenizer 'Digits' behind ByteLevel is not supported");
  EXPECT_EQ(refusal([](T& t) { t.normalizer = R"({"type": "Lowercase"})"; }),
            "dir/t.json: normalizer type 'Lowercase' is not supported");
  EXPECT_EQ(refusal([](T& t) { t.decoder = R"({"type": "Metaspace"})"; }),
            "dir/t.json: decoder type 'Metaspace' is not supported");
  EXPECT_EQ(refusal([](T& t) { t.decoder = "null"; }),
            "dir/t.json: a file without a ByteLevel decoder is not supported");
  EXPECT_EQ(refusal([](T& t) { t.post_processor = R"({"type": "BertProcessing"})"; }),
            "dir/t.json: post_processor type 'BertProcessing' is not supported");
  EXPECT_EQ(refusal([](T& t) { t.model_options = R"("byte_fallback": true,)"; }),
            "dir/t.json: model 'byte_fallback' is not supported");
  EXPECT_EQ(refusal([](T& t) { t.model_options = R"("dropout": 0.1,)"; }),
            "dir/t.json: model 'dropout' is not supported");
  EXPECT_EQ(refusal([](T& t) { t.model_options = R"("end_of_word_suffix": "</w>",)"; }),
            "dir/t.json: model 'end_of_word_suffix' '</w>' is not supported");
  EXPECT_EQ(refusal([](T& t) { t.pre_tokenizer = split_json(regex("a"), "Merged"); }),
            "dir/t.json: Split behavior 'Merged' is not supported");
  EXPECT_EQ(refusal([](T& t) { t.pre_tokenizer = split_json(R"({"String": ""})", "Isolated"); }),
            "dir/t.json: an empty Split pattern is not supported");
  EXPECT_EQ(
      refusal([](T& t) { t.post_processor = R"({"type": "TemplateProcessing", "single": []})"; }),
      "dir/t.json: a template with 0 texts is not supported");
}

TEST(Load, RefusesPatternsThatMeanSomethingElseHere) {
  const auto refusal = [](const std::string& pattern) {
    TinyTokenizer tiny;
    tiny.pre_tokenizer = split_json(regex(pattern), "Isolated");
    return load_error(tiny.json());
  };
  const auto uses = [](const std::string& pattern, const std::string& what) {
    return "tokenizer.json: regex '" + pattern + "' uses " + what + ", which is not supported";
  };
  EXPECT_EQ(refusal("[a-z&&[^b]]"), uses("[a-z&&[^b]]", "the class intersection '&&'"));
  EXPECT_EQ(refusal("[a[b]]"), uses("[a[b]]", "a class within a class"));
  EXPECT_EQ(refusal("[[:alpha:]]"), uses("[[:alpha:]]", "a POSIX class"));
  EXPECT_EQ(refusal("\\h+"), uses("\\h+", "\\h (a hex digit to Oniguruma)"));
  EXPECT_EQ(refusal("\\bx"), uses("\\bx", "a word boundary"));
  EXPECT_EQ(refusal("[\\W]"), uses("[\\W]", "\\W within a class"));
  EXPECT_EQ(refusal("(*COMMIT)x"), uses("(*COMMIT)x", "'(*'"));
  EXPECT_NE(refusal("(a").find("regex '(a' is not supported: missing closing parenthesis"),
            std::string::npos)
      << refusal("(a");
  EXPECT_EQ(refusal("\\[[\\[\\]]&&\\(*"), "loaded");
}

TEST(Load, RefusesInconsistentData) {
  const auto corruption = [](void (*change)(TinyTokenizer&)) {
    TinyTokenizer tiny = tiny_tokenizer();
    change(tiny);
    const Result<Tokenizer> tokenizer = Tokenizer::parse(tiny.json(), "t");
    if (tokenizer.ok()) return std::string("loaded");
    EXPECT_EQ(tokenizer.status().code(), StatusCode::kDataLoss);
    EXPECT_EQ(tokenizer.status().message().find('\n'), std::string::npos);
    return tokenizer.status().message();
  };
  using T = TinyTokenizer;
  EXPECT_EQ(corruption([](T& t) { t.more_vocab = R"(, "xy": 97)"; }),
            "t: id 97 of token 'xy' is already that of 'a'");
  EXPECT_EQ(corruption([](T& t) { t.more_vocab = R"(, "a": 290)"; }),
            "t: token 'a' occurs twice in the vocab");
  EXPECT_EQ(corruption([](T& t) { t.more_vocab = R"(, "xy": -1)"; }),
            "t: token 'xy' has an id that is not an integer in [0, 4194304)");
  EXPECT_EQ(corruption([](T& t) { t.more_vocab = R"(, "xy": 1e3)"; }),
            "t: token 'xy' has an id that is not an integer in [0, 4194304)");
  EXPECT_EQ(corruption([](T& t) { t.more_vocab = ", \"▁the\\n\": 290"; }),
            "t: token '▁the\\x0A' (id 290) is not written in the byte-level alphabet");
  EXPECT_EQ(corruption([](T& t) {
              t.merges.clear();
              t.merges.push_back({"ab", "c"});
            }),
            "t: merge 0 names 'ab', which is not in the vocab");
  EXPECT_EQ(corruption([](T& t) { t.added_tokens += ", " + added_token(97, "<x>"); }),
            "t: id 97 of added token '<x>' is already that of 'a'");
  EXPECT_EQ(corruption([](T& t) { t.added_tokens += ", " + added_token(300, "<x>"); }),
            "t: added tokens '<|end|>' and '<x>' both have id 300");
  EXPECT_EQ(corruption([](T& t) { t.added_tokens += ", " + added_token(305, "<think>"); }),
            "t: added token '<think>' has ids 301 and 305");
  EXPECT_EQ(corruption([](T& t) { t.added_tokens += ", " + added_token(305, "a"); }),
            "t: added token 'a' has id 305 but the vocab says 97");
  EXPECT_EQ(corruption([](T& t) { t.added_tokens += ", {\"id\": 305}"; }),
            "t: an added token has no string 'content'");
  EXPECT_EQ(corruption([](T& t) { t.added_tokens += ", {\"content\": \"x\"}"; }),
            "t: added token 'x' has no id");
  EXPECT_EQ(corruption([](T& t) { t.added_tokens += ", " + added_token(305, ""); }),
            "t: an added token has an empty content");
  EXPECT_EQ(corruption([](T& t) {
              t.post_processor =
                  R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "b"}}],)"
                  R"("special_tokens": {"b": {"ids": [299]}}})";
            }),
            "t: template token 'b' has id 299, which has no token");
  EXPECT_EQ(corruption([](T& t) { t.model_options = R"("ignore_merges": 3,)"; }),
            "t: 'ignore_merges' is not true or false");
}

TEST(Load, RefusesBrokenMerges) {
  const auto with_merges = [](const std::string& merges) {
    std::string json = TinyTokenizer().json();
    json.replace(json.find("\"merges\": []"), 12, "\"merges\": " + merges);
    return load_error(json);
  };
  EXPECT_EQ(with_merges("[\"a b\"]"),
            "tokenizer.json: merge 0 makes 'ab', which is not in the vocab");
  EXPECT_EQ(with_merges("[\"ab\"]"), "tokenizer.json: merge 0 'ab' is not two tokens");
  EXPECT_EQ(with_merges("[\"a b c\"]"), "tokenizer.json: merge 0 'a b c' is not two tokens");
  EXPECT_EQ(with_merges("[[\"a\"]]"),
            "tokenizer.json: merge 0 is neither a string nor two strings");
  EXPECT_EQ(with_merges("[[\"a\", 1]]"),
            "tokenizer.json: merge 0 is neither a string nor two strings");
  EXPECT_EQ(with_merges("[\"a \u4e2d\"]"),
            "tokenizer.json: merge 0 names '\u4e2d', which is not in the vocab");
  EXPECT_EQ(with_merges("{}"), "tokenizer.json: model has no array 'merges'");
}

TEST(Load, RefusesTruncatedFiles) {
  const std::string json = tiny_tokenizer().json();
  for (std::size_t size = 0; size < json.size(); size += 37) {
    const Result<Tokenizer> tokenizer = Tokenizer::parse(json.substr(0, size));
    ASSERT_FALSE(tokenizer.ok()) << size;
    EXPECT_EQ(tokenizer.status().code(), StatusCode::kDataLoss);
    EXPECT_EQ(tokenizer.status().message().find("tokenizer.json: not valid JSON ("), 0u);
  }
  EXPECT_EQ(load_error("[]"), "tokenizer.json: the document is not an object");
  EXPECT_EQ(load_error("{}"), "tokenizer.json: there is no 'model'");
  EXPECT_EQ(load_error(R"({"model": {"type": "Unigram"}})"),
            "tokenizer.json: model type 'Unigram' is not supported");
}

TEST(Load, AMissingFileIsNotFound) {
  const Result<Tokenizer> tokenizer = Tokenizer::load("/no/such/tokenizer.json");
  ASSERT_FALSE(tokenizer.ok());
  EXPECT_EQ(tokenizer.status().code(), StatusCode::kNotFound);
  EXPECT_EQ(tokenizer.status().message().find("/no/such/tokenizer.json: "), 0u);
}

// --- real tokenizers ------------------------------------------------------------------------

std::filesystem::path shared_data() {
  if (const char* path = std::getenv("REPLAYSSM_SHARED_DATA")) return path;
  return std::filesystem::path(RSSM_SOURCE_DIR) / ".." / "shared" / "data";
}

/// The decompressed file, or nothing where xz is missing or fails.
std::string unxz(const std::filesystem::path& path) {
  const std::string command = "xz -dc '" + path.string() + "' 2>/dev/null";
  std::string out;
  std::FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return out;
  std::vector<char> buffer(1 << 16);
  while (const std::size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    out.append(buffer.data(), n);
  }
  return pclose(pipe) == 0 ? out : std::string();
}

void append_utf8(unsigned long code, std::string* out) {
  const auto byte = [&](unsigned long value) { *out += static_cast<char>(value); };
  if (code < 0x80) {
    byte(code);
  } else if (code < 0x800) {
    byte(0xC0 | (code >> 6));
    byte(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    byte(0xE0 | (code >> 12));
    byte(0x80 | ((code >> 6) & 0x3F));
    byte(0x80 | (code & 0x3F));
  } else {
    byte(0xF0 | (code >> 18));
    byte(0x80 | ((code >> 12) & 0x3F));
    byte(0x80 | ((code >> 6) & 0x3F));
    byte(0x80 | (code & 0x3F));
  }
}

std::string unescape(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\') {
      out += text[i];
      continue;
    }
    switch (text.at(++i)) {
      case 'n':
        out += '\n';
        break;
      case 'r':
        out += '\r';
        break;
      case 't':
        out += '\t';
        break;
      case 'u': {
        const std::size_t end = text.find('}', i);
        append_utf8(std::stoul(text.substr(i + 2, end - i - 2), nullptr, 16), &out);
        i = end;
        break;
      }
      default:
        out += text[i];
    }
  }
  return out;
}

Ids parse_ids(const std::string& text) {
  std::istringstream in(text);
  Ids ids;
  for (std::int32_t id = 0; in >> id;) ids.push_back(id);
  return ids;
}

struct Golden {
  char kind = ' ';
  std::string first;
  std::string second;
};

std::vector<Golden> read_golden(const std::string& name) {
  const auto path = std::filesystem::path(RSSM_SOURCE_DIR) / "tests/data/tokenizer/golden.txt";
  std::ifstream file(path);
  std::vector<Golden> cases;
  std::string section;
  for (std::string line; std::getline(file, line);) {
    const std::size_t tab = line.find('\t');
    if (line[0] == '@') {
      section = line.substr(tab + 1);
    } else if (section == name) {
      const std::size_t second = line.find('\t', tab + 1);
      cases.push_back({line[0], line.substr(tab + 1, second - tab - 1), line.substr(second + 1)});
    }
  }
  return cases;
}

class RealTokenizer : public ::testing::TestWithParam<const char*> {};

TEST_P(RealTokenizer, AgreesWithHuggingFace) {
  const auto path = shared_data() / "tokenizers" / GetParam() / "tokenizer.json.xz";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is not there";
  const std::string json = unxz(path);
  if (json.empty()) GTEST_SKIP() << "xz cannot decompress " << path;
  const Result<Tokenizer> tokenizer = Tokenizer::parse(json);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  const std::vector<Golden> cases = read_golden(GetParam());
  ASSERT_GE(cases.size(), 60u);
  for (const Golden& golden : cases) {
    if (golden.kind == 'E') {
      const std::string text = unescape(golden.first);
      const Ids ids = encode(*tokenizer, text);
      EXPECT_EQ(ids, parse_ids(golden.second)) << golden.first;
      // Qwen3 normalizes, so its text need not come back as it was.
      if (std::string_view(GetParam()) != "qwen3") {
        EXPECT_EQ(*tokenizer->decode(ids), text);
      }
    } else {
      EXPECT_EQ(*tokenizer->decode(parse_ids(golden.first)), unescape(golden.second));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, RealTokenizer, ::testing::Values("qwen3", "llama3", "deepseek_v3"),
                         [](const auto& instance) { return std::string(instance.param); });

}  // namespace
}  // namespace replayssm
