// The side of Gated DeltaNet and Kimi Delta Attention of step_harness.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "ops/delta_rule/reference.h"
#include "ops/delta_rule_cases.h"
#include "replayssm/ops/gated_delta_net.h"
#include "replayssm/ops/kimi_delta_attention.h"
#include "support/step_harness.h"

namespace replayssm::testing {

/// Parameters of a case's layers, and the operands of tokens.
class DeltaModel {
 public:
  using Case = DeltaCase;
  using Runner = class DeltaRunner;
  using Reference = DeltaRuleReference;

  struct Layer {
    DeltaRuleReferenceParams params;
    std::vector<float> conv_weight;  // (width, channels)
    std::vector<float> conv_bias;    // (channels)
  };
  /// What a layer gets for one token; u = [q | k | v] in front of the convolution.
  struct Inputs {
    std::vector<float> u, a, b;
  };

  explicit DeltaModel(const DeltaCase& test_case, std::uint64_t seed = 1) : case_(test_case) {
    Rng rng(seed);
    for (int i = 0; i < case_.layers; ++i) layers_.push_back(make_layer(rng));
  }

  /// The same layers for plain decoding: f32 checkpoints, exact, no read copies, the smallest
  /// window.
  DeltaModel plain() const {
    DeltaModel model = *this;
    model.case_.checkpoint = DType::kF32;
    model.case_.read_copy = ReadCopyFormat::kNone;
    model.case_.flush = FlushMode::kExact;
    model.case_.limits = {1, 1};
    model.case_.rewindable = false;
    return model;
  }

  const DeltaCase& test_case() const { return case_; }
  const Layer& layer(int i) const { return layers_[static_cast<std::size_t>(i)]; }

  Inputs inputs(int layer, TokenId token) const {
    Rng rng(token * 64 + static_cast<std::uint64_t>(layer));
    Inputs inputs;
    inputs.u.resize(static_cast<std::size_t>(case_.qkv()));
    // Keys that nobody normalizes must be short, or the recurrence diverges.
    const float key = case_.normalize ? 1.0f : 1.0f / std::sqrt(float(case_.shape.key_dim));
    for (std::size_t i = 0; i < inputs.u.size(); ++i) {
      const bool is_key = i < static_cast<std::size_t>(2 * case_.keys());
      inputs.u[i] = round_to(case_.activation, rng.normal() * (is_key ? key : 1.0f));
    }
    const float mood = rng.uniform(0.0f, 1.0f);
    inputs.a.resize(static_cast<std::size_t>(case_.gates()));
    for (float& a : inputs.a) a = round_to(case_.gate_type, raw_gate(rng, mood));
    inputs.b.resize(static_cast<std::size_t>(case_.shape.value_heads));
    for (float& b : inputs.b) {
      const bool fixed = case_.decay == DeltaDecay::kSlow || case_.decay == DeltaDecay::kFast;
      b = fixed ? std::log(9.0f) : round_to(case_.gate_type, rng.normal());
    }
    return inputs;
  }

  Reference reference(int i) const { return {case_.shape, layer(i).params}; }
  std::vector<double> advance(Reference& reference, const Inputs& in) const {
    const auto k = in.u.begin() + static_cast<std::ptrdiff_t>(case_.keys());
    const auto v = k + static_cast<std::ptrdiff_t>(case_.keys());
    return reference.step({{in.u.begin(), k}, {k, v}, {v, in.u.end()}, in.a, in.b});
  }

  StatePool make_pool(std::int64_t slots) const { return make_pool(case_.options(slots)); }
  StatePool make_pool(const StatePoolOptions& options) const {
    Result<StatePool> pool = StatePool::create(options);
    EXPECT_TRUE(is_ok(pool));
    return std::move(pool).value();
  }

