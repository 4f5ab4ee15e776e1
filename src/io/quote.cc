#include "io/quote.h"

#include <cstddef>

namespace replayssm {

namespace {

constexpr std::size_t kMaxQuotedBytes = 200;
constexpr std::size_t kMaxQuotedDims = 16;

}  // namespace

std::string quote(std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text.substr(0, kMaxQuotedBytes)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else {
      out += "\\x";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    }
  }
  out += text.size() > kMaxQuotedBytes ? "...\"" : "\"";
  return out;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) out += ", ";
    if (i == kMaxQuotedDims) {
      out += "...";
      break;
    }
    out += std::to_string(shape[i]);
  }
  out += "]";
  return out;
}

}  // namespace replayssm
