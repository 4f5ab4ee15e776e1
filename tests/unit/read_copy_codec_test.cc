// The numbers of read copies: every code, every rounding boundary, the ends of the range, scales.
#include "state/read_copy_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "support/rng.h"

namespace replayssm::read_copy {
namespace {

using replayssm::testing::Rng;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kMax = std::numeric_limits<float>::max();

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }
float from_bits(std::uint32_t x) { return std::bit_cast<float>(x); }

/// A format by its definition: magnitudes of codes 0, 1, ... in ascending order.
struct Format {
  std::string name;
  std::uint8_t sign;
  std::uint8_t nan;  // what NaN becomes
  std::vector<double> magnitudes;
  std::function<std::uint8_t(float)> encode;
  std::function<float(std::uint8_t)> decode;
};

double small_float(int mantissa_bits, int bias, int code) {
  const int one = 1 << mantissa_bits;
  const int exponent = code >> mantissa_bits;
  const int mantissa = code & (one - 1);
  return exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                       : std::ldexp(one + mantissa, exponent - bias - mantissa_bits);
}

std::vector<Format> formats() {
  Format e4m3{"e4m3", 0x80, 0x7f, {}, encode_e4m3, decode_e4m3};
  for (int code = 0; code < 0x7f; ++code) e4m3.magnitudes.push_back(small_float(3, 7, code));
  Format e2m1{"e2m1", 0x8, 0x7, {}, encode_e2m1, decode_e2m1};
  for (int code = 0; code < 8; ++code) e2m1.magnitudes.push_back(small_float(1, 1, code));
  return {e4m3, e2m1};
}

class SmallFloats : public ::testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(Formats, SmallFloats, ::testing::ValuesIn(formats()),
                         [](const auto& test) { return test.param.name; });

TEST(Formats, HaveTheValuesOfTheirSpecification) {
  const std::vector<Format> all = formats();
  EXPECT_EQ(all[0].magnitudes.back(), 448.0);
  EXPECT_EQ(all[0].magnitudes[1], 0x1p-9);
  EXPECT_EQ(all[1].magnitudes, (std::vector<double>{0, 0.5, 1, 1.5, 2, 3, 4, 6}));
  EXPECT_TRUE(std::isnan(decode_e4m3(0x7f)));
  EXPECT_TRUE(std::isnan(decode_e4m3(0xff)));
}

TEST_P(SmallFloats, EveryCodeSurvives) {
  const Format& f = GetParam();
  for (std::size_t code = 0; code < f.magnitudes.size(); ++code) {
    for (const std::uint8_t sign : {std::uint8_t{0}, f.sign}) {
      const auto signed_code = static_cast<std::uint8_t>(code | sign);
      const float value = f.decode(signed_code);
      EXPECT_EQ(static_cast<double>(std::abs(value)), f.magnitudes[code]) << int{signed_code};
      EXPECT_EQ(std::signbit(value), sign != 0) << int{signed_code};
      EXPECT_EQ(int{f.encode(value)}, int{signed_code});
    }
  }
}

TEST_P(SmallFloats, RoundsToNearestTiesToEven) {
  const Format& f = GetParam();
  for (std::size_t code = 0; code + 1 < f.magnitudes.size(); ++code) {
    const auto middle = static_cast<float>((f.magnitudes[code] + f.magnitudes[code + 1]) / 2);
    for (const std::uint8_t sign : {std::uint8_t{0}, f.sign}) {
      const float s = sign == 0 ? 1.0f : -1.0f;
      EXPECT_EQ(int{f.encode(s * std::nextafter(middle, 0.0f))}, static_cast<int>(code | sign));
      EXPECT_EQ(int{f.encode(s * middle)}, static_cast<int>((code + code % 2) | sign)) << middle;
      EXPECT_EQ(int{f.encode(s * std::nextafter(middle, kInfinity))},
                static_cast<int>((code + 1) | sign));
    }
  }
}

TEST_P(SmallFloats, EndsOfTheRange) {
  const Format& f = GetParam();
  const auto largest = static_cast<std::uint8_t>(f.magnitudes.size() - 1);
  const auto limit = static_cast<float>(f.magnitudes.back());
  for (const float x :
       {std::nextafter(limit, kInfinity), 1.04f * limit, 2 * limit, kMax, kInfinity}) {
    EXPECT_EQ(int{f.encode(x)}, int{largest}) << x;
    EXPECT_EQ(int{f.encode(-x)}, largest | f.sign) << x;
  }
  for (const float x : {0.0f, from_bits(1), std::numeric_limits<float>::min(), 1e-20f}) {
    EXPECT_EQ(int{f.encode(x)}, 0) << x;
    EXPECT_EQ(int{f.encode(-x)}, int{f.sign}) << x;
  }
  for (const float x : {kNan, -kNan, from_bits(0x7f800001), from_bits(0xffffffff)}) {
    EXPECT_EQ(int{f.encode(x)}, int{f.nan});
  }
}

// Every sign, exponent and leading mantissa bits of a float, and the float after and before them.
TEST_P(SmallFloats, AgreesWithTheNearestValueEverywhere) {
  const Format& f = GetParam();
  for (std::uint32_t upper = 0; upper < 0x10000u; ++upper) {
    for (const std::uint32_t lower : {0x0000u, 0x0001u, 0x8000u, 0xffffu}) {
      const float x = from_bits(upper << 16 | lower);
      if (std::isnan(x)) continue;
      const double magnitude = std::min(static_cast<double>(std::abs(x)), f.magnitudes.back());
      const auto above = std::lower_bound(f.magnitudes.begin(), f.magnitudes.end(), magnitude);
      std::size_t want = static_cast<std::size_t>(above - f.magnitudes.begin());
      if (want > 0) {
        const double up = *above - magnitude;
        const double down = magnitude - f.magnitudes[want - 1];
        if (down < up || (down == up && want % 2 == 1)) --want;
      }
      ASSERT_EQ(int{f.encode(x)}, static_cast<int>(want | (std::signbit(x) ? f.sign : 0u))) << x;
    }
  }
}

TEST(Int8, RoundsToNearestTiesToEvenAndSaturates) {
  for (int code = -127; code <= 127; ++code) {
    const auto x = static_cast<float>(code);
    EXPECT_EQ(encode_int8(x), code);
    if (code == 127) break;
    const float middle = x + 0.5f;
    EXPECT_EQ(encode_int8(middle), code % 2 == 0 ? code : code + 1);
    EXPECT_EQ(encode_int8(std::nextafter(middle, -kInfinity)), code);
    EXPECT_EQ(encode_int8(std::nextafter(middle, kInfinity)), code + 1);
  }
  for (const float x : {127.4f, 127.5f, 128.0f, 1e9f, kMax, kInfinity}) {
    EXPECT_EQ(encode_int8(x), 127) << x;
    EXPECT_EQ(encode_int8(-x), -127) << x;
  }
  EXPECT_EQ(encode_int8(from_bits(1)), 0);
  EXPECT_EQ(encode_int8(kNan), 0);
  EXPECT_EQ(encode_int8(-kNan), 0);
}

TEST(Magnitudes, OrderAsNumbersWithNanOnTop) {
  const float ascending[] = {0.0f, from_bits(1), 1e-20f, 1.0f, 448.0f, kMax, kInfinity, kNan};
  for (std::size_t i = 0; i + 1 < std::size(ascending); ++i) {
    EXPECT_LT(magnitude_bits(ascending[i]), magnitude_bits(-ascending[i + 1]));
    EXPECT_EQ(magnitude_bits(-ascending[i]), magnitude_bits(ascending[i]));
  }
}

TEST(Scales, TakeTheLargestValueToTheLargestCode) {
  Rng rng(2);
  for (int i = 0; i < 2000; ++i) {
    const float amax = std::ldexp(rng.uniform(1.0f, 2.0f), static_cast<int>(rng.between(-80, 126)));
    const float int8 = int8_scale(bits(amax));
    EXPECT_EQ(encode_int8(amax * inverse_unit(int8)), 127) << amax;
    EXPECT_NEAR(127.0 * static_cast<double>(int8) / static_cast<double>(amax), 1.0, 0x1p-22);
    const float fp8 = fp8_scale(bits(amax));
    EXPECT_EQ(int{encode_e4m3(amax * inverse_unit(fp8))}, 0x7e) << amax;
    EXPECT_NEAR(448.0 * static_cast<double>(fp8) / static_cast<double>(amax), 1.0, 0x1p-22);
    const float nvfp4 = nvfp4_scale(bits(amax));
    EXPECT_NEAR(2688.0 * static_cast<double>(nvfp4) / static_cast<double>(amax), 1.0, 0x1p-22);
    const std::uint8_t block = nvfp4_block_scale(bits(amax), nvfp4);
    EXPECT_EQ(int{block}, 0x7e) << amax;  // 448
    EXPECT_EQ(int{encode_e2m1(amax * inverse_unit(nvfp4_unit(block, nvfp4)))}, 0x7) << amax;
  }
}

TEST(Scales, AreNormalNumbersWhoseInverseIsToo) {
  for (const float amax : {0.0f, from_bits(1), std::numeric_limits<float>::min(), 1e-30f, 1.0f}) {
    for (const float scale :
         {fp8_scale(bits(amax)), int8_scale(bits(amax)), nvfp4_scale(bits(amax))}) {
      EXPECT_GE(scale, kMinScale) << amax;
      EXPECT_LE(inverse_unit(scale), 1.0f / kMinScale) << amax;
      const float smallest_unit = nvfp4_unit(1, scale);
      EXPECT_TRUE(std::isnormal(smallest_unit) && std::isnormal(inverse_unit(smallest_unit)));
    }
  }
  EXPECT_EQ(inverse_unit(nvfp4_unit(0, kMinScale)), 0.0f);
}

TEST(Scales, OfWhatIsNotFiniteAreNan) {
  for (const float amax : {kInfinity, kNan, from_bits(0x7f800001)}) {
    EXPECT_TRUE(std::isnan(fp8_scale(bits(amax))));
    EXPECT_TRUE(std::isnan(int8_scale(bits(amax))));
    EXPECT_TRUE(std::isnan(nvfp4_scale(bits(amax))));
  }
  EXPECT_TRUE(std::isfinite(fp8_scale(bits(kMax))));
  EXPECT_TRUE(std::isfinite(int8_scale(bits(kMax))));
  EXPECT_TRUE(std::isfinite(nvfp4_scale(bits(kMax))));
}

}  // namespace
}  // namespace replayssm::read_copy
