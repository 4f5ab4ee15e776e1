// The delta rule's step on the GPU, both families: rows of every kind in one launch.
//
// A warp asks for its first tiles and, while they are on their way, its block prepares what its
// warps share (preparation.cuh, weights.cuh); then every warp goes through its run of tiles alone
// (config.h). With the entries e of the window (live records, then the row's own tokens), w(e, t)
// the product of the decays after e up to token t, and rows v of the state:
//
//   h_k[v, t] = w(-1, t) (S k_t)[v] + sum_e w(e, t) (k_e . k_t) d_e[v]      e before t
//   h_q[v, t] = the same with q_t, and e = t too
//   d_t[v]    = beta_t (v_t[v] - h_k[v, t]),   o_t[v] = h_q[v, t]
//
// S k, S q and the sums over records are products on the tensor cores (products.cuh), but S k and
// S q of a single token and an fp32 state, which are not worth splitting the state for
// (recurrence.cuh); the sums over own tokens are solved from one to the next between the four lanes
// that share rows. Where every channel has its own decay, decays multiply channels of k and q
// instead of scores.
//
// With one decay per head an fp32 checkpoint holds R, S = c R (ops/deferred_decay.h): products are
// with R, and w(-1, t) takes c along.
//
// A row that flushes, and a committed row, run the recurrence on tiles in registers
// (recurrence.cuh). What must not contribute is not loaded, or replaced by selection: unused places
// may hold NaN.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/encode_copy.cuh"
#include "cuda/language.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/read_copy.cuh"
#include "cuda/step_launch.cuh"
#include "ops/delta_rule/cuda/direct.cuh"
#include "ops/delta_rule/cuda/kernels.h"
#include "ops/delta_rule/cuda/preparation.cuh"
#include "ops/delta_rule/cuda/products.cuh"
#include "ops/delta_rule/cuda/recurrence.cuh"
#include "ops/delta_rule/cuda/weights.cuh"

