// How fp32 states of heads with one decay advance (ops/deferred_decay.h).
#include "ops/deferred_decay.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "support/rng.h"

namespace replayssm {
namespace {

using testing::Rng;

/// One element of a state by the recurrence that the class stands for.
struct Element {
  void advance(float decay, float dt, float input) {
    const float factor = deferred.take(decay);
    if (factor != 1.0f) rest *= factor;
    rest = std::fma(deferred.gain(dt), input, rest);
  }
  double value() const { return double{deferred.value()} * rest; }

  DeferredDecay deferred;
  float rest = 0.0f;
};

/// Decays of every kind: the recurrence in fp64 is never far, relative to what has been added up.
TEST(DeferredDecay, IsTheRecurrence) {
  for (const float weakest : {0.999f, 0.9f, 0.3f, 1e-3f, 1e-12f, 1e-38f}) {
    Rng rng(7);
    Element element;
    double want = 0.0;
    double size = 0.0;
    for (int i = 0; i < 3000; ++i) {
      const float decay = std::pow(weakest, rng.uniform(0.0f, 1.0f));
      const float dt = rng.uniform(1e-3f, 1.0f);
      const float input = rng.normal();
      element.advance(decay, dt, input);
      want = double{decay} * want + double{dt} * input;
      size = double{decay} * size + double{dt} * std::abs(input);
      ASSERT_NEAR(element.value(), want, 4e-6 * size) << weakest << ", token " << i;
      ASSERT_GE(element.deferred.value(), 0x1p-32f);
      ASSERT_LE(element.deferred.value(), 0x1p32f);
    }
  }
}

/// What the past was worth is forgotten; what grows beyond fp32 is infinite, and a NaN stays one.
TEST(DeferredDecay, Extremes) {
  Element forgotten;
  forgotten.advance(0.5f, 1.0f, 3.0f);
  forgotten.advance(0.0f, 0.25f, 2.0f);
  EXPECT_EQ(forgotten.value(), 0.5);
  EXPECT_EQ(forgotten.deferred.value(), 1.0f);

  Element growing;
  for (int i = 0; i < 40; ++i) growing.advance(2.0f, 1.0f, 1.0f);
  EXPECT_NEAR(growing.value(), 0x1p40, 0x1p20);
  for (int i = 0; i < 200; ++i) growing.advance(2.0f, 1.0f, 1.0f);
  EXPECT_TRUE(std::isinf(growing.value()));

  Element broken;
  broken.advance(std::numeric_limits<float>::quiet_NaN(), 1.0f, 1.0f);
  EXPECT_TRUE(std::isnan(broken.value()));
  broken.advance(0.5f, 1.0f, 1.0f);
  EXPECT_TRUE(std::isnan(broken.value()));
}

/// Nothing but c of the stored state enters: going on from what is stored is going on.
TEST(DeferredDecay, GoesOnFromTheStoredNumber) {
  Rng rng(11);
  Element whole;
  Element parts;
  for (int i = 0; i < 500; ++i) {
    const float decay = rng.uniform(0.0f, 0.9f);
    const float input = rng.normal();
    whole.advance(decay, 0.5f, input);
    parts.deferred = DeferredDecay(parts.deferred.value());
    parts.advance(decay, 0.5f, input);
    ASSERT_EQ(whole.rest, parts.rest);
    ASSERT_EQ(whole.deferred.value(), parts.deferred.value());
  }
}

/// GPUs and CPUs take the same reciprocal: for every mantissa, and whatever the exponent.
TEST(DeferredDecay, ReciprocalsAreRoundedAlike) {
  for (std::uint32_t mantissa = 0; mantissa < 1u << 23; ++mantissa) {
    const float c = std::bit_cast<float>(0x3f000000u | mantissa);
    ASSERT_EQ(branchless_reciprocal(c), 1.0f / c) << c;
  }
  for (int exponent = -32; exponent <= 32; ++exponent) {
    for (const float mantissa : {1.0f, 1.25f, 0x1.fffffep0f}) {
      const float c = std::ldexp(exponent == 32 ? 1.0f : mantissa, exponent);
      ASSERT_EQ(branchless_reciprocal(c), 1.0f / c) << c;
      ASSERT_EQ(DeferredDecay(c).gain(3.0f), 3.0f * (1.0f / c)) << c;
    }
  }
}

}  // namespace
}  // namespace replayssm
