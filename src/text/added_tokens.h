// AddedTokens: tokens that are found in the text as they stand, before anything else looks at it
// (chat markers and the like). Matches are leftmost, then longest, and do not overlap.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "replayssm/status.h"

namespace replayssm {

struct AddedToken {
  std::string content;
  std::int32_t id = -1;
  bool special = false;      // left out of decoded text on request
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space behind it
  bool single_word = false;  // not within a word
  bool normalized = false;   // looked for in the normalized text, in its own normalized form
};

class AddedTokens {
 public:
  /// A part of the text: a token, or text between tokens (id -1).
  struct Segment {
    std::string_view text;
    std::int32_t id = -1;
  };
  enum class Stage { kRawText, kNormalizedText };

  /// `pattern`: what to look for, the content or its normalized form.
  void add(AddedToken token, std::string_view pattern);

  /// The token with this content, or nothing.
  const AddedToken* find(std::string_view content) const;
  const AddedToken* find(std::int32_t id) const;

  /// Appends the segments of `text`. Unless `parse_special`, special tokens are ordinary text.
  void split(std::string_view text, Stage stage, bool parse_special,
             std::vector<Segment>* segments) const;

 private:
  class Trie {
   public:
    void add(std::string_view pattern, std::int32_t value);
    /// The longest pattern at `pos`: its value, or -1; *length is set if there is one.
    std::int32_t longest(std::string_view text, std::size_t pos, std::size_t* length) const;
    bool empty() const { return nodes_.empty(); }

   private:
    struct Node {
      std::int32_t first_child = -1;
      std::int32_t sibling = -1;
      std::int32_t value = -1;
      char byte = 0;
    };
    std::int32_t child(std::int32_t node, char byte) const;

    std::vector<Node> nodes_;
    std::array<std::int32_t, 256> roots_{};  // node + 1, 0: none
  };

  std::vector<AddedToken> tokens_;
  std::unordered_map<std::string, std::size_t> by_content_;
  std::unordered_map<std::int32_t, std::size_t> by_id_;
  Trie raw_;
  Trie normalized_;
};

}  // namespace replayssm
