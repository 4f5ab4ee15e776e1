// A tokenizer.json small enough to reason about: the id of each single byte is its value, merges
// make ids from 256 on.
#pragma once

#include <cstdio>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/byte_level.h"

namespace replayssm::test {

inline std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char buffer[8];
      std::snprintf(buffer, sizeof buffer, "\\u%04x", static_cast<unsigned>(c));
      out += buffer;
    } else {
      out += c;
    }
  }
  return out + '"';
}

struct TinyTokenizer {
  std::vector<std::pair<std::string, std::string>> merges;  // of bytes
  bool merges_as_pairs = false;
  std::string more_vocab;         // such as ", \"x\": 300"
  std::string model_options;      // such as "\"ignore_merges\": true,"
  std::string added_tokens = "";  // comma-separated objects
  std::string normalizer = "null";
  std::string pre_tokenizer =
      R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})";
  std::string post_processor = "null";
  std::string decoder = R"({"type": "ByteLevel"})";

  std::string json() const {
    std::string vocab;
    int id = 0;
    for (; id < 256; ++id) {
      const char c = static_cast<char>(id);
      if (id > 0) vocab += ", ";
      vocab += json_string(to_byte_level(std::string_view(&c, 1))) + ": " + std::to_string(id);
    }
    std::string list;
    std::set<std::string> known;
    for (const auto& [left, right] : merges) {
      if (!list.empty()) list += ", ";
      const std::string a = to_byte_level(left);
      const std::string b = to_byte_level(right);
      if (merges_as_pairs) {
        list.append("[").append(json_string(a)).append(", ").append(json_string(b)).append("]");
      } else {
        list += json_string(a + " " + b);
      }
      // Two merges may make the same token.
      if (!known.insert(a + b).second) continue;
      vocab += ", " + json_string(a + b) + ": " + std::to_string(id++);
    }
    return "{\"version\": \"1.0\", \"added_tokens\": [" + added_tokens +
           "], \"normalizer\": " + normalizer + ", \"pre_tokenizer\": " + pre_tokenizer +
           ", \"post_processor\": " + post_processor + ", \"decoder\": " + decoder +
           ", \"model\": {\"type\": \"BPE\", " + model_options + " \"vocab\": {" + vocab +
           more_vocab + "}, \"merges\": [" + list + "]}}";
  }
};

/// An added token; `flags` such as "\"special\": true, \"lstrip\": true".
inline std::string added_token(int id, std::string_view content, std::string_view flags = "") {
  std::string out = "{\"id\": " + std::to_string(id) + ", \"content\": " + json_string(content);
  if (!flags.empty()) out.append(", ").append(flags);
  return out + "}";
}

/// What the stream decoder's tests and the fuzzer use: a few merges and added tokens, two of them
/// each other's beginning.
inline TinyTokenizer tiny_tokenizer() {
  TinyTokenizer tiny;
  tiny.merges = {{"h", "e"},       {"l", "l"},   {"he", "ll"},         {"hell", "o"},
                 {" ", " "},       {"  ", "  "}, {" ", "w"},           {"\xF0", "\x9F"},
                 {"\xC3", "\xA9"}, {"o", "r"},   {"\xE6", "\xBC\xA2"}, {"1", "2"}};
  tiny.merges.insert(tiny.merges.begin(), {"\xBC", "\xA2"});
  tiny.added_tokens = added_token(300, "<|end|>", "\"special\": true, \"normalized\": false") +
                      ", " + added_token(301, "<think>", "\"normalized\": false") + ", " +
                      added_token(302, "<|end|>!", "\"special\": true, \"normalized\": false");
  return tiny;
}

}  // namespace replayssm::test
