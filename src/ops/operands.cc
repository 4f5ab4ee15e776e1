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
  bool matches =
      !view.empty() && view.dtype == dtype && view.rank == static_cast<int>(shape.size());
  int axis = 0;
  for (const std::int64_t extent : shape) {
    matches = matches && view.shape[axis] == extent && view.strides[axis] >= 0;
    ++axis;
  }
  if (!matches) {
    return invalid_argument(name, " is ", view.empty() ? "empty" : to_string(view), ", expected ",
                            to_string(dtype), " ", shape_text(shape));
  }
  if (view.shape[view.rank - 1] > 1 && view.strides[view.rank - 1] != 1) {
    return invalid_argument(name, " has last stride ", view.strides[view.rank - 1],
                            ", expected 1 (contiguous)");
  }
  return {};
}

}  // namespace replayssm
