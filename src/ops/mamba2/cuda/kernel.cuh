// The Mamba-2 step on the GPU: rows of every kind in one launch.
//
// The unit of work is a tile: 16 rows of one head's state. A warp takes a run of consecutive tiles
// of one group of one row, alone: it asks for its first tiles, computes what the run shares (the
// products B . C of the window) and what a head shares (time steps, decays, the window's weights),
// and then waits for a tile, uses it and asks for the one `stages` further on. Blocks exist only to
// be scheduled; warps never wait for each other.
//
// Outputs of tentative rows are products on the tensor cores (cuda/ptx/mma.cuh):
//   y[p, t] = scale_t  sum_n S[p, n] C[t, n]  +  sum_e x[e, p] W[e, t]
//   W[e, t] = (product of the decays after e, up to t) dt_e (B_e . C_t) + [e is t] D
// over the entries e of the window: live records, then the row's own tokens. bf16 operands are
// multiplied as they are; an fp32 operand is split into terms that together carry its digits.
//
// Rules that make results repeatable:
//  * An element of the state is advanced by fma(S, a, u * B), u = dt * x, in token order, wherever
//    that happens; time steps and decays come from cuda/gates.cuh. So a flush is bit-equal to plain
//    decoding, and a row of n tokens to n rows of one.
//  * Which lane holds what depends on the types and the state size only, never on the launch shape.
//  * What must not contribute is not loaded, or masked bit by bit: unused places may hold NaN.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/read_copy.cuh"
#include "ops/mamba2/cuda/kernels.h"
#include "ops/mamba2/cuda/lanes.cuh"
#include "ops/mamba2/cuda/row.cuh"

