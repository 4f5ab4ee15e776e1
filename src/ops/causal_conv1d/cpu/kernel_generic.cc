#include "ops/causal_conv1d/cpu/kernel-inl.h"

namespace replayssm::cpu {

CausalConv1dFunction causal_conv1d_kernel_generic(bool bf16_activation) {
  return bf16_activation ? CausalConv1dKernel<GenericIsa, BF16>::run
                         : CausalConv1dKernel<GenericIsa, float>::run;
}

}  // namespace replayssm::cpu
