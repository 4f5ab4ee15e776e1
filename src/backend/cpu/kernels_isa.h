// The table each kernels_<isa>.cc defines. Data rather than functions, so that nothing compiled for
// a newer processor runs before the choice is made.
#pragma once

#include "backend/cpu/kernels.h"

namespace replayssm::cpu {

extern const BackendKernels kGenericBackendKernels;
extern const BackendKernels kAvx2BackendKernels;
extern const BackendKernels kAvx512BackendKernels;

}  // namespace replayssm::cpu
