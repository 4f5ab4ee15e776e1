// Portable vectors: plain loops over eight lanes that any compiler can map to its own registers.
#pragma once

#include <bit>
#include <cstdint>

#include "replayssm/dtype.h"

namespace replayssm::cpu {

struct GenericIsa {};

template <typename Isa>
struct Vec;

template <>
struct Vec<GenericIsa> {
  static constexpr int kLanes = 8;
  float lane[kLanes];

  static Vec zero() { return broadcast(0.0f); }

  static Vec broadcast(float x) {
    Vec v;
    for (float& lane_value : v.lane) lane_value = x;
    return v;
  }

  template <typename T>
  static Vec load(const T* p) {
    Vec v;
    for (int i = 0; i < kLanes; ++i) v.lane[i] = to_float(p[i]);
    return v;
  }

  /// The first n < kLanes elements, zero elsewhere; touches nothing beyond them.
  template <typename T>
  static Vec load_partial(const T* p, int n) {
    Vec v = zero();
    for (int i = 0; i < n; ++i) v.lane[i] = to_float(p[i]);
    return v;
  }

  template <typename T>
  void store(T* p) const {
    for (int i = 0; i < kLanes; ++i) p[i] = from_float<T>(lane[i]);
  }
  template <typename T>
  void store_partial(T* p, int n) const {
    for (int i = 0; i < n; ++i) p[i] = from_float<T>(lane[i]);
  }

  friend Vec operator+(Vec a, Vec b) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] += b.lane[i];
    return a;
  }
  friend Vec operator-(Vec a, Vec b) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] -= b.lane[i];
    return a;
  }
  friend Vec operator*(Vec a, Vec b) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] *= b.lane[i];
    return a;
  }
  friend Vec operator/(Vec a, Vec b) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] /= b.lane[i];
    return a;
  }
  /// max and min return b where either operand is NaN, as the x86 instructions do.
  friend Vec max(Vec a, Vec b) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
  }
  friend Vec min(Vec a, Vec b) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
  }

  /// a * b + c, rounded twice here and once where the instruction set has a fused form.
  friend Vec fma(Vec a, Vec b, Vec c) {
    for (int i = 0; i < kLanes; ++i) c.lane[i] = a.lane[i] * b.lane[i] + c.lane[i];
    return c;
  }

  /// Sum of the lanes, as a fixed tree: ((0+4)+(2+6)) + ((1+5)+(3+7)).
  float sum() const {
    const float even = (lane[0] + lane[4]) + (lane[2] + lane[6]);
    const float odd = (lane[1] + lane[5]) + (lane[3] + lane[7]);
    return even + odd;
  }

  float max_lane() const {
    float result = lane[0];
    for (int i = 1; i < kLanes; ++i) result = lane[i] > result ? lane[i] : result;
    return result;
  }

  /// The low nine bits of each lane's representation, as sign and exponent of a float.
  Vec low_bits_as_exponent() const {
    Vec v;
    for (int i = 0; i < kLanes; ++i) {
      v.lane[i] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(lane[i]) << 23);
    }
    return v;
  }

  /// out[i] = v[i].sum(), the same tree.
  static void sum8(const Vec* v, float* out) {
    for (int i = 0; i < 8; ++i) out[i] = v[i].sum();
  }
};

}  // namespace replayssm::cpu
