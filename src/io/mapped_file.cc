#include "io/mapped_file.h"

#include <sys/mman.h>

#include <cerrno>
#include <limits>
#include <utility>

#include "io/posix.h"

namespace replayssm {

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this != &other) {
    unmap();
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}

MappedFile::~MappedFile() { unmap(); }

void MappedFile::unmap() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  bytes_ = {};
}

Result<MappedFile> MappedFile::open(const std::string& path) {
  RSSM_ASSIGN_OR_RETURN(const RegularFile file, open_regular_file(path));
  if (file.size == 0) return MappedFile();  // mmap refuses length 0
  if (file.size > std::numeric_limits<std::size_t>::max()) {
    return resource_exhausted(path, ": found ", file.size, " bytes, expected at most ",
                              std::numeric_limits<std::size_t>::max(), " to map");
  }
  const auto size = static_cast<std::size_t>(file.size);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.fd.get(), 0);
  if (data == MAP_FAILED) return errno_status(path, "cannot map", errno);
  return MappedFile(std::span(static_cast<const std::byte*>(data), size));
}

}  // namespace replayssm
