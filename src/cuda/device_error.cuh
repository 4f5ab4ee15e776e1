// Where kernels leave what they find wrong.
#pragma once

#include <cstdint>

#include "replayssm/cuda.h"

namespace replayssm::cuda {

/// Keeps the first error: later ones do not overwrite it.
__device__ inline void report_error(DeviceError* error, DeviceError::What what, std::int64_t row,
                                    std::int64_t found, std::int64_t allowed) {
  if (error == nullptr) return;
  if (atomicCAS(reinterpret_cast<int*>(&error->what), DeviceError::kNone, what) != 0) return;
  error->row = static_cast<std::int32_t>(row);
  error->found = found;
  error->allowed = allowed;
}

}  // namespace replayssm::cuda
