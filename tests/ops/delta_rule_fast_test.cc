// The fast mode: flushes as one product of the stored deltas.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "ops/delta_rule_cases.h"
#include "support/delta_rule_harness.h"
#include "support/flush_stream.h"
#include "support/history.h"
#include "support/mamba2_harness.h"
#include "support/rewinds.h"
#include "support/saves.h"
#include "support/step_properties.h"

namespace replayssm::testing {
namespace {

DeltaCase fast_case(DeltaFamily family, int window, int draft, DType checkpoint = DType::kF32,
                    DType activation = DType::kF32) {
  DeltaCase c = small_delta_case(
      family, std::string(to_string(checkpoint)) + "_" + to_string(activation), window, draft);
  c.flush = FlushMode::kFast;
  c.checkpoint = checkpoint;
  c.activation = activation;
  return c;
}

std::vector<DeltaCase> fast_cases(int window, int draft) {
  std::vector<DeltaCase> cases;
  for (const DeltaFamily family : kDeltaFamilies) {
    for (const auto& [checkpoint, activation] : kTypePairs) {
      cases.push_back(fast_case(family, window, draft, checkpoint, activation));
    }
  }
  return cases;
}

std::vector<DeltaCase> fast_pool_cases(int window) {
  std::vector<DeltaCase> cases;
  for (const DeltaFamily family : kDeltaFamilies) {
    DeltaCase c = fast_case(family, window, 3);
    c.conv_width = 4;
    c.layers = 2;
    c.rewindable = true;
    cases.push_back(c);
  }
  return cases;
}

const auto kName = [](const auto& test) { return test.param.name; };

// ---- What a flush stores ----

class FastFlush : public ::testing::TestWithParam<DeltaCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, FastFlush, ::testing::ValuesIn(fast_cases(8, 3)), kName);

// The plain recurrence's state within the case's bound: after every flush, forced ones included.
TEST_P(FastFlush, CheckpointIsCloseToThePlainRecurrence) {
  expect_flushes_are_plain(DeltaModel(GetParam()));
}

/// Values of a record field, (outer, places, inner).
std::vector<float> record_values(const StatePool& pool, std::int32_t slot, const char* name) {
  const Field& field = pool.impl().layout(0).field(name);
  EXPECT_STREQ(field.name, name);
  const std::vector<std::byte> bytes = field_bytes(pool, 0, slot, name);
  std::vector<float> values(bytes.size() / size_of(field.dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = load_element(field.dtype, bytes.data(), static_cast<std::int64_t>(i));
  }
  return values;
}

/// w(-1) S + sum_i w(i) k'_i d_i^T in fp64 from what the slot's memory holds, in the stored order.
std::vector<double> product_of_records(const StatePool& pool, std::int32_t slot,
                                       const DeltaRuleShape& shape) {
  const Cursor cursor = pool.cursor(slot).value();
  const std::int64_t places = pool.options().limits.record_places();
  const std::vector<float> k = record_values(pool, slot, "k");
  const std::vector<float> k_scale = record_values(pool, slot, "k_scale");
  const std::vector<float> decay = record_values(pool, slot, "decay");
  const std::vector<float> delta = record_values(pool, slot, "delta");
  const std::vector<float> stored = checkpoint_values(pool, 0, slot);
  std::vector<double> state(stored.begin(), stored.end());
  const auto at = [&](const std::vector<float>& field, std::int64_t outer, std::int64_t position,
                      std::int64_t inner, std::int64_t i) {
    return static_cast<double>(
        field[static_cast<std::size_t>((outer * places + position % places) * inner + i)]);
  };
  for (std::int64_t h = 0; h < shape.value_heads; ++h) {
    const std::int64_t key_head = h / shape.heads_per_key();
    for (std::int64_t n = 0; n < shape.key_dim; ++n) {
      for (std::int64_t v = 0; v < shape.value_dim; ++v) {
        const std::int64_t tile = v / kDeltaRuleTile * kDeltaRuleTile;
        const std::int64_t width = std::min(kDeltaRuleTile, shape.value_dim - tile);
        double& s = state[static_cast<std::size_t>(h * shape.key_dim * shape.value_dim +
                                                   tile * shape.key_dim + n * width + v - tile)];
        for (std::int64_t p = cursor.checkpoint_position; p < cursor.position; ++p) {
          const double key = at(k, key_head, p, shape.key_dim, n) * at(k_scale, key_head, p, 1, 0);
          s = at(decay, h, p, shape.decays(), shape.channel_decay ? n : 0) * s +
              key * at(delta, h, p, shape.value_dim, v);
        }
      }
    }
  }
  return state;
}

// The formula, from the bytes in the ring; the deltas are made unlike any that a recurrence would
// have solved, so nothing but them can have been folded. Flush, materialize, the fold in front of a
// committed row and that of a load are the same operation to the bit.
TEST_P(FastFlush, EveryFoldIsTheProductOfTheStoredDeltas) {
  const DeltaModel model(GetParam());
  const DeltaRuleShape& shape = GetParam().shape;
  const std::int64_t state_shape[] = {shape.value_heads, shape.key_dim * shape.value_dim};
  for (const CpuContext& context : Contexts({1})) {
    StatePool pool = model.make_pool(4);
    DeltaRunner runner(model, pool, context);
    for (const std::int64_t live : {1, 2, 5, 8}) {
      prepare(runner, 0, 6, live);
      const Field& field = pool.impl().layout(0).field("delta");
      std::byte* deltas = pool.impl().field(0, 0, field);
      Rng rng(5);
      for (std::int64_t i = 0; i < field.outer * field.places * field.inner; ++i) {
        store_element(field.dtype, deltas, i, rng.normal());
      }
      const std::vector<double> want = product_of_records(pool, 0, shape);
      ASSERT_TRUE(is_ok(pool.materialize(context, 0, 6 + live, 1)));
      const double bound = GetParam().checkpoint == DType::kF32    ? 1e-6
                           : GetParam().checkpoint == DType::kBF16 ? 0x1p-8
                                                                   : 0x1p-11;
      EXPECT_TRUE(close(checkpoint_values(pool, 0, 1), want, bound, state_shape))
          << describe(context) << ", live " << live;

      ASSERT_TRUE(is_ok(pool.copy(0, 2)));
      ASSERT_TRUE(is_ok(pool.force_flush(2)));
      runner.step({tentative(2, names(9, 0, 1), 0)});
      EXPECT_TRUE(same_bytes(checkpoint_bytes(pool, 0, 2), checkpoint_bytes(pool, 0, 1)));

      StatePoolOptions narrow = GetParam().options(1);
      narrow.limits = {1, 1};
      StatePool small = model.make_pool(narrow);
      ASSERT_TRUE(is_ok(small.load(context, 0, pool.save(0).value())));
      if (live > 1) {
        EXPECT_TRUE(same_bytes(checkpoint_bytes(small, 0, 0), checkpoint_bytes(pool, 0, 1)));
      }
      // A committed row folds first: as after materialize.
      runner.step({committed(0, names(9, 0, 2)), committed(1, names(9, 0, 2))});
      EXPECT_TRUE(same_bytes(checkpoint_bytes(pool, 0, 0), checkpoint_bytes(pool, 0, 1)));
    }
  }
}

// A row of several tokens solves its later deltas from the earlier ones as stored, so the state
// does not depend on how tokens were spread over steps by more than the rounding of one delta.
TEST_P(FastFlush, WidthOfStepsHardlyMatters) {
  const DeltaModel model(GetParam());
  for (const CpuContext& context : Contexts({1})) {
    StatePool pool = model.make_pool(4);
    DeltaRunner runner(model, pool, context);
    DeltaOracle oracle(model);
    for (const std::int32_t slot : {0, 1}) ASSERT_TRUE(is_ok(pool.reset(slot)));
    for (int round = 0; round < 40; ++round) {
      const std::vector<TokenId> tokens = names(1, 3 * round, 3);
      for (const TokenId token : tokens) runner.step({tentative(0, {token}, 1)});
      runner.step({tentative(1, tokens, 3)});
      oracle.run(tokens);
    }
    const std::vector<TokenId> next = names(1, 120, 1);
    const OracleOutput want = oracle.run(next);
    for (const std::int32_t slot : {0, 1}) {
      expect_close(runner.step({tentative(slot, next, 1)})[0], want, GetParam(),
                   describe(context) + ", slot " + std::to_string(slot));
    }
  }
}

// ---- The pool ----

class FastRewind : public ::testing::TestWithParam<DeltaCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, FastRewind, ::testing::ValuesIn(fast_pool_cases(6)), kName);

TEST_P(FastRewind, C33_TruncateToEveryPrefix) {
  expect_truncate_reaches_every_prefix(DeltaModel(GetParam()));
}
TEST_P(FastRewind, C14_MaterializeEveryPrefix) {
  expect_materialize_reaches_every_prefix(DeltaModel(GetParam()));
}
TEST_P(FastRewind, ChainsOfRewinds) { expect_chains_of_rewinds(DeltaModel(GetParam())); }

class FastSave : public ::testing::TestWithParam<DeltaCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, FastSave, ::testing::ValuesIn(fast_pool_cases(8)), kName);

