// The causal convolution oracle in fp64: see replayssm/ops/causal_conv1d.h.
#pragma once

#include <vector>

namespace replayssm {

/// Outputs (tokens, channels) of a whole sequence's raw inputs u (tokens, channels); weight
/// (width, channels); bias (channels) or empty.
std::vector<double> causal_conv1d_reference(const std::vector<float>& u,
                                            const std::vector<float>& weight,
                                            const std::vector<float>& bias, std::size_t channels,
                                            std::size_t width, bool silu);

}  // namespace replayssm
