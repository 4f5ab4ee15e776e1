// The Mamba-2 step on the GPU: rows of every kind in one launch.
//
// The unit of work is a tile: 16 rows of one head's state. A warp takes a run of consecutive tiles
// of one group of one row, alone: it asks for B and C and for its first tiles, computes what the
// run shares (the products B . C of the window) and what a head shares (time steps, decays, the
// window's weights), and then waits for a tile, uses it and asks for the one `stages` further on.
// Blocks exist only to be scheduled; warps never wait for each other.
//
// Outputs of tentative rows are products on the tensor cores (cuda/ptx/mma.cuh):
//   y[p, t] = scale_t  sum_n S[p, n] C[t, n]  +  sum_e x[e, p] W[e, t]
//   W[e, t] = (product of the decays after e, up to t) dt_e (B_e . C_t) + [e is t] D
// over the entries e of the window: live records, then the row's own tokens. bf16 operands are
// multiplied as they are; an fp32 operand is split into terms that together carry its digits.
//
// Rules that make results repeatable:
//  * An element of the state is advanced by fma(u, B, R), u = gain * x, in token order, wherever
//    that happens (ops/deferred_decay.h); time steps and decays come from cuda/gates.cuh. So
//    a flush is bit-equal to plain decoding, and a row of n tokens to n rows of one.
//  * Which lane holds what depends on the types and the state size only, never on the launch shape.
//  * What must not contribute is not loaded, or masked bit by bit: unused places may hold NaN.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/encode_copy.cuh"
#include "cuda/language.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/step_launch.cuh"
#include "ops/mamba2/cuda/direct.cuh"
#include "ops/mamba2/cuda/kernels.h"
#include "ops/mamba2/cuda/lanes.cuh"
#include "ops/mamba2/cuda/window.cuh"

