// The delta rule's CPU kernels' interface: one table of functions per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/row_kernels.h"
#include "replayssm/cpu.h"
#include "replayssm/cursor.h"
#include "replayssm/dtype.h"
#include "replayssm/state_pool.h"
#include "state/read_copy.h"

namespace replayssm::cpu {

/// Value heads [head_begin, head_end) of one key head for one row of a step. Pointers are to the
/// slot's or the row's data of head 0; strides count elements.
struct DeltaRuleTask {
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  std::int64_t key_head = 0;
  std::int64_t head_begin = 0;
  std::int64_t head_end = 0;
  bool appends_key = false;  // exactly one task of a (row, key head) appends the head's k

  // State: (value_heads, tiles, key_dim, columns of the tile), see ops/delta_rule/shape.h.
  // `checkpoint_in` is null for a state that is zero by definition; otherwise it may equal
  // `checkpoint`.
  const void* checkpoint_in = nullptr;
  void* checkpoint = nullptr;
  // What belongs to both (ops/deferred_decay.h): (value_heads, value_dim / kDeferredRows); null for
  // two-byte checkpoints and with a decay per channel.
  const float* deferred_in = nullptr;
  float* deferred = nullptr;
  ReadCopy copy;  // of `checkpoint`; may not exist

  // Record ring; live record i lies at place (first_place + i) mod places.
  void* ring_k = nullptr;         // (key_heads, places, key_dim) activation, as received
  float* ring_k_scale = nullptr;  // (key_heads, places)
  void* ring_v = nullptr;         // (value_heads, places, value_dim) activation; null likewise
  float* ring_decay = nullptr;    // (value_heads, places, 1 or key_dim), factors in [0, 1]
  float* ring_beta = nullptr;     // (value_heads, places); null with a fast flush
  void* ring_delta = nullptr;     // (value_heads, places, value_dim) activation
  std::int64_t places = 1;
  std::int64_t first_place = 0;
  std::int64_t live = 0;

  FlushMode flush = FlushMode::kExact;
  DType activation = DType::kF32;  // f32, bf16 or f16

  const float* a_log = nullptr;    // (value_heads) or null: zero
  const float* dt_bias = nullptr;  // (value_heads, 1 or key_dim) or null: zero
  bool bounded = false;            // lower_bound * sigmoid instead of -exp(A_log) softplus
  float lower_bound = 0.0f;
  bool beta_doubled = false;
  bool normalize = true;  // q and k to unit length
  float norm_epsilon = 0.0f;
  float q_scale = 1.0f;

  // The row's tokens: (tokens, heads, inner).
  std::int64_t tokens = 0;
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* gate = nullptr;  // raw, before dt_bias
  const void* beta = nullptr;  // raw
  void* o = nullptr;
  DType gate_type = DType::kF32;
  DType beta_type = DType::kF32;
  std::int64_t q_token_stride = 0, q_head_stride = 0;
  std::int64_t k_token_stride = 0, k_head_stride = 0;
  std::int64_t v_token_stride = 0, v_head_stride = 0;
  std::int64_t gate_token_stride = 0, gate_head_stride = 0;
  std::int64_t beta_token_stride = 0;
  std::int64_t o_token_stride = 0, o_head_stride = 0;
};

using DeltaRuleKernels = RowKernels<DeltaRuleTask>;

/// Kernels for an instruction set, a checkpoint type (f32, bf16 or f16) and a kind of decay (one
/// per key channel, or one per head). The activation type is the task's.
const DeltaRuleKernels& delta_rule_kernels(CpuIsa isa, DType checkpoint, bool channel_decay);

}  // namespace replayssm::cpu