namespace replayssm::cuda {

/// kTokenBlocks: blocks of eight tokens a tentative row may have; 0: one token, multiplied without
/// tensor cores (splitting an fp32 state costs more than the products). kWindowSteps: blocks of
/// sixteen window entries (places of the ring).
template <typename State, typename Act, int kStateSize, int kTokenBlocks, int kWindowSteps,
          ReadCopyFormat kCopy>
class Mamba2StepKernel : private Mamba2Row<State, Act, kStateSize>,
                         private Mamba2Lanes<State, Act, kStateSize> {
  using Base = Mamba2Row<State, Act, kStateSize>;
  using Base::first_place, Base::first_tile, Base::gate, Base::kind, Base::lane, Base::launch;
  using Base::live, Base::output, Base::own, Base::p, Base::places, Base::position, Base::read_row;
  using Base::ring_b, Base::ring_dt, Base::ring_x, Base::slot, Base::state, Base::zero_outputs;
  using Base::tile_begin, Base::tile_end, Base::time_step, Base::token_b, Base::token_begin;
  using Base::token_c, Base::token_count, Base::token_x, Base::raw_time_step, Base::warp;
  using Base::zero;
  using typename Base::Position;

  using Lanes = Mamba2Lanes<State, Act, kStateSize>;
  using Lanes::advance, Lanes::column, Lanes::kColumns, Lanes::kPassRows, Lanes::kRowLanes;
  using Lanes::kSlots, Lanes::kTeamLanes, Lanes::kTeams, Lanes::kVector, Lanes::kVectors;
  using Lanes::load_columns, Lanes::read_tile, Lanes::reduce, Lanes::team, Lanes::widen_columns;
  using typename Lanes::PackedColumns, typename Lanes::Tile;

  static constexpr bool kOneToken = kTokenBlocks == 0;
  static constexpr bool kHasCopy = kCopy != ReadCopyFormat::kNone;
  using Copy = ReadCopyTiles<kCopy>;

  // One-token outputs take all rows of a tile at a time.
  static constexpr int kOneSlots = kTileRows / kTeams;
  static constexpr int kOneRowLanes = kWarpLanes / kTileRows;

  static constexpr int kTileBytes = kTileRows * kStateSize * static_cast<int>(sizeof(State));
  static constexpr int kActPerChunk = 16 / static_cast<int>(sizeof(Act));
  static constexpr int kXChunks = kTileRows / kActPerChunk;   // 16-byte chunks of a tile's x
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
  static constexpr int kCopySegments = kHasCopy ? kStateSize / Copy::kSegment : 1;
  static_assert(!kHasCopy || (!kWideAct && !kOneToken));
  static constexpr bool kWideState = sizeof(State) == 4;
  static constexpr bool kBf16Products = std::is_same_v<State, BF16> && std::is_same_v<Act, BF16>;
  static constexpr int kCFloats = kBf16Products ? 0 : kOwn;
  // An fp32 weight as this many bf16 terms: 24 bits.
  static constexpr int kWeightTerms = 3;

 public:
  static __device__ __forceinline__ void run(const Mamba2CudaParams& p, const Mamba2Launch& launch,
                                             unsigned char* shared) {
    Mamba2StepKernel kernel(p, launch, shared);
    if (!kernel.find_work()) return;
    kernel.read_row();
    if (kernel.kind == PlannedRow::kPadding) {
      kernel.zero_outputs();
      return;
    }
    kernel.start_pipeline();
    if (kernel.kind == PlannedRow::kCommitted) {
      kernel.template process<PlannedRow::kCommitted>();
    } else if (kernel.kind == PlannedRow::kFlush) {
      kernel.template process<PlannedRow::kFlush>();
    } else {
      kernel.template process<PlannedRow::kReplay>();
    }
  }

 private:
  __device__ __forceinline__ Mamba2StepKernel(const Mamba2CudaParams& params,
                                              const Mamba2Launch& launch_shape,
                                              unsigned char* shared_memory)
      : Base(params, launch_shape),
        Lanes(Base::lane),
        shared(shared_memory),
        g(lane / 4),
        q(lane % 4) {}

  // Each kind of row has a loop of its own, so that none pays for another's registers.
  using Kind = PlannedRow::Kind;

  // ---- Shared memory, all of it private to a warp ----

  __device__ __forceinline__ unsigned char* stage(int index) const {
    return shared + (warp * launch.stages + index) * launch.shared.stage_bytes;
  }
  __device__ __forceinline__ std::uint64_t* barrier(int index) const {
    return reinterpret_cast<std::uint64_t*>(shared + launch.shared.barrier_offset) +
           warp * launch.stages + index;
  }
  static __device__ __forceinline__ State* stage_state(unsigned char* stage) {
    return reinterpret_cast<State*>(stage);
  }
  __device__ __forceinline__ Act* stage_x(unsigned char* stage) const {
    return reinterpret_cast<Act*>(stage + launch.shared.stage_x_offset);
  }

  __device__ __forceinline__ CopyTile copy_in_memory(const Position& at) const {
    return Copy::in_memory(p.copy, slot, at.head, launch.head_dim, at.p0, kStateSize);
  }
  static __device__ __forceinline__ CopyTile copy_in_stage(unsigned char* stage) {
    return Copy::in_stage(stage, kStateSize);
  }
  /// Writes the read copy of a staged tile that has changed, to memory and over the tile.
  __device__ __forceinline__ void encode_copy(const Position& at, unsigned char* from) const {
    Copy::template encode<kStateSize>(stage_state(from), kStateSize, copy_in_memory(at),
                                      copy_in_stage(from), lane);
    ptx::fence_proxy_async();
  }

  /// A head's values by entry: the live records, then the row's own tokens.
  struct Table {
    float* weight;    // [token][kEntries]: dt times the product of later decays up to the token
    float* dt;        // [entry]
    float* decay;     // [entry]
    float* scale;     // [token]: product of all decays up to the token
    float* products;  // [kEntries], one-token kernels: B_entry . C
  };
  __device__ __forceinline__ Table table() const {
    float* base = reinterpret_cast<float*>(shared + launch.shared.table_offset) +
                  warp * launch.shared.table_stride;
    const int tokens = static_cast<int>(p.limits.draft_capacity);
    float* dt = base + tokens * kEntries;
    return {base, dt, dt + places, dt + 2 * places, base};
  }

  // ---- Loading ----

  // Pointers into tiles move along with the tiles, so that a tile costs additions only.

  __device__ __forceinline__ void start_pipeline() {
    if (lane == 0) {
      for (int i = 0; i < launch.stages; ++i) ptx::mbarrier_init(barrier(i), kWarpLanes + 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    tile_ahead = tile_begin;
    rows_ahead = first_tile.p0;
    state_ahead = state(first_tile);
    const int entry = lane / kXChunks;
    const int offset = lane % kXChunks * kActPerChunk;
    x_ahead =
        (entry < live ? ring_x(first_tile, entry) : token_x(entry - live, first_tile)) + offset;
#pragma unroll 1
    for (int i = 0; i < launch.stages; ++i) load_tile(i);
  }

  /// Starts the loads of the next tile into a stage: its state, the records' x and the own tokens'
  /// x.
  __device__ __forceinline__ void load_tile(int index) {
    if (tile_ahead >= tile_end) return;
    unsigned char* to = stage(index);
    std::uint64_t* bar = barrier(index);
    if (kHasCopy && kind == PlannedRow::kReplay) {
      if (!zero) {
        Copy::load(copy_in_memory(position(tile_ahead)), copy_in_stage(to), kStateSize, bar, lane);
      }
      if (lane == 0) ptx::mbarrier_arrive(bar);
    } else if (ptx::kHasBulkCopy) {
      if (lane == 0) {
        if (zero) {
          ptx::mbarrier_arrive(bar);
        } else {
          ptx::mbarrier_arrive_expect(bar, kTileBytes);
          ptx::bulk_copy(to, state_ahead, kTileBytes, bar, ptx::evict_first_policy());
        }
      }
    } else {
      if (lane == 0) ptx::mbarrier_arrive(bar);
      if (!zero) {
        const unsigned char* from = reinterpret_cast<const unsigned char*>(state_ahead);
        for (int i = lane * 16; i < kTileBytes; i += kWarpLanes * 16) {
          ptx::copy_async_16(to + i, from + i);
        }
      }
    }
    const int chunks = (live + own) * kXChunks;
    Act* x = stage_x(to);
    if (lane < chunks) ptx::copy_async_16(x + lane * kActPerChunk, x_ahead);
    if (chunks > kWarpLanes) load_more_x(x, chunks);
    ptx::copy_async_arrive(bar);

    ++tile_ahead;
    rows_ahead += kTileRows;
    const bool head_ends = rows_ahead == launch.head_dim;
    if (head_ends) rows_ahead = 0;
    state_ahead += head_ends ? launch.state_jump : std::int64_t{kTileRows} * kStateSize;
    x_ahead += !head_ends               ? std::int64_t{kTileRows}
               : lane / kXChunks < live ? launch.ring_x_jump
                                        : launch.x_jump;
  }

  /// The chunks of x beyond one per lane.
  __device__ __forceinline__ void load_more_x(Act* x, int chunks) const {
    const Position at = position(tile_ahead);
#pragma unroll 1
    for (int i = kWarpLanes + lane; i < chunks; i += kWarpLanes) {
      const int entry = i / kXChunks;
      const Act* from = entry < live ? ring_x(at, entry) : token_x(entry - live, at);
      ptx::copy_async_16(x + i * kActPerChunk, from + i % kXChunks * kActPerChunk);
    }
  }

  // ---- What the run shares: the tokens' C, and B . C ----

  using Columns = Packed<Act, kOwn>;

  static __device__ __forceinline__ Columns no_columns() {
    Columns none;
#pragma unroll
    for (int i = 0; i < Columns::kWords; ++i) none.word[i] = 0;
    return none;
  }

  /// `first`: the first entry the window has, after the live records of a row that folds them.
  __device__ __forceinline__ void prepare_group(int first) {
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      const int token = 8 * k + g;
#pragma unroll
      for (int s = 0; s < kSegments; ++s) {
        c[k][s] = token < own ? load_packed<Act, kOwn>(token_c(token) + (4 * s + q) * kOwn)
                              : no_columns();
      }
    }
    if constexpr (kHasCopy) {
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
        const int token = 8 * k + g;
#pragma unroll
        for (int s = 0; s < kCopySegments; ++s) {
#pragma unroll
          for (int i = 0; i < Copy::kPairs; ++i) c_copy[k][s][i] = 0;
          if (token >= own) continue;
          const auto packed = load_packed<Act, Copy::kBlock>(token_c(token) + Copy::kSegment * s +
                                                             Copy::kBlock * q);
#pragma unroll
          for (int i = 0; i < Copy::kPairs; ++i) c_copy[k][s][i] = packed.word[i];
        }
      }
    }
    const int entries = live + own;
#pragma unroll
    for (int i = 0; i < kEntryBlocks; ++i) {
      float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (8 * i < entries && 8 * i + 7 >= first) {
        const int entry = 8 * i + g;
        const bool present = entry >= first && entry < entries;
        const Act* from = entry < live ? ring_b(entry) : token_b(entry - live);
        Columns b[kSegments];
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
          b[s] = present ? load_packed<Act, kOwn>(from + (4 * s + q) * kOwn) : no_columns();
        }
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
#pragma unroll
          for (int k = 0; k < kOwn / 2; k += kWideAct ? 1 : 2) {
            multiply_act(sums, c[0][s], c[kBlocks - 1][s], b[s], k);
          }
        }
      }
      bc[0][i][0] = sums[0];
      bc[0][i][1] = sums[1];
      if constexpr (kTokenBlocks == 2) {
        bc[1][i][0] = sums[2];
        bc[1][i][1] = sums[3];
      }
    }

