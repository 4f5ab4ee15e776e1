// A warp's share of a step of the delta rule: which tiles of which row, and where their data lies.
#pragma once

#include <cstdint>

#include "cuda/gates.cuh"
#include "cuda/step_launch.cuh"
#include "cuda/vector.cuh"
#include "cuda/warp.cuh"
#include "ops/deferred_decay.h"
#include "ops/delta_rule/cuda/config.h"
#include "ops/delta_rule/cuda/params.h"
#include "state/cuda/row_of_step.cuh"

namespace replayssm::cuda {

/// kRows: of a tile.
template <typename State, typename Act, int kRows = kDeltaRuleTileRows>
class DeltaRuleRow : protected RowOfStep {
 protected:
  __device__ __forceinline__ DeltaRuleRow(const DeltaRuleCudaParams& params,
                                          const DeltaRuleLaunch& shape)
      : RowOfStep(params.limits), p(params), launch(shape) {
    thread = static_cast<int>(threadIdx.x);
    lane = thread % kWarpLanes;
    warp = thread / kWarpLanes;
    key_head = group_of_block();
    const Run run = run_of(warp);
    head = run.head;
    tile_count = run.tiles;
    first_row = run.first_tile * kRows;
  }

  struct Run {
    int head, first_tile, tiles;
  };
  __device__ __forceinline__ Run own_run() const { return {head, first_row / kRows, tile_count}; }
  /// Of a warp of the block.
  __device__ __forceinline__ Run run_of(int warp_of_block) const {
    const int run = block_in_group() * launch.warps + warp_of_block;
    // A key head's last block may have warps without a run.
    const bool has_run = run < launch.runs_per_key;
    const int head_in_key =
        has_run ? static_cast<int>(__umulhi(2u * static_cast<unsigned>(run), launch.head_of_run))
                : 0;
    const int first_tile = has_run ? (run - head_in_key * launch.runs_per_head) * launch.tiles : 0;
    return {key_head * launch.heads_per_key + head_in_key, first_tile,
            has_run ? min(launch.tiles, launch.tiles_per_head - first_tile) : 0};
  }

  /// Records are folded by re-running the recurrence from their v, and not by their deltas.
  __device__ __forceinline__ bool folds_values() const {
    return kind != PlannedRow::kReplay && !p.fast_flush;
  }
  /// Exactly one run of a head appends what the head records once.
  static __device__ __forceinline__ bool is_first_of_head(const Run& run) {
    return run.tiles > 0 && run.first_tile == 0;
  }
  /// Exactly one block of a key head appends what the key head records once.
  static __device__ __forceinline__ bool is_first_of_key() { return block_in_group() == 0; }

  /// Makes this object's values new ones to the compiler. What a branch with many registers in use
  /// has to spill is then spilled there, and not where the other branches would have to load it;
  /// and what has been computed of the values does not stay in registers.
  __device__ __forceinline__ void isolate() {
    asm volatile("" : "+r"(thread), "+r"(lane), "+r"(warp), "+r"(places), "+r"(key_head));
    asm volatile("" : "+r"(head), "+r"(first_row), "+r"(tile_count), "+r"(slot), "+r"(live));
    asm volatile("" : "+r"(first_place), "+r"(own), "+r"(token_begin), "+r"(token_count));
  }

  __device__ __forceinline__ void zero_outputs() const {
    const int rows = tile_count * kRows;
    for (int t = 0; t < token_count; ++t) {
      for (int row = lane; row < rows; row += kWarpLanes) output(t)[row] = narrow<Act>(0.0f);
    }
  }

  // ---- Addresses ----

