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
  static constexpr bool kOneHead = kVariant == DeltaRuleVariant::kDirect;  // of a block's warps
  static constexpr int kUnroll = kMasked ? 1 : 8;  // the general kernel is large enough
  // Elements of a vector that a lane holds while a warp prepares it.
  static constexpr int kPerLane = kKeyDim / kWarpLanes;

  using Row = DeltaRuleRow<State, Act, kRows>;
  using Row::first_place, Row::own, Row::p, Row::places, Row::raw_beta, Row::raw_gate,
      Row::ring_beta, Row::ring_decay, Row::ring_k;
  using Row::folds_values, Row::gate_parameters, Row::is_first_of_head, Row::lane, Row::launch,
      Row::live;
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
    return at<float>(launch.shared.keys) + record * vector_pitch();
  }
  /// Where every channel has its own decay. Of a record: its decays; if it is not folded, its key
  /// times the decays of later records takes their place. Of token t, entry window + t: its decays.
  __device__ __forceinline__ float* channel_decay(int entry) const {
    return at<float>(launch.shared.decays) + entry * key_dim();
  }
  __device__ __forceinline__ float* token_channel_decay(int t) const {
    return channel_decay(static_cast<int>(p.limits.window) + t);
  }
  __device__ __forceinline__ float* total() const { return at<float>(launch.shared.total); }
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
    if constexpr (kChannelDecay) {
      const auto from = [&](int t) { return raw_gate(first + t).at; };
      if (p.gate_is_f32) {
        copy_vectors(at<float>(launch.shared.raw_gates), vector_pitch(), count, 4, from);
      } else {
        copy_vectors(at<float>(launch.shared.raw_gates), vector_pitch(), count, kSize, from);
      }
    }
  }

  /// Whether the warp prepares what its head needs.
  __device__ __forceinline__ bool prepares_head() const { return !kOneHead || warp == 0; }

  /// Fewer instructions, but later by the time of a load or more: not where latency counts.
  static __device__ __forceinline__ bool copies_bulk() { return ptx::kHasBulkCopy && !kOneHead; }

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
  /// 1 / |x|, or 1 where the model does not normalize.
  __device__ __forceinline__ float unit_scale(const Vector& v) const {
    if (!p.normalize) return 1.0f;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sum = __fmaf_rn(v.x[i], v.x[i], sum);
#pragma unroll
    for (int mask = kWarpLanes / 2; mask > 0; mask /= 2) {
      sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, mask));
    }
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(sum, p.norm_epsilon)));
  }

  /// Scales of the loaded tokens' k and q, a vector per warp; `to_vectors`: and the scaled vectors.
  __device__ __forceinline__ void scale_tokens(int count, bool to_vectors) const {
    // The last warps: the first ones have products to compute.
    for (int c = launch.warps - 1 - warp; c < 2 * count; c += launch.warps) {
      const Vector v = load_lane(raw_token(c));
      const float unit = c % 2 == 0 ? unit_scale(v) : __fmul_rn(unit_scale(v), p.q_scale);
      if (lane == 0) scale()[c] = unit;
      if (to_vectors) store_scaled(v, unit, vector(c));
    }
  }

  /// For folds: unit keys of the live records. Where deltas are added up, they take decays of later
  /// records too: those of channels come with the keys, and the products of all records' take the
  /// place of the first one's; those of heads take the place of the records', and the product of
  /// all that of the first beta.
  __device__ __forceinline__ void prepare_fold() const {
    if (live == 0) return;
    if (kChannelDecay && !folds_values()) {
      // The last threads, where there are more than channels: the first ones have gates to prepare.
      for (int n = block_threads() - 1 - thread; n < key_dim(); n += block_threads()) {
        float later = 1.0f;
#pragma unroll 4
        for (int e = live - 1; e >= 0; --e) {
          key(e)[n] = __fmul_rn(__fmul_rn(key_scale()[e], widen(raw_key(e)[n])), later);
          later *= channel_decay(e)[n];
        }
        channel_decay(0)[n] = later;
      }
      return;
    }
    for (int i = warp; i < live; i += launch.warps) {
      store_scaled(load_lane(raw_key(i)), key_scale()[i], key(i));
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

  /// The records as prepare_fold leaves them; `values`: theirs for a pass.
  __device__ __forceinline__ FoldedRecords<Act> folded_records(const Act* values,
                                                               int value_pitch) const {
    return {.count = live,
            .exact = folds_values(),
            .values = values,
            .value_pitch = value_pitch,
            .keys = key(0),
            .key_pitch = vector_pitch(),
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
      const float factor = token_decay(loaded.gate, loaded.parameters);
      decays()[live + lane] = factor;
      if (records) *ring_decay(entry) = factor;
    }
  }

  /// Of the channel that is this thread's, where threads have one each for all tokens.
  __device__ __forceinline__ bool has_own_channel() const {
    return kChannelDecay && block_threads() % kKeyDim == 0;
  }
  __device__ __forceinline__ GateParameters load_own_channel() const {
    const int n = thread % kKeyDim;
    if (!has_own_channel() || (kMasked && n >= key_dim())) return {};
    return gate_parameters(n);
  }
  /// Decay of a channel for a loaded token; `append` records it.
  __device__ __forceinline__ float prepare_channel(int t, int n, const GateParameters& own_channel,
                                                   bool append) const {
    const auto index = t * vector_pitch() + n;
    const float raw = p.gate_is_f32 ? at<float>(launch.shared.raw_gates)[index]
                                    : widen(at<Act>(launch.shared.raw_gates)[index]);
    const float factor = token_decay(raw, has_own_channel() ? own_channel : gate_parameters(n));
    if (append) ring_decay(live + t)[n] = factor;
    token_channel_decay(t)[n] = factor;
    return factor;
  }

  /// Decays of all channels for the loaded tokens.
  __device__ __forceinline__ void prepare_channels(int count, const GateParameters& own_channel,
                                                   bool append) const {
    if constexpr (kChannelDecay) {
      for (int i = thread; i < count * kKeyDim; i += block_threads()) {
        const int n = i % kKeyDim;
        if (!kMasked || n < key_dim()) prepare_channel(i / kKeyDim, n, own_channel, append);
      }
    }
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

  /// With a decay per channel: keys of records times those of later records and the product of all
  /// of them (unless they are folded), and columns times the decays of the row's tokens so far.
  __device__ __forceinline__ void decay_channels(int records, const GateParameters& own_channel,
                                                 bool append) const {
    for (int i = thread; i < 2 * kKeyDim; i += block_threads()) {
      const int n = i % kKeyDim;
      if (kMasked && n >= key_dim()) continue;
      float product = 1.0f;
      if (i < kKeyDim) {
#pragma unroll 4
        for (int e = records - 1; e >= 0; --e) {
          const float factor = channel_decay(e)[n];
          channel_decay(e)[n] = widen(raw_key(e)[n]) * product;
          product *= factor;
        }
        total()[n] = product;
      } else {
        for (int t = 0; t < own; ++t) {
          product *= prepare_channel(t, n, own_channel, append);
          vector(2 * t)[n] = widen(raw_token(2 * t)[n]) * product;
          vector(2 * t + 1)[n] = widen(raw_token(2 * t + 1)[n]) * product;
        }
      }
    }
  }

  // ---- Scores: products of the window's keys with the columns, without their scales ----

  /// Entries: `records` live records, then the row's own tokens.
  __device__ __forceinline__ void prepare_scores(int records) const {
    if constexpr (sizeof(Act) == 2 && !kChannelDecay) {
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
    for (int first = warp * kQuads; first < items; first += launch.warps * kQuads) {
      const int item = min(first + lane / 4, items - 1);  // a warp stays together
      const int entry = item >> shift;
      const int c = min(item & ((1 << shift) - 1), 2 * own - 1);
      const int token = entry - records;
      float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll kUnroll
      for (int n = 0; n < kKeyDim; n += 16) {
        if (kMasked && n >= key_dim()) break;
        const int from = n + 4 * (lane % 4);
        float x[4], y[4];
        if constexpr (kChannelDecay) {
          if (token < 0) {
            load_four(channel_decay(entry) + from, x);
            load_four(vector(c) + from, y);
          } else {
            load_four(raw_token(2 * token) + from, x);
            load_four(raw_token(c) + from, y);
            for (int s = token + 1; s <= c / 2; ++s) {
              float f[4];
              load_four(token_channel_decay(s) + from, f);
#pragma unroll
              for (int i = 0; i < 4; ++i) y[i] *= f[i];
            }
          }
        } else {
          load_four((token < 0 ? raw_key(entry) : raw_token(2 * token)) + from, x);
          load_four(raw_token(c) + from, y);
        }
        add_product(x, y, part);
      }
      float sum = (part[0] + part[1]) + (part[2] + part[3]);
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (lane % 4 == 0) scores(c)[token < 0 ? entry : own_score() + token] = sum;
    }
  }

  // ---- Weights ----

  /// The weights of the warp's head: scores with their scales, times the decays between entry and
  /// token. The checkpoint's weight takes the scale of k or q along.
  __device__ __forceinline__ void prepare_weights(int records) const {
    const int columns = 2 * own;
    // A lane has a column, then a record, then a pair of own tokens.
    float column = lane < columns ? scale()[lane] : 0.0f;
    if constexpr (!kChannelDecay) {
      for (int s = 0; s <= min(lane / 2, own - 1); ++s) column *= decays()[live + s];
    }
    float later = 1.0f;
#pragma unroll 1
    for (int first = last_group(records); first >= 0; first -= kWarpLanes) {
      const int entry = first + lane;
      const bool is_record = entry < records;
      float factor = is_record ? key_scale()[entry] : 0.0f;
      if constexpr (!kChannelDecay) factor *= later_decays(first, records, later);
      const bool is_padding = entry < (records + 15) / 16 * 16;
      for (int c = 0; c < columns; ++c) {
        const float weight = factor * __shfl_sync(kAllLanes, column, c);
        if (is_padding) weights(c)[entry] = is_record ? weight * scores(c)[entry] : 0.0f;
      }
    }
    // Records that have been folded are in the checkpoint already.
    if (lane < columns) state_weights()[lane] = kChannelDecay ? column : column * later;
#pragma unroll 1
    for (int item = lane; item < columns * kMaxTokens; item += kWarpLanes) {
      const int c = item / kMaxTokens;
      const int i = item % kMaxTokens;
      const int t = c / 2;
      if (i > t) continue;
      float weight = scale()[c] * scale()[2 * i];
      if constexpr (!kChannelDecay) {
        for (int s = i + 1; s <= t; ++s) weight *= decays()[live + s];
      }
      own_weights(c)[i] = weight * scores(c)[own_score() + i];
    }
    __syncwarp();
  }

  unsigned char* shared;
};

}  // namespace replayssm::cuda
