// Which of its kernels a recurrence's step takes.
#pragma once

#include <cstdint>

#include "cuda/query.h"
#include "replayssm/dtype.h"
#include "replayssm/status.h"

namespace replayssm::cuda {

enum class StepKernel {
  kAuto,
  kStreamed,  // tiles through shared memory, outputs from weights: as many bytes as can be
  kDirect,    // rows in registers, records one after the other: as few latencies as can be
};

/// The environment's REPLAYSSM_CUDA_STEP, "streamed" or "direct", for comparisons: a step that has
/// no direct kernel is streamed all the same. kAuto if it is not set; anything else is refused.
Result<StepKernel> requested_step_kernel();

/// What steps of this process take from now on, whatever the environment says; kAuto: what it says.
/// For tests.
void force_step_kernel(StepKernel kernel);

/// Tiles of a run of the streamed kernels where their tuning does not say, for tests: runs of
/// several tiles are chosen for many rows. Half of the rows of a Mamba-2 step are its tail then. 0:
/// as chosen.
void force_run_tiles(int tiles);
int forced_run_tiles();

/// Whether the direct kernel is the faster one for any number of rows: plain decoding of f32 states
/// prepares next to nothing for many rows to share, and writes what it has in registers. With
/// two-byte states it has too much to convert.
constexpr bool is_direct_for_any_rows(bool plain, DType checkpoint) {
  return plain && checkpoint == DType::kF32;
}

/// Whether a step that has both kernels takes the direct one: where it is faster for `any_rows`,
/// and else up to `most` state rows, of all heads and rows of the step, for a multiprocessor.
Result<bool> takes_direct_kernel(StepKernel asked, bool any_rows, std::int64_t state_rows,
                                 std::int64_t most, const CudaDeviceInfo& device);

/// Why, for people.
constexpr const char* direct_reason(bool any_rows) {
  return any_rows ? "plain decoding: the state goes to registers and back"
                  : "few rows: their state goes straight to registers";
}

}  // namespace replayssm::cuda
