// The CPU backend's conversions, products, element-wise ops, norms and rotation against naive
// double-precision loops, on every instruction set this processor has and every storage type.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/kernels.h"
#include "engine/backend_support.h"

namespace replayssm {
namespace {

using test::BackendTest;
using test::bits;
using test::copy_rows;
using test::kNan;
using test::kStorage;
using test::Operand;
using test::Output;
using test::sigmoid_of;
using test::silu_of;
using test::untouched;

INSTANTIATE_TEST_SUITE_P(Isa, BackendTest, testing::ValuesIn(supported_isas()),
                         [](const auto& param) { return std::string(to_string(param.param)); });

// ---- conversions ----

TEST_P(BackendTest, WidensEveryHalfExactly) {
  std::vector<std::uint16_t> halves(65536);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  std::vector<float> floats(halves.size());
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    kernels().widen[cpu::storage_index(dtype)](halves.data(), floats.data(), 65536);
    for (std::size_t i = 0; i < halves.size(); ++i) {
      const float expected =
          dtype == DType::kBF16 ? to_float(BF16{halves[i]}) : to_float(F16{halves[i]});
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(floats[i])) << to_string(dtype) << " " << i;
      } else {
        ASSERT_EQ(bits(floats[i]), bits(expected)) << to_string(dtype) << " " << i;
      }
    }
  }
}

TEST_P(BackendTest, NarrowsLikeTheScalarConversions) {
  std::vector<float> values = {0.0f,
                               -0.0f,
                               std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::quiet_NaN(),
                               std::bit_cast<float>(0x7f800001u),  // signalling, payload cut off
                               std::bit_cast<float>(0xff80ffffu),
                               std::bit_cast<float>(0x7fffffffu),
                               std::numeric_limits<float>::max(),
                               -std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::denorm_min(),
                               std::numeric_limits<float>::min()};
  // Around every half of either type: the value, the ties to its neighbours, and next to the ties.
  for (std::uint32_t half = 0; half < 65536; half += 7) {
    const std::uint32_t bf16_tie = (half << 16) | 0x8000u;
    const std::uint32_t f16 = bits(to_float(F16{static_cast<std::uint16_t>(half)}));
    for (const std::uint32_t center : {half << 16, bf16_tie, f16, f16 + 0x1000u}) {
      for (const std::uint32_t near : {center - 1, center, center + 1}) {
        values.push_back(std::bit_cast<float>(near));
      }
    }
  }
  // Ties between subnormals of f16: odd multiples of 2^-25.
  for (int i = 1; i < 2048; i += 2) values.push_back(std::ldexp(static_cast<float>(i), -25));
  while (values.size() % 16 != 5) values.push_back(1.0f);  // a tail on every instruction set
  const auto n = static_cast<std::int64_t>(values.size());

  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    std::vector<std::uint16_t> halves(values.size() + 1, 0xabcd);
    kernels().narrow[cpu::storage_index(dtype)](values.data(), halves.data(), n);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const bool bf16 = dtype == DType::kBF16;
      const std::uint16_t expected = bf16 ? to_bf16(values[i]).bits : to_f16(values[i]).bits;
      const float back = bf16 ? to_float(BF16{halves[i]}) : to_float(F16{halves[i]});
      if (std::isnan(values[i])) {
        ASSERT_TRUE(std::isnan(back)) << to_string(dtype) << " " << std::hex << bits(values[i]);
      } else {
        ASSERT_EQ(halves[i], expected) << to_string(dtype) << " " << std::hex << bits(values[i]);
      }
    }
    EXPECT_EQ(halves.back(), 0xabcd);
  }
}

// ---- rows of dots ----

