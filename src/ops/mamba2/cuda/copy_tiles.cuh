// Products with tiles of a read copy: codes become pairs of f16, exactly, and are multiplied with C
// in f16 on the tensor cores. C is brought to the top of f16's range by a power of two per token.
//
// Lane (g, q) = (lane / 4, lane % 4) loads up to 16 bytes of row g, and of row g + 8, of every
// segment; its codes serve as its elements of the contracted axis.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/read_copy.cuh"
#include "cuda/vector.cuh"
#include "cuda/warp.cuh"

namespace replayssm::cuda {

template <ReadCopyFormat kFormat, int kStateSize>
class Mamba2CopyTiles : public ReadCopyTiles<kFormat> {
  using Base = ReadCopyTiles<kFormat>;

 public:
  using Base::kNvfp4, Base::kRows;
  static constexpr int kRowBytes = kNvfp4 ? kStateSize / 2 : kStateSize;
  static constexpr int kTileScales = kNvfp4 ? 1 : kRows;  // in fp32
  static constexpr int kBlockColumns = 16;

  static constexpr int kLaneBytes = kRowBytes / 4 < 16 ? kRowBytes / 4 : 16;
  static constexpr int kSegments = kRowBytes / (4 * kLaneBytes);
  static constexpr int kWords = kLaneBytes / 4;
  static constexpr int kColumns = kNvfp4 ? 2 * kLaneBytes : kLaneBytes;  // of a lane in a segment
  static constexpr int kPairs = kColumns / 2;
  static constexpr int kBlocks = kNvfp4 ? kColumns / kBlockColumns : 1;

  /// C of a lane's columns, as the pairs that decode makes.
  using Columns = std::uint32_t[kSegments][kPairs];

  /// The tile `count` tiles on.
  static __device__ __forceinline__ CopyTile moved(CopyTile tile, int count) {
    tile.codes += count * kRows * kRowBytes;
    tile.block_scales += count * kStateSize;
    tile.scales += count * kTileScales;
    return tile;
  }

  /// A token's C for this lane, brought to f16's range; returns the inverse of the factor. `from`:
  /// bf16, the same for all lanes that share `present`.
  static __device__ __forceinline__ float load_columns(const BF16* from, bool present, int q,
                                                       Columns& out) {
    Packed<BF16, kColumns> packed[kSegments];
    std::uint32_t amax = 0;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) packed[s].word[i] = 0;
      if (present) packed[s] = load_packed<BF16, kColumns>(from + (4 * s + q) * kColumns);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        amax = max(amax, larger_magnitude(packed[s].word[i]));
      }
    }
    const F16Range range = F16Range::of_four_lanes(amax);
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int first = first_column(i);
        out[s][i] =
            f16_pair(packed[s][first] * range.factor, packed[s][first + kPairStep] * range.factor);
      }
    }
    return range.inverse;
  }

  /// sums[b] += rows g and g + 8 of the staged tile times columns[b], C of tokens 8 b + g.
  template <int kTokenBlocks>
  static __device__ __forceinline__ void multiply(const CopyTile& tile, int lane,
                                                  const Columns (&columns)[kTokenBlocks],
                                                  float (&sums)[kTokenBlocks][4]) {
    const int g = lane / 4;
    const int q = lane % 4;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      std::uint32_t low[kPairs], high[kPairs];
      decode(tile.codes + g * kRowBytes + (4 * s + q) * kLaneBytes, low);
      decode(tile.codes + (g + 8) * kRowBytes + (4 * s + q) * kLaneBytes, high);
      if constexpr (kNvfp4) {
        apply_block_scales(tile, g, s, q, low);
        apply_block_scales(tile, g + 8, s, q, high);
      }
#pragma unroll
      for (int i = 0; i < kPairs; i += 2) {
#pragma unroll
        for (int b = 0; b < kTokenBlocks; ++b) {
          ptx::mma_f16(sums[b], low[i], high[i], low[i + 1], high[i + 1], columns[b][s][i],
                       columns[b][s][i + 1]);
        }
      }
    }
    const float scale_low = kNvfp4 ? tile.scales[0] * kNvfp4Rest : tile.scales[g];
    const float scale_high = kNvfp4 ? scale_low : tile.scales[g + 8];
#pragma unroll
    for (int b = 0; b < kTokenBlocks; ++b) {
      sums[b][0] *= scale_low;
      sums[b][1] *= scale_low;
      sums[b][2] *= scale_high;
      sums[b][3] *= scale_high;
    }
  }

  /// Which column of multiply_one's products holds this lane's C: blocks of nvfp4 have columns of
  /// their own, so that scales apply to sums instead of codes.
  static __device__ __forceinline__ bool holds_one(int g, int q) {
    return kNvfp4 ? g == 2 * q : g == 0;
  }

  /// One token: this lane's share of rows g and g + 8 times C; shares of lanes that differ in q add
  /// up. `columns` is zero in lanes that do not hold them.
  static __device__ __forceinline__ void multiply_one(const CopyTile& tile, int lane,
                                                      const Columns& columns, float (&out)[2]) {
    const int g = lane / 4;
    const int q = lane % 4;
    out[0] = 0.0f;
    out[1] = 0.0f;
    float sums[kBlocks][4];
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      if (kNvfp4 || s == 0) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[b][i] = 0.0f;
        }
      }
      std::uint32_t low[kPairs], high[kPairs];
      decode(tile.codes + g * kRowBytes + (4 * s + q) * kLaneBytes, low);
      decode(tile.codes + (g + 8) * kRowBytes + (4 * s + q) * kLaneBytes, high);
