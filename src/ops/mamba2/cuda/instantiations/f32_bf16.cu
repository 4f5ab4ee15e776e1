#include "ops/mamba2/cuda/kernel.cuh"

namespace replayssm::cuda {

RSSM_INSTANTIATE_MAMBA2(float, BF16)

}  // namespace replayssm::cuda
