// Runs layers of a StatePool (behind their convolution where the case has one) and the fp64 oracle
// of one sequence, for any recurrence family. Tokens are 64-bit names: a token's operands are a
// function of its name, so a sequence is a list of names and can be replayed anywhere.
//
// A family's Model has a test_case(), layer(i) with the convolution's weights, inputs(layer, token)
// whose u goes through the convolution, and a Reference with reference(i) and advance(reference,
// inputs). Its Case has sizes, types, limits and bounds.
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
#include "replayssm/cpu.h"
#include "replayssm/ops/causal_conv1d.h"
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

/// By layer: values of several tokens, (tokens, heads, head_dim).
using OracleOutput = std::vector<std::vector<double>>;

/// One sequence token by token in fp64, all layers.
template <typename Model>
class OracleOf {
 public:
  explicit OracleOf(const Model& model) : model_(&model) {
    for (int i = 0; i < model.test_case().layers; ++i) {
      layers_.push_back({model.reference(i), {}});
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
  /// As the family's reference keeps it.
  const std::vector<double>& state(int layer) const {
    return layers_[static_cast<std::size_t>(layer)].recurrence.state();
  }
  std::vector<double>& state(int layer) {
    return layers_[static_cast<std::size_t>(layer)].recurrence.state();
  }

 private:
  struct Layer {
    typename Model::Reference recurrence;
    std::vector<float> window;  // (at most width - 1, channels): raw inputs, oldest first
  };

  void advance(std::size_t index, Layer& layer, std::span<const TokenId> tokens,
               std::vector<double>& output) {
    if (tokens.empty()) return;
    const auto& c = model_->test_case();
    const auto channels = static_cast<std::size_t>(c.conv_channels());
    std::vector<typename Model::Inputs> inputs;
    for (const TokenId token : tokens) {
      inputs.push_back(model_->inputs(static_cast<int>(index), token));
    }
    if (c.conv_width > 0) {
      for (const typename Model::Inputs& in : inputs) {
        layer.window.insert(layer.window.end(), in.u.begin(), in.u.end());
      }
      const auto& weights = model_->layer(static_cast<int>(index));
      const std::vector<double> all =
          causal_conv1d_reference(layer.window, weights.conv_weight, weights.conv_bias, channels,
                                  static_cast<std::size_t>(c.conv_width), c.conv_silu);
      auto value = all.end() - static_cast<std::ptrdiff_t>(inputs.size() * channels);
      for (typename Model::Inputs& in : inputs) {
        for (float& x : in.u) x = round_to(c.activation, static_cast<float>(*value++));
      }
      const std::size_t keep = channels * static_cast<std::size_t>(c.conv_width - 1);
      if (layer.window.size() > keep) {
        layer.window.erase(layer.window.begin(),
                           layer.window.end() - static_cast<std::ptrdiff_t>(keep));
      }
    }
    for (const typename Model::Inputs& in : inputs) {
      const std::vector<double> y = model_->advance(layer.recurrence, in);
      output.insert(output.end(), y.begin(), y.end());
    }
  }

  const Model* model_;
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

/// Steps a pool of `model`'s layers on one CPU context; a subclass may run them elsewhere. Derived
/// has buffers(layer, step, rows), the operands of a layer, and convolve and recurrence(layer,
/// step, buffers), which run an op on them.
template <typename Derived, typename Model>
class RunnerOf {
 public:
  RunnerOf(const Model& model, StatePool& pool, const CpuContext& context)
      : model_(&model), pool_(&pool), context_(context) {}
  virtual ~RunnerOf() = default;

  virtual Result<Step> begin(const std::vector<StepRow>& rows) { return pool_->begin_step(rows); }
  virtual Status end(Step& step, const std::vector<std::int64_t>& accepted) {
    return pool_->commit(step, accepted);
  }

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

  template <typename Buffers>
  Status convolve(int layer, Step& step, Buffers& buffers) {
    return causal_conv1d_step(context_, *pool_, layer, step, conv_operands(layer, buffers));
  }

  template <typename Buffers>
  CausalConv1dOperands conv_operands(int layer, const Buffers& buffers) const {
    const auto& c = model_->test_case();
    const auto& weights = model_->layer(layer);
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
    const auto& c = model_->test_case();
    auto b = self().buffers(index, step, rows);
    std::vector<std::vector<std::byte>> before;
    for (const TokenBuffer* input : b.inputs()) before.push_back(input->bytes());
    if (c.conv_width > 0) {
      ASSERT_TRUE(is_ok(self().convolve(index, step, b)));
      check_written(rows, step, b.conv_out, b.conv_view, "convolution output");
    }
    const std::vector<std::byte> conv_before = b.conv_out.bytes();
    ASSERT_TRUE(is_ok(self().recurrence(index, step, b)));
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(same_bytes(b.inputs()[i]->bytes(), before[i])) << "input " << i << " was written";
    }
    EXPECT_TRUE(same_bytes(b.conv_out.bytes(), conv_before)) << "the convolution's output changed";
    check_written(rows, step, b.y, b.y_view, "output");
    for (std::size_t i = 0; i < rows.size(); ++i) {
      std::vector<float> y;
      for (std::int64_t t = 0; t < rows[i].count(); ++t) {
        const std::vector<float> token = get_token(b.y_view, step.rows()[i].token_begin + t);
        y.insert(y.end(), token.begin(), token.end());
      }
      output[i].push_back(std::move(y));
    }
  }

  const CpuContext& context() const { return context_; }
  StatePool& pool() { return *pool_; }
  const Model& model() const { return *model_; }

 protected:
  Derived& self() { return static_cast<Derived&>(*this); }

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

  const Model* model_;
  StatePool* pool_;
  CpuContext context_;
};

/// Brings `slot` to `live` records (at most a window) after a checkpoint at `folded` tokens of
/// sequence 1, without a flush in between. Rejected drafts lie in the ring as well.
template <typename Runner>
void prepare(Runner& runner, std::int32_t slot, std::int64_t folded, std::int64_t live) {
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
template <typename Case>
void expect_close(const std::vector<std::vector<float>>& got, const OracleOutput& want,
                  const Case& c, const std::string& where) {
  const auto size = static_cast<std::size_t>(c.inner());
  const auto shape = c.output_shape();
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
