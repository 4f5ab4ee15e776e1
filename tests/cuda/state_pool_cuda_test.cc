// Pools in device memory: the case table against the fp64 oracle, moves between slots and between
// backends, steps whose rows live on the device, graphs, misuse. Without a GPU every case but the
// last is skipped.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ops/mamba2_cases.h"
#include "support/cuda_runner.h"
#include "support/mamba2_harness.h"
#include "support/mamba2_plan.h"
#include "support/pool_access.h"

namespace replayssm::testing {
namespace {

using cuda::DeviceBytes;
using cuda::OnCuda;

/// A case in the shapes and types that CUDA kernels take.
Mamba2Case for_cuda(Mamba2Case c) {
  c.shape.head_dim = (c.shape.head_dim + 15) / 16 * 16;
  c.shape.state_size = c.shape.state_size <= 64 ? 64 : c.shape.state_size <= 128 ? 128 : 256;
  if (c.checkpoint == DType::kBF16 && c.activation == DType::kF32) c.activation = DType::kBF16;
  c.unit = 8;
  return c;
}

std::vector<Mamba2Case> cuda_cases() {
  std::vector<Mamba2Case> cases;
  for (const Mamba2Case& c : mamba2_cases()) {
    const Mamba2Case mapped = for_cuda(c);
    // Of the table's geometries those that are not CUDA's would only repeat others.
    if (c.name[0] == 'P' && !(mapped.shape == c.shape)) continue;
    cases.push_back(mapped);
  }
  return cases;
}

/// Four heads of 32x64 behind a convolution, two layers.
Mamba2Case usual_case(DType checkpoint = DType::kF32, DType activation = DType::kF32) {
  Mamba2Case c = for_cuda(small_case("usual", 6, 3));
  c.shape.head_dim = 32;
  c.checkpoint = checkpoint;
  c.activation = activation;
  c.conv_width = 4;
  c.layers = 2;
  c.rewindable = true;
  return c;
}

StatePool cuda_pool(const Mamba2Model& model, std::int64_t slots, std::int64_t max_rows = 64) {
  StatePoolOptions options = on_cuda(model.test_case().options(slots));
  options.max_rows = max_rows;
  return model.make_pool(options);
}

const CudaContext kCuda(0, nullptr);

/// The best instruction set there is: like the GPU, all but the generic one fuse multiply and add.
CpuContext best_cpu() { return {.threads = nullptr, .isa = supported_isas().back()}; }

// ---- Against the oracle ----

class CudaTable : public OnCuda, public ::testing::WithParamInterface<Mamba2Case> {};

TEST_P(CudaTable, MatchesOracle) {
  const Mamba2Case& c = GetParam();
  const Mamba2Model model(c, 7);
  StatePool pool = cuda_pool(model, kPlanSlots);
  for (std::int32_t slot = 0; slot < kPlanSlots; ++slot) {
    ASSERT_TRUE(is_ok(pool.reset(kCuda, slot)));
  }
  Mamba2CudaRunner runner(model, pool);
  for (const PlannedStep& step : plan_steps(model, 11)) {
    for (const std::int32_t slot : step.restarted) ASSERT_TRUE(is_ok(pool.reset(kCuda, slot)));
    for (const std::int32_t slot : step.forced) ASSERT_TRUE(is_ok(pool.force_flush(kCuda, slot)));
    const StepOutput output = runner.step(step.rows);
    for (std::size_t row = 0; row < step.rows.size(); ++row) {
      if (step.rows[row].slot < 0) continue;
      expect_close(output[row], step.expected[row], c,
                   "slot " + std::to_string(step.rows[row].slot));
      if (HasFatalFailure()) return;
    }
    if (HasFailure()) return;
  }
  for (std::int32_t slot = 0; slot < kPlanSlots; ++slot) {
    EXPECT_EQ(pool.cursor(kCuda, slot).value(), pool.cursor(slot).value());
  }
  EXPECT_TRUE(is_ok(to_status(pool.take_device_error(kCuda).value())));
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaTable, ::testing::ValuesIn(cuda_cases()),
                         [](const auto& test) { return test.param.name; });

// ---- The convolution ----

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

// ---- Moves ----

class CudaMoves : public OnCuda, public ::testing::WithParamInterface<std::pair<DType, DType>> {
 protected:
  Mamba2Case test_case() const { return usual_case(GetParam().first, GetParam().second); }