  /// Params of either family: both have these members.
  template <typename Params>
  Params op_params(int i) const {
    const DeltaRuleReferenceParams& p = layer(i).params;
    const std::int64_t heads = case_.shape.value_heads;
    Params params;
    if (!p.a_log.empty()) {
      params.a_log = TensorView::contiguous(p.a_log.data(), DType::kF32, {heads});
    }
    if (!p.dt_bias.empty()) {
      params.dt_bias =
          case_.shape.channel_decay
              ? TensorView::contiguous(p.dt_bias.data(), DType::kF32, {heads, case_.shape.key_dim})
              : TensorView::contiguous(p.dt_bias.data(), DType::kF32, {heads});
    }
    params.beta_doubled = p.beta_doubled;
    params.normalize = p.normalize;
    params.norm_epsilon = p.norm_epsilon;
    params.scale = p.scale;
    if constexpr (requires { params.lower_bound; }) params.lower_bound = p.lower_bound;
    return params;
  }

 private:
  /// With A_log and dt_bias of fixed_a_log() and zero, the raw gates of a case's decays.
  float raw_gate(Rng& rng, float mood) const {
    const bool bounded = case_.family == DeltaFamily::kKimiBounded;
    const auto raw_of = [bounded](double log_decay) {
      return static_cast<float>(bounded ? -std::log(-5.0 / log_decay - 1.0)
                                        : std::log(std::expm1(-log_decay)));
    };
    switch (case_.decay) {
      case DeltaDecay::kUsual:
        return rng.normal() - (bounded ? 2.0f : 1.5f);
      case DeltaDecay::kSlow:
        return raw_of(-0.01);
      case DeltaDecay::kFast:
        return raw_of(-1.5);
      case DeltaDecay::kSteep:
        return rng.uniform(8.0f, 20.0f);
      case DeltaDecay::kTiny:
        return bounded ? 100.0f : 27.631021f;
      case DeltaDecay::kZero:
        return bounded ? 100.0f : 200.0f;
      case DeltaDecay::kNone:
        return -200.0f;
      case DeltaDecay::kMixed:
        return mood < 0.2f   ? 400.0f
               : mood < 0.4f ? -200.0f
                             : rng.normal() - (bounded ? 6.0f : 2.0f);
    }
    return 0.0f;
  }

  Layer make_layer(Rng& rng) const {
    Layer layer;
    DeltaRuleReferenceParams& p = layer.params;
    const bool usual = case_.decay == DeltaDecay::kUsual;
    for (std::int64_t h = 0; case_.a_log && h < case_.shape.value_heads; ++h) {
      p.a_log.push_back(usual ? rng.uniform(-1.5f, 1.0f) : 0.0f);
    }
    for (std::int64_t i = 0; case_.dt_bias && i < case_.gates(); ++i) {
      p.dt_bias.push_back(usual ? rng.uniform(-0.5f, 0.5f) : 0.0f);
    }
    p.lower_bound = case_.lower_bound();
    p.beta_doubled = case_.beta_doubled;
    p.normalize = case_.normalize;
    p.scale = case_.scale;
    for (std::int64_t i = 0; i < case_.conv_width * case_.conv_channels(); ++i) {
      layer.conv_weight.push_back(rng.normal() * 0.7f);
    }
    for (std::int64_t i = 0; case_.conv_bias && i < case_.conv_channels(); ++i) {
      layer.conv_bias.push_back(rng.normal() * 0.3f);
    }
    return layer;
  }

  DeltaCase case_;
  std::vector<Layer> layers_;
};

using DeltaOracle = OracleOf<DeltaModel>;

class DeltaRunner : public RunnerOf<DeltaRunner, DeltaModel> {
 public:
  using RunnerOf::RunnerOf;

  /// The operands of one layer for a step, and where its outputs go.
  struct LayerBuffers {
    TokenBuffer u, a, b, y, conv_out;
    TensorView u_view, q, k, v, a_view, b_view, y_view, conv_view;

    std::vector<const TokenBuffer*> inputs() const { return {&u, &a, &b}; }
    /// GatedDeltaNetOperands or KimiDeltaAttentionOperands.
    template <typename Operands>
    Operands operands() const {
      return {q, k, v, a_view, b_view, y_view};
    }
  };

