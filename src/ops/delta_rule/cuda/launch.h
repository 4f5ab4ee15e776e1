// Launching the delta rule's CUDA kernels: checks, choice of a configuration, dispatch by type.
// Nothing here allocates or synchronizes, so that a step can be captured in a graph; on an error
// nothing has been launched.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/delta_rule/cuda/config.h"
#include "ops/delta_rule/cuda/params.h"
#include "replayssm/status.h"

namespace replayssm::cuda {

/// Whether there is a kernel for these shapes, limits and types.
Status check_delta_rule_support(const DeltaRuleCudaParams& params);

/// Everything the host can know to be wrong, with what was found and what is allowed.
Status validate_delta_rule(const DeltaRuleCudaParams& params);

/// One step of one layer, rows of every kind, with a configuration chosen for these parameters (its
/// choice depends on counts and shapes only, so it may be reused while they stay).
Status delta_rule_cuda_step(const DeltaRuleCudaParams& params, const DeltaRuleCudaConfig& config,
                            cudaStream_t stream);

/// Chooses the configuration too.
Status delta_rule_cuda_step(const DeltaRuleCudaParams& params, const CudaDeviceInfo& device,
                            cudaStream_t stream);

}  // namespace replayssm::cuda
