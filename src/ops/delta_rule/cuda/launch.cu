#include "ops/delta_rule/cuda/launch.h"

#include "cuda/operand_checks.h"
#include "cuda/step_launch.cuh"
#include "ops/deferred_decay.h"
#include "ops/delta_rule/cuda/kernels.h"

namespace replayssm::cuda {
namespace {

Status validate_geometry(const DeltaRuleCudaParams& p) {
  const DeltaRuleShape& s = p.shape;
  if (s.key_heads < 1 || s.value_heads < 1 || s.value_heads % s.key_heads != 0) {
    return invalid_argument("value heads is ", s.value_heads, ", expected a multiple of key heads ",
                            s.key_heads);
  }
  if (s.channel_decay && s.key_heads != s.value_heads) {
    return invalid_argument("key heads is ", s.key_heads, ", expected the value heads ",
                            s.value_heads, " where every channel has its own decay");
  }
  for (const auto& [name, found] :
       {std::pair{"key_dim", s.key_dim}, std::pair{"value_dim", s.value_dim}}) {
    if (found < 16 || found > 256 || found % 16 != 0) {
      return unsupported(name, " is ", found, ", CUDA kernels take multiples of 16 up to 256");
    }
  }
  return check_step_limits(p.limits, p.row_count, p.token_count);
}

template <typename State, typename Act>
DeltaRuleKernelFunction find(const DeltaRuleCudaParams& p, DeltaRuleVariant variant) {
  return p.shape.channel_decay ? delta_rule_step_function<State, Act, true>(variant)
                               : delta_rule_step_function<State, Act, false>(variant);
}

template <typename State>
DeltaRuleKernelFunction find_with_copy(const DeltaRuleCudaParams& p, DeltaRuleVariant variant) {
  return p.shape.channel_decay
             ? delta_rule_copy_step_function<State, true>(p.copy.format, variant)
             : delta_rule_copy_step_function<State, false>(p.copy.format, variant);
}

DeltaRuleKernelFunction find_kernel(const DeltaRuleCudaParams& p, DeltaRuleVariant variant) {
  const bool bf16_act = p.activation == DType::kBF16;
  if (!bf16_act && p.activation != DType::kF32) return nullptr;
  if (p.copy.format != ReadCopyFormat::kNone) {
    if (!bf16_act || p.fast_flush) return nullptr;
    if (p.checkpoint == DType::kF32) return find_with_copy<float>(p, variant);
    if (p.checkpoint == DType::kBF16) return find_with_copy<BF16>(p, variant);
    return nullptr;
  }
  switch (p.checkpoint) {
    case DType::kF32:
      return bf16_act ? find<float, BF16>(p, variant) : find<float, float>(p, variant);
    case DType::kBF16:
      return bf16_act ? find<BF16, BF16>(p, variant) : find<BF16, float>(p, variant);
    case DType::kF16:
      return bf16_act ? find<F16, BF16>(p, variant) : find<F16, float>(p, variant);
    default:
      return nullptr;
  }
}

/// Launches what has been validated.
Status launch_step(const DeltaRuleCudaParams& params, const DeltaRuleCudaConfig& config,
                   cudaStream_t stream) {
  return launch_step_kernel("step of the delta rule", find_kernel(params, config.variant), params,
                            config, delta_rule_warps(params, config.variant).of_block,
                            params.shape.key_heads, config.blocks_per_key, GridTail{}, stream);
}

}  // namespace

Status check_delta_rule_support(const DeltaRuleCudaParams& p) {
  RSSM_RETURN_IF_ERROR(validate_geometry(p));
  if (find_kernel(p, delta_rule_variant(p)) == nullptr) {
    return no_step_kernel(p.checkpoint, p.activation, p.copy.format);
  }
  return {};
}

Status validate_delta_rule(const DeltaRuleCudaParams& p) {
  RSSM_RETURN_IF_ERROR(check_delta_rule_support(p));
  if (p.row_count > 0 && p.rows == nullptr) {
    return invalid_argument("rows is null, expected device memory");
  }
  RSSM_RETURN_IF_ERROR(check_pointer("state", p.state));
  if (!p.shape.channel_decay && defers_decay(p.checkpoint)) {
    RSSM_RETURN_IF_ERROR(check_pointer("deferred decays", p.deferred));
  }
  RSSM_RETURN_IF_ERROR(check_pointer("k ring", p.ring_k));
  RSSM_RETURN_IF_ERROR(check_pointer("k scale ring", p.ring_k_scale));
  RSSM_RETURN_IF_ERROR(check_pointer("decay ring", p.ring_decay));
  RSSM_RETURN_IF_ERROR(check_pointer("delta ring", p.ring_delta));
  if (!p.fast_flush) {
    RSSM_RETURN_IF_ERROR(check_pointer("v ring", p.ring_v));
    RSSM_RETURN_IF_ERROR(check_pointer("beta ring", p.ring_beta));
  }
  RSSM_RETURN_IF_ERROR(
      check_strides({{"state slot stride", p.state_slot_stride, p.checkpoint, true},
                     {"state head stride", p.state_head_stride, p.checkpoint},
                     {"k ring slot stride", p.ring_k_slot_stride, p.activation, true},
                     {"k ring head stride", p.ring_k_head_stride, p.activation},
                     {"v ring slot stride", p.ring_v_slot_stride, p.activation, true},
                     {"v ring head stride", p.ring_v_head_stride, p.activation},
                     {"delta ring slot stride", p.ring_delta_slot_stride, p.activation, true},
                     {"delta ring head stride", p.ring_delta_head_stride, p.activation}}));
  if (p.shape.channel_decay) {
    RSSM_RETURN_IF_ERROR(
        check_strides({{"decay ring slot stride", p.ring_decay_slot_stride, DType::kF32, true},
                       {"decay ring head stride", p.ring_decay_head_stride, DType::kF32}}));
  } else {
    RSSM_RETURN_IF_ERROR(check_reach({{"decay ring head stride", p.ring_decay_head_stride}}));
  }
  RSSM_RETURN_IF_ERROR(check_reach({{"k scale ring head stride", p.ring_k_scale_head_stride},
                                    {"beta ring head stride", p.ring_beta_head_stride}}));
  if (p.token_count == 0) return {};
  RSSM_RETURN_IF_ERROR(check_pointer("q", p.q));
  RSSM_RETURN_IF_ERROR(check_pointer("k", p.k));
  RSSM_RETURN_IF_ERROR(check_pointer("v", p.v));
  RSSM_RETURN_IF_ERROR(check_pointer("a", p.gate));
  RSSM_RETURN_IF_ERROR(check_pointer("b", p.beta));
  RSSM_RETURN_IF_ERROR(check_pointer("o", p.o));
  if (p.shape.channel_decay) {
    const DType gate = p.gate_is_f32 ? DType::kF32 : p.activation;
    RSSM_RETURN_IF_ERROR(check_strides({{"a token stride", p.gate_token_stride, gate},
                                        {"a head stride", p.gate_head_stride, gate}}));
  } else {
    RSSM_RETURN_IF_ERROR(check_reach(
        {{"a token stride", p.gate_token_stride}, {"a head stride", p.gate_head_stride}}));
  }
  RSSM_RETURN_IF_ERROR(check_reach({{"b token stride", p.beta_token_stride},
                                    {"o token stride", p.o_token_stride},
                                    {"o head stride", p.o_head_stride}}));
  return check_strides({{"q token stride", p.q_token_stride, p.activation},
                        {"q head stride", p.q_head_stride, p.activation},
                        {"k token stride", p.k_token_stride, p.activation},
                        {"k head stride", p.k_head_stride, p.activation},
                        {"v token stride", p.v_token_stride, p.activation},
                        {"v head stride", p.v_head_stride, p.activation}});
}

Status delta_rule_cuda_step(const DeltaRuleCudaParams& params, const DeltaRuleCudaConfig& config,
                            cudaStream_t stream) {
  RSSM_RETURN_IF_ERROR(validate_delta_rule(params));
  return launch_step(params, config, stream);
}

Status delta_rule_cuda_step(const DeltaRuleCudaParams& params, const CudaDeviceInfo& device,
                            cudaStream_t stream) {
  RSSM_RETURN_IF_ERROR(validate_delta_rule(params));
  RSSM_ASSIGN_OR_RETURN(const DeltaRuleCudaConfig config, choose_delta_rule_config(params, device));
  return launch_step(params, config, stream);
}

}  // namespace replayssm::cuda
