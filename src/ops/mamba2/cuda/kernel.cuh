// The Mamba-2 step on the GPU: rows of every kind in one launch.
//
// A block serves consecutive tiles (config.h) of one group of one row. It first prepares what its
// tiles share - the records' B, the tokens' C, their products, and per head the time steps, decays
// and suffix products of decays - while the first tiles are already on their way. After that every
// warp works alone: wait for its next tile, use it, ask for the one `stages` further on.
//
// Rules that make results repeatable:
//  * An element of the state is advanced by fma(S, a, u * B), u = dt * x, in token order, wherever
//    that happens; time steps and decays come from cuda/gates.cuh. So a flush is bit-equal to plain
//    decoding, and a row of n tokens to n rows of one.
//  * Which lane holds what depends on the type and the state size only, never on the launch shape.
//  * What must not contribute is not loaded, or not added: unused places may hold NaN.
#pragma once

#include <cstdint>

#include "cuda/device_error.cuh"
#include "cuda/gates.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/vector.cuh"
#include "ops/mamba2/cuda/config.h"
#include "ops/mamba2/cuda/params.h"

namespace replayssm::cuda {

inline constexpr int kWarpLanes = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

template <typename State, typename Act, int kStateSize, int kTileRows>
class Mamba2StepKernel {
  // A lane holds kVectors vectors of 16 bytes of each of kSlots state rows. Lanes that share rows
  // form a team; slot s of a lane of team m is row m * kSlots + s.
  static constexpr int kVector = 16 / static_cast<int>(sizeof(State));
  static constexpr int kTeamLanes =
      kStateSize / kVector < kWarpLanes ? kStateSize / kVector : kWarpLanes;
  static constexpr int kVectors = kStateSize / (kVector * kTeamLanes);
  static constexpr int kTeams = kWarpLanes / kTeamLanes;
  static constexpr int kSlots = kTileRows / kTeams;
  static constexpr int kColumns = kVector * kVectors;
  static constexpr int kRowLanes = kWarpLanes / kTileRows;  // lanes that end up with a row's sum
  static_assert(kSlots * kTeams == kTileRows && kSlots <= kTeamLanes);

  static constexpr int kTileElements = kTileRows * kStateSize;
  static constexpr int kTileBytes = kTileElements * static_cast<int>(sizeof(State));
  static constexpr int kActPerChunk = 16 / static_cast<int>(sizeof(Act));
  static constexpr int kXChunks = kTileRows / kActPerChunk;   // 16-byte chunks of a tile's x
  static constexpr int kBChunks = kStateSize / kActPerChunk;  // 16-byte chunks of B or C

 public:
  static __device__ __forceinline__ void run(const Mamba2CudaParams& p, const Mamba2Launch& launch,
                                             unsigned char* shared) {
    Mamba2StepKernel kernel(p, launch, shared);
    if (!kernel.read_row()) {
      kernel.zero_outputs();
      return;
    }
    kernel.start_pipeline();
    kernel.prepare();
    kernel.process();
  }

 private:
  __device__ __forceinline__ Mamba2StepKernel(const Mamba2CudaParams& params,
                                              const Mamba2Launch& launch_shape,
                                              unsigned char* shared_memory)
      : p(params), launch(launch_shape), shared(shared_memory) {
    lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    warp = static_cast<int>(threadIdx.x) / kWarpLanes;
    team = lane / kTeamLanes;
    column = (lane % kTeamLanes) * kVector;
    places = p.limits.record_places();
    row = blockIdx.x / launch.blocks_per_row;
    const int in_row = static_cast<int>(blockIdx.x - row * launch.blocks_per_row);
    group = in_row / launch.blocks_per_group;
    tile_begin = (in_row % launch.blocks_per_group) * launch.tiles_per_block;
    tile_end = min(tile_begin + launch.tiles_per_block, launch.tiles_per_group);
    first_head = tile_begin / launch.tiles_per_head;
    group_head = static_cast<int>(group * (p.heads / p.groups));
  }

  // ---- The row ----

