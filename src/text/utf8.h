// UTF-8: one definition of "valid" for input checks, lossy decoding and streaming.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace replayssm {

/// What stands at one position of a byte string.
struct Utf8Char {
  enum class Kind {
    kValid,      // a character of `length` bytes
    kInvalid,    // `length` bytes that no continuation can make valid (a maximal subpart)
    kTruncated,  // the text ends within a character that may still become valid
  };
  Kind kind = Kind::kInvalid;
  int length = 1;
  char32_t code = 0;  // only when valid
};

/// Reads the character at `pos`, which must be below text.size(). Overlong forms, surrogates and
/// codes above U+10FFFF are invalid.
Utf8Char read_utf8(std::string_view text, std::size_t pos);

/// Offset of the first byte that is not part of a valid character, or npos.
std::size_t find_invalid_utf8(std::string_view text);

/// Appends `text`, each maximal invalid subpart replaced by one U+FFFD (the Unicode standard's
/// recommended practice, which is also what Rust's from_utf8_lossy and browsers do). A truncated
/// character at the end is left alone; returns how many bytes were consumed.
std::size_t append_utf8_lossy(std::string_view text, std::string* out);

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

/// `text` in single quotes for a one-line message: control and invalid bytes escaped, long texts
/// shortened.
std::string in_quotes(std::string_view text);

}  // namespace replayssm
