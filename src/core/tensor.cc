#include "replayssm/tensor.h"

namespace replayssm {

std::string to_string(const TensorView& view) {
  std::string text = to_string(view.dtype);
  text += " (";
  for (int i = 0; i < view.rank; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(view.shape[i]);
  }
  text += ")";
  return text;
}

}  // namespace replayssm
