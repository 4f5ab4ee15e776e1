// Choosing how to decode: in place, or by replay with which window.
#pragma once

#include <cstdint>
#include <string>

#include "replayssm/cpu.h"
#include "replayssm/cuda.h"
#include "replayssm/state_pool.h"

namespace replayssm {

struct DecodePlan {
  bool replay = false;
  int window = 0;            // L; 0 for plain (in-place) decoding
  double plain_seconds = 0;  // estimates per token of one sequence, over all layers
  double replay_seconds = 0;
  std::string reason;  // one line for a person
};

/// Decides for decoding `sequences` sequences together, one token each, on `context`. Uses layers,
/// types and limits.window (as the window replay would use) of `options`.
///
/// The estimate is a sum over what a step must do, with the larger of memory and arithmetic time:
///
///   plain   states read and written once per token
///   replay  states (or their read copies) read once per token, written once per window; records
///           read, appended and folded
///
/// On a CPU a write that follows a read costs nearly nothing while a fold costs arithmetic, so
/// plain usually wins for f32 states and replay for 16-bit ones, which it rounds once per window
/// instead of once per token: where replay costs less than plain or is needed for a 16-bit state's
/// accuracy and costs little more, replay is chosen.
Result<DecodePlan> choose_decode(const CpuContext& context, const StatePoolOptions& options,
                                 std::int64_t sequences);

/// The same on a GPU, by what steps take on an H200 (docs/kernels/): no device is asked. There a
/// step of few sequences is latency, of which replay has more, and one of many is bytes, of which
/// it has half; plain decoding is a committed row of one token. Estimates are of steps whose
/// launches follow each other in a graph.
Result<DecodePlan> choose_decode(const CudaContext& context, const StatePoolOptions& options,
                                 std::int64_t sequences);

}  // namespace replayssm
