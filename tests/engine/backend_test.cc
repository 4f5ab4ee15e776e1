// The CPU backend against naive double-precision loops, on every instruction set this processor has
// and every storage type. Outputs start as NaN inside and outside of what an op may write, and read
// operands end at an unmapped page.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/kernels.h"
#include "backend/kv_cache.h"

namespace replayssm {
namespace {

constexpr DType kStorage[] = {DType::kF32, DType::kBF16, DType::kF16};
const float kNan = std::bit_cast<float>(0x7fc0beefu);  // recognisable: "nobody wrote this"

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }
bool untouched(float x) { return bits(x) == bits(kNan); }

/// Memory whose last byte is followed by an inaccessible page.
class PageEnd {
 public:
  explicit PageEnd(std::size_t bytes) : bytes_(bytes) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    mapped_ = (bytes + page - 1) / page * page + page;
    base_ = static_cast<std::byte*>(
        ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(base_, MAP_FAILED);
    EXPECT_EQ(::mprotect(base_ + mapped_ - page, page, PROT_NONE), 0);
    data_ = base_ + mapped_ - page - bytes;
  }
  ~PageEnd() { ::munmap(base_, mapped_); }
  PageEnd(const PageEnd&) = delete;
  PageEnd& operator=(const PageEnd&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_;
  std::size_t mapped_ = 0;
  std::byte* base_ = nullptr;
  std::byte* data_ = nullptr;
};

/// Read-only operand (rows, cols) of a storage type.
class Operand {
 public:
  Operand(DType dtype, std::int64_t rows, std::int64_t cols, std::mt19937& rng, float scale = 1.0f)
      : dtype_(dtype),
        rows_(rows),
        cols_(cols),
        memory_(static_cast<std::size_t>(rows * cols) * size_of(dtype)) {
    std::normal_distribution<float> normal(0.0f, scale);
    for (std::int64_t i = 0; i < rows * cols; ++i) set(i, normal(rng));
  }

  void set(std::int64_t i, float value) {
    // Memory that ends at a page boundary starts at any multiple of the element size.
    std::byte* p = memory_.data() + static_cast<std::size_t>(i) * size_of(dtype_);
    if (dtype_ == DType::kF32) {
      std::memcpy(p, &value, sizeof(value));
    } else {
      const std::uint16_t half = dtype_ == DType::kBF16 ? to_bf16(value).bits : to_f16(value).bits;
      std::memcpy(p, &half, sizeof(half));
    }
  }
  float at(std::int64_t i) const {
    const std::byte* p = memory_.data() + static_cast<std::size_t>(i) * size_of(dtype_);
    if (dtype_ == DType::kF32) {
      float value;
      std::memcpy(&value, p, sizeof(value));
      return value;
    }
    std::uint16_t half;
    std::memcpy(&half, p, sizeof(half));
    return dtype_ == DType::kBF16 ? to_float(BF16{half}) : to_float(F16{half});
  }
  float at(std::int64_t row, std::int64_t col) const { return at(row * cols_ + col); }
  const float* row(std::int64_t index) const {
    return reinterpret_cast<const float*>(memory_.data()) + index * cols_;
  }

  TensorView view() const { return TensorView::contiguous(memory_.data(), dtype_, {rows_, cols_}); }
  TensorView vector() const { return TensorView::contiguous(memory_.data(), dtype_, {cols_}); }
  /// Rows [begin, begin + count) as a matrix of their own.
  TensorView rows_view(std::int64_t begin, std::int64_t count) const {
    return TensorView::contiguous(
        memory_.data() + static_cast<std::size_t>(begin * cols_) * size_of(dtype_), dtype_,
        {count, cols_});
  }

 private:
  DType dtype_;
  std::int64_t rows_;
  std::int64_t cols_;
  PageEnd memory_;
};

/// Output matrix with guards before, after and between its rows, NaN everywhere.
class Output {
 public:
  Output(std::int64_t rows, std::int64_t cols)
      : rows_(rows),
        cols_(cols),
        stride_(cols + kGuard),
        data_(static_cast<std::size_t>(rows * stride_ + kGuard), kNan) {}

