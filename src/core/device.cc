#include "replayssm/device.h"

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

}  // namespace replayssm
