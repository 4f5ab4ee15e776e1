#include "io/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>

#include "io/posix.h"

namespace replayssm {

namespace {

// Linux moves at most 0x7ffff000 bytes a call, and a chunk well below keeps every type in range.
constexpr std::size_t kChunk = std::size_t{1} << 28;

/// A file that is removed unless it was renamed to its final place.
struct TemporaryFile {
  std::string path;
  UniqueFd fd;
  bool keep = false;

  TemporaryFile(std::string file_path, UniqueFd file)
      : path(std::move(file_path)), fd(std::move(file)) {}
  TemporaryFile(TemporaryFile&& other) noexcept
      : path(std::move(other.path)),
        fd(std::move(other.fd)),
        keep(std::exchange(other.keep, true)) {}
  TemporaryFile& operator=(TemporaryFile&&) = delete;
  ~TemporaryFile() {
    if (!keep) ::unlink(path.c_str());
  }
};

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "./" : path.substr(0, slash + 1);
}

Result<TemporaryFile> create_temporary(const std::string& target) {
  static std::atomic<std::uint64_t> counter{0};
  // The name does not contain the target's, which may already be as long as the system allows.
  const std::string prefix = folder_of(target) + ".replayssm-" + std::to_string(::getpid()) + "-";
  constexpr int kAttempts = 100;  // a crashed process with the same id may have left some names
  for (int i = 0; i < kAttempts; ++i) {
    std::string path = prefix + std::to_string(counter++) + ".tmp";
    // Not mkstemp: its mode 0600 would survive the rename, while 0666 obeys the umask.
    UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (fd.valid()) return TemporaryFile(std::move(path), std::move(fd));
    if (errno != EEXIST) return errno_status(target, "cannot create a file beside it", errno);
  }
  return errno_status(target, "cannot create a file beside it", EEXIST);
}

Status write_all(const std::string& target, int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), std::min(bytes.size(), kChunk));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno_status(target, "cannot write", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  return {};
}

}  // namespace

Result<std::string> read_file(const std::string& path, std::uint64_t max_bytes) {
  RSSM_ASSIGN_OR_RETURN(const RegularFile file, open_regular_file(path));
  if (file.size > max_bytes) {
    return resource_exhausted(path, ": found ", file.size, " bytes, expected at most ", max_bytes);
  }
  // One spare byte sees the end of the file, or that it grew since its size was taken.
  std::string text(static_cast<std::size_t>(file.size) + 1, '\0');
  std::size_t filled = 0;
  while (true) {
    const ssize_t count =
        ::read(file.fd.get(), text.data() + filled, std::min(text.size() - filled, kChunk));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno_status(path, "cannot read", errno);
    if (count == 0) break;
    filled += static_cast<std::size_t>(count);
    if (filled > max_bytes) {
      return resource_exhausted(path, ": found more than ", max_bytes, " bytes, expected at most ",
                                max_bytes);
    }
    if (filled == text.size()) text.resize(2 * text.size());
  }
  text.resize(filled);
  return text;
}

Status write_file_atomically(const std::string& path, std::span<const std::byte> bytes) {
  RSSM_ASSIGN_OR_RETURN(TemporaryFile file, create_temporary(path));
  RSSM_RETURN_IF_ERROR(write_all(path, file.fd.get(), bytes));
  if (::fsync(file.fd.get()) != 0) return errno_status(path, "cannot flush", errno);
  if (!file.fd.close()) return errno_status(path, "cannot close", errno);
  if (::rename(file.path.c_str(), path.c_str()) != 0) {
    return errno_status(path, "cannot replace", errno);
  }
  file.keep = true;
  // The rename itself is on the disk only once the folder is.
  const UniqueFd folder(::open(folder_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder.valid()) return errno_status(path, "cannot open its folder to flush it", errno);
  // EINVAL: a file system whose folders cannot be flushed one by one.
  if (::fsync(folder.get()) != 0 && errno != EINVAL) {
    return errno_status(path, "cannot flush its folder", errno);
  }
  return {};
}

}  // namespace replayssm
