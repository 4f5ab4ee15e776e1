// Kimi Delta Attention step: Gated DeltaNet with a decay per key channel and keys of its own for
// every head (Kimi Team, "Kimi Linear", 2025). What gated_delta_net.h says of committed and
// tentative rows, flushes, records, read copies and chunking holds here, with alpha a vector:
//
//   alpha = exp(-exp(A_log) softplus(a + dt_bias))                     without lower_bound
//   alpha = exp(lower_bound sigmoid(exp(A_log) (a + dt_bias)))         with lower_bound
//   d     = beta (v - S^T (alpha * k'))
//   S     = diag(alpha) S + k' d^T                         S: (key_dim, value_dim)
//   o     = S^T q'
//
// In a tentative row the weights are vectors too: w(i, t) multiplies the channels of k'_t and q'_t.
// They are running products of factors in [0, 1] in both forms of the gate. Keys divided by a
// cumulative decay, which would need a bound on the window's sum of log-decays, are not used.
//
// Types: q, k, v, o of the pool's activation type (f32, bf16, f16); a and b that type or f32;
// parameters f32; checkpoint f32, bf16 or f16; arithmetic fp32; decays are recorded in f32. Results
// do not depend on the other rows of the step or on the number of threads.
#pragma once

#include <optional>
#include <string>

#include "replayssm/cpu.h"
#include "replayssm/cuda.h"
#include "replayssm/state_pool.h"
#include "replayssm/tensor.h"

namespace replayssm {

struct KimiDeltaAttentionParams {
  TensorView a_log;    // (heads) f32; may be empty (zero) with lower_bound
  TensorView dt_bias;  // (heads, key_dim) f32, contiguous; empty: zero
  /// Chooses the bounded gate; finite and below 0. Which form a model means is its configuration's
  /// to say: the parameters have the same shapes in both.
  std::optional<float> lower_bound;
  bool beta_doubled = false;
  bool normalize = true;
  float norm_epsilon = 1e-6f;
  std::optional<float> scale;  // empty: key_dim^-1/2
};

/// Operands over the packed tokens of the step. The last dimension is contiguous; the other strides
/// are free. o overlaps no input.
struct KimiDeltaAttentionOperands {
  TensorView q;  // (tokens, heads, key_dim)
  TensorView k;  // (tokens, heads, key_dim)
  TensorView v;  // (tokens, heads, value_dim)
  TensorView a;  // (tokens, heads, key_dim), raw gate
  TensorView b;  // (tokens, heads), raw beta
  TensorView o;  // (tokens, heads, value_dim), written for every row, zero for padding
};

/// Runs the recurrence of `layer` for all rows of `step`. Workspace: none. On error nothing has
/// been read or written; the step stays open.
Status kimi_delta_attention_step(const CpuContext& context, StatePool& pool, int layer, Step& step,
                                 const KimiDeltaAttentionParams& params,
                                 const KimiDeltaAttentionOperands& operands);

/// On a CUDA pool: the pointers of params and operands are device memory of the pool's device,
/// aligned to 16 bytes, with strides of q, k and v that are multiples of 16 bytes. Strides are less
/// than 2^31 - 1023 elements, and so are the tokens of a step. One launch on the context's stream;
/// it allocates nothing, does not wait, and may be captured in a graph. key_dim and value_dim are
/// multiples of 16 up to 256, checkpoints f32, bf16 and f16, activations f32 and bf16, read copies
/// of f32 and bf16 checkpoints with bf16 activations. Results differ from the CPU's in the order of
/// sums; fp32 numbers are multiplied as two or three terms on the tensor cores.
Status kimi_delta_attention_step(const CudaContext& context, StatePool& pool, int layer, Step& step,
                                 const KimiDeltaAttentionParams& params,
                                 const KimiDeltaAttentionOperands& operands);

/// Which kernel kimi_delta_attention_step runs for this pool and layer, and why; or why none can.
Result<std::string> kimi_delta_attention_explain(const CpuContext& context, const StatePool& pool,
                                                 int layer);

/// The same for a CUDA pool and a step of `rows` rows, on which the launch shape depends.
Result<std::string> kimi_delta_attention_explain(const CudaContext& context, const StatePool& pool,
                                                 int layer, std::int64_t rows);

/// Bytes the state and the ring of one row of one layer without a read copy move in a step (see
/// StateTraffic).
StateTraffic kimi_delta_attention_row_traffic(const KimiDeltaAttentionShape& shape,
                                              DType checkpoint, DType activation,
                                              ReplayLimits limits, RowKind kind,
                                              const Cursor& cursor, std::int64_t token_count,
                                              FlushMode flush = FlushMode::kExact);

}  // namespace replayssm
