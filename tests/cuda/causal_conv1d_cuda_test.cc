// The causal convolution on the GPU against its oracle and against the CPU. Without a GPU every
// case is skipped.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "ops/mamba2_cases.h"
#include "support/cuda_runner.h"
#include "support/mamba2_harness.h"
#include "support/pool_access.h"

namespace replayssm::testing {
namespace {

using cuda::DeviceBytes;
using cuda::OnCuda;

class CudaConv : public OnCuda {};

/// One convolution layer stepped alike on both devices.
class ConvPair {
 public:
  ConvPair(ConvShape shape, DType activation, bool silu, bool bias, std::int64_t pitch)
      : shape_(shape), activation_(activation), silu_(silu), pitch_(pitch) {
    StatePoolOptions options;
    options.layers = {{Mamba2Shape{1, 16, 64, 1}, shape}};
    options.slots = 3;
    options.limits = {8, 4};
    options.activation = activation;
    options.poison = true;
    Rng rng(77);
    for (std::int64_t i = 0; i < shape.width * shape.channels; ++i) {
      weight_.push_back(rng.normal());
    }
    for (std::int64_t i = 0; bias && i < shape.channels; ++i) bias_.push_back(rng.normal());
    for (const bool on_gpu : {false, true}) {
      Result<StatePool> pool = StatePool::create(on_gpu ? on_cuda(options) : options);
      EXPECT_TRUE(is_ok(pool));
      const float a = -1.0f;
      EXPECT_TRUE(is_ok(pool->set_mamba2_a(0, {&a, 1})));
      pools_.push_back(std::move(pool).value());
    }
    for (std::int32_t slot = 0; slot < 3; ++slot) {
      EXPECT_TRUE(is_ok(pools_[0].reset(slot)));
      EXPECT_TRUE(is_ok(pools_[1].reset(kCuda, slot)));
    }
  }

  std::vector<float> input(TokenId token) const {
    Rng rng(token);
    std::vector<float> u(static_cast<std::size_t>(shape_.channels));
    for (float& x : u) x = round_to(activation_, rng.normal());
    return u;
  }

  /// Outputs of a row's tokens by [device][row].
  std::vector<std::vector<std::vector<float>>> step(std::span<const RowSpec> rows) {
    std::vector<std::vector<std::vector<float>>> out(2);
    std::vector<std::int64_t> accepted;
    for (const RowSpec& row : rows) accepted.push_back(row.accepts());
    const std::vector<StepRow> placed = step_rows(rows);
    const std::int64_t tokens = placed.back().token_begin + placed.back().token_count;
    TokenBuffer u(activation_, tokens, shape_.channels + pitch_);
    CausalConv1dOperands o;
    o.u = u.slice(pitch_, shape_.channels);
    o.weight = TensorView::contiguous(weight_.data(), DType::kF32, {shape_.width, shape_.channels});
    if (!bias_.empty()) {
      o.bias = TensorView::contiguous(bias_.data(), DType::kF32, {shape_.channels});
    }
    o.silu = silu_;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      for (std::int64_t t = 0; t < rows[i].count() && rows[i].slot >= 0; ++t) {
        set_token(o.u, placed[i].token_begin + t, input(rows[i].tokens[std::size_t(t)]));
      }
    }
    for (const std::size_t device : {0u, 1u}) {
      TokenBuffer result(activation_, tokens, shape_.channels + pitch_);
      o.out = result.slice(pitch_, shape_.channels);
      device == 0 ? on_host(o, placed, tokens, accepted)
                  : on_gpu(o, u, result, placed, tokens, accepted);
      for (const StepRow& row : placed) {
        std::vector<float>& values = out[device].emplace_back();
        for (std::int64_t t = 0; t < row.token_count; ++t) {
          const std::vector<float> token = get_token(o.out, row.token_begin + t);
          values.insert(values.end(), token.begin(), token.end());
        }
      }
    }
    EXPECT_TRUE(same_bytes(field_bytes_of(1), field_bytes_of(0))) << "rings differ";
    return out;
  }

  std::vector<double> reference(const std::vector<TokenId>& sequence, std::size_t count) const {
    std::vector<float> u;
    for (const TokenId token : sequence) {
      const std::vector<float> x = input(token);
      u.insert(u.end(), x.begin(), x.end());
    }
    const auto channels = static_cast<std::size_t>(shape_.channels);
    const std::vector<double> all = causal_conv1d_reference(
        u, weight_, bias_, channels, static_cast<std::size_t>(shape_.width), silu_);
    return {all.end() - static_cast<std::ptrdiff_t>(count * channels), all.end()};
  }

