// Read copies on the GPU: outputs of tentative rows are those of the copy that is stored, the copy
// is that of the checkpoint to the last bit, and the checkpoint is that of a pool without copies.
// Without a GPU every case is skipped.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "ops/mamba2_cases.h"
#include "support/cuda_runner.h"
#include "support/delta_rule_cuda_runner.h"
#include "support/pool_access.h"
#include "support/read_copy_properties.h"

namespace replayssm::testing {
namespace {

using cuda::OnCuda;

constexpr ReadCopyFormat kFormats[] = {ReadCopyFormat::kFp8E4M3, ReadCopyFormat::kInt8,
                                       ReadCopyFormat::kNvfp4};

template <typename Case>
void add_formats(std::vector<Case>& cases, const Case& base) {
  for (const ReadCopyFormat format : kFormats) {
    for (const DType checkpoint : {DType::kF32, DType::kBF16}) {
      Case c = base;
      std::ostringstream name;
      name << base.name << "_" << (format == ReadCopyFormat::kFp8E4M3 ? "fp8" : to_string(format))
           << "_" << to_string(checkpoint);
      c.name = std::move(name).str();
      c.read_copy = format;
      c.checkpoint = checkpoint;
      c.activation = DType::kBF16;
      c.unit = 8;
      cases.push_back(std::move(c));
    }
  }
}

std::vector<Mamba2Case> mamba2_copies() {
  std::vector<Mamba2Case> cases;
  for (const std::int64_t state_size : {64, 128, 256}) {
    for (const auto& [window, draft] : {std::pair{8, 4}, {16, 1}, {20, 12}}) {
      Mamba2Case c = small_case(
          std::string("N").append(std::to_string(state_size)) + "_L" + std::to_string(window),
          window, draft);
      // Single tokens prepare two heads of a group at a time.
      c.shape = {draft == 1 ? 6 : 4, 48, state_size, 2};
      add_formats(cases, c);
    }
  }
  // Entries beyond the places that pairs of heads have, and pairs of several small heads.
  Mamba2Case c = small_case("N128_L31", 31, 1);
  c.shape = {6, 48, 128, 2};
  add_formats(cases, c);
  c = small_case("N128_P16", 16, 1);
  c.shape = {10, 16, 128, 2};
  add_formats(cases, c);
  return cases;
}

std::vector<DeltaCase> delta_copies() {
  std::vector<DeltaCase> cases;
  for (const DeltaFamily family : {DeltaFamily::kGated, DeltaFamily::kKimi}) {
    const bool channels = family == DeltaFamily::kKimi;
    for (const auto& [k, v] : {std::pair{128, 128}, {80, 48}, {256, 32}}) {
      for (const auto& [window, draft] : {std::pair{8, 4}, {16, 1}, {20, 12}, {40, 1}}) {
        if (k == 256 && draft == 12) continue;  // beyond a block's shared memory with channels
        if (k != 128 && window == 40) continue;
        std::ostringstream name;
        name << "K" << k << "_L" << window;
        DeltaCase c = small_delta_case(family, std::move(name).str(), window, draft);
        c.shape = {channels ? 4 : 2, 4, k, v, channels};
        add_formats(cases, c);
      }
    }
  }
  return cases;
}

/// A slot's page of a layer with its parts.
struct Page {
  Page(const StatePool& pool, int layer, std::int32_t slot)
      : layout(&pool.impl().layout(layer)), bytes(page_bytes(pool, layer, slot)) {}

  ReadCopy copy() { return layout->read_copy_in(bytes.data()); }
  /// The checkpoint in the order of pages on the CPU.
  std::vector<std::byte> checkpoint(const StatePool& pool, int layer) const {
    const Field& f = layout->field("checkpoint");
    std::vector<std::byte> out(f.bytes());
    checkpoint_from_cuda(pool.impl().recurrence(layer), f, bytes.data() + f.offset, out.data());
    return out;
  }

