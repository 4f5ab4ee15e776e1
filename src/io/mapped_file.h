// MappedFile: a whole file as read-only memory.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "replayssm/status.h"

namespace replayssm {

/// Owns a read-only mapping of a whole file. Moving it keeps the address of the bytes. The file
/// must not be truncated while it is mapped: the system answers reads of the lost part with SIGBUS.
class MappedFile {
 public:
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  /// Follows symbolic links; an empty file gives empty bytes(). Errors: kNotFound; anything but a
  /// regular file (kInvalidArgument); no address space (kResourceExhausted).
  static Result<MappedFile> open(const std::string& path);

  /// Starts on a page boundary.
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  explicit MappedFile(std::span<const std::byte> bytes) : bytes_(bytes) {}
  void unmap();

  std::span<const std::byte> bytes_;
};

}  // namespace replayssm
