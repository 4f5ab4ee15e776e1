// The recurrence on a tile held in registers: what folds and committed rows do, and the only place
// where a state advances. Every sum has one order, so an exact flush is bit-equal to plain
// decoding.
#pragma once

#include <cstdint>

#include "cuda/ptx/select.cuh"
#include "cuda/vector.cuh"
#include "cuda/warp.cuh"
#include "ops/delta_rule/cuda/config.h"

namespace replayssm::cuda {

/// kKeyDim: columns a lane's registers allow for; with kMasked, key_dim may be less.
template <typename State, int kKeyDim, bool kMasked, bool kChannelDecay>
class DeltaRuleRecurrence {
 protected:
  // kTeamLanes lanes share kSlots rows, each with kColumns columns of every one of them, in vectors
  // of 16 bytes. Slots are rows of a pass of kPassRows rows; a team's slots are two neighbours and
  // the two half a pass further, so that sums over a team end up where tensor-core products leave
  // them (products.cuh): lanes 4g to 4g + 3 have rows g and g + kPassRows / 2.
  static constexpr int kVector = 16 / static_cast<int>(sizeof(State));
  static constexpr int kColumns = 16;
  static constexpr int kVectors = kColumns / kVector;
  static constexpr int kTeamLanes = kKeyDim / kColumns;
  static constexpr int kTeams = kWarpLanes / kTeamLanes;
  static constexpr int kSlots = 4;
  static constexpr int kPassRows = kTeams * kSlots;
  static constexpr int kRowLanes = kTeamLanes / kSlots;  // lanes that end up with a row's sum
  static_assert(kDeltaRuleTileRows % kPassRows == 0 && kRowLanes >= 1);

  __device__ __forceinline__ DeltaRuleRecurrence(int lane_index, int key_dim)
      : lane_(lane_index),
        key_dim_(key_dim),
        first_row_(lane_index / kTeamLanes * (kSlots / 2)),
        first_column_(lane_index % kTeamLanes * kVector) {}

  struct Tile {
    float s[kSlots][kColumns];
  };

  __device__ __forceinline__ int row_of(int slot) const {
    return first_row_ + slot / 2 + slot % 2 * (kPassRows / 2);
  }
  /// The row of a pass whose sum `multiply` leaves in this lane.
  __device__ __forceinline__ int result_row() const {
    return row_of(lane_ % kTeamLanes / kRowLanes);
  }

  __device__ __forceinline__ bool has_column(int v) const {
    return !kMasked || v * kVector * kTeamLanes + first_column_ < key_dim_;
  }
  __device__ __forceinline__ int column(int v) const {
    return v * kVector * kTeamLanes + first_column_;
  }

  __device__ __forceinline__ void read_tile(const State* staged, bool is_zero, Tile& tile) const {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (is_zero || !has_column(v)) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) tile.s[s][v * kVector + i] = 0.0f;
        } else {
          const auto packed =
              load_packed<State, kVector>(staged + row_of(s) * key_dim_ + column(v));
#pragma unroll
          for (int i = 0; i < kVector; ++i) tile.s[s][v * kVector + i] = packed[i];
        }
      }
    }
  }

  /// Encodes the tile to global memory, past the caches, and/or back to its stage.
  template <bool kToStage>
  __device__ __forceinline__ void write_tile(const Tile& tile, State* global, State* staged) const {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!has_column(v)) continue;
        Packed<State, kVector> packed;
