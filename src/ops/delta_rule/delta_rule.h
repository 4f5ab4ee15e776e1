// What the ops of the delta rule's two families share: checks, work items and folds.
#pragma once

#include <string>

#include "ops/delta_rule/operands.h"
#include "ops/delta_rule/shape.h"
#include "ops/fold.h"
#include "replayssm/cpu.h"
#include "replayssm/cuda.h"
#include "replayssm/state_pool.h"

namespace replayssm {

Status delta_rule_step(const CpuContext& context, StatePool& pool, int layer, Step& step,
                       const DeltaRuleShape& shape, const DeltaRuleParams& params,
                       const DeltaRuleOperands& operands);
Status delta_rule_step(const CudaContext& context, StatePool& pool, int layer, Step& step,
                       const DeltaRuleShape& shape, const DeltaRuleParams& params,
                       const DeltaRuleOperands& operands);

std::string delta_rule_explain(const CpuContext& context, const StatePoolOptions& options,
                               int layer, const char* family, const DeltaRuleShape& shape);
Result<std::string> delta_rule_explain(const CudaContext& context, const StatePool& pool, int layer,
                                       const char* family, const DeltaRuleShape& shape,
                                       std::int64_t rows);

StateTraffic delta_rule_row_traffic(const DeltaRuleShape& shape, DType checkpoint, DType activation,
                                    ReplayLimits limits, RowKind kind, const Cursor& cursor,
                                    std::int64_t token_count, FlushMode flush);

void delta_rule_fold(const CpuContext& context, const StatePool::Impl& pool, int layer,
                     const DeltaRuleShape& shape, const FoldTask& fold);

}  // namespace replayssm