 private:
  std::vector<std::byte> field_bytes_of(std::size_t device) const {
    std::vector<std::byte> all;
    for (std::int32_t slot = 0; slot < 3; ++slot) {
      const std::vector<std::byte> one = field_bytes(pools_[device], 0, slot, "conv");
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
  /// The recurrence's operands: zeros.
  static Mamba2Operands nothing(void* zeros, void* y, DType type, std::int64_t tokens) {
    Mamba2Operands o;
    o.x = TensorView::contiguous(zeros, type, {tokens, 1, 16});
    o.b = TensorView::contiguous(zeros, type, {tokens, 1, 64});
    o.c = o.b;
    o.dt = TensorView::contiguous(zeros, DType::kF32, {tokens, 1});
    o.y = TensorView::contiguous(y, type, {tokens, 1, 16});
    return o;
  }
  void on_host(const CausalConv1dOperands& o, const std::vector<StepRow>& rows, std::int64_t tokens,
               const std::vector<std::int64_t>& accepted) {
    std::vector<std::byte> zeros(static_cast<std::size_t>(tokens) * 256);
    std::vector<std::byte> y(static_cast<std::size_t>(tokens) * 64);
    Result<Step> step = pools_[0].begin_step(rows);
    ASSERT_TRUE(is_ok(step));
    ASSERT_TRUE(is_ok(causal_conv1d_step(best_cpu(), pools_[0], 0, *step, o)));
    ASSERT_TRUE(is_ok(mamba2_step(best_cpu(), pools_[0], 0, *step, {},
                                  nothing(zeros.data(), y.data(), activation_, tokens))));
    ASSERT_TRUE(is_ok(pools_[0].commit(*step, accepted)));
  }
  void on_gpu(CausalConv1dOperands o, const TokenBuffer& u, TokenBuffer& result,
              const std::vector<StepRow>& rows, std::int64_t tokens,
              const std::vector<std::int64_t>& accepted) {
    const DeviceImage inputs(u.bytes());
    const DeviceImage outputs(result.bytes());
    DeviceFloats floats;
    o.u = inputs.view(o.u);
    o.out = outputs.view(o.out);
    o.weight = floats.put(o.weight);
    o.bias = floats.put(o.bias);
    DeviceBytes zeros(static_cast<std::size_t>(tokens) * 256);
    zeros.fill(0);
    const DeviceBytes y(static_cast<std::size_t>(tokens) * 64);
    Result<Step> step = pools_[1].begin_step(kCuda, std::span<const StepRow>(rows));
    ASSERT_TRUE(is_ok(step));
    ASSERT_TRUE(is_ok(causal_conv1d_step(kCuda, pools_[1], 0, *step, o)));
    ASSERT_TRUE(is_ok(mamba2_step(kCuda, pools_[1], 0, *step, {},
                                  nothing(zeros.as<void>(), y.as<void>(), activation_, tokens))));
    ASSERT_TRUE(is_ok(pools_[1].commit(kCuda, *step, std::span<const std::int64_t>(accepted))));
    outputs.download(result.data());
  }

  ConvShape shape_;
  DType activation_;
  bool silu_;
  std::int64_t pitch_;
  std::vector<float> weight_, bias_;
  std::vector<StatePool> pools_;
};

// Every width, channel counts with and without vectors, prompts longer than the ring, rollback,
// padding: the oracle's values, the CPU's bits, and the CPU's ring.
TEST_F(CudaConv, MatchesOracleAndCpu) {
  for (int width = 2; width <= 8; ++width) {
    for (const std::int64_t channels : {1, 12, 33, 516, 1029}) {
      const DType activation = (width + channels) % 3 == 0 ? DType::kBF16 : DType::kF32;
      const bool silu = (width + channels) % 2 == 0;
      const std::string where = "width " + std::to_string(width) + ", channels " +
                                std::to_string(channels) + (silu ? ", silu" : "");
      ConvPair pair({channels, width}, activation, silu, channels != 33, channels % 2 == 0 ? 0 : 3);
      std::vector<std::vector<TokenId>> sequences(3);
      Rng rng(5);
      TokenId token = 0;
      for (int i = 0; i < 14; ++i) {
        std::vector<RowSpec> rows;
        for (std::int32_t slot = 0; slot < 3; ++slot) {
          if (rng.chance(0.2) && rows.size() + 2 < 3) rows.push_back(padding(rng.between(1, 2)));
          if (rows.size() == 3 || rng.chance(0.2)) continue;
          RowSpec row;
          row.slot = slot;
          row.kind = rng.chance(0.35) ? RowKind::kCommitted : RowKind::kTentative;
          const bool is_committed = row.kind == RowKind::kCommitted;
          row.tokens.resize(static_cast<std::size_t>(rng.between(1, is_committed ? 25 : 4)));
          for (TokenId& t : row.tokens) t = ++token;
          if (!is_committed) row.accepted = rng.between(0, row.count());
          rows.push_back(std::move(row));
        }
        if (rows.empty()) continue;
        const auto output = pair.step(rows);
        if (HasFailure()) return;
        for (std::size_t r = 0; r < rows.size(); ++r) {
          const std::vector<float>& got = output[1][r];
          if (rows[r].slot < 0) {
            EXPECT_TRUE(same_bits(got, std::vector<float>(got.size(), 0.0f))) << where;
            continue;
          }
          if (best_cpu().isa != CpuIsa::kGeneric) {
            EXPECT_TRUE(same_bits(got, output[0][r])) << where;
          }
          std::vector<TokenId>& sequence = sequences[static_cast<std::size_t>(rows[r].slot)];
          sequence.insert(sequence.end(), rows[r].tokens.begin(), rows[r].tokens.end());
          const std::vector<double> want = pair.reference(sequence, rows[r].tokens.size());
          ASSERT_EQ(got.size(), want.size());
          for (std::size_t k = 0; k < got.size(); ++k) {
            const double bound = 4e-6 * (1.0 + std::abs(want[k])) +
                                 (activation == DType::kBF16 ? 0x1p-8 * std::abs(want[k]) : 0.0);
            ASSERT_NEAR(double(got[k]), want[k], bound) << where << ", element " << k;
          }
          sequence.resize(sequence.size() - static_cast<std::size_t>(rows[r].count()) +
                          static_cast<std::size_t>(rows[r].accepts()));
        }
      }
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
