// The pool's own CUDA kernels: slots, rows and cursors. Each is one launch on a stream; what
// depends on a cursor reads it on the device, so all of them can be captured in a graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "replayssm/cuda.h"
#include "replayssm/state_pool.h"

namespace replayssm::cuda {

/// A field of every slot's pages of one layer: (outer, places, inner) with inner in bytes.
struct DeviceField {
  std::int64_t offset = 0;  // bytes from the pool's base to slot 0's
  std::int64_t slot_stride = 0;
  std::int64_t outer = 0;
  std::int64_t places = 1;
  std::int64_t inner = 0;
  std::int32_t word = 1;     // bytes moved at a time; divides everything above
  std::int32_t history = 0;  // convolution inputs kept before the first position
  enum Kind : std::int32_t { kState, kRecord, kConv } kind = kState;  // kState: Field::is_state()
};

/// What all the kernels see. Arrays are in device memory.
struct SlotTable {
  std::byte* base = nullptr;
  const DeviceField* fields = nullptr;  // (field_count)
  std::int32_t field_count = 0;
  std::int32_t blocks_per_field = 1;
  Cursor* cursors = nullptr;            // (slots)
  SlotCondition* conditions = nullptr;  // (slots)
  std::int32_t* owners = nullptr;       // (slots) scratch of begin_rows; kNoRow between launches
  std::int64_t slots = 0;
  DeviceRow* incoming = nullptr;     // (max_rows) rows from the host
  DeviceRow* rows = nullptr;         // (max_rows) the step's rows, bad ones made padding
  std::int64_t* accepted = nullptr;  // (max_rows) counts from the host
  DeviceError* error = nullptr;
  ReplayLimits limits;
  bool rewindable = false;
};

/// Every byte of an idle entry of SlotTable::owners.
inline constexpr int kNoRowByte = 0x7f;

void launch_set_slot(const SlotTable& table, std::int32_t slot, const Cursor& cursor,
                     SlotCondition condition, cudaStream_t stream);
void launch_force_flush(const SlotTable& table, std::int32_t slot, cudaStream_t stream);

/// A slot whose records have been folded: its checkpoint is that of its position.
void launch_end_fold(const SlotTable& table, std::int32_t slot, cudaStream_t stream);

/// Copies what src owns to dst, records and convolution inputs up to `prefix` (negative: position);
/// dst becomes ready at {checkpoint_position, prefix}, or invalid if src is not ready.
void launch_copy_slot(const SlotTable& table, std::int32_t src, std::int32_t dst,
                      std::int64_t prefix, cudaStream_t stream);
/// Fills a slot's pages with NaN: all, or what its cursor does not reach.
void launch_poison(const SlotTable& table, std::int32_t slot, bool all, cudaStream_t stream);

/// Host values travel as kernel parameters, so no host memory has to outlive the call.
void launch_put_rows(const SlotTable& table, std::span<const StepRow> rows, cudaStream_t stream);
void launch_put_accepted(const SlotTable& table, std::span<const std::int64_t> accepted,
                         cudaStream_t stream);

/// Validates `rows` (not table.rows) into table.rows and moves their slots from `expected` into the
/// step.
void launch_begin_rows(const SlotTable& table, const DeviceRow* rows, std::int64_t row_count,
                       std::int64_t token_count, SlotCondition expected, cudaStream_t stream);

/// Ends the step of table.rows without moving cursors.
void launch_abort(const SlotTable& table, std::int64_t row_count, bool conv_ran,
                  bool recurrence_ran, cudaStream_t stream);

}  // namespace replayssm::cuda
