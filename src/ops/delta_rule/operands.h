// Parameters and operands of the delta rule's two families in one form.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

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

  float q_scale(std::int64_t key_dim) const {
    return scale.value_or(1.0f / std::sqrt(static_cast<float>(key_dim)));
  }
};

/// gate is (tokens, value_heads), or (tokens, value_heads, key_dim) with a decay per channel.
struct DeltaRuleOperands {
  TensorView q, k, v, gate, beta, o;
};

}  // namespace replayssm
