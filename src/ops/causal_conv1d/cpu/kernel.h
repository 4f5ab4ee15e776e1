// The causal convolution CPU kernel's interface.
#pragma once

#include <cstdint>

#include "replayssm/cpu.h"
#include "replayssm/dtype.h"

namespace replayssm::cpu {

/// Channels [channel_begin, channel_end) of one row.
struct CausalConv1dTask {
  std::int64_t channels = 0;
  std::int64_t channel_begin = 0;
  std::int64_t channel_end = 0;
  int width = 0;
  const float* weight = nullptr;  // (width, channels)
  const float* bias = nullptr;    // (channels) or null
  bool silu = true;
  void* ring = nullptr;  // (places, channels) activation
  std::int64_t places = 1;
  std::int64_t position = 0;  // of the row's first token
  std::int64_t tokens = 0;
  const void* u = nullptr;
  void* out = nullptr;
  std::int64_t u_token_stride = 0;
  std::int64_t out_token_stride = 0;
};

using CausalConv1dFunction = void (*)(const CausalConv1dTask&);

CausalConv1dFunction causal_conv1d_kernel(CpuIsa isa, DType activation);

}  // namespace replayssm::cpu
