// Steps of the delta rule: what a result may depend on, what a step may write, extreme gates.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "ops/delta_rule_cases.h"
#include "support/delta_rule_harness.h"
#include "support/plain_shadow.h"
#include "support/pool_access.h"
#include "support/step_properties.h"

namespace replayssm::testing {
namespace {

/// A small case of every family in every combination of types; equal types behind a convolution.
std::vector<DeltaCase> type_cases() {
  std::vector<DeltaCase> cases;
  for (const DeltaFamily family : kDeltaFamilies) {
    for (const auto& [checkpoint, activation] : kTypePairs) {
      const bool conv = checkpoint == activation;
      DeltaCase c = small_delta_case(
          family,
          std::string(conv ? "conv_" : "") + to_string(checkpoint) + "_" + to_string(activation), 8,
          4);
      c.checkpoint = checkpoint;
      c.activation = activation;
      c.conv_width = conv ? 4 : 0;
      c.layers = conv ? 2 : 1;
      cases.push_back(std::move(c));
    }
  }
  return cases;
}

class DeltaTypes : public ::testing::TestWithParam<DeltaCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, DeltaTypes, ::testing::ValuesIn(type_cases()),
                         [](const auto& test) { return test.param.name; });

TEST_P(DeltaTypes, C71_ChunkingChangesNoBit) {
  expect_chunking_changes_no_bit(DeltaModel(GetParam()));
}
TEST_P(DeltaTypes, C55_PackedPromptsEqualTheirOwnRuns) {
  expect_packed_prompts_equal_their_own_runs(DeltaModel(GetParam()));
}
// C25 as well: committed, verify and padding rows in one batch.
TEST_P(DeltaTypes, C49_RowAloneEqualsRowAmongOthers) {
  expect_row_alone_equals_row_among_others(DeltaModel(GetParam()));
}
TEST_P(DeltaTypes, TentativeStepWritesItsOwnPlacesOnly) {
  expect_tentative_step_writes_its_own_places_only(DeltaModel(GetParam()));
}
TEST_P(DeltaTypes, C39_PaddingTouchesNothing) {
  expect_padding_touches_nothing(DeltaModel(GetParam()));
}
TEST_P(DeltaTypes, C09_LiveRowsAreExactBesidePadding) {
  expect_live_rows_are_exact_beside_padding(DeltaModel(GetParam()));
}
TEST_P(DeltaTypes, C20_AcceptingNothingKeepsTheState) {
  expect_accepting_nothing_keeps_the_state(DeltaModel(GetParam()));
}
TEST_P(DeltaTypes, C10_AppendThatWrapsIsStable) {
  expect_append_that_wraps_is_stable(DeltaModel(GetParam()));
}
TEST_P(DeltaTypes, C07_RecycledMemoryIsNeverRead) {
  expect_recycled_memory_is_never_read(DeltaModel(GetParam()));
}

class DeltaFamilies : public ::testing::TestWithParam<DeltaFamily> {};
INSTANTIATE_TEST_SUITE_P(Families, DeltaFamilies, ::testing::ValuesIn(kDeltaFamilies),
                         [](const auto& test) { return to_string(test.param); });

// C28, C38: rows narrower than the capacity, every accepted count of each.
TEST_P(DeltaFamilies, C28_C38_RowsNarrowerThanTheCapacity) {
  DeltaCase c = small_delta_case(GetParam(), "narrow", 9, 5);
  c.conv_width = 4;
  expect_rows_narrower_than_the_capacity(DeltaModel(c));
}

TEST_P(DeltaFamilies, C22_PlaceholdersAreNotCommitted) {
  DeltaCase c = small_delta_case(GetParam(), "tail", 8, 4);
  c.conv_width = 4;
  expect_placeholders_are_not_committed(DeltaModel(c));
}

// C19, C29: a draft partly accepted, a step without a draft, a draft again: convolution and state
// have rolled back together.
TEST_P(DeltaFamilies, C19_C29_DraftThenPlainThenDraft) {
  DeltaCase c = small_delta_case(GetParam(), "rollback", 8, 4);
  c.conv_width = 4;
  const DeltaModel model(c);
  for (const CpuContext& context : Contexts()) {
    for (std::int64_t accepted = 0; accepted <= 3; ++accepted) {
      StatePool pool = model.make_pool(1);
      DeltaRunner runner(model, pool, context);
      DeltaOracle oracle(model);
      ASSERT_TRUE(is_ok(pool.reset(0)));
      std::uint64_t sequence = 1;
      const auto expect = [&](RowSpec row) {
        const StepOutput output = runner.step({row});
        expect_close(output[0], oracle.run(row.tokens, static_cast<std::size_t>(row.accepts())), c,
                     describe(context) + ", accepted " + std::to_string(accepted));
      };
      expect(committed(0, names(sequence++, 0, 5)));
      for (int round = 0; round < 4; ++round) {
        expect(tentative(0, names(sequence++, 0, 3), accepted));
        expect(tentative(0, names(sequence++, 0, 1), 1));
        expect(committed(0, names(sequence++, 0, 1)));
        expect(tentative(0, names(sequence++, 0, 4), accepted));
      }
    }
  }
}

// C05: the bound of the gate reaches prompt, decode, verify and flush alike: every path agrees with
// the oracle for a bound that makes another sequence of it.
TEST(KimiGate, C05_BoundReachesEveryPath) {
  DeltaCase bounded = small_delta_case(DeltaFamily::kKimiBounded, "c05", 6, 3);
  DeltaCase softplus = small_delta_case(DeltaFamily::kKimi, "c05", 6, 3);
  const DeltaModel model(bounded);
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(2);
    DeltaRunner runner(model, pool, context);
    DeltaOracle oracle(model);
    DeltaOracle other{DeltaModel(softplus)};
    ASSERT_TRUE(is_ok(pool.reset(0)));
    const std::vector<TokenId> prompt = names(1, 0, 7);
    expect_close(runner.step({committed(0, prompt)})[0], oracle.run(prompt), bounded, "prompt");
    for (int step = 0; step < 12; ++step) {
      const std::vector<TokenId> tokens = names(1, 7 + 3 * step, step % 2 == 0 ? 1 : 3);
      const StepOutput output = runner.step({tentative(0, tokens, 1)});
      expect_close(output[0], oracle.run(tokens, 1), bounded, "step " + std::to_string(step));
    }
    EXPECT_GT(pool.cursor(0).value().checkpoint_position, 7);  // it flushed
  }
}

