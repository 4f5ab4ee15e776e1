// The kernels that exist, one translation unit per pair of types and kind of decay
// (instantiations/).
#pragma once

#include "ops/delta_rule/cuda/config.h"
#include "ops/delta_rule/cuda/params.h"

namespace replayssm::cuda {

using DeltaRuleKernelFunction = void (*)(DeltaRuleCudaParams, DeltaRuleLaunch);

/// All variants with bf16 activations, else kAny or null.
template <typename State, typename Act, bool kChannelDecay>
DeltaRuleKernelFunction delta_rule_step_function(DeltaRuleVariant variant);

/// Kernels with bf16 activations whose tentative rows read a copy: kSingle, kSmall and kAny, else
/// null.
template <typename State, bool kChannelDecay>
DeltaRuleKernelFunction delta_rule_copy_step_function(ReadCopyFormat format,
                                                      DeltaRuleVariant variant);

}  // namespace replayssm::cuda
