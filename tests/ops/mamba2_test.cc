// Mamba-2 steps: what a result may depend on, what a step may write, extreme gates.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "ops/mamba2_cases.h"
#include "support/mamba2_harness.h"
#include "support/pool_access.h"
#include "support/step_properties.h"

namespace replayssm::testing {
namespace {

Mamba2Case with_types(Mamba2Case c, DType checkpoint, DType activation) {
  c.checkpoint = checkpoint;
  c.activation = activation;
  c.name += std::string("_") + to_string(checkpoint) + "_" + to_string(activation);
  return c;
}

/// A small case in every combination of types, with and without a convolution.
std::vector<Mamba2Case> type_cases() {
  std::vector<Mamba2Case> cases;
  for (const auto& [checkpoint, activation] : kTypePairs) {
    Mamba2Case c = small_case("plain", 8, 4);
    c.shape.head_dim = 24;
    cases.push_back(with_types(c, checkpoint, activation));
    c.name = "conv";
    c.conv_width = 4;
    c.layers = 2;
    cases.push_back(with_types(c, checkpoint, activation));
  }
  return cases;
}

class Mamba2Types : public ::testing::TestWithParam<Mamba2Case> {};

INSTANTIATE_TEST_SUITE_P(Cases, Mamba2Types, ::testing::ValuesIn(type_cases()),
                         [](const auto& test) { return test.param.name; });

TEST_P(Mamba2Types, C71_ChunkingChangesNoBit) {
  expect_chunking_changes_no_bit(Mamba2Model(GetParam()));
}
// C55, C49, C77: prompts of different length packed in one step, with padding around them, equal
TEST_P(Mamba2Types, C55_PackedPromptsEqualTheirOwnRuns) {
  expect_packed_prompts_equal_their_own_runs(Mamba2Model(GetParam()));
}
// C48, C49: what a row computes does not depend on the rows beside it, whatever their kinds.
TEST_P(Mamba2Types, C49_RowAloneEqualsRowAmongOthers) {
  expect_row_alone_equals_row_among_others(Mamba2Model(GetParam()));
}
// A tentative step that does not flush writes the ring places of its own tokens and nothing else.
TEST_P(Mamba2Types, TentativeStepWritesItsOwnPlacesOnly) {
  expect_tentative_step_writes_its_own_places_only(Mamba2Model(GetParam()));
}
// C39, C40, C09: slot 0 is live, all rows are padding: 100 steps leave the pool as it is, and y is
TEST_P(Mamba2Types, C39_PaddingTouchesNothing) {
  expect_padding_touches_nothing(Mamba2Model(GetParam()));
}
// C09: three live and five padding rows in a pool poisoned with NaN.
TEST_P(Mamba2Types, C09_LiveRowsAreExactBesidePadding) {
  expect_live_rows_are_exact_beside_padding(Mamba2Model(GetParam()));
}
// C20: accepted counts 0, 1, 3, 0 in one batch. Rows with 0 stay where they were: offered the same
TEST_P(Mamba2Types, C20_AcceptingNothingKeepsTheState) {
  expect_accepting_nothing_keeps_the_state(Mamba2Model(GetParam()));
}
// C10: a step whose records wrap around the ring while it reads the ring, 1,000 times: its tokens
TEST_P(Mamba2Types, C10_AppendThatWrapsIsStable) {
  expect_append_that_wraps_is_stable(Mamba2Model(GetParam()));
}
// C07, C45, C23, C42: whatever bytes memory held before (NaN, infinity, 0x7f, another sequence's
TEST_P(Mamba2Types, C07_C23_C42_C45_RecycledMemoryIsNeverRead) {
  expect_recycled_memory_is_never_read(Mamba2Model(GetParam()));
}

// C28, C38: draft capacity 5, rows of 1..5 tokens in one batch, every accepted count of each.
TEST(Mamba2, C28_RowsNarrowerThanTheCapacity) {
  Mamba2Case c = small_case("narrow", 9, 5);
  c.conv_width = 4;
  expect_rows_narrower_than_the_capacity(Mamba2Model(c));
}

// C22: a prompt's tail of one real token and three placeholders beside a verifying row.
TEST(Mamba2, C22_PlaceholdersAreNotCommitted) {
  Mamba2Case c = small_case("tail", 8, 4);
  c.conv_width = 4;
  expect_placeholders_are_not_committed(Mamba2Model(c));
}

// C68: decays of 1e-12 and exactly 0 over 64 tokens, replayed and folded; positive A in a small
// window. Nothing overflows, and 0 x infinity never happens.
TEST(Mamba2, C68_ExtremeDecaysStayFinite) {
  for (const Decay decay : {Decay::kTiny, Decay::kZero, Decay::kGrowing}) {
    const bool growing = decay == Decay::kGrowing;
    Mamba2Case c = small_case("extreme", growing ? 4 : 64, growing ? 2 : 4);
    c.decay = decay;
    c.softplus = c.dt_bias = false;
    const Mamba2Model model(c);
    for (const CpuContext& context : Contexts()) {
      StatePool pool = model.make_pool(2);
      Mamba2Runner runner(model, pool, context);
      SequenceOracle replayed(model);
      SequenceOracle plain(model);
      ASSERT_TRUE(is_ok(pool.reset(0)));
      ASSERT_TRUE(is_ok(pool.reset(1)));
      // e^(5 * 14) is near the square root of the largest float; e^(5 * 18) is beyond it.
      const int steps = growing ? 7 : 40;
      for (int i = 0; i < steps; ++i) {
        const std::vector<TokenId> tokens = names(1, 2 * i, 2);
        const StepOutput output = runner.step({tentative(0, tokens, 2), committed(1, tokens)});
        expect_close(output[0], replayed.run(tokens), c, "replayed step " + std::to_string(i));
        expect_close(output[1], plain.run(tokens), c, "plain step " + std::to_string(i));
      }
    }
  }
}

// A decay of exactly 0 in the middle of a window forgets everything before it and nothing after.
TEST(Mamba2, C68_ZeroDecayAmongOrdinaryOnes) {
  Mamba2Case c = small_case("one_zero", 16, 4);
  c.softplus = false;
  c.dt_bias = false;
  Mamba2Model model(c);
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(1);
    // exp(-3e4 * dt): 0 for ordinary tokens' dt, but tokens with dt = 0 keep the state.
    ASSERT_TRUE(is_ok(pool.reset(0)));
    Mamba2Reference oracle(c.shape, model.layer(0).params);
    for (int i = 0; i < 60; ++i) {
      const std::vector<StepRow> rows = {{0, RowKind::kTentative, 0, 1, {}}};
      Mamba2Model::Inputs in = model.inputs(0, static_cast<TokenId>(i + 1));
      const float dt = i % 7 == 3 ? 3e4f : i % 5 == 0 ? 0.0f : in.dt[0];
      for (float& x : in.dt) x = dt;
      const auto inner = static_cast<std::ptrdiff_t>(c.inner());
      const auto bc = static_cast<std::ptrdiff_t>(c.bc());
      Mamba2Token token;
      token.x.assign(in.u.begin(), in.u.begin() + inner);
      token.b.assign(in.u.begin() + inner, in.u.begin() + inner + bc);
      token.c.assign(in.u.begin() + inner + bc, in.u.end());
      token.dt = in.dt;
      const std::vector<double> want = oracle.step(token);
      std::vector<float> y(static_cast<std::size_t>(inner), kUnwritten);
      Mamba2Operands operands;
      operands.x = TensorView::contiguous(token.x.data(), DType::kF32, {1, 4, 8});
      operands.b = TensorView::contiguous(token.b.data(), DType::kF32, {1, 2, 16});
      operands.c = TensorView::contiguous(token.c.data(), DType::kF32, {1, 2, 16});
      operands.dt = TensorView::contiguous(token.dt.data(), DType::kF32, {1, 4});
      operands.y = TensorView::contiguous(y.data(), DType::kF32, {1, 4, 8});
      Result<Step> step = pool.begin_step(rows);
      ASSERT_TRUE(is_ok(step));
      ASSERT_TRUE(is_ok(mamba2_step(context, pool, 0, *step, model.op_params(0), operands)));
      const std::int64_t one[] = {1};
      ASSERT_TRUE(is_ok(pool.commit(*step, one)));
      const std::int64_t shape[] = {4, 8};
      ASSERT_TRUE(close(y, want, 1e-5, shape)) << "token " << i << ", " << describe(context);
    }
  }
}

// C70: without limits a dt of 1e-5 passes as it is; the same in prompt, decode and replay.
TEST(Mamba2, C70_SmallDtIsNotClamped) {
  for (const bool limited : {false, true}) {
    Mamba2Case c = small_case("small_dt", 8, 4);
    c.softplus = false;
    c.dt_bias = false;
    c.d = false;
    if (limited) c.dt_min = 0.001f, c.dt_max = 0.1f;
    const Mamba2Model model(c);
    for (const CpuContext& context : Contexts()) {
      StatePool pool = model.make_pool(3);
      const float expected_dt = limited ? 0.001f : 1e-5f;
      const std::vector<float> dt(4, 1e-5f);
      const Mamba2Model::Inputs in = model.inputs(0, 1);
      const float* x = in.u.data();
      const float* b = x + c.inner();
      const float* cc = b + c.bc();
      for (std::int32_t slot = 0; slot < 2; ++slot) {
        ASSERT_TRUE(is_ok(pool.reset(slot)));
        const std::vector<StepRow> rows = {
            {slot, slot == 0 ? RowKind::kCommitted : RowKind::kTentative, 0, 1, {}}};
        std::vector<float> y(32, kUnwritten);
        Mamba2Operands operands;
        operands.x = TensorView::contiguous(x, DType::kF32, {1, 4, 8});
        operands.b = TensorView::contiguous(b, DType::kF32, {1, 2, 16});
        operands.c = TensorView::contiguous(cc, DType::kF32, {1, 2, 16});
        operands.dt = TensorView::contiguous(dt.data(), DType::kF32, {1, 4});
        operands.y = TensorView::contiguous(y.data(), DType::kF32, {1, 4, 8});
        Result<Step> step = pool.begin_step(rows);
        ASSERT_TRUE(is_ok(step));
        ASSERT_TRUE(is_ok(mamba2_step(context, pool, 0, *step, model.op_params(0), operands)));
        const std::int64_t one[] = {1};
        ASSERT_TRUE(is_ok(pool.commit(*step, one)));
        std::vector<double> want(32);
        for (int h = 0; h < 4; ++h) {
          double bc = 0.0;
          for (int n = 0; n < 16; ++n) {
            bc += static_cast<double>(b[h / 2 * 16 + n]) * static_cast<double>(cc[h / 2 * 16 + n]);
          }
          for (int p = 0; p < 8; ++p) {
            const auto i = static_cast<std::size_t>(h * 8 + p);
            want[i] = static_cast<double>(expected_dt) * static_cast<double>(x[i]) * bc;
          }
        }
        const std::int64_t shape[] = {4, 8};
        EXPECT_TRUE(close(y, want, 1e-5, shape)) << "limited " << limited << ", slot " << slot;
      }
    }
  }
}

// Softplus far from 0 on both sides, where log1p(exp(x)) overflows or vanishes.
TEST(Mamba2, SoftplusOfLargeArguments) {
  Mamba2Case c = small_case("softplus", 8, 4);
  c.d = false;
  c.dt_bias = false;
  const Mamba2Model model(c);
  Mamba2Reference oracle(c.shape, model.layer(0).params);
  for (const CpuContext& context : Contexts()) {
    for (const float raw :
         {-90.0f, -30.0f, -16.0f, -5.0f, 0.0f, 5.0f, 19.9f, 20.1f, 80.0f, 100.0f}) {
      for (const RowKind kind : {RowKind::kCommitted, RowKind::kTentative}) {
        StatePool pool = model.make_pool(1);
        ASSERT_TRUE(is_ok(pool.reset(0)));
        Mamba2Model::Inputs in = model.inputs(0, 1);
        in.dt.assign(4, raw);
        Mamba2Token token;
        token.x.assign(in.u.begin(), in.u.begin() + 32);
        token.b.assign(in.u.begin() + 32, in.u.begin() + 64);
        token.c.assign(in.u.begin() + 64, in.u.end());
        token.dt = in.dt;
        Mamba2Reference fresh(c.shape, model.layer(0).params);
        const std::vector<double> want = fresh.step(token);
        std::vector<float> y(32, kUnwritten);
        Mamba2Operands operands;
        operands.x = TensorView::contiguous(token.x.data(), DType::kF32, {1, 4, 8});
        operands.b = TensorView::contiguous(token.b.data(), DType::kF32, {1, 2, 16});
        operands.c = TensorView::contiguous(token.c.data(), DType::kF32, {1, 2, 16});
        operands.dt = TensorView::contiguous(token.dt.data(), DType::kF32, {1, 4});
        operands.y = TensorView::contiguous(y.data(), DType::kF32, {1, 4, 8});
        const std::vector<StepRow> rows = {{0, kind, 0, 1, {}}};
        Result<Step> step = pool.begin_step(rows);
        ASSERT_TRUE(is_ok(step));
        ASSERT_TRUE(is_ok(mamba2_step(context, pool, 0, *step, model.op_params(0), operands)));
        const std::int64_t shape[] = {4, 8};
        EXPECT_TRUE(close(y, want, 1e-5, shape)) << "dt_raw " << raw;
      }
    }
  }
}

// C78: the stored state itself, not only outputs, from a non-zero start and with head_dim != state.
TEST(Mamba2, C78_StoredStateIsHeadsByHeadDimByStateSize) {
  Mamba2Case c = small_case("layout", 8, 4);
  c.shape = {6, 24, 16, 3};
  const Mamba2Model model(c);
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(1);
    Mamba2Runner runner(model, pool, context);
    ASSERT_TRUE(is_ok(pool.reset(0)));
    SequenceOracle oracle(model);
    for (int step = 0; step < 3; ++step) {
      const std::vector<TokenId> tokens = names(1, step * 9, 9);
      runner.step({committed(0, tokens)});
      oracle.run(tokens);
      const std::int64_t shape[] = {6, 24, 16};
      EXPECT_TRUE(close(checkpoint_values(pool, 0, 0), oracle.state(0), 1e-6, shape))
          << describe(context);
    }
  }
}

