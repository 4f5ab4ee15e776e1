// For src/cuda/ptx/convert.cuh.
#pragma once

#include <cuda_fp16.h>

#include "state/read_copy_codec.h"

namespace replayssm::cuda::ptx {

/// An e4m3 code as f16.
inline std::uint32_t widen_e4m3(unsigned code) {
  const int exponent = static_cast<int>(code >> 3 & 15);
  const int mantissa = static_cast<int>(code & 7);
  float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  if (exponent == 15 && mantissa == 7) value = NAN;
  return __half_as_ushort(__float2half_rn((code & 0x80) != 0 ? -value : value));
}

inline void unpack_e4m3(std::uint32_t codes, std::uint32_t& low, std::uint32_t& high) {
  low = widen_e4m3(codes & 0xff) | widen_e4m3(codes >> 8 & 0xff) << 16;
  high = widen_e4m3(codes >> 16 & 0xff) | widen_e4m3(codes >> 24) << 16;
}

inline std::uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  std::uint32_t codes = 0;
  for (const float x : {x3, x2, x1, x0}) codes = codes << 8 | read_copy::encode_e4m3(x);
  return codes;
}

}  // namespace replayssm::cuda::ptx