  TensorView view() {
    TensorView view = TensorView::contiguous(data_.data() + kGuard, DType::kF32, {rows_, cols_});
    view.strides[0] = stride_;
    return view;
  }
  float* row(std::int64_t r) { return data_.data() + kGuard + r * stride_; }
  float at(std::int64_t r, std::int64_t c) const {
    return data_[static_cast<std::size_t>(kGuard + r * stride_ + c)];
  }
  std::vector<std::uint32_t> row_bits(std::int64_t r) const {
    std::vector<std::uint32_t> result;
    for (std::int64_t c = 0; c < cols_; ++c) result.push_back(bits(at(r, c)));
    return result;
  }
  bool row_untouched(std::int64_t r) const {
    for (std::int64_t c = 0; c < cols_; ++c) {
      if (!untouched(at(r, c))) return false;
    }
    return true;
  }
  bool guards_intact() const {
    for (std::size_t i = 0; i < data_.size(); ++i) {
      if (static_cast<std::int64_t>(i) % stride_ < kGuard && !untouched(data_[i])) return false;
    }
    return true;
  }

 private:
  static constexpr std::int64_t kGuard = 19;
  std::int64_t rows_;
  std::int64_t cols_;
  std::int64_t stride_;
  std::vector<float> data_;
};

void copy_rows(const Operand& from, std::int64_t rows, std::int64_t cols, Output& to) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) to.row(r)[c] = from.at(r, c);
  }
}

