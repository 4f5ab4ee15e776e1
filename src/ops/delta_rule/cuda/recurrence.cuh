// The recurrence on a tile held in registers: what folds and committed rows do, and the only place
// where a state advances. Every sum has one order, so an exact flush is bit-equal to plain
// decoding.
#pragma once

#include <cstdint>

#include "cuda/vector.cuh"
#include "cuda/warp.cuh"
#include "ops/delta_rule/cuda/config.h"

namespace replayssm::cuda {

/// The live records as folds read them, prepared (preparation.cuh), from a pass's first row on.
template <typename Act>
struct FoldedRecords {
  int count;
  bool exact;         // the recurrence is re-run from v; else deltas are added up
  const Act* values;  // (count, rows) v, or deltas
  int value_pitch;
  const float* keys;  // (count, key_dim), unit
  int key_pitch;
  const float* decays;  // (count), or (count, key_dim); of deltas: of later records, with the keys
  int decay_pitch;      // where every channel has its own
  const float* total;   // of deltas: decays of all records
  const float* betas;   // (count)
};

/// kKeyDim: columns a lane's registers allow for; with kMasked, key_dim may be less. kRowSlots:
/// rows of a lane; sums over a row have the same order whatever it is.
template <typename State, int kKeyDim, bool kMasked, bool kChannelDecay, int kRowSlots = 4>
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
  static constexpr int kSlots = kRowSlots;
  static constexpr int kPassRows = kTeams * kSlots;
  static constexpr int kRowLanes = kTeamLanes / kSlots;  // lanes that end up with a row's sum
  static constexpr int kDecays = kChannelDecay ? kColumns : 1;
  static constexpr int kRecordsAtOnce = kSlots < 4 ? 2 : 1;  // whose deltas are added up
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

  /// The rows of a pass as loaded; zero in columns that there are not.
  struct PackedTile {
    Packed<State, kVector> vector[kSlots][kVectors];
  };
  __device__ __forceinline__ PackedTile load_tile(const State* from) const {
    PackedTile out{};
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!has_column(v)) continue;
        out.vector[s][v] = load_packed<State, kVector>(from + row_of(s) * key_dim_ + column(v));
      }
    }
    return out;
  }
  static __device__ __forceinline__ void widen_tile(const PackedTile& from, Tile& tile) {
    widen_rows(from.vector, tile.s);
  }

  __device__ __forceinline__ void read_tile(const State* from, bool is_zero, Tile& tile) const {
    widen_tile(is_zero ? PackedTile{} : load_tile(from), tile);
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
  static __device__ __forceinline__ void round_tile(Tile& tile) { round_rows<State>(tile.s); }

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
    return team_sum<kTeamLanes>(sum, lane_);
  }

  /// d = beta (v - S alpha k); S = alpha S + d k. `decay`: alpha of the lane's columns where every
  /// channel has its own, else one. Returns d of result_row().
  __device__ __forceinline__ float advance(Tile& tile, const float (&k)[kColumns],
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
    const int first = lane_ - lane_ % kTeamLanes;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const float row_d = __shfl_sync(kAllLanes, d, first + s * kRowLanes);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        tile.s[s][i] =
            __fmaf_rn(tile.s[s][i], decay[kChannelDecay ? i : 0], __fmul_rn(row_d, k[i]));
      }
    }
    return d;
  }

  /// Decays of the lane's columns where every channel has its own, else one.
  __device__ __forceinline__ void load_decays(const float* from, float (&out)[kDecays]) const {
    if constexpr (kChannelDecay) {
      load_vector(from, out);
    } else {
      out[0] = *from;
    }
  }

  /// Through the records in their order. Exactly: by the recurrence. Else S = alpha S + sum_e d_e
  /// k_e, alpha of all records together, k_e (or d_e) times the decays of later ones.
  template <typename Act>
  __device__ __forceinline__ void fold(const FoldedRecords<Act>& records, Tile& tile) const {
    const float* k_at = records.keys;
    const float* decay_at = records.decays;
    float decay[kDecays];
    if (!records.exact) {
      load_decays(records.total, decay);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          tile.s[s][i] = __fmul_rn(tile.s[s][i], decay[kChannelDecay ? i : 0]);
        }
      }
      const Act* d = records.values;
#pragma unroll kRecordsAtOnce
      for (int i = 0; i < records.count; ++i) {
        float k[kColumns];
        load_vector(k_at, k);
        const float weight = kChannelDecay ? 1.0f : *decay_at;
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          const float row_d = __fmul_rn(weight, widen(d[row_of(s)]));
#pragma unroll
          for (int n = 0; n < kColumns; ++n) tile.s[s][n] = __fmaf_rn(row_d, k[n], tile.s[s][n]);
        }
        k_at += records.key_pitch;
        decay_at += records.decay_pitch;
        d += records.value_pitch;
      }
      return;
    }
    const Act* v = records.values + result_row();
#pragma unroll 1
    for (int i = 0; i < records.count; ++i) {
      float k[kColumns];
      load_vector(k_at, k);
      load_decays(decay_at, decay);
      advance(tile, k, decay, records.betas[i], widen(*v));
      k_at += records.key_pitch;
      decay_at += records.decay_pitch;
      v += records.value_pitch;
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
    halve_sums<kSlots / 2, kTeamLanes / 2>(sx, lane_);
    halve_sums<kSlots / 2, kTeamLanes / 2>(sy, lane_);
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

 protected:
  int lane_, key_dim_;
  int first_row_, first_column_;
};

}  // namespace replayssm::cuda
