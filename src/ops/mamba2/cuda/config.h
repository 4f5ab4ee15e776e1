// How a Mamba-2 CUDA step is cut into blocks, as data that can be printed.
//
// The unit of work is a tile: kTileRows consecutive rows of one head's state, contiguous in memory.
// A run is `tiles_per_run` consecutive tiles of one group of one row of the step, the work of one
// warp, which has `stages` private buffers. Blocks are `warps` runs that are scheduled together.
// Rows that flush are cut into runs of their own length, and so may be the last rows of the step
// (cuda/grid_tail.h); where a row has fewer runs than the grid has places for, the rest of its
// warps have nothing to do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/grid_tail.h"
#include "cuda/query.h"
#include "cuda/step_kernel.h"
#include "ops/mamba2/cuda/params.h"
#include "replayssm/status.h"
#include "state/cuda/step.h"

namespace replayssm::cuda {

inline constexpr int kMamba2MaxWarps = 4;
inline constexpr int kMamba2MaxStages = 8;
inline constexpr int kMamba2MaxCopyTiles = 4;
inline constexpr int kTileRows = 16;
inline constexpr int kFoldRecords = 16;  // whose B a fold has in shared memory at once

/// Where everything lies in a block's shared memory; byte offsets.
struct Mamba2SharedPlan {
  std::int32_t stage_bytes = 0;       // state tile, then (places, tile rows) of x
  std::int32_t stage_x_offset = 0;    // within a stage
  std::int32_t copy_stage_bytes = 0;  // tiles of a read copy, then their x
  std::int32_t copy_x_offset = 0;     // within a stage
  std::int32_t warp_bytes = 0;  // stages; or, where records are folded, fewer and scratch memory
  // Per warp: weight (T, entries), dt, decay (places), scale (T), rest (2).
  std::int32_t table_offset = 0;
  std::int32_t table_stride = 0;    // floats
  std::int32_t barrier_offset = 0;  // (warps, stages)
  std::int32_t bytes = 0;
};

/// What the kernel needs beside its parameters, computed here once instead of by every warp.
struct Mamba2Launch {
  Mamba2SharedPlan shared;
  std::int32_t warps = 4;
  std::int32_t stages = 2;          // of a replaying row
  std::int32_t state_stages = 2;    // of a committed row
  std::int32_t fold_stages = 1;     // of a row that folds
  std::int32_t copy_tiles = 1;      // of a read copy, to a stage
  std::int32_t prefetch_bytes = 0;  // into L2: of the tile that a stage will be asked for next
  std::int32_t tiles_per_run = 16;
  std::int32_t fold_tiles_per_run = 16;  // of a row that flushes
  std::int32_t tail_tiles_per_run = 16;  // of the rows of `tail`, whatever their kind
  GridTail tail;
  std::int32_t tiles_per_head = 4;
  std::int32_t tiles_per_group = 64;
  std::int32_t heads_per_group = 16;
  std::int32_t runs_per_group = 4;
  std::uint32_t head_of_run = 0;  // direct: divides by the runs of a head (cuda/block_shape.h)
  std::int32_t head_dim = 64;
  // Elements from behind a head's last tile to the next head's first.
  std::int64_t state_jump = 0, x_jump = 0, ring_x_jump = 0, y_jump = 0;
};

/// The kernels there are for a state size of 128; other sizes have the general one.
enum class Mamba2Variant {
  kOneToken,  // draft capacity 1, at most 32 places
  kSmall,     // draft capacity up to 8, at most 32 places
  kGeneral,   // everything else
  kDirect,    // what the first two serve, without read copies (direct.cuh, cuda/step_kernel.h)
};
/// The streamed kernel of a step.
Mamba2Variant mamba2_variant(const Mamba2CudaParams& params);

/// Overrides; 0 leaves a choice to choose_mamba2_config.
struct Mamba2Tuning {
  StepKernel kernel = StepKernel::kAuto;
  int warps = 0;
  int stages = 0;
  int tiles_per_run = 0;
  int fold_tiles_per_run = 0;
  int tail_rows = 0;
};

struct Mamba2CudaConfig {
  Mamba2Variant variant = Mamba2Variant::kGeneral;
  Mamba2Launch launch;
  // The grid: groups, blocks of a group's runs, places of rows (cuda/grid_tail.h).
  std::int32_t blocks_per_group = 0;
  std::int64_t blocks = 0;
  int blocks_per_multiprocessor = 0;  // that fit
  std::int32_t shared_limit = 0;      // bytes a block may have on the device
  bool overlaps = false;              // with the end of the kernel before it
  std::string reason;

  /// "2 stages x 4 warps, 8 tiles per run, 4096 blocks, 73216 B shared, 3 per SM: <reason>".
  std::string to_string() const;
};

/// State rows that a warp advances at a time: as many as its registers hold.
constexpr int mamba2_pass_rows(int state_size) {
  return kTileRows * state_size > 1024 ? kTileRows / 2 : kTileRows;
}
/// Window entries a variant holds weights for; at least the places of the ring.
constexpr int mamba2_entries(Mamba2Variant variant) {
  return variant == Mamba2Variant::kGeneral ? 80 : 32;
}
/// Blocks of four warps that its registers allow on a multiprocessor (__launch_bounds__).
constexpr int mamba2_resident_blocks(Mamba2Variant variant) {
  using enum Mamba2Variant;
  return variant == kGeneral ? 2 : variant == kOneToken || variant == kDirect ? 4 : 3;
}

/// Where a step of the parameters' rows has its flushes.
FlushPlaces mamba2_flush_places(const Mamba2CudaParams& params, const CudaDeviceInfo& device);

/// Picks warps, stages and runs that fit the device, or says why nothing does.
Result<Mamba2CudaConfig> choose_mamba2_config(const Mamba2CudaParams& params,
                                              const CudaDeviceInfo& device,
                                              const Mamba2Tuning& tuning = {});

}  // namespace replayssm::cuda
