// For src/cuda/ptx/select.cuh.
#pragma once

namespace replayssm::cuda::ptx {

inline float select(bool condition, float yes, float no) { return condition ? yes : no; }

}  // namespace replayssm::cuda::ptx