namespace replayssm::cuda {

template <typename State, typename Act, bool kChannelDecay, DeltaRuleVariant kVariant,
          ReadCopyFormat kCopy>
class DeltaRuleStepKernel
    : private DeltaRuleWeights<State, Act, kChannelDecay, kVariant>,
      private DeltaRuleRecurrence<State, delta_rule_key_dim(kVariant),
                                  kVariant == DeltaRuleVariant::kAny, kChannelDecay>,
      private DeltaRuleProducts<State, Act, std::conditional_t<kChannelDecay, float, Act>,
                                delta_rule_key_dim(kVariant), kVariant == DeltaRuleVariant::kAny,
                                delta_rule_column_blocks(kVariant)> {
  using Weights = DeltaRuleWeights<State, Act, kChannelDecay, kVariant>;
  using Weights::finish_weights, Weights::own_weights, Weights::share_weights;
  using Weights::state_weights, Weights::weights;

  using Preparation = DeltaRulePreparation<State, Act, kChannelDecay, kVariant>;
  using Preparation::act_pitch, Preparation::append_key_scales, Preparation::append_keys;
  using Preparation::betas, Preparation::decays;
  using Preparation::folded_records, Preparation::init_records_barrier, Preparation::kActPerChunk;
  using Preparation::kBlocks, Preparation::key_dim, Preparation::kKeyDim, Preparation::kMasked;
  using Preparation::kDefers, Preparation::kMaxTokens, Preparation::load_deferred;
  using Preparation::load_own_channel, Preparation::load_records, Preparation::store_deferred;
  using Preparation::load_token_gates, Preparation::load_tokens, Preparation::prepare_channels;
  using Preparation::prepare_fold, Preparation::prepare_token_gates, Preparation::raw_token;
  using Preparation::scale_tokens, Preparation::shared, Preparation::token_channel_decay;
  using Preparation::token_row;
  using Preparation::vector, Preparation::vector_pitch, Preparation::wait_for_records;
  using typename Preparation::GateParameters, typename Preparation::TokenGates;

  using Row = DeltaRuleRow<State, Act>;
  using Row::first_row, Row::folds_values, Row::head, Row::is_first_of_key, Row::isolate;
  using Row::kind, Row::lane, Row::launch, Row::live, Row::output, Row::own, Row::p, Row::read_row;
  using Row::ring_delta, Row::ring_v, Row::slot, Row::state;
  using Row::tile_count, Row::token_count, Row::token_v, Row::value_offset, Row::warp, Row::zero;
  using Row::zero_outputs;

  using Recurrence = DeltaRuleRecurrence<State, kKeyDim, kMasked, kChannelDecay>;
  using Recurrence::advance, Recurrence::fold, Recurrence::kColumns, Recurrence::kPassRows;
  using Recurrence::kRowLanes, Recurrence::left_deferred, Recurrence::load_vector;
  using Recurrence::multiply, Recurrence::take_decay;
  using Recurrence::read_tile, Recurrence::result_row, Recurrence::round_tile;
  using typename Recurrence::Tile;

  // Where every channel has its own decay, columns are multiplied by them, in fp32.
  using Column = std::conditional_t<kChannelDecay, float, Act>;
  using Products = DeltaRuleProducts<State, Act, Column, kKeyDim, kMasked, kBlocks>;
  using Products::clear, Products::column_part, Products::g, Products::kSegments;
  using Products::multiply_first_records, Products::multiply_state, Products::multiply_window;
  using Products::q, Products::weight_terms;
  using typename Products::ColumnPart;
  using typename Products::Sums;
  using typename Products::WeightTerms;

  static constexpr bool kHasCopy = kCopy != ReadCopyFormat::kNone;
  using Copy = ReadCopyTiles<kCopy>;

  static constexpr int kRecordChunks = kDeltaRuleTileRows / kActPerChunk;  // of 16 bytes
  // Whether the stage of a replaying row may hold several tiles.
  static constexpr bool kFillsSeveral = kHasCopy || (sizeof(State) == 2 && !kChannelDecay);
  // Whether a tile's tokens are solved beside the products of the next: there is no branch in
  // either, then. Without a second tile in the stage solving lasts while the stage is filled.
  static constexpr bool kOverlaps = kFillsSeveral && sizeof(Act) == 2 && kBlocks == 1;

  // One token on an fp32 state is multiplied without tensor cores.
  static constexpr bool kScalar =
      kVariant == DeltaRuleVariant::kSingle && sizeof(State) == 4 && !kHasCopy;
  // Whether there are launches that prefetch (config.cc).
  static constexpr bool kMayPrefetch =
      sizeof(State) == 4 && !kHasCopy && !kChannelDecay && kBlocks == 1;
  // Whether what the block prepares is asked for before the tiles, for which a warp waits later.
  // Blocks with decays of channels have more to prepare than to wait for.
  static constexpr bool kLoadsFirst = !kChannelDecay;
  // Whether rows that flush are prepared by the code of those that do not: with decays of channels
  // it is long, and executed once by a block. With one decay per head it is shorter, and what
  // flushes need of it costs the others registers.
  static constexpr bool kSharesPreparation = kChannelDecay;
  /// Whether a function's tentative rows flush.
  enum class Flushes { kNone, kAll, kSome };
  // What all tiles of a run are multiplied with stays in registers where it fits.
  static constexpr bool kKeepColumns =
      kBlocks == 1 && (!kChannelDecay || sizeof(State) == 2 || kHasCopy);

 public:
  static __device__ __forceinline__ void run(const DeltaRuleCudaParams& p,
                                             const DeltaRuleLaunch& launch, unsigned char* shared) {
    DeltaRuleStepKernel kernel(p, launch, shared);
    kernel.read_row(p.rows + blockIdx.z);
    if (kernel.kind == PlannedRow::kPadding) {
      kernel.zero_outputs();
      return;
    }
    if (kernel.has_nothing_to_do()) return;
    TokenGates gates{};
    if constexpr (kLoadsFirst) {
      kernel.init_barriers();
      kernel.load_prepared();
      gates = kernel.load_token_gates(0, kernel.first_tokens());
      kernel.isolate();  // addresses of these loads are not worth their registers
      kernel.store_run();
      __syncwarp();
    } else {
      kernel.store_run();
      kernel.init_barriers();
    }
    kernel.fill(0);
    if (kSharesPreparation && kernel.kind != PlannedRow::kCommitted) {
      kernel.template tentative<Flushes::kSome>(gates);
    } else if (kernel.kind == PlannedRow::kReplay) {
      kernel.template tentative<Flushes::kNone>(gates);
    } else {
      kernel.isolate();
      if (kernel.kind == PlannedRow::kCommitted) {
        kernel.committed(gates);
      } else {
        kernel.template tentative<Flushes::kAll>(gates);
      }
    }
  }

 private:
  __device__ __forceinline__ DeltaRuleStepKernel(const DeltaRuleCudaParams& params,
                                                 const DeltaRuleLaunch& shape,
                                                 unsigned char* shared_memory)
      : Weights(params, shape, shared_memory),
        Recurrence(Row::lane, kMasked ? static_cast<int>(params.shape.key_dim) : kKeyDim),
        Products(Row::lane, shape.tf32_mask) {}

  // ---- The run, as it lies in shared memory; volatile, so that it stays there ----

  __device__ __forceinline__ volatile DeltaRuleRun& stored_run() const {
    return *reinterpret_cast<DeltaRuleRun*>(shared + launch.shared.run +
                                            warp * launch.shared.run_pitch);
  }
  /// For the warp's lanes, after a barrier of theirs.
  __device__ __forceinline__ void store_run() const {
    if (lane != 0) return;
    volatile DeltaRuleRun& run = stored_run();
    run.state = state();
    run.v = token_v(0);
    run.output = output(0);
    run.ring_delta = ring_delta();
    run.ring_v = ring_v();
    run.tiles = tile_count;
  }
  __device__ __forceinline__ State* run_state() const {
    return static_cast<State*>(stored_run().state);
  }
  __device__ __forceinline__ Act* run_ring_delta() const {
    return static_cast<Act*>(stored_run().ring_delta);
  }
  __device__ __forceinline__ Act* run_ring_v() const {
    return static_cast<Act*>(stored_run().ring_v);
  }
  /// Its tiles: beside decays of channels there is no register for them.
  __device__ __forceinline__ int run_length() const {
    return kChannelDecay ? stored_run().tiles : tile_count;
  }

  // ---- Stages ----

  __device__ __forceinline__ unsigned char* stage() const {
    return shared + warp * launch.shared.stage_bytes;
  }
  __device__ __forceinline__ State* staged_state() const {
    return reinterpret_cast<State*>(stage());
  }
  /// (live records, rows of the fill): deltas of the records, or their v if the recurrence is
  /// re-run.
  __device__ __forceinline__ Act* staged_values() const {
    return reinterpret_cast<Act*>(stage() + launch.shared.values);
  }
  __device__ __forceinline__ std::uint64_t* barrier() const {
    return reinterpret_cast<std::uint64_t*>(shared + launch.shared.barriers) + warp;
  }
  /// Replaying rows read the copy instead of the state.
  __device__ __forceinline__ bool reads_copy() const {
    return kHasCopy && kind == PlannedRow::kReplay;
  }
  /// Tiles that a stage holds.
  __device__ __forceinline__ int fill_tiles() const {
    return kFillsSeveral && kind == PlannedRow::kReplay ? launch.fill_tiles : 1;
  }

  __device__ __forceinline__ void init_barriers() const {
    if (lane == 0) {
      ptx::mbarrier_init(barrier(), kWarpLanes);
      init_records_barrier();
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
  }

  /// What a stage lacks that is not loaded: the state or copy of a row that has none yet, and a
  /// first record, which products multiply by zero.
  __device__ __forceinline__ void clear_stage(int tiles) const {
    const auto clear = [&](unsigned char* from, int bytes) {
#pragma unroll 1
      for (int i = lane * 16; i < bytes; i += kWarpLanes * 16) {
        *reinterpret_cast<uint4*>(from + i) = uint4{};
      }
    };
    if (zero) clear(stage(), launch.shared.values);
    if (live == 0) {
      clear(stage() + launch.shared.values,
            tiles * kDeltaRuleTileRows * static_cast<int>(sizeof(Act)));
    }
  }

  /// Asks for the run's tiles from `tile` on, as many as a stage holds, and their rows of the
  /// records.
  __device__ __forceinline__ void fill(int tile) const {
    if (tile >= run_length()) return;
    const int tiles = min(fill_tiles(), run_length() - tile);
    std::uint64_t* bar = barrier();
    if (kOverlaps && (zero || live == 0)) clear_stage(tiles);
    if (!zero) {
      if (reads_copy()) {
        Copy::load(copy_in_memory(tile), copy_in_stage(0), key_dim(), tiles, bar, lane);
      } else {
        const State* from = run_state() + tile * kDeltaRuleTileRows * key_dim();
        const int elements = tiles * kDeltaRuleTileRows * key_dim();
        if (ptx::kHasBulkCopy) {
          if (lane == 0) {
            const auto bytes = static_cast<std::uint32_t>(elements * sizeof(State));
            ptx::mbarrier_expect(bar, bytes);
            ptx::bulk_copy(stage(), from, bytes, bar, ptx::kEvictFirst);
            if (kMayPrefetch && launch.prefetch_bytes != 0 && tile + tiles < run_length()) {
              ptx::prefetch_bulk(from + elements, launch.prefetch_bytes);
            }
          }
        } else {
          constexpr int kPerChunk = 16 / static_cast<int>(sizeof(State));
          for (int i = lane * kPerChunk; i < elements; i += kWarpLanes * kPerChunk) {
            ptx::copy_async_16(staged_state() + i, from + i);
          }
        }
      }
    }
    // Lanes take chunks of records' rows; a fill has a power of two of them.
    const int shift = 31 - __clz(fill_tiles() * kRecordChunks);
    const int offset = (lane & ((1 << shift) - 1)) * kActPerChunk;
    if (offset < tiles * kDeltaRuleTileRows) {
      const Act* ring =
          (folds_values() ? run_ring_v() : run_ring_delta()) + tile * kDeltaRuleTileRows + offset;
      Act* to = staged_values() + offset;
      const auto copy = [&](int entry) {
        ptx::copy_async_16(to + entry * launch.shared.value_pitch, ring + value_offset(entry));
      };
      int entry = lane >> shift;
      if (entry < live) copy(entry);  // which most often is all
#pragma unroll 1
      for (entry += kWarpLanes >> shift; entry < live; entry += kWarpLanes >> shift) copy(entry);
    }
    ptx::copy_async_arrive(bar);
  }

  __device__ __forceinline__ void wait_for_fill(std::uint32_t& parity) const {
    ptx::mbarrier_wait(barrier(), parity);
    parity ^= 1;
    __syncwarp();
  }

  /// A fill is done with: its stage goes to the tiles from `tile` on.
  __device__ __forceinline__ void refill(int tile) const {
    if (tile >= run_length()) return;
    if (kind != PlannedRow::kReplay) ptx::fence_proxy_async();  // the stage has been written to
    __syncwarp();
    fill(tile);
  }

  __device__ __forceinline__ CopyTile copy_in_memory(int tile) const {
    return Copy::in_memory(p.copy, slot, head, p.shape.value_dim,
                           first_row + tile * kDeltaRuleTileRows, key_dim());
  }
  /// Tile i of a fill.
  __device__ __forceinline__ CopyTile copy_in_stage(int i) const {
    return Copy::in_stage(stage(), key_dim(), i, launch.fill_tiles);
  }
  /// Writes the read copy of a staged tile that has changed, to memory and over the tile.
  __device__ __forceinline__ CopyTile encode_copy(int tile) const {
    const CopyTile staged = Copy::in_stage(stage(), key_dim());
    CopyEncoder<kCopy, kKeyDim, State>::encode(staged_state(), key_dim(), copy_in_memory(tile),
                                               staged, lane);
    return staged;
  }

  // ---- Tentative rows ----

  /// The token of block b whose sums the lane has, if has_token(b).
  __device__ __forceinline__ int lane_token(int b) const {
    return kVariant == DeltaRuleVariant::kSingle ? 0 : 4 * b + q;
  }
  __device__ __forceinline__ bool has_token(int b) const { return 4 * b + q < own; }

  /// v of the tokens for a tile: of lane_token(b), rows g and g + 8.
  struct Values {
    Act v[kBlocks][2];
  };
  __device__ __forceinline__ Values load_values(int tile) const {
    Values values;
    const Act* from = static_cast<const Act*>(stored_run().v) + tile * kDeltaRuleTileRows + g;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int t = lane_token(b);
      if (!has_token(b) || tile >= run_length()) continue;
      values.v[b][0] = from[Row::along(t, p.v_token_stride)];
      values.v[b][1] = from[Row::along(t, p.v_token_stride) + 8];
    }
    return values;
  }

  __device__ __forceinline__ const Column* state_columns() const {
    if constexpr (kChannelDecay) {
      return vector(0);
    } else {
      return raw_token(0);
    }
  }
  __device__ __forceinline__ int column_pitch() const {
    return kChannelDecay ? vector_pitch() : act_pitch();
  }
  /// Column 8 b + g.
  __device__ __forceinline__ const Column* lane_column(int b) const {
    return state_columns() + token_row(8 * b + g) * column_pitch();
  }

  /// What the outputs of all tiles of a run have in common, as far as it stays in registers.
  struct Common {
    struct None {};
    struct Scalar {
      float k[kColumns], q[kColumns];
    };
    using Copied = typename Copy::template Columns<kKeyDim, kChannelDecay ? 2 : 1>;
    std::conditional_t<kScalar, Scalar, None> scalar;
    std::conditional_t<kKeepColumns && !kHasCopy && !kScalar, ColumnPart[kSegments], None> columns;
    std::conditional_t<kKeepColumns && kHasCopy, Copied, None> copied;
    WeightTerms window;
    float2 state;              // weights of the checkpoint for token q
    float beta;                // of token q
    float own[kMaxTokens][2];  // weights of own tokens i for k and q of token q
  };

  __device__ __forceinline__ Common load_common(int records) const {
    Common common{};
    if constexpr (kScalar) {
      load_vector(state_columns(), common.scalar.k);
      load_vector(state_columns() + column_pitch(), common.scalar.q);
    } else if constexpr (kKeepColumns && kHasCopy) {
      common.copied = copy_columns(0);
    } else if constexpr (kKeepColumns) {
#pragma unroll
      for (int s = 0; s < kSegments; ++s) {
        common.columns[s] = column_part(lane_column(0), key_dim(), s);
      }
    }
    if constexpr (kBlocks == 1) {
      if (records > 0) {
        common.window = weight_terms(weights(0), launch.shared.weight_stride, 0, 0);
      }
      const int t = min(q, own - 1);
      common.state = *reinterpret_cast<const float2*>(state_weights() + 2 * t);
      common.beta = betas()[live + t];
#pragma unroll
      for (int i = 0; i < kMaxTokens; ++i) {
        common.own[i][0] = own_weights(2 * t)[i];
        common.own[i][1] = own_weights(2 * t + 1)[i];
        if (kVariant == DeltaRuleVariant::kSingle) break;
      }
    }
    return common;
  }

  /// Tokens of the row that are prepared first.
  __device__ __forceinline__ int first_tokens() const {
    return kind == PlannedRow::kCommitted ? chunk_length(0) : own;
  }
  /// Asks for keys and queries of those, and for the records.
  __device__ __forceinline__ void load_prepared() const {
    load_tokens(0, first_tokens());
    load_records();
    ptx::copy_async_commit();
  }

  template <Flushes kFlushes>
  __device__ __forceinline__ void tentative(TokenGates gates) {
    const bool flushes =
        kFlushes == Flushes::kSome ? kind == PlannedRow::kFlush : kFlushes == Flushes::kAll;
    const int records = flushes ? 0 : live;  // that outputs see
    if constexpr (!kLoadsFirst) load_prepared();
    DeferredDecay deferred = load_deferred();
    Values values = load_values(0);
    const GateParameters own_channel = load_own_channel();
    if constexpr (!kLoadsFirst) gates = load_token_gates(0, own);
    const float rate = kChannelDecay ? own_channel.rate() : 0.0f;
    ptx::copy_async_wait_committed();
    __syncwarp();  // the raw gates of channels are the warp's own
    prepare_channels(own, rate, own_channel.bias, is_first_of_key());
    __syncthreads();
    // A few threads', beside what others prepare.
    prepare_token_gates(gates, 0, own, true);
    wait_for_records();
    if (flushes) deferred = prepare_run_fold(deferred);
    if (is_first_of_key()) append_keys();
    share_weights(records);
    __syncthreads();
    append_key_scales();
    finish_weights(records, deferred);
    // From here on warps go their own ways.
    if (flushes) {
      if constexpr (kFlushes == Flushes::kSome) isolate();
      tiles_of_flush(values);
    } else {
      tiles_of_replay(values);
    }
  }

  /// Returns what is deferred in the checkpoint after the fold, of which it keeps what the fold
  /// leaves. Before the run's first tile.
  __device__ __forceinline__ DeferredDecay prepare_run_fold(DeferredDecay deferred) const {
    deferred = prepare_fold(deferred);
    if constexpr (kChannelDecay) return {};
    if (lane == 0) stored_run().deferred = deferred.value();
    if constexpr (!kDefers) return {};
    store_deferred(0, stored_run().tiles * kDeltaRuleTileRows, deferred);
    return deferred;
  }
  /// What prepare_run_fold keeps.
  __device__ __forceinline__ DeferredDecay deferred_by_fold() const {
    return DeferredDecay(stored_run().deferred);
  }
  /// The same where it is to be multiplied in.
  __device__ __forceinline__ DeferredDecay rest_of_fold() const {
    if constexpr (kChannelDecay || kDefers) return {};
    return deferred_by_fold();
  }

  __device__ __forceinline__ void tiles_of_replay(Values values) const {
    const Common common = load_common(live);
    std::uint32_t parity = 0;
#pragma unroll 1
    for (int first = 0; first < run_length(); first += fill_tiles()) {
      const int next = min(first + fill_tiles(), run_length());
      wait_for_fill(parity);
      if constexpr (kOverlaps) {
        // A tile is solved beside the products of the next one.
        Values mine = values;
        values = load_values(first + 1);
        Sums sums;
        add_up_tile(0, copy_in_stage(0), live, !zero, common, sums);
#pragma unroll 1
        for (int tile = first + 1; tile < next; ++tile) {
          const Values next_values = values;
          values = load_values(tile + 1);
          const int i = tile - first;
          Sums next_sums;
          add_up_tile(i, copy_in_stage(i), live, !zero, common, next_sums);
          store(tile - 1, mine, solve(mine, common, sums));
          mine = next_values;
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[0][j] = next_sums[0][j];
        }
        refill(next);  // while the last one is solved
        store(next - 1, mine, solve(mine, common, sums));
      } else {
#pragma unroll 1
        for (int tile = first; tile < next; ++tile) {
          const Values mine = values;
          values = load_values(tile + 1);
          Sums sums;
          const int i = kFillsSeveral ? tile - first : 0;
          add_up_tile(i, copy_in_stage(i), live, !zero, common, sums);
          if (tile + 1 == next) refill(next);  // while its outputs are finished
          store(tile, mine, solve(mine, common, sums));
        }
      }
    }
  }

  __device__ __forceinline__ void tiles_of_flush(Values values) const {
    std::uint32_t parity = 0;
#pragma unroll 1
    for (int tile = 0; tile < run_length(); ++tile) {
      wait_for_fill(parity);
      fold_tile(tile);
      CopyTile copy{};
      if constexpr (kHasCopy) copy = encode_copy(tile);
      if (own == 0) {
        refill(tile + 1);
        continue;
      }
      const Values mine = values;
      values = load_values(tile + 1);
      // The fold needs the registers that these would stay in.
      const Common common = load_common(0);
      Sums sums;
      add_up_tile(0, copy, 0, true, common, sums);
      refill(tile + 1);
      store(tile, mine, solve(mine, common, sums));
    }
  }

  /// Columns 8 b.. for products with a copy.
  __device__ __forceinline__ auto copy_columns(int b) const {
    return Copy::template columns<kKeyDim, kChannelDecay ? 2 : 1>(lane_column(b), key_dim(), lane);
  }

  /// S k and S q of staged tile i, or of the copy.
  __device__ __forceinline__ void multiply_tile(int i, const CopyTile& copy, int blocks,
                                                const Common& common, Sums& sums) const {
    const State* tile = staged_state() + i * kDeltaRuleTileRows * key_dim();
    if constexpr (kScalar) {
      this->multiply_staged(tile, common.scalar.k, common.scalar.q, sums[0]);
    } else if constexpr (kHasCopy) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (kBlocks > 1 && b >= blocks) break;
        if constexpr (kKeepColumns) {
          Copy::template multiply<kKeyDim>(copy, key_dim(), lane, common.copied, sums[b]);
        } else {
          Copy::template multiply<kKeyDim>(copy, key_dim(), lane, copy_columns(b), sums[b]);
        }
      }
    } else if constexpr (kKeepColumns) {
      multiply_state(
          tile, key_dim(), blocks,
          [&](int, int s) -> const ColumnPart& { return common.columns[s]; }, sums);
    } else {
      multiply_state(
          tile, key_dim(), blocks,
          [&](int b, int s) { return column_part(lane_column(b), key_dim(), s); }, sums);
    }
  }

  /// Sums over the checkpoint and the records, for staged tile i, of which `copy` is the copy.
  __device__ __forceinline__ void add_up_tile(int i, const CopyTile& copy, int records,
                                              bool has_state, const Common& common,
                                              Sums& sums) const {
    const int blocks = (own + 3) / 4;
    const Act* values = staged_values() + i * kDeltaRuleTileRows;
    const int pitch = launch.shared.value_pitch;
    const int stride = launch.shared.weight_stride;
    clear(sums);
    if constexpr (kOverlaps) {
      // Records are a chain of products of their own.
      Sums of_records;
      clear(of_records);
      multiply_first_records(values, pitch, records, common.window, of_records);
      multiply_window(values, pitch, 16, records, weights(0), stride, blocks, common.window,
                      of_records);
      multiply_tile(i, copy, blocks, common, sums);
      if constexpr (!kChannelDecay) scale_sums(common, sums);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[0][j] += of_records[0][j];
    } else {
      if (has_state) {
        multiply_tile(i, copy, blocks, common, sums);
        if constexpr (!kChannelDecay) scale_sums(common, sums);
      }
      multiply_window(values, pitch, 0, records, weights(0), stride, blocks, common.window, sums);
    }
    if constexpr (kChannelDecay) scale_sums(common, sums);  // and records
  }

  __device__ __forceinline__ void scale_sums(const Common& common, Sums& sums) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float2 w = common.state;
      if constexpr (kBlocks > 1) {
        const int t = min(4 * b + q, own - 1);
        w = *reinterpret_cast<const float2*>(state_weights() + 2 * t);
      }
      sums[b][0] *= w.x;
      sums[b][1] *= w.y;
      sums[b][2] *= w.x;
      sums[b][3] *= w.y;
    }
  }

  /// A tile's deltas, of the lane's own tokens, and outputs.
  struct Solved {
    float d[kBlocks][2];
    float o[kBlocks][2];
  };
  /// Of the tokens one after the other: the lane that holds a token's sums tells the others of its
  /// rows the delta.
  __device__ __forceinline__ Solved solve(const Values& values, const Common& common,
                                          Sums& sums) const {
    Solved out;
    constexpr int kMost = kVariant == DeltaRuleVariant::kSingle ? 1 : kMaxTokens;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (!kOverlaps && i >= own) break;
      const int owner = i / 4;
      const float beta_i = kBlocks == 1 ? common.beta : betas()[live + i];
      // Meaningful in the lane of token i.
      float d0 = beta_i * (widen(values.v[owner][0]) - sums[owner][0]);
      float d1 = beta_i * (widen(values.v[owner][1]) - sums[owner][2]);
      if constexpr (kMost > 1) {
        const int from = lane - q + i % 4;
        d0 = __shfl_sync(kAllLanes, d0, from);
        d1 = __shfl_sync(kAllLanes, d1, from);
      }
      if (q == i % 4) {
        out.d[owner][0] = d0;
        out.d[owner][1] = d1;
      }
#pragma unroll
      for (int b = owner; b < kBlocks; ++b) {
        const int t = 4 * b + q;
        if (t >= i && t < own) {
          const float w = kBlocks == 1 ? common.own[i][1] : own_weights(2 * t + 1)[i];
          sums[b][1] = fmaf(w, d0, sums[b][1]);
          sums[b][3] = fmaf(w, d1, sums[b][3]);
        }
        if (kMost > 1 && t > i && t < own) {
          const float w = kBlocks == 1 ? common.own[i][0] : own_weights(2 * t)[i];
          sums[b][0] = fmaf(w, d0, sums[b][0]);
          sums[b][2] = fmaf(w, d1, sums[b][2]);
        }
      }
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      out.o[b][0] = sums[b][1];
      out.o[b][1] = sums[b][3];
    }
    return out;
  }

  __device__ __forceinline__ void store(int tile, const Values& values,
                                        const Solved& solved) const {
    const int row = tile * kDeltaRuleTileRows + g;
    Act* o = static_cast<Act*>(stored_run().output) + row;
    Act* delta = run_ring_delta() + row;
    Act* v = run_ring_v() + row;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int t = lane_token(b);
      if (!has_token(b)) break;
      Act* o_at = o + Row::along(t, p.o_token_stride);
      o_at[0] = narrow<Act>(solved.o[b][0]);
      o_at[8] = narrow<Act>(solved.o[b][1]);
      const int offset = value_offset(live + t);
      delta[offset] = narrow<Act>(solved.d[b][0]);
      delta[offset + 8] = narrow<Act>(solved.d[b][1]);
      if (p.fast_flush) continue;
      v[offset] = values.v[b][0];
      v[offset + 8] = values.v[b][1];
    }
  }

  // ---- Folds and committed rows ----

  /// Folds the live records into a tile, in memory and in its stage.
  __device__ __forceinline__ void fold_tile(int tile) const {
    State* to = run_state() + tile * kDeltaRuleTileRows * key_dim();
#pragma unroll 1
    for (int row = 0; row < kDeltaRuleTileRows; row += kPassRows) {
      State* staged = staged_state() + row * key_dim();
      Tile rows;
      read_tile(staged, zero, rows);
      fold(folded_records(staged_values() + row, launch.shared.value_pitch, rest_of_fold()), rows);
      this->template write_tile<true>(rows, to + row * key_dim(), staged);
    }
    __syncwarp();
  }

  __device__ __forceinline__ int chunk_length(int first) const {
    return min(token_count - first, kMaxTokens);
  }

  /// v of a committed row's first token for a pass.
  __device__ __forceinline__ float first_value(int tile, int pass_row) const {
    const int row = tile * kDeltaRuleTileRows + pass_row + result_row();
    return tile < tile_count && token_count > 0 ? widen(token_v(0)[row]) : 0.0f;
  }

  __device__ __forceinline__ void committed(TokenGates gates) const {
    if constexpr (!kLoadsFirst) load_prepared();
    const DeferredDecay deferred = load_deferred();
    float v = first_value(0, 0);
    const GateParameters own_channel = load_own_channel();
    if constexpr (!kLoadsFirst) gates = load_token_gates(0, chunk_length(0));
    ptx::copy_async_wait_committed();
    __syncthreads();
    prepare_token_gates(gates, 0, chunk_length(0), false);
    wait_for_records();
    prepare_run_fold(deferred);
    prepare_chunk(0, own_channel);
    __syncthreads();
    std::uint32_t parity = 0;
    // Warps stay together, because they prepare chunks of tokens together.
#pragma unroll 1
    for (int tile = 0; tile < launch.tiles; ++tile) {
      if (tile < tile_count) wait_for_fill(parity);
#pragma unroll 1
      for (int row = 0; row < kDeltaRuleTileRows; row += kPassRows) {
        const bool is_last = row + kPassRows == kDeltaRuleTileRows;
        const float ahead = first_value(is_last ? tile + 1 : tile, is_last ? 0 : row + kPassRows);
        // A row of one chunk prepares it once.
        committed_pass(tile, row, token_count > kMaxTokens && (tile > 0 || row > 0), v);
        v = ahead;
      }
      if (kHasCopy && tile < tile_count) {
        __syncwarp();
        encode_copy(tile);
      }
      refill(tile + 1);
    }
  }

  /// What the loaded tokens first.. have in common for all tiles.
  __device__ __forceinline__ void prepare_chunk(int first,
                                                const GateParameters& own_channel) const {
    const int count = chunk_length(first);
    scale_tokens(count, true);
    prepare_channels(count, own_channel.rate(), own_channel.bias, false);
  }

  /// All tokens through kPassRows rows of a tile; `again`: the first chunk has to be prepared anew;
  /// `first_v`: first_value. Warps without a tile help to prepare.
  __device__ __forceinline__ void committed_pass(int tile, int pass_row, bool again,
                                                 float first_v) const {
    Tile rows;
    const int row = tile * kDeltaRuleTileRows + pass_row + result_row();
    State* staged = staged_state() + pass_row * key_dim();
    const bool has_tile = tile < tile_count;
    DeferredDecay deferred;
    if constexpr (kDefers) deferred = deferred_by_fold();
    if (has_tile) {
      read_tile(staged, zero, rows);
      if (live > 0) {
        fold(folded_records(staged_values() + pass_row, launch.shared.value_pitch, rest_of_fold()),
             rows);
        round_tile(rows);
      }
    }
    float next_v = first_v;
#pragma unroll 1
    for (int first = 0; first < token_count; first += kMaxTokens) {
      const int count = chunk_length(first);
      if (first > 0 || again) {
        __syncthreads();  // the chunk before is done with
        load_tokens(first, count);
        const GateParameters own_channel = load_own_channel();
        prepare_token_gates(load_token_gates(first, count), first, count, false);
        ptx::copy_async_wait_all();
        __syncthreads();
        prepare_chunk(first, own_channel);
        __syncthreads();
      }
      if (!has_tile) continue;
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        const float v = next_v;
        if (first + t + 1 < token_count) next_v = widen(token_v(first + t + 1)[row]);
        float x[kColumns];
        load_vector(vector(2 * t), x);
        const DeferredAdvance by = take_decay(deferred, decays() + live + t);
        advance(rows, x, token_channel_decay(t), by, betas()[live + t], v);
        load_vector(vector(2 * t + 1), x);
        const float o = multiply(rows, x) * left_deferred(by);
        if (lane % kRowLanes == 0) output(first + t)[row] = narrow<Act>(o);
        round_tile(rows);
      }
    }
    if (has_tile) {
      this->template write_tile<kHasCopy>(
          rows, state() + (tile * kDeltaRuleTileRows + pass_row) * key_dim(), staged);
      store_deferred(tile * kDeltaRuleTileRows + pass_row, kPassRows, deferred);
    }
  }
};

