#include "ops/mamba2/reference.h"

#include <algorithm>
#include <cmath>

namespace replayssm {

Mamba2Reference::Mamba2Reference(const Mamba2Shape& shape, Mamba2ReferenceParams params)
    : shape_(shape),
      params_(std::move(params)),
      state_(static_cast<std::size_t>(shape.state_elements()), 0.0) {}

std::vector<double> Mamba2Reference::step(const Mamba2Token& token) {
  const auto heads = static_cast<std::size_t>(shape_.heads);
  const auto head_dim = static_cast<std::size_t>(shape_.head_dim);
  const auto state_size = static_cast<std::size_t>(shape_.state_size);
  const std::size_t heads_per_group = heads / static_cast<std::size_t>(shape_.groups);
  std::vector<double> y(heads * head_dim);
  for (std::size_t h = 0; h < heads; ++h) {
    double dt = double(token.dt[h]) + (params_.dt_bias.empty() ? 0.0 : params_.dt_bias[h]);
    if (params_.dt_softplus) dt = dt > 20.0 ? dt : std::log1p(std::exp(dt));
    dt = std::min(std::max(dt, params_.dt_min), params_.dt_max);
    const double decay = std::exp(double(params_.a[h]) * dt);
    const float* b = token.b.data() + h / heads_per_group * state_size;
    const float* c = token.c.data() + h / heads_per_group * state_size;
    for (std::size_t p = 0; p < head_dim; ++p) {
      const double x = token.x[h * head_dim + p];
      double* s = state_.data() + (h * head_dim + p) * state_size;
      double sum = 0.0;
      for (std::size_t n = 0; n < state_size; ++n) {
        s[n] = decay * s[n] + dt * x * b[n];
        sum += s[n] * c[n];
      }
      if (!params_.d.empty()) sum += double(params_.d[h]) * x;
      if (!token.z.empty()) {
        const double z = token.z[h * head_dim + p];
        sum *= z / (1.0 + std::exp(-z));
      }
      y[h * head_dim + p] = sum;
    }
  }
  return y;
}

}  // namespace replayssm
