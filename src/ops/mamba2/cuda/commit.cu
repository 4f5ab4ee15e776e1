// The commit of a step: one small kernel for all layers, so that it can live inside a graph.
#include "ops/mamba2/cuda/kernel.cuh"
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
  const std::int64_t accepted = p.accepted[row];
  const bool all = r.kind == RowKind::kCommitted;
  if (accepted < 0 || accepted > r.token_count || (all && accepted != r.token_count)) {
    report_error(p.error, DeviceError::kAccepted, row, accepted, r.token_count);
    return;
  }
  p.cursors[r.slot] = commit_cursor(p.cursors[r.slot], r.kind, accepted, p.limits);
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
