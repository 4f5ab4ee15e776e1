#include "ops/causal_conv1d/cpu/kernel-inl.h"

namespace replayssm::cpu {

CausalConv1dFunction causal_conv1d_kernel_avx512(bool bf16_activation) {
  return bf16_activation ? CausalConv1dKernel<Avx512Isa, BF16>::run
                         : CausalConv1dKernel<Avx512Isa, float>::run;
}

}  // namespace replayssm::cpu
