// The vectors of every instruction set against scalar code.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "replayssm/cpu.h"
#include "support/rng.h"
#include "unit/vec_probe.h"

namespace replayssm::testing {
namespace {

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

struct NamedProbe {
  CpuIsa isa;
  const VecProbe* probe;
};

std::vector<NamedProbe> probes() {
  std::vector<NamedProbe> all;
  for (const CpuIsa isa : supported_isas()) {
    switch (isa) {
      case CpuIsa::kGeneric:
        all.push_back({isa, &vec_probe_generic()});
        break;
#if defined(__x86_64__)
      case CpuIsa::kAvx2:
        all.push_back({isa, &vec_probe_avx2()});
        break;
      case CpuIsa::kAvx512:
        all.push_back({isa, &vec_probe_avx512()});
        break;
#else
      default:
        break;
#endif
    }
  }
  return all;
}

TEST(Vec, LoadsEveryHalfPattern) {
  for (const auto& [isa, probe] : probes()) {
    const auto lanes = static_cast<std::uint32_t>(probe->lanes);
    std::vector<BF16> b(lanes);
    std::vector<F16> h(lanes);
    std::vector<float> out(lanes);
    for (std::uint32_t pattern = 0; pattern < 0x10000u; pattern += lanes) {
      for (std::uint32_t i = 0; i < lanes; ++i) {
        b[i].bits = h[i].bits = static_cast<std::uint16_t>(pattern + i);
      }
      probe->load_bf16(b.data(), out.data());
      for (std::uint32_t i = 0; i < lanes; ++i) {
        ASSERT_EQ(bits(out[i]), bits(to_float(b[i]))) << to_string(isa) << " bf16 " << b[i].bits;
      }
      probe->load_f16(h.data(), out.data());
      for (std::uint32_t i = 0; i < lanes; ++i) {
        const float want = to_float(h[i]);
        if (std::isnan(want)) {
          ASSERT_TRUE(std::isnan(out[i])) << to_string(isa) << " f16 " << h[i].bits;
        } else {
          ASSERT_EQ(bits(out[i]), bits(want)) << to_string(isa) << " f16 " << h[i].bits;
        }
      }
    }
  }
}

TEST(Vec, StoresRoundLikeScalarCode) {
  std::vector<float> values;
  for (std::uint32_t upper = 0; upper < 0x10000u; upper += 3) {
    for (const std::uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(std::bit_cast<float>((upper << 16) | lower));
    }
  }
  // Ties of binary16, normal and subnormal.
  for (std::uint32_t pattern = 0; pattern < 0x7c00u; pattern += 5) {
    const float low = to_float(F16{static_cast<std::uint16_t>(pattern)});
    const float high = to_float(F16{static_cast<std::uint16_t>(pattern + 1)});
    if (std::isinf(high)) continue;
    const float middle = (low + high) * 0.5f;
    for (const float x : {middle, std::nextafter(middle, high), std::nextafter(middle, low)}) {
      values.push_back(x);
      values.push_back(-x);
    }
  }
  values.resize(values.size() / 16 * 16);
  for (const auto& [isa, probe] : probes()) {
    const auto lanes = static_cast<std::size_t>(probe->lanes);
    std::vector<BF16> b(lanes);
    std::vector<F16> h(lanes);
    for (std::size_t at = 0; at < values.size(); at += lanes) {
      probe->store_bf16(&values[at], b.data());
      probe->store_f16(&values[at], h.data());
      for (std::size_t i = 0; i < lanes; ++i) {
        const float x = values[at + i];
        ASSERT_EQ(b[i].bits, to_bf16(x).bits) << to_string(isa) << " bf16 of " << bits(x);
        if (std::isnan(x)) {
          ASSERT_TRUE(std::isnan(to_float(h[i]))) << to_string(isa);
        } else {
          ASSERT_EQ(h[i].bits, to_f16(x).bits) << to_string(isa) << " f16 of " << bits(x);
        }
      }
    }
  }
}

TEST(Vec, PartialLoadsAndStoresTouchNothingBeyond) {
  for (const auto& [isa, probe] : probes()) {
    const int lanes = probe->lanes;
    for (int n = 0; n < lanes; ++n) {
      // Elements from n on lie behind the end of the input vector's memory: address sanitizers see
      // a read beyond it.
      std::vector<float> in(static_cast<std::size_t>(n));
      std::vector<BF16> b(static_cast<std::size_t>(n));
      in.reserve(1);  // an address also where there is no element
      b.reserve(1);
      for (int i = 0; i < n; ++i) {
        in[static_cast<std::size_t>(i)] = static_cast<float>(i) + 1.0f;
        b[static_cast<std::size_t>(i)] = to_bf16(static_cast<float>(i) + 1.0f);
      }
      std::vector<float> out(static_cast<std::size_t>(lanes), -1.0f);
      probe->load_partial_f32(in.data(), out.data(), n);
      for (int i = 0; i < lanes; ++i) {
        EXPECT_EQ(out[static_cast<std::size_t>(i)], i < n ? static_cast<float>(i) + 1.0f : 0.0f);
      }
      out.assign(static_cast<std::size_t>(lanes), -1.0f);
      probe->load_partial_bf16(b.data(), out.data(), n);
      for (int i = 0; i < lanes; ++i) {
        EXPECT_EQ(out[static_cast<std::size_t>(i)], i < n ? static_cast<float>(i) + 1.0f : 0.0f);
      }

      const std::vector<float> full(static_cast<std::size_t>(lanes), 2.0f);
      const std::vector<BF16> full_b(static_cast<std::size_t>(lanes), to_bf16(2.0f));
      const std::vector<F16> full_h(static_cast<std::size_t>(lanes), to_f16(2.0f));
      std::vector<float> f32(static_cast<std::size_t>(lanes), 7.0f);
      std::vector<BF16> bf16(static_cast<std::size_t>(lanes), to_bf16(7.0f));
      std::vector<F16> f16(static_cast<std::size_t>(lanes), to_f16(7.0f));
      probe->partial_f32(full.data(), f32.data(), n);
      probe->partial_bf16(full_b.data(), bf16.data(), n);
      probe->partial_f16(full_h.data(), f16.data(), n);
      for (int i = 0; i < lanes; ++i) {
        const float want = i < n ? 2.0f : 7.0f;
        EXPECT_EQ(f32[static_cast<std::size_t>(i)], want) << to_string(isa) << " n " << n;
        EXPECT_EQ(to_float(bf16[static_cast<std::size_t>(i)]), want) << to_string(isa);
        EXPECT_EQ(to_float(f16[static_cast<std::size_t>(i)]), want) << to_string(isa);
      }
    }
  }
}

TEST(Vec, ArithmeticIsIeee) {
  Rng rng(5);
  for (const auto& [isa, probe] : probes()) {
    const auto lanes = static_cast<std::size_t>(probe->lanes);
    std::vector<float> a(lanes);
    std::vector<float> b(lanes);
    std::vector<float> c(lanes);
    std::vector<float> out(lanes * 7);
    for (int round = 0; round < 2000; ++round) {
      for (std::size_t i = 0; i < lanes; ++i) {
        a[i] = rng.normal();
        b[i] = rng.normal();
        c[i] = rng.normal();
      }
      probe->arithmetic(a.data(), b.data(), c.data(), out.data());
      for (std::size_t i = 0; i < lanes; ++i) {
        const float fused =
            isa == CpuIsa::kGeneric ? a[i] * b[i] + c[i] : std::fma(a[i], b[i], c[i]);
        const float want[] = {a[i] + b[i],          a[i] - b[i],          a[i] * b[i], a[i] / b[i],
                              std::max(a[i], b[i]), std::min(a[i], b[i]), fused};
        for (std::size_t op = 0; op < 7; ++op) {
          ASSERT_EQ(bits(out[op * lanes + i]), bits(want[op])) << to_string(isa) << " op " << op;
        }
      }
    }
  }
}

// max and min return the second operand where either is NaN.
TEST(Vec, MaxAndMinOfNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto& [isa, probe] : probes()) {
    const auto lanes = static_cast<std::size_t>(probe->lanes);
    const std::vector<float> nans(lanes, nan);
    const std::vector<float> ones(lanes, 1.0f);
    std::vector<float> out(lanes * 7);
    probe->arithmetic(nans.data(), ones.data(), ones.data(), out.data());
    EXPECT_EQ(out[4 * lanes], 1.0f) << to_string(isa);
    EXPECT_EQ(out[5 * lanes], 1.0f) << to_string(isa);
    probe->arithmetic(ones.data(), nans.data(), ones.data(), out.data());
    EXPECT_TRUE(std::isnan(out[4 * lanes])) << to_string(isa);
    EXPECT_TRUE(std::isnan(out[5 * lanes])) << to_string(isa);
  }
}

TEST(Vec, SumAndMaxUseEveryLane) {
  Rng rng(6);
  for (const auto& [isa, probe] : probes()) {
    const auto lanes = static_cast<std::size_t>(probe->lanes);
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      std::vector<float> one(lanes, 0.0f);
      one[lane] = 3.0f;
      EXPECT_EQ(probe->sum(one.data()), 3.0f) << to_string(isa) << " lane " << lane;
      std::vector<float> low(lanes, -5.0f);
      low[lane] = -2.0f;
      EXPECT_EQ(probe->max_lane(low.data()), -2.0f) << to_string(isa) << " lane " << lane;
    }
    for (int round = 0; round < 1000; ++round) {
      std::vector<float> values(lanes);
      double exact = 0.0;
      double magnitude = 0.0;
      for (float& x : values) {
        x = rng.normal();
        exact += static_cast<double>(x);
        magnitude += std::abs(static_cast<double>(x));
      }
      EXPECT_NEAR(static_cast<double>(probe->sum(values.data())), exact, magnitude * 0x1p-22);
      // The eight-lane sets share one summation tree.
      if (lanes == 8) {
        EXPECT_EQ(bits(probe->sum(values.data())), bits(vec_probe_generic().sum(values.data())));
      }
    }
  }
}

