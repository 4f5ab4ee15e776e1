// Choices that stay one instruction.
#pragma once

namespace replayssm::cuda::ptx {

/// condition ? yes : no. The compiler may turn a chain of conditional expressions into a branch and
/// copy what follows, shuffles among it, into both arms, where half a warp executes each.
__device__ __forceinline__ float select(bool condition, float yes, float no) {
  float out;
  asm("{ .reg .pred p; setp.ne.b32 p, %3, 0; selp.f32 %0, %1, %2, p; }"
      : "=f"(out)
      : "f"(yes), "f"(no), "r"(static_cast<int>(condition)));
  return out;
}

/// The larger one, or NaN if either is.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(x), "f"(y));
  return out;
}

}  // namespace replayssm::cuda::ptx
