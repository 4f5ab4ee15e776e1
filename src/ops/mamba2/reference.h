// The Mamba-2 oracle: the recurrence of replayssm/ops/mamba2.h, token by token in fp64. Tests hold
// every kernel against this and never against another kernel.
#pragma once

#include <limits>
#include <vector>

#include "replayssm/state_pool.h"

namespace replayssm {

struct Mamba2ReferenceParams {
  std::vector<float> a;        // (heads)
  std::vector<float> d;        // (heads) or empty
  std::vector<float> dt_bias;  // (heads) or empty
  bool dt_softplus = true;
  double dt_min = 0.0;
  double dt_max = std::numeric_limits<double>::infinity();
};

/// One token's operands, packed: x, z (heads, head_dim), b, c (groups, state_size), dt (heads).
struct Mamba2Token {
  std::vector<float> x, b, c, dt, z;
};

class Mamba2Reference {
 public:
  Mamba2Reference(const Mamba2Shape& shape, Mamba2ReferenceParams params);

  /// Advances the state by one token and returns y (heads, head_dim).
  std::vector<double> step(const Mamba2Token& token);

  /// (heads, head_dim, state_size)
  std::vector<double>& state() { return state_; }
  const std::vector<double>& state() const { return state_; }

 private:
  Mamba2Shape shape_;
  Mamba2ReferenceParams params_;
  std::vector<double> state_;
};

}  // namespace replayssm
