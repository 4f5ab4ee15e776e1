// Devices of the CUDA backend, as the library's own code asks for them.
#pragma once

#include "replayssm/device.h"

namespace replayssm::cuda {

Result<int> device_count();

Result<DeviceProperties> device_properties(int index);

}  // namespace replayssm::cuda
