// Read copies on the device: a warp loads or multiplies a tile of 16 rows (encode_copy.cuh makes
// one).
//
// All formats are decoded to pairs of bf16, exactly (nvfp4: code times block scale), and multiplied
// on the tensor cores; scales in fp32 are applied to the sums. Lane (g, q) = (lane / 4, lane % 4)
// owns 16 neighbouring columns of every segment of 64: a block of nvfp4.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/read_copy.h"
#include "cuda/vector.cuh"
#include "cuda/warp.cuh"

namespace replayssm::cuda {

/// A tile's planes, in global memory or in a stage.
struct CopyTile {
  std::uint8_t* codes;
  std::uint8_t* block_scales;
  float* scales;
};

template <ReadCopyFormat kFormat>
class ReadCopyTiles {
 public:
  static constexpr bool kNvfp4 = kFormat == ReadCopyFormat::kNvfp4;
  static constexpr int kRows = 16;
  static constexpr int kBlock = 16;    // columns of a lane in a segment
  static constexpr int kSegment = 64;  // columns
  static constexpr int kPairs = kBlock / 2;

  static __device__ __forceinline__ int code_row_bytes(int width) {
    return kNvfp4 ? width / 2 : width;
  }

  /// Rows [row, row + 16) of a head of `rows` rows.
  static __device__ __forceinline__ CopyTile in_memory(const ReadCopyParams& p, std::int64_t slot,
                                                       std::int64_t head, std::int64_t rows,
                                                       std::int64_t row, int width) {
    const std::int64_t at = slot * p.slot_stride;
    const std::int64_t first = head * rows + row;
    CopyTile tile;
    tile.codes = p.codes + at + first * code_row_bytes(width);
    tile.block_scales = kNvfp4 ? p.block_scales + at + first * (width / kBlock) : nullptr;
    tile.scales = p.scales + at / 4 + (kNvfp4 ? first / kRows : first);
    return tile;
  }
  /// Tile i of `tiles` that are staged together, plane by plane.
  static __device__ __forceinline__ CopyTile in_stage(unsigned char* stage, int width, int i = 0,
                                                      int tiles = 1) {
    const int code_bytes = kRows * code_row_bytes(width);
    CopyTile tile;
    tile.codes = stage + i * code_bytes;
    unsigned char* block_scales = stage + tiles * code_bytes;
    tile.block_scales = block_scales + i * width;
    tile.scales = reinterpret_cast<float*>(block_scales + (kNvfp4 ? tiles * width : 0)) +
                  i * (kNvfp4 ? 1 : kRows);
    return tile;
  }

  /// Asks for `tiles` consecutive tiles, to where in_stage has the first of them; completes on the
  /// barrier with the caller's copy_async_arrive.
  static __device__ __forceinline__ void load(const CopyTile& from, const CopyTile& to, int width,
                                              int tiles, std::uint64_t* barrier, int lane) {
    const int code_bytes = tiles * kRows * code_row_bytes(width);
    const int more = tiles * (kNvfp4 ? width : kRows * 4);
    void* more_to = kNvfp4 ? static_cast<void*>(to.block_scales) : to.scales;
    const void* more_from = kNvfp4 ? static_cast<const void*>(from.block_scales) : from.scales;
    if (ptx::kHasBulkCopy) {
      if (lane == 0) {
        ptx::mbarrier_expect(barrier, static_cast<std::uint32_t>(code_bytes + more));
        ptx::bulk_copy(to.codes, from.codes, static_cast<std::uint32_t>(code_bytes), barrier,
                       ptx::kEvictFirst);
        ptx::bulk_copy(more_to, more_from, static_cast<std::uint32_t>(more), barrier,
                       ptx::kEvictFirst);
      }
    } else {
      for (int i = lane * 16; i < code_bytes; i += kWarpLanes * 16) {
        ptx::copy_async_16(to.codes + i, from.codes + i);
      }
      for (int i = lane * 16; i < more; i += kWarpLanes * 16) {
        ptx::copy_async_16(static_cast<std::uint8_t*>(more_to) + i,
                           static_cast<const std::uint8_t*>(more_from) + i);
      }
    }
    if (kNvfp4 && lane < tiles) ptx::copy_async_4(to.scales + lane, from.scales + lane);
  }

  /// A lane's part of eight columns (that of column g) as pairs that go with a copy's: kTerms bf16
  /// terms of 16 columns in each segment of 64.
  template <int kWidth, int kTerms>
  struct Columns {
    static constexpr int kSegments = (kWidth + kSegment - 1) / kSegment;
    std::uint32_t pairs[kSegments][kTerms][kPairs];
  };
  /// `column`: that of the lane's eighth of the warp.
  template <int kWidth, int kTerms, typename T>
  static __device__ __forceinline__ Columns<kWidth, kTerms> columns(const T* column, int width,
                                                                    int lane) {
    Columns<kWidth, kTerms> out;
#pragma unroll
    for (int s = 0; s < Columns<kWidth, kTerms>::kSegments; ++s) {
      const int n = s * kSegment + kBlock * (lane % 4);
      Packed<T, kBlock> c{};
      if (n < width) c = load_packed<T, kBlock>(column + n);
      std::uint32_t terms[kTerms][kPairs];
      bf16_terms(c, terms);
#pragma unroll
      for (int term = 0; term < kTerms; ++term) pair_like_codes(terms[term], out.pairs[s][term]);
    }
    return out;
  }