  /// False for padding, and for a row that names what does not exist.
  __device__ __forceinline__ bool read_row() {
    const DeviceRow r = p.rows[row];
    token_begin = r.token_begin;
    token_count = r.token_count;
    slot = r.slot;
    if (token_begin < 0 || token_count < 0 || token_begin > p.token_count - token_count) {
      if (first_thread()) {
        report_error(p.error, DeviceError::kTokenRange, row, token_begin + token_count,
                     p.token_count);
      }
      token_count = 0;
      return false;
    }
    if (slot < 0) return false;
    if (slot >= p.slots) {
      if (first_thread()) report_error(p.error, DeviceError::kSlot, row, slot, p.slots - 1);
      return false;
    }
    committed = r.kind == RowKind::kCommitted;
    if (!committed && (token_count < 1 || token_count > p.limits.draft_capacity)) {
      if (first_thread()) {
        report_error(p.error, DeviceError::kTokenCount, row, token_count, p.limits.draft_capacity);
      }
      return false;
    }
    const Cursor cursor = p.cursors[slot];
    const std::int64_t n = cursor.live();
    if (n < 0 || n > p.limits.window || cursor.checkpoint_position < 0) {
      if (first_thread()) report_error(p.error, DeviceError::kCursor, row, n, p.limits.window);
      return false;
    }
    live = static_cast<int>(n);
    first_place = static_cast<int>(cursor.checkpoint_position % places);
    zero = cursor.checkpoint_position == 0;
    flush = !committed && tentative_row_flushes(cursor, p.limits);
    own = committed ? 0 : static_cast<int>(token_count);
    return true;
  }

  __device__ __forceinline__ bool first_thread() const {
    return threadIdx.x == 0 && blockIdx.x == row * launch.blocks_per_row;
  }

  __device__ __forceinline__ void zero_outputs() {
    for (int tile = tile_begin + warp; tile < tile_end; tile += launch.warps) {
      const Position at = position(tile);
      for (std::int64_t t = 0; t < token_count; ++t) {
        if (lane < kTileRows) output(t, at)[lane] = narrow<Act>(0.0f);
      }
    }
  }

  // ---- Addresses ----

  struct Position {
    std::int64_t head;
    int local_head;  // among the heads the block touches
    int p0;          // first state row
  };

  __device__ __forceinline__ Position position(int tile) const {
    const int head = tile / launch.tiles_per_head;
    return {group_head + head, head - first_head,
            (tile - head * launch.tiles_per_head) * kTileRows};
  }

  __device__ __forceinline__ int place(int entry) const {
    const int at = first_place + entry;
    return at < places ? at : at - places;
  }

  __device__ __forceinline__ State* state(const Position& at) const {
    return static_cast<State*>(p.state) + slot * p.state_slot_stride +
           at.head * p.state_head_stride + static_cast<std::int64_t>(at.p0) * kStateSize;
  }
  __device__ __forceinline__ Act* ring_x(const Position& at, int entry) const {
    return static_cast<Act*>(p.ring_x) + slot * p.ring_x_slot_stride +
           at.head * p.ring_x_head_stride + place(entry) * p.ring_x_place_stride + at.p0;
  }
  __device__ __forceinline__ Act* ring_b(int entry) const {
    return static_cast<Act*>(p.ring_b) + slot * p.ring_b_slot_stride +
           group * p.ring_b_group_stride + place(entry) * p.ring_b_place_stride;
  }
  __device__ __forceinline__ float* ring_dt(std::int64_t head, int entry) const {
    return p.ring_dt + slot * p.ring_dt_slot_stride + head * p.ring_dt_head_stride + place(entry);
  }
  __device__ __forceinline__ const Act* token_x(std::int64_t t, const Position& at) const {
    return static_cast<const Act*>(p.x) + (token_begin + t) * p.x_token_stride +
           at.head * p.x_head_stride + at.p0;
  }
  __device__ __forceinline__ const Act* token_b(std::int64_t t) const {
    return static_cast<const Act*>(p.b) + (token_begin + t) * p.b_token_stride +
           group * p.b_group_stride;
  }
  __device__ __forceinline__ const Act* token_c(std::int64_t t) const {
    return static_cast<const Act*>(p.c) + (token_begin + t) * p.c_token_stride +
           group * p.c_group_stride;
  }
  __device__ __forceinline__ const Act* gate(std::int64_t t, const Position& at) const {
    return static_cast<const Act*>(p.z) + (token_begin + t) * p.z_token_stride +
           at.head * p.z_head_stride + at.p0;
  }
  __device__ __forceinline__ Act* output(std::int64_t t, const Position& at) const {
    return static_cast<Act*>(p.y) + (token_begin + t) * p.y_token_stride +
           at.head * p.y_head_stride + at.p0;
  }
  __device__ __forceinline__ float time_step(std::int64_t t, std::int64_t head) const {
    const std::int64_t at = (token_begin + t) * p.dt_token_stride + head;
    const float raw = p.dt_is_f32 ? static_cast<const float*>(p.dt)[at]
                                  : widen(static_cast<const Act*>(p.dt)[at]);
    return mamba2_time_step(raw, p.dt_bias == nullptr ? 0.0f : p.dt_bias[head], p.dt_softplus,
                            p.dt_min, p.dt_max);
  }

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
  __device__ __forceinline__ Act* shared_b() const {
    return reinterpret_cast<Act*>(shared + launch.shared.b_offset);
  }
  __device__ __forceinline__ Act* shared_c() const {
    return reinterpret_cast<Act*>(shared + launch.shared.c_offset);
  }
  __device__ __forceinline__ float* shared_bc() const {
    return reinterpret_cast<float*>(shared + launch.shared.bc_offset);
  }

