#pragma once

#include "cpu/gates.h"
#include "cpu/simd/vec.h"
#include "cpu/simd/vec_math.h"
#include "unit/vec_probe.h"

namespace replayssm::testing {

template <typename Isa>
const VecProbe& vec_probe() {
  using V = cpu::Vec<Isa>;
  static const VecProbe probe = {
      V::kLanes,
      [](const float* in, float* out) { V::load(in).store(out); },
      [](const BF16* in, float* out) { V::load(in).store(out); },
      [](const F16* in, float* out) { V::load(in).store(out); },
      [](const float* in, BF16* out) { V::load(in).store(out); },
      [](const float* in, F16* out) { V::load(in).store(out); },
      [](const float* in, float* out, int n) { V::load(in).store_partial(out, n); },
      [](const BF16* in, BF16* out, int n) { V::load(in).store_partial(out, n); },
      [](const F16* in, F16* out, int n) { V::load(in).store_partial(out, n); },
      [](const float* in, float* out, int n) { V::load_partial(in, n).store(out); },
      [](const BF16* in, float* out, int n) { V::load_partial(in, n).store(out); },
      [](const float* pa, const float* pb, const float* pc, float* out) {
        const V a = V::load(pa);
        const V b = V::load(pb);
        const V c = V::load(pc);
        const V results[] = {a + b, a - b, a * b, a / b, max(a, b), min(a, b), fma(a, b, c)};
        for (const V& result : results) {
          result.store(out);
          out += V::kLanes;
        }
      },
      [](const float* in) { return V::load(in).sum(); },
      [](const float* in) { return V::load(in).max_lane(); },
      [](const float* in, float* out) {
        V v[8];
        for (int i = 0; i < 8; ++i) v[i] = V::load(in + i * V::kLanes);
        V::sum8(v, out);
      },
      [](const float* in, float* out) { cpu::exp<Isa>(V::load(in)).store(out); },
      [](const float* in, float* out) { cpu::silu<Isa>(V::load(in)).store(out); },
      [](float a, const float* dt, int n, float* out) { cpu::mamba2_decays<Isa>(a, dt, n, out); },
  };
  return probe;
}

}  // namespace replayssm::testing
