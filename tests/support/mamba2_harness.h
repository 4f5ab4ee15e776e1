// Runs Mamba-2 layers of a StatePool (behind their convolution where the case has one) and the fp64
// oracle of one sequence. Tokens are 64-bit names: a token's operands are a function of its name,
// so a sequence is a list of names and can be replayed anywhere.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops/causal_conv1d/reference.h"
#include "ops/mamba2/reference.h"
#include "ops/mamba2_cases.h"
#include "replayssm/cpu.h"
#include "replayssm/ops/causal_conv1d.h"
#include "replayssm/ops/mamba2.h"
#include "replayssm/state_pool.h"
#include "support/compare.h"
#include "support/operand.h"
#include "support/rng.h"

namespace replayssm {

/// How GoogleTest shows a cursor.
inline void PrintTo(const Cursor& cursor, std::ostream* out) {
  *out << "{checkpoint_position " << cursor.checkpoint_position << ", position " << cursor.position
       << (cursor.force_flush ? ", force_flush}" : "}");
}

}  // namespace replayssm

namespace replayssm::testing {

using TokenId = std::uint64_t;

/// Parameters of a case's layers, and the operands of tokens.
class Mamba2Model {
 public:
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

  /// The same layers for plain decoding: f32 checkpoints and the smallest window.
  Mamba2Model plain() const {
    Mamba2Model model = *this;
    model.case_.checkpoint = DType::kF32;
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

/// By layer: values of several tokens, (tokens, heads, head_dim).
using OracleOutput = std::vector<std::vector<double>>;

/// One sequence token by token in fp64, all layers.
class SequenceOracle {
 public:
  explicit SequenceOracle(const Mamba2Model& model) : model_(&model) {
    const Mamba2Case& c = model.test_case();
    for (int i = 0; i < c.layers; ++i) {
      layers_.push_back({Mamba2Reference(c.shape, model.layer(i).params), {}});
    }
  }

  /// Outputs of `tokens` after the accepted ones, of which the first `accepted` become accepted.
  OracleOutput run(std::span<const TokenId> tokens, std::size_t accepted) {
    OracleOutput output(layers_.size());
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      advance(i, layers_[i], tokens.first(accepted), output[i]);
      if (accepted == tokens.size()) continue;
      Layer ahead = layers_[i];
      advance(i, ahead, tokens.subspan(accepted), output[i]);
    }
    position_ += static_cast<std::int64_t>(accepted);
    return output;
  }
  OracleOutput run(std::span<const TokenId> tokens) { return run(tokens, tokens.size()); }

  std::int64_t position() const { return position_; }
  /// (heads, head_dim, state_size)
  const std::vector<double>& state(int layer) const {
    return layers_[static_cast<std::size_t>(layer)].recurrence.state();
  }

 private:
  struct Layer {
    Mamba2Reference recurrence;
    std::vector<float> window;  // (at most width - 1, channels): raw inputs, oldest first
  };

  void advance(std::size_t index, Layer& layer, std::span<const TokenId> tokens,
               std::vector<double>& output) {
    if (tokens.empty()) return;
    const Mamba2Case& c = model_->test_case();
    const auto channels = static_cast<std::size_t>(c.inner() + 2 * c.bc());
    std::vector<Mamba2Model::Inputs> inputs;
    for (const TokenId token : tokens) {
      inputs.push_back(model_->inputs(static_cast<int>(index), token));
    }
    if (c.conv_width > 0) {
      for (const Mamba2Model::Inputs& in : inputs) {
        layer.window.insert(layer.window.end(), in.u.begin(), in.u.end());
      }
      const Mamba2Model::Layer& weights = model_->layer(static_cast<int>(index));
      const std::vector<double> all =
          causal_conv1d_reference(layer.window, weights.conv_weight, weights.conv_bias, channels,
                                  static_cast<std::size_t>(c.conv_width), c.conv_silu);
      auto value = all.end() - static_cast<std::ptrdiff_t>(inputs.size() * channels);
      for (Mamba2Model::Inputs& in : inputs) {
        for (float& x : in.u) x = round_to(c.activation, static_cast<float>(*value++));
      }
      const std::size_t keep = channels * static_cast<std::size_t>(c.conv_width - 1);
      if (layer.window.size() > keep) {
        layer.window.erase(layer.window.begin(),
                           layer.window.end() - static_cast<std::ptrdiff_t>(keep));
      }
    }
    for (Mamba2Model::Inputs& in : inputs) {
      const auto b = in.u.begin() + static_cast<std::ptrdiff_t>(c.inner());
      const auto cc = b + static_cast<std::ptrdiff_t>(c.bc());
      Mamba2Token token;
      token.x.assign(in.u.begin(), b);
      token.b.assign(b, cc);
      token.c.assign(cc, in.u.end());
      token.dt = std::move(in.dt);
      token.z = std::move(in.z);
      const std::vector<double> y = layer.recurrence.step(token);
      output.insert(output.end(), y.begin(), y.end());
    }
  }

  const Mamba2Model* model_;
  std::vector<Layer> layers_;
  std::int64_t position_ = 0;
};

/// A row and what becomes of it. A padding row has a negative slot; its operands are NaN.
struct RowSpec {
  std::int32_t slot = -1;
  RowKind kind = RowKind::kTentative;
  std::vector<TokenId> tokens;
  std::int64_t accepted = -1;  // -1: all
  std::int64_t gap = 0;        // tokens of nobody in front of the row

