// The geometries, types and options every Mamba-2 kernel is tested with, whatever runs it.
#pragma once

#include <array>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "replayssm/cursor.h"
#include "replayssm/dtype.h"
#include "replayssm/state_pool.h"
#include "support/step_case.h"

namespace replayssm::testing {

/// Where the decays exp(A dt) of a case lie.
enum class Decay {
  kUsual,    // 0.2 .. 0.999, different per head and token
  kTiny,     // 1e-12
  kZero,     // exp underflows to exactly 0
  kGrowing,  // exp(+5): a positive A
};

struct Mamba2Case : StepCase {
  Mamba2Shape shape;
  DType dt_type = DType::kF32;
  bool conv_bias = true;
  bool d = true;
  bool z = false;
  bool dt_bias = true;
  bool softplus = true;
  float dt_min = 0.0f;
  float dt_max = std::numeric_limits<float>::infinity();
  Decay decay = Decay::kUsual;

  std::int64_t inner() const { return shape.heads * shape.head_dim; }
  std::int64_t bc() const { return shape.groups * shape.state_size; }
  std::int64_t conv_channels() const { return conv_width == 0 ? 0 : inner() + 2 * bc(); }

  std::array<std::int64_t, 2> output_shape() const { return {shape.heads, shape.head_dim}; }
  /// Of a stored checkpoint.
  std::array<std::int64_t, 3> state_shape() const {
    return {shape.heads, shape.head_dim, shape.state_size};
  }

  StatePoolOptions options(std::int64_t slots) const {
    return pool_options(shape, conv_channels(), slots);
  }

