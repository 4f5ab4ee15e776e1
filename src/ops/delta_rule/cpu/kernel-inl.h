// The delta rule's CPU kernels, written once on Vec<Isa> for both families: kChannelDecay chooses
// between a decay per key channel and one per head.
//
// The state of a head is walked in blocks of columns (of value_dim) that stay in L1: within a
// block, rows (of key_dim) are contiguous or nearly so, and every column is a lane, so that S k and
// S q need no horizontal sums. Memory is read once and written at most once whatever the number of
// tokens.
//
// Bit-equality rests on three rules. An element of the state is advanced by fma(S, decay, k * d),
// in token order, wherever that happens. The product (decay * k) . S that gives d, and S . q, run
// over the rows in order in two accumulators, even rows and odd rows, added at the end. Columns
// never meet. Blocking and the length of a row of tokens therefore never change a result.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "cpu/gates.h"
#include "cpu/simd/vec_math.h"
#include "ops/delta_rule/cpu/kernel.h"
#include "ops/delta_rule/shape.h"

namespace replayssm::cpu {

template <typename Isa, typename State, typename Act, bool kChannelDecay>
class DeltaRuleKernel {
  using V = Vec<Isa>;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kMaxLive = ReplayLimits::kMaxWindow;
  static constexpr int kMaxTokens = ReplayLimits::kMaxDraftCapacity;
  static constexpr int kMaxTerms = kMaxLive + kMaxTokens;
  static constexpr int kMaxKeyDim = 256;
  // Tokens of a committed row taken through a head's state together.
  static constexpr int kChunk = 8;
  static constexpr int kBlock = 2 * kLanes;  // columns in registers; divides a tile
  static constexpr bool kNarrow = sizeof(State) < sizeof(float);
  static constexpr int kDecayDim = kChannelDecay ? kMaxKeyDim : 1;
  static_assert(kDeltaRuleTile % kBlock == 0);

  /// N vectors of columns. Widths are multiples of 8, so the last vector may be half a 512-bit one.
  template <int kVectors, bool kPartial>
  struct Columns {
    static constexpr int N = kVectors;
    static constexpr int kRest = 8;
    static constexpr int kWidth = kPartial ? (N - 1) * kLanes + kRest : N * kLanes;

    template <typename T>
    static V load(const T* p, int i) {
      if constexpr (kPartial) {
        if (i == N - 1) return V::load_partial(p + i * kLanes, kRest);
      }
      return V::load(p + i * kLanes);
    }
    template <typename T>
    static void store(V x, T* p, int i) {
      if constexpr (kPartial) {
        if (i == N - 1) {
          x.store_partial(p + i * kLanes, kRest);
          return;
        }
      }
      x.store(p + i * kLanes);
    }
  };

  /// f(Columns, first column, offset of (row 0, that column) in the head's state, elements from row
  /// to row) for every block of columns, in the order of memory.
  template <typename F>
  static void for_each_block(const DeltaRuleTask& task, F f) {
    for (std::int64_t tile = 0; tile < task.value_dim; tile += kDeltaRuleTile) {
      const std::int64_t rest = task.value_dim - tile;
      const std::int64_t pitch = rest < kDeltaRuleTile ? rest : kDeltaRuleTile;
      for (std::int64_t c = 0; c < pitch; c += kBlock) {
        const std::int64_t width = pitch - c;
        const std::int64_t offset = tile * task.key_dim + c;
        if (width >= kBlock) {
          f(Columns<2, false>{}, tile + c, offset, pitch);
        } else if constexpr (kLanes > 8) {
          if (width > kLanes) {
            f(Columns<2, true>{}, tile + c, offset, pitch);
          } else if (width == kLanes) {
            f(Columns<1, false>{}, tile + c, offset, pitch);
          } else {
            f(Columns<1, true>{}, tile + c, offset, pitch);
          }
        } else {
          f(Columns<1, false>{}, tile + c, offset, pitch);
        }
      }
    }
  }

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
    alignas(64) float k[kChunk][kMaxKeyDim];
    alignas(64) float q[kChunk][kMaxKeyDim];
    float scale[kChunk];
    HeadGates<kChunk> gates;
    for (std::int64_t first = 0; first < task.tokens; first += kChunk) {
      const std::int64_t rest = task.tokens - first;
      const int count = rest < kChunk ? static_cast<int>(rest) : kChunk;
      prepare_tokens(task, first, count, k, q, scale);
      // After the first write the state is in place, also where it came from elsewhere.
      const bool in_place = folds || first > 0;
      for (std::int64_t head = task.head_begin; head < task.head_end; ++head) {
        gates.compute(task, head, first, count);
        State* out = state_out(task, head);
        const State* in = in_place ? out : state_in(task, head);
        Recurrence r{count, k, gates.decay, gates.beta};
        for_each_block(task, [&](auto columns, std::int64_t column, std::int64_t at,
                                 std::int64_t pitch) {
          const auto token_v_at = [&](int t) { return token_v(task, first + t, head) + column; };
          const auto output = [&](int t, const V* o) {
            Act* to = token_o(task, first + t, head) + column;
            for (int i = 0; i < columns.N; ++i) columns.store(o[i], to, i);
          };
          advance<decltype(columns), State>(r, q, task.key_dim, in == nullptr ? nullptr : in + at,
                                            out + at, pitch, out + at, pitch, token_v_at, output);
        });
      }
    }
    if (folds || task.tokens > 0) write_copy(task);
  }

