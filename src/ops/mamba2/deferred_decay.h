// How a Mamba-2 state advances in fp32, on every backend: decays are deferred.
//
//   c_i = a_i c_{i-1},   R_i = R_{i-1} + (dt_i / c_i) x_i B_i^T,   S_i = c_i R_i
//
// is S_i = a_i S_{i-1} + dt_i x_i B_i^T with one fused multiply-add per element instead of a
// product and a fused multiply-add. c is one number per head. An fp32 checkpoint stores R and c, so
// that a fold of n records and n steps of plain decoding, which store R and c after every token, do
// the same operations. Two-byte checkpoints store S: they begin with c = 1 and multiply it in
// before they round.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "replayssm/dtype.h"
#include "replayssm/host_device.h"

namespace replayssm {

class DeferredDecay {
 public:
  DeferredDecay() = default;
  RSSM_HOST_DEVICE explicit DeferredDecay(float c) : c_(c) {}

  /// c: what R is to be multiplied by.
  RSSM_HOST_DEVICE float value() const { return c_; }

  /// Takes a token's decay along. Returns what R has to be multiplied by before the token is added:
  /// 1, but where c would leave [2^-32, 2^32], which says nothing but the tokens.
  RSSM_HOST_DEVICE float take(float decay) {
    const float c = c_ * decay;
    const bool keeps = c >= 0x1p-32f && c <= 0x1p32f;
    c_ = keeps ? c : 1.0f;
    return keeps ? 1.0f : c;
  }

  /// dt / c: what x B^T of the token just taken along is added with.
  RSSM_HOST_DEVICE float gain(float dt) const { return dt * reciprocal(c_); }

 private:
  /// 1 / c within a unit in the last place, for c in [2^-32, 2^32], by Newton's method from an
  /// estimate of 12%. The same bits everywhere, and no branch: GPUs divide with one, after which a
  /// compiler no longer knows that a warp is together.
  static RSSM_HOST_DEVICE float reciprocal(float c) {
    std::uint32_t bits;
    std::memcpy(&bits, &c, sizeof bits);
    bits = 0x7ef311c7u - bits;
    float r;
    std::memcpy(&r, &bits, sizeof r);
    for (int i = 0; i < 4; ++i) r = std::fma(r, std::fma(-c, r, 1.0f), r);
    return r;
  }

  float c_ = 1.0f;
};

/// Rows of a head that share a stored c. Kernels give so many to one thread or warp at least, so
/// whoever advances rows reads and writes their c alone.
inline constexpr std::int64_t kDeferredRows = 8;

constexpr bool defers_decay(DType checkpoint) { return checkpoint == DType::kF32; }

}  // namespace replayssm
