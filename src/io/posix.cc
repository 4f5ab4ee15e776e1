#include "io/posix.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace replayssm {

bool UniqueFd::close() {
  const int fd = std::exchange(fd_, -1);
  // EINTR leaves the descriptor closed on Linux; trying again could close somebody else's.
  return fd < 0 || ::close(fd) == 0 || errno == EINTR;
}

void UniqueFd::reset() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Status errno_status(std::string_view path, std::string_view action, int error) {
  StatusCode code = StatusCode::kInternal;
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      code = StatusCode::kNotFound;
      break;
    case ENOMEM:
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case EMFILE:
    case ENFILE:
      code = StatusCode::kResourceExhausted;
      break;
    case EACCES:
    case EPERM:
    case EROFS:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
      code = StatusCode::kInvalidArgument;
      break;
    case EIO:
      code = StatusCode::kDataLoss;
      break;
    default:
      break;
  }
  return make_status(code, path, ": ", action, ": ", std::generic_category().message(error));
}

Result<RegularFile> open_regular_file(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer. Regular files ignore it.
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return errno_status(path, "cannot open", errno);
  struct stat info = {};
  if (::fstat(fd.get(), &info) != 0) return errno_status(path, "cannot stat", errno);
  if (!S_ISREG(info.st_mode)) {
    const char* found = S_ISDIR(info.st_mode)    ? "a directory"
                        : S_ISFIFO(info.st_mode) ? "a FIFO"
                        : S_ISCHR(info.st_mode)  ? "a character device"
                        : S_ISBLK(info.st_mode)  ? "a block device"
                                                 : "a special file";
    return invalid_argument(path, ": found ", found, ", expected a regular file");
  }
  return RegularFile{std::move(fd), static_cast<std::uint64_t>(info.st_size)};
}

}  // namespace replayssm
