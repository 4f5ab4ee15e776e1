#include "ops/mamba2/cpu/kernel-inl.h"

namespace replayssm::cpu {

const Mamba2Kernels& mamba2_kernels_generic(bool bf16_checkpoint, bool bf16_activation) {
  return Mamba2KernelTable<GenericIsa>::kTable[bf16_checkpoint][bf16_activation];
}

}  // namespace replayssm::cpu
