// Gated DeltaNet and Kimi Delta Attention on the GPU: the case table against the fp64 oracle, exact
// flushes, moves between slots and backends, graphs, sizes. Without a GPU every case is skipped.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cuda/step_kernel.h"
#include "support/delta_rule_cuda_runner.h"
#include "support/moves.h"
#include "support/pool_access.h"
#include "support/random_plan.h"

namespace replayssm::testing {
namespace {

using cuda::OnCuda;

struct Types {
  DType checkpoint, activation;
  FlushMode flush = FlushMode::kExact;

  DeltaCase usual(DeltaFamily family) const {
    return usual_delta_case(family, checkpoint, activation, flush);
  }
  std::string to_string() const {
    std::ostringstream out;
    out << replayssm::to_string(checkpoint) << "_" << replayssm::to_string(activation) << "_"
        << replayssm::to_string(flush);
    return std::move(out).str();
  }
};
constexpr Types kTypes[] = {{DType::kF32, DType::kF32},
                            {DType::kF32, DType::kBF16},
                            {DType::kBF16, DType::kBF16},
                            {DType::kBF16, DType::kF32},
                            {DType::kF16, DType::kF32},
                            {DType::kF16, DType::kBF16},
                            {DType::kF32, DType::kBF16, FlushMode::kFast},
                            {DType::kBF16, DType::kBF16, FlushMode::kFast},
                            {DType::kF16, DType::kF32, FlushMode::kFast}};

std::vector<DeltaCase> cuda_cases() {
  std::vector<DeltaCase> cases;
  for (const DeltaCase& c : delta_rule_cases()) {
    const DeltaCase mapped = for_cuda(c);
    const bool geometry = c.name.find("_K") != std::string::npos;
    // Of the table's geometries those that are not CUDA's would only repeat others.
    if (geometry &&
        (mapped.shape.key_dim != c.shape.key_dim || mapped.shape.value_dim != c.shape.value_dim)) {
      continue;
    }
    cases.push_back(mapped);
  }
  for (const DeltaFamily family : kDeltaFamilies) {
    // Every kernel variant with every pair of types, and tiles that no block takes at once.
    for (const Types& types : kTypes) {
      for (const auto& [window, draft] :
           {std::pair{16, 1}, {16, 4}, {16, 8}, {32, 16}, {64, 1}, {40, 4}}) {
        for (const auto& [k, v] : {std::pair{128, 144}, {64, 80}, {256, 32}}) {
          std::ostringstream name;
          name << "cuda_" << types.to_string() << "_L" << window << "_T" << draft << "_K" << k
               << "_V" << v;
          DeltaCase c = small_delta_case(family, std::move(name).str(), window, draft);
          c.shape.key_dim = k;
          c.shape.value_dim = v;
          c.checkpoint = types.checkpoint;
          c.activation = types.activation;
          c.flush = types.flush;
          c.unit = 8;
          c.strided = true;
          if (k != 128 && window == 40) continue;  // more records than a warp has lanes
          // What a block's shared memory holds.
          if (k == 256 && window > 32) continue;
          if (k == 256 && family != DeltaFamily::kGated && draft == 16) continue;
          cases.push_back(c);
        }
      }
    }
  }
  return cases;
}

using cuda::force_step_kernel, cuda::StepKernel;

/// Steps take one kernel or the other by the throw of a coin.
class AnyKernel {
 public:
  ~AnyKernel() { force_step_kernel(StepKernel::kAuto); }
  void throw_coin() {
    force_step_kernel(rng_.chance(0.5) ? StepKernel::kStreamed : StepKernel::kDirect);
    runs_.choose();
  }

