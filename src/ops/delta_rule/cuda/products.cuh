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
  static constexpr int kUnroll = kMasked ? 1 : kSegments;  // the general kernel is large enough
  // Chains of products, each with one for the rest: fp32 columns have twice as many.
  static constexpr int kChains = kBlocks == 1 && !kExactColumns ? 2 : 1;
  static constexpr bool kBf16State = std::is_same_v<State, BF16>;
  // bf16 terms of a column that a bf16 state is multiplied with.
  static constexpr int kColumnTerms = kExactColumns ? 1 : sizeof(Act) == 4 ? 3 : 2;
  // bf16 terms of a weight: 24 bits.
  static constexpr int kWeightTerms = 3;

  __device__ __forceinline__ DeltaRuleProducts(int lane, std::uint32_t tf32_mask)
      : g(lane / 4), q(lane % 4), tf32_mask_(tf32_mask) {}

  static __device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[b][i] = 0.0f;
    }
  }

  /// A lane's part of a column as the tensor cores take it: terms of pairs of bf16, or of tf32.
  struct ColumnPart {
    static constexpr int kTerms = kBf16State ? kColumnTerms : kExactColumns ? 1 : 2;
    static constexpr int kWords = kBf16State ? kOwn / 2 : kOwn;
    std::uint32_t term[kTerms][kWords];
  };

  /// Segment s of column 8 b + g, which `column` is.
  __device__ __forceinline__ ColumnPart column_part(const Column* column, int key_dim,
                                                    int s) const {
    ColumnPart part;
    const int n = 4 * kOwn * s + q * kOwn;
    Packed<Column, kOwn> c{};
    if (!kMasked || n < key_dim) {
      c = load_packed<Column, kOwn>(column + n);
    }
    if constexpr (!kBf16State) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const Tf32Pair pair = split_tf32(c[i], tf32_mask_);
        part.term[0][i] = pair.high;
        if constexpr (!kExactColumns) part.term[1][i] = pair.low;
      }
    } else {
      bf16_terms(c, part.term);
    }
    return part;
  }

  /// sums[v, c] += sum_n S[v, n] columns[c, n] for the staged tile. `blocks`: that have columns;
  /// part_of(b, s) is column_part or what it has returned.
  template <typename PartOf>
  __device__ __forceinline__ void multiply_state(const State* tile, int key_dim, int blocks,
                                                 PartOf part_of, Sums& sums) const {
    const State* low = tile + g * key_dim + q * kOwn;
    const State* high = low + 8 * key_dim;
    // A product waits for the one before it in its chain: there are several, one of them `sums`.
    Sums chain[2 * kChains - 1];
#pragma unroll
    for (Sums& c : chain) clear(c);
#pragma unroll kUnroll
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
        const ColumnPart& part = part_of(b, s);
        float(&main)[4] = s % kChains == 0 ? sums[b] : chain[2 * kChains - 2][b];
        float(&rest)[4] = chain[s % kChains][b];
        if constexpr (kBf16State) {
          multiply_bf16(s0, s1, part, main, rest);
        } else {
          multiply_tf32(s0, s1, part, main, rest);
        }
      }
    }