// The tests can fail: one changed record, one changed checkpoint element, one changed gate is seen.
TEST(Mamba2, ChangedStateIsSeen) {
  const Mamba2Case c = small_case("teeth", 8, 4);
  const Mamba2Model model(c);
  for (const char* name : {"checkpoint", "deferred_decay", "x", "b", "dt"}) {
    for (const CpuContext& context : Contexts()) {
      StatePool pool = model.make_pool(2);
      Mamba2Runner runner(model, pool, context);
      for (std::int32_t slot = 0; slot < 2; ++slot) {
        ASSERT_TRUE(is_ok(pool.reset(slot)));
        runner.step({committed(slot, names(1, 0, 3))});
        runner.step({tentative(slot, names(1, 3, 2), 2)});
      }
      const Field& field = pool.impl().layout(0).field(name);
      const std::int64_t place = field.kind == FieldKind::kCheckpoint ? 0 : 4 % field.places;
      std::byte* data = pool.impl().field(0, 1, field);
      const std::int64_t at = place * field.inner;
      store_element(field.dtype, data, at, load_element(field.dtype, data, at) + 0.01f);
      const StepOutput output =
          runner.step({tentative(0, names(1, 5, 1), 1), tentative(1, names(1, 5, 1), 1)});
      SequenceOracle oracle(model);
      oracle.run(names(1, 0, 5));
      const OracleOutput want = oracle.run(names(1, 5, 1));
      const std::int64_t shape[] = {4, 8};
      EXPECT_TRUE(close(output[0][0], want[0], 1e-5, shape));
      EXPECT_FALSE(close(output[1][0], want[0], 1e-5, shape)) << name;
    }
  }
}

