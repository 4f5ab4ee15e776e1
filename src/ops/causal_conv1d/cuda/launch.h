// The causal convolution step on the GPU. Nothing here allocates or synchronizes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "replayssm/cuda.h"
#include "replayssm/cursor.h"
#include "replayssm/dtype.h"

namespace replayssm::cuda {

struct CausalConv1dCudaParams {
  const DeviceRow* rows = nullptr;  // (rows), validated: a bad row is padding
  std::int64_t row_count = 0;
  const Cursor* cursors = nullptr;  // (slots)

  void* ring = nullptr;  // (slots, places, channels) activation type
  std::int64_t ring_slot_stride = 0;
  std::int64_t places = 1;
  std::int64_t channels = 0;
  int width = 0;
  DType activation = DType::kF32;

  const void* u = nullptr;  // (tokens, channels) activation type
  void* out = nullptr;
  std::int64_t u_token_stride = 0, out_token_stride = 0;
  const float* weight = nullptr;  // (width, channels)
  const float* bias = nullptr;    // (channels) or null
  bool silu = true;
};

void launch_causal_conv1d(const CausalConv1dCudaParams& params, cudaStream_t stream);

}  // namespace replayssm::cuda
