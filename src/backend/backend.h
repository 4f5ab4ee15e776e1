// The interface model code is written against: packed token activations in, packed activations out.
//
// Activations are f32 matrices (tokens, features) with contiguous rows. A forward pass carries the
// tokens of many sequences at once; ForwardRow says which tokens belong to which sequence. Shapes
// are checked when a model is loaded, so the arithmetic ops here have preconditions, not statuses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "backend/kv_cache.h"
#include "replayssm/ops/causal_conv1d.h"
#include "replayssm/ops/gated_delta_net.h"
#include "replayssm/ops/mamba2.h"
#include "replayssm/state_pool.h"
#include "replayssm/status.h"
#include "replayssm/step.h"
#include "replayssm/tensor.h"

namespace replayssm {

/// One sequence's tokens in a forward pass: rows [begin, begin + count) of every activation matrix.
struct ForwardRow {
  std::int32_t slot = -1;  // slot of the state pool and of the KV cache; negative: padding
  RowKind kind = RowKind::kTentative;
  /// Prompt tokens go through the matrix library, decode and verify tokens through matrix-vector
  /// kernels whose results do not depend on how many rows share the pass. The phase decides, never
  /// the count: a one-token prompt tail is still a prompt.
  bool prompt = false;
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t position = 0;  // absolute position of the first token in its sequence
};

struct AttentionShape {
  std::int64_t query_heads = 0;
  std::int64_t kv_heads = 0;  // divides query_heads
  std::int64_t head_dim = 0;
  float scale = 1.0f;  // applied to q . k
};

/// What a gate's values go through before they multiply.
enum class GateFunction : std::uint8_t {
  kSilu,     // z / (1 + e^-z)
  kSigmoid,  // 1 / (1 + e^-z)
};

class Backend {
 public:
  virtual ~Backend() = default;

  /// Memory for activations, aligned to 64 bytes; null if there is none.
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes) = 0;

  /// A weight matrix where this backend's ops can read it: the same memory if they can read it as
  /// it is, else a copy that lives as long as the backend.
  virtual Result<TensorView> place(const TensorView& host) = 0;

  /// Rows [from, from + count) of `source` to rows [to, to + count) of `target`, of equal width.
  /// Within one matrix rows move towards the front only.
  virtual void copy_rows(const TensorView& source, std::int64_t from, const TensorView& target,
                         std::int64_t to, std::int64_t count) = 0;

  /// The convolution and the recurrence of a state pool's layer: see replayssm/ops.
  virtual Status causal_conv1d(StatePool& pool, int layer, Step& step,
                               const CausalConv1dOperands& operands) = 0;
  virtual Status mamba2(StatePool& pool, int layer, Step& step, const Mamba2Params& params,
                        const Mamba2Operands& operands) = 0;
  virtual Status gated_delta_net(StatePool& pool, int layer, Step& step,
                                 const GatedDeltaNetParams& params,
                                 const GatedDeltaNetOperands& operands) = 0;

  /// out[t] = table[tokens[t]]. table (vocabulary, features) in f32, bf16 or f16; ids are in range.
  virtual void embed(std::span<const std::int32_t> tokens, const TensorView& table,
                     const TensorView& out) = 0;

  /// y = x w^T over the tokens of `rows`: x (tokens, in) f32, w (out, in) f32/bf16/f16 contiguous,
  /// y (tokens, out) f32. Each prompt row is a product of its own, so that a sequence's result does
  /// not depend on its neighbours. Rows of y that belong to no row or to padding are left alone.
  /// Fails only where a matrix library does; y is then unspecified.
  virtual Status matmul(std::span<const ForwardRow> rows, const TensorView& x, const TensorView& w,
                        const TensorView& y) = 0;

  /// out = x * rsqrt(mean(x^2) + eps) * weight, per row. weight (features) f32. out may be x. Rows
  /// may be heads of tokens, and further apart than they are long.
  virtual void rms_norm(const TensorView& x, const TensorView& weight, float eps,
                        const TensorView& out) = 0;

  /// u = y * silu(z); out = u * rsqrt(mean over each of `groups` equal channel groups of u^2 + eps)
  /// * weight. y, out (tokens, features); z (tokens, features) may have a larger row stride.
  virtual void gated_rms_norm(const TensorView& y, const TensorView& z, const TensorView& weight,
                              std::int64_t groups, float eps, const TensorView& out) = 0;

  /// x *= f(gate) in place. x, gate (rows, features), rows as in rms_norm.
  virtual void gate(const TensorView& x, const TensorView& gate, GateFunction f) = 0;

  /// x = max(x, 0)^2 in place.
  virtual void relu_squared(const TensorView& x) = 0;

  /// x += y.
  virtual void add(const TensorView& x, const TensorView& y) = 0;

  /// Angles of rotary position embedding for the tokens of `rows`, once for all layers of a pass:
  ///   table[t] = cos(p f_0) .. cos(p f_n-1) | sin(p f_0) .. sin(p f_n-1),  p the token's position,
  /// f the n `frequencies` in radians per position. table (tokens, 2n) f32; the products are taken
  /// in fp64, so that angles stay right at any position.
  virtual void rotary_table(std::span<const ForwardRow> rows, std::span<const double> frequencies,
                            const TensorView& table) = 0;

  /// Turns the pairs (j, j + n), j < n, of every head by its token's angles, in place:
  ///   x_j, x_j+n = x_j cos_j - x_j+n sin_j, x_j+n cos_j + x_j sin_j
  /// x (tokens, heads, head_dim >= 2n); the rest of a head is left as it is.
  virtual void rotate(const TensorView& table, const TensorView& x) = 0;

  /// Causal grouped-query attention; keys and queries carry their positional encoding, if the model
  /// has one. Writes k and v of the step's
  /// tokens into `cache` at their absolute positions, then for a token at position p
  ///   out = sum_j softmax_j(scale * q . k_j) v_j, j in [0, p].
  /// q, out (tokens, query_heads * head_dim); k, v (tokens, kv_heads * head_dim). `layer` counts
  /// attention layers. A token's result depends on its sequence only, not on the chunking.
  virtual void attention(std::span<const ForwardRow> rows, const AttentionShape& shape,
                         const TensorView& q, const TensorView& k, const TensorView& v,
                         KvCache& cache, int layer, const TensorView& out) = 0;
};

}  // namespace replayssm
