// What a block of the delta rule's step prepares before its warps go their own ways: loads, keys,
// queries, gates, and the weights of what outputs are sums of.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/mma.cuh"
#include "ops/delta_rule/cuda/recurrence.cuh"
#include "ops/delta_rule/cuda/row.cuh"

namespace replayssm::cuda {

template <typename State, typename Act, bool kChannelDecay, DeltaRuleVariant kVariant,
          int kRows = kDeltaRuleTileRows>
class DeltaRulePreparation : protected DeltaRuleRow<State, Act, kRows> {
 protected:
  static constexpr int kKeyDim = delta_rule_key_dim(kVariant);
  static constexpr bool kMasked = kVariant == DeltaRuleVariant::kAny;
  static constexpr int kBlocks = delta_rule_column_blocks(kVariant);
  static constexpr int kMaxTokens = delta_rule_chunk(kVariant);
  static constexpr int kActPerChunk = 16 / static_cast<int>(sizeof(Act));
  static constexpr int kActPitch = delta_rule_vector_pitch(kKeyDim, sizeof(Act));
  static constexpr int kVectorPitch = delta_rule_vector_pitch(kKeyDim, 4);
  static constexpr bool kDirect = is_direct(kVariant);
  // The block's warps have one head; where every channel has its own decay, so has a key head.
  static constexpr bool kOneHead = kDirect || kChannelDecay;
  static constexpr int kUnroll = kMasked ? 1 : 8;  // the general kernel is large enough
  // Elements of a vector that a lane holds while a warp prepares it.
  static constexpr int kPerLane = kKeyDim / kWarpLanes;

  using Row = DeltaRuleRow<State, Act, kRows>;
  using Row::first_place, Row::own, Row::p, Row::places, Row::raw_beta, Row::raw_gate,
      Row::ring_beta, Row::ring_decay, Row::ring_k;
  using Row::folds_values, Row::gate_parameters, Row::is_first_of_head, Row::is_first_of_key;
  using Row::lane, Row::launch, Row::live;
  using Row::ring_k_scale, Row::thread, Row::token_decay, Row::token_k;
  using Row::token_q, Row::warp;
  using typename Row::GateParameters;

  __device__ __forceinline__ DeltaRulePreparation(const DeltaRuleCudaParams& params,
                                                  const DeltaRuleLaunch& shape,
                                                  unsigned char* shared_memory)
      : Row(params, shape), shared(shared_memory) {}

  // Compile-time numbers where there is but one.
  __device__ __forceinline__ int key_dim() const {
    return kMasked ? static_cast<int>(p.shape.key_dim) : kKeyDim;
  }
  __device__ __forceinline__ int act_pitch() const {
    return kMasked ? launch.act_pitch : kActPitch;
  }
  __device__ __forceinline__ int vector_pitch() const {
    return kMasked ? launch.vector_pitch : kVectorPitch;
  }
  __device__ __forceinline__ int block_threads() const { return launch.warps * kWarpLanes; }

  // ---- Shared memory ----

  template <typename T>
  __device__ __forceinline__ T* at(std::int32_t offset) const {
    return reinterpret_cast<T*>(shared + offset);
  }
  __device__ __forceinline__ Act* raw_token(int c) const {
    return at<Act>(launch.shared.raw_tokens) + c * act_pitch();
  }
  __device__ __forceinline__ Act* raw_key(int record) const {
    return at<Act>(launch.shared.raw_keys) + record * key_dim();
  }
  __device__ __forceinline__ float* vector(int c) const {
    return at<float>(launch.shared.vectors) + c * vector_pitch();
  }
  /// Unit key of a record that is folded.
  __device__ __forceinline__ float* key(int record) const {
    return at<float>(launch.shared.keys) + record * key_dim();
  }
  /// Where every channel has its own decay: those of a record, and of token t as entry window + t.
  __device__ __forceinline__ float* channel_decay(int entry) const {
    return at<float>(launch.shared.decays) + entry * key_dim();
  }
  __device__ __forceinline__ float* token_channel_decay(int t) const {
    return channel_decay(static_cast<int>(p.limits.window) + t);
  }
  __device__ __forceinline__ float* key_scale() const { return at<float>(launch.shared.key_scale); }
  __device__ __forceinline__ float* scale() const { return at<float>(launch.shared.scale); }
  /// k_e . column c by entry e; own tokens from own_score() on.
  __device__ __forceinline__ float* scores(int c) const {
    return at<float>(launch.shared.scores) + c * launch.shared.score_stride;
  }
  __device__ __forceinline__ int own_score() const {
    return (static_cast<int>(p.limits.window) + 7) / 8 * 8;
  }

