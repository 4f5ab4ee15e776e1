// How the states of heads with one decay (Mamba-2, Gated DeltaNet) advance in fp32, on every
// backend: decays are deferred.
//
//   c_i = a_i c_{i-1},   R_i = R_{i-1} + (g_i / c_i) u_i w_i^T,   S_i = c_i R_i
//
// is S_i = a_i S_{i-1} + g_i u_i w_i^T with one fused multiply-add per element instead of a product
// and a fused multiply-add; for Mamba-2 g u w^T is dt x B^T, for Gated DeltaNet d k^T (g is 1). c
// is one number per head. An fp32 checkpoint stores R and c, so that a fold of n records and n
// steps of plain decoding, which store R and c after every token, do the same operations. R is up
// to 2^32 times S: states beyond 2^96 are infinite. Two-byte checkpoints store S: they begin with c
// = 1 and multiply it in before they round. Kimi Delta Attention, where every channel has a decay
// of its own, stores S.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "replayssm/dtype.h"
#include "replayssm/host_device.h"

namespace replayssm {

/// 1 / c, rounded as by a division, for c in [2^-32, 2^32]: by Newton's method from an estimate of
/// 12%, which misses a mantissa of ones alone. It has no branch. GPUs divide with one, after which
/// a compiler no longer knows that a warp is together.
RSSM_ALWAYS_INLINE RSSM_HOST_DEVICE float branchless_reciprocal(float c) {
  std::uint32_t bits;
  std::memcpy(&bits, &c, sizeof bits);
  const std::uint32_t estimate = 0x7ef311c7u - bits;
  float r;
  std::memcpy(&r, &estimate, sizeof r);
  for (int i = 0; i < 4; ++i) r = std::fma(r, std::fma(-c, r, 1.0f), r);
  std::uint32_t rounded;
  std::memcpy(&rounded, &r, sizeof rounded);
  rounded += (bits & 0x7fffffu) == 0x7fffffu ? 1 : 0;
  std::memcpy(&r, &rounded, sizeof r);
  return r;
}

/// What a token does to a head's rows: R = factor R + gain u w^T, S = rest R.
struct DeferredAdvance {
  float factor, gain, rest;
};

/// c of the equations above.
class DeferredDecay {
 public:
  // Not defaulted: that would be a function of its own in a build without optimization.
  RSSM_ALWAYS_INLINE RSSM_HOST_DEVICE DeferredDecay() {}  // NOLINT(modernize-use-equals-default)
  RSSM_ALWAYS_INLINE RSSM_HOST_DEVICE explicit DeferredDecay(float c) : c_(c) {}

  /// c: what R is to be multiplied by.
  RSSM_ALWAYS_INLINE RSSM_HOST_DEVICE float value() const { return c_; }

  /// Takes a token's decay along. Returns what R has to be multiplied by before the token is added:
  /// 1, but where c would leave [2^-32, 2^32], which depends on the tokens alone.
  RSSM_ALWAYS_INLINE RSSM_HOST_DEVICE float take(float decay) {
    const float c = c_ * decay;
    const bool keeps = c >= 0x1p-32f && c <= 0x1p32f;
    c_ = keeps ? c : 1.0f;
    return keeps ? 1.0f : c;
  }

  /// 1 / c: what the token just taken along is added with, beside a gain of its own.
  RSSM_ALWAYS_INLINE RSSM_HOST_DEVICE float gain() const {
#if defined(__CUDA_ARCH__)
    return branchless_reciprocal(c_);
#else
    return 1.0f / c_;
#endif
  }
  /// g / c.
  RSSM_ALWAYS_INLINE RSSM_HOST_DEVICE float gain(float g) const { return g * gain(); }

  /// Takes a token's decay along; its gain is 1 / c.
  RSSM_ALWAYS_INLINE RSSM_HOST_DEVICE DeferredAdvance advance(float decay) {
    DeferredAdvance by;
    by.factor = take(decay);
    by.gain = gain();
    by.rest = value();
    return by;
  }

 private:
  float c_ = 1.0f;
};

/// Rows of a head that share a stored c: as many as one warp or thread has at least, so that
/// whoever advances rows is alone with their c.
inline constexpr std::int64_t kDeferredRows = 8;

RSSM_ALWAYS_INLINE constexpr bool defers_decay(DType checkpoint) {
  return checkpoint == DType::kF32;
}
/// How many c a checkpoint stores for a head of so many rows.
RSSM_ALWAYS_INLINE constexpr std::int64_t deferred_decay_count(DType checkpoint,
                                                               std::int64_t rows) {
  return defers_decay(checkpoint) ? rows / kDeferredRows : 0;
}

}  // namespace replayssm