TEST_P(FastSave, C61_SameGeometryIsBitEqual) {
  expect_same_geometry_is_bit_equal(DeltaModel(GetParam()));
}

// A state with records goes into a pool of its own mode only, both named; without records into
// either, and continues there.
TEST_P(FastSave, OtherModeTakesNoRecords) {
  DeltaCase exact = GetParam();
  exact.flush = FlushMode::kExact;
  const DeltaModel models[] = {DeltaModel(GetParam()), DeltaModel(exact)};
  constexpr StatusCode kBad = StatusCode::kInvalidArgument;
  for (const int from : {0, 1}) {
    StatePool source = models[from].make_pool(2);
    DeltaRunner runner(models[from], source, {});
    StatePool target = models[1 - from].make_pool(1);
    DeltaRunner other(models[1 - from], target, {});
    ASSERT_TRUE(is_ok(target.reset(0)));
    prepare(runner, 0, 5, 3);
    const std::vector<std::byte> before = slot_bytes(target, 0);
    EXPECT_TRUE(refused(target.load({}, 0, source.save(0).value()), kBad,
                        {"layer 0", "3 records", "fast", "exact", "materialize"}));
    EXPECT_TRUE(same_bytes(slot_bytes(target, 0), before));
    ASSERT_TRUE(is_ok(source.materialize({}, 0, 8, 1)));
    ASSERT_TRUE(is_ok(target.load({}, 0, source.save(1).value())));
    expect_loaded_continues(other, 0, 8, "from the other mode");
  }
}

