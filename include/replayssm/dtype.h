// Element types and the scalar conversions between them.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

// Kernels are compiled once per instruction set. A helper they share must be inlined: an outlined
// copy compiled for AVX-512 could be the one the linker keeps for baseline code.
#if defined(__GNUC__)
#define RSSM_ALWAYS_INLINE [[gnu::always_inline]] inline
#else
#define RSSM_ALWAYS_INLINE inline
#endif

namespace replayssm {

enum class DType : std::uint8_t {
  kF32 = 0,
  kBF16 = 1,
  kF16 = 2,
  kI32 = 3,
  kI64 = 4,
  kU8 = 5,
  kF64 = 6,
};

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kU8:
      return 1;
  }
  return 0;
}

/// Short lower-case name, as on the command line: "f32", "bf16", ...
const char* to_string(DType dtype);

/// bfloat16: the upper half of a binary32.
struct BF16 {
  std::uint16_t bits;
};

/// IEEE binary16.
struct F16 {
  std::uint16_t bits;
};

RSSM_ALWAYS_INLINE float to_float(float x) { return x; }

RSSM_ALWAYS_INLINE float to_float(BF16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

/// Round to nearest, ties to even; NaN stays NaN (quiet), overflow becomes infinity.
RSSM_ALWAYS_INLINE BF16 to_bf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return BF16{static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  }
  return BF16{static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

float to_float(F16 x);

/// Round to nearest, ties to even; overflow becomes infinity.
F16 to_f16(float x);

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<BF16> {
  static constexpr DType value = DType::kBF16;
};
template <>
struct DTypeOf<F16> {
  static constexpr DType value = DType::kF16;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = DType::kI64;
};

/// Converts one float to the storage type T.
template <typename T>
RSSM_ALWAYS_INLINE T from_float(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else if constexpr (DTypeOf<T>::value == DType::kBF16) {
    return to_bf16(x);
  } else {
    return to_f16(x);
  }
}

}  // namespace replayssm