  /// Bound of norm(y - oracle) / norm(oracle) per token. f32 everywhere: rounding of sums. bf16
  /// activations: y itself is rounded (2^-9 at most), and with a convolution so are x, B and C.
  /// bf16 checkpoints: a rounding per window or committed token, which decays with the state.
  double bound() const {
    if (read_copy != ReadCopyFormat::kNone) return read_copy_bound();
    if (checkpoint == DType::kBF16) return 2e-2;
    if (activation == DType::kBF16) return conv_width == 0 ? 4e-3 : 1.5e-2;
    return 1e-5;
  }
};

inline std::ostream& operator<<(std::ostream& out, const Mamba2Case& c) { return out << c.name; }

/// A small case: H = 4, P = 8, N = 16.
inline Mamba2Case small_case(std::string name, int window, int draft, std::int64_t groups = 2) {
  Mamba2Case c;
  c.name = std::move(name);
  c.shape = {4, 8, 16, groups};
  c.limits = {window, draft};
  return c;
}

inline std::vector<Mamba2Case> mamba2_cases() {
  std::vector<Mamba2Case> cases;
  const auto add = [&](std::string name, Mamba2Shape shape, ReplayLimits limits,
                       auto&&... edits) -> void {
    Mamba2Case c;
    c.name = std::move(name);
    c.shape = shape;
    c.limits = limits;
    (edits(c), ...);
    cases.push_back(std::move(c));
  };
  const auto bf16_state = [](Mamba2Case& c) { c.checkpoint = DType::kBF16; };
  const auto bf16_act = [](Mamba2Case& c) { c.activation = c.dt_type = DType::kBF16; };
  const auto bf16_act_f32_dt = [](Mamba2Case& c) { c.activation = DType::kBF16; };
  const auto z = [](Mamba2Case& c) { c.z = true; };
  const auto no_d = [](Mamba2Case& c) { c.d = false; };
  const auto no_bias = [](Mamba2Case& c) { c.dt_bias = false; };
  const auto no_softplus = [](Mamba2Case& c) { c.softplus = false; };
  const auto limit_dt = [](Mamba2Case& c) { c.dt_min = 0.05f, c.dt_max = 0.3f; };
  const auto strided = [](Mamba2Case& c) { c.strided = true; };
  const auto layers = [](Mamba2Case& c) { c.layers = 3; };
  const auto conv4 = [](Mamba2Case& c) { c.conv_width = 4; };
  const auto conv2 = [](Mamba2Case& c) { c.conv_width = 2, c.conv_bias = false; };
  const auto linear8 = [](Mamba2Case& c) { c.conv_width = 8, c.conv_silu = false; };
  const auto decay = [](Decay d) {
    return [d](Mamba2Case& c) { c.decay = d, c.softplus = false, c.dt_bias = false; };
  };

  // Geometries: head_dim x state_size, groups, heads that are no power of two.
  for (const std::int64_t p : {8, 24, 64, 80}) {
    for (const std::int64_t n : {16, 48, 64, 128, 240, 256}) {
      const std::int64_t groups = n % 64 == 0 ? (p == 64 ? 8 : 2) : 1;
      const std::int64_t heads = groups == 8 ? 8 : groups == 2 ? 6 : 5;
      add("P" + std::to_string(p) + "_N" + std::to_string(n), {heads, p, n, groups}, {8, 3},
          strided);
    }
  }
  add("one_head", {1, 64, 128, 1}, {16, 4});
  add("many_heads", {33, 8, 16, 3}, {16, 4});
  add("groups_equal_heads", {7, 16, 32, 7}, {8, 2}, z);
  add("groups_8_of_24", {24, 8, 16, 8}, {8, 2});
  add("largest", {2, 256, 256, 1}, {5, 2});

  // Windows and draft capacities.
  for (const auto& [l, t] : {std::pair{1, 1},
                             {2, 1},
                             {2, 2},
                             {3, 2},
                             {4, 4},
                             {5, 1},
                             {7, 5},
                             {8, 8},
                             {16, 1},
                             {16, 4},
                             {16, 16},
                             {17, 16},
                             {31, 7},
                             {64, 1},
                             {64, 16}}) {
    add("L" + std::to_string(l) + "_T" + std::to_string(t), {4, 8, 16, 2}, {l, t});
  }
  // C27: every draft capacity.
  for (int t = 1; t <= ReplayLimits::kMaxDraftCapacity; ++t) {
    add("draft_" + std::to_string(t), {3, 8, 16, 1}, {18, t}, conv4);
  }

  // Types.
  add("bf16_act", {6, 24, 48, 2}, {8, 3}, bf16_act, z);
  add("bf16_act_f32_dt", {6, 64, 128, 2}, {8, 3}, bf16_act_f32_dt, strided);
  add("bf16_state", {6, 64, 128, 2}, {16, 4}, bf16_state);
  add("bf16_state_bf16_act", {6, 80, 128, 1}, {16, 4}, bf16_state, bf16_act, z, strided);
  add("bf16_state_odd", {5, 24, 240, 1}, {6, 3}, bf16_state, bf16_act_f32_dt);

  // Options.
  add("plain_options", {4, 8, 16, 2}, {8, 2}, no_d, no_bias, no_softplus);
  add("no_d_z", {4, 24, 64, 2}, {8, 2}, no_d, z);
  add("no_bias", {4, 8, 16, 2}, {8, 2}, no_bias, z, strided);
  add("no_softplus", {4, 8, 16, 2}, {8, 2}, no_softplus);
  add("dt_limits", {4, 8, 16, 2}, {8, 2}, limit_dt);  // C70
  add("dt_limits_no_softplus_z", {4, 8, 16, 1}, {8, 2}, limit_dt, no_softplus, z);

  // C68: decays at the ends of the range.
  add("decay_tiny", {4, 8, 16, 2}, {64, 4}, decay(Decay::kTiny));
  add("decay_zero", {4, 8, 16, 2}, {64, 4}, decay(Decay::kZero));
  add("decay_zero_bf16", {4, 8, 16, 2}, {16, 4}, decay(Decay::kZero), bf16_state, bf16_act);

  // Behind a convolution, several layers.
  add("conv4", {4, 8, 16, 2}, {16, 4}, conv4, layers);
  add("conv2", {4, 24, 48, 2}, {8, 3}, conv2, strided);
  add("conv8_linear", {3, 8, 16, 1}, {8, 1}, linear8);
  add("conv4_bf16", {6, 64, 128, 2}, {16, 4}, conv4, bf16_act, z, strided);
  add("conv4_bf16_state", {6, 64, 64, 2}, {16, 4}, conv4, bf16_act, bf16_state, layers);

  // Real geometries: Mamba-2 2.7B-like and Nemotron-H-like slices.
  add("real_mamba2", {16, 64, 128, 1}, {16, 4}, conv4, bf16_act);
  add("real_nemotron_h", {16, 80, 128, 8}, {16, 1}, conv4, z);
  return cases;
}

}  // namespace replayssm::testing
