// truncate, materialize and copy: every prefix of every window, then both sequences go on. Cases
// are rewindable with a window of 6.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "support/plain_shadow.h"
#include "support/pool_access.h"
#include "support/step_harness.h"

namespace replayssm::testing {

/// Sequence 1, from any of its positions on.
template <typename Model>
class RewoundSequence {
 public:
  /// More tokens after `position` of sequence 1, in rows of every kind.
  void expect_continues(typename Model::Runner& runner, std::int32_t slot, std::int64_t position,
                        const std::string& where) {
    const Model& model = runner.model();
    while (static_cast<std::int64_t>(oracles_.size()) <= position) {
      if (oracles_.empty()) {
        oracles_.emplace_back(model);
      } else {
        OracleOf<Model> next = oracles_.back();
        next.run(names(1, next.position(), 1));
        oracles_.push_back(std::move(next));
      }
    }
    OracleOf<Model> oracle = oracles_[static_cast<std::size_t>(position)];
    std::uint64_t sequence = 50;
    for (const auto& [count, accepted] : {std::pair{3, 2}, {3, 0}, {2, 2}, {3, 3}, {3, 1}}) {
      const std::vector<TokenId> tokens = names(sequence++, 0, count);
      const StepOutput output = runner.step({tentative(slot, tokens, accepted)});
      expect_close(output[0], oracle.run(tokens, static_cast<std::size_t>(accepted)),
                   model.test_case(), where);
    }
    const std::vector<TokenId> tokens = names(sequence, 0, 5);
    const StepOutput output = runner.step({committed(slot, tokens)});
    expect_close(output[0], oracle.run(tokens), model.test_case(), where + ", committed");
  }

