// A row of a step as every recurrence's kernel holds it.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/ptx/multiply.cuh"
#include "replayssm/cursor.h"
#include "state/cuda/step.h"

namespace replayssm::cuda {

class RowOfStep {
 protected:
  __device__ __forceinline__ explicit RowOfStep(const ReplayLimits& limits)
      : places(static_cast<int>(limits.record_places())) {}

  __device__ __forceinline__ void read_row(const PlannedRow* row) {
    const auto* at = reinterpret_cast<const uint4*>(row);
    const uint4 words[2] = {at[0], at[1]};
    PlannedRow r;
    memcpy(&r, words, sizeof(r));
    kind = r.kind;
    token_begin = static_cast<int>(r.token_begin);
    token_count = static_cast<int>(r.token_count);
    slot = r.slot;
    live = r.live;
    first_place = r.first_place;
    zero = r.zero;
    own = kind == PlannedRow::kCommitted ? 0 : token_count;
  }

  /// Without tokens there is nothing to do but fold.
  __device__ __forceinline__ bool has_nothing_to_do() const {
    return token_count == 0 && (live == 0 || kind == PlannedRow::kReplay);
  }

  /// Of a live record, or of a token behind them.
  __device__ __forceinline__ int place(int entry) const {
    const int at = first_place + entry;
    return at < places ? at : at - places;
  }

  /// An index times its axis' stride, by one instruction to 64 bits where their product takes four:
  /// all strides but those of slots fit in 32 (cuda/operand_checks.h).
  static __device__ __forceinline__ std::int64_t along(int index, std::int64_t stride) {
    return ptx::multiply_wide(index, static_cast<std::int32_t>(stride));
  }

  /// Items along an axis.
  template <typename T>
  struct Axis {
    T* from;
    int index;
    std::int64_t stride;
  };
  /// The item of one or the other, without a branch: lanes differ.
  template <typename T>
  static __device__ __forceinline__ T* item_of(bool first, const Axis<T>& a, const Axis<T>& b) {
    T* const from = first ? a.from : b.from;
    const auto stride = static_cast<std::int32_t>(first ? a.stride : b.stride);
    return from + along(first ? a.index : b.index, stride);
  }

  int places;  // of the ring
  int token_begin, token_count;
  int slot;
  int live;         // records to replay or fold
  int first_place;  // of the oldest
  int own;          // tokens a tentative row appends; 0 for a committed row
  PlannedRow::Kind kind;
  bool zero;  // the checkpoint is zero by definition and never loaded
};

}  // namespace replayssm::cuda
