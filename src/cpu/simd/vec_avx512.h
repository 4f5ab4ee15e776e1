// Sixteen floats in a 512-bit register (AVX-512 F, BW, DQ, VL).
#pragma once

#include <immintrin.h>

#include "cpu/simd/vec_avx2.h"

namespace replayssm::cpu {

struct Avx512Isa {};

template <>
struct Vec<Avx512Isa> {
  static constexpr int kLanes = 16;
  __m512 v;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }

  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const BF16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
  }
  static Vec load(const F16* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }

  static Vec load_partial(const float* p, int n) {
    return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
  }
  static Vec load_partial(const BF16* p, int n) {
    const __m256i half = _mm256_maskz_loadu_epi16(first_lanes(n), p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
  }
  static Vec load_partial(const F16* p, int n) {
    return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
  }

  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(BF16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16_bits()); }
  void store(F16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_f16_bits()); }
  void store_partial(float* p, int n) const { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
  void store_partial(BF16* p, int n) const {
    _mm256_mask_storeu_epi16(p, first_lanes(n), to_bf16_bits());
  }
  void store_partial(F16* p, int n) const {
    _mm256_mask_storeu_epi16(p, first_lanes(n), to_f16_bits());
  }

  friend Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
  friend Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
  friend Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
  friend Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

  float sum() const {
    const __m256 low = _mm512_castps512_ps256(v);
    const __m256 high = _mm512_extractf32x8_ps(v, 1);
    const __m256 oct = _mm256_add_ps(low, high);
    const __m128 quad = _mm_add_ps(_mm256_castps256_ps128(oct), _mm256_extractf128_ps(oct, 1));
    const __m128 pair = _mm_add_ps(quad, _mm_movehl_ps(quad, quad));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
  }

  float max_lane() const { return _mm512_reduce_max_ps(v); }

  Vec low_bits_as_exponent() const {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 23))};
  }

  static Vec times_exp2(Vec p, Vec n) { return {_mm512_scalef_ps(p.v, n.v)}; }

  /// out[i] = v[i].sum(), the same tree: a transposition on the way makes one addition serve four
  /// or eight vectors.
  static void sum8(const Vec* v, float* out) {
    const auto half = [](Vec a) {
      return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    };
    _mm256_storeu_ps(out, detail::sum8(half(v[0]), half(v[1]), half(v[2]), half(v[3]), half(v[4]),
                                       half(v[5]), half(v[6]), half(v[7])));
  }

 private:
  static __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

  __m256i to_f16_bits() const {
    return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  __m256i to_bf16_bits() const {
    // Integer rounding rather than VCVTNEPS2BF16, which flushes subnormals and is not everywhere.
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet));
  }
};

}  // namespace replayssm::cpu
