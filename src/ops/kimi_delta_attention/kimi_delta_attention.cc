#include "replayssm/ops/kimi_delta_attention.h"

#include "ops/delta_rule/delta_rule.h"
#include "state/pool_impl.h"

namespace replayssm {
namespace {

constexpr const char* kFamily = "kimi_delta_attention";

DeltaRuleParams common(const KimiDeltaAttentionParams& params) {
  return {.family = kFamily,
          .a_log = params.a_log,
          .dt_bias = params.dt_bias,
          .lower_bound = params.lower_bound,
          .beta_doubled = params.beta_doubled,
          .normalize = params.normalize,
          .norm_epsilon = params.norm_epsilon,
          .scale = params.scale};
}

template <typename Context>
Status run_step(const Context& context, StatePool& pool, int layer, Step& step,
                const KimiDeltaAttentionParams& params, const KimiDeltaAttentionOperands& o) {
  RSSM_ASSIGN_OR_RETURN(const KimiDeltaAttentionShape* shape,
                        pool.impl().shape_of<KimiDeltaAttentionShape>(layer, kFamily));
  return delta_rule_step(context, pool, layer, step, delta_rule(*shape), common(params),
                         {o.q, o.k, o.v, o.a, o.b, o.o});
}

}  // namespace

Status kimi_delta_attention_step(const CpuContext& context, StatePool& pool, int layer, Step& step,
                                 const KimiDeltaAttentionParams& params,
                                 const KimiDeltaAttentionOperands& operands) {
  return run_step(context, pool, layer, step, params, operands);
}

Status kimi_delta_attention_step(const CudaContext& context, StatePool& pool, int layer, Step& step,
                                 const KimiDeltaAttentionParams& params,
                                 const KimiDeltaAttentionOperands& operands) {
  return run_step(context, pool, layer, step, params, operands);
}

Result<std::string> kimi_delta_attention_explain(const CpuContext& context, const StatePool& pool,
                                                 int layer) {
  RSSM_ASSIGN_OR_RETURN(const KimiDeltaAttentionShape* shape,
                        pool.impl().shape_of<KimiDeltaAttentionShape>(layer, kFamily));
  return delta_rule_explain(context, pool.options(), layer, kFamily, delta_rule(*shape));
}

Result<std::string> kimi_delta_attention_explain(const CudaContext& context, const StatePool& pool,
                                                 int layer, std::int64_t rows) {
  RSSM_ASSIGN_OR_RETURN(const KimiDeltaAttentionShape* shape,
                        pool.impl().shape_of<KimiDeltaAttentionShape>(layer, kFamily));
  return delta_rule_explain(context, pool, layer, kFamily, delta_rule(*shape), rows);
}

StateTraffic kimi_delta_attention_row_traffic(const KimiDeltaAttentionShape& shape,
                                              DType checkpoint, DType activation,
                                              ReplayLimits limits, RowKind kind,
                                              const Cursor& cursor, std::int64_t token_count,
                                              FlushMode flush) {
  return delta_rule_row_traffic(delta_rule(shape), checkpoint, activation, limits, kind, cursor,
                                token_count, flush);
}

void fold_records(const CpuContext& context, const StatePool::Impl& pool, int layer,
                  const KimiDeltaAttentionShape& shape, const FoldTask& fold) {
  delta_rule_fold(context, pool, layer, delta_rule(shape), fold);
}

}  // namespace replayssm