 private:
  // ---- Addressing ----

  static const State* state_in(const DeltaRuleTask& task, std::int64_t head) {
    return task.checkpoint_in == nullptr ? nullptr
                                         : static_cast<const State*>(task.checkpoint_in) +
                                               head * task.key_dim * task.value_dim;
  }
  static State* state_out(const DeltaRuleTask& task, std::int64_t head) {
    return static_cast<State*>(task.checkpoint) + head * task.key_dim * task.value_dim;
  }
  static const Act* token_q(const DeltaRuleTask& task, std::int64_t token) {
    return static_cast<const Act*>(task.q) + token * task.q_token_stride +
           task.key_head * task.q_head_stride;
  }
  static const Act* token_k(const DeltaRuleTask& task, std::int64_t token) {
    return static_cast<const Act*>(task.k) + token * task.k_token_stride +
           task.key_head * task.k_head_stride;
  }
  static const Act* token_v(const DeltaRuleTask& task, std::int64_t token, std::int64_t head) {
    return static_cast<const Act*>(task.v) + token * task.v_token_stride +
           head * task.v_head_stride;
  }
  static Act* token_o(const DeltaRuleTask& task, std::int64_t token, std::int64_t head) {
    return static_cast<Act*>(task.o) + token * task.o_token_stride + head * task.o_head_stride;
  }
  static std::int64_t append_place(const DeltaRuleTask& task, int token) {
    return (task.first_place + task.live + token) % task.places;
  }

  static void write_copy(const DeltaRuleTask& task) {
    if (!task.copy.exists()) return;
    encode_read_copy(task.copy, task.checkpoint, DTypeOf<State>::value, task.head_begin,
                     task.head_end);
  }

  /// Asks for the same row of the next tile, while arithmetic on this one leaves memory idle. Heads
  /// follow one another, so past the last tile this is the next head's; past the last head it is a
  /// harmless hint.
  template <typename C, typename T>
  static void prefetch_next_tile(const T* row, std::int64_t pitch, std::int64_t key_dim) {
    constexpr std::int64_t kLine = 64 / static_cast<std::int64_t>(sizeof(T));
    for (std::int64_t i = 0; i < C::N * kLanes; i += kLine) {
      __builtin_prefetch(row + key_dim * pitch + i);
    }
  }

  /// One block's share of asking for what the next head reads of the live records: a few short runs
  /// per field, too short for hardware prefetchers. Where the next head has another key head, its
  /// keys too. Past the last head these are harmless hints.
  template <bool kFlush>
  static void prefetch_next_records(const DeltaRuleTask& task, std::int64_t head, int block) {
    const std::int64_t blocks = (task.value_dim + kBlock - 1) / kBlock;
    const auto lines = [](const auto* p, std::int64_t n) {
      constexpr std::int64_t kLine = 64 / static_cast<std::int64_t>(sizeof *p);
      for (std::int64_t i = 0; i < n; i += kLine) __builtin_prefetch(p + i);
    };
    for (std::int64_t i = block; i < task.live; i += blocks) {
      const std::int64_t place = (task.first_place + i) % task.places;
      const std::int64_t at = (head + 1) * task.places + place;
      if constexpr (kChannelDecay) lines(task.ring_log_decay + at * task.key_dim, task.key_dim);
      const void* values = kFlush ? task.ring_v : task.ring_delta;
      lines(static_cast<const Act*>(values) + at * task.value_dim, task.value_dim);
      if (head + 1 < task.head_end) continue;
      const std::int64_t key_at = (task.key_head + 1) * task.places + place;
      lines(static_cast<const Act*>(task.ring_k) + key_at * task.key_dim, task.key_dim);
    }
  }

  // ---- Keys, queries and gates of tokens and records ----

  /// 1 / |x|, or 1 where the model does not normalize.
  static float unit_scale(const DeltaRuleTask& task, const Act* x) {
    if (!task.normalize) return 1.0f;
    V sum = V::zero();
    std::int64_t n = 0;
    for (; n + kLanes <= task.key_dim; n += kLanes) {
      const V xn = V::load(x + n);
      sum = fma(xn, xn, sum);
    }
    if (n < task.key_dim) {
      const V xn = V::load_partial(x + n, static_cast<int>(task.key_dim - n));
      sum = fma(xn, xn, sum);
    }
    return 1.0f / std::sqrt(sum.sum() + task.norm_epsilon);
  }

