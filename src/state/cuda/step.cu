#include "state/cuda/step.h"

#include <algorithm>
#include <limits>

#include "cuda/device_error.cuh"
#include "cuda/language.cuh"
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

/// Where rows go that flush evenly among the first of them: places of row i of those, and j of
/// others.
struct SpreadOrder {
  std::int64_t flushes;
  std::int64_t span;  // of places among which they are

  __device__ SpreadOrder(std::int64_t flushing, std::int64_t rows, FlushPlaces among)
      : flushes(flushing), span(max(flushing, (rows * static_cast<int>(among) + 3) / 4)) {}
  __device__ std::int64_t of_flush(std::int64_t i) const { return i * span / flushes; }
  /// The flushes before it are those with of_flush(i) - i <= j.
  __device__ std::int64_t of_other(std::int64_t j) const {
    const std::int64_t others = span - flushes;  // within the span
    const std::int64_t before = others == 0 ? flushes : ((j + 1) * flushes + others - 1) / others;
    return j + min(before, flushes);
  }
};

/// Rows keep no order among those that flush, nor among the others.
__global__ void plan_kernel(const __grid_constant__ PlanParams p) {
  __shared__ int flushes;
  __shared__ int next_flush;
  __shared__ int next_other;
  if (threadIdx.x == 0) flushes = next_flush = next_other = 0;
  __syncthreads();
  RowCheck check{.rows = p.rows,
                 .token_count = p.token_count,
                 .cursors = p.cursors,
                 .slots = p.slots,
                 .limits = p.limits,
                 .error = nullptr};
  const auto for_rows = [&](auto visit) {
    for (int row = static_cast<int>(threadIdx.x); row < p.row_count;
         row += static_cast<int>(blockDim.x)) {
      visit(plan_row(p, checked_row(check, row)));
    }
  };
  const bool spreads = p.flushes != FlushPlaces::kFirst;
  if (spreads) {
    for_rows([&](const PlannedRow& planned) {
      if (planned.kind == PlannedRow::kFlush) atomicAdd(&flushes, 1);
    });
    __syncthreads();
  }
  check.error = p.error;  // reported once
  const SpreadOrder spread(flushes, p.row_count, p.flushes);
  for_rows([&](const PlannedRow& planned) {
    std::int64_t to;
    if (planned.kind == PlannedRow::kFlush) {
      const std::int64_t i = atomicAdd(&next_flush, 1);
      to = spreads ? spread.of_flush(i) : i;
    } else {
      const std::int64_t j = atomicAdd(&next_other, 1);
      to = spreads ? spread.of_other(j) : p.row_count - 1 - j;
    }
    p.planned[to] = planned;
  });
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
  launch_kernel(plan_kernel, 1, threads, 0, stream, params);
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
  launch_kernel(commit_kernel, static_cast<unsigned>(blocks), kThreads, 0, stream, params);
  return to_status(cudaGetLastError(), "launch of the commit");
}

}  // namespace replayssm::cuda
