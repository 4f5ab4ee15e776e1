#include "ops/delta_rule/cpu/kernel-inl.h"

namespace replayssm::cpu {

const DeltaRuleKernels& delta_rule_kernels_avx2(bool bf16_checkpoint, bool bf16_activation,
                                                bool channel_decay) {
  return DeltaRuleKernelTable<Avx2Isa>::get(bf16_checkpoint, bf16_activation, channel_decay);
}

}  // namespace replayssm::cpu
