// The recurrence itself, token by token over a block of columns. Plain decoding, prompts and exact
// flushes share it, which is what makes them equal to the bit.
//
// An element of the state is advanced in token order, wherever that happens: with a decay per
// channel by fma(S, decay, k * d), with one per head by fma(k, d / c, R) where S = c R
// (ops/deferred_decay.h). The product (decay * k) . S or (c * k) . R that gives d, and S . q or
// c (R . q), run over the rows in order in two accumulators, even rows and odd rows, added at the
// end. Columns never meet. Blocking and the length of a row of tokens therefore never change a
// result.
//
// The pass that advances a block by one token also forms the next token's product with the new
// state, so n tokens are n + 1 passes over a block in L1.
#pragma once

#include <type_traits>

#include "ops/deferred_fields.h"
#include "ops/delta_rule/cpu/inputs-inl.h"

namespace replayssm::cpu::delta {

struct NoOutput {};

/// What `count` tokens with one decay per head do to the head, from `deferred` on, which goes
/// along. kEachStored: every token's state is stored as S, and the next one begins with that.
template <bool kEachStored>
RSSM_ALWAYS_INLINE void defer_decays(const float* const* decay, int count, DeferredDecay& deferred,
                                     DeferredAdvance* advances) {
  for (int t = 0; t < count; ++t) {
    advances[t] = deferred.advance(decay[t][0]);
    if (kEachStored) deferred = {};
  }
}

template <typename Isa, typename State, bool kChannelDecay>
class Recurrence {
  using V = Vec<Isa>;
  using Decay = std::conditional_t<kChannelDecay, const float*, DeferredAdvance>;

 public:
  int count;
  std::int64_t key_dim;
  const float (*k)[kMaxKeyDim];
  const float (*q)[kMaxKeyDim];  // null where there are no outputs
  const Decay* decay;            // by token: (key_dim), or what defer_decays makes of it
  const float* beta;
  const float* const* v;  // (value_dim) by token

  /// All tokens through the block at `column`: from `in` (null: zero) to `out`, with the states
  /// between them in `work`. output(t, o) takes the outputs.
  template <typename C, typename Work, typename Output>
  void advance(std::int64_t column, const State* in, State* out, std::int64_t pitch, Work* work,
               std::int64_t work_pitch, Output output) const {
    constexpr int N = C::N;
    constexpr bool kOutput = !std::is_same_v<Output, NoOutput>;
    alignas(64) float next[kMaxKeyDim];
    V dot[N];
    V o[N];
    V d[N];
    for (V& lane : dot) lane = V::zero();
    decayed_key(0, next);
    if (in != nullptr) dot_rows<C>(in, pitch, next, dot);
    for (int t = 0; t < count; ++t) {
      const V b = V::broadcast(beta[t]);
      for (int j = 0; j < N; ++j) d[j] = b * (C::load(v[t] + column, j) - dot[j]);
      if constexpr (!kChannelDecay) {
        for (V& lane : d) lane = lane * V::broadcast(decay[t].gain);
      }
      const Token token{decay[t], k[t], d, kOutput ? q[t] : nullptr, next};
      const bool last = t + 1 == count;
      if (!last) decayed_key(t + 1, next);
      const Work* from = work;
      if (t == 0 && last) {
        advance_token<C, kOutput, false>(token, in, pitch, out, pitch, o, dot);
      } else if (t == 0) {
        advance_token<C, kOutput, true>(token, in, pitch, work, work_pitch, o, dot);
      } else if (!last) {
        advance_token<C, kOutput, true>(token, from, work_pitch, work, work_pitch, o, dot);
      } else {
        advance_token<C, kOutput, false>(token, from, work_pitch, out, pitch, o, dot);
      }
      if constexpr (kOutput) output(t, o);
    }
  }

 private:
  struct Token {
    Decay decay;
    const float* k;
    const V* d;  // divided by c
    const float* q;
    const float* next;  // decay * k of the next token, or c * k
  };

  RSSM_ALWAYS_INLINE void decayed_key(int t, float* out) const {
    if constexpr (kChannelDecay) {
      multiplied<Isa>(k[t], decay[t], key_dim, out);
    } else {
      // One of the two is 1: R takes the factor when the token is added.
      scaled<Isa>(k[t], key_dim, decay[t].factor * decay[t].rest, out);
    }
  }

