// What a CUDA step does once for all layers: rows are planned before the first layer and committed
// after the last. Nothing here allocates or synchronizes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "replayssm/cuda.h"
#include "replayssm/cursor.h"
#include "replayssm/state_pool.h"
#include "replayssm/status.h"
#include "replayssm/step.h"

namespace replayssm::cuda {

/// A row as the layers' kernels use it: checked, with its cursor resolved. Written once per step by
/// cuda_plan_step, because every warp of every layer needs it and each load it would have to follow
/// costs a trip to memory.
struct alignas(16) PlannedRow {
  enum Kind : std::int8_t { kPadding, kCommitted, kReplay, kFlush };
  std::int64_t token_begin = 0;
  std::int64_t token_count = 0;
  std::int32_t slot = -1;
  std::int16_t live = 0;         // records to replay or fold
  std::int16_t first_place = 0;  // of the oldest
  Kind kind = kPadding;
  bool zero = false;  // the checkpoint is zero by definition and never loaded
};
static_assert(sizeof(PlannedRow) == 32);

/// Where a step's plan has its rows that flush: before the others, or evenly among those of its
/// first quarters, as many as the value says. The last part is without, so that no flush ends last.
enum class FlushPlaces : std::uint8_t {
  kFirst = 0,
  kFirstQuarter = 1,
  kFirstHalf = 2,
  kFirstThreeQuarters = 3
};

struct PlanParams {
  const DeviceRow* rows = nullptr;  // (rows)
  std::int64_t row_count = 0;
  std::int64_t token_count = 0;     // tokens of the operands
  const Cursor* cursors = nullptr;  // (slots)
  std::int64_t slots = 0;
  ReplayLimits limits;
  DeviceError* error = nullptr;   // sticky, may be null
  PlannedRow* planned = nullptr;  // (rows)
  FlushPlaces flushes = FlushPlaces::kFirst;
};

/// Checks a step's rows, resolves their cursors, and puts those that flush before or among the
/// others: a flush is many times the work of a replay, so begun last it would be what a launch
/// waits for. A row that names what does not exist becomes padding and is reported in the error
/// word. Results do not depend on the order.
Status cuda_plan_step(const PlanParams& params, cudaStream_t stream);

/// The commit of a step, for all layers at once.
struct CommitParams {
  const DeviceRow* rows = nullptr;         // (rows)
  const std::int64_t* accepted = nullptr;  // (rows)
  std::int64_t row_count = 0;
  Cursor* cursors = nullptr;            // (slots)
  SlotCondition* conditions = nullptr;  // (slots), or null: not kept
  std::int64_t slots = 0;
  ReplayLimits limits;
  DeviceError* error = nullptr;  // sticky, may be null
};

/// Moves the cursors of all rows by their accepted counts. A row whose count is not allowed (0 to
/// its tokens; all of a committed row's) keeps its cursor and is reported in the error word.
Status cuda_commit(const CommitParams& params, cudaStream_t stream);

}  // namespace replayssm::cuda
