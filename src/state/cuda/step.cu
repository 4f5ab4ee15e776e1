#include "state/cuda/step.h"

#include <algorithm>
#include <limits>

#include "cuda/device_error.cuh"
#include "cuda/runtime.h"
#include "state/cuda/row_check.cuh"

namespace replayssm::cuda {
namespace {

/// The row with its cursor resolved.
__device__ PlannedRow plan_row(const PlanParams& p, const DeviceRow& row) {
  PlannedRow out;
  out.token_begin = row.token_begin;
  out.token_count = row.token_count;
  out.slot = row.slot;
  if (row.slot < 0) return out;
  const Cursor cursor = p.cursors[row.slot];
  out.live = static_cast<std::int16_t>(cursor.live());
  out.first_place =
      static_cast<std::int16_t>(cursor.checkpoint_position % p.limits.record_places());
  out.zero = cursor.checkpoint_position == 0;
  out.kind = row.kind == RowKind::kCommitted           ? PlannedRow::kCommitted
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
  const RowCheck check{.rows = p.rows,
                       .token_count = p.token_count,
                       .cursors = p.cursors,
                       .slots = p.slots,
                       .limits = p.limits,
                       .error = p.error};
  for (int row = static_cast<int>(threadIdx.x); row < p.row_count;
       row += static_cast<int>(blockDim.x)) {
    const PlannedRow planned = plan_row(p, checked_row(check, row));
    const bool first = planned.kind == PlannedRow::kFlush;
    p.planned[first ? atomicAdd(&front, 1) : atomicAdd(&back, -1) - 1] = planned;
  }
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
  if (p.conditions != nullptr && p.conditions[r.slot] != SlotCondition::kInStep) {
    report_error(p.error, DeviceError::kCondition, row,
                 static_cast<std::int64_t>(p.conditions[r.slot]),
                 static_cast<std::int64_t>(SlotCondition::kInStep));
    return;
  }
  const Cursor cursor = p.cursors[r.slot];
  const std::int64_t accepted = p.accepted[row];
  const bool all = r.kind == RowKind::kCommitted;
  SlotCondition after = SlotCondition::kReady;
  if (accepted < 0 || accepted > r.token_count || (all && accepted != r.token_count)) {
    report_error(p.error, DeviceError::kAccepted, row, accepted, r.token_count);
    if (!outlives_abort(r.kind, cursor, p.limits, true, true)) after = SlotCondition::kInvalid;
  } else {
    p.cursors[r.slot] = commit_cursor(cursor, r.kind, accepted, p.limits);
  }
  if (p.conditions != nullptr) p.conditions[r.slot] = after;
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
  return to_status(cudaGetLastError(), "launch of the plan");
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
  return to_status(cudaGetLastError(), "launch of the commit");
}

}  // namespace replayssm::cuda
