// The Mamba-2 CPU kernels, written once on Vec<Isa>. A state row (one p) is state_size contiguous
// elements; rows are processed in blocks that stay in registers or in L1, so that memory is read
// once and written at most once whatever the number of tokens.
//
// Bit-equality rests on two rules. An element of the state is advanced by fma(u, B, R) with
// u = gain * x (ops/deferred_decay.h), in token order, wherever that happens. A dot product
// R . C runs over the columns in order in one vector accumulator and is reduced by the fixed tree
// of Vec::sum. Blocking therefore never changes a result.
#pragma once

#include <cstring>

#include "cpu/gates.h"
#include "cpu/simd/vec_math.h"
#include "ops/deferred_fields.h"
#include "ops/mamba2/cpu/kernel.h"

namespace replayssm::cpu {

template <typename Isa, typename State, typename Act>
class Mamba2Kernel {
  using V = Vec<Isa>;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kMaxLive = ReplayLimits::kMaxWindow;
  static constexpr int kMaxTokens = ReplayLimits::kMaxDraftCapacity;
  static constexpr int kMaxWindowTokens = kMaxLive + kMaxTokens;
  static constexpr int kMaxHeadDim = 256;
  static constexpr int kMaxStateSize = 256;
  // Tokens of a committed row taken through a head's state together: their B and C stay in cache.
  static constexpr int kChunk = 16;
  static constexpr int kBlock = 8;  // state rows processed together; divides every head_dim
  static constexpr int kRows = 4;   // of them in registers at a time
  template <typename T>
  static constexpr bool kNarrow = sizeof(T) < sizeof(float);
  static constexpr int kAhead = 2 * kBlock;  // rows between a load and what is prefetched beside it
  static constexpr std::int64_t kLineElements = 64 / static_cast<std::int64_t>(sizeof(State));
  static constexpr bool kDefers = defers_decay(DTypeOf<State>::value);  // the checkpoint stores c

 public:
  static void fold(const Mamba2Task& task) {
    fold_heads(task);
    write_copy(task);
  }

  static void tentative(const Mamba2Task& task) { replay<false>(task); }
  static void flush(const Mamba2Task& task) { replay<true>(task); }

  static void committed(const Mamba2Task& task) {
    const bool folds = task.live > 0;
    if (folds) fold_heads(task);
    for (std::int64_t head = task.head_begin; head < task.head_end; ++head) {
      bool zero = task.checkpoint_in == nullptr && !folds;
      for (std::int64_t first = 0; first < task.tokens; first += kChunk) {
        const std::int64_t rest = task.tokens - first;
        const int count = rest < kChunk ? static_cast<int>(rest) : kChunk;
        // After the first write the state is in place, also where it came from elsewhere.
        const bool in_place = folds || first > 0;
        advance(task, head, first, count, zero, in_place);
        zero = false;
      }
    }
    if (folds || task.tokens > 0) write_copy(task);
  }

 private:
  /// The live records of a head, ready for outputs.
  struct Records {
    Records(const Mamba2Task& task, std::int64_t head) : count(static_cast<int>(task.live)) {
      const Act* ring_x = static_cast<const Act*>(task.ring_x);
      const Act* ring_b = static_cast<const Act*>(task.ring_b);
      std::int64_t place = task.first_place;
      for (int i = 0; i < count; ++i) {
        x[i] = ring_x + (head * task.places + place) * task.head_dim;
        b[i] = ring_b + (task.group * task.places + place) * task.state_size;
        dt[i] = task.ring_dt[head * task.places + place];
        if (++place == task.places) place = 0;
      }
      mamba2_decays<Isa>(task.a[head], dt, count, decay);
    }

    int count;
    const Act* x[kMaxLive];
    const Act* b[kMaxLive];
    float dt[kMaxLive];
    float decay[kMaxLive];
  };
  /// And for the recurrence.
  struct Fold {
    explicit Fold(const Records& of) : records(of) {}  // where nothing is folded
    Fold(const Records& of, DeferredDecay before) : records(of), deferred(before) {
      for (int i = 0; i < records.count; ++i) {
        factor[i] = deferred.take(records.decay[i]);
        gain[i] = deferred.gain(records.dt[i]);
      }
    }

