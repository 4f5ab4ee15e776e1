// The delta rule's CPU kernels, written once on Vec<Isa> for both families: kChannelDecay chooses
// between a decay per key channel and one per head.
//
//   columns-inl.h     how a head's state is walked: blocks of columns that stay in L1
//   inputs-inl.h      what enters and leaves: keys, values and gates of tokens and of records
//   recurrence-inl.h  the recurrence token by token: plain decoding, prompts, exact flushes
//   fold-inl.h        records into the state, exact or fast
//   window-inl.h      outputs of tentative tokens from the checkpoint and the records
//
// Memory is read once and written at most once whatever the number of tokens. A read copy stands
// for the checkpoint where a tentative row reads it, and is written wherever the checkpoint is.
#pragma once

#include "ops/delta_rule/cpu/fold-inl.h"
#include "ops/delta_rule/cpu/window-inl.h"

namespace replayssm::cpu {

template <typename Isa, typename State, bool kChannelDecay>
class DeltaRuleKernel {
  using V = Vec<Isa>;
  using Recurrence = delta::Recurrence<Isa, State, kChannelDecay>;
  using Fold = delta::Fold<Isa, State, kChannelDecay>;
  using Keys = delta::RecordKeys<Isa>;
  using Records = delta::HeadRecords<Isa, kChannelDecay>;
  using Window = delta::Window<Isa, kChannelDecay>;
  static constexpr int kMaxTokens = delta::kMaxTokens;
  // Tokens of a committed row taken through a head's state together.
  static constexpr int kChunk = 8;

 public:
  static void fold(const DeltaRuleTask& task) {
    fold_heads(task);
    write_copy(task);
  }

  static void tentative(const DeltaRuleTask& task) { replay<false>(task); }
  static void flush(const DeltaRuleTask& task) { replay<true>(task); }

  static void committed(const DeltaRuleTask& task) {
    const bool folds = task.live > 0;
    if (folds) fold_heads(task);
    delta::TokenVectors<Isa, kChunk> tokens;
    ChunkGates gates;
    delta::TokenValues<Isa, kChunk> values;
    for (std::int64_t first = 0; first < task.tokens; first += kChunk) {
      const std::int64_t rest = task.tokens - first;
      const int count = rest < kChunk ? static_cast<int>(rest) : kChunk;
      tokens.read(task, first, count);
      // After the first write the state is in place, also where it came from elsewhere.
      const bool in_place = folds || first > 0;
      for (std::int64_t head = task.head_begin; head < task.head_end; ++head) {
        gates.compute(task, head, first, count);
        values.enter(task, head, first, count);
        DeferredAdvance advances[kChunk];
        const Recurrence r{count,
                           task.key_dim,
                           tokens.k,
                           tokens.q,
                           decays(task, head, gates, count, in_place, advances),
                           gates.beta,
                           values.v};
        State* out = state_out(task, head);
        const State* in = in_place ? out : state_in(task, head);
        delta::for_each_block<Isa>(task, [&](auto columns, const delta::BlockPlace& place) {
          using C = decltype(columns);
          State* to = out + place.offset;
          r.template advance<C>(place.column, offset(in, place), to, place.pitch, to, place.pitch,
                                [&](int t, const V* o) {
                                  for (int i = 0; i < C::N; ++i) {
                                    C::store(o[i], values.o[t] + place.column, i);
                                  }
                                });
        });
        values.leave_outputs(task, head, first, count);
      }
    }
    if (folds || task.tokens > 0) write_copy(task);
  }

 private:
  using ChunkGates = delta::HeadGates<Isa, kChannelDecay, kChunk>;

