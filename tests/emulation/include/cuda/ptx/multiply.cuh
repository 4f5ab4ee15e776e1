// For src/cuda/ptx/multiply.cuh.
#pragma once

#include <cstdint>

namespace replayssm::cuda::ptx {

inline std::int64_t multiply_wide(std::int32_t a, std::int32_t b) { return std::int64_t{a} * b; }

}  // namespace replayssm::cuda::ptx