  /// Brings `slot` to `live` records after `folded` committed tokens of sequence 1.
  static void bring(Mamba2Runner& runner, std::int32_t slot, std::int64_t folded,
                    std::int64_t live) {
    if (folded > 0) runner.step({committed(slot, names(1, 0, folded))});
    for (std::int64_t done = 0; done < live;) {
      const std::int64_t n = std::min<std::int64_t>(live - done, live - done <= 3 ? 3 : 1);
      runner.step({tentative(slot, names(1, folded + done, n), n)});
      done += n;
    }
  }
  /// More tokens in rows of both kinds against the oracle.
  static void expect_continues(Mamba2Runner& runner, std::int32_t slot, std::int64_t position,
                               const std::string& where) {
    SequenceOracle oracle(runner.model());
    if (position > 0) oracle.run(names(1, 0, position));
    std::uint64_t sequence = 50;
    for (const auto& [count, accepted] : {std::pair{3, 2}, {3, 0}, {2, 2}, {3, 3}, {3, 1}}) {
      const std::vector<TokenId> tokens = names(sequence++, 0, count);
      const StepOutput output = runner.step({tentative(slot, tokens, accepted)});
      expect_close(output[0], oracle.run(tokens, static_cast<std::size_t>(accepted)),
                   runner.model().test_case(), where);
    }
    const std::vector<TokenId> tokens = names(sequence, 0, 5);
    const StepOutput output = runner.step({committed(slot, tokens)});
    expect_close(output[0], oracle.run(tokens), runner.model().test_case(), where + ", committed");
  }
};

INSTANTIATE_TEST_SUITE_P(Types, CudaMoves,
                         ::testing::Values(std::pair{DType::kF32, DType::kF32},
                                           std::pair{DType::kF32, DType::kBF16},
                                           std::pair{DType::kBF16, DType::kBF16}),
                         [](const auto& test) {
                           return std::string(to_string(test.param.first)) + "_" +
                                  to_string(test.param.second);
                         });

// Every prefix: the checkpoint of decode, fold, encode, which for f32 is plain decoding's; the
// source keeps its bytes; both go on.
TEST_P(CudaMoves, MaterializeEveryPrefix) {
  const Mamba2Model model(test_case());
  StatePool pool = cuda_pool(model, 4);
  Mamba2CudaRunner runner(model, pool);
  for (const std::int64_t folded : {0, 1, 5, 13}) {
    for (const std::int64_t live : {0, 1, 4, 6}) {
      for (std::int64_t prefix = folded; prefix <= folded + live; ++prefix) {
        const std::string where = "folded " + std::to_string(folded) + ", live " +
                                  std::to_string(live) + ", prefix " + std::to_string(prefix);
        ASSERT_TRUE(is_ok(pool.reset(kCuda, 1)));
        bring(runner, 1, folded, live);
        const std::vector<std::byte> before = slot_bytes(pool, 1);
        ASSERT_TRUE(is_ok(pool.materialize(kCuda, 1, prefix, 2))) << where;
        EXPECT_TRUE(same_bytes(slot_bytes(pool, 1), before)) << where;
        EXPECT_EQ(pool.cursor(kCuda, 1).value(), (Cursor{folded, folded + live, false})) << where;
        EXPECT_EQ(pool.cursor(kCuda, 2).value(), (Cursor{prefix, prefix, false})) << where;
        EXPECT_EQ(pool.cursor(2).value(), (Cursor{prefix, prefix, false})) << where;
        if (test_case().checkpoint == DType::kF32 && prefix > 0) {
          ASSERT_TRUE(is_ok(pool.reset(kCuda, 3)));
          runner.step({committed(3, names(1, 0, prefix))});
          for (int layer = 0; layer < 2; ++layer) {
            EXPECT_TRUE(
                same_bytes(checkpoint_bytes(pool, layer, 2), checkpoint_bytes(pool, layer, 3), 4))
                << where;
          }
        }
        expect_continues(runner, 2, prefix, where + ", copy");
        if (prefix == folded) expect_continues(runner, 1, folded + live, where + ", source");
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(CudaMoves, CopyAndTruncate) {
  const Mamba2Model model(test_case());
  StatePool pool = cuda_pool(model, 4);
  Mamba2CudaRunner runner(model, pool);
  for (const std::int64_t folded : {0, 3, 10}) {
    ASSERT_TRUE(is_ok(pool.reset(kCuda, 0)));
    bring(runner, 0, folded, 5);
    ASSERT_TRUE(is_ok(pool.copy(kCuda, 0, 3)));
    EXPECT_TRUE(same_bytes(slot_bytes(pool, 3), slot_bytes(pool, 0)));
    EXPECT_EQ(pool.cursor(kCuda, 3).value(), pool.cursor(0).value());
    ASSERT_TRUE(is_ok(pool.truncate(kCuda, 3, folded + 2)));
    EXPECT_EQ(pool.cursor(kCuda, 3).value(), (Cursor{folded, folded + 2, false}));
    expect_continues(runner, 3, folded + 2, "truncated");
    expect_continues(runner, 0, folded + 5, "source");
    if (HasFailure()) return;
  }
  // A recycled slot behaves like a fresh one.
  ASSERT_TRUE(is_ok(pool.release(kCuda, 0)));
  EXPECT_EQ(pool.acquire(kCuda).value(), 0);
  expect_continues(runner, 0, 0, "recycled");
}

// A state written on one backend continues on the other, and its image is the same everywhere.
TEST_P(CudaMoves, StatesTravelBetweenBackends) {
  const Mamba2Model model(test_case());
  const CpuContext cpu = best_cpu();
  StatePool host = model.make_pool(2);
  StatePool device = cuda_pool(model, 2);
  Mamba2Runner on_host(model, host, cpu);
  Mamba2CudaRunner on_device(model, device);
  for (const std::int64_t folded : {0, 1, 9}) {
    for (const std::int64_t live : {0, 2, 6}) {
      const std::string where =
          "folded " + std::to_string(folded) + ", live " + std::to_string(live);
      ASSERT_TRUE(is_ok(host.reset(0)));
      bring(on_host, 0, folded, live);
      const std::vector<std::byte> image = host.save(0).value();
      ASSERT_TRUE(is_ok(device.load(kCuda, 1, image)));
      EXPECT_EQ(device.cursor(kCuda, 1).value(), (Cursor{folded, folded + live, false}));
      EXPECT_TRUE(same_bytes(device.save(kCuda, 1).value(), image)) << where;
      for (int layer = 0; layer < 2; ++layer) {
        for (const Field& f : host.impl().layout(layer).fields) {
          EXPECT_TRUE(same_bytes(field_bytes(device, layer, 1, f.name),
                                 field_bytes(host, layer, 0, f.name)))
              << where << ", " << f.name;
        }
      }
      expect_continues(on_device, 1, folded + live, where + ", on the device");

      ASSERT_TRUE(is_ok(device.reset(kCuda, 0)));
      bring(on_device, 0, folded, live);
      ASSERT_TRUE(is_ok(host.load(cpu, 1, device.save(kCuda, 0).value())));
      expect_continues(on_host, 1, folded + live, where + ", on the host");
      if (HasFailure()) return;
    }
  }
  std::vector<std::byte> corrupt = host.save(0).value();
  corrupt[corrupt.size() / 2] ^= std::byte{1};
  const std::vector<std::byte> memory = slot_bytes(device, 1);
  EXPECT_TRUE(refused(device.load(kCuda, 1, corrupt), StatusCode::kDataLoss, {"checksum"}));
  EXPECT_TRUE(same_bytes(slot_bytes(device, 1), memory));
}

// Records that do not fit are folded on the device: what materialize gives, bit for bit.
TEST_P(CudaMoves, LoadIntoASmallerWindowFolds) {
  Mamba2Case large = test_case();
  large.limits = {20, 3};
  Mamba2Case small = test_case();
  small.limits = {4, 3};
  const Mamba2Model large_model(large);
  const Mamba2Model small_model(small);
  StatePool from = cuda_pool(large_model, 2);
  StatePool to = cuda_pool(small_model, 1);
  Mamba2CudaRunner from_runner(large_model, from);
  Mamba2CudaRunner to_runner(small_model, to);
  for (const std::int64_t folded : {0, 7}) {
    ASSERT_TRUE(is_ok(from.reset(kCuda, 0)));
    bring(from_runner, 0, folded, 9);
    ASSERT_EQ(from.cursor(0).value().live(), 9);
    ASSERT_TRUE(is_ok(to.load(kCuda, 0, from.save(kCuda, 0).value())));
    ASSERT_TRUE(is_ok(from.materialize(kCuda, 0, folded + 9, 1)));
    EXPECT_EQ(to.cursor(kCuda, 0).value(), (Cursor{folded + 9, folded + 9, false}));
    for (int layer = 0; layer < 2; ++layer) {
      EXPECT_TRUE(same_bytes(checkpoint_bytes(to, layer, 0), checkpoint_bytes(from, layer, 1)));
    }
    expect_continues(to_runner, 0, folded + 9, "folded " + std::to_string(folded));
    if (HasFailure()) return;
  }
}

// One flush from identical inputs: the same bits where the CPU fuses multiply and add, elsewhere
// two ulp of the row's largest value, or one code of bf16.
TEST_P(CudaMoves, FlushAgreesWithTheCpu) {
  Mamba2Case c = test_case();
  c.shape = {4, 64, 128, 2};
  c.limits = {16, 4};
  c.conv_width = 0;
  const Mamba2Model model(c);
  StatePool host = model.make_pool(2);
  StatePool device = cuda_pool(model, 2);
  Mamba2Runner on_host(model, host, best_cpu());
  for (const std::int64_t folded : {0, 40}) {
    ASSERT_TRUE(is_ok(host.reset(0)));
    bring(on_host, 0, folded, 13);
    ASSERT_TRUE(is_ok(device.load(kCuda, 0, host.save(0).value())));
    const std::int64_t position = host.cursor(0).value().position;
    ASSERT_TRUE(is_ok(host.materialize(best_cpu(), 0, position, 1)));
    ASSERT_TRUE(is_ok(device.materialize(kCuda, 0, position, 1)));
    for (int layer = 0; layer < c.layers; ++layer) {
      const std::vector<float> a = checkpoint_values(host, layer, 1);
      const std::vector<float> b = checkpoint_values(device, layer, 1);
      if (best_cpu().isa != CpuIsa::kGeneric) {
        ASSERT_TRUE(same_bits(b, a));
        continue;
      }
      const auto columns = static_cast<std::size_t>(c.shape.state_size);
      for (std::size_t row = 0; row < a.size(); row += columns) {
        float largest = 0.0f;
        for (std::size_t i = row; i < row + columns; ++i)
          largest = std::max(largest, std::abs(a[i]));
        const float ulp = std::nextafter(largest, std::numeric_limits<float>::infinity()) - largest;
        for (std::size_t i = row; i < row + columns; ++i) {
          const float code = c.checkpoint == DType::kBF16 ? std::abs(a[i]) * 0x1p-7f : 0.0f;
          ASSERT_LE(std::abs(a[i] - b[i]), std::max(2.0f * ulp, code)) << "element " << i;
        }
      }
    }
  }
}

// A thousand tokens in rows of every kind: states within 1e-6, where nothing is rounded to bf16.
TEST_P(CudaMoves, LongRunsAgreeWithTheCpu) {
  Mamba2Case c = test_case();
  if (c.checkpoint != DType::kF32) return;
  c.shape = {2, 64, 128, 1};
  c.limits = {16, 4};
  c.conv_width = 0;
  c.layers = 1;
  const Mamba2Model model(c);
  StatePool host = model.make_pool(2);
  StatePool device = cuda_pool(model, 2);
  ASSERT_TRUE(is_ok(host.reset(0)));
  ASSERT_TRUE(is_ok(device.reset(kCuda, 0)));
  Mamba2Runner on_host(model, host, best_cpu());
  Mamba2CudaRunner on_device(model, device);
  Rng rng(3);
  std::int64_t position = 0;
  while (position < 1000) {
    const bool is_committed = rng.chance(0.2);
    const std::int64_t count = rng.between(1, is_committed ? 20 : 4);
    const std::int64_t accepted = is_committed ? count : rng.between(1, count);
    const std::vector<TokenId> tokens = names(1, position, count);
    const RowSpec row = is_committed ? committed(0, tokens) : tentative(0, tokens, accepted);
    on_host.step({row});
    on_device.step({row});
    position += accepted;
  }
  ASSERT_EQ(host.cursor(0).value(), device.cursor(kCuda, 0).value());
  ASSERT_TRUE(is_ok(host.materialize(best_cpu(), 0, position, 1)));
  ASSERT_TRUE(is_ok(device.materialize(kCuda, 0, position, 1)));
  const std::vector<float> a = checkpoint_values(host, 0, 1);
  const std::vector<float> b = checkpoint_values(device, 0, 1);
  const std::int64_t shape[] = {2, 64, 128};
  EXPECT_TRUE(close(b, std::vector<double>(a.begin(), a.end()), 1e-6, shape));
}

// ---- Steps whose rows are on the device ----

/// A step of a fixed number of rows of up to T tokens, its rows, counts and operands in device
/// memory that stays where it is.
class DeviceStepper {
 public:
  DeviceStepper(const Mamba2Model& model, StatePool& pool, std::int64_t rows, cudaStream_t stream)
      : model_(&model),
        pool_(&pool),
        context_(0, stream),
        runner_(model, pool, stream),
        row_count_(rows),
        tokens_per_row_(pool.options().limits.draft_capacity),
        rows_(static_cast<std::size_t>(rows) * sizeof(DeviceRow)),
        accepted_(static_cast<std::size_t>(rows) * sizeof(std::int64_t)) {
    for (int layer = 0; layer < model.test_case().layers; ++layer) {
      auto buffers = runner_.buffers(layer, {}, tokens(), {});
      Layer& l = layers_.emplace_back();
      for (const TokenBuffer* buffer : {&buffers.u, &buffers.dt, &buffers.y, &buffers.conv_out}) {
        l.memory.emplace_back(buffer->bytes().size());
      }
      l.params = model.op_params(layer);
      l.params.d = l.floats.put(l.params.d);
      l.params.dt_bias = l.floats.put(l.params.dt_bias);
      if (model.test_case().conv_width > 0) {
        l.conv = runner_.conv_operands(layer, buffers);
        l.conv.u = moved(l.conv.u, buffers.u, l.memory[0]);
        l.conv.out = moved(l.conv.out, buffers.conv_out, l.memory[3]);
        l.conv.weight = l.floats.put(l.conv.weight);
        l.conv.bias = l.floats.put(l.conv.bias);
      }
      TokenBuffer& xbc = model.test_case().conv_width > 0 ? buffers.conv_out : buffers.u;
      const DeviceBytes& xbc_memory = l.memory[model.test_case().conv_width > 0 ? 3 : 0];
      l.operands = {
          moved(buffers.x, xbc, xbc_memory),        moved(buffers.b, xbc, xbc_memory),
          moved(buffers.c, xbc, xbc_memory),        moved(buffers.dt_view, buffers.dt, l.memory[1]),
          moved(buffers.z, buffers.u, l.memory[0]), moved(buffers.y_view, buffers.y, l.memory[2])};
    }
  }

  std::int64_t tokens() const { return row_count_ * tokens_per_row_; }
  /// Row i's tokens begin at i * T, so that a graph need not know the counts.
  std::vector<StepRow> placed(std::span<const RowSpec> rows) const {
    std::vector<StepRow> out;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      out.push_back({rows[i].slot,
                     rows[i].kind,
                     static_cast<std::int64_t>(i) * tokens_per_row_,
                     rows[i].count(),
                     {}});
    }
    return out;
  }

  /// Rows (missing ones become padding), counts and operands of the next step.
  void put(std::vector<RowSpec> rows) {
    rows.resize(static_cast<std::size_t>(row_count_), padding(0));
    std::vector<DeviceRow> device_rows;
    std::vector<std::int64_t> accepted;
    const std::vector<StepRow> where = placed(rows);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      device_rows.push_back(
          {where[i].token_begin, where[i].token_count, where[i].slot, where[i].kind});
      accepted.push_back(rows[i].accepts());
    }
    put_rows(device_rows);
    put_accepted(accepted);
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      auto buffers = runner_.buffers(static_cast<int>(layer), where, tokens(), rows);
      std::size_t i = 0;
      for (const TokenBuffer* buffer : {&buffers.u, &buffers.dt, &buffers.y, &buffers.conv_out}) {
        layers_[layer].memory[i++].upload(buffer->bytes().data(), buffer->bytes().size());
      }
    }
  }
  void put_rows(const std::vector<DeviceRow>& rows) {
    rows_.upload(rows.data(), rows.size() * sizeof(DeviceRow));
  }
  void put_accepted(const std::vector<std::int64_t>& accepted) {
    accepted_.upload(accepted.data(), accepted.size() * sizeof(std::int64_t));
  }

  DeviceRows rows() const { return {rows_.as<DeviceRow>(), row_count_, tokens()}; }
  const std::int64_t* accepted() const { return accepted_.as<std::int64_t>(); }

  Status ops(Step& step) {
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      Layer& l = layers_[layer];
      const int index = static_cast<int>(layer);
      if (model_->test_case().conv_width > 0) {
        RSSM_RETURN_IF_ERROR(causal_conv1d_step(context_, *pool_, index, step, l.conv));
      }
      RSSM_RETURN_IF_ERROR(mamba2_step(context_, *pool_, index, step, l.params, l.operands));
    }
    return {};
  }
  /// The whole step, ready to be captured.
  Status enqueue() {
    RSSM_ASSIGN_OR_RETURN(Step step, pool_->begin_step(context_, rows()));
    RSSM_RETURN_IF_ERROR(ops(step));
    return pool_->commit(context_, step, accepted());
  }

  /// (T, heads, head_dim) of a row as it lies in the last layer's y.
  std::vector<float> outputs(std::size_t layer, std::int64_t row, std::int64_t count) const {
    const Layer& l = layers_[layer];
    const std::vector<unsigned char> bytes = l.memory[2].download();
    TensorView view = l.operands.y;
    view.data = const_cast<unsigned char*>(bytes.data()) +
                (static_cast<unsigned char*>(l.operands.y.data) - l.memory[2].as<unsigned char>());
    std::vector<float> out;
    for (std::int64_t t = 0; t < count; ++t) {
      const std::vector<float> token = get_token(view, row * tokens_per_row_ + t);
      out.insert(out.end(), token.begin(), token.end());
    }
    return out;
  }

 private:
  struct Layer {
    std::vector<DeviceBytes> memory;  // u, dt, y, conv_out
    DeviceFloats floats;
    Mamba2Params params;
    CausalConv1dOperands conv;
    Mamba2Operands operands;
  };
  static TensorView moved(TensorView view, TokenBuffer& from, const DeviceBytes& to) {
    if (view.empty()) return view;
    view.data = to.as<std::byte>() + (static_cast<std::byte*>(view.data) - from.data());
    return view;
  }

  const Mamba2Model* model_;
  StatePool* pool_;
  CudaContext context_;
  Mamba2CudaRunner runner_;
  std::int64_t row_count_;
  std::int64_t tokens_per_row_;
  DeviceBytes rows_, accepted_;
  std::vector<Layer> layers_;
};

class CudaDeviceRows : public OnCuda {};

// C39, C75: replays of one graph with rows, counts, slots and padding that change between them are
// bit for bit the eager steps with host rows.
TEST_F(CudaDeviceRows, C39_GraphReplayIsBitEqualToEagerSteps) {
  for (const auto& [checkpoint, activation] :
       {std::pair{DType::kF32, DType::kBF16}, {DType::kBF16, DType::kBF16}}) {
    const Mamba2Model model(usual_case(checkpoint, activation));
    StatePool eager = cuda_pool(model, 5);
    StatePool replayed = cuda_pool(model, 5);
    for (std::int32_t slot = 0; slot < 5; ++slot) {
      ASSERT_TRUE(is_ok(eager.reset(kCuda, slot)));
      ASSERT_TRUE(is_ok(replayed.reset(kCuda, slot)));
    }
    cudaStream_t stream = nullptr;
    ASSERT_CUDA(cudaStreamCreate(&stream));
    constexpr std::int64_t kRows = 6;
    Mamba2CudaRunner runner(model, eager);
    DeviceStepper stepper(model, replayed, kRows, stream);
    ASSERT_CUDA(cudaDeviceSynchronize());
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    const Status status = stepper.enqueue();
    ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
    ASSERT_TRUE(is_ok(status));
    ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    ASSERT_CUDA(cudaGraphDestroy(graph));

    Rng rng(9);
    std::uint64_t sequence = 1;
    for (int i = 0; i < 40; ++i) {
      std::vector<RowSpec> rows;
      std::int64_t before = 0;  // tokens left of the previous row's place
      std::vector<std::int32_t> order = {0, 1, 2, 3, 4};
      for (std::size_t k = order.size(); k-- > 1;) {
        std::swap(order[k], order[static_cast<std::size_t>(rng.below(std::int64_t(k) + 1))]);
      }
      for (const std::int32_t slot : order) {
        if (static_cast<std::int64_t>(rows.size()) == kRows) break;
        if (slot != 0 && rng.chance(0.4)) continue;
        RowSpec row;
        if (rng.chance(0.2)) {
          row = padding(rng.between(0, 3));
        } else {
          row.slot = slot;
          row.kind = rng.chance(0.25) ? RowKind::kCommitted : RowKind::kTentative;
          row.tokens = names(sequence++, 0, rng.between(1, 3));
          if (row.kind == RowKind::kTentative) row.accepted = rng.between(0, row.count());
        }
        row.gap = before;
        before = 3 - row.count();
        rows.push_back(row);
      }
      const StepOutput want = runner.step(rows);
      stepper.put(rows);
      ASSERT_CUDA(cudaDeviceSynchronize());
      ASSERT_CUDA(cudaGraphLaunch(exec, stream));
      ASSERT_CUDA(cudaStreamSynchronize(stream));
      for (std::size_t r = 0; r < rows.size(); ++r) {
        for (std::size_t layer = 0; layer < want[r].size(); ++layer) {
          ASSERT_TRUE(
              same_bits(stepper.outputs(layer, static_cast<std::int64_t>(r), rows[r].count()),
                        want[r][layer]))
              << "replay " << i << ", row " << r;
        }
      }
      for (std::int32_t slot = 0; slot < 5; ++slot) {
        ASSERT_EQ(replayed.cursor(kCuda, slot).value(), eager.cursor(slot).value());
        for (int layer = 0; layer < 2; ++layer) {
          // The eager pool fills what nobody owns with NaN after every commit; a graph does not.
          if (eager.cursor(slot).value().checkpoint_position > 0) {
            ASSERT_TRUE(same_bytes(checkpoint_bytes(replayed, layer, slot),
                                   checkpoint_bytes(eager, layer, slot)))
                << "replay " << i << ", slot " << slot;
          }
        }
        ASSERT_TRUE(same_bytes(replayed.save(kCuda, slot).value(), eager.save(kCuda, slot).value()))
            << "replay " << i << ", slot " << slot;
      }
    }
    EXPECT_EQ(replayed.take_device_error(kCuda).value().what, DeviceError::kNone);
    ASSERT_CUDA(cudaGraphExecDestroy(exec));
    ASSERT_CUDA(cudaStreamDestroy(stream));
  }
}

// C39: a live slot 0 beside padding, a hundred replays: byte-identical.
TEST_F(CudaDeviceRows, C39_PaddingTouchesNothing) {
  const Mamba2Model model(usual_case());
  StatePool pool = cuda_pool(model, 2);
  ASSERT_TRUE(is_ok(pool.reset(kCuda, 0)));
  Mamba2CudaRunner runner(model, pool);
  runner.step({committed(0, names(1, 0, 5))});
  runner.step({tentative(0, names(1, 5, 3), 2)});
  const std::vector<std::byte> before = pool_bytes(pool);
  DeviceStepper stepper(model, pool, 5, nullptr);
  stepper.put({padding(3), padding(0), padding(1), padding(3), padding(2)});
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(is_ok(stepper.enqueue()));
  for (const std::int64_t row : {0, 3}) {
    const std::vector<float> y = stepper.outputs(0, row, 3);
    EXPECT_TRUE(same_bits(y, std::vector<float>(y.size(), 0.0f)));
  }
  EXPECT_TRUE(same_bytes(pool_bytes(pool), before));
  EXPECT_EQ(pool.cursor(kCuda, 0).value(), (Cursor{5, 7, false}));
  EXPECT_EQ(pool.take_device_error(kCuda).value().what, DeviceError::kNone);
}

/// A pool with slots 0 and 1 at five tokens and slot 2 free, and a stepper of three rows.
struct Misuse {
  Misuse() : model(usual_case()), pool(cuda_pool(model, 3)), stepper(model, pool, 3, nullptr) {
    Mamba2CudaRunner runner(model, pool);
    for (const std::int32_t slot : {0, 1}) {
      EXPECT_TRUE(is_ok(pool.reset(kCuda, slot)));
      runner.step({committed(slot, names(1, 0, 5))});
    }
    good = {tentative(0, names(2, 0, 2), 2), tentative(1, names(3, 0, 2), 1)};
  }
  /// Runs the step after `edit`ing row 1; it must be padding with this error, and row 0 unharmed.
  template <typename Edit>
  void expect_padding(Edit edit, const DeviceError& want, std::int64_t outputs = 2) {
    stepper.put(good);
    std::vector<DeviceRow> rows = {{0, 2, 0, RowKind::kTentative},
                                   {3, 2, 1, RowKind::kTentative},
                                   {9, 0, -1, RowKind::kTentative}};
    edit(rows[1]);
    stepper.put_rows(rows);
    const std::vector<std::byte> before = slot_bytes(pool, 1);
    const Cursor cursor = pool.cursor(kCuda, 0).value();
    ASSERT_TRUE(is_ok(stepper.enqueue()));
    const std::vector<float> y = stepper.outputs(1, 1, outputs);
    EXPECT_TRUE(same_bits(y, std::vector<float>(y.size(), 0.0f)));
    EXPECT_TRUE(same_bytes(slot_bytes(pool, 1), before));
    EXPECT_EQ(pool.cursor(kCuda, 0).value().position, cursor.position + 2);
    EXPECT_EQ(pool.cursor(kCuda, 1).value(), (Cursor{5, 5, false}));
    expect_error(want);
  }
  /// The first error is kept, returned once, and forgotten.
  void expect_error(const DeviceError& want) {
    const DeviceError found = pool.take_device_error(kCuda).value();
    EXPECT_EQ(found.what, want.what) << to_status(found).message();
    EXPECT_EQ(found.row, want.row);
    EXPECT_EQ(found.found, want.found);
    EXPECT_EQ(found.allowed, want.allowed);
    EXPECT_FALSE(to_status(found).ok());
    EXPECT_EQ(pool.take_device_error(kCuda).value().what, DeviceError::kNone);
  }

