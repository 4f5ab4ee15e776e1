// Where memory lives and kernels run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "replayssm/status.h"

namespace replayssm {

enum class DeviceKind : std::uint8_t { kCpu = 0, kCuda = 1 };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu", "cuda".
const char* to_string(DeviceKind kind);
/// "cpu", "cuda:0".
std::string to_string(const Device& device);

/// How many devices of a kind can be used: 1 for the CPU. For CUDA an error says why there is none:
/// the build is without it, or the machine has no driver or no GPU.
Result<int> device_count(DeviceKind kind);

struct DeviceProperties {
  std::string name;
  int compute_capability = 0;  // 90 for sm_90; 0 for the CPU. Kernels need at least 80
  int multiprocessors = 0;     // processors of a CPU
  std::size_t memory = 0;      // bytes; 0 for the CPU
  std::size_t free_memory = 0;
};

/// Refuses a device that is not there, naming it and how many there are.
Result<DeviceProperties> device_properties(const Device& device);

}  // namespace replayssm
