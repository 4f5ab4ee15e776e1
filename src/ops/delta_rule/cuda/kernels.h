// The kernels that exist, one translation unit per pair of types and kind of decay
// (instantiations/).
#pragma once

#include "ops/delta_rule/cuda/config.h"
#include "ops/delta_rule/cuda/params.h"

namespace replayssm::cuda {

using DeltaRuleKernelFunction = void (*)(DeltaRuleCudaParams, DeltaRuleLaunch);

template <typename State, typename Act, bool kChannelDecay>
DeltaRuleKernelFunction delta_rule_step_function(DeltaRuleVariant variant);

}  // namespace replayssm::cuda
