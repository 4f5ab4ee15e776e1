// A build without CUDA: what it says when asked for it.
#include "cuda/query.h"
#include "state/device_pool.h"

namespace replayssm {

bool has_kernels_for(DeviceKind kind) { return kind == DeviceKind::kCpu; }

Result<std::unique_ptr<DevicePool>> create_device_pool(const DevicePoolPlan& plan) {
  return unsupported("device is ", to_string(plan.options->device), ", this build has: cpu");
}

namespace cuda {

Result<int> device_count() { return unsupported("device is cuda, this build has: cpu"); }

Result<DeviceProperties> device_properties(int index) {
  return unsupported("device is cuda:", index, ", this build has: cpu");
}

}  // namespace cuda
}  // namespace replayssm