  static void scaled(const Act* x, std::int64_t n, float scale, float* y) {
    map_vectors<Isa>(x, n, y, [scale](V a, std::int64_t) { return V::broadcast(scale) * a; });
  }

  /// k and q of tokens first.. as the recurrence takes them, and the scales of k.
  static void prepare_tokens(const DeltaRuleTask& task, std::int64_t first, int count,
                             float (*k)[kMaxKeyDim], float (*q)[kMaxKeyDim], float* k_scale) {
    for (int t = 0; t < count; ++t) {
      const Act* raw_k = token_k(task, first + t);
      const Act* raw_q = token_q(task, first + t);
      k_scale[t] = unit_scale(task, raw_k);
      scaled(raw_k, task.key_dim, k_scale[t], k[t]);
      scaled(raw_q, task.key_dim, unit_scale(task, raw_q) * task.q_scale, q[t]);
    }
  }

  /// The gates of one head for up to kCount tokens.
  template <int kCount>
  struct HeadGates {
    alignas(64) float log_decay[kCount][kDecayDim];
    alignas(64) float decay[kCount][kDecayDim];
    float beta[kCount];

    void compute(const DeltaRuleTask& task, std::int64_t head, std::int64_t first, int count) {
      const V a_log = V::broadcast(task.a_log == nullptr ? 0.0f : task.a_log[head]);
      const auto log_decay_of = [&](V raw_plus_bias) {
        return task.bounded ? bounded_log_decay<Isa>(a_log, raw_plus_bias, task.lower_bound)
                            : softplus_log_decay<Isa>(a_log, raw_plus_bias);
      };
      const std::int64_t at = first * task.gate_token_stride + head * task.gate_head_stride;
      if constexpr (kChannelDecay) {
        const float* bias = task.dt_bias == nullptr ? nullptr : task.dt_bias + head * task.key_dim;
        const auto of_token = [&](const auto* raw, int t) {
          map_vectors<Isa>(raw, task.key_dim, log_decay[t], [&](V x, std::int64_t n) {
            if (bias == nullptr) return log_decay_of(x);
            const std::int64_t rest = task.key_dim - n;
            return log_decay_of(x + (rest < kLanes
                                         ? V::load_partial(bias + n, static_cast<int>(rest))
                                         : V::load(bias + n)));
          });
          exp_all(log_decay[t], task.key_dim, decay[t]);
        };
        for (int t = 0; t < count; ++t) {
          const std::int64_t token = at + t * task.gate_token_stride;
          if (task.gate_is_f32) {
            of_token(static_cast<const float*>(task.gate) + token, t);
          } else {
            of_token(static_cast<const Act*>(task.gate) + token, t);
          }
        }
      } else {
        float raw[kCount];
        gather(task.gate, task.gate_is_f32, at, task.gate_token_stride, count, raw);
        const V bias = V::broadcast(task.dt_bias == nullptr ? 0.0f : task.dt_bias[head]);
        map_vectors<Isa>(raw, count, &log_decay[0][0],
                         [&](V x, std::int64_t) { return log_decay_of(x + bias); });
        exp_all(&log_decay[0][0], count, &decay[0][0]);
      }
      float raw[kCount];
      gather(task.beta, task.beta_is_f32, first * task.beta_token_stride + head,
             task.beta_token_stride, count, raw);
      map_vectors<Isa>(raw, count, beta, [&](V x, std::int64_t) {
        return delta_rule_beta<Isa>(x, task.beta_doubled);
      });
    }
  };

  static void gather(const void* data, bool is_f32, std::int64_t at, std::int64_t stride, int count,
                     float* out) {
    for (int t = 0; t < count; ++t) {
      const std::int64_t i = at + t * stride;
      out[t] =
          is_f32 ? static_cast<const float*>(data)[i] : to_float(static_cast<const Act*>(data)[i]);
    }
  }

  static void exp_all(const float* x, std::int64_t n, float* y) {
    map_vectors<Isa>(x, n, y, [](V a, std::int64_t) { return exp<Isa>(a); });
  }

  /// The keys of the live records, oldest first.
  struct RecordKeys {
    alignas(64) float k[kMaxLive][kMaxKeyDim];

    void read(const DeltaRuleTask& task) {
      std::int64_t place = task.first_place;
      for (std::int64_t i = 0; i < task.live; ++i) {
        const std::int64_t at = task.key_head * task.places + place;
        scaled(static_cast<const Act*>(task.ring_k) + at * task.key_dim, task.key_dim,
               task.ring_k_scale[at], k[i]);
        if (++place == task.places) place = 0;
      }
    }
  };

