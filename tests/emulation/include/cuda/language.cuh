// Launches and dynamic shared memory, for src/cuda/language.cuh.
#pragma once

#include <cuda_runtime_api.h>

namespace replayssm::cuda {

template <typename... Params>
void launch_kernel(void (*kernel)(Params...), dim3 blocks, dim3 threads, std::size_t shared_bytes,
                   cudaStream_t, std::type_identity_t<Params>... params) {
  emulation::launch(blocks, threads, shared_bytes, [=] { kernel(params...); });
}

template <typename... Params>
void launch_overlapped(void (*kernel)(Params...), dim3 blocks, dim3 threads,
                       std::size_t shared_bytes, cudaStream_t stream,
                       std::type_identity_t<Params>... params) {
  launch_kernel(kernel, blocks, threads, shared_bytes, stream, params...);
}

inline unsigned char* dynamic_shared() { return emulation::dynamic_shared(); }

}  // namespace replayssm::cuda
