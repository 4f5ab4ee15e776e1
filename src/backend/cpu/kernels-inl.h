// Bodies of BackendKernels, compiled once per instruction set. Templates only, all of them over
// Isa: see cpu/simd/vec.h. Standard library templates are avoided for the same reason.
#pragma once

#include <cstdint>

#include "backend/cpu/kernels.h"
#include "cpu/gates.h"
#include "cpu/simd/vec_math.h"

namespace replayssm::cpu {

/// Keys per block of the online softmax. Blocks start at position 0, so that the order in which a
/// query meets its keys depends on its position only. A multiple of every tile's outputs.
inline constexpr std::int64_t kKeyBlock = 48;

/// Head dimensions are padded to this in scratch, so that kernels store whole vectors there.
inline constexpr std::int64_t kPadding = 16;

constexpr std::int64_t padded_head_dim(std::int64_t head_dim) {
  return (head_dim + kPadding - 1) / kPadding * kPadding;
}

/// Which weights a tile asks the memory for while it computes: rows of the matrix are often a page
/// each, and hardware prefetchers start anew on every page. Only a hint, so it may pass the end.
struct Prefetch {
  std::int64_t rows = 0;    // how far ahead
  std::int64_t share = 0;   // this caller's part, of
  std::int64_t shares = 1;  // so many that will pass over the same weights
};

/// R rows of x against O rows of w with one accumulator vector each. Every tile adds in the same
/// order, so R and O are invisible in the results.
template <typename Isa, typename T, int R, int O>
inline void dot_tile(const float* const* x, const T* w, std::int64_t w_stride, std::int64_t in,
                     float* const* y, std::int64_t first, const Prefetch& prefetch) {
  using V = Vec<Isa>;
  // A single row of x leaves the processor enough time to run ahead by itself.
  constexpr bool kPrefetch = R > 1 && O > 1;
  constexpr std::int64_t kLine = 64 / sizeof(T);
  V sums[R][O];
  const float* rows[R];
  for (int r = 0; r < R; ++r) {
    rows[r] = x[r];
    for (int o = 0; o < O; ++o) sums[r][o] = V::zero();
  }
  std::int64_t k = 0;
  const auto step = [&] {
    V weights[O];
    for (int o = 0; o < O; ++o) weights[o] = V::load(w + o * w_stride + k);
    for (int r = 0; r < R; ++r) {
      const V xs = V::load(rows[r] + k);
      for (int o = 0; o < O; ++o) sums[r][o] = fma(xs, weights[o], sums[r][o]);
    }
    k += V::kLanes;
  };
  if constexpr (kPrefetch) {
    std::int64_t ahead[O];
    for (int o = 0; o < O; ++o) {
      ahead[o] = (o % prefetch.shares == prefetch.share ? o + prefetch.rows : o) * w_stride;
    }
    while (k + kLine <= in) {
      for (int o = 0; o < O; ++o) __builtin_prefetch(w + ahead[o] + k);
      for (std::int64_t i = 0; i < kLine; i += V::kLanes) step();
    }
  }
  while (k + V::kLanes <= in) step();
  if (k < in) {
    const int tail = static_cast<int>(in - k);
    for (int o = 0; o < O; ++o) {
      const V weights = V::load_partial(w + o * w_stride + k, tail);
      for (int r = 0; r < R; ++r) {
        sums[r][o] = fma(V::load_partial(rows[r] + k, tail), weights, sums[r][o]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int o = 0; o < O; ++o) y[r][first + o] = sums[r][o].sum();
  }
}

template <typename Isa, typename T, int R, int O>
inline void dot_rows(const float* const* x, const T* w, std::int64_t w_stride, std::int64_t outs,
                     std::int64_t in, float* const* y, std::int64_t first, Prefetch prefetch) {
  if (prefetch.shares == 1) prefetch.rows = O;  // the next tile; it may stay in the first level
  std::int64_t o = 0;
  for (; o + O <= outs; o += O) {
    dot_tile<Isa, T, R, O>(x, w + o * w_stride, w_stride, in, y, first + o, prefetch);
  }
  for (; o < outs; ++o) {
    dot_tile<Isa, T, R, 1>(x, w + o * w_stride, w_stride, in, y, first + o, prefetch);
  }
}

template <typename Isa, typename T>
void dots(const float* const* x, std::int64_t rows, const void* weights, std::int64_t w_stride,
          std::int64_t outs, std::int64_t in, float* const* y, std::int64_t y_first) {
  // Weights come from memory once per block of outputs; further groups of rows find them in cache
  // and fetch the next block meanwhile.
  constexpr std::int64_t kBlock = 12;
  constexpr std::int64_t kGroup = 4;
  const std::int64_t groups = (rows + kGroup - 1) / kGroup;
  const T* w = static_cast<const T*>(weights);
  for (std::int64_t first = 0; first < outs; first += kBlock, w += kBlock * w_stride) {
    const std::int64_t n = outs - first < kBlock ? outs - first : kBlock;
    for (std::int64_t g = 0; g < groups; ++g) {
      const Prefetch prefetch{kBlock, g, groups};
      const float* const* xs = x + g * kGroup;
      float* const* ys = y + g * kGroup;
      switch (rows - g * kGroup) {
        case 1:
          dot_rows<Isa, T, 1, 4>(xs, w, w_stride, n, in, ys, y_first + first, prefetch);
          break;
        case 2:
          dot_rows<Isa, T, 2, 4>(xs, w, w_stride, n, in, ys, y_first + first, prefetch);
          break;
        case 3:
          dot_rows<Isa, T, 3, 3>(xs, w, w_stride, n, in, ys, y_first + first, prefetch);
          break;
        default:
          dot_rows<Isa, T, 4, 3>(xs, w, w_stride, n, in, ys, y_first + first, prefetch);
          break;
      }
    }
  }
}

template <typename Isa, typename T>
void widen(const void* from, float* to, std::int64_t n) {
  using V = Vec<Isa>;
  const T* p = static_cast<const T*>(from);
  std::int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::load(p + i).store(to + i);
  const int tail = static_cast<int>(n - i);
  if (tail > 0) V::load_partial(p + i, tail).store_partial(to + i, tail);
}

template <typename Isa, typename T>
void narrow(const float* from, void* to, std::int64_t n) {
  using V = Vec<Isa>;
  T* p = static_cast<T*>(to);
  std::int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::load(from + i).store(p + i);
  const int tail = static_cast<int>(n - i);
  if (tail > 0) V::load_partial(from + i, tail).store_partial(p + i, tail);
}

/// out[i] = f(x[i], y[i]) over n elements.
template <typename Isa, typename F>
inline void map(const float* x, const float* y, float* out, std::int64_t n, F f) {
  using V = Vec<Isa>;
  std::int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) f(V::load(x + i), V::load(y + i)).store(out + i);
  const int tail = static_cast<int>(n - i);
  if (tail > 0) {
    f(V::load_partial(x + i, tail), V::load_partial(y + i, tail)).store_partial(out + i, tail);
  }
}

/// Sum of squares with four accumulators, which also keeps the rounding error of long rows small.
template <typename Isa>
inline float sum_of_squares(const float* x, std::int64_t n) {
  using V = Vec<Isa>;
  V sums[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
  std::int64_t i = 0;
  for (; i + 4 * V::kLanes <= n; i += 4 * V::kLanes) {
    for (int j = 0; j < 4; ++j) {
      const V v = V::load(x + i + j * V::kLanes);
      sums[j] = fma(v, v, sums[j]);
    }
  }
  for (; i < n; i += V::kLanes) {
    const std::int64_t left = n - i;
    const V v = left >= V::kLanes ? V::load(x + i) : V::load_partial(x + i, static_cast<int>(left));
    sums[0] = fma(v, v, sums[0]);
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum();
}

template <typename Isa>
void rms_norm(const float* x, const float* weight, std::int64_t n, float eps, float* out) {
  using V = Vec<Isa>;
  const float mean = sum_of_squares<Isa>(x, n) / static_cast<float>(n);
  const V scale = V::broadcast(1.0f / __builtin_sqrtf(mean + eps));
  map<Isa>(x, weight, out, n, [&](V v, V w) { return v * scale * w; });
}

template <typename Isa>
void gated_rms_norm(const float* y, const float* z, const float* weight, std::int64_t n, float eps,
                    float* out) {
  using V = Vec<Isa>;
  map<Isa>(y, z, out, n, [](V v, V gate) { return v * cpu::silu<Isa>(gate); });
  rms_norm<Isa>(out, weight, n, eps, out);
}

template <typename Isa>
void relu_squared(float* x, std::int64_t n) {
  using V = Vec<Isa>;
  map<Isa>(x, x, x, n, [](V v, V) {
    const V positive = max(V::zero(), v);  // in this order NaN survives
    return positive * positive;
  });
}

template <typename Isa>
void add(float* x, const float* y, std::int64_t n) {
  using V = Vec<Isa>;
  map<Isa>(x, y, x, n, [](V a, V b) { return a + b; });
}

template <typename Isa>
void multiply_silu(float* x, const float* gate, std::int64_t n) {
  using V = Vec<Isa>;
  map<Isa>(x, gate, x, n, [](V v, V z) { return v * cpu::silu<Isa>(z); });
}

template <typename Isa>
void multiply_sigmoid(float* x, const float* gate, std::int64_t n) {
  using V = Vec<Isa>;
  map<Isa>(x, gate, x, n, [](V v, V z) { return v * cpu::sigmoid<Isa>(z); });
}

template <typename Isa>
void rotate(const float* angles, std::int64_t n, float* x) {
  using V = Vec<Isa>;
  const auto turn = [&](std::int64_t j, auto load, auto store) {
    const V cosine = load(angles + j);
    const V sine = load(angles + n + j);
    const V a = load(x + j);
    const V b = load(x + n + j);
    store(a * cosine - b * sine, x + j);
    store(b * cosine + a * sine, x + n + j);
  };
  std::int64_t j = 0;
  for (; j + V::kLanes <= n; j += V::kLanes) {
    turn(j, [](const float* p) { return V::load(p); }, [](V v, float* p) { v.store(p); });
  }
  const int tail = static_cast<int>(n - j);
  if (tail > 0) {
    turn(
        j, [tail](const float* p) { return V::load_partial(p, tail); },
        [tail](V v, float* p) { v.store_partial(p, tail); });
  }
}

/// sums[r] = sums[r] * rescale[r] + sum over n keys of p[r][j] v[j], for R queries and D vectors of
/// the head dimension; with D = 1, `left` elements, which may be less than a vector.
template <typename Isa, typename T, int R, int D>
inline void weighted_values_tile(const float* p, const float* rescale, const T* v,
                                 std::int64_t v_stride, std::int64_t n, std::int64_t left,
                                 float* sums, std::int64_t sums_stride) {
  using V = Vec<Isa>;
  V acc[R][D];
  for (int r = 0; r < R; ++r) {
    for (int d = 0; d < D; ++d) {
      acc[r][d] = V::load(sums + r * sums_stride + d * V::kLanes) * V::broadcast(rescale[r]);
    }
  }
  if (D > 1 || left >= V::kLanes) {
    for (std::int64_t j = 0; j < n; ++j, v += v_stride) {
      V values[D];
      for (int d = 0; d < D; ++d) values[d] = V::load(v + d * V::kLanes);
      for (int r = 0; r < R; ++r) {
        const V weight = V::broadcast(p[r * kKeyBlock + j]);
        for (int d = 0; d < D; ++d) acc[r][d] = fma(weight, values[d], acc[r][d]);
      }
    }
  } else {
    for (std::int64_t j = 0; j < n; ++j, v += v_stride) {
      const V values = V::load_partial(v, static_cast<int>(left));
      for (int r = 0; r < R; ++r) {
        acc[r][0] = fma(V::broadcast(p[r * kKeyBlock + j]), values, acc[r][0]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int d = 0; d < D; ++d) acc[r][d].store(sums + r * sums_stride + d * V::kLanes);
  }
}

template <typename Isa, typename T, int R, int D>
inline void weighted_values(const float* p, const float* rescale, const T* v, std::int64_t v_stride,
                            std::int64_t n, std::int64_t head_dim, float* sums,
                            std::int64_t sums_stride) {
  constexpr std::int64_t kLanes = Vec<Isa>::kLanes;
  std::int64_t d = 0;
  for (; d + D * kLanes <= head_dim; d += D * kLanes) {
    weighted_values_tile<Isa, T, R, D>(p, rescale, v + d, v_stride, n, head_dim - d, sums + d,
                                       sums_stride);
  }
  for (; d < head_dim; d += kLanes) {
    weighted_values_tile<Isa, T, R, 1>(p, rescale, v + d, v_stride, n, head_dim - d, sums + d,
                                       sums_stride);
  }
}

/// One query's softmax over a block: scores become exp(scale * score - max), and the running
/// maximum and total move on. Returns the factor for what was accumulated before.
template <typename Isa>
inline float softmax_block(float* scores, std::int64_t n, float scale, float* running_max,
                           float* total) {
  using V = Vec<Isa>;
  const float previous = *running_max;
  V block_max = V::broadcast(previous);
  const std::int64_t padded = (n + V::kLanes - 1) / V::kLanes * V::kLanes;
  for (std::int64_t j = n; j < padded; ++j) scores[j] = 0.0f;  // never leave stale values in lanes
  for (std::int64_t j = 0; j < padded; j += V::kLanes) {
    (V::load(scores + j) * V::broadcast(scale)).store(scores + j);
  }
  for (std::int64_t j = n; j < padded; ++j) scores[j] = -__builtin_inff();
  for (std::int64_t j = 0; j < padded; j += V::kLanes) {
    block_max = max(block_max, V::load(scores + j));
  }
  const float current = block_max.max_lane();
  const V offset = V::broadcast(current);
  V sum = V::zero();
  for (std::int64_t j = 0; j < padded; j += V::kLanes) {
    const V weights = cpu::exp<Isa>(V::load(scores + j) - offset);
    weights.store(scores + j);
    sum = sum + weights;
  }
  // 0 for the first block, whose previous maximum is -inf; exactly 1 if the maximum stays.
  float rescale[V::kLanes];
  cpu::exp<Isa>(V::broadcast(previous) - offset).store(rescale);
  *running_max = current;
  *total = *total * rescale[0] + sum.sum();
  return rescale[0];
}

/// Keys and values of one block, at its first position.
template <typename T>
struct KeyBlock {
  const T* keys;
  const T* values;
};

/// The per-query state of a task, all of it in scratch or on the caller's stack.
struct AttentionState {
  const float* const* q;
  float* sums;               // (queries, padded head_dim)
  float* scores;             // (queries, kKeyBlock)
  float* const* score_rows;  // into scores
  float* running_max;
  float* totals;
};

/// Adds the first n keys of a block to the queries [begin, end) of a task.
template <typename Isa, typename T>
inline void attend_block(const AttentionTask& task, const KeyBlock<T>& block,
                         const AttentionState& state, std::int64_t begin, std::int64_t end,
                         std::int64_t n) {
  const std::int64_t stride = padded_head_dim(task.head_dim);
  float rescale[AttentionTask::kMaxQueries];

  dots<Isa, T>(state.q + begin, end - begin, block.keys, task.kv_stride, n, task.head_dim,
               state.score_rows + begin, 0);
  for (std::int64_t i = begin; i < end; ++i) {
    rescale[i] = softmax_block<Isa>(state.scores + i * kKeyBlock, n, task.scale,
                                    state.running_max + i, state.totals + i);
  }
  for (std::int64_t i = begin; i < end; i += 4) {
    const float* p = state.scores + i * kKeyBlock;
    float* out = state.sums + i * stride;
    switch (end - i) {
      case 1:
        weighted_values<Isa, T, 1, 8>(p, rescale + i, block.values, task.kv_stride, n,
                                      task.head_dim, out, stride);
        break;
      case 2:
        weighted_values<Isa, T, 2, 4>(p, rescale + i, block.values, task.kv_stride, n,
                                      task.head_dim, out, stride);
        break;
      case 3:
        weighted_values<Isa, T, 3, 2>(p, rescale + i, block.values, task.kv_stride, n,
                                      task.head_dim, out, stride);
        break;
      default:
        weighted_values<Isa, T, 4, 2>(p, rescale + i, block.values, task.kv_stride, n,
                                      task.head_dim, out, stride);
        break;
    }
  }
}

/// Adds a block of keys to all queries that see any of it.
template <typename Isa, typename T>
inline void attend(const AttentionTask& task, const KeyBlock<T>& block, const AttentionState& state,
                   std::int64_t first) {
  // Tokens that see a part of this block go one by one, those that see all of it together.
  std::int64_t t = first > task.position ? first - task.position : 0;
  for (; t < task.tokens && task.position + t + 1 - first < kKeyBlock; ++t) {
    attend_block<Isa, T>(task, block, state, t * task.heads, (t + 1) * task.heads,
                         task.position + t + 1 - first);
  }
  if (t < task.tokens) {
    attend_block<Isa, T>(task, block, state, t * task.heads, task.tokens * task.heads, kKeyBlock);
  }
}

template <typename Isa, typename T>
void attention(const AttentionTask& task, float* scratch) {
  const std::int64_t queries = task.tokens * task.heads;
  const std::int64_t stride = padded_head_dim(task.head_dim);
  float* sums = scratch;  // then scores: see AttentionState
  float* scores = sums + queries * stride;

  const float* q[AttentionTask::kMaxQueries];
  float* score_rows[AttentionTask::kMaxQueries];
  float running_max[AttentionTask::kMaxQueries];
  float totals[AttentionTask::kMaxQueries];
  for (std::int64_t i = 0; i < queries; ++i) {
    q[i] = task.q + i / task.heads * task.q_stride + i % task.heads * task.head_dim;
    score_rows[i] = scores + i * kKeyBlock;
    running_max[i] = -__builtin_inff();
    totals[i] = 0.0f;
  }
  for (std::int64_t i = 0; i < queries * stride; ++i) sums[i] = 0.0f;
  const AttentionState state{q, sums, scores, score_rows, running_max, totals};
  const std::int64_t end = task.position + task.tokens;
  for (std::int64_t first = 0; first < end; first += kKeyBlock) {
    const KeyBlock<T> block{static_cast<const T*>(task.keys) + first * task.kv_stride,
                            static_cast<const T*>(task.values) + first * task.kv_stride};
    attend<Isa, T>(task, block, state, first);
  }

  for (std::int64_t i = 0; i < queries; ++i) {
    float* out = task.out + i / task.heads * task.out_stride + i % task.heads * task.head_dim;
    const Vec<Isa> inverse = Vec<Isa>::broadcast(1.0f / totals[i]);
    map<Isa>(sums + i * stride, sums + i * stride, out, task.head_dim,
             [&](Vec<Isa> v, Vec<Isa>) { return v * inverse; });
  }
}

template <typename Isa>
constexpr BackendKernels make_backend_kernels() {
  return {.dots = {dots<Isa, float>, dots<Isa, BF16>, dots<Isa, F16>},
          .widen = {widen<Isa, float>, widen<Isa, BF16>, widen<Isa, F16>},
          .narrow = {narrow<Isa, float>, narrow<Isa, BF16>, narrow<Isa, F16>},
          .attention = {attention<Isa, float>, attention<Isa, BF16>, attention<Isa, F16>},
          .rms_norm = rms_norm<Isa>,
          .gated_rms_norm = gated_rms_norm<Isa>,
          .relu_squared = relu_squared<Isa>,
          .add = add<Isa>,
          .multiply_silu = multiply_silu<Isa>,
          .multiply_sigmoid = multiply_sigmoid<Isa>,
          .rotate = rotate<Isa>};
}

}  // namespace replayssm::cpu
