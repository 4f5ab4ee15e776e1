#include "text/stream_decoder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "engine/tiny_tokenizer.h"
#include "text/utf8.h"

namespace replayssm {
namespace {

const Tokenizer& tiny() {
  static const Result<Tokenizer> tokenizer = Tokenizer::parse(test::tiny_tokenizer().json());
  return *tokenizer;
}

TEST(StreamDecoder, HoldsBackIncompleteCharacters) {
  StreamDecoder decoder(tiny());
  EXPECT_EQ(*decoder.push('a'), "a");
  EXPECT_EQ(*decoder.push(0xF0), "");
  EXPECT_EQ(*decoder.push(0x9F), "");
  EXPECT_EQ(*decoder.push(0x98), "");
  EXPECT_EQ(*decoder.push(0x80), "\U0001F600");
  EXPECT_EQ(*decoder.push(0xE6), "");
  EXPECT_EQ(*decoder.push('b'), "\uFFFDb");
  EXPECT_EQ(*decoder.push(0xC3), "");
  EXPECT_EQ(decoder.finish(), "\uFFFD");
  EXPECT_EQ(decoder.finish(), "");
  EXPECT_EQ(*decoder.push(0xA9), "\uFFFD");  // the tail is gone
}

TEST(StreamDecoder, SkipsSpecialTokensOnRequest) {
  StreamDecoder all(tiny());
  StreamDecoder text(tiny(), true);
  EXPECT_EQ(*all.push(300), "<|end|>");
  EXPECT_EQ(*text.push(300), "");
  EXPECT_EQ(*text.push(301), "<think>");
  // A character goes on behind a token that is not shown.
  EXPECT_EQ(*text.push(0xC3), "");
  EXPECT_EQ(*text.push(300), "");
  EXPECT_EQ(*text.push(0xA9), "é");
}

TEST(StreamDecoder, AnIdThatIsNoTokenChangesNothing) {
  StreamDecoder decoder(tiny());
  EXPECT_EQ(*decoder.push(0xC3), "");
  EXPECT_EQ(decoder.push(303).status().message(), "token id 303 is not in [0, 303)");
  EXPECT_EQ(*decoder.push(0xA9), "é");
}

TEST(StreamDecoder, AddsUpToTheWholeDecode) {
  std::mt19937 random(3);
  const std::vector<std::int32_t> bytes = {'a',  0xF0, 0x9F, 0x98, 0x80, 0xE6, 0xBC, 0xA2, 0xC3,
                                           0xA9, 0xED, 0xA0, 0xF4, 0x90, 0xFF, 0xC0, 256,  264};
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::int32_t> ids;
    for (int i = static_cast<int>(random() % 12); i >= 0; --i) {
      ids.push_back(random() % 8 == 0 ? 300 + static_cast<int>(random() % 3)
                                      : bytes[random() % bytes.size()]);
    }
    for (const bool skip_special : {false, true}) {
      StreamDecoder decoder(tiny(), skip_special);
      std::string text;
      for (const std::int32_t id : ids) {
        const std::string part = *decoder.push(id);
        EXPECT_EQ(find_invalid_utf8(part), std::string::npos);
        text += part;
      }
      text += decoder.finish();
      EXPECT_EQ(text, *tiny().decode(ids, skip_special));
    }
  }
}

TEST(StreamDecoder, EmojiCutAnywhere) {
  const std::string text = "é 👨\u200d👩\u200d👧 漢😀!";
  for (std::size_t i = 0; i <= text.size(); ++i) {
    for (std::size_t j = i; j <= text.size(); ++j) {
      StreamDecoder decoder(tiny());
      std::string out;
      for (const std::string& part : {text.substr(0, i), text.substr(i, j - i), text.substr(j)}) {
        const std::string shown = decoder.push_bytes(part);
        EXPECT_EQ(find_invalid_utf8(shown), std::string::npos);
        out += shown;
      }
      EXPECT_EQ(out, text);
      EXPECT_EQ(decoder.finish(), "");
    }
  }
}

// --- stop strings ---------------------------------------------------------------------------

StopStrings stops(std::vector<std::string> texts) { return *StopStrings::create(std::move(texts)); }

TEST(StopStrings, CutsTheTextBeforeTheStopString) {
  StopStrings s = stops({"END"});
  EXPECT_EQ(s.push("abcE"), "abc");
  EXPECT_EQ(s.push("Nx"), "ENx");
  EXPECT_EQ(s.push("yEN"), "y");
  EXPECT_FALSE(s.stopped());
  EXPECT_EQ(s.stop_index(), -1);
  EXPECT_EQ(s.push("D and more"), "");
  EXPECT_TRUE(s.stopped());
  EXPECT_EQ(s.stop_index(), 0);
  EXPECT_EQ(s.push("nothing"), "");
  EXPECT_EQ(s.finish(), "");
}

TEST(StopStrings, ReleasesWhatWasHeldAtTheEnd) {
  StopStrings s = stops({"\n\nUser:"});
  EXPECT_EQ(s.push("hi\n"), "hi");
  EXPECT_EQ(s.push("\nUse"), "");
  EXPECT_EQ(s.finish(), "\n\nUse");
  EXPECT_FALSE(s.stopped());
}

TEST(StopStrings, OverlappingBeginnings) {
  StopStrings s = stops({"aab"});
  EXPECT_EQ(s.push("aa"), "");
  EXPECT_EQ(s.push("a"), "a");  // the last two may still begin it
  EXPECT_EQ(s.push("ab?"), "a");
  EXPECT_TRUE(s.stopped());
}

TEST(StopStrings, TheFirstToBeCompleteWins) {
  StopStrings inner = stops({"abcd", "bc"});
  EXPECT_EQ(inner.push("xabcd"), "xa");
  EXPECT_EQ(inner.stop_index(), 1);
  StopStrings longest = stops({"c", "abc"});
  EXPECT_EQ(longest.push("xabc"), "x");  // both end here; the longer one began earlier
  EXPECT_EQ(longest.stop_index(), 1);
}

TEST(StopStrings, NoStopStringsPassEverything) {
  StopStrings s;
  EXPECT_EQ(s.push("abc"), "abc");
  EXPECT_EQ(s.finish(), "");
}

TEST(StopStrings, RefusesEmptyAndInvalidOnes) {
  EXPECT_EQ(StopStrings::create({"a", ""}).status().message(), "stop string 1 is empty");
  EXPECT_EQ(StopStrings::create({"a\xFF"}).status().message(),
            "stop string 0 is not valid UTF-8 at byte 1");
}

/// The text before the stop string, from the definition.
std::string cut(const std::string& text, const std::vector<std::string>& stop_texts) {
  for (std::size_t end = 1; end <= text.size(); ++end) {
    std::size_t longest = 0;
    for (const std::string& stop : stop_texts) {
      if (end >= stop.size() && text.compare(end - stop.size(), stop.size(), stop) == 0) {
        longest = std::max(longest, stop.size());
      }
    }
    if (longest > 0) return text.substr(0, end - longest);
  }
  return text;
}

TEST(StopStrings, TheSameForEverySplit) {
  std::mt19937 random(5);
  const auto word = [&](int length) {
    std::string out;
    for (int i = 0; i < length; ++i)
      out += std::vector<std::string>{"a", "b", "é", "漢"}[random() % 4];
    return out;
  };
  int stopped = 0;
  for (int round = 0; round < 4000; ++round) {
    const std::string text = word(1 + static_cast<int>(random() % 10));
    std::vector<std::string> texts;
    for (int i = static_cast<int>(random() % 3); i >= 0; --i) {
      texts.push_back(word(1 + static_cast<int>(random() % 4)));
    }
    StopStrings s = stops(texts);
    std::string out;
    for (std::size_t pos = 0; pos < text.size();) {
      std::size_t end = pos;
      do {  // whole characters, as the stream decoder gives
        end += read_utf8(text, end).length;
      } while (end < text.size() && random() % 2 == 0);
      const std::string shown = s.push(std::string_view(text).substr(pos, end - pos));
      EXPECT_EQ(find_invalid_utf8(shown), std::string::npos);
      out += shown;
      pos = end;
    }
    out += s.finish();
    EXPECT_EQ(out, cut(text, texts)) << text;
    stopped += s.stopped();
  }
  EXPECT_GT(stopped, 1000);
  EXPECT_LT(stopped, 3900);
}

TEST(StopStrings, BehindTheStreamDecoder) {
  StreamDecoder decoder(tiny());
  StopStrings s = stops({"漢!"});
  std::string out;
  const auto ids = tiny().encode("hello é漢?漢! more");
  for (const std::int32_t id : *ids) {
    out += s.push(*decoder.push(id));
    if (s.stopped()) break;
  }
  EXPECT_EQ(out, "hello é漢?");
  EXPECT_TRUE(s.stopped());
}

}  // namespace
}  // namespace replayssm
