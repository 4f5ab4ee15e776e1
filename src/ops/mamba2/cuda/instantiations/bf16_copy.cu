#include "ops/mamba2/cuda/kernel.cuh"

namespace replayssm::cuda {

template Mamba2KernelFunction mamba2_copy_step_function<BF16>(ReadCopyFormat format, int state_size,
                                                              Mamba2Variant variant);

}  // namespace replayssm::cuda
