// What a Mamba-2 CUDA step reads and writes: device pointers and strides, nothing else. Strides
// count elements, and those of slots may exceed 32 bits; a stride never implies a size. The
// innermost dimension is contiguous everywhere, and (head_dim, state_size) of a checkpoint is.
#pragma once

#include <cstdint>
#include <limits>

#include "cuda/read_copy.h"
#include "replayssm/cursor.h"
#include "replayssm/dtype.h"
#include "state/cuda/step.h"

namespace replayssm::cuda {

struct Mamba2CudaParams {
  // Geometry and types.
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t state_size = 0;
  std::int64_t groups = 1;
  ReplayLimits limits;
  DType checkpoint = DType::kF32;
  DType activation = DType::kF32;

  // The step. Launch shapes depend on the counts, never on the contents.
  const PlannedRow* rows = nullptr;  // (rows), in the order in which they are begun
  std::int64_t row_count = 0;
  std::int64_t token_count = 0;  // tokens of the operands
  bool plain = false;  // whether the host knows that no row is tentative or has several tokens

  // State of one layer. The record of position p lies at place p mod limits.record_places().
  void* state = nullptr;     // (slots, heads, head_dim, state_size) checkpoint type
  void* ring_x = nullptr;    // (slots, heads, places, head_dim) activation type
  void* ring_b = nullptr;    // (slots, groups, places, state_size) activation type
  float* ring_dt = nullptr;  // (slots, heads, places)
  // The decays deferred in an f32 checkpoint (ops/deferred_decay.h): (slots, heads, head_dim
  // / kDeferredRows). Null beside two-byte checkpoints.
  float* deferred = nullptr;
  ReadCopyParams copy;  // of rows of state_size, 16 rows of head_dim to a tile
  std::int64_t state_slot_stride = 0, state_head_stride = 0;
  std::int64_t ring_x_slot_stride = 0, ring_x_head_stride = 0, ring_x_place_stride = 0;
  std::int64_t ring_b_slot_stride = 0, ring_b_group_stride = 0, ring_b_place_stride = 0;
  std::int64_t ring_dt_slot_stride = 0, ring_dt_head_stride = 0;
  std::int64_t deferred_slot_stride = 0;  // heads: head_dim / kDeferredRows apart

  // Parameters.
  const float* a = nullptr;        // (heads)
  const float* d = nullptr;        // (heads) or null: no skip
  const float* dt_bias = nullptr;  // (heads) or null: zero
  bool dt_softplus = true;
  float dt_min = 0.0f;
  float dt_max = std::numeric_limits<float>::infinity();

  // Operands over the packed tokens of the step.
  const void* x = nullptr;   // (tokens, heads, head_dim) activation type
  const void* b = nullptr;   // (tokens, groups, state_size) activation type
  const void* c = nullptr;   // (tokens, groups, state_size) activation type
  const void* dt = nullptr;  // (tokens, heads) raw, f32 if dt_is_f32, else activation type
  const void* z = nullptr;   // (tokens, heads, head_dim) activation type, or null: no gate
  void* y = nullptr;         // (tokens, heads, head_dim) activation type
  bool dt_is_f32 = false;
  std::int64_t x_token_stride = 0, x_head_stride = 0;
  std::int64_t b_token_stride = 0, b_group_stride = 0;
  std::int64_t c_token_stride = 0, c_group_stride = 0;
  std::int64_t dt_token_stride = 0;
  std::int64_t z_token_stride = 0, z_head_stride = 0;
  std::int64_t y_token_stride = 0, y_head_stride = 0;
};

}  // namespace replayssm::cuda
