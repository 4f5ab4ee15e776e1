#include "backend/cpu/kernels-inl.h"
#include "backend/cpu/kernels_isa.h"

namespace replayssm::cpu {

constinit const BackendKernels kAvx2BackendKernels = make_backend_kernels<Avx2Isa>();

}  // namespace replayssm::cpu