  // Of the warp's head.
  __device__ __forceinline__ std::int32_t head_at() const {
    return launch.shared.head + (kOneHead ? 0 : warp * launch.shared.head_bytes);
  }
  /// Decays by entry, where a head has one.
  __device__ __forceinline__ float* decays() const { return at<float>(head_at()); }
  __device__ __forceinline__ float* betas() const {
    return at<float>(head_at() + launch.shared.betas);
  }
  __device__ __forceinline__ float* weights(int c) const {
    return at<float>(head_at() + launch.shared.weights) + c * launch.shared.weight_stride;
  }
  __device__ __forceinline__ float* own_weights(int c) const {
    return weights(8 * kBlocks) + c * kMaxTokens;
  }
  __device__ __forceinline__ float* state_weights() const { return own_weights(8 * kBlocks); }

  // ---- Loads ----
  //
  // All of them are asynchronous and begin before any is waited for: what a block prepares would
  // otherwise pay the latency of memory several times over.

  /// `rows` vectors of key_dim elements of `size` bytes; from(row) is where one begins.
  template <typename From>
  __device__ __forceinline__ void copy_vectors(void* to, int pitch, int rows, int size,
                                               From from) const {
    const int chunks = key_dim() * size / 16;
    for (int i = thread; i < rows * chunks; i += block_threads()) {
      const int row = i / chunks;
      const int chunk = i % chunks;
      ptx::copy_async_16(
          static_cast<unsigned char*>(to) + row * pitch * size + chunk * 16,
          static_cast<const unsigned char*>(static_cast<const void*>(from(row))) + chunk * 16);
    }
  }

  /// k, q (and gates of channels) of tokens first..
  __device__ __forceinline__ void load_tokens(std::int64_t first, int count) const {
    constexpr int kSize = static_cast<int>(sizeof(Act));
    copy_vectors(raw_token(0), act_pitch(), 2 * count, kSize, [&](int c) {
      return c % 2 == 0 ? token_k(first + c / 2) : token_q(first + c / 2);
    });
    if constexpr (kChannelDecay) load_channel_gates(first, count);
  }
  /// Every warp those that it prepares itself (prepare_channels), for which it needs no barrier.
  __device__ __forceinline__ void load_channel_gates(std::int64_t first, int count) const {
    const int size = p.gate_is_f32 ? 4 : static_cast<int>(sizeof(Act));
    if (lane >= kWarpLanes * size / 16) return;
    const auto* from = static_cast<const unsigned char*>(raw_gate(first).at) + lane * 16;
    const std::int64_t token_bytes = p.gate_token_stride * size;
    for_channels(count, [&](int t, int n) {
      if (kMasked && n * size + lane * 16 >= key_dim() * size) return;
      ptx::copy_async_16(at<unsigned char>(launch.shared.raw_gates) +
                             (t * key_dim() + n) * size + lane * 16,
                         from + t * token_bytes + n * size);
    });
  }

  /// Whether the warp prepares what its head needs.
  __device__ __forceinline__ bool prepares_head() const { return !kOneHead || warp == 0; }

  /// Fewer instructions, but later by the time of a load or more: not where latency counts.
  static __device__ __forceinline__ bool copies_bulk() { return ptx::kHasBulkCopy && !kDirect; }

  /// Completes when the live records' keys (and decays of channels) are there.
  __device__ __forceinline__ std::uint64_t* records_barrier() const {
    return at<std::uint64_t>(launch.shared.barriers) + launch.warps;
  }
  __device__ __forceinline__ void init_records_barrier() const {
    if (thread == 0) ptx::mbarrier_init(records_barrier(), 1);
  }
  /// After a barrier of the block.
  __device__ __forceinline__ void wait_for_records() const {
    if (copies_bulk() && live > 0) ptx::mbarrier_wait(records_barrier(), 0);
  }