#pragma unroll
        for (int i = 0; i < kVector / 2; ++i) {
          packed.set(i, tile.s[s][v * kVector + 2 * i], tile.s[s][v * kVector + 2 * i + 1]);
        }
        const uint4 bits = {packed.word[0], packed.word[1], packed.word[2], packed.word[3]};
        const int offset = row_of(s) * key_dim_ + column(v);
        __stcs(reinterpret_cast<uint4*>(global + offset), bits);
        if constexpr (kToStage) *reinterpret_cast<uint4*>(staged + offset) = bits;
      }
    }
  }

  /// What the stored state loses of a tile that went on in registers.
  static __device__ __forceinline__ void round_tile(Tile& tile) {
    if constexpr (sizeof(State) == 2) {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) tile.s[s][i] = widen(narrow<State>(tile.s[s][i]));
      }
    }
  }

  /// This lane's columns of a vector in shared memory; zero where there are none.
  template <typename T>
  __device__ __forceinline__ void load_vector(const T* from, float (&out)[kColumns]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Packed<T, kVector> packed{};
      if (has_column(v)) packed = load_packed<T, kVector>(from + column(v));
#pragma unroll
      for (int i = 0; i < kVector; ++i) out[v * kVector + i] = packed[i];
    }
  }

  /// Sums of S x over columns; the lane's result is that of result_row().
  __device__ __forceinline__ float multiply(const Tile& tile, const float (&x)[kColumns]) const {
    float sum[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      sum[s] = 0.0f;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sum[s] = __fmaf_rn(tile.s[s][i], x[i], sum[s]);
    }
    exchange<kSlots / 2, kTeamLanes / 2>(sum);
    float total = sum[0];
#pragma unroll
    for (int rest = kRowLanes / 2; rest > 0; rest /= 2) {
      total = __fadd_rn(total, __shfl_xor_sync(kAllLanes, total, rest));
    }
    return total;
  }

  /// S = alpha S, before deltas are added.
  template <int kDecays>
  static __device__ __forceinline__ void decay_tile(const float (&decay)[kDecays], Tile& tile) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        tile.s[s][i] = __fmul_rn(tile.s[s][i], decay[kChannelDecay ? i : 0]);
      }
    }
  }
  /// S += weight d k, d by rows of the pass: what a fast flush does with a record.
  template <typename Act>
  __device__ __forceinline__ void add_delta(const Act* d, float weight, const float (&k)[kColumns],
                                            Tile& tile) const {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const float row_d = __fmul_rn(weight, widen(d[row_of(s)]));
#pragma unroll
      for (int i = 0; i < kColumns; ++i) tile.s[s][i] = __fmaf_rn(row_d, k[i], tile.s[s][i]);
    }
  }

  /// sums = {S x, S y} of rows g = lane / 4 and g + 8 of the staged tile, alike in lanes 4g..4g
  /// + 3. A state of fp32 is multiplied as it is.
  __device__ __forceinline__ void multiply_staged(const State* staged, const float (&x)[kColumns],
                                                  const float (&y)[kColumns],
                                                  float (&sums)[4]) const {
    static_assert(!kMasked && kTeamLanes == 8 && kPassRows == kDeltaRuleTileRows);
    float sx[kSlots], sy[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      sx[s] = sy[s] = 0.0f;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const auto packed = load_packed<State, kVector>(staged + row_of(s) * key_dim_ + column(v));
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          sx[s] = __fmaf_rn(packed[i], x[v * kVector + i], sx[s]);
          sy[s] = __fmaf_rn(packed[i], y[v * kVector + i], sy[s]);
        }
      }
    }
    halve<kSlots / 2, kTeamLanes / 2>(sx);
    halve<kSlots / 2, kTeamLanes / 2>(sy);
    const float all[4] = {sx[0], sy[0], sx[1], sy[1]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] = all[i];
#pragma unroll
      for (int mask = 2; mask > 0; mask /= 2) {
        sums[i] = __fadd_rn(sums[i], __shfl_xor_sync(kAllLanes, sums[i], mask));
      }
    }
  }

  /// d = beta (v - S alpha k); S = alpha S + d k. `decay`: alpha of the lane's columns where every
  /// channel has its own, else one.
  template <int kDecays>
  __device__ __forceinline__ void advance(Tile& tile, const float (&k)[kColumns],
                                          const float (&decay)[kDecays], float beta,
                                          float v) const {
    float d;
    if constexpr (kChannelDecay) {
      float decayed[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) decayed[i] = __fmul_rn(decay[i], k[i]);
      d = __fmul_rn(beta, __fsub_rn(v, multiply(tile, decayed)));
    } else {
      d = __fmul_rn(beta, __fmaf_rn(-decay[0], multiply(tile, k), v));
    }
    const int team = lane_ - lane_ % kTeamLanes;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const float row_d = __shfl_sync(kAllLanes, d, team + s * kRowLanes);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        tile.s[s][i] =
            __fmaf_rn(tile.s[s][i], decay[kChannelDecay ? i : 0], __fmul_rn(row_d, k[i]));
      }
    }
  }

 private:
  /// Halves the sums a lane holds: it keeps kHalf of them, and gets what its partner has of those.
  template <int kHalf, int kMask>
  __device__ __forceinline__ void halve(float (&sum)[kSlots]) const {
    const bool upper = (lane_ & kMask) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float send = ptx::select(upper, sum[i], sum[i + kHalf]);
      const float keep = ptx::select(upper, sum[i + kHalf], sum[i]);
      sum[i] = __fadd_rn(keep, __shfl_xor_sync(kAllLanes, send, kMask));
    }
  }
  template <int kHalf, int kMask>
  __device__ __forceinline__ void exchange(float (&sum)[kSlots]) const {
    if constexpr (kHalf > 0) {
      halve<kHalf, kMask>(sum);
      exchange<kHalf / 2, kMask / 2>(sum);
    }
  }

 protected:
  int lane_, key_dim_;
  int first_row_, first_column_;
};

}  // namespace replayssm::cuda
