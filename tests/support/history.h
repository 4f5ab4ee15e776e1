// Long random histories of a pool with one layer behind a convolution.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "support/plain_shadow.h"
#include "support/pool_access.h"
#include "support/step_harness.h"

namespace replayssm::testing {

inline constexpr std::int32_t kHistorySlots = 4;

/// A slot's sequence: the oracle at the checkpoint's position, the live tokens after it, and the
/// oracle behind those.
template <typename Model>
struct Sequence {
  OracleOf<Model> base;
  std::vector<TokenId> live;
  OracleOf<Model> tip;

  void truncate(std::int64_t size) {
    live.resize(static_cast<std::size_t>(size));
    tip = base;
    tip.run(live);
  }
};

struct HistoryCounts {
  int flushes = 0, copies = 0, materialized = 0, truncated = 0, resets = 0, aborts = 0, invalid = 0;
  std::int64_t tokens = 0;
};

/// Random steps, resets, copies, rewinds and aborted steps over several slots. Outputs are held
/// against the oracle, checkpoints bit for bit against plain decoding.
template <typename Model>
class History {
 public:
  History(const Model& model, const CpuContext& context, std::uint64_t seed)
      : model_(model),
        case_(model.test_case()),
        context_(context),
        pool_(model.make_pool(kHistorySlots)),
        runner_(model, pool_, context),
        shadow_(model, kHistorySlots, {nullptr, context.isa}),
        rng_(seed),
        sequences_(kHistorySlots, {OracleOf<Model>(model), {}, OracleOf<Model>(model)}) {
    for (std::int32_t slot = 0; slot < kHistorySlots; ++slot) reset(slot);
  }

  void run(int steps) {
    for (step_ = 0; step_ < steps && !::testing::Test::HasFailure(); ++step_) {
      if (rng_.chance(0.02)) {
        EXPECT_TRUE(is_ok(pool_.force_flush(any())));
      }
      if (rng_.chance(0.004)) reset(any());
      if (rng_.chance(0.01)) copy(any(), any());
      if (rng_.chance(0.01)) materialize(any(), any());
      if (rng_.chance(0.02)) truncate(any());
      if (rng_.chance(0.03)) abort_step();
      one_step();
    }
  }
  const HistoryCounts& counts() const { return counts_; }

 private:
  std::int32_t any() { return static_cast<std::int32_t>(rng_.below(kHistorySlots)); }
  Sequence<Model>& at(std::int32_t slot) { return sequences_[static_cast<std::size_t>(slot)]; }
  std::string where(std::int32_t slot) const {
    return describe(context_) + ", step " + std::to_string(step_) + ", slot " +
           std::to_string(slot);
  }

  void reset(std::int32_t slot) {
    ASSERT_TRUE(is_ok(pool_.reset(slot)));
    shadow_.reset(slot);
    at(slot) = {OracleOf<Model>(model_), {}, OracleOf<Model>(model_)};
    ++counts_.resets;
  }

  void copy(std::int32_t src, std::int32_t dst) {
    if (src == dst) return;
    ASSERT_TRUE(is_ok(pool_.copy(src, dst)));
    shadow_.copy(src, dst);
    at(dst) = at(src);
    ++counts_.copies;
  }

  void materialize(std::int32_t src, std::int32_t dst) {
    if (src == dst) return;
    const Cursor cursor = pool_.cursor(src).value();
    const std::int64_t prefix = rng_.between(cursor.checkpoint_position, cursor.position);
    const std::vector<std::byte> before = slot_bytes(pool_, src);
    ASSERT_TRUE(is_ok(pool_.materialize(context_, src, prefix, dst)));
    EXPECT_TRUE(same_bytes(slot_bytes(pool_, src), before)) << where(src);
    EXPECT_EQ(pool_.cursor(dst).value(), (Cursor{prefix, prefix, false}));
    Sequence<Model> sequence = at(src);
    sequence.truncate(prefix - cursor.checkpoint_position);
    shadow_.copy(src, dst);
    at(dst) = std::move(sequence);
    fold(dst);
    if (prefix > 0) shadow_.expect_checkpoint(pool_, dst, dst, where(dst) + ", materialized");
    ++counts_.materialized;
  }

  void truncate(std::int32_t slot) {
    const Cursor cursor = pool_.cursor(slot).value();
    const std::int64_t position = rng_.between(cursor.checkpoint_position, cursor.position);
    ASSERT_TRUE(is_ok(pool_.truncate(slot, position)));
    at(slot).truncate(position - cursor.checkpoint_position);
    ++counts_.truncated;
  }

  /// The live tokens of the model of `slot` move into its checkpoint.
  void fold(std::int32_t slot) {
    Sequence<Model>& sequence = at(slot);
    shadow_.fold(slot, sequence.live);
    sequence.base.run(sequence.live);
    sequence.live.clear();
  }

