#include "ops/delta_rule/reference.h"

#include <cmath>

namespace replayssm {

DeltaRuleReference::DeltaRuleReference(const DeltaRuleShape& shape, DeltaRuleReferenceParams params)
    : shape_(shape),
      params_(std::move(params)),
      state_(static_cast<std::size_t>(shape.state_elements()), 0.0) {}

std::vector<double> DeltaRuleReference::normalized(const float* x, double scale) const {
  const auto key_dim = static_cast<std::size_t>(shape_.key_dim);
  double sum = params_.norm_epsilon;
  for (std::size_t n = 0; n < key_dim; ++n) sum += double(x[n]) * double(x[n]);
  if (params_.normalize) scale /= std::sqrt(sum);
  std::vector<double> y(key_dim);
  for (std::size_t n = 0; n < key_dim; ++n) y[n] = scale * double(x[n]);
  return y;
}

double DeltaRuleReference::decay(const DeltaRuleToken& token, std::size_t head,
                                 std::size_t channel) const {
  const std::size_t at =
      shape_.channel_decay ? head * static_cast<std::size_t>(shape_.key_dim) + channel : head;
  const double u = double(token.a[at]) + (params_.dt_bias.empty() ? 0.0 : params_.dt_bias[at]);
  const double a = params_.a_log.empty() ? 1.0 : std::exp(double(params_.a_log[head]));
  if (params_.lower_bound) return std::exp(*params_.lower_bound / (1.0 + std::exp(-a * u)));
  return std::exp(-a * (u > 20.0 ? u : std::log1p(std::exp(u))));
}

std::vector<double> DeltaRuleReference::step(const DeltaRuleToken& token) {
  const auto key_dim = static_cast<std::size_t>(shape_.key_dim);
  const auto value_dim = static_cast<std::size_t>(shape_.value_dim);
  const auto heads = static_cast<std::size_t>(shape_.value_heads);
  const auto heads_per_key = static_cast<std::size_t>(shape_.heads_per_key());
  const double scale = params_.scale ? double(*params_.scale) : 1.0 / std::sqrt(double(key_dim));
  std::vector<double> o(heads * value_dim);
  for (std::size_t h = 0; h < heads; ++h) {
    const std::size_t key_head = h / heads_per_key;
    const std::vector<double> q = normalized(token.q.data() + key_head * key_dim, scale);
    const std::vector<double> k = normalized(token.k.data() + key_head * key_dim, 1.0);
    const double beta = (params_.beta_doubled ? 2.0 : 1.0) / (1.0 + std::exp(-double(token.b[h])));
    double* s = state_.data() + h * key_dim * value_dim;
    for (std::size_t n = 0; n < key_dim; ++n) {
      const double alpha = decay(token, h, n);
      for (std::size_t v = 0; v < value_dim; ++v) s[n * value_dim + v] *= alpha;
    }
    for (std::size_t v = 0; v < value_dim; ++v) {
      double found = 0.0;
      for (std::size_t n = 0; n < key_dim; ++n) found += s[n * value_dim + v] * k[n];
      const double d = beta * (double(token.v[h * value_dim + v]) - found);
      double sum = 0.0;
      for (std::size_t n = 0; n < key_dim; ++n) {
        s[n * value_dim + v] += k[n] * d;
        sum += s[n * value_dim + v] * q[n];
      }
      o[h * value_dim + v] = sum;
    }
  }
  return o;
}

}  // namespace replayssm
