#include "backend/cpu/kernels.h"

#include "backend/cpu/kernels-inl.h"
#include "backend/cpu/kernels_isa.h"

namespace replayssm::cpu {

const BackendKernels& backend_kernels(CpuIsa isa) {
#if defined(__x86_64__)
  if (isa == CpuIsa::kAvx512) return kAvx512BackendKernels;
  if (isa == CpuIsa::kAvx2) return kAvx2BackendKernels;
#endif
  return kGenericBackendKernels;
}

std::int64_t attention_scratch_floats(std::int64_t queries, std::int64_t head_dim) {
  return queries * (padded_head_dim(head_dim) + kKeyBlock);
}

}  // namespace replayssm::cpu
