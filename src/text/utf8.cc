#include "text/utf8.h"

#include <cstdint>
#include <cstring>

namespace replayssm {
namespace {

/// Length of the ASCII run at `pos`, rounded down to whole words of eight bytes.
std::size_t ascii_words(std::string_view text, std::size_t pos) {
  std::size_t end = pos;
  while (end + 8 <= text.size()) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + end, 8);
    if ((word & 0x8080808080808080ull) != 0) break;
    end += 8;
  }
  return end - pos;
}

}  // namespace

Utf8Char read_utf8(std::string_view text, std::size_t pos) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(pos);
  if (lead < 0x80) return {Utf8Char::Kind::kValid, 1, lead};
  int length = 0;
  // Range of the second byte; it excludes overlong forms, surrogates and codes above U+10FFFF.
  unsigned low = 0x80;
  unsigned high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {Utf8Char::Kind::kInvalid, 1, 0};
  }
  char32_t code = lead & (0x7Fu >> length);
  for (int i = 1; i < length; ++i) {
    if (pos + i >= text.size()) return {Utf8Char::Kind::kTruncated, i, 0};
    const unsigned next = byte(pos + i);
    if (next < low || next > high) return {Utf8Char::Kind::kInvalid, i, 0};
    code = (code << 6) | (next & 0x3F);
    low = 0x80;
    high = 0xBF;
  }
  return {Utf8Char::Kind::kValid, length, code};
}

std::size_t find_invalid_utf8(std::string_view text) {
  std::size_t pos = 0;
  while (pos < text.size()) {
    pos += ascii_words(text, pos);
    if (pos >= text.size()) break;
    const Utf8Char c = read_utf8(text, pos);
    if (c.kind != Utf8Char::Kind::kValid) return pos;
    pos += c.length;
  }
  return std::string_view::npos;
}

std::size_t append_utf8_lossy(std::string_view text, std::string* out) {
  std::size_t pos = 0;
  std::size_t copied = 0;  // text before it is in *out
  while (pos < text.size()) {
    pos += ascii_words(text, pos);
    if (pos >= text.size()) break;
    const Utf8Char c = read_utf8(text, pos);
    if (c.kind == Utf8Char::Kind::kTruncated) break;
    if (c.kind == Utf8Char::Kind::kInvalid) {
      out->append(text.substr(copied, pos - copied));
      out->append(kReplacementCharacter);
      copied = pos + c.length;
    }
    pos += c.length;
  }
  out->append(text.substr(copied, pos - copied));
  return pos;
}

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kLimit = 60;
  constexpr char kHex[] = "0123456789ABCDEF";
  std::string out = "'";
  for (std::size_t pos = 0; pos < text.size();) {
    if (pos >= kLimit) {
      out += "...";
      break;
    }
    const Utf8Char c = read_utf8(text, pos);
    const bool plain =
        c.kind == Utf8Char::Kind::kValid && c.code >= 0x20 && (c.code < 0x7F || c.code >= 0xA0);
    if (plain) {
      out.append(text.substr(pos, c.length));
    } else {
      for (int i = 0; i < c.length; ++i) {
        const unsigned byte = static_cast<unsigned char>(text[pos + i]);
        out += "\\x";
        out += kHex[byte >> 4];
        out += kHex[byte & 15];
      }
    }
    pos += c.length;
  }
  out += '\'';
  return out;
}

}  // namespace replayssm
