// Whole-file reads and writes, for configurations and saved sessions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "replayssm/status.h"

namespace replayssm {

/// The contents of a regular file of at most `max_bytes`. Errors: kNotFound, not a regular file,
/// larger than max_bytes (kResourceExhausted, with both sizes).
Result<std::string> read_file(const std::string& path, std::uint64_t max_bytes);

/// Writes a new file beside `path`, flushes it to the disk and renames it over `path`, so that a
/// reader, or a crash, sees the old contents or the new and never a part. A symbolic link at `path`
/// is replaced, not followed. On failure `path` is untouched and nothing is left beside it, except
/// that a failure to flush the folder, the last step, leaves the complete new file in place.
Status write_file_atomically(const std::string& path, std::span<const std::byte> bytes);

}  // namespace replayssm