// C68: decays of 0 and 1 over a whole window of 64, replayed, solved and folded; nothing overflows
// and 0 x infinity never happens.
TEST_P(DeltaFamilies, C68_ExtremeDecaysStayFinite) {
  for (const DeltaDecay decay : {DeltaDecay::kTiny, DeltaDecay::kZero, DeltaDecay::kNone}) {
    DeltaCase c = small_delta_case(GetParam(), "extreme", 64, 1);
    c.dt_bias = false;
    c.decay = decay;
    const DeltaModel model(c);
    for (const CpuContext& context : Contexts({1})) {
      StatePool pool = model.make_pool(1);
      DeltaRunner runner(model, pool, context);
      DeltaOracle oracle(model);
      ASSERT_TRUE(is_ok(pool.reset(0)));
      for (int token = 0; token < 140; ++token) {
        const std::vector<TokenId> tokens = names(1, token, 1);
        expect_close(runner.step({tentative(0, tokens, 1)})[0], oracle.run(tokens), c,
                     describe(context) + ", token " + std::to_string(token));
      }
    }
  }
}

// C67: no decay and 4,000 equal tokens with unscaled long keys and large values: the state exceeds
// what 16 bits with five exponent bits can hold, outputs stay finite and right.
TEST_P(DeltaFamilies, C67_LargeStatesStayFinite) {
  DeltaCase c = small_delta_case(GetParam(), "large", 16, 1);
  c.dt_bias = false;
  c.decay = DeltaDecay::kNone;
  c.activation = DType::kBF16;
  const DeltaModel model(c);
  const CpuContext context{nullptr, supported_isas().back()};
  StatePool pool = model.make_pool(1);
  DeltaRunner runner(model, pool, context);
  ASSERT_TRUE(is_ok(pool.reset(0)));
  const std::vector<RowSpec> row = {tentative(0, names(1, 0, 1), 1)};
  std::vector<float> values;
  for (int token = 0; token < 4'000; ++token) {
    Result<Step> step = pool.begin_step(step_rows(row));
    ASSERT_TRUE(is_ok(step));
    auto buffers = runner.buffers(0, *step, row);
    set_token(buffers.v, 0, std::vector<float>(4 * 24, 3e5f));
    ASSERT_TRUE(is_ok(runner.recurrence(0, *step, buffers)));
    ASSERT_TRUE(is_ok(runner.commit(*step, row)));
    values = get_token(buffers.y_view, 0);
    for (const float y : values) ASSERT_TRUE(std::isfinite(y)) << "token " << token;
  }
  // The delta rule has stored v under k exactly: the state times k is v.
  const std::vector<float> state = checkpoint_values(pool, 0, 0);
  float largest = 0.0f;
  for (const float s : state) largest = std::max(largest, std::abs(s));
  EXPECT_GT(largest, 65504.0f);
}