#pragma unroll
      for (int i = 0; i < kPairs; i += 2) {
        ptx::mma_f16(sums[i * kBlocks / kPairs], low[i], high[i], low[i + 1], high[i + 1],
                     columns[s][i], columns[s][i + 1]);
      }
      if constexpr (kNvfp4) {
        float scales[2][kBlocks];
        block_scales(tile, g, s, q, scales[0]);
        block_scales(tile, g + 8, s, q, scales[1]);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          out[0] = fmaf(scales[0][b], sums[b][0], out[0]);
          out[1] = fmaf(scales[1][b], sums[b][2], out[1]);
        }
      }
    }
    if constexpr (kNvfp4) {
      const float scale = tile.scales[0] * kNvfp4Rest;
      out[0] *= scale;
      out[1] *= scale;
    } else {
      out[0] = sums[0][0] * tile.scales[g];
      out[1] = sums[0][2] * tile.scales[g + 8];
    }
  }

 private:
  // e2m1 codes are decoded to 2^-6 of their values.
  static constexpr float kNvfp4Rest = 0x1p6f;

  // Pair i is of columns first_column(i) and kPairStep further.
  static constexpr int kPairStep = kNvfp4 ? 2 : 1;
  static constexpr __device__ int first_column(int pair) {
    return kNvfp4 ? pair / 4 * 8 + pair % 2 * 4 + pair / 2 % 2 : 2 * pair;
  }

  /// The lane's codes of a row as pairs of f16.
  static __device__ __forceinline__ void decode(const std::uint8_t* from,
                                                std::uint32_t (&pairs)[kPairs]) {
    const auto words =
        load_packed<std::uint32_t, kWords>(reinterpret_cast<const std::uint32_t*>(from));
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const std::uint32_t w = words.word[i];
      if constexpr (kNvfp4) {
        // A nibble s e e m, moved to s 0 0 e e m 0 0, is an e4m3 of 2^-6 of its value.
        const std::uint32_t even = (w << 4 & 0x80808080u) | (w << 2 & 0x1c1c1c1cu);
        const std::uint32_t odd = (w & 0x80808080u) | (w >> 2 & 0x1c1c1c1cu);
        ptx::unpack_e4m3(even, pairs[4 * i], pairs[4 * i + 1]);
        ptx::unpack_e4m3(odd, pairs[4 * i + 2], pairs[4 * i + 3]);
      } else if constexpr (kFormat == ReadCopyFormat::kFp8E4M3) {
        ptx::unpack_e4m3(w, pairs[2 * i], pairs[2 * i + 1]);
      } else {
        // 1024 + 128 + the code, less 1152.
        const std::uint32_t biased = w ^ 0x80808080u;
        const __half2 offset = __half2half2(__ushort_as_half(0x6480));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::uint32_t x = __byte_perm(biased, 0x64646464u, half == 0 ? 0x4140 : 0x4342);
          const __half2 pair = __hsub2(*reinterpret_cast<const __half2*>(&x), offset);
          pairs[2 * i + half] = *reinterpret_cast<const std::uint32_t*>(&pair);
        }
      }
    }
  }

  static __device__ __forceinline__ void block_scales(const CopyTile& tile, int row, int s, int q,
                                                      float (&out)[kBlocks]) {
    const std::uint8_t* at =
        tile.block_scales + row * (kStateSize / kBlockColumns) + (4 * s + q) * kBlocks;
    std::uint32_t codes = 0;
    if constexpr (kBlocks == 2) {
      codes = *reinterpret_cast<const std::uint16_t*>(at);
    } else {
      codes = *at;
    }
    std::uint32_t pair, none;
    ptx::unpack_e4m3(codes, pair, none);
    const __half2 scales = *reinterpret_cast<const __half2*>(&pair);
    out[0] = __low2float(scales);
    if constexpr (kBlocks == 2) out[1] = __high2float(scales);
  }

  static __device__ __forceinline__ void apply_block_scales(const CopyTile& tile, int row, int s,
                                                            int q, std::uint32_t (&pairs)[kPairs]) {
    float scales[kBlocks];
    block_scales(tile, row, s, q, scales);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const __half2 scale = __float2half2_rn(scales[i * kBlocks / kPairs]);
      const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&pairs[i]), scale);
      pairs[i] = *reinterpret_cast<const std::uint32_t*>(&product);
    }
  }
};

/// No copy.
template <int kStateSize>
class Mamba2CopyTiles<ReadCopyFormat::kNone, kStateSize> {
 public:
  static constexpr int kTileScales = 0;
  using Columns = std::uint32_t[1][1];
};

}  // namespace replayssm::cuda
