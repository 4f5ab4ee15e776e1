#include "ops/mamba2/cpu/kernel-inl.h"

namespace replayssm::cpu {

const Mamba2Kernels& mamba2_kernels_generic(DType checkpoint, DType activation) {
  return Mamba2KernelTable<GenericIsa>::get(checkpoint, activation);
}

}  // namespace replayssm::cpu
