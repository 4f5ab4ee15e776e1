// The delta rule's step of few rows, both families, where latency is the time and not bytes or
// instructions.
//
// A warp has a pass of eight rows of one head's state (recurrence.cuh). It asks for everything at
// once, its rows straight to registers; its block, which has rows of one head, prepares keys,
// queries and gates together; then it advances its rows through the live records and the tokens in
// registers, with o_t read from the state after token t. Only a row that flushes or is committed
// writes them back. So the chain from the row to its outputs is two trips to memory, two barriers
// and the recurrence: nearly as short as plain decoding's. It takes more instructions than
// kernel.cuh, which is why steps of many rows go there, but for plain decoding of f32 states.
//
// In pools without drafts (kDirectSingle) a token goes straight to registers: what is prepared of
// it is ready when the state arrives, and rows without records have one barrier.
//
// Live records of a row that only replays are added up from their deltas, as fast flushes do; exact
// flushes and committed rows re-run the recurrence. Checkpoints are the same bits as kernel.cuh's;
// outputs of tentative rows are rounded elsewhere.
#pragma once

#include <cstdint>

#include "cuda/language.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/step_launch.cuh"
#include "ops/delta_rule/cuda/kernels.h"
#include "ops/delta_rule/cuda/preparation.cuh"
#include "ops/delta_rule/cuda/recurrence.cuh"

