// Devices of the CUDA backend, as the library's own code asks for them.
#pragma once

#include <cstddef>

#include "replayssm/device.h"

namespace replayssm::cuda {

Result<int> device_count();

Result<DeviceProperties> device_properties(int index);

/// Properties of a device that launch configurations depend on.
struct CudaDeviceInfo {
  int index = 0;
  int multiprocessors = 0;
  int compute_capability = 0;  // 90 for sm_90
  std::size_t shared_per_block = 0;
  std::size_t shared_per_multiprocessor = 0;
};

/// Cheap: no memory query, and the device need not be the current one.
Result<CudaDeviceInfo> query_device(int index);

}  // namespace replayssm::cuda
