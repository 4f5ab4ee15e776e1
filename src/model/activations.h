// Activation matrices of a forward pass, and slices of them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "replayssm/status.h"
#include "replayssm/tensor.h"

namespace replayssm {

/// f32 matrices by number, kept from one pass to the next and grown when a pass needs more.
class Activations {
 public:
  Result<TensorView> matrix(Backend& backend, int id, std::int64_t rows, std::int64_t columns) {
    if (static_cast<std::size_t>(id) >= buffers_.size()) {
      buffers_.resize(static_cast<std::size_t>(id) + 1);
    }
    Buffer& buffer = buffers_[static_cast<std::size_t>(id)];
    const auto bytes = static_cast<std::size_t>(rows * columns) * sizeof(float);
    if (bytes > buffer.bytes) {
      buffer.memory = backend.allocate(bytes);
      buffer.bytes = buffer.memory == nullptr ? 0 : bytes;
      if (buffer.memory == nullptr) {
        return resource_exhausted("cannot allocate ", bytes, " bytes of activations");
      }
    }
    return TensorView::contiguous(buffer.memory.get(), DType::kF32, {rows, columns});
  }

 private:
  struct Buffer {
    std::shared_ptr<std::byte> memory;
    std::size_t bytes = 0;
  };
  std::vector<Buffer> buffers_;
};

/// Columns [first, first + count) of a matrix, without a copy.
inline TensorView columns(TensorView matrix, std::int64_t first, std::int64_t count) {
  matrix.data = matrix.as<float>() + first;
  matrix.shape[1] = count;
  return matrix;
}

/// A contiguous (tokens, parts * inner) as a matrix (tokens * parts, inner), without a copy.
inline TensorView part_rows(TensorView matrix, std::int64_t parts) {
  matrix.shape[0] *= parts;
  matrix.shape[1] /= parts;
  matrix.strides[0] = matrix.shape[1];
  return matrix;
}

/// (tokens, parts * inner) as (tokens, parts, inner), without a copy.
inline TensorView split(TensorView matrix, std::int64_t parts) {
  const std::int64_t inner = matrix.shape[1] / parts;
  matrix.rank = 3;
  matrix.shape[1] = parts;
  matrix.shape[2] = inner;
  matrix.strides[1] = inner;
  matrix.strides[2] = 1;
  return matrix;
}

}  // namespace replayssm