  std::vector<RowSpec> random_rows() {
    std::vector<RowSpec> rows;
    const auto first = any();
    for (std::int32_t i = 0; i < kHistorySlots; ++i) {
      const std::int32_t slot = (first + i) % kHistorySlots;
      if (rng_.chance(0.1)) rows.push_back(padding(rng_.between(1, 3)));
      if (rng_.chance(0.25)) continue;
      const bool is_committed = rng_.chance(0.05);
      std::vector<TokenId> tokens(static_cast<std::size_t>(
          rng_.between(1, is_committed ? 6 : case_.limits.draft_capacity)));
      for (TokenId& token : tokens) token = ++next_token_;
      const std::int64_t accepted = rng_.between(0, static_cast<std::int64_t>(tokens.size()));
      rows.push_back(is_committed ? committed(slot, std::move(tokens))
                                  : tentative(slot, std::move(tokens), accepted));
    }
    if (rows.empty()) rows.push_back(padding(1));
    return rows;
  }

  void one_step() {
    const std::vector<RowSpec> rows = random_rows();
    std::vector<Cursor> cursors;
    for (const RowSpec& row : rows) {
      cursors.push_back(row.slot < 0 ? Cursor{} : pool_.cursor(row.slot).value());
    }
    const StepOutput output = runner_.step(rows);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const RowSpec& row = rows[i];
      if (row.slot < 0) continue;
      Sequence<Model>& sequence = at(row.slot);
      expect_close(output[i], sequence.tip.run(row.tokens, static_cast<std::size_t>(row.accepts())),
                   case_, where(row.slot));
      counts_.tokens += row.accepts();
      if (row.kind == RowKind::kCommitted) {
        fold(row.slot);
        shadow_.decode(row.slot, row.tokens);
        sequence.base.run(row.tokens);
        shadow_.expect_checkpoint(pool_, row.slot, row.slot, where(row.slot) + ", committed");
      } else {
        if (tentative_row_flushes(cursors[i], case_.limits)) {
          ++counts_.flushes;
          fold(row.slot);
          shadow_.expect_checkpoint(pool_, row.slot, row.slot, where(row.slot) + ", flush");
        }
        sequence.live.insert(sequence.live.end(), row.tokens.begin(),
                             row.tokens.begin() + row.accepts());
      }
      const auto live = static_cast<std::int64_t>(sequence.live.size());
      EXPECT_EQ(pool_.cursor(row.slot).value(),
                (Cursor{sequence.base.position(), sequence.base.position() + live, false}))
          << where(row.slot);
    }
  }

  /// A step that stops after none, one or both parts of the layer.
  void abort_step() {
    const std::vector<RowSpec> rows = random_rows();
    std::vector<Cursor> cursors;
    for (const RowSpec& row : rows) {
      cursors.push_back(row.slot < 0 ? Cursor{} : pool_.cursor(row.slot).value());
    }
    Result<Step> step = pool_.begin_step(step_rows(rows));
    ASSERT_TRUE(is_ok(step));
    const int parts = static_cast<int>(rng_.below(3));
    auto buffers = runner_.buffers(0, *step, rows);
    if (parts > 0) {
      ASSERT_TRUE(
          is_ok(causal_conv1d_step(context_, pool_, 0, *step, runner_.conv_operands(0, buffers))));
    }
    if (parts > 1) {
      ASSERT_TRUE(is_ok(runner_.recurrence(0, *step, buffers)));
    }
    ASSERT_TRUE(is_ok(pool_.abort(*step)));
    ++counts_.aborts;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const RowSpec& row = rows[i];
      if (row.slot < 0) continue;
      const Result<Cursor> after = pool_.cursor(row.slot);
      const bool rewritten = parts > 1 && row_flushes(row.kind, cursors[i], case_.limits);
      const bool may_be_rewritten = rewritten || (parts > 0 && row.kind == RowKind::kCommitted);
      if (after.ok()) {
        EXPECT_FALSE(rewritten) << where(row.slot);
        EXPECT_EQ(after.value(), cursors[i]) << where(row.slot);
        continue;
      }
      EXPECT_TRUE(may_be_rewritten) << where(row.slot) << ": " << after.status().message();
      ++counts_.invalid;
      // Revived by a copy of a sequence that is well, or a new start.
      std::int32_t donor = any();
      if (donor != row.slot && pool_.cursor(donor).ok()) {
        copy(donor, row.slot);
      } else {
        reset(row.slot);
      }
    }
  }

  const Model& model_;
  const typename Model::Case& case_;
  CpuContext context_;
  StatePool pool_;
  typename Model::Runner runner_;
  PlainShadow<Model> shadow_;
  Rng rng_;
  std::vector<Sequence<Model>> sequences_;
  TokenId next_token_ = 0;
  int step_ = 0;
  HistoryCounts counts_;
};

inline void expect_everything_happened(const HistoryCounts& counts, int steps) {
  EXPECT_GT(counts.tokens, 2 * steps);
  EXPECT_GT(counts.flushes, steps / 10);
  EXPECT_GT(counts.copies, steps / 500);
  EXPECT_GT(counts.materialized, steps / 500);
  EXPECT_GT(counts.truncated, steps / 200);
  EXPECT_GT(counts.resets, steps / 1000);
  EXPECT_GT(counts.aborts, steps / 500);
  EXPECT_GT(counts.invalid, 0);
}

}  // namespace replayssm::testing
