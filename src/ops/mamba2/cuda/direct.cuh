// The Mamba-2 step of few rows, where latency is the time and not bytes or instructions.
//
// A warp has a pass of rows (lanes.cuh) of one head of one row of the step. It asks for everything
// at once: its rows of the state and the first tokens straight to registers, the records to shared
// memory. Then it advances the state through the live records and the tokens in registers, with y_t
// read from the state after token t; only a row that flushes or is committed writes it back. So the
// chain from the row to its outputs is two trips to memory, a barrier and the recurrence: nearly as
// short as plain decoding's. It takes more instructions than kernel.cuh, which is why steps of many
// rows go there, but for plain decoding of f32 states. What is dear here is instructions, each
// fetched for one use: loops are not unrolled far.
//
// Checkpoints are the same bits as kernel.cuh's; outputs of tentative rows are rounded elsewhere.
#pragma once

#include <cstdint>

#include "cuda/language.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/step_launch.cuh"
#include "ops/mamba2/cuda/lanes.cuh"
#include "ops/mamba2/cuda/row.cuh"

namespace replayssm::cuda {

template <typename State, typename Act, int kStateSize>
class Mamba2DirectKernel : private Mamba2Row<State, Act, kStateSize>,
                           private Mamba2Lanes<State, Act, kStateSize> {
  using Row = Mamba2Row<State, Act, kStateSize>;
  using Row::gate, Row::kDefers, Row::kind, Row::lane, Row::launch, Row::live, Row::load_deferred;
  using Row::output, Row::own, Row::p, Row::store_deferred;
  using Row::raw_time_step, Row::ring_b, Row::ring_dt, Row::ring_x, Row::state, Row::token_b;
  using Row::token_c, Row::token_count, Row::token_x, Row::warp, Row::zero;
  using typename Row::Position;

  using Lanes = Mamba2Lanes<State, Act, kStateSize>;
  using Lanes::advance, Lanes::column, Lanes::kColumns, Lanes::kPassRows, Lanes::kRowLanes;
  using Lanes::kSlots, Lanes::kTeamLanes, Lanes::kVector, Lanes::kVectors, Lanes::load_columns;
  using Lanes::load_tile, Lanes::multiply, Lanes::reduce, Lanes::round_tile, Lanes::team,
      Lanes::widen_columns;
  using Lanes::widen_tile;
  using typename Lanes::PackedColumns, typename Lanes::PackedTile, typename Lanes::Tile;

  // Tokens of a chunk: a lane has a token and a row.
  static constexpr int kTokens = kWarpLanes / kPassRows;

 public:
  static __device__ __forceinline__ void run(const Mamba2CudaParams& p, const Mamba2Launch& launch,
                                             unsigned char* shared) {
    Mamba2DirectKernel kernel(p, launch, shared);
    kernel.read_row(p.rows + blockIdx.z);
    if (kernel.kind == PlannedRow::kPadding) {
      kernel.zero_rows();
      return;
    }
    if (kernel.has_nothing_to_do()) return;
    kernel.step();
  }

 private:
  /// A run is one pass here, and no warp is without one.
  __device__ __forceinline__ Mamba2DirectKernel(const Mamba2CudaParams& params,
                                                const Mamba2Launch& launch_shape,
                                                unsigned char* shared_memory)
      : Row(params, launch_shape), Lanes(Row::lane), shared(shared_memory) {
    const int run = block_in_group() * launch.warps + warp;
    head_in_group = static_cast<int>(__umulhi(2u * static_cast<unsigned>(run), launch.head_of_run));
    Row::group = group_of_block();
    at = {Row::group * launch.heads_per_group + head_in_group,
          (run - head_in_group * (launch.head_dim / kPassRows)) * kPassRows};
  }

  // Shared memory: B of the live records; per warp their x, and u = gain x, by rows of the pass.
  __device__ __forceinline__ Act* staged_b(int record) const {
    return reinterpret_cast<Act*>(shared) + record * kStateSize;
  }
  __device__ __forceinline__ Act* staged_x(int record) const {
    return staged_b(window()) + (warp * window() + record) * kPassRows;
  }
  __device__ __forceinline__ float* staged_u(int record) const {
    return reinterpret_cast<float*>(staged_b(window()) + launch.warps * window() * kPassRows) +
           (warp * window() + record) * kPassRows;
  }
  __device__ __forceinline__ int window() const { return static_cast<int>(p.limits.window); }

  __device__ __forceinline__ void zero_rows() const {
    for (int t = 0; t < token_count; ++t) {
      if (lane < kPassRows) output(t, at)[lane] = narrow<Act>(0.0f);
    }
  }

  /// Tokens from `first` on, as loaded: x, z and dt of token lane / kPassRows, state row
  /// lane % kPassRows.
  struct Tokens {
    PackedColumns b[kTokens], c[kTokens];
    Act x, z;
    LoadedNumber<Act> dt;
  };

  __device__ __forceinline__ Tokens load_tokens(int first) const {
    Tokens out;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (first + i >= token_count) break;
      out.b[i] = load_columns(token_b(first + i));
      out.c[i] = load_columns(token_c(first + i));
    }
    const int t = first + lane / kPassRows;
    out.x = out.z = narrow<Act>(0.0f);
    out.dt = LoadedNumber<Act>(0.0f);
    if (t < token_count) {
      out.x = token_x(t, at)[lane % kPassRows];
      if (p.z != nullptr) out.z = gate(t, at)[lane % kPassRows];
      out.dt = raw_time_step(t, at.head);
    }
    return out;
  }

