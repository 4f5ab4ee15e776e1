#include "ops/mamba2/cuda/kernel.cuh"

namespace replayssm::cuda {

template Mamba2KernelFunction mamba2_step_function<BF16, float>(int state_size,
                                                                Mamba2Variant variant);

}  // namespace replayssm::cuda
