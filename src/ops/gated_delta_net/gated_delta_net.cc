#include "replayssm/ops/gated_delta_net.h"

#include "ops/delta_rule/delta_rule.h"
#include "state/pool_impl.h"

namespace replayssm {
namespace {

constexpr const char* kFamily = "gated_delta_net";

}  // namespace

Status gated_delta_net_step(const CpuContext& context, StatePool& pool, int layer, Step& step,
                            const GatedDeltaNetParams& params,
                            const GatedDeltaNetOperands& operands) {
  RSSM_ASSIGN_OR_RETURN(const GatedDeltaNetShape* shape,
                        pool.impl().shape_of<GatedDeltaNetShape>(layer, kFamily));
  const DeltaRuleParams common{.family = kFamily,
                               .a_log = params.a_log,
                               .dt_bias = params.dt_bias,
                               .beta_doubled = params.beta_doubled,
                               .normalize = params.normalize,
                               .norm_epsilon = params.norm_epsilon,
                               .scale = params.scale};
  return delta_rule_step(context, pool, layer, step, delta_rule(*shape), common,
                         {operands.q, operands.k, operands.v, operands.a, operands.b, operands.o});
}

Result<std::string> gated_delta_net_explain(const CpuContext& context, const StatePool& pool,
                                            int layer) {
  RSSM_ASSIGN_OR_RETURN(const GatedDeltaNetShape* shape,
                        pool.impl().shape_of<GatedDeltaNetShape>(layer, kFamily));
  return delta_rule_explain(context, pool.options(), layer, kFamily, delta_rule(*shape));
}

StateTraffic gated_delta_net_row_traffic(const GatedDeltaNetShape& shape, DType checkpoint,
                                         DType activation, ReplayLimits limits, RowKind kind,
                                         const Cursor& cursor, std::int64_t token_count,
                                         FlushMode flush) {
  return delta_rule_row_traffic(delta_rule(shape), checkpoint, activation, limits, kind, cursor,
                                token_count, flush);
}

void fold_records(const CpuContext& context, const StatePool::Impl& pool, int layer,
                  const GatedDeltaNetShape& shape, const FoldTask& fold) {
  delta_rule_fold(context, pool.options, layer, delta_rule(shape), fold);
}

}  // namespace replayssm
