// What launching a recurrence's step has in common for all families.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/block_shape.h"
#include "cuda/grid_tail.h"
#include "cuda/language.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/runtime.h"
#include "cuda/warp.cuh"
#include "replayssm/dtype.h"
#include "replayssm/read_copy.h"

namespace replayssm::cuda {

/// The refusal of a combination of types for which there is no kernel.
inline Status no_step_kernel(DType checkpoint, DType activation, ReadCopyFormat copy) {
  return unsupported("no CUDA kernel for a ", to_string(checkpoint), " checkpoint with ",
                     to_string(activation), " activations and read copy ", to_string(copy),
                     "; there are f32, bf16 and f16 checkpoints with f32 and bf16 activations, and "
                     "read copies of f32 and bf16 checkpoints with bf16 activations");
}

// A step's grid is (groups, blocks of a group, places of rows). Blocks go to multiprocessors in
// turn, and where flushes are cut into fewer runs only the first blocks of a group have some: were
// a group's blocks the ones that follow each other, a few multiprocessors would do all flushes.

__device__ __forceinline__ int group_of_block() { return static_cast<int>(blockIdx.x); }
/// Of those at one place.
__device__ __forceinline__ int block_in_group() { return static_cast<int>(blockIdx.y); }

/// What the block has of a grid that may be cut finer at its end.
__device__ __forceinline__ GridPlace place_of_block(const GridTail& tail) {
  return grid_place(tail, block_in_group(), static_cast<int>(blockIdx.z),
                    static_cast<int>(gridDim.y));
}

/// What a step's kernel begins with: its parameters are brought to the constant cache while there
/// is nothing else to wait for (each 64 bytes of them are a miss in a launch of their own), then it
/// waits for the kernels before it.
template <typename Params, typename Launch>
__device__ __forceinline__ void begin_step_kernel(const Params& params, const Launch& launch) {
  const auto touch = [](const auto& value) {
    const auto* words = reinterpret_cast<const unsigned*>(&value);
#pragma unroll
    for (unsigned i = 0; i < sizeof(value) / 4; i += 16) asm volatile("" ::"r"(words[i]));
  };
  touch(params);
  touch(launch);
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_begin();
}

/// Launches a step's kernel over `groups` of `blocks` each and places of rows, as many rows at a
/// time as a grid takes. `Config`: a family's, whose launch has warps and shared.bytes, and which
/// says whether the launch overlaps with the one before it.
template <typename Params, typename Launch, typename Config>
Status launch_step_kernel(const char* name, void (*kernel)(Params, Launch), const Params& params,
                          const Config& config, int max_warps, std::int64_t groups,
                          std::int64_t blocks, const GridTail& tail, cudaStream_t stream) {
  if (config.blocks == 0) return {};
  const Launch& launch = config.launch;
  if (launch.warps < 1 || launch.warps > max_warps) {
    return invalid_argument("warps per block is ", launch.warps, ", expected 1 to ", max_warps);
  }
  // The device's limit, not this launch's need: the attribute is the kernel's, and another thread's
  // launch may need more.
  RSSM_RETURN_IF_ERROR(to_status(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, config.shared_limit),
      name));
  Params slice = params;
  for (std::int64_t first = 0; first < params.row_count; first += kMostInGrid) {
    slice.rows = params.rows + first;
    slice.row_count = std::min(kMostInGrid, params.row_count - first);
    const dim3 grid(static_cast<unsigned>(groups), static_cast<unsigned>(blocks),
                    static_cast<unsigned>(tail.places(slice.row_count)));
    const dim3 threads(static_cast<unsigned>(launch.warps * kWarpLanes));
    const auto shared_bytes = static_cast<std::size_t>(launch.shared.bytes);
    if (config.overlaps) {
      launch_overlapped(kernel, grid, threads, shared_bytes, stream, slice, launch);
    } else {
      launch_kernel(kernel, grid, threads, shared_bytes, stream, slice, launch);
    }
    RSSM_RETURN_IF_ERROR(to_status(cudaGetLastError(), name));
  }
  return {};
}

}  // namespace replayssm::cuda
