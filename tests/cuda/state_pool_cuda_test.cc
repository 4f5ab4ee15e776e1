// Pools in device memory with rows from the host: the case table against the fp64 oracle, moves
// between slots and between backends, misuse. Without a GPU every case but the last is skipped.
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
#include "support/moves.h"
#include "support/pool_access.h"
#include "support/random_plan.h"

namespace replayssm::testing {
namespace {

using cuda::DeviceBytes;
using cuda::OnCuda;

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
  for (const PlannedStep& step : random_plan(model, 11)) {
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

// ---- Moves ----

class CudaMoves : public OnCuda, public ::testing::WithParamInterface<std::pair<DType, DType>> {
 protected:
  Mamba2Case test_case() const { return usual_case(GetParam().first, GetParam().second); }
};

INSTANTIATE_TEST_SUITE_P(
    Types, CudaMoves,
    ::testing::Values(std::pair{DType::kF32, DType::kF32}, std::pair{DType::kF32, DType::kBF16},
                      std::pair{DType::kBF16, DType::kF32}, std::pair{DType::kBF16, DType::kBF16},
                      std::pair{DType::kF16, DType::kF32}, std::pair{DType::kF16, DType::kBF16}),
    [](const auto& test) {
      return std::string(to_string(test.param.first)) + "_" + to_string(test.param.second);
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
// two ulp of the row's largest value, or one code of bf16 or f16.
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
          const float code = c.checkpoint == DType::kBF16  ? std::abs(a[i]) * 0x1p-7f
                             : c.checkpoint == DType::kF16 ? std::abs(a[i]) * 0x1p-10f + 0x1p-24f
                                                           : 0.0f;
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
  edited.layers[1].read_copy = ReadCopyFormat::kNvfp4;
  EXPECT_TRUE(
      refused(create(edited), StatusCode::kUnsupported, {"layer 1", "f32 activations", "nvfp4"}));
  edited = options;
  edited.activation = DType::kF16;
  EXPECT_TRUE(
      refused(create(edited), StatusCode::kUnsupported, {"layer 0", "f16 activations", "bf16"}));

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
