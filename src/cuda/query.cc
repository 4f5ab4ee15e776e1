#include "cuda/query.h"

#include <type_traits>

#include "cuda/runtime.h"

namespace replayssm::cuda {

Result<int> device_count() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return unsupported("device is cuda, but this machine has none: ", cudaGetErrorString(error),
                       "; usable: cpu");
  }
  if (count == 0) return unsupported("device is cuda, but this machine has none; usable: cpu");
  return count;
}

Result<DeviceProperties> device_properties(int index) {
  RSSM_ASSIGN_OR_RETURN(const int count, device_count());
  if (index < 0 || index >= count) {
    return invalid_argument("device is cuda:", index,
                            ", this machine has cuda:0 to cuda:", count - 1);
  }
  const CurrentDevice current(index);
  RSSM_RETURN_IF_ERROR(current.status());
  cudaDeviceProp found{};
  RSSM_RETURN_IF_ERROR(to_status(cudaGetDeviceProperties(&found, index), "device query"));
  DeviceProperties out;
  out.name = found.name;
  out.compute_capability = 10 * found.major + found.minor;
  out.multiprocessors = found.multiProcessorCount;
  RSSM_RETURN_IF_ERROR(to_status(cudaMemGetInfo(&out.free_memory, &out.memory), "memory query"));
  return out;
}

Result<CudaDeviceInfo> query_device(int index) {
  CudaDeviceInfo info;
  info.index = index;
  const auto get = [&](cudaDeviceAttr attribute, auto& out) -> Status {
    int value = 0;
    RSSM_RETURN_IF_ERROR(
        to_status(cudaDeviceGetAttribute(&value, attribute, index), "device query"));
    out = static_cast<std::remove_reference_t<decltype(out)>>(value);
    return {};
  };
  int major = 0;
  int minor = 0;
  RSSM_RETURN_IF_ERROR(get(cudaDevAttrMultiProcessorCount, info.multiprocessors));
  RSSM_RETURN_IF_ERROR(get(cudaDevAttrMaxSharedMemoryPerBlockOptin, info.shared_per_block));
  RSSM_RETURN_IF_ERROR(
      get(cudaDevAttrMaxSharedMemoryPerMultiprocessor, info.shared_per_multiprocessor));
  RSSM_RETURN_IF_ERROR(get(cudaDevAttrComputeCapabilityMajor, major));
  RSSM_RETURN_IF_ERROR(get(cudaDevAttrComputeCapabilityMinor, minor));
  info.compute_capability = 10 * major + minor;
  return info;
}

}  // namespace replayssm::cuda
