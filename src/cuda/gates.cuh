// Gate functions of the CUDA backend. Prompt, decode, verify, flush and materialize all call these,
// so a sequence sees one gate whatever path its tokens took. Intrinsics keep the compiler from
// contracting a product and a sum differently where a function is inlined twice.
#pragma once

namespace replayssm::cuda {

/// log(1 + e^u); u itself above 20, where the difference is below half an ulp (every reference
/// implementation of these models uses the same threshold).
__device__ __forceinline__ float softplus(float u) { return u > 20.0f ? u : log1pf(expf(u)); }

/// u * sigmoid(u).
__device__ __forceinline__ float silu(float u) { return __fdiv_rn(u, __fadd_rn(1.0f, expf(-u))); }

/// Mamba-2 time step: softplus(raw + bias), clamped only if the model asks for it.
__device__ __forceinline__ float mamba2_time_step(float raw, float bias, bool apply_softplus,
                                                  float lower, float upper) {
  const float u = __fadd_rn(raw, bias);
  const float dt = apply_softplus ? softplus(u) : u;
  return dt < lower ? lower : dt > upper ? upper : dt;
}

/// Mamba-2 decay factor of one token: exp(A * dt), A < 0.
__device__ __forceinline__ float mamba2_decay(float a, float time_step) {
  return expf(__fmul_rn(a, time_step));
}

}  // namespace replayssm::cuda
