// Mamba-2's side of step_harness.h.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "ops/mamba2/reference.h"
#include "ops/mamba2_cases.h"
#include "replayssm/ops/mamba2.h"
#include "support/step_harness.h"

namespace replayssm::testing {

/// Parameters of a case's layers, and the operands of tokens.
class Mamba2Model {
 public:
  using Case = Mamba2Case;
  using Runner = class Mamba2Runner;
  using Reference = Mamba2Reference;
  struct Layer {
    Mamba2ReferenceParams params;
    std::vector<float> conv_weight;  // (width, channels)
    std::vector<float> conv_bias;    // (channels)
  };
  /// What a layer gets for one token; u = [x | B | C] in front of the convolution.
  struct Inputs {
    std::vector<float> u, dt, z;
  };

  explicit Mamba2Model(const Mamba2Case& test_case, std::uint64_t seed = 1) : case_(test_case) {
    Rng rng(seed);
    for (int i = 0; i < case_.layers; ++i) layers_.push_back(make_layer(rng));
  }

  /// The same layers for plain decoding: f32 checkpoints, no read copies, the smallest window.
  Mamba2Model plain() const {
    Mamba2Model model = *this;
    model.case_.checkpoint = DType::kF32;
    model.case_.read_copy = ReadCopyFormat::kNone;
    model.case_.limits = {1, 1};
    model.case_.rewindable = false;
    return model;
  }

  const Mamba2Case& test_case() const { return case_; }
  const Layer& layer(int i) const { return layers_[static_cast<std::size_t>(i)]; }

  Inputs inputs(int layer, TokenId token) const {
    Rng rng(token * 64 + static_cast<std::uint64_t>(layer));
    Inputs inputs;
    inputs.u.resize(static_cast<std::size_t>(case_.inner() + 2 * case_.bc()));
    for (float& x : inputs.u) x = round_to(case_.activation, rng.normal());
    inputs.dt.resize(static_cast<std::size_t>(case_.shape.heads));
    for (float& dt : inputs.dt) dt = round_to(case_.dt_type, raw_dt(rng));
    if (case_.z) {
      inputs.z.resize(static_cast<std::size_t>(case_.inner()));
      for (float& z : inputs.z) z = round_to(case_.activation, rng.normal());
    }
    return inputs;
  }

  Reference reference(int i) const { return {case_.shape, layer(i).params}; }
  std::vector<double> advance(Reference& reference, const Inputs& in) const {
    const auto b = in.u.begin() + static_cast<std::ptrdiff_t>(case_.inner());
    const auto c = b + static_cast<std::ptrdiff_t>(case_.bc());
    return reference.step({{in.u.begin(), b}, {b, c}, {c, in.u.end()}, in.dt, in.z});
  }

  Status set_a(StatePool& pool) const {
    for (int i = 0; i < case_.layers; ++i) {
      RSSM_RETURN_IF_ERROR(pool.set_mamba2_a(i, layer(i).params.a));
    }
    return {};
  }

  Mamba2Params op_params(int i) const {
    const Mamba2ReferenceParams& p = layer(i).params;
    Mamba2Params params;
    if (!p.d.empty()) {
      params.d = TensorView::contiguous(p.d.data(), DType::kF32, {case_.shape.heads});
    }
    if (!p.dt_bias.empty()) {
      params.dt_bias = TensorView::contiguous(p.dt_bias.data(), DType::kF32, {case_.shape.heads});
    }
    params.dt_softplus = case_.softplus;
    params.dt_min = case_.dt_min;
    params.dt_max = case_.dt_max;
    return params;
  }

  StatePool make_pool(std::int64_t slots) const { return make_pool(case_.options(slots)); }
  StatePool make_pool(const StatePoolOptions& options) const {
    Result<StatePool> pool = StatePool::create(options);
    EXPECT_TRUE(is_ok(pool));
    EXPECT_TRUE(is_ok(set_a(*pool)));
    return std::move(pool).value();
  }

 private:
  float raw_dt(Rng& rng) const {
    switch (case_.decay) {
      case Decay::kUsual:
        return case_.softplus ? rng.normal() - 1.5f : rng.uniform(0.01f, 0.5f);
      case Decay::kTiny:
      case Decay::kZero:
      case Decay::kGrowing:
        return 1.0f;
    }
    return 0.0f;
  }
  float make_a(Rng& rng) const {
    switch (case_.decay) {
      case Decay::kUsual:
        return -rng.uniform(0.05f, 3.0f);
      case Decay::kTiny:
        return -27.631021f;  // log(1e-12)
      case Decay::kZero:
        return -200.0f;
      case Decay::kGrowing:
        return 5.0f;
    }
    return 0.0f;
  }

  Layer make_layer(Rng& rng) const {
    Layer layer;
    const auto heads = static_cast<std::size_t>(case_.shape.heads);
    for (std::size_t h = 0; h < heads; ++h) {
      layer.params.a.push_back(make_a(rng));
      if (case_.d) layer.params.d.push_back(rng.normal());
      if (case_.dt_bias) layer.params.dt_bias.push_back(rng.uniform(-0.5f, 0.5f));
    }
    layer.params.dt_softplus = case_.softplus;
    layer.params.dt_min = static_cast<double>(case_.dt_min);
    layer.params.dt_max = static_cast<double>(case_.dt_max);
    for (std::int64_t i = 0; i < case_.conv_width * case_.conv_channels(); ++i) {
      layer.conv_weight.push_back(rng.normal() * 0.7f);
    }
    for (std::int64_t i = 0; case_.conv_bias && i < case_.conv_channels(); ++i) {
      layer.conv_bias.push_back(rng.normal() * 0.3f);
    }
    return layer;
  }

