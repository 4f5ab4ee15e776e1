#include "ops/operands.h"

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

}  // namespace replayssm