  const PageLayout* layout;
  std::vector<std::byte> bytes;
};

/// The state that the stored copy stands for, in the order of the family's reference.
std::vector<double> copied_state(Page& page) {
  std::vector<double> values =
      read_copy_values(page.copy(), page.layout->field("checkpoint").outer);
  multiply_deferred(deferred_decays(*page.layout, page.bytes.data()), values);
  return values;
}

void expect_copy_is_of_checkpoint(const StatePool& pool, int layer, std::int32_t slot,
                                  const std::string& where) {
  Page page(pool, layer, slot);
  const Field& checkpoint = page.layout->field("checkpoint");
  const std::vector<std::byte> state = page.checkpoint(pool, layer);
  std::vector<std::byte> fresh(page.bytes.size());
  encode_read_copy(page.layout->read_copy_in(fresh.data()), state.data(), checkpoint.dtype, 0,
                   checkpoint.outer);
  for (const Field& f : page.layout->fields) {
    if (f.kind != FieldKind::kReadCopy) continue;
    EXPECT_TRUE(same_bytes({page.bytes.data() + f.offset, f.bytes()},
                           {fresh.data() + f.offset, f.bytes()}, size_of(f.dtype)))
        << where << ", layer " << layer << ", " << f.name;
  }
}

template <typename Runner, typename Model>
void expect_outputs_read_the_copy_on_cuda(const Model& model) {
  const auto& c = model.test_case();
  auto exact_case = c;  // the bounds of what a copy does not touch
  exact_case.read_copy = ReadCopyFormat::kNone;
  auto seen_case = exact_case;  // the checkpoint's rounding is in the copy
  seen_case.checkpoint = DType::kF32;
  StatePoolOptions without = on_cuda(c.options(2));
  for (LayerSpec& layer : without.layers) layer.read_copy = ReadCopyFormat::kNone;
  StatePool pool = cuda_pool(model, 2);
  StatePool twin = model.make_pool(without);
  Runner runner(model, pool);
  Runner twin_runner(model, twin);
  ASSERT_TRUE(is_ok(pool.reset(kCuda, 1)));
  ASSERT_TRUE(is_ok(twin.reset(kCuda, 1)));
  OracleOf<Model> exact(model);  // at the position
  OracleOf<Model> seen(model);   // there, from the copy over the live records
  const auto read_copy = [&] {
    for (int layer = 0; layer < c.layers; ++layer) {
      Page page(pool, layer, 1);
      seen.state(layer) = copied_state(page);
    }
  };
  Rng rng(33);
  AnyRuns runs;
  TokenId token = 1;
  int flushes = 0;
  const int steps = 32 + 4 * c.limits.window / c.limits.draft_capacity;
  for (int step = 0; step < steps; ++step) {
    if (rng.chance(0.2)) {
      ASSERT_TRUE(is_ok(pool.force_flush(kCuda, 1)));
      ASSERT_TRUE(is_ok(twin.force_flush(kCuda, 1)));
    }
    const bool is_committed = step == 4 || rng.chance(0.1);
    std::vector<TokenId> tokens(static_cast<std::size_t>(
        is_committed ? rng.between(1, 9) : rng.between(1, c.limits.draft_capacity)));
    for (TokenId& t : tokens) t = token++;
    const auto count = static_cast<std::int64_t>(tokens.size());
    const std::int64_t accepted = is_committed || rng.chance(0.6) ? count : rng.between(0, count);
    const std::vector<RowSpec> rows = {
        padding(1), is_committed ? committed(1, tokens) : tentative(1, tokens, accepted)};
    const Cursor before = pool.cursor(1).value();
    const std::string where = "step " + std::to_string(step);
    runs.choose();
    const StepOutput output = runner.step(rows);
    const StepOutput twin_output = twin_runner.step(rows);
    const OracleOutput want = exact.run(tokens, static_cast<std::size_t>(accepted));
    if (is_committed) {
      expect_close(output[1], want, exact_case, where);
      for (std::size_t layer = 0; layer < output[1].size(); ++layer) {
        EXPECT_TRUE(same_bits(output[1][layer], twin_output[1][layer])) << where;
      }
      seen.run(tokens);
      read_copy();
    } else {
      if (tentative_row_flushes(before, c.limits)) {
        ++flushes;
        read_copy();
      }
      expect_close(output[1], seen.run(tokens, static_cast<std::size_t>(accepted)), seen_case,
                   where);
    }
    const Cursor cursor = pool.cursor(1).value();
    for (int layer = 0; layer < c.layers && cursor.checkpoint_position > 0; ++layer) {
      expect_copy_is_of_checkpoint(pool, layer, 1, where);
      EXPECT_TRUE(same_bytes(checkpoint_bytes(pool, layer, 1), checkpoint_bytes(twin, layer, 1)))
          << where << ": the copy has found its way into the checkpoint";
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GE(flushes, 4) << "the stream tests little";

  // Moves keep or renew the copy, and so does a state that comes from elsewhere.
  ASSERT_TRUE(is_ok(pool.copy(kCuda, 1, 0)));
  expect_copy_is_of_checkpoint(pool, 0, 0, "copied");
  ASSERT_TRUE(is_ok(pool.materialize(kCuda, 1, pool.cursor(1).value().position, 0)));
  expect_copy_is_of_checkpoint(pool, 0, 0, "materialized");
  ASSERT_TRUE(is_ok(pool.load(kCuda, 0, pool.save(kCuda, 1).value())));
  expect_copy_is_of_checkpoint(pool, 0, 0, "loaded");
}

class Mamba2CudaCopies : public OnCuda, public ::testing::WithParamInterface<Mamba2Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, Mamba2CudaCopies, ::testing::ValuesIn(mamba2_copies()),
                         [](const auto& test) { return test.param.name; });
TEST_P(Mamba2CudaCopies, OutputsReadTheCopyAndNothingElseDoes) {
  expect_outputs_read_the_copy_on_cuda<Mamba2CudaRunner>(Mamba2Model(GetParam()));
}

class DeltaCudaCopies : public OnCuda, public ::testing::WithParamInterface<DeltaCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, DeltaCudaCopies, ::testing::ValuesIn(delta_copies()),
                         [](const auto& test) { return test.param.name; });
TEST_P(DeltaCudaCopies, OutputsReadTheCopyAndNothingElseDoes) {
  expect_outputs_read_the_copy_on_cuda<DeltaCudaRunner>(DeltaModel(GetParam()));
}

/// Numbers that are hard to encode, of both signs. The step that encodes them adds a token to them.
float hard_number(Rng& rng, int kind, std::size_t i) {
  const float sign = rng.chance(0.5) ? -1.0f : 1.0f;
  switch (kind) {
    case 0:  // every magnitude there is
      return sign *
             std::ldexp(1.0f + rng.uniform(0.0f, 1.0f), static_cast<int>(rng.between(-149, 127)));
    case 1:  // near codes of every format, and the middle between two
      return sign * 0.125f * static_cast<float>(rng.between(0, 56));
    case 2:  // zeros of both signs and blocks too small for a scale
      return i % 97 == 0 ? sign * 3e38f
                         : sign * (rng.chance(0.5) ? 0.0f : 1e33f * rng.uniform(0.0f, 1.0f));
    case 3:
      return i % 311 == 0 ? std::numeric_limits<float>::quiet_NaN()
                          : sign * rng.uniform(0.0f, 1.0f);
    default:
      return i % 311 == 0 ? sign * std::numeric_limits<float>::infinity()
                          : sign * rng.uniform(0.0f, 1.0f);
  }
}

template <typename Runner, typename Model>
void expect_copies_of_hard_numbers(const Model& model) {
  const auto& c = model.test_case();
  StatePool pool = cuda_pool(model, 1);
  StatePool host = model.make_pool(c.options(1));
  Runner runner(model, pool);
  ASSERT_TRUE(is_ok(pool.reset(kCuda, 0)));
  runner.step(std::vector<RowSpec>{committed(0, {1, 2, 3})});
  ASSERT_TRUE(is_ok(host.load(CpuContext{}, 0, pool.save(kCuda, 0).value())));
  Rng rng(5);
  for (int kind = 0; kind < 5; ++kind) {
    for (int layer = 0; layer < c.layers; ++layer) {
      const Field& f = host.impl().layout(layer).field("checkpoint");
      std::vector<float> values(f.bytes() / size_of(f.dtype));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = hard_number(rng, kind, i);
      set_checkpoint(host, layer, 0, values);
    }
    ASSERT_TRUE(is_ok(pool.load(kCuda, 0, host.save(0).value())));
    runner.step(std::vector<RowSpec>{committed(0, {TokenId{4} + kind})});
    for (int layer = 0; layer < c.layers; ++layer) {
      expect_copy_is_of_checkpoint(pool, layer, 0, "numbers of kind " + std::to_string(kind));
    }
  }
}
TEST_P(Mamba2CudaCopies, AreTheCodecsOfAnyNumbers) {
  expect_copies_of_hard_numbers<Mamba2CudaRunner>(Mamba2Model(GetParam()));
}
TEST_P(DeltaCudaCopies, AreTheCodecsOfAnyNumbers) {
  expect_copies_of_hard_numbers<DeltaCudaRunner>(DeltaModel(GetParam()));
}

// f32 activations have no kernels with copies: refused by name.
class CudaCopies : public OnCuda {};
TEST_F(CudaCopies, PoolsWithoutKernelsAreRefused) {
  Mamba2Case c = for_cuda(small_case("f32", 8, 4));
  c.read_copy = ReadCopyFormat::kNvfp4;
  c.activation = DType::kF32;
  EXPECT_TRUE(refused(StatePool::create(on_cuda(c.options(1))).status(), StatusCode::kUnsupported,
                      {"layer 0", "f32", "nvfp4"}));
}

}  // namespace
}  // namespace replayssm::testing