  /// Decays of a committed row's tokens as the recurrence takes them: in `advances`, if deferred.
  static auto decays(const DeltaRuleTask& task, std::int64_t head, const ChunkGates& gates,
                     int count, bool in_place, DeferredAdvance* advances) {
    if constexpr (kChannelDecay) {
      return gates.decay;
    } else {
      constexpr bool kStoresS = !defers_decay(DTypeOf<State>::value);
      DeferredDecay deferred = in_place ? deferred_out(task, head, task.value_dim)
                                        : deferred_in(task, head, task.value_dim);
      delta::defer_decays<kStoresS>(gates.decay, count, deferred, advances);
      store_deferred(task, head, task.value_dim, deferred);
      return advances;
    }
  }

  static const State* state_in(const DeltaRuleTask& task, std::int64_t head) {
    return task.checkpoint_in == nullptr ? nullptr
                                         : static_cast<const State*>(task.checkpoint_in) +
                                               head * task.key_dim * task.value_dim;
  }
  static State* state_out(const DeltaRuleTask& task, std::int64_t head) {
    return static_cast<State*>(task.checkpoint) + head * task.key_dim * task.value_dim;
  }
  static const State* offset(const State* state, const delta::BlockPlace& place) {
    return state == nullptr ? nullptr : state + place.offset;
  }

  static void write_copy(const DeltaRuleTask& task) {
    if (!task.copy.exists()) return;
    encode_read_copy(task.copy, task.checkpoint, DTypeOf<State>::value, task.head_begin,
                     task.head_end);
  }

  static void fold_heads(const DeltaRuleTask& task) {
    Keys keys;
    keys.read(task);
    Fold fold(task, keys);
    for (std::int64_t head = task.head_begin; head < task.head_end; ++head) {
      Records records;
      records.read(task, head, fold.wanted());
      fold.prepare(records, deferred_in(task, head, task.value_dim));
      store_deferred(task, head, task.value_dim, fold.deferred());
      const State* in = state_in(task, head);
      State* out = state_out(task, head);
      delta::for_each_block<Isa>(task, [&](auto columns, const delta::BlockPlace& place) {
        fold.template block<decltype(columns)>(place, offset(in, place), out + place.offset);
      });
    }
  }

  template <bool kFlush>
  static void replay(const DeltaRuleTask& task) {
    const auto tokens = static_cast<int>(task.tokens);
    Keys keys;
    keys.read(task);
    Fold fold(task, keys);
    const auto wanted = kFlush ? fold.wanted() : Records::Column::kDelta;
    typename Window::Tokens vectors;
    vectors.read(task, 0, tokens);
    // After a flush the records are part of the state and the window is the row's own tokens.
    Window window(task, vectors, keys, kFlush ? 0 : static_cast<int>(task.live));
    typename Window::Gates gates;
    Records records;
    delta::TokenValues<Isa, kMaxTokens> values;
    delta::TokenDeltas<Isa> deltas;
    // What a fast flush will fold is the stored delta, so the row's later tokens correct its
    // rounding; an exact flush will not see it.
    const bool as_stored = task.flush == FlushMode::kFast && task.activation != DType::kF32;
    const auto solve = [&]<typename C, bool kAsStored>(const delta::BlockPlace& place,
                                                       const V(*read)[C::N]) {
      delta::solve_block<C, kAsStored, Isa>(window, tokens, place.column, read, gates.beta,
                                            values.v, task.activation, deltas.d, values.o);
    };
    for (std::int64_t head = task.head_begin; head < task.head_end; ++head) {
      gates.compute(task, head, 0, tokens);
      records.read(task, head, wanted);
      values.enter(task, head, 0, tokens);
      deltas.enter(task, head);
      DeferredDecay deferred = deferred_in(task, head, task.value_dim);
      if constexpr (kFlush) {
        fold.prepare(records, deferred);
        deferred = fold.deferred();
        store_deferred(task, head, task.value_dim, deferred);
      }
      window.prepare(gates, records, deferred);
      const State* in = state_in(task, head);
      State* out = state_out(task, head);
      int block = 0;
      delta::for_each_block<Isa>(task, [&](auto columns, const delta::BlockPlace& place) {
        using C = decltype(columns);
        prefetch_next_head(task, head, block++, wanted);
        const State* s = offset(in, place);
        if constexpr (kFlush) {
          fold.template block<C>(place, s, out + place.offset);
          s = out + place.offset;
        }
        V read[2 * kMaxTokens][C::N];
        read_block<C, kFlush>(task, head, place, s, window, records, read);
        if (as_stored) {
          solve.template operator()<C, true>(place, read);
        } else {
          solve.template operator()<C, false>(place, read);
        }
      });
      values.leave_outputs(task, head, 0, tokens);
      deltas.leave_all(task, head);
      append(task, head, gates);
    }
    if (task.appends_key) append_keys(task, vectors.k_scale);
  }