  /// Keys and gates of the live records.
  __device__ __forceinline__ void load_records() const {
    if (!copies_bulk()) {
      copy_vectors(raw_key(0), key_dim(), live, sizeof(Act), [&](int i) { return ring_k(i); });
      if constexpr (kChannelDecay) {
        copy_vectors(channel_decay(0), key_dim(), live, 4, [&](int i) { return ring_decay(i); });
      }
    } else if (thread == 0 && live > 0) {
      // One span of the ring, or two where it wraps.
      std::uint64_t* bar = records_barrier();
      const int key_bytes = key_dim() * static_cast<int>(sizeof(Act));
      const int decay_bytes = kChannelDecay ? key_dim() * 4 : 0;
      ptx::mbarrier_arrive_expect(bar,
                                  static_cast<std::uint32_t>(live * (key_bytes + decay_bytes)));
      const int unwrapped = min(live, places - first_place);
      for (int first = 0; first < live; first += unwrapped) {
        const int count = first == 0 ? unwrapped : live - unwrapped;
        ptx::bulk_copy(raw_key(first), ring_k(first), static_cast<std::uint32_t>(count * key_bytes),
                       bar, ptx::kEvictFirst);
        if constexpr (kChannelDecay) {
          ptx::bulk_copy(channel_decay(first), ring_decay(first),
                         static_cast<std::uint32_t>(count * decay_bytes), bar, ptx::kEvictFirst);
        }
        if (first > 0) break;
      }
    }
    for (int i = thread; i < live; i += block_threads()) {
      ptx::copy_async_4(key_scale() + i, ring_k_scale(i));
    }
    for (int i = lane; i < live && prepares_head(); i += kWarpLanes) {
      if constexpr (!kChannelDecay) ptx::copy_async_4(decays() + i, ring_decay(i));
      if (folds_values()) ptx::copy_async_4(betas() + i, ring_beta(i));
    }
  }

  // ---- Keys, queries, gates ----

  struct Vector {
    float x[kPerLane];
  };

