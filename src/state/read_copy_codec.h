// The numbers of read copies: codes and scales, one element or scale at a time, for host and
// device. docs/read-copies.md derives the rules; replayssm/read_copy.h has the formats.
//
// Every function is a few integer operations and correctly rounded fp32 operations without a
// product that feeds a sum, so the same input gives the same bits wherever it is compiled.
// encode_e4m3 and encode_e2m1 compute what cvt.rn.satfinite to e4m3x2 and e2m1x2 does: a kernel may
// use those.
#pragma once

#include <bit>
#include <cstdint>

#include "replayssm/host_device.h"

namespace replayssm::read_copy {

RSSM_HOST_DEVICE inline std::uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return std::bit_cast<std::uint32_t>(x);
#endif
}

RSSM_HOST_DEVICE inline float float_of(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

inline constexpr std::uint32_t kSignBit = 0x80000000u;
inline constexpr std::uint32_t kInfinityBits = 0x7f800000u;
inline constexpr std::uint32_t kNanBits = 0x7fc00000u;

/// |x| as an integer. These order like the magnitudes, with NaN above infinity: a maximum of them
/// does not depend on the order of its terms and never loses a NaN.
RSSM_HOST_DEVICE inline std::uint32_t magnitude_bits(float x) { return bits_of(x) & ~kSignBit; }

/// 2^exponent of a normal number.
RSSM_HOST_DEVICE constexpr std::uint32_t power_of_two_bits(int exponent) {
  return static_cast<std::uint32_t>(exponent + 127) << 23;
}

// ---- Small floating-point numbers ----

/// Magnitudes of a format of kMantissa mantissa bits and exponent bias kBias, with subnormals and
/// without infinities; kMaxCode is the largest value's.
template <int kMantissa, int kBias, std::uint32_t kMaxCode>
struct SmallFloat {
  static constexpr std::uint32_t kOne = 1u << kMantissa;  // the hidden bit's weight

  RSSM_HOST_DEVICE static float decode(std::uint32_t code) {
    const std::uint32_t exponent = code >> kMantissa;
    const std::uint32_t mantissa = code & (kOne - 1);
    const bool normal = exponent > 0;
    const int scale = static_cast<int>(normal ? exponent : 1) - kBias - kMantissa;
    return static_cast<float>(normal ? mantissa + kOne : mantissa) *
           float_of(power_of_two_bits(scale));
  }

  /// The code of the magnitude with these bits: nearest, ties to even, saturating; NaN as the
  /// largest. Both roundings are computed and one is taken by a mask: neighbours differ in which
  /// they need, and a choice would become a branch.
  RSSM_HOST_DEVICE static std::uint32_t encode(std::uint32_t magnitude) {
    const std::uint32_t max = bits_of(decode(kMaxCode));
    const std::uint32_t bits = magnitude < max ? magnitude : max;
    // Below the normal numbers: multiples of the smallest, which is the last place of the sum.
    constexpr std::uint32_t kLeastNormal = power_of_two_bits(1 - kBias);
    constexpr std::uint32_t kAnchor = power_of_two_bits(1 - kBias - kMantissa + 23);
    const std::uint32_t subnormal = bits_of(float_of(bits) + float_of(kAnchor)) - kAnchor;
    constexpr int kDropped = 23 - kMantissa;
    constexpr std::uint32_t kHalf = 1u << (kDropped - 1);
    const std::uint32_t rounded = bits + (kHalf - 1) + ((bits >> kDropped) & 1u);
    const std::uint32_t normal =
        (rounded >> kDropped) - (static_cast<std::uint32_t>(127 - kBias) << kMantissa);
    const std::uint32_t is_subnormal = 0u - static_cast<std::uint32_t>(bits < kLeastNormal);
    return (subnormal & is_subnormal) | (normal & ~is_subnormal);
  }
};

using E4M3 = SmallFloat<3, 7, 0x7e>;
using E2M1 = SmallFloat<1, 1, 0x7>;

/// NaN becomes 0x7f.
RSSM_HOST_DEVICE inline std::uint8_t encode_e4m3(float x) {
  const std::uint32_t magnitude = magnitude_bits(x);
  const std::uint32_t code = E4M3::encode(magnitude) | (bits_of(x) >> 24 & 0x80u);
  return static_cast<std::uint8_t>(magnitude > kInfinityBits ? 0x7fu : code);
}

/// 0x7f and 0xff are NaN.
RSSM_HOST_DEVICE inline float decode_e4m3(std::uint8_t code) {
  const std::uint32_t magnitude = code & 0x7fu;
  const std::uint32_t value = magnitude == 0x7fu ? kNanBits : bits_of(E4M3::decode(magnitude));
  return float_of(value | (code & 0x80u) << 24);
}

/// A code in the low four bits. NaN, which the format lacks, becomes 6.
RSSM_HOST_DEVICE inline std::uint8_t encode_e2m1(float x) {
  const std::uint32_t magnitude = magnitude_bits(x);
  const std::uint32_t code = E2M1::encode(magnitude) | (bits_of(x) >> 28 & 0x8u);
  return static_cast<std::uint8_t>(magnitude > kInfinityBits ? 0x7u : code);
}

/// Of the low four bits.
RSSM_HOST_DEVICE inline float decode_e2m1(std::uint8_t code) {
  return float_of(bits_of(E2M1::decode(code & 0x7u)) | (code & 0x8u) << 28);
}

/// Nearest integer, ties to even, within -127..127; NaN becomes 0.
RSSM_HOST_DEVICE inline std::int8_t encode_int8(float x) {
  const float above = x > -127.0f ? x : -127.0f;
  const float clamped = above < 127.0f ? above : 127.0f;
  const float anchor = 12582912.0f;  // 1.5 * 2^23: integers are the last place of the sum
  const std::uint32_t code = bits_of(clamped + anchor) - bits_of(anchor);
  return static_cast<std::int8_t>(magnitude_bits(x) > kInfinityBits ? 0u : code);
}

// ---- Scales ----

/// No fp32 scale is smaller, so that scales and their inverses are normal numbers.
inline constexpr float kMinScale = 0x1p-100f;

/// amax, by its magnitude_bits, divided by `largest`, the largest code's value; NaN if amax is not
/// finite.
RSSM_HOST_DEVICE inline float linear_scale(std::uint32_t amax, float largest) {
  if (amax >= kInfinityBits) return float_of(kNanBits);
  const float scale = float_of(amax) / largest;
  return scale > kMinScale ? scale : kMinScale;
}

/// Of a row's amax.
RSSM_HOST_DEVICE inline float int8_scale(std::uint32_t amax) { return linear_scale(amax, 127.0f); }
/// Of a row's amax.
RSSM_HOST_DEVICE inline float fp8_scale(std::uint32_t amax) { return linear_scale(amax, 448.0f); }
/// Of a tile's amax.
RSSM_HOST_DEVICE inline float nvfp4_scale(std::uint32_t amax) {
  return linear_scale(amax, 6.0f * 448.0f);
}

/// What the E4M3 scale of a block under its tile's scale is nearest to.
RSSM_HOST_DEVICE inline float nvfp4_block_ratio(float block_amax, float scale) {
  return block_amax * (1.0f / (6.0f * scale));
}
RSSM_HOST_DEVICE inline std::uint8_t nvfp4_block_scale(std::uint32_t block_amax, float scale) {
  return encode_e4m3(nvfp4_block_ratio(float_of(block_amax), scale));
}

/// What a code of 1 stands for in a block.
RSSM_HOST_DEVICE inline float nvfp4_unit(std::uint8_t block_scale, float scale) {
  return decode_e4m3(block_scale) * scale;
}

/// What elements are multiplied by before they become codes: 1 / unit, and 0 for a block whose
/// scale is 0.
RSSM_HOST_DEVICE inline float inverse_unit(float unit) { return unit == 0.0f ? 0.0f : 1.0f / unit; }

}  // namespace replayssm::read_copy
