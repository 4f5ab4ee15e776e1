#include "ops/mamba2/cpu/kernel-inl.h"

namespace replayssm::cpu {

const Mamba2Kernels& mamba2_kernels_avx512(DType checkpoint, DType activation) {
  return Mamba2KernelTable<Avx512Isa>::get(checkpoint, activation);
}

}  // namespace replayssm::cpu
