// What every kernel assumes about a warp, and what its lanes do together for all families.
#pragma once

#include "cuda/ptx/select.cuh"

namespace replayssm::cuda {

inline constexpr int kWarpLanes = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

/// The product of the lanes' x after this one, of kLanes lanes together, times `later`, which then
/// takes all of them along: decays of newer records, a warp's worth at a time from the newest on.
/// `lane`: of those.
template <int kLanes = kWarpLanes>
__device__ __forceinline__ float product_of_later(float x, int lane, float& later) {
  float product = x;
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const float other = __shfl_down_sync(kAllLanes, product, step, kLanes);
    if (lane + step < kLanes) product *= other;
  }
  const float next = __shfl_down_sync(kAllLanes, product, 1, kLanes);
  const float out = lane == kLanes - 1 ? later : next * later;
  later *= __shfl_sync(kAllLanes, product, 0, kLanes);
  return out;
}

/// Halves the sums that a lane holds: it keeps kHalf of them, and gets what its partner has of
/// those.
template <int kHalf, int kMask, int kCount>
__device__ __forceinline__ void halve_sums(float (&sum)[kCount], int lane) {
  const bool upper = (lane & kMask) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float send = ptx::select(upper, sum[i], sum[i + kHalf]);
    const float keep = ptx::select(upper, sum[i + kHalf], sum[i]);
    sum[i] = keep + __shfl_xor_sync(kAllLanes, send, kMask);
  }
}
template <int kHalf, int kMask, int kCount>
__device__ __forceinline__ void halve_to_one(float (&sum)[kCount], int lane) {
  if constexpr (kHalf > 0) {
    halve_sums<kHalf, kMask>(sum, lane);
    halve_to_one<kHalf / 2, kMask / 2>(sum, lane);
  }
}
/// Adds up kCount numbers, a power of two, over each kLanes lanes; lane i of them gets the sum of
/// number i / (kLanes / kCount). n sums take n - 1 + log2(lanes / n) exchanges.
template <int kLanes, int kCount>
__device__ __forceinline__ float team_sum(float (&sum)[kCount], int lane) {
  static_assert((kCount & (kCount - 1)) == 0 && kCount <= kLanes);
  halve_to_one<kCount / 2, kLanes / 2>(sum, lane);
  float total = sum[0];
#pragma unroll
  for (int rest = kLanes / kCount / 2; rest > 0; rest /= 2) {
    total += __shfl_xor_sync(kAllLanes, total, rest);
  }
  return total;
}

}  // namespace replayssm::cuda
