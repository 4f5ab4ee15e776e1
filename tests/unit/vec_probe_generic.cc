#include "unit/vec_probe-inl.h"

namespace replayssm::testing {

const VecProbe& vec_probe_generic() { return vec_probe<cpu::GenericIsa>(); }

}  // namespace replayssm::testing