    if constexpr (kOneToken) {
      // Column 0 of the products, lane 0..3, as a row by entry.
#pragma unroll
      for (int i = 0; i < kEntryBlocks; ++i) {
        if (g == 0) {
          *reinterpret_cast<float2*>(table().products + 8 * i + 2 * q) = {bc[0][i][0], bc[0][i][1]};
        }
      }
      widen_columns(load_columns(token_c(0)), c_columns);
      __syncwarp();
    } else if constexpr (!kBf16Products) {
#pragma unroll
      for (int k = 0; k < kTokenBlocks; ++k) {
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
#pragma unroll
          for (int i = 0; i < kOwn; ++i) c_float[k][s][i] = c[k][s][i];
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

  /// sums += rows (low: g, high: g + 8) times columns, over pair k (and k + 1) of their elements.
  static __device__ __forceinline__ void multiply_act(float (&sums)[4], const Columns& low,
                                                      const Columns& high, const Columns& b,
                                                      int k) {
    constexpr bool two = kTokenBlocks == 2;
    if constexpr (kWideAct) {
      const ptx::Tf32Pair l0 = ptx::split_tf32(low[2 * k]), l1 = ptx::split_tf32(low[2 * k + 1]);
      const ptx::Tf32Pair h0 = ptx::split_tf32(two ? high[2 * k] : 0.0f);
      const ptx::Tf32Pair h1 = ptx::split_tf32(two ? high[2 * k + 1] : 0.0f);
      const ptx::Tf32Pair b0 = ptx::split_tf32(b[2 * k]), b1 = ptx::split_tf32(b[2 * k + 1]);
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
    float dt[kEntryChunks];  // of entry 32 i + lane: recorded, or raw for an own token
  };

  __device__ __forceinline__ HeadInputs load_head(std::int64_t head) const {
    HeadInputs in;
    in.a = p.a[head];
    in.d = p.d == nullptr ? 0.0f : p.d[head];
    in.bias = p.dt_bias == nullptr ? 0.0f : p.dt_bias[head];
#pragma unroll
    for (int i = 0; i < kEntryChunks; ++i) {
      const int entry = kWarpLanes * i + lane;
      in.dt[i] = entry < live         ? *ring_dt(head, entry)
                 : entry < live + own ? raw_time_step(entry - live, head)
                                      : 0.0f;
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
      float dt = in.dt[i];
      if (entry < live + own) {
        if (entry >= live) {
          dt = mamba2_time_step(dt, in.bias, p.dt_softplus, p.dt_min, p.dt_max);
          if (at.p0 == 0) *ring_dt(at.head, entry) = dt;
        }
        decay = mamba2_decay(in.a, dt);
        out.dt[entry] = dt;
        out.decay[entry] = decay;
      }
      float product = entry < live ? decay : 1.0f;
#pragma unroll
      for (int step = 1; step < kWarpLanes; step *= 2) {
        const float other = __shfl_down_sync(kAllLanes, product, step);
        if (lane + step < kWarpLanes) product *= other;
      }
      const float next = __shfl_down_sync(kAllLanes, product, 1);
      const float suffix = lane == kWarpLanes - 1 ? newer : next * newer;
      weight[i] = entry < live && kind != PlannedRow::kFlush ? suffix * dt : 0.0f;
      own_dt[i] = dt;
      newer *= __shfl_sync(kAllLanes, product, 0);
    }
    __syncwarp();
    float all = kind == PlannedRow::kFlush ? 1.0f : newer;
    if constexpr (kOneToken) {
      if (own == 0) return;
      const float decay = out.decay[live];
      one_scale = all * decay;
#pragma unroll
      for (int i = 0; i < kEntryChunks; ++i) {
        const int entry = kWarpLanes * i + lane;
        const float product = entry < kEntries ? out.products[entry] : 0.0f;
        one_weight[i] =
            entry == live ? fmaf(own_dt[i], product, in.d) : weight[i] * decay * product;
        if (entry > live) one_weight[i] = 0.0f;
      }
      return;
    }
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

  /// The window's weights W and the outputs' scales, as this lane's operands of the products.
  __device__ __forceinline__ void prepare_weights(float d) {
    const Table head = table();
#pragma unroll
    for (int k = 0; k < kTokenBlocks; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = 8 * k + 2 * q + i;
        scale[k][i] = token < own ? head.scale[token] : 0.0f;
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
        Packed<BF16, 4> packed;
        packed.set(0, rest[0], rest[1]);
        packed.set(1, rest[2], rest[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) rest[i] -= packed[i];
        weights[k][s][2 * term] = packed.word[0];
        weights[k][s][2 * term + 1] = packed.word[1];
      }
    }
  }

  // ---- Tiles ----

  template <Kind kKind>
  __device__ __forceinline__ void process() {
    int index = 0;
    std::uint32_t parity = 0;
    const bool needs_head = kKind != PlannedRow::kCommitted || live > 0;
    HeadInputs next{};
    if (needs_head) next = load_head(first_tile.head);
    Position at = first_tile;
    if constexpr (kKind != PlannedRow::kCommitted) {
      prepare_group(kKind == PlannedRow::kFlush ? live : 0);
      point_at_outputs(at);
    }
#pragma unroll 1
    for (int tile = tile_begin; tile < tile_end; ++tile) {
      if (needs_head && (tile == tile_begin || at.p0 == 0)) {
        const HeadInputs now = next;
        if (tile + (launch.head_dim - at.p0) / kTileRows < tile_end) {
          next = load_head(at.head + 1);
        }
        __syncwarp();
        fill_table(now, at);
        if constexpr (kKind != PlannedRow::kCommitted && !kOneToken) prepare_weights(now.d);
      }
      unsigned char* from = stage(index);
      if constexpr (kKind == PlannedRow::kCommitted) {
        committed_tile(at, from, index, parity);
      } else {
        ptx::mbarrier_wait(barrier(index), parity);
        __syncwarp();
        append_x(at, stage_x(from));
        if constexpr (kKind == PlannedRow::kFlush) {
          fold_tile(at, from, true);
          if constexpr (kHasCopy) encode_copy(at, from);
        }
        const bool has_state = kKind == PlannedRow::kFlush || !zero;
        if constexpr (kOneToken) {
          output_one_token(at, from, has_state);
        } else {
          output_tile(at, from, kKind == PlannedRow::kFlush ? live : 0, has_state);
        }
        if constexpr (kKind == PlannedRow::kFlush) ptx::fence_proxy_async();
      }
      __syncwarp();
      load_tile(index);
      if (++index == launch.stages) {
        index = 0;
        parity ^= 1;
      }
      at.p0 += kTileRows;
      const bool head_ends = at.p0 == launch.head_dim;
      if constexpr (kKind != PlannedRow::kCommitted) {
        y_at += head_ends ? launch.y_jump : std::int64_t{kTileRows};
        x_append += head_ends ? launch.ring_x_jump : std::int64_t{kTileRows};
      }
      if (head_ends) {
        at.p0 = 0;
        ++at.head;
      }
    }
  }

  __device__ __forceinline__ void point_at_outputs(const Position& at) {
    y_at = kOneToken ? output(0, at) + lane / kOneRowLanes : output(2 * q, at) + g;
    x_append = ring_x(at, live + lane / kXChunks) + lane % kXChunks * kActPerChunk;
  }

  __device__ __forceinline__ void append_x(const Position& at, const Act* x) const {
    const int chunks = own * kXChunks;
    const Act* from = x + live * kTileRows;
    if (lane < chunks) {
      *reinterpret_cast<uint4*>(x_append) =
          *reinterpret_cast<const uint4*>(from + lane * kActPerChunk);
    }
#pragma unroll 1
    for (int i = kWarpLanes + lane; i < chunks; i += kWarpLanes) {
      *reinterpret_cast<uint4*>(ring_x(at, live + i / kXChunks) + i % kXChunks * kActPerChunk) =
          *reinterpret_cast<const uint4*>(from + i * kActPerChunk);
    }
  }

  // ---- Outputs of one token ----

  /// Products and window terms of all rows in one sum per row and lane. An entry of the window is a
  /// lane's: it adds its term to its own partial sums.
  __device__ __forceinline__ void output_one_token(const Position& at, unsigned char* from,
                                                   bool has_state) {
    float sum[kOneSlots];
#pragma unroll
    for (int s = 0; s < kOneSlots; ++s) sum[s] = 0.0f;
    if (has_state) {
      const State* tile = stage_state(from) + team * kOneSlots * kStateSize + column;
#pragma unroll
      for (int s = 0; s < kOneSlots; ++s) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const auto packed =
              load_packed<State, kVector>(tile + s * kStateSize + v * kVector * kTeamLanes);
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            sum[s] = fmaf(packed[i], c_columns[v * kVector + i], sum[s]);
          }
        }
      }
#pragma unroll
      for (int s = 0; s < kOneSlots; ++s) sum[s] *= one_scale;
    }
    static_assert(!kOneToken || kTeams == 1, "an entry's lane adds to all rows of the tile");
#pragma unroll
    for (int i = 0; i < kEntryChunks; ++i) {
      // Lanes beyond the window take the token's own x, with a weight of zero: no branch.
      const int entry = min(kWarpLanes * i + lane, live);
      const auto x = load_packed<Act, kOneSlots>(stage_x(from) + entry * kTileRows);
#pragma unroll
      for (int s = 0; s < kOneSlots; ++s) sum[s] = fmaf(one_weight[i], x[s], sum[s]);
    }
    __syncwarp();
    float y = reduce(sum);
    if (lane % kOneRowLanes == 0) {
      if (p.z != nullptr) y *= silu(widen(gate(0, at)[lane / kOneRowLanes]));
      *y_at = narrow<Act>(y);
    }
  }

  // ---- Outputs of several tokens ----

  __device__ __forceinline__ void output_tile(const Position& at, unsigned char* from, int first,
                                              bool has_state) {
    float y[kTokenBlocks][4];
#pragma unroll
    for (int k = 0; k < kTokenBlocks; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y[k][i] = 0.0f;
    }
    if (has_state) {
      if constexpr (kHasCopy) {
        multiply_copy(from, y);
      } else {
        multiply_state(stage_state(from), y);
      }
#pragma unroll
      for (int k = 0; k < kTokenBlocks; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) y[k][i] *= scale[k][i % 2];
      }
    }
#pragma unroll
    for (int s = 0; s < kWindowSteps; ++s) {
      if (16 * s < live + own && 16 * s + 15 >= first) {
        multiply_window(stage_x(from), s, y);
      }
    }
    if (p.z != nullptr) apply_gate(at, y);
#pragma unroll
    for (int k = 0; k < kTokenBlocks; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (8 * k + 2 * q + i < own) {
          Act* to = y_at + (8 * k + i) * p.y_token_stride;
          to[0] = narrow<Act>(y[k][i]);
          to[8] = narrow<Act>(y[k][i + 2]);
        }
      }
    }
  }

  __device__ __forceinline__ void apply_gate(const Position& at,
                                             float (&y)[kTokenBlocks][4]) const {
#pragma unroll
    for (int k = 0; k < kTokenBlocks; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * k + 2 * q + i % 2;
        if (token < own) y[k][i] *= silu(widen(gate(token, at)[g + 8 * (i / 2)]));
      }
    }
  }

  /// y[p, t] += sum_n S[p, n] C[t, n], S as the staged read copy has it.
  __device__ __forceinline__ void multiply_copy(unsigned char* from, float (&y)[kTokenBlocks][4]) {
    const auto columns = [&](int k, int s, std::uint32_t(&words)[1][Copy::kPairs]) {
#pragma unroll
      for (int i = 0; i < Copy::kPairs; ++i) words[0][i] = c_copy[k][s][i];
    };
    Copy::template multiply<kStateSize, kTokenBlocks, 1>(copy_in_stage(from), kStateSize, lane,
                                                         kTokenBlocks, columns, y);
  }

  /// y[p, t] += sum_n S[p, n] C[t, n] for the staged tile.
  __device__ __forceinline__ void multiply_state(const State* tile, float (&y)[kTokenBlocks][4]) {
    const State* low = tile + g * kStateSize + q * kOwn;
    const State* high = low + 8 * kStateSize;
    float rest[kTokenBlocks][4];  // of the low terms, in a chain of its own
#pragma unroll
    for (int k = 0; k < kTokenBlocks; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rest[k][i] = 0.0f;
    }
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      const auto s0 = load_packed<State, kOwn>(low + 4 * kOwn * s);
      const auto s1 = load_packed<State, kOwn>(high + 4 * kOwn * s);
      if constexpr (kBf16Products) {
#pragma unroll
        for (int i = 0; i < kOwn / 2; i += 2) {
#pragma unroll
          for (int k = 0; k < kTokenBlocks; ++k) {
            ptx::mma_bf16(i % 4 == 0 ? y[k] : rest[k], s0.word[i], s1.word[i], s0.word[i + 1],
                          s1.word[i + 1], c[k][s].word[i], c[k][s].word[i + 1]);
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < kOwn / 2; ++i) {
          const ptx::Tf32Pair a0 = ptx::split_tf32(s0[2 * i]);
          const ptx::Tf32Pair a1 = ptx::split_tf32(s1[2 * i]);
          const ptx::Tf32Pair a2 = ptx::split_tf32(s0[2 * i + 1]);
          const ptx::Tf32Pair a3 = ptx::split_tf32(s1[2 * i + 1]);
#pragma unroll
          for (int k = 0; k < kTokenBlocks; ++k) {
            // bf16 is tf32 as it is; tf32 ignores an fp32's low bits.
            const float c0 = c_float[k][s][2 * i], c1 = c_float[k][s][2 * i + 1];
            const std::uint32_t w0 = __float_as_uint(c0), w1 = __float_as_uint(c1);
            ptx::mma_tf32(y[k], a0.high, a1.high, a2.high, a3.high, w0, w1);
            if constexpr (kWideState) {
              ptx::mma_tf32(rest[k], a0.low, a1.low, a2.low, a3.low, w0, w1);
            }
            if constexpr (kWideAct) {
              const ptx::Tf32Pair b0 = ptx::split_tf32(c0), b1 = ptx::split_tf32(c1);
              ptx::mma_tf32(rest[k], a0.high, a1.high, a2.high, a3.high, b0.low, b1.low);
            }
          }
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kTokenBlocks; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y[k][i] += rest[k][i];
    }
  }

  /// y[p, t] += sum_e x[e, p] W[e, t] over the sixteen entries of a step.
  __device__ __forceinline__ void multiply_window(const Act* x, int s,
                                                  float (&y)[kTokenBlocks][4]) {
    const int entries = live + own;
    if constexpr (kWideAct) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int e0 = 16 * s + 8 * half + 2 * q;
        const auto at = [&](int entry, int state_row) {
          return ptx::split_tf32(entry < entries ? x[entry * kTileRows + state_row] : 0.0f);
        };
        const ptx::Tf32Pair a0 = at(e0, g), a1 = at(e0, g + 8);
        const ptx::Tf32Pair a2 = at(e0 + 1, g), a3 = at(e0 + 1, g + 8);
#pragma unroll
        for (int k = 0; k < kTokenBlocks; ++k) {
          const ptx::Tf32Pair b0 = ptx::split_tf32(__uint_as_float(weights[k][s][2 * half]));
          const ptx::Tf32Pair b1 = ptx::split_tf32(__uint_as_float(weights[k][s][2 * half + 1]));
          ptx::mma_tf32(y[k], a0.low, a1.low, a2.low, a3.low, b0.high, b1.high);
          ptx::mma_tf32(y[k], a0.high, a1.high, a2.high, a3.high, b0.low, b1.low);
          ptx::mma_tf32(y[k], a0.high, a1.high, a2.high, a3.high, b0.high, b1.high);
        }
      }
    } else {
      // Matrix i of the load: entries 8 (i / 2).., state rows 8 (i % 2)..
      std::uint32_t a[4];
      const int entry = min(16 * s + 8 * (lane / 16) + lane % 8, entries - 1);
      ptx::load_matrices_transposed(a, x + entry * kTileRows + 8 * (lane / 8 % 2));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int e0 = 16 * s + 8 * half + 2 * q;
        const std::uint32_t mask =
            (e0 < entries ? 0xffffu : 0u) | (e0 + 1 < entries ? 0xffff0000u : 0u);
        a[2 * half] &= mask;
        a[2 * half + 1] &= mask;
      }
#pragma unroll
      for (int k = 0; k < kTokenBlocks; ++k) {
#pragma unroll
        for (int term = kWeightTerms - 1; term >= 0; --term) {
          ptx::mma_bf16(y[k], a[0], a[1], a[2], a[3], weights[k][s][2 * term],
                        weights[k][s][2 * term + 1]);
        }
      }
    }
  }

  // ---- Folds ----

  /// Folds the live records into the staged tile; to global memory too if asked.
  __device__ __forceinline__ void fold_tile(const Position& at, unsigned char* from,
                                            bool to_global) {
#pragma unroll 1
    for (int first_row = 0; first_row < kTileRows; first_row += kPassRows) {
      fold_pass(at, from, first_row, to_global);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void fold_pass(const Position& at, unsigned char* from, int first_row,
                                            bool to_global) {
    State* staged = stage_state(from) + first_row * kStateSize;
    Tile tile;
    read_tile(staged, zero, tile);
    const Table head = table();
    const Act* x = stage_x(from) + first_row + team * kSlots;
    const Act* from_b = ring_b(0);
    int until_wrap = places - first_place;
    // Two records ahead: they come from L2.
    PackedColumns next[2];
    const auto load_next = [&](PackedColumns& to) {
      to = load_columns(from_b);
      from_b += p.ring_b_place_stride;
      if (--until_wrap == 0) from_b -= places * p.ring_b_place_stride;
    };
    load_next(next[0]);
    if (live > 1) load_next(next[1]);
#pragma unroll 1
    for (int entry = 0; entry < live; ++entry) {
      const PackedColumns b = next[0];
      next[0] = next[1];
      if (entry + 2 < live) load_next(next[1]);
      const float dt = head.dt[entry];
      const float decay = head.decay[entry];
      float bv[kColumns];
      widen_columns(b, bv);
      const auto xv = load_packed<Act, kSlots>(x + entry * kTileRows);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) advance(tile, s, decay, __fmul_rn(dt, xv[s]), bv);
    }
    if (to_global) {
      this->template write_tile<true, true>(
          tile, state(at) + static_cast<std::int64_t>(first_row) * kStateSize, staged);
    } else {
      this->template write_tile<false, true>(tile, nullptr, staged);
    }
  }

  // ---- Committed rows ----

  /// A token's operands as loaded, so that the next token's are on their way during this one's use.
  struct TokenOperands {
    PackedColumns b, c;
    Act x;  // of state row `lane` of the pass
    Act z;  // of state row lane / kRowLanes of the pass
  };

  __device__ __forceinline__ TokenOperands load_operands(std::int64_t t, const Position& at) const {
    return {load_columns(token_b(t)), load_columns(token_c(t)), token_x(t, at)[lane % kPassRows],
            p.z == nullptr ? narrow<Act>(0.0f) : gate(t, at)[lane / kRowLanes]};
  }

  __device__ __forceinline__ void committed_tile(const Position& at, unsigned char* from, int index,
                                                 std::uint32_t parity) {
    TokenOperands first{};
    if (token_count > 0) first = load_operands(0, at);
    const float lane_dt = lane < token_count ? time_step(lane, at.head) : 0.0f;
    ptx::mbarrier_wait(barrier(index), parity);
    __syncwarp();
    if (live > 0) {
      fold_tile(at, from, token_count == 0);
      ptx::fence_proxy_async();
    }
    if (token_count == 0) {
      if (kHasCopy && live > 0) encode_copy(at, from);
      return;
    }
    committed_pass(at, stage_state(from), first, lane_dt);
#pragma unroll 1
    for (int first_row = kPassRows; first_row < kTileRows; first_row += kPassRows) {
      const Position pass{at.head, at.p0 + first_row};
      committed_pass(pass, stage_state(from) + first_row * kStateSize, load_operands(0, pass),
                     lane_dt);
    }
    if constexpr (kHasCopy) {
      __syncwarp();
      encode_copy(at, from);
    }
  }

  /// All tokens through kPassRows rows of the state. `next`: the first token's operands; `lane_dt`:
  /// the time step of token `lane`.
  __device__ __forceinline__ void committed_pass(const Position& at, State* staged,
                                                 TokenOperands next, float lane_dt) {
    const float a = p.a[at.head];
    const float d = p.d == nullptr ? 0.0f : p.d[at.head];
    Tile tile;
    read_tile(staged, zero && live == 0, tile);
    for (std::int64_t t0 = 0; t0 < token_count; t0 += kWarpLanes) {
      if (t0 > 0) lane_dt = t0 + lane < token_count ? time_step(t0 + lane, at.head) : 0.0f;
      const float lane_decay = mamba2_decay(a, lane_dt);
      const int count = static_cast<int>(min(token_count - t0, std::int64_t{kWarpLanes}));
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        const TokenOperands now = next;
        if (t0 + t + 1 < token_count) next = load_operands(t0 + t + 1, at);
        const float dt = __shfl_sync(kAllLanes, lane_dt, t);
        const float decay = __shfl_sync(kAllLanes, lane_decay, t);
        const float u = __fmul_rn(dt, widen(now.x));
        float b[kColumns];
        float c_now[kColumns];
        widen_columns(now.b, b);
        widen_columns(now.c, c_now);
        float sum[kSlots];
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          advance(tile, s, decay, __shfl_sync(kAllLanes, u, team * kSlots + s), b);
          sum[s] = 0.0f;
#pragma unroll
          for (int i = 0; i < kColumns; ++i) sum[s] = fmaf(tile.s[s][i], c_now[i], sum[s]);
        }
        if constexpr (sizeof(State) == 2) {
          // The state a next token starts from is the stored one.
#pragma unroll
          for (int s = 0; s < kSlots; ++s) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) tile.s[s][i] = widen(narrow<State>(tile.s[s][i]));
          }
        }
        float y = reduce(sum);
        const int state_row = lane / kRowLanes;
        y = fmaf(d, __shfl_sync(kAllLanes, widen(now.x), state_row), y);
        if (lane % kRowLanes == 0) {
          if (p.z != nullptr) y *= silu(widen(now.z));
          output(t0 + t, at)[state_row] = narrow<Act>(y);
        }
      }
    }
    this->template write_tile<true, kHasCopy>(tile, state(at), staged);
  }

  unsigned char* shared;
  int g, q;  // lane of a product: lane / 4 and lane % 4

  int tile_ahead, rows_ahead;  // the next tile to load, and its first row in its head
  const State* state_ahead;
  const Act* x_ahead;             // its x, the chunk of entry lane / kXChunks
  Act* y_at;                      // output of token 2 q, state row g of the tile
  Act* x_append;                  // where the chunk of own token lane / kXChunks goes
  Columns c[kBlocks][kSegments];  // C of token 8 k + g
  float c_float[kBlocks][kSegments][kCFloats > 0 ? kCFloats : 1];
  float bc[kBlocks][kEntryBlocks][2];  // B . C of entries 8 i + 2 q, + 1 and token 8 k + g
  // W of entries 16 s + {2q, 2q+1, 2q+8, 2q+9} and token 8 k + g: fp32, or bf16 terms.
  std::uint32_t weights[kBlocks][kWindowSteps][kWideAct ? 4 : 2 * kWeightTerms];
  // C for read copies, by segments.
  std::uint32_t c_copy[kBlocks][kCopySegments][Copy::kPairs];
  float c_columns[kColumns];       // one token: C of this lane's columns,
  float one_weight[kEntryChunks];  // the weights of entries 32 i + lane,
  float one_scale;                 // and the scale of the checkpoint's part
  float scale[kBlocks][2];         // of the checkpoint's part of tokens 8 k + 2 q, + 1
};

