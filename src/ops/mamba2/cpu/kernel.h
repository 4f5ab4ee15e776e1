// The Mamba-2 CPU kernels' interface: one table of functions per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/row_kernels.h"
#include "replayssm/cpu.h"
#include "replayssm/cursor.h"
#include "replayssm/dtype.h"
#include "state/read_copy.h"

namespace replayssm::cpu {

/// Heads [head_begin, head_end) of one group for one row of a step. Pointers are to the slot's or
/// the row's data of head 0 / group 0; strides count elements.
struct Mamba2Task {
  std::int64_t head_dim = 0;
  std::int64_t state_size = 0;
  std::int64_t group = 0;
  std::int64_t head_begin = 0;
  std::int64_t head_end = 0;
  bool appends_b = false;  // exactly one task of a (row, group) appends the group's B

  // State: (heads, head_dim, state_size). `checkpoint_in` is null for a state that is zero by
  // definition; otherwise it may equal `checkpoint`.
  const void* checkpoint_in = nullptr;
  void* checkpoint = nullptr;
  // What belongs to both (ops/deferred_decay.h): (heads, head_dim / kDeferredRows); null for
  // two-byte checkpoints.
  const float* deferred_in = nullptr;
  float* deferred = nullptr;
  ReadCopy copy;  // of `checkpoint`; may not exist

  // Record ring; live record i lies at place (first_place + i) mod places.
  void* ring_x = nullptr;    // (heads, places, head_dim) activation
  void* ring_b = nullptr;    // (groups, places, state_size) activation
  float* ring_dt = nullptr;  // (heads, places)
  std::int64_t places = 1;
  std::int64_t first_place = 0;
  std::int64_t live = 0;

  const float* a = nullptr;        // (heads)
  const float* d = nullptr;        // (heads) or null
  const float* dt_bias = nullptr;  // (heads) or null
  bool dt_softplus = true;
  float dt_min = 0.0f;
  float dt_max = 0.0f;

  // The row's tokens: (tokens, heads or groups, inner).
  std::int64_t tokens = 0;
  const void* x = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;
  const void* dt = nullptr;
  bool dt_is_f32 = true;  // else the activation type
  const void* z = nullptr;
  void* y = nullptr;
  std::int64_t x_token_stride = 0, x_head_stride = 0;
  std::int64_t b_token_stride = 0, b_group_stride = 0;
  std::int64_t c_token_stride = 0, c_group_stride = 0;
  std::int64_t dt_token_stride = 0;
  std::int64_t z_token_stride = 0, z_head_stride = 0;
  std::int64_t y_token_stride = 0, y_head_stride = 0;
};

using Mamba2Kernels = RowKernels<Mamba2Task>;

/// Kernels for an instruction set and types; checkpoint and activation are f32, bf16 or f16.
const Mamba2Kernels& mamba2_kernels(CpuIsa isa, DType checkpoint, DType activation);

}  // namespace replayssm::cpu
