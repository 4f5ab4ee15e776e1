// The oracle of the delta rule's two families: the recurrence of replayssm/ops/gated_delta_net.h
// and kimi_delta_attention.h, token by token in fp64. Tests hold every kernel against this and
// never against another kernel.
#pragma once

#include <optional>
#include <vector>

#include "ops/delta_rule/shape.h"

namespace replayssm {

struct DeltaRuleReferenceParams {
  std::vector<float> a_log;    // (value_heads) or empty
  std::vector<float> dt_bias;  // (value_heads, 1 or key_dim) or empty
  std::optional<float> lower_bound;
  bool beta_doubled = false;
  bool normalize = true;
  float norm_epsilon = 1e-6f;
  std::optional<float> scale;
};

/// One token's operands, packed: q, k (key_heads, key_dim), v (value_heads, value_dim),
/// a (value_heads, 1 or key_dim), b (value_heads).
struct DeltaRuleToken {
  std::vector<float> q, k, v, a, b;
};

class DeltaRuleReference {
 public:
  DeltaRuleReference(const DeltaRuleShape& shape, DeltaRuleReferenceParams params);

  /// Advances the state by one token and returns o (value_heads, value_dim).
  std::vector<double> step(const DeltaRuleToken& token);

  /// (value_heads, key_dim, value_dim)
  std::vector<double>& state() { return state_; }
  const std::vector<double>& state() const { return state_; }

 private:
  std::vector<double> normalized(const float* x, double scale) const;
  double decay(const DeltaRuleToken& token, std::size_t head, std::size_t channel) const;

  DeltaRuleShape shape_;
  DeltaRuleReferenceParams params_;
  std::vector<double> state_;
};

}  // namespace replayssm