  __device__ __forceinline__ bool lane_has(int i) const {
    return !kMasked || lane * kPerLane + i < key_dim();
  }
  __device__ __forceinline__ Vector load_lane(const Act* from) const {
    Vector out;
#pragma unroll
    for (int i = 0; i < kPerLane; i += 4) {
      Packed<Act, 4> packed{};
      if (lane_has(i)) packed = load_packed<Act, 4>(from + lane * kPerLane + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) out.x[i + j] = packed[j];
    }
    return out;
  }
  __device__ __forceinline__ void store_scaled(const Vector& v, float factor, float* to) const {
#pragma unroll
    for (int i = 0; i < kPerLane; i += 4) {
      if (!lane_has(i)) continue;
      *reinterpret_cast<float4*>(to + lane * kPerLane + i) = {
          __fmul_rn(factor, v.x[i]), __fmul_rn(factor, v.x[i + 1]), __fmul_rn(factor, v.x[i + 2]),
          __fmul_rn(factor, v.x[i + 3])};
    }
  }
  static __device__ __forceinline__ float sum_of_squares(const Vector& v) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sum = __fmaf_rn(v.x[i], v.x[i], sum);
    return sum;
  }
  /// 1 / |x| from |x|^2, or 1 where the model does not normalize.
  __device__ __forceinline__ float unit_scale(float squares) const {
    if (!p.normalize) return 1.0f;
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(squares, p.norm_epsilon)));
  }
  /// Of column c, k or q of a token.
  __device__ __forceinline__ float column_scale(int c, float squares) const {
    const float unit = unit_scale(squares);
    return c % 2 == 0 ? unit : __fmul_rn(unit, p.q_scale);
  }

  /// The scale of column c as the warp's lanes have it; `to_vectors`: and the scaled vector.
  __device__ __forceinline__ void scale_token(int c, const Vector& raw, bool to_vectors) const {
    float squares[1] = {sum_of_squares(raw)};
    const float unit = column_scale(c, team_sum<kWarpLanes>(squares, lane));
    if (lane == 0) scale()[c] = unit;
    if (to_vectors) store_scaled(raw, unit, vector(c));
  }
  /// The first column that the warp scales: the other warps have keys, products or gates to prepare.
  __device__ __forceinline__ int first_column() const {
    return kChannelDecay ? warp : launch.warps - 1 - warp;
  }
  /// Those of the loaded tokens' k and q, a vector per warp.
  __device__ __forceinline__ void scale_tokens(int count, bool to_vectors) const {
    for (int c = first_column(); c < 2 * count; c += launch.warps) {
      scale_token(c, load_lane(raw_token(c)), to_vectors);
    }
  }

  static __device__ __forceinline__ float2& pair_at(float* from) {
    return *reinterpret_cast<float2*>(from);
  }

  /// For folds: unit keys of the live records. Where deltas are added up, they take decays of later
  /// records too: those of channels come with the keys, and the products of all records' take the
  /// place of the first one's; those of heads take the place of the records', and the product of
  /// all that of the first beta.
  __device__ __forceinline__ void prepare_fold() const {
    if (live == 0) return;
    if (kChannelDecay && !folds_values()) {
      // Two channels to a thread, of the last ones: the first ones have norms to compute.
      for (int n = 2 * (block_threads() - 1 - thread); n < key_dim(); n += 2 * block_threads()) {
        float2 later = {1.0f, 1.0f};
#pragma unroll 4
        for (int e = live - 1; e >= 0; --e) {
          const auto raw = load_packed<Act, 2>(raw_key(e) + n);
          pair_at(key(e) + n) = {__fmul_rn(__fmul_rn(key_scale()[e], raw[0]), later.x),
                                 __fmul_rn(__fmul_rn(key_scale()[e], raw[1]), later.y)};
          const float2 decay = pair_at(channel_decay(e) + n);
          later.x *= decay.x;
          later.y *= decay.y;
        }
        pair_at(channel_decay(0) + n) = later;
      }
      return;
    }
    if (launch.shared.keys_replace_raw) {
      replace_raw_keys();
    } else {
      for (int i = warp; i < live; i += launch.warps) {
        store_scaled(load_lane(raw_key(i)), key_scale()[i], key(i));
      }
    }
    // Where a block has one head, not the warp that has its gates to prepare.
    if (!kChannelDecay && !folds_values() && (!kOneHead || warp == min(1, launch.warps - 1))) {
      float later = 1.0f;
      for (int first = last_group(live); first >= 0; first -= kWarpLanes) {
        const float factor = later_decays(first, live, later);
        if (first + lane < live) decays()[first + lane] = factor;
      }
      if (lane == 0) betas()[0] = later;
      __syncwarp();
    }
  }
  /// Unit keys to where raw ones lie, which go through registers.
  __device__ __forceinline__ void replace_raw_keys() const {
    Vector mine[kDeltaRuleKeysOfWarp];
#pragma unroll
    for (int j = 0; j < kDeltaRuleKeysOfWarp; ++j) {
      const int i = j * launch.warps + warp;
      if (i < live) mine[j] = load_lane(raw_key(i));
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kDeltaRuleKeysOfWarp; ++j) {
      const int i = j * launch.warps + warp;
      if (i < live) store_scaled(mine[j], key_scale()[i], key(i));
    }
  }

  /// The records as prepare_fold leaves them; `values`: theirs for a pass.
  __device__ __forceinline__ FoldedRecords<Act> folded_records(const Act* values,
                                                               int value_pitch) const {
    return {.count = live,
            .exact = folds_values(),
            .values = values,
            .value_pitch = value_pitch,
            .keys = key(0),
            .key_pitch = key_dim(),
            .decays = kChannelDecay ? channel_decay(0) : decays(),
            .decay_pitch = kChannelDecay ? key_dim() : 1,
            .total = kChannelDecay ? channel_decay(0) : betas(),
            .betas = betas()};
  }

  /// The first of the last 32 of so many records; negative if there are none.
  static __device__ __forceinline__ int last_group(int records) {
    return records == 0 ? -1 : (records - 1) / kWarpLanes * kWarpLanes;
  }
  /// Products of the decays after record first + lane, with one decay per head; `later`: those
  /// after the group, then with the group's.
  __device__ __forceinline__ float later_decays(int first, int records, float& later) const {
    return product_of_later(first + lane < records ? decays()[first + lane] : 1.0f, lane, later);
  }

  /// Gates of tokens first.. as loaded, by lanes.
  struct TokenGates {
    GateParameters parameters;
    float gate, beta;
  };
  __device__ __forceinline__ TokenGates load_token_gates(std::int64_t first, int count) const {
    TokenGates out{};
    if (lane >= count || !prepares_head()) return out;
    out.beta = *raw_beta(first + lane);
    if constexpr (!kChannelDecay) {
      out.parameters = gate_parameters(0);
      out.gate = *raw_gate(first + lane);
    }
    return out;
  }
  /// Betas of tokens first.. for the warp's head, and decays where a head has one, as entries after
  /// the live records. `append` records them.
  __device__ __forceinline__ void prepare_token_gates(const TokenGates& loaded, std::int64_t first,
                                                      int count, bool append) const {
    static_assert(kMaxTokens <= kWarpLanes);
    if (lane >= count || !prepares_head()) return;
    const bool records = append && is_first_of_head();
    const int entry = live + static_cast<int>(first) + lane;
    const float beta = delta_rule_beta(loaded.beta, p.beta_doubled);
    betas()[live + lane] = beta;
    if (records && !p.fast_flush) *ring_beta(entry) = beta;
    if constexpr (!kChannelDecay) {
      const float factor = token_decay(loaded.gate, exp_f32(loaded.parameters.a_log), loaded.parameters.bias);
      decays()[live + lane] = factor;
      if (records) *ring_decay(entry) = factor;
    }
  }

  /// Decays of channels are prepared by warps, as many at a time as they have lanes.
  __device__ __forceinline__ int channel_slices() const {
    return (key_dim() + kWarpLanes - 1) / kWarpLanes;
  }
  /// f(token, first channel) for those that are the warp's.
  template <typename F>
  __device__ __forceinline__ void for_channels(int count, F f) const {
    for (int i = warp; i < count * channel_slices(); i += launch.warps) {
      f(i / channel_slices(), i % channel_slices() * kWarpLanes);
    }
  }
  /// Whether a thread has one channel for all tokens: then load_own_channel has its parameters.
  __device__ __forceinline__ bool has_own_channel() const {
    return kChannelDecay && launch.warps % channel_slices() == 0;
  }
  __device__ __forceinline__ GateParameters load_own_channel() const {
    if constexpr (!kChannelDecay) return {};
    const int n = warp % channel_slices() * kWarpLanes + lane;
    const bool present = has_own_channel() && (!kMasked || n < key_dim());
    return gate_parameters(present ? n : 0);
  }
  /// Decays of all channels for the loaded tokens; `append` records them. `rate`: exp(A_log).
  __device__ __forceinline__ void prepare_channels(int count, float rate, float own_bias,
                                                   bool append) const {
    if constexpr (kChannelDecay) {
      for_channels(count, [&](int t, int first) {
        const int n = first + lane;
        if (kMasked && n >= key_dim()) return;
        const int index = t * key_dim() + n;
        const float raw = p.gate_is_f32 ? at<float>(launch.shared.raw_gates)[index]
                                        : widen(at<Act>(launch.shared.raw_gates)[index]);
        prepare_channel(t, n, raw, rate, has_own_channel() ? own_bias : gate_parameters(n).bias,
                        append);
      });
    }
  }
  __device__ __forceinline__ void prepare_channel(int t, int n, float raw, float rate, float bias,
                                                  bool append) const {
    const float decay = token_decay(raw, rate, bias);
    if (append) ring_decay(live + t)[n] = decay;
    token_channel_decay(t)[n] = decay;
  }

  __device__ __forceinline__ void append_keys() const {
    const int chunks = key_dim() / kActPerChunk;
    for (int i = thread; i < own * chunks; i += block_threads()) {
      const int t = i / chunks;
      const int offset = i % chunks * kActPerChunk;
      *reinterpret_cast<uint4*>(ring_k(live + t) + offset) =
          *reinterpret_cast<const uint4*>(raw_token(2 * t) + offset);
    }
  }

  /// After a barrier behind the tokens' scales.
  __device__ __forceinline__ void append_key_scales() const {
    if (own == 0 || !is_first_of_key()) return;
    for (int t = thread; t < own; t += block_threads()) *ring_k_scale(live + t) = scale()[2 * t];
  }

  // ---- Scores, where a head has one decay: products of the window's keys with the columns, without
  // their scales ----

  /// Entries: `records` live records, then the row's own tokens.
  __device__ __forceinline__ void prepare_scores(int records) const {
    if constexpr (sizeof(Act) == 2) {
      multiply_scores(records);
    } else {
      add_up_scores(records);
    }
  }

  /// On the tensor cores, exact products of bf16: a warp has eight entries.
  __device__ __forceinline__ void multiply_scores(int records) const {
    const int g = lane / 4;
    const int q = lane % 4;
    const int record_jobs = (records + 7) / 8;
    for (int job = warp; job < record_jobs + (own + 7) / 8; job += launch.warps) {
      const bool is_record = job < record_jobs;
      const int first = is_record ? 8 * job : 8 * (job - record_jobs);
      const Act* entry =
          is_record ? raw_key(min(first + g, records - 1)) : raw_token(2 * min(first + g, own - 1));
      constexpr int kTiles = (kBlocks + 1) / 2;  // of 16 columns
      float sums[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][i] = 0.0f;
      }
#pragma unroll kUnroll
      for (int s = 0; s < kKeyDim; s += 32) {
        if (kMasked && s >= key_dim()) break;
        const int n = s + 8 * q;
        Packed<Act, 8> e{};
        if (!kMasked || n < key_dim()) e = load_packed<Act, 8>(entry + n);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          if (m > 0 && 8 * m >= own) break;
          Packed<Act, 8> low{}, high{};
          if (!kMasked || n < key_dim()) {
            low = load_packed<Act, 8>(raw_token(16 * m + g) + n);
            if (kBlocks > 1) high = load_packed<Act, 8>(raw_token(16 * m + 8 + g) + n);
          }
#pragma unroll
          for (int i = 0; i < 4; i += 2) {
            ptx::mma_bf16(sums[m], low.word[i], high.word[i], low.word[i + 1], high.word[i + 1],
                          e.word[i], e.word[i + 1]);
          }
        }
      }
      const int to = (is_record ? first : own_score() + first) + 2 * q;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        *reinterpret_cast<float2*>(scores(16 * m + g) + to) = {sums[m][0], sums[m][1]};
        if (kBlocks > 1) {
          *reinterpret_cast<float2*>(scores(16 * m + 8 + g) + to) = {sums[m][2], sums[m][3]};
        }
      }
    }
  }

  __device__ __forceinline__ static void add_product(const float (&x)[4], const float (&y)[4],
                                                     float (&sum)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = fmaf(x[i], y[i], sum[i]);
  }
  template <typename T>
  static __device__ __forceinline__ void load_four(const T* from, float (&out)[4]) {
    const auto packed = load_packed<T, 4>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = packed[i];
  }

  /// In fp32, four lanes to a product.
  __device__ __forceinline__ void add_up_scores(int records) const {
    const int shift = 32 - __clz(2 * own - 1);  // log2 of the number of columns, rounded up
    const int items = (records + own) << shift;
    constexpr int kQuads = kWarpLanes / 4;
#pragma unroll 1
    for (int first = warp * kQuads; first < items; first += launch.warps * kQuads) {
      const int item = min(first + lane / 4, items - 1);  // a warp stays together
      const int entry = item >> shift;
      const int c = min(item & ((1 << shift) - 1), 2 * own - 1);
      const int token = entry - records;
      const Act* key = token < 0 ? raw_key(entry) : raw_token(2 * token);
      float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
      for (int n = 4 * (lane % 4); n < kKeyDim; n += 16) {
        if (kMasked && n >= key_dim()) break;
        const auto x = load_packed<Act, 4>(key + n);
        const auto y = load_packed<Act, 4>(raw_token(c) + n);
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = fmaf(x[i], y[i], part[i]);
      }
      float sum = (part[0] + part[1]) + (part[2] + part[3]);
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (lane % 4 == 0) scores(c)[token < 0 ? entry : own_score() + token] = sum;
    }
  }

  // ---- Weights ----

  // Where every channel has its own decay, a warp goes through entries from the newest to the oldest
  // with all channels in its lanes, and the columns of several tokens.
  static constexpr int kGroup = kVariant == DeltaRuleVariant::kSingle ? 2 : kMasked ? 4 : 8;
  static constexpr int kRecordsAtOnce = kVariant == DeltaRuleVariant::kSingle ? 4 : kMasked ? 1 : 2;

  /// Weights of records and own tokens, the columns of the checkpoint, and scales, which all but own
  /// tokens' weights have yet to be multiplied by (state_weights).
  __device__ __forceinline__ void prepare_channel_weights(int records) const {
    if constexpr (kVariant == DeltaRuleVariant::kSingle) {
      if (own > 0) weigh_columns(0, records);
    } else {
#pragma unroll 1
      for (int first = 0; first < 2 * own; first += kGroup) weigh_columns(first, records);
    }
    // Products take sixteen records at once: zeros up to the next multiple.
    const int padding = -records & 15;
    for (int i = thread; i < 32 * own; i += block_threads()) {
      if (i % 16 < padding) weights(i / 16)[records + i % 16] = 0.0f;
    }
  }

  __device__ __forceinline__ Vector load_lane_decays(const float* from) const {
    Vector out;
#pragma unroll
    for (int i = 0; i < kPerLane; i += 4) {
      float4 four = {1.0f, 1.0f, 1.0f, 1.0f};
      if (lane_has(i)) four = *reinterpret_cast<const float4*>(from + lane * kPerLane + i);
      out.x[i] = four.x;
      out.x[i + 1] = four.y;
      out.x[i + 2] = four.z;
      out.x[i + 3] = four.w;
    }
    return out;
  }
  static __device__ __forceinline__ void multiply_by(const Vector& factor, Vector& v) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) v.x[i] *= factor.x[i];
  }
  /// sums[i] = x . column i of the lane's channels.
  static __device__ __forceinline__ void multiply_columns(const Vector& x,
                                                          const Vector (&column)[kGroup],
                                                          float* sums) {
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      sums[c] = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sums[c] = fmaf(x.x[i], column[c].x[i], sums[c]);
    }
  }

  /// Weights of the warp's share of the records for columns first... Returns the product of the
  /// decays from the warp's first record on.
  __device__ __forceinline__ Vector weigh_records(int first, int records,
                                                  const Vector (&column)[kGroup]) const {
    constexpr int kSums = kRecordsAtOnce * kGroup;
    constexpr int kLanes = kWarpLanes / kSums;  // that get a sum
    const int c = lane / kLanes % kGroup;
    const int record = lane / kLanes / kGroup;  // of those at once, from the newest on
    const int share = (records + launch.warps - 1) / launch.warps;
    const int begin = warp * share;
    const int end = min(begin + share, records);
    Vector later;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) later.x[i] = 1.0f;