  __device__ __forceinline__ void load_records() const {
    constexpr int kPerChunk = 16 / static_cast<int>(sizeof(Act));
    constexpr int kBChunks = kStateSize / kPerChunk;
    constexpr int kXChunks = kPassRows / kPerChunk;
    const int threads = launch.warps * kWarpLanes;
    for (int i = static_cast<int>(threadIdx.x); i < live * kBChunks; i += threads) {
      const int offset = i % kBChunks * kPerChunk;
      ptx::copy_async_16(staged_b(i / kBChunks) + offset, ring_b(i / kBChunks) + offset);
    }
    for (int i = lane; i < live * kXChunks; i += kWarpLanes) {
      const int offset = i % kXChunks * kPerChunk;
      ptx::copy_async_16(staged_x(i / kXChunks) + offset, ring_x(at, i / kXChunks) + offset);
    }
  }

  __device__ __forceinline__ void step() {
    // Everything is asked for before anything is used.
    PackedTile packed{};
    if (!zero) packed = load_tile(state(at));
    DeferredDecay rest = load_deferred(at);
    load_records();
    const float record_dt = lane < live ? *ring_dt(at.head, lane) : 0.0f;
    Tokens tokens = load_tokens(0);
    const float a = p.a[at.head];
    const float d = p.d == nullptr ? 0.0f : p.d[at.head];
    const float bias = p.dt_bias == nullptr ? 0.0f : p.dt_bias[at.head];
    const float record_decay = lane < live ? mamba2_decay(a, record_dt) : 1.0f;
    ptx::copy_async_wait_all();
    __syncthreads();

    Tile tile;
    widen_tile(packed, tile);
    if (live > 0) {
      if (kind == PlannedRow::kReplay) {
        replay(record_dt, record_decay, rest.value(), tile);
        rest = DeferredDecay();
      } else {
        fold(record_dt, record_decay, rest, tile);
        if constexpr (!kDefers) {
          multiply(tile, rest.value());
          rest = DeferredDecay();
        }
        if (kind == PlannedRow::kFlush || token_count == 0) write_state(tile, rest);
        round_tile(tile);
      }
    }

#pragma unroll 1
    for (int first = 0; first < token_count; first += kTokens) {
      if (first > 0) tokens = load_tokens(first);
      const float dt =
          mamba2_time_step(tokens.dt.value(p.dt_is_f32), bias, p.dt_softplus, p.dt_min, p.dt_max);
      if (own > 0) append(first, tokens, dt);
      const float x_of = widen(tokens.x);
      const DeferredAdvance advance_of = prepare_tokens(first, dt, mamba2_decay(a, dt), rest);
      const float u_of = __fmul_rn(advance_of.gain, x_of);
      const float z_of = widen(tokens.z);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        if (first + i >= token_count) break;
        const float factor = __shfl_sync(kAllLanes, advance_of.factor, i * kPassRows);
        float scale = 1.0f;
        if (kind == PlannedRow::kCommitted) {
          scale = __shfl_sync(kAllLanes, advance_of.rest, i * kPassRows);
        }
        float b[kColumns], c[kColumns];
        widen_columns(tokens.b[i], b);
        widen_columns(tokens.c[i], c);
        float sum[kSlots];
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          const int from = i * kPassRows + team * kSlots + s;
          multiply(tile, s, factor);
          advance(tile, s, __shfl_sync(kAllLanes, u_of, from), b);
          if (!kDefers && kind == PlannedRow::kCommitted) multiply(tile, s, scale);
          sum[s] = 0.0f;
#pragma unroll
          for (int n = 0; n < kColumns; ++n) sum[s] = fmaf(tile.s[s][n], c[n], sum[s]);
        }
        if (kind == PlannedRow::kCommitted) round_tile(tile);
        float y = reduce(sum);
        if (kDefers) y *= scale;
        const int row = lane / kRowLanes;
        y = fmaf(d, __shfl_sync(kAllLanes, x_of, i * kPassRows + row), y);
        const float z = __shfl_sync(kAllLanes, z_of, i * kPassRows + row);
        if (lane % kRowLanes == 0) {
          if (p.z != nullptr) y *= silu(z);
          output(first + i, at)[row] = narrow<Act>(y);
        }
      }
    }
    if (kind == PlannedRow::kCommitted && token_count > 0) write_state(tile, rest);
  }

  /// u of the records for the rows of the pass: `factor` of record `lane` times x.
  __device__ __forceinline__ void prepare_records(float factor) const {
#pragma unroll 1
    for (int first = 0; first < live; first += kTokens) {
      const int entry = first + lane / kPassRows;
      const float u = __fmul_rn(__shfl_sync(kAllLanes, factor, entry),
                                widen(staged_x(min(entry, live - 1))[lane % kPassRows]));
      if (entry < live) staged_u(entry)[lane % kPassRows] = u;
    }
    __syncwarp();
  }
  __device__ __forceinline__ void add_record(int record, Tile& tile) const {
    const auto u = load_packed<float, kSlots>(staged_u(record) + team * kSlots);
    float b[kColumns];
    widen_columns(load_columns(staged_b(record)), b);
#pragma unroll
    for (int s = 0; s < kSlots; ++s) advance(tile, s, u[s], b);
  }

  /// Of token first + lane / kPassRows. Rows that store no state multiply decays in at once, which
  /// needs no division and gives the same but for rounding; what was deferred goes first.
  __device__ __forceinline__ DeferredAdvance prepare_tokens(int first, float dt, float decay,
                                                            DeferredDecay& rest) const {
    const int token = lane / kPassRows;
    if (kind != PlannedRow::kCommitted) {
      const float before = token == 0 ? rest.value() : 1.0f;
      rest = DeferredDecay();
      return {before * decay, dt, 1.0f};
    }
    DeferredDecay mine;
    float factor = 1.0f;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (first + i >= token_count) break;
      if (!kDefers) rest = DeferredDecay();
      const float before_token = rest.take(__shfl_sync(kAllLanes, decay, i * kPassRows));
      factor = token == i ? before_token : factor;
      mine = token == i ? rest : mine;
    }
    return {factor, mine.gain(dt), mine.value()};
  }

  /// Through the live records one after the other, as the plain kernel goes.
  __device__ __forceinline__ void fold(float record_dt, float record_decay, DeferredDecay& rest,
                                       Tile& tile) const {
    DeferredDecay mine;  // after record `lane`
    float factor = 1.0f;
#pragma unroll 4
    for (int i = 0; i < live; ++i) {
      const float before_record = rest.take(__shfl_sync(kAllLanes, record_decay, i));
      factor = lane == i ? before_record : factor;
      mine = lane == i ? rest : mine;
    }
    // A vote, so that the compiler knows that the warp stays together.
    const bool rescales = __any_sync(kAllLanes, factor != 1.0f) != 0;
    prepare_records(mine.gain(record_dt));
#pragma unroll 1
    for (int i = 0; i < live; ++i) {
      if (rescales) multiply(tile, __shfl_sync(kAllLanes, factor, i));
      add_record(i, tile);
    }
  }

  /// The same state without folding it, rounded elsewhere: decays are multiplied ahead.
  __device__ __forceinline__ void replay(float record_dt, float record_decay, float rest,
                                         Tile& tile) const {
    float all = 1.0f;
    const float later = product_of_later(record_decay, lane, all);
    prepare_records(later * record_dt);
    multiply(tile, all * rest);
#pragma unroll 2
    for (int i = 0; i < live; ++i) add_record(i, tile);
  }

  __device__ __forceinline__ void write_state(const Tile& tile, const DeferredDecay& rest) const {
    this->template write_tile<true, false>(tile, state(at), nullptr);
    store_deferred(at, kPassRows, rest);
  }

  /// Records of a tentative row's tokens; what a head or a group records once, its first warp does.
  __device__ __forceinline__ void append(int first, const Tokens& tokens, float dt) const {
    const int t = first + lane / kPassRows;
    if (t < own) {
      ring_x(at, live + t)[lane % kPassRows] = tokens.x;
      if (at.p0 == 0 && lane % kPassRows == 0) *ring_dt(at.head, live + t) = dt;
    }
    if (at.p0 != 0 || head_in_group != 0 || team != 0) return;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (first + i >= own) break;
      Act* to = ring_b(live + first + i) + column;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        store_packed(to + v * kVector * kTeamLanes, tokens.b[i].vector[v]);
      }
    }
  }

  unsigned char* shared;
  int head_in_group;
  Position at;
};

template <typename State, typename Act, int kStateSize>
__global__ void __launch_bounds__(kMamba2MaxWarps* kWarpLanes,
                                  mamba2_resident_blocks(Mamba2Variant::kDirect))
    mamba2_direct_kernel(const __grid_constant__ Mamba2CudaParams params,
                         const __grid_constant__ Mamba2Launch launch) {
  begin_step_kernel(params, launch);
  Mamba2DirectKernel<State, Act, kStateSize>::run(params, launch, dynamic_shared());
}

}  // namespace replayssm::cuda
