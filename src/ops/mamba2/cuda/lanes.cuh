// Element-wise work of a warp on a tile of the state (folds, committed rows), and sums over rows.
#pragma once

#include <cstdint>

#include "cuda/vector.cuh"
#include "ops/mamba2/cuda/config.h"
#include "ops/mamba2/cuda/row.cuh"

namespace replayssm::cuda {

template <typename State, typename Act, int kStateSize>
class Mamba2Lanes {
 protected:
  // A lane holds kVectors vectors of 16 bytes of each of kSlots state rows of a pass of kPassRows.
  // Lanes that share rows form a team; slot s of a lane of team m is row m * kSlots + s.
  static constexpr int kVector = 16 / static_cast<int>(sizeof(State));
  static constexpr int kTeamLanes =
      kStateSize / kVector < kWarpLanes ? kStateSize / kVector : kWarpLanes;
  static constexpr int kVectors = kStateSize / (kVector * kTeamLanes);
  static constexpr int kTeams = kWarpLanes / kTeamLanes;
  static constexpr int kColumns = kVector * kVectors;
  static constexpr int kPassRows = mamba2_pass_rows(kStateSize);
  static constexpr int kSlots = kPassRows / kTeams;
  static constexpr int kRowLanes = kWarpLanes / kPassRows;  // lanes that end up with a row's sum
  static_assert(kSlots * kTeams == kPassRows && kSlots <= kTeamLanes);

  __device__ __forceinline__ explicit Mamba2Lanes(int lane)
      : team(lane / kTeamLanes), column((lane % kTeamLanes) * kVector), lane_(lane) {}

  struct Tile {
    float s[kSlots][kColumns];
  };

  __device__ __forceinline__ int tile_offset(int s, int v) const {
    return (team * kSlots + s) * kStateSize + v * kVector * kTeamLanes + column;
  }

  /// The rows of a pass as loaded.
  struct PackedTile {
    Packed<State, kVector> vector[kSlots][kVectors];
  };
  __device__ __forceinline__ PackedTile load_tile(const State* from) const {
    PackedTile out;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        out.vector[s][v] = load_packed<State, kVector>(from + tile_offset(s, v));
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

  /// What the stored state loses of a tile that went on in registers.
  static __device__ __forceinline__ void round_tile(Tile& tile) { round_rows<State>(tile.s); }

  /// Encodes the tile to global memory, past the caches, and/or back to its stage.
  template <bool kToGlobal, bool kToStage>
  __device__ __forceinline__ void write_tile(const Tile& tile, State* global, State* staged) const {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        Packed<State, kVector> packed;
#pragma unroll
        for (int i = 0; i < kVector / 2; ++i) {
          packed.set(i, tile.s[s][v * kVector + 2 * i], tile.s[s][v * kVector + 2 * i + 1]);
        }
        const uint4 bits = {packed.word[0], packed.word[1], packed.word[2], packed.word[3]};
        if constexpr (kToGlobal) __stcs(reinterpret_cast<uint4*>(global + tile_offset(s, v)), bits);
        if constexpr (kToStage) *reinterpret_cast<uint4*>(staged + tile_offset(s, v)) = bits;
      }
    }
  }

  /// s = fma(u, b, s): the one place where a state advances (ops/deferred_decay.h).
  static __device__ __forceinline__ void advance(Tile& tile, int s, float u,
                                                 const float (&b)[kColumns]) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) tile.s[s][i] = __fmaf_rn(u, b[i], tile.s[s][i]);
  }
  static __device__ __forceinline__ void multiply(Tile& tile, int s, float by) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) tile.s[s][i] = __fmul_rn(tile.s[s][i], by);
  }
  static __device__ __forceinline__ void multiply(Tile& tile, float by) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) multiply(tile, s, by);
  }

  /// This lane's columns of a row of B or C, as loaded.
  struct PackedColumns {
    Packed<Act, kVector> vector[kVectors];
  };

  __device__ __forceinline__ PackedColumns load_columns(const Act* from) const {
    return load_vectors(from + column);
  }
  /// From the first of them on.
  static __device__ __forceinline__ PackedColumns load_vectors(const Act* from) {
    PackedColumns out;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      out.vector[v] = load_packed<Act, kVector>(from + v * kVector * kTeamLanes);
    }
    return out;
  }

  static __device__ __forceinline__ void widen_columns(const PackedColumns& from,
                                                       float (&out)[kColumns]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) out[v * kVector + i] = from.vector[v][i];
    }
  }

  /// Sums each slot over its team; the lane's result is that of state row lane / kRowLanes.
  template <int kCount>
  __device__ __forceinline__ float reduce(float (&sum)[kCount]) const {
    return team_sum<kTeamLanes>(sum, lane_);
  }

  int team;    // of the lane
  int column;  // first of the lane's columns of a vector

 private:
  int lane_;
};

}  // namespace replayssm::cuda