// Per layer, over the pool's default: sizes, records, what explain says, and both layers' outputs.
TEST(FastMode, IsALayersOwn) {
  DeltaCase c = small_delta_case(DeltaFamily::kGated, "mixed", 8, 3);
  c.layers = 2;
  const DeltaModel model(c);
  StatePoolOptions options = c.options(2);
  options.layers[1].flush = FlushMode::kFast;
  EXPECT_EQ(options.flush_mode(0), FlushMode::kExact);
  EXPECT_EQ(options.flush_mode(1), FlushMode::kFast);
  StatePool pool = model.make_pool(options);
  EXPECT_NE(pool.impl().layout(0).bytes, pool.impl().layout(1).bytes);
  const CpuContext context{nullptr, supported_isas().back()};
  EXPECT_NE(gated_delta_net_explain(context, pool, 0).value().find("exact flush"),
            std::string::npos);
  EXPECT_NE(gated_delta_net_explain(context, pool, 1).value().find("fast flush"),
            std::string::npos);
  DeltaRunner runner(model, pool, context);
  DeltaOracle oracle(model);
  ASSERT_TRUE(is_ok(pool.reset(0)));
  for (int step = 0; step < 12; ++step) {
    const std::vector<TokenId> tokens = names(1, 3 * step, 3);
    expect_close(runner.step({tentative(0, tokens, 3)})[0], oracle.run(tokens), c,
                 "step " + std::to_string(step));
  }
  EXPECT_STREQ(to_string(FlushMode::kExact), "exact");
  EXPECT_STREQ(to_string(FlushMode::kFast), "fast");

  // The other way round: the pool fast, one layer exact.
  options.flush = FlushMode::kFast;
  options.layers[1].flush = FlushMode::kExact;
  EXPECT_EQ(StatePool::bytes_per_slot(options).value().record_ring,
            StatePool::bytes_per_slot(pool.options()).value().record_ring);
}

