// What every kernel assumes about a warp.
#pragma once

namespace replayssm::cuda {

inline constexpr int kWarpLanes = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

}  // namespace replayssm::cuda
