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
#include "ops/mamba2/cuda/copy_tiles.cuh"
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
  using Lanes::kSlots, Lanes::kVector, Lanes::load_columns, Lanes::read_tile, Lanes::reduce;
  using Lanes::reduce_lanes, Lanes::team, Lanes::widen_columns;
  using typename Lanes::PackedColumns, typename Lanes::Tile;

  static constexpr bool kOneToken = kTokenBlocks == 0;
  static constexpr bool kHasCopy = kCopy != ReadCopyFormat::kNone;
  // One token without tensor cores: splitting an fp32 state costs more than the products.
  static constexpr bool kOnePlain = kOneToken && !kHasCopy && sizeof(State) == 4;
  using Copy = Mamba2CopyTiles<kCopy, kStateSize>;

  // One token on a checkpoint: eight lanes to four rows of a tile, each with every eighth vector of
  // them, so that a sum has few lanes to travel.
  static constexpr int kOneLanes = 8;
  static constexpr int kOneRows = kTileRows * kOneLanes / kWarpLanes;
  static constexpr int kOneRowLanes = kOneLanes / kOneRows;  // that end up with a row's sum
  static constexpr int kOneVectors = kOnePlain ? kStateSize / (kOneLanes * kVector) : 1;
  static constexpr int kOneEntries = 16 * kWindowSteps / kOneLanes;  // of the window, per lane

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
  static constexpr int kXEntries =
      kWarpLanes / kXChunks;  // entries that a load of x by all lanes has
  static constexpr int kXPointers = kEntries == 2 * kXEntries ? 2 : 1;
  static constexpr bool kWideAct = sizeof(Act) == 4;
  static_assert(!kHasCopy || !kWideAct);
  static constexpr bool kWideState = sizeof(State) == 4;
  // A two-byte state is multiplied as it is: with C in bf16, or with C brought to f16.
  static constexpr bool kPackedProducts = !kWideState && !kWideAct;
  static constexpr bool kF16Products = std::is_same_v<State, F16> && !kWideAct;
  static constexpr int kCFloats = kPackedProducts ? 0 : kOwn;
  static constexpr int kFoldStep = 2;  // records at a time
  // An fp32 weight as this many bf16 terms: 24 bits.
  static constexpr int kWeightTerms = 3;

  // Each kind of row has a loop of its own, so that none pays for another's registers.
  using Kind = PlannedRow::Kind;

 public:
  static __device__ __forceinline__ void run(const Mamba2CudaParams& p, const Mamba2Launch& launch,
                                             unsigned char* shared) {
    Mamba2StepKernel kernel(p, launch, shared);
    kernel.read_row();
    if (!kernel.find_work()) return;
    if (kernel.kind == PlannedRow::kPadding) {
      kernel.zero_outputs();
      return;
    }
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

  // ---- Shared memory, all of it private to a warp ----

  template <Kind kKind>
  static constexpr bool kReadsCopy = kHasCopy && kKind == PlannedRow::kReplay;

  /// The warp's buffers in turn. A row that folds has fewer, and scratch memory behind them.
  struct Stage {
    unsigned char* at;
    std::uint64_t* barrier;
    int index = 0;
    std::uint32_t parity = 0;
  };
  __device__ __forceinline__ Stage first_stage() const {
    return {shared + warp * launch.shared.warp_bytes,
            reinterpret_cast<std::uint64_t*>(shared + launch.shared.barrier_offset) +
                warp * launch.stages};
  }
  template <Kind kKind>
  __device__ __forceinline__ void move_on(Stage& stage) const {
    const int bytes =
        kReadsCopy<kKind> ? launch.shared.copy_stage_bytes : launch.shared.stage_bytes;
    stage.at += bytes;
    ++stage.barrier;
    if (++stage.index < stages) return;
    stage.at -= stages * bytes;
    stage.barrier -= stages;
    stage.index = 0;
    stage.parity ^= 1;
  }
  static __device__ __forceinline__ State* stage_state(unsigned char* stage) {
    return reinterpret_cast<State*>(stage);
  }
  /// Where the x of a stage's first tile lies; tiles follow each other.
  template <Kind kKind>
  __device__ __forceinline__ Act* stage_x(unsigned char* stage) const {
    return reinterpret_cast<Act*>(
        stage + (kReadsCopy<kKind> ? launch.shared.copy_x_offset : launch.shared.stage_x_offset));
  }

  __device__ __forceinline__ CopyTile copy_in_memory(const Position& at) const {
    return ReadCopyTiles<kCopy>::in_memory(p.copy, slot, at.head, launch.head_dim, at.p0,
                                           kStateSize);
  }
  __device__ __forceinline__ CopyTile copy_in_stage(unsigned char* stage) const {
    return Copy::in_stage(stage, launch.copy_tiles);
  }
  /// Writes the read copy of a staged tile that has changed, to memory and over the tile.
  __device__ __forceinline__ void encode_copy(const Position& at, unsigned char* from) const {
    Copy::encode_tile(stage_state(from), copy_in_memory(at), copy_in_stage(from), lane);
    ptx::fence_proxy_async();
  }

  /// What a fold of up to kFoldRecords records shares: their B, and per pass u = dt x and decays.
  struct Scratch {
    Act* b;        // [kFoldRecords][kStateSize]
    float* u;      // [kFoldRecords][kPassRows]
    float* decay;  // [kFoldRecords]
  };
  __device__ __forceinline__ Scratch scratch() const {
    unsigned char* at =
        shared + warp * launch.shared.warp_bytes + launch.fold_stages * launch.shared.stage_bytes;
    auto* u = reinterpret_cast<float*>(at + kFoldRecords * kStateSize * sizeof(Act));
    return {reinterpret_cast<Act*>(at), u, u + kFoldRecords * kPassRows};
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

  template <Kind kKind>
  __device__ __forceinline__ void start_pipeline() {
    stages = folds<kKind>()                    ? launch.fold_stages
             : kKind == PlannedRow::kCommitted ? launch.state_stages
                                               : launch.stages;
    Stage stage = first_stage();
    if (lane < stages) ptx::mbarrier_init(stage.barrier + lane, kWarpLanes + 1);
    ptx::fence_mbarrier_init();
    __syncwarp();
    tile_ahead = tile_begin;
    rows_ahead = first_tile.p0;
    if constexpr (kReadsCopy<kKind>) {
      copy_ahead = copy_in_memory(first_tile);
    } else {
      state_ahead = state(first_tile);
    }
#pragma unroll
    for (int i = 0; i < kXPointers; ++i) {
      const int entry = i * kXEntries + lane / kXChunks;
      x_ahead[i] = (entry < live ? ring_x(first_tile, entry) : token_x(entry - live, first_tile)) +
                   lane % kXChunks * kActPerChunk;
    }
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      load_stage<kKind>(stage);
      move_on<kKind>(stage);
    }
  }

  template <Kind kKind>
  __device__ __forceinline__ bool folds() const {
    return kKind == PlannedRow::kFlush || (kKind == PlannedRow::kCommitted && live > 0);
  }

  /// Starts the loads of the next tile, or tiles of a read copy, into a stage: the state, and x of
  /// the records and the own tokens.
  template <Kind kKind>
  __device__ __forceinline__ void load_stage(const Stage& stage) {
    const int tiles =
        kReadsCopy<kKind> ? min(launch.copy_tiles, tile_end - tile_ahead) : tile_end - tile_ahead;
    if (tiles <= 0) return;
    if constexpr (kReadsCopy<kKind>) {
      if (!zero) {
        Copy::load(copy_ahead, copy_in_stage(stage.at), tiles, stage.barrier, lane);
      }
      copy_ahead = Copy::moved(copy_ahead, tiles);
      if (lane == 0) ptx::mbarrier_arrive(stage.barrier);
    } else if (ptx::kHasBulkCopy) {
      if (lane == 0) {
        if (zero) {
          ptx::mbarrier_arrive(stage.barrier);
        } else {
          ptx::mbarrier_arrive_expect(stage.barrier, kTileBytes);
          ptx::bulk_copy(stage.at, state_ahead, kTileBytes, stage.barrier, ptx::kEvictFirst);
        }
      }
    } else {
      if (lane == 0) ptx::mbarrier_arrive(stage.barrier);
      if (!zero) {
        const unsigned char* from = reinterpret_cast<const unsigned char*>(state_ahead);
        for (int i = lane * 16; i < kTileBytes; i += kWarpLanes * 16) {
          ptx::copy_async_16(stage.at + i, from + i);
        }
      }
    }
    Act* x = stage_x<kKind>(stage.at);
    if constexpr (kReadsCopy<kKind>) {
      load_x_of_tiles(x, tiles);
    } else {
      load_x<kKind>(x);
    }
    ptx::copy_async_arrive(stage.barrier);
  }

  /// Starts the loads of a tile's x, and moves on by a tile.
  template <Kind kKind>
  __device__ __forceinline__ void load_x(Act* x) {
    const int chunks = (live + own) * kXChunks;
    if (lane < chunks) ptx::copy_async_16(x + lane * kActPerChunk, x_ahead[0]);
    if constexpr (kXPointers == 2) {
      if (lane < chunks - kWarpLanes) {
        ptx::copy_async_16(x + (kWarpLanes + lane) * kActPerChunk, x_ahead[1]);
      }
    } else {
      if (chunks > kWarpLanes) load_more_x(x, chunks);
    }
    if constexpr (!kReadsCopy<kKind>) state_ahead += kTileRows * kStateSize;
    move_ahead(1, kTileRows);
  }

  /// The same for tiles of a read copy.
  __device__ __forceinline__ void load_x_of_tiles(Act* x, int tiles) {
    const int stride = places * kTileRows;
    if (rows_ahead + tiles * kTileRows > launch.head_dim || live + own > kXEntries) {
#pragma unroll 1
      for (int i = 0; i < tiles; ++i) load_x<PlannedRow::kReplay>(x + i * stride);
      return;
    }
    // Of one head, and a chunk per lane and tile: the common case.
    const bool mine = lane < (live + own) * kXChunks;
    Act* to = x + lane * kActPerChunk;
#pragma unroll
    for (int i = 0; i < kMamba2MaxCopyTiles; ++i) {
      if (mine && i < tiles) ptx::copy_async_16(to + i * stride, x_ahead[0] + i * kTileRows);
    }
    move_ahead(tiles, kTileRows * tiles);
  }

  __device__ __forceinline__ void move_ahead(int tiles, int rows) {
    tile_ahead += tiles;
    rows_ahead += rows;
#pragma unroll
    for (int i = 0; i < kXPointers; ++i) x_ahead[i] += rows;
    if (rows_ahead == launch.head_dim) {
      rows_ahead = 0;
      state_ahead += launch.state_jump;
#pragma unroll
      for (int i = 0; i < kXPointers; ++i) {
        x_ahead[i] += i * kXEntries + lane / kXChunks < live ? launch.ring_x_jump : launch.x_jump;
      }
    }
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
    if constexpr (kHasCopy) prepare_copy_columns();
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
      __syncwarp();
    }
    if constexpr (kOnePlain) {
      const Act* from = token_c(0) + lane % kOneLanes * kVector;
#pragma unroll
      for (int v = 0; v < kOneVectors; ++v) {
        const auto packed = load_packed<Act, kVector>(from + v * kOneLanes * kVector);
#pragma unroll
        for (int i = 0; i < kVector; ++i) one_columns[v][i] = packed[i];
      }
    } else if constexpr (kF16Products && !kHasCopy) {
      bring_columns_to_f16();
    } else if constexpr (!kPackedProducts) {
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
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
      amax = max(amax, __shfl_xor_sync(kAllLanes, amax, 1));
      amax = max(amax, __shfl_xor_sync(kAllLanes, amax, 2));
      const F16Range range(amax);
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
    const float all = kind == PlannedRow::kFlush ? 1.0f : newer;
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

  /// Brings a token's weights to the lanes that multiply with them.
  __device__ __forceinline__ void spread_one_weights(const float (&of_entry)[kEntryChunks]) {
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
          rest[i] = __shfl_sync(kAllLanes, of_entry[16 * s / kWarpLanes], entry);
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

  // ---- Tiles ----

  template <Kind kKind>
  __device__ __forceinline__ void process() {
    start_pipeline<kKind>();
    Stage stage = first_stage();
    const bool needs_head = kKind != PlannedRow::kCommitted || live > 0;
    HeadInputs next{};
    if (needs_head) next = load_head(first_tile.head);
    if (folds<kKind>() && live <= kFoldRecords) load_fold_columns(0);
    Position at = first_tile;
    if constexpr (kKind != PlannedRow::kCommitted) {
      prepare_group(kKind == PlannedRow::kFlush ? live : 0);
      point_at_outputs(at);
    }
    int in_stage = 0;  // tiles of the stage that have been used, of a read copy
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
      if constexpr (kKind == PlannedRow::kCommitted) {
        committed_tile(at, stage);
      } else {
        if (!kReadsCopy<kKind> || in_stage == 0) {
          ptx::mbarrier_wait(stage.barrier, stage.parity);
          __syncwarp();
        }
        const Act* x = stage_x<kKind>(stage.at) + in_stage * places * kTileRows;
        append_x(at, x);
        if constexpr (kKind == PlannedRow::kFlush) {
          fold_tile<kKind>(at, stage.at, true);
          if constexpr (kHasCopy) encode_copy(at, stage.at);
        }
        const bool has_state = kKind == PlannedRow::kFlush || !zero;
        if constexpr (!kOneToken) {
          output_tile(at, stage.at, in_stage, x, kKind == PlannedRow::kFlush ? live : 0, has_state);
        } else if constexpr (!kOnePlain) {
          output_one_multiplied(at, stage.at, in_stage, x, kKind == PlannedRow::kFlush ? live : 0,
                                has_state);
        } else {
          output_one_token(at, stage.at, x, has_state);
        }
        if constexpr (kKind == PlannedRow::kFlush) ptx::fence_proxy_async();
      }
      if (!kReadsCopy<kKind> || ++in_stage == launch.copy_tiles) {
        in_stage = 0;
        __syncwarp();
        load_stage<kKind>(stage);
        move_on<kKind>(stage);
      }
      at.p0 += kTileRows;
      if constexpr (kKind != PlannedRow::kCommitted) {
        y_at += kTileRows;
        x_append += kTileRows;
      }
      if (at.p0 == launch.head_dim) {
        at.p0 = 0;
        ++at.head;
        if constexpr (kKind != PlannedRow::kCommitted) {
          y_at += launch.y_jump;
          x_append += launch.ring_x_jump;
        }
      }
    }
  }

  __device__ __forceinline__ void point_at_outputs(const Position& at) {
    y_at = !kOneToken  ? output(2 * q, at) + g
           : kOnePlain ? output(0, at) + lane / kOneRowLanes
                       : output(0, at) + g + 8 * (q / 2);
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

  /// Products and window terms of a lane's rows in one sum per row. Every eighth entry of the
  /// window is a lane's: it adds its terms to its own partial sums.
  __device__ __forceinline__ void output_one_token(const Position& at, unsigned char* from,
                                                   const Act* x, bool has_state) {
    const int first_row = lane / kOneLanes * kOneRows;
    const int in_team = lane % kOneLanes;
    float sum[kOneRows];
#pragma unroll
    for (int s = 0; s < kOneRows; ++s) sum[s] = 0.0f;
    if (has_state) {
      const State* tile = stage_state(from) + first_row * kStateSize + in_team * kVector;
#pragma unroll
      for (int v = 0; v < kOneVectors; ++v) {
#pragma unroll
        for (int s = 0; s < kOneRows; ++s) {
          const auto packed =
              load_packed<State, kVector>(tile + s * kStateSize + v * kOneLanes * kVector);
#pragma unroll
          for (int i = 0; i < kVector; ++i) sum[s] = fmaf(packed[i], one_columns[v][i], sum[s]);
        }
      }
#pragma unroll
      for (int s = 0; s < kOneRows; ++s) sum[s] *= one_scale;
    }
    x += first_row;
#pragma unroll
    for (int i = 0; i < kOneEntries; ++i) {
      if (i >= kOneEntries / 2 && live < i * kOneLanes) break;
      // Lanes beyond the window take the token's own x, with a weight of zero: no branch.
      const int entry = min(i * kOneLanes + in_team, live);
      const auto now = load_packed<Act, kOneRows>(x + entry * kTileRows);
#pragma unroll
      for (int s = 0; s < kOneRows; ++s) sum[s] = fmaf(one_weights[i], now[s], sum[s]);
    }
    float y = reduce_lanes<kOneLanes>(sum);
    if (lane % kOneRowLanes == 0) {
      if (p.z != nullptr) y *= silu(widen(gate(0, at)[lane / kOneRowLanes]));
      *y_at = narrow<Act>(y);
    }
  }

  /// The same on the tensor cores, for what needs no splitting: a read copy, a two-byte state.
  __device__ __forceinline__ void output_one_multiplied(const Position& at, unsigned char* from,
                                                        int tile, const Act* x, int first,
                                                        bool has_state) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < kWindowSteps; ++s) {
      if (16 * s >= live + own || 16 * s + 15 < first) continue;
      std::uint32_t a[4];
      load_window(x, s, a);
      ptx::mma_bf16(sum, a[0], a[1], a[2], a[3], one_terms[s][0], one_terms[s][1]);
    }
    float rows[2] = {sum[0] + sum[1], sum[2] + sum[3]};  // g and g + 8
    if (has_state) {
      float of_state[2];
      if constexpr (kHasCopy) {
        Copy::multiply_one(Copy::moved(copy_in_stage(from), tile), lane, copy_columns[0], of_state);
      } else {
        float y[kBlocks][4] = {};
        multiply_state(stage_state(from), y);
        // Column 0: zero in other lanes than q = 0.
        of_state[0] = y[0][0];
        of_state[1] = y[0][2];
      }
      rows[0] = fmaf(of_state[0], one_scale, rows[0]);
      rows[1] = fmaf(of_state[1], one_scale, rows[1]);
    }
    float y = reduce_lanes<4>(rows);
    if (q % 2 == 0) {
      if (p.z != nullptr) y *= silu(widen(gate(0, at)[g + 8 * (q / 2)]));
      *y_at = narrow<Act>(y);
    }
  }

  // ---- Outputs of several tokens ----

  /// `tile`: of those in the stage.
  __device__ __forceinline__ void output_tile(const Position& at, unsigned char* from, int tile,
                                              const Act* x, int first, bool has_state) {
    float y[kTokenBlocks][4];
#pragma unroll
    for (int k = 0; k < kTokenBlocks; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y[k][i] = 0.0f;
    }
    if (has_state) {
      if constexpr (kHasCopy) {
        Copy::template multiply<kTokenBlocks>(Copy::moved(copy_in_stage(from), tile), lane,
                                              copy_columns, y);
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
        multiply_window(x, s, y);
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

  /// y[p, t] += sum_n S[p, n] C[t, n] for the staged tile.
  __device__ __forceinline__ void multiply_state(const State* tile, float (&y)[kBlocks][4]) {
    const State* low = tile + g * kStateSize + q * kOwn;
    const State* high = low + 8 * kStateSize;
    float rest[kBlocks][4];  // of the low terms, in a chain of its own
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rest[k][i] = 0.0f;
    }
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      const auto s0 = load_packed<State, kOwn>(low + 4 * kOwn * s);
      const auto s1 = load_packed<State, kOwn>(high + 4 * kOwn * s);
      if constexpr (kPackedProducts) {
#pragma unroll
        for (int i = 0; i < kOwn / 2; i += 2) {
#pragma unroll
          for (int k = 0; k < kBlocks; ++k) {
            float(&sums)[4] = i % 4 == 0 ? y[k] : rest[k];
            if constexpr (kF16Products) {
              ptx::mma_f16(sums, s0.word[i], s1.word[i], s0.word[i + 1], s1.word[i + 1],
                           c[k][s].word[i], c[k][s].word[i + 1]);
            } else {
              ptx::mma_bf16(sums, s0.word[i], s1.word[i], s0.word[i + 1], s1.word[i + 1],
                            c[k][s].word[i], c[k][s].word[i + 1]);
            }
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
          for (int k = 0; k < kBlocks; ++k) {
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
    for (int k = 0; k < kBlocks; ++k) {
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
      std::uint32_t a[4];
      load_window(x, s, a);
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

  /// The x of sixteen entries as rows g and g + 8 of a product. Entries beyond the window repeat
  /// the last one, which has a weight in any case, with weights of zero.
  __device__ __forceinline__ void load_window(const Act* x, int s, std::uint32_t (&a)[4]) const {
    // Matrix i of the load: entries 8 (i / 2).., state rows 8 (i % 2)..
    const int entry = min(16 * s + 8 * (lane / 16) + lane % 8, live + own - 1);
    ptx::load_matrices_transposed(a, x + entry * kTileRows + 8 * (lane / 8 % 2));
  }

  // ---- Folds ----

  /// Copies B of records first .. first + kFoldRecords to scratch, and a zero behind them.
  __device__ __forceinline__ void load_fold_columns(int first) const {
    const Scratch to = scratch();
    const int count = min(kFoldRecords, live - first);
#pragma unroll 1
    for (int i = lane; i < count * kBChunks; i += kWarpLanes) {
      const int offset = i % kBChunks * kActPerChunk;
      ptx::copy_async_16(to.b + i / kBChunks * kStateSize + offset,
                         ring_b(first + i / kBChunks) + offset);
    }
    if (count % 2 != 0) {
      for (int i = lane; i < kBChunks; i += kWarpLanes) {
        *reinterpret_cast<uint4*>(to.b + count * kStateSize + i * kActPerChunk) = uint4{};
      }
    }
    ptx::copy_async_wait_all();
    __syncwarp();
  }

  /// Folds the live records into the staged tile; to global memory too if asked.
  template <Kind kKind>
  __device__ __forceinline__ void fold_tile(const Position& at, unsigned char* from,
                                            bool to_global) {
#pragma unroll 1
    for (int first_row = 0; first_row < kTileRows; first_row += kPassRows) {
      fold_pass(at, stage_state(from) + first_row * kStateSize, stage_x<kKind>(from), first_row,
                to_global);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void fold_pass(const Position& at, State* staged, const Act* x,
                                            int first_row, bool to_global) {
    Tile tile;
    read_tile(staged, zero, tile);
    const Scratch with = scratch();
#pragma unroll 1
    for (int first = 0; first < live; first += kFoldRecords) {
      __syncwarp();
      if (live > kFoldRecords) load_fold_columns(first);
      const int count = min(kFoldRecords, live - first);
      prepare_fold(with, x, first, count, first_row);
      const float* u = with.u + team * kSlots;
      const float* decays = with.decay;
      const Act* from_b = with.b + column;
#pragma unroll 1
      for (int entry = 0; entry < count; entry += kFoldStep) {
#pragma unroll
        for (int i = 0; i < kFoldStep; ++i) {
          float b[kColumns];
          widen_columns(Lanes::load_vectors(from_b + i * kStateSize), b);
          const auto now = load_packed<float, kSlots>(u + i * kPassRows);
          const float decay = decays[i];
#pragma unroll
          for (int s = 0; s < kSlots; ++s) advance(tile, s, decay, now[s], b);
        }
        u += kFoldStep * kPassRows;
        decays += kFoldStep;
        from_b += kFoldStep * kStateSize;
      }
    }
    if (to_global) {
      this->template write_tile<true, true>(
          tile, state(at) + static_cast<std::int64_t>(first_row) * kStateSize, staged);
    } else {
      this->template write_tile<false, true>(tile, nullptr, staged);
    }
  }

  /// dt x and the decays of a pass's records, to scratch. A record more, where their number is odd,
  /// is one that changes nothing: s = fma(s, 1, -0 * 0) for every s.
  __device__ __forceinline__ void prepare_fold(const Scratch& to, const Act* x, int first,
                                               int count, int first_row) const {
    constexpr int kGroups = kPassRows / 4;  // of four rows
    const Table head = table();
#pragma unroll
    for (int i = 0; i < kFoldRecords * kGroups; i += kWarpLanes) {
      const int entry = (i + lane) / kGroups;
      const int row = (i + lane) % kGroups * 4;
      float4 u = {-0.0f, -0.0f, -0.0f, -0.0f};
      if (entry < count) {
        const auto xv = load_packed<Act, 4>(x + (first + entry) * kTileRows + first_row + row);
        const float dt = head.dt[first + entry];
        u = {__fmul_rn(dt, xv[0]), __fmul_rn(dt, xv[1]), __fmul_rn(dt, xv[2]),
             __fmul_rn(dt, xv[3])};
      }
      *reinterpret_cast<float4*>(to.u + entry * kPassRows + row) = u;
    }
    if (lane < kFoldRecords) to.decay[lane] = lane < count ? head.decay[first + lane] : 1.0f;
    __syncwarp();
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

  __device__ __forceinline__ void committed_tile(const Position& at, const Stage& stage) {
    unsigned char* from = stage.at;
    TokenOperands first{};
    if (token_count > 0) first = load_operands(0, at);
    const float lane_dt = lane < token_count ? time_step(lane, at.head) : 0.0f;
    ptx::mbarrier_wait(stage.barrier, stage.parity);
    __syncwarp();
    if (live > 0) {
      fold_tile<PlannedRow::kCommitted>(at, from, token_count == 0);
      ptx::fence_proxy_async();
    }
    if (token_count == 0) {
      if constexpr (kHasCopy) {
        if (live > 0) encode_copy(at, from);
      }
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
  int g, q;    // lane of a product: lane / 4 and lane % 4
  int stages;  // that the row uses

  int tile_ahead, rows_ahead;  // the next tile to load, and its first row in its head
  const State* state_ahead;
  CopyTile copy_ahead;
  const Act* x_ahead[kXPointers];  // its x, the chunks of entries i kXEntries + lane / kXChunks
  Act* y_at;                       // output of token 2 q, state row g of the tile
  Act* x_append;                   // where the chunk of own token lane / kXChunks goes
  Columns c[kBlocks][kSegments];   // C of token 8 k + g
  float c_float[kBlocks][kSegments][kCFloats > 0 ? kCFloats : 1];
  float bc[kBlocks][kEntryBlocks][2];  // B . C of entries 8 i + 2 q, + 1 and token 8 k + g
  // W of entries 16 s + {2q, 2q+1, 2q+8, 2q+9} and token 8 k + g: fp32, or bf16 terms.
  std::uint32_t weights[kBlocks][kWindowSteps][kWideAct ? 4 : 2 * kWeightTerms];
  typename Copy::Columns copy_columns[kBlocks];  // C of token 8 k + g for read copies
  float c_rest[kBlocks]
              [2];          // inverses of what C in f16 was multiplied by, of tokens 8 k + 2 q, + 1
  float scale[kBlocks][2];  // of the checkpoint's part of tokens 8 k + 2 q, + 1

  // One token: C of this lane's columns, the weights of entries 8 i + lane % 8, or a term of those
  // of entries 16 s + {2q, 2q+1, 2q+8, 2q+9}; and the scale of the checkpoint's part.
  float one_columns[kOneVectors][kVector];
  float one_weights[kOneEntries];
  std::uint32_t one_terms[kWindowSteps][2];
  float one_scale;
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
  // Kept few: nobody is known to keep a two-byte state beside fp32 activations.
  if constexpr (sizeof(State) < sizeof(Act)) return mamba2_step_kernel<State, Act, 128, 2, 5>;
  if (variant == Mamba2Variant::kOneToken) return mamba2_step_kernel<State, Act, 128, 0, 2>;
  if (variant == Mamba2Variant::kGeneral) return mamba2_step_kernel<State, Act, 128, 2, 5>;
  return mamba2_step_kernel<State, Act, 128, 1, 2>;
}

template <typename State, ReadCopyFormat kCopy>
Mamba2KernelFunction mamba2_kernel_with(int state_size, Mamba2Variant variant) {
  if (state_size == 64) return mamba2_step_kernel<State, BF16, 64, 2, 5, kCopy>;
  if (state_size == 256) return mamba2_step_kernel<State, BF16, 256, 2, 5, kCopy>;
  if (state_size != 128) return nullptr;
  if (variant == Mamba2Variant::kOneToken) {
    return mamba2_step_kernel<State, BF16, 128, 0, 2, kCopy>;
  }
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
