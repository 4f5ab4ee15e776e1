// What the vectors of one instruction set compute, behind functions that any code may call.
#pragma once

#include "replayssm/dtype.h"

namespace replayssm::testing {

struct VecProbe {
  int lanes;
  // Load and store of a whole vector and of its first n elements, by storage type.
  void (*convert_f32)(const float* in, float* out);
  void (*load_bf16)(const BF16* in, float* out);
  void (*load_f16)(const F16* in, float* out);
  void (*store_bf16)(const float* in, BF16* out);
  void (*store_f16)(const float* in, F16* out);
  void (*partial_f32)(const float* in, float* out, int n);
  void (*partial_bf16)(const BF16* in, BF16* out, int n);
  void (*partial_f16)(const F16* in, F16* out, int n);
  // out = the whole vector that load_partial makes of the first n elements.
  void (*load_partial_f32)(const float* in, float* out, int n);
  void (*load_partial_bf16)(const BF16* in, float* out, int n);
  // out = [a + b, a - b, a * b, a / b, max, min, fma(a, b, c)], each of `lanes` elements.
  void (*arithmetic)(const float* a, const float* b, const float* c, float* out);
  float (*sum)(const float* in);
  float (*max_lane)(const float* in);
  // out[i] = sum of vector i, for eight vectors one after the other.
  void (*sum8)(const float* in, float* out);
  void (*exp)(const float* in, float* out);
  void (*silu)(const float* in, float* out);
  void (*decays)(float a, const float* dt, int n, float* out);
};

const VecProbe& vec_probe_generic();
const VecProbe& vec_probe_avx2();
const VecProbe& vec_probe_avx512();

}  // namespace replayssm::testing
