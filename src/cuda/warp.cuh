// What every kernel assumes about a warp, and what its lanes do together for all families.
#pragma once

namespace replayssm::cuda {

inline constexpr int kWarpLanes = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

/// The product of the lanes' x after this one, times `later`, which then takes all of them along:
/// decays of newer records, a warp's worth at a time from the newest on.
__device__ __forceinline__ float product_of_later(float x, int lane, float& later) {
  float product = x;
#pragma unroll
  for (int step = 1; step < kWarpLanes; step *= 2) {
    const float other = __shfl_down_sync(kAllLanes, product, step);
    if (lane + step < kWarpLanes) product *= other;
  }
  const float next = __shfl_down_sync(kAllLanes, product, 1);
  const float out = lane == kWarpLanes - 1 ? later : next * later;
  later *= __shfl_sync(kAllLanes, product, 0);
  return out;
}

}  // namespace replayssm::cuda
