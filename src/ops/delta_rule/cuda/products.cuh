// Products of a tentative row on the tensor cores (cuda/ptx/mma.cuh): a staged tile of the state,
// or the window's deltas, times the columns of the row's tokens.
//
// Column 2t of a product belongs to k of token t, column 2t + 1 to q. Lane (g, q) = (lane / 4,
// lane % 4) therefore ends up with both sums of token 4 b + q of column block b, for rows g and
// g + 8 of the tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/mma.cuh"
#include "cuda/vector.cuh"
#include "cuda/warp.cuh"
#include "ops/delta_rule/cuda/config.h"

namespace replayssm::cuda {

/// Column: the type of columns; bf16 ones are multiplied as they are, fp32 ones as terms.
template <typename State, typename Act, typename Column, int kKeyDim, bool kMasked, int kBlocks>
class DeltaRuleProducts {
  static constexpr bool kExactColumns = sizeof(Column) == 2;

 protected:
  using Sums = float[kBlocks][4];

  // A lane owns kOwn neighbouring columns of each segment of 4 kOwn.
  static constexpr int kOwn = 16 / static_cast<int>(sizeof(State));
  static constexpr int kSegments = kKeyDim / (4 * kOwn);
  static constexpr bool kBf16State = std::is_same_v<State, BF16>;
  // bf16 terms of a column that a bf16 state is multiplied with.
  static constexpr int kColumnTerms = kExactColumns ? 1 : sizeof(Act) == 4 ? 3 : 2;
  // bf16 terms of a weight: 24 bits.
  static constexpr int kWeightTerms = 3;

  __device__ __forceinline__ explicit DeltaRuleProducts(int lane) : g(lane / 4), q(lane % 4) {}

