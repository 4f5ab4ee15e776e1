// A warp's share of a Mamba-2 step: which tiles of which row, and where their data lies.
#pragma once

#include <cstdint>

#include "cuda/gates.cuh"
#include "cuda/step_launch.cuh"
#include "cuda/vector.cuh"
#include "cuda/warp.cuh"
#include "ops/deferred_decay.h"
#include "ops/mamba2/cuda/config.h"
#include "ops/mamba2/cuda/params.h"
#include "state/cuda/row_of_step.cuh"

namespace replayssm::cuda {

template <typename State, typename Act, int kStateSize>
class Mamba2Row : protected RowOfStep {
 protected:
  static constexpr bool kDefers = defers_decay(DTypeOf<State>::value);  // the checkpoint stores c

  struct Position {
    int head;
    int p0;  // first state row
  };

  __device__ __forceinline__ Mamba2Row(const Mamba2CudaParams& params, const Mamba2Launch& shape)
      : RowOfStep(params.limits), p(params), launch(shape) {
    lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  }

  /// The warp's group and tiles, by the kind of its row; false if there is nothing left for it.
  __device__ __forceinline__ bool find_work(const GridPlace& place) {
    const int run = place.block * launch.warps + warp;
    const int tiles = place.in_tail                ? launch.tail_tiles_per_run
                      : kind == PlannedRow::kFlush ? launch.fold_tiles_per_run
                                                   : launch.tiles_per_run;
    tile_begin = run * tiles;
    if (tile_begin >= launch.tiles_per_group) return false;
    tile_end = min(tile_begin + tiles, launch.tiles_per_group);
    group = group_of_block();
    group_head = group * launch.heads_per_group;
    first_tile = position(tile_begin);
    return true;
  }

  __device__ __forceinline__ void zero_outputs() const {
    for (int tile = tile_begin; tile < tile_end; ++tile) {
      const Position at = position(tile);
      for (int t = 0; t < token_count; ++t) {
        if (lane < kTileRows) output(t, at)[lane] = narrow<Act>(0.0f);
      }
    }
  }

  // ---- Addresses ----

  __device__ __forceinline__ Position position(int tile) const {
    const int head = static_cast<int>(static_cast<unsigned>(tile) /
                                      static_cast<unsigned>(launch.tiles_per_head));
    return {group_head + head, (tile - head * launch.tiles_per_head) * kTileRows};
  }

  __device__ __forceinline__ State* state(const Position& at) const {
    return static_cast<State*>(p.state) + slot * p.state_slot_stride +
           along(at.head, p.state_head_stride) + at.p0 * kStateSize;
  }
  /// Of the rows from at.p0 on.
  __device__ __forceinline__ float* deferred_decay(const Position& at) const {
    return p.deferred + slot * p.deferred_slot_stride +
           (at.head * launch.head_dim + at.p0) / static_cast<int>(kDeferredRows);
  }
  /// As the checkpoint has it. All rows of a head have the same, but others may be writing theirs.
  __device__ __forceinline__ DeferredDecay load_deferred(const Position& at) const {
    if (!kDefers || zero) return DeferredDecay();
    return DeferredDecay(*deferred_decay(at));
  }
  __device__ __forceinline__ void store_deferred(const Position& at, int rows,
                                                 const DeferredDecay& deferred) const {
    if (kDefers && lane < rows / static_cast<int>(kDeferredRows)) {
      deferred_decay(at)[lane] = deferred.value();
    }
  }

  __device__ __forceinline__ Act* ring_x_places(const Position& at) const {
    return static_cast<Act*>(p.ring_x) + slot * p.ring_x_slot_stride +
           along(at.head, p.ring_x_head_stride) + at.p0;
  }
  __device__ __forceinline__ Act* ring_x(const Position& at, int entry) const {
    return ring_x_places(at) + along(place(entry), p.ring_x_place_stride);
  }
  __device__ __forceinline__ Act* ring_b_places() const {
    return static_cast<Act*>(p.ring_b) + slot * p.ring_b_slot_stride +
           along(group, p.ring_b_group_stride);
  }
  __device__ __forceinline__ Act* ring_b(int entry) const {
    return ring_b_places() + along(place(entry), p.ring_b_place_stride);
  }
  __device__ __forceinline__ float* ring_dt(int head, int entry) const {
    return p.ring_dt + slot * p.ring_dt_slot_stride + along(head, p.ring_dt_head_stride) +
           place(entry);
  }
  __device__ __forceinline__ const Act* tokens_x(const Position& at) const {
    return static_cast<const Act*>(p.x) + along(at.head, p.x_head_stride) + at.p0;
  }
  __device__ __forceinline__ const Act* token_x(int t, const Position& at) const {
    return tokens_x(at) + along(token_begin + t, p.x_token_stride);
  }
  __device__ __forceinline__ const Act* tokens_b() const {
    return static_cast<const Act*>(p.b) + along(group, p.b_group_stride);
  }
  __device__ __forceinline__ const Act* token_b(int t) const {
    return tokens_b() + along(token_begin + t, p.b_token_stride);
  }
  __device__ __forceinline__ const Act* token_c(int t) const {
    return static_cast<const Act*>(p.c) + along(token_begin + t, p.c_token_stride) +
           along(group, p.c_group_stride);
  }
  __device__ __forceinline__ const Act* gate(int t, const Position& at) const {
    return static_cast<const Act*>(p.z) + along(token_begin + t, p.z_token_stride) +
           along(at.head, p.z_head_stride) + at.p0;
  }
  __device__ __forceinline__ Act* output(int t, const Position& at) const {
    return static_cast<Act*>(p.y) + along(token_begin + t, p.y_token_stride) +
           along(at.head, p.y_head_stride) + at.p0;
  }
  /// Of a live record, or of a token behind them.
  __device__ __forceinline__ const Act* entry_x(const Position& at, int entry) const {
    return item_of<const Act>(entry < live,
                              {ring_x_places(at), place(entry), p.ring_x_place_stride},
                              {tokens_x(at), token_begin + entry - live, p.x_token_stride});
  }
  __device__ __forceinline__ const Act* entry_b(int entry) const {
    return item_of<const Act>(entry < live, {ring_b_places(), place(entry), p.ring_b_place_stride},
                              {tokens_b(), token_begin + entry - live, p.b_token_stride});
  }
  __device__ __forceinline__ LoadedNumber<Act> raw_time_step(int t, int head) const {
    return {p.dt, along(token_begin + t, p.dt_token_stride) + head, p.dt_is_f32};
  }
  __device__ __forceinline__ float time_step(int t, int head) const {
    return mamba2_time_step(raw_time_step(t, head).value(p.dt_is_f32),
                            p.dt_bias == nullptr ? 0.0f : p.dt_bias[head], p.dt_softplus, p.dt_min,
                            p.dt_max);
  }

  const Mamba2CudaParams& p;
  const Mamba2Launch& launch;
  int lane, warp;
  int group;
  int group_head, tile_begin, tile_end;
  Position first_tile;
};

}  // namespace replayssm::cuda
