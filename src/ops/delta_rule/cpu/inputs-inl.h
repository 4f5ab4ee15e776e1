// What a work item of the delta rule computes with: keys, queries, values and gates of its tokens
// and of the live records, as floats.
//
// Activations are widened here, where they enter, and rounded here, where they leave, so that the
// arithmetic is compiled once for all activation types. f32 is handed on by pointer and costs
// nothing.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "cpu/gates.h"
#include "ops/delta_rule/cpu/columns-inl.h"

namespace replayssm::cpu::delta {

/// f(std::type_identity<T>) with the C++ type of an activation type.
template <typename F>
RSSM_ALWAYS_INLINE auto with_type(DType type, F f) {
  switch (type) {
    case DType::kBF16:
      return f(std::type_identity<BF16>{});
    case DType::kF16:
      return f(std::type_identity<F16>{});
    default:
      return f(std::type_identity<float>{});
  }
}

RSSM_ALWAYS_INLINE std::int64_t bytes_of(DType activation) {
  return activation == DType::kF32 ? 4 : 2;
}

/// Where element `first` of an array of an activation type lies.
RSSM_ALWAYS_INLINE const std::byte* at(DType type, const void* data, std::int64_t first) {
  return static_cast<const std::byte*>(data) + first * bytes_of(type);
}
RSSM_ALWAYS_INLINE std::byte* at(DType type, void* data, std::int64_t first) {
  return static_cast<std::byte*>(data) + first * bytes_of(type);
}

/// n 16-bit activations from element `first` on, as floats in `buffer`.
template <typename Isa>
void widen(DType type, const void* data, std::int64_t first, std::int64_t n, float* buffer) {
  const auto copy = [&](const auto* from) {
    map_vectors<Isa>(from + first, n, buffer, [](Vec<Isa> x, std::int64_t) { return x; });
  };
  if (type == DType::kBF16) return copy(static_cast<const BF16*>(data));
  copy(static_cast<const F16*>(data));
}

/// n activations from element `first` on: in place if they are f32, else widened into `buffer`.
template <typename Isa>
RSSM_ALWAYS_INLINE const float* widened(DType type, const void* data, std::int64_t first,
                                        std::int64_t n, float* buffer) {
  if (type == DType::kF32) return static_cast<const float*>(data) + first;
  widen<Isa>(type, data, first, n, buffer);
  return buffer;
}

/// Where the f32 results for activations from element `first` on are to be put: at their own place
/// if they are f32, else in `buffer`, from where `leave` takes them.
RSSM_ALWAYS_INLINE float* results_for(DType type, void* data, std::int64_t first, float* buffer) {
  return type == DType::kF32 ? static_cast<float*>(data) + first : buffer;
}

/// n floats, a multiple of 8, to 16-bit activations from element `first` on.
template <typename Isa>
void narrow(DType type, const float* x, void* data, std::int64_t first, std::int64_t n) {
  const auto copy = [&](auto* to) {
    to += first;
    std::int64_t i = 0;
    for (; i + Vec<Isa>::kLanes <= n; i += Vec<Isa>::kLanes) Vec<Isa>::load(x + i).store(to + i);
    if (i < n) {
      const auto rest = static_cast<int>(n - i);
      Vec<Isa>::load_partial(x + i, rest).store_partial(to + i, rest);
    }
  };
  if (type == DType::kBF16) return copy(static_cast<BF16*>(data));
  copy(static_cast<F16*>(data));
}

/// Rounds n results from where results_for put them to where they belong.
template <typename Isa>
RSSM_ALWAYS_INLINE void leave(DType type, const float* results, void* data, std::int64_t first,
                              std::int64_t n) {
  if (type != DType::kF32) narrow<Isa>(type, results, data, first, n);
}

/// x as it will be read back after it has left.
template <typename Isa>
Vec<Isa> rounded(DType type, Vec<Isa> x) {
  return with_type(type, [&]<typename T>(std::type_identity<T>) {
    if constexpr (!std::is_same_v<T, float>) {
      T stored[Vec<Isa>::kLanes];
      x.store(stored);
      x = Vec<Isa>::load(stored);
    }
    return x;
  });
}

/// y = scale * x.
template <typename Isa>
RSSM_ALWAYS_INLINE void scaled(const float* x, std::int64_t n, float scale, float* y) {
  map_vectors<Isa>(x, n, y,
                   [scale](Vec<Isa> a, std::int64_t) { return Vec<Isa>::broadcast(scale) * a; });
}

/// y = x * a, element by element; y may be x.
template <typename Isa>
void multiplied(const float* x, const float* a, std::int64_t n, float* y) {
  using V = Vec<Isa>;
  map_vectors<Isa>(x, n, y, [a, n](V xi, std::int64_t i) {
    const std::int64_t rest = n - i;
    return xi *
           (rest < V::kLanes ? V::load_partial(a + i, static_cast<int>(rest)) : V::load(a + i));
  });
}

// ---- Tokens ----

/// Keys and queries of up to kCount tokens as the recurrence takes them: scaled to unit length
/// where the model normalizes, queries by the op's scale as well.
template <typename Isa, int kCount>
struct TokenVectors {
  alignas(64) float k[kCount][kMaxKeyDim];
  alignas(64) float q[kCount][kMaxKeyDim];
  float k_scale[kCount];  // that made k of the key as received

