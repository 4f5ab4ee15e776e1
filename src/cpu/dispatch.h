// Run-time choice among the per-instruction-set translation units of a kernel.
#pragma once

#include "replayssm/cpu.h"

namespace replayssm::cpu {

/// RSSM_DISPATCH_ISA(isa, f, args...) calls f_generic, f_avx2 or f_avx512.
#if defined(__x86_64__)
#define RSSM_DISPATCH_ISA(isa, function, ...)                \
  ((isa) == CpuIsa::kAvx512 ? function##_avx512(__VA_ARGS__) \
   : (isa) == CpuIsa::kAvx2 ? function##_avx2(__VA_ARGS__)   \
                            : function##_generic(__VA_ARGS__))
#else
#define RSSM_DISPATCH_ISA(isa, function, ...) \
  (static_cast<void>(isa), function##_generic(__VA_ARGS__))
#endif

}  // namespace replayssm::cpu
