// File descriptors and errno, shared by the files of this folder.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "replayssm/status.h"

namespace replayssm {

/// Owns a file descriptor.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

  /// Closes now; false if close() reported an error, which for a written file means lost data.
  bool close();

 private:
  void reset();

  int fd_ = -1;
};

struct RegularFile {
  UniqueFd fd;
  std::uint64_t size = 0;
};

/// "<path>: <action>: <the system's words for error>", with the code that fits `error`.
Status errno_status(std::string_view path, std::string_view action, int error);

/// Opens for reading, following symbolic links. Errors: not found, anything but a regular file.
Result<RegularFile> open_regular_file(const std::string& path);

}  // namespace replayssm
