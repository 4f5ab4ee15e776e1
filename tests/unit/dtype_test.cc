// Scalar conversions: every 16-bit pattern, ties, the ends of the range, NaN.
#include "replayssm/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "support/rng.h"

namespace replayssm {
namespace {

using testing::Rng;

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }
float from_bits(std::uint32_t x) { return std::bit_cast<float>(x); }

TEST(DType, SizesAndNames) {
  EXPECT_EQ(size_of(DType::kF64), 8u);
  EXPECT_EQ(size_of(DType::kI64), 8u);
  EXPECT_EQ(size_of(DType::kF32), 4u);
  EXPECT_EQ(size_of(DType::kI32), 4u);
  EXPECT_EQ(size_of(DType::kBF16), 2u);
  EXPECT_EQ(size_of(DType::kF16), 2u);
  EXPECT_EQ(size_of(DType::kU8), 1u);
  EXPECT_STREQ(to_string(DType::kF32), "f32");
  EXPECT_STREQ(to_string(DType::kBF16), "bf16");
  EXPECT_STREQ(to_string(DType::kF16), "f16");
  EXPECT_STREQ(to_string(DType::kI32), "i32");
  EXPECT_STREQ(to_string(DType::kI64), "i64");
  EXPECT_STREQ(to_string(DType::kU8), "u8");
  EXPECT_STREQ(to_string(DType::kF64), "f64");
}

TEST(BF16, EveryPatternSurvives) {
  for (std::uint32_t pattern = 0; pattern < 0x10000u; ++pattern) {
    const float x = to_float(BF16{static_cast<std::uint16_t>(pattern)});
    EXPECT_EQ(bits(x), pattern << 16);
    const std::uint16_t back = to_bf16(x).bits;
    if (std::isnan(x)) {
      EXPECT_EQ(back, pattern | 0x40u);  // quiet, otherwise the same
    } else {
      EXPECT_EQ(back, pattern);
    }
  }
}

TEST(BF16, RoundsToNearestTiesToEven) {
  // Between two neighbours of every sign and exponent, from below the tie to above it.
  for (std::uint32_t upper = 0; upper < 0xffffu; ++upper) {
    if ((upper & 0x7fffu) >= 0x7f80u) continue;
    const std::uint32_t base = upper << 16;
    EXPECT_EQ(to_bf16(from_bits(base + 0x7fff)).bits, upper);
    EXPECT_EQ(to_bf16(from_bits(base + 0x8001)).bits, upper + 1);
    EXPECT_EQ(to_bf16(from_bits(base + 0x8000)).bits, upper + (upper & 1));
  }
}

TEST(BF16, EndsOfTheRange) {
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(to_bf16(-std::numeric_limits<float>::max()).bits, 0xff80);
  EXPECT_EQ(to_bf16(from_bits(0x7f7f7fff)).bits, 0x7f7f);
  EXPECT_EQ(to_bf16(from_bits(0x7f7f8000)).bits, 0x7f80);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::infinity()).bits, 0x7f80);
  EXPECT_EQ(to_bf16(-0.0f).bits, 0x8000);
  EXPECT_EQ(to_bf16(from_bits(1)).bits, 0);
  // NaN whose payload lies in the dropped bits stays NaN.
  EXPECT_TRUE(std::isnan(to_float(to_bf16(from_bits(0x7f800001)))));
  EXPECT_TRUE(std::isnan(to_float(to_bf16(from_bits(0xffffffff)))));
  EXPECT_TRUE(std::signbit(to_float(to_bf16(from_bits(0xff800001)))));
}

double f16_value(std::uint32_t pattern) {
  const std::uint32_t exponent = (pattern >> 10) & 31u;
  const double mantissa = pattern & 1023u;
  const double sign = (pattern & 0x8000u) != 0 ? -1.0 : 1.0;
  if (exponent == 0) return sign * mantissa * 0x1p-24;
  if (exponent == 31) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  return sign * std::ldexp(1.0 + mantissa / 1024.0, static_cast<int>(exponent) - 15);
}

