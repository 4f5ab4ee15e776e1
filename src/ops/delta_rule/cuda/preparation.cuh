// What a block of the delta rule's step prepares before its warps go their own ways, with either
// kernel: loads, keys, queries and gates.
#pragma once

#include <cstdint>

#include "cuda/ptx/async_copy.cuh"
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
  static constexpr bool kDefers = delta_rule_defers<State, kChannelDecay>();
  // Elements of a vector that a lane holds while a warp prepares it.
  static constexpr int kPerLane = kKeyDim / kWarpLanes;

  using Row = DeltaRuleRow<State, Act, kRows>;
  using Row::first_place, Row::own, Row::p, Row::places, Row::raw_beta, Row::raw_gate,
      Row::ring_beta, Row::ring_decay, Row::ring_k;
  using Row::folds_values, Row::gate_parameters, Row::head, Row::is_first_of_key;
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
  /// Where the vector of column c of a product lies; columns without a token have another's.
  static __device__ __forceinline__ int token_row(int c) { return c & (2 * kMaxTokens - 1); }
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

  // Of a warp's head: every warp has a table, unless all have one head.

  __device__ __forceinline__ std::int32_t head_at(int of_warp) const {
    return launch.shared.head + (kOneHead ? 0 : of_warp * launch.shared.head_bytes);
  }
  __device__ __forceinline__ std::int32_t head_at() const { return head_at(warp); }
  /// Decays by entry, where a head has one.
  __device__ __forceinline__ float* decays(int of_warp) const {
    return at<float>(head_at(of_warp));
  }
  __device__ __forceinline__ float* decays() const { return decays(warp); }
  __device__ __forceinline__ float* betas(int of_warp) const {
    return at<float>(head_at(of_warp) + launch.shared.betas);
  }
  __device__ __forceinline__ float* betas() const { return betas(warp); }

  // ---- Deferred decays ----

  /// As the checkpoint has it. All rows of a head have the same, but others may be writing theirs.
  __device__ __forceinline__ DeferredDecay load_deferred() const {
    if (!kDefers || Row::zero) return DeferredDecay();
    return DeferredDecay(*Row::deferred_decay(0));
  }
  /// Of `rows` rows of the run.
  __device__ __forceinline__ void store_deferred(int row, int rows, DeferredDecay deferred) const {
    if (kDefers && lane < rows / static_cast<int>(kDeferredRows)) {
      Row::deferred_decay(row)[lane] = deferred.value();
    }
  }

  // ---- Loads ----
  //
  // All of them begin before any is waited for: what a block prepares would otherwise pay the
  // latency of memory several times over.

  /// `rows` vectors of key_dim elements of `size` bytes; from(row) is where one begins.
  template <typename From>
  __device__ __forceinline__ void copy_vectors(void* to, int pitch, int rows, int size,
                                               From from) const {
    const int chunks = key_dim() * size / 16;
#pragma unroll 1
    for (int i = thread; i < rows * chunks; i += block_threads()) {
      const int row = i / chunks;
      const int chunk = i % chunks;
      ptx::copy_async_16(
          static_cast<unsigned char*>(to) + row * pitch * size + chunk * 16,
          static_cast<const unsigned char*>(static_cast<const void*>(from(row))) + chunk * 16);
    }
  }

  /// k, q (and gates of channels) of tokens first..
  __device__ __forceinline__ void load_tokens(int first, int count) const {
    constexpr int kSize = static_cast<int>(sizeof(Act));
    if constexpr (kChannelDecay) {
      load_token_vectors(first, count);
      load_channel_gates(first, count);
    } else {
      copy_vectors(raw_token(0), act_pitch(), 2 * count, kSize, [&](int c) {
        return c % 2 == 0 ? token_k(first + c / 2) : token_q(first + c / 2);
      });
    }
  }
  // Where every channel has its own decay, a warp loads what it prepares itself, for which it needs
  // no barrier: token t is warp t's, modulo their number.

  __device__ __forceinline__ void load_token_vectors(int first, int count) const {
    const int chunks = key_dim() / kActPerChunk;
#pragma unroll 1
    for (int t = warp; t < count; t += launch.warps) {
#pragma unroll 1
      for (int i = lane; i < 2 * chunks; i += kWarpLanes) {
        const bool is_q = i >= chunks;
        const int offset = (is_q ? i - chunks : i) * kActPerChunk;
        ptx::copy_async_16(raw_token(is_q ? 2 * t + 1 : 2 * t) + offset,
                           (is_q ? token_q(first + t) : token_k(first + t)) + offset);
      }
    }
  }
  __device__ __forceinline__ void load_channel_gates(int first, int count) const {
    const auto* from = static_cast<const unsigned char*>(raw_gate(head, first, 0).at) + lane * 16;
    for_channels(count, [&](int t, int n) {
      if (lane * 16 >= channels_from(n) * gate_bytes()) return;
      ptx::copy_async_16(
          raw_channel_gates(t, n) + lane * 16,
          from + Row::along(t * gate_bytes(), p.gate_token_stride) + n * gate_bytes());
    });
  }
  __device__ __forceinline__ int gate_bytes() const {
    return p.gate_is_f32 ? 4 : static_cast<int>(sizeof(Act));
  }
  /// Raw gates of channels n.. that a warp prepares lie where their decays will, at the end.
  __device__ __forceinline__ unsigned char* raw_channel_gates(int t, int n) const {
    return reinterpret_cast<unsigned char*>(token_channel_decay(t) + n) +
           channels_from(n) * (4 - gate_bytes());
  }

  /// Whether the warp prepares what its head needs.
  __device__ __forceinline__ bool prepares_head() const { return !kOneHead || warp == 0; }

  /// Fewer instructions, but later by the time of a load or more: not where latency counts.
  static __device__ __forceinline__ bool copies_bulk() {
    return ptx::kHasBulkCopy && kChannelDecay && !kDirect;
  }

  /// Completes when the live records' keys and decays of channels are there.
  __device__ __forceinline__ std::uint64_t* records_barrier() const {
    return at<std::uint64_t>(launch.shared.barriers) + launch.warps;
  }
  __device__ __forceinline__ void init_records_barrier() const {
    if (copies_bulk() && thread == 0) ptx::mbarrier_init(records_barrier(), 1);
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
        copy_vectors(channel_decay(0), key_dim(), live, 4,
                     [&](int i) { return ring_decay(head, i); });
      }
    } else if (thread == 0 && live > 0) {
      // One span of the ring, or two where it wraps.
      std::uint64_t* bar = records_barrier();
      const int key_bytes = key_dim() * static_cast<int>(sizeof(Act));
      const int decay_bytes = key_dim() * 4;
      ptx::mbarrier_arrive_expect(bar,
                                  static_cast<std::uint32_t>(live * (key_bytes + decay_bytes)));
      const int unwrapped = min(live, places - first_place);
#pragma unroll 1
      for (int first = 0; first < live; first += unwrapped) {
        const int count = first == 0 ? unwrapped : live - unwrapped;
        ptx::bulk_copy(raw_key(first), ring_k(first), static_cast<std::uint32_t>(count * key_bytes),
                       bar, ptx::kEvictFirst);
        ptx::bulk_copy(channel_decay(first), ring_decay(head, first),
                       static_cast<std::uint32_t>(count * decay_bytes), bar, ptx::kEvictFirst);
        if (first > 0) break;
      }
    }