#pragma unroll 4
    for (int e = records - 1; e >= end; --e) multiply_by(load_lane_decays(channel_decay(e)), later);
#pragma unroll 1
    for (int newest = end - 1; newest >= begin; newest -= kRecordsAtOnce) {
      float sums[kSums];
#pragma unroll
      for (int r = 0; r < kRecordsAtOnce; ++r) {
        const int e = max(newest - r, begin);
        Vector key = load_lane(raw_key(e));
        multiply_by(later, key);
        multiply_columns(key, column, sums + r * kGroup);
        if (newest - r >= begin) multiply_by(load_lane_decays(channel_decay(e)), later);
      }
      const float sum = team_sum<kWarpLanes>(sums, lane);
      const int e = newest - record;
      if (lane % kLanes == 0 && e >= begin && (kGroup == 2 || first + c < 2 * own)) {
        weights(first + c)[e] = key_scale()[e] * sum;
      }
    }
    return later;
  }

  /// Columns first.. of a group. Own tokens are the last warp's, the checkpoint's columns the first
  /// one's, which has the oldest records.
  __device__ __forceinline__ void weigh_columns(int first, int records) const {
    const bool is_last_warp = warp == launch.warps - 1;
    constexpr int kLanes = kWarpLanes / kGroup;  // that get the sums of a column
    const int columns = kVariant == DeltaRuleVariant::kSingle ? 2 : 2 * own;
    const int mine = first + lane / kLanes;
    const bool writes = lane % kLanes == 0 && mine < columns;
    Vector column[kGroup];
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      column[c] = load_lane(raw_token(min(first + c, columns - 1)));
    }
    float sums[kGroup];
    float unit = 0.0f;
    if (is_last_warp) {
#pragma unroll
      for (int c = 0; c < kGroup; ++c) sums[c] = sum_of_squares(column[c]);
      unit = column_scale(mine, team_sum<kWarpLanes>(sums, lane));
      if (writes) scale()[mine] = state_weights()[mine] = unit;
      __syncwarp();
    }
    // A column takes decays along on its way: of tokens up to its own, then of records.
