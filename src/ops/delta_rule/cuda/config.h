// How a CUDA step of the delta rule is cut into blocks, as data that can be printed.
//
// The unit of work is a tile: kDeltaRuleTileRows rows (of value_dim) of one head's state,
// contiguous in memory. A run is what one warp does alone: consecutive tiles of one head. A block
// takes the runs of as many warps, all of one key head of one row of the step, and prepares once
// what they share (keys, scores).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/query.h"
#include "cuda/step_kernel.h"
#include "ops/deferred_decay.h"
#include "ops/delta_rule/cuda/params.h"
#include "replayssm/dtype.h"
#include "replayssm/status.h"
#include "state/cuda/step.h"

namespace replayssm::cuda {

inline constexpr int kDeltaRuleTileRows = 16;
inline constexpr int kDeltaRuleDirectRows = 8;   // of a warp of the direct kernel
inline constexpr int kDeltaRuleDirectWarps = 4;  // of its blocks, unless asked otherwise

/// The kernels there are for a pair of types and a kind of decay.
enum class DeltaRuleVariant {
  kSingle,  // key_dim 128, draft capacity 1
  kSmall,   // key_dim 128, draft capacity up to 4
  kDraft,   // key_dim 128, draft capacity up to 8
  kAny,     // key_dim a multiple of 16 up to 256, draft capacity up to 16
  // What the first three serve, without read copies (direct.cuh, cuda/step_kernel.h):
  kDirectSingle,  // draft capacity 1, in blocks of kDeltaRuleDirectWarps
  kDirect,        // everything else
};
constexpr bool is_direct(DeltaRuleVariant variant) {
  return variant == DeltaRuleVariant::kDirectSingle || variant == DeltaRuleVariant::kDirect;
}
/// The streamed kernel of a step.
DeltaRuleVariant delta_rule_variant(const DeltaRuleCudaParams& params);
constexpr int delta_rule_key_dim(DeltaRuleVariant variant) {
  return variant == DeltaRuleVariant::kAny ? 256 : 128;
}
/// Blocks of eight columns of a product: k and q of four tokens.
constexpr int delta_rule_column_blocks(DeltaRuleVariant variant) {
  using enum DeltaRuleVariant;
  return variant == kAny ? 4 : variant == kDraft || variant == kDirect ? 2 : 1;
}

/// Most warps of a block, and how many of a multiprocessor a kernel leaves registers for.
struct DeltaRuleWarps {
  int of_block, of_multiprocessor;