  std::int64_t count() const { return static_cast<std::int64_t>(tokens.size()); }
  std::int64_t accepts() const { return accepted < 0 ? count() : accepted; }
};

inline RowSpec committed(std::int32_t slot, std::vector<TokenId> tokens) {
  return {slot, RowKind::kCommitted, std::move(tokens)};
}
inline RowSpec tentative(std::int32_t slot, std::vector<TokenId> tokens, std::int64_t accepted) {
  return {slot, RowKind::kTentative, std::move(tokens), accepted};
}
inline RowSpec padding(std::int64_t tokens, RowKind kind = RowKind::kTentative) {
  return {-1, kind, std::vector<TokenId>(static_cast<std::size_t>(tokens))};
}

/// Names of `count` tokens of sequence `sequence` from its token `first` on.
inline std::vector<TokenId> names(std::uint64_t sequence, std::int64_t first, std::int64_t count) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    tokens[static_cast<std::size_t>(i)] =
        (sequence << 24) + static_cast<std::uint64_t>(first + i) + 1;
  }
  return tokens;
}

inline std::vector<StepRow> step_rows(std::span<const RowSpec> rows) {
  std::vector<StepRow> out;
  std::int64_t token = 0;
  for (const RowSpec& row : rows) {
    token += row.gap;
    out.push_back({row.slot, row.kind, token, row.count(), {}});
    token += row.count();
  }
  return out;
}

/// By row, by layer: (count, heads, head_dim).
using StepOutput = std::vector<std::vector<std::vector<float>>>;

/// Steps a pool of `model`'s layers on one CPU context; a subclass runs them elsewhere.
class Mamba2Runner {
 public:
  Mamba2Runner(const Mamba2Model& model, StatePool& pool, const CpuContext& context)
      : model_(&model), pool_(&pool), context_(context) {}
  virtual ~Mamba2Runner() = default;

  /// One whole step: begin, all layers, commit.
  StepOutput step(std::span<const RowSpec> rows) {
    StepOutput output(rows.size());
    Result<Step> step = begin(step_rows(rows));
    EXPECT_TRUE(is_ok(step));
    if (!step.ok()) return output;
    for (int i = 0; i < model_->test_case().layers; ++i) layer(i, *step, rows, output);
    EXPECT_TRUE(is_ok(commit(*step, rows)));
    return output;
  }
  StepOutput step(std::initializer_list<RowSpec> rows) {
    return step(std::span<const RowSpec>(rows.begin(), rows.size()));
  }

  Status commit(Step& step, std::span<const RowSpec> rows) {
    std::vector<std::int64_t> accepted;
    for (const RowSpec& row : rows) accepted.push_back(row.accepts());
    return end(step, accepted);
  }

  /// The operands of one layer for a step, and where its outputs go.
  struct LayerBuffers {
    TokenBuffer u, dt, y, conv_out;
    TensorView u_view, x, b, c, dt_view, z, y_view, conv_view;

    Mamba2Operands mamba2() const { return {x, b, c, dt_view, z, y_view}; }
  };