 private:
  std::vector<OracleOf<Model>> oracles_;  // of sequence 1, by position
};

/// Checkpoint positions that put the ring's wrap (at multiples of 9) everywhere, and sequences
/// shorter than the convolution.
inline constexpr std::int64_t kFolded[] = {0, 1, 5, 8, 13};

/// C11, C14: the state at every prefix of the live records, bit for bit the plain recurrence; the
/// source keeps its bytes; both go on; records beyond the prefix are never read.
template <typename Model>
void expect_materialize_reaches_every_prefix(const Model& model) {
  RewoundSequence<Model> sequence;
  for (const CpuContext& context : Contexts({1})) {
    StatePool pool = model.make_pool(3);
    typename Model::Runner runner(model, pool, context);
    PlainShadow shadow(model, 2, context);
    for (const std::int64_t folded : kFolded) {
      shadow.reset(1);
      shadow.decode(1, names(1, 0, folded));
      for (std::int64_t live = 0; live <= 6; ++live) {
        for (std::int64_t prefix = folded; prefix <= folded + live; ++prefix) {
          const std::string where = describe(context) + ", folded " + std::to_string(folded) +
                                    ", live " + std::to_string(live) + ", prefix " +
                                    std::to_string(prefix);
          prepare(runner, 1, folded, live);
          const std::vector<std::byte> before = slot_bytes(pool, 1);
          ASSERT_TRUE(is_ok(pool.materialize(context, 1, prefix, 2))) << where;
          EXPECT_TRUE(same_bytes(slot_bytes(pool, 1), before)) << where;
          EXPECT_EQ(pool.cursor(1).value(), (Cursor{folded, folded + live, false})) << where;
          EXPECT_EQ(pool.cursor(2).value(), (Cursor{prefix, prefix, false})) << where;
          if (prefix > 0) {
            shadow.copy(1, 0);
            shadow.fold(0, names(1, folded, prefix - folded));
            shadow.expect_checkpoint(pool, 2, 0, where);
          }
          sequence.expect_continues(runner, 2, prefix, where + ", copy");
          sequence.expect_continues(runner, 1, folded + live, where + ", source");
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

template <typename Model>
void expect_truncate_reaches_every_prefix(const Model& model) {
  RewoundSequence<Model> sequence;
  for (const CpuContext& context : Contexts({1})) {
    StatePool pool = model.make_pool(2);
    typename Model::Runner runner(model, pool, context);
    for (const std::int64_t folded : kFolded) {
      for (std::int64_t live = 0; live <= 6; ++live) {
        for (std::int64_t prefix = folded; prefix <= folded + live; ++prefix) {
          prepare(runner, 1, folded, live);
          ASSERT_TRUE(is_ok(pool.truncate(1, prefix)));
          EXPECT_EQ(pool.cursor(1).value(), (Cursor{folded, prefix, false}));
          sequence.expect_continues(runner, 1, prefix,
                                    "folded " + std::to_string(folded) + ", live " +
                                        std::to_string(live) + ", prefix " +
                                        std::to_string(prefix));
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

template <typename Model>
void expect_chains_of_rewinds(const Model& model) {
  RewoundSequence<Model> sequence;
  for (const CpuContext& context : Contexts({1})) {
    StatePool pool = model.make_pool(4);
    typename Model::Runner runner(model, pool, context);
    prepare(runner, 0, 7, 6);
    ASSERT_TRUE(is_ok(pool.truncate(0, 11)));
    ASSERT_TRUE(is_ok(pool.copy(0, 1)));
    ASSERT_TRUE(is_ok(pool.truncate(1, 9)));
    ASSERT_TRUE(is_ok(pool.materialize(context, 1, 8, 2)));
    ASSERT_TRUE(is_ok(pool.materialize(context, 0, 10, 3)));
    ASSERT_TRUE(is_ok(pool.truncate(3, 10)));
    sequence.expect_continues(runner, 0, 11, "truncated");
    sequence.expect_continues(runner, 1, 9, "copied and truncated");
    sequence.expect_continues(runner, 2, 8, "copied, truncated, materialized");
    sequence.expect_continues(runner, 3, 10, "truncated, materialized");
  }
}

/// C01, C14: copies of a live, wrapped ring go on as the original does, bit for bit, and so does
/// the original; also after the original's slot has found another owner.
template <typename Model>
void expect_copy_moves_ring_and_cursor(const Model& model) {
  RewoundSequence<Model> sequence;
  for (const bool rewindable : {false, true}) {
    StatePoolOptions options = model.test_case().options(4);
    options.rewindable = rewindable;
    for (const CpuContext& context : Contexts({1})) {
      StatePool pool = model.make_pool(options);
      typename Model::Runner runner(model, pool, context);
      for (const std::int64_t folded : kFolded) {
        for (const std::int64_t live : {0, 1, 5, 6}) {
          prepare(runner, 3, folded, live);
          const std::vector<std::byte> before = slot_bytes(pool, 3);
          ASSERT_TRUE(is_ok(pool.copy(3, 1)));
          EXPECT_TRUE(same_bytes(slot_bytes(pool, 3), before));
          EXPECT_EQ(pool.cursor(1).value(), pool.cursor(3).value());
          std::vector<RowSpec> rows = {tentative(1, names(5, 0, 3), 3),
                                       tentative(3, names(5, 0, 3), 3)};
          const StepOutput both = runner.step(rows);
          for (std::size_t layer = 0; layer < 2; ++layer) {
            EXPECT_TRUE(same_bits(both[0][layer], both[1][layer]));
          }
          EXPECT_TRUE(same_bytes(slot_bytes(pool, 1), slot_bytes(pool, 3)));
          // Back to another slot while a stranger takes the first, then once more.
          prepare(runner, 3, folded, live);
          ASSERT_TRUE(is_ok(pool.copy(3, 1)));
          ASSERT_TRUE(is_ok(pool.reset(3)));
          runner.step({committed(3, names(8, 0, 9))});
          ASSERT_TRUE(is_ok(pool.copy(1, 0)));
          ASSERT_TRUE(is_ok(pool.release(1)));
          sequence.expect_continues(
              runner, 0, folded + live,
              "folded " + std::to_string(folded) + ", live " + std::to_string(live));
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

}  // namespace replayssm::testing