namespace replayssm::cuda {

template <typename State, typename Act, bool kChannelDecay, DeltaRuleVariant kVariant>
class DeltaRuleDirectKernel
    : private DeltaRulePreparation<State, Act, kChannelDecay, kVariant, kDeltaRuleDirectRows>,
      private DeltaRuleRecurrence<State, delta_rule_key_dim(kVariant), false, kChannelDecay,
                                  kDeltaRuleDirectRows / 4> {
  static constexpr bool kSingleTokens = kVariant == DeltaRuleVariant::kDirectSingle;
  static constexpr int kRows = kDeltaRuleDirectRows;

  using Preparation = DeltaRulePreparation<State, Act, kChannelDecay, kVariant, kRows>;
  using Preparation::append_key_scales, Preparation::append_keys, Preparation::betas;
  using Preparation::decays, Preparation::folded_records, Preparation::kActPerChunk;
  using Preparation::first_column, Preparation::kDefers, Preparation::kKeyDim;
  using Preparation::head_at, Preparation::kMaxTokens, Preparation::load_deferred;
  using Preparation::kPerLane, Preparation::load_own_channel, Preparation::prepare_channel;
  using Preparation::load_records, Preparation::load_token_gates, Preparation::load_tokens;
  using Preparation::prepare_channels, Preparation::prepare_fold, Preparation::prepare_token_gates;
  using Preparation::prepares_records, Preparation::store_deferred;
  using Preparation::scale_token, Preparation::scale_tokens;
  using Preparation::shared, Preparation::token_channel_decay, Preparation::vector;
  using typename Preparation::GateParameters, typename Preparation::TokenGates;
  using typename Preparation::Vector;

  using Row = DeltaRuleRow<State, Act, kRows>;
  using Row::folds_values, Row::gate_parameters, Row::head, Row::is_first_of_key, Row::kind,
      Row::lane, Row::launch, Row::live;
  using Row::output, Row::own, Row::p, Row::raw_gate, Row::read_row, Row::ring_delta;
  using Row::ring_k, Row::token_k, Row::token_q;
  using Row::ring_v, Row::state, Row::thread, Row::token_count, Row::token_v;
  using Row::value_offset, Row::warp, Row::zero, Row::zero_outputs;

  using Recurrence = DeltaRuleRecurrence<State, kKeyDim, false, kChannelDecay, kRows / 4>;
  using Recurrence::advance, Recurrence::fold, Recurrence::kColumns, Recurrence::kPassRows;
  using Recurrence::kRowLanes, Recurrence::left_deferred, Recurrence::load_tile;
  using Recurrence::load_vector, Recurrence::take_decay;
  using Recurrence::multiply, Recurrence::result_row, Recurrence::round_tile;
  using Recurrence::widen_tile;
  using typename Recurrence::PackedTile, typename Recurrence::Tile;
  static_assert(kPassRows == kRows);
  static constexpr int kRowChunks = kRows / kActPerChunk;  // of 16 bytes, of a record's values
  static_assert(kMaxTokens * kRowChunks <= kWarpLanes);

 public:
  static __device__ __forceinline__ void run(const DeltaRuleCudaParams& p,
                                             const DeltaRuleLaunch& launch, unsigned char* shared) {
    DeltaRuleDirectKernel kernel(p, launch, shared);
    kernel.read_row(p.rows + blockIdx.z);
    if (kernel.kind == PlannedRow::kPadding) {
      kernel.zero_outputs();
      return;
    }
    if (kernel.has_nothing_to_do()) return;
    kernel.step();
  }

 private:
  __device__ __forceinline__ DeltaRuleDirectKernel(const DeltaRuleCudaParams& params,
                                                   const DeltaRuleLaunch& shape,
                                                   unsigned char* shared_memory)
      : Preparation(params, shape, shared_memory), Recurrence(Row::lane, kKeyDim) {}

  /// (entries, rows of the warp): deltas of the live records, or their v if the recurrence is
  /// re-run; then v of a chunk's tokens.
  __device__ __forceinline__ Act* values(int entry) const {
    return reinterpret_cast<Act*>(shared + warp * launch.shared.stage_bytes) + entry * kRows;
  }

  /// Tokens prepared together: the record ring's drafts.
  __device__ __forceinline__ int chunk() const {
    return kSingleTokens ? 1 : static_cast<int>(p.limits.draft_capacity);
  }
  __device__ __forceinline__ int chunk_length(int first) const {
    return kSingleTokens ? 1 : min(token_count - first, chunk());
  }

  __device__ __forceinline__ void load_values() const {
    const Act* ring = folds_values() ? ring_v() : ring_delta();
    for (int i = lane; i < live * kRowChunks; i += kWarpLanes) {
      const int offset = i % kRowChunks * kActPerChunk;
      ptx::copy_async_16(values(i / kRowChunks) + offset,
                         ring + value_offset(i / kRowChunks) + offset);
    }
  }
  __device__ __forceinline__ void load_token_values(int first, int count) const {
    if (lane >= count * kRowChunks) return;
    const int offset = lane % kRowChunks * kActPerChunk;
    ptx::copy_async_16(values(live + lane / kRowChunks) + offset,
                       token_v(first + lane / kRowChunks) + offset);
  }
  /// What goes to registers of a chunk.
  struct Gates {
    TokenGates token;
    float rate, bias;  // where every channel has its own decay
  };
  __device__ __forceinline__ Gates load_chunk(int first) const {
    const int count = chunk_length(first);
    load_tokens(first, count);
    load_token_values(first, count);
    const TokenGates token = load_token_gates(first, count);
    if constexpr (!kChannelDecay) return {token, 0.0f, 0.0f};
    const GateParameters channel = load_own_channel();
    return {token, channel.rate(), channel.bias};
  }

  /// What the loaded tokens first.. have in common for all rows.
  __device__ __forceinline__ void prepare_chunk(int first, const Gates& gates) const {
    const int count = chunk_length(first);
    const bool append = own > 0 && is_first_of_key();
    scale_tokens(count, true);
    prepare_token_gates(gates.token, first, count, own > 0);
    prepare_channels(count, gates.rate, gates.bias, append);
    if (append) append_keys();
  }

  /// A chunk of one token.
  struct SingleToken {
    Packed<Act, kPerLane> vector;  // k or q, of the warps that scale one
    TokenGates gates;
    GateParameters channel;
    float gate;  // of the thread's channel
  };
  __device__ __forceinline__ SingleToken load_token(int t) const {
    SingleToken out{};
    if (t >= token_count) return out;
    if (first_column() < 2) {
      const Act* from = first_column() == 0 ? token_k(t) : token_q(t);
      out.vector = load_packed<Act, kPerLane>(from + lane * kPerLane);
    }
    if constexpr (kChannelDecay) {
      static_assert(kDeltaRuleDirectWarps * kWarpLanes == kKeyDim);
      out.gate = *raw_gate(head, t, thread);
      out.channel = gate_parameters(head, thread);
    }
    out.gates = load_token_gates(t, 1);
    load_token_values(t, 1);
    return out;
  }
  __device__ __forceinline__ void prepare_token(int t, const SingleToken& loaded) const {
    if (t >= token_count) return;
    const bool append = own > 0 && is_first_of_key();
    const int c = first_column();
    if (c < 2) {
      Vector raw;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) raw.x[i] = loaded.vector[i];
      scale_token(c, raw, true);
      if (c == 0 && append) store_packed(ring_k(live) + lane * kPerLane, loaded.vector);
    }
    prepare_token_gates(loaded.gates, t, 1, own > 0);
    if constexpr (kChannelDecay) {
      prepare_channel(0, thread, loaded.gate, loaded.channel.rate(), loaded.channel.bias, append);
    }
  }

  /// What the fold of the live records leaves deferred.
  __device__ __forceinline__ float* deferred_by_fold() const {
    return this->template at<float>(head_at() + launch.shared.deferred);
  }
  __device__ __forceinline__ void prepare_live(DeferredDecay deferred) const {
    deferred = prepare_fold(deferred);
    if (!kChannelDecay && prepares_records() && lane == 0) *deferred_by_fold() = deferred.value();
  }

