#include "ops/causal_conv1d/cpu/kernel-inl.h"

namespace replayssm::cpu {

CausalConv1dFunction causal_conv1d_kernel_avx2(DType activation) {
  return causal_conv1d_function<Avx2Isa>(activation);
}

}  // namespace replayssm::cpu
