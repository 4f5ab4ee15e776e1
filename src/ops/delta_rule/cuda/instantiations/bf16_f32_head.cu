#include "ops/delta_rule/cuda/kernel.cuh"

namespace replayssm::cuda {

template DeltaRuleKernelFunction delta_rule_step_function<BF16, float, false>(
    DeltaRuleVariant variant);

}  // namespace replayssm::cuda
