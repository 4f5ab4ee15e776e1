#include "ops/mamba2/cuda/kernel.cuh"

namespace replayssm::cuda {

template Mamba2KernelFunction mamba2_step_function<F16, BF16>(int state_size,
                                                              Mamba2Variant variant);

}  // namespace replayssm::cuda
