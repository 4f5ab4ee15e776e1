// Steps: what begin_step and commit refuse, stale steps, abort.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "ops/mamba2_cases.h"
#include "support/mamba2_harness.h"
#include "support/plain_shadow.h"
#include "support/pool_access.h"

namespace replayssm::testing {
namespace {

Mamba2Case step_case() {
  Mamba2Case c = small_case("step", 8, 4);
  c.conv_width = 4;
  c.layers = 2;
  return c;
}

/// A pool of five slots: 0 .. 3 hold sequences, 4 is free.
class PoolStep : public ::testing::Test {
 protected:
  PoolStep() : model_(step_case()), pool_(model_.make_pool(5)), runner_(model_, pool_, {}) {
    for (std::int32_t slot = 0; slot < 4; ++slot) {
      EXPECT_TRUE(is_ok(pool_.reset(slot)));
      runner_.step({committed(slot, names(slot + 1u, 0, 5))});
      runner_.step({tentative(slot, names(slot + 1u, 5, 3), 2)});
    }
  }

  /// Runs everything up to the commit.
  Step forward(std::span<const RowSpec> rows) {
    Result<Step> step = pool_.begin_step(step_rows(rows));
    EXPECT_TRUE(is_ok(step));
    output_.assign(rows.size(), {});
    for (int layer = 0; layer < 2; ++layer) runner_.layer(layer, *step, rows, output_);
    return std::move(step).value();
  }

