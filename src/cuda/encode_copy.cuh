// Read copies on the device: a warp encodes a staged tile of 16 rows, to the codec's bits.
//
// Two lanes have a row, each every other block of sixteen elements, which they load in vectors of
// 16 bytes. Neighbouring rows lie in the same banks, so a lane begins a block with vector `turn`,
// which differs by row, and turns the block's codes back.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/select.cuh"
#include "cuda/read_copy.cuh"
#include "cuda/vector.cuh"
#include "cuda/warp.cuh"
#include "state/read_copy_codec.h"

namespace replayssm::cuda {

/// kWidth: columns the code allows for.
template <ReadCopyFormat kFormat, int kWidth, typename State>
class CopyEncoder {
  using Tiles = ReadCopyTiles<kFormat>;
  static constexpr bool kNvfp4 = Tiles::kNvfp4;
  static constexpr int kBlock = Tiles::kBlock;
  static constexpr int kMine = (kWidth / kBlock + 1) / 2;  // blocks of a lane
  static constexpr int kEach = 16 / static_cast<int>(sizeof(State));
  static constexpr int kVectors = kBlock / kEach;
  static constexpr int kWords = kNvfp4 ? 2 : 4;  // codes of a block
  using Codes = std::uint32_t[kWords];

 public:
  /// The staged state (16 rows of `width` elements, contiguous), to memory and over the state in
  /// its stage.
  static __device__ __forceinline__ void encode(const State* state, int width, const CopyTile& to,
                                                const CopyTile& staged, int lane) {
    const CopyEncoder encoder(state, width, lane);
    float amax[kMine];
    std::uint32_t all = 0;  // of a row, or of the tile
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      amax[j] = encoder.amax_of(j);
      all = max(all, __float_as_uint(amax[j]));
    }
#pragma unroll
    for (int mask = 1; mask < (kNvfp4 ? kWarpLanes : 2); mask *= 2) {
      all = max(all, __shfl_xor_sync(kAllLanes, all, mask));
    }
    Encoded out;
    out.scale = scale_of(all);
    float inverse[kMine];
    inverse_units(amax, out, inverse);
    const bool finite = all < read_copy::kInfinityBits;
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      if (encoder.has(j)) encoder.encode_block(j, inverse[j], finite, out.codes[j]);
    }
    __syncwarp();
    encoder.write(out, to);
    encoder.write(out, staged);
    __syncwarp();
  }

 private:
  /// A lane's part of the copy.
  struct Encoded {
    Codes codes[kMine];
    std::uint32_t block_scales[(kMine + 3) / 4];  // a byte each
    float scale;
  };

  __device__ __forceinline__ CopyEncoder(const State* state, int width, int lane)
      : width_(width),
        row_(lane / 2),
        odd_(lane % 2),
        turn_(row_ % kVectors),
        from_(state + row_ * width + odd_ * kBlock) {}

  __device__ __forceinline__ int block_of(int j) const { return 2 * j + odd_; }
  __device__ __forceinline__ bool has(int j) const { return block_of(j) * kBlock < width_; }
  /// The vector of block j that this lane takes as number i.
  __device__ __forceinline__ Packed<State, kEach> load(int j, int i) const {
    return load_packed<State, kEach>(from_ + 2 * j * kBlock + (i + turn_) % kVectors * kEach);
  }

  /// NaN if any element is.
  __device__ __forceinline__ float amax_of(int j) const {
    float amax = 0.0f;
    if (!has(j)) return amax;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const auto x = load(j, i);
#pragma unroll
      for (int k = 0; k < kEach; ++k) amax = ptx::max_or_nan(amax, fabsf(x[k]));
    }
    return amax;
  }

  static __device__ __forceinline__ float scale_of(std::uint32_t amax) {
    namespace rc = read_copy;
    return kNvfp4                                ? rc::nvfp4_scale(amax)
           : kFormat == ReadCopyFormat::kFp8E4M3 ? rc::fp8_scale(amax)
                                                 : rc::int8_scale(amax);
  }

  /// What the elements of each block are multiplied by; and the blocks' scales.
  static __device__ __forceinline__ void inverse_units(const float (&amax)[kMine], Encoded& out,
                                                       float (&inverse)[kMine]) {
    namespace rc = read_copy;
    if constexpr (kNvfp4) {
      const auto ratio = [&](int j) {
        return j < kMine ? rc::nvfp4_block_ratio(amax[min(j, kMine - 1)], out.scale) : 0.0f;
      };
#pragma unroll
      for (int j = 0; j < kMine; j += 4) {
        const std::uint32_t scales =
            ptx::pack_e4m3(ratio(j), ratio(j + 1), ratio(j + 2), ratio(j + 3));
        out.block_scales[j / 4] = scales;
        std::uint32_t pairs[2];
        ptx::unpack_e4m3(scales, pairs[0], pairs[1]);
#pragma unroll
        for (int i = 0; i < 4 && j + i < kMine; ++i) {
          const __half2 pair = *reinterpret_cast<const __half2*>(&pairs[i / 2]);
          const float scale = i % 2 == 0 ? __low2float(pair) : __high2float(pair);
          inverse[j + i] = rc::inverse_unit(__fmul_rn(scale, out.scale));
        }
      }
    } else {
      inverse[0] = rc::inverse_unit(out.scale);
#pragma unroll
      for (int j = 1; j < kMine; ++j) inverse[j] = inverse[0];
    }
  }

  __device__ __forceinline__ void encode_block(int j, float inverse, bool finite,
                                               Codes& codes) const {
    float x[kBlock];  // in units, in this lane's order
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const auto packed = load(j, i);
#pragma unroll
      for (int k = 0; k < kEach; ++k) x[i * kEach + k] = __fmul_rn(packed[k], inverse);
    }
    if constexpr (kNvfp4) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) x[i] = round_to_e2m1(x[i]);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const float* of = x + 8 * w;
        codes[w] = nibbles(ptx::pack_e4m3(of[0], of[2], of[4], of[6]),
                           ptx::pack_e4m3(of[1], of[3], of[5], of[7]));
      }
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const float* of = x + 4 * w;
        codes[w] = kFormat == ReadCopyFormat::kFp8E4M3 ? ptx::pack_e4m3(of[0], of[1], of[2], of[3])
                                                       : pack_int8(of);
      }
    }
    turn_back(codes);
    // NaN, which every element is where the scale is: the tensor cores' e4m3 has one.
    if (kFormat != ReadCopyFormat::kFp8E4M3 && !finite) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) codes[w] = kNvfp4 ? 0x77777777u : 0;
    }
  }

  /// 2^-6 of the number that encode_e2m1 makes of a finite x: a number of e4m3, whose lowest
  /// exponents are those of e2m1. |x| is rounded to the multiple of half its binade, or half the
  /// first normal one, that is the last place of its sum with an anchor.
  static __device__ __forceinline__ float round_to_e2m1(float x) {
    constexpr std::uint32_t kOne = read_copy::power_of_two_bits(-6);
    constexpr std::uint32_t kSix = kOne + (5u << 22);
    constexpr float kAnchor = 0x1p22f;
    const std::uint32_t bits = __float_as_uint(x);
    const int magnitude =
        __viaddmin_s32_relu(static_cast<int>(bits & ~read_copy::kSignBit), -(6 << 23), kSix);
    const float binade = __uint_as_float(
        max(static_cast<std::uint32_t>(magnitude) & read_copy::kInfinityBits, kOne));
    const float sum = __fmaf_rn(binade, kAnchor, __int_as_float(magnitude));
    const float rounded = __fmaf_rn(binade, -kAnchor, sum);
    return __uint_as_float(__float_as_uint(rounded) | (bits & read_copy::kSignBit));
  }

  /// Codes of e2m1 from those of e4m3 of 2^-6 of their values, s 0 0 e e m 0 0: `even` has elements
  /// 0, 2, 4 and 6, `odd` the others.
  static __device__ __forceinline__ std::uint32_t nibbles(std::uint32_t even, std::uint32_t odd) {
    constexpr std::uint32_t kLow = 0x0f0f0f0fu, kLowSign = 0x08080808u, kHighSign = 0x80808080u;
    const std::uint32_t low = (even >> 4 & kLowSign) | (even >> 2 & ~kLowSign);
    const std::uint32_t high = (odd & kHighSign) | (odd << 2 & ~kHighSign);
    return (low & kLow) | (high & ~kLow);
  }

  /// Integers within -127..127 are the low bytes of their sums with 1.5 * 2^23.
  static __device__ __forceinline__ std::uint32_t pack_int8(const float* x) {
    const auto code = [](float value) {
      return __float_as_uint(__fadd_rn(fminf(fmaxf(value, -127.0f), 127.0f), 12582912.0f));
    };
    return __byte_perm(__byte_perm(code(x[0]), code(x[1]), 0x0040),
                       __byte_perm(code(x[2]), code(x[3]), 0x0040), 0x5410);
  }

  /// Codes of vectors turn_, turn_ + 1, .. in memory's order.
  __device__ __forceinline__ void turn_back(Codes& codes) const {
    if constexpr (kNvfp4) {
      // Byte k of the eight is byte k - shift.
      const std::uint32_t shift = static_cast<std::uint32_t>(turn_ * (8 / kVectors));
      const std::uint32_t by = (8 - shift) * 0x1111u;
      const std::uint32_t low = codes[0], high = codes[1];
      codes[0] = __byte_perm(low, high, (0x3210u + by) & 0x7777u);
      codes[1] = __byte_perm(low, high, (0x7654u + by) & 0x7777u);
    } else {
      constexpr int kVectorWords = kWords / kVectors;
#pragma unroll
      for (int step = 1; step < kVectors; step *= 2) {
        const bool turns = (turn_ & step) != 0;
        Codes before;
#pragma unroll
        for (int w = 0; w < kWords; ++w) before[w] = codes[w];
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          codes[w] = turns ? before[(w + kWords - step * kVectorWords) % kWords] : before[w];
        }
      }
    }
  }

  __device__ __forceinline__ void write(const Encoded& from, const CopyTile& tile) const {
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      if (!has(j)) continue;
      std::uint8_t* at =
          tile.codes + row_ * Tiles::code_row_bytes(width_) + block_of(j) * 4 * kWords;
      if constexpr (kNvfp4) {
        *reinterpret_cast<uint2*>(at) = {from.codes[j][0], from.codes[j][1]};
        tile.block_scales[row_ * (width_ / kBlock) + block_of(j)] =
            static_cast<std::uint8_t>(from.block_scales[j / 4] >> (8 * (j % 4)));
      } else {
        *reinterpret_cast<uint4*>(at) = {from.codes[j][0], from.codes[j][1], from.codes[j][2],
                                         from.codes[j][3]};
      }
    }
    if (odd_ == 0 && (!kNvfp4 || row_ == 0)) tile.scales[row_] = from.scale;
  }

  int width_, row_, odd_, turn_;
  const State* from_;
};

}  // namespace replayssm::cuda
