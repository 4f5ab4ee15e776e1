// What kernels that move 16 bytes at a time ask of addresses and strides.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "replayssm/cursor.h"
#include "replayssm/dtype.h"
#include "replayssm/status.h"

namespace replayssm::cuda {

inline Status check_pointer(const char* name, const void* at) {
  if (at == nullptr) return invalid_argument(name, " is null, expected device memory");
  const auto rest = reinterpret_cast<std::uintptr_t>(at) % 16;
  if (rest == 0) return {};
  return invalid_argument(name, " is at an address that is ", rest, " mod 16, expected 0");
}

/// The most of what kernels count in 32 bits: tokens, which they count a few beyond the last, and
/// elements of a stride.
inline constexpr std::int64_t kMostIn32Bits = (std::int64_t{1} << 31) - 1024;

/// Kernels multiply indices by strides of 32 bits, to 64 (state/cuda/row_of_step.cuh), but for
/// slots'.
struct Reach {
  const char* name;
  std::int64_t elements;
};

inline Status check_reach(std::initializer_list<Reach> strides) {
  for (const Reach& s : strides) {
    if (s.elements >= -kMostIn32Bits && s.elements <= kMostIn32Bits) continue;
    return unsupported(s.name, " is ", s.elements, " elements, kernels take up to ", kMostIn32Bits);
  }
  return {};
}

/// Of what is moved 16 bytes at a time.
struct Stride {
  const char* name;
  std::int64_t elements;
  DType dtype;
  bool of_slots = false;
};

inline Status check_strides(std::initializer_list<Stride> strides) {
  for (const Stride& s : strides) {
    const std::int64_t bytes = s.elements * static_cast<std::int64_t>(size_of(s.dtype));
    if (bytes % 16 != 0) {
      return invalid_argument(s.name, " is ", s.elements, " elements or ", bytes,
                              " bytes, expected a multiple of 16 bytes");
    }
    if (!s.of_slots) RSSM_RETURN_IF_ERROR(check_reach({{s.name, s.elements}}));
  }
  return {};
}

/// Limits every recurrence's kernels share, and counts.
inline Status check_step_limits(const ReplayLimits& limits, std::int64_t rows,
                                std::int64_t tokens) {
  if (limits.draft_capacity < 1 || limits.draft_capacity > limits.window) {
    return invalid_argument("draft capacity T is ", limits.draft_capacity,
                            ", expected 1 to the window L = ", limits.window);
  }
  if (limits.window > ReplayLimits::kMaxWindow ||
      limits.draft_capacity > ReplayLimits::kMaxDraftCapacity) {
    return unsupported("window ", limits.window, " and draft capacity ", limits.draft_capacity,
                       ", kernels take up to ", ReplayLimits::kMaxWindow, " and ",
                       ReplayLimits::kMaxDraftCapacity);
  }
  if (rows < 0 || tokens < 0) {
    return invalid_argument(rows, " rows and ", tokens, " tokens, expected none negative");
  }
  if (tokens > kMostIn32Bits) {
    return unsupported(tokens, " tokens in a step, kernels take up to ", kMostIn32Bits);
  }
  return {};
}

}  // namespace replayssm::cuda