namespace replayssm::cuda {

/// kTokenBlocks: blocks of eight tokens a tentative row may have; 0: one token, multiplied without
/// tensor cores (splitting an fp32 state costs more than the products). kWindowSteps: blocks of
/// sixteen window entries (places of the ring).
template <typename State, typename Act, int kStateSize, int kTokenBlocks, int kWindowSteps,
          ReadCopyFormat kCopy>
class Mamba2StepKernel
    : private Mamba2Window<State, Act, kStateSize, kTokenBlocks, kWindowSteps, kCopy>,
      private Mamba2Lanes<State, Act, kStateSize> {
  using Base = Mamba2Window<State, Act, kStateSize, kTokenBlocks, kWindowSteps, kCopy>;
  using Base::c, Base::c_float, Base::copy_columns, Base::fill_table, Base::g;
  using Base::copy_in_memory, Base::time_step, Base::token_b, Base::token_c;
  using Base::first_stage, Base::first_tile, Base::gate, Base::kind, Base::lane, Base::launch;
  using Base::kActPerChunk, Base::kBChunks, Base::kBlocks, Base::kF16Products, Base::kHasCopy;
  using Base::kDefers, Base::load_deferred, Base::load_head, Base::store_deferred;
  using Base::kOneEntries, Base::kOneLanes, Base::kOnePlain, Base::kOneToken, Base::kOneVectors;
  using Base::kOwn, Base::kPackedProducts, Base::kSegments, Base::kWeightTerms, Base::kWideAct;
  using Base::kPairsHeads;
  using Base::kWideState, Base::kXChunks;
  using Base::live, Base::output, Base::own, Base::p, Base::places, Base::ring_b, Base::ring_x;
  using Base::load_group, Base::prepare_barriers, Base::prepare_group, Base::prepare_weights,
      Base::q, Base::scale, Base::table;
  using Base::one_columns, Base::one_scale, Base::one_terms, Base::one_weights;
  using Base::shared, Base::stage_state, Base::state, Base::tile_begin, Base::tile_end;
  using Base::token_count, Base::token_x, Base::warp, Base::zero;
  using Base::weights;
  using typename Base::Columns, typename Base::Copy, typename Base::GroupInputs;
  using typename Base::HeadInputs;
  using typename Base::Kind, typename Base::Position, typename Base::Stage, typename Base::Table;
  using typename Base::Pair;

  using Lanes = Mamba2Lanes<State, Act, kStateSize>;
  using Lanes::advance, Lanes::column, Lanes::kColumns, Lanes::kPassRows, Lanes::kRowLanes;
  using Lanes::kSlots, Lanes::kVector, Lanes::load_columns, Lanes::read_tile, Lanes::reduce;
  using Lanes::round_tile, Lanes::team, Lanes::widen_columns;
  using typename Lanes::PackedColumns, typename Lanes::Tile;

  static constexpr int kOneRows = kTileRows * kOneLanes / kWarpLanes;
  static constexpr int kOneRowLanes = kOneLanes / kOneRows;  // that end up with a row's sum
  static constexpr int kFoldStep = 2;                        // records at a time

 public:
  static __device__ __forceinline__ void run(const Mamba2CudaParams& p, const Mamba2Launch& launch,
                                             unsigned char* shared) {
    Mamba2StepKernel kernel(p, launch, shared);
    kernel.prepare_barriers();
    const GridPlace place = place_of_block(launch.tail);
    kernel.read_row(p.rows + place.row);
    if (!kernel.find_work(place)) return;
    if (kernel.kind == PlannedRow::kPadding) {
      kernel.zero_outputs();
      return;
    }
    // Each kind of row has a loop of its own, so that none pays for another's registers.
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
      : Base(params, launch_shape, shared_memory), Lanes(Base::lane) {}

  // ---- Tiles ----

  template <Kind kKind>
  __device__ __forceinline__ void process() {
    const int first_entry = kKind == PlannedRow::kFlush ? live : 0;
    GroupInputs group_inputs{};
    if constexpr (kKind != PlannedRow::kCommitted) group_inputs = load_group(first_entry);
    this->template start_pipeline<kKind>();
    Stage stage = first_stage();
    const bool needs_head = kKind != PlannedRow::kCommitted || live > 0;
    const bool pairs = kPairsHeads && kKind == PlannedRow::kReplay && this->pairs_heads();
    HeadInputs next{};
    if (pairs) {
      next = this->load_pair(pair_at(first_tile, tile_begin));
    } else if (needs_head) {
      next = load_head(first_tile);
    }
    if (this->template folds<kKind>() && live <= kFoldRecords) load_fold_columns(0);
    Position at = first_tile;
    if constexpr (kKind != PlannedRow::kCommitted) {
      prepare_group(group_inputs, first_entry);
      point_at_outputs(at);
    }
    int in_stage = 0;  // tiles of the stage that have been used, of a read copy
    bool enters_head = true;
    bool is_second = false;  // of a pair of heads
#pragma unroll 1
    for (int tile = tile_begin; tile < tile_end; ++tile) {
      if (pairs && enters_head) {
        if constexpr (kPairsHeads && kKind == PlannedRow::kReplay) {
          if (!is_second) {
            const HeadInputs now = next;
            const Pair pair = pair_at(at, tile);
            const int after = tile + tiles_left_of_head(at) + launch.tiles_per_head;
            if (after < tile_end) next = this->load_pair(pair_at({at.head + 2, 0}, after));
            __syncwarp();
            this->fill_pair(now, pair);
            this->take_of_pair(0);
            is_second = pair.has_second;
          } else {
            this->take_of_pair(1);
            is_second = false;
          }
        }
      } else if (needs_head && enters_head) {
        const HeadInputs now = next;
        if (tile + tiles_left_of_head(at) < tile_end) next = load_head({at.head + 1, 0});
        __syncwarp();
        fill_table(now, at);
        if constexpr (kKind != PlannedRow::kCommitted && !kOneToken) prepare_weights(now.d);
      }
      if constexpr (kKind == PlannedRow::kCommitted) {
        committed_tile(at, stage);
      } else {
        if (!Base::template kReadsCopy<kKind> || in_stage == 0) {
          ptx::mbarrier_wait(stage.barrier, stage.parity);
          __syncwarp();
        }
        const Act* x = this->template stage_x<kKind>(stage.at) + in_stage * places * kTileRows;
        append_x(at, x);
        if constexpr (kKind == PlannedRow::kFlush) {
          fold_tile<kKind>(at, stage.at, true);
          if constexpr (kHasCopy) encode_copy(at, stage.at);
        }
        const bool has_state = kKind == PlannedRow::kFlush || !zero;
        CopyTile copy{};
        if constexpr (kHasCopy) {
          copy = Copy::moved(this->template copy_in_stage<kKind>(stage.at), in_stage);
        }
        if constexpr (!kOneToken) {
          output_tile(at, stage.at, copy, x, kKind == PlannedRow::kFlush ? live : 0, has_state);
        } else if constexpr (!kOnePlain) {
          output_one_multiplied(at, stage.at, copy, x, kKind == PlannedRow::kFlush ? live : 0,
                                has_state);
        } else {
          output_one_token(at, stage.at, x, has_state);
        }
        if constexpr (kKind == PlannedRow::kFlush) ptx::fence_proxy_async();
      }
      if (!Base::template kReadsCopy<kKind> || ++in_stage == launch.copy_tiles) {
        in_stage = 0;
        __syncwarp();
        this->template load_stage<kKind>(stage);
        this->template move_on<kKind>(stage);
      }
      at.p0 += kTileRows;
      enters_head = at.p0 == launch.head_dim;
      if constexpr (kKind != PlannedRow::kCommitted) {
        y_at += kTileRows;
        x_append += kTileRows;
      }
      if (enters_head) {
        at.p0 = 0;
        ++at.head;
        if constexpr (kKind != PlannedRow::kCommitted) {
          y_at += launch.y_jump;
          x_append += launch.ring_x_jump;
        }
      }
    }
  }

  __device__ __forceinline__ int tiles_left_of_head(const Position& at) const {
    return (launch.head_dim - at.p0) / kTileRows;
  }
  /// The head of the run's tile `tile`, which is at `at`, and the next if the run has it.
  __device__ __forceinline__ Pair pair_at(const Position& at, int tile) const {
    return {at, tile + tiles_left_of_head(at) < tile_end};
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

  /// Writes the read copy of a staged tile that has changed, to memory and over the tile.
  __device__ __forceinline__ void encode_copy(const Position& at, unsigned char* from) const {
    CopyEncoder<kCopy, kStateSize, State>::encode(
        stage_state(from), kStateSize, copy_in_memory(at),
        this->template copy_in_stage<PlannedRow::kFlush>(from), lane);
    ptx::fence_proxy_async();
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
    float y = team_sum<kOneLanes>(sum, lane);
    if (lane % kOneRowLanes == 0) {
      if (p.z != nullptr) y *= silu(widen(gate(0, at)[lane / kOneRowLanes]));
      *y_at = narrow<Act>(y);
    }
  }

  /// The same on the tensor cores, for what needs no splitting: a read copy, a two-byte state.
  __device__ __forceinline__ void output_one_multiplied(const Position& at, unsigned char* from,
                                                        const CopyTile& copy, const Act* x,
                                                        int first, bool has_state) {
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
        Copy::multiply_one(copy, lane, copy_columns[0], of_state);
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
    float y = team_sum<4>(rows, lane);
    // New to the compiler: it would work the condition out ahead of the tiles, and spill it.
    int part = q;
    asm volatile("" : "+r"(part));
    if (part % 2 == 0) {
      if (p.z != nullptr) y *= silu(widen(gate(0, at)[g + 8 * (q / 2)]));
      *y_at = narrow<Act>(y);
    }
  }

  // ---- Outputs of several tokens ----

  /// `copy`: of the tile, if it has one.
  __device__ __forceinline__ void output_tile(const Position& at, unsigned char* from,
                                              const CopyTile& copy, const Act* x, int first,
                                              bool has_state) {
    float y[kTokenBlocks][4];
#pragma unroll
    for (int k = 0; k < kTokenBlocks; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y[k][i] = 0.0f;
    }
    if (has_state) {
      if constexpr (kHasCopy) {
        Copy::template multiply<kTokenBlocks>(copy, lane, copy_columns, y);
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
          Act* to = y_at + Base::along(8 * k + i, p.y_token_stride);
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
          // An f16 state is tf32 as it is, and has no rest that is multiplied.
          const auto split = [](float x) {
            return kWideState && !kWideAct ? split_tf32_for_exact(x) : split_tf32(x);
          };
          const Tf32Pair a0 = split(s0[2 * i]), a1 = split(s1[2 * i]);
          const Tf32Pair a2 = split(s0[2 * i + 1]), a3 = split(s1[2 * i + 1]);
#pragma unroll
          for (int k = 0; k < kBlocks; ++k) {
            // bf16 is tf32 as it is: then high is all of it.
            const Tf32Pair b0 = split_tf32(c_float[k][s][2 * i]);
            const Tf32Pair b1 = split_tf32(c_float[k][s][2 * i + 1]);
            ptx::mma_tf32(y[k], a0.high, a1.high, a2.high, a3.high, b0.high, b1.high);
            if constexpr (kWideState) {
              ptx::mma_tf32(rest[k], a0.low, a1.low, a2.low, a3.low, b0.high, b1.high);
            }
            if constexpr (kWideAct) {
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
          return split_tf32(entry < entries ? x[entry * kTileRows + state_row] : 0.0f);
        };
        const Tf32Pair a0 = at(e0, g), a1 = at(e0, g + 8);
        const Tf32Pair a2 = at(e0 + 1, g), a3 = at(e0 + 1, g + 8);
#pragma unroll
        for (int k = 0; k < kTokenBlocks; ++k) {
          const Tf32Pair b0 = split_tf32(__uint_as_float(weights[k][s][2 * half]));
          const Tf32Pair b1 = split_tf32(__uint_as_float(weights[k][s][2 * half + 1]));
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

  /// What a fold of up to kFoldRecords records shares: their B, and per pass u = gain x and
  /// factors.
  struct Scratch {
    Act* b;         // [kFoldRecords][kStateSize]
    float* u;       // [kFoldRecords][kPassRows]
    float* factor;  // [kFoldRecords]: what R is multiplied by first
  };
  __device__ __forceinline__ Scratch scratch() const {
    unsigned char* at =
        shared + warp * launch.shared.warp_bytes + launch.fold_stages * launch.shared.stage_bytes;
    auto* u = reinterpret_cast<float*>(at + kFoldRecords * kStateSize * sizeof(Act));
    return {reinterpret_cast<Act*>(at), u, u + kFoldRecords * kPassRows};
  }

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
      fold_pass(at, stage_state(from) + first_row * kStateSize, this->template stage_x<kKind>(from),
                first_row, to_global);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void fold_pass(const Position& at, State* staged, const Act* x,
                                            int first_row, bool to_global) {
    Tile tile;
    read_tile(staged, zero, tile);
    const Scratch with = scratch();
    const float* rest = table().rest;
    const bool rescales = __any_sync(kAllLanes, rest[1] != 0.0f) != 0;
#pragma unroll 1
    for (int first = 0; first < live; first += kFoldRecords) {
      __syncwarp();
      if (live > kFoldRecords) load_fold_columns(first);
      const int count = min(kFoldRecords, live - first);
      prepare_fold(with, x, first, count, first_row);
      const float* u = with.u + team * kSlots;
      const float* factors = with.factor;
      const Act* from_b = with.b + column;
#pragma unroll 1
      for (int entry = 0; entry < count; entry += kFoldStep) {
#pragma unroll
        for (int i = 0; i < kFoldStep; ++i) {
          float b[kColumns];
          widen_columns(Lanes::load_vectors(from_b + i * kStateSize), b);
          const auto now = load_packed<float, kSlots>(u + i * kPassRows);
          if (rescales) Lanes::multiply(tile, factors[i]);
#pragma unroll
          for (int s = 0; s < kSlots; ++s) advance(tile, s, now[s], b);
        }
        u += kFoldStep * kPassRows;
        factors += kFoldStep;
        from_b += kFoldStep * kStateSize;
      }
    }
    if constexpr (!kDefers) Lanes::multiply(tile, rest[0]);
    if (to_global) {
      this->template write_tile<true, true>(tile, state(at) + first_row * kStateSize, staged);
      store_deferred({at.head, at.p0 + first_row}, kPassRows, DeferredDecay(rest[0]));
    } else {
      this->template write_tile<false, true>(tile, nullptr, staged);
    }
  }

  /// gain x and the factors of a pass's records, to scratch. A record more, where their number is
  /// odd, is one that changes nothing: s = fma(-0, 0, s) for every s.
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
        const float gain = head.dt[first + entry];
        u = {__fmul_rn(gain, xv[0]), __fmul_rn(gain, xv[1]), __fmul_rn(gain, xv[2]),
             __fmul_rn(gain, xv[3])};
      }
      *reinterpret_cast<float4*>(to.u + entry * kPassRows + row) = u;
    }
    if (lane < kFoldRecords) to.factor[lane] = lane < count ? head.decay[first + lane] : 1.0f;
    __syncwarp();
  }

  // ---- Committed rows ----

  /// A token's operands as loaded, so that the next token's are on their way during this one's use.
  struct TokenOperands {
    PackedColumns b, c;
    Act x;  // of state row `lane` of the pass
    Act z;  // of state row lane / kRowLanes of the pass
  };

  __device__ __forceinline__ TokenOperands load_operands(int t, const Position& at) const {
    return {load_columns(token_b(t)), load_columns(token_c(t)), token_x(t, at)[lane % kPassRows],
            p.z == nullptr ? narrow<Act>(0.0f) : gate(t, at)[lane / kRowLanes]};
  }

  __device__ __forceinline__ void committed_tile(const Position& at, const Stage& stage) {
    unsigned char* from = stage.at;
    TokenOperands first{};
    if (token_count > 0) first = load_operands(0, at);
    const float lane_dt = lane < token_count ? time_step(lane, at.head) : 0.0f;
    const DeferredDecay before = live == 0 ? load_deferred(at)
                                 : kDefers ? DeferredDecay(table().rest[0])
                                           : DeferredDecay();
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
    committed_pass(at, stage_state(from), first, lane_dt, before);
#pragma unroll 1
    for (int first_row = kPassRows; first_row < kTileRows; first_row += kPassRows) {
      const Position pass{at.head, at.p0 + first_row};
      committed_pass(pass, stage_state(from) + first_row * kStateSize, load_operands(0, pass),
                     lane_dt, before);
    }
    if constexpr (kHasCopy) {
      __syncwarp();
      encode_copy(at, from);
    }
  }

  /// All tokens through kPassRows rows of the state. `next`: the first token's operands; `lane_dt`:
  /// the time step of token `lane`; `rest`: what is deferred before it.
  __device__ __forceinline__ void committed_pass(const Position& at, State* staged,
                                                 TokenOperands next, float lane_dt,
                                                 DeferredDecay rest) {
    const float a = p.a[at.head];
    const float d = p.d == nullptr ? 0.0f : p.d[at.head];
    Tile tile;
    read_tile(staged, zero && live == 0, tile);
    for (int t0 = 0; t0 < token_count; t0 += kWarpLanes) {
      if (t0 > 0) lane_dt = t0 + lane < token_count ? time_step(t0 + lane, at.head) : 0.0f;
      const float lane_decay = mamba2_decay(a, lane_dt);
      const int count = min(token_count - t0, kWarpLanes);
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        const TokenOperands now = next;
        if (t0 + t + 1 < token_count) next = load_operands(t0 + t + 1, at);
        const float factor = rest.take(__shfl_sync(kAllLanes, lane_decay, t));
        const float u = __fmul_rn(rest.gain(__shfl_sync(kAllLanes, lane_dt, t)), widen(now.x));
        // A vote, so that the compiler knows that the warp stays together.
        if (__any_sync(kAllLanes, factor != 1.0f) != 0) Lanes::multiply(tile, factor);
        float b[kColumns];
        float c_now[kColumns];
        widen_columns(now.b, b);
        widen_columns(now.c, c_now);
        float sum[kSlots];
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          advance(tile, s, __shfl_sync(kAllLanes, u, team * kSlots + s), b);
        }
        if constexpr (!kDefers) {
          Lanes::multiply(tile, rest.value());
          rest = DeferredDecay();
        }
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          sum[s] = 0.0f;
#pragma unroll
          for (int i = 0; i < kColumns; ++i) sum[s] = fmaf(tile.s[s][i], c_now[i], sum[s]);
        }
        round_tile(tile);  // the state a next token starts from is the stored one
        float y = reduce(sum) * rest.value();
        const int state_row = lane / kRowLanes;
        y = fmaf(d, __shfl_sync(kAllLanes, widen(now.x), state_row), y);
        if (lane % kRowLanes == 0) {
          if (p.z != nullptr) y *= silu(widen(now.z));
          output(t0 + t, at)[state_row] = narrow<Act>(y);
        }
      }
    }
    this->template write_tile<true, kHasCopy>(tile, state(at), staged);
    store_deferred(at, kPassRows, rest);
  }

  Act* y_at;      // output of token 2 q, state row g of the tile
  Act* x_append;  // where the chunk of own token lane / kXChunks goes
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
  begin_step_kernel(params, launch);
  Mamba2StepKernel<State, Act, kStateSize, kTokenBlocks, kWindowSteps, kCopy>::run(
      params, launch, dynamic_shared());
}

template <typename State, typename Act>
Mamba2KernelFunction mamba2_step_function(int state_size, Mamba2Variant variant) {
  if (state_size == 64) return mamba2_step_kernel<State, Act, 64, 2, 5>;
  if (state_size == 256) return mamba2_step_kernel<State, Act, 256, 2, 5>;
  if (state_size != 128) return nullptr;
  // Kept few: nobody is known to keep a two-byte state beside fp32 activations.
  if constexpr (sizeof(State) < sizeof(Act)) {
    return mamba2_step_kernel<State, Act, 128, 2, 5>;
  } else {
    switch (variant) {
      case Mamba2Variant::kOneToken:
        return mamba2_step_kernel<State, Act, 128, 0, 2>;
      case Mamba2Variant::kSmall:
        return mamba2_step_kernel<State, Act, 128, 1, 2>;
      case Mamba2Variant::kGeneral:
        return mamba2_step_kernel<State, Act, 128, 2, 5>;
      case Mamba2Variant::kDirect:
        return mamba2_direct_kernel<State, Act, 128>;
    }
    return nullptr;
  }
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
