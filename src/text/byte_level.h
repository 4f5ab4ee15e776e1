// The byte-level alphabet: how byte-level BPE writes arbitrary bytes as printable characters. The
// 188 printable Latin-1 bytes stand for themselves; the other 68, in order, are U+0100 to U+0143 (a
// space is U+0120, shown as "Ġ").
#pragma once

#include <string>
#include <string_view>

namespace replayssm {

/// Appends the bytes that `token` stands for; false when a character is not in the alphabet (then
/// *bytes is unspecified).
bool append_byte_level(std::string_view token, std::string* bytes);

/// The other way round: how `bytes` is written in a vocabulary.
std::string to_byte_level(std::string_view bytes);

}  // namespace replayssm
