// Limits and sizes by which launch shapes are chosen, for all families.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/query.h"

namespace replayssm::cuda {

inline constexpr std::int64_t kMostInGrid = 65535;  // of a grid's second and third extent

constexpr std::int64_t round_up_to(std::int64_t bytes, std::int64_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

/// Blocks of `warps` warps and `shared_bytes` that a multiprocessor holds at once, when registers
/// allow for `resident_warps`; 0 if the device allows no such block.
inline int blocks_that_fit(const CudaDeviceInfo& device, std::int32_t shared_bytes, int warps,
                           int resident_warps) {
  constexpr std::size_t kReservedPerBlock = 1024;  // shared memory the driver takes per block
  const auto bytes = static_cast<std::size_t>(shared_bytes);
  if (bytes > device.shared_per_block) return 0;
  const std::size_t fit = device.shared_per_multiprocessor / (bytes + kReservedPerBlock);
  return static_cast<int>(std::min(fit, static_cast<std::size_t>(resident_warps / warps)));
}

}  // namespace replayssm::cuda
