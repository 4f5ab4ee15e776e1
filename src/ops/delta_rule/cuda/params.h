// What a CUDA step of the delta rule reads and writes: device pointers and strides, nothing else.
// Strides count elements, and those of slots may exceed 32 bits; a stride never implies a size. The
// innermost dimension is contiguous everywhere, and (value_dim, key_dim) of a checkpoint is.
#pragma once

#include <cstdint>

#include "cuda/read_copy.h"
#include "ops/delta_rule/shape.h"
#include "replayssm/cursor.h"
#include "replayssm/dtype.h"
#include "state/cuda/step.h"

namespace replayssm::cuda {

struct DeltaRuleCudaParams {
  // Geometry and types.
  DeltaRuleShape shape;
  ReplayLimits limits;
  DType checkpoint = DType::kF32;
  DType activation = DType::kF32;
  bool fast_flush = false;  // records are folded by their deltas; there are no rings of v and beta

  // The step. Launch shapes depend on the counts, never on the contents.
  const PlannedRow* rows = nullptr;  // (rows), in the order in which they are begun
  std::int64_t row_count = 0;
  std::int64_t token_count = 0;  // tokens of the operands
  bool plain = false;  // whether the host knows that no row is tentative or has several tokens

  // State of one layer. The record of position p lies at place p mod limits.record_places().
  void* state = nullptr;          // (slots, value_heads, value_dim, key_dim) checkpoint type
  void* ring_k = nullptr;         // (slots, key_heads, places, key_dim) activation, as received
  float* ring_k_scale = nullptr;  // (slots, key_heads, places)
  void* ring_v = nullptr;         // (slots, value_heads, places, value_dim) activation
  float* ring_decay = nullptr;    // (slots, value_heads, places, 1 or key_dim)
  float* ring_beta = nullptr;     // (slots, value_heads, places)
  void* ring_delta = nullptr;     // (slots, value_heads, places, value_dim) activation
  // The decays deferred in an f32 checkpoint of heads with one decay (ops/deferred_decay.h):
  // (slots, value_heads, value_dim / kDeferredRows).
  float* deferred = nullptr;
  ReadCopyParams copy;  // of rows of K, 16 rows of V to a tile
  std::int64_t state_slot_stride = 0, state_head_stride = 0;
  std::int64_t deferred_slot_stride = 0;  // heads: value_dim / kDeferredRows apart
  std::int64_t ring_k_slot_stride = 0, ring_k_head_stride = 0;  // places: key_dim apart
  std::int64_t ring_k_scale_slot_stride = 0, ring_k_scale_head_stride = 0;
  std::int64_t ring_v_slot_stride = 0, ring_v_head_stride = 0;  // places: value_dim apart
  std::int64_t ring_decay_slot_stride = 0, ring_decay_head_stride = 0;
  std::int64_t ring_beta_slot_stride = 0, ring_beta_head_stride = 0;
  std::int64_t ring_delta_slot_stride = 0, ring_delta_head_stride = 0;  // places: value_dim apart

  // Parameters.
  const float* a_log = nullptr;    // (value_heads) or null: zero
  const float* dt_bias = nullptr;  // (value_heads, 1 or key_dim) or null: zero
  bool bounded = false;            // lower_bound * sigmoid instead of -exp(A_log) softplus
  float lower_bound = 0.0f;
  bool beta_doubled = false;
  bool normalize = true;  // q and k to unit length
  float norm_epsilon = 0.0f;
  float q_scale = 1.0f;

  // Operands over the packed tokens of the step.
  const void* q = nullptr;     // (tokens, key_heads, key_dim) activation type
  const void* k = nullptr;     // (tokens, key_heads, key_dim) activation type
  const void* v = nullptr;     // (tokens, value_heads, value_dim) activation type
  const void* gate = nullptr;  // (tokens, value_heads, 1 or key_dim) raw, f32 or activation type
  const void* beta = nullptr;  // (tokens, value_heads) raw, f32 or activation type
  void* o = nullptr;           // (tokens, value_heads, value_dim) activation type
  bool gate_is_f32 = true;
  bool beta_is_f32 = true;
  std::int64_t q_token_stride = 0, q_head_stride = 0;
  std::int64_t k_token_stride = 0, k_head_stride = 0;
  std::int64_t v_token_stride = 0, v_head_stride = 0;
  std::int64_t gate_token_stride = 0, gate_head_stride = 0;
  std::int64_t beta_token_stride = 0;
  std::int64_t o_token_stride = 0, o_head_stride = 0;
};

}  // namespace replayssm::cuda
