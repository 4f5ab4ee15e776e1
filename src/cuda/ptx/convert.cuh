// Conversions of packed small numbers.
#pragma once

#include <cstdint>

#include "state/read_copy_codec.h"

namespace replayssm::cuda::ptx {

/// Four e4m3 codes as two pairs of f16, exactly.
__device__ __forceinline__ void unpack_e4m3(std::uint32_t codes, std::uint32_t& low,
                                            std::uint32_t& high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; "
      "}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#else
  // A code's bits, placed as s 0 e e e e m m m 0.., are an f16 of 2^-8 of its value.
  const auto pair = [](std::uint32_t spread) {
    const std::uint32_t bits = (spread & 0x80008000u) | (spread >> 1 & 0x3f803f80u);
    std::uint32_t out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(bits), "r"(0x5c005c00u));
    return out;
  };
  low = pair(__byte_perm(codes, 0, 0x1404));
  high = pair(__byte_perm(codes, 0, 0x3424));
#endif
}

/// The codec's encode_e4m3 of four numbers, the first in the low byte.
__device__ __forceinline__ std::uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint32_t codes;
  asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; "
      "cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h}; }"
      : "=r"(codes)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return codes;
#else
  const auto code = [](float x) { return std::uint32_t{read_copy::encode_e4m3(x)}; };
  return code(x0) | code(x1) << 8 | code(x2) << 16 | code(x3) << 24;
#endif
}

}  // namespace replayssm::cuda::ptx
