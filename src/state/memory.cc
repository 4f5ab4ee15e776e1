#include "state/memory.h"

#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace replayssm {

std::shared_ptr<std::byte> reserve_memory(std::size_t bytes) {
#if defined(__linux__)
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  madvise(p, bytes, MADV_HUGEPAGE);  // advice only: where it is refused small pages serve
  return {static_cast<std::byte*>(p), [bytes](std::byte* q) { munmap(q, bytes); }};
#else
  constexpr std::align_val_t kAlignment{64};
  auto* p = static_cast<std::byte*>(::operator new(bytes, kAlignment, std::nothrow));
  if (p == nullptr) return nullptr;
  std::memset(p, 0, bytes);
  return {p, [](std::byte* q) { ::operator delete(q, kAlignment); }};
#endif
}

}  // namespace replayssm
