// f16 as in CUDA's header of this name, as far as kernels use it.
#pragma once

#include "emulation.h"

struct __half {
  std::uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half x) {
  _Float16 value;
  std::memcpy(&value, &x, 2);
  return static_cast<float>(value);
}
inline __half __float2half_rn(float x) {
  const auto value = static_cast<_Float16>(x);
  __half out;
  std::memcpy(&out, &value, 2);
  return out;
}
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
inline __half2 __float2half2_rn(float x) { return __floats2half2_rn(x, x); }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline float __low2float(__half2 x) { return __half2float(x.x); }
inline float __high2float(__half2 x) { return __half2float(x.y); }
inline __half2 __hmul2(__half2 a, __half2 b) {
  return __floats2half2_rn(__low2float(a) * __low2float(b), __high2float(a) * __high2float(b));
}
inline __half2 __hsub2(__half2 a, __half2 b) {
  return __floats2half2_rn(__low2float(a) - __low2float(b), __high2float(a) - __high2float(b));
}