  static __device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[b][i] = 0.0f;
    }
  }

  /// sums[v, c] += sum_n S[v, n] columns[c, n] for the staged tile. `blocks`: that have columns.
  __device__ __forceinline__ void multiply_state(const State* tile, int key_dim,
                                                 const Column* columns, int column_pitch,
                                                 int blocks, Sums& sums) const {
    const State* low = tile + g * key_dim + q * kOwn;
    const State* high = low + 8 * key_dim;
    const Column* column = columns + g * column_pitch + q * kOwn;
    Sums rest;  // of the low terms, in chains of their own
    clear(rest);
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      if (kMasked && 4 * kOwn * s >= key_dim) break;
      const bool present = !kMasked || 4 * kOwn * s + q * kOwn < key_dim;
      Packed<State, kOwn> s0{}, s1{};
      if (present) {
        s0 = load_packed<State, kOwn>(low + 4 * kOwn * s);
        s1 = load_packed<State, kOwn>(high + 4 * kOwn * s);
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (kBlocks > 1 && b >= blocks) break;
        Packed<Column, kOwn> c{};
        if (present) {
          c = load_packed<Column, kOwn>(column + 8 * b * column_pitch + 4 * kOwn * s);
        }
        if constexpr (kBf16State) {
          multiply_bf16(s0, s1, c, sums[b], rest[b]);
        } else {
          multiply_tf32(s0, s1, c, sums[b], rest[b]);
        }
      }
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[b][i] += rest[b][i];
    }
  }

  /// sums[v, c] += sum_e records[e, v] weights[c, e] over the window's live records, 16 at a time.
  /// weights are zero from `live` to the next multiple of 16; records beyond `live` may hold
  /// anything.
  __device__ __forceinline__ void multiply_window(const Act* records, int live,
                                                  const float* weights, int weight_stride,
                                                  int blocks, Sums& sums) const {
#pragma unroll 1
    for (int first = 0; first < live; first += 16) {
      const float* weight = weights + g * weight_stride + first + 2 * q;
      if constexpr (sizeof(Act) == 4) {
        const auto at = [&](int entry, int row) {
          return ptx::split_tf32(entry < live ? records[entry * kDeltaRuleTileRows + row] : 0.0f);
        };
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int e0 = first + 8 * half + 2 * q;
          const ptx::Tf32Pair a0 = at(e0, g), a1 = at(e0, g + 8);
          const ptx::Tf32Pair a2 = at(e0 + 1, g), a3 = at(e0 + 1, g + 8);
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) {
            if (kBlocks > 1 && b >= blocks) break;
            const float2 w =
                *reinterpret_cast<const float2*>(weight + 8 * b * weight_stride + 8 * half);
            const ptx::Tf32Pair w0 = ptx::split_tf32(w.x), w1 = ptx::split_tf32(w.y);
            ptx::mma_tf32(sums[b], a0.low, a1.low, a2.low, a3.low, w0.high, w1.high);
            ptx::mma_tf32(sums[b], a0.high, a1.high, a2.high, a3.high, w0.low, w1.low);
            ptx::mma_tf32(sums[b], a0.high, a1.high, a2.high, a3.high, w0.high, w1.high);
          }
        }
      } else {
        // Matrix i of the load: entries 8 (i / 2).., rows 8 (i % 2)..
        std::uint32_t a[4];
        const int lane = 4 * g + q;
        const int entry = min(first + 8 * (lane / 16) + lane % 8, live - 1);
        ptx::load_matrices_transposed(a, records + entry * kDeltaRuleTileRows + 8 * (lane / 8 % 2));
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          if (kBlocks > 1 && b >= blocks) break;
          const float2 w0 = *reinterpret_cast<const float2*>(weight + 8 * b * weight_stride);
          const float2 w1 = *reinterpret_cast<const float2*>(weight + 8 * b * weight_stride + 8);
          float left[4] = {w0.x, w0.y, w1.x, w1.y};
#pragma unroll
          for (int term = 0; term < kWeightTerms; ++term) {
            const auto packed = take_bf16_term<4>(left);
            ptx::mma_bf16(sums[b], a[0], a[1], a[2], a[3], packed.word[0], packed.word[1]);
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void multiply_bf16(const Packed<State, kOwn>& s0,
                                                const Packed<State, kOwn>& s1,
                                                const Packed<Column, kOwn>& c, float (&sums)[4],
                                                float (&rest)[4]) const {
    float left[kOwn];
    if constexpr (!kExactColumns) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) left[i] = c[i];
    }
#pragma unroll
    for (int term = 0; term < kColumnTerms; ++term) {
      Packed<BF16, kOwn> packed;
      if constexpr (kExactColumns) {
        packed = c;
      } else {
        packed = take_bf16_term<kOwn>(left);
      }
#pragma unroll
      for (int i = 0; i < kOwn / 2; i += 2) {
        ptx::mma_bf16(term == 0 && i % 4 == 0 ? sums : rest, s0.word[i], s1.word[i], s0.word[i + 1],
                      s1.word[i + 1], packed.word[i], packed.word[i + 1]);
      }
    }
  }

  __device__ __forceinline__ void multiply_tf32(const Packed<State, kOwn>& s0,
                                                const Packed<State, kOwn>& s1,
                                                const Packed<Column, kOwn>& c, float (&sums)[4],
                                                float (&rest)[4]) const {
    constexpr bool kWideState = sizeof(State) == 4;
#pragma unroll
    for (int i = 0; i < kOwn / 2; ++i) {
      const ptx::Tf32Pair a0 = ptx::split_tf32(s0[2 * i]);
      const ptx::Tf32Pair a1 = ptx::split_tf32(s1[2 * i]);
      const ptx::Tf32Pair a2 = ptx::split_tf32(s0[2 * i + 1]);
      const ptx::Tf32Pair a3 = ptx::split_tf32(s1[2 * i + 1]);
      const ptx::Tf32Pair b0 = ptx::split_tf32(c[2 * i]);
      const ptx::Tf32Pair b1 = ptx::split_tf32(c[2 * i + 1]);
      ptx::mma_tf32(sums, a0.high, a1.high, a2.high, a3.high, b0.high, b1.high);
      if constexpr (kWideState) {
        ptx::mma_tf32(rest, a0.low, a1.low, a2.low, a3.low, b0.high, b1.high);
      }
      if constexpr (!kExactColumns) {
        ptx::mma_tf32(rest, a0.high, a1.high, a2.high, a3.high, b0.low, b1.low);
      }
    }
  }

 protected:
  int g, q;
};

}  // namespace replayssm::cuda
