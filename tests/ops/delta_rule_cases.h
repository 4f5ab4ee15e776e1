// The geometries, types and options every kernel of the delta rule is tested with, for Gated
// DeltaNet and both gates of Kimi Delta Attention.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "ops/delta_rule/shape.h"
#include "replayssm/cursor.h"
#include "replayssm/dtype.h"
#include "replayssm/state_pool.h"
#include "support/step_case.h"

namespace replayssm::testing {

enum class DeltaFamily { kGated, kKimi, kKimiBounded };

inline const char* to_string(DeltaFamily family) {
  return family == DeltaFamily::kGated  ? "gdn"
         : family == DeltaFamily::kKimi ? "kda"
                                        : "kda_bounded";
}
inline constexpr DeltaFamily kDeltaFamilies[] = {DeltaFamily::kGated, DeltaFamily::kKimi,
                                                 DeltaFamily::kKimiBounded};

/// Where the decays of a case lie.
enum class DeltaDecay {
  kUsual,  // 0.2 .. 0.999, different per head, token and channel
  kSlow,   // exp(-0.01), with beta 0.9
  kFast,   // exp(-1.5), with beta 0.9
  kSteep,  // exp(-8) .. exp(-20) (the bounded gate: close to exp of its bound)
  kTiny,   // 1e-12 (the bounded gate: exp of its bound)
  kZero,   // exp underflows to exactly 0 (the bounded gate: a bound of -400)
  kNone,   // exactly 1
  kMixed,  // 0, 1 and usual ones by token
};

struct DeltaCase : StepCase {
  DeltaFamily family = DeltaFamily::kGated;
  DeltaRuleShape shape;
  DType gate_type = DType::kF32;
  bool conv_bias = false;
  bool a_log = true;
  bool dt_bias = true;
  bool beta_doubled = false;
  bool normalize = true;
  std::optional<float> scale;
  DeltaDecay decay = DeltaDecay::kUsual;

  std::int64_t keys() const { return shape.key_heads * shape.key_dim; }
  std::int64_t inner() const { return shape.value_heads * shape.value_dim; }
  std::int64_t gates() const { return shape.value_heads * shape.decays(); }
  std::int64_t qkv() const { return 2 * keys() + inner(); }
  std::int64_t conv_channels() const { return conv_width == 0 ? 0 : qkv(); }
  std::array<std::int64_t, 2> output_shape() const { return {shape.value_heads, shape.value_dim}; }
  /// Of a stored checkpoint: tiles are not equally wide.
  std::array<std::int64_t, 2> state_shape() const {
    return {shape.value_heads, shape.key_dim * shape.value_dim};
  }
  std::optional<float> lower_bound() const {
    if (family != DeltaFamily::kKimiBounded) return {};
    return decay == DeltaDecay::kZero || decay == DeltaDecay::kMixed ? -400.0f : -5.0f;
  }
  RecurrenceShape recurrence() const {
    if (family == DeltaFamily::kGated) {
      return GatedDeltaNetShape{shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim};
    }
    return KimiDeltaAttentionShape{shape.value_heads, shape.key_dim, shape.value_dim};
  }

  StatePoolOptions options(std::int64_t slots) const {
    return pool_options(recurrence(), conv_channels(), slots);
  }

