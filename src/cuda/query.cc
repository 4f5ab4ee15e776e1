#include "cuda/query.h"

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

}  // namespace replayssm::cuda
