#include "ops/delta_rule/cpu/kernel-inl.h"

namespace replayssm::cpu {

const DeltaRuleKernels& delta_rule_kernels_avx2(DType checkpoint, bool channel_decay) {
  return DeltaRuleKernelTable<Avx2Isa>::get(checkpoint, channel_decay);
}

}  // namespace replayssm::cpu
