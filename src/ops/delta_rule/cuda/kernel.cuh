// The delta rule's step on the GPU, both families: rows of every kind in one launch.
//
// A block asks for its first state and, while that is on its way, prepares what its warps share;
// then every warp has a tile of 16 rows of a head's state to itself, part after part (config.h).
// With the entries e of the window (live records, then the row's own tokens), w(e, t) the product
// of the decays after e up to token t, and rows v of the state:
//
//   h_k[v, t] = w(-1, t) (S k_t)[v] + sum_e w(e, t) (k_e . k_t) d_e[v]      e before t
//   h_q[v, t] = the same with q_t, and e = t too
//   d_t[v]    = beta_t (v_t[v] - h_k[v, t]),   o_t[v] = h_q[v, t]
//
// S k, S q and the sums over records are products on the tensor cores (products.cuh); the sums over
// own tokens are solved from one to the next between the four lanes that share rows. Where every
// channel has its own decay, decays multiply channels of k and q instead of scores.
//
// A row that flushes, and a committed row, run the recurrence on tiles in registers
// (recurrence.cuh). What must not contribute is not loaded, or replaced by selection: unused places
// may hold NaN.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/async_copy.cuh"
#include "cuda/read_copy.cuh"
#include "ops/delta_rule/cuda/kernels.h"
#include "ops/delta_rule/cuda/products.cuh"
#include "ops/delta_rule/cuda/recurrence.cuh"
#include "ops/delta_rule/cuda/row.cuh"