  /// The run's first tile; others follow it.
  __device__ __forceinline__ State* state() const {
    return static_cast<State*>(p.state) + slot * p.state_slot_stride +
           along(head, p.state_head_stride) + along(first_row, p.shape.key_dim);
  }
  /// Of the run's rows from `row` on, where the checkpoint defers decays.
  __device__ __forceinline__ float* deferred_decay(int row) const {
    return p.deferred + slot * p.deferred_slot_stride +
           (head * static_cast<int>(p.shape.value_dim) + first_row + row) /
               static_cast<int>(kDeferredRows);
  }
  __device__ __forceinline__ Act* ring_k(int entry) const {
    return static_cast<Act*>(p.ring_k) + slot * p.ring_k_slot_stride +
           along(key_head, p.ring_k_head_stride) + along(place(entry), p.shape.key_dim);
  }
  __device__ __forceinline__ float* ring_k_scale(int entry) const {
    return p.ring_k_scale + slot * p.ring_k_scale_slot_stride +
           along(key_head, p.ring_k_scale_head_stride) + place(entry);
  }
  /// Place 0 of the rings of v and of deltas, and token 0 of v and o, from the run's first row on.
  __device__ __forceinline__ Act* ring_v() const {
    return static_cast<Act*>(p.ring_v) + slot * p.ring_v_slot_stride +
           along(head, p.ring_v_head_stride) + first_row;
  }
  __device__ __forceinline__ Act* ring_delta() const {
    return static_cast<Act*>(p.ring_delta) + slot * p.ring_delta_slot_stride +
           along(head, p.ring_delta_head_stride) + first_row;
  }
  /// From place 0 to the place of an entry.
  __device__ __forceinline__ int value_offset(int entry) const {
    return place(entry) * static_cast<int>(p.shape.value_dim);
  }
  __device__ __forceinline__ float* ring_decay(int of_head, int entry) const {
    return p.ring_decay + slot * p.ring_decay_slot_stride +
           along(of_head, p.ring_decay_head_stride) + along(place(entry), launch.decays);
  }
  __device__ __forceinline__ float* ring_beta(int of_head, int entry) const {
    return p.ring_beta + slot * p.ring_beta_slot_stride + along(of_head, p.ring_beta_head_stride) +
           place(entry);
  }
  __device__ __forceinline__ const Act* token_q(int t) const {
    return static_cast<const Act*>(p.q) + along(token_begin + t, p.q_token_stride) +
           along(key_head, p.q_head_stride);
  }
  __device__ __forceinline__ const Act* token_k(int t) const {
    return static_cast<const Act*>(p.k) + along(token_begin + t, p.k_token_stride) +
           along(key_head, p.k_head_stride);
  }
  __device__ __forceinline__ const Act* token_v(int t) const {
    return static_cast<const Act*>(p.v) + along(token_begin + t, p.v_token_stride) +
           along(head, p.v_head_stride) + first_row;
  }
  __device__ __forceinline__ Act* output(int t) const {
    return static_cast<Act*>(p.o) + along(token_begin + t, p.o_token_stride) +
           along(head, p.o_head_stride) + first_row;
  }
  /// A gate or beta as received.
  struct Raw {
    const void* at;
    bool is_f32;

    __device__ __forceinline__ LoadedNumber<Act> load() const { return {at, 0, is_f32}; }
    __device__ __forceinline__ float operator*() const { return load().value(is_f32); }
  };
  static __device__ __forceinline__ Raw raw(const void* data, bool is_f32, std::int64_t index) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    return {bytes + index * (is_f32 ? 4 : static_cast<int>(sizeof(Act))), is_f32};
  }
  /// `channel`: 0 where a head has one decay.
  __device__ __forceinline__ Raw raw_gate(int of_head, int t, int channel) const {
    return raw(
        p.gate, p.gate_is_f32,
        along(token_begin + t, p.gate_token_stride) + along(of_head, p.gate_head_stride) + channel);
  }
  __device__ __forceinline__ Raw raw_beta(int of_head, int t) const {
    return raw(p.beta, p.beta_is_f32, along(token_begin + t, p.beta_token_stride) + of_head);
  }
  /// The model's part of a gate.
  struct GateParameters {
    float a_log, bias;

    __device__ __forceinline__ float rate() const { return exp_f32(a_log); }
  };
  __device__ __forceinline__ GateParameters gate_parameters(int of_head, int channel) const {
    return {p.a_log == nullptr ? 0.0f : p.a_log[of_head],
            p.dt_bias == nullptr ? 0.0f : p.dt_bias[of_head * launch.decays + channel]};
  }
  __device__ __forceinline__ float token_decay(float raw_gate, float rate, float bias) const {
    const float u = __fadd_rn(raw_gate, bias);
    return exp_f32(p.bounded ? bounded_log_decay(rate, u, p.lower_bound)
                             : softplus_log_decay(rate, u));
  }

  const DeltaRuleCudaParams& p;
  const DeltaRuleLaunch& launch;
  int thread, lane, warp;
  int key_head, head;
  int first_row, tile_count;  // of the run
};

}  // namespace replayssm::cuda
