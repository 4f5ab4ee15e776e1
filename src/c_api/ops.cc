// The ops of the C interface: arguments, steps, explanations.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "c_api/boundary.h"
#include "replayssm/ops/causal_conv1d.h"
#include "replayssm/ops/gated_delta_net.h"
#include "replayssm/ops/kimi_delta_attention.h"
#include "replayssm/ops/mamba2.h"
#include "replayssm/tensor.h"

namespace {

using namespace replayssm;         // NOLINT(google-build-using-namespace)
using namespace replayssm::c_api;  // NOLINT(google-build-using-namespace)

static_assert(TensorView::kMaxRank == RSSM_MAX_RANK);

/// One tensor of an op: its name in messages, the caller's, and where the op takes it from.
struct Operand {
  const char* name;
  const rssm_tensor& from;
  TensorView& to;
};

Status convert(const char* op, std::initializer_list<Operand> operands) {
  for (const auto& [name, from, to] : operands) {
    if (from.data == nullptr && from.rank == 0) continue;
    if (from.rank < 0 || from.rank > RSSM_MAX_RANK) {
      return invalid_argument(op, " ", name, " has rank ", from.rank, ", expected 0..",
                              RSSM_MAX_RANK);
    }
    RSSM_ASSIGN_OR_RETURN(to.dtype, dtype(from.dtype, op, " ", name));
    to.data = from.data;
    to.rank = from.rank;
    std::copy_n(from.shape, from.rank, to.shape.begin());
    std::copy_n(from.strides, from.rank, to.strides.begin());
  }
  return {};
}

template <typename Args>
Status check_op(const rssm_pool* pool, const rssm_step* step, const Args* args) {
  RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
  RSSM_RETURN_IF_ERROR(check_not_null("step", step));
  return check_struct("args", args);
}

/// The delta rule's families name what they share alike, here and there.
template <typename Args, typename Params>
Args delta_rule_defaults(const Params& from) {
  Args defaults{};
  defaults.beta_doubled = from.beta_doubled ? 1 : 0;
  defaults.normalize = from.normalize ? 1 : 0;
  defaults.norm_epsilon = from.norm_epsilon;
  return defaults;
}

template <typename Args, typename Params, typename Operands>
Status convert_delta_rule(const char* family, const Args& args, Params& params,
                          Operands& operands) {
  params.beta_doubled = args.beta_doubled != 0;
  params.normalize = args.normalize != 0;
  params.norm_epsilon = args.norm_epsilon;
  if (args.scale != 0.0f) params.scale = args.scale;
  return convert(family, {{"A_log", args.a_log, params.a_log},
                          {"dt_bias", args.dt_bias, params.dt_bias},
                          {"q", args.q, operands.q},
                          {"k", args.k, operands.k},
                          {"v", args.v, operands.v},
                          {"a", args.a, operands.a},
                          {"b", args.b, operands.b},
                          {"o", args.o, operands.o}});
}

/// `family` is a family's explain function: (context, pool, layer), and on CUDA the rows.
template <typename Family>
rssm_status explain(const rssm_pool* pool, const rssm_context* context, std::int32_t layer,
                    std::int64_t rows, char* buffer, std::uint64_t capacity, std::uint64_t* needed,
                    Family family) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    if (capacity > 0) RSSM_RETURN_IF_ERROR(check_not_null("buffer", buffer));
    std::string text;
    RSSM_RETURN_IF_ERROR(with_context(context, [&]<typename Context>(const Context& c) -> Status {
      if constexpr (kIsCuda<Context>) {
        RSSM_ASSIGN_OR_RETURN(text, family(c, pool->pool, layer, rows));
      } else {
        RSSM_ASSIGN_OR_RETURN(text, family(c, pool->pool, layer));
      }
      return {};
    }));
    if (needed != nullptr) *needed = text.size() + 1;
    if (capacity > 0) {
      buffer[text.copy(buffer, static_cast<std::size_t>(capacity - 1))] = '\0';
    }
    return {};
  });
}

}  // namespace