  /// What the window's rows take from the block at `s` (null: zero), which a flush has just stored,
  /// or from its read copy, and from the records' deltas.
  template <typename C, bool kFlush>
  static void read_block(const DeltaRuleTask& task, std::int64_t head,
                         const delta::BlockPlace& place, const State* s, const Window& window,
                         const Records& records, V (*out)[C::N]) {
    if (s != nullptr && task.copy.exists()) {
      read_copy_block<C, kFlush>(task, head, place, window, records, out);
    } else {
      window.template read<C, true>(s, place, records.column, out);
    }
  }

  /// Out of line: inlined, it takes 5% of the time of verifying without a copy.
  template <typename C, bool kFlush>
  [[gnu::noinline]] static void read_copy_block(const DeltaRuleTask& task, std::int64_t head,
                                                const delta::BlockPlace& place,
                                                const Window& window, const Records& records,
                                                V (*out)[C::N]) {
    constexpr std::int64_t kBlock = delta::kBlock<Isa>;
    static_assert(kBlock % kReadCopyTile == 0);
    alignas(64) float block[delta::kMaxKeyDim * kBlock];
    for (std::int64_t c = 0; c < C::kWidth; c += kReadCopyTile) {
      const std::int64_t column = place.column + c;
      if constexpr (kFlush) {
        encode_read_copy_tile(task.copy, task.checkpoint, DTypeOf<State>::value, head, column);
      }
      decode_read_copy_tile(task.copy, head, column, block + c, 1, kBlock);
    }
    const delta::BlockPlace in_block{.column = place.column, .offset = 0, .pitch = kBlock};
    window.template read<C, false>(block, in_block, records.column, out);
  }

  RSSM_ALWAYS_INLINE static void prefetch(DType type, const void* data, std::int64_t first,
                                          std::int64_t n) {
    delta::prefetch_lines(delta::at(type, data, first), n * delta::bytes_of(type));
  }

  /// One block's share of asking for what the next head reads and writes beside its state: short
  /// runs of many fields, too short for hardware prefetchers. Where the next head has another key
  /// head, its keys and queries too. Past the last head these are harmless hints.
  RSSM_ALWAYS_INLINE static void prefetch_next_head(const DeltaRuleTask& task, std::int64_t head,
                                                    int block, typename Records::Column wanted) {
    const std::int64_t blocks = (task.value_dim + delta::kBlock<Isa> - 1) / delta::kBlock<Isa>;
    const std::int64_t key_head = head + 1 < task.head_end ? task.key_head : task.key_head + 1;
    for (std::int64_t i = block; i < task.live; i += blocks) {
      prefetch_place(task, head + 1, key_head, (task.first_place + i) % task.places,
                     wanted == Records::Column::kDelta, wanted == Records::Column::kValue);
    }
    for (std::int64_t t = block; t < task.tokens; t += blocks) {
      prefetch_place(task, head + 1, key_head, delta::append_place(task, static_cast<int>(t)), true,
                     task.flush == FlushMode::kExact);
      prefetch_token(task, head + 1, key_head, t);
    }
  }

