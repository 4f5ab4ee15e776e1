// Text from a file, made safe to put in a one-line message.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace replayssm {

/// `text` in double quotes. Quotes, backslashes and every byte that is not printable ASCII are
/// escaped, so that a hostile name cannot break the line or drive a terminal; long text is cut.
std::string quote(std::string_view text);

/// "[2, 3]", as shapes are written in a safetensors header.
std::string shape_text(std::span<const std::int64_t> shape);

}  // namespace replayssm
