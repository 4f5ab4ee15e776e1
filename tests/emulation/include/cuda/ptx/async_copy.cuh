// For src/cuda/ptx/async_copy.cuh: copies are registered where kernels ask for them, and land where
// kernels wait.
#pragma once

#include <cstdlib>

#include "emulation.h"

namespace replayssm::cuda::ptx {

/// EMULATION_SM80=1: as before sm_90.
inline const bool kHasBulkCopy = std::getenv("EMULATION_SM80") == nullptr;
inline constexpr std::uint64_t kEvictFirst = 0;

inline void mbarrier_init(std::uint64_t* at, std::uint32_t arrivals) {
  emulation::make_barrier(at, arrivals);
}
inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {}

inline void mbarrier_arrive(std::uint64_t* at) {
  emulation::Barrier& barrier = emulation::barrier(at);
  if (++barrier.arrivals > barrier.expected_arrivals) emulation::fail("too many arrivals");
  emulation::current().advanced = true;
}
inline void mbarrier_expect(std::uint64_t* at, std::uint32_t bytes) {
  emulation::barrier(at).expected_bytes += bytes;
}
inline void mbarrier_arrive_expect(std::uint64_t* at, std::uint32_t bytes) {
  mbarrier_expect(at, bytes);
  mbarrier_arrive(at);
}
inline bool mbarrier_test(std::uint64_t* at, std::uint32_t parity) {
  emulation::Barrier& barrier = emulation::barrier(at);
  if (barrier.arrivals == barrier.expected_arrivals &&
      barrier.announced_bytes == barrier.expected_bytes) {
    for (const std::size_t copy : barrier.copies) emulation::land(copy);
    barrier.copies.clear();
    barrier.arrivals = 0;
    barrier.expected_bytes = barrier.announced_bytes = 0;
    barrier.phase ^= 1;
  }
  return barrier.phase != (parity & 1);
}
inline void mbarrier_wait(std::uint64_t* at, std::uint32_t parity) {
  while (!mbarrier_test(at, parity)) emulation::yield();
  emulation::current().advanced = true;
}

inline void copy_async_16(void* shared, const void* global) {
  emulation::current().copies.push_back(emulation::add_copy(shared, global, 16));
}
inline void copy_async_4(void* shared, const void* global) {
  emulation::current().copies.push_back(emulation::add_copy(shared, global, 4));
}
inline void copy_async_commit() {
  emulation::current().committed_copies = emulation::current().copies.size();
}
inline void copy_async_wait_committed() {
  std::vector<std::size_t>& copies = emulation::current().copies;
  const auto end =
      copies.begin() + static_cast<std::ptrdiff_t>(emulation::current().committed_copies);
  std::for_each(copies.begin(), end, emulation::land);
  copies.erase(copies.begin(), end);
  emulation::current().committed_copies = 0;
}
inline void copy_async_wait_all() {
  copy_async_commit();
  copy_async_wait_committed();
}
inline void copy_async_arrive(std::uint64_t* at) {
  emulation::Barrier& barrier = emulation::barrier(at);
  const std::vector<std::size_t>& copies = emulation::current().copies;
  barrier.copies.insert(barrier.copies.end(), copies.begin(), copies.end());
  mbarrier_arrive(at);
}
inline void bulk_copy(void* shared, const void* global, std::uint32_t bytes, std::uint64_t* at,
                      std::uint64_t) {
  if (bytes % 16 != 0) emulation::fail("a bulk copy's size is not a multiple of 16");
  emulation::Barrier& barrier = emulation::barrier(at);
  barrier.copies.push_back(emulation::add_copy(shared, global, bytes));
  barrier.announced_bytes += bytes;
}

inline void prefetch_bulk(const void*, std::uint32_t) {}

}  // namespace replayssm::cuda::ptx
