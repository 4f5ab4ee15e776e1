#include "ops/delta_rule/cpu/kernel-inl.h"

namespace replayssm::cpu {

const DeltaRuleKernels& delta_rule_kernels_generic(DType checkpoint, bool channel_decay) {
  return DeltaRuleKernelTable<GenericIsa>::get(checkpoint, channel_decay);
}

}  // namespace replayssm::cpu