 private:
  Rng rng_{17};
  AnyRuns runs_;
};

void expect_no_device_error(StatePool& pool) {
  EXPECT_TRUE(is_ok(to_status(pool.take_device_error(kCuda).value())));
}

class DeltaCudaTable : public OnCuda, public ::testing::WithParamInterface<DeltaCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, DeltaCudaTable, ::testing::ValuesIn(cuda_cases()),
                         [](const auto& test) { return test.param.name; });

TEST_P(DeltaCudaTable, MatchesOracle) {
  const DeltaCase& c = GetParam();
  const DeltaModel model(c, 7);
  StatePool pool = cuda_pool(model, kPlanSlots);
  for (std::int32_t slot = 0; slot < kPlanSlots; ++slot) {
    ASSERT_TRUE(is_ok(pool.reset(kCuda, slot)));
  }
  DeltaCudaRunner runner(model, pool);
  AnyRuns runs;
  for (const PlannedStep& step : random_plan(model, 11)) {
    runs.choose();
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
  expect_no_device_error(pool);
}

class DeltaCuda : public OnCuda, public ::testing::WithParamInterface<DeltaFamily> {};
INSTANTIATE_TEST_SUITE_P(Families, DeltaCuda, ::testing::ValuesIn(kDeltaFamilies),
                         [](const auto& test) { return to_string(test.param); });

// C71, C77: a row of n tokens is n rows of one, in every checkpoint format, also after a fold.
TEST_P(DeltaCuda, CommittedRowIsBitEqualToItsTokens) {
  for (const Types& types : kTypes) {
    for (const int key_dim : {64, 128, 256}) {
      DeltaCase c = types.usual(GetParam());
      c.shape.key_dim = key_dim;
      const DeltaModel model(c);
      StatePool pool = cuda_pool(model, 2);
      DeltaCudaRunner runner(model, pool);
      for (const std::int32_t slot : {0, 1}) {
        ASSERT_TRUE(is_ok(pool.reset(kCuda, slot)));
        runner.step({tentative(slot, names(1, 0, 3), 2)});
      }
      const StepOutput whole = runner.step({committed(0, names(1, 2, 41))});
      std::vector<std::vector<float>> parts(static_cast<std::size_t>(c.layers));
      for (std::int64_t done = 2; done < 43;) {
        const std::int64_t n = std::min<std::int64_t>(done % 3 == 0 ? 5 : 1, 43 - done);
        const StepOutput output = runner.step({committed(1, names(1, done, n))});
        for (std::size_t l = 0; l < parts.size(); ++l) {
          parts[l].insert(parts[l].end(), output[0][l].begin(), output[0][l].end());
        }
        done += n;
      }
      for (int layer = 0; layer < c.layers; ++layer) {
        const auto l = static_cast<std::size_t>(layer);
        EXPECT_TRUE(same_bits(whole[0][l], parts[l])) << types.to_string();
        EXPECT_TRUE(same_bytes(checkpoint_bytes(pool, layer, 0), checkpoint_bytes(pool, layer, 1)))
            << types.to_string() << " K " << key_dim;
      }
      if (HasFailure()) return;
    }
  }
}

/// With an f32 checkpoint, what flushes store is plain decoding's state, bit for bit, whichever of
/// its kernels a step takes.
void expect_flushes_equal_plain_decoding(const DeltaCase& c) {
  const ReplayLimits limits = c.limits;
  const DeltaModel model(c);
  StatePool pool = cuda_pool(model, 2);
  DeltaCudaRunner runner(model, pool);
  ASSERT_TRUE(is_ok(pool.reset(kCuda, 0)));
  ASSERT_TRUE(is_ok(pool.reset(kCuda, 1)));
  Rng rng(5);
  AnyKernel kernel;
  std::int64_t position = 0;
  int flushes = 0;
  for (int i = 0; i < 60 + 3 * limits.window / limits.draft_capacity; ++i) {
    if (rng.chance(0.05)) {
      ASSERT_TRUE(is_ok(pool.force_flush(kCuda, 0)));
    }
    const Cursor before = pool.cursor(0).value();
    const std::int64_t count = rng.between(1, limits.draft_capacity);
    const std::int64_t accepted = rng.chance(0.5) ? count : rng.between(0, count);
    kernel.throw_coin();
    runner.step({tentative(0, names(1, position, count), accepted)});
    if (tentative_row_flushes(before, limits)) {
      ++flushes;
      const std::int64_t done = pool.cursor(1).value().position;
      kernel.throw_coin();
      runner.step({committed(1, names(1, done, before.position - done))});
      for (int layer = 0; layer < c.layers; ++layer) {
        ASSERT_TRUE(
            same_bytes(checkpoint_bytes(pool, layer, 0), checkpoint_bytes(pool, layer, 1), 4))
            << "flush " << flushes << " of window " << limits.window;
      }
    }
    position += accepted;
  }
  EXPECT_GE(flushes, 2);
}

// C04.
TEST_P(DeltaCuda, FlushIsBitEqualToPlainDecoding) {
  for (const DType activation : {DType::kF32, DType::kBF16}) {
    for (const ReplayLimits limits : {ReplayLimits{16, 4}, {16, 1}, {5, 3}, {64, 16}, {8, 8}}) {
      DeltaCase c = usual_delta_case(GetParam(), DType::kF32, activation);
      c.limits = limits;
      expect_flushes_equal_plain_decoding(c);
      if (HasFailure()) return;
    }
  }
}

// What is deferred leaves its range in every window, by decays of 0 too, in the kernels for a
// key_dim of 128 and bf16.
TEST_P(DeltaCuda, FlushIsBitEqualWhateverDecaysAre) {
  for (const DeltaDecay decay :
       {DeltaDecay::kFast, DeltaDecay::kSteep, DeltaDecay::kZero, DeltaDecay::kMixed}) {
    for (const ReplayLimits limits : {ReplayLimits{16, 1}, {16, 4}, {16, 8}}) {
      DeltaCase c = usual_delta_case(GetParam(), DType::kF32, DType::kBF16);
      c.decay = decay;
      c.layers = 1;
      c.shape.key_dim = 128;
      c.limits = limits;
      expect_flushes_equal_plain_decoding(c);
      if (HasFailure()) return;
    }
  }
}

/// 8,000 rounds of four tokens of which 1, 4, 2, 3 are accepted in turn.
void expect_no_growth(DeltaFamily family, FlushMode flush) {
  DeltaCase c = for_cuda(small_delta_case(family, "drift", 16, 4));
  c.flush = flush;
  // What a fast flush brings into the state is the rounding of deltas.
  if (flush == FlushMode::kFast) c.activation = DType::kBF16;
  c.dt_bias = false;
  c.decay = DeltaDecay::kSlow;
  const DeltaModel model(c);
  StatePool pool = cuda_pool(model, 1);
  DeltaCudaRunner runner(model, pool);
  DeltaOracle oracle(model);
  ASSERT_TRUE(is_ok(pool.reset(kCuda, 0)));
  constexpr std::int64_t kAccepted[] = {1, 4, 2, 3};
  constexpr int kRounds = 8'000;
  double worst[2] = {};  // of each half
  for (int round = 0; round < kRounds; ++round) {
    const std::int64_t accepted = kAccepted[round % 4];
    const std::vector<TokenId> tokens = names(1, 4 * round, 4);
    const StepOutput output = runner.step({tentative(0, tokens, accepted)});
    const OracleOutput want = oracle.run(tokens, static_cast<std::size_t>(accepted));
    if (round % 64 != 0) continue;
    double difference = 0.0;
    double reference = 0.0;
    for (std::size_t i = 0; i < want[0].size(); ++i) {
      const double d = static_cast<double>(output[0][0][i]) - want[0][i];
      difference += d * d;
      reference += want[0][i] * want[0][i];
    }
    double& half = worst[2 * round / kRounds];
    half = std::max(half, std::sqrt(difference / reference));
  }
  EXPECT_LT(worst[0], c.bound());
  EXPECT_LT(worst[1], c.bound());
  EXPECT_GT(worst[0], 0.0);
  EXPECT_LT(worst[1], 1.5 * worst[0]);
}

// C02 on the device.
TEST_P(DeltaCuda, C02_NoGrowthOverEightThousandRounds) {
  expect_no_growth(GetParam(), FlushMode::kExact);
}
TEST_P(DeltaCuda, C02_NoGrowthWithFastFlushes) { expect_no_growth(GetParam(), FlushMode::kFast); }

// C05: one gate whether a token comes in a prompt, alone, as a draft, or through a flush.
TEST_P(DeltaCuda, C05_OneGateOnEveryPath) {
  DeltaCase c = usual_delta_case(GetParam());
  c.decay = DeltaDecay::kMixed;
  const DeltaModel model(c);
  StatePool pool = cuda_pool(model, 4);
  DeltaCudaRunner runner(model, pool);
  for (const std::int32_t slot : {0, 1, 2}) ASSERT_TRUE(is_ok(pool.reset(kCuda, slot)));
  const std::vector<TokenId> tokens = names(1, 0, 3);
  const StepOutput prompt = runner.step({committed(0, tokens)});
  const StepOutput verify = runner.step({tentative(1, tokens, 3)});
  std::vector<float> single;
  for (std::int64_t t = 0; t < 3; ++t) {
    const StepOutput one = runner.step({tentative(2, names(1, t, 1), 1)});
    single.insert(single.end(), one[0][0].begin(), one[0][0].end());
  }
  const std::vector<double> want(prompt[0][0].begin(), prompt[0][0].end());
  EXPECT_TRUE(close(verify[0][0], want, c.bound(), c.output_shape()));
  EXPECT_TRUE(close(single, want, c.bound(), c.output_shape()));
  for (const std::int32_t slot : {1, 2}) {
    ASSERT_TRUE(is_ok(pool.materialize(kCuda, slot, 3, 3)));
    EXPECT_TRUE(same_bytes(checkpoint_bytes(pool, 0, 3), checkpoint_bytes(pool, 0, 0)));
  }
}

// Prefixes, copies, truncation, and records that do not fit a smaller window.
TEST_P(DeltaCuda, StatesMove) {
  for (const Types& types : kTypes) {
    const DeltaModel model(types.usual(GetParam()));
    DeltaCase small = model.test_case();
    small.limits = {3, 3};
    const DeltaModel small_model(small);
    StatePool pool = cuda_pool(model, 4);
    StatePool narrow = cuda_pool(small_model, 1);
    DeltaCudaRunner runner(model, pool);
    DeltaCudaRunner narrow_runner(small_model, narrow);
    for (const std::int64_t folded : {0, 5}) {
      for (const std::int64_t live : {0, 1, 6}) {
        const std::string where = types.to_string() + " folded " + std::to_string(folded) +
                                  ", live " + std::to_string(live);
        ASSERT_TRUE(is_ok(pool.reset(kCuda, 1)));
        bring(runner, 1, folded, live);
        const std::int64_t end = folded + live;
        const std::int64_t prefix = folded + live / 2;
        ASSERT_TRUE(is_ok(pool.materialize(kCuda, 1, prefix, 2))) << where;
        ASSERT_TRUE(is_ok(pool.copy(kCuda, 1, 3)));
        ASSERT_TRUE(is_ok(pool.materialize(kCuda, 1, end, 0)));
        ASSERT_TRUE(is_ok(narrow.load(kCuda, 0, pool.save(kCuda, 1).value())));
        if (live > 3) {
          for (int layer = 0; layer < 2; ++layer) {
            EXPECT_TRUE(
                same_bytes(checkpoint_bytes(narrow, layer, 0), checkpoint_bytes(pool, layer, 0)))
                << where;
          }
        }
        expect_continues(runner, 2, prefix, where + ", prefix");
        expect_continues(runner, 1, end, where + ", source");
        ASSERT_TRUE(is_ok(pool.truncate(kCuda, 3, prefix)));
        expect_continues(runner, 3, prefix, where + ", truncated");
        expect_continues(narrow_runner, 0, end, where + ", smaller window");
        if (HasFailure()) return;
      }
    }
  }
}

// A state written on one backend continues on the other, and saving it again gives the same bytes.
TEST_P(DeltaCuda, StatesTravelBetweenBackends) {
  for (const Types& types : kTypes) {
    DeltaCase c = types.usual(GetParam());
    c.shape.value_dim = 80;  // the CPU's last tile is narrower
    const DeltaModel model(c);
    const CpuContext cpu = best_cpu();
    StatePool host = model.make_pool(2);
    StatePool device = cuda_pool(model, 2);
    DeltaRunner on_host(model, host, cpu);
    DeltaCudaRunner on_device(model, device);
    for (const std::int64_t folded : {0, 9}) {
      for (const std::int64_t live : {0, 6}) {
        const std::string where = types.to_string() + " folded " + std::to_string(folded) +
                                  ", live " + std::to_string(live);
        ASSERT_TRUE(is_ok(host.reset(0)));
        bring(on_host, 0, folded, live);
        const std::vector<std::byte> image = host.save(0).value();
        ASSERT_TRUE(is_ok(device.load(kCuda, 1, image)));
        EXPECT_TRUE(same_bytes(device.save(kCuda, 1).value(), image)) << where;
        expect_continues(on_device, 1, folded + live, where + ", on the device");
        ASSERT_TRUE(is_ok(device.reset(kCuda, 0)));
        bring(on_device, 0, folded, live);
        ASSERT_TRUE(is_ok(host.load(cpu, 1, device.save(kCuda, 0).value())));
        expect_continues(on_host, 1, folded + live, where + ", on the host");
        if (HasFailure()) return;
      }
    }
  }
}

/// What a slot's checkpoint stores in the order of a page on the CPU, decoded, (heads, elements).
std::vector<float> cpu_ordered(const StatePool& pool, std::int32_t slot) {
  const StatePool::Impl& impl = pool.impl();
  const Field& field = impl.layout(0).field("checkpoint");
  std::vector<std::byte> bytes = field_bytes(pool, 0, slot, "checkpoint");
  if (impl.gpu != nullptr) {
    const std::vector<std::byte> page = bytes;
    checkpoint_from_cuda(impl.recurrence(0), field, page.data(), bytes.data());
  }
  std::vector<float> values(bytes.size() / size_of(field.dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = load_element(field.dtype, bytes.data(), static_cast<std::int64_t>(i));
  }
  return values;
}

// One flush from identical inputs, within two ulp of the head's largest value or one code of a
// two-byte state; and a thousand tokens in rows of every kind, states within 1e-6 where nothing is
// rounded to 16 bits. Fast flushes add up in another order.
TEST_P(DeltaCuda, AgreesWithTheCpu) {
  for (const Types& types : kTypes) {
    if (types.flush != FlushMode::kExact) continue;
    DeltaCase c = types.usual(GetParam());
    c.shape.value_dim = 128;
    c.limits = {16, 4};
    c.conv_width = 0;
    c.layers = 1;
    const DeltaModel model(c);
    StatePool host = model.make_pool(2);
    StatePool device = cuda_pool(model, 2);
    DeltaRunner on_host(model, host, best_cpu());
    DeltaCudaRunner on_device(model, device);
    for (const std::int64_t folded : {0, 40}) {
      ASSERT_TRUE(is_ok(host.reset(0)));
      bring(on_host, 0, folded, 13);
      ASSERT_TRUE(is_ok(device.load(kCuda, 0, host.save(0).value())));
      ASSERT_TRUE(is_ok(host.materialize(best_cpu(), 0, folded + 13, 1)));
      ASSERT_TRUE(is_ok(device.materialize(kCuda, 0, folded + 13, 1)));
      const std::vector<float> a = cpu_ordered(host, 1);
      const std::vector<float> b = cpu_ordered(device, 1);
      ASSERT_EQ(a.size(), b.size());
      ASSERT_EQ(deferred_decays(host, 0, 1), deferred_decays(device, 0, 1));
      const std::size_t head = a.size() / static_cast<std::size_t>(c.shape.value_heads);
      for (std::size_t first = 0; first < a.size(); first += head) {
        float largest = 0.0f;
        for (std::size_t i = first; i < first + head; ++i) {
          largest = std::max(largest, std::abs(a[i]));
        }
        const float ulp = std::nextafter(largest, std::numeric_limits<float>::infinity()) - largest;
        for (std::size_t i = first; i < first + head; ++i) {
          const float code =
              c.checkpoint == DType::kF32
                  ? 0.0f
                  : std::max(std::abs(a[i]) * (c.checkpoint == DType::kBF16 ? 0x1p-7f : 0x1p-10f),
                             0x1p-24f);
          ASSERT_LE(std::abs(a[i] - b[i]), std::max(2.0f * ulp, code)) << "element " << i;
        }
      }
    }
    if (c.checkpoint != DType::kF32) continue;
    ASSERT_TRUE(is_ok(host.reset(0)));
    ASSERT_TRUE(is_ok(device.reset(kCuda, 0)));
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
    ASSERT_TRUE(is_ok(host.materialize(best_cpu(), 0, position, 1)));
    ASSERT_TRUE(is_ok(device.materialize(kCuda, 0, position, 1)));
    std::vector<float> a = cpu_ordered(host, 1);
    std::vector<float> b = cpu_ordered(device, 1);
    multiply_deferred(deferred_decays(host, 0, 1), a);
    multiply_deferred(deferred_decays(device, 0, 1), b);
    EXPECT_TRUE(close(b, std::vector<double>(a.begin(), a.end()), 1e-6, c.state_shape()));
  }
}

// C39, C75, C80: 1023, 1024, 1025 and 65,536 row-heads.
TEST_P(DeltaCuda, ManyRowHeads) {
  struct Size {
    std::int32_t rows;
    std::int64_t heads;
  };
  for (const Size size : {Size{1023, 1}, Size{1024, 1}, Size{1025, 1}, Size{1024, 64}}) {
    DeltaCase c = for_cuda(small_delta_case(GetParam(), "many", 4, 2));
    c.shape.value_heads = size.heads;
    c.shape.key_heads =
        c.shape.channel_decay ? size.heads : std::max<std::int64_t>(1, size.heads / 4);
    c.shape.value_dim = 16;
    const DeltaModel model(c);
    StatePool pool = cuda_pool(model, size.rows, size.rows);
    DeltaCudaRunner runner(model, pool);
    for (std::int32_t slot = 0; slot < size.rows; ++slot) {
      ASSERT_TRUE(is_ok(pool.reset(kCuda, slot)));
    }
    // Slots run the same two sequences, so that two oracles do for all.
    std::vector<DeltaOracle> oracles(2, DeltaOracle(model));
    for (int i = 0; i < 4; ++i) {
      std::vector<RowSpec> rows;
      OracleOutput want[2];
      for (std::uint64_t s = 0; s < 2; ++s) {
        want[s] = oracles[s].run(names(s + 1, 10 * i, 2), 1 + s);
      }
      for (std::int32_t slot = size.rows - 1; slot >= 0; --slot) {
        const auto s = static_cast<std::uint64_t>(slot % 2);
        rows.push_back(tentative(slot, names(s + 1, 10 * i, 2), static_cast<std::int64_t>(1 + s)));
      }
      const StepOutput output = runner.step(rows);
      for (std::size_t r = 0; r < rows.size(); ++r) {
        const auto s = static_cast<std::size_t>(rows[r].slot % 2);
        if (r < 2) expect_close(output[r], want[s], c, "row " + std::to_string(r));
        if (r >= 2) {
          ASSERT_TRUE(same_bits(output[r][0], output[r % 2][0])) << "row " << r;
        }
        if (HasFailure()) return;
      }
    }
  }
}

// C82: slots beyond 2^31 elements.
TEST_P(DeltaCuda, C82_OffsetsBeyond32Bits) {
  std::size_t available = 0;
  std::size_t total = 0;
  ASSERT_CUDA(cudaMemGetInfo(&available, &total));
  if (available < (std::size_t{40} << 30)) GTEST_SKIP() << "needs 40 GiB";
  DeltaCase c = usual_delta_case(GetParam(), DType::kF32, DType::kBF16);
  c.layers = 1;
  const DeltaModel model(c);
  StatePoolOptions options = on_cuda(c.options(4));
  options.page_alignment = std::size_t{8} << 30;
  options.poison = false;
  StatePool pool = model.make_pool(options);
  DeltaCudaRunner runner(model, pool);
  ASSERT_TRUE(is_ok(pool.reset(kCuda, 3)));
  DeltaOracle oracle(model);
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

TEST_P(DeltaCuda, PoolsThatCannotBeAreRefused) {
  const auto refused_for = [&](auto edit, std::initializer_list<std::string> words) {
    DeltaCase c = usual_delta_case(GetParam());
    edit(c);
    c.conv_width = 0;
    return refused(StatePool::create(on_cuda(c.options(1))).status(), StatusCode::kUnsupported,
                   words);
  };
  EXPECT_TRUE(
      refused_for([](DeltaCase& c) { c.shape.key_dim = 24; }, {"layer 0", "key_dim", "24"}));
  EXPECT_TRUE(
      refused_for([](DeltaCase& c) { c.shape.value_dim = 40; }, {"layer 0", "value_dim", "40"}));
  EXPECT_TRUE(refused_for([](DeltaCase& c) { c.activation = c.gate_type = DType::kF16; },
                          {"layer 0", "f16 activations"}));
  EXPECT_TRUE(refused_for(
      [](DeltaCase& c) {
        c.shape.key_dim = 256;
        c.limits = {64, 16};
      },
      {"layer 0", "shared memory", "window 64", "key_dim 256"}));
}

}  // namespace
}  // namespace replayssm::testing
