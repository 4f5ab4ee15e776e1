// The vectors of every instruction set against scalar code.
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace replayssm::testing