  /// The live records of a value head, oldest first.
  struct HeadRecords {
    alignas(64) float decay[kMaxLive][kDecayDim];
    float beta[kMaxLive];
    const Act* v[kMaxLive];
    const Act* delta[kMaxLive];

    void read(const DeltaRuleTask& task, std::int64_t head) {
      std::int64_t place = task.first_place;
      for (std::int64_t i = 0; i < task.live; ++i) {
        const std::int64_t at = head * task.places + place;
        beta[i] = task.ring_beta[at];
        v[i] = static_cast<const Act*>(task.ring_v) + at * task.value_dim;
        delta[i] = static_cast<const Act*>(task.ring_delta) + at * task.value_dim;
        if constexpr (kChannelDecay) {
          exp_all(task.ring_log_decay + at * task.key_dim, task.key_dim, decay[i]);
        } else {
          decay[i][0] = task.ring_log_decay[at];
        }
        if (++place == task.places) place = 0;
      }
      if constexpr (!kChannelDecay) exp_all(&decay[0][0], task.live, &decay[0][0]);
    }
  };

  // ---- The recurrence over a block of columns ----

  struct Recurrence {
    int count;
    const float (*k)[kMaxKeyDim];
    const float (*decay)[kDecayDim];
    const float* beta;

    /// decay * k of entry i.
    void decayed_key(int i, std::int64_t key_dim, float* out) const {
      if constexpr (kChannelDecay) {
        multiply(k[i], decay[i], key_dim, out);
      } else {
        const V a = V::broadcast(decay[i][0]);
        map_vectors<Isa>(k[i], key_dim, out, [a](V x, std::int64_t) { return x * a; });
      }
    }
  };