TEST_P(BackendTest, DotsAreRightAndTheSameForAnyRowCount) {
  for (const DType dtype : kStorage) {
    for (const auto& [out, in] : {std::pair<int, int>{1, 1},
                                  {3, 7},
                                  {5, 16},
                                  {12, 33},
                                  {13, 64},
                                  {37, 100},
                                  {50, 259},
                                  {26, 2051}}) {
      constexpr std::int64_t kRows = 65;
      const Operand x(DType::kF32, kRows, in, rng_);
      const Operand w(dtype, out, in, rng_, 0.1f);
      std::vector<const float*> xs;
      for (std::int64_t r = 0; r < kRows; ++r) xs.push_back(x.row(r));
      const auto run = [&](std::int64_t first, std::int64_t rows, Output& y) {
        std::vector<float*> ys;
        for (std::int64_t r = 0; r < kRows; ++r) ys.push_back(y.row(r));
        kernels().dots[cpu::storage_index(dtype)](xs.data() + first, rows, w.view().data, in, out,
                                                  in, ys.data() + first, 0);
      };
      Output alone(kRows, out);
      for (std::int64_t r = 0; r < kRows; ++r) run(r, 1, alone);
      EXPECT_TRUE(alone.guards_intact());
      for (std::int64_t r = 0; r < kRows; ++r) {
        for (std::int64_t o = 0; o < out; ++o) {
          double sum = 0;
          double magnitude = 0;
          for (std::int64_t i = 0; i < in; ++i) {
            const double term = static_cast<double>(x.at(r, i)) * w.at(o, i);
            sum += term;
            magnitude += std::abs(term);
          }
          ASSERT_NEAR(alone.at(r, o), sum, 2e-6 * magnitude) << out << "x" << in;
        }
      }
      for (const std::int64_t rows : {2, 3, 4, 5, 6, 7, 8, 16, 65}) {
        Output together(kRows, out);
        run(kRows - rows, rows, together);
        EXPECT_TRUE(together.guards_intact());
        for (std::int64_t r = 0; r < kRows; ++r) {
          if (r < kRows - rows) {
            ASSERT_TRUE(together.row_untouched(r));
          } else {
            ASSERT_EQ(together.row_bits(r), alone.row_bits(r)) << rows << " rows, row " << r;
          }
        }
      }
    }
  }
}

// ---- matmul ----

ForwardRow decode(std::int32_t slot, std::int64_t begin, std::int64_t count) {
  return {.slot = slot, .begin = begin, .count = count};
}
ForwardRow prompt(std::int32_t slot, std::int64_t begin, std::int64_t count) {
  return {
      .slot = slot, .kind = RowKind::kCommitted, .prompt = true, .begin = begin, .count = count};
}

TEST_P(BackendTest, MatmulRowsAreIndependentOfNeighboursAndThreads) {
  ThreadPool two(2);
  ThreadPool three(3);
  for (const DType dtype : kStorage) {
    for (const auto& [out, in] :
         {std::pair<int, int>{1, 1}, {7, 19}, {131, 67}, {200, 160}, {333, 515}}) {
      // Padding in between, a row nobody owns (25), an empty prompt and a one-token prompt.
      const std::vector<ForwardRow> rows = {decode(3, 0, 1),  prompt(1, 1, 13), decode(-1, 14, 2),
                                            decode(0, 16, 5), prompt(5, 21, 1), prompt(-1, 22, 3),
                                            prompt(6, 26, 0), decode(7, 26, 1), prompt(2, 27, 6)};
      constexpr std::int64_t kTokens = 33;
      const Operand x(DType::kF32, kTokens, in, rng_);
      const Operand w(dtype, out, in, rng_, 0.1f);
      CpuBackend backend(context());
      Output y(kTokens, out);
      ASSERT_TRUE(backend.matmul(rows, x.view(), w.view(), y.view()).ok());
      EXPECT_TRUE(y.guards_intact());
      std::vector<bool> owned(kTokens, false);
      for (const ForwardRow& row : rows) {
        for (std::int64_t t = row.begin; t < row.begin + row.count; ++t) {
          owned[static_cast<std::size_t>(t)] = row.slot >= 0;
        }
      }
      for (std::int64_t t = 0; t < kTokens; ++t) {
        if (!owned[static_cast<std::size_t>(t)]) {
          EXPECT_TRUE(y.row_untouched(t)) << t;
          continue;
        }
        for (std::int64_t o = 0; o < out; ++o) {
          double sum = 0;
          double magnitude = 0;
          for (std::int64_t i = 0; i < in; ++i) {
            const double term = static_cast<double>(x.at(t, i)) * w.at(o, i);
            sum += term;
            magnitude += std::abs(term);
          }
          ASSERT_NEAR(y.at(t, o), sum, 3e-6 * magnitude) << "token " << t << " output " << o;
        }
      }
      const auto expect_same = [&](const Output& other, const ForwardRow& row) {
        for (std::int64_t t = row.begin; t < row.begin + row.count; ++t) {
          ASSERT_EQ(other.row_bits(t), y.row_bits(t)) << "token " << t << ", " << out << "x" << in;
        }
      };
      for (const ForwardRow& row : rows) {
        if (row.slot < 0) continue;
        Output alone(kTokens, out);
        ASSERT_TRUE(backend.matmul({&row, 1}, x.view(), w.view(), alone.view()).ok());
        expect_same(alone, row);
      }
      for (ThreadPool* pool : {&two, &three}) {
        CpuBackend threaded(context(pool));
        Output other(kTokens, out);
        ASSERT_TRUE(threaded.matmul(rows, x.view(), w.view(), other.view()).ok());
        EXPECT_TRUE(other.guards_intact());
        for (const ForwardRow& row : rows) {
          if (row.slot >= 0) expect_same(other, row);
        }
      }
    }
  }
}