  Mamba2Case case_;
  std::vector<Layer> layers_;
};

using SequenceOracle = OracleOf<Mamba2Model>;

class Mamba2Runner : public RunnerOf<Mamba2Runner, Mamba2Model> {
 public:
  using RunnerOf::RunnerOf;

  /// The operands of one layer for a step, and where its outputs go.
  struct LayerBuffers {
    TokenBuffer u, dt, y, conv_out;
    TensorView u_view, x, b, c, dt_view, z, y_view, conv_view;

    Mamba2Operands mamba2() const { return {x, b, c, dt_view, z, y_view}; }
    std::vector<const TokenBuffer*> inputs() const { return {&u, &dt}; }
  };

  LayerBuffers buffers(int layer, const Step& step, std::span<const RowSpec> rows,
                       std::int64_t more_tokens = 0) {
    return buffers(layer, step.rows(), step.token_end() + more_tokens, rows);
  }
  /// For rows placed at `placed` among `tokens` tokens.
  LayerBuffers buffers(int layer, std::span<const StepRow> placed, std::int64_t tokens,
                       std::span<const RowSpec> rows) {
    const Mamba2Case& c = model_->test_case();
    const std::int64_t guard = c.guard();
    // Head rows of x, z and y spread out, but only where the convolution does not make x.
    const std::int64_t p = c.shape.head_dim;
    const std::int64_t p_stride = p + c.spread();
    const std::int64_t inner = c.shape.heads * p_stride;
    const std::int64_t bc = c.bc();
    const bool shared_dt = c.strided && c.dt_type == c.activation;

    // [guard | z | guard | x B C | guard | dt | guard], as a model's input projection lays them
    // out.
    const std::int64_t z_at = guard;
    const std::int64_t u_at = z_at + (c.z ? inner + guard : 0);
    const std::int64_t dt_at = u_at + inner + 2 * bc + guard;
    const std::int64_t end = dt_at + (shared_dt ? c.shape.heads + guard : 0);
    const std::int64_t pitch = (end + c.unit - 1) / c.unit * c.unit;
    LayerBuffers out{TokenBuffer(c.activation, tokens, pitch),
                     TokenBuffer(c.dt_type, tokens, c.shape.heads + guard),
                     TokenBuffer(c.activation, tokens, inner + 2 * guard),
                     TokenBuffer(c.activation, tokens, c.conv_channels() + guard + c.unit),
                     {},
                     {},
                     {},
                     {},
                     {},
                     {},
                     {},
                     {}};
    const auto heads_view = [&](TokenBuffer& buffer, std::int64_t at) {
      return buffer.slice(at, c.shape.heads, p, p_stride);
    };
    if (c.z) out.z = heads_view(out.u, z_at);
    out.y_view = heads_view(out.y, guard);
    out.dt_view = shared_dt ? out.u.slice(dt_at, c.shape.heads) : out.dt.slice(0, c.shape.heads);
    TokenBuffer& xbc = c.conv_width == 0 ? out.u : out.conv_out;
    const std::int64_t x_at = c.conv_width == 0 ? u_at : guard;
    if (c.conv_width > 0) {
      out.u_view = out.u.slice(u_at, c.conv_channels());
      out.conv_view = out.conv_out.slice(x_at, c.conv_channels());
    }
    out.x = heads_view(xbc, x_at);
    out.b = xbc.slice(x_at + inner, c.shape.groups, c.shape.state_size, c.shape.state_size);
    out.c = xbc.slice(x_at + inner + bc, c.shape.groups, c.shape.state_size, c.shape.state_size);

    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].slot < 0) continue;  // stays NaN
      for (std::size_t t = 0; t < rows[i].tokens.size(); ++t) {
        const Mamba2Model::Inputs inputs = model_->inputs(layer, rows[i].tokens[t]);
        const std::int64_t token = placed[i].token_begin + static_cast<std::int64_t>(t);
        if (c.conv_width > 0) {
          set_token(out.u_view, token, inputs.u);
        } else {
          const std::span<const float> u(inputs.u);
          const auto x_size = static_cast<std::size_t>(c.inner());
          set_token(out.x, token, u.first(x_size));
          set_token(out.b, token, u.subspan(x_size, static_cast<std::size_t>(bc)));
          set_token(out.c, token, u.last(static_cast<std::size_t>(bc)));
        }
        set_token(out.dt_view, token, inputs.dt);
        if (c.z) set_token(out.z, token, inputs.z);
      }
    }
    return out;
  }

  virtual Status convolve(int layer, Step& step, LayerBuffers& buffers) {
    return RunnerOf::convolve(layer, step, buffers);
  }
  virtual Status recurrence(int layer, Step& step, LayerBuffers& buffers) {
    return mamba2_step(context_, *pool_, layer, step, model_->op_params(layer), buffers.mamba2());
  }
};

}  // namespace replayssm::testing
