#include "ops/delta_rule/cuda/config.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "cuda/block_shape.h"

namespace replayssm::cuda {
namespace {

DeltaRuleShared plan_shared(const DeltaRuleCudaParams& p, const DeltaRuleLaunch& launch) {
  const DeltaRuleVariant variant = delta_rule_variant(p);
  const std::int64_t columns = 8 * delta_rule_column_blocks(variant);
  const std::int64_t window = p.limits.window;
  const std::int64_t entries = window + columns / 2;
  const std::int64_t vector = launch.vector_pitch;
  const auto act_bytes = static_cast<std::int64_t>(size_of(p.activation));
  DeltaRuleShared plan;
  std::int64_t at = 0;
  const auto take = [&](std::int64_t bytes) {
    const std::int64_t begin = at;
    at = round_up_to(at + bytes, 16);
    return static_cast<std::int32_t>(begin);
  };
  plan.values = static_cast<std::int32_t>(kDeltaRuleTileRows * p.shape.key_dim *
                                          static_cast<std::int64_t>(size_of(p.checkpoint)));
  plan.stage_bytes = static_cast<std::int32_t>(
      round_up_to(plan.values + p.limits.record_places() * kDeltaRuleTileRows * act_bytes, 128));
  take(std::int64_t{launch.warps} * launch.stages * plan.stage_bytes);
  plan.raw_tokens = take(columns * vector * act_bytes);
  plan.raw_keys = take(window * vector * act_bytes);
  plan.vectors = take(4 * columns * vector);
  if (p.shape.channel_decay) {
    plan.raw_gates = take(4 * columns / 2 * vector);
    plan.decays = take(4 * entries * vector);
    plan.total = take(4 * vector);
  } else {
    plan.keys = take(4 * window * vector);
  }
  plan.gate_stride = static_cast<std::int32_t>(2 * entries + 2);
  plan.gates = take(4 * launch.parts * plan.gate_stride);
  plan.key_scale = take(4 * window);
  plan.scale = take(4 * columns);
  plan.scores = take(4 * entries * columns);
  plan.weight_stride = static_cast<std::int32_t>(round_up_to(window, 16) + 4);
  plan.weight_bytes = static_cast<std::int32_t>(
      4 * (columns * plan.weight_stride + columns * columns / 2 + columns));
  plan.weights = take(std::int64_t{launch.parts} * plan.weight_bytes);
  plan.barriers = take(8 * launch.stages * launch.warps);
  plan.bytes = static_cast<std::int32_t>(round_up_to(at, 128));
  return plan;
}

}  // namespace

DeltaRuleVariant delta_rule_variant(const DeltaRuleCudaParams& p) {
  if (p.shape.key_dim != 128 || p.limits.draft_capacity > 8) return DeltaRuleVariant::kAny;
  // Of the kernels that read copies there are fewer.
  if (p.copy.format != ReadCopyFormat::kNone && p.limits.draft_capacity > 4) {
    return DeltaRuleVariant::kAny;
  }
  return p.limits.draft_capacity <= 4 ? DeltaRuleVariant::kSmall : DeltaRuleVariant::kDraft;
}

std::string DeltaRuleCudaConfig::to_string() const {
  std::ostringstream out;
  out << launch.warps << " warps x " << launch.parts << (launch.parts == 1 ? " part, " : " parts, ")
      << launch.stages << (launch.stages == 1 ? " stage, " : " stages, ") << blocks << " blocks, "
      << launch.shared.bytes << " B shared, " << blocks_per_multiprocessor << " per SM: " << reason;
  return std::move(out).str();
}

Result<DeltaRuleCudaConfig> choose_delta_rule_config(const DeltaRuleCudaParams& p,
                                                     const CudaDeviceInfo& device,
                                                     const DeltaRuleTuning& tuning) {
  if (p.shape.key_heads > kMostInGrid) {
    return unsupported(p.shape.key_heads, " key heads; a launch allows ", kMostInGrid);
  }
  struct Candidate {
    int warps, parts, stages;
    const char* reason;
  };
  // Tried in this order; the first that fits the device wins. Several parts amortize what their key
  // head shares, where there are blocks enough for every multiprocessor all the same.
  static constexpr Candidate kCandidates[] = {
      {4, 4, 1, "two-byte tiles: four small blocks keep more loads in flight than two"},
      {4, 2, 1, "small blocks: one loads while others prepare or compute"},
      {8, 4, 1, "the parts of a key head share its keys' preparation"},
      {8, 2, 1, "the parts of a key head share its keys' preparation"},
      {8, 1, 1, "a head per block: its state is asked for before its keys are prepared"},
      {4, 1, 1, "long windows leave room for four warps"},
      {2, 1, 1, "long windows leave room for two warps"},
      {1, 1, 1, "long windows leave room for one warp"},
  };
  const auto tiles = static_cast<int>(p.shape.value_dim / kDeltaRuleTileRows);
  const bool asked = tuning.warps != 0 || tuning.parts != 0 || tuning.stages != 0;
  std::int32_t least_bytes = std::numeric_limits<std::int32_t>::max();
  for (const Candidate& candidate : kCandidates) {
    DeltaRuleCudaConfig config;
    DeltaRuleLaunch& launch = config.launch;
    launch.tiles_per_head = tiles;
    launch.heads_per_key = static_cast<std::int32_t>(p.shape.heads_per_key());
    launch.decays = static_cast<std::int32_t>(p.shape.decays());
    const auto state_bytes = static_cast<int>(size_of(p.checkpoint));
    launch.vector_pitch = delta_rule_vector_pitch(static_cast<int>(p.shape.key_dim));
    launch.warps = std::min(tuning.warps != 0 ? tuning.warps : candidate.warps, tiles);
    launch.parts = tuning.parts != 0 ? tuning.parts : candidate.parts;
    launch.parts_per_head = (tiles + launch.warps - 1) / launch.warps;
    launch.head_of_part = static_cast<std::uint32_t>(
        ((std::int64_t{1} << 31) + launch.parts_per_head - 1) / launch.parts_per_head);
    launch.parts_per_key = launch.parts_per_head * launch.heads_per_key;
    launch.parts = std::min(launch.parts, launch.parts_per_key);
    launch.stages = std::min(tuning.stages != 0 ? tuning.stages : candidate.stages, launch.parts);
    config.blocks_per_key = (launch.parts_per_key + launch.parts - 1) / launch.parts;
    config.blocks = p.row_count * p.shape.key_heads * config.blocks_per_key;
    if (!asked) {
      const bool small = candidate.warps == 4 && candidate.parts > 1;
      if (small && state_bytes == 4 && !p.shape.channel_decay) continue;
      if (launch.parts < candidate.parts) continue;
      if (candidate.parts > 1 && config.blocks < std::int64_t{8} * device.multiprocessors) continue;
    }
    launch.shared = plan_shared(p, launch);
    least_bytes = std::min(least_bytes, launch.shared.bytes);
    config.blocks_per_multiprocessor =
        blocks_that_fit(device, launch.shared.bytes, launch.warps, 2 * kDeltaRuleMaxWarps);
    if (config.blocks_per_multiprocessor == 0) continue;
    config.reason = asked ? "as asked" : candidate.reason;
    config.shared_limit = static_cast<std::int32_t>(device.shared_per_block);
    return config;
  }
  return unsupported("a block needs ", least_bytes, " bytes of shared memory for window ",
                     p.limits.window, ", draft capacity ", p.limits.draft_capacity, " and key_dim ",
                     p.shape.key_dim, "; the device allows ", device.shared_per_block);
}

}  // namespace replayssm::cuda
