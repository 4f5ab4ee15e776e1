// Folding the live records into a block of a head's state, in either mode:
//
//   exact  the recurrence over the recorded k, v, decay and beta, in plain decoding's order
//   fast   S = w(-1) S + sum_i w(i) k'_i d_i^T as one product of the recorded deltas d_i, with w(i)
//          the product of the decays after record i (-1: of all)
//
// Where decays are deferred (one per head, an f32 checkpoint), an exact fold goes on from the R and
// c that are stored; a fast one leaves S.
//
// The state is decoded once and encoded once.
#pragma once

#include "ops/delta_rule/cpu/recurrence-inl.h"

namespace replayssm::cpu::delta {

template <typename Isa, typename State, bool kChannelDecay>
class Fold {
  using V = Vec<Isa>;
  using Records = HeadRecords<Isa, kChannelDecay>;

 public:
  /// `keys` outlives this.
  Fold(const DeltaRuleTask& task, const RecordKeys<Isa>& keys)
      : keys_(keys),
        fast_(task.flush == FlushMode::kFast),
        count_(static_cast<int>(task.live)),
        key_dim_(task.key_dim) {}

  /// What `prepare` wants of a head's records.
  typename Records::Column wanted() const {
    return fast_ ? Records::Column::kDelta : Records::Column::kValue;
  }

  /// Makes the head whose records these are the current one; `before`: what is deferred in its
  /// state.
  void prepare(const Records& records, DeferredDecay before) {
    records_ = &records;
    deferred_ = before;
    if (count_ == 0) return;
    if (fast_) {
      weigh_keys();
      deferred_ = {};
    } else if constexpr (!kChannelDecay) {
      defer_decays<false>(records.decay, count_, deferred_, advances_);
      if (!defers_decay(DTypeOf<State>::value)) deferred_ = {};
    }
  }

  /// What is deferred in the state that `block` leaves.
  DeferredDecay deferred() const { return deferred_; }

  /// The records into the block at `place`, from `in` (null: zero) to `out`, which may be `in`.
  template <typename C>
  void block(const BlockPlace& place, const State* in, State* out) const {
    if (count_ == 0) {
      copy_block<C>(place.pitch, in, out);
    } else if (fast_) {
      add_products<C>(place, in, out);
    } else {
      rerun<C>(place, in, out);
    }
  }

 private:
  template <typename C>
  void copy_block(std::int64_t pitch, const State* in, State* out) const {
    for (std::int64_t n = 0; n < key_dim_; ++n) {
      for (int i = 0; i < C::N; ++i) {
        C::store(in == nullptr ? V::zero() : C::load(in + n * pitch, i), out + n * pitch, i);
      }
    }
  }

  // ---- Exact ----

  auto decays() const {
    if constexpr (kChannelDecay) {
      return records_->decay;
    } else {
      return advances_;
    }
  }

  template <typename C>
  void rerun(const BlockPlace& place, const State* in, State* out) const {
    const Recurrence<Isa, State, kChannelDecay> r{
        count_, key_dim_, keys_.k, nullptr, decays(), records_->beta, records_->column};
    if constexpr (sizeof(State) < sizeof(float)) {
      alignas(64) float work[kMaxKeyDim * kBlock<Isa>];
      r.template advance<C>(place.column, in, out, place.pitch, work, kBlock<Isa>, NoOutput{});
    } else {
      r.template advance<C>(place.column, in, out, place.pitch, out, place.pitch, NoOutput{});
    }
  }

  // ---- Fast ----

  /// Running products of decays from the newest record backwards: weighted_[i] = w(i) k'_i, and
  /// w(-1) in state_weight_.
  void weigh_keys() {
    if constexpr (kChannelDecay) {
      for (std::int64_t n = 0; n < key_dim_; ++n) state_weight_[n] = 1.0f;
      for (int i = count_ - 1; i >= 0; --i) {
        multiplied<Isa>(keys_.k[i], state_weight_, key_dim_, weighted_[i]);
        multiplied<Isa>(state_weight_, records_->decay[i], key_dim_, state_weight_);
      }
    } else {
      float weight = 1.0f;
      for (int i = count_ - 1; i >= 0; --i) {
        scaled<Isa>(keys_.k[i], key_dim_, weight, weighted_[i]);
        weight *= records_->decay[i][0];
      }
      weight *= deferred_.value();
      for (std::int64_t n = 0; n < key_dim_; ++n) state_weight_[n] = weight;
    }
  }

  /// A few rows of the state at a time stay in registers while the records pass, oldest first.
  template <typename C>
  void add_products(const BlockPlace& place, const State* in, State* out) const {
    constexpr int kRows = 4;  // divides key_dim, a multiple of 8
    constexpr int N = C::N;
    for (std::int64_t n = 0; n < key_dim_; n += kRows) {
      V s[kRows][N];
      for (int r = 0; r < kRows; ++r) {
        const std::int64_t row = (n + r) * place.pitch;
        prefetch_next_tile<C>(out + row, place.pitch, key_dim_);
        const V weight = V::broadcast(state_weight_[n + r]);
        for (int j = 0; j < N; ++j) {
          s[r][j] = in == nullptr ? V::zero() : weight * C::load(in + row, j);
        }
      }
      for (int i = 0; i < count_; ++i) {
        V d[N];
        for (int j = 0; j < N; ++j) d[j] = C::load(records_->column[i] + place.column, j);
        for (int r = 0; r < kRows; ++r) {
          const V k = V::broadcast(weighted_[i][n + r]);
          for (int j = 0; j < N; ++j) s[r][j] = fma(k, d[j], s[r][j]);
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int j = 0; j < N; ++j) C::store(s[r][j], out + (n + r) * place.pitch, j);
      }
    }
  }

  const RecordKeys<Isa>& keys_;
  const Records* records_ = nullptr;
  bool fast_;
  int count_;
  std::int64_t key_dim_;
  DeferredDecay deferred_;
  DeferredAdvance advances_[kChannelDecay ? 1 : kMaxLive];  // of an exact fold, one decay per token
  alignas(64) float weighted_[kMaxLive][kMaxKeyDim];
  alignas(64) float state_weight_[kMaxKeyDim];
};

}  // namespace replayssm::cpu::delta
