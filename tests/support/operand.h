// Operands as models pass them: columns of a wider (tokens, pitch) buffer, with guard values in
// every element an op has no business with.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <span>
#include <vector>

#include "replayssm/dtype.h"
#include "replayssm/tensor.h"

namespace replayssm::testing {

inline float round_to(DType dtype, float x) {
  return dtype == DType::kBF16  ? to_float(to_bf16(x))
         : dtype == DType::kF16 ? to_float(to_f16(x))
                                : x;
}

/// A NaN that no arithmetic produces: "nobody wrote this".
inline const float kUnwritten = std::bit_cast<float>(0x7fd5a5a5u);

inline float load_element(DType dtype, const std::byte* data, std::int64_t index) {
  if (dtype == DType::kBF16) {
    BF16 x;
    std::memcpy(&x, data + index * 2, 2);
    return to_float(x);
  }
  if (dtype == DType::kF16) {
    F16 x;
    std::memcpy(&x, data + index * 2, 2);
    return to_float(x);
  }
  float x;
  std::memcpy(&x, data + index * 4, 4);
  return x;
}

inline void store_element(DType dtype, std::byte* data, std::int64_t index, float value) {
  if (dtype == DType::kBF16) {
    const BF16 x = to_bf16(value);
    std::memcpy(data + index * 2, &x, 2);
  } else if (dtype == DType::kF16) {
    const F16 x = to_f16(value);
    std::memcpy(data + index * 2, &x, 2);
  } else {
    std::memcpy(data + index * 4, &value, 4);
  }
}

/// Bytes of memory at a multiple of 64.
class AlignedBytes {
 public:
  explicit AlignedBytes(std::size_t bytes, std::byte fill = std::byte{0})
      : memory_(bytes + 64, fill), bytes_(bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    offset_ = (64 - address % 64) % 64;
  }
  std::byte* data() { return memory_.data() + offset_; }
  std::span<std::byte> span() { return {data(), bytes_}; }

 private:
  std::vector<std::byte> memory_;
  std::size_t bytes_;
  std::size_t offset_ = 0;
};

/// A (tokens, pitch) buffer whose elements start as kUnwritten.
class TokenBuffer {
 public:
  TokenBuffer(DType dtype, std::int64_t tokens, std::int64_t pitch)
      : dtype_(dtype),
        tokens_(tokens),
        pitch_(pitch),
        memory_(static_cast<std::size_t>(tokens * pitch) * size_of(dtype)) {
    for (std::int64_t i = 0; i < tokens * pitch; ++i) {
      store_element(dtype_, memory_.data(), i, kUnwritten);
    }
  }

  /// (tokens, outer, inner) or (tokens, inner) starting at `column`; rows of `inner` elements are
  /// `outer_stride` apart.
  TensorView slice(std::int64_t column, std::int64_t outer, std::int64_t inner,
                   std::int64_t outer_stride) {
    TensorView view;
    view.data = memory_.data() + static_cast<std::size_t>(column) * size_of(dtype_);
    view.dtype = dtype_;
    view.rank = 3;
    view.shape = {tokens_, outer, inner};
    view.strides = {pitch_, outer_stride, 1};
    return view;
  }
  TensorView slice(std::int64_t column, std::int64_t inner) {
    TensorView view = slice(column, 1, inner, 1);
    view.rank = 2;
    view.shape = {tokens_, inner};
    view.strides = {pitch_, 1};
    return view;
  }

  const std::vector<std::byte>& bytes() const { return memory_; }
  std::byte* data() { return memory_.data(); }
  DType dtype() const { return dtype_; }

 private:
  DType dtype_;
  std::int64_t tokens_;
  std::int64_t pitch_;
  std::vector<std::byte> memory_;
};

/// Flat index, in elements, of (token, i) of a view, with i counting the token's elements densely.
inline std::int64_t element_of(const TensorView& view, std::int64_t token, std::int64_t i) {
  std::int64_t index = token * view.strides[0];
  for (int axis = view.rank - 1; axis >= 1; --axis) {
    index += i % view.shape[axis] * view.strides[axis];
    i /= view.shape[axis];
  }
  return index;
}

inline void set_token(const TensorView& view, std::int64_t token, std::span<const float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_element(view.dtype, static_cast<std::byte*>(view.data),
                  element_of(view, token, static_cast<std::int64_t>(i)), values[i]);
  }
}

inline std::vector<float> get_token(const TensorView& view, std::int64_t token) {
  std::int64_t size = 1;
  for (int axis = 1; axis < view.rank; ++axis) size *= view.shape[axis];
  std::vector<float> values(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < size; ++i) {
    values[static_cast<std::size_t>(i)] = load_element(
        view.dtype, static_cast<const std::byte*>(view.data), element_of(view, token, i));
  }
  return values;
}

}  // namespace replayssm::testing
