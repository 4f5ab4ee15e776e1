// Gate functions of the CPU backend. Prompt, decode, verify, flush and materialize all call these,
// so a sequence sees one gate whatever path its tokens took.
#pragma once

#include <cmath>

#include "replayssm/dtype.h"

namespace replayssm::cpu {

/// log(1 + e^u); u itself above 20, where the difference is below half an ulp (every reference
/// implementation of these models uses the same threshold).
RSSM_ALWAYS_INLINE float softplus(float u) { return u > 20.0f ? u : std::log1p(std::exp(u)); }

/// u * sigmoid(u).
RSSM_ALWAYS_INLINE float silu(float u) { return u / (1.0f + std::exp(-u)); }

/// Mamba-2 time step: softplus(raw + bias), clamped only if the model asks for it.
RSSM_ALWAYS_INLINE float mamba2_time_step(float raw, float bias, bool apply_softplus, float lower,
                              float upper) {
  const float u = raw + bias;
  const float dt = apply_softplus ? softplus(u) : u;
  return dt < lower ? lower : dt > upper ? upper : dt;
}

/// Mamba-2 decay factor of one token: exp(A * dt), A < 0.
RSSM_ALWAYS_INLINE float mamba2_decay(float a, float time_step) { return std::exp(a * time_step); }

}  // namespace replayssm::cpu
