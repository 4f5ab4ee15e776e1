#include "ops/delta_rule/cuda/kernel.cuh"

namespace replayssm::cuda {

template DeltaRuleKernelFunction delta_rule_step_function<F16, BF16, false>(
    DeltaRuleVariant variant);

}  // namespace replayssm::cuda