  /// Bound of norm(o - oracle) / norm(oracle) per token. f32 everywhere: rounding of sums. 16-bit
  /// activations: o and the recorded deltas are rounded (by 2^-9 at most with bf16, an eighth of
  /// that with f16), and with a convolution so are q, k and v. 16-bit checkpoints: a rounding per
  /// window or committed token, which decays with the state. Fast flushes put the rounding of
  /// deltas into the state.
  double bound() const {
    const auto of = [](DType type, double bf16) {
      return type == DType::kBF16 ? bf16 : type == DType::kF16 ? bf16 / 8 : 0.0;
    };
    const double wide = conv_width > 0 || flush == FlushMode::kFast ? 2e-2 : 8e-3;
    return std::max({f32_bound, of(checkpoint, 2e-2), of(activation, wide), read_copy_bound()});
  }
  double f32_bound = 1e-5;
};

inline std::ostream& operator<<(std::ostream& out, const DeltaCase& c) { return out << c.name; }

/// A small case: 2 key heads and 4 value heads (4 heads in Kimi Delta Attention), K = 16, V = 24.
inline DeltaCase small_delta_case(DeltaFamily family, std::string name, int window, int draft) {
  DeltaCase c;
  c.name = std::string(to_string(family)) + "_" + name;
  c.family = family;
  const bool channels = family != DeltaFamily::kGated;
  c.shape = {channels ? 4 : 2, 4, 16, 24, channels};
  c.limits = {window, draft};
  return c;
}

inline std::vector<DeltaCase> delta_rule_cases() {
  std::vector<DeltaCase> cases;
  for (const DeltaFamily family : kDeltaFamilies) {
    const bool channels = family != DeltaFamily::kGated;
    const auto add = [&](std::string name, std::array<std::int64_t, 4> shape, ReplayLimits limits,
                         auto&&... edits) -> void {
      DeltaCase c = small_delta_case(family, std::move(name), 1, 1);
      c.shape = {channels ? shape[1] : shape[0], shape[1], shape[2], shape[3], channels};
      c.limits = limits;
      (edits(c), ...);
      cases.push_back(std::move(c));
    };
    const auto bf16_state = [](DeltaCase& c) { c.checkpoint = DType::kBF16; };
    const auto bf16_act = [](DeltaCase& c) { c.activation = c.gate_type = DType::kBF16; };
    const auto bf16_act_f32_gate = [](DeltaCase& c) { c.activation = DType::kBF16; };
    const auto f16_state = [](DeltaCase& c) { c.checkpoint = DType::kF16; };
    const auto f16_act = [](DeltaCase& c) { c.activation = c.gate_type = DType::kF16; };
    const auto f16_act_f32_gate = [](DeltaCase& c) { c.activation = DType::kF16; };
    const auto fast = [](DeltaCase& c) { c.flush = FlushMode::kFast; };
    const auto no_bias = [](DeltaCase& c) { c.dt_bias = false; };
    const auto doubled = [](DeltaCase& c) { c.beta_doubled = true; };
    const auto unscaled = [](DeltaCase& c) { c.normalize = false, c.scale = 0.5f; };
    const auto strided = [](DeltaCase& c) { c.strided = true; };
    const auto layers = [](DeltaCase& c) { c.layers = 3; };
    const auto conv4 = [](DeltaCase& c) { c.conv_width = 4; };
    const auto decay = [](DeltaDecay d) { return [d](DeltaCase& c) { c.decay = d; }; };

    // Geometries: K and V independent, tiles and vectors with every kind of rest.
    for (const std::int64_t k : {8, 16, 24, 80, 128}) {
      for (const std::int64_t v : {8, 16, 24, 32, 40, 56, 128}) {
        const std::int64_t key_heads = v == 24 ? 3 : v == 128 ? 1 : 2;
        add("K" + std::to_string(k) + "_V" + std::to_string(v),
            {key_heads, key_heads * (k == 24 ? 3 : 2), k, v}, {6, 3}, strided);
      }
    }
    add("one_head", {1, 1, 128, 128}, {16, 4});
    add("many_heads", {11, 33, 8, 8}, {16, 4});
    add("heads_equal", {5, 5, 16, 16}, {8, 2});
    add("heads_8_of_1", {1, 8, 16, 24}, {8, 4}, strided);
    add("largest", {1, 2, 256, 256}, {5, 2});

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
      add("L" + std::to_string(l) + "_T" + std::to_string(t), {2, 4, 16, 24}, {l, t});
    }
    for (int t = 1; t <= ReplayLimits::kMaxDraftCapacity; ++t) {  // C27
      add("draft_" + std::to_string(t), {2, 6, 16, 8}, {18, t}, conv4);
    }

    // Types.
    add("bf16_act", {2, 4, 24, 40}, {8, 3}, bf16_act);
    add("bf16_act_f32_gate", {2, 4, 64, 64}, {8, 3}, bf16_act_f32_gate, strided);
    add("bf16_state", {2, 4, 64, 64}, {16, 4}, bf16_state);
    add("bf16_state_bf16_act", {2, 4, 128, 48}, {16, 4}, bf16_state, bf16_act, strided);
    add("f16_act", {2, 4, 24, 40}, {8, 3}, f16_act);
    add("f16_act_f32_gate", {2, 4, 64, 64}, {8, 3}, f16_act_f32_gate, strided);
    add("f16_state", {2, 4, 64, 64}, {16, 4}, f16_state);
    add("f16_state_f16_act", {2, 4, 128, 48}, {16, 4}, f16_state, f16_act, strided);
    add("bf16_state_f16_act", {2, 4, 16, 24}, {8, 3}, bf16_state, f16_act);

    // Fast flushes: every width of the last block of columns, the longest window, all types.
    for (const std::int64_t v : {8, 24, 32, 40, 56}) {
      add("fast_V" + std::to_string(v), {2, 4, 24, v}, {6, 3}, fast, strided);
    }
    add("fast_largest", {1, 2, 256, 256}, {5, 2}, fast);
    add("fast_L64_T16", {2, 4, 16, 24}, {64, 16}, fast);
    add("fast_conv4", {2, 4, 16, 24}, {16, 4}, fast, conv4, layers);
    add("fast_bf16_act", {2, 4, 24, 40}, {8, 3}, fast, bf16_act);
    add("fast_f16_act", {2, 4, 24, 40}, {8, 3}, fast, f16_act);
    add("fast_bf16_state", {2, 4, 64, 64}, {16, 4}, fast, bf16_state);
    add("fast_f16_state_bf16_act", {2, 4, 128, 48}, {16, 4}, fast, f16_state, bf16_act);
    add("fast_decay_zero", {2, 4, 16, 24}, {64, 4}, fast, decay(DeltaDecay::kZero));
    add("fast_decay_none", {2, 4, 16, 24}, {64, 4}, fast, decay(DeltaDecay::kNone));
    add("fast_decay_mixed", {2, 4, 16, 24}, {16, 4}, fast, decay(DeltaDecay::kMixed));

    // Options.
    add("no_bias", {2, 4, 16, 24}, {8, 2}, no_bias, strided);
    add("beta_doubled", {2, 4, 16, 24}, {8, 3}, doubled);
    add("unscaled", {2, 4, 16, 24}, {8, 3}, unscaled);
    if (family == DeltaFamily::kKimiBounded) {
      add("no_a_log", {4, 4, 16, 24}, {8, 3}, [](DeltaCase& c) { c.a_log = false; });
    }

    // C68: decays at the ends of the range.
    add("decay_tiny", {2, 4, 16, 24}, {64, 4}, decay(DeltaDecay::kTiny));
    add("decay_zero", {2, 4, 16, 24}, {64, 4}, decay(DeltaDecay::kZero));
    add("decay_none", {2, 4, 16, 24}, {64, 4}, decay(DeltaDecay::kNone));
    add("decay_mixed", {2, 4, 16, 24}, {16, 4}, decay(DeltaDecay::kMixed));
    add("decay_mixed_bf16", {2, 4, 16, 24}, {16, 4}, decay(DeltaDecay::kMixed), bf16_state,
        bf16_act);

    // Behind a convolution, several layers.
    add("conv4", {2, 4, 16, 24}, {16, 4}, conv4, layers);
    add("conv4_bf16", {2, 4, 64, 64}, {16, 4}, conv4, bf16_act, strided);
    add("conv4_f16", {2, 4, 64, 64}, {16, 4}, conv4, f16_act, strided);
    add("conv4_bf16_state", {2, 4, 32, 64}, {16, 4}, conv4, bf16_act, bf16_state, layers);

    // A slice of the published geometry: 128 x 128, two value heads to a key head.
    add("real", {2, 4, 128, 128}, {16, 4}, conv4, bf16_act);
  }
  return cases;
}

}  // namespace replayssm::testing
