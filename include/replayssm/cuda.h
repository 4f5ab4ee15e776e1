// CUDA execution: streams, and steps whose rows and accepted counts live in device memory.
//
// A CUDA pool (StatePoolOptions::device) offers two kinds of steps that run the same kernels:
//
//  * Rows from the host: begin_step(context, span), ops, commit(context, step, span). Everything is
//    validated before it is launched, and the pool's host mirror of the cursors stays exact.
//  * Rows on the device: begin_step(context, DeviceRows), ops, commit(context, step, pointer). The
//    rows and counts are arrays that the caller may rewrite between replays of a graph that holds
//    the whole sequence. What the host cannot see is checked on the device: a row that cannot run
//    becomes padding and is reported in the pool's DeviceError. The host mirror of the cursors ends
//    with the first such step. A replay counts as such a step: it must not fall between the begin
//    and the commit of another one.
//
// Calls on one pool must be ordered by the caller: one stream, or events between several. No call
// allocates device memory or synchronizes unless its description says so.
#pragma once

#include <cstdint>

#include "replayssm/status.h"
#include "replayssm/step.h"

namespace replayssm {

/// What a CUDA op runs on. `stream` is a cudaStream_t of that device; null is its default stream.
struct CudaContext {
  CudaContext(int device_index, void* cuda_stream) : device(device_index), stream(cuda_stream) {}

  int device;
  void* stream;
};

/// A StepRow in device memory. Rows are ascending and disjoint in tokens.
struct alignas(16) DeviceRow {
  std::int64_t token_begin = 0;
  std::int64_t token_count = 0;
  std::int32_t slot = -1;  // negative: padding, outputs are zero and nothing else is touched
  RowKind kind = RowKind::kTentative;
};

/// The rows of a step in device memory. The counts are the host's and fix the launches' shapes.
struct DeviceRows {
  const DeviceRow* rows = nullptr;  // (row_count), device memory aligned to 16
  std::int64_t row_count = 0;       // at most StatePoolOptions::max_rows
  std::int64_t token_count = 0;     // every row's tokens lie in [0, token_count)
};

/// The first misuse that kernels found; what == kNone: none. Later ones do not overwrite it.
struct DeviceError {
  enum What : std::int32_t {
    kNone = 0,
    kSlot,        // slot `found`, last slot `allowed`; the row became padding
    kTokenRange,  // tokens end at `found` past the operands' `allowed`, or begin at `found` before
                  // the previous row's end `allowed`; no output of the row is written
    kTokenCount,  // a tentative row of `found` tokens, capacity `allowed`; padding
    kAccepted,    // accepted `found` of `allowed` tokens. The row accepts nothing; where the step
                  // rewrote the stored state the slot becomes invalid
    kCursor,      // `found` live records, window `allowed`; padding
    kDuplicate,   // slot `found` is already in row `allowed`; the later row became padding
    kCondition,   // the slot's condition is `found`, expected `allowed` (see SlotCondition);
                  // begin_step: padding; commit: nothing changes; copy, materialize: the target
                  // becomes invalid
  };
  std::int32_t what = kNone;
  std::int32_t row = 0;  // of the step; -1 in a copy between slots
  std::int64_t found = 0;
  std::int64_t allowed = 0;
};

/// Ok for kNone, else what was found and what is allowed.
Status to_status(const DeviceError& error);

}  // namespace replayssm
