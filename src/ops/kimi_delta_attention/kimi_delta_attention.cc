#include "replayssm/ops/kimi_delta_attention.h"

#include "ops/delta_rule/delta_rule.h"
#include "state/pool_impl.h"

namespace replayssm {
namespace {

constexpr const char* kFamily = "kimi_delta_attention";

}  // namespace

Status kimi_delta_attention_step(const CpuContext& context, StatePool& pool, int layer, Step& step,
                                 const KimiDeltaAttentionParams& params,
                                 const KimiDeltaAttentionOperands& operands) {
  RSSM_ASSIGN_OR_RETURN(const KimiDeltaAttentionShape* shape,
                        pool.impl().shape_of<KimiDeltaAttentionShape>(layer, kFamily));
  const DeltaRuleParams common{.family = kFamily,
                               .a_log = params.a_log,
                               .dt_bias = params.dt_bias,
                               .lower_bound = params.lower_bound,
                               .beta_doubled = params.beta_doubled,
                               .normalize = params.normalize,
                               .norm_epsilon = params.norm_epsilon,
                               .scale = params.scale};
  return delta_rule_step(context, pool, layer, step, delta_rule(*shape), common,
                         {operands.q, operands.k, operands.v, operands.a, operands.b, operands.o});
}

Result<std::string> kimi_delta_attention_explain(const CpuContext& context, const StatePool& pool,
                                                 int layer) {
  RSSM_ASSIGN_OR_RETURN(const KimiDeltaAttentionShape* shape,
                        pool.impl().shape_of<KimiDeltaAttentionShape>(layer, kFamily));
  return delta_rule_explain(context, pool.options(), layer, kFamily, delta_rule(*shape));
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
  delta_rule_fold(context, pool.options, layer, delta_rule(shape), fold);
}

}  // namespace replayssm