  /// The rows as loaded, and what is deferred in them.
  struct Loaded {
    PackedTile tile;
    DeferredDecay deferred;
  };
  /// Everything is asked for before anything is used; then what warps share is prepared.
  __device__ __forceinline__ Loaded bring_first() const {
    Loaded loaded{};
    const auto load_state = [&] {
      loaded.deferred = load_deferred();
      if (!zero) loaded.tile = load_tile(state());
      load_values();
      load_records();
    };
    if constexpr (kSingleTokens) {
      // First what takes longest from its arrival on: gates of channels, or the state.
      SingleToken token;
      if constexpr (kChannelDecay) token = load_token(0);
      load_state();
      if constexpr (!kChannelDecay) token = load_token(0);
      prepare_token(0, token);
      ptx::copy_async_wait_all();
      if (live > 0) {
        __syncthreads();
        prepare_live(loaded.deferred);
      }
    } else {
      load_state();
      const Gates gates = load_chunk(0);
      ptx::copy_async_wait_all();
      __syncthreads();
      prepare_live(loaded.deferred);
      prepare_chunk(0, gates);
    }
    return loaded;
  }
  /// The same for a chunk behind the first one.
  __device__ __forceinline__ void bring_chunk(int first) const {
    __syncthreads();  // the chunk before is done with
    if constexpr (kSingleTokens) {
      prepare_token(first, load_token(first));
      ptx::copy_async_wait_all();
    } else {
      const Gates gates = load_chunk(first);
      ptx::copy_async_wait_all();
      __syncthreads();
      prepare_chunk(first, gates);
    }
  }

  __device__ __forceinline__ void step() const {
    const Loaded loaded = bring_first();
    __syncthreads();
    append_key_scales();
    Tile tile;
    widen_tile(loaded.tile, tile);
    DeferredDecay deferred = loaded.deferred;
    if (live > 0) fold_live(tile, deferred);
#pragma unroll 1
    for (int first = 0; first < token_count; first += chunk()) {
      if (first > 0) {
        bring_chunk(first);
        __syncthreads();
      }
      advance_tokens(first, tile, deferred);
    }
    if (kind == PlannedRow::kCommitted && token_count > 0) write_state(tile, deferred);
  }

  /// Through the live records; to memory where the checkpoint moves.
  __device__ __forceinline__ void fold_live(Tile& tile, DeferredDecay& deferred) const {
    if constexpr (!kChannelDecay) deferred = DeferredDecay(*deferred_by_fold());
    fold(folded_records(values(0), kRows, deferred), tile);
    if constexpr (!kDefers) deferred = DeferredDecay();
    if (kind == PlannedRow::kReplay) return;
    if (kind == PlannedRow::kFlush || token_count == 0) write_state(tile, deferred);
    round_tile(tile);
  }

  __device__ __forceinline__ void advance_tokens(int first, Tile& tile,
                                                 DeferredDecay& deferred) const {
    const int count = chunk_length(first);
    const int row = result_row();
    const bool writes = lane % kRowLanes == 0;
    // A token's decay is taken along while the one before it is worked on.
    DeferredAdvance next = take_decay(deferred, decays() + live);
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const DeferredAdvance by = next;
      if (t + 1 < count) next = take_decay(deferred, decays() + live + t + 1);
      float x[kColumns];
      load_vector(vector(2 * t), x);
      const Act v = values(live + t)[row];
      const float d = advance(tile, x, token_channel_decay(t), by, betas()[live + t], widen(v));
      load_vector(vector(2 * t + 1), x);
      const float o = multiply(tile, x) * left_deferred(by);
      if (writes) output(first + t)[row] = narrow<Act>(o);
      if (kind == PlannedRow::kCommitted) {
        round_tile(tile);
      } else if (writes) {
        const int to = value_offset(live + t) + row;
        ring_delta()[to] = narrow<Act>(d);
        if (!p.fast_flush) ring_v()[to] = v;
      }
    }
  }

  __device__ __forceinline__ void write_state(const Tile& tile, DeferredDecay deferred) const {
    this->template write_tile<false>(tile, state(), nullptr);
    store_deferred(0, kRows, deferred);
  }
};

template <typename State, typename Act, bool kChannelDecay, DeltaRuleVariant kVariant>
__global__ void __launch_bounds__(
    delta_rule_warps(kVariant, DTypeOf<State>::value, kChannelDecay, false).of_block* kWarpLanes,
    delta_rule_warps(kVariant, DTypeOf<State>::value, kChannelDecay, false).blocks())
    delta_rule_direct_kernel(const __grid_constant__ DeltaRuleCudaParams params,
                             const __grid_constant__ DeltaRuleLaunch launch) {
  begin_step_kernel(params, launch);
  DeltaRuleDirectKernel<State, Act, kChannelDecay, kVariant>::run(params, launch, dynamic_shared());
}

}  // namespace replayssm::cuda
