// A kernel among those before and after it in its stream (programmatic dependent launch), sm_90 and
// later. Both do nothing in a kernel that was launched without overlap (cuda/language.cuh).
#pragma once

namespace replayssm::cuda::ptx {

/// Until the kernels before this one are done and what they wrote can be seen. Before the first
/// access to memory, by every thread.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Once all blocks have come here, those of the next kernel may take what room there is, and wait.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace replayssm::cuda::ptx
