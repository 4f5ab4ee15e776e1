#include "ops/operands.h"

#include <cstring>

namespace replayssm {
namespace {

std::string shape_text(std::initializer_list<std::int64_t> shape) {
  std::string text = "(";
  for (const std::int64_t extent : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(extent);
  }
  return text + ")";
}

}  // namespace

Status check_vector(const char* name, const TensorView& view, std::int64_t size) {
  return check_packed(name, view, DType::kF32, {size});
}

Status check_packed(const char* name, const TensorView& view, DType dtype,
                    std::initializer_list<std::int64_t> shape) {
  bool matches = view.dtype == dtype && view.rank == static_cast<int>(shape.size());
  bool no_elements = false;
  int axis = 0;
  for (const std::int64_t extent : shape) {
    matches = matches && view.shape[axis++] == extent;
    no_elements = no_elements || extent == 0;
  }
  // Memory of no elements may be null.
  if (!matches || (view.empty() && !no_elements)) {
    return invalid_argument(name, " is ", view.empty() ? "empty" : to_string(view), ", expected ",
                            to_string(dtype), " ", shape_text(shape));
  }
  for (axis = 0; axis < view.rank; ++axis) {
    if (view.strides[axis] < 0) {
      return invalid_argument(name, " has stride ", view.strides[axis], " on axis ", axis,
                              ", expected at least 0");
    }
  }
  if (view.shape[view.rank - 1] > 1 && view.strides[view.rank - 1] != 1) {
    return invalid_argument(name, " has last stride ", view.strides[view.rank - 1],
                            ", expected 1 (contiguous)");
  }
  return {};
}

void zero_tokens(const TensorView& output, const StepRow& row) {
  const auto element = static_cast<std::int64_t>(size_of(output.dtype));
  for (std::int64_t t = 0; t < row.token_count; ++t) {
    std::byte* token = static_cast<std::byte*>(at_token(output, row.token_begin + t));
    for (std::int64_t h = 0; h < output.shape[1]; ++h) {
      std::memset(token + h * output.strides[1] * element, 0,
                  static_cast<std::size_t>(output.shape[2] * element));
    }
  }
}

}  // namespace replayssm
