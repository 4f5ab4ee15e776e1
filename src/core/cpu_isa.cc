#include <cstdlib>
#include <string>

#include "replayssm/cpu.h"

namespace replayssm {

const char* to_string(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kGeneric:
      return "generic";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

std::vector<CpuIsa> supported_isas() {
  std::vector<CpuIsa> isas{CpuIsa::kGeneric};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (avx2) {
    isas.push_back(CpuIsa::kAvx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      isas.push_back(CpuIsa::kAvx512);
    }
  }
#endif
  return isas;
}

Result<CpuIsa> select_isa() {
  const std::vector<CpuIsa> supported = supported_isas();
  const char* requested = std::getenv("REPLAYSSM_ISA");
  if (requested == nullptr || *requested == '\0') return supported.back();
  std::string names;
  for (const CpuIsa isa : supported) {
    if (std::string_view(requested) == to_string(isa)) return isa;
    names += names.empty() ? "" : ", ";
    names += to_string(isa);
  }
  return unsupported("REPLAYSSM_ISA: '", requested, "' cannot run here; this processor supports ",
                     names);
}

}  // namespace replayssm
