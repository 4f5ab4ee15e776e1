#include "replayssm/device.h"

#include <thread>

#include "cuda/query.h"
#include "replayssm/cpu.h"

namespace replayssm {

const char* to_string(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::kCpu:
      return "cpu";
    case DeviceKind::kCuda:
      return "cuda";
  }
  return "unknown";
}

std::string to_string(const Device& device) {
  if (device.kind == DeviceKind::kCpu) return to_string(device.kind);
  return std::string(to_string(device.kind)) + ":" + std::to_string(device.index);
}

Result<int> device_count(DeviceKind kind) {
  return kind == DeviceKind::kCpu ? Result<int>(1) : cuda::device_count();
}

Result<DeviceProperties> device_properties(const Device& device) {
  if (device.kind == DeviceKind::kCuda) return cuda::device_properties(device.index);
  if (device.index != 0) {
    return invalid_argument("device is cpu:", device.index, ", there is only cpu:0");
  }
  DeviceProperties properties;
  properties.name = std::string("cpu ") + to_string(supported_isas().back());
  properties.multiprocessors = static_cast<int>(std::thread::hardware_concurrency());
  return properties;
}

}  // namespace replayssm
