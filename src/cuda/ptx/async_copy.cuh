// Asynchronous copies into shared memory and the barriers they complete on. Bulk copies exist from
// sm_90 on; before that callers copy 16 bytes per lane.
#pragma once

#include <cstdint>

namespace replayssm::cuda::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kHasBulkCopy = true;
#else
inline constexpr bool kHasBulkCopy = false;
#endif

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(std::uint64_t* barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

/// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// Orders this thread's ordinary accesses to shared memory before later bulk copies into it.
__device__ __forceinline__ void fence_proxy_async() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void mbarrier_arrive(std::uint64_t* barrier) {
  asm volatile("{ .reg .b64 token; mbarrier.arrive.shared::cta.b64 token, [%0]; }" ::"r"(
                   shared_address(barrier))
               : "memory");
}

/// Arrives and announces `bytes` that bulk copies will complete on the barrier.
__device__ __forceinline__ void mbarrier_arrive_expect(std::uint64_t* barrier,
                                                       std::uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b64 token; mbarrier.arrive.expect_tx.shared::cta.b64 token, [%0], %1; }" ::"r"(
          shared_address(barrier)),
      "r"(bytes)
      : "memory");
#else
  mbarrier_arrive(barrier);
#endif
}

/// Announces `bytes` that bulk copies will complete on the barrier, without arriving.
__device__ __forceinline__ void mbarrier_expect(std::uint64_t* barrier, std::uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

__device__ __forceinline__ bool mbarrier_test(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; "
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#else
  // Before sm_90 a phase is tested by its parity through the same instruction without suspension.
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
      "p; }"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#endif
  return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
  while (!mbarrier_test(barrier, parity)) {
  }
}

/// 16 bytes from global to shared memory, past L1.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
}

/// 4 bytes from global to shared memory.
__device__ __forceinline__ void copy_async_4(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}

__device__ __forceinline__ void copy_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

/// What this thread has asked for so far is what copy_async_wait_committed waits for.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ void copy_async_wait_committed() {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
}

/// Arrives on the barrier once this thread's copy_async_16 so far have landed.
__device__ __forceinline__ void copy_async_arrive(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

/// A cache policy for data that is read once: evict_first for all of it, as createpolicy encodes
/// it.
inline constexpr std::uint64_t kEvictFirst = 0x12f0000000000000ull;

/// `bytes` (a multiple of 16) from global to shared memory, completing on the barrier.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, std::uint32_t bytes,
                                          std::uint64_t* barrier, std::uint64_t policy) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

/// Asks for `bytes` (a multiple of 16) to be brought to L2.
__device__ __forceinline__ void prefetch_bulk(const void* global, std::uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}

}  // namespace replayssm::cuda::ptx