TEST(Mamba2, ExplainNamesTheKernel) {
  const Mamba2Model model(small_case("explain", 8, 4));
  StatePool pool = model.make_pool(1);
  for (const CpuContext& context : Contexts({1})) {
    const Result<std::string> text = mamba2_explain(context, pool, 0);
    ASSERT_TRUE(is_ok(text));
    EXPECT_NE(text.value().find(to_string(context.isa)), std::string::npos) << text.value();
  }
  EXPECT_TRUE(refused(mamba2_explain({}, pool, 1), StatusCode::kInvalidArgument, {"1"}));
  EXPECT_TRUE(refused(mamba2_explain({}, pool, -1), StatusCode::kInvalidArgument, {"-1"}));
}

// State traffic is what must move: checkpoint once per read or write, records once.
TEST(Mamba2, TrafficIsWhatMustMove) {
  const Mamba2Shape shape{4, 8, 16, 2};
  const std::int64_t state = 4 * (8 * 16 + 1) * 4;  // with a deferred decay for eight rows
  const std::int64_t record = 4 * (4 * 8 + 2 * 16 + 4);
  const ReplayLimits limits{8, 4};
  const auto traffic = [&](RowKind kind, Cursor cursor, std::int64_t tokens) {
    return mamba2_row_traffic(shape, DType::kF32, DType::kF32, limits, kind, cursor, tokens);
  };
  // Nothing is read for a sequence that starts.
  StateTraffic t = traffic(RowKind::kTentative, {0, 0, false}, 3);
  EXPECT_EQ(t.checkpoint_read, 0);
  EXPECT_EQ(t.checkpoint_written, 0);
  EXPECT_EQ(t.ring_written, 3 * record);
  // A step between flushes reads the checkpoint and the live records.
  t = traffic(RowKind::kTentative, {10, 13, false}, 2);
  EXPECT_EQ(t.checkpoint_read, state);
  EXPECT_EQ(t.checkpoint_written, 0);
  EXPECT_EQ(t.ring_written, 2 * record);
  EXPECT_GT(t.ring_read, 0);
  EXPECT_EQ(traffic(RowKind::kTentative, {10, 14, false}, 2).ring_read - t.ring_read,
            t.ring_read / 3);
  // A flush also writes it.
  t = traffic(RowKind::kTentative, {10, 15, false}, 2);
  EXPECT_EQ(t.checkpoint_read, state);
  EXPECT_EQ(t.checkpoint_written, state);
  EXPECT_EQ(t.ring_written, 2 * record);
  t = traffic(RowKind::kCommitted, {10, 10, false}, 100);
  EXPECT_EQ(t.checkpoint_read, state);
  EXPECT_EQ(t.checkpoint_written, state);
  EXPECT_EQ(t.ring_read, 0);
  EXPECT_EQ(t.ring_written, 0);

  // The pool adds them up over rows and layers.
  Mamba2Case c = small_case("traffic", 8, 4);
  c.layers = 2;
  const Mamba2Model model(c);
  StatePool pool = model.make_pool(2);
  Mamba2Runner runner(model, pool, {});
  ASSERT_TRUE(is_ok(pool.reset(0)));
  ASSERT_TRUE(is_ok(pool.reset(1)));
  runner.step({committed(0, names(1, 0, 5)), tentative(1, names(2, 0, 4), 3)});
  EXPECT_EQ(pool.traffic().checkpoint_written, 2 * state);
  EXPECT_EQ(pool.traffic().ring_written, 2 * 4 * record);
  pool.reset_traffic();
  EXPECT_EQ(pool.traffic().ring_written, 0);
  runner.step({padding(4), tentative(1, names(2, 4, 1), 1)});
  EXPECT_EQ(pool.traffic().checkpoint_read, 0);  // position 0 is zero by definition
  EXPECT_EQ(pool.traffic().ring_written, 2 * record);
}

}  // namespace
}  // namespace replayssm::testing