  LayerBuffers buffers(int layer, const Step& step, std::span<const RowSpec> rows,
                       std::int64_t more_tokens = 0) {
    const DeltaCase& c = model_->test_case();
    const DeltaRuleShape& s = c.shape;
    const std::int64_t tokens = step.token_end() + more_tokens;
    const std::int64_t guard = c.guard();
    const std::int64_t spread = c.spread();
    const std::int64_t key_width = s.key_heads * (s.key_dim + spread);
    const std::int64_t value_width = s.value_heads * (s.value_dim + spread);
    const std::int64_t gate_pitch = s.decays() + (s.channel_decay && c.strided ? 7 * c.unit : 0);

    // [guard | q k v | guard], as a model's input projection lays them out.
    const std::int64_t qkv_width = 2 * key_width + value_width;
    LayerBuffers out{TokenBuffer(c.activation, tokens, qkv_width + 2 * guard),
                     TokenBuffer(c.gate_type, tokens, s.value_heads * gate_pitch + guard),
                     TokenBuffer(c.gate_type, tokens, s.value_heads + guard),
                     TokenBuffer(c.activation, tokens, value_width + 2 * guard),
                     TokenBuffer(c.activation, tokens, c.conv_channels() + guard + c.unit),
                     {},
                     {},
                     {},
                     {},
                     {},
                     {},
                     {},
                     {}};
    if (c.conv_width > 0) {
      out.u_view = out.u.slice(guard, c.conv_channels());
      out.conv_view = out.conv_out.slice(guard, c.conv_channels());
    }
    TokenBuffer& qkv = c.conv_width == 0 ? out.u : out.conv_out;
    out.q = qkv.slice(guard, s.key_heads, s.key_dim, s.key_dim + spread);
    out.k = qkv.slice(guard + key_width, s.key_heads, s.key_dim, s.key_dim + spread);
    out.v = qkv.slice(guard + 2 * key_width, s.value_heads, s.value_dim, s.value_dim + spread);
    out.y_view = out.y.slice(guard, s.value_heads, s.value_dim, s.value_dim + spread);
    out.a_view = s.channel_decay ? out.a.slice(guard, s.value_heads, s.key_dim, gate_pitch)
                                 : out.a.slice(guard, s.value_heads);
    out.b_view = out.b.slice(0, s.value_heads);

    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].slot < 0) continue;  // stays NaN
      for (std::size_t t = 0; t < rows[i].tokens.size(); ++t) {
        const DeltaModel::Inputs inputs = model_->inputs(layer, rows[i].tokens[t]);
        const std::int64_t token = step.rows()[i].token_begin + static_cast<std::int64_t>(t);
        if (c.conv_width > 0) {
          set_token(out.u_view, token, inputs.u);
        } else {
          const std::span<const float> u(inputs.u);
          const auto keys = static_cast<std::size_t>(c.keys());
          set_token(out.q, token, u.first(keys));
          set_token(out.k, token, u.subspan(keys, keys));
          set_token(out.v, token, u.subspan(2 * keys));
        }
        set_token(out.a_view, token, inputs.a);
        set_token(out.b_view, token, inputs.b);
      }
    }
    return out;
  }

  virtual Status convolve(int layer, Step& step, LayerBuffers& buffers) {
    return RunnerOf::convolve(layer, step, buffers);
  }
  virtual Status recurrence(int layer, Step& step, LayerBuffers& b) {
    if (model_->test_case().family == DeltaFamily::kGated) {
      return gated_delta_net_step(context_, *pool_, layer, step,
                                  model_->op_params<GatedDeltaNetParams>(layer),
                                  b.operands<GatedDeltaNetOperands>());
    }
    return kimi_delta_attention_step(context_, *pool_, layer, step,
                                     model_->op_params<KimiDeltaAttentionParams>(layer),
                                     b.operands<KimiDeltaAttentionOperands>());
  }
};

}  // namespace replayssm::testing
