// What a warp computes once: for its run, C and the products B . C of the window; for a head, time
// steps, decays and the window's weights.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/mma.cuh"
#include "cuda/vector.cuh"
#include "ops/mamba2/cuda/lanes.cuh"
#include "ops/mamba2/cuda/pipeline.cuh"

namespace replayssm::cuda {

/// kTokenBlocks: blocks of eight tokens a tentative row may have; 0: one token.
template <typename State, typename Act, int kStateSize, int kTokenBlocks, int kWindowSteps,
          ReadCopyFormat kCopy>
class Mamba2Window : protected Mamba2Pipeline<State, Act, kStateSize, kWindowSteps, kCopy> {
  using Base = Mamba2Pipeline<State, Act, kStateSize, kWindowSteps, kCopy>;

 protected:
  using Base::entry_b, Base::kActPerChunk, Base::kDefers, Base::kHasCopy, Base::kind, Base::lane,
      Base::launch;
  using Base::live, Base::load_deferred, Base::own, Base::p, Base::places, Base::raw_time_step,
      Base::ring_b, Base::ring_dt;
  using Base::shared, Base::tile_begin, Base::token_b, Base::token_c, Base::warp;
  using typename Base::Copy, typename Base::Position;

  static constexpr bool kOneToken = kTokenBlocks == 0;
  // One token without tensor cores: splitting an fp32 state costs more than the products.
  static constexpr bool kOnePlain = kTokenBlocks == 0 && !kHasCopy && sizeof(State) == 4;

  // One token on a checkpoint: eight lanes to four rows of a tile, each with every eighth vector of
  // them, so that a sum has few lanes to travel.
  static constexpr int kOneLanes = 8;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(State));
  static constexpr int kOneVectors = kOnePlain ? kStateSize / (kOneLanes * kVector) : 1;
  static constexpr int kOneEntries = 16 * kWindowSteps / kOneLanes;  // of the window, per lane

  static constexpr int kBChunks = kStateSize / kActPerChunk;  // 16-byte chunks of B or C

  // ---- Layout for products ----
  //
  // Lane (g, q) = (lane / 4, lane % 4) owns kOwn neighbouring columns of each segment of 4 kOwn, as
  // pairs that serve as the k's of one tf32 product or, two pairs at a time, of one bf16 product.
  static constexpr int kOwn = 16 / static_cast<int>(sizeof(State));
  static constexpr int kSegments = kStateSize / (4 * kOwn);
  static constexpr int kEntryBlocks = 2 * kWindowSteps;  // of eight entries
  static constexpr int kBlocks = kOneToken ? 1 : kTokenBlocks;
  static constexpr int kEntries = 16 * kWindowSteps;
  static constexpr int kEntryChunks = (kEntries + kWarpLanes - 1) / kWarpLanes;
  static constexpr bool kWideAct = sizeof(Act) == 4;
  static_assert(!kHasCopy || !kWideAct);
  static constexpr bool kWideState = sizeof(State) == 4;
  // A two-byte state is multiplied as it is: with C in bf16, or with C brought to f16.
  static constexpr bool kPackedProducts = !kWideState && !kWideAct;
  static constexpr bool kF16Products = std::is_same_v<State, F16> && !kWideAct;
  static constexpr int kCFloats = kPackedProducts ? 0 : kOwn;
  // An fp32 weight as this many bf16 terms: 24 bits.
  static constexpr int kWeightTerms = 3;

  __device__ __forceinline__ Mamba2Window(const Mamba2CudaParams& params,
                                          const Mamba2Launch& launch_shape,
                                          unsigned char* shared_memory)
      : Base(params, launch_shape, shared_memory), g(lane / 4), q(lane % 4) {}

