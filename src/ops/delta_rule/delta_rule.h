// What the ops of the delta rule's two families share: checks, work items and folds.
#pragma once

#include <optional>
#include <string>

#include "ops/delta_rule/shape.h"
#include "ops/fold.h"
#include "replayssm/cpu.h"
#include "replayssm/state_pool.h"
#include "replayssm/tensor.h"

namespace replayssm {

struct DeltaRuleParams {
  const char* family = "";
  TensorView a_log;
  TensorView dt_bias;
  std::optional<float> lower_bound;  // the bounded form of the gate, for which A_log may be empty
  bool beta_doubled = false;
  bool normalize = true;
  float norm_epsilon = 0.0f;
  std::optional<float> scale;
};

/// gate is (tokens, value_heads), or (tokens, value_heads, key_dim) with a decay per channel.
struct DeltaRuleOperands {
  TensorView q, k, v, gate, beta, o;
};

Status delta_rule_step(const CpuContext& context, StatePool& pool, int layer, Step& step,
                       const DeltaRuleShape& shape, const DeltaRuleParams& params,
                       const DeltaRuleOperands& operands);

std::string delta_rule_explain(const CpuContext& context, const StatePoolOptions& options,
                               int layer, const char* family, const DeltaRuleShape& shape);

StateTraffic delta_rule_row_traffic(const DeltaRuleShape& shape, DType checkpoint, DType activation,
                                    ReplayLimits limits, RowKind kind, const Cursor& cursor,
                                    std::int64_t token_count, FlushMode flush);

void delta_rule_fold(const CpuContext& context, const StatePoolOptions& options, int layer,
                     const DeltaRuleShape& shape, const FoldTask& fold);

}  // namespace replayssm
