#include "backend/cpu/kernels-inl.h"
#include "backend/cpu/kernels_isa.h"

namespace replayssm::cpu {

constinit const BackendKernels kAvx512BackendKernels = make_backend_kernels<Avx512Isa>();

}  // namespace replayssm::cpu