double sigmoid_of(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double silu_of(double x) { return x * sigmoid_of(x); }

#define EXPECT_RELATIVE(actual, expected, tolerance)                                     \
  EXPECT_LE(std::abs(static_cast<double>(actual) - (expected)),                          \
            (tolerance) * std::abs(expected) + std::numeric_limits<float>::denorm_min()) \
      << "actual " << (actual) << ", expected " << (expected)

class BackendTest : public testing::TestWithParam<CpuIsa> {
 protected:
  CpuIsa isa() const { return GetParam(); }
  const cpu::BackendKernels& kernels() const { return cpu::backend_kernels(isa()); }
  CpuContext context(ThreadPool* pool = nullptr) const { return {pool, isa()}; }
  std::mt19937 rng_{7};
};

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

// ---- attention ----

struct AttentionCase {
  std::int64_t query_heads;
  std::int64_t kv_heads;
  std::int64_t head_dim;
};

constexpr AttentionCase kAttentionCases[] = {{1, 1, 1},  {4, 2, 5},   {6, 2, 33}, {8, 1, 64},
                                             {2, 2, 80}, {3, 1, 128}, {70, 1, 16}};

/// One sequence: queries, keys and values of all its tokens, and the oracle's answer.
struct Sequence {
  Sequence(const AttentionCase& c, std::int64_t length, std::mt19937& rng, float spread = 1.0f)
      : shape{c.query_heads, c.kv_heads, c.head_dim,
              1.0f / std::sqrt(static_cast<float>(c.head_dim))},
        tokens(length),
        q(DType::kF32, length, c.query_heads * c.head_dim, rng, spread),
        k(DType::kF32, length, c.kv_heads * c.head_dim, rng, spread),
        v(DType::kF32, length, c.kv_heads * c.head_dim, rng) {}

  std::vector<double> expected(std::int64_t token, DType dtype) const {
    const auto stored = [&](float x) {
      return static_cast<double>(dtype == DType::kBF16  ? to_float(to_bf16(x))
                                 : dtype == DType::kF16 ? to_float(to_f16(x))
                                                        : x);
    };
    std::vector<double> out;
    for (std::int64_t h = 0; h < shape.query_heads; ++h) {
      const std::int64_t kv = h / (shape.query_heads / shape.kv_heads) * shape.head_dim;
      std::vector<double> p;
      double largest = -std::numeric_limits<double>::infinity();
      for (std::int64_t j = 0; j <= token; ++j) {
        double dot = 0;
        for (std::int64_t d = 0; d < shape.head_dim; ++d) {
          dot += q.at(token, h * shape.head_dim + d) * stored(k.at(j, kv + d));
        }
        p.push_back(dot * shape.scale);
        largest = std::max(largest, p.back());
      }
      double total = 0;
      for (double& score : p) total += score = std::exp(score - largest);
      for (std::int64_t d = 0; d < shape.head_dim; ++d) {
        double sum = 0;
        for (std::int64_t j = 0; j <= token; ++j) {
          sum += p[static_cast<std::size_t>(j)] * stored(v.at(j, kv + d));
        }
        out.push_back(sum / total);
      }
    }
    return out;
  }

  KvCache cache(DType dtype, std::int64_t slots = 3) const {
    Result<KvCache> cache = KvCache::create({.layers = 2,
                                             .slots = slots,
                                             .capacity = tokens + 60,
                                             .kv_heads = shape.kv_heads,
                                             .head_dim = shape.head_dim,
                                             .dtype = dtype});
    EXPECT_TRUE(cache.ok()) << cache.status().message();
    // What has not been written yet must not matter. All ones is a NaN in every type.
    const std::size_t bytes =
        static_cast<std::size_t>(2 * slots * (tokens + 60) * shape.kv_heads * shape.head_dim) *
        size_of(dtype);
    std::memset(cache->key(0, 0, 0, 0), 0xff, bytes);
    std::memset(cache->value(0, 0, 0, 0), 0xff, bytes);
    return std::move(cache).value();
  }

  /// Runs tokens [begin, begin + count) and puts their outputs into the same rows of `out`.
  void run(Backend& backend, KvCache& cache, std::int64_t begin, std::int64_t count, bool is_prompt,
           Output& out) const {
    TensorView rows = out.view();
    rows.data = out.row(begin);
    const ForwardRow row{
        .slot = 1, .prompt = is_prompt, .begin = 0, .count = count, .position = begin};
    backend.attention({&row, 1}, shape, q.rows_view(begin, count), k.rows_view(begin, count),
                      v.rows_view(begin, count), cache, 1, rows);
  }

  AttentionShape shape;
  std::int64_t tokens;
  Operand q;
  Operand k;
  Operand v;
};

TEST_P(BackendTest, AttentionIsRightAndTheSameForAnyChunking) {
  ThreadPool pool(2);
  for (const DType dtype : kStorage) {
    for (const AttentionCase& c : kAttentionCases) {
      const std::int64_t length = c.query_heads * c.head_dim > 200 ? 101 : 150;
      const Sequence sequence(c, length, rng_);
      const std::int64_t features = c.query_heads * c.head_dim;
      CpuBackend backend(context());
      KvCache cache = sequence.cache(dtype);
      Output whole(length, features);
      sequence.run(backend, cache, 0, length, true, whole);
      EXPECT_TRUE(whole.guards_intact());
      for (const std::int64_t t : {std::int64_t{0}, std::int64_t{1}, std::int64_t{46},
                                   std::int64_t{47}, std::int64_t{48}, length - 1}) {
        const std::vector<double> expected = sequence.expected(t, dtype);
        for (std::int64_t f = 0; f < features; ++f) {
          ASSERT_NEAR(whole.at(t, f), expected[static_cast<std::size_t>(f)], 3e-6)
              << "token " << t << " feature " << f;
        }
      }
      CpuBackend threaded(context(&pool));
      for (const std::int64_t chunk : {1, 5, 64, 150}) {
        KvCache other_cache = sequence.cache(dtype);
        Output other(length, features);
        for (std::int64_t t = 0; t < length; t += chunk) {
          sequence.run(threaded, other_cache, t, std::min(chunk, length - t), t == 0, other);
        }
        EXPECT_TRUE(other.guards_intact());
        for (std::int64_t t = 0; t < length; ++t) {
          ASSERT_EQ(other.row_bits(t), whole.row_bits(t)) << "chunk " << chunk << " token " << t;
        }
      }
    }
  }
}

TEST_P(BackendTest, AttentionRowsAreIndependentAndPaddingIsUntouched) {
  ThreadPool pool(2);
  const AttentionCase c{6, 2, 33};
  const std::int64_t features = c.query_heads * c.head_dim;
  constexpr std::int64_t kTokens = 100;
  for (const DType dtype : kStorage) {
    const Sequence batch(c, kTokens, rng_);
    const std::vector<ForwardRow> rows = {
        {.slot = 2, .prompt = true, .begin = 0, .count = 60, .position = 0},
        {.slot = -1, .begin = 60, .count = 2, .position = 1000000},
        {.slot = 0, .begin = 62, .count = 1, .position = 0},
        {.slot = 3, .begin = 64, .count = 4, .position = 0},
        {.slot = 1, .prompt = true, .begin = 70, .count = 30, .position = 0}};
    CpuBackend backend(context(&pool));
    KvCache cache = batch.cache(dtype, 5);
    Output out(kTokens, features);
    backend.attention(rows, batch.shape, batch.q.view(), batch.k.view(), batch.v.view(), cache, 0,
                      out.view());
    EXPECT_TRUE(out.guards_intact());
    for (const std::int64_t t : {60, 61, 63, 68, 69}) EXPECT_TRUE(out.row_untouched(t)) << t;
    // Slot 4 belongs to nobody; all ones is what the cache was filled with.
    const std::vector<std::uint8_t> ones(static_cast<std::size_t>(c.head_dim) * size_of(dtype),
                                         0xff);
    for (std::int64_t i = 0; i < c.kv_heads * kTokens; ++i) {
      const std::int64_t h = i / kTokens;
      const std::int64_t p = i % kTokens;
      ASSERT_EQ(std::memcmp(cache.key(0, 4, h, p), ones.data(), ones.size()), 0);
      ASSERT_EQ(std::memcmp(cache.value(0, 4, h, p), ones.data(), ones.size()), 0);
    }
    CpuBackend single(context());
    for (const ForwardRow& row : rows) {
      if (row.slot < 0) continue;
      KvCache own = batch.cache(dtype, 5);
      Output alone(kTokens, features);
      single.attention({&row, 1}, batch.shape, batch.q.view(), batch.k.view(), batch.v.view(), own,
                       0, alone.view());
      for (std::int64_t t = row.begin; t < row.begin + row.count; ++t) {
        ASSERT_EQ(alone.row_bits(t), out.row_bits(t)) << t;
      }
    }
  }
}

TEST_P(BackendTest, RejectedTokensAreOverwritten) {
  const AttentionCase c{4, 2, 16};
  const Sequence sequence(c, 20, rng_);
  const Sequence draft(c, 20, rng_);
  CpuBackend backend(context());
  KvCache plain_cache = sequence.cache(DType::kBF16);
  Output plain(20, 64);
  sequence.run(backend, plain_cache, 0, 20, true, plain);
  KvCache cache = sequence.cache(DType::kBF16);
  Output out(20, 64);
  sequence.run(backend, cache, 0, 8, true, out);
  draft.run(backend, cache, 8, 5, false, out);
  sequence.run(backend, cache, 8, 12, false, out);
  for (std::int64_t t = 0; t < 20; ++t) EXPECT_EQ(out.row_bits(t), plain.row_bits(t)) << t;
}

TEST_P(BackendTest, AttentionSurvivesLargeScores) {
  for (const float spread : {1e2f, 1e9f, 1e17f}) {
    const AttentionCase c{4, 2, 40};
    const std::int64_t length = 101;
    const Sequence sequence(c, length, rng_, spread);
    CpuBackend backend(context());
    KvCache cache = sequence.cache(DType::kF32);
    Output out(length, c.query_heads * c.head_dim);
    sequence.run(backend, cache, 0, length, true, out);
    for (const std::int64_t t : {std::int64_t{0}, std::int64_t{50}, length - 1}) {
      const std::vector<double> expected = sequence.expected(t, DType::kF32);
      for (std::size_t f = 0; f < expected.size(); ++f) {
        // Scores of 1e4 carry an error of 1e-3 in fp32, which the exponential passes on.
        ASSERT_NEAR(out.at(t, static_cast<std::int64_t>(f)), expected[f], 2e-2) << t;
      }
    }
  }
}

TEST_P(BackendTest, ASingleKeyGivesItsValue) {
  for (const DType dtype : kStorage) {
    const AttentionCase c{6, 2, 33};
    Sequence sequence(c, 1, rng_, 1e4f);
    CpuBackend backend(context());
    KvCache cache = sequence.cache(dtype);
    Output out(1, c.query_heads * c.head_dim);
    sequence.run(backend, cache, 0, 1, false, out);
    const std::vector<double> expected = sequence.expected(0, dtype);
    for (std::size_t f = 0; f < expected.size(); ++f) {
      EXPECT_EQ(out.at(0, static_cast<std::int64_t>(f)), static_cast<float>(expected[f]));
    }
  }
}

// ---- KV cache ----

TEST(KvCacheTest, PlacesAreAdjacentAndDisjoint) {
  const KvCacheOptions options{
      .layers = 3, .slots = 4, .capacity = 5, .kv_heads = 2, .head_dim = 8, .dtype = DType::kBF16};
  EXPECT_EQ(KvCache::bytes_per_token(options), 2u * 3 * 2 * 8 * 2);
  Result<KvCache> cache = KvCache::create(options);
  ASSERT_TRUE(cache.ok()) << cache.status().message();
  const std::byte* key = cache->key(0, 0, 0, 0);
  const std::byte* value = cache->value(0, 0, 0, 0);
  std::ptrdiff_t offset = 0;
  for (int layer = 0; layer < 3; ++layer) {
    for (std::int64_t slot = 0; slot < 4; ++slot) {
      for (std::int64_t head = 0; head < 2; ++head) {
        for (std::int64_t position = 0; position < 5; ++position, offset += 16) {
          EXPECT_EQ(cache->key(layer, slot, head, position) - key, offset);
          EXPECT_EQ(cache->value(layer, slot, head, position) - value, offset);
        }
      }
    }
  }
  std::memset(cache->key(0, 0, 0, 0), 1, static_cast<std::size_t>(offset));
  std::memset(cache->value(0, 0, 0, 0), 2, static_cast<std::size_t>(offset));
  KvCache moved = std::move(cache).value();
  EXPECT_EQ(moved.key(0, 0, 0, 0), key);
  EXPECT_EQ(moved.key(2, 3, 1, 4)[15], std::byte{1});
  EXPECT_EQ(moved.value(2, 3, 1, 4)[15], std::byte{2});
}

TEST(KvCacheTest, ReservesWithoutTouching) {
  Result<KvCache> cache = KvCache::create({.layers = 1,
                                           .slots = 1024,
                                           .capacity = 8192,
                                           .kv_heads = 8,
                                           .head_dim = 64});  // 16 GiB each
  ASSERT_TRUE(cache.ok()) << cache.status().message();
  *cache->key(0, 1023, 7, 8191) = std::byte{3};
  EXPECT_EQ(*cache->key(0, 1023, 7, 8191), std::byte{3});
}

TEST(KvCacheTest, AModelWithoutAttentionNeedsNothing) {
  const Result<KvCache> cache = KvCache::create({});
  ASSERT_TRUE(cache.ok()) << cache.status().message();
  EXPECT_EQ(KvCache::bytes_per_token(cache->options()), 0u);
}

TEST(KvCacheTest, ErrorsNameBothValues) {
  const KvCacheOptions good{.layers = 1, .slots = 1, .capacity = 1, .kv_heads = 1, .head_dim = 1};
  const auto message = [](const KvCacheOptions& options, StatusCode code) {
    const Result<KvCache> cache = KvCache::create(options);
    EXPECT_FALSE(cache.ok());
    EXPECT_EQ(cache.status().code(), code);
    return cache.status().message();
  };
  const auto expect_contains = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  KvCacheOptions options = good;
  options.layers = -2;
  expect_contains(message(options, StatusCode::kInvalidArgument),
                  "layers is -2, expected at least");
  options = good;
  options.slots = 0;
  expect_contains(message(options, StatusCode::kInvalidArgument),
                  "slots is 0, expected at least 1");
  options = good;
  options.head_dim = -1;
  expect_contains(message(options, StatusCode::kInvalidArgument), "head_dim is -1");
  options = good;
  options.dtype = DType::kI32;
  expect_contains(message(options, StatusCode::kUnsupported), "dtype i32, expected f32");
  options = good;
  options.capacity = std::numeric_limits<std::int64_t>::max() / 2;
  expect_contains(message(options, StatusCode::kResourceExhausted), "4611686018427387903 tokens");
  options.capacity = std::int64_t{1} << 55;  // a size that exists, address space that does not
  expect_contains(message(options, StatusCode::kResourceExhausted), "cannot reserve");
}

}  // namespace
}  // namespace replayssm
