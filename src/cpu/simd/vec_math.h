// Elementary functions on Vec<Isa>, written once over its primitives so that every instruction set
// evaluates the same polynomial. They are inlined so that loops keep their constants in registers.
#pragma once

#include "cpu/simd/vec.h"

namespace replayssm::cpu {

/// 2^n for integral n in [-126, 127].
template <typename Isa>
RSSM_ALWAYS_INLINE Vec<Isa> exp2_integral(Vec<Isa> n) {
  // Adding 1.5 * 2^23 puts an integer into the low bits of the representation; 127 is the bias.
  return (n + Vec<Isa>::broadcast(12582912.0f + 127.0f)).low_bits_as_exponent();
}

/// p 2^n, rounded once, for p of about 1 and integral n in [-160, 145].
template <typename Isa>
RSSM_ALWAYS_INLINE Vec<Isa> times_exp2(Vec<Isa> p, Vec<Isa> n) {
  using V = Vec<Isa>;
  if constexpr (requires { V::times_exp2(p, n); }) {
    return V::times_exp2(p, n);
  } else {
    // Two factors, because 2^n alone leaves the range of normal numbers where p 2^n does not.
    const V magic = V::broadcast(12582912.0f);
    const V half = (n * V::broadcast(0.5f) + magic) - magic;
    return p * exp2_integral<Isa>(half) * exp2_integral<Isa>(n - half);
  }
}

/// e^x within 2 units in the last place; 0 below about -104, infinity above about 88.7, NaN for
/// NaN.
template <typename Isa>
RSSM_ALWAYS_INLINE Vec<Isa> exp(Vec<Isa> x) {
  using V = Vec<Isa>;
  const V magic = V::broadcast(12582912.0f);
  x = max(V::broadcast(-110.0f), min(V::broadcast(100.0f), x));  // in this order NaN survives
  const V n = (x * V::broadcast(1.44269504088896341f) + magic) - magic;
  V r = fma(n, V::broadcast(-0.693359375f), x);  // exact: the constant has 10 significant bits
  r = fma(n, V::broadcast(2.12194440e-4f), r);
  V p = V::broadcast(1.9875691500e-4f);
  p = fma(p, r, V::broadcast(1.3981999507e-3f));
  p = fma(p, r, V::broadcast(8.3334519073e-3f));
  p = fma(p, r, V::broadcast(4.1665795894e-2f));
  p = fma(p, r, V::broadcast(1.6666665459e-1f));
  p = fma(p, r, V::broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r) + V::broadcast(1.0f);
  return times_exp2<Isa>(p, n);
}

/// x / (1 + e^-x).
template <typename Isa>
inline Vec<Isa> silu(Vec<Isa> x) {
  const Vec<Isa> one = Vec<Isa>::broadcast(1.0f);
  return x / (one + exp<Isa>(Vec<Isa>::zero() - x));
}

}  // namespace replayssm::cpu
