// Gated DeltaNet step: outputs of the new tokens of every row of a step, and the state they leave.
//
// Mathematics, per value head hv with the q and k of key head h = hv / (value_heads / key_heads),
// in fp32 (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024):
//
//   q'    = scale q / sqrt(sum q^2 + epsilon),  k' = k / sqrt(sum k^2 + epsilon)   if normalize,
//   q'    = scale q,  k' = k                                                       otherwise
//   alpha = exp(-exp(A_log) softplus(a + dt_bias)),  beta = sigmoid(b), or 2 sigmoid(b)
//   d     = beta (v - S^T alpha k')                   the delta, (value_dim)
//   S     = alpha S + k' d^T                          S: (key_dim, value_dim)
//   o     = S^T q'                                    S after the token
//
// A committed row applies this token by token to the stored checkpoint; o reads the state before it
// is encoded. A row of n tokens is bit-equal to n rows of one token, for every checkpoint format
// (each token's state is encoded), so prompts may be chunked at will.
//
// A tentative row leaves the checkpoint S0 alone. S0 is read once for all its tokens: with w(i, t)
// the product of the alphas after entry i up to token t, where entries are the n live records and
// the row's own tokens,
//
//   d_t = beta_t (v_t - w(-1, t) S0^T k'_t - sum_i w(i, t) (k'_i . k'_t) d_i)     i before t
//   o_t = w(-1, t) S0^T q'_t + sum_i w(i, t) (k'_i . q'_t) d_i                    i up to t
//
// Weights are running products of factors in [0, 1], so nothing overflows; a decay of 0 forgets.
// The row's tokens are appended as records {k, 1/|k|, alpha, v, beta, d}; in the fast mode without
// v and beta. k, v and d are in the activation type.
//
// If the row flushes (tentative_row_flushes in cursor.h), the n records are first folded into the
// checkpoint: decode, fold in fp32, one encode. Outputs then read the new checkpoint. The layer's
// FlushMode says how they are folded:
//
//   exact  the recurrence above from k, v, alpha and beta in the committed row's operation order;
//          d serves outputs only. With an f32 checkpoint the state is bit-equal to plain
//          decoding's.
//   fast   S = w(-1) S + sum_i w(i) k'_i d_i^T as one product, w(i) the product of the alphas after
//          record i. A row's later tokens are solved from its earlier d as stored.
//
// With a read copy (LayerSpec::read_copy) S0 is decode(copy) in d_t and o_t of tentative rows: they
// are the recurrence from the copy over the live records and the row's tokens. The copy is that of
// the checkpoint as it is stored, encoded anew wherever the checkpoint is. Exact folds take k, v
// and gates, never d, so committed rows and checkpoints are bit-equal to those of a pool without
// copies; fast ones would take the copy's rounding into the checkpoint, and such a layer is
// refused.
//
// Types: q, k, v, o of the pool's activation type (f32, bf16, f16); a and b that type or f32;
// parameters f32; checkpoint f32, bf16 or f16; arithmetic fp32. Results do not depend on the other
// rows of the step or on the number of threads.
#pragma once

#include <optional>
#include <string>

#include "replayssm/cpu.h"
#include "replayssm/cuda.h"
#include "replayssm/state_pool.h"
#include "replayssm/tensor.h"

namespace replayssm {

struct GatedDeltaNetParams {
  TensorView a_log;    // (value_heads) f32
  TensorView dt_bias;  // (value_heads) f32; empty: zero
  /// 2 sigmoid(b) instead of sigmoid(b): the model allows negative eigenvalues.
  bool beta_doubled = false;
  bool normalize = true;
  float norm_epsilon = 1e-6f;
  std::optional<float> scale;  // empty: key_dim^-1/2
};

/// Operands over the packed tokens of the step. The last dimension is contiguous; the other strides
/// are free, so q, k and v may be slices of one projection. o overlaps no input.
struct GatedDeltaNetOperands {
  TensorView q;  // (tokens, key_heads, key_dim)
  TensorView k;  // (tokens, key_heads, key_dim)
  TensorView v;  // (tokens, value_heads, value_dim)
  TensorView a;  // (tokens, value_heads), raw gate
  TensorView b;  // (tokens, value_heads), raw beta
  TensorView o;  // (tokens, value_heads, value_dim), written for every row, zero for padding
};

/// Runs the recurrence of `layer` for all rows of `step`. Workspace: none. On error nothing has
/// been read or written; the step stays open.
Status gated_delta_net_step(const CpuContext& context, StatePool& pool, int layer, Step& step,
                            const GatedDeltaNetParams& params,
                            const GatedDeltaNetOperands& operands);

/// On a CUDA pool: the pointers of params and operands are device memory of the pool's device,
/// aligned to 16 bytes, with strides of q, k and v that are multiples of 16 bytes. Strides are less
/// than 2^31 - 1023 elements, and so are the tokens of a step. One launch on the context's stream;
/// it allocates nothing, does not wait, and may be captured in a graph. key_dim and value_dim are
/// multiples of 16 up to 256, checkpoints f32, bf16 and f16, activations f32 and bf16, read copies
/// of f32 and bf16 checkpoints with bf16 activations. Results differ from the CPU's in the order of
/// sums; fp32 numbers are multiplied as two or three terms on the tensor cores.
Status gated_delta_net_step(const CudaContext& context, StatePool& pool, int layer, Step& step,
                            const GatedDeltaNetParams& params,
                            const GatedDeltaNetOperands& operands);

/// Which kernel gated_delta_net_step runs for this pool and layer, and why; or why none can.
Result<std::string> gated_delta_net_explain(const CpuContext& context, const StatePool& pool,
                                            int layer);

/// The same for a CUDA pool and a step of `rows` rows, on which the launch shape depends.
Result<std::string> gated_delta_net_explain(const CudaContext& context, const StatePool& pool,
                                            int layer, std::int64_t rows);

/// Bytes the state and the ring of one row of one layer without a read copy move in a step (see
/// StateTraffic).
StateTraffic gated_delta_net_row_traffic(const GatedDeltaNetShape& shape, DType checkpoint,
                                         DType activation, ReplayLimits limits, RowKind kind,
                                         const Cursor& cursor, std::int64_t token_count,
                                         FlushMode flush = FlushMode::kExact);

}  // namespace replayssm