// Eight sums at once are the eight sums, bit for bit.
TEST(Vec, SumOfEightIsEightSums) {
  Rng rng(7);
  for (const auto& [isa, probe] : probes()) {
    const auto lanes = static_cast<std::size_t>(probe->lanes);
    std::vector<float> values(lanes * 8);
    for (int round = 0; round < 1000; ++round) {
      for (float& x : values) x = rng.normal();
      float sums[8];
      probe->sum8(values.data(), sums);
      for (std::size_t i = 0; i < 8; ++i) {
        ASSERT_EQ(bits(sums[i]), bits(probe->sum(&values[i * lanes])))
            << to_string(isa) << " vector " << i;
      }
    }
  }
}

/// Calls `check(x, f(x))` for values all over the range of floats, many where e^x is neither 0 nor
/// infinite.
template <typename Check>
void for_many_values(const NamedProbe& named, void (*function)(const float*, float*), Check check) {
  const auto lanes = static_cast<std::size_t>(named.probe->lanes);
  Rng rng(8);
  std::vector<float> in(lanes);
  std::vector<float> out(lanes);
  for (int round = 0; round < 40'000; ++round) {
    for (float& x : in) {
      x = round % 4 == 0 ? std::bit_cast<float>(static_cast<std::uint32_t>(rng.next()))
                         : rng.uniform(-112.0f, 96.0f) * (round % 4 == 1 ? 1e-3f : 1.0f);
    }
    function(in.data(), out.data());
    for (std::size_t i = 0; i < lanes; ++i) check(in[i], out[i]);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(Vec, ExpIsWithinTwoUlp) {
  for (const NamedProbe& named : probes()) {
    for_many_values(named, named.probe->exp, [&](float x, float y) {
      if (std::isnan(x)) {
        ASSERT_TRUE(std::isnan(y)) << to_string(named.isa);
        return;
      }
      const double exact = std::exp(static_cast<double>(x));
      if (exact > 3.4028235e38) {
        ASSERT_TRUE(std::isinf(y) || y > 3.40e38f) << to_string(named.isa) << " exp(" << x << ")";
        return;
      }
      // A unit in the last place of the nearest float, subnormal ones included.
      const double ulp =
          std::max(std::ldexp(1.0, std::ilogb(std::max(exact, 1e-300)) - 23), 0x1p-149);
      ASSERT_LE(std::abs(static_cast<double>(y) - exact), 2.0 * ulp)
          << to_string(named.isa) << " exp(" << x << ") = " << y;
    });
    const auto lanes = static_cast<std::size_t>(named.probe->lanes);
    std::vector<float> out(lanes);
    const float infinity = std::numeric_limits<float>::infinity();
    for (const auto& [x, want] : {std::pair{-infinity, 0.0f},
                                  {infinity, infinity},
                                  {0.0f, 1.0f},
                                  {-0.0f, 1.0f},
                                  {-200.0f, 0.0f},
                                  {-3e38f, 0.0f}}) {
      const std::vector<float> in(lanes, x);
      named.probe->exp(in.data(), out.data());
      for (const float y : out) EXPECT_EQ(y, want) << to_string(named.isa) << " exp(" << x << ")";
    }
  }
}

TEST(Vec, SiluFollowsItsDefinition) {
  for (const NamedProbe& named : probes()) {
    for_many_values(named, named.probe->silu, [&](float x, float y) {
      if (!std::isfinite(x)) return;
      const double exact = static_cast<double>(x) / (1.0 + std::exp(-static_cast<double>(x)));
      ASSERT_LE(std::abs(static_cast<double>(y) - exact), 1e-6 * std::abs(exact) + 1e-36)
          << to_string(named.isa) << " silu(" << x << ") = " << y;
    });
  }
}

// A decay depends on a and its dt only: not on its place in the vector or on its neighbours.
TEST(Vec, DecaysDoNotDependOnTheirNeighbours) {
  Rng rng(9);
  for (const auto& [isa, probe] : probes()) {
    for (int round = 0; round < 300; ++round) {
      const float a = -rng.uniform(0.01f, 20.0f);
      std::vector<float> dt(80);
      for (float& x : dt) x = rng.uniform(0.0f, 8.0f);
      std::vector<float> all(80);
      probe->decays(a, dt.data(), 80, all.data());
      const auto n = static_cast<std::size_t>(rng.between(1, 80));
      const auto first = static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(81 - n)));
      std::vector<float> some(n + 1, -7.0f);
      probe->decays(a, &dt[first], static_cast<int>(n), some.data());
      for (std::size_t i = 0; i < n; ++i) {
        ASSERT_EQ(bits(some[i]), bits(all[first + i])) << to_string(isa) << " n " << n;
        ASSERT_NEAR(static_cast<double>(some[i]),
                    std::exp(static_cast<double>(a) * static_cast<double>(dt[first + i])), 1e-5)
            << to_string(isa);
      }
      ASSERT_EQ(some[n], -7.0f) << to_string(isa);
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
