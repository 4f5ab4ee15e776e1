#include "ops/mamba2/cuda/config.h"

#include <algorithm>
#include <sstream>

#include "cuda/block_shape.h"

namespace replayssm::cuda {
namespace {

std::int32_t aligned(std::int64_t bytes, std::int64_t to) {
  return static_cast<std::int32_t>(round_up_to(bytes, to));
}

Mamba2SharedPlan plan_shared(const Mamba2CudaParams& p, const Mamba2Launch& launch) {
  const std::int64_t state_bytes = static_cast<std::int64_t>(size_of(p.checkpoint));
  const std::int64_t act_bytes = static_cast<std::int64_t>(size_of(p.activation));
  const std::int64_t places = p.limits.record_places();
  Mamba2SharedPlan plan;
  plan.stage_x_offset = static_cast<std::int32_t>(kTileRows * p.state_size * state_bytes);
  plan.stage_bytes = aligned(plan.stage_x_offset + places * kTileRows * act_bytes, 128);
  std::int64_t at = std::int64_t{launch.warps} * launch.stages * plan.stage_bytes;
  plan.table_offset = static_cast<std::int32_t>(at);
  plan.table_stride =
      aligned(p.limits.draft_capacity * (mamba2_entries(mamba2_variant(p)) + 1) + 2 * places, 4);
  at += aligned(std::int64_t{launch.warps} * plan.table_stride * 4, 16);
  plan.barrier_offset = static_cast<std::int32_t>(at);
  at += std::int64_t{launch.warps} * launch.stages * 8;
  plan.bytes = aligned(at, 128);
  return plan;
}

/// Cuts the step into runs: long enough to amortize what a run prepares, short enough that the last
/// ones do not leave multiprocessors idle.
void cut_runs(const Mamba2CudaParams& p, const CudaDeviceInfo& device, const Mamba2Tuning& tuning,
              Mamba2Launch& launch) {
  // Measured on an H200: sixteen tiles amortize a run's preparation; below three and a half waves
  // of sixteen warps per multiprocessor the last wave costs more than that saves, down to four
  // tiles, and below two waves further.
  constexpr std::int64_t kLongest = 16;
  constexpr std::int64_t kShort = 4;
  const std::int64_t wave = std::int64_t{16} * device.multiprocessors;
  launch.head_dim = static_cast<std::int32_t>(p.head_dim);
  launch.heads_per_group = static_cast<std::int32_t>(p.heads / p.groups);
  launch.tiles_per_head = launch.head_dim / kTileRows;
  launch.tiles_per_group = launch.heads_per_group * launch.tiles_per_head;
  const std::int64_t back = p.head_dim - kTileRows;
  launch.state_jump = p.state_head_stride - back * p.state_size;
  launch.x_jump = p.x_head_stride - back;
  launch.ring_x_jump = p.ring_x_head_stride - back;
  launch.y_jump = p.y_head_stride - back;
  const std::int64_t tiles = p.row_count * p.groups * launch.tiles_per_group;
  std::int64_t per_run = tuning.tiles_per_run;
  if (per_run == 0) {
    per_run = kLongest;
    while (per_run > kShort && tiles / per_run < wave * 7 / 2) per_run /= 2;
    while (per_run > 1 && tiles / per_run < wave * 7 / 4) per_run /= 2;
  }
  launch.tiles_per_run =
      static_cast<std::int32_t>(std::min<std::int64_t>(per_run, launch.tiles_per_group));
  launch.stages = std::min(launch.stages, launch.tiles_per_run);
  launch.runs_per_group =
      (launch.tiles_per_group + launch.tiles_per_run - 1) / launch.tiles_per_run;
}

}  // namespace

Mamba2Variant mamba2_variant(const Mamba2CudaParams& p) {
  const ReplayLimits& limits = p.limits;
  if (p.state_size != 128 || limits.draft_capacity > 8 || limits.record_places() > 32) {
    return Mamba2Variant::kGeneral;
  }
  const bool one_token = limits.draft_capacity == 1 && p.checkpoint == DType::kF32 &&
                         p.copy.format == ReadCopyFormat::kNone;
  return one_token ? Mamba2Variant::kOneToken : Mamba2Variant::kSmall;
}

std::string Mamba2CudaConfig::to_string() const {
  std::ostringstream out;
  out << launch.stages << " stages x " << launch.warps << " warps, " << launch.tiles_per_run
      << " tiles per run, " << blocks << " blocks, " << launch.shared.bytes << " B shared, "
      << blocks_per_multiprocessor << " per SM: " << reason;
  return std::move(out).str();
}

Result<Mamba2CudaConfig> choose_mamba2_config(const Mamba2CudaParams& p,
                                              const CudaDeviceInfo& device,
                                              const Mamba2Tuning& tuning) {
  if (p.groups > kMostInGrid) {
    return unsupported(p.groups, " groups; a launch allows ", kMostInGrid);
  }
  // Tried in this order: the first with the wanted warps per multiprocessor wins, else the one with
  // most. A tile of fp32 is enough for a warp to have in flight while others work; a tile of
  // two-byte elements is half of that.
  struct Candidate {
    int warps, stages;
    const char* reason;
  };
  static constexpr Candidate kCandidates[] = {
      {4, 2, "two-byte tiles: two stages per warp keep enough loads in flight"},
      {4, 1, "one stage per warp: enough in flight, or all there is room for"},
      {3, 1, "a fourth warp would cost a resident block"},
      {2, 1, "long windows leave room for two warps"},
      {1, 1, "long windows leave room for one warp"},
  };
  const bool wide = p.checkpoint == DType::kF32;
  const int wanted_warps = kMamba2MaxWarps * mamba2_resident_blocks(mamba2_variant(p));

  Mamba2CudaConfig best;
  int most_warps = 0;
  std::int32_t least_bytes = std::numeric_limits<std::int32_t>::max();
  for (const Candidate& candidate : kCandidates) {
    if (candidate.stages == 2 && wide) continue;
    Mamba2CudaConfig config;
    Mamba2Launch& launch = config.launch;
    launch.warps = tuning.warps != 0 ? tuning.warps : candidate.warps;
    launch.stages = tuning.stages != 0 ? tuning.stages : candidate.stages;
    config.reason = tuning.warps != 0 || tuning.stages != 0 ? "as asked" : candidate.reason;
    cut_runs(p, device, tuning, launch);
    const std::int64_t runs = p.row_count * p.groups * launch.runs_per_group;
    // A block per run where there are fewer runs than multiprocessors can take.
    if (tuning.warps == 0 && runs < std::int64_t{4} * device.multiprocessors) launch.warps = 1;
    launch.warps = std::min(launch.warps, launch.runs_per_group);
    config.blocks_per_group = (launch.runs_per_group + launch.warps - 1) / launch.warps;
    config.blocks = config.blocks_per_group * p.groups * p.row_count;
    launch.shared = plan_shared(p, launch);
    config.blocks_per_multiprocessor =
        blocks_that_fit(device, launch.shared.bytes, launch.warps, wanted_warps);
    least_bytes = std::min(least_bytes, launch.shared.bytes);
    const int warps = config.blocks_per_multiprocessor * launch.warps;
    if (warps > most_warps) {
      best = config;
      most_warps = warps;
    }
    if (warps >= wanted_warps) break;
    if (launch.stages < candidate.stages || launch.warps < candidate.warps) break;  // few runs
  }
  if (most_warps == 0) {
    return unsupported("a block needs ", least_bytes, " bytes of shared memory for window ",
                       p.limits.window, ", draft capacity ", p.limits.draft_capacity,
                       " and state size ", p.state_size, "; the device allows ",
                       device.shared_per_block);
  }
  best.shared_limit = static_cast<std::int32_t>(device.shared_per_block);
  return best;
}

}  // namespace replayssm::cuda
