// Gate functions of the CUDA backend. Prompt, decode, verify, flush and materialize all call these,
// so a sequence sees one gate whatever path its tokens took. Intrinsics keep the compiler from
// contracting a product and a sum differently where a function is inlined twice.
#pragma once

namespace replayssm::cuda {

/// 2^n for integral n in [-126, 127].
__device__ __forceinline__ float exp2_integral(float n) {
  return __uint_as_float(__float_as_uint(__fadd_rn(n, 12582912.0f + 127.0f)) << 23);
}

/// e^x as in cpu/simd/vec_math.h, operation for operation: a flush from the same records then gives
/// the same bits as on a CPU that fuses multiply and add. Within 2 units in the last place.
__device__ __forceinline__ float exp_f32(float x) {
  constexpr float kMagic = 12582912.0f;
  x = x > 100.0f ? 100.0f : x;  // NaN survives
  x = x < -110.0f ? -110.0f : x;
  const float n = __fsub_rn(__fadd_rn(__fmul_rn(x, 1.44269504088896341f), kMagic), kMagic);
  float r = __fmaf_rn(n, -0.693359375f, x);
  r = __fmaf_rn(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = __fmaf_rn(p, r, 1.3981999507e-3f);
  p = __fmaf_rn(p, r, 8.3334519073e-3f);
  p = __fmaf_rn(p, r, 4.1665795894e-2f);
  p = __fmaf_rn(p, r, 1.6666665459e-1f);
  p = __fmaf_rn(p, r, 5.0000001201e-1f);
  p = __fadd_rn(__fmaf_rn(p, __fmul_rn(r, r), r), 1.0f);
  const float half = __fsub_rn(__fadd_rn(__fmul_rn(n, 0.5f), kMagic), kMagic);
  return __fmul_rn(__fmul_rn(p, exp2_integral(half)), exp2_integral(__fsub_rn(n, half)));
}

/// log(1 + e^u); u itself above 20, where the difference is below half an ulp (every reference
/// implementation of these models uses the same threshold).
__device__ __forceinline__ float softplus(float u) { return u > 20.0f ? u : log1pf(expf(u)); }

/// u / (1 + e^-u).
__device__ __forceinline__ float silu(float u) {
  return __fdiv_rn(u, __fadd_rn(1.0f, exp_f32(__fsub_rn(0.0f, u))));
}

/// Mamba-2 time step: softplus(raw + bias), clamped only if the model asks for it.
__device__ __forceinline__ float mamba2_time_step(float raw, float bias, bool apply_softplus,
                                                  float lower, float upper) {
  const float u = __fadd_rn(raw, bias);
  const float dt = apply_softplus ? softplus(u) : u;
  return dt < lower ? lower : dt > upper ? upper : dt;
}

/// Mamba-2 decay factor of one token: exp(A * dt), A < 0.
__device__ __forceinline__ float mamba2_decay(float a, float time_step) {
  return exp_f32(__fmul_rn(a, time_step));
}

/// Log-decay of Gated DeltaNet and of Kimi Delta Attention's first form: -exp(A_log) softplus(raw +
/// bias). `rate`: exp(A_log).
__device__ __forceinline__ float softplus_log_decay(float rate, float raw_plus_bias) {
  return __fsub_rn(0.0f, __fmul_rn(rate, softplus(raw_plus_bias)));
}

/// 1 / (1 + e^-x).
__device__ __forceinline__ float sigmoid(float x) {
  return __fdiv_rn(1.0f, __fadd_rn(1.0f, exp_f32(__fsub_rn(0.0f, x))));
}

/// Log-decay of Kimi Delta Attention's second form: lower_bound sigmoid(exp(A_log) (raw + bias)).
/// `rate`: exp(A_log).
__device__ __forceinline__ float bounded_log_decay(float rate, float raw_plus_bias,
                                                   float lower_bound) {
  return __fmul_rn(lower_bound, sigmoid(__fmul_rn(rate, raw_plus_bias)));
}

/// Write strength of the delta rule: sigmoid(raw), or twice that where the model allows negative
/// eigenvalues.
__device__ __forceinline__ float delta_rule_beta(float raw, bool doubled) {
  return __fmul_rn(doubled ? 2.0f : 1.0f, sigmoid(raw));
}

}  // namespace replayssm::cuda