  void read(const DeltaRuleTask& task, std::int64_t first, int count) {
    for (int t = 0; t < count; ++t) {
      const std::int64_t token = first + t;
      const float* raw =
          widened<Isa>(task.activation, task.k, key_at(task, token), task.key_dim, k[t]);
      k_scale[t] = unit_scale(task, raw);
      scaled<Isa>(raw, task.key_dim, k_scale[t], k[t]);
      raw = widened<Isa>(task.activation, task.q,
                         token * task.q_token_stride + task.key_head * task.q_head_stride,
                         task.key_dim, q[t]);
      scaled<Isa>(raw, task.key_dim, unit_scale(task, raw) * task.q_scale, q[t]);
    }
  }

  static std::int64_t key_at(const DeltaRuleTask& task, std::int64_t token) {
    return token * task.k_token_stride + task.key_head * task.k_head_stride;
  }

 private:
  /// 1 / |x|, or 1 where the model does not normalize.
  static float unit_scale(const DeltaRuleTask& task, const float* x) {
    using V = Vec<Isa>;
    if (!task.normalize) return 1.0f;
    V sum = V::zero();
    std::int64_t n = 0;
    for (; n + V::kLanes <= task.key_dim; n += V::kLanes) {
      const V xn = V::load(x + n);
      sum = fma(xn, xn, sum);
    }
    if (n < task.key_dim) {
      const V xn = V::load_partial(x + n, static_cast<int>(task.key_dim - n));
      sum = fma(xn, xn, sum);
    }
    return 1.0f / std::sqrt(sum.sum() + task.norm_epsilon);
  }
};

/// Values of up to kCount tokens of one head, and their outputs until they leave.
template <typename Isa, int kCount>
class TokenValues {
 public:
  const float* v[kCount];
  float* o[kCount];

  void enter(const DeltaRuleTask& task, std::int64_t head, std::int64_t first, int count) {
    for (int t = 0; t < count; ++t) {
      v[t] = widened<Isa>(task.activation, task.v, value_at(task, head, first + t), task.value_dim,
                          v_buffer_[t]);
      o[t] = results_for(task.activation, task.o, output_at(task, head, first + t), o_buffer_[t]);
    }
  }

  void leave_outputs(const DeltaRuleTask& task, std::int64_t head, std::int64_t first,
                     int count) const {
    for (int t = 0; t < count; ++t) {
      leave<Isa>(task.activation, o[t], task.o, output_at(task, head, first + t), task.value_dim);
    }
  }

  static std::int64_t value_at(const DeltaRuleTask& task, std::int64_t head, std::int64_t token) {
    return token * task.v_token_stride + head * task.v_head_stride;
  }

 private:
  static std::int64_t output_at(const DeltaRuleTask& task, std::int64_t head, std::int64_t token) {
    return token * task.o_token_stride + head * task.o_head_stride;
  }

  alignas(64) float v_buffer_[kCount][kMaxValueDim];
  alignas(64) float o_buffer_[kCount][kMaxValueDim];
};

/// The gates of one head for up to kCount tokens.
template <typename Isa, bool kChannelDecay, int kCount>
class HeadGates {
  using V = Vec<Isa>;
  static constexpr int kRoom = (kCount + V::kLanes - 1) / V::kLanes * V::kLanes;  // whole vectors

 public:
  const float* decay[kCount];  // (1 or key_dim) by token
  float beta[kRoom];

  HeadGates() {
    for (int t = 0; t < kCount; ++t) decay[t] = decay_[t];
  }

  void compute(const DeltaRuleTask& task, std::int64_t head, std::int64_t first, int count) {
    const V rate = exp<Isa>(V::broadcast(task.a_log == nullptr ? 0.0f : task.a_log[head]));
    if (task.bounded) {
      compute_decays(task, head, first, count, [rate, bound = task.lower_bound](V x) {
        return bounded_log_decay<Isa>(rate, x, bound);
      });
    } else {
      compute_decays(task, head, first, count,
                     [rate](V x) { return softplus_log_decay<Isa>(rate, x); });
    }
    float raw[kRoom];
    gather(task.beta_type, task.beta, first * task.beta_token_stride + head, task.beta_token_stride,
           count, raw);
    map_vectors<Isa>(raw, count, beta,
                     [&](V x, std::int64_t) { return delta_rule_beta<Isa>(x, task.beta_doubled); });
  }

