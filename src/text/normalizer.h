// Unicode normalization form C.
#pragma once

#include <string>
#include <string_view>

#include "replayssm/status.h"

namespace replayssm {

/// `text`, which must be valid UTF-8, in NFC. The result is `text` itself where that is known to be
/// normalized already, else a view of *buffer.
Result<std::string_view> to_nfc(std::string_view text, std::string* buffer);

}  // namespace replayssm