template <typename State, bool kChannelDecay, DeltaRuleVariant kVariant, ReadCopyFormat kCopy>
inline constexpr DeltaRuleWarps kDeltaRuleWarps = delta_rule_warps(
    kVariant, DTypeOf<State>::value, kChannelDecay, kCopy != ReadCopyFormat::kNone);

template <typename State, typename Act, bool kChannelDecay, DeltaRuleVariant kVariant,
          ReadCopyFormat kCopy>
__global__ void __launch_bounds__(
    kDeltaRuleWarps<State, kChannelDecay, kVariant, kCopy>.of_block* kWarpLanes,
    kDeltaRuleWarps<State, kChannelDecay, kVariant, kCopy>.blocks())
    delta_rule_step_kernel(const __grid_constant__ DeltaRuleCudaParams params,
                           const __grid_constant__ DeltaRuleLaunch launch) {
  begin_step_kernel(params, launch);
  DeltaRuleStepKernel<State, Act, kChannelDecay, kVariant, kCopy>::run(params, launch,
                                                                       dynamic_shared());
}

/// The kernels that there are: fewer for fp32 activations and for copies, which are read by few.
template <typename State, typename Act, bool kChannelDecay, ReadCopyFormat kCopy>
DeltaRuleKernelFunction delta_rule_kernel_with(DeltaRuleVariant variant) {
  using enum DeltaRuleVariant;
  if (variant == kAny) return delta_rule_step_kernel<State, Act, kChannelDecay, kAny, kCopy>;
  if constexpr (sizeof(Act) == 2 && !std::is_same_v<State, F16>) {
    if (variant == kSingle) {
      return delta_rule_step_kernel<State, Act, kChannelDecay, kSingle, kCopy>;
    }
    if (variant == kSmall) return delta_rule_step_kernel<State, Act, kChannelDecay, kSmall, kCopy>;
    if constexpr (kCopy == ReadCopyFormat::kNone) {
      if (variant == kDirectSingle) {
        return delta_rule_direct_kernel<State, Act, kChannelDecay, kDirectSingle>;
      }
      if (variant == kDirect) {
        return delta_rule_direct_kernel<State, Act, kChannelDecay, kDirect>;
      }
      return delta_rule_step_kernel<State, Act, kChannelDecay, kDraft, kCopy>;
    }
  }
  return nullptr;
}

template <typename State, typename Act, bool kChannelDecay>
DeltaRuleKernelFunction delta_rule_step_function(DeltaRuleVariant variant) {
  return delta_rule_kernel_with<State, Act, kChannelDecay, ReadCopyFormat::kNone>(variant);
}

template <typename State, bool kChannelDecay>
DeltaRuleKernelFunction delta_rule_copy_step_function(ReadCopyFormat format,
                                                      DeltaRuleVariant variant) {
  switch (format) {
    case ReadCopyFormat::kNone:
      break;
    case ReadCopyFormat::kFp8E4M3:
      return delta_rule_kernel_with<State, BF16, kChannelDecay, ReadCopyFormat::kFp8E4M3>(variant);
    case ReadCopyFormat::kInt8:
      return delta_rule_kernel_with<State, BF16, kChannelDecay, ReadCopyFormat::kInt8>(variant);
    case ReadCopyFormat::kNvfp4:
      return delta_rule_kernel_with<State, BF16, kChannelDecay, ReadCopyFormat::kNvfp4>(variant);
  }
  return nullptr;
}

}  // namespace replayssm::cuda
