// For src/cuda/ptx/select.cuh.
#pragma once

#include <cmath>

namespace replayssm::cuda::ptx {

inline float select(bool condition, float yes, float no) { return condition ? yes : no; }

inline float max_or_nan(float x, float y) {
  return std::isnan(x) || std::isnan(y) ? NAN : std::fmax(x, y);
}

}  // namespace replayssm::cuda::ptx
