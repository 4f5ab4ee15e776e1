// A product that stays one instruction.
#pragma once

#include <cstdint>

namespace replayssm::cuda::ptx {

/// a b in 64 bits. Of the product of two widened numbers the compiler makes one of 64 bits, four
/// instructions, once it has taken either apart.
__device__ __forceinline__ std::int64_t multiply_wide(std::int32_t a, std::int32_t b) {
  std::int64_t out;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(out) : "r"(a), "r"(b));
  return out;
}

}  // namespace replayssm::cuda::ptx
