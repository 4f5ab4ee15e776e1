// Address space without memory behind it: only pages that are touched cost anything.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <span>

namespace replayssm::testing {

class VirtualMemory {
 public:
  explicit VirtualMemory(std::size_t bytes) : bytes_(bytes) {
    void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED) data_ = static_cast<std::byte*>(p);
  }
  ~VirtualMemory() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }
  VirtualMemory(const VirtualMemory&) = delete;
  VirtualMemory& operator=(const VirtualMemory&) = delete;

  /// Null where the system grants no such range.
  std::byte* data() const { return data_; }
  std::span<std::byte> span() const { return {data_, bytes_}; }

 private:
  std::size_t bytes_;
  std::byte* data_ = nullptr;
};

}  // namespace replayssm::testing
