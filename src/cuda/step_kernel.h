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

/// Whether a step that has both kernels takes the direct one. `state_rows`: of all heads and rows
/// of the step; `most`: of them for a multiprocessor, up to which the direct kernel is faster.
Result<bool> takes_direct_kernel(StepKernel asked, std::int64_t state_rows, std::int64_t most,
                                 const CudaDeviceInfo& device);

/// `most` of a step that takes the direct kernel for any number of rows.
inline constexpr std::int64_t kAnyNumberOfRows = std::int64_t{1} << 48;
/// Whether it does: plain decoding of f32 states prepares next to nothing for many rows to share,
/// and writes what it has in registers. With two-byte states it has too much to convert.
template <typename Params>
bool takes_direct_kernel_always(const Params& p) {
  return p.plain && p.checkpoint == DType::kF32;
}

/// Why, for people.
inline constexpr const char* kDirectReason = "few rows: their state goes straight to registers";
inline constexpr const char* kDirectPlainReason =
    "plain decoding: the state goes to registers and back";

}  // namespace replayssm::cuda
