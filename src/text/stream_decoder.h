// Turns tokens into text as they come: StreamDecoder gives whole characters only, StopStrings ends
// the text at a stop string.
//
//   StreamDecoder decoder(tokenizer);
//   StopStrings stops = ...;
//   for each new id: send(stops.push(*decoder.push(id))); if (stops.stopped()) break;
//   at the end:      send(stops.push(decoder.finish())); send(stops.finish());
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "replayssm/status.h"
#include "text/tokenizer.h"

namespace replayssm {

/// What push and finish return adds up to Tokenizer::decode of all ids. The tokenizer must outlive
/// the decoder.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special = false)
      : tokenizer_(&tokenizer), skip_special_(skip_special) {}

  /// The characters that `id` completes; bytes that can no longer become one are U+FFFD. An id
  /// that is no token is an error and changes nothing.
  Result<std::string> push(std::int32_t id);

  /// The same, for bytes.
  std::string push_bytes(std::string_view bytes);

  /// What is left: nothing, or U+FFFD for an incomplete character. The decoder can be used again.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::string tail_;  // the beginning of a character, at most three bytes
};

/// Finds the stop string that is complete first (the longest of those that end together), however
/// the text was cut into pushes, and holds back text that may be the beginning of one.
class StopStrings {
 public:
  /// No stop strings: everything passes.
  StopStrings() = default;

  /// Empty or invalid UTF-8 stop strings are refused.
  static Result<StopStrings> create(std::vector<std::string> stops);

  /// The text that can be shown now, whole characters if `text` is. Nothing once stopped.
  std::string push(std::string_view text);

  /// The end of the text: what was held back, unless stopped.
  std::string finish();

  bool stopped() const { return stopped_ >= 0; }

  /// Index of the stop string that was found, -1 before.
  int stop_index() const { return stopped_; }

 private:
  struct Stop {
    std::string text;
    std::vector<std::size_t> border;  // of each prefix (Knuth, Morris, Pratt)
    std::size_t matched = 0;          // bytes of `text` at the end of what was pushed
  };

  std::vector<Stop> stops_;
  std::string held_;
  int stopped_ = -1;
};

}  // namespace replayssm
