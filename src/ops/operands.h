// Checks and addressing of op operands.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "replayssm/status.h"
#include "replayssm/step.h"
#include "replayssm/tensor.h"

namespace replayssm {

/// `view` is a contiguous f32 vector of `size` elements.
Status check_vector(const char* name, const TensorView& view, std::int64_t size);

/// `view` has this type and shape, its last dimension is contiguous and no stride is negative.
Status check_packed(const char* name, const TensorView& view, DType dtype,
                    std::initializer_list<std::int64_t> shape);

/// Address of a token's data; null for an empty view.
inline void* at_token(const TensorView& view, std::int64_t token) {
  if (view.empty()) return nullptr;
  return static_cast<std::byte*>(view.data) +
         token * view.strides[0] * static_cast<std::int64_t>(size_of(view.dtype));
}

/// Zeros a row's tokens of an output (tokens, heads, inner).
void zero_tokens(const TensorView& output, const StepRow& row);

}  // namespace replayssm
