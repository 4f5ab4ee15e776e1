#include "unit/vec_probe-inl.h"

namespace replayssm::testing {

const VecProbe& vec_probe_avx512() { return vec_probe<cpu::Avx512Isa>(); }

}  // namespace replayssm::testing