    const Records& records;
    DeferredDecay deferred;  // after all records
    float factor[kMaxLive];  // of the rows, before the record is added
    float gain[kMaxLive];    // of x B^T
  };

  static std::int64_t state_offset(const Mamba2Task& task, std::int64_t head, std::int64_t p) {
    return (head * task.head_dim + p) * task.state_size;
  }
  static const State* state_in(const Mamba2Task& task, std::int64_t head, std::int64_t p) {
    return task.checkpoint_in == nullptr
               ? nullptr
               : static_cast<const State*>(task.checkpoint_in) + state_offset(task, head, p);
  }
  static State* state_out(const Mamba2Task& task, std::int64_t head, std::int64_t p) {
    return static_cast<State*>(task.checkpoint) + state_offset(task, head, p);
  }

  static float time_step(const Mamba2Task& task, std::int64_t head, std::int64_t token) {
    const std::int64_t at = token * task.dt_token_stride + head;
    const float raw = task.dt_is_f32 ? static_cast<const float*>(task.dt)[at]
                                     : to_float(static_cast<const Act*>(task.dt)[at]);
    return mamba2_time_step<Isa>(raw, task.dt_bias == nullptr ? 0.0f : task.dt_bias[head],
                                 task.dt_softplus, task.dt_min, task.dt_max);
  }

  static const Act* token_x(const Mamba2Task& task, std::int64_t token, std::int64_t head) {
    return static_cast<const Act*>(task.x) + token * task.x_token_stride +
           head * task.x_head_stride;
  }
  static const Act* token_b(const Mamba2Task& task, std::int64_t token) {
    return static_cast<const Act*>(task.b) + token * task.b_token_stride +
           task.group * task.b_group_stride;
  }
  static const Act* token_c(const Mamba2Task& task, std::int64_t token) {
    return static_cast<const Act*>(task.c) + token * task.c_token_stride +
           task.group * task.c_group_stride;
  }

  static void write_copy(const Mamba2Task& task) {
    if (!task.copy.exists()) return;
    encode_read_copy(task.copy, task.checkpoint, DTypeOf<State>::value, task.head_begin,
                     task.head_end);
  }

  /// Several rows are walked side by side, which hardware prefetchers follow badly: ask for the
  /// same place of the next block of rows. Past the end of the state this is a harmless hint.
  static void prefetch_next(const State* row, std::int64_t n, std::int64_t state_size) {
    if (n % kLineElements == 0) __builtin_prefetch(row + n + kAhead * state_size);
  }

  /// y[p..p+8) = (sum + D x) * silu(z).
  static void finish(const Mamba2Task& task, std::int64_t token, std::int64_t head, std::int64_t p,
                     const float* sum) {
    const V d = V::broadcast(task.d == nullptr ? 0.0f : task.d[head]);
    const Act* x = token_x(task, token, head) + p;
    Act* y =
        static_cast<Act*>(task.y) + token * task.y_token_stride + head * task.y_head_stride + p;
    const Act* z = task.z == nullptr
                       ? nullptr
                       : static_cast<const Act*>(task.z) + token * task.z_token_stride +
                             head * task.z_head_stride + p;
    constexpr int kPart = kLanes < kBlock ? kLanes : kBlock;
    for (int r = 0; r < kBlock; r += kPart) {
      V out = fma(d, V::load_partial(x + r, kPart), V::load_partial(sum + r, kPart));
      if (z != nullptr) out = out * silu<Isa>(V::load_partial(z + r, kPart));
      out.store_partial(y + r, kPart);
    }
  }

  // ---- Fold: kRows state rows by kTile vectors in registers through all records ----