  /// dot = S . x over the rows.
  template <typename C, typename T>
  static void dot_rows(const T* s, std::int64_t pitch, std::int64_t key_dim, const float* x,
                       V* dot) {
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

  /// One token: S = fma(S, decay, k d), from `from` (null: zero) to `to`; with kOutput o = S . q
  /// before S is encoded; with kNext dot = S . next as the next token will find it stored.
  template <typename C, bool kOutput, bool kNext, typename From, typename To>
  static void advance_rows(const From* from, std::int64_t from_pitch, To* to, std::int64_t to_pitch,
                           std::int64_t key_dim, const float* decay, const float* k, const V* d,
                           const float* q, V* o, const float* next, V* dot) {
    constexpr int N = C::N;
    V o_sum[2][N];
    V next_sum[2][N];
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < N; ++i) o_sum[h][i] = next_sum[h][i] = V::zero();
    }
    V di[N];
    for (int i = 0; i < N; ++i) di[i] = d[i];
    V a = V::broadcast(decay[0]);
    for (std::int64_t n = 0; n < key_dim; n += 2) {
      for (int h = 0; h < 2; ++h) {
        const V kn = V::broadcast(k[n + h]);
        if constexpr (kChannelDecay) a = V::broadcast(decay[n + h]);
        if constexpr (!kNext) prefetch_next_tile<C>(to + (n + h) * to_pitch, to_pitch, key_dim);
        for (int i = 0; i < N; ++i) {
          const V old = from == nullptr ? V::zero() : C::load(from + (n + h) * from_pitch, i);
          V s = fma(old, a, kn * di[i]);
          if constexpr (kOutput) o_sum[h][i] = fma(s, V::broadcast(q[n + h]), o_sum[h][i]);
          C::store(s, to + (n + h) * to_pitch, i);
          if constexpr (kNext) {
            if constexpr (sizeof(To) < sizeof(float)) s = C::load(to + (n + h) * to_pitch, i);
            next_sum[h][i] = fma(s, V::broadcast(next[n + h]), next_sum[h][i]);
          }
        }
      }
    }
    for (int i = 0; i < N; ++i) {
      if constexpr (kOutput) o[i] = o_sum[0][i] + o_sum[1][i];
      if constexpr (kNext) dot[i] = next_sum[0][i] + next_sum[1][i];
    }
  }

  struct NoOutput {};

  /// All of r's tokens through a block: from `in` (null: zero) to `out`, with the states between
  /// them in `work`. v(i) points at entry i's values, output(i, o) takes its outputs; q may be null
  /// where there are none.
  template <typename C, typename Work, typename Values, typename Output>
  static void advance(const Recurrence& r, const float (*q)[kMaxKeyDim], std::int64_t key_dim,
                      const State* in, State* out, std::int64_t pitch, Work* work,
                      std::int64_t work_pitch, Values v, Output output) {
    constexpr int N = C::N;
    constexpr bool kOutput = !std::is_same_v<Output, NoOutput>;
    alignas(64) float next[kMaxKeyDim];
    V dot[N];
    V o[N];
    V d[N];
    for (V& lane : dot) lane = V::zero();
    r.decayed_key(0, key_dim, next);
    if (in != nullptr) dot_rows<C>(in, pitch, key_dim, next, dot);
    for (int i = 0; i < r.count; ++i) {
      const V beta = V::broadcast(r.beta[i]);
      const Act* vi = v(i);
      for (int j = 0; j < N; ++j) d[j] = beta * (C::load(vi, j) - dot[j]);
      const float* qi = kOutput ? q[i] : nullptr;
      const bool last = i + 1 == r.count;
      if (!last) r.decayed_key(i + 1, key_dim, next);
      if (i == 0 && last) {
        advance_rows<C, kOutput, false>(in, pitch, out, pitch, key_dim, r.decay[i], r.k[i], d, qi,
                                        o, next, dot);
      } else if (i == 0) {
        advance_rows<C, kOutput, true>(in, pitch, work, work_pitch, key_dim, r.decay[i], r.k[i], d,
                                       qi, o, next, dot);
      } else if (!last) {
        advance_rows<C, kOutput, true>(static_cast<const Work*>(work), work_pitch, work, work_pitch,
                                       key_dim, r.decay[i], r.k[i], d, qi, o, next, dot);
      } else {
        advance_rows<C, kOutput, false>(static_cast<const Work*>(work), work_pitch, out, pitch,
                                        key_dim, r.decay[i], r.k[i], d, qi, o, next, dot);
      }
      if constexpr (kOutput) output(i, o);
    }
  }

  /// The records through a block of a head's state, encoded once.
  template <typename C>
  static void fold_block(const DeltaRuleTask& task, const RecordKeys& keys,
                         const HeadRecords& records, std::int64_t column, const State* in,
                         State* out, std::int64_t pitch) {
    const auto count = static_cast<int>(task.live);
    if (count == 0) {
      for (std::int64_t n = 0; n < task.key_dim; ++n) {
        for (int i = 0; i < C::N; ++i) {
          C::store(in == nullptr ? V::zero() : C::load(in + n * pitch, i), out + n * pitch, i);
        }
      }
      return;
    }
    const Recurrence r{count, keys.k, records.decay, records.beta};
    const auto v = [&](int i) { return records.v[i] + column; };
    if constexpr (kNarrow) {
      alignas(64) float work[kMaxKeyDim * kBlock];
      advance<C>(r, nullptr, task.key_dim, in, out, pitch, work, kBlock, v, NoOutput{});
    } else {
      advance<C>(r, nullptr, task.key_dim, in, out, pitch, out, pitch, v, NoOutput{});
    }
  }

  static void fold_heads(const DeltaRuleTask& task) {
    RecordKeys keys;
    keys.read(task);
    for (std::int64_t head = task.head_begin; head < task.head_end; ++head) {
      HeadRecords records;
      records.read(task, head);
      fold_head(task, head, keys, records);
    }
  }

  static void fold_head(const DeltaRuleTask& task, std::int64_t head, const RecordKeys& keys,
                        const HeadRecords& records) {
    const State* in = state_in(task, head);
    State* out = state_out(task, head);
    for_each_block(
        task, [&](auto columns, std::int64_t column, std::int64_t at, std::int64_t pitch) {
          fold_block<decltype(columns)>(task, keys, records, column,
                                        in == nullptr ? nullptr : in + at, out + at, pitch);
        });
  }

  // ---- Tentative rows ----
  //
  // With w(i, t) the product of the decays after entry i up to token t (entries are the live
  // records and the row's own tokens before or at t), per column:
  //
  //   d_t = beta_t (v_t - S0 . w(-1, t) k_t - sum_i (k_i . w(i, t) k_t) d_i),   i before t
  //   o_t =              S0 . w(-1, t) q_t + sum_i (k_i . w(i, t) q_t) d_i,     i before or at t
  //
  // The d_i of records are in the ring; those of the row's tokens follow from one another. Weights
  // are products of factors in [0, 1], so nothing overflows.

  /// Rows 2t and 2t + 1 belong to k_t and q_t.
  struct Window {
    alignas(64) float rows[2 * kMaxTokens][kMaxKeyDim];
    float scores[kMaxTerms][2 * kMaxTokens];  // products with records, then with own tokens
  };

  /// out[r] = x . rows[r] for r in [first, last), eight sums at a time.
  static void dot_all(const float* x, std::int64_t key_dim, const float (*rows)[kMaxKeyDim],
                      int first, int last, float* out) {
    for (int r = first; r < last; r += 8) {
      const int count = last - r < 8 ? last - r : 8;
      V sum[8];
      for (V& lane : sum) lane = V::zero();
      if (count == 8) {
        dot_rows_of<8>(x, key_dim, rows + r, sum);
      } else {
        for (int i = 0; i < count; i += 2) dot_rows_of<2>(x, key_dim, rows + r + i, sum + i);
      }
      float sums[8];
      V::sum8(sum, sums);
      for (int i = 0; i < count; ++i) out[r + i] = sums[i];
    }
  }

  template <int kCount>
  static void dot_rows_of(const float* x, std::int64_t key_dim, const float (*rows)[kMaxKeyDim],
                          V* out) {
    V sum[kCount];
    for (V& lane : sum) lane = V::zero();
    std::int64_t n = 0;
    for (; n + kLanes <= key_dim; n += kLanes) {
      const V xn = V::load(x + n);
      for (int i = 0; i < kCount; ++i) sum[i] = fma(xn, V::load(rows[i] + n), sum[i]);
    }
    if (n < key_dim) {
      const auto rest = static_cast<int>(key_dim - n);
      const V xn = V::load_partial(x + n, rest);
      for (int i = 0; i < kCount; ++i) {
        sum[i] = fma(xn, V::load_partial(rows[i] + n, rest), sum[i]);
      }
    }
    for (int i = 0; i < kCount; ++i) out[i] = sum[i];
  }

  /// out = x * a, over the channels; out may be x.
  static void multiply(const float* x, const float* a, std::int64_t n, float* out) {
    map_vectors<Isa>(x, n, out, [a, n](V xi, std::int64_t i) {
      const std::int64_t rest = n - i;
      return xi * (rest < kLanes ? V::load_partial(a + i, static_cast<int>(rest)) : V::load(a + i));
    });
  }

  /// Scores among the row's own tokens. With a decay per channel, rows end up multiplied by the
  /// decays of tokens 0..t.
  static void score_tokens(const DeltaRuleTask& task, const float (*k)[kMaxKeyDim],
                           const float (*decay)[kDecayDim], int live, Window& window) {
    const auto tokens = static_cast<int>(task.tokens);
    for (int s = tokens - 1; s >= 0; --s) {
      dot_all(k[s], task.key_dim, window.rows, 2 * s, 2 * tokens, window.scores[live + s]);
      if constexpr (kChannelDecay) {
        for (int r = 2 * s; r < 2 * tokens; ++r)
          multiply(window.rows[r], decay[s], task.key_dim, window.rows[r]);
      }
    }
  }

  template <bool kFlush>
  static void replay(const DeltaRuleTask& task) {
    // After a flush the records are part of the state and the window is the row's own tokens.
    const int live = kFlush ? 0 : static_cast<int>(task.live);
    const auto tokens = static_cast<int>(task.tokens);
    RecordKeys keys;
    keys.read(task);
    alignas(64) float k[kMaxTokens][kMaxKeyDim];
    alignas(64) float q[kMaxTokens][kMaxKeyDim];
    float k_scale[kMaxTokens];
    prepare_tokens(task, 0, tokens, k, q, k_scale);
    Window window;
    const auto set_rows = [&] {
      for (int t = 0; t < tokens; ++t) {
        const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(task.key_dim);
        std::memcpy(window.rows[2 * t], k[t], bytes);
        std::memcpy(window.rows[2 * t + 1], q[t], bytes);
      }
    };
    if constexpr (!kChannelDecay) {
      set_rows();
      score_tokens(task, k, nullptr, live, window);
      for (int i = 0; i < live; ++i) {
        dot_all(keys.k[i], task.key_dim, window.rows, 0, 2 * tokens, window.scores[i]);
      }
    }
    HeadGates<kMaxTokens> gates;
    HeadRecords records;
    Terms terms;
    terms.live = live;
    for (std::int64_t head = task.head_begin; head < task.head_end; ++head) {
      gates.compute(task, head, 0, tokens);
      records.read(task, head);
      if constexpr (kChannelDecay) {
        set_rows();
        score_tokens(task, k, gates.decay, live, window);
        score_records(task, keys, records, live, window);
        terms.take(tokens, window);
      } else {
        terms.weigh(tokens, window, gates.decay, records.decay);
      }
      const State* in = state_in(task, head);
      State* out = state_out(task, head);
      int block = 0;
      for_each_block(
          task, [&](auto columns, std::int64_t column, std::int64_t at, std::int64_t pitch) {
            using C = decltype(columns);
            prefetch_next_records<kFlush>(task, head, block++);
            const State* s = in == nullptr ? nullptr : in + at;
            if constexpr (kFlush) {
              fold_block<C>(task, keys, records, column, s, out + at, pitch);
              s = out + at;
            }
            read_block<C, kFlush>(task, head, column, s, pitch, window, terms, gates.beta, records);
          });
      append(task, head, gates);
    }
    if (task.appends_key) append_keys(task, k_scale);
  }

  /// Scores with the records where every channel decays by itself: rows already carry the decays of
  /// the row's own tokens; a record's key is multiplied by those of the records after it. Leaves
  /// rows multiplied by all decays of the window.
  static void score_records(const DeltaRuleTask& task, const RecordKeys& keys,
                            const HeadRecords& records, int live, Window& window) {
    const auto rows = static_cast<int>(2 * task.tokens);
    if (live == 0) return;
    alignas(64) float weight[kMaxKeyDim];
    for (std::int64_t n = 0; n < task.key_dim; ++n) weight[n] = 1.0f;
    alignas(64) float key[kMaxKeyDim];
    for (int i = live - 1; i >= 0; --i) {
      multiply(keys.k[i], weight, task.key_dim, key);
      dot_all(key, task.key_dim, window.rows, 0, rows, window.scores[i]);
      if constexpr (kChannelDecay) multiply(weight, records.decay[i], task.key_dim, weight);
    }
    for (int r = 0; r < rows; ++r) multiply(window.rows[r], weight, task.key_dim, window.rows[r]);
  }

  /// The weighted scores of one head, and the weight of S0 by token.
  struct Terms {
    int live = 0;
    float k[kMaxTokens][kMaxTerms];
    float q[kMaxTokens][kMaxTerms];
    float state[kMaxTokens];

    /// Decays are in the scores already.
    void take(int tokens, const Window& window) {
      for (int t = 0; t < tokens; ++t) {
        state[t] = 1.0f;
        for (int i = 0; i <= live + t; ++i) {
          k[t][i] = window.scores[i][2 * t];
          q[t][i] = window.scores[i][2 * t + 1];
        }
      }
    }

    /// One decay per token: running products from the newest entry backwards.
    void weigh(int tokens, const Window& window, const float (*decay)[kDecayDim],
               const float (*record_decay)[kDecayDim]) {
      for (int t = 0; t < tokens; ++t) {
        float weight = 1.0f;
        for (int i = live + t; i >= 0; --i) {
          k[t][i] = weight * window.scores[i][2 * t];
          q[t][i] = weight * window.scores[i][2 * t + 1];
          weight *= i >= live ? decay[i - live][0] : record_decay[i][0];
        }
        state[t] = weight;
      }
    }
  };

  /// solve_block on the block at s, which a flush has just stored, or on its read copy.
  template <typename C, bool kFlush>
  static void read_block(const DeltaRuleTask& task, std::int64_t head, std::int64_t column,
                         const State* s, std::int64_t pitch, const Window& window,
                         const Terms& terms, const float* beta, const HeadRecords& records) {
    if (s == nullptr || !task.copy.exists()) {
      solve_block<C, true>(task, head, column, s, pitch, window, terms, beta, records);
      return;
    }
    static_assert(kBlock % kReadCopyTile == 0);
    alignas(64) float block[kMaxKeyDim * kBlock];
    for (std::int64_t c = 0; c < C::kWidth; c += kReadCopyTile) {
      if constexpr (kFlush) {
        encode_read_copy_tile(task.copy, task.checkpoint, DTypeOf<State>::value, head, column + c);
      }
      decode_read_copy_tile(task.copy, head, column + c, block + c, 1, kBlock);
    }
    solve_block<C, false>(task, head, column, block, kBlock, window, terms, beta, records);
  }

  /// Deltas and outputs of the row's tokens for a block of columns; appends the deltas. kStream:
  /// the block is one of a state in memory, not of a scratch of its own.
  template <typename C, bool kStream, typename T>
  static void solve_block(const DeltaRuleTask& task, std::int64_t head, std::int64_t column,
                          const T* s, std::int64_t pitch, const Window& window, const Terms& terms,
                          const float* beta, const HeadRecords& records) {
    constexpr int N = C::N;
    const auto tokens = static_cast<int>(task.tokens);
    V read[2 * kMaxTokens][N];
    if (s == nullptr) {
      for (int r = 0; r < 2 * tokens; ++r) {
        for (V& lane : read[r]) lane = V::zero();
      }
    } else {
      read_rows<C, kStream>(s, pitch, task.key_dim, window.rows, 2 * tokens, read);
    }
    V own[kMaxTokens][N];
    for (int t = 0; t < tokens; ++t) {
      const V scale = V::broadcast(terms.state[t]);
      V hk[N];
      V hq[N];
      for (int j = 0; j < N; ++j) {
        hk[j] = scale * read[2 * t][j];
        hq[j] = scale * read[2 * t + 1][j];
      }
      const auto add = [&](int i, const auto& delta) {
        const V wk = V::broadcast(terms.k[t][i]);
        const V wq = V::broadcast(terms.q[t][i]);
        for (int j = 0; j < N; ++j) {
          const V d = delta(j);
          hk[j] = fma(wk, d, hk[j]);
          hq[j] = fma(wq, d, hq[j]);
        }
      };
      for (int i = 0; i < terms.live; ++i) {
        add(i, [&](int j) { return C::load(records.delta[i] + column, j); });
      }
      for (int i = 0; i < t; ++i) add(terms.live + i, [&](int j) { return own[i][j]; });
      const Act* v = token_v(task, t, head) + column;
      const V b = V::broadcast(beta[t]);
      const V wq = V::broadcast(terms.q[t][terms.live + t]);
      Act* o = token_o(task, t, head) + column;
      Act* delta = static_cast<Act*>(task.ring_delta) +
                   (head * task.places + append_place(task, t)) * task.value_dim + column;
      for (int j = 0; j < N; ++j) {
        own[t][j] = b * (C::load(v, j) - hk[j]);
        C::store(fma(wq, own[t][j], hq[j]), o, j);
        C::store(own[t][j], delta, j);
      }
    }
  }

  /// out[r] = S . rows[r] for a block of columns: as many rows at a time as registers hold.
  template <typename C, bool kStream, typename T>
  static void read_rows(const T* s, std::int64_t pitch, std::int64_t key_dim,
                        const float (*rows)[kMaxKeyDim], int count, V (*out)[C::N]) {
    constexpr int kMost = kLanes > 8 ? 8 : 4;
    int r = 0;
    for (; r + kMost < count; r += kMost) {
      read_some<C, kMost, false>(s, pitch, key_dim, rows + r, out + r);
    }
    if (count - r > 4) {
      if (count - r == 8) return read_some<C, 8, kStream>(s, pitch, key_dim, rows + r, out + r);
      read_some<C, 4, false>(s, pitch, key_dim, rows + r, out + r);
      r += 4;
    }
    if (count - r == 4) return read_some<C, 4, kStream>(s, pitch, key_dim, rows + r, out + r);
    read_some<C, 2, kStream>(s, pitch, key_dim, rows + r, out + r);
  }

  template <typename C, int kCount, bool kPrefetch, typename T>
  static void read_some(const T* s, std::int64_t pitch, std::int64_t key_dim,
                        const float (*rows)[kMaxKeyDim], V (*out)[C::N]) {
    V sum[kCount][C::N];
    for (auto& row : sum) {
      for (V& lane : row) lane = V::zero();
    }
    for (std::int64_t n = 0; n < key_dim; ++n) {
      if constexpr (kPrefetch) prefetch_next_tile<C>(s + n * pitch, pitch, key_dim);
      V sn[C::N];
      for (int j = 0; j < C::N; ++j) sn[j] = C::load(s + n * pitch, j);
      for (int r = 0; r < kCount; ++r) {
        const V x = V::broadcast(rows[r][n]);
        for (int j = 0; j < C::N; ++j) sum[r][j] = fma(sn[j], x, sum[r][j]);
      }
    }
    for (int r = 0; r < kCount; ++r) {
      for (int j = 0; j < C::N; ++j) out[r][j] = sum[r][j];
    }
  }

  static void append(const DeltaRuleTask& task, std::int64_t head,
                     const HeadGates<kMaxTokens>& gates) {
    for (int t = 0; t < task.tokens; ++t) {
      const std::int64_t at = head * task.places + append_place(task, t);
      std::memcpy(static_cast<Act*>(task.ring_v) + at * task.value_dim, token_v(task, t, head),
                  sizeof(Act) * static_cast<std::size_t>(task.value_dim));
      const std::int64_t decays = kChannelDecay ? task.key_dim : 1;
      std::memcpy(task.ring_log_decay + at * decays, gates.log_decay[t],
                  sizeof(float) * static_cast<std::size_t>(decays));
      task.ring_beta[at] = gates.beta[t];
    }
  }

  static void append_keys(const DeltaRuleTask& task, const float* k_scale) {
    for (int t = 0; t < task.tokens; ++t) {
      const std::int64_t at = task.key_head * task.places + append_place(task, t);
      std::memcpy(static_cast<Act*>(task.ring_k) + at * task.key_dim, token_k(task, t),
                  sizeof(Act) * static_cast<std::size_t>(task.key_dim));
      task.ring_k_scale[at] = k_scale[t];
    }
  }
};

/// The kernels of one instruction set, by [checkpoint is bf16][activation is bf16][channel decay].
template <typename Isa>
struct DeltaRuleKernelTable {
  template <typename State, typename Act, bool kChannelDecay>
  static constexpr DeltaRuleKernels entry() {
    using K = DeltaRuleKernel<Isa, State, Act, kChannelDecay>;
    return {
        .fold = K::fold, .tentative = K::tentative, .flush = K::flush, .committed = K::committed};
  }
  template <typename State, typename Act>
  static constexpr DeltaRuleKernels kPair[2] = {entry<State, Act, false>(),
                                                entry<State, Act, true>()};

  static const DeltaRuleKernels& get(bool bf16_checkpoint, bool bf16_activation,
                                     bool channel_decay) {
    return bf16_checkpoint
               ? (bf16_activation ? kPair<BF16, BF16> : kPair<BF16, float>)[channel_decay]
               : (bf16_activation ? kPair<float, BF16> : kPair<float, float>)[channel_decay];
  }
};

}  // namespace replayssm::cpu
