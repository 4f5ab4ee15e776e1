// Elements of activations and checkpoints as fp32 in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/warp.cuh"
#include "replayssm/dtype.h"

namespace replayssm::cuda {

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(BF16 x) {
  return __uint_as_float(static_cast<std::uint32_t>(x.bits) << 16);
}
__device__ __forceinline__ float widen(F16 x) { return __half2float(__ushort_as_half(x.bits)); }

template <typename T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ BF16 narrow<BF16>(float x) {
  return BF16{__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}
/// Nearest, ties to even; overflow becomes infinity, as to_f16 does on the host.
template <>
__device__ __forceinline__ F16 narrow<F16>(float x) {
  return F16{__half_as_ushort(__float2half_rn(x))};
}

/// kCount consecutive elements as loaded: a multiple of 4 bytes.
template <typename T, int kCount>
struct Packed {
  static constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  static constexpr int kWords = kBytes / 4;
  static_assert(kBytes % 4 == 0);
  std::uint32_t word[kWords];

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word[i]);
    } else if constexpr (std::is_same_v<T, F16>) {
      const std::uint32_t bits = i % 2 == 0 ? word[i / 2] & 0xffffu : word[i / 2] >> 16;
      return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    } else {
      return __uint_as_float(i % 2 == 0 ? word[i / 2] << 16 : word[i / 2] & 0xffff0000u);
    }
  }

  __device__ __forceinline__ void set(int i, float even, float odd) {
    // Elements 2i and 2i + 1.
    if constexpr (sizeof(T) == 4) {
      word[2 * i] = __float_as_uint(even);
      word[2 * i + 1] = __float_as_uint(odd);
    } else if constexpr (std::is_same_v<T, F16>) {
      const __half2 pair = __floats2half2_rn(even, odd);
      word[i] = static_cast<std::uint32_t>(__half_as_ushort(pair.x)) |
                static_cast<std::uint32_t>(__half_as_ushort(pair.y)) << 16;
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(even, odd);
      word[i] = static_cast<std::uint32_t>(__bfloat16_as_ushort(pair.x)) |
                static_cast<std::uint32_t>(__bfloat16_as_ushort(pair.y)) << 16;
    }
  }
};

/// The widest loads the size allows; `from` is aligned to min(16, size).
template <typename T, int kCount>
__device__ __forceinline__ Packed<T, kCount> load_packed(const T* from) {
  Packed<T, kCount> out;
  constexpr int kWords = Packed<T, kCount>::kWords;
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 v = reinterpret_cast<const uint4*>(from)[i];
      out.word[4 * i] = v.x;
      out.word[4 * i + 1] = v.y;
      out.word[4 * i + 2] = v.z;
      out.word[4 * i + 3] = v.w;
    }
  } else if constexpr (kWords == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    out.word[0] = v.x;
    out.word[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) out.word[i] = reinterpret_cast<const std::uint32_t*>(from)[i];
  }
  return out;
}

/// The widest stores the size allows; `to` is aligned to min(16, size).
template <typename T, int kCount>
__device__ __forceinline__ void store_packed(T* to, const Packed<T, kCount>& from) {
  constexpr int kWords = Packed<T, kCount>::kWords;
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      reinterpret_cast<uint4*>(to)[i] = {from.word[4 * i], from.word[4 * i + 1],
                                         from.word[4 * i + 2], from.word[4 * i + 3]};
    }
  } else if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(to) = {from.word[0], from.word[1]};
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<std::uint32_t*>(to)[i] = from.word[i];
  }
}

/// Rows as loaded, as fp32.
template <typename T, int kCount, int kRows, int kVectors>
__device__ __forceinline__ void widen_rows(const Packed<T, kCount> (&from)[kRows][kVectors],
                                           float (&to)[kRows][kVectors * kCount]) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[row][v * kCount + i] = from[row][v][i];
    }
  }
}

/// What rows lose that are stored as T, of such that went on in registers.
template <typename T, int kRows, int kColumns>
__device__ __forceinline__ void round_rows(float (&rows)[kRows][kColumns]) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) rows[row][i] = widen(narrow<T>(rows[row][i]));
    }
  }
}

