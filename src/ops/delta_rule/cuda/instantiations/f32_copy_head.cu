#include "ops/delta_rule/cuda/kernel.cuh"

namespace replayssm::cuda {

template DeltaRuleKernelFunction delta_rule_copy_step_function<float, false>(
    ReadCopyFormat format, DeltaRuleVariant variant);

}  // namespace replayssm::cuda