  /// sums[r, c] += sum_n S[r, n] columns[c, n] of the staged tile, for rows g and g + 8.
  template <int kWidth, int kTerms>
  static __device__ __forceinline__ void multiply(const CopyTile& tile, int width, int lane,
                                                  const Columns<kWidth, kTerms>& by,
                                                  float (&sums)[4]) {
    const int g = lane / 4;
    float raw[2][4] = {};
#pragma unroll
    for (int s = 0; s < Columns<kWidth, kTerms>::kSegments; ++s) {
      if (s * kSegment >= width) break;
      const int column = s * kSegment + kBlock * (lane % 4);
      std::uint32_t low[kPairs], high[kPairs];
      decode(tile, width, g, column, low);
      decode(tile, width, g + 8, column, high);
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        const auto& pairs = by.pairs[s][term];
#pragma unroll
        for (int i = 0; i < kPairs; i += 2) {
          ptx::mma_bf16(raw[i / 2 % 2], low[i], high[i], low[i + 1], high[i + 1], pairs[i],
                        pairs[i + 1]);
        }
      }
    }
    const float scale_low = kNvfp4 ? tile.scales[0] * kNvfp4Rest : tile.scales[g];
    const float scale_high = kNvfp4 ? scale_low : tile.scales[g + 8];
    sums[0] = fmaf(raw[0][0] + raw[1][0], scale_low, sums[0]);
    sums[1] = fmaf(raw[0][1] + raw[1][1], scale_low, sums[1]);
    sums[2] = fmaf(raw[0][2] + raw[1][2], scale_high, sums[2]);
    sums[3] = fmaf(raw[0][3] + raw[1][3], scale_high, sums[3]);
  }

 private:
  // A code's bits make a bf16 of 2^-126 (e2m1) or 2^-120 (e4m3) times its value, subnormal codes
  // included; products with these bring it back.
  static constexpr float kE4M3Factor = 0x1p120f;
  static constexpr float kBlockFactor = 0x1p100f;  // times a block scale, within bf16's range
  static constexpr float kNvfp4Rest = 0x1p26f;

  static __device__ __forceinline__ std::uint32_t pair_of(float x) {
    const __nv_bfloat162 pair = __float2bfloat162_rn(x);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
  static __device__ __forceinline__ std::uint32_t multiply_pair(std::uint32_t x, std::uint32_t y) {
    const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&x),
                                           *reinterpret_cast<const __nv_bfloat162*>(&y));
    return *reinterpret_cast<const std::uint32_t*>(&product);
  }
  static __device__ __forceinline__ std::uint32_t subtract_pair(std::uint32_t x, std::uint32_t y) {
    const __nv_bfloat162 rest = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&x),
                                        *reinterpret_cast<const __nv_bfloat162*>(&y));
    return *reinterpret_cast<const std::uint32_t*>(&rest);
  }

  /// The lane's 16 codes of a row as pairs of bf16. Codes that are half a word apart make a pair,
  /// because the same shifts then serve both; pair_like_codes orders columns alike.
  static __device__ __forceinline__ void decode(const CopyTile& tile, int width, int row,
                                                int column, std::uint32_t (&pairs)[kPairs]) {
    if (column >= width) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) pairs[i] = 0;
      return;
    }
    if constexpr (kNvfp4) {
      const uint2 codes = *reinterpret_cast<const uint2*>(tile.codes + (row * width + column) / 2);
      const std::uint32_t block = tile.block_scales[row * (width / kBlock) + column / kBlock];
      // The scale's bits likewise make an fp32 of 2^-120 times its value.
      const std::uint32_t unit =
          pair_of(__uint_as_float(block << 20) * 0x1p110f * (kBlockFactor * 0x1p10f));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t w = half == 0 ? codes.x : codes.y;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const std::uint32_t sign = i == 3 ? w : w << (12 - 4 * i);
          const std::uint32_t rest = i < 2 ? w << (6 - 4 * i) : w >> (4 * i - 6);
          pairs[4 * half + i] = multiply_pair((sign & 0x80008000u) | (rest & 0x01c001c0u), unit);
        }
      }
    } else {
      const uint4 codes = *reinterpret_cast<const uint4*>(tile.codes + row * width + column);
      const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const std::uint32_t w = words[j];
          if constexpr (kFormat == ReadCopyFormat::kFp8E4M3) {
            const std::uint32_t sign = odd ? w : w << 8;
            const std::uint32_t rest = odd ? w >> 4 : w << 4;
            pairs[2 * j + odd] =
                multiply_pair((sign & 0x80008000u) | (rest & 0x07f007f0u), pair_of(kE4M3Factor));
          } else {
            // 128 + the low seven bits, less 128 or (negative) 256.
            const std::uint32_t x = odd ? w >> 8 : w;
            pairs[2 * j + odd] =
                subtract_pair((x & 0x007f007fu) | 0x43004300u, (x & 0x00800080u) | 0x43004300u);
          }
        }
      }
    }
  }

  /// Pairs of neighbours to pairs as decode makes them: of columns 4 apart within 8 (nvfp4), or 2
  /// apart within 4.
  static __device__ __forceinline__ void pair_like_codes(const std::uint32_t (&words)[kPairs],
                                                         std::uint32_t (&pairs)[kPairs]) {
    constexpr int kApart = kNvfp4 ? 4 : 2;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const int first = p / kApart * 2 * kApart + p % kApart;  // column
      pairs[p] = __byte_perm(words[first / 2], words[(first + kApart) / 2],
                             first % 2 == 0 ? 0x5410 : 0x7632);
    }
  }
};

}  // namespace replayssm::cuda