TEST_P(BackendTest, MatmulRefusesOtherTypes) {
  CpuBackend backend(context());
  float value = 0.0f;
  const ForwardRow row = decode(0, 0, 1);
  const TensorView x = TensorView::contiguous(&value, DType::kF32, {1, 1});
  const TensorView w = TensorView::contiguous(&value, DType::kI32, {1, 1});
  const Status status = backend.matmul({&row, 1}, x, w, x);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("i32"), std::string::npos) << status.message();
}

TEST_P(BackendTest, AFailedProductIsReported) {
  if (std::string(cpu::gemm_name()) == "built-in") GTEST_SKIP() << "cannot fail";
  // A row stride below the row length is refused by the matrix library.
  cpu::Scratch scratch(1);
  std::vector<float> memory(64, 1.0f);
  const cpu::GemmBlock block{
      .x = memory.data(), .x_stride = 1, .y = memory.data() + 32, .y_stride = 4, .rows = 2};
  const Status status =
      cpu::gemm(context(), {&block, 1},
                {.data = memory.data(), .dtype = DType::kF32, .out = 4, .in = 4}, scratch);
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_NE(status.message().find("4 x 4"), std::string::npos) << status.message();
}

// ---- element-wise ops and norms ----

constexpr std::int64_t kFeatures[] = {1, 7, 8, 16, 31, 33, 64, 100, 257, 4096};

TEST_P(BackendTest, EmbedWidensTheRowsAskedFor) {
  ThreadPool pool(2);
  for (const DType dtype : kStorage) {
    for (const std::int64_t features : kFeatures) {
      const Operand table(dtype, 11, features, rng_);
      const std::vector<std::int32_t> tokens = {10, 0, 3, 3, 10, 7};
      CpuBackend backend(context(&pool));
      Output out(static_cast<std::int64_t>(tokens.size()), features);
      backend.embed(tokens, table.view(), out.view());
      EXPECT_TRUE(out.guards_intact());
      for (std::size_t t = 0; t < tokens.size(); ++t) {
        for (std::int64_t c = 0; c < features; ++c) {
          ASSERT_EQ(out.at(static_cast<std::int64_t>(t), c), table.at(tokens[t], c));
        }
      }
    }
  }
}

TEST_P(BackendTest, RmsNorm) {
  ThreadPool pool(2);
  constexpr std::int64_t kTokens = 9;
  for (const std::int64_t features : kFeatures) {
    const Operand x(DType::kF32, kTokens, features, rng_, 3.0f);
    const Operand weight(DType::kF32, 1, features, rng_);
    CpuBackend backend(context(&pool));
    Output out(kTokens, features);
    backend.rms_norm(x.view(), weight.vector(), 1e-5f, out.view());
    Output in_place(kTokens, features);
    copy_rows(x, kTokens, features, in_place);
    backend.rms_norm(in_place.view(), weight.vector(), 1e-5f, in_place.view());
    EXPECT_TRUE(out.guards_intact());
    EXPECT_TRUE(in_place.guards_intact());
    for (std::int64_t t = 0; t < kTokens; ++t) {
      double sum = 0;
      for (std::int64_t c = 0; c < features; ++c) {
        sum += static_cast<double>(x.at(t, c)) * x.at(t, c);
      }
      const double scale = 1.0 / std::sqrt(sum / static_cast<double>(features) + 1e-5);
      for (std::int64_t c = 0; c < features; ++c) {
        EXPECT_RELATIVE(out.at(t, c), x.at(t, c) * scale * weight.at(c), 1e-6);
      }
      EXPECT_EQ(out.row_bits(t), in_place.row_bits(t));
      Output alone(1, features);
      backend.rms_norm(x.rows_view(t, 1), weight.vector(), 1e-5f, alone.view());
      EXPECT_EQ(out.row_bits(t), alone.row_bits(0));
    }
  }
}

