// The CUDA runtime's errors and current device.
#pragma once

#include <cuda_runtime_api.h>

#include "replayssm/status.h"

namespace replayssm::cuda {

inline Status to_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  // A failed call leaves its error behind as the thread's last one too; it has been reported now.
  cudaGetLastError();
  const StatusCode code =
      error == cudaErrorMemoryAllocation ? StatusCode::kResourceExhausted : StatusCode::kInternal;
  return make_status(code, what, ": ", cudaGetErrorString(error));
}

/// An error that earlier work of this thread or device left behind; `what` has not been launched.
inline Status check_earlier(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return {};
  return make_status(StatusCode::kInternal, what,
                     " found an error of earlier CUDA work: ", cudaGetErrorString(error));
}

/// Makes a device the thread's current one for a scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index) {
    error_ = cudaGetDevice(&previous_);
    if (error_ == cudaSuccess && previous_ != index) {
      error_ = cudaSetDevice(index);
      restores_ = error_ == cudaSuccess;
    }
  }
  ~CurrentDevice() {
    if (restores_) cudaSetDevice(previous_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  Status status() const { return to_status(error_, "choice of the CUDA device"); }

 private:
  int previous_ = 0;
  cudaError_t error_ = cudaSuccess;
  bool restores_ = false;
};

}  // namespace replayssm::cuda
