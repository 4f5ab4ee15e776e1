// Where CUDA C++ has a syntax of its own: launches and dynamic shared memory. tests/emulation has
// its own version of this header.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

namespace replayssm::cuda {

template <typename... Params>
void launch_kernel(void (*kernel)(Params...), dim3 blocks, dim3 threads, std::size_t shared_bytes,
                   cudaStream_t stream, std::type_identity_t<Params>... params) {
  kernel<<<blocks, threads, shared_bytes, stream>>>(params...);
}

/// The same for a kernel that waits for earlier ones itself (cuda/ptx/grid.cuh): its blocks may be
/// brought in while the last of the kernel before it are still at work. sm_90 and later.
template <typename... Params>
void launch_overlapped(void (*kernel)(Params...), dim3 blocks, dim3 threads,
                       std::size_t shared_bytes, cudaStream_t stream,
                       std::type_identity_t<Params>... params) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  static_cast<void>(cudaLaunchKernelEx(&config, kernel, params...));  // cudaGetLastError has it
}

/// A block's dynamic shared memory.
__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  return shared_bytes;
}

}  // namespace replayssm::cuda
