// The recurrence on a tile held in registers: what folds and committed rows do, and the only place
// where a state advances. Every sum has one order, so an exact flush is bit-equal to plain
// decoding.
#pragma once

#include <cstdint>

#include "cuda/vector.cuh"
#include "cuda/warp.cuh"
#include "ops/deferred_decay.h"
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
  // Where every channel has its own decay: (count, key_dim) decays. Else (count), exactly: what v
  // is multiplied by, beta / c, or with its sign set what R is to be multiplied by first, after
  // which that is beta; of deltas: decays of later records, with the keys.
  const float* decays;
  int decay_pitch;
  const float* total;  // of deltas: decays of all records, with what was deferred before
  const float* betas;  // (count)
  float rest;          // exactly, with one decay per head: what is deferred after the records
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
  static constexpr bool kDefers = delta_rule_defers<State, kChannelDecay>();
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

  static __device__ __forceinline__ int row_of_slot(int slot) {
    return slot / 2 + slot % 2 * (kPassRows / 2);
  }
  __device__ __forceinline__ int row_of(int slot) const { return first_row_ + row_of_slot(slot); }
  /// The row of a pass whose sum `multiply` leaves in this lane.
  __device__ __forceinline__ int result_row() const {
    return row_of(lane_ % kTeamLanes / kRowLanes);
  }

  __device__ __forceinline__ bool has_column(int v) const {
    return !kMasked || v * kVector * kTeamLanes + first_column_ < key_dim_;
  }

  /// Of the lane's first element in a pass, and from there to vector v of a slot, which is a
  /// constant. As one number per vector the compiler works them out ahead of the tiles, and spills
  /// them.
  __device__ __forceinline__ int first_offset() const {
    return first_row_ * key_dim_ + first_column_;
  }
  __device__ __forceinline__ int offset(int slot, int v) const {
    return row_of_slot(slot) * key_dim_ + v * kVector * kTeamLanes;
  }

  /// The rows of a pass as loaded; zero in columns that there are not.
  struct PackedTile {
    Packed<State, kVector> vector[kSlots][kVectors];
  };
  __device__ __forceinline__ PackedTile load_tile(const State* from) const {
    PackedTile out{};
    from += first_offset();
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!has_column(v)) continue;
        out.vector[s][v] = load_packed<State, kVector>(from + offset(s, v));
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
    global += first_offset();
    if constexpr (kToStage) staged += first_offset();
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
        __stcs(reinterpret_cast<uint4*>(global + offset(s, v)), bits);
        if constexpr (kToStage) *reinterpret_cast<uint4*>(staged + offset(s, v)) = bits;
      }
    }
  }

  /// What the stored state loses of a tile that went on in registers.
  static __device__ __forceinline__ void round_tile(Tile& tile) { round_rows<State>(tile.s); }

  /// This lane's columns of a vector in shared memory; zero where there are none.
  template <typename T>
  __device__ __forceinline__ void load_vector(const T* from, float (&out)[kColumns]) const {
    from += first_column_;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Packed<T, kVector> packed{};
      if (has_column(v)) packed = load_packed<T, kVector>(from + offset(0, v));
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

  /// x of the row of slot s, of those that lanes have for result_row().
  __device__ __forceinline__ float of_slot(float x, int s) const {
    return __shfl_sync(kAllLanes, x, lane_ - lane_ % kTeamLanes + s * kRowLanes);
  }

  static __device__ __forceinline__ void scale_tile(Tile& tile, float factor) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) tile.s[s][i] = __fmul_rn(tile.s[s][i], factor);
    }
  }

  /// With one decay per head (ops/deferred_decay.h): R += u k^T, u = d / c = gain v - beta R k,
  /// with gain = beta / c. `product`: R k of result_row().
  __device__ __forceinline__ void add_token(Tile& tile, const float (&k)[kColumns], float product,
                                            float gain, float beta, float v) const {
    const float u = __fmaf_rn(-beta, product, __fmul_rn(gain, v));
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const float row_u = of_slot(u, s);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) tile.s[s][i] = __fmaf_rn(row_u, k[i], tile.s[s][i]);
    }
  }

  /// With a decay alpha for each of the lane's columns: d = beta (v - S alpha k), S = alpha S + d
  /// k. Returns d of result_row().
  __device__ __forceinline__ float advance_channels(Tile& tile, const float (&k)[kColumns],
                                                    const float (&decay)[kColumns], float beta,
                                                    float v) const {
    float decayed[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) decayed[i] = __fmul_rn(decay[i], k[i]);
    const float d = __fmul_rn(beta, __fsub_rn(v, multiply(tile, decayed)));
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const float row_d = of_slot(d, s);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        tile.s[s][i] = __fmaf_rn(tile.s[s][i], decay[i], __fmul_rn(row_d, k[i]));
      }
    }
    return d;
  }

  /// What a token does where a head has one decay, which `deferred` takes along; a two-byte state
  /// does not leave it deferred.
  static __device__ __forceinline__ DeferredAdvance take_decay(DeferredDecay& deferred,
                                                               const float* decay) {
    DeferredAdvance by{1.0f, 1.0f, 1.0f};
    if constexpr (!kChannelDecay) {
      by = deferred.advance(*decay);
      if constexpr (!kDefers) deferred = DeferredDecay();
    }
    return by;
  }
  /// What products with the tile are to be multiplied by after it.
  static __device__ __forceinline__ float left_deferred(const DeferredAdvance& by) {
    return kDefers ? by.rest : 1.0f;
  }

  /// A token: d = beta (v - S alpha k), S = alpha S + d k. `decays`: alpha of all channels, where
  /// they have their own, else `by` is of take_decay. Returns d of result_row().
  __device__ __forceinline__ float advance(Tile& tile, const float (&k)[kColumns],
                                           const float* decays, const DeferredAdvance& by,
                                           float beta, float v) const {
    if constexpr (kChannelDecay) {
      float alpha[kColumns];
      load_vector(decays, alpha);
      return advance_channels(tile, k, alpha, beta, v);
    } else {
      // Votes, so that the compiler knows that the warp stays together. Where there are registers
      // for it a product does not wait for a factor that there hardly ever is.
      constexpr bool kLate = kSlots < 4;
      if (!kLate && __any_sync(kAllLanes, by.factor != 1.0f) != 0) scale_tile(tile, by.factor);
      float product = multiply(tile, k);
      if (kLate && __any_sync(kAllLanes, by.factor != 1.0f) != 0) {
        scale_tile(tile, by.factor);
        product = multiply(tile, k);
      }
      add_token(tile, k, product, __fmul_rn(beta, by.gain), beta, v);
      if constexpr (!kDefers) scale_tile(tile, by.rest);
      return __fmul_rn(beta, __fmaf_rn(-by.rest, product, v));
    }
  }

  /// Of a record's entry in `decays`, exactly: whether it is what R is to be multiplied by.
  static __device__ __forceinline__ bool is_factor(float x) {
    return static_cast<std::int32_t>(__float_as_uint(x)) < 0;
  }

  /// Through the records in their order: by the recurrence, or by their deltas.
  template <typename Act>
  __device__ __forceinline__ void fold(const FoldedRecords<Act>& records, Tile& tile) const {
    if (!records.exact) {
      add_deltas(records, tile);
    } else if constexpr (kChannelDecay) {
      rerun_channels(records, tile);
    } else {
      rerun_deferred(records, tile);
    }
  }

  /// S = alpha S + sum_e d_e k_e, alpha of all records together, k_e (or d_e) times the decays of
  /// later ones.
  template <typename Act>
  __device__ __forceinline__ void add_deltas(const FoldedRecords<Act>& records, Tile& tile) const {
    if constexpr (kChannelDecay) {
      float decay[kColumns];
      load_vector(records.total, decay);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) tile.s[s][i] = __fmul_rn(tile.s[s][i], decay[i]);
      }
    } else {
      scale_tile(tile, *records.total);
    }
    const float* k_at = records.keys;
    const float* decay_at = records.decays;
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
  }

  template <typename Act>
  __device__ __forceinline__ void rerun_channels(const FoldedRecords<Act>& records,
                                                 Tile& tile) const {
    const float* k_at = records.keys;
    const float* decay_at = records.decays;
    const Act* v = records.values + result_row();
#pragma unroll 1
    for (int i = 0; i < records.count; ++i) {
      float k[kColumns], decay[kColumns];
      load_vector(k_at, k);
      load_vector(decay_at, decay);
      advance_channels(tile, k, decay, records.betas[i], widen(*v));
      k_at += records.key_pitch;
      decay_at += records.decay_pitch;
      v += records.value_pitch;
    }
  }

  template <typename Act>
  __device__ __forceinline__ void rerun_deferred(const FoldedRecords<Act>& records,
                                                 Tile& tile) const {
    bool mine = false;
#pragma unroll 1
    for (int i = lane_; i < records.count; i += kWarpLanes) mine |= is_factor(records.decays[i]);
    const bool rescales = __any_sync(kAllLanes, mine) != 0;
    const float* k_at = records.keys;
    const Act* v = records.values + result_row();
#pragma unroll 1
    for (int i = 0; i < records.count; ++i) {
      float k[kColumns];
      load_vector(k_at, k);
      float gain = records.decays[i];
      const float beta = records.betas[i];
      if (rescales) {
        const bool now = is_factor(gain);
        scale_tile(tile, now ? -gain : 1.0f);
        gain = now ? beta : gain;
      }
      add_token(tile, k, multiply(tile, k), gain, beta, widen(*v));
      k_at += records.key_pitch;
      v += records.value_pitch;
    }
    if constexpr (!kDefers) scale_tile(tile, records.rest);
  }

  /// sums = {S x, S y} of rows g = lane / 4 and g + 8 of the staged tile, alike in lanes 4g..4g
  /// + 3. A state of fp32 is multiplied as it is.
  __device__ __forceinline__ void multiply_staged(const State* staged, const float (&x)[kColumns],
                                                  const float (&y)[kColumns],
                                                  float (&sums)[4]) const {
    static_assert(!kMasked && kTeamLanes == 8 && kPassRows == kDeltaRuleTileRows);
    staged += first_offset();
    float sx[kSlots], sy[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      sx[s] = sy[s] = 0.0f;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const auto packed = load_packed<State, kVector>(staged + offset(s, v));
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
