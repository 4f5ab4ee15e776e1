#include "replayssm/ops/gated_delta_net.h"

#include "ops/delta_rule/delta_rule.h"
#include "state/pool_impl.h"

namespace replayssm {
namespace {

constexpr const char* kFamily = "gated_delta_net";

DeltaRuleParams common(const GatedDeltaNetParams& params) {
  return {.family = kFamily,
          .a_log = params.a_log,
          .dt_bias = params.dt_bias,
          .beta_doubled = params.beta_doubled,
          .normalize = params.normalize,
          .norm_epsilon = params.norm_epsilon,
          .scale = params.scale};
}

template <typename Context>
Status run_step(const Context& context, StatePool& pool, int layer, Step& step,
                const GatedDeltaNetParams& params, const GatedDeltaNetOperands& o) {
  RSSM_ASSIGN_OR_RETURN(const GatedDeltaNetShape* shape,
                        pool.impl().shape_of<GatedDeltaNetShape>(layer, kFamily));
  return delta_rule_step(context, pool, layer, step, delta_rule(*shape), common(params),
                         {o.q, o.k, o.v, o.a, o.b, o.o});
}

}  // namespace

Status gated_delta_net_step(const CpuContext& context, StatePool& pool, int layer, Step& step,
                            const GatedDeltaNetParams& params,
                            const GatedDeltaNetOperands& operands) {
  return run_step(context, pool, layer, step, params, operands);
}

Status gated_delta_net_step(const CudaContext& context, StatePool& pool, int layer, Step& step,
                            const GatedDeltaNetParams& params,
                            const GatedDeltaNetOperands& operands) {
  return run_step(context, pool, layer, step, params, operands);
}

Result<std::string> gated_delta_net_explain(const CpuContext& context, const StatePool& pool,
                                            int layer) {
  RSSM_ASSIGN_OR_RETURN(const GatedDeltaNetShape* shape,
                        pool.impl().shape_of<GatedDeltaNetShape>(layer, kFamily));
  return delta_rule_explain(context, pool.options(), layer, kFamily, delta_rule(*shape));
}

Result<std::string> gated_delta_net_explain(const CudaContext& context, const StatePool& pool,
                                            int layer, std::int64_t rows) {
  RSSM_ASSIGN_OR_RETURN(const GatedDeltaNetShape* shape,
                        pool.impl().shape_of<GatedDeltaNetShape>(layer, kFamily));
  return delta_rule_explain(context, pool, layer, kFamily, delta_rule(*shape), rows);
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
  delta_rule_fold(context, pool, layer, delta_rule(shape), fold);
}

}  // namespace replayssm