  LayerBuffers buffers(int layer, const Step& step, std::span<const RowSpec> rows,
                       std::int64_t more_tokens = 0) {
    return buffers(layer, step.rows(), step.token_end() + more_tokens, rows);
  }
  /// For rows placed at `placed` among `tokens` tokens.
  LayerBuffers buffers(int layer, std::span<const StepRow> placed, std::int64_t tokens,
                       std::span<const RowSpec> rows) {
    const Mamba2Case& c = model_->test_case();
    const std::int64_t guard = !c.strided ? 0 : c.unit == 1 ? 3 : c.unit;
    // Head rows of x, z and y spread out, but only where the convolution does not make x.
    const std::int64_t p = c.shape.head_dim;
    const std::int64_t p_stride =
        c.strided && c.conv_width == 0 ? p + (c.unit == 1 ? 5 : c.unit) : p;
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

  CausalConv1dOperands conv_operands(int layer, const LayerBuffers& buffers) const {
    const Mamba2Case& c = model_->test_case();
    const Mamba2Model::Layer& weights = model_->layer(layer);
    CausalConv1dOperands conv;
    conv.u = buffers.u_view;
    conv.weight = TensorView::contiguous(weights.conv_weight.data(), DType::kF32,
                                         {c.conv_width, c.conv_channels()});
    if (!weights.conv_bias.empty()) {
      conv.bias =
          TensorView::contiguous(weights.conv_bias.data(), DType::kF32, {c.conv_channels()});
    }
    conv.out = buffers.conv_view;
    conv.silu = c.conv_silu;
    return conv;
  }

  /// Runs one layer and appends its outputs. Checks that inputs and memory around outputs keep
  /// their bits, and that padding rows come out as zeros.
  void layer(int index, Step& step, std::span<const RowSpec> rows, StepOutput& output) {
    const Mamba2Case& c = model_->test_case();
    LayerBuffers b = buffers(index, step, rows);
    const std::vector<std::byte> u_before = b.u.bytes();
    const std::vector<std::byte> dt_before = b.dt.bytes();
    run(index, step, b);
    if (::testing::Test::HasFatalFailure()) return;
    EXPECT_TRUE(same_bytes(b.u.bytes(), u_before)) << "inputs were written";
    EXPECT_TRUE(same_bytes(b.dt.bytes(), dt_before)) << "dt was written";
    if (c.conv_width > 0) {
      check_written(rows, step, b.conv_out, b.conv_view, "convolution output");
    }
    check_written(rows, step, b.y, b.y_view, "y");
    for (std::size_t i = 0; i < rows.size(); ++i) {
      std::vector<float> y;
      for (std::int64_t t = 0; t < rows[i].count(); ++t) {
        const std::vector<float> token = get_token(b.y_view, step.rows()[i].token_begin + t);
        y.insert(y.end(), token.begin(), token.end());
      }
      output[i].push_back(std::move(y));
    }
  }

  virtual Result<Step> begin(const std::vector<StepRow>& rows) { return pool_->begin_step(rows); }
  virtual Status end(Step& step, const std::vector<std::int64_t>& accepted) {
    return pool_->commit(step, accepted);
  }
  /// The ops of a layer on its buffers.
  virtual void run(int layer, Step& step, LayerBuffers& b) {
    if (model_->test_case().conv_width > 0) {
      ASSERT_TRUE(
          is_ok(causal_conv1d_step(context_, *pool_, layer, step, conv_operands(layer, b))));
    }
    const std::vector<std::byte> conv_before = b.conv_out.bytes();
    ASSERT_TRUE(
        is_ok(mamba2_step(context_, *pool_, layer, step, model_->op_params(layer), b.mamba2())));
    EXPECT_TRUE(same_bytes(b.conv_out.bytes(), conv_before)) << "x, B or C was written";
  }

  const CpuContext& context() const { return context_; }
  StatePool& pool() { return *pool_; }
  const Mamba2Model& model() const { return *model_; }

 private:
  /// Every element of the rows' tokens was written, padding with zeros, and nothing else was.
  void check_written(std::span<const RowSpec> rows, const Step& step, TokenBuffer& buffer,
                     const TensorView& view, const char* what) {
    if (view.shape[0] == 0) return;
    std::vector<std::byte> outside = buffer.bytes();
    TensorView copy = view;
    copy.data = outside.data() + (static_cast<std::byte*>(view.data) - buffer.bytes().data());
    const auto size = static_cast<std::size_t>(view.numel() / view.shape[0]);
    const std::vector<float> blank(size, kUnwritten);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      for (std::int64_t t = 0; t < rows[i].count(); ++t) {
        const std::int64_t token = step.rows()[i].token_begin + t;
        const std::vector<float> values = get_token(view, token);
        if (rows[i].slot < 0) {
          EXPECT_TRUE(same_bits(values, std::vector<float>(size, 0.0f)))
              << what << " of padding row " << i << ", token " << t;
        } else {
          const auto unwritten = std::find_if(values.begin(), values.end(), [&](float x) {
            return std::bit_cast<std::uint32_t>(x) ==
                   std::bit_cast<std::uint32_t>(round_to(view.dtype, kUnwritten));
          });
          EXPECT_EQ(unwritten, values.end()) << what << " of row " << i << ", token " << t
                                             << " not written at " << unwritten - values.begin();
        }
        set_token(copy, token, blank);
      }
    }
    const TokenBuffer untouched(buffer.dtype(), 1,
                                static_cast<std::int64_t>(outside.size() / size_of(view.dtype)));
    EXPECT_TRUE(same_bytes(outside, untouched.bytes(), size_of(view.dtype)))
        << what << ": memory around the rows was written";
  }