TEST(F16, EveryPatternSurvives) {
  for (std::uint32_t pattern = 0; pattern < 0x10000u; ++pattern) {
    const float x = to_float(F16{static_cast<std::uint16_t>(pattern)});
    const double value = f16_value(pattern);
    const std::uint16_t back = to_f16(x).bits;
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(x)) << pattern;
      EXPECT_EQ(back & 0x7c00u, 0x7c00u) << pattern;
      EXPECT_NE(back & 0x03ffu, 0u) << pattern;
      EXPECT_EQ(back & 0x8000u, pattern & 0x8000u) << pattern;
    } else {
      EXPECT_EQ(static_cast<double>(x), value) << pattern;
      EXPECT_EQ(std::signbit(x), std::signbit(value)) << pattern;
      EXPECT_EQ(back, pattern);
    }
  }
}

TEST(F16, RoundsToNearestTiesToEven) {
  for (std::uint32_t pattern = 0; pattern < 0x7bffu; ++pattern) {
    for (const std::uint32_t sign : {0u, 0x8000u}) {
      const double low = f16_value(pattern | sign);
      const double high = f16_value((pattern + 1) | sign);
      // The middle of two neighbours is a float.
      const auto middle = static_cast<float>((low + high) / 2.0);
      const float to_high = std::nextafter(middle, static_cast<float>(high));
      const float to_low = std::nextafter(middle, static_cast<float>(low));
      EXPECT_EQ(to_f16(middle).bits, (pattern + (pattern & 1)) | sign);
      EXPECT_EQ(to_f16(to_high).bits, (pattern + 1) | sign);
      EXPECT_EQ(to_f16(to_low).bits, pattern | sign);
    }
  }
}

TEST(F16, EndsOfTheRange) {
  EXPECT_EQ(to_f16(65504.0f).bits, 0x7bff);
  EXPECT_EQ(to_f16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_f16(-1e30f).bits, 0xfc00);
  EXPECT_EQ(to_f16(0x1p-25f).bits, 0x0000);  // tie between 0 and the smallest
  EXPECT_EQ(to_f16(std::nextafter(0x1p-25f, 1.0f)).bits, 0x0001);
  EXPECT_EQ(to_f16(from_bits(1)).bits, 0x0000);
  EXPECT_EQ(to_f16(-0.0f).bits, 0x8000);
  EXPECT_TRUE(std::isnan(to_float(to_f16(from_bits(0x7f800001)))));
}

TEST(DType, RandomFloatsRoundToTheNearestNeighbour) {
  Rng rng(1);
  for (int i = 0; i < 200'000; ++i) {
    const float x = from_bits(static_cast<std::uint32_t>(rng.next()));
    if (!std::isfinite(x)) continue;
    const auto exact = static_cast<double>(x);
    const BF16 b = to_bf16(x);
    const auto b_error = std::abs(static_cast<double>(to_float(b)) - exact);
    for (const int step : {-1, 1}) {
      const BF16 next{static_cast<std::uint16_t>(b.bits + step)};
      if (!std::isfinite(to_float(next)) || !std::isfinite(to_float(b))) continue;
      EXPECT_LE(b_error, std::abs(static_cast<double>(to_float(next)) - exact));
    }
    if (std::abs(x) > 65519.0f) continue;
    const F16 h = to_f16(x);
    const auto h_error = std::abs(static_cast<double>(to_float(h)) - exact);
    for (const int step : {-1, 1}) {
      const auto next = static_cast<std::uint16_t>(h.bits + step);
      if ((next & 0x7c00u) == 0x7c00u) continue;
      EXPECT_LE(h_error, std::abs(f16_value(next) - exact));
    }
  }
}

}  // namespace
}  // namespace replayssm
