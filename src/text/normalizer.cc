#include "text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

namespace replayssm {
namespace {

/// Characters below U+0300 neither combine nor decompose under NFC; from 0xCC on, a lead byte
/// starts a character of U+0300 or above.
bool is_nfc_trivially(std::string_view text) {
  return std::none_of(text.begin(), text.end(),
                      [](char c) { return static_cast<unsigned char>(c) >= 0xCC; });
}

struct Free {
  void operator()(utf8proc_uint8_t* pointer) const { std::free(pointer); }
};

}  // namespace

Result<std::string_view> to_nfc(std::string_view text, std::string* buffer) {
  if (is_nfc_trivially(text)) return text;
  utf8proc_uint8_t* raw = nullptr;
  const utf8proc_ssize_t length =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &raw,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, Free> owned(raw);
  if (length < 0) return invalid_argument("NFC normalization failed: ", utf8proc_errmsg(length));
  buffer->assign(reinterpret_cast<const char*>(raw), static_cast<std::size_t>(length));
  return std::string_view(*buffer);
}

}  // namespace replayssm
