// Gate functions of the CPU backend. Prompt, decode, verify, flush and materialize all call these,
// so a sequence sees one gate whatever path its tokens took. SiLU is in cpu/simd/vec_math.h.
#pragma once

#include <initializer_list>

#include "cpu/simd/vec_math.h"
#include "replayssm/dtype.h"

namespace replayssm::cpu {

/// log(1 + e^u) within a few units in the last place, as max(u, 0) + log1p(y) with y = e^-|u|.
/// Above 20, where reference implementations switch to u itself, that is what the sum rounds to.
template <typename Isa>
RSSM_ALWAYS_INLINE Vec<Isa> softplus(Vec<Isa> u) {
  using V = Vec<Isa>;
  const V y = exp<Isa>(V::zero() - max(V::zero() - u, u));
  // log(1 + y) = 2 atanh(z), z = y / (2 + y) in [0, 1/3]: no cancellation however small y is.
  const V z = y / (V::broadcast(2.0f) + y);
  const V zz = z * z;
  V p = V::broadcast(2.0f / 17.0f);
  for (const float c : {2.0f / 15.0f, 2.0f / 13.0f, 2.0f / 11.0f, 2.0f / 9.0f, 2.0f / 7.0f,
                        2.0f / 5.0f, 2.0f / 3.0f, 2.0f}) {
    p = fma(p, zz, V::broadcast(c));
  }
  return fma(p, z, max(V::zero(), u));  // in this order NaN survives
}

/// 1 / (1 + e^-x).
template <typename Isa>
RSSM_ALWAYS_INLINE Vec<Isa> sigmoid(Vec<Isa> x) {
  const Vec<Isa> one = Vec<Isa>::broadcast(1.0f);
  return one / (one + exp<Isa>(Vec<Isa>::zero() - x));
}

/// y[i] = f(x[i]) a vector at a time; an element's value does not depend on its neighbours or on n.
template <typename Isa, typename T, typename F>
inline void map_vectors(const T* x, std::int64_t n, float* y, F f) {
  using V = Vec<Isa>;
  std::int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) f(V::load(x + i), i).store(y + i);
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    f(V::load_partial(x + i, rest), i).store_partial(y + i, rest);
  }
}

/// Mamba-2 time step: softplus(raw + bias), clamped only if the model asks for it.
template <typename Isa>
inline float mamba2_time_step(float raw, float bias, bool apply_softplus, float lower,
                              float upper) {
  float dt = raw + bias;
  if (apply_softplus) softplus<Isa>(Vec<Isa>::broadcast(dt)).store_partial(&dt, 1);
  return dt < lower ? lower : dt > upper ? upper : dt;
}

/// Mamba-2 decay factors: decay[i] = exp(a * dt[i]), a < 0.
template <typename Isa>
inline void mamba2_decays(float a, const float* dt, int n, float* decay) {
  using V = Vec<Isa>;
  map_vectors<Isa>(dt, n, decay, [a](V x, std::int64_t) { return exp<Isa>(V::broadcast(a) * x); });
}

/// Log-decay of Gated DeltaNet and of Kimi Delta Attention's first form: -rate softplus(raw + bias)
/// with rate = exp(A_log).
template <typename Isa>
RSSM_ALWAYS_INLINE Vec<Isa> softplus_log_decay(Vec<Isa> rate, Vec<Isa> raw_plus_bias) {
  return Vec<Isa>::zero() - rate * softplus<Isa>(raw_plus_bias);
}

/// Log-decay of Kimi Delta Attention's second form: lower_bound sigmoid(rate (raw + bias)).
template <typename Isa>
RSSM_ALWAYS_INLINE Vec<Isa> bounded_log_decay(Vec<Isa> rate, Vec<Isa> raw_plus_bias,
                                              float lower_bound) {
  return Vec<Isa>::broadcast(lower_bound) * sigmoid<Isa>(rate * raw_plus_bias);
}

/// Write strength of the delta rule: sigmoid(raw), or twice that where the model allows negative
/// eigenvalues.
template <typename Isa>
RSSM_ALWAYS_INLINE Vec<Isa> delta_rule_beta(Vec<Isa> raw, bool doubled) {
  return Vec<Isa>::broadcast(doubled ? 2.0f : 1.0f) * sigmoid<Isa>(raw);
}

}  // namespace replayssm::cpu
