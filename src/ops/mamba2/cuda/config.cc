#include "ops/mamba2/cuda/config.h"

#include <algorithm>
#include <sstream>

namespace replayssm::cuda {
namespace {

constexpr int kRegisterLimitedBlocks = 3;        // __launch_bounds__ of the kernel
constexpr std::size_t kReservedPerBlock = 1024;  // shared memory the driver takes per block

std::int32_t aligned(std::int64_t bytes, std::int64_t to) {
  return static_cast<std::int32_t>((bytes + to - 1) / to * to);
}

Mamba2SharedPlan plan_shared(const Mamba2CudaParams& p, const Mamba2CudaConfig& config) {
  const std::int64_t state_bytes = static_cast<std::int64_t>(size_of(p.checkpoint));
  const std::int64_t act_bytes = static_cast<std::int64_t>(size_of(p.activation));
  const std::int64_t places = p.limits.record_places();
  const std::int64_t tokens = p.limits.draft_capacity;
  const Mamba2Launch& launch = config.launch;
  const std::int64_t heads = std::min<std::int64_t>(
      p.heads / p.groups,
      (launch.tiles_per_block + launch.tiles_per_head - 2) / launch.tiles_per_head + 1);
  Mamba2SharedPlan plan;
  plan.stage_x_offset = static_cast<std::int32_t>(config.tile_rows * p.state_size * state_bytes);
  plan.stage_bytes = aligned(plan.stage_x_offset + places * config.tile_rows * act_bytes, 128);
  std::int64_t at = std::int64_t{launch.warps} * launch.stages * plan.stage_bytes;
  plan.b_offset = static_cast<std::int32_t>(at);
  at += aligned(places * p.state_size * act_bytes, 16);
  plan.c_offset = static_cast<std::int32_t>(at);
  at += aligned(tokens * p.state_size * act_bytes, 16);
  plan.bc_offset = static_cast<std::int32_t>(at);
  at += aligned(tokens * places * 4, 16);
  plan.table_offset = static_cast<std::int32_t>(at);
  plan.table_stride = static_cast<std::int32_t>(3 * places + 1);
  at += aligned(heads * plan.table_stride * 4, 16);
  plan.barrier_offset = static_cast<std::int32_t>(at);
  at += std::int64_t{launch.warps} * launch.stages * 8;
  plan.bytes = aligned(at, 128);
  return plan;
}

int blocks_that_fit(const CudaDeviceInfo& device, std::int32_t shared_bytes) {
  if (static_cast<std::size_t>(shared_bytes) > device.shared_per_block) return 0;
  const std::size_t fit = device.shared_per_multiprocessor /
                          (static_cast<std::size_t>(shared_bytes) + kReservedPerBlock);
  return static_cast<int>(std::min<std::size_t>(fit, kRegisterLimitedBlocks));
}

/// Cuts the row into blocks: long enough to amortize a block's preparation, short enough that every
/// multiprocessor gets several and the last ones do not leave the others idle.
void cut_blocks(const Mamba2CudaParams& p, const CudaDeviceInfo& device, const Mamba2Tuning& tuning,
                Mamba2CudaConfig& config) {
  constexpr std::int64_t kWaves = 4;
  Mamba2Launch& launch = config.launch;
  launch.tiles_per_head = static_cast<std::int32_t>(p.head_dim / config.tile_rows);
  launch.tiles_per_group = static_cast<std::int32_t>(p.heads / p.groups) * launch.tiles_per_head;
  const std::int64_t tiles = p.row_count * p.groups * launch.tiles_per_group;
  int per_block = tuning.tiles_per_block;
  if (per_block == 0) {
    const std::int64_t wanted = kWaves * device.multiprocessors * kRegisterLimitedBlocks;
    per_block = launch.warps * 4;
    while (per_block > launch.warps && tiles / per_block < wanted) per_block /= 2;
    while (per_block > 1 && tiles / per_block < device.multiprocessors) per_block /= 2;
  }
  launch.tiles_per_block = std::min(per_block, launch.tiles_per_group);
  launch.warps = std::min(launch.warps, launch.tiles_per_block);
  launch.stages =
      std::min(launch.stages, (launch.tiles_per_block + launch.warps - 1) / launch.warps);
  launch.blocks_per_group =
      (launch.tiles_per_group + launch.tiles_per_block - 1) / launch.tiles_per_block;
  launch.blocks_per_row = launch.blocks_per_group * static_cast<std::int32_t>(p.groups);
  config.blocks = p.row_count * launch.blocks_per_row;
}

}  // namespace

std::string Mamba2CudaConfig::to_string() const {
  std::ostringstream out;
  out << tile_rows << " rows x " << launch.stages << " stages x " << launch.warps << " warps, "
      << launch.tiles_per_block << " tiles per block, " << blocks << " blocks, "
      << launch.shared.bytes << " B shared, " << blocks_per_multiprocessor << " per SM: " << reason;
  return std::move(out).str();
}

Result<Mamba2CudaConfig> choose_mamba2_config(const Mamba2CudaParams& p,
                                              const CudaDeviceInfo& device,
                                              const Mamba2Tuning& tuning) {
  // Tried in this order; the first that reaches the wanted warps per multiprocessor wins, else the
  // one with most warps. More stages than two buy nothing while enough warps are resident.
  struct Candidate {
    int warps, stages;
    const char* reason;
  };
  static constexpr Candidate kCandidates[] = {
      {4, 2, "two stages per warp and twelve warps keep enough loads in flight"},
      {3, 2, "a fourth warp would cost a resident block"},
      {2, 2, "long windows leave room for two warps"},
      {4, 1, "one stage: no room for a second"},
      {2, 1, "one stage and two warps: no room for more"},
      {1, 1, "one tile at a time: no room for more"},
  };
  constexpr int kWantedWarps = 12;

  Mamba2CudaConfig best;
  int best_warps = 0;
  std::int32_t least_bytes = std::numeric_limits<std::int32_t>::max();
  for (const Candidate& candidate : kCandidates) {
    Mamba2CudaConfig config;
    config.tile_rows = tuning.tile_rows != 0 ? tuning.tile_rows : p.state_size > 128 ? 8 : 16;
    config.launch.warps = tuning.warps != 0 ? tuning.warps : candidate.warps;
    config.launch.stages = tuning.stages != 0 ? tuning.stages : candidate.stages;
    config.reason = tuning.warps != 0 || tuning.stages != 0 ? "as asked" : candidate.reason;
    cut_blocks(p, device, tuning, config);
    config.launch.shared = plan_shared(p, config);
    config.blocks_per_multiprocessor = blocks_that_fit(device, config.launch.shared.bytes);
    least_bytes = std::min(least_bytes, config.launch.shared.bytes);
    const int warps = config.blocks_per_multiprocessor * config.launch.warps;
    if (warps > best_warps) {
      best = config;
      best_warps = warps;
    }
    if (warps >= kWantedWarps) break;
    if (config.launch.warps < candidate.warps) break;  // few tiles: nothing else to try
  }
  if (best_warps == 0) {
    return unsupported("a block needs ", least_bytes, " bytes of shared memory for window ",
                       p.limits.window, ", draft capacity ", p.limits.draft_capacity,
                       " and state size ", p.state_size, "; the device allows ",
                       device.shared_per_block);
  }
  if (best.blocks > std::numeric_limits<std::int32_t>::max()) {
    return unsupported("a step of ", p.row_count, " rows needs ", best.blocks,
                       " blocks; a launch allows ", std::numeric_limits<std::int32_t>::max());
  }
  return best;
}

}  // namespace replayssm::cuda
