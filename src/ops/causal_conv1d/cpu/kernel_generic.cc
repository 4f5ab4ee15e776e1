#include "ops/causal_conv1d/cpu/kernel-inl.h"

namespace replayssm::cpu {

CausalConv1dFunction causal_conv1d_kernel_generic(DType activation) {
  return causal_conv1d_function<GenericIsa>(activation);
}

}  // namespace replayssm::cpu
