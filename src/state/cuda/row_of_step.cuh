// A row of a step as every recurrence's kernel holds it.
#pragma once

#include <cstdint>
#include <cstring>

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
    token_begin = r.token_begin;
    token_count = r.token_count;
    slot = r.slot;
    live = r.live;
    first_place = r.first_place;
    zero = r.zero;
    own = kind == PlannedRow::kCommitted ? 0 : static_cast<int>(token_count);
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

  int places;  // of the ring
  std::int64_t token_begin, token_count;
  int slot;
  int live;         // records to replay or fold
  int first_place;  // of the oldest
  int own;          // tokens a tentative row appends; 0 for a committed row
  PlannedRow::Kind kind;
  bool zero;  // the checkpoint is zero by definition and never loaded
};

}  // namespace replayssm::cuda