 private:
  template <typename LogDecay>
  void compute_decays(const DeltaRuleTask& task, std::int64_t head, std::int64_t first, int count,
                      LogDecay log_decay_of) {
    const std::int64_t at = first * task.gate_token_stride + head * task.gate_head_stride;
    if constexpr (kChannelDecay) {
      const float* bias = task.dt_bias == nullptr ? nullptr : task.dt_bias + head * task.key_dim;
      with_type(task.gate_type, [&]<typename T>(std::type_identity<T>) {
        for (int t = 0; t < count; ++t) {
          const T* raw = static_cast<const T*>(task.gate) + at + t * task.gate_token_stride;
          map_vectors<Isa>(raw, task.key_dim, decay_[t], [&](V x, std::int64_t n) {
            if (bias == nullptr) return log_decay_of(x);
            const std::int64_t rest = task.key_dim - n;
            return log_decay_of(x + (rest < V::kLanes
                                         ? V::load_partial(bias + n, static_cast<int>(rest))
                                         : V::load(bias + n)));
          });
          exponentials(decay_[t], task.key_dim);
        }
      });
    } else {
      float raw[kRoom];
      gather(task.gate_type, task.gate, at, task.gate_token_stride, count, raw);
      const V bias = V::broadcast(task.dt_bias == nullptr ? 0.0f : task.dt_bias[head]);
      map_vectors<Isa>(raw, count, &decay_[0][0],
                       [&](V x, std::int64_t) { return log_decay_of(x + bias); });
      exponentials(&decay_[0][0], count);
    }
  }

  static void exponentials(float* x, std::int64_t n) {
    map_vectors<Isa>(x, n, x, [](V a, std::int64_t) { return exp<Isa>(a); });
  }

  static void gather(DType type, const void* data, std::int64_t first, std::int64_t stride,
                     int count, float* out) {
    with_type(type, [&]<typename T>(std::type_identity<T>) {
      const T* from = static_cast<const T*>(data) + first;
      for (int t = 0; t < count; ++t) out[t] = to_float(from[t * stride]);
    });
  }

  alignas(64) float decay_[kChannelDecay ? kCount : kRoom][kChannelDecay ? kMaxKeyDim : 1];
};

// ---- Live records, oldest first ----

/// f(i, place) for every live record.
template <typename F>
void for_each_record(const DeltaRuleTask& task, F f) {
  std::int64_t place = task.first_place;
  for (std::int64_t i = 0; i < task.live; ++i) {
    f(i, place);
    if (++place == task.places) place = 0;
  }
}

/// Keys of the records, as the recurrence takes them.
template <typename Isa>
struct RecordKeys {
  alignas(64) float k[kMaxLive][kMaxKeyDim];

  void read(const DeltaRuleTask& task) {
    for_each_record(task, [&](std::int64_t i, std::int64_t place) {
      const std::int64_t at = task.key_head * task.places + place;
      const float* raw =
          widened<Isa>(task.activation, task.ring_k, at * task.key_dim, task.key_dim, k[i]);
      scaled<Isa>(raw, task.key_dim, task.ring_k_scale[at], k[i]);
    });
  }
};

/// What one value head recorded: decays, and either the values that the recurrence is re-run from
/// (with beta) or the deltas that were solved.
template <typename Isa, bool kChannelDecay>
class HeadRecords {
 public:
  enum class Column { kValue, kDelta };

  const float* decay[kMaxLive];   // (1 or key_dim)
  const float* column[kMaxLive];  // (value_dim)
  float beta[kMaxLive];           // with Column::kValue

  void read(const DeltaRuleTask& task, std::int64_t head, Column what) {
    const void* ring = what == Column::kValue ? task.ring_v : task.ring_delta;
    for_each_record(task, [&](std::int64_t i, std::int64_t place) {
      const std::int64_t at = head * task.places + place;
      decay[i] = task.ring_decay + at * (kChannelDecay ? task.key_dim : 1);
      column[i] =
          widened<Isa>(task.activation, ring, at * task.value_dim, task.value_dim, buffer_[i]);
      if (what == Column::kValue) beta[i] = task.ring_beta[at];
    });
  }

 private:
  alignas(64) float buffer_[kMaxLive][kMaxValueDim];
};

// ---- What the row leaves in the ring ----

/// Where the row's token t is recorded.
RSSM_ALWAYS_INLINE std::int64_t append_place(const DeltaRuleTask& task, int token) {
  return (task.first_place + task.live + token) % task.places;
}

/// Deltas of the row's tokens of one head, on their way into the ring.
template <typename Isa>
class TokenDeltas {
 public:
  float* d[kMaxTokens];

  void enter(const DeltaRuleTask& task, std::int64_t head) {
    for (int t = 0; t < task.tokens; ++t) {
      d[t] = results_for(task.activation, task.ring_delta, place(task, head, t), buffer_[t]);
    }
  }
  void leave_all(const DeltaRuleTask& task, std::int64_t head) const {
    for (int t = 0; t < task.tokens; ++t) {
      leave<Isa>(task.activation, d[t], task.ring_delta, place(task, head, t), task.value_dim);
    }
  }

 private:
  static std::int64_t place(const DeltaRuleTask& task, std::int64_t head, int t) {
    return (head * task.places + append_place(task, t)) * task.value_dim;
  }

  alignas(64) float buffer_[kMaxTokens][kMaxValueDim];
};

}  // namespace replayssm::cpu::delta