constexpr Mamba2Variant mamba2_variant_of(int token_blocks) {
  return token_blocks == 0   ? Mamba2Variant::kOneToken
         : token_blocks == 1 ? Mamba2Variant::kSmall
                             : Mamba2Variant::kGeneral;
}

template <typename State, typename Act, int kStateSize, int kTokenBlocks, int kWindowSteps,
          ReadCopyFormat kCopy = ReadCopyFormat::kNone>
__global__ void __launch_bounds__(kMamba2MaxWarps* kWarpLanes,
                                  mamba2_resident_blocks(mamba2_variant_of(kTokenBlocks)))
    mamba2_step_kernel(const __grid_constant__ Mamba2CudaParams params,
                       const __grid_constant__ Mamba2Launch launch) {
  extern __shared__ __align__(128) unsigned char shared[];
  Mamba2StepKernel<State, Act, kStateSize, kTokenBlocks, kWindowSteps, kCopy>::run(params, launch,
                                                                                   shared);
}

template <typename State, typename Act>
Mamba2KernelFunction mamba2_step_function(int state_size, Mamba2Variant variant) {
  if (state_size == 64) return mamba2_step_kernel<State, Act, 64, 2, 5>;
  if (state_size == 256) return mamba2_step_kernel<State, Act, 256, 2, 5>;
  if (state_size != 128) return nullptr;
  if (variant == Mamba2Variant::kOneToken) {
    if constexpr (sizeof(State) == 4) return mamba2_step_kernel<State, Act, 128, 0, 2>;
  }
  if (variant == Mamba2Variant::kGeneral) return mamba2_step_kernel<State, Act, 128, 2, 5>;
  return mamba2_step_kernel<State, Act, 128, 1, 2>;
}