extern "C" {

rssm_status rssm_mamba2_args_init(rssm_mamba2_args* args, size_t size) {
  const Mamba2Params from;
  rssm_mamba2_args defaults{};
  defaults.dt_softplus = from.dt_softplus ? 1 : 0;
  defaults.dt_min = from.dt_min;
  defaults.dt_max = from.dt_max;
  return init_struct("args", args, size, defaults);
}

rssm_status rssm_mamba2_step(rssm_pool* pool, const rssm_context* context, int32_t layer,
                             rssm_step* step, const rssm_mamba2_args* args) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_op(pool, step, args));
    Mamba2Params params;
    params.dt_softplus = args->dt_softplus != 0;
    params.dt_min = args->dt_min;
    params.dt_max = args->dt_max;
    Mamba2Operands operands;
    RSSM_RETURN_IF_ERROR(convert("mamba2", {{"D", args->d, params.d},
                                            {"dt_bias", args->dt_bias, params.dt_bias},
                                            {"x", args->x, operands.x},
                                            {"B", args->b, operands.b},
                                            {"C", args->c, operands.c},
                                            {"dt", args->dt, operands.dt},
                                            {"z", args->z, operands.z},
                                            {"y", args->y, operands.y}}));
    return with_context(context, [&](const auto& c) {
      return mamba2_step(c, pool->pool, layer, *step->step, params, operands);
    });
  });
}

rssm_status rssm_mamba2_explain(const rssm_pool* pool, const rssm_context* context, int32_t layer,
                                int64_t rows, char* buffer, uint64_t capacity, uint64_t* needed) {
  return explain(pool, context, layer, rows, buffer, capacity, needed,
                 [](const auto&... on) { return mamba2_explain(on...); });
}

rssm_status rssm_gated_delta_net_args_init(rssm_gated_delta_net_args* args, size_t size) {
  return init_struct("args", args, size,
                     delta_rule_defaults<rssm_gated_delta_net_args>(GatedDeltaNetParams{}));
}

rssm_status rssm_gated_delta_net_step(rssm_pool* pool, const rssm_context* context, int32_t layer,
                                      rssm_step* step, const rssm_gated_delta_net_args* args) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_op(pool, step, args));
    GatedDeltaNetParams params;
    GatedDeltaNetOperands operands;
    RSSM_RETURN_IF_ERROR(convert_delta_rule("gated_delta_net", *args, params, operands));
    return with_context(context, [&](const auto& c) {
      return gated_delta_net_step(c, pool->pool, layer, *step->step, params, operands);
    });
  });
}

rssm_status rssm_gated_delta_net_explain(const rssm_pool* pool, const rssm_context* context,
                                         int32_t layer, int64_t rows, char* buffer,
                                         uint64_t capacity, uint64_t* needed) {
  return explain(pool, context, layer, rows, buffer, capacity, needed,
                 [](const auto&... on) { return gated_delta_net_explain(on...); });
}

rssm_status rssm_kimi_delta_attention_args_init(rssm_kimi_delta_attention_args* args, size_t size) {
  return init_struct(
      "args", args, size,
      delta_rule_defaults<rssm_kimi_delta_attention_args>(KimiDeltaAttentionParams{}));
}

rssm_status rssm_kimi_delta_attention_step(rssm_pool* pool, const rssm_context* context,
                                           int32_t layer, rssm_step* step,
                                           const rssm_kimi_delta_attention_args* args) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_op(pool, step, args));
    KimiDeltaAttentionParams params;
    KimiDeltaAttentionOperands operands;
    if (args->lower_bound != 0.0f) params.lower_bound = args->lower_bound;
    RSSM_RETURN_IF_ERROR(convert_delta_rule("kimi_delta_attention", *args, params, operands));
    return with_context(context, [&](const auto& c) {
      return kimi_delta_attention_step(c, pool->pool, layer, *step->step, params, operands);
    });
  });
}

rssm_status rssm_kimi_delta_attention_explain(const rssm_pool* pool, const rssm_context* context,
                                              int32_t layer, int64_t rows, char* buffer,
                                              uint64_t capacity, uint64_t* needed) {
  return explain(pool, context, layer, rows, buffer, capacity, needed,
                 [](const auto&... on) { return kimi_delta_attention_explain(on...); });
}

rssm_status rssm_causal_conv1d_args_init(rssm_causal_conv1d_args* args, size_t size) {
  rssm_causal_conv1d_args defaults{};
  defaults.silu = CausalConv1dOperands{}.silu ? 1 : 0;
  return init_struct("args", args, size, defaults);
}

rssm_status rssm_causal_conv1d_step(rssm_pool* pool, const rssm_context* context, int32_t layer,
                                    rssm_step* step, const rssm_causal_conv1d_args* args) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_op(pool, step, args));
    CausalConv1dOperands operands;
    operands.silu = args->silu != 0;
    RSSM_RETURN_IF_ERROR(convert("convolution", {{"u", args->u, operands.u},
                                                 {"weight", args->weight, operands.weight},
                                                 {"bias", args->bias, operands.bias},
                                                 {"out", args->out, operands.out}}));
    return with_context(context, [&](const auto& c) {
      return causal_conv1d_step(c, pool->pool, layer, *step->step, operands);
    });
  });
}

}  // extern "C"
