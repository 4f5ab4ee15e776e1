// What may be wrong with a step's row and is only seen on the device.
#pragma once

#include <cstdint>

#include "cuda/device_error.cuh"
#include "replayssm/cursor.h"
#include "replayssm/state_pool.h"

namespace replayssm::cuda {

struct RowCheck {
  const DeviceRow* rows = nullptr;
  std::int64_t token_count = 0;               // tokens of the operands
  const Cursor* cursors = nullptr;            // (slots)
  const SlotCondition* conditions = nullptr;  // (slots), or null: not kept
  SlotCondition expected = SlotCondition::kReady;
  std::int64_t slots = 0;
  ReplayLimits limits;
  DeviceError* error = nullptr;  // sticky, may be null
};

/// The row as ops may run it, before duplicates are looked for.
__device__ inline DeviceRow checked_row(const RowCheck& p, std::int64_t i) {
  const DeviceRow row = p.rows[i];
  const auto fits = [&](const DeviceRow& r) {
    return r.token_begin >= 0 && r.token_count >= 0 && r.token_count <= p.token_count &&
           r.token_begin <= p.token_count - r.token_count;
  };
  if (!fits(row)) {
    const bool long_row = row.token_count < 0 || row.token_count > p.token_count;
    report_error(p.error, DeviceError::kTokenRange, i,
                 long_row              ? row.token_count
                 : row.token_begin < 0 ? row.token_begin
                                       : row.token_begin + row.token_count,
                 p.token_count);
    return {};  // its outputs lie where they may not
  }
  // A row before that does not fit reaches nowhere, and is reported itself.
  if (i > 0 && fits(p.rows[i - 1])) {
    const std::int64_t earliest = p.rows[i - 1].token_begin + p.rows[i - 1].token_count;
    if (row.token_begin < earliest) {
      report_error(p.error, DeviceError::kTokenRange, i, row.token_begin, earliest);
      return {};
    }
  }
  if (row.slot < 0) return row;
  DeviceRow padding = row;
  padding.slot = -1;
  if (row.slot >= p.slots) {
    report_error(p.error, DeviceError::kSlot, i, row.slot, p.slots - 1);
    return padding;
  }
  if (row.kind != RowKind::kCommitted &&
      (row.token_count < 1 || row.token_count > p.limits.draft_capacity)) {
    report_error(p.error, DeviceError::kTokenCount, i, row.token_count, p.limits.draft_capacity);
    return padding;
  }
  if (p.conditions != nullptr && p.conditions[row.slot] != p.expected) {
    report_error(p.error, DeviceError::kCondition, i,
                 static_cast<std::int64_t>(p.conditions[row.slot]),
                 static_cast<std::int64_t>(p.expected));
    return padding;
  }
  const Cursor cursor = p.cursors[row.slot];
  if (cursor.checkpoint_position < 0 || cursor.live() < 0 || cursor.live() > p.limits.window) {
    report_error(p.error, DeviceError::kCursor, i, cursor.live(), p.limits.window);
    return padding;
  }
  return row;
}

}  // namespace replayssm::cuda
