// Limits and sizes by which launch shapes are chosen, for all families.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/query.h"
#include "replayssm/status.h"

namespace replayssm::cuda {

inline constexpr std::int64_t kMostInGrid = 65535;  // of a grid's second and third extent

/// `config`, unless its blocks of a group exceed the extent along which they are counted.
template <typename Config>
Result<Config> within_grid(Config config, std::int64_t blocks_of_group) {
  if (blocks_of_group <= kMostInGrid) return config;
  return unsupported(blocks_of_group, " blocks for the heads of a group; a launch allows ",
                     kMostInGrid);
}

constexpr std::int64_t round_up_to(std::int64_t bytes, std::int64_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

/// Blocks that the device holds at once, `resident` of them on a multiprocessor.
constexpr std::int64_t wave_of(int resident, const CudaDeviceInfo& device) {
  return std::int64_t{resident} * device.multiprocessors;
}

/// What a family's configuration has from the device once its blocks are counted. Its launch is to
/// overlap with the one before it (cuda/language.cuh) where blocks of two such find room together;
/// else those that come early fill the multiprocessors that are free first, and the work is shared
/// out unevenly.
template <typename Config>
void suit_to_device(const CudaDeviceInfo& device, Config& config) {
  config.shared_limit = static_cast<std::int32_t>(device.shared_per_block);
  config.overlaps = device.compute_capability >= 90 &&
                    2 * config.blocks <= wave_of(config.blocks_per_multiprocessor, device);
}

/// 2^31 / divisor, rounded up: __umulhi(2 n, reciprocal) is n / divisor where n times divisor is
/// below 2^31.
constexpr std::uint32_t reciprocal_of(std::int64_t divisor) {
  return static_cast<std::uint32_t>(((std::int64_t{1} << 31) + divisor - 1) / divisor);
}

/// The most warps up to `most` that `runs` are shared out to without a rest: a power of two.
constexpr std::int32_t warps_that_divide(std::int64_t runs, int most) {
  std::int32_t warps = 1;
  while (2 * warps <= most && runs % (2 * warps) == 0) warps *= 2;
  return warps;
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