// C67 with f16 operands and records: short keys make a state beyond f16 of values within it. It is
// kept in f32, outputs and deltas are within f16 again.
TEST_P(DeltaFamilies, C67_F16OperandsOverALargeState) {
  for (const FlushMode mode : {FlushMode::kExact, FlushMode::kFast}) {
    DeltaCase c = small_delta_case(GetParam(), "large_f16", 16, 1);
    c.dt_bias = false;
    c.decay = DeltaDecay::kNone;
    c.activation = DType::kF16;
    c.normalize = false;
    c.flush = mode;
    const DeltaModel model(c);
    StatePool pool = model.make_pool(1);
    DeltaRunner runner(model, pool, {nullptr, supported_isas().back()});
    ASSERT_TRUE(is_ok(pool.reset(0)));
    const std::vector<RowSpec> row = {tentative(0, names(1, 0, 1), 1)};
    const std::vector<float> key(static_cast<std::size_t>(c.keys()), 0x1p-6f);
    for (int token = 0; token < 4'000; ++token) {
      Result<Step> step = pool.begin_step(step_rows(row));
      ASSERT_TRUE(is_ok(step));
      auto buffers = runner.buffers(0, *step, row);
      set_token(buffers.k, 0, key);
      set_token(buffers.q, 0, key);
      set_token(buffers.v, 0, std::vector<float>(4 * 24, 3e4f));
      ASSERT_TRUE(is_ok(runner.recurrence(0, *step, buffers)));
      ASSERT_TRUE(is_ok(runner.commit(*step, row)));
      for (const float y : get_token(buffers.y_view, 0)) {
        ASSERT_TRUE(std::isfinite(y)) << to_string(mode) << ", token " << token;
      }
    }
    float largest = 0.0f;
    for (const float s : checkpoint_values(pool, 0, 0)) largest = std::max(largest, std::abs(s));
    EXPECT_GT(largest, 65504.0f) << to_string(mode);
  }
}

// A state changed by hand is what outputs read: nothing is kept elsewhere.
TEST_P(DeltaFamilies, ChangedStateIsSeen) {
  const DeltaCase c = small_delta_case(GetParam(), "changed", 8, 2);
  const DeltaModel model(c);
  StatePool pool = model.make_pool(1);
  DeltaRunner runner(model, pool, {});
  ASSERT_TRUE(is_ok(pool.reset(0)));
  runner.step({committed(0, names(1, 0, 4))});
  const StepOutput before = runner.step({tentative(0, names(1, 4, 2), 0)});
  set_checkpoint(pool, 0, 0, std::vector<float>(4 * 16 * 24, 1.0f));
  const StepOutput after = runner.step({tentative(0, names(1, 4, 2), 0)});
  for (std::size_t i = 0; i < before[0][0].size(); ++i) {
    EXPECT_NE(before[0][0][i], after[0][0][i]) << i;
  }
}

// C78, C88: the stored state is (value_heads, tiles of 32 columns, key_dim, columns), and value
// head h reads key head h / (value_heads / key_heads): every element of the state is told apart.
TEST_P(DeltaFamilies, C78_C88_StoredStateIsTilesOfColumns) {
  DeltaCase c = small_delta_case(GetParam(), "layout", 4, 1);
  c.shape.value_dim = 56;  // tiles of 32 and 24
  const DeltaModel model(c);
  for (const CpuContext& context : Contexts({1})) {
    StatePool pool = model.make_pool(1);
    DeltaRunner runner(model, pool, context);
    DeltaRuleReference oracle = model.reference(0);
    ASSERT_TRUE(is_ok(pool.reset(0)));
    for (const TokenId token : names(1, 0, 6)) {
      runner.step({committed(0, {token})});
      model.advance(oracle, model.inputs(0, token));
    }
    const std::vector<float> stored = checkpoint_values(pool, 0, 0);
    std::vector<double> want;
    for (std::int64_t h = 0; h < 4; ++h) {
      for (const auto& [first, width] : {std::pair<std::int64_t, std::int64_t>{0, 32}, {32, 24}}) {
        for (std::int64_t k = 0; k < 16; ++k) {
          for (std::int64_t v = first; v < first + width; ++v) {
            want.push_back(oracle.state()[static_cast<std::size_t>((h * 16 + k) * 56 + v)]);
          }
        }
      }
    }
    const std::int64_t shape[] = {4, 16 * 56};
    EXPECT_TRUE(close(stored, want, 1e-5, shape)) << describe(context);
  }
}

