#include "ops/delta_rule/cpu/kernel-inl.h"

namespace replayssm::cpu {

const DeltaRuleKernels& delta_rule_kernels_avx512(DType checkpoint, bool channel_decay) {
  return DeltaRuleKernelTable<Avx512Isa>::get(checkpoint, channel_decay);
}

}  // namespace replayssm::cpu
