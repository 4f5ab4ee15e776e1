#include "ops/mamba2/cuda/config.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "cuda/block_shape.h"

namespace replayssm::cuda {
namespace {

std::int32_t aligned(std::int64_t bytes, std::int64_t to) {
  return static_cast<std::int32_t>(round_up_to(bytes, to));
}

/// Sizes of the stages and what lies behind them; sets how many stages a row that folds has.
Mamba2SharedPlan plan_shared(const Mamba2CudaParams& p, Mamba2Launch& launch) {
  const std::int64_t state_bytes = static_cast<std::int64_t>(size_of(p.checkpoint));
  const std::int64_t act_bytes = static_cast<std::int64_t>(size_of(p.activation));
  const std::int64_t places = p.limits.record_places();
  const std::int64_t x_bytes = places * kTileRows * act_bytes;
  const bool copied = p.copy.format != ReadCopyFormat::kNone;
  Mamba2SharedPlan plan;
  plan.stage_x_offset = static_cast<std::int32_t>(kTileRows * p.state_size * state_bytes);
  plan.stage_bytes = aligned(plan.stage_x_offset + x_bytes, 32);
  plan.copy_x_offset =
      aligned(launch.copy_tiles * staged_copy_bytes(p.copy.format, p.state_size), 16);
  plan.copy_stage_bytes = aligned(plan.copy_x_offset + launch.copy_tiles * x_bytes, 32);
  // B of the records, their gain x for the rows of a pass, their factors.
  const std::int64_t scratch =
      kFoldRecords *
      (p.state_size * act_bytes + mamba2_pass_rows(static_cast<int>(p.state_size)) * 4 + 4);
  const std::int64_t stage = copied ? plan.copy_stage_bytes : plan.stage_bytes;
  plan.warp_bytes =
      aligned(std::max<std::int64_t>(launch.stages * stage, plan.stage_bytes + scratch), 32);
  launch.state_stages = std::min(launch.stages, plan.warp_bytes / plan.stage_bytes);
  launch.fold_stages = std::min(
      launch.stages, static_cast<std::int32_t>((plan.warp_bytes - scratch) / plan.stage_bytes));
  std::int64_t at = std::int64_t{launch.warps} * plan.warp_bytes;
  plan.table_offset = static_cast<std::int32_t>(at);
  plan.table_stride = aligned(
      p.limits.draft_capacity * (mamba2_entries(mamba2_variant(p)) + 1) + 2 * places + 2, 4);
  at += aligned(std::int64_t{launch.warps} * plan.table_stride * 4, 16);
  plan.barrier_offset = static_cast<std::int32_t>(at);
  at += std::int64_t{launch.warps} * launch.stages * 8;
  plan.bytes = aligned(at, 128);
  return plan;
}

/// Lengths of runs, in tiles: of rows that read (or are committed), and of rows that flush.
struct Runs {
  std::int64_t replay, fold;
};

/// Sixteen warps to a multiprocessor: what runs are counted against.
std::int64_t warps_of(const CudaDeviceInfo& device) {
  return std::int64_t{16} * std::max(1, device.multiprocessors);
}

/// Runs for all of those warps that the step is to have at least, from which on the last ones cost
/// little. Measured on an H200: with one token one each is enough.
std::int64_t enough_runs(const Mamba2CudaParams& p, const CudaDeviceInfo& device) {
  const std::int64_t warps = warps_of(device);
  return mamba2_variant(p) == Mamba2Variant::kOneToken ? warps * 9 / 10 : warps * 7 / 4;
}

/// A run of `length` tiles, halved down to `shortest` until there are `enough`.
std::int64_t shortened(std::int64_t length, std::int64_t shortest, std::int64_t tiles,
                       std::int64_t enough) {
  while (length > shortest && tiles / length < enough) length = (length + 1) / 2;
  return length;
}

/// Tiles of a run: a head's three to five, an even part of a larger head's, or those of as many
/// smaller heads as have four. Runs are cut from a group: where parts are uneven they cross heads.
std::int64_t part_of_heads(std::int64_t tiles_per_head) {
  if (tiles_per_head < 3) return 4 / tiles_per_head * tiles_per_head;
  const std::int64_t parts = (tiles_per_head + 4) / 5;
  return (tiles_per_head + parts - 1) / parts;
}

/// Runs of checkpoints. A run prepares something for each of its heads and little for itself, so
/// that one head is long enough; where tiles are few, half of one ends more evenly. Rows that flush
/// are arithmetic: in runs so long that most warps are left to rows that read, and so short that
/// the last of them do not end the step. Measured on an H200 for batches of 8 to 512.
Runs runs_of_states(const Mamba2CudaParams& p, std::int64_t tiles, std::int64_t tiles_per_head,
                    const CudaDeviceInfo& device) {
  const bool wide = p.checkpoint == DType::kF32;
  const Mamba2Variant variant = mamba2_variant(p);
  const bool one_token = variant == Mamba2Variant::kOneToken;
  const std::int64_t part = part_of_heads(tiles_per_head);
  const std::int64_t warps = warps_of(device);
  Runs runs{part, part};
  // The general variant prepares more for a run.
  if (variant == Mamba2Variant::kGeneral) runs.replay *= 2;
  // One token on fp32 states waits for memory: it wants runs that begin at different times.
  if (one_token && wide && part % 2 == 0 && tiles < 22 * warps) runs.replay /= 2;
  runs.replay = shortened(runs.replay, 2, tiles, enough_runs(p, device));
  // A quarter of a warp's share of the step, or a third; in whole replaying runs if it has them.
  const std::int64_t parts = warps * (one_token || wide ? 4 : 3);
  const std::int64_t longest = std::max(
      {(tiles + parts - 1) / parts, one_token ? runs.replay / 2 : runs.replay, std::int64_t{1}});
  runs.fold =
      longest < runs.replay ? longest : (longest + runs.replay / 2) / runs.replay * runs.replay;
  runs.fold = std::min(runs.fold, 4 * part);
  return runs;
}

/// Runs of read copies, which leave little to load: long ones prepare less.
Runs runs_of_copies(const Mamba2CudaParams& p, std::int64_t tiles, const CudaDeviceInfo& device) {
  const std::int64_t warps = warps_of(device);
  const bool one_token = mamba2_variant(p) == Mamba2Variant::kOneToken;
  std::int64_t most = 16;
  // Drafts, measured on an H200: down to four tiles twice as many runs are better.
  if (!one_token) most = shortened(most, 4, tiles, warps * 7 / 2);
  most = shortened(most, 1, tiles, enough_runs(p, device));
  // A run that folds lasts several times as long: where runs are few, half of one is long enough.
  const bool few = one_token && tiles / most < 2 * warps;
  return {most, std::min<std::int64_t>(8, few ? std::max<std::int64_t>(1, most / 2) : most)};
}

/// Runs of `tiles` tiles that a group is cut into.
std::int32_t runs_of_group(const Mamba2Launch& launch, std::int32_t tiles) {
  return (launch.tiles_per_group + tiles - 1) / tiles;
}
/// Whether there are fewer replaying runs than multiprocessors can take: then each has a block.
bool has_few_runs(const Mamba2CudaParams& p, const Mamba2Launch& launch,
                  const CudaDeviceInfo& device) {
  return p.row_count * p.groups * runs_of_group(launch, launch.tiles_per_run) < wave_of(4, device);
}

/// Cuts the step into runs: long enough to amortize what a run prepares, short enough that the last
/// ones do not leave multiprocessors idle. No block has warps that rows of one kind or the other
/// leave without a run while others have several: it holds its shared memory for all of them.
void cut_runs(const Mamba2CudaParams& p, const CudaDeviceInfo& device, const Mamba2Tuning& tuning,
              Mamba2Launch& launch) {
  launch.head_dim = static_cast<std::int32_t>(p.head_dim);
  launch.heads_per_group = static_cast<std::int32_t>(p.heads / p.groups);
  launch.tiles_per_head = launch.head_dim / kTileRows;
  launch.tiles_per_group = launch.heads_per_group * launch.tiles_per_head;
  launch.state_jump = p.state_head_stride - p.head_dim * p.state_size;
  launch.x_jump = p.x_head_stride - p.head_dim;
  launch.ring_x_jump = p.ring_x_head_stride - p.head_dim;
  launch.y_jump = p.y_head_stride - p.head_dim;
  const std::int64_t tiles = p.row_count * p.groups * launch.tiles_per_group;
  const Runs runs = p.copy.format != ReadCopyFormat::kNone
                        ? runs_of_copies(p, tiles, device)
                        : runs_of_states(p, tiles, launch.tiles_per_head, device);
  const auto tiles_of = [&](int asked, std::int64_t wanted) {
    return static_cast<std::int32_t>(
        std::min<std::int64_t>(asked != 0 ? asked : wanted, launch.tiles_per_group));
  };
  launch.tiles_per_run = tiles_of(tuning.tiles_per_run, runs.replay);
  if (tuning.warps == 0 && has_few_runs(p, launch, device)) launch.warps = 1;
  launch.warps = std::min(launch.warps, runs_of_group(launch, launch.tiles_per_run));
  const std::int64_t most_folding = std::max(1, launch.tiles_per_group / launch.warps);
  launch.fold_tiles_per_run =
      tiles_of(tuning.fold_tiles_per_run != 0 ? tuning.fold_tiles_per_run : tuning.tiles_per_run,
               std::min(runs.fold, most_folding));
  launch.runs_per_group =
      runs_of_group(launch, std::min(launch.tiles_per_run, launch.fold_tiles_per_run));
}

/// Read copies leave little to load and less to prepare: half a wave of blocks a quarter as long at
/// the end is worth 2%. Measured on an H200; without a copy preparing them costs what it saves.
void cut_tail(const Mamba2CudaParams& p, const CudaDeviceInfo& device, const Mamba2Tuning& tuning,
              Mamba2CudaConfig& config) {
  Mamba2Launch& launch = config.launch;
  const std::int64_t wave = wave_of(config.blocks_per_multiprocessor, device);
  const std::int64_t row_blocks = config.blocks_per_group * p.groups;
  std::int64_t rows = tuning.tail_rows;
  if (rows == 0 && p.copy.format != ReadCopyFormat::kNone && config.blocks >= 2 * wave) {
    rows = (wave / 2 + row_blocks / 2) / row_blocks;
  }
  if (rows == 0) return;
  launch.tail_tiles_per_run = std::max(1, launch.tiles_per_run / 4);
  const std::int64_t runs = runs_of_group(launch, launch.tail_tiles_per_run);
  const std::int64_t places = std::int64_t{launch.warps} * config.blocks_per_group;
  launch.tail = grid_tail(p.row_count, rows, (runs + places - 1) / places);
  config.blocks = row_blocks * launch.tail.places(p.row_count);
}

/// Half of the tile that a stage will be asked for next. Steps on fp32 states wait for memory, and
/// more should be on its way than stages hold. Measured on an H200 in steps of many waves of
/// blocks: it is worth 3.5% to one token and 0.7% to drafts, all of the tile 2.5% and nothing; with
/// few waves, whose blocks begin together, it costs as much.
std::int32_t prefetched_bytes(const Mamba2CudaParams& p, const Mamba2CudaConfig& config,
                              const CudaDeviceInfo& device) {
  if (mamba2_variant(p) == Mamba2Variant::kGeneral || p.checkpoint != DType::kF32 ||
      p.copy.format != ReadCopyFormat::kNone || config.launch.state_jump != 0 ||
      config.launch.tiles_per_run <= config.launch.stages || device.compute_capability < 90 ||
      config.blocks < 4 * wave_of(config.blocks_per_multiprocessor, device)) {
    return 0;
  }
  return static_cast<std::int32_t>(kTileRows * p.state_size * 4 / 2);
}

bool has_direct_kernel(const Mamba2CudaParams& p) {
  return mamba2_variant(p) != Mamba2Variant::kGeneral && p.copy.format == ReadCopyFormat::kNone;
}

/// A warp has a pass of rows of one head.
Mamba2CudaConfig direct_config(const Mamba2CudaParams& p, const CudaDeviceInfo& device,
                               const Mamba2Tuning& tuning) {
  const std::int64_t rows = mamba2_pass_rows(static_cast<int>(p.state_size));
  Mamba2CudaConfig config;
  config.variant = Mamba2Variant::kDirect;
  config.reason = direct_reason(is_direct_for_any_rows(p.plain, p.checkpoint));
  Mamba2Launch& launch = config.launch;
  launch.head_dim = static_cast<std::int32_t>(p.head_dim);
  launch.heads_per_group = static_cast<std::int32_t>(p.heads / p.groups);
  launch.runs_per_group = static_cast<std::int32_t>(launch.heads_per_group * (p.head_dim / rows));
  launch.head_of_run = reciprocal_of(p.head_dim / rows);
  launch.warps =
      warps_that_divide(launch.runs_per_group, tuning.warps != 0 ? tuning.warps : kMamba2MaxWarps);
  // B of the records; per warp their x and gain x for its rows.
  const auto act_bytes = static_cast<std::int64_t>(size_of(p.activation));
  launch.shared.bytes = aligned(
      p.limits.window * (p.state_size * act_bytes + launch.warps * rows * (act_bytes + 4)), 128);
  config.blocks_per_group = launch.runs_per_group / launch.warps;
  config.blocks = config.blocks_per_group * p.groups * p.row_count;
  config.blocks_per_multiprocessor =
      blocks_that_fit(device, launch.shared.bytes, launch.warps,
                      kMamba2MaxWarps * mamba2_resident_blocks(config.variant));
  suit_to_device(device, config);
  return config;
}

}  // namespace

Mamba2Variant mamba2_variant(const Mamba2CudaParams& p) {
  const ReplayLimits& limits = p.limits;
  const bool narrow_state = size_of(p.checkpoint) < size_of(p.activation);
  if (p.state_size != 128 || limits.draft_capacity > 8 || limits.record_places() > 32 ||
      narrow_state) {
    return Mamba2Variant::kGeneral;
  }
  const bool one_token = limits.draft_capacity == 1;
  return one_token ? Mamba2Variant::kOneToken : Mamba2Variant::kSmall;
}

std::string Mamba2CudaConfig::to_string() const {
  std::ostringstream out;
  if (variant == Mamba2Variant::kDirect) {
    out << "direct, " << launch.warps << " warps, " << blocks << " blocks: " << reason;
    return std::move(out).str();
  }
  out << launch.stages << " stages x " << launch.warps << " warps, " << launch.tiles_per_run
      << " tiles per run, " << launch.fold_tiles_per_run << " where it folds";
  if (!launch.tail.empty()) {
    out << ", " << launch.tail_tiles_per_run << " from row " << launch.tail.first_row << " on";
  }
  out << (launch.prefetch_bytes != 0 ? ", half of the next prefetched, " : ", ") << blocks
      << " blocks, " << launch.shared.bytes << " B shared, " << blocks_per_multiprocessor
      << " per SM: " << reason;
  return std::move(out).str();
}

FlushPlaces mamba2_flush_places(const Mamba2CudaParams& p, const CudaDeviceInfo& device) {
  // Measured on an H200. In long steps flushes of drafts on fp32 states, which are arithmetic and
  // writes, do better among rows that read: 2% with 15 tiles per warp and more; 3% worse with 8.
  // Single tokens with a read copy want the same of a shorter part of the step: 3% with nvfp4.
  // Others, whose flushes are few or whose replays are arithmetic as well, come out even or lose.
  constexpr std::int64_t kTiles = 14;  // per warp
  const std::int64_t tiles = p.row_count * p.heads * (p.head_dim / kTileRows);
  if (tiles < kTiles * warps_of(device)) return FlushPlaces::kFirst;
  const bool drafts = p.limits.draft_capacity > 1;
  if (p.copy.format != ReadCopyFormat::kNone) {
    return drafts ? FlushPlaces::kFirst : FlushPlaces::kFirstQuarter;
  }
  return drafts && p.checkpoint == DType::kF32 ? FlushPlaces::kFirstHalf : FlushPlaces::kFirst;
}

Result<Mamba2CudaConfig> choose_mamba2_config(const Mamba2CudaParams& p,
                                              const CudaDeviceInfo& device,
                                              const Mamba2Tuning& asked) {
  Mamba2Tuning tuning = asked;
  if (tuning.tiles_per_run == 0 && forced_run_tiles() != 0) {
    tuning.tiles_per_run = forced_run_tiles();
    tuning.tail_rows = static_cast<int>((p.row_count + 1) / 2);
  }
  if (has_direct_kernel(p)) {
    constexpr std::int64_t kMostRows = 256;  // measured on an H200
    RSSM_ASSIGN_OR_RETURN(
        const bool is_direct,
        takes_direct_kernel(tuning.kernel, is_direct_for_any_rows(p.plain, p.checkpoint),
                            p.heads * p.head_dim * p.row_count, kMostRows, device));
    if (is_direct) {
      const Mamba2CudaConfig direct = direct_config(p, device, tuning);
      return within_grid(direct, direct.blocks_per_group);
    }
  }
  // Tried in this order: the first with the wanted warps per multiprocessor wins, else the one with
  // most.
  struct Candidate {
    int warps, stages;
    const char* reason;
  };
  static constexpr Candidate kCandidates[] = {
      {4, 3, "three stages per warp: drafts use tiles in bursts"},
      {4, 2, "two stages per warp: one is loaded while the other is used"},
      {4, 1, "one stage per warp: all there is room for"},
      {3, 1, "a fourth warp would cost a resident block"},
      {2, 1, "long windows leave room for two warps"},
      {1, 1, "long windows leave room for one warp"},
  };
  // Measured on an H200: worth 3% to drafts on two-byte states, which leave the room.
  const bool may_have_three = size_of(p.checkpoint) == 2 &&
                              p.copy.format == ReadCopyFormat::kNone &&
                              mamba2_variant(p) == Mamba2Variant::kSmall;
  const int resident_blocks = mamba2_resident_blocks(mamba2_variant(p));
  const int resident_warps = kMamba2MaxWarps * resident_blocks;

  Mamba2CudaConfig best;
  int most_warps = 0;
  std::int32_t least_bytes = std::numeric_limits<std::int32_t>::max();
  for (const Candidate& candidate : kCandidates) {
    if (candidate.stages == 3 && !may_have_three) continue;
    Mamba2CudaConfig config;
    config.variant = mamba2_variant(p);
    Mamba2Launch& launch = config.launch;
    launch.warps = tuning.warps != 0 ? tuning.warps : candidate.warps;
    launch.stages =
        tuning.stages != 0 ? std::min(tuning.stages, kMamba2MaxStages) : candidate.stages;
    config.reason = tuning.warps != 0 || tuning.stages != 0 ? "as asked" : candidate.reason;
    cut_runs(p, device, tuning, launch);
    // A head's tiles, usually: a stage of them is smaller than one of the checkpoint.
    launch.copy_tiles = p.copy.format == ReadCopyFormat::kNone    ? 1
                        : p.copy.format == ReadCopyFormat::kNvfp4 ? kMamba2MaxCopyTiles
                                                                  : kMamba2MaxCopyTiles / 2;
    launch.copy_tiles = std::min(launch.copy_tiles, launch.tiles_per_run);
    launch.stages =
        std::min(launch.stages, (launch.tiles_per_run + launch.copy_tiles - 1) / launch.copy_tiles);
    config.blocks_per_group = (launch.runs_per_group + launch.warps - 1) / launch.warps;
    config.blocks = config.blocks_per_group * p.groups * p.row_count;
    launch.shared = plan_shared(p, launch);
    config.blocks_per_multiprocessor =
        blocks_that_fit(device, launch.shared.bytes, launch.warps, resident_warps);
    least_bytes = std::min(least_bytes, launch.shared.bytes);
    const int warps = config.blocks_per_multiprocessor * launch.warps;
    if (warps > most_warps) {
      best = config;
      most_warps = warps;
    }
    if (warps >= resident_warps) break;
    if (has_few_runs(p, launch, device)) break;
    if (launch.stages < candidate.stages && launch.stages == 1) break;
  }
  if (most_warps == 0) {
    return unsupported("a block needs ", least_bytes, " bytes of shared memory for window ",
                       p.limits.window, ", draft capacity ", p.limits.draft_capacity,
                       " and state size ", p.state_size, "; the device allows ",
                       device.shared_per_block);
  }
  suit_to_device(device, best);
  cut_tail(p, device, tuning, best);
  best.launch.prefetch_bytes = prefetched_bytes(p, best, device);
  return within_grid(best, best.blocks_per_group);
}

}  // namespace replayssm::cuda
