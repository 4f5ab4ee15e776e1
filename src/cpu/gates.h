// Gate functions of the CPU backend. Prompt, decode, verify, flush and materialize all call these,
// so a sequence sees one gate whatever path its tokens took. SiLU is in cpu/simd/vec_math.h.
#pragma once

#include <cmath>

#include "cpu/simd/vec_math.h"
#include "replayssm/dtype.h"

namespace replayssm::cpu {

/// log(1 + e^u); u itself above 20, where the difference is below half an ulp (every reference
/// implementation of these models uses the same threshold).
RSSM_ALWAYS_INLINE float softplus(float u) { return u > 20.0f ? u : std::log1p(std::exp(u)); }

/// Mamba-2 time step: softplus(raw + bias), clamped only if the model asks for it.
RSSM_ALWAYS_INLINE float mamba2_time_step(float raw, float bias, bool apply_softplus, float lower,
                                          float upper) {
  const float u = raw + bias;
  const float dt = apply_softplus ? softplus(u) : u;
  return dt < lower ? lower : dt > upper ? upper : dt;
}

/// Mamba-2 decay factors: decay[i] = exp(a * dt[i]), a < 0. An element's value does not depend on
/// its neighbours or on n.
template <typename Isa>
inline void mamba2_decays(float a, const float* dt, int n, float* decay) {
  using V = Vec<Isa>;
  const V va = V::broadcast(a);
  int i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) exp<Isa>(va * V::load(dt + i)).store(decay + i);
  if (i < n) exp<Isa>(va * V::load_partial(dt + i, n - i)).store_partial(decay + i, n - i);
}

}  // namespace replayssm::cpu
