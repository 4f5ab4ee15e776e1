// The kernels that exist, one translation unit per pair of types (instantiations/).
#pragma once

#include "ops/mamba2/cuda/config.h"
#include "ops/mamba2/cuda/params.h"

namespace replayssm::cuda {

using Mamba2KernelFunction = void (*)(Mamba2CudaParams, Mamba2Launch);

/// The kernel for a state size and variant, or null.
template <typename State, typename Act>
Mamba2KernelFunction mamba2_step_function(int state_size, Mamba2Variant variant);

/// Kernels with bf16 activations whose tentative rows read a copy.
template <typename State>
Mamba2KernelFunction mamba2_copy_step_function(ReadCopyFormat format, int state_size,
                                               Mamba2Variant variant);

}  // namespace replayssm::cuda
