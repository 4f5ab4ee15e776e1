// Mamba-2 (SSD) step: outputs of the new tokens of every row of a step, and the state they leave.
//
// Mathematics, per head h of group g = h / (heads / groups), in fp32 (Dao and Gu, "Transformers are
// SSMs", 2024, with a scalar A per head):
//
//   dt = clamp(softplus(dt_raw + dt_bias), dt_min, dt_max)
//   S  = exp(A dt) S + (dt x) B^T                 S: (head_dim, state_size)
//   y  = S C + D x,   then y * silu(z) if z is given
//
// A committed row applies this token by token to the stored checkpoint; y reads the state after its
// token, before that state is encoded. A row of n tokens is bit-equal to n rows of one token, for
// every checkpoint format (each token's state is encoded), so prompts may be chunked at will.
//
// A tentative row leaves the checkpoint S0 alone and replays the n live records i and the row's own
// tokens up to t:
//
//   y_t = w_0 S0 C_t + sum_i w_i dt_i (B_i . C_t) x_i + D x_t,   w_i = product of exp(A dt_j), j >
//   i
//
// The weights are products of decays taken from the newest token backwards. Differences of prefix
// sums of log-decays would be the same numbers, but lose the recent ones' digits to one large old
// term, and fail on a decay of exactly 0.
//
// If the row flushes (tentative_row_flushes in cursor.h), the n records are first folded into the
// checkpoint: decode, the recurrence above in fp32 in the committed row's operation order, one
// encode. With an f32 checkpoint the state is bit-equal to plain decoding's. Outputs then read the
// new checkpoint. The row's tokens are appended as records {x, B, dt} either way.
//
// With a read copy (LayerSpec::read_copy) S0 in y_t is decode(copy). The copy is that of the
// checkpoint as it is stored, encoded anew wherever the checkpoint is; nothing but y_t reads it, so
// committed rows and checkpoints are bit-equal to those of a pool without copies.
//
// A is the pool's (StatePool::set_mamba2_a).
//
// Types: x, B, C, z, y of the pool's activation type (f32, bf16, f16); dt_raw that type or f32;
// parameters f32; checkpoint f32, bf16 or f16; arithmetic fp32. Results do not depend on the other
// rows of the step or on the number of threads.
#pragma once

#include <limits>
#include <string>

#include "replayssm/cpu.h"
#include "replayssm/state_pool.h"
#include "replayssm/tensor.h"

namespace replayssm {

struct Mamba2Params {
  TensorView d;        // (heads) f32; empty: no skip
  TensorView dt_bias;  // (heads) f32; empty: zero
  bool dt_softplus = true;
  /// Limits of dt; the defaults limit nothing. Set them only where the model's configuration does.
  float dt_min = 0.0f;
  float dt_max = std::numeric_limits<float>::infinity();
};

/// Operands over the packed tokens of the step. The last dimension is contiguous; the other strides
/// are free, so x, B, C and dt may be slices of one projection. y overlaps no input.
struct Mamba2Operands {
  TensorView x;   // (tokens, heads, head_dim)
  TensorView b;   // (tokens, groups, state_size)
  TensorView c;   // (tokens, groups, state_size)
  TensorView dt;  // (tokens, heads), raw
  TensorView z;   // (tokens, heads, head_dim); empty: no gate
  TensorView y;   // (tokens, heads, head_dim), written for every row, zero for padding
};

/// Runs the recurrence of `layer` for all rows of `step`. Workspace: none. On error nothing has
/// been read or written; the step stays open.
Status mamba2_step(const CpuContext& context, StatePool& pool, int layer, Step& step,
                   const Mamba2Params& params, const Mamba2Operands& operands);

/// On a CUDA pool: the pointers of params and operands are device memory of the pool's device,
/// aligned to 16 bytes, with strides of x, B and C that are multiples of 16 bytes. Strides are less
/// than 2^31 - 1023 elements, and so are the tokens of a step. One launch on the context's stream;
/// it allocates nothing, does not wait, and may be captured in a graph. Head sizes are multiples of
/// 16, state sizes 64, 128 or 256, types f32/f32, f32/bf16 and bf16/bf16 (checkpoint/activation),
/// read copies with bf16 activations. Results differ from the CPU's in the order of sums and by
/// some units in the last place of softplus; fp32 weights and states are multiplied as two or three
/// terms. An x that is not finite in a later token of a row reaches the outputs of the tokens
/// before it.
Status mamba2_step(const CudaContext& context, StatePool& pool, int layer, Step& step,
                   const Mamba2Params& params, const Mamba2Operands& operands);

/// Which kernel mamba2_step runs for this pool and layer, and why; or why none can.
Result<std::string> mamba2_explain(const CpuContext& context, const StatePool& pool, int layer);

/// The same for a CUDA pool and a step of `rows` rows, on which the launch shape depends; and,
/// where it differs, for plain decoding whose rows came from the host.
Result<std::string> mamba2_explain(const CudaContext& context, const StatePool& pool, int layer,
                                   std::int64_t rows);

/// Bytes the state and the ring of one row of one layer without a read copy move in a step (see
/// StateTraffic).
StateTraffic mamba2_row_traffic(const Mamba2Shape& shape, DType checkpoint, DType activation,
                                ReplayLimits limits, RowKind kind, const Cursor& cursor,
                                std::int64_t token_count);

}  // namespace replayssm