#pragma unroll
    for (const Sums& c : chain) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[b][i] += c[b][i];
      }
    }
  }

  /// Weights of 16 records for one block of columns, where records are bf16.
  struct WeightTerms {
    std::uint32_t word[kWeightTerms][2];
  };
  /// Of records first.. and columns 8 b..; weights: (columns, weight_stride).
  __device__ __forceinline__ WeightTerms weight_terms(const float* weights, int weight_stride,
                                                      int first, int b) const {
    const float* weight = weights + (8 * b + g) * weight_stride + first + 2 * q;
    const float2 w0 = *reinterpret_cast<const float2*>(weight);
    const float2 w1 = *reinterpret_cast<const float2*>(weight + 8);
    float left[4] = {w0.x, w0.y, w1.x, w1.y};
    WeightTerms out;
#pragma unroll
    for (int term = 0; term < kWeightTerms; ++term) {
      const auto packed = take_bf16_term<4>(left);
      out.word[term][0] = packed.word[0];
      out.word[term][1] = packed.word[1];
    }
    return out;
  }

  /// sums[v, c] += sum_e records[e, v] weights[c, e] over the window's live records from `first`
  /// on, 16 at a time. Records are `pitch` elements apart. Weights are zero from `live` to the next
  /// multiple of 16; records beyond `live` may hold anything. `first_terms`: those of the first 16
  /// records, for one block of columns; unused where there are more blocks, or fp32 records.
  __device__ __forceinline__ void multiply_window(const Act* records, int pitch, int first,
                                                  int live, const float* weights, int weight_stride,
                                                  int blocks, const WeightTerms& first_terms,
                                                  Sums& sums) const {
#pragma unroll 1
    for (; first < live; first += 16) {
      if constexpr (sizeof(Act) == 4) {
        multiply_records_tf32(records, pitch, live, weights, weight_stride, first, blocks, sums);
      } else {
        multiply_records(
            records, pitch, live, first, blocks,
            [&](int b) {
              return kBlocks == 1 && first == 0 ? first_terms
                                                : weight_terms(weights, weight_stride, first, b);
            },
            sums);
      }
    }
  }
  /// The same of the first 16 records, bf16, for one block of columns, without a branch: where
  /// there are none `terms` are zero and record 0 is finite (cleared, or one that has been folded).
  __device__ __forceinline__ void multiply_first_records(const Act* records, int pitch, int live,
                                                         const WeightTerms& terms,
                                                         Sums& sums) const {
    multiply_records(records, pitch, live, 0, 1, [&](int) { return terms; }, sums);
  }

 private:
  /// terms_of(b): the weights of records first.. for block b of columns.
  template <typename TermsOf>
  __device__ __forceinline__ void multiply_records(const Act* records, int pitch, int live,
                                                   int first, int blocks, TermsOf terms_of,
                                                   Sums& sums) const {
    // Matrix i of the load: entries 8 (i / 2).., rows 8 (i % 2)..
    std::uint32_t a[4];
    const int lane = 4 * g + q;
    const int entry = min(first + 8 * (lane / 16) + lane % 8, max(live - 1, 0));
    ptx::load_matrices_transposed(a, records + entry * pitch + 8 * (lane / 8 % 2));
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (kBlocks > 1 && b >= blocks) break;
      const WeightTerms terms = terms_of(b);
#pragma unroll
      for (int term = 0; term < kWeightTerms; ++term) {
        ptx::mma_bf16(sums[b], a[0], a[1], a[2], a[3], terms.word[term][0], terms.word[term][1]);
      }
    }
  }

  __device__ __forceinline__ void multiply_records_tf32(const Act* records, int pitch, int live,
                                                        const float* weights, int weight_stride,
                                                        int first, int blocks, Sums& sums) const {
    const float* weight = weights + g * weight_stride + first + 2 * q;
    const auto at = [&](int entry, int row) {
      return split_tf32(entry < live ? widen(records[entry * pitch + row]) : 0.0f);
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int e0 = first + 8 * half + 2 * q;
      const Tf32Pair a0 = at(e0, g), a1 = at(e0, g + 8);
      const Tf32Pair a2 = at(e0 + 1, g), a3 = at(e0 + 1, g + 8);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (kBlocks > 1 && b >= blocks) break;
        const float2 w =
            *reinterpret_cast<const float2*>(weight + 8 * b * weight_stride + 8 * half);
        const Tf32Pair w0 = split_tf32(w.x), w1 = split_tf32(w.y);
        ptx::mma_tf32(sums[b], a0.low, a1.low, a2.low, a3.low, w0.high, w1.high);
        ptx::mma_tf32(sums[b], a0.high, a1.high, a2.high, a3.high, w0.low, w1.low);
        ptx::mma_tf32(sums[b], a0.high, a1.high, a2.high, a3.high, w0.high, w1.high);
      }
    }
  }

  __device__ __forceinline__ void multiply_bf16(const Packed<State, kOwn>& s0,
                                                const Packed<State, kOwn>& s1,
                                                const ColumnPart& part, float (&sums)[4],
                                                float (&rest)[4]) const {
#pragma unroll
    for (int term = 0; term < ColumnPart::kTerms; ++term) {
      const auto& word = part.term[term];
#pragma unroll
      for (int i = 0; i < kOwn / 2; i += 2) {
        ptx::mma_bf16(term == 0 && i % 4 == 0 ? sums : rest, s0.word[i], s1.word[i], s0.word[i + 1],
                      s1.word[i + 1], word[i], word[i + 1]);
      }
    }
  }

  __device__ __forceinline__ void multiply_tf32(const Packed<State, kOwn>& s0,
                                                const Packed<State, kOwn>& s1,
                                                const ColumnPart& part, float (&sums)[4],
                                                float (&rest)[4]) const {
    constexpr bool kWideState = sizeof(State) == 4;
    const auto split = [&](float x) {
      return kWideState && kExactColumns ? split_tf32_for_exact(x)
                                         : split_tf32(x, kWideState ? tf32_mask_ : kTf32Mask);
    };
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      const Tf32Pair a0 = split(s0[i]), a1 = split(s1[i]);
      const Tf32Pair a2 = split(s0[i + 1]), a3 = split(s1[i + 1]);
      ptx::mma_tf32(sums, a0.high, a1.high, a2.high, a3.high, part.term[0][i], part.term[0][i + 1]);
      if constexpr (kWideState) {
        ptx::mma_tf32(rest, a0.low, a1.low, a2.low, a3.low, part.term[0][i], part.term[0][i + 1]);
      }
      if constexpr (!kExactColumns) {
        constexpr int kLow = ColumnPart::kTerms - 1;
        ptx::mma_tf32(rest, a0.high, a1.high, a2.high, a3.high, part.term[kLow][i],
                      part.term[kLow][i + 1]);
      }
    }
  }

 protected:
  int g, q;

 private:
  std::uint32_t tf32_mask_;
};

}  // namespace replayssm::cuda
