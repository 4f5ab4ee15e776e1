// The two numbers that place a sequence, and the rules that move them. Every layer, backend and
// operation derives what it does from these functions; nothing else is stored.
//
//   checkpoint after [0, checkpoint_position)
//     + ring records of [checkpoint_position, position)  =  state after `position` tokens
#pragma once

#include <cstdint>

#include "replayssm/host_device.h"
#include "replayssm/step.h"

namespace replayssm {

struct Cursor {
  std::int64_t checkpoint_position = 0;  // tokens folded into the checkpoint
  std::int64_t position = 0;             // tokens accepted
  bool force_flush = false;              // the next tentative row flushes if anything is live

  /// Records to replay: n = position - checkpoint_position, always in [0, window].
  RSSM_HOST_DEVICE constexpr std::int64_t live() const { return position - checkpoint_position; }

  friend bool operator==(const Cursor&, const Cursor&) = default;
};

/// Limits shared by all layers of a pool: 1 <= draft_capacity <= window.
struct ReplayLimits {
  static constexpr int kMaxWindow = 64;
  static constexpr int kMaxDraftCapacity = 16;

  int window = 16;         // L: most records replayed before a flush
  int draft_capacity = 1;  // T: most tentative tokens one step carries for a row

  /// Record places of a ring; the record of absolute position p lives at p mod record_places().
  RSSM_HOST_DEVICE constexpr int record_places() const { return window + draft_capacity; }

  /// Input places of a convolution ring of `width` taps.
  RSSM_HOST_DEVICE constexpr int conv_places(int width, bool rewindable) const {
    return width - 1 + draft_capacity + (rewindable ? window : 0);
  }
};

/// The flush predicate of a tentative row: n > 0 and (n + T > L or force_flush), with T the pool's
/// capacity, not the row's count.
RSSM_HOST_DEVICE constexpr bool tentative_row_flushes(const Cursor& cursor, ReplayLimits limits) {
  const std::int64_t live = cursor.live();
  return live > 0 && (live + limits.draft_capacity > limits.window || cursor.force_flush);
}

/// Whether the row rewrites the checkpoint. A committed row always does.
RSSM_HOST_DEVICE constexpr bool row_flushes(RowKind kind, const Cursor& cursor,
                                            ReplayLimits limits) {
  return kind == RowKind::kCommitted || tentative_row_flushes(cursor, limits);
}

/// Whether a row's slot is as it was before a step that is given up, after its convolutions or
/// recurrences have run. Tentative tokens lie past the position, where nothing reads; a rewritten
/// checkpoint, or a committed row's inputs over the convolution's history, cannot be taken back.
RSSM_HOST_DEVICE constexpr bool outlives_abort(RowKind kind, const Cursor& cursor,
                                               ReplayLimits limits, bool conv_ran,
                                               bool recurrence_ran) {
  return !(recurrence_ran && row_flushes(kind, cursor, limits)) &&
         !(conv_ran && kind == RowKind::kCommitted);
}

/// The cursor after committing `accepted` of the row's tokens. A committed row accepts all of them.
RSSM_HOST_DEVICE constexpr Cursor commit_cursor(Cursor cursor, RowKind kind, std::int64_t accepted,
                                                ReplayLimits limits) {
  if (kind == RowKind::kCommitted) {
    cursor.position += accepted;
    cursor.checkpoint_position = cursor.position;
  } else {
    if (tentative_row_flushes(cursor, limits)) cursor.checkpoint_position = cursor.position;
    cursor.position += accepted;
  }
  cursor.force_flush = false;
  return cursor;
}

}  // namespace replayssm
