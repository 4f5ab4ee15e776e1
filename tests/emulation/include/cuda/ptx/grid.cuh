// Kernels run one after the other, for src/cuda/ptx/grid.cuh.
#pragma once

namespace replayssm::cuda::ptx {

inline void wait_for_earlier_kernels() {}
inline void let_next_kernel_begin() {}

}  // namespace replayssm::cuda::ptx
