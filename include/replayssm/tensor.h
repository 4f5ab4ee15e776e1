// TensorView: a non-owning, typed, strided window on memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "replayssm/dtype.h"

namespace replayssm {

/// Non-owning strided tensor. Strides count elements, are 64-bit, and are always explicit: a stride
/// never implies a size, because pool pages and packed projections are larger than their contents.
struct TensorView {
  static constexpr int kMaxRank = 5;

  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};  // in elements

  bool empty() const { return data == nullptr; }

  std::int64_t numel() const {
    std::int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }

  /// Densely packed view, last dimension contiguous.
  static TensorView contiguous(void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView view;
    view.data = data;
    view.dtype = dtype;
    view.rank = static_cast<int>(shape.size());
    int axis = 0;
    for (const std::int64_t extent : shape) view.shape[axis++] = extent;
    std::int64_t stride = 1;
    for (int i = view.rank - 1; i >= 0; --i) {
      view.strides[i] = stride;
      stride *= view.shape[i];
    }
    return view;
  }

  /// Read-only data viewed through the same type; ops document which operands they write.
  static TensorView contiguous(const void* data, DType dtype,
                               std::initializer_list<std::int64_t> shape) {
    return contiguous(const_cast<void*>(data), dtype, shape);
  }
};

/// "f32 (4, 64, 128)".
std::string to_string(const TensorView& view);

}  // namespace replayssm
