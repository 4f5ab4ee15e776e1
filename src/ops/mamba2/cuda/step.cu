// What a step does once for all layers: small kernels, so that they can live inside a graph.
#include "ops/mamba2/cuda/launch.h"
#include "ops/mamba2/cuda/params.h"

namespace replayssm::cuda {
namespace {

/// Keeps the first error: later ones do not overwrite it.
__device__ void report_error(DeviceError* error, DeviceError::What what, std::int64_t row,
                                    std::int64_t found, std::int64_t allowed) {
  if (error == nullptr) return;
  if (atomicCAS(reinterpret_cast<int*>(&error->what), DeviceError::kNone, what) != 0) return;
  error->row = static_cast<std::int32_t>(row);
  error->found = found;
  error->allowed = allowed;
}

__global__ void commit_kernel(const __grid_constant__ CommitParams p) {
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= p.row_count) return;
  const DeviceRow r = p.rows[row];
  if (r.slot < 0) return;
  if (r.slot >= p.slots) {
    report_error(p.error, DeviceError::kSlot, row, r.slot, p.slots - 1);
    return;
  }
  const std::int64_t accepted = p.accepted[row];
  const bool all = r.kind == RowKind::kCommitted;
  if (accepted < 0 || accepted > r.token_count || (all && accepted != r.token_count)) {
    report_error(p.error, DeviceError::kAccepted, row, accepted, r.token_count);
    return;
  }
  p.cursors[r.slot] = commit_cursor(p.cursors[r.slot], r.kind, accepted, p.limits);
}

/// The row with its cursor resolved, or padding if it names what does not exist.
__device__ PlannedRow plan_row(const PlanParams& p, std::int64_t row) {
  const DeviceRow r = p.rows[row];
  const auto refuse = [&](DeviceError::What what, std::int64_t found, std::int64_t allowed) {
    report_error(p.error, what, row, found, allowed);
  };
  PlannedRow out;
  if (r.token_begin < 0 || r.token_count < 0 || r.token_begin > p.token_count - r.token_count) {
    refuse(DeviceError::kTokenRange, r.token_begin + r.token_count, p.token_count);
    return out;
  }
  out.token_begin = r.token_begin;
  out.token_count = r.token_count;
  if (r.slot < 0) return out;
  if (r.slot >= p.slots) {
    refuse(DeviceError::kSlot, r.slot, p.slots - 1);
    return out;
  }
  const bool committed = r.kind == RowKind::kCommitted;
  if (!committed && (r.token_count < 1 || r.token_count > p.limits.draft_capacity)) {
    refuse(DeviceError::kTokenCount, r.token_count, p.limits.draft_capacity);
    return out;
  }
  const Cursor cursor = p.cursors[r.slot];
  const std::int64_t live = cursor.live();
  if (live < 0 || live > p.limits.window || cursor.checkpoint_position < 0) {
    refuse(DeviceError::kCursor, live, p.limits.window);
    return out;
  }
  out.slot = r.slot;
  out.live = static_cast<std::int16_t>(live);
  out.first_place =
      static_cast<std::int16_t>(cursor.checkpoint_position % p.limits.record_places());
  out.zero = cursor.checkpoint_position == 0;
  out.kind = committed                                    ? PlannedRow::kCommitted
             : tentative_row_flushes(cursor, p.limits) ? PlannedRow::kFlush
                                                          : PlannedRow::kReplay;
  return out;
}

/// Rows that flush go to the front, the others to the back; among themselves in any order.
__global__ void plan_kernel(const __grid_constant__ PlanParams p) {
  __shared__ int front;
  __shared__ int back;
  if (threadIdx.x == 0) {
    front = 0;
    back = static_cast<int>(p.row_count);
  }
  __syncthreads();
  for (int row = static_cast<int>(threadIdx.x); row < p.row_count;
       row += static_cast<int>(blockDim.x)) {
    const PlannedRow planned = plan_row(p, row);
    const bool first = planned.kind == PlannedRow::kFlush;
    p.planned[first ? atomicAdd(&front, 1) : atomicAdd(&back, -1) - 1] = planned;
  }
}

}  // namespace

Status cuda_plan_step(const PlanParams& params, cudaStream_t stream) {
  if (params.row_count < 0 || params.row_count > std::numeric_limits<std::int32_t>::max()) {
    return invalid_argument("rows to plan is ", params.row_count, ", expected 0 to ",
                            std::numeric_limits<std::int32_t>::max());
  }
  if (params.row_count == 0) return {};
  if (params.rows == nullptr || params.cursors == nullptr || params.planned == nullptr) {
    return invalid_argument("rows, cursors or planned rows is null, expected device memory");
  }
  const unsigned threads =
      static_cast<unsigned>(std::min<std::int64_t>(1024, (params.row_count + 31) / 32 * 32));
  plan_kernel<<<1, threads, 0, stream>>>(params);
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return {};
  return make_status(StatusCode::kInternal, "launch of the plan: ", cudaGetErrorString(error));
}

Status cuda_commit(const CommitParams& params, cudaStream_t stream) {
  if (params.row_count < 0) {
    return invalid_argument("rows to commit is ", params.row_count, ", expected 0 or more");
  }
  if (params.row_count == 0) return {};
  if (params.rows == nullptr || params.accepted == nullptr || params.cursors == nullptr) {
    return invalid_argument("rows, accepted or cursors is null, expected device memory");
  }
  constexpr int kThreads = 128;
  const std::int64_t blocks = (params.row_count + kThreads - 1) / kThreads;
  commit_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return {};
  return make_status(StatusCode::kInternal, "launch of the commit: ", cudaGetErrorString(error));
}

}  // namespace replayssm::cuda