  RSSM_ALWAYS_INLINE static void prefetch_place(const DeltaRuleTask& task, std::int64_t head,
                                                std::int64_t key_head, std::int64_t place,
                                                bool delta, bool value) {
    const std::int64_t at = head * task.places + place;
    if constexpr (kChannelDecay) {
      prefetch(DType::kF32, task.ring_decay, at * task.key_dim, task.key_dim);
    }
    if (delta) prefetch(task.activation, task.ring_delta, at * task.value_dim, task.value_dim);
    if (value) prefetch(task.activation, task.ring_v, at * task.value_dim, task.value_dim);
    if (key_head == task.key_head) return;
    prefetch(task.activation, task.ring_k, (key_head * task.places + place) * task.key_dim,
             task.key_dim);
  }

  RSSM_ALWAYS_INLINE static void prefetch_token(const DeltaRuleTask& task, std::int64_t head,
                                                std::int64_t key_head, std::int64_t t) {
    prefetch(task.activation, task.v, t * task.v_token_stride + head * task.v_head_stride,
             task.value_dim);
    prefetch(task.activation, task.o, t * task.o_token_stride + head * task.o_head_stride,
             task.value_dim);
    if constexpr (kChannelDecay) {
      prefetch(task.gate_type, task.gate, t * task.gate_token_stride + head * task.gate_head_stride,
               task.key_dim);
    }
    if (key_head == task.key_head) return;
    prefetch(task.activation, task.q, t * task.q_token_stride + key_head * task.q_head_stride,
             task.key_dim);
    prefetch(task.activation, task.k, t * task.k_token_stride + key_head * task.k_head_stride,
             task.key_dim);
  }

  static void append(const DeltaRuleTask& task, std::int64_t head,
                     const typename Window::Gates& gates) {
    const std::int64_t decays = kChannelDecay ? task.key_dim : 1;
    for (int t = 0; t < task.tokens; ++t) {
      const std::int64_t at = head * task.places + delta::append_place(task, t);
      std::memcpy(task.ring_decay + at * decays, gates.decay[t],
                  sizeof(float) * static_cast<std::size_t>(decays));
      if (task.flush == FlushMode::kFast) continue;
      std::memcpy(delta::at(task.activation, task.ring_v, at * task.value_dim),
                  delta::at(task.activation, task.v,
                            delta::TokenValues<Isa, kMaxTokens>::value_at(task, head, t)),
                  static_cast<std::size_t>(task.value_dim * delta::bytes_of(task.activation)));
      task.ring_beta[at] = gates.beta[t];
    }
  }

  static void append_keys(const DeltaRuleTask& task, const float* k_scale) {
    for (int t = 0; t < task.tokens; ++t) {
      const std::int64_t at = task.key_head * task.places + delta::append_place(task, t);
      std::memcpy(delta::at(task.activation, task.ring_k, at * task.key_dim),
                  delta::at(task.activation, task.k, Window::Tokens::key_at(task, t)),
                  static_cast<std::size_t>(task.key_dim * delta::bytes_of(task.activation)));
      task.ring_k_scale[at] = k_scale[t];
    }
  }
};

/// The kernels of one instruction set.
template <typename Isa>
struct DeltaRuleKernelTable {
  template <typename State, bool kChannelDecay>
  static constexpr DeltaRuleKernels entry() {
    using K = DeltaRuleKernel<Isa, State, kChannelDecay>;
    return {
        .fold = K::fold, .tentative = K::tentative, .flush = K::flush, .committed = K::committed};
  }
  /// By [channel decay].
  template <typename State>
  static constexpr DeltaRuleKernels kPair[2] = {entry<State, false>(), entry<State, true>()};

  static const DeltaRuleKernels& get(DType checkpoint, bool channel_decay) {
    return checkpoint == DType::kF32    ? kPair<float>[channel_decay]
           : checkpoint == DType::kBF16 ? kPair<BF16>[channel_decay]
                                        : kPair<F16>[channel_decay];
  }
};

}  // namespace replayssm::cpu
