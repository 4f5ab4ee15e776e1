// Outputs and deltas of a tentative row's tokens from a checkpoint that is left alone.
//
// With w(i, t) the product of the decays after entry i up to token t (entries are the live records
// and the row's own tokens before or at t), per column:
//
//   d_t = beta_t (v_t - S0 . w(-1, t) k_t - sum_i (k_i . w(i, t) k_t) d_i),   i before t
//   o_t =              S0 . w(-1, t) q_t + sum_i (k_i . w(i, t) q_t) d_i,     i before or at t
//
// The d_i of records are in the ring; those of the row's tokens follow from one another. Weights
// are products of factors in [0, 1], so nothing overflows. Where decays are deferred the checkpoint
// holds R with S0 = c R, and c is one more factor of w(-1, t).
//
// Row 2t of the window belongs to k_t, row 2t + 1 to q_t: what a row takes from the checkpoint is a
// product with key_dim vectors, and the records' deltas are further vectors of the same product.
#pragma once

#include "ops/deferred_decay.h"
#include "ops/delta_rule/cpu/inputs-inl.h"

namespace replayssm::cpu::delta {

/// A head's window as multipliers: of the checkpoint's rows, and of the entries' deltas.
template <typename Isa, bool kChannelDecay>
class Window {
  using V = Vec<Isa>;
  static constexpr int kMaxRows = 2 * kMaxTokens;
  static constexpr int kMaxTerms = kMaxLive + kMaxTokens;

 public:
  using Tokens = TokenVectors<Isa, kMaxTokens>;
  using Gates = HeadGates<Isa, kChannelDecay, kMaxTokens>;
  using Records = HeadRecords<Isa, kChannelDecay>;

  /// The window of `live` records and the task's tokens. `tokens` and `keys` outlive it.
  Window(const DeltaRuleTask& task, const Tokens& tokens, const RecordKeys<Isa>& keys, int live)
      : tokens_(tokens),
        keys_(keys),
        key_dim_(task.key_dim),
        live_(live),
        rows_(2 * static_cast<int>(task.tokens)) {
    if constexpr (!kChannelDecay) {
      // All heads share the products of keys and queries; a head's decays come in as factors.
      const auto bytes = sizeof(float) * static_cast<std::size_t>(key_dim_);
      for (int t = 0; 2 * t < rows_; ++t) {
        std::memcpy(row_[2 * t], tokens_.k[t], bytes);
        std::memcpy(row_[2 * t + 1], tokens_.q[t], bytes);
      }
      for (int i = 0; i < live_; ++i) dot_rows(keys_.k[i], 0, scores_[i]);
      for (int t = 0; 2 * t < rows_; ++t) dot_rows(tokens_.k[t], 2 * t, scores_[live_ + t]);
    }
  }

  /// Brings in one head's decays, those deferred in its checkpoint too (one decay per token).
  void prepare(const Gates& gates, const Records& records,
               [[maybe_unused]] DeferredDecay deferred) {
    if constexpr (kChannelDecay) {
      score_tokens(gates);
      weigh_rows(gates);
      score_records(records);
    } else {
      weigh_scores(gates, records, deferred);
    }
  }

  int live() const { return live_; }
  /// The multiplier of entry i's delta in row r.
  float term(int i, int r) const { return terms_[i][r]; }

  /// out[r] = what row r takes from the block `s` (null: zero) and from the records' deltas: as
  /// many rows at a time as registers hold. kStream: the block is one of a state in memory, not of
  /// a scratch of its own.
  template <typename C, bool kStream, typename State>
  void read(const State* s, const BlockPlace& place, const float* const* deltas,
            V (*out)[C::N]) const {
    constexpr int kMost = V::kLanes > 8 ? 8 : 4;
    int r = 0;
    for (; r + kMost < rows_; r += kMost) read_rows<C, kMost, false>(s, place, deltas, r, out);
    if (rows_ - r > 4) {
      if (rows_ - r == 8) return read_rows<C, 8, kStream>(s, place, deltas, r, out);
      read_rows<C, 4, false>(s, place, deltas, r, out);
      r += 4;
    }
    if (rows_ - r == 4) return read_rows<C, 4, kStream>(s, place, deltas, r, out);
    read_rows<C, 2, kStream>(s, place, deltas, r, out);
  }

 private:
  // ---- One decay per token ----

  /// Running products of decays from the newest entry backwards.
  void weigh_scores(const Gates& gates, const Records& records, DeferredDecay deferred) {
    for (int r = 0; r < rows_; r += 2) {
      float weight = 1.0f;
      for (int i = live_ + r / 2; i >= 0; --i) {
        terms_[i][r] = weight * scores_[i][r];
        terms_[i][r + 1] = weight * scores_[i][r + 1];
        weight *= i >= live_ ? gates.decay[i - live_][0] : records.decay[i][0];
      }
      state_weight_[r] = state_weight_[r + 1] = weight * deferred.value();
    }
  }

