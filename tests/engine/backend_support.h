// What tests of the CPU backend have in common: operands that end at an unmapped page, outputs that
// are NaN inside and outside of what an op may write, a fixture per instruction set.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/kernels.h"

namespace replayssm::test {

inline constexpr DType kStorage[] = {DType::kF32, DType::kBF16, DType::kF16};
inline const float kNan = std::bit_cast<float>(0x7fc0beefu);  // recognisable: "nobody wrote this"

inline std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }
inline bool untouched(float x) { return bits(x) == bits(kNan); }

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

inline void copy_rows(const Operand& from, std::int64_t rows, std::int64_t cols, Output& to) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) to.row(r)[c] = from.at(r, c);
  }
}

inline double sigmoid_of(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double silu_of(double x) { return x * sigmoid_of(x); }

#define EXPECT_RELATIVE(actual, expected, tolerance)                                     \
  EXPECT_LE(std::abs(static_cast<double>(actual) - (expected)),                          \
            (tolerance) * std::abs(expected) + std::numeric_limits<float>::denorm_min()) \
      << "actual " << (actual) << ", expected " << (expected)

class BackendTest : public ::testing::TestWithParam<CpuIsa> {
 protected:
  CpuIsa isa() const { return GetParam(); }
  const cpu::BackendKernels& kernels() const { return cpu::backend_kernels(isa()); }
  CpuContext context(ThreadPool* pool = nullptr) const { return {pool, isa()}; }
  std::mt19937 rng_{7};
};

}  // namespace replayssm::test