  Mamba2Model model;
  StatePool pool;
  DeviceStepper stepper;
  std::vector<RowSpec> good;
};

TEST_F(CudaDeviceRows, BadRowsBecomePaddingAndAreReported) {
  constexpr auto kReady = static_cast<std::int64_t>(SlotCondition::kReady);
  Misuse m;
  m.expect_padding([](DeviceRow& row) { row.slot = 3; }, {DeviceError::kSlot, 1, 3, 2});
  m.expect_padding([](DeviceRow& row) { row.slot = 1 << 30; }, {DeviceError::kSlot, 1, 1 << 30, 2});
  m.expect_padding([](DeviceRow& row) { row.slot = 0; }, {DeviceError::kDuplicate, 1, 0, 0});
  m.expect_padding(
      [](DeviceRow& row) { row.slot = 2; },
      {DeviceError::kCondition, 1, static_cast<std::int64_t>(SlotCondition::kFree), kReady});
  m.expect_padding([](DeviceRow& row) { row.token_count = 0; }, {DeviceError::kTokenCount, 1, 0, 3},
                   0);
  m.expect_padding([](DeviceRow& row) { row.token_count = 4; }, {DeviceError::kTokenCount, 1, 4, 3},
                   2);
  m.expect_padding([](DeviceRow& row) { row.token_begin = 8; },
                   {DeviceError::kTokenRange, 1, 10, 9}, 0);
  m.expect_padding([](DeviceRow& row) { row.token_begin = 1; }, {DeviceError::kTokenRange, 1, 1, 2},
                   0);
  m.expect_padding(
      [](DeviceRow& row) { row.token_count = std::numeric_limits<std::int64_t>::max(); },
      {DeviceError::kTokenRange, 1, std::numeric_limits<std::int64_t>::max(), 9}, 0);
}

TEST_F(CudaDeviceRows, BadCountsAcceptNothing) {
  Misuse m;
  for (const std::int64_t bad : {std::int64_t{3}, std::int64_t{-1}}) {
    m.stepper.put(m.good);
    m.stepper.put_accepted({1, bad, 0});
    const Cursor before = m.pool.cursor(kCuda, 1).value();
    ASSERT_TRUE(is_ok(m.stepper.enqueue()));
    m.expect_error({DeviceError::kAccepted, 1, bad, 2});
    EXPECT_EQ(m.pool.cursor(kCuda, 1).value(), before);
  }
  // A committed row has rewritten its slot: only reset, load or copy revive it.
  m.stepper.put({committed(1, names(3, 0, 2))});
  m.stepper.put_accepted({1, 0, 0});
  ASSERT_TRUE(is_ok(m.stepper.enqueue()));
  m.expect_error({DeviceError::kAccepted, 0, 1, 2});
  m.stepper.put(m.good);
  ASSERT_TRUE(is_ok(m.stepper.enqueue()));
  m.expect_error({DeviceError::kCondition, 1, static_cast<std::int64_t>(SlotCondition::kInvalid),
                  static_cast<std::int64_t>(SlotCondition::kReady)});
  ASSERT_TRUE(is_ok(m.pool.copy(kCuda, 0, 1)));
  ASSERT_TRUE(is_ok(m.stepper.enqueue()));
  EXPECT_EQ(m.pool.take_device_error(kCuda).value().what, DeviceError::kNone);
}

// Two commits, a step without commit, a slot reset inside a step: reported, never silent.
TEST_F(CudaDeviceRows, StepsOutOfOrderAreReported) {
  constexpr auto kReady = static_cast<std::int64_t>(SlotCondition::kReady);
  constexpr auto kInStep = static_cast<std::int64_t>(SlotCondition::kInStep);
  Misuse m;
  m.stepper.put({m.good[0]});
  Result<Step> open = m.pool.begin_step(kCuda, m.stepper.rows());
  ASSERT_TRUE(is_ok(open));
  ASSERT_TRUE(is_ok(m.stepper.ops(*open)));
  // Another begin without a commit: the row is inside the first step.
  Result<Step> second = m.pool.begin_step(kCuda, m.stepper.rows());
  ASSERT_TRUE(is_ok(second));
  m.expect_error({DeviceError::kCondition, 0, kInStep, kReady});
  EXPECT_TRUE(refused(m.pool.commit(kCuda, *open, m.stepper.accepted()),
                      StatusCode::kFailedPrecondition, {"another step"}));
}

TEST_F(CudaDeviceRows, CommitsOutOfOrderAreReported) {
  constexpr auto kReady = static_cast<std::int64_t>(SlotCondition::kReady);
  constexpr auto kInStep = static_cast<std::int64_t>(SlotCondition::kInStep);
  Misuse m;
  m.stepper.put({m.good[0]});
  // A captured commit replayed once too often.
  cudaStream_t stream = nullptr;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  const CudaContext context(0, stream);
  Result<Step> step = m.pool.begin_step(kCuda, m.stepper.rows());
  ASSERT_TRUE(is_ok(step));
  ASSERT_TRUE(is_ok(m.stepper.ops(*step)));
  ASSERT_CUDA(cudaDeviceSynchronize());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  const Status status = m.pool.commit(context, *step, m.stepper.accepted());
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  ASSERT_TRUE(is_ok(status));
  ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  ASSERT_CUDA(cudaGraphDestroy(graph));
  ASSERT_CUDA(cudaGraphLaunch(exec, stream));
  ASSERT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(m.pool.take_device_error(kCuda).value().what, DeviceError::kNone);
  const Cursor committed_once = m.pool.cursor(kCuda, 0).value();
  EXPECT_EQ(committed_once, (Cursor{5, 7, false}));
  ASSERT_CUDA(cudaGraphLaunch(exec, stream));
  ASSERT_CUDA(cudaStreamSynchronize(stream));
  m.expect_error({DeviceError::kCondition, 0, kReady, kInStep});
  EXPECT_EQ(m.pool.cursor(kCuda, 0).value(), committed_once);

  // A slot that is reset inside a step stays at its start.
  Result<Step> broken = m.pool.begin_step(kCuda, m.stepper.rows());
  ASSERT_TRUE(is_ok(broken));
  ASSERT_TRUE(is_ok(m.stepper.ops(*broken)));
  ASSERT_TRUE(is_ok(m.pool.reset(kCuda, 0)));
  ASSERT_TRUE(is_ok(m.pool.commit(kCuda, *broken, m.stepper.accepted())));
  m.expect_error({DeviceError::kCondition, 0, kReady, kInStep});
  EXPECT_EQ(m.pool.cursor(kCuda, 0).value(), Cursor{});
  ASSERT_CUDA(cudaGraphExecDestroy(exec));
  ASSERT_CUDA(cudaStreamDestroy(stream));
}

TEST_F(CudaDeviceRows, TheHostKnowsWhatItDoesNotKnow) {
  Misuse m;
  EXPECT_EQ(m.pool.cursor(0).value(), (Cursor{5, 5, false}));
  m.stepper.put(m.good);
  ASSERT_TRUE(is_ok(m.stepper.enqueue()));
  EXPECT_TRUE(refused(m.pool.cursor(0), StatusCode::kFailedPrecondition, {"slot 0", "cuda:0"}));
  EXPECT_EQ(m.pool.cursor(kCuda, 0).value(), (Cursor{5, 7, false}));
  // Calls that need the cursor fetch it; steps with host rows still work.
  ASSERT_TRUE(is_ok(m.pool.truncate(kCuda, 0, 6)));
  EXPECT_EQ(m.pool.cursor(kCuda, 0).value(), (Cursor{5, 6, false}));
  ASSERT_TRUE(is_ok(m.pool.materialize(kCuda, 0, 6, 2)));
  EXPECT_EQ(m.pool.cursor(kCuda, 2).value(), (Cursor{6, 6, false}));
  EXPECT_TRUE(refused(m.pool.truncate(kCuda, 0, 4), StatusCode::kInvalidArgument, {"4", "5..6"}));
  Mamba2CudaRunner runner(m.model, m.pool);
  runner.step({tentative(0, names(2, 1, 2), 1)});
  EXPECT_EQ(m.pool.cursor(kCuda, 0).value(), (Cursor{5, 7, false}));
  // Commits are for the step's own kind of rows.
  Result<Step> device = m.pool.begin_step(kCuda, m.stepper.rows());
  ASSERT_TRUE(is_ok(device));
  ASSERT_TRUE(is_ok(m.stepper.ops(*device)));
  const std::vector<std::int64_t> counts(3, 0);
  EXPECT_TRUE(refused(m.pool.commit(kCuda, *device, std::span<const std::int64_t>(counts)),
                      StatusCode::kInvalidArgument, {"cpu", "cuda:0"}));
  ASSERT_TRUE(is_ok(m.pool.abort(kCuda, *device)));
  EXPECT_EQ(m.pool.take_device_error(kCuda).value().what, DeviceError::kNone);
  EXPECT_EQ(m.pool.cursor(kCuda, 0).value(), (Cursor{5, 7, false}));
  ASSERT_TRUE(is_ok(m.stepper.enqueue()));
  EXPECT_EQ(m.pool.take_device_error(kCuda).value().what, DeviceError::kNone);
}

// ---- Host rows: misuse that is known before anything is launched ----

class CudaSteps : public OnCuda {};

TEST_F(CudaSteps, AbortGivesBackOrInvalidates) {
  const Mamba2Model model(usual_case());
  StatePool pool = cuda_pool(model, 3);
  Mamba2CudaRunner runner(model, pool);
  for (const std::int32_t slot : {0, 1, 2}) {
    ASSERT_TRUE(is_ok(pool.reset(kCuda, slot)));
    runner.step({committed(slot, names(1, 0, 4))});
  }
  const std::vector<RowSpec> rows = {tentative(0, names(1, 4, 2), 0), committed(1, names(1, 4, 2)),
                                     padding(1)};
  Result<Step> step = runner.begin(step_rows(rows));
  ASSERT_TRUE(is_ok(step));
  StepOutput output(rows.size());
  runner.layer(0, *step, rows, output);
  ASSERT_TRUE(is_ok(pool.abort(kCuda, *step)));
  EXPECT_EQ(pool.cursor(kCuda, 0).value(), (Cursor{4, 4, false}));
  EXPECT_TRUE(refused(pool.save(kCuda, 1), StatusCode::kFailedPrecondition, {"1", "invalid"}));
  ASSERT_TRUE(is_ok(pool.copy(kCuda, 0, 1)));

  // Two open steps of different slots; the second takes the first one's place on the device.
  const std::vector<RowSpec> first = {tentative(0, names(1, 4, 2), 2)};
  const std::vector<RowSpec> second = {tentative(1, names(1, 4, 3), 1)};
  Result<Step> a = runner.begin(step_rows(first));
  Result<Step> b = runner.begin(step_rows(second));
  ASSERT_TRUE(is_ok(a));
  ASSERT_TRUE(is_ok(b));
  StepOutput a_output(1);
  StepOutput b_output(1);
  for (int layer = 0; layer < 2; ++layer) {
    runner.layer(layer, *a, first, a_output);
    runner.layer(layer, *b, second, b_output);
  }
  ASSERT_TRUE(is_ok(runner.commit(*a, first)));
  ASSERT_TRUE(is_ok(runner.commit(*b, second)));
  EXPECT_EQ(pool.cursor(kCuda, 0).value(), (Cursor{4, 6, false}));
  EXPECT_EQ(pool.cursor(kCuda, 1).value(), (Cursor{4, 5, false}));
  EXPECT_EQ(pool.take_device_error(kCuda).value().what, DeviceError::kNone);
  SequenceOracle oracle(model);
  oracle.run(names(1, 0, 4));
  expect_close(a_output[0], oracle.run(names(1, 4, 2), 0), model.test_case(), "first");
  expect_close(b_output[0], oracle.run(names(1, 4, 3), 0), model.test_case(), "second");
}

TEST_F(CudaSteps, CallsForAnotherDeviceAreRefused) {
  const Mamba2Model model(usual_case());
  StatePool host = model.make_pool(2);
  StatePool device = cuda_pool(model, 2, 4);
  const auto wrong = [](const Status& status) {
    return refused(status, StatusCode::kInvalidArgument, {"cuda:0", "cpu"});
  };
  EXPECT_TRUE(wrong(device.reset(0)));
  EXPECT_TRUE(wrong(host.reset(kCuda, 0)));
  EXPECT_TRUE(wrong(device.acquire().status()));
  ASSERT_TRUE(is_ok(device.reset(kCuda, 0)));
  ASSERT_TRUE(is_ok(host.reset(0)));
  EXPECT_TRUE(wrong(device.save(0).status()));
  EXPECT_TRUE(wrong(device.copy(0, 1)));
  EXPECT_TRUE(wrong(device.materialize(CpuContext{}, 0, 0, 1)));
  EXPECT_TRUE(wrong(device.load(CpuContext{}, 0, host.save(0).value())));
  EXPECT_TRUE(wrong(host.copy(kCuda, 0, 1)));
  const std::vector<StepRow> rows = {{0, RowKind::kTentative, 0, 1, {}}};
  EXPECT_TRUE(wrong(device.begin_step(rows).status()));
  EXPECT_TRUE(wrong(host.begin_step(kCuda, std::span<const StepRow>(rows)).status()));
  EXPECT_TRUE(wrong(mamba2_explain(CpuContext{}, device, 0).status()));
  const CudaContext other(5, nullptr);
  EXPECT_TRUE(refused(device.reset(other, 0), StatusCode::kInvalidArgument, {"cuda:5", "cuda:0"}));
  const Result<std::string> text = mamba2_explain(kCuda, device, 0, 2);
  ASSERT_TRUE(is_ok(text));
  EXPECT_NE(text->find("cuda:0"), std::string::npos) << *text;
  const std::vector<StepRow> many(5, StepRow{-1, RowKind::kTentative, 0, 0, {}});
  EXPECT_TRUE(refused(device.begin_step(kCuda, std::span<const StepRow>(many)),
                      StatusCode::kInvalidArgument, {"5", "4"}));
}

TEST_F(CudaSteps, PoolsThatCannotBeAreRefused) {
  StatePoolOptions options = on_cuda(usual_case().options(3));
  const auto create = [](const StatePoolOptions& o) { return StatePool::create(o).status(); };
  StatePoolOptions edited = options;
  edited.device.index = 99;
  EXPECT_TRUE(refused(create(edited), StatusCode::kInvalidArgument, {"cuda:99", "cuda:0"}));
  edited = options;
  edited.slots = std::int64_t{1} << 22;
  EXPECT_TRUE(refused(create(edited), StatusCode::kResourceExhausted, {"4194304", "free"}));
  edited = options;
  edited.max_rows = -1;
  EXPECT_TRUE(refused(create(edited), StatusCode::kInvalidArgument, {"-1"}));
  edited = options;
  std::get<Mamba2Shape>(edited.layers[1].recurrence).head_dim = 24;
  edited.layers[1].conv = {};
  EXPECT_TRUE(refused(create(edited), StatusCode::kUnsupported, {"layer 1", "24", "16"}));
  edited = options;
  edited.checkpoint = DType::kBF16;
  EXPECT_TRUE(refused(create(edited), StatusCode::kUnsupported, {"bf16", "f32"}));

  const std::size_t bytes = StatePool::bytes_per_slot(options).value().total * 3;
  AlignedBytes host(bytes);
  edited = options;
  edited.storage = host.span();
  EXPECT_TRUE(refused(create(edited), StatusCode::kInvalidArgument, {"host", "cuda:0"}));
  const DeviceBytes memory(bytes + 64);
  edited.storage = {memory.as<std::byte>(), bytes - 1};
  EXPECT_TRUE(refused(create(edited), StatusCode::kInvalidArgument,
                      {std::to_string(bytes - 1), std::to_string(bytes)}));
  edited.storage = {memory.as<std::byte>() + 16, bytes};
  EXPECT_TRUE(refused(create(edited), StatusCode::kInvalidArgument, {"16", "64"}));
  edited.storage = {memory.as<std::byte>(), bytes};
  const Result<StatePool> pool = StatePool::create(edited);
  ASSERT_TRUE(is_ok(pool));
  EXPECT_EQ(pool->impl().base, memory.as<std::byte>());
}

// An error that earlier work left is reported by the call that finds it, and then gone.
TEST_F(CudaSteps, EarlierErrorsAreReported) {
  const Mamba2Model model(usual_case());
  StatePool pool = cuda_pool(model, 2);
  void* nothing = nullptr;
  ASSERT_EQ(cudaMalloc(&nothing, std::numeric_limits<std::size_t>::max() / 2),
            cudaErrorMemoryAllocation);
  EXPECT_TRUE(refused(pool.reset(kCuda, 0), StatusCode::kInternal, {"earlier", "memory"}));
  EXPECT_TRUE(is_ok(pool.reset(kCuda, 0)));
}

// C82: slots beyond 2^31 elements.
TEST_F(CudaSteps, C82_OffsetsBeyond32Bits) {
  std::size_t available = 0;
  std::size_t total = 0;
  ASSERT_CUDA(cudaMemGetInfo(&available, &total));
  if (available < (std::size_t{40} << 30)) GTEST_SKIP() << "needs 40 GiB";
  Mamba2Case c = usual_case(DType::kF32, DType::kBF16);
  c.layers = 1;
  const Mamba2Model model(c);
  StatePoolOptions options = on_cuda(c.options(4));
  options.page_alignment = std::size_t{8} << 30;
  options.poison = false;
  StatePool pool = model.make_pool(options);
  Mamba2CudaRunner runner(model, pool);
  ASSERT_TRUE(is_ok(pool.reset(kCuda, 3)));
  SequenceOracle oracle(model);
  oracle.run(names(1, 0, 7));
  runner.step({committed(3, names(1, 0, 7))});
  runner.step({tentative(3, names(1, 7, 2), 2)});
  oracle.run(names(1, 7, 2));
  ASSERT_TRUE(is_ok(pool.copy(kCuda, 3, 1)));
  ASSERT_TRUE(is_ok(pool.materialize(kCuda, 1, 9, 2)));
  for (const std::int32_t slot : {1, 2, 3}) {
    const StepOutput output = runner.step({tentative(slot, names(1, 9, 3), 0)});
    expect_close(output[0], oracle.run(names(1, 9, 3), 0), c, "slot " + std::to_string(slot));
  }
}

// Where there is no GPU the library says so, and the CPU works.
TEST(WithoutCuda, ThePoolIsRefusedAndTheCpuWorks) {
  const Result<int> devices = device_count(DeviceKind::kCuda);
  if (devices.ok()) GTEST_SKIP() << "there is a CUDA device";
  EXPECT_TRUE(refused(devices, StatusCode::kUnsupported, {"cuda", "cpu"}));
  const Mamba2Model model(usual_case());
  EXPECT_TRUE(is_ok(StatePool::bytes_per_slot(on_cuda(model.test_case().options(2)))));
  EXPECT_TRUE(refused(StatePool::create(on_cuda(model.test_case().options(2))),
                      StatusCode::kUnsupported, {"cuda", "cpu"}));
  StatePool pool = model.make_pool(2);
  ASSERT_TRUE(is_ok(pool.reset(0)));
  Mamba2Runner runner(model, pool, {});
  SequenceOracle oracle(model);
  const StepOutput output = runner.step({committed(0, names(1, 0, 5))});
  expect_close(output[0], oracle.run(names(1, 0, 5)), model.test_case(), "on the CPU");
}

}  // namespace
}  // namespace replayssm::testing
