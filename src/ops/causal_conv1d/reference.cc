#include "ops/causal_conv1d/reference.h"

#include <cmath>

namespace replayssm {

std::vector<double> causal_conv1d_reference(const std::vector<float>& u,
                                            const std::vector<float>& weight,
                                            const std::vector<float>& bias, std::size_t channels,
                                            std::size_t width, bool silu) {
  const std::size_t tokens = u.size() / channels;
  std::vector<double> out(u.size());
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t c = 0; c < channels; ++c) {
      double sum = bias.empty() ? 0.0 : bias[c];
      for (std::size_t i = 0; i < width; ++i) {
        if (t + i + 1 < width) continue;  // before the sequence's start
        sum += double(weight[i * channels + c]) * u[(t + i + 1 - width) * channels + c];
      }
      out[t * channels + c] = silu ? sum / (1.0 + std::exp(-sum)) : sum;
    }
  }
  return out;
}

}  // namespace replayssm
