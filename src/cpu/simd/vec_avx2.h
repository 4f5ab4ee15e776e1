// Eight floats in a 256-bit register (AVX2, FMA, F16C).
#pragma once

#include <immintrin.h>

#include <cstring>

#include "cpu/simd/vec_generic.h"

namespace replayssm::cpu {

struct Avx2Isa {};

namespace detail {

/// Lane i holds the sum of a_i's lanes, as the tree ((0+4)+(2+6)) + ((1+5)+(3+7)).
RSSM_ALWAYS_INLINE __m256 sum8(__m256 a0, __m256 a1, __m256 a2, __m256 a3, __m256 a4, __m256 a5,
                               __m256 a6, __m256 a7) {
  const auto halves = [](__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  };
  const auto pairs = [](__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  };
  const __m256 even = pairs(halves(a0, a4), halves(a1, a5));
  const __m256 odd = pairs(halves(a2, a6), halves(a3, a7));
  return _mm256_add_ps(_mm256_shuffle_ps(even, odd, 0x88), _mm256_shuffle_ps(even, odd, 0xdd));
}

}  // namespace detail

template <>
struct Vec<Avx2Isa> {
  static constexpr int kLanes = 8;
  __m256 v;

  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }

  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load(const BF16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
  }
  static Vec load(const F16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }

  static Vec load_partial(const float* p, int n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
  template <typename T>
  static Vec load_partial(const T* p, int n) {
    T padded[kLanes] = {};
    std::memcpy(padded, p, static_cast<std::size_t>(n) * sizeof(T));
    return load(padded);
  }

  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(BF16* p) const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i words = _mm256_blendv_epi8(rounded, quiet, nan);
    const __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
  }
  void store(F16* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  void store_partial(float* p, int n) const { _mm256_maskstore_ps(p, first_lanes(n), v); }
  template <typename T>
  void store_partial(T* p, int n) const {
    T padded[kLanes];
    store(padded);
    std::memcpy(p, padded, static_cast<std::size_t>(n) * sizeof(T));
  }

  friend Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
  friend Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
  friend Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
  friend Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
  friend Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }

  /// Same tree as Vec<GenericIsa>::sum.
  float sum() const {
    const __m128 quad = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 pair = _mm_add_ps(quad, _mm_movehl_ps(quad, quad));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
  }

  float max_lane() const {
    const __m128 quad = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 pair = _mm_max_ps(quad, _mm_movehl_ps(quad, quad));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
  }

  Vec low_bits_as_exponent() const {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 23))};
  }

  /// out[i] = v[i].sum(), the same tree: a transposition on the way makes one addition serve four
  /// or eight vectors.
  static void sum8(const Vec* v, float* out) {
    _mm256_storeu_ps(out,
                     detail::sum8(v[0].v, v[1].v, v[2].v, v[3].v, v[4].v, v[5].v, v[6].v, v[7].v));
  }

 private:
  static __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
};

}  // namespace replayssm::cpu