  /// A head's values by entry: the live records, then the row's own tokens.
  struct Table {
    float* weight;    // [token][kEntries]: dt times the product of later decays up to the token
    float* dt;        // [entry]; of a record that is folded: its gain
    float* decay;     // [entry]; of a record that is folded: what R is multiplied by first
    float* scale;     // [token]: product of all decays up to the token
    float* rest;      // [2], of records that are folded: what they leave deferred, and whether
                      // any of them has R multiplied (0 or 1)
    float* products;  // [kEntries], one-token kernels: B_entry . C
  };
  __device__ __forceinline__ Table table() const {
    float* base = reinterpret_cast<float*>(shared + launch.shared.table_offset) +
                  warp * launch.shared.table_stride;
    const int tokens = static_cast<int>(p.limits.draft_capacity);
    float* dt = base + tokens * kEntries;
    float* scale = dt + 2 * places;
    return {base, dt, dt + places, scale, scale + tokens, base};
  }

  // ---- What the run shares: the tokens' C, and B . C ----

  using Columns = Packed<Act, kOwn>;
  // For B . C lane (g, q) has chunk q of every four.
  using Chunk = Packed<Act, kActPerChunk>;
  static constexpr int kGroupSegments = kBChunks / 4;
  // What is loaded before anything else, as far as registers allow. Blocks of entries whose B is:
  // all that a window of 16 has, but for the rows that fill it.
  static constexpr int kBlocksAhead = kWideAct ? 1 : 2;
  // Segments of C as the state is multiplied with it, where that is not how B . C has it.
  static constexpr bool kSharesC = !kOnePlain && kOwn == kActPerChunk;
  static constexpr int kSegmentsAhead = kSharesC || kHasCopy || kWideAct ? 0
                                        : kOnePlain                      ? kOneVectors
                                                                         : kSegments;

  /// What B . C is formed of, asked for as soon as a warp knows its run, so that it is there when
  /// the run's first loads are under way.
  struct GroupInputs {
    Chunk c[kBlocks][kGroupSegments];       // of token 8 k + g
    Chunk b[kBlocksAhead][kGroupSegments];  // of entry 8 i + g
    // What the lane multiplies the state with.
    Columns columns[kBlocks][kSegmentsAhead > 0 ? kSegmentsAhead : 1];
  };