#pragma unroll 1
    for (int i = thread; i < live; i += block_threads()) {
      ptx::copy_async_4(key_scale() + i, ring_k_scale(i));
    }
#pragma unroll 1
    for (int i = lane; i < live && prepares_head(); i += kWarpLanes) {
      if constexpr (!kChannelDecay) ptx::copy_async_4(decays() + i, ring_decay(head, i));
      if (folds_values()) ptx::copy_async_4(betas() + i, ring_beta(head, i));
    }
  }

  // ---- Keys, queries, gates ----

  struct Vector {
    float x[kPerLane];
  };

  __device__ __forceinline__ bool lane_has(int i) const {
    return !kMasked || lane * kPerLane + i < key_dim();
  }
  /// This lane's part of a vector; zero where there is none.
  template <typename T>
  __device__ __forceinline__ Vector load_lane(const T* from) const {
    Vector out;
#pragma unroll
    for (int i = 0; i < kPerLane; i += 4) {
      Packed<T, 4> packed{};
      if (lane_has(i)) packed = load_packed<T, 4>(from + lane * kPerLane + i);
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
  /// The first column that the warp scales: other warps have keys, products or gates to prepare.
  __device__ __forceinline__ int first_column() const {
    if constexpr (kChannelDecay) return warp;
    if constexpr (kDirect) return launch.warps - 1 - warp;
    return warp == launch.warps - 1 ? warp : launch.warps - 2 - warp;
  }
  /// Those of the loaded tokens' k and q, a vector per warp.
  __device__ __forceinline__ void scale_tokens(int count, bool to_vectors) const {
#pragma unroll 1
    for (int c = first_column(); c < 2 * count; c += launch.warps) {
      scale_token(c, load_lane(raw_token(c)), to_vectors);
    }
  }

  /// For folds: unit keys of the live records. Where deltas are added up, they take decays of later
  /// records too: those of channels come with the keys, and the products of all records' take the
  /// place of the first one's; those of heads take the place of the records', and the product of
  /// all, with what is deferred, that of the first beta. Else what is deferred takes decays of
  /// heads along, and beta / c takes their place. Returns what the fold leaves deferred, in the
  /// warps that have it to prepare.
  __device__ __forceinline__ DeferredDecay prepare_fold(DeferredDecay deferred) const {
    if (live == 0) return deferred;
    if (kChannelDecay && !folds_values()) {
      // Two channels to a thread. In the direct kernel the first warps have norms to compute.
      const int order = kDirect ? block_threads() - 1 - thread : thread;
      for (int n = 2 * order; n < key_dim(); n += 2 * block_threads()) {
        Packed<float, 2> later, unit;
        later.set(0, 1.0f, 1.0f);
#pragma unroll 4
        for (int e = live - 1; e >= 0; --e) {
          const auto raw = load_packed<Act, 2>(raw_key(e) + n);
          unit.set(0, __fmul_rn(__fmul_rn(key_scale()[e], raw[0]), later[0]),
                   __fmul_rn(__fmul_rn(key_scale()[e], raw[1]), later[1]));
          store_packed(key(e) + n, unit);
          const auto decay = load_packed<float, 2>(channel_decay(e) + n);
          later.set(0, later[0] * decay[0], later[1] * decay[1]);
        }
        store_packed(channel_decay(0) + n, later);
      }
      return deferred;
    }
    if (launch.shared.keys_replace_raw) {
      replace_raw_keys();
    } else {
#pragma unroll 1
      for (int i = warp; i < live; i += launch.warps) {
        store_scaled(load_lane(raw_key(i)), key_scale()[i], key(i));
      }
    }
    if (kChannelDecay || !prepares_records()) return deferred;
    if (folds_values()) return defer_records(deferred);
    float later = 1.0f;
#pragma unroll 1
    for (int first = last_group(live); first >= 0; first -= kWarpLanes) {
      const float factor = later_decays(first, live, later);
      if (first + lane < live) decays()[first + lane] = factor;
    }
    if (lane == 0) betas()[0] = later * deferred.value();
    __syncwarp();
    return DeferredDecay();
  }
  /// Whether the warp has the records' decays to prepare, where a head has one: where a block has
  /// one head, not the warp that has its gates to prepare.
  __device__ __forceinline__ bool prepares_records() const {
    return !kOneHead || warp == min(1, launch.warps - 1);
  }
  /// One after the other, as the recurrence takes them. FoldedRecords says what of.
  __device__ __forceinline__ DeferredDecay defer_records(DeferredDecay deferred) const {
#pragma unroll 1
    for (int first = 0; first < live; first += kWarpLanes) {
      const int count = min(kWarpLanes, live - first);
      DeferredDecay mine;
      float factor = 1.0f;
#pragma unroll 4
      for (int i = 0; i < count; ++i) {
        const float before_record = deferred.take(decays()[first + i]);
        factor = lane == i ? before_record : factor;
        mine = lane == i ? deferred : mine;
      }
      __syncwarp();
      if (lane < count) {
        decays()[first + lane] = factor == 1.0f ? mine.gain(betas()[first + lane]) : -factor;
      }
    }
    __syncwarp();
    return deferred;
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
  __device__ __forceinline__ FoldedRecords<Act> folded_records(const Act* values, int value_pitch,
                                                               DeferredDecay rest) const {
    return {.count = live,
            .exact = folds_values(),
            .values = values,
            .value_pitch = value_pitch,
            .keys = key(0),
            .key_pitch = key_dim(),
            .decays = kChannelDecay ? channel_decay(0) : decays(),
            .decay_pitch = kChannelDecay ? key_dim() : 1,
            .total = kChannelDecay ? channel_decay(0) : betas(),
            .betas = betas(),
            .rest = rest.value()};
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

  /// The gate that a thread prepares: of token t for a warp's table. The block's last threads do
  /// for all tables at once what would take every warp as long.
  struct GateJob {
    int t, of_warp;
    bool present;
  };
  __device__ __forceinline__ GateJob gate_job(int count) const {
    static_assert(2 * kMaxTokens <= kWarpLanes);
    if constexpr (kOneHead) return {lane, warp, warp == 0 && lane < count};
    const int bits = kWarpLanes - __clz(launch.warps - 1);
    const int job = block_threads() - 1 - thread;
    const int of_warp = job & ((1 << bits) - 1);
    const int t = job >> bits;
    return {t, of_warp, of_warp < launch.warps && t < count};
  }
  __device__ __forceinline__ typename Row::Run run_of_job(const GateJob& job) const {
    return kOneHead ? Row::own_run() : Row::run_of(job.of_warp);
  }

  /// Gates of tokens first.. as loaded, by jobs. Beside decays of channels numbers are widened at
  /// once: measured on an H200, 0.4 us less at batch 1 in place, where everything else is the same.
  using Loaded = LoadedNumber<std::conditional_t<kChannelDecay, float, Act>>;
  struct TokenGates {
    GateParameters parameters;
    Loaded gate, beta;
  };
  template <typename Raw>
  static __device__ __forceinline__ Loaded load_number(const Raw& raw) {
    if constexpr (kChannelDecay) {
      return Loaded(*raw);
    } else {
      return raw.load();
    }
  }
  __device__ __forceinline__ TokenGates load_token_gates(int first, int count) const {
    TokenGates out{};
    const GateJob job = gate_job(count);
    if (!job.present) return out;
    const int of_head = run_of_job(job).head;
    out.beta = load_number(raw_beta(of_head, first + job.t));
    if constexpr (!kChannelDecay) {
      out.parameters = gate_parameters(of_head, 0);
      out.gate = load_number(raw_gate(of_head, first + job.t, 0));
    }
    return out;
  }
  /// Betas of tokens first.., and decays where a head has one, as entries after the live records of
  /// the tables. `append` records them. Then comes a barrier of the block.
  __device__ __forceinline__ void prepare_token_gates(const TokenGates& loaded, int first,
                                                      int count, bool append) const {
    const GateJob job = gate_job(count);
    if (!job.present) return;
    const auto run = run_of_job(job);
    const bool records = append && Row::is_first_of_head(run);
    const int entry = live + first + job.t;
    const float beta = delta_rule_beta(loaded.beta.value(p.beta_is_f32), p.beta_doubled);
    betas(job.of_warp)[live + job.t] = beta;
    if (records && !p.fast_flush) *ring_beta(run.head, entry) = beta;
    if constexpr (!kChannelDecay) {
      const float factor = token_decay(loaded.gate.value(p.gate_is_f32), loaded.parameters.rate(),
                                       loaded.parameters.bias);
      decays(job.of_warp)[live + job.t] = factor;
      if (records) *ring_decay(run.head, entry) = factor;
    }
  }

  /// Decays of channels are prepared by warps, as many at a time as they have lanes.
  __device__ __forceinline__ int channel_slices() const {
    return (key_dim() + kWarpLanes - 1) / kWarpLanes;
  }
  __device__ __forceinline__ int channels_from(int n) const {
    return kMasked ? min(kWarpLanes, key_dim() - n) : kWarpLanes;
  }
  /// f(token, first channel) for those that are the warp's.
  template <typename F>
  __device__ __forceinline__ void for_channels(int count, F f) const {
#pragma unroll 1
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
    return gate_parameters(head, present ? n : 0);
  }
  /// Decays of all channels for the loaded tokens; `append` records them. `rate`: exp(A_log).
  __device__ __forceinline__ void prepare_channels(int count, float rate, float own_bias,
                                                   bool append) const {
    if constexpr (kChannelDecay) {
      for_channels(count, [&](int t, int first) {
        const int n = first + lane;
        const bool present = lane < channels_from(first);
        const unsigned char* from = raw_channel_gates(t, first);
        float raw = 0.0f;
        if (present) {
          raw = p.gate_is_f32 ? reinterpret_cast<const float*>(from)[lane]
                              : widen(reinterpret_cast<const Act*>(from)[lane]);
        }
        __syncwarp();
        if (!present) return;
        prepare_channel(t, n, raw, rate,
                        has_own_channel() ? own_bias : gate_parameters(head, n).bias, append);
      });
    }
  }
  __device__ __forceinline__ void prepare_channel(int t, int n, float raw, float rate, float bias,
                                                  bool append) const {
    const float decay = token_decay(raw, rate, bias);
    if (append) ring_decay(head, live + t)[n] = decay;
    token_channel_decay(t)[n] = decay;
  }

  __device__ __forceinline__ void append_keys() const {
    const int chunks = key_dim() / kActPerChunk;
#pragma unroll 1
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
#pragma unroll 1
    for (int t = thread; t < own; t += block_threads()) *ring_k_scale(live + t) = scale()[2 * t];
  }

  unsigned char* shared;
};

}  // namespace replayssm::cuda