/// Two numbers as a word of f16, the first in its low half.
__device__ __forceinline__ std::uint32_t f16_pair(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

/// The power of two that brings numbers up to `magnitude` (by its bits) to 2^14, the top of f16's
/// range, where those down to 2^-28 of it are normal; and the inverse of it.
struct F16Range {
  __device__ __forceinline__ explicit F16Range(std::uint32_t magnitude) {
    const std::uint32_t exponent = max(magnitude >> 23, 32u);
    factor = __uint_as_float((2 * 127 + 14 - exponent) << 23);
    inverse = __uint_as_float((exponent - 14) << 23);
  }
  /// Of what four neighbouring lanes have between them.
  static __device__ __forceinline__ F16Range of_four_lanes(std::uint32_t magnitude) {
    magnitude = max(magnitude, __shfl_xor_sync(kAllLanes, magnitude, 1));
    magnitude = max(magnitude, __shfl_xor_sync(kAllLanes, magnitude, 2));
    return F16Range(magnitude);
  }
  float factor;
  float inverse;
};

/// The bits of the larger magnitude of a pair of bf16.
__device__ __forceinline__ std::uint32_t larger_magnitude(std::uint32_t bf16_pair) {
  return max(bf16_pair & 0x7fff0000u, bf16_pair << 16 & 0x7fff0000u);
}

/// The bf16 numbers next to x; x keeps what they leave. Three of them carry an fp32 number.
template <int kCount>
__device__ __forceinline__ Packed<BF16, kCount> take_bf16_term(float (&x)[kCount]) {
  Packed<BF16, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) out.set(i, x[2 * i], x[2 * i + 1]);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] -= out[i];
  return out;
}

/// Numbers as kTerms terms of pairs of bf16 that add up to them; bf16 numbers are their only term.
template <int kTerms, typename T, int kCount>
__device__ __forceinline__ void bf16_terms(const Packed<T, kCount>& x,
                                           std::uint32_t (&terms)[kTerms][kCount / 2]) {
  if constexpr (sizeof(T) == 2) {
    static_assert(kTerms == 1 && std::is_same_v<T, BF16>);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) terms[0][i] = x.word[i];
  } else {
    float left[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) left[i] = x[i];
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      const auto packed = take_bf16_term(left);
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) terms[term][i] = packed.word[i];
    }
  }
}

/// A number of either type, as loaded. It is widened where it is used: the warp would otherwise
/// wait for it where it is loaded.
template <typename Act>
class LoadedNumber {
 public:
  LoadedNumber() = default;
  __device__ __forceinline__ explicit LoadedNumber(float x) { memcpy(&bits_, &x, sizeof(x)); }
  /// Element `index` of `data`, which is of fp32 if `is_f32`, else of Act.
  __device__ __forceinline__ LoadedNumber(const void* data, std::int64_t index, bool is_f32) {
    bits_ = sizeof(Act) == 4 || is_f32 ? static_cast<const std::uint32_t*>(data)[index]
                                       : static_cast<const std::uint16_t*>(data)[index];
  }
  __device__ __forceinline__ float value(bool is_f32) const {
    if constexpr (sizeof(Act) == 2) {
      if (!is_f32) return widen(Act{static_cast<std::uint16_t>(bits_)});
    }
    float x;
    memcpy(&x, &bits_, sizeof(x));
    return x;
  }

 private:
  std::uint32_t bits_;
};

/// What a tf32 operand keeps of an fp32 number.
inline constexpr std::uint32_t kTf32Mask = 0xffffe000u;

/// x = high + low: what a tf32 operand keeps of x, and the rest. The two carry x to 2^-21.
struct Tf32Pair {
  std::uint32_t high;
  std::uint32_t low;
};
__device__ __forceinline__ Tf32Pair split_tf32(float x, std::uint32_t mask = kTf32Mask) {
  const std::uint32_t high = __float_as_uint(x) & mask;
  return {high, __float_as_uint(x - __uint_as_float(high))};
}
/// The same with a bit less in high, to 2^-20: for products with numbers that are tf32 as they are.
/// Where both factors are split, the product of their rests is left out, and would be four times as
/// large. Of kTf32Mask the assembler sees that it is for nothing, as tensor cores ignore the other
/// bits: it passes x for x & mask, and as the rest is formed of x, too, moves every x to where the
/// product wants it. Where that counts and both factors are split, the mask is a parameter of the
/// kernel.
__device__ __forceinline__ Tf32Pair split_tf32_for_exact(float x) {
  return split_tf32(x, 0xffffc000u);
}

}  // namespace replayssm::cuda
