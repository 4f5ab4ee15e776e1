#include "ops/delta_rule/cuda/config.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <sstream>

#include "cuda/block_shape.h"

namespace replayssm::cuda {
namespace {

/// Hands out a block's shared memory piece by piece.
class SharedLayout {
 public:
  std::int32_t take(std::int64_t bytes) {
    const std::int64_t begin = at_;
    at_ = round_up_to(at_ + bytes, 16);
    return static_cast<std::int32_t>(begin);
  }
  std::int32_t bytes() const { return static_cast<std::int32_t>(round_up_to(at_, 128)); }

 private:
  std::int64_t at_ = 0;
};

/// What both kernels prepare of keys, tokens and gates: the window's, and those of `chunk` tokens.
/// plan.keys_replace_raw says where unit keys lie.
void plan_prepared(const DeltaRuleCudaParams& p, const DeltaRuleLaunch& launch, std::int64_t chunk,
                   SharedLayout& layout, DeltaRuleShared& plan) {
  const std::int64_t window = p.limits.window;
  const auto act_bytes = static_cast<std::int64_t>(size_of(p.activation));
  const std::int64_t vector = 4 * launch.vector_pitch;
  plan.raw_tokens = layout.take(2 * chunk * launch.act_pitch * act_bytes);
  plan.keys = layout.take(4 * window * p.shape.key_dim);
  plan.raw_keys =
      plan.keys_replace_raw ? plan.keys : layout.take(window * p.shape.key_dim * act_bytes);
  plan.vectors = layout.take(2 * chunk * vector);
  if (p.shape.channel_decay) plan.decays = layout.take(4 * (window + chunk) * p.shape.key_dim);
  plan.key_scale = layout.take(4 * window);
  plan.betas = static_cast<std::int32_t>(4 * (window + chunk));
}

DeltaRuleShared plan_shared(const DeltaRuleCudaParams& p, const DeltaRuleLaunch& launch) {
  const DeltaRuleVariant variant = delta_rule_variant(p);
  const std::int64_t columns = 8 * delta_rule_column_blocks(variant);  // of products
  const std::int64_t chunk = delta_rule_chunk(variant);
  const std::int64_t window = p.limits.window;
  const auto act_bytes = static_cast<std::int64_t>(size_of(p.activation));
  DeltaRuleShared plan;
  SharedLayout layout;
  // A stage: a tile of the state, or what a replaying row reads of the state or its copy.
  const std::int64_t tile =
      kDeltaRuleTileRows * p.shape.key_dim * static_cast<std::int64_t>(size_of(p.checkpoint));
  const bool has_copy = p.copy.format != ReadCopyFormat::kNone;
  plan.values = static_cast<std::int32_t>(std::max(
      tile,
      launch.fill_tiles * (has_copy ? staged_copy_bytes(p.copy.format, p.shape.key_dim) : tile)));
  // 16 bytes more than the rows, so that lanes that read several records together do not share
  // banks; with a decay per channel the room is worth more.
  plan.value_pitch = static_cast<std::int32_t>(launch.fill_tiles * kDeltaRuleTileRows +
                                               (p.shape.channel_decay ? 0 : 16 / act_bytes));
  plan.stage_bytes = static_cast<std::int32_t>(
      round_up_to(plan.values + window * plan.value_pitch * act_bytes, 128));
  layout.take(std::int64_t{launch.warps} * plan.stage_bytes);
  // Without a second place for keys a block more finds room, beside decays of channels or stages of
  // several tiles.
  const bool channels = p.shape.channel_decay;
  plan.keys_replace_raw = (channels || launch.fill_tiles > 1) && !p.fast_flush &&
                          window <= std::int64_t{kDeltaRuleKeysOfWarp} * launch.warps;
  plan_prepared(p, launch, chunk, layout, plan);
  plan.scale = layout.take(4 * columns);
  if (!channels) {
    // Groups of eight entries, those of the row's own tokens apart.
    plan.score_stride =
        static_cast<std::int32_t>(round_up_to(window, 8) + round_up_to(chunk, 8) + 4);
    // Tentative rows have scores, committed ones vectors.
    const std::int64_t bytes = 4 * columns * plan.score_stride;
    plan.scores = bytes <= 2 * chunk * 4 * launch.vector_pitch ? plan.vectors : layout.take(bytes);
  }
  plan.weights = static_cast<std::int32_t>(round_up_to(2 * plan.betas, 16));
  plan.weight_stride = static_cast<std::int32_t>(round_up_to(window, 16) + 4);
  plan.head_bytes = static_cast<std::int32_t>(
      round_up_to(plan.weights + 4 * columns * (plan.weight_stride + chunk + 1), 16));
  plan.head = layout.take((channels ? 1 : launch.warps) * std::int64_t{plan.head_bytes});
  plan.barriers = layout.take(8 * (launch.warps + 1));
  if (launch.warps <= 2 * chunk) {
    // In the gaps behind the raw tokens.
    plan.run = static_cast<std::int32_t>(plan.raw_tokens + p.shape.key_dim * act_bytes);
    plan.run_pitch = static_cast<std::int32_t>(launch.act_pitch * act_bytes);
    static_assert(sizeof(DeltaRuleRun) <= kDeltaRuleVectorGap);
  } else {
    plan.run_pitch = static_cast<std::int32_t>(sizeof(DeltaRuleRun));
    plan.run = layout.take(std::int64_t{launch.warps} * plan.run_pitch);
  }
  plan.bytes = layout.bytes();
  return plan;
}

/// Of the direct kernel: chunks of T tokens, and values for a warp's rows.
DeltaRuleShared plan_direct_shared(const DeltaRuleCudaParams& p, const DeltaRuleLaunch& launch) {
  const std::int64_t chunk = p.limits.draft_capacity;
  const std::int64_t entries = p.limits.window + chunk;
  DeltaRuleShared plan;
  SharedLayout layout;
  plan.stage_bytes = static_cast<std::int32_t>(round_up_to(
      entries * kDeltaRuleDirectRows * static_cast<std::int64_t>(size_of(p.activation)), 16));
  layout.take(std::int64_t{launch.warps} * plan.stage_bytes);
  plan_prepared(p, launch, chunk, layout, plan);
  plan.scale = layout.take(4 * 2 * chunk);
  plan.deferred = 2 * plan.betas;
  plan.head_bytes = static_cast<std::int32_t>(round_up_to(plan.deferred + 4, 16));
  plan.head = layout.take(plan.head_bytes);
  plan.bytes = layout.bytes();
  return plan;
}

/// The heads of a step, cut into tiles of `tile_rows` rows and runs of `tiles` of them.
DeltaRuleLaunch cut_heads(const DeltaRuleCudaParams& p, int tile_rows, int tiles, int warps) {
  DeltaRuleLaunch launch;
  launch.tiles_per_head = static_cast<std::int32_t>(p.shape.value_dim / tile_rows);
  launch.heads_per_key = static_cast<std::int32_t>(p.shape.heads_per_key());
  launch.decays = static_cast<std::int32_t>(p.shape.decays());
  const auto key_dim = static_cast<int>(p.shape.key_dim);
  launch.act_pitch = delta_rule_vector_pitch(key_dim, static_cast<int>(size_of(p.activation)));
  launch.vector_pitch = delta_rule_vector_pitch(key_dim, 4);
  launch.tiles = std::min(tiles, launch.tiles_per_head);
  launch.runs_per_head = (launch.tiles_per_head + launch.tiles - 1) / launch.tiles;
  launch.head_of_run = reciprocal_of(launch.runs_per_head);
  launch.runs_per_key = launch.runs_per_head * launch.heads_per_key;
  // No block with warps to spare while another has all it may.
  const std::int32_t blocks = (launch.runs_per_key + warps - 1) / warps;
  launch.warps = (launch.runs_per_key + blocks - 1) / blocks;
  return launch;
}

void count_blocks(const DeltaRuleCudaParams& p, DeltaRuleCudaConfig& config) {
  const DeltaRuleLaunch& launch = config.launch;
  config.blocks_per_key = (launch.runs_per_key + launch.warps - 1) / launch.warps;
  config.blocks = p.row_count * p.shape.key_heads * config.blocks_per_key;
}

/// Plans shared memory for stages of as many tiles as the kernels allow, but two tiles of a state
/// only where that costs no block and leaves a run several fills.
void fill_stages(const DeltaRuleCudaParams& p, const CudaDeviceInfo& device,
                 DeltaRuleCudaConfig& config) {
  constexpr int kCopyTiles = 4;
  DeltaRuleLaunch& launch = config.launch;
  const auto plan = [&](int tiles) {
    // A power of two: lanes are cut by it.
    launch.fill_tiles = static_cast<std::int32_t>(
        std::bit_floor(static_cast<unsigned>(std::min(tiles, launch.tiles))));
    launch.shared = plan_shared(p, launch);
    config.blocks_per_multiprocessor =
        blocks_that_fit(device, launch.shared.bytes, launch.warps,
                        delta_rule_warps(p, config.variant).of_multiprocessor);
    return config.blocks_per_multiprocessor;
  };
  if (p.copy.format != ReadCopyFormat::kNone) {
    plan(kCopyTiles);
  } else {
    const int blocks = plan(1);
    const bool may_have_two = size_of(p.checkpoint) == 2 && !p.shape.channel_decay;
    if (may_have_two && launch.tiles >= 4 && blocks > 0 && plan(2) < blocks) plan(1);
  }
}

/// Half of the next tile, for single tokens and short drafts on fp32 states, which wait for memory.
/// Measured on an H200: with many waves of blocks it is worth 1.5%, all of it 0.8% or nothing; with
/// few waves, whose blocks begin together, it costs 7%, and to decays of channels it is worth
/// nothing.
std::int32_t prefetched_bytes(const DeltaRuleCudaParams& p, const DeltaRuleCudaConfig& config,
                              const CudaDeviceInfo& device) {
  using enum DeltaRuleVariant;
  if ((config.variant != kSingle && config.variant != kSmall) || p.shape.channel_decay ||
      p.checkpoint != DType::kF32 || p.copy.format != ReadCopyFormat::kNone ||
      config.launch.tiles < 2 || device.compute_capability < 90 ||
      config.blocks < 8 * wave_of(config.blocks_per_multiprocessor, device)) {
    return 0;
  }
  return static_cast<std::int32_t>(kDeltaRuleTileRows * p.shape.key_dim * 4 / 2);
}

bool has_direct_kernel(const DeltaRuleCudaParams& p) {
  return delta_rule_variant(p) != DeltaRuleVariant::kAny && p.copy.format == ReadCopyFormat::kNone;
}

/// State rows per multiprocessor up to which the direct kernel is the faster one: measured on an
/// H200, steps of 1 to 16 rows of the step.
std::int64_t most_direct_rows(const DeltaRuleCudaParams& p) {
  switch (delta_rule_variant(p)) {
    case DeltaRuleVariant::kSingle:
      return p.shape.channel_decay ? 160 : 64;
    case DeltaRuleVariant::kSmall:
      return p.shape.channel_decay ? 128 : 40;
    default:
      return 128;
  }
}

DeltaRuleCudaConfig direct_config(const DeltaRuleCudaParams& p, const CudaDeviceInfo& device,
                                  const DeltaRuleTuning& tuning) {
  DeltaRuleCudaConfig config;
  config.reason = direct_reason(is_direct_for_any_rows(p.plain, p.checkpoint));
  // A block has rows of one head, so that its warps share the head's gates.
  const int warps = warps_that_divide(p.shape.value_dim / kDeltaRuleDirectRows,
                                      tuning.warps != 0 ? tuning.warps : kDeltaRuleDirectWarps);
  config.launch = cut_heads(p, kDeltaRuleDirectRows, 1, warps);
  const bool single = p.limits.draft_capacity == 1 && config.launch.warps == kDeltaRuleDirectWarps;
  config.variant = single ? DeltaRuleVariant::kDirectSingle : DeltaRuleVariant::kDirect;
  count_blocks(p, config);
  config.launch.shared = plan_direct_shared(p, config.launch);
  config.blocks_per_multiprocessor =
      blocks_that_fit(device, config.launch.shared.bytes, config.launch.warps,
                      delta_rule_warps(p, config.variant).of_multiprocessor);
  suit_to_device(device, config);
  return config;
}

}  // namespace

DeltaRuleVariant delta_rule_variant(const DeltaRuleCudaParams& p) {
  if (p.shape.key_dim != 128 || p.limits.draft_capacity > 8) return DeltaRuleVariant::kAny;
  if (p.activation != DType::kBF16 || p.checkpoint == DType::kF16) return DeltaRuleVariant::kAny;
  // Of the kernels that read copies there are fewer.
  if (p.copy.format != ReadCopyFormat::kNone && p.limits.draft_capacity > 4) {
    return DeltaRuleVariant::kAny;
  }
  return p.limits.draft_capacity == 1   ? DeltaRuleVariant::kSingle
         : p.limits.draft_capacity <= 4 ? DeltaRuleVariant::kSmall
                                        : DeltaRuleVariant::kDraft;
}

std::string DeltaRuleCudaConfig::to_string() const {
  std::ostringstream out;
  if (is_direct(variant)) out << "direct, ";
  out << launch.warps << " warps x " << launch.tiles
      << (launch.tiles == 1 ? " tile, " : " tiles, ");
  if (launch.fill_tiles > 1) out << launch.fill_tiles << " to a stage, ";
  if (launch.prefetch_bytes != 0) out << "half of the next prefetched, ";
  out << blocks << " blocks, " << launch.shared.bytes << " B shared, " << blocks_per_multiprocessor
      << " per SM: " << reason;
  return std::move(out).str();
}

FlushPlaces delta_rule_flush_places(const DeltaRuleCudaParams& p, const CudaDeviceInfo& device) {
  // Measured on an H200: single tokens on fp32 states, and short drafts with one decay per head,
  // leave arithmetic idle, the more evenly the wider flushes are spread: 1.4% with 62 tiles per
  // warp, 0 to 1% with 31. What is left behind the last flush has to last as long as it: shorter
  // steps lose up to 8%, and as much two-byte states, which are bound by arithmetic. Read copies
  // leave the least behind it: 3% for less than half.
  constexpr std::int64_t kTiles = 30;  // per warp of sixteen to a multiprocessor
  const std::int64_t tiles =
      p.row_count * p.shape.value_heads * p.shape.value_dim / kDeltaRuleTileRows;
  if (tiles < kTiles * 16 * device.multiprocessors) return FlushPlaces::kFirstHalf;
  if (p.copy.format != ReadCopyFormat::kNone) return FlushPlaces::kFirstQuarter;
  const bool waits =
      p.checkpoint == DType::kF32 && p.limits.draft_capacity <= (p.shape.channel_decay ? 1 : 4);
  return waits ? FlushPlaces::kFirstThreeQuarters : FlushPlaces::kFirstHalf;
}

Result<DeltaRuleCudaConfig> choose_delta_rule_config(const DeltaRuleCudaParams& p,
                                                     const CudaDeviceInfo& device,
                                                     const DeltaRuleTuning& tuning) {
  const int tiles = tuning.tiles != 0 ? tuning.tiles : forced_run_tiles();
  if (has_direct_kernel(p)) {
    RSSM_ASSIGN_OR_RETURN(
        const bool is_direct,
        takes_direct_kernel(tuning.kernel, is_direct_for_any_rows(p.plain, p.checkpoint),
                            p.shape.value_heads * p.shape.value_dim * p.row_count,
                            most_direct_rows(p), device));
    if (is_direct) {
      const DeltaRuleCudaConfig direct = direct_config(p, device, tuning);
      if (direct.blocks_per_multiprocessor > 0) {
        return within_grid(direct, direct.blocks_per_key);
      }
    }
  }
  struct Candidate {
    int warps, tiles;
    const char* reason;
  };
  // Tried in this order; the first that fits the device wins. Long runs amortize what is prepared
  // for them, where there are warps enough for every multiprocessor all the same.
  static constexpr Candidate kCandidates[] = {
      {8, 4, "long runs: what a head needs is prepared once for four tiles"},
      {4, 8, "long runs of drafts: what a head needs is prepared once for eight tiles"},
      {4, 4, "long runs, four warps: small blocks load while others compute"},
      {4, 2, "runs of two tiles, four warps to what they share"},
      {8, 1, "a tile per warp, eight warps to the decays of channels"},
      {4, 1, "a tile per warp, four warps to what they share"},
      {2, 1, "long windows leave room for two warps"},
      {1, 1, "long windows leave room for one warp"},
  };
  using enum DeltaRuleVariant;
  const bool asked = tuning.warps != 0 || tiles != 0;
  const DeltaRuleWarps most = delta_rule_warps(p, delta_rule_variant(p));
  if (tuning.warps > most.of_block) {
    return unsupported("blocks of ", tuning.warps, " warps, the kernel has registers for ",
                       most.of_block);
  }
  std::int32_t least_bytes = std::numeric_limits<std::int32_t>::max();
  for (const Candidate& candidate : kCandidates) {
    if (!asked && candidate.warps > most.of_block) continue;
    DeltaRuleCudaConfig config;
    config.variant = delta_rule_variant(p);
    DeltaRuleLaunch& launch = config.launch;
    launch = cut_heads(p, kDeltaRuleTileRows, tiles != 0 ? tiles : candidate.tiles,
                       tuning.warps != 0 ? tuning.warps : std::min(candidate.warps, most.of_block));
    count_blocks(p, config);
    if (!asked && candidate.tiles > 1) {
      if (candidate.warps > 4 && size_of(p.checkpoint) == 2) continue;
      // Where blocks are small, and for long drafts; not where a block has but two runs.
      if (candidate.tiles > 4 &&
          (launch.warps < 3 || (most.of_block > 4 && config.variant != kDraft))) {
        continue;
      }
      // Every channel's decay is prepared per head: a block with few warps takes too long over it,
      // and where blocks are small, two of one head would prepare it twice.
      if (candidate.tiles > 2 && p.shape.channel_decay) continue;
      const bool is_whole_head = p.shape.channel_decay && most.of_block == 4;
      const std::int64_t warps = config.blocks * launch.warps;
      if (!is_whole_head &&
          warps < std::int64_t{3} * most.of_multiprocessor * device.multiprocessors) {
        continue;
      }
    }
    // Where a head has one decay, eight warps have little to share: smaller blocks end more evenly.
    if (!asked && candidate.tiles == 1 && candidate.warps == 8 && !p.shape.channel_decay) continue;
    fill_stages(p, device, config);
    least_bytes = std::min(least_bytes, launch.shared.bytes);
    if (config.blocks_per_multiprocessor == 0) continue;
    config.reason = asked ? "as asked" : candidate.reason;
    suit_to_device(device, config);
    launch.prefetch_bytes = prefetched_bytes(p, config, device);
    return within_grid(config, config.blocks_per_key);
  }
  return unsupported("a block needs ", least_bytes, " bytes of shared memory for window ",
                     p.limits.window, ", draft capacity ", p.limits.draft_capacity, " and key_dim ",
                     p.shape.key_dim, "; the device allows ", device.shared_per_block);
}

}  // namespace replayssm::cuda