  /// Of the most warps.
  constexpr int blocks() const { return of_multiprocessor / of_block; }
};
constexpr DeltaRuleWarps delta_rule_warps(DeltaRuleVariant variant, DType checkpoint,
                                          bool channel_decay, bool has_copy) {
  using enum DeltaRuleVariant;
  // Fewer warps that do not spill are faster than sixteen that do, by 1 to 16% (measured on an
  // H200), and by a third in the general kernel. Single tokens without a copy, and drafts of
  // two-byte states with one decay per head, spill little.
  if (variant == kAny) return {4, 8};
  const bool spills = has_copy || channel_decay || checkpoint == DType::kF32;
  const bool is_draft = variant == kSmall || variant == kDraft;
  return spills && (is_draft || (variant == kSingle && has_copy)) ? DeltaRuleWarps{4, 12}
                                                                  : DeltaRuleWarps{8, 16};
}

inline DeltaRuleWarps delta_rule_warps(const DeltaRuleCudaParams& p, DeltaRuleVariant variant) {
  return delta_rule_warps(variant, p.checkpoint, p.shape.channel_decay,
                          p.copy.format != ReadCopyFormat::kNone);
}

/// Whether the checkpoint stores R and c (ops/deferred_decay.h).
template <typename State, bool kChannelDecay>
constexpr bool delta_rule_defers() {
  return !kChannelDecay && defers_decay(DTypeOf<State>::value);
}

/// Tokens that a block prepares together: drafts, or a chunk of a committed row.
constexpr int delta_rule_chunk(DeltaRuleVariant variant) {
  return variant == DeltaRuleVariant::kSingle ? 2 : 4 * delta_rule_column_blocks(variant);
}
/// Bytes between a vector of keys or columns in shared memory and the next: the lanes that read
/// several vectors together do not share banks.
inline constexpr int kDeltaRuleVectorGap = 64;
/// Elements from one such vector to the next.
constexpr int delta_rule_vector_pitch(int key_dim, int element_bytes) {
  return key_dim + kDeltaRuleVectorGap / element_bytes;
}

/// Where a run's data lies, from its first row on. A warp looks these up in shared memory for every
/// tile: in registers they, or what they are computed from, would be spilled.
struct DeltaRuleRun {
  void* state;
  const void* v;  // of the row's first token; `output` too
  void* output;
  void* ring_delta;  // of place 0
  void* ring_v;
  std::int32_t tiles;
  float deferred;  // what folds leave deferred, or multiply in where the checkpoint does not defer
};

/// Keys that a warp takes through its registers where unit keys take the place of raw ones.
inline constexpr int kDeltaRuleKeysOfWarp = 4;

/// Where everything lies in a block's shared memory. Offsets are bytes, strides are elements. What
/// comes from global memory lies there as it is (raw), in the activation type unless said.
struct DeltaRuleShared {
  // Per warp: the tiles of a fill, then (window, rows of them) of values.
  std::int32_t stage_bytes = 0;
  std::int32_t values = 0;        // within a stage
  std::int32_t value_pitch = 0;   // from one record's to the next
  std::int32_t raw_tokens = 0;    // (2 chunk, key_dim): k and q of tokens in turn
  std::int32_t raw_keys = 0;      // (window, key_dim): k of live records
  std::int32_t vectors = 0;       // (2 chunk, key_dim) f32: raw tokens scaled, or times decays
  std::int32_t keys = 0;          // (window, key_dim) f32: unit keys of records that are folded
  bool keys_replace_raw = false;  // whether they lie where the raw ones do
  // Decay per channel: (window + chunk, key_dim) f32. Raw gates of tokens lie at the end of theirs
  // first.
  std::int32_t decays = 0;
  std::int32_t key_scale = 0;  // (window)
  std::int32_t scale = 0;      // (columns)
  // Decay per head: (columns, entries), entries = window + chunk; maybe where `vectors` are.
  std::int32_t scores = 0;
  std::int32_t score_stride = 0;
  // Per warp, or once where its warps have one head, of the head: decays, betas of entries; weights
  // of the window's records (columns, weight_stride), of the row's own tokens (columns, chunk), of
  // the checkpoint (columns).
  std::int32_t head = 0;
  std::int32_t head_bytes = 0;
  std::int32_t betas = 0;     // within it
  std::int32_t deferred = 0;  // of the direct kernel, within it: as DeltaRuleRun has it
  std::int32_t weights = 0;
  std::int32_t weight_stride = 0;
  std::int32_t barriers = 0;   // (warps), and one for the records
  std::int32_t run = 0;        // DeltaRuleRun of the first warp
  std::int32_t run_pitch = 0;  // bytes, from one warp's to the next
  std::int32_t bytes = 0;
};

/// What the kernel needs beside its parameters, computed here once instead of by every warp.
struct DeltaRuleLaunch {
  DeltaRuleShared shared;
  std::int32_t warps = 8;
  std::int32_t tiles = 1;       // of a run
  std::int32_t fill_tiles = 1;  // of a replaying row that a stage holds, a power of two
  std::int32_t runs_per_head = 1;
  std::uint32_t head_of_run = 0;  // divides by the runs of a head (cuda/block_shape.h)
  std::int32_t runs_per_key = 1;  // of all value heads of a key head
  std::int32_t tiles_per_head = 8;
  std::int32_t heads_per_key = 1;
  std::int32_t decays = 1;          // of a head and token
  std::int32_t act_pitch = 0;       // elements from one vector in shared memory to the next
  std::int32_t vector_pitch = 0;    // the same for fp32
  std::int32_t prefetch_bytes = 0;  // into L2: of the tile that comes next
  // kTf32Mask as a parameter of the kernel (cuda/vector.cuh says what for).
  std::uint32_t tf32_mask = 0xffffe000u;
};

/// Overrides; 0 leaves a choice to choose_delta_rule_config.
struct DeltaRuleTuning {
  StepKernel kernel = StepKernel::kAuto;
  int warps = 0;
  int tiles = 0;
};

struct DeltaRuleCudaConfig {
  DeltaRuleVariant variant = DeltaRuleVariant::kAny;
  DeltaRuleLaunch launch;
  // The grid: key heads, blocks of a key head's runs, rows.
  std::int32_t blocks_per_key = 0;
  std::int64_t blocks = 0;
  int blocks_per_multiprocessor = 0;  // that fit
  std::int32_t shared_limit = 0;      // bytes a block may have on the device
  bool overlaps = false;              // with the end of the kernel before it
  std::string reason;

  /// "8 warps x 4 tiles, 4096 blocks, 98432 B shared, 2 per SM: <reason>".
  std::string to_string() const;
};

/// Where a step of the parameters' rows has its flushes. They are arithmetic and replays wait for
/// memory, so they run side by side.
FlushPlaces delta_rule_flush_places(const DeltaRuleCudaParams& params,
                                    const CudaDeviceInfo& device);

/// Picks warps and runs that fit the device, or says why nothing does.
Result<DeltaRuleCudaConfig> choose_delta_rule_config(const DeltaRuleCudaParams& params,
                                                     const CudaDeviceInfo& device,
                                                     const DeltaRuleTuning& tuning = {});

}  // namespace replayssm::cuda