  Mamba2Model model_;
  StatePool pool_;
  Mamba2Runner runner_;
  StepOutput output_;
};

// C16, C27, C31 and the rest: rows that cannot be are refused, nothing is marked or written.
TEST_F(PoolStep, BadRowsAreRefused) {
  constexpr RowKind kT = RowKind::kTentative;
  constexpr RowKind kC = RowKind::kCommitted;
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  static const std::int32_t tree[] = {-1, 0, 0, 1};
  static const std::int32_t two_roots[] = {-1, -1};
  static const std::int32_t cycle[] = {1, 0};
  static const std::int32_t itself[] = {0};
  static const std::int32_t far[] = {-1, 5};
  static const std::int32_t low[] = {-2, 0};
  static const std::int32_t later[] = {-1, 2, 1};
  static const std::int32_t three[] = {-1, 0, 1};
  struct Case {
    const char* name;
    std::vector<StepRow> rows;
    StatusCode code;
    std::vector<std::string> parts;
  };
  constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
  constexpr StatusCode kOrder = StatusCode::kFailedPrecondition;
  const std::vector<Case> cases = {
      {"C16 too many tokens", {{0, kT, 0, 2, {}}, {1, kT, 2, 7, {}}}, kInvalid, {"1", "7", "4"}},
      {"C16 offsets decrease", {{0, kT, 4, 2, {}}, {1, kT, 0, 2, {}}}, kInvalid, {"1", "0", "6"}},
      {"overlap", {{0, kT, 0, 3, {}}, {1, kT, 2, 2, {}}}, kInvalid, {"2", "3"}},
      {"overlap with padding", {{-1, kT, 0, 3, {}}, {1, kT, 2, 2, {}}}, kInvalid, {"2", "3"}},
      {"negative begin", {{0, kT, -1, 2, {}}}, kInvalid, {"-1"}},
      {"negative count", {{0, kC, 0, -1, {}}}, kInvalid, {"-1"}},
      {"negative count of padding", {{-1, kT, 0, -1, {}}}, kInvalid, {"-1"}},
      {"end beyond 64 bits", {{0, kC, kMax - 1, 3, {}}}, kInvalid, {"3"}},
      {"no tokens", {{0, kT, 0, 0, {}}}, kInvalid, {"0", "4"}},
      {"count > T", {{0, kT, 0, 5, {}}}, kInvalid, {"5", "4"}},
      {"duplicate slot",
       {{0, kT, 0, 1, {}}, {1, kC, 1, 1, {}}, {0, kC, 2, 1, {}}},
       kInvalid,
       {"0"}},
      {"slot out of range", {{5, kT, 0, 1, {}}}, kInvalid, {"5", "4"}},
      {"free slot", {{4, kT, 0, 1, {}}}, kOrder, {"4", "free"}},
      {"free slot, committed", {{0, kT, 0, 1, {}}, {4, kC, 1, 1, {}}}, kOrder, {"4", "free"}},
      {"C31 tree", {{0, kT, 0, 4, tree}}, StatusCode::kUnsupported, {"0", "chain"}},
      {"C31 two roots", {{0, kT, 0, 2, two_roots}}, StatusCode::kUnsupported, {"chain"}},
      {"C31 cycle", {{0, kT, 0, 2, cycle}}, kInvalid, {"1"}},
      {"C31 own parent", {{0, kT, 0, 1, itself}}, kInvalid, {"0"}},
      {"C31 parent out of range", {{0, kT, 0, 2, far}}, kInvalid, {"5"}},
      {"C31 parent below -1", {{0, kT, 0, 2, low}}, kInvalid, {"-2"}},
      {"C31 parent comes later", {{0, kT, 0, 3, later}}, kInvalid, {"2"}},
      {"C31 too many parents", {{0, kT, 0, 2, three}}, kInvalid, {"3", "2"}},
      {"C31 too few parents", {{0, kT, 0, 4, three}}, kInvalid, {"3", "4"}},
      {"C31 tree of a committed row", {{0, kC, 0, 4, tree}}, StatusCode::kUnsupported, {"chain"}},
  };
  const std::vector<std::byte> memory = pool_bytes(pool_);
  for (const Case& c : cases) {
    const Result<Step> step = pool_.begin_step(c.rows);
    EXPECT_FALSE(step.ok()) << c.name;
    if (step.ok()) return;
    EXPECT_EQ(step.status().code(), c.code) << c.name << ": " << step.status().message();
    for (const std::string& part : c.parts) {
      EXPECT_NE(step.status().message().find(part), std::string::npos)
          << c.name << ": '" << step.status().message() << "' does not contain '" << part << "'";
    }
  }
  EXPECT_TRUE(same_bytes(pool_bytes(pool_), memory));
  // Every slot is still ready.
  for (std::int32_t slot = 0; slot < 4; ++slot) EXPECT_TRUE(is_ok(pool_.force_flush(slot)));
}

TEST_F(PoolStep, C31_ChainParentsAreAChain) {
  std::vector<RowSpec> rows = {tentative(0, names(9, 0, 3), 2), tentative(1, names(2, 7, 3), 2)};
  std::vector<StepRow> with_parents = step_rows(rows);
  {
    const std::vector<std::int32_t> chain = {-1, 0, 1};
    with_parents[0].parents = chain;
    Result<Step> step = pool_.begin_step(with_parents);
    ASSERT_TRUE(is_ok(step));
    EXPECT_TRUE(is_ok(pool_.abort(*step)));
  }
  std::vector<std::int32_t> chain = {-1, 0, 1};
  with_parents[0].parents = chain;
  Result<Step> step = pool_.begin_step(with_parents);
  ASSERT_TRUE(is_ok(step));
  chain.clear();
  chain.shrink_to_fit();  // the caller's memory is not needed any more
  output_.assign(2, {});
  for (int layer = 0; layer < 2; ++layer) runner_.layer(layer, *step, rows, output_);
  EXPECT_TRUE(is_ok(runner_.commit(*step, rows)));
  EXPECT_EQ(pool_.cursor(0).value().position, 9);
}

TEST_F(PoolStep, SlotInsideAStepIsBusy) {
  const std::vector<RowSpec> rows = {tentative(0, names(1, 7, 2), 1)};
  Result<Step> step = pool_.begin_step(step_rows(rows));
  ASSERT_TRUE(is_ok(step));
  const std::vector<std::byte> memory = pool_bytes(pool_);
  const auto busy = [](const Status& status) {
    return refused(status, StatusCode::kFailedPrecondition, {"0", "step"});
  };
  EXPECT_TRUE(busy(pool_.begin_step(step_rows(rows)).status()));
  EXPECT_TRUE(busy(pool_.force_flush(0)));
  EXPECT_TRUE(busy(pool_.copy(0, 4)));
  EXPECT_TRUE(busy(pool_.materialize({}, 0, 7, 4)));
  EXPECT_TRUE(busy(pool_.truncate(0, 7)));
  EXPECT_TRUE(busy(pool_.save(0).status()));
  // The cursor is that before the step.
  EXPECT_EQ(pool_.cursor(0).value(), (Cursor{5, 7, false}));
  // Other slots are not concerned: a second step at the same time.
  const std::vector<RowSpec> others = {tentative(1, names(2, 7, 2), 1)};
  StepOutput other_output(1);
  Result<Step> second = pool_.begin_step(step_rows(others));
  ASSERT_TRUE(is_ok(second));
  for (int layer = 0; layer < 2; ++layer) runner_.layer(layer, *second, others, other_output);
  EXPECT_TRUE(is_ok(runner_.commit(*second, others)));
  output_.assign(1, {});
  for (int layer = 0; layer < 2; ++layer) runner_.layer(layer, *step, rows, output_);
  EXPECT_TRUE(is_ok(runner_.commit(*step, rows)));
  EXPECT_EQ(pool_.cursor(0).value(), (Cursor{5, 8, false}));
}

// C20: wrong accepted counts change nothing, and the step stays open.
TEST_F(PoolStep, C20_WrongCommitsAreRefused) {
  const std::vector<RowSpec> rows = {tentative(0, names(1, 7, 3), 2), padding(2),
                                     committed(1, names(2, 7, 4))};
  Step step = forward(rows);
  const std::vector<std::byte> memory = pool_bytes(pool_);
  using Counts = std::vector<std::int64_t>;
  struct Case {
    Counts accepted;
    std::vector<std::string> parts;
  };
  const std::vector<Case> cases = {
      {{-1, 0, 4}, {"-1", "3"}},
      {{4, 0, 4}, {"4", "3"}},
      {{std::numeric_limits<std::int64_t>::min(), 0, 4}, {"3"}},
      {{std::numeric_limits<std::int64_t>::max(), 0, 4}, {"3"}},
      {{2, 0, 3}, {"3", "4"}},
      {{2, 0, 0}, {"0", "4"}},
      {{2, 0, 5}, {"5", "4"}},
      {{2, 0, -1}, {"-1", "4"}},
      {{2, 0}, {"2", "3"}},
      {{}, {"0", "3"}},
      {{2, 0, 4, 0}, {"4", "3"}},
  };
  for (const Case& c : cases) {
    const Status status = pool_.commit(step, c.accepted);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.message();
    for (const std::string& part : c.parts) {
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    }
    EXPECT_EQ(pool_.cursor(0).value(), (Cursor{5, 7, false}));
    EXPECT_EQ(pool_.cursor(1).value(), (Cursor{5, 7, false}));
  }
  EXPECT_TRUE(same_bytes(pool_bytes(pool_), memory));
  // What a padding row is said to accept does not matter.
  EXPECT_TRUE(is_ok(pool_.commit(step, Counts{2, 77, 4})));
  EXPECT_EQ(pool_.cursor(0).value(), (Cursor{5, 9, false}));
  EXPECT_EQ(pool_.cursor(1).value(), (Cursor{11, 11, false}));
}

TEST_F(PoolStep, CommitNeedsEveryPartOfEveryLayer) {
  const std::vector<RowSpec> rows = {tentative(0, names(1, 7, 3), 2)};
  Result<Step> begun = pool_.begin_step(step_rows(rows));
  ASSERT_TRUE(is_ok(begun));
  Step& step = *begun;
  const std::int64_t accepted[] = {2};
  EXPECT_TRUE(refused(pool_.commit(step, accepted), StatusCode::kFailedPrecondition, {"0"}));
  output_.assign(1, {});
  runner_.layer(1, step, rows, output_);
  EXPECT_TRUE(refused(pool_.commit(step, accepted), StatusCode::kFailedPrecondition, {"0"}));
  auto b = runner_.buffers(0, step, rows);
  ASSERT_TRUE(is_ok(causal_conv1d_step({}, pool_, 0, step, runner_.conv_operands(0, b))));
  EXPECT_TRUE(
      refused(pool_.commit(step, accepted), StatusCode::kFailedPrecondition, {"0", "recurrence"}));
  ASSERT_TRUE(is_ok(mamba2_step({}, pool_, 0, step, model_.op_params(0), b.mamba2())));
  EXPECT_TRUE(is_ok(pool_.commit(step, accepted)));
  EXPECT_EQ(pool_.cursor(0).value(), (Cursor{5, 9, false}));

  // And one whose convolution is missing.
  const std::vector<RowSpec> next = {tentative(0, names(1, 9, 1), 1)};
  Result<Step> second = pool_.begin_step(step_rows(next));
  ASSERT_TRUE(is_ok(second));
  output_.assign(1, {});
  runner_.layer(0, *second, next, output_);
  auto b1 = runner_.buffers(1, *second, next);
  for (std::int64_t i = 0; i < 1; ++i) {
    set_token(b1.conv_view, i, std::vector<float>(96, 0.5f));
  }
  ASSERT_TRUE(is_ok(mamba2_step({}, pool_, 1, *second, model_.op_params(1), b1.mamba2())));
  const std::int64_t one[] = {1};
  EXPECT_TRUE(
      refused(pool_.commit(*second, one), StatusCode::kFailedPrecondition, {"1", "convolution"}));
  EXPECT_TRUE(is_ok(pool_.abort(*second)));
}

TEST_F(PoolStep, EndedStepsAreRefused) {
  const std::vector<RowSpec> rows = {tentative(0, names(1, 7, 2), 1)};
  const std::int64_t accepted[] = {1};
  for (const bool aborted : {false, true}) {
    Step step = forward(rows);
    auto b = runner_.buffers(0, step, rows);
    EXPECT_TRUE(is_ok(aborted ? pool_.abort(step) : pool_.commit(step, accepted)));
    const Cursor cursor = pool_.cursor(0).value();
    const std::vector<std::byte> memory = pool_bytes(pool_);
    EXPECT_TRUE(refused(pool_.commit(step, accepted), StatusCode::kFailedPrecondition));
    EXPECT_TRUE(refused(pool_.abort(step), StatusCode::kFailedPrecondition));
    EXPECT_TRUE(refused(causal_conv1d_step({}, pool_, 0, step, runner_.conv_operands(0, b)),
                        StatusCode::kFailedPrecondition));
    EXPECT_TRUE(refused(mamba2_step({}, pool_, 0, step, model_.op_params(0), b.mamba2()),
                        StatusCode::kFailedPrecondition));
    // Not even while the same rows are in a new step.
    Result<Step> next = pool_.begin_step(step_rows(rows));
    ASSERT_TRUE(is_ok(next));
    EXPECT_TRUE(refused(pool_.commit(step, accepted), StatusCode::kFailedPrecondition));
    EXPECT_TRUE(refused(mamba2_step({}, pool_, 0, step, model_.op_params(0), b.mamba2()),
                        StatusCode::kFailedPrecondition));
    EXPECT_TRUE(is_ok(pool_.abort(*next)));
    EXPECT_EQ(pool_.cursor(0).value(), cursor);
    EXPECT_TRUE(same_bytes(pool_bytes(pool_), memory));
  }
}

// A slot that changes hands inside a step makes the step stale: no op runs, nothing is written, and
// the commit is refused. abort gives the other rows back.
TEST_F(PoolStep, SlotThatChangesHandsMakesTheStepStale) {
  const std::vector<std::byte> image = pool_.save(3).value();
  const std::vector<std::pair<const char*, std::function<Status()>>> changes = {
      {"reset", [&] { return pool_.reset(0); }},
      {"release", [&] { return pool_.release(0); }},
      {"copy onto", [&] { return pool_.copy(3, 0); }},
      {"materialize onto",
       [&] { return pool_.materialize({}, 3, pool_.cursor(3).value().position, 0); }},
      {"load onto", [&] { return pool_.load({}, 0, image); }},
      {"release and acquire",
       [&] {
         RSSM_RETURN_IF_ERROR(pool_.release(0));
         return pool_.reset(0);
       }},
  };
  for (const auto& [name, change] : changes) {
    for (const bool ran : {false, true}) {
      SCOPED_TRACE(std::string(name) + (ran ? ", after the layers ran" : ", before they ran"));
      if (!pool_.cursor(0).ok()) {
        ASSERT_TRUE(is_ok(pool_.reset(0)));
      }
      const std::vector<RowSpec> rows = {tentative(1, names(2, 7, 2), 1),
                                         tentative(0, names(1, 7, 2), 1)};
      const Cursor neighbour = pool_.cursor(1).value();
      ASSERT_FALSE(tentative_row_flushes(neighbour, model_.test_case().limits));
      Result<Step> begun = pool_.begin_step(step_rows(rows));
      ASSERT_TRUE(is_ok(begun));
      Step& step = *begun;
      auto b = runner_.buffers(0, step, rows);
      if (ran) {
        output_.assign(2, {});
        for (int layer = 0; layer < 2; ++layer) runner_.layer(layer, step, rows, output_);
      }
      ASSERT_TRUE(is_ok(change()));
      const std::vector<std::byte> memory = pool_bytes(pool_);
      const std::vector<std::byte> y = b.y.bytes();
      EXPECT_TRUE(refused(causal_conv1d_step({}, pool_, 0, step, runner_.conv_operands(0, b)),
                          StatusCode::kFailedPrecondition, {"0"}));
      EXPECT_TRUE(refused(mamba2_step({}, pool_, 0, step, model_.op_params(0), b.mamba2()),
                          StatusCode::kFailedPrecondition, {"0"}));
      const std::int64_t accepted[] = {1, 1};
      EXPECT_TRUE(refused(pool_.commit(step, accepted), StatusCode::kFailedPrecondition, {"0"}));
      EXPECT_TRUE(same_bytes(pool_bytes(pool_), memory));
      EXPECT_TRUE(same_bytes(b.y.bytes(), y));

      // The neighbour must not be lost with it.
      const Result<Cursor> before = pool_.cursor(0);
      EXPECT_TRUE(is_ok(pool_.abort(step)));
      ASSERT_TRUE(is_ok(pool_.cursor(1)));
      EXPECT_EQ(pool_.cursor(1).value(), neighbour);
      EXPECT_TRUE(is_ok(pool_.force_flush(1))) << "slot 1 is not ready";
      EXPECT_TRUE(is_ok(pool_.truncate(1, neighbour.position)));
      // The slot that left keeps what it was given.
      const Result<Cursor> after = pool_.cursor(0);
      ASSERT_EQ(before.ok(), after.ok());
      if (before.ok()) {
        EXPECT_EQ(before.value(), after.value());
      }
      // A neighbour told to flush would flush in the next round: start it anew.
      ASSERT_TRUE(is_ok(pool_.copy(2, 1)));
    }
  }
}

// A step of one pool is none of another's, even if both count the same.
TEST_F(PoolStep, StepOfAnotherPoolIsRefused) {
  StatePool twin = model_.make_pool(5);
  Mamba2Runner twin_runner(model_, twin, {});
  for (std::int32_t slot = 0; slot < 4; ++slot) {
    ASSERT_TRUE(is_ok(twin.reset(slot)));
    twin_runner.step({committed(slot, names(slot + 1u, 0, 5))});
    twin_runner.step({tentative(slot, names(slot + 1u, 5, 3), 2)});
  }
  const std::vector<RowSpec> rows = {tentative(0, names(1, 7, 2), 1)};
  Result<Step> mine = pool_.begin_step(step_rows(rows));
  Result<Step> its = twin.begin_step(step_rows(rows));
  ASSERT_TRUE(is_ok(mine));
  ASSERT_TRUE(is_ok(its));
  auto b = runner_.buffers(0, *mine, rows);
  const std::vector<std::byte> memory = pool_bytes(pool_);
  EXPECT_TRUE(refused(causal_conv1d_step({}, pool_, 0, *its, runner_.conv_operands(0, b)),
                      StatusCode::kFailedPrecondition));
  const std::int64_t accepted[] = {1};
  EXPECT_TRUE(refused(pool_.commit(*its, accepted), StatusCode::kFailedPrecondition));
  EXPECT_TRUE(same_bytes(pool_bytes(pool_), memory));

  // Nor is one of a pool of more layers, with nothing but padding.
  Mamba2Case deep = step_case();
  deep.layers = 5;
  StatePool other = Mamba2Model(deep).make_pool(5);
  const std::vector<StepRow> pads = {{-1, RowKind::kTentative, 0, 2, {}}};
  Result<Step> padded = other.begin_step(pads);
  ASSERT_TRUE(is_ok(padded));
  EXPECT_TRUE(
      refused(pool_.commit(*padded, accepted), StatusCode::kFailedPrecondition, {"5", "2"}));
  EXPECT_TRUE(refused(pool_.abort(*padded), StatusCode::kFailedPrecondition, {"5", "2"}));
}

// abort: a tentative row that does not flush survives unharmed at any point of the step, and run
// again it computes the same bits.
TEST_F(PoolStep, AbortedTentativeRowsRunAgainWithTheSameResult) {
  const std::vector<RowSpec> rows = {tentative(0, names(1, 7, 2), 1), padding(1),
                                     tentative(1, names(2, 7, 1), 0)};
  for (int parts = 0; parts <= 4; ++parts) {
    for (const std::int32_t slot : {0, 1}) {
      ASSERT_FALSE(tentative_row_flushes(pool_.cursor(slot).value(), model_.test_case().limits));
    }
    const Cursor cursors[] = {pool_.cursor(0).value(), pool_.cursor(1).value()};
    Result<Step> step = pool_.begin_step(step_rows(rows));
    ASSERT_TRUE(is_ok(step));
    for (int part = 0; part < parts; ++part) {
      const int layer = part / 2;
      auto b = runner_.buffers(layer, *step, rows);
      for (std::int64_t t = 0; t < 4; ++t) {
        set_token(b.conv_view, t, std::vector<float>(96, 3.0f));  // operands of an aborted step
      }
      ASSERT_TRUE(
          is_ok(part % 2 == 0
                    ? causal_conv1d_step({}, pool_, layer, *step, runner_.conv_operands(layer, b))
                    : mamba2_step({}, pool_, layer, *step, model_.op_params(layer), b.mamba2())));
    }
    ASSERT_TRUE(is_ok(pool_.abort(*step)));
    EXPECT_EQ(pool_.cursor(0).value(), cursors[0]);
    EXPECT_EQ(pool_.cursor(1).value(), cursors[1]);
  }
  StatePool clean = model_.make_pool(5);
  Mamba2Runner clean_runner(model_, clean, {});
  for (std::int32_t slot = 0; slot < 2; ++slot) {
    ASSERT_TRUE(is_ok(clean.reset(slot)));
    clean_runner.step({committed(slot, names(slot + 1u, 0, 5))});
    clean_runner.step({tentative(slot, names(slot + 1u, 5, 3), 2)});
  }
  const StepOutput got = runner_.step(rows);
  const StepOutput want = clean_runner.step(rows);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    for (std::size_t layer = 0; layer < 2; ++layer) {
      EXPECT_TRUE(same_bits(got[row][layer], want[row][layer]));
    }
  }
  for (std::int32_t slot = 0; slot < 2; ++slot) {
    EXPECT_TRUE(same_bytes(slot_bytes(pool_, slot), slot_bytes(clean, slot)));
  }
}

// abort after a layer rewrote a checkpoint: those rows are invalid until reset, load or copy
// revives them, everything else refuses them by name; tentative rows beside them survive.
TEST_F(PoolStep, AbortedFlushesAndCommittedRowsAreInvalidUntilRevived) {
  const std::vector<std::byte> image = pool_.save(3).value();
  const std::vector<std::function<Status(std::int32_t)>> revivals = {
      [&](std::int32_t slot) { return pool_.reset(slot); },
      [&](std::int32_t slot) { return pool_.copy(3, slot); },
      [&](std::int32_t slot) { return pool_.load({}, slot, image); },
      [&](std::int32_t slot) {
        return pool_.materialize({}, 3, pool_.cursor(3).value().position, slot);
      },
      [&](std::int32_t slot) {
        RSSM_RETURN_IF_ERROR(pool_.release(slot));
        return pool_.reset(slot);
      },
  };
  for (const auto& revive : revivals) {
    for (const std::int32_t slot : {0, 1, 2}) ASSERT_TRUE(is_ok(pool_.copy(3, slot)));
    ASSERT_TRUE(is_ok(pool_.force_flush(0)));
    const std::vector<RowSpec> rows = {tentative(0, names(1, 7, 1), 1),
                                       committed(1, names(1, 7, 1)),
                                       tentative(2, names(1, 7, 1), 1)};
    Result<Step> step = pool_.begin_step(step_rows(rows));
    ASSERT_TRUE(is_ok(step));
    output_.assign(3, {});
    runner_.layer(0, *step, rows, output_);
    ASSERT_TRUE(is_ok(pool_.abort(*step)));
    for (const std::int32_t slot : {0, 1}) {
      const auto dead = [&](const Status& status) {
        return refused(status, StatusCode::kFailedPrecondition, {std::to_string(slot), "invalid"});
      };
      EXPECT_TRUE(dead(pool_.cursor(slot).status()));
      EXPECT_TRUE(dead(pool_.save(slot).status()));
      EXPECT_TRUE(dead(pool_.copy(slot, 4)));
      EXPECT_TRUE(dead(pool_.materialize({}, slot, 7, 4)));
      EXPECT_TRUE(dead(pool_.truncate(slot, 7)));
      EXPECT_TRUE(dead(pool_.force_flush(slot)));
      const std::vector<StepRow> row = {{slot, RowKind::kTentative, 0, 1, {}}};
      EXPECT_TRUE(dead(pool_.begin_step(row).status()));
    }
    EXPECT_EQ(pool_.free_slots(), 1);  // an invalid slot still belongs to its sequence
    EXPECT_EQ(pool_.cursor(2).value(), pool_.cursor(3).value());

    for (const std::int32_t slot : {0, 1}) ASSERT_TRUE(is_ok(revive(slot)));
    SequenceOracle oracle(model_);
    const bool fresh = pool_.cursor(0).value().position == 0;
    if (!fresh) oracle.run(names(4, 0, 7));
    const OracleOutput want = oracle.run(names(9, 0, 2));
    const StepOutput output =
        runner_.step({tentative(0, names(9, 0, 2), 2), tentative(1, names(9, 0, 2), 1)});
    expect_close(output[0], want, model_.test_case(), "slot 0");
    expect_close(output[1], want, model_.test_case(), "slot 1");
  }
}

// abort before anything was rewritten keeps flushing and committed rows, with their order to flush.
TEST_F(PoolStep, AbortBeforeAnyLayerKeepsEveryRow) {
  ASSERT_TRUE(is_ok(pool_.force_flush(0)));
  const std::vector<std::byte> memory = pool_bytes(pool_);
  const std::vector<RowSpec> rows = {tentative(0, names(1, 7, 1), 1), committed(1, names(2, 7, 3))};
  Result<Step> step = pool_.begin_step(step_rows(rows));
  ASSERT_TRUE(is_ok(step));
  ASSERT_TRUE(is_ok(pool_.abort(*step)));
  EXPECT_EQ(pool_.cursor(0).value(), (Cursor{5, 7, true}));
  EXPECT_EQ(pool_.cursor(1).value(), (Cursor{5, 7, false}));
  EXPECT_TRUE(same_bytes(pool_bytes(pool_), memory));
}

// A committed row of no tokens is a flush of the live records.
TEST_F(PoolStep, CommittedRowWithoutTokensFoldsTheRecords) {
  runner_.step({committed(0, {}), committed(1, names(2, 7, 1))});
  EXPECT_EQ(pool_.cursor(0).value(), (Cursor{7, 7, false}));
  PlainShadow shadow(model_, 1, {});
  shadow.reset(0);
  shadow.fold(0, names(1, 0, 7));
  shadow.expect_checkpoint(pool_, 0, 0, "slot 0");
  ASSERT_TRUE(is_ok(pool_.reset(0)));
  runner_.step({committed(0, {})});
  EXPECT_EQ(pool_.cursor(0).value(), Cursor{});
  SequenceOracle oracle(model_);
  const std::vector<TokenId> tokens = names(1, 0, 3);
  const StepOutput output = runner_.step({tentative(0, tokens, 3)});
  expect_close(output[0], oracle.run(tokens), model_.test_case(), "after an empty prompt");
}

// C39: rows past the batch's end, slot 0 live and in the step as well.
TEST_F(PoolStep, TokenEndCountsPadding) {
  const std::vector<StepRow> rows = {{0, RowKind::kTentative, 3, 2, {}},
                                     {-1, RowKind::kTentative, 10, 6, {}}};
  Result<Step> step = pool_.begin_step(rows);
  ASSERT_TRUE(is_ok(step));
  EXPECT_EQ(step->token_end(), 16);
  ASSERT_EQ(step->rows().size(), 2u);
  EXPECT_EQ(step->rows()[1].token_count, 6);
  EXPECT_TRUE(is_ok(pool_.abort(*step)));
}

}  // namespace
}  // namespace replayssm::testing
