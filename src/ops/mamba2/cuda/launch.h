// Launching the Mamba-2 CUDA kernels: checks, choice of a configuration, dispatch by type. Nothing
// here allocates or synchronizes, so that a step can be captured in a graph; on an error nothing
// has been launched.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/mamba2/cuda/config.h"
#include "ops/mamba2/cuda/params.h"
#include "replayssm/status.h"

namespace replayssm::cuda {

/// Whether there is a kernel for these shapes, limits and types.
Status check_mamba2_support(const Mamba2CudaParams& params);

/// Everything the host can know to be wrong, with what was found and what is allowed.
Status validate_mamba2(const Mamba2CudaParams& params);

/// One step of one layer, rows of every kind, with a configuration chosen for these parameters (its
/// choice depends on counts and shapes only, so it may be reused while they stay).
Status mamba2_cuda_step(const Mamba2CudaParams& params, const Mamba2CudaConfig& config,
                        cudaStream_t stream);

/// Chooses the configuration too.
Status mamba2_cuda_step(const Mamba2CudaParams& params, const CudaDeviceInfo& device,
                        cudaStream_t stream);

}  // namespace replayssm::cuda
