#include "ops/mamba2/cpu/kernel-inl.h"

namespace replayssm::cpu {

const Mamba2Kernels& mamba2_kernels_avx512(bool bf16_checkpoint, bool bf16_activation) {
  return Mamba2KernelTable<Avx512Isa>::kTable[bf16_checkpoint][bf16_activation];
}

}  // namespace replayssm::cpu
