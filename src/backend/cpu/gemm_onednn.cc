#include <dnnl.h>
#include <omp.h>

#include <algorithm>
#include <atomic>

#include "backend/cpu/gemm.h"
#include "backend/cpu/kernels.h"

namespace replayssm::cpu {
namespace {

#define RSSM_STRING_INNER(x) #x
#define RSSM_STRING(x) RSSM_STRING_INNER(x)

/// Output rows of a panel: enough panels to spread over threads, each long enough to multiply well.
constexpr std::int64_t panel_rows_for(std::int64_t out) {
  const std::int64_t sixteenth = (out / 16 + 31) / 32 * 32;
  return sixteenth < 64 ? 64 : sixteenth > 256 ? 256 : sixteenth;
}

/// oneDNN multiplies on the calling thread while this lives. Its own OpenMP threads would compete
/// for cores with the workers of the pool, which spin for a while before they sleep.
class SingleThreaded {
 public:
  SingleThreaded() : previous_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~SingleThreaded() { omp_set_num_threads(previous_); }
  SingleThreaded(const SingleThreaded&) = delete;
  SingleThreaded& operator=(const SingleThreaded&) = delete;

 private:
  int previous_;
};

}  // namespace

Status gemm(const CpuContext& context, std::span<const GemmBlock> blocks,
            const GemmWeights& weights, Scratch& scratch) {
  if (blocks.empty()) return {};
  const std::int64_t in = weights.in;
  const std::int64_t panel_rows = panel_rows_for(weights.out);
  const bool widen = weights.dtype != DType::kF32;
  if (widen && !scratch.reserve(panel_rows * in)) {
    return resource_exhausted("matmul: no memory for a panel of ", panel_rows, " x ", in,
                              " weights");
  }
  const auto widen_panel = backend_kernels(context.isa).widen[storage_index(weights.dtype)];
  const std::size_t element = size_of(weights.dtype);
  const std::int64_t panels = (weights.out + panel_rows - 1) / panel_rows;
  std::atomic<dnnl_status_t> failure{dnnl_success};
  context.parallel_for(panels, [&](std::int64_t panel, int worker) {
    const SingleThreaded guard;
    const std::int64_t first = panel * panel_rows;
    const std::int64_t count = std::min(panel_rows, weights.out - first);
    const auto* source = static_cast<const std::byte*>(weights.data) +
                         static_cast<std::size_t>(first * in) * element;
    const float* w = reinterpret_cast<const float*>(source);
    if (widen) {
      widen_panel(source, scratch.get(worker), count * in);
      w = scratch.get(worker);
    }
    for (const GemmBlock& block : blocks) {
      const dnnl_status_t status =
          dnnl_sgemm('N', 'T', block.rows, count, in, 1.0f, block.x, block.x_stride, w, in, 0.0f,
                     block.y + first, block.y_stride);
      if (status != dnnl_success) failure.store(status, std::memory_order_relaxed);
    }
  });
  if (const dnnl_status_t status = failure.load(); status != dnnl_success) {
    return make_status(StatusCode::kInternal, "matmul: oneDNN sgemm failed with status ",
                       static_cast<int>(status), " for weights ", weights.out, " x ", in);
  }
  return {};
}

const char* gemm_name() {
  return "oneDNN " RSSM_STRING(DNNL_VERSION_MAJOR) "." RSSM_STRING(
      DNNL_VERSION_MINOR) "." RSSM_STRING(DNNL_VERSION_PATCH);
}

}  // namespace replayssm::cpu