  template <int kTile>
  static void fold_tile(const State* in, State* out, std::int64_t state_size, std::int64_t column,
                        const Fold& fold, const float (*u)[kRows]) {
    const Records& records = fold.records;
    V s[kRows][kTile];
    for (int r = 0; r < kRows; ++r) {
      prefetch_next(out + r * state_size, column, state_size);
      for (int v = 0; v < kTile; ++v) {
        s[r][v] = in == nullptr ? V::zero() : V::load(in + r * state_size + column + v * kLanes);
      }
    }
    for (int i = 0; i < records.count; ++i) {
      if (fold.factor[i] != 1.0f) scale_tile<kTile>(s, fold.factor[i]);
      V b[kTile];
      for (int v = 0; v < kTile; ++v) b[v] = V::load(records.b[i] + column + v * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const V ur = V::broadcast(u[i][r]);
        for (int v = 0; v < kTile; ++v) s[r][v] = fma(ur, b[v], s[r][v]);
      }
    }
    if (!kDefers) scale_tile<kTile>(s, fold.deferred.value());
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kTile; ++v) s[r][v].store(out + r * state_size + column + v * kLanes);
    }
  }

  template <int kTile>
  static void scale_tile(V (&s)[kRows][kTile], float by) {
    const V factor = V::broadcast(by);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kTile; ++v) s[r][v] = s[r][v] * factor;
    }
  }

  static void fold_heads(const Mamba2Task& task) {
    for (std::int64_t head = task.head_begin; head < task.head_end; ++head) {
      const Records records(task, head);
      const Fold fold(records, deferred_in(task, head, task.head_dim));
      fold_some(task, head, fold, 0, task.head_dim);
      store_deferred(task, head, task.head_dim, fold.deferred);
    }
  }

  /// Rows [first, last) of a head.
  static void fold_some(const Mamba2Task& task, std::int64_t head, const Fold& fold,
                        std::int64_t first, std::int64_t last) {
    for (std::int64_t p = first; p < last; p += kRows) {
      fold_rows(task, fold, state_in(task, head, p), state_out(task, head, p), p);
    }
  }

  static void fold_rows(const Mamba2Task& task, const Fold& fold, const State* in, State* out,
                        std::int64_t p) {
    const Records& records = fold.records;
    float u[kMaxLive][kRows];
    for (int i = 0; i < records.count; ++i) {
      for (int r = 0; r < kRows; ++r) u[i][r] = fold.gain[i] * to_float(records.x[i][p + r]);
    }
    std::int64_t column = 0;
    for (; column + 2 * kLanes <= task.state_size; column += 2 * kLanes) {
      fold_tile<2>(in, out, task.state_size, column, fold, u);
    }
    if (column < task.state_size) fold_tile<1>(in, out, task.state_size, column, fold, u);
  }

  // ---- Committed rows ----

  static void advance(const Mamba2Task& task, std::int64_t head, std::int64_t first, int count,
                      bool zero, bool in_place) {
    float dt[kChunk] = {};
    float decay[kChunk];
    for (int t = 0; t < count; ++t) dt[t] = time_step(task, head, first + t);
    mamba2_decays<Isa>(task.a[head], dt, count, decay);
    DeferredAdvance advances[kChunk];
    DeferredDecay deferred = zero       ? DeferredDecay()
                             : in_place ? deferred_out(task, head, task.head_dim)
                                        : deferred_in(task, head, task.head_dim);
    for (int t = 0; t < count; ++t) {
      advances[t] = deferred.advance(decay[t]);
      advances[t].gain *= dt[t];
      if (!kDefers) deferred = {};
    }
    store_deferred(task, head, task.head_dim, deferred);
    for (std::int64_t p = 0; p < task.head_dim; p += kBlock) {
      State* out = state_out(task, head, p);
      const State* in = zero ? nullptr : in_place ? out : state_in(task, head, p);
      for (int t = 0; t < count; ++t) {
        V sum[kBlock];
        if (kNarrow<State> || count > 1) {
          advance_block<kRows>(task, head, first + t, p, advances[t], in, out, sum);
        } else {
          advance_block<1>(task, head, first + t, p, advances[t], in, out, sum);
        }
        in = out;
        float y[kBlock];
        V::sum8(sum, y);
        for (float& of_row : y) of_row *= advances[t].rest;
        finish(task, first + t, head, p, y);
      }
    }
  }

  /// One token through a block of rows, R of them side by side. A row at a time follows memory
  /// front to back, which is worth most when the state comes from memory; several rows share the
  /// loads of B and C, which is worth more when it is in cache or has to be converted.
  template <int R>
  static void advance_block(const Mamba2Task& task, std::int64_t head, std::int64_t token,
                            std::int64_t p, const DeferredAdvance& by, const State* in, State* out,
                            V* sums) {
    if (in == nullptr) {  // once in a sequence
      std::memset(out, 0, sizeof(State) * static_cast<std::size_t>(kBlock * task.state_size));
      in = out;
    }
    for (int r = 0; r < kBlock; r += R) {
      const std::int64_t at = r * task.state_size;
      if (by.factor == 1.0f) {
        advance_rows<R, false>(task, head, token, p + r, by, in + at, out + at, sums + r);
      } else {
        advance_rows<R, true>(task, head, token, p + r, by, in + at, out + at, sums + r);
      }
    }
  }

  template <int R, bool kScales>
  static void advance_rows(const Mamba2Task& task, std::int64_t head, std::int64_t token,
                           std::int64_t p, const DeferredAdvance& by, const State* in, State* out,
                           V* sums) {
    const Act* x = token_x(task, token, head);
    const Act* b = token_b(task, token);
    const Act* c = token_c(task, token);
    const V factor = V::broadcast(by.factor);
    const V rest = V::broadcast(by.rest);
    V u[R];
    V sum[R];
    for (int r = 0; r < R; ++r) {
      u[r] = V::broadcast(by.gain * to_float(x[p + r]));
      sum[r] = V::zero();
    }
    for (std::int64_t n = 0; n < task.state_size; n += kLanes) {
      const V bn = V::load(b + n);
      const V cn = V::load(c + n);
      for (int r = 0; r < R; ++r) {
        const std::int64_t at = r * task.state_size + n;
        prefetch_next(out + r * task.state_size, n, task.state_size);
        V s = V::load(in + at);
        if (kScales) s = s * factor;
        s = fma(u[r], bn, s);
        sum[r] = fma(s, cn, sum[r]);
        if (!kDefers) s = s * rest;
        s.store(out + at);
      }
    }
    for (int r = 0; r < R; ++r) sums[r] = sum[r];
  }

  // ---- Tentative rows ----

  /// What a tentative row's heads share: C in fp32 and the products B_i . C_t.
  struct Window {
    float c[kMaxTokens][kMaxStateSize];
    float bc[kMaxTokens][kMaxWindowTokens];  // [token][record or own token]
  };

  static float dot(const Act* b, const float* c, std::int64_t n) {
    V sum = V::zero();
    for (std::int64_t i = 0; i < n; i += kLanes) sum = fma(V::load(b + i), V::load(c + i), sum);
    return sum.sum();
  }

  static void prepare_window(const Mamba2Task& task, int live, Window& window) {
    const Act* ring_b =
        static_cast<const Act*>(task.ring_b) + task.group * task.places * task.state_size;
    for (int t = 0; t < task.tokens; ++t) {
      const Act* c = token_c(task, t);
      for (std::int64_t n = 0; n < task.state_size; n += kLanes) {
        V::load(c + n).store(window.c[t] + n);
      }
      std::int64_t place = task.first_place;
      for (int i = 0; i < live; ++i) {
        window.bc[t][i] = dot(ring_b + place * task.state_size, window.c[t], task.state_size);
        if (++place == task.places) place = 0;
      }
      for (int i = 0; i <= t; ++i) {
        window.bc[t][live + i] = dot(token_b(task, i), window.c[t], task.state_size);
      }
    }
  }

  template <bool kFlush>
  static void replay(const Mamba2Task& task) {
    // After a flush the records are part of the state and the window is the row's own tokens.
    const int live = kFlush ? 0 : static_cast<int>(task.live);
    const int tokens = static_cast<int>(task.tokens);
    Window window;
    prepare_window(task, live, window);
    for (std::int64_t head = task.head_begin; head < task.head_end; ++head) {
      const Records records(task, head);
      const DeferredDecay before = deferred_in(task, head, task.head_dim);
      const Fold fold = kFlush ? Fold(records, before) : Fold(records);
      if (kFlush) store_deferred(task, head, task.head_dim, fold.deferred);
      float dt[kMaxTokens];
      float decay[kMaxTokens];
      for (int t = 0; t < tokens; ++t) dt[t] = time_step(task, head, t);
      mamba2_decays<Isa>(task.a[head], dt, tokens, decay);
      float y[kMaxTokens][kMaxHeadDim];
      if (kFlush || task.checkpoint_in != nullptr) {
        float scale[kMaxTokens];
        float product = kFlush && kDefers ? fold.deferred.value() : before.value();
        for (int i = live - 1; i >= 0; --i) product *= records.decay[i];
        for (int t = 0; t < tokens; ++t) scale[t] = product *= decay[t];
        if (task.copy.exists()) {
          read_head_of_copy<kFlush>(task, head, fold, window, tokens, scale, y);
        } else {
          read_head<kFlush>(task, head, fold, window, tokens, scale, y);
        }
      } else {
        for (int t = 0; t < tokens; ++t)
          std::memset(y[t], 0, sizeof(float) * static_cast<std::size_t>(task.head_dim));
      }
      add_window(task, head, records, live, dt, decay, window, y);
      append(task, head, dt);
    }
    if (task.appends_b) append_b(task);
  }

  /// y[t][p] = scale[t] * (R row p) . C_t, with R folded first if the row flushes.
  template <bool kFlush>
  static void read_head(const Mamba2Task& task, std::int64_t head, const Fold& fold,
                        const Window& window, int tokens, const float* scale,
                        float (*y)[kMaxHeadDim]) {
    for (std::int64_t p = 0; p < task.head_dim; p += kBlock) {
      if constexpr (kFlush) fold_some(task, head, fold, p, p + kBlock);
      const State* s = kFlush ? state_out(task, head, p) : state_in(task, head, p);
      read_rows<true>(s, task.state_size, window, tokens, scale, p, y);
    }
  }

  /// The same with the read copy of R. A flush writes the copy of a tile before it reads it.
  template <bool kFlush>
  static void read_head_of_copy(const Mamba2Task& task, std::int64_t head, const Fold& fold,
                                const Window& window, int tokens, const float* scale,
                                float (*y)[kMaxHeadDim]) {
    static_assert(kReadCopyTile % kBlock == 0);
    alignas(64) float tile[kReadCopyTile * kMaxStateSize];
    for (std::int64_t first = 0; first < task.head_dim; first += kReadCopyTile) {
      const std::int64_t rest = task.head_dim - first;
      const std::int64_t rows = rest < kReadCopyTile ? rest : kReadCopyTile;
      if constexpr (kFlush) {
        fold_some(task, head, fold, first, first + rows);
        encode_read_copy_tile(task.copy, task.checkpoint, DTypeOf<State>::value, head, first);
      }
      decode_read_copy_tile(task.copy, head, first, tile, task.state_size, 1);
      for (std::int64_t r = 0; r < rows; r += kBlock) {
        read_rows<false>(tile + r * task.state_size, task.state_size, window, tokens, scale,
                         first + r, y);
      }
    }
  }

  /// y[t][p + r] = scale[t] * (S row p + r) . C_t for the block's rows r. kStream: more rows follow
  /// in memory.
  template <bool kStream, typename T>
  static void read_rows(const T* s, std::int64_t state_size, const Window& window, int tokens,
                        const float* scale, std::int64_t p, float (*y)[kMaxHeadDim]) {
    constexpr bool kWide = !kNarrow<T>;
    int t = 0;
    for (; t + 4 <= tokens; t += 4) {
      read_block<kStream, kWide ? 1 : 2, 4>(s, state_size, window.c + t, scale + t, p, y + t);
    }
    for (; t + 2 <= tokens; t += 2) {
      read_block<kStream, kWide ? 1 : 4, 2>(s, state_size, window.c + t, scale + t, p, y + t);
    }
    if (t < tokens) {
      read_block<kStream, kWide ? 1 : 8, 1>(s, state_size, window.c + t, scale + t, p, y + t);
    }
  }

  /// T tokens, R rows side by side (see advance_block); eight dot products are reduced at a time.
  template <bool kStream, int R, int T, typename S>
  static void read_block(const S* s, std::int64_t state_size, const float (*c)[kMaxStateSize],
                         const float* scale, std::int64_t p, float (*y)[kMaxHeadDim]) {
    constexpr int kSumRows = 8 / T;
    for (int first = 0; first < kBlock; first += kSumRows) {
      V sum[8];  // [token][row]
      for (int r = 0; r < kSumRows; r += R) {
        read_tile<kStream, R, T, kSumRows>(s + (first + r) * state_size, state_size, c, sum + r);
      }
      float sums[8];
      V::sum8(sum, sums);
      for (int t = 0; t < T; ++t) {
        for (int r = 0; r < kSumRows; ++r) {
          y[t][p + first + r] = scale[t] * sums[t * kSumRows + r];
        }
      }
    }
  }

  template <bool kStream, int R, int T, int kStride, typename S>
  static void read_tile(const S* rows, std::int64_t state_size, const float (*c)[kMaxStateSize],
                        V* sums) {
    V sum[T][R];
    for (int t = 0; t < T; ++t) {
      for (int r = 0; r < R; ++r) sum[t][r] = V::zero();
    }
    for (std::int64_t n = 0; n < state_size; n += kLanes) {
      V row[R];
      for (int r = 0; r < R; ++r) {
        if constexpr (kStream) prefetch_next(rows + r * state_size, n, state_size);
        row[r] = V::load(rows + r * state_size + n);
      }
      for (int t = 0; t < T; ++t) {
        const V cn = V::load(c[t] + n);
        for (int r = 0; r < R; ++r) sum[t][r] = fma(row[r], cn, sum[t][r]);
      }
    }
    for (int t = 0; t < T; ++t) {
      for (int r = 0; r < R; ++r) sums[t * kStride + r] = sum[t][r];
    }
  }

  /// One term's share of asking for the next head while the window's arithmetic leaves memory idle:
  /// its record, once, and state lines beyond those that prefetch_next has asked for.
  static void prefetch_next_head(const Mamba2Task& task, std::int64_t head, const Act* record_x,
                                 int token, int term) {
    constexpr int kLinesPerTerm = 4;
    const State* ahead = state_out(task, head + 1, 0) + kAhead * task.state_size;
    const int first = (token * static_cast<int>(task.live) + term) * kLinesPerTerm;
    for (int i = 0; i < kLinesPerTerm; ++i) __builtin_prefetch(ahead + (first + i) * kLineElements);
    if (token > 0) return;
    constexpr std::int64_t kRecordLine = 64 / static_cast<std::int64_t>(sizeof(Act));
    const Act* next_x = record_x + task.places * task.head_dim;
    for (std::int64_t p = 0; p < task.head_dim; p += kRecordLine) __builtin_prefetch(next_x + p);
  }

  /// Adds the window's terms, newest first, so that the weights are running products of decays.
  static void add_window(const Mamba2Task& task, std::int64_t head, const Records& records,
                         int live, const float* dt, const float* decay, const Window& window,
                         float (*y)[kMaxHeadDim]) {
    for (int t = 0; t < task.tokens; ++t) {
      const Act* x[kMaxWindowTokens];
      float weight[kMaxWindowTokens];
      int terms = 0;
      float product = 1.0f;
      for (int i = t; i >= 0; --i, ++terms) {
        x[terms] = token_x(task, i, head);
        weight[terms] = product * dt[i] * window.bc[t][live + i];
        product *= decay[i];
      }
      for (int i = live - 1; i >= 0; --i, ++terms) {
        x[terms] = records.x[i];
        weight[terms] = product * records.dt[i] * window.bc[t][i];
        prefetch_next_head(task, head, records.x[i], t, i);
        product *= records.decay[i];
      }
      std::int64_t p = 0;
      for (; p + 4 * kLanes <= task.head_dim; p += 4 * kLanes)
        add_terms<4>(x, weight, terms, p, y[t]);
      for (; p + kLanes <= task.head_dim; p += kLanes) add_terms<1>(x, weight, terms, p, y[t]);
      for (; p < task.head_dim; ++p) {
        for (int i = 0; i < terms; ++i) y[t][p] += weight[i] * to_float(x[i][p]);
      }
      for (p = 0; p < task.head_dim; p += kBlock) finish(task, t, head, p, y[t] + p);
    }
  }

  /// y[p..] += sum_i weight_i x_i[p..] over kVectors vectors.
  template <int kVectors>
  static void add_terms(const Act* const* x, const float* weight, int terms, std::int64_t p,
                        float* y) {
    V sum[kVectors];
    for (int v = 0; v < kVectors; ++v) sum[v] = V::load(y + p + v * kLanes);
    for (int i = 0; i < terms; ++i) {
      const V w = V::broadcast(weight[i]);
      for (int v = 0; v < kVectors; ++v) sum[v] = fma(w, V::load(x[i] + p + v * kLanes), sum[v]);
    }
    for (int v = 0; v < kVectors; ++v) sum[v].store(y + p + v * kLanes);
  }

  static std::int64_t append_place(const Mamba2Task& task, int token) {
    return (task.first_place + task.live + token) % task.places;
  }

  static void append(const Mamba2Task& task, std::int64_t head, const float* dt) {
    for (int t = 0; t < task.tokens; ++t) {
      const std::int64_t at = head * task.places + append_place(task, t);
      std::memcpy(static_cast<Act*>(task.ring_x) + at * task.head_dim, token_x(task, t, head),
                  sizeof(Act) * static_cast<std::size_t>(task.head_dim));
      task.ring_dt[at] = dt[t];
    }
  }

  static void append_b(const Mamba2Task& task) {
    for (int t = 0; t < task.tokens; ++t) {
      const std::int64_t at = task.group * task.places + append_place(task, t);
      std::memcpy(static_cast<Act*>(task.ring_b) + at * task.state_size, token_b(task, t),
                  sizeof(Act) * static_cast<std::size_t>(task.state_size));
    }
  }
};

/// The kernels of one instruction set.
template <typename Isa>
struct Mamba2KernelTable {
  template <typename State, typename Act>
  static constexpr Mamba2Kernels entry() {
    using K = Mamba2Kernel<Isa, State, Act>;
    return {
        .fold = K::fold, .tentative = K::tentative, .flush = K::flush, .committed = K::committed};
  }
  /// By activation type.
  template <typename State>
  static constexpr Mamba2Kernels kRow[3] = {entry<State, float>(), entry<State, BF16>(),
                                            entry<State, F16>()};
  static_assert(static_cast<int>(DType::kF32) == 0 && static_cast<int>(DType::kBF16) == 1 &&
                static_cast<int>(DType::kF16) == 2);

  static const Mamba2Kernels& get(DType checkpoint, DType activation) {
    const auto& row = checkpoint == DType::kF32    ? kRow<float>
                      : checkpoint == DType::kBF16 ? kRow<BF16>
                                                   : kRow<F16>;
    return row[static_cast<int>(activation)];
  }
};

}  // namespace replayssm::cpu