  /// What the tiles of a head share, by entry: the live records, then the row's own tokens.
  struct Table {
    float* dt;
    float* decay;
    float* suffix;  // product of the decays of newer records; [places]: of all records
  };
  __device__ __forceinline__ Table table(int local_head) const {
    float* base = reinterpret_cast<float*>(shared + launch.shared.table_offset) +
                  local_head * launch.shared.table_stride;
    return {base, base + places, base + 2 * places};
  }

  // ---- Loading ----

  __device__ __forceinline__ void start_pipeline() {
    if (lane == 0) {
      for (int i = 0; i < launch.stages; ++i) ptx::mbarrier_init(barrier(i), kWarpLanes + 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    for (int i = 0; i < launch.stages; ++i) load_tile(tile_begin + warp + i * launch.warps, i);
  }

  /// Starts the loads of a tile into a stage: its state, the records' x and the own tokens' x.
  __device__ __forceinline__ void load_tile(int tile, int index) {
    if (tile >= tile_end) return;
    const Position at = position(tile);
    unsigned char* to = stage(index);
    std::uint64_t* bar = barrier(index);
    if (ptx::kHasBulkCopy) {
      if (lane == 0) {
        if (zero) {
          ptx::mbarrier_arrive(bar);
        } else {
          ptx::mbarrier_arrive_expect(bar, kTileBytes);
          ptx::bulk_copy(to, state(at), kTileBytes, bar, ptx::evict_first_policy());
        }
      }
    } else {
      if (lane == 0) ptx::mbarrier_arrive(bar);
      if (!zero) {
        const unsigned char* from = reinterpret_cast<const unsigned char*>(state(at));
        for (int i = lane * 16; i < kTileBytes; i += kWarpLanes * 16) {
          ptx::copy_async_16(to + i, from + i);
        }
      }
    }
    Act* x = stage_x(to);
    for (int i = lane; i < (live + own) * kXChunks; i += kWarpLanes) {
      const int entry = i / kXChunks;
      const int offset = (i % kXChunks) * kActPerChunk;
      const Act* from = entry < live ? ring_x(at, entry) : token_x(entry - live, at);
      ptx::copy_async_16(x + entry * kTileRows + offset, from + offset);
    }
    ptx::copy_async_arrive(bar);
  }

  // ---- Preparation, by the whole block ----

  __device__ __forceinline__ void prepare() {
    const int entries = live + own;
    if (entries == 0) return;  // a committed row without live records; uniform over the block
    const int threads = launch.warps * kWarpLanes;
    Act* b = shared_b();
    Act* c = shared_c();
    for (int i = static_cast<int>(threadIdx.x); i < (entries + own) * kBChunks; i += threads) {
      const int entry = i / kBChunks;
      const int offset = (i % kBChunks) * kActPerChunk;
      if (entry < entries) {
        const Act* from = entry < live ? ring_b(entry) : token_b(entry - live);
        ptx::copy_async_16(b + entry * kStateSize + offset, from + offset);
      } else {
        const int t = entry - entries;
        ptx::copy_async_16(c + t * kStateSize + offset, token_c(t) + offset);
      }
    }
    const int heads = (tile_end - 1) / launch.tiles_per_head - first_head + 1;
    for (int h = warp; h < heads; h += launch.warps) fill_table(h);
    ptx::copy_async_wait_all();
    __syncthreads();
    if (own == 0) return;

    // The first block of a group appends the tokens' B.
    if (tile_begin == 0) {
      for (int i = static_cast<int>(threadIdx.x); i < own * kBChunks; i += threads) {
        const int entry = live + i / kBChunks;
        const int offset = (i % kBChunks) * kActPerChunk;
        *reinterpret_cast<uint4*>(ring_b(entry) + offset) =
            *reinterpret_cast<const uint4*>(b + entry * kStateSize + offset);
      }
    }
    multiply_bc();
    __syncthreads();
  }

  /// Time steps and decays of the entries of a head; its first block appends the tokens' dt.
  __device__ __forceinline__ void fill_table(int local_head) {
    const std::int64_t head = group_head + first_head + local_head;
    const bool appends = (first_head + local_head) * launch.tiles_per_head >= tile_begin;
    const Table out = table(local_head);
    const float a = p.a[head];
    float newer = 1.0f;
    for (int first = (live + own - 1) / kWarpLanes * kWarpLanes; first >= 0; first -= kWarpLanes) {
      const int entry = first + lane;
      float decay = 1.0f;
      if (entry < live + own) {
        float dt;
        if (entry < live) {
          dt = *ring_dt(head, entry);
        } else {
          dt = time_step(entry - live, head);
          if (appends) *ring_dt(head, entry) = dt;
        }
        decay = mamba2_decay(a, dt);
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
      if (entry < live) out.suffix[entry] = lane == kWarpLanes - 1 ? newer : next * newer;
      newer *= __shfl_sync(kAllLanes, product, 0);
    }
    if (lane == 0) out.suffix[places] = newer;
  }

  /// bc[t][entry] = B_entry . C_t for the entries token t sees: eight lanes per product.
  __device__ __forceinline__ void multiply_bc() {
    constexpr int kLanes = 8;
    const int first = flush ? live : 0;
    const int columns = live + own - first;
    const int sub = lane % kLanes;
    for (int pair0 = warp * (kWarpLanes / kLanes); pair0 < own * columns;
         pair0 += launch.warps * (kWarpLanes / kLanes)) {
      const int pair = pair0 + lane / kLanes;
      const int t = pair / columns;
      const int entry = first + pair - t * columns;
      const bool seen = t < own && entry <= live + t;
      float sum = 0.0f;
      if (seen) {
        const Act* b = shared_b() + entry * kStateSize;
        const Act* c = shared_c() + t * kStateSize;
#pragma unroll
        for (int chunk = 0; chunk < kBChunks / kLanes; ++chunk) {
          const int offset = (chunk * kLanes + sub) * kActPerChunk;
          const auto bv = load_packed<Act, kActPerChunk>(b + offset);
          const auto cv = load_packed<Act, kActPerChunk>(c + offset);
#pragma unroll
          for (int i = 0; i < kActPerChunk; ++i) sum = fmaf(bv[i], cv[i], sum);
        }
      }
#pragma unroll
      for (int mask = kLanes / 2; mask > 0; mask /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, mask);
      }
      if (seen && sub == 0) shared_bc()[t * places + entry] = sum;
    }
  }

  // ---- Tiles, by one warp ----

  __device__ __forceinline__ void process() {
    int index = 0;
    std::uint32_t parity = 0;
    for (int tile = tile_begin + warp; tile < tile_end; tile += launch.warps) {
      const Position at = position(tile);
      unsigned char* from = stage(index);
      if (committed) {
        committed_tile(at, from, index, parity);
      } else {
        ptx::mbarrier_wait(barrier(index), parity);
        append_x(at, stage_x(from));
        if (flush) fold_tile(at, from, true);
        const int count = own;
        int t = 0;
        for (; t + 4 <= count; t += 4) output_tokens<4>(at, from, t);
        for (; t < count; ++t) output_tokens<1>(at, from, t);
        if (flush) ptx::fence_proxy_async();
      }
      __syncwarp();
      load_tile(tile + launch.stages * launch.warps, index);
      if (++index == launch.stages) {
        index = 0;
        parity ^= 1;
      }
    }
  }

  __device__ __forceinline__ void append_x(const Position& at, const Act* x) {
    for (int i = lane; i < own * kXChunks; i += kWarpLanes) {
      const int entry = live + i / kXChunks;
      const int offset = (i % kXChunks) * kActPerChunk;
      *reinterpret_cast<uint4*>(ring_x(at, entry) + offset) =
          *reinterpret_cast<const uint4*>(x + entry * kTileRows + offset);
    }
  }

  struct Tile {
    float s[kSlots][kColumns];
  };

  __device__ __forceinline__ int tile_offset(int s, int v) const {
    return (team * kSlots + s) * kStateSize + v * kVector * kTeamLanes + column;
  }

  __device__ __forceinline__ void read_tile(const State* from, bool is_zero, Tile& tile) const {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (is_zero) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) tile.s[s][v * kVector + i] = 0.0f;
        } else {
          const auto packed = load_packed<State, kVector>(from + tile_offset(s, v));
#pragma unroll
          for (int i = 0; i < kVector; ++i) tile.s[s][v * kVector + i] = packed[i];
        }
      }
    }
  }

  /// Encodes the tile to global memory, past the caches, and/or back to its stage.
  template <bool kToGlobal, bool kToStage>
  __device__ __forceinline__ void write_tile(const Tile& tile, State* global, State* staged) const {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        Packed<State, kVector> packed;
#pragma unroll
        for (int i = 0; i < kVector / 2; ++i) {
          packed.set(i, tile.s[s][v * kVector + 2 * i], tile.s[s][v * kVector + 2 * i + 1]);
        }
        const uint4 bits = {packed.word[0], packed.word[1], packed.word[2], packed.word[3]};
        if constexpr (kToGlobal) __stcs(reinterpret_cast<uint4*>(global + tile_offset(s, v)), bits);
        if constexpr (kToStage) *reinterpret_cast<uint4*>(staged + tile_offset(s, v)) = bits;
      }
    }
  }

  /// s = fma(s, decay, u * b): the one place where a state advances.
  static __device__ __forceinline__ void advance(Tile& tile, int s, float decay, float u,
                                                 const float (&b)[kColumns]) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      tile.s[s][i] = __fmaf_rn(tile.s[s][i], decay, __fmul_rn(u, b[i]));
    }
  }

  template <typename Pointer>
  __device__ __forceinline__ void read_columns(Pointer from, float (&out)[kColumns]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const auto packed = load_packed<Act, kVector>(from + v * kVector * kTeamLanes + column);
#pragma unroll
      for (int i = 0; i < kVector; ++i) out[v * kVector + i] = packed[i];
    }
  }

  /// Folds the live records into the staged tile.
  __device__ __forceinline__ void fold_tile(const Position& at, unsigned char* from,
                                            bool to_global) {
    Tile tile;
    read_tile(stage_state(from), zero, tile);
    const Table head = table(at.local_head);
    const Act* x = stage_x(from) + team * kSlots;
    const Act* b = shared_b();
#pragma unroll 1
    for (int entry = 0; entry < live; ++entry) {
      const float dt = head.dt[entry];
      const float decay = head.decay[entry];
      float bv[kColumns];
      read_columns(b + entry * kStateSize, bv);
      const auto xv = load_packed<Act, kSlots>(x + entry * kTileRows);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) advance(tile, s, decay, __fmul_rn(dt, xv[s]), bv);
    }
    __syncwarp();
    if (to_global) {
      write_tile<true, true>(tile, state(at), stage_state(from));
    } else {
      write_tile<false, true>(tile, nullptr, stage_state(from));
    }
    __syncwarp();
  }

  /// Sums each slot over its team; the lane's result is that of state row lane / kRowLanes. A step
  /// halves the slots a lane holds, so that kSlots sums take kSlots + log2(kRowLanes) - 1
  /// exchanges.
  __device__ __forceinline__ float reduce(float (&sum)[kSlots]) const {
    exchange<kSlots / 2, kTeamLanes / 2>(sum);
    float total = sum[0];
#pragma unroll
    for (int rest = kRowLanes / 2; rest > 0; rest /= 2) {
      total += __shfl_xor_sync(kAllLanes, total, rest);
    }
    return total;
  }

  template <int kHalf, int kMask>
  __device__ __forceinline__ void exchange(float (&sum)[kSlots]) const {
    if constexpr (kHalf > 0) {
      const bool upper = (lane & kMask) != 0;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float send = upper ? sum[i] : sum[i + kHalf];
        const float keep = upper ? sum[i + kHalf] : sum[i];
        sum[i] = keep + __shfl_xor_sync(kAllLanes, send, kMask);
      }
      exchange<kHalf / 2, kMask / 2>(sum);
    }
  }

  /// Outputs of kTokens own tokens from `t0` on, from the staged tile and the window.
  template <int kTokens>
  __device__ __forceinline__ void output_tokens(const Position& at, unsigned char* from, int t0) {
    const Table head = table(at.local_head);
    float sum[kTokens][kSlots];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) sum[t][s] = 0.0f;
    }
    if (!zero || flush) {
      float c[kTokens][kColumns];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) read_columns(shared_c() + (t0 + t) * kStateSize, c[t]);
      const State* tile = stage_state(from);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const auto packed = load_packed<State, kVector>(tile + tile_offset(s, v));