namespace replayssm::cuda {

template <typename State, typename Act, bool kChannelDecay, DeltaRuleVariant kVariant,
          ReadCopyFormat kCopy>
class DeltaRuleStepKernel
    : private DeltaRuleRow<State, Act>,
      private DeltaRuleRecurrence<State, delta_rule_key_dim(kVariant),
                                  kVariant == DeltaRuleVariant::kAny, kChannelDecay>,
      private DeltaRuleProducts<State, Act, std::conditional_t<kChannelDecay, float, Act>,
                                delta_rule_key_dim(kVariant), kVariant == DeltaRuleVariant::kAny,
                                delta_rule_column_blocks(kVariant)> {
  static constexpr int kKeyDim = delta_rule_key_dim(kVariant);
  static constexpr bool kMasked = kVariant == DeltaRuleVariant::kAny;
  static constexpr int kBlocks = delta_rule_column_blocks(kVariant);
  static constexpr int kMaxTokens = 4 * kBlocks;

  using Row = DeltaRuleRow<State, Act>;
  using Row::beta, Row::head_of, Row::is_first_of_head, Row::is_first_of_key, Row::key_head;
  using Row::isolate, Row::kind, Row::lane, Row::launch, Row::live, Row::token_decay, Row::output,
      Row::own;
  using Row::p, Row::part_count, Row::first_position, Row::present, Row::raw_gate, Row::read_row,
      Row::ring_beta;
  using Row::ring_delta, Row::ring_k, Row::ring_k_scale, Row::ring_decay, Row::ring_v;
  using Row::slot, Row::state, Row::thread, Row::token_count, Row::token_k, Row::token_q,
      Row::token_v;
  using Row::value_offset, Row::warp, Row::zero, Row::zero_outputs;
  using typename Row::Position;

  using Recurrence = DeltaRuleRecurrence<State, kKeyDim, kMasked, kChannelDecay>;
  using Recurrence::advance, Recurrence::kColumns, Recurrence::kPassRows;
  using Recurrence::kRowLanes, Recurrence::load_vector, Recurrence::multiply;
  using Recurrence::read_tile, Recurrence::round_tile;
  using typename Recurrence::Tile;

  // Where every channel has its own decay, columns are multiplied by them, in fp32.
  using Column = std::conditional_t<kChannelDecay, float, Act>;
  using Products = DeltaRuleProducts<State, Act, Column, kKeyDim, kMasked, kBlocks>;
  using Products::clear, Products::g, Products::multiply_state, Products::multiply_window;
  using Products::q;
  using typename Products::Sums;

  static constexpr bool kHasCopy = kCopy != ReadCopyFormat::kNone;
  using Copy = ReadCopyTiles<kCopy>;

  static constexpr int kDecays = kChannelDecay ? kColumns : 1;
  static constexpr int kActPerChunk = 16 / static_cast<int>(sizeof(Act));
  static constexpr int kRecordChunks = kDeltaRuleTileRows / kActPerChunk;  // of 16 bytes
  static constexpr int kVectorPitch = delta_rule_vector_pitch(kKeyDim);
  // Elements of a vector that a lane holds while a warp prepares it.
  static constexpr int kPerLane = kKeyDim / kWarpLanes;

 public:
  static __device__ __forceinline__ void run(const DeltaRuleCudaParams& p,
                                             const DeltaRuleLaunch& launch, unsigned char* shared) {
    DeltaRuleStepKernel kernel(p, launch, shared);
    kernel.read_row();
    if (kernel.kind == PlannedRow::kPadding) {
      kernel.zero_outputs();
      return;
    }
    if (kernel.token_count == 0 && kernel.live == 0) return;
    kernel.init_barriers();
    Position ahead = kernel.first_position();
    for (int part = 0; part < launch.stages; ++part) {
      kernel.load_part(part, ahead);
      kernel.advance_position(ahead);
    }
    if (kernel.kind == PlannedRow::kReplay) {
      kernel.template tentative<false>(ahead);
    } else {
      kernel.isolate();
      asm volatile("" : "+r"(ahead.head), "+r"(ahead.part), "+r"(ahead.v0));
      if (kernel.kind == PlannedRow::kCommitted) {
        kernel.committed(ahead);
      } else {
        kernel.template tentative<true>(ahead);
      }
    }
  }

 private:
  __device__ __forceinline__ DeltaRuleStepKernel(const DeltaRuleCudaParams& params,
                                                 const DeltaRuleLaunch& shape,
                                                 unsigned char* shared_memory)
      : Row(params, shape),
        Recurrence(Row::lane, kMasked ? static_cast<int>(params.shape.key_dim) : kKeyDim),
        Products(Row::lane),
        shared(shared_memory),
        key_dim(kMasked ? static_cast<int>(params.shape.key_dim) : kKeyDim),
        pitch(kMasked ? shape.vector_pitch : kVectorPitch) {}

  // ---- Shared memory ----

  __device__ __forceinline__ unsigned char* stage(int part) const {
    return shared + (part % launch.stages * launch.warps + warp) * launch.shared.stage_bytes;
  }
  __device__ __forceinline__ State* stage_state(int part) const {
    return reinterpret_cast<State*>(stage(part));
  }
  /// (entries, tile rows): deltas of the live records, or their v if the row folds them; then v of
  /// a tentative row's tokens.
  __device__ __forceinline__ Act* stage_values(int part) const {
    return reinterpret_cast<Act*>(stage(part) + launch.shared.values);
  }
  __device__ __forceinline__ std::uint64_t* barrier(int part) const {
    return reinterpret_cast<std::uint64_t*>(shared + launch.shared.barriers) +
           part % launch.stages * launch.warps + warp;
  }
  template <typename T>
  __device__ __forceinline__ T* at(std::int32_t offset) const {
    return reinterpret_cast<T*>(shared + offset);
  }
  __device__ __forceinline__ Act* raw_token(int c) const {
    return at<Act>(launch.shared.raw_tokens) + c * pitch;
  }
  __device__ __forceinline__ Act* raw_key(int record) const {
    return at<Act>(launch.shared.raw_keys) + record * pitch;
  }
  __device__ __forceinline__ float* vector(int c) const {
    return at<float>(launch.shared.vectors) + c * pitch;
  }
  /// Of a record: its unit key if it is folded, where a head has one decay.
  __device__ __forceinline__ float* key(int record) const {
    return at<float>(launch.shared.keys) + record * pitch;
  }
  /// Where every channel has its own decay. Of a record: its decays; if it is not folded, its key
  /// times the decays of later records takes their place. Of token t, entry window + t: its decays.
  __device__ __forceinline__ float* channel_decay(int entry) const {
    return at<float>(launch.shared.decays) + entry * pitch;
  }
  __device__ __forceinline__ float* token_channel_decay(int t) const {
    return channel_decay(static_cast<int>(p.limits.window) + t);
  }
  __device__ __forceinline__ float* total() const { return at<float>(launch.shared.total); }
  /// Decays of a part's head by entry. Those of live records that are not folded make place for the
  /// products of later records' decays.
  __device__ __forceinline__ float* decay(int part) const {
    return at<float>(launch.shared.gates) + part * launch.shared.gate_stride;
  }
  __device__ __forceinline__ float* betas(int part) const {
    return decay(part) + (launch.shared.gate_stride - 2) / 2;
  }
  /// Product of all live records' decays.
  __device__ __forceinline__ float& total_decay(int part) const {
    return decay(part)[launch.shared.gate_stride - 2];
  }
  __device__ __forceinline__ float* key_scale() const { return at<float>(launch.shared.key_scale); }
  __device__ __forceinline__ float* scale() const { return at<float>(launch.shared.scale); }
  __device__ __forceinline__ float* scores(int entry) const {
    return at<float>(launch.shared.scores) + entry * 8 * kBlocks;
  }
  __device__ __forceinline__ float* weights(int part, int c) const {
    return at<float>(launch.shared.weights + part * launch.shared.weight_bytes) +
           c * launch.shared.weight_stride;
  }
  __device__ __forceinline__ float* own_weights(int part, int c) const {
    return weights(part, 8 * kBlocks) + c * kMaxTokens;
  }
  __device__ __forceinline__ float* state_weights(int part) const {
    return own_weights(part, 8 * kBlocks);
  }
  // Its namesake advances a state.
  __device__ __forceinline__ void advance_position(Position& position) const {
    Row::advance(position);
  }
  __device__ __forceinline__ int block_threads() const { return launch.warps * kWarpLanes; }

  // ---- Loads ----
  //
  // All of them are asynchronous and begin before any is waited for: what a block prepares would
  // otherwise pay the latency of memory several times over.

  __device__ __forceinline__ void init_barriers() const {
    if (lane == 0) {
      for (int i = 0; i < launch.stages; ++i) ptx::mbarrier_init(barrier(i), kWarpLanes);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
  }

  /// Asks for the warp's tile of a part and its rows of the records and of the tokens' v.
  __device__ __forceinline__ void load_part(int part, const Position& to_load) const {
    if (part >= part_count || !present(to_load)) return;
    std::uint64_t* bar = barrier(part);
    State* to = stage_state(part);
    if (kHasCopy && kind == PlannedRow::kReplay) {
      if (!zero) Copy::load(copy_in_memory(to_load), copy_in_stage(part), key_dim, bar, lane);
    } else if (!zero) {
      const State* from = state(to_load);
      const int bytes = kDeltaRuleTileRows * key_dim * static_cast<int>(sizeof(State));
      if (ptx::kHasBulkCopy) {
        if (lane == 0) {
          ptx::mbarrier_expect(bar, static_cast<std::uint32_t>(bytes));
          ptx::bulk_copy(to, from, static_cast<std::uint32_t>(bytes), bar,
                         ptx::evict_first_policy());
        }
      } else {
        constexpr int kPerChunk = 16 / static_cast<int>(sizeof(State));
        for (int i = lane * kPerChunk; i < kDeltaRuleTileRows * key_dim;
             i += kWarpLanes * kPerChunk) {
          ptx::copy_async_16(to + i, from + i);
        }
      }
    }
    Act* values = stage_values(part);
    const int offset = lane % kRecordChunks * kActPerChunk;
    const Act* ring =
        (kind == PlannedRow::kReplay ? ring_delta(to_load) : ring_v(to_load)) + offset;
    constexpr int kStep = kWarpLanes / kRecordChunks;
    for (int entry = lane / kRecordChunks; entry < live; entry += kStep) {
      ptx::copy_async_16(values + entry * kDeltaRuleTileRows + offset, ring + value_offset(entry));
    }
    const Act* tokens = token_v(0, to_load) + offset;
    for (int t = lane / kRecordChunks; t < own; t += kStep) {
      ptx::copy_async_16(values + (live + t) * kDeltaRuleTileRows + offset,
                         tokens + t * p.v_token_stride);
    }
    ptx::copy_async_arrive(bar);
  }

  __device__ __forceinline__ CopyTile copy_in_memory(const Position& tile) const {
    return Copy::in_memory(p.copy, slot, tile.head, p.shape.value_dim, tile.v0, key_dim);
  }
  __device__ __forceinline__ CopyTile copy_in_stage(int part) const {
    return Copy::in_stage(stage(part), key_dim);
  }
  /// Writes the read copy of a staged tile that has changed, to memory and over the tile.
  __device__ __forceinline__ void encode_copy(int part, const Position& tile) const {
    Copy::template encode<kKeyDim>(stage_state(part), key_dim, copy_in_memory(tile),
                                   copy_in_stage(part), lane);
  }

  __device__ __forceinline__ void wait_for(int part) const {
    ptx::mbarrier_wait(barrier(part), static_cast<std::uint32_t>(part / launch.stages % 2));
    __syncwarp();
  }

  /// A tile is done with: its stage goes to part `part`.
  __device__ __forceinline__ void reload(int part, const Position& to_load) const {
    if (part >= part_count) return;
    if (kind != PlannedRow::kReplay) ptx::fence_proxy_async();  // the stage has been written to
    __syncwarp();
    load_part(part, to_load);
  }

  /// `rows` vectors of key_dim elements of `size` bytes; from(row) is where one begins.
  template <typename From>
  __device__ __forceinline__ void copy_vectors(void* to, int rows, int size, From from) const {
    const int chunks = key_dim * size / 16;
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
    copy_vectors(raw_token(0), 2 * count, sizeof(Act), [&](int c) {
      return c % 2 == 0 ? token_k(first + c / 2) : token_q(first + c / 2);
    });
    if constexpr (kChannelDecay) {
      copy_vectors(at<float>(launch.shared.raw_gates), count, p.gate_is_f32 ? 4 : sizeof(Act),
                   [&](int t) { return raw_gate(first + t, key_head).at; });
    }
  }

  /// Keys and gates of the live records.
  __device__ __forceinline__ void load_records(bool folds) const {
    copy_vectors(raw_key(0), live, sizeof(Act), [&](int i) { return ring_k(i); });
    for (int i = thread; i < live; i += block_threads()) {
      ptx::copy_async_4(key_scale() + i, ring_k_scale(i));
    }
    // The last warps: the first ones have more vectors to ask for.
    for (int part = launch.warps - 1 - warp; part < part_count; part += launch.warps) {
      const int head = head_of(part);
      for (int i = lane; i < live; i += kWarpLanes) {
        if constexpr (!kChannelDecay) {
          ptx::copy_async_4(decay(part) + i, ring_decay(head, i));
        }
        if (folds) ptx::copy_async_4(betas(part) + i, ring_beta(head, i));
      }
    }
    // A key head has one value head here, so parts share these.
    if constexpr (kChannelDecay) {
      copy_vectors(channel_decay(0), live, 4, [&](int i) { return ring_decay(key_head, i); });
    }
  }

  // ---- What a block shares: keys, queries, gates ----

  struct Vector {
    float x[kPerLane];
  };

  __device__ __forceinline__ bool lane_has(int i) const {
    return !kMasked || lane * kPerLane + i < key_dim;
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

  /// Unit keys of the live records for folds. (With a decay per channel there is no room for them;
  /// keys are scaled where they are used.)
  __device__ __forceinline__ void prepare_fold() const {
    if constexpr (!kChannelDecay) {
      for (int i = warp; i < live; i += launch.warps) {
        store_scaled(load_lane(raw_key(i)), key_scale()[i], key(i));
      }
    }
  }

  /// Products of decays of the live records that outputs see, a part per warp.
  __device__ __forceinline__ void prepare_record_weights() const {
    for (int part = warp; part < part_count; part += launch.warps) {
      float* factor = decay(part);
      float later = 1.0f;
      for (int first = (live - 1) / kWarpLanes * kWarpLanes; first >= 0; first -= kWarpLanes) {
        const int entry = first + lane;
        float product = entry < live ? factor[entry] : 1.0f;
#pragma unroll
        for (int step = 1; step < kWarpLanes; step *= 2) {
          const float other = __shfl_down_sync(kAllLanes, product, step);
          if (lane + step < kWarpLanes) product *= other;
        }
        const float next = __shfl_down_sync(kAllLanes, product, 1);
        if (entry < live) factor[entry] = lane == kWarpLanes - 1 ? later : next * later;
        later *= __shfl_sync(kAllLanes, product, 0);
      }
      if (lane == 0) total_decay(part) = later;
    }
  }

  /// Betas of tokens first.., and decays where a head has one, as entries after the live records.
  /// `append` records them.
  __device__ __forceinline__ void prepare_token_gates(std::int64_t first, int count,
                                                      bool append) const {
    for (int part = warp; part < part_count; part += launch.warps) {
      const int head = head_of(part);
      const bool records = append && is_first_of_head(part);
      for (int t = lane; t < count; t += kWarpLanes) {
        const int entry = live + static_cast<int>(first) + t;
        const float b = beta(first + t, head);
        betas(part)[live + t] = b;
        if (records) *ring_beta(head, entry) = b;
        if constexpr (!kChannelDecay) {
          const float factor = token_decay(*raw_gate(first + t, head), head, 0);
          decay(part)[live + t] = factor;
          if (records) *ring_decay(head, entry) = factor;
        }
      }
    }
  }

  /// Decay of a channel for a loaded token; `append` records it.
  __device__ __forceinline__ float prepare_channel(int t, int n, bool append) const {
    const auto index = t * pitch + n;
    const float raw = p.gate_is_f32 ? at<float>(launch.shared.raw_gates)[index]
                                    : widen(at<Act>(launch.shared.raw_gates)[index]);
    const float factor = token_decay(raw, key_head, n);
    if (append) ring_decay(key_head, live + t)[n] = factor;
    token_channel_decay(t)[n] = factor;
    return factor;
  }

  __device__ __forceinline__ void append_keys() const {
    const int chunks = key_dim / kActPerChunk;
    for (int i = thread; i < own * chunks; i += block_threads()) {
      const int t = i / chunks;
      const int offset = i % chunks * kActPerChunk;
      *reinterpret_cast<uint4*>(ring_k(live + t) + offset) =
          *reinterpret_cast<const uint4*>(raw_token(2 * t) + offset);
    }
  }

  /// With a decay per channel: keys of records times those of later records and the product of all
  /// of them (unless they are folded), and columns times the decays of the row's tokens so far.
  __device__ __forceinline__ void decay_channels(int records, bool append) const {
    for (int i = thread; i < 2 * kKeyDim; i += block_threads()) {
      const int n = i % kKeyDim;
      if (kMasked && n >= key_dim) continue;
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
          product *= prepare_channel(t, n, append);
          vector(2 * t)[n] = widen(raw_token(2 * t)[n]) * product;
          vector(2 * t + 1)[n] = widen(raw_token(2 * t + 1)[n]) * product;
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

  /// log2 of the number of columns, rounded up: items are cut into entries and columns by it.
  __device__ __forceinline__ int column_shift() const { return 32 - __clz(2 * own - 1); }

  /// Products of the window's keys with the columns, without their scales; four lanes to a product.
  /// Entries: `records` live records, then the row's own tokens.
  __device__ __forceinline__ void prepare_scores(int records) const {
    const int shift = column_shift();
    const int items = (records + own) << shift;
    constexpr int kQuads = kWarpLanes / 4;
    for (int first = warp * kQuads; first < items; first += launch.warps * kQuads) {
      const int item = min(first + lane / 4, items - 1);  // a warp stays together
      const int entry = item >> shift;
      const int c = min(item & ((1 << shift) - 1), 2 * own - 1);
      const int token = entry - records;
      float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int n = 0; n < kKeyDim; n += 16) {
        if (kMasked && n >= key_dim) break;
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
      if (lane % 4 == 0) scores(entry)[c] = sum;
    }
  }

  /// The weights of every part's head: scores with their scales, times the decays between entry and
  /// token. The checkpoint's weight takes the scale of k or q along.
  __device__ __forceinline__ void prepare_weights(int records) const {
    const int shift = column_shift();
    const int padded = (records + 15) / 16 * 16;
    const int items = (padded + own + 1) << shift;
    for (int index = thread; index < items * part_count; index += block_threads()) {
      const int part = index / items;
      const int item = index - part * items;
      const int c = item & ((1 << shift) - 1);
      if (c >= 2 * own) continue;
      const int t = c / 2;
      const int i = item >> shift;  // record, padding, own token, checkpoint
      const int token = i < padded ? -1 : i - padded;
      if (i >= records && i < padded) {
        weights(part, c)[i] = 0.0f;
        continue;
      }
      const bool checkpoint = token == own;
      if (token > t && !checkpoint) continue;
      float weight = scale()[c];
      if constexpr (!kChannelDecay) {
        const float* factor = decay(part) + live;
        for (int s = t; s > (checkpoint ? -1 : token); --s) weight *= factor[s];
      }
      if (checkpoint) {
        // Records that have been folded are in the checkpoint already.
        if (!kChannelDecay && records > 0) weight *= total_decay(part);
        state_weights(part)[c] = weight;
      } else if (token < 0) {
        if constexpr (!kChannelDecay) weight *= decay(part)[i];
        weights(part, c)[i] = weight * key_scale()[i] * scores(i)[c];
      } else {
        own_weights(part, c)[token] = weight * scale()[2 * token] * scores(records + token)[c];
      }
    }
  }

  // ---- Tentative rows ----

  /// `ahead`: the first tile that has not been asked for.
  template <bool kFlush>
  __device__ __forceinline__ void tentative(Position ahead) const {
    const int records = kFlush ? 0 : live;  // that outputs see
    load_tokens(0, own);
    load_records(kFlush);
    prepare_token_gates(0, own, true);
    ptx::copy_async_wait_all();
    __syncthreads();
    scale_tokens(own, false);
    if constexpr (kChannelDecay) {
      decay_channels(records, is_first_of_head(0));
      __syncthreads();
    } else if constexpr (!kFlush) {
      prepare_record_weights();
    }
    if constexpr (kFlush) prepare_fold();
    if (is_first_of_key()) append_keys();
    if (own > 0) prepare_scores(records);
    __syncthreads();
    finish_tokens();
    if (own > 0) prepare_weights(records);
    __syncthreads();
    // From here on warps go their own ways.
    Position tile = first_position();
#pragma unroll 1
    for (int part = 0; part < part_count; ++part) {
      if (present(tile)) {
        wait_for(part);
        append_values(part, tile);
        if constexpr (kFlush) {
          fold_tile(part, tile);
          if constexpr (kHasCopy) encode_copy(part, tile);
        }
        if (own > 0) output_tile(part, tile, records, kFlush || !zero);
      }
      reload(part + launch.stages, ahead);
      advance_position(tile);
      advance_position(ahead);
    }
  }

  /// What had to wait for scales and products.
  __device__ __forceinline__ void finish_tokens() const {
    if (is_first_of_key()) {
      for (int t = thread; t < own; t += block_threads()) *ring_k_scale(live + t) = scale()[2 * t];
    }
    if constexpr (kChannelDecay) {
      // The checkpoint's columns take all records' decays along.
      for (int i = thread; i < 2 * own * kKeyDim; i += block_threads()) {
        if (kMasked && i % kKeyDim >= key_dim) continue;
        vector(i / kKeyDim)[i % kKeyDim] *= total()[i % kKeyDim];
      }
    }
  }

  __device__ __forceinline__ void append_values(int part, const Position& tile) const {
    const int offset = lane % kRecordChunks * kActPerChunk;
    const Act* from = stage_values(part) + live * kDeltaRuleTileRows + offset;
    Act* to = ring_v(tile) + offset;
    for (int t = lane / kRecordChunks; t < own; t += kWarpLanes / kRecordChunks) {
      *reinterpret_cast<uint4*>(to + value_offset(live + t)) =
          *reinterpret_cast<const uint4*>(from + t * kDeltaRuleTileRows);
    }
  }

  __device__ __forceinline__ const Column* state_columns() const {
    if constexpr (kChannelDecay) {
      return vector(0);
    } else {
      return raw_token(0);
    }
  }

  __device__ __forceinline__ void multiply_copy(int part, int blocks, Sums& sums) const {
    constexpr int kTerms = kChannelDecay ? 2 : 1;
    constexpr int kBlock = Copy::kBlock;
    const auto columns = [&](int b, int s, std::uint32_t(&words)[kTerms][kBlock / 2]) {
      const int n = s * Copy::kSegment + kBlock * q;
      Packed<Column, kBlock> c{};
      if (!kMasked || n < key_dim) {
        c = load_packed<Column, kBlock>(state_columns() + (8 * b + g) * pitch + n);
      }
      if constexpr (kTerms == 1) {
#pragma unroll
        for (int i = 0; i < kBlock / 2; ++i) words[0][i] = c.word[i];
      } else {
        float left[kBlock];
#pragma unroll
        for (int i = 0; i < kBlock; ++i) left[i] = c[i];
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
          const auto packed = take_bf16_term<kBlock>(left);
#pragma unroll
          for (int i = 0; i < kBlock / 2; ++i) words[term][i] = packed.word[i];
        }
      }
    };
    Copy::template multiply<kKeyDim, kBlocks, kTerms>(copy_in_stage(part), key_dim, lane, blocks,
                                                      columns, sums);
  }

  __device__ __forceinline__ void output_tile(int part, const Position& tile, int records,
                                              bool has_state) const {
    const int blocks = (own + 3) / 4;
    Sums sums;
    clear(sums);
    if (has_state) {
      if constexpr (kHasCopy) {
        multiply_copy(part, blocks, sums);
      } else {
        multiply_state(stage_state(part), key_dim, state_columns(), pitch, blocks, sums);
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int t = min(4 * b + q, own - 1);
        const float2 w = *reinterpret_cast<const float2*>(state_weights(part) + 2 * t);
        sums[b][0] *= w.x;
        sums[b][1] *= w.y;
        sums[b][2] *= w.x;
        sums[b][3] *= w.y;
      }
    }
    multiply_window(stage_values(part), records, weights(part, 0), launch.shared.weight_stride,
                    blocks, sums);
    solve(tile, part, sums);
  }

  /// Deltas and outputs of the tokens, one after the other: the lane that holds a token's sums
  /// tells the others of its rows the delta.
  __device__ __forceinline__ void solve(const Position& tile, int part, Sums& sums) const {
    const Act* v = stage_values(part) + live * kDeltaRuleTileRows + g;
    float d[kBlocks][2];  // of the lane's own tokens
#pragma unroll
    for (int i = 0; i < kMaxTokens; ++i) {
      if (i >= own) break;
      const int owner = i / 4;
      const float beta_i = betas(part)[live + i];
      // Meaningful in the lane of token i.
      float d0 = beta_i * (widen(v[i * kDeltaRuleTileRows]) - sums[owner][0]);
      float d1 = beta_i * (widen(v[i * kDeltaRuleTileRows + 8]) - sums[owner][2]);
      const int from = lane - q + i % 4;
      d0 = __shfl_sync(kAllLanes, d0, from);
      d1 = __shfl_sync(kAllLanes, d1, from);
      if (q == i % 4) {
        d[owner][0] = d0;
        d[owner][1] = d1;
      }
#pragma unroll
      for (int b = owner; b < kBlocks; ++b) {
        const int t = 4 * b + q;
        const float* weight = own_weights(part, 2 * t) + i;
        if (t >= i && t < own) {
          const float wq = weight[kMaxTokens];
          sums[b][1] = fmaf(wq, d0, sums[b][1]);
          sums[b][3] = fmaf(wq, d1, sums[b][3]);
        }
        if (t > i && t < own) {
          const float wk = weight[0];
          sums[b][0] = fmaf(wk, d0, sums[b][0]);
          sums[b][2] = fmaf(wk, d1, sums[b][2]);
        }
      }
    }
    Act* o = output(0, tile) + g;
    Act* delta = ring_delta(tile) + g;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int t = 4 * b + q;
      if (t >= own) break;
      Act* o_at = o + t * p.o_token_stride;
      o_at[0] = narrow<Act>(sums[b][1]);
      o_at[8] = narrow<Act>(sums[b][3]);
      Act* delta_at = delta + value_offset(live + t);
      delta_at[0] = narrow<Act>(d[b][0]);
      delta_at[8] = narrow<Act>(d[b][1]);
    }
  }

  // ---- Folds and committed rows ----

  __device__ __forceinline__ void load_decays(const float* from, float (&out)[kDecays]) const {
    if constexpr (kChannelDecay) {
      load_vector(from, out);
    } else {
      out[0] = *from;
    }
  }

  __device__ __forceinline__ void fold_records(int part, int first_row, Tile& tile) const {
    const Act* v = stage_values(part) + first_row + lane / kRowLanes;
#pragma unroll 1
    for (int i = 0; i < live; ++i) {
      float k[kColumns], alpha[kDecays];
      if constexpr (kChannelDecay) {
        load_vector(raw_key(i), k);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) k[j] = __fmul_rn(key_scale()[i], k[j]);
        load_vector(channel_decay(i), alpha);
      } else {
        load_vector(key(i), k);
        alpha[0] = decay(part)[i];
      }
      advance(tile, k, alpha, betas(part)[i], widen(v[i * kDeltaRuleTileRows]));
    }
  }

  /// Folds the live records into a part's tile, in memory and in its stage.
  __device__ __forceinline__ void fold_tile(int part, const Position& at_tile) const {
#pragma unroll 1
    for (int first_row = 0; first_row < kDeltaRuleTileRows; first_row += kPassRows) {
      State* staged = stage_state(part) + first_row * key_dim;
      Tile tile;
      read_tile(staged, zero, tile);
      fold_records(part, first_row, tile);
      this->template write_tile<true>(tile, state(at_tile) + first_row * key_dim, staged);
    }
    __syncwarp();
  }

  __device__ __forceinline__ int chunk_length(std::int64_t first) const {
    return static_cast<int>(min(token_count - first, std::int64_t{kMaxTokens}));
  }

  __device__ __forceinline__ void committed(Position ahead) const {
    load_tokens(0, chunk_length(0));
    load_records(true);
    ptx::copy_async_wait_all();
    __syncthreads();
    prepare_fold();
    prepare_chunk(0);
    __syncthreads();
    Position tile = first_position();
#pragma unroll 1
    for (int part = 0; part < part_count; ++part) {
      if (present(tile)) wait_for(part);
#pragma unroll 1
      for (int first_row = 0; first_row < kDeltaRuleTileRows; first_row += kPassRows) {
        // A row of one chunk prepares it once.
        const bool again = token_count > kMaxTokens && (part > 0 || first_row > 0);
        committed_pass(part, tile, first_row, again);
      }
      if (kHasCopy && present(tile)) {
        __syncwarp();
        encode_copy(part, tile);
      }
      reload(part + launch.stages, ahead);
      advance_position(tile);
      advance_position(ahead);
    }
  }

  /// What the loaded tokens first.. have in common for all parts.
  __device__ __forceinline__ void prepare_chunk(std::int64_t first) const {
    const int count = chunk_length(first);
    scale_tokens(count, true);
    prepare_token_gates(first, count, false);
    if constexpr (kChannelDecay) {
      for (int i = thread; i < count * kKeyDim; i += block_threads()) {
        const int n = i % kKeyDim;
        if (!kMasked || n < key_dim) prepare_channel(i / kKeyDim, n, false);
      }
    }
  }

  /// All tokens through kPassRows rows of the state; `again`: the first chunk has to be prepared
  /// anew. Warps without a tile help to prepare.
  __device__ __forceinline__ void committed_pass(int part, const Position& at_tile, int first_row,
                                                 bool again) const {
    Tile tile;
    const int row = lane / kRowLanes;
    const Position rows{at_tile.head, at_tile.part, at_tile.v0 + first_row};
    const bool has_tile = present(at_tile);
    if (has_tile) {
      read_tile(stage_state(part) + first_row * key_dim, zero, tile);
      if (live > 0) {
        fold_records(part, first_row, tile);
        round_tile(tile);
      }
    }
#pragma unroll 1
    for (std::int64_t first = 0; first < token_count; first += kMaxTokens) {
      if (first > 0 || again) {
        __syncthreads();  // the chunk before is done with
        load_tokens(first, chunk_length(first));
        ptx::copy_async_wait_all();
        __syncthreads();
        prepare_chunk(first);
        __syncthreads();
      }
      if (!has_tile) continue;
      const int count = chunk_length(first);
      float next_v = widen(token_v(first, rows)[row]);
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        const float v = next_v;
        if (t + 1 < count) next_v = widen(token_v(first + t + 1, rows)[row]);
        float x[kColumns], alpha[kDecays];
        load_vector(vector(2 * t), x);
        load_decays(kChannelDecay ? token_channel_decay(t) : decay(part) + live + t, alpha);
        advance(tile, x, alpha, betas(part)[live + t], v);
        load_vector(vector(2 * t + 1), x);
        const float o = multiply(tile, x);
        if (lane % kRowLanes == 0) output(first + t, rows)[row] = narrow<Act>(o);
        round_tile(tile);
      }
    }
    if (has_tile) {
      this->template write_tile<kHasCopy>(tile, state(at_tile) + first_row * key_dim,
                                          stage_state(part) + first_row * key_dim);
    }
  }

  unsigned char* shared;
  int key_dim, pitch;
};

template <typename State, typename Act, bool kChannelDecay, DeltaRuleVariant kVariant,
          ReadCopyFormat kCopy>
__global__ void __launch_bounds__(kDeltaRuleMaxWarps* kWarpLanes, 2)
    delta_rule_step_kernel(const __grid_constant__ DeltaRuleCudaParams params,
                           const __grid_constant__ DeltaRuleLaunch launch) {
  extern __shared__ __align__(128) unsigned char shared[];
  DeltaRuleStepKernel<State, Act, kChannelDecay, kVariant, kCopy>::run(params, launch, shared);
}

template <typename State, typename Act, bool kChannelDecay>
DeltaRuleKernelFunction delta_rule_step_function(DeltaRuleVariant variant) {
  constexpr auto kCopy = ReadCopyFormat::kNone;
  switch (variant) {
    case DeltaRuleVariant::kSmall:
      return delta_rule_step_kernel<State, Act, kChannelDecay, DeltaRuleVariant::kSmall, kCopy>;
    case DeltaRuleVariant::kDraft:
      return delta_rule_step_kernel<State, Act, kChannelDecay, DeltaRuleVariant::kDraft, kCopy>;
    case DeltaRuleVariant::kAny:
      return delta_rule_step_kernel<State, Act, kChannelDecay, DeltaRuleVariant::kAny, kCopy>;
  }
  return nullptr;
}

template <typename State, bool kChannelDecay, ReadCopyFormat kCopy>
DeltaRuleKernelFunction delta_rule_kernel_with(DeltaRuleVariant variant) {
  using enum DeltaRuleVariant;
  if (variant == kSmall) return delta_rule_step_kernel<State, BF16, kChannelDecay, kSmall, kCopy>;
  if (variant == kAny) return delta_rule_step_kernel<State, BF16, kChannelDecay, kAny, kCopy>;
  return nullptr;
}

template <typename State, bool kChannelDecay>
DeltaRuleKernelFunction delta_rule_copy_step_function(ReadCopyFormat format,
                                                      DeltaRuleVariant variant) {
  switch (format) {
    case ReadCopyFormat::kNone:
      break;
    case ReadCopyFormat::kFp8E4M3:
      return delta_rule_kernel_with<State, kChannelDecay, ReadCopyFormat::kFp8E4M3>(variant);
    case ReadCopyFormat::kInt8:
      return delta_rule_kernel_with<State, kChannelDecay, ReadCopyFormat::kInt8>(variant);
    case ReadCopyFormat::kNvfp4:
      return delta_rule_kernel_with<State, kChannelDecay, ReadCopyFormat::kNvfp4>(variant);
  }
  return nullptr;
}

}  // namespace replayssm::cuda
