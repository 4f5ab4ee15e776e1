#include "text/byte_level.h"

#include <array>
#include <cstdint>

namespace replayssm {
namespace {

constexpr unsigned kAlphabetEnd = 0x144;  // one past its last character

struct Alphabet {
  std::array<std::int16_t, 256> to_char{};
  std::array<std::int16_t, kAlphabetEnd> to_byte{};
};

constexpr Alphabet make_alphabet() {
  Alphabet alphabet;
  for (std::int16_t& byte : alphabet.to_byte) byte = -1;
  int next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    const int character = printable ? byte : next++;
    alphabet.to_char[byte] = static_cast<std::int16_t>(character);
    alphabet.to_byte[character] = static_cast<std::int16_t>(byte);
  }
  return alphabet;
}

constexpr Alphabet kAlphabet = make_alphabet();

}  // namespace

bool append_byte_level(std::string_view token, std::string* bytes) {
  const std::size_t start = bytes->size();
  bytes->resize(start + token.size());
  char* out = bytes->data() + start;
  for (std::size_t pos = 0; pos < token.size(); ++pos) {
    unsigned c = static_cast<unsigned char>(token[pos]);
    if (c >= 0x80) {  // the alphabet ends within the characters of two bytes
      if (c < 0xC2 || c > 0xDF || ++pos >= token.size()) return false;
      const unsigned next = static_cast<unsigned char>(token[pos]);
      if ((next & 0xC0) != 0x80) return false;
      c = ((c & 0x1F) << 6) | (next & 0x3F);
    }
    if (c >= kAlphabetEnd || kAlphabet.to_byte[c] < 0) return false;
    *out++ = static_cast<char>(kAlphabet.to_byte[c]);
  }
  bytes->resize(static_cast<std::size_t>(out - bytes->data()));
  return true;
}

std::string to_byte_level(std::string_view bytes) {
  std::string out;
  out.reserve(2 * bytes.size());
  for (const char byte : bytes) {
    const int c = kAlphabet.to_char[static_cast<unsigned char>(byte)];
    if (c < 0x80) {
      out += static_cast<char>(c);
    } else {
      out += static_cast<char>(0xC0 | (c >> 6));
      out += static_cast<char>(0x80 | (c & 0x3F));
    }
  }
  return out;
}

}  // namespace replayssm