  // ---- A decay per channel: every channel has weights of its own, so the vectors carry them ----

  /// Terms among the row's own tokens. A token's key passes the later tokens and takes their decays
  /// on its way, for k and q of a token alike.
  void score_tokens(const Gates& gates) {
    const int tokens = rows_ / 2;
    alignas(64) float passing[kMaxKeyDim];
    for (int t = 0; t < tokens; ++t) {
      const float* key = tokens_.k[t];
      for (int u = t; u < tokens; u += 4) {
        float* out = terms_[live_ + t] + 2 * u;
        switch (tokens - u) {
          case 1:
            pass_tokens<1>(key, gates, u, u == t, nullptr, out);
            break;
          case 2:
            pass_tokens<2>(key, gates, u, u == t, nullptr, out);
            break;
          case 3:
            pass_tokens<3>(key, gates, u, u == t, nullptr, out);
            break;
          default:
            pass_tokens<4>(key, gates, u, u == t, passing, out);
        }
        key = passing;
      }
    }
  }

  /// The products of `key` with k and q of kCount tokens from `first` on, and what becomes of it. A
  /// token's own key has no decay to take.
  template <int kCount>
  void pass_tokens(const float* key, const Gates& gates, int first, bool own, float* passed,
                   float* out) const {
    V sum[8];
    for (V& lane : sum) lane = V::zero();
    const float* decay[kCount];
    for (int c = 0; c < kCount; ++c) decay[c] = gates.decay[first + c];
    const float(*k)[kMaxKeyDim] = tokens_.k + first;
    const float(*q)[kMaxKeyDim] = tokens_.q + first;
    for_each_vector([&](std::int64_t n, auto load, auto store) {
      V x = load(key + n);
      for (int c = 0; c < kCount; ++c) {
        if (c > 0 || !own) x = x * load(decay[c] + n);
        sum[2 * c] = fma(x, load(k[c] + n), sum[2 * c]);
        sum[2 * c + 1] = fma(x, load(q[c] + n), sum[2 * c + 1]);
      }
      if (passed != nullptr) store(x, passed + n);
    });
    V::sum8(sum, out);
  }

  /// Rows are the tokens' vectors times the decays of the tokens up to theirs.
  void weigh_rows(const Gates& gates) {
    for_each_vector([&](std::int64_t n, auto load, auto store) {
      V weight = V::broadcast(1.0f);
      for (int t = 0; 2 * t < rows_; ++t) {
        weight = weight * load(gates.decay[t] + n);
        store(weight * load(tokens_.k[t] + n), row_[2 * t] + n);
        store(weight * load(tokens_.q[t] + n), row_[2 * t + 1] + n);
      }
    });
  }

  /// Terms of the records: a record's key is multiplied by the decays of the records after it.
  /// Leaves rows multiplied by all decays of the window.
  void score_records(const Records& records) {
    if (live_ == 0) return;
    const int newest = live_ - 1;
    dot_rows(keys_.k[newest], 0, terms_[newest]);
    alignas(64) float key[kMaxKeyDim];
    alignas(64) float weight[kMaxKeyDim];
    const float* after = records.decay[newest];
    for (int i = newest - 1; i >= 0; --i) {
      weigh_record(keys_.k[i], records.decay[i], after, key, weight);
      after = weight;
      dot_rows(key, 0, terms_[i]);
    }
    for (int r = 0; r < rows_; ++r) multiplied<Isa>(row_[r], after, key_dim_, row_[r]);
  }

  /// key = k * after, weight = decay * after.
  void weigh_record(const float* k, const float* decay, const float* after, float* key,
                    float* weight) const {
    for_each_vector([&](std::int64_t n, auto load, auto store) {
      const V a = load(after + n);
      store(load(k + n) * a, key + n);
      store(load(decay + n) * a, weight + n);
    });
  }

  // ---- Products over key_dim ----

  /// f(n, load, store) for every vector of key_dim.
  template <typename F>
  void for_each_vector(F f) const {
    std::int64_t n = 0;
    for (; n + V::kLanes <= key_dim_; n += V::kLanes) {
      f(n, [](const float* p) { return V::load(p); }, [](V x, float* p) { x.store(p); });
    }
    if (n < key_dim_) {
      const auto rest = static_cast<int>(key_dim_ - n);
      f(
          n, [rest](const float* p) { return V::load_partial(p, rest); },
          [rest](V x, float* p) { x.store_partial(p, rest); });
    }
  }

  /// out[r] = x . row r for all rows from `first` on, an even number of them.
  void dot_rows(const float* x, int first, float* out) const {
    for (int r = first; r < rows_; r += 8) {
      switch (rows_ - r) {
        case 2:
          dot_group<2>(x, r, out + r);
          break;
        case 4:
          dot_group<4>(x, r, out + r);
          break;
        case 6:
          dot_group<6>(x, r, out + r);
          break;
        default:
          dot_group<8>(x, r, out + r);
      }
    }
  }