TEST(DeltaExplain, NamesTheKernelAndTheForm) {
  const CpuContext context{nullptr, supported_isas().back()};
  StatePool gated = DeltaModel(small_delta_case(DeltaFamily::kGated, "explain", 8, 2)).make_pool(1);
  const std::string text = gated_delta_net_explain(context, gated, 0).value();
  for (const char* part : {"gated_delta_net", "4x16x24", "2 key heads", to_string(context.isa),
                           "checkpoint f32", "exact flush", "1 threads"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  }
  StatePool kimi = DeltaModel(small_delta_case(DeltaFamily::kKimi, "explain", 8, 2)).make_pool(1);
  const std::string form = kimi_delta_attention_explain(context, kimi, 0).value();
  for (const char* part : {"kimi_delta_attention", "per channel", "no pre-decayed keys"}) {
    EXPECT_NE(form.find(part), std::string::npos) << part << " in: " << form;
  }
}

TEST(DeltaTraffic, IsWhatMustMove) {
  const GatedDeltaNetShape shape{2, 4, 16, 24};
  const ReplayLimits limits{8, 3};
  const auto of = [&](RowKind kind, Cursor cursor, std::int64_t tokens) {
    return gated_delta_net_row_traffic(shape, DType::kF32, DType::kBF16, limits, kind, cursor,
                                       tokens);
  };
  constexpr std::int64_t kState = 4 * (16 * 24 + 24 / 8) * 4;  // with deferred decays
  constexpr std::int64_t kKeys = 2 * (16 * 2 + 4);
  constexpr std::int64_t kValues = 4 * 24 * 2;
  const StateTraffic first = of(RowKind::kTentative, {0, 0, false}, 3);
  EXPECT_EQ(first.checkpoint_read, 0);
  EXPECT_EQ(first.checkpoint_written, 0);
  EXPECT_EQ(first.ring_read, 0);
  EXPECT_EQ(first.ring_written, 3 * (kKeys + 4 * 4 + 4 * 4 + 2 * kValues));
  const StateTraffic verify = of(RowKind::kTentative, {10, 14, false}, 2);
  EXPECT_EQ(verify.checkpoint_read, kState);
  EXPECT_EQ(verify.checkpoint_written, 0);
  EXPECT_EQ(verify.ring_read, 4 * (kKeys + 4 * 4 + kValues));
  const StateTraffic flush = of(RowKind::kTentative, {10, 16, false}, 2);
  EXPECT_EQ(flush.checkpoint_written, kState);
  EXPECT_EQ(flush.ring_read, 6 * (kKeys + 4 * 4 + 4 * 4 + kValues));
  const StateTraffic plain = of(RowKind::kCommitted, {10, 10, false}, 1);
  EXPECT_EQ(plain.checkpoint_written, kState);
  EXPECT_EQ(plain.ring_written, 0);
  const StateTraffic narrow = gated_delta_net_row_traffic(shape, DType::kBF16, DType::kBF16, limits,
                                                          RowKind::kCommitted, {10, 10, false}, 1);
  EXPECT_EQ(narrow.checkpoint_written, 4 * 16 * 24 * 2);
  // A decay per channel is recorded per channel, and goes into the state at once.
  const StateTraffic kimi = kimi_delta_attention_row_traffic(
      {4, 16, 24}, DType::kF32, DType::kBF16, limits, RowKind::kTentative, {10, 11, false}, 1);
  EXPECT_EQ(kimi.ring_read, 4 * (16 * 2 + 4) + 4 * 16 * 4 + kValues);
  EXPECT_EQ(kimi.checkpoint_read, 4 * 16 * 24 * 4);
}

}  // namespace
}  // namespace replayssm::testing