  const Mamba2Model* model_;
  StatePool* pool_;
  CpuContext context_;
};

/// Brings `slot` to `live` records (at most a window) after a checkpoint at `folded` tokens of
/// sequence 1, without a flush in between. Rejected drafts lie in the ring as well.
inline void prepare(Mamba2Runner& runner, std::int32_t slot, std::int64_t folded,
                    std::int64_t live) {
  StatePool& pool = runner.pool();
  const int draft = pool.options().limits.draft_capacity;
  ASSERT_TRUE(is_ok(pool.reset(slot)));
  if (folded > 0) runner.step({committed(slot, names(1, 0, folded))});
  std::int64_t done = 0;
  while (done < live) {
    // Single tokens, then as many at once as a step takes: a later step would flush.
    const std::int64_t accepted = live - done <= draft ? live - done : 1;
    std::vector<TokenId> tokens = names(1, folded + done, accepted);
    if (accepted < draft) tokens.push_back(777);
    runner.step({tentative(slot, tokens, accepted)});
    done += accepted;
  }
  ASSERT_EQ(pool.cursor(slot).value(), (Cursor{folded, folded + live, false}));
}

/// Compares a row's outputs with the oracle's, per layer and token.
inline void expect_close(const std::vector<std::vector<float>>& got, const OracleOutput& want,
                         const Mamba2Case& c, const std::string& where) {
  const auto size = static_cast<std::size_t>(c.inner());
  const std::int64_t shape[] = {c.shape.heads, c.shape.head_dim};
  ASSERT_EQ(got.size(), want.size()) << where;
  for (std::size_t layer = 0; layer < got.size(); ++layer) {
    ASSERT_EQ(got[layer].size(), want[layer].size()) << where << ", layer " << layer;
    for (std::size_t t = 0; t * size < got[layer].size(); ++t) {
      ASSERT_TRUE(close(std::span(got[layer]).subspan(t * size, size),
                        std::span(want[layer]).subspan(t * size, size), c.bound(), shape))
          << where << ", layer " << layer << ", token " << t;
    }
  }
}

/// Contexts of every supported instruction set; the thread pools live as long as this does.
class Contexts {
 public:
  explicit Contexts(std::initializer_list<int> thread_counts = {1, 2}) {
    for (const int threads : thread_counts) {
      if (threads > 1) pools_.push_back(std::make_unique<ThreadPool>(threads));
      for (const CpuIsa isa : supported_isas()) {
        contexts_.push_back({threads > 1 ? pools_.back().get() : nullptr, isa});
      }
    }
  }
  auto begin() const { return contexts_.begin(); }
  auto end() const { return contexts_.end(); }

 private:
  std::vector<std::unique_ptr<ThreadPool>> pools_;
  std::vector<CpuContext> contexts_;
};

inline std::string describe(const CpuContext& context) {
  return std::string(to_string(context.isa)) + " x " + std::to_string(context.thread_count());
}

}  // namespace replayssm::testing
