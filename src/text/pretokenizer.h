// PreTokenizer: cuts text into the pieces that byte-pair encoding treats one by one. The steps are
// those of Hugging Face tokenizers (Split, Digits, ByteLevel), each applied to the pieces of the
// one before.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "replayssm/status.h"
#include "text/regex.h"

namespace replayssm {

/// What becomes of the text that a Split pattern matches.
enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

class PreTokenizer {
 public:
  struct Span {
    std::size_t begin = 0;
    std::size_t end = 0;
    bool match = false;
  };
  struct Scratch {
    Regex::Scratch regex;
    std::vector<std::string_view> pieces;  // of the text given last, or of `prefixed`
    std::vector<std::string_view> next;
    std::vector<Span> spans;
    std::string prefixed;
  };

  /// `invert`: what lies between matches counts as the match.
  void add_split(Regex pattern, SplitBehavior behavior, bool invert);
  void add_split(std::string literal, SplitBehavior behavior, bool invert);

  /// Each piece that does not begin with a space gets one. At most once.
  void add_prefix_space();

  /// Leaves the pieces of `text`, which must be valid UTF-8, in scratch.pieces; none is empty.
  Status split(std::string_view text, Scratch& scratch) const;

 private:
  struct Step {
    enum class Kind { kRegex, kLiteral, kPrefixSpace };
    Kind kind = Kind::kPrefixSpace;
    std::optional<Regex> regex;
    std::string literal;
    SplitBehavior behavior = SplitBehavior::kIsolated;
    bool invert = false;
  };

  static Status find_spans(const Step& step, std::string_view text, Scratch& scratch);
  static void merge_spans(SplitBehavior behavior, std::vector<Span>* spans);
  static void prefix_pieces(Scratch& scratch);

  std::vector<Step> steps_;
};

}  // namespace replayssm