// C36: records without v and beta, to the byte; what is saved is what the exact mode adds.
TEST(FastMode, C36_SizesAreExact) {
  for (const DeltaFamily family : kDeltaFamilies) {
    for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
      DeltaCase c = fast_case(family, 8, 3, DType::kF32, type);
      const std::size_t element = size_of(type);
      const std::size_t key_heads = family == DeltaFamily::kGated ? 2 : 4;
      const std::size_t decays = family == DeltaFamily::kGated ? 1 : 16;
      const std::size_t fast = StatePool::bytes_per_slot(c.options(1)).value().record_ring;
      EXPECT_EQ(fast, 11 * (key_heads * (16 * element + 4) + 4 * (24 * element + 4 * decays)));
      c.flush = FlushMode::kExact;
      EXPECT_EQ(StatePool::bytes_per_slot(c.options(1)).value().record_ring,
                fast + 11 * 4 * (24 * element + 4));
    }
  }
}

TEST(FastMode, TrafficHasNoValuesAndNoBetas) {
  const GatedDeltaNetShape shape{2, 4, 16, 24};
  const auto of = [&](FlushMode mode, RowKind kind, Cursor cursor, std::int64_t tokens) {
    return gated_delta_net_row_traffic(shape, DType::kF32, DType::kF16, {8, 3}, kind, cursor,
                                       tokens, mode);
  };
  constexpr std::int64_t kRecord = 2 * (16 * 2 + 4) + 4 * 4 + 4 * 24 * 2;
  const Cursor full{10, 16, false};
  EXPECT_EQ(of(FlushMode::kFast, RowKind::kTentative, full, 2).ring_read, 6 * kRecord);
  EXPECT_EQ(of(FlushMode::kFast, RowKind::kTentative, full, 2).ring_written, 2 * kRecord);
  EXPECT_EQ(of(FlushMode::kExact, RowKind::kTentative, full, 2).ring_read, 6 * (kRecord + 16));
  EXPECT_EQ(of(FlushMode::kExact, RowKind::kTentative, full, 2).ring_written,
            2 * (kRecord + 4 * 24 * 2 + 16));
}

TEST(FastMode, IsRefusedWhereThereAreNoDeltas) {
  StatePoolOptions options = small_case("fast", 8, 3).options(1);
  options.flush = FlushMode::kFast;
  EXPECT_TRUE(refused(StatePool::create(options), StatusCode::kUnsupported,
                      {"layer 0", "fast", "mamba2", "exact"}));
  options.layers[0].flush = FlushMode::kExact;
  EXPECT_TRUE(is_ok(StatePool::create(options)));
  options = small_delta_case(DeltaFamily::kGated, "fast", 8, 3).options(1);
  options.flush = static_cast<FlushMode>(7);
  EXPECT_TRUE(refused(StatePool::create(options), StatusCode::kInvalidArgument,
                      {"layer 0", "7", "0 (exact) or 1 (fast)"}));
}

// The deltas are solved against the copy, so its rounding would reach the checkpoint.
TEST(FastMode, IsRefusedWithAReadCopy) {
  for (const DeltaFamily family : kDeltaFamilies) {
    DeltaCase c = small_delta_case(family, "fast", 8, 3);
    c.layers = 2;
    StatePoolOptions options = c.options(1);
    options.layers[1].read_copy = ReadCopyFormat::kNvfp4;
    EXPECT_TRUE(is_ok(StatePool::create(options)));
    options.flush = FlushMode::kFast;
    const Result<StatePool> pool = StatePool::create(options);
    EXPECT_TRUE(refused(pool, StatusCode::kUnsupported,
                        {"layer 1", "flush mode is fast", "read_copy is nvfp4"}));
    EXPECT_EQ(StatePool::bytes_per_slot(options).status().message(), pool.status().message());
    options.layers[1].flush = FlushMode::kExact;
    EXPECT_TRUE(is_ok(StatePool::create(options)));
  }
}

}  // namespace
}  // namespace replayssm::testing