#pragma unroll
          for (int t = 0; t < kTokens; ++t) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
              sum[t][s] = fmaf(packed[i], c[t][v * kVector + i], sum[t][s]);
            }
          }
        }
      }
      float scale = flush ? 1.0f : head.suffix[places];
      for (int t = 0; t < t0; ++t) scale *= head.decay[live + t];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        scale *= head.decay[live + t0 + t];
#pragma unroll
        for (int s = 0; s < kSlots; ++s) sum[t][s] *= scale;
      }
    }

    // The window: every lane of a team takes one entry and adds its term to all rows of the team,
    // so that the exchange that sums the products sums these terms too.
    const float d = p.d == nullptr ? 0.0f : p.d[at.head];
    const int last = live + t0 + kTokens - 1;
#pragma unroll 1
    for (int first = flush ? live : 0; first <= last; first += kTeamLanes) {
      const int entry = first + lane % kTeamLanes;
      if (entry <= last) {
        const auto x = load_packed<Act, kSlots>(stage_x(from) + entry * kTileRows + team * kSlots);
        const float dt = head.dt[entry];
        float weight = entry < live ? head.suffix[entry] : 1.0f;
        for (int t = 0; t < t0; ++t) {
          if (entry < live + t) weight *= head.decay[live + t];
        }
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          const int newest = live + t0 + t;
          if (entry < newest) weight *= head.decay[newest];
          if (entry <= newest) {
            float factor = weight * dt * shared_bc()[(t0 + t) * places + entry];
            if (entry == newest) factor += d;
#pragma unroll
            for (int s = 0; s < kSlots; ++s) sum[t][s] = fmaf(factor, x[s], sum[t][s]);
          }
        }
      }
    }
    __syncwarp();

    finish_tokens<0>(at, t0, sum);
  }

  template <int kFirst, int kTokens>
  __device__ __forceinline__ void finish_tokens(const Position& at, int t0,
                                                float (&sum)[kTokens][kSlots]) {
    if constexpr (kFirst < kTokens) {
      float y = reduce(sum[kFirst]);
      if (lane % kRowLanes == 0) {
        const int t = t0 + kFirst;
        if (p.z != nullptr) y *= silu(widen(gate(t, at)[lane / kRowLanes]));
        output(t, at)[lane / kRowLanes] = narrow<Act>(y);
      }
      finish_tokens<kFirst + 1>(at, t0, sum);
    }
  }

  // ---- Committed rows ----

  /// A token's operands as loaded, so that the next token's are on their way during this one's use.
  struct TokenOperands {
    Packed<Act, kVector> b[kVectors];
    Packed<Act, kVector> c[kVectors];
    Act x;  // of state row `lane`
    Act z;  // of state row lane / kRowLanes
  };

  __device__ __forceinline__ void load_operands(std::int64_t t, const Position& at,
                                                TokenOperands& out) const {
    const Act* b = token_b(t) + column;
    const Act* c = token_c(t) + column;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      out.b[v] = load_packed<Act, kVector>(b + v * kVector * kTeamLanes);
      out.c[v] = load_packed<Act, kVector>(c + v * kVector * kTeamLanes);
    }
    out.x = token_x(t, at)[lane % kTileRows];
    out.z = p.z == nullptr ? narrow<Act>(0.0f) : gate(t, at)[lane / kRowLanes];
  }

  __device__ __forceinline__ void committed_tile(const Position& at, unsigned char* from, int index,
                                                 std::uint32_t parity) {
    const float a = p.a[at.head];
    const float d = p.d == nullptr ? 0.0f : p.d[at.head];
    TokenOperands next;
    if (token_count > 0) load_operands(0, at, next);
    float lane_dt = lane < token_count ? time_step(lane, at.head) : 0.0f;
    ptx::mbarrier_wait(barrier(index), parity);
    if (live > 0) {
      fold_tile(at, from, token_count == 0);
      ptx::fence_proxy_async();
    }
    if (token_count == 0) return;
    Tile tile;
    read_tile(stage_state(from), zero && live == 0, tile);
    for (std::int64_t t0 = 0; t0 < token_count; t0 += kWarpLanes) {
      if (t0 > 0) lane_dt = t0 + lane < token_count ? time_step(t0 + lane, at.head) : 0.0f;
      const float lane_decay = mamba2_decay(a, lane_dt);
      const int count = static_cast<int>(min(token_count - t0, std::int64_t{kWarpLanes}));
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        const TokenOperands now = next;
        if (t0 + t + 1 < token_count) load_operands(t0 + t + 1, at, next);
        const float dt = __shfl_sync(kAllLanes, lane_dt, t);
        const float decay = __shfl_sync(kAllLanes, lane_decay, t);
        const float u = __fmul_rn(dt, widen(now.x));
        float b[kColumns];
        float c[kColumns];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            b[v * kVector + i] = now.b[v][i];
            c[v * kVector + i] = now.c[v][i];
          }
        }
        float sum[kSlots];
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          advance(tile, s, decay, __shfl_sync(kAllLanes, u, team * kSlots + s), b);
          sum[s] = 0.0f;
