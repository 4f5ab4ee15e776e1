// Where memory lives and kernels run.
#pragma once

#include <cstdint>

namespace replayssm {

enum class DeviceKind : std::uint8_t { kCpu = 0, kCuda = 1 };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

const char* to_string(DeviceKind kind);

}  // namespace replayssm
