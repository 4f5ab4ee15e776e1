// The commit of a step: one small kernel for all layers, so that it can live inside a graph.
#include "cuda/device_error.cuh"
#include "ops/mamba2/cuda/launch.h"

namespace replayssm::cuda {
namespace {

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
