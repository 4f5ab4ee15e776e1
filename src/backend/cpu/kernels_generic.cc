#include "backend/cpu/kernels-inl.h"
#include "backend/cpu/kernels_isa.h"

namespace replayssm::cpu {

constinit const BackendKernels kGenericBackendKernels = make_backend_kernels<GenericIsa>();

}  // namespace replayssm::cpu
