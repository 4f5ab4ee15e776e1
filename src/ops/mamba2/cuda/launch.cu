#include "ops/mamba2/cuda/launch.h"

#include "cuda/operand_checks.h"
#include "cuda/step_launch.cuh"
#include "ops/deferred_decay.h"
#include "ops/mamba2/cuda/kernels.h"

namespace replayssm::cuda {
namespace {

Status validate_geometry(const Mamba2CudaParams& p) {
  if (p.heads < 1 || p.groups < 1 || p.heads % p.groups != 0) {
    return invalid_argument("heads is ", p.heads, ", expected a multiple of groups ", p.groups);
  }
  if (p.head_dim < 16 || p.head_dim > 256 || p.head_dim % 16 != 0) {
    return unsupported("head_dim is ", p.head_dim, ", CUDA kernels take multiples of 16 up to 256");
  }
  if (p.state_size != 64 && p.state_size != 128 && p.state_size != 256) {
    return unsupported("state_size is ", p.state_size, ", CUDA kernels take 64, 128 or 256");
  }
  return check_step_limits(p.limits, p.row_count, p.token_count);
}

template <typename State, typename Act>
Mamba2KernelFunction find(const Mamba2CudaParams& p, Mamba2Variant variant) {
  return mamba2_step_function<State, Act>(static_cast<int>(p.state_size), variant);
}

template <typename State>
Mamba2KernelFunction find_for(const Mamba2CudaParams& p, Mamba2Variant variant) {
  if (p.activation == DType::kF32) return find<State, float>(p, variant);
  if (p.activation == DType::kBF16) return find<State, BF16>(p, variant);
  return nullptr;
}

Mamba2KernelFunction find_kernel(const Mamba2CudaParams& p, Mamba2Variant variant) {
  if (p.copy.format != ReadCopyFormat::kNone) {
    const auto size = static_cast<int>(p.state_size);
    if (p.activation != DType::kBF16) return nullptr;
    if (p.checkpoint == DType::kF32)
      return mamba2_copy_step_function<float>(p.copy.format, size, variant);
    if (p.checkpoint == DType::kBF16) {
      return mamba2_copy_step_function<BF16>(p.copy.format, size, variant);
    }
    return nullptr;
  }
  if (p.checkpoint == DType::kF32) return find_for<float>(p, variant);
  if (p.checkpoint == DType::kBF16) return find_for<BF16>(p, variant);
  if (p.checkpoint == DType::kF16) return find_for<F16>(p, variant);
  return nullptr;
}

/// Launches what has been validated.
Status launch_step(const Mamba2CudaParams& params, const Mamba2CudaConfig& config,
                   cudaStream_t stream) {
  return launch_step_kernel("Mamba-2 step", find_kernel(params, config.variant), params, config,
                            kMamba2MaxWarps, params.groups, config.blocks_per_group,
                            config.launch.tail, stream);
}

}  // namespace

Status check_mamba2_support(const Mamba2CudaParams& p) {
  RSSM_RETURN_IF_ERROR(validate_geometry(p));
  if (find_kernel(p, mamba2_variant(p)) == nullptr) {
    return no_step_kernel(p.checkpoint, p.activation, p.copy.format);
  }
  return {};
}

Status validate_mamba2(const Mamba2CudaParams& p) {
  RSSM_RETURN_IF_ERROR(check_mamba2_support(p));
  if (p.row_count > 0 && (p.rows == nullptr || p.a == nullptr)) {
    return invalid_argument("rows or A is null, expected device memory");
  }
  RSSM_RETURN_IF_ERROR(check_pointer("state", p.state));
  RSSM_RETURN_IF_ERROR(check_pointer("ring_x", p.ring_x));
  RSSM_RETURN_IF_ERROR(check_pointer("ring_b", p.ring_b));
  RSSM_RETURN_IF_ERROR(check_pointer("ring_dt", p.ring_dt));
  if (defers_decay(p.checkpoint)) {
    RSSM_RETURN_IF_ERROR(check_pointer("deferred decays", p.deferred));
  }
  RSSM_RETURN_IF_ERROR(
      check_strides({{"state slot stride", p.state_slot_stride, p.checkpoint, true},
                     {"state head stride", p.state_head_stride, p.checkpoint},
                     {"x ring slot stride", p.ring_x_slot_stride, p.activation, true},
                     {"x ring head stride", p.ring_x_head_stride, p.activation},
                     {"x ring place stride", p.ring_x_place_stride, p.activation},
                     {"B ring slot stride", p.ring_b_slot_stride, p.activation, true},
                     {"B ring group stride", p.ring_b_group_stride, p.activation},
                     {"B ring place stride", p.ring_b_place_stride, p.activation}}));
  RSSM_RETURN_IF_ERROR(check_reach({{"dt ring head stride", p.ring_dt_head_stride}}));
  if (p.token_count == 0) return {};
  RSSM_RETURN_IF_ERROR(check_pointer("x", p.x));
  RSSM_RETURN_IF_ERROR(check_pointer("B", p.b));
  RSSM_RETURN_IF_ERROR(check_pointer("C", p.c));
  RSSM_RETURN_IF_ERROR(check_pointer("dt", p.dt));
  RSSM_RETURN_IF_ERROR(check_pointer("y", p.y));
  RSSM_RETURN_IF_ERROR(check_reach({{"dt token stride", p.dt_token_stride},
                                    {"y token stride", p.y_token_stride},
                                    {"y head stride", p.y_head_stride},
                                    {"z token stride", p.z_token_stride},
                                    {"z head stride", p.z_head_stride}}));
  return check_strides({{"x token stride", p.x_token_stride, p.activation},
                        {"x head stride", p.x_head_stride, p.activation},
                        {"B token stride", p.b_token_stride, p.activation},
                        {"B group stride", p.b_group_stride, p.activation},
                        {"C token stride", p.c_token_stride, p.activation},
                        {"C group stride", p.c_group_stride, p.activation}});
}

Status mamba2_cuda_step(const Mamba2CudaParams& params, const Mamba2CudaConfig& config,
                        cudaStream_t stream) {
  RSSM_RETURN_IF_ERROR(validate_mamba2(params));
  return launch_step(params, config, stream);
}

Status mamba2_cuda_step(const Mamba2CudaParams& params, const CudaDeviceInfo& device,
                        cudaStream_t stream) {
  RSSM_RETURN_IF_ERROR(validate_mamba2(params));
  RSSM_ASSIGN_OR_RETURN(const Mamba2CudaConfig config, choose_mamba2_config(params, device));
  return launch_step(params, config, stream);
}

}  // namespace replayssm::cuda