template <typename State, ReadCopyFormat kCopy>
Mamba2KernelFunction mamba2_kernel_with(int state_size, Mamba2Variant variant) {
  if (state_size == 64) return mamba2_step_kernel<State, BF16, 64, 2, 5, kCopy>;
  if (state_size == 256) return mamba2_step_kernel<State, BF16, 256, 2, 5, kCopy>;
  if (state_size != 128) return nullptr;
  if (variant == Mamba2Variant::kGeneral) {
    return mamba2_step_kernel<State, BF16, 128, 2, 5, kCopy>;
  }
  return mamba2_step_kernel<State, BF16, 128, 1, 2, kCopy>;
}

template <typename State>
Mamba2KernelFunction mamba2_copy_step_function(ReadCopyFormat format, int state_size,
                                               Mamba2Variant variant) {
  switch (format) {
    case ReadCopyFormat::kNone:
      break;
    case ReadCopyFormat::kFp8E4M3:
      return mamba2_kernel_with<State, ReadCopyFormat::kFp8E4M3>(state_size, variant);
    case ReadCopyFormat::kInt8:
      return mamba2_kernel_with<State, ReadCopyFormat::kInt8>(state_size, variant);
    case ReadCopyFormat::kNvfp4:
      return mamba2_kernel_with<State, ReadCopyFormat::kNvfp4>(state_size, variant);
  }
  return nullptr;
}

}  // namespace replayssm::cuda
