// Launching the Mamba-2 CUDA kernels: checks, choice of a configuration, dispatch by type. Nothing
// here allocates or synchronizes, so that a step can be captured in a graph; on an error nothing
// has been launched.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/mamba2/cuda/config.h"
#include "ops/mamba2/cuda/params.h"
#include "replayssm/status.h"

namespace replayssm::cuda {

Result<CudaDeviceInfo> query_device(int index);

/// Everything the host can know to be wrong, with what was found and what is allowed.
Status validate_mamba2(const Mamba2CudaParams& params);

/// One step of one layer, rows of every kind, with a configuration chosen for these parameters (its
/// choice depends on counts and shapes only, so it may be reused while they stay).
Status mamba2_cuda_step(const Mamba2CudaParams& params, const Mamba2CudaConfig& config,
                        cudaStream_t stream);

/// Chooses the configuration too.
Status mamba2_cuda_step(const Mamba2CudaParams& params, const CudaDeviceInfo& device,
                        cudaStream_t stream);

/// Checks a step's rows, resolves their cursors, and puts those that flush first: a flush is many
/// times the work of a replay, so begun last it would be what a launch waits for. Once per step,
/// before its first layer. A row that names what does not exist becomes padding and is reported in
/// the error word. Results do not depend on the order.
Status cuda_plan_step(const PlanParams& params, cudaStream_t stream);

/// Moves the cursors of all rows by their accepted counts. A row whose count is not allowed (0 to
/// its tokens; all of a committed row's) keeps its cursor and is reported in the error word.
Status cuda_commit(const CommitParams& params, cudaStream_t stream);

}  // namespace replayssm::cuda
