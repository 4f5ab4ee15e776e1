// How a Mamba-2 CUDA step is cut into blocks, as data that can be printed.
//
// The unit of work is a tile: kTileRows consecutive rows of one head's state, contiguous in memory.
// A block takes `tiles_per_block` consecutive tiles of one group of one row of the step; its warps
// take them in turn, each with `stages` private buffers, so that no warp waits for another between
// the block's preparation (B . C, decays) and its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ops/mamba2/cuda/params.h"
#include "replayssm/status.h"

namespace replayssm::cuda {

inline constexpr int kMamba2MaxWarps = 4;
inline constexpr int kMamba2MaxStages = 8;

/// Where everything lies in a block's shared memory; byte offsets.
struct Mamba2SharedPlan {
  std::int32_t stage_bytes = 0;     // state tile, then (places, tile rows) of x
  std::int32_t stage_x_offset = 0;  // within a stage
  std::int32_t b_offset = 0;        // (places, state_size) activation type
  std::int32_t c_offset = 0;        // (draft_capacity, state_size) activation type
  std::int32_t bc_offset = 0;       // (draft_capacity, places) f32
  std::int32_t table_offset = 0;    // per head: dt (places), decay (places), suffix (places + 1)
  std::int32_t table_stride = 0;    // floats
  std::int32_t barrier_offset = 0;  // (warps, stages)
  std::int32_t bytes = 0;
};

/// What the kernel needs beside its parameters.
struct Mamba2Launch {
  Mamba2SharedPlan shared;
  std::int32_t warps = 4;
  std::int32_t stages = 2;
  std::int32_t tiles_per_block = 16;
  std::int32_t tiles_per_head = 4;
  std::int32_t tiles_per_group = 64;
  std::int32_t blocks_per_group = 4;
  std::int32_t blocks_per_row = 32;
};

/// Properties of a device the choice depends on.
struct CudaDeviceInfo {
  int index = 0;
  int multiprocessors = 0;
  int compute_capability = 0;  // 90 for sm_90
  std::size_t shared_per_block = 0;
  std::size_t shared_per_multiprocessor = 0;
};

/// Overrides; 0 leaves a choice to choose_mamba2_config.
struct Mamba2Tuning {
  int tile_rows = 0;
  int warps = 0;
  int stages = 0;
  int tiles_per_block = 0;
};

struct Mamba2CudaConfig {
  int tile_rows = 16;
  Mamba2Launch launch;
  std::int64_t blocks = 0;
  int blocks_per_multiprocessor = 0;  // that fit by shared memory
  std::string reason;

  /// "16 rows x 2 stages x 4 warps, 16 tiles per block, 8192 blocks, 3 per SM: <reason>".
  std::string to_string() const;
};

/// Picks tile, warps and stages that fit the device, or says why nothing does.
Result<Mamba2CudaConfig> choose_mamba2_config(const Mamba2CudaParams& params,
                                              const CudaDeviceInfo& device,
                                              const Mamba2Tuning& tuning = {});

}  // namespace replayssm::cuda
