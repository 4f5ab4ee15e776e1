#include "unit/vec_probe-inl.h"

namespace replayssm::testing {

const VecProbe& vec_probe_avx2() { return vec_probe<cpu::Avx2Isa>(); }

}  // namespace replayssm::testing