#pragma unroll
          for (int i = 0; i < kColumns; ++i) sum[s] = fmaf(tile.s[s][i], c[i], sum[s]);
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
    write_tile<true, false>(tile, state(at), nullptr);
  }

  const Mamba2CudaParams& p;
  const Mamba2Launch& launch;
  unsigned char* shared;
  int lane, warp, team, column, places;
  std::int64_t row;
  std::int64_t group;
  int group_head, first_head, tile_begin, tile_end;

  std::int64_t token_begin, token_count, slot;
  int live;         // records to replay or fold
  int first_place;  // of the oldest
  int own;          // tokens a tentative row appends; 0 for a committed row
  bool committed, flush;
  bool zero;  // the checkpoint is zero by definition and never loaded
};

template <typename State, typename Act, int kStateSize, int kTileRows>
__global__ void __launch_bounds__(kMamba2MaxWarps* kWarpLanes, 3)
    mamba2_step_kernel(const __grid_constant__ Mamba2CudaParams params,
                       const __grid_constant__ Mamba2Launch launch) {
  extern __shared__ __align__(128) unsigned char shared[];
  Mamba2StepKernel<State, Act, kStateSize, kTileRows>::run(params, launch, shared);
}

using Mamba2KernelFunction = void (*)(Mamba2CudaParams, Mamba2Launch);

/// The kernel of a type pair for a state size and tile, or null. Defined in instantiations/.
template <typename State, typename Act>
Mamba2KernelFunction mamba2_step_function(int state_size, int tile_rows);

#define RSSM_INSTANTIATE_MAMBA2(State, Act)                                              \
  template <>                                                                            \
  Mamba2KernelFunction mamba2_step_function<State, Act>(int state_size, int tile_rows) { \
    switch (state_size * 100 + tile_rows) {                                              \
      case 64 * 100 + 16:                                                                \
        return mamba2_step_kernel<State, Act, 64, 16>;                                   \
      case 128 * 100 + 8:                                                                \
        return mamba2_step_kernel<State, Act, 128, 8>;                                   \
      case 128 * 100 + 16:                                                               \
        return mamba2_step_kernel<State, Act, 128, 16>;                                  \
      case 256 * 100 + 8:                                                                \
        return mamba2_step_kernel<State, Act, 256, 8>;                                   \
      default:                                                                           \
        return nullptr;                                                                  \
    }                                                                                    \
  }

}  // namespace replayssm::cuda
