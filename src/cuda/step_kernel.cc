#include "cuda/step_kernel.h"

#include <atomic>
#include <cstdlib>
#include <string_view>

namespace replayssm::cuda {
namespace {

std::atomic<StepKernel> forced{StepKernel::kAuto};
std::atomic<int> forced_tiles{0};

}  // namespace

void force_step_kernel(StepKernel kernel) { forced = kernel; }

void force_run_tiles(int tiles) { forced_tiles = tiles; }
int forced_run_tiles() { return forced_tiles; }

Result<StepKernel> requested_step_kernel() {
  const char* requested = std::getenv("REPLAYSSM_CUDA_STEP");
  if (requested == nullptr || *requested == '\0') return StepKernel::kAuto;
  const std::string_view name = requested;
  if (name == "streamed") return StepKernel::kStreamed;
  if (name == "direct") return StepKernel::kDirect;
  return unsupported("REPLAYSSM_CUDA_STEP: '", name, "', expected streamed or direct");
}

Result<bool> takes_direct_kernel(StepKernel asked, bool any_rows, std::int64_t state_rows,
                                 std::int64_t most, const CudaDeviceInfo& device) {
  if (asked == StepKernel::kAuto) asked = forced;
  if (asked == StepKernel::kAuto) {
    static const Result<StepKernel> requested = requested_step_kernel();
    RSSM_ASSIGN_OR_RETURN(asked, requested);
  }
  if (asked != StepKernel::kAuto) return asked == StepKernel::kDirect;
  return any_rows || state_rows <= most * device.multiprocessors;
}

}  // namespace replayssm::cuda