  /// `first`: the first entry the window has, after the live records of a row that folds them.
  __device__ __forceinline__ GroupInputs load_group(int first) const {
    GroupInputs in;
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      const int token = 8 * k + g;
      load_chunks(token_c(token), token < own, in.c[k]);
    }
#pragma unroll
    for (int i = 0; i < kBlocksAhead; ++i) load_entries(i, first, in.b[i]);
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
      for (int s = 0; s < kSegmentsAhead; ++s) in.columns[k][s] = load_columns_of(k, s);
    }
    return in;
  }

  /// What this lane multiplies the state with: its columns of segment s of its token's C.
  __device__ __forceinline__ Columns load_columns_of(int k, int s) const {
    const int token = kOnePlain ? 0 : 8 * k + g;
    const int vector = kOnePlain ? kOneLanes * s + lane % kOneLanes : 4 * s + q;
    Columns column{};
    if (token < own) column = load_packed<Act, kOwn>(token_c(token) + vector * kOwn);
    return column;
  }

  __device__ __forceinline__ Columns state_columns(const GroupInputs& in, int k, int s) const {
    if constexpr (kSharesC) {
      return in.c[k][s];
    } else if constexpr (kSegmentsAhead > 0) {
      return in.columns[k][s];
    } else {
      return load_columns_of(k, s);
    }
  }

  __device__ __forceinline__ void load_entries(int block, int first,
                                               Chunk (&b)[kGroupSegments]) const {
    const int entry = 8 * block + g;
    load_chunks(entry_b(entry), entry >= first && entry < live + own, b);
  }

  __device__ __forceinline__ void load_chunks(const Act* from, bool present,
                                              Chunk (&to)[kGroupSegments]) const {
    from += q * kActPerChunk;
#pragma unroll
    for (int s = 0; s < kGroupSegments; ++s) {
      to[s] = Chunk{};
      if (present) to[s] = load_packed<Act, kActPerChunk>(from + 4 * s * kActPerChunk);
    }
  }

  /// sums[i] += B . C of block i, one product of each after the other: a product waits for the one
  /// before it.
  template <int kCount>
  static __device__ __forceinline__ void multiply_blocks(const GroupInputs& in,
                                                         const Chunk (&b)[kCount][kGroupSegments],
                                                         float (&sums)[kCount][4]) {
#pragma unroll
    for (int s = 0; s < kGroupSegments; ++s) {
#pragma unroll
      for (int k = 0; k < kActPerChunk / 2; k += kWideAct ? 1 : 2) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          multiply_act(sums[i], in.c[0][s], in.c[kBlocks - 1][s], b[i][s], k);
        }
      }
    }
  }

  __device__ __forceinline__ void keep_products(int block, const float (&sums)[4]) {
    bc[0][block][0] = sums[0];
    bc[0][block][1] = sums[1];
    if constexpr (kTokenBlocks == 2) {
      bc[1][block][0] = sums[2];
      bc[1][block][1] = sums[3];
    }
  }

  /// `first`: as above.
  __device__ __forceinline__ void prepare_group(const GroupInputs& in, int first) {
    if constexpr (kHasCopy) prepare_copy_columns();
    {
      float sums[kBlocksAhead][4] = {};
      multiply_blocks(in, in.b, sums);
#pragma unroll
      for (int i = 0; i < kBlocksAhead; ++i) keep_products(i, sums[i]);
    }
#pragma unroll
    for (int i = kBlocksAhead; i < kEntryBlocks; ++i) {
      float sums[1][4] = {};
      if (8 * i < live + own && 8 * i + 7 >= first) {
        Chunk b[1][kGroupSegments];
        load_entries(i, first, b[0]);
        multiply_blocks(in, b, sums);
      }
      keep_products(i, sums[0]);
    }

    if constexpr (kOneToken) {
      // Column 0 of the products, lane 0..3, as a row by entry.
#pragma unroll
      for (int i = 0; i < kEntryBlocks; ++i) {
        if (g == 0) {
          *reinterpret_cast<float2*>(table().products + 8 * i + 2 * q) = {bc[0][i][0], bc[0][i][1]};
        }
      }
      __syncwarp();
    }
    if constexpr (kOnePlain) {
#pragma unroll
      for (int v = 0; v < kOneVectors; ++v) {
        const Columns columns = state_columns(in, 0, v);
#pragma unroll
        for (int i = 0; i < kVector; ++i) one_columns[v][i] = columns[i];
      }
    } else if constexpr (kHasCopy) {
      // Its columns are prepared above.
    } else if constexpr (kPackedProducts) {
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
        for (int s = 0; s < kSegments; ++s) c[k][s] = state_columns(in, k, s);
      }
      if constexpr (kF16Products) bring_columns_to_f16();
    } else {
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
          const Columns columns = state_columns(in, k, s);
#pragma unroll
          for (int i = 0; i < kOwn; ++i) c_float[k][s][i] = columns[i];
        }
      }
    }

    // The run that begins with the group's first tile appends the tokens' B.
    if (tile_begin == 0) {
#pragma unroll 1
      for (int i = lane; i < own * kBChunks; i += kWarpLanes) {
        const int offset = (i % kBChunks) * kActPerChunk;
        *reinterpret_cast<uint4*>(ring_b(live + i / kBChunks) + offset) =
            *reinterpret_cast<const uint4*>(token_b(i / kBChunks) + offset);
      }
    }
  }

  /// C in f16, for the products with a state of that type.
  __device__ __forceinline__ void bring_columns_to_f16() {
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      std::uint32_t amax = 0;
#pragma unroll
      for (int s = 0; s < kSegments; ++s) {
#pragma unroll
        for (int i = 0; i < Columns::kWords; ++i) {
          amax = max(amax, larger_magnitude(c[k][s].word[i]));
        }
      }
      const F16Range range = F16Range::of_four_lanes(amax);
#pragma unroll
      for (int s = 0; s < kSegments; ++s) {
#pragma unroll
        for (int i = 0; i < Columns::kWords; ++i) {
          c[k][s].word[i] =
              f16_pair(c[k][s][2 * i] * range.factor, c[k][s][2 * i + 1] * range.factor);
        }
      }
      c_rest[k][0] = __shfl_sync(kAllLanes, range.inverse, 8 * q);
      c_rest[k][1] = __shfl_sync(kAllLanes, range.inverse, 8 * q + 4);
    }
  }

  /// C for the products with a read copy, and what their sums are to be multiplied by.
  __device__ __forceinline__ void prepare_copy_columns() {
    if constexpr (kOneToken) {
      c_rest[0][0] = Copy::load_columns(token_c(0), true, q, copy_columns[0]);
      if (Copy::holds_one(g, q)) return;
#pragma unroll
      for (int s = 0; s < Copy::kSegments; ++s) {
#pragma unroll
        for (int i = 0; i < Copy::kPairs; ++i) copy_columns[0][s][i] = 0;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
        const int token = 8 * k + g;
        const float rest = Copy::load_columns(token_c(token), token < own, q, copy_columns[k]);
        c_rest[k][0] = __shfl_sync(kAllLanes, rest, 8 * q);
        c_rest[k][1] = __shfl_sync(kAllLanes, rest, 8 * q + 4);
      }
    }
  }

  /// sums += rows (low: g, high: g + 8) times columns, over pair k (and k + 1) of their elements.
  static __device__ __forceinline__ void multiply_act(float (&sums)[4], const Chunk& low,
                                                      const Chunk& high, const Chunk& b, int k) {
    constexpr bool two = kTokenBlocks == 2;
    if constexpr (kWideAct) {
      const Tf32Pair l0 = split_tf32(low[2 * k]), l1 = split_tf32(low[2 * k + 1]);
      const Tf32Pair h0 = split_tf32(two ? high[2 * k] : 0.0f);
      const Tf32Pair h1 = split_tf32(two ? high[2 * k + 1] : 0.0f);
      const Tf32Pair b0 = split_tf32(b[2 * k]), b1 = split_tf32(b[2 * k + 1]);
      ptx::mma_tf32(sums, l0.low, h0.low, l1.low, h1.low, b0.high, b1.high);
      ptx::mma_tf32(sums, l0.high, h0.high, l1.high, h1.high, b0.low, b1.low);
      ptx::mma_tf32(sums, l0.high, h0.high, l1.high, h1.high, b0.high, b1.high);
    } else {
      ptx::mma_bf16(sums, low.word[k], two ? high.word[k] : 0, low.word[k + 1],
                    two ? high.word[k + 1] : 0, b.word[k], b.word[k + 1]);
    }
  }

  // ---- What a head shares ----

  /// A head's inputs as loaded, one head ahead of their use.
  struct HeadInputs {
    float a, d, bias;
    DeferredDecay deferred;
    // Of entry 32 i + lane: recorded in fp32, or raw for an own token.
    LoadedNumber<Act> dt[kEntryChunks];
  };

  /// `at`: the first of the head's rows that the warp has.
  __device__ __forceinline__ HeadInputs load_head(const Position& at) const {
    return load_head(at, lane);
  }
  /// Entry 32 i + `lane_entry` is the lane's.
  __device__ __forceinline__ HeadInputs load_head(const Position& at, int lane_entry) const {
    const int head = at.head;
    HeadInputs in;
    in.deferred = load_deferred(at);
    in.a = p.a[head];
    in.d = p.d == nullptr ? 0.0f : p.d[head];
    in.bias = p.dt_bias == nullptr ? 0.0f : p.dt_bias[head];
#pragma unroll
    for (int i = 0; i < kEntryChunks; ++i) {
      const int entry = kWarpLanes * i + lane_entry;
      in.dt[i] = entry < live         ? LoadedNumber<Act>(*ring_dt(head, entry))
                 : entry < live + own ? raw_time_step(entry - live, head)
                                      : LoadedNumber<Act>(0.0f);
    }
    return in;
  }

  /// Time steps, decays and their products; the warp with the head's first tile appends the tokens'
  /// time steps.
  __device__ __forceinline__ void fill_table(const HeadInputs& in, const Position& at) {
    const Table out = table();
    float newer = 1.0f;
    float weight[kEntryChunks], own_dt[kEntryChunks];
#pragma unroll
    for (int i = kEntryChunks - 1; i >= 0; --i) {
      const int entry = kWarpLanes * i + lane;
      float decay = 1.0f;
      float dt = in.dt[i].value(p.dt_is_f32 || entry < live);
      if (entry < live + own) {
        if (entry >= live) {
          dt = mamba2_time_step(dt, in.bias, p.dt_softplus, p.dt_min, p.dt_max);
          if (at.p0 == 0) *ring_dt(at.head, entry) = dt;
        }
        decay = mamba2_decay(in.a, dt);
        out.dt[entry] = dt;
        out.decay[entry] = decay;
      }
      const float suffix = product_of_later(entry < live ? decay : 1.0f, lane, newer);
      weight[i] = entry < live && kind != PlannedRow::kFlush ? suffix * dt : 0.0f;
      own_dt[i] = dt;
    }
    __syncwarp();
    if (kind != PlannedRow::kReplay) defer_records(out, in.deferred);
    const float all =
        kind == PlannedRow::kFlush ? (kDefers ? out.rest[0] : 1.0f) : newer * in.deferred.value();
    if constexpr (kOneToken) {
      if (own == 0) return;
      const float decay = out.decay[live];
      one_scale = all * decay;
      float one_weight[kEntryChunks];  // of entry 32 i + lane
#pragma unroll
      for (int i = 0; i < kEntryChunks; ++i) {
        const int entry = kWarpLanes * i + lane;
        const float product = entry < kEntries ? out.products[entry] : 0.0f;
        one_weight[i] =
            entry == live ? fmaf(own_dt[i], product, in.d) : weight[i] * decay * product;
        if (entry > live) one_weight[i] = 0.0f;
      }
      if constexpr (kHasCopy || kF16Products) one_scale *= c_rest[0][0];
      spread_one_weights(one_weight);
    } else {
      fill_weights(out, all, weight, own_dt);
    }
  }

  // ---- Two heads at a time ----
  //
  // One token with a read copy leaves a head little more than its window to prepare, and runs have
  // several heads. A window that fits into half a warp is prepared for two of them at once.

  static constexpr bool kPairsHeads = kOneToken && kHasCopy;
  static constexpr int kHalf = kWarpLanes / 2;

  __device__ __forceinline__ bool pairs_heads() const { return live + own <= kHalf; }

  /// Two heads that a warp goes through, or the last one alone.
  struct Pair {
    Position at;  // the first of the first head's rows that the warp has
    bool has_second;
  };
  /// Of the lane's half.
  __device__ __forceinline__ Position position_in(const Pair& pair) const {
    if (lane < kHalf || !pair.has_second) return pair.at;
    return {pair.at.head + 1, 0};
  }
  __device__ __forceinline__ HeadInputs load_pair(const Pair& pair) const {
    return load_head(position_in(pair), lane % kHalf);
  }
  /// fill_table of both, for a row that replays: the results stay in registers.
  __device__ __forceinline__ void fill_pair(const HeadInputs& in, const Pair& pair) {
    const int entry = lane % kHalf;
    const Position at = position_in(pair);
    float decay = 1.0f;
    float dt = in.dt[0].value(p.dt_is_f32 || entry < live);
    if (entry < live + own) {
      if (entry >= live) {
        dt = mamba2_time_step(dt, in.bias, p.dt_softplus, p.dt_min, p.dt_max);
        if (at.p0 == 0) *ring_dt(at.head, entry) = dt;
      }
      decay = mamba2_decay(in.a, dt);
    }
    float all = 1.0f;
    const float suffix = product_of_later<kHalf>(entry < live ? decay : 1.0f, entry, all);
    const float own_decay = __shfl_sync(kAllLanes, decay, live, kHalf);
    const float product = table().products[entry];
    pair_weight = entry == live ? fmaf(dt, product, in.d) : suffix * dt * own_decay * product;
    if (entry > live) pair_weight = 0.0f;
    pair_scale = all * in.deferred.value() * own_decay;
  }
  /// The first or the second of the heads that have been prepared.
  __device__ __forceinline__ void take_of_pair(int which) {
    one_scale = __shfl_sync(kAllLanes, pair_scale, which * kHalf) * c_rest[0][0];
    const float weight[1] = {pair_weight};
    spread_one_weights(weight, which * kHalf);
  }

  /// For folds, in place of the records' time steps and decays. One after the other: a fold of some
  /// of them and then of the others has to come to the same.
  __device__ __forceinline__ void defer_records(const Table& out, DeferredDecay deferred) const {
    bool rescales = false;
#pragma unroll 1
    for (int first = 0; first < live; first += kWarpLanes) {
      const int count = min(kWarpLanes, live - first);
      DeferredDecay mine;
      float factor = 1.0f;
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const float before_record = deferred.take(out.decay[first + i]);
        factor = lane == i ? before_record : factor;
        mine = lane == i ? deferred : mine;
      }
      rescales |= __any_sync(kAllLanes, factor != 1.0f) != 0;
      __syncwarp();
      if (lane < count) {
        out.dt[first + lane] = mine.gain(out.dt[first + lane]);
        out.decay[first + lane] = factor;
      }
    }
    if (lane == 0) {
      out.rest[0] = deferred.value();
      out.rest[1] = rescales ? 1.0f : 0.0f;
    }
    __syncwarp();
  }

  /// The window's weights without B . C, and the outputs' scales, for several tokens.
  __device__ __forceinline__ void fill_weights(const Table& out, float all,
                                               float (&weight)[kEntryChunks],
                                               const float (&own_dt)[kEntryChunks]) {
#pragma unroll 1
    for (int t = 0; t < own; ++t) {
      const float decay = out.decay[live + t];
      all *= decay;
      if (lane == 0) out.scale[t] = all;
#pragma unroll
      for (int i = 0; i < kEntryChunks; ++i) {
        const int entry = kWarpLanes * i + lane;
        weight[i] = entry == live + t ? own_dt[i] : weight[i] * decay;
        if (entry < kEntries) out.weight[t * kEntries + entry] = weight[i];
      }
    }
    __syncwarp();
  }

  /// Brings a token's weights to the lanes that multiply with them. Entry 0 is that of
  /// `first_lane`.
  __device__ __forceinline__ void spread_one_weights(const float (&of_entry)[kEntryChunks],
                                                     int first_lane = 0) {
    if constexpr (kOnePlain) {
#pragma unroll
      for (int i = 0; i < kOneEntries; ++i) {
        const int entry = i * kOneLanes + lane % kOneLanes;
        one_weights[i] = __shfl_sync(kAllLanes, of_entry[i * kOneLanes / kWarpLanes], entry);
      }
    } else {
      // Column g of the products takes term g of the weights.
      const int first = kind == PlannedRow::kFlush ? live : 0;
#pragma unroll
      for (int s = 0; s < kWindowSteps; ++s) {
        if (16 * s >= live + own || 16 * s + 15 < first) continue;
        float rest[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int entry = 16 * s + 2 * q + i % 2 + 8 * (i / 2);
          rest[i] = __shfl_sync(kAllLanes, of_entry[16 * s / kWarpLanes], first_lane + entry);
        }
        one_terms[s][0] = one_terms[s][1] = 0;
#pragma unroll
        for (int term = 0; term < kWeightTerms; ++term) {
          const Packed<BF16, 4> packed = take_bf16_term(rest);
          if (g == term) {
            one_terms[s][0] = packed.word[0];
            one_terms[s][1] = packed.word[1];
          }
        }
      }
    }
  }

  /// The window's weights W and the outputs' scales, as this lane's operands of the products.
  __device__ __forceinline__ void prepare_weights(float d) {
    const Table head = table();
#pragma unroll
    for (int k = 0; k < kTokenBlocks; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = 8 * k + 2 * q + i;
        scale[k][i] = token < own ? head.scale[token] : 0.0f;
        if constexpr (kHasCopy || kF16Products) scale[k][i] *= c_rest[k][i];
      }
      const int token = 8 * k + g;
      const float* row_weights = head.weight + (token < own ? token : 0) * kEntries + 2 * q;
#pragma unroll
      for (int s = 0; s < kWindowSteps; ++s) {
        float weight[4];  // of entries 2q, 2q + 1, 2q + 8, 2q + 9 of the step
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 w = *reinterpret_cast<const float2*>(row_weights + 16 * s + 8 * half);
          const int newest = live + token - (16 * s + 8 * half + 2 * q);
          weight[2 * half] = fmaf(w.x, bc[k][2 * s + half][0], newest == 0 ? d : 0.0f);
          weight[2 * half + 1] = fmaf(w.y, bc[k][2 * s + half][1], newest == 1 ? d : 0.0f);
          if (newest < 0 || token >= own) weight[2 * half] = 0.0f;
          if (newest < 1 || token >= own) weight[2 * half + 1] = 0.0f;
        }
        set_weights(k, s, weight);
      }
    }
  }

  __device__ __forceinline__ void set_weights(int k, int s, const float (&weight)[4]) {
    if constexpr (kWideAct) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[k][s][i] = __float_as_uint(weight[i]);
    } else {
      float rest[4] = {weight[0], weight[1], weight[2], weight[3]};
#pragma unroll
      for (int term = 0; term < kWeightTerms; ++term) {
        const Packed<BF16, 4> packed = take_bf16_term(rest);
        weights[k][s][2 * term] = packed.word[0];
        weights[k][s][2 * term + 1] = packed.word[1];
      }
    }
  }

  int g, q;  // lane of a product: lane / 4 and lane % 4

  Columns c[kBlocks][kSegments];  // C of token 8 k + g, for a two-byte state
  float c_float[kBlocks][kSegments][kCFloats > 0 ? kCFloats : 1];
  float bc[kBlocks][kEntryBlocks][2];  // B . C of entries 8 i + 2 q, + 1 and token 8 k + g
  // W of entries 16 s + {2q, 2q+1, 2q+8, 2q+9} and token 8 k + g: fp32, or bf16 terms.
  std::uint32_t weights[kBlocks][kWindowSteps][kWideAct ? 4 : 2 * kWeightTerms];
  typename Copy::Columns copy_columns[kBlocks];  // C of token 8 k + g for read copies
  // Inverses of what C in f16 was multiplied by, of tokens 8 k + 2 q, + 1.
  float c_rest[kBlocks][2];
  float scale[kBlocks][2];  // of the checkpoint's part of tokens 8 k + 2 q, + 1

  // One token: C of this lane's columns, the weights of entries 8 i + lane % 8, or a term of those
  // of entries 16 s + {2q, 2q+1, 2q+8, 2q+9}; and the scale of the checkpoint's part.
  float one_columns[kOneVectors][kVector];
  float one_weights[kOneEntries];
  std::uint32_t one_terms[kWindowSteps][2];
  float one_scale;
  // Of two heads, each in its half of the lanes: the weight of entry lane % 16, and the scale.
  float pair_weight, pair_scale;
};

}  // namespace replayssm::cuda