TEST_P(BackendTest, GatedRmsNormPerGroup) {
  ThreadPool pool(2);
  constexpr std::int64_t kTokens = 5;
  for (const std::int64_t groups : {1, 2, 8}) {
    for (const std::int64_t group_features : {1, 5, 16, 33, 512}) {
      const std::int64_t features = groups * group_features;
      const Operand y(DType::kF32, kTokens, features, rng_, 2.0f);
      // z is a window on wider rows, as in a packed projection.
      const Operand packed(DType::kF32, kTokens, features + 3, rng_, 4.0f);
      TensorView z = packed.view();
      z.shape[1] = features;
      const Operand weight(DType::kF32, 1, features, rng_);
      CpuBackend backend(context(&pool));
      Output out(kTokens, features);
      backend.gated_rms_norm(y.view(), z, weight.vector(), groups, 1e-5f, out.view());
      Output in_place(kTokens, features);
      copy_rows(y, kTokens, features, in_place);
      backend.gated_rms_norm(in_place.view(), z, weight.vector(), groups, 1e-5f, in_place.view());
      EXPECT_TRUE(out.guards_intact());
      EXPECT_TRUE(in_place.guards_intact());
      for (std::int64_t t = 0; t < kTokens; ++t) {
        EXPECT_EQ(out.row_bits(t), in_place.row_bits(t));
        for (std::int64_t g = 0; g < groups; ++g) {
          std::vector<double> u;
          double sum = 0;
          for (std::int64_t c = g * group_features; c < (g + 1) * group_features; ++c) {
            u.push_back(y.at(t, c) * silu_of(packed.at(t, c)));
            sum += u.back() * u.back();
          }
          const double scale = 1.0 / std::sqrt(sum / static_cast<double>(group_features) + 1e-5);
          for (std::int64_t c = 0; c < group_features; ++c) {
            const std::int64_t channel = g * group_features + c;
            EXPECT_RELATIVE(out.at(t, channel),
                            u[static_cast<std::size_t>(c)] * scale * weight.at(channel), 1e-6);
          }
        }
      }
    }
  }
}

TEST_P(BackendTest, ReluSquaredAndAdd) {
  ThreadPool pool(2);
  constexpr std::int64_t kTokens = 7;
  for (const std::int64_t features : kFeatures) {
    Operand x(DType::kF32, kTokens, features, rng_);
    const Operand y(DType::kF32, kTokens, features, rng_);
    x.set(0, std::numeric_limits<float>::quiet_NaN());
    CpuBackend backend(context(&pool));
    Output squared(kTokens, features);
    Output sum(kTokens, features);
    copy_rows(x, kTokens, features, squared);
    copy_rows(x, kTokens, features, sum);
    backend.relu_squared(squared.view());
    backend.add(sum.view(), y.view());
    EXPECT_TRUE(squared.guards_intact());
    EXPECT_TRUE(sum.guards_intact());
    EXPECT_TRUE(std::isnan(squared.at(0, 0)));
    EXPECT_TRUE(std::isnan(sum.at(0, 0)));
    for (std::int64_t i = 1; i < kTokens * features; ++i) {
      const float positive = std::max(x.at(i), 0.0f);
      ASSERT_EQ(squared.at(i / features, i % features), positive * positive);
      ASSERT_EQ(sum.at(i / features, i % features), x.at(i) + y.at(i));
    }
  }
}

TEST_P(BackendTest, GatesOverTheWholeRange) {
  std::vector<float> x;
  for (float v = -87.0f; v <= 100.0f; v += 0.0137f) x.push_back(v);
  const std::size_t accurate = x.size();
  x.insert(x.end(), {-88.5f, -95.0f, -104.0f, -1e4f, -3e38f, 1e4f, 3e38f,
                     std::numeric_limits<float>::quiet_NaN(), 0.0f, 1e-30f, -1e-30f});
  const auto count = static_cast<std::int64_t>(x.size());
  for (const bool silu : {true, false}) {
    std::vector<float> y(x.size(), 1.0f);
    y.push_back(kNan);
    (silu ? kernels().multiply_silu : kernels().multiply_sigmoid)(y.data(), x.data(), count);
    EXPECT_TRUE(untouched(y.back()));
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (std::isnan(x[i])) {
        EXPECT_TRUE(std::isnan(y[i]));
      } else if (i < accurate || x[i] > -1.0f) {
        EXPECT_RELATIVE(y[i], silu ? silu_of(x[i]) : sigmoid_of(x[i]), 5e-7);
      } else {  // the result is below the normal numbers, or e^-x overflows
        EXPECT_LE(std::abs(y[i]), 1e-36f) << x[i];
      }
    }
  }
}