#pragma unroll 1
    for (int i = min(columns, first + kGroup) / 2 - 1; i >= 0; --i) {
      if (is_last_warp) {
        multiply_columns(load_lane(raw_token(2 * i)), column, sums);
        const float sum = team_sum<kWarpLanes>(sums, lane);
        if (writes && i <= mine / 2) own_weights(mine)[i] = scale()[2 * i] * unit * sum;
      }
      const Vector decay = load_lane_decays(token_channel_decay(i));
#pragma unroll
      for (int c = 0; c < kGroup; ++c) {
        if (i <= (first + c) / 2) multiply_by(decay, column[c]);
      }
    }
    const Vector later = weigh_records(first, records, column);
    if (warp != 0) return;
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      multiply_by(later, column[c]);
      if (first + c < columns) store_scaled(column[c], 1.0f, vector(first + c));
    }
  }

  /// The weights of the warp's head, which has one decay: scores with their scales, times the decays
  /// between entry and token. The checkpoint's weight takes the scale of k or q along.
  __device__ __forceinline__ void prepare_weights(int records) const {
    const int columns = 2 * own;
    // A lane has a column, then a record, then a pair of own tokens.
    float column = lane < columns ? scale()[lane] : 0.0f;
    for (int s = 0; s <= min(lane / 2, own - 1); ++s) column *= decays()[live + s];
    float later = 1.0f;
#pragma unroll 1
    for (int first = last_group(records); first >= 0; first -= kWarpLanes) {
      const int entry = first + lane;
      const bool is_record = entry < records;
      float factor = is_record ? key_scale()[entry] : 0.0f;
      factor *= later_decays(first, records, later);
      const bool is_padding = entry < (records + 15) / 16 * 16;
      for (int c = 0; c < columns; ++c) {
        const float weight = factor * __shfl_sync(kAllLanes, column, c);
        if (is_padding) weights(c)[entry] = is_record ? weight * scores(c)[entry] : 0.0f;
      }
    }
    // Records that have been folded are in the checkpoint already.
    if (lane < columns) state_weights()[lane] = column * later;
#pragma unroll 1
    for (int item = lane; item < columns * kMaxTokens; item += kWarpLanes) {
      const int c = item / kMaxTokens;
      const int i = item % kMaxTokens;
      const int t = c / 2;
      if (i > t) continue;
      float weight = scale()[c] * scale()[2 * i];
      for (int s = i + 1; s <= t; ++s) weight *= decays()[live + s];
      own_weights(c)[i] = weight * scores(c)[own_score() + i];
    }
    __syncwarp();
  }

  unsigned char* shared;
};

}  // namespace replayssm::cuda