  /// dot = S . x over the rows.
  template <typename C>
  RSSM_ALWAYS_INLINE void dot_rows(const State* s, std::int64_t pitch, const float* x,
                                   V* dot) const {
    V sum[2][C::N];
    for (auto& part : sum) {
      for (V& lane : part) lane = V::zero();
    }
    for (std::int64_t n = 0; n < key_dim; n += 2) {
      for (int h = 0; h < 2; ++h) {
        const V xn = V::broadcast(x[n + h]);
        for (int i = 0; i < C::N; ++i) {
          sum[h][i] = fma(C::load(s + (n + h) * pitch, i), xn, sum[h][i]);
        }
      }
    }
    for (int i = 0; i < C::N; ++i) dot[i] = sum[0][i] + sum[1][i];
  }

  template <typename C, bool kOutput, bool kNext, typename From, typename To>
  RSSM_ALWAYS_INLINE void advance_token(Token token, const From* from, std::int64_t from_pitch,
                                        To* to, std::int64_t to_pitch, V* o, V* dot) const {
    if constexpr (!kChannelDecay) {
      if (token.decay.factor != 1.0f) [[unlikely]] {
        return advance_rows<C, kOutput, kNext, true>(token, from, from_pitch, to, to_pitch, o, dot);
      }
    }
    advance_rows<C, kOutput, kNext, false>(token, from, from_pitch, to, to_pitch, o, dot);
  }

  /// One token, from `from` (null: zero) to `to`; with kOutput o = S . q before S is encoded; with
  /// kNext dot = S . next as the next token will find it stored. What the loop reads is its own: a
  /// vector store may alias anything behind a reference. kScales: R takes a factor first. What is
  /// narrower than R is a stored state, S.
  template <typename C, bool kOutput, bool kNext, bool kScales, typename From, typename To>
  void advance_rows(Token token, const From* from, std::int64_t from_pitch, To* to,
                    std::int64_t to_pitch, V* o, V* dot) const {
    constexpr int N = C::N;
    V o_sum[2][N];
    V next_sum[2][N];
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < N; ++i) o_sum[h][i] = next_sum[h][i] = V::zero();
    }
    const std::int64_t rows = key_dim;
    V d[N];
    for (int i = 0; i < N; ++i) d[i] = token.d[i];
    V a = V::zero();  // the row's decay, or the head's factor
    V rest = V::zero();
    if constexpr (!kChannelDecay) {
      a = V::broadcast(token.decay.factor);
      rest = V::broadcast(token.decay.rest);
    }
    for (std::int64_t n = 0; n < rows; n += 2) {
      V old[2][N];
      for (int h = 0; h < 2; ++h) {
        for (int i = 0; i < N; ++i) {
          old[h][i] = from == nullptr ? V::zero() : C::load(from + (n + h) * from_pitch, i);
        }
      }
      for (int h = 0; h < 2; ++h) {
        const V kn = V::broadcast(token.k[n + h]);
        if constexpr (kChannelDecay) a = V::broadcast(token.decay[n + h]);
        if constexpr (!kNext) prefetch_next_tile<C>(to + (n + h) * to_pitch, to_pitch, rows);
        for (int i = 0; i < N; ++i) {
          V s = advanced<kScales>(old[h][i], a, kn, d[i]);
          if constexpr (kOutput) o_sum[h][i] = fma(s, V::broadcast(token.q[n + h]), o_sum[h][i]);
          if constexpr (!kChannelDecay && sizeof(To) < sizeof(float)) s = rest * s;
          C::store(s, to + (n + h) * to_pitch, i);
          if constexpr (kNext) {
            if constexpr (sizeof(To) < sizeof(float)) s = C::load(to + (n + h) * to_pitch, i);
            next_sum[h][i] = fma(s, V::broadcast(token.next[n + h]), next_sum[h][i]);
          }
        }
      }
    }
    for (int i = 0; i < N; ++i) {
      if constexpr (kOutput) o[i] = o_sum[0][i] + o_sum[1][i];
      if constexpr (kOutput && !kChannelDecay) o[i] = rest * o[i];
      if constexpr (kNext) dot[i] = next_sum[0][i] + next_sum[1][i];
    }
  }

  /// With one decay per head as on GPUs: a product and an addition are faster on Zen 5
  /// (docs/kernels/gdn-cpu.md), but then backends agree to three ulp and not to two.
  template <bool kScales>
  RSSM_ALWAYS_INLINE static V advanced(V old, V by, V k, V d) {
    if constexpr (kChannelDecay) return fma(old, by, k * d);
    return fma(k, d, kScales ? old * by : old);
  }
};

}  // namespace replayssm::cpu::delta