/// Gates are windows on wider rows, as those of attention are behind their queries.
TEST_P(BackendTest, GateMultipliesInPlace) {
  ThreadPool pool(2);
  constexpr std::int64_t kTokens = 9;
  for (const std::int64_t features : kFeatures) {
    const Operand x(DType::kF32, kTokens, features, rng_);
    const Operand packed(DType::kF32, kTokens, features + 3, rng_, 4.0f);
    TensorView gate = packed.view();
    gate.shape[1] = features;
    for (const GateFunction f : {GateFunction::kSilu, GateFunction::kSigmoid}) {
      CpuBackend backend(context(&pool));
      Output out(kTokens, features);
      copy_rows(x, kTokens, features, out);
      backend.gate(out.view(), gate, f);
      EXPECT_TRUE(out.guards_intact());
      for (std::int64_t t = 0; t < kTokens; ++t) {
        for (std::int64_t c = 0; c < features; ++c) {
          const double z = packed.at(t, c);
          EXPECT_RELATIVE(out.at(t, c),
                          x.at(t, c) * (f == GateFunction::kSilu ? silu_of(z) : sigmoid_of(z)),
                          1e-6);
        }
      }
    }
  }
}

// ---- rotary position embedding ----

/// Angles stay right where a product in fp32 would have lost them (pos * f of 262,143 radians), and
/// rows are placed by their own positions.
TEST_P(BackendTest, RotaryTable) {
  ThreadPool pool(2);
  const std::vector<double> frequencies = {1.0, 0.70710678118654752, 1e-3, 3.1622776601683794e-7};
  const ForwardRow rows[] = {
      {.slot = 3, .begin = 0, .count = 2, .position = 0},
      {.slot = -1, .begin = 2, .count = 1, .position = 9},
      {.slot = 0, .begin = 3, .count = 70, .position = 262'143},
  };
  CpuBackend backend(context(&pool));
  Output table(73, 8);
  backend.rotary_table(rows, frequencies, table.view());
  EXPECT_TRUE(table.guards_intact());
  EXPECT_TRUE(table.row_untouched(2)) << "padding";
  for (const ForwardRow& row : rows) {
    if (row.slot < 0) continue;
    for (std::int64_t t = 0; t < row.count; ++t) {
      for (std::size_t j = 0; j < frequencies.size(); ++j) {
        const double angle = static_cast<double>(row.position + t) * frequencies[j];
        const auto column = static_cast<std::int64_t>(j);
        EXPECT_NEAR(table.at(row.begin + t, column), std::cos(angle), 1e-7);
        EXPECT_NEAR(table.at(row.begin + t, 4 + column), std::sin(angle), 1e-7);
      }
    }
  }
}

TEST_P(BackendTest, RotateTurnsPairsOfEveryHead) {
  ThreadPool pool(2);
  constexpr std::int64_t kTokens = 7;
  for (const std::int64_t pairs : {1, 3, 8, 16, 19, 32}) {
    for (const std::int64_t rest : {0, 5}) {
      constexpr std::int64_t kHeads = 3;
      const std::int64_t dim = 2 * pairs + rest;
      const Operand x(DType::kF32, kTokens, kHeads * dim, rng_);
      const Operand angles(DType::kF32, kTokens, 2 * pairs, rng_);
      Output out(kTokens, kHeads * dim);
      copy_rows(x, kTokens, kHeads * dim, out);
      TensorView heads = out.view();
      heads.rank = 3;
      heads.shape[1] = kHeads;
      heads.shape[2] = dim;
      heads.strides[1] = dim;
      heads.strides[2] = 1;
      CpuBackend backend(context(&pool));
      backend.rotate(angles.view(), heads);
      EXPECT_TRUE(out.guards_intact());
      for (std::int64_t t = 0; t < kTokens; ++t) {
        for (std::int64_t h = 0; h < kHeads; ++h) {
          for (std::int64_t j = 0; j < pairs; ++j) {
            const double a = x.at(t, h * dim + j);
            const double b = x.at(t, h * dim + pairs + j);
            const double cosine = angles.at(t, j);
            const double sine = angles.at(t, pairs + j);
            EXPECT_NEAR(out.at(t, h * dim + j), a * cosine - b * sine, 1e-5);
            EXPECT_NEAR(out.at(t, h * dim + pairs + j), b * cosine + a * sine, 1e-5);
          }
          for (std::int64_t c = h * dim + 2 * pairs; c < (h + 1) * dim; ++c) {
            ASSERT_EQ(out.at(t, c), x.at(t, c)) << "not of a pair";
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace replayssm