  template <int kCount>
  void dot_group(const float* x, int first, float* out) const {
    V sum[8];
    for (V& lane : sum) lane = V::zero();
    const float(*rows)[kMaxKeyDim] = row_ + first;
    for_each_vector([&](std::int64_t n, auto load, [[maybe_unused]] auto store) {
      const V xn = load(x + n);
      for (int i = 0; i < kCount; ++i) sum[i] = fma(xn, load(rows[i] + n), sum[i]);
    });
    V::sum8(sum, out);
  }

  // ---- Products over the state's rows ----

  template <typename C, int kCount, bool kPrefetch, typename State>
  void read_rows(const State* s, const BlockPlace& place, const float* const* deltas, int first,
                 V (*out)[C::N]) const {
    constexpr int N = C::N;
    V sum[kCount][N];
    for (auto& row : sum) {
      for (V& lane : row) lane = V::zero();
    }
    // One base and constant distances: a pointer per row would not fit into registers.
    const float(*rows)[kMaxKeyDim] = row_ + first;
    const auto add = [&](const V* vector, auto multiplier) {
      for (int r = 0; r < kCount; ++r) {
        const V x = V::broadcast(multiplier(r));
        for (int j = 0; j < N; ++j) sum[r][j] = fma(vector[j], x, sum[r][j]);
      }
    };
    V vector[N];
    for (std::int64_t n = 0; s != nullptr && n < key_dim_; ++n) {
      const State* at = s + n * place.pitch;
      if constexpr (kPrefetch) prefetch_next_tile<C>(at, place.pitch, key_dim_);
      for (int j = 0; j < N; ++j) vector[j] = C::load(at, j);
      add(vector, [&](int r) { return rows[r][n]; });
    }
    if constexpr (!kChannelDecay) {
      for (int r = 0; r < kCount; ++r) {
        const V weight = V::broadcast(state_weight_[first + r]);
        for (V& lane : sum[r]) lane = weight * lane;
      }
    }
    for (int i = 0; i < live_; ++i) {
      for (int j = 0; j < N; ++j) vector[j] = C::load(deltas[i] + place.column, j);
      add(vector, [&](int r) { return terms_[i][first + r]; });
    }
    for (int r = 0; r < kCount; ++r) {
      for (int j = 0; j < N; ++j) out[first + r][j] = sum[r][j];
    }
  }

  const Tokens& tokens_;
  const RecordKeys<Isa>& keys_;
  std::int64_t key_dim_;
  int live_;
  int rows_;
  alignas(64) float row_[kMaxRows][kMaxKeyDim];  // with a decay per channel, they carry decays
  // By entry. Sums are stored eight at a time, so there is room past the last.
  float scores_[kMaxTerms][kMaxRows + 8];  // before decays; one decay per token
  float terms_[kMaxTerms][kMaxRows + 8];
  float state_weight_[kMaxRows];  // one decay per token
};

/// The triangular system of the row's deltas for a block of columns, and its outputs. `read` is
/// what the window's rows take from the checkpoint and the records. With kAsStored, later tokens
/// see deltas as they will be stored, in `stored_type`.
template <typename C, bool kAsStored, typename Isa, bool kChannelDecay>
void solve_block(const Window<Isa, kChannelDecay>& window, int tokens, std::int64_t column,
                 const Vec<Isa> (*read)[C::N], const float* beta, const float* const* v,
                 DType stored_type, float* const* delta, float* const* o) {
  using V = Vec<Isa>;
  constexpr int N = C::N;
  V own[kMaxTokens][N];
  for (int t = 0; t < tokens; ++t) {
    V hk[N];
    V hq[N];
    for (int j = 0; j < N; ++j) {
      hk[j] = read[2 * t][j];
      hq[j] = read[2 * t + 1][j];
    }
    for (int i = 0; i < t; ++i) {
      const V wk = V::broadcast(window.term(window.live() + i, 2 * t));
      const V wq = V::broadcast(window.term(window.live() + i, 2 * t + 1));
      for (int j = 0; j < N; ++j) {
        hk[j] = fma(wk, own[i][j], hk[j]);
        hq[j] = fma(wq, own[i][j], hq[j]);
      }
    }
    const V b = V::broadcast(beta[t]);
    const V wq = V::broadcast(window.term(window.live() + t, 2 * t + 1));
    for (int j = 0; j < N; ++j) {
      own[t][j] = b * (C::load(v[t] + column, j) - hk[j]);
      if constexpr (kAsStored) own[t][j] = rounded<Isa>(stored_type, own[t][j]);
      C::store(fma(wq, own[t][j], hq[j]), o[t] + column, j);
      C::store(own[t][j], delta[t] + column, j);
    }
  }
}

}  // namespace replayssm::cpu::delta
