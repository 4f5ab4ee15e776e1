// save and load of any recurrence family's states. Cases have a window of 8, a draft capacity of 3
// and two layers.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "support/plain_shadow.h"
#include "support/pool_access.h"
#include "support/step_harness.h"

namespace replayssm::testing {

template <typename Runner>
void expect_loaded_continues(Runner& runner, std::int32_t slot, std::int64_t position,
                             const std::string& where) {
  OracleOf oracle(runner.model());
  oracle.run(names(1, 0, position));
  const int draft = runner.model().test_case().limits.draft_capacity;
  for (int i = 0; i < 9; ++i) {
    const std::vector<TokenId> tokens = names(60u + static_cast<unsigned>(i), 0, 1 + i % draft);
    const auto accepted = static_cast<std::int64_t>(i % 3 == 0 ? 0 : tokens.size());
    const StepOutput output = runner.step({tentative(slot, tokens, accepted)});
    expect_close(output[0], oracle.run(tokens, static_cast<std::size_t>(accepted)),
                 runner.model().test_case(), where + ", step " + std::to_string(i));
  }
}

inline constexpr std::int64_t kSavedAt[] = {0, 1, 2, 6, 10, 11, 12};

/// C01, C61: save, let somebody else use the slot, load into this and another slot: bit for bit the
/// uninterrupted sequence. Wrapped rings, position 0, sequences shorter than the convolution;
/// twice.
template <typename Model>
void expect_same_geometry_is_bit_equal(const Model& tested) {
  auto c = tested.test_case();
  for (const bool rewindable : {false, true}) {
    c.rewindable = rewindable;
    const Model model(c);
    for (const CpuContext& context : Contexts({1})) {
      StatePool pool = model.make_pool(4);
      typename Model::Runner runner(model, pool, context);
      for (const std::int64_t folded : kSavedAt) {
        for (const std::int64_t live : {0, 1, 3, 5, 8}) {
          const std::string where =
              "folded " + std::to_string(folded) + ", live " + std::to_string(live);
          prepare(runner, 3, folded, live);
          const std::vector<std::byte> before = slot_bytes(pool, 3);
          const Result<std::vector<std::byte>> image = pool.save(3);
          ASSERT_TRUE(is_ok(image));
          EXPECT_TRUE(same_bytes(slot_bytes(pool, 3), before)) << "save writes nothing";
          ASSERT_TRUE(is_ok(pool.copy(3, 0)));  // goes on without interruption
          ASSERT_TRUE(is_ok(pool.reset(3)));
          runner.step({committed(3, names(9, 0, 7))});
          runner.step({tentative(3, names(9, 7, 3), 3)});
          ASSERT_TRUE(is_ok(pool.load(context, 1, *image)));
          ASSERT_TRUE(is_ok(pool.load(context, 3, *image)));
          EXPECT_EQ(pool.cursor(1).value(), (Cursor{folded, folded + live, false}));
          EXPECT_TRUE(same_bytes(slot_bytes(pool, 1), before)) << where;
          EXPECT_TRUE(same_bytes(slot_bytes(pool, 3), before)) << where;
          EXPECT_TRUE(same_bytes(pool.save(1).value(), *image)) << where;
          for (int step = 0; step < 5; ++step) {
            std::vector<RowSpec> rows;
            for (const std::int32_t slot : {0, 1, 3}) {
              rows.push_back(tentative(slot, names(2, step * 3, 3), 1 + step % 3));
            }
            const StepOutput output = runner.step(rows);
            for (std::size_t layer = 0; layer < 2; ++layer) {
              EXPECT_TRUE(same_bits(output[1][layer], output[0][layer])) << where;
              EXPECT_TRUE(same_bits(output[2][layer], output[0][layer])) << where;
            }
            if (step == 2) {  // a second backup, of the restored sequence
              ASSERT_TRUE(is_ok(pool.load(context, 1, pool.save(1).value())));
            }
          }
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

/// for bit a flush; those that fit are kept.
template <typename Model>
void expect_other_windows_keep_or_fold(const Model& tested) {
  auto from = tested.test_case();
  for (const CpuContext& context : {CpuContext{nullptr, supported_isas().back()}}) {
    for (const bool from_rewindable : {false, true}) {
      from.rewindable = from_rewindable;
      const Model model(from);
      StatePool source = model.make_pool(1);
      typename Model::Runner source_runner(model, source, context);
      PlainShadow shadow(model, 1, context);
      for (const bool to_rewindable : {false, true}) {
        for (const ReplayLimits limits :
             {ReplayLimits{1, 1}, {2, 2}, {4, 1}, {5, 5}, {8, 3}, {16, 4}, {64, 16}}) {
          auto to = tested.test_case();
          to.limits = limits;
          to.rewindable = to_rewindable;
          const Model to_model(to);
          StatePool target = to_model.make_pool(2);
          typename Model::Runner runner(to_model, target, context);
          for (const std::int64_t folded : {0, 2, 11}) {
            for (const std::int64_t live : {0, 1, 4, 5, 8}) {
              const std::string where = "L " + std::to_string(limits.window) + ", folded " +
                                        std::to_string(folded) + ", live " + std::to_string(live) +
                                        (from_rewindable ? ", from rewindable" : "") +
                                        (to_rewindable ? ", to rewindable" : "");
              prepare(source_runner, 0, folded, live);
              ASSERT_TRUE(is_ok(target.load(context, 1, source.save(0).value()))) << where;
              const Cursor cursor = target.cursor(1).value();
              EXPECT_EQ(cursor.position, folded + live) << where;
              ASSERT_LE(cursor.live(), limits.window) << where;
              if (live <= limits.window && (from_rewindable || !to_rewindable)) {
                EXPECT_EQ(cursor.checkpoint_position, folded) << where;
              }
              if (cursor.checkpoint_position != folded) {
                EXPECT_EQ(cursor.live(), 0) << where;
                shadow.reset(0);
                shadow.decode(0, names(1, 0, folded));
                shadow.fold(0, names(1, folded, live));
                shadow.expect_checkpoint(target, 1, 0, where);
              }
              // Whatever prefix the pool now says it can reach must be right.
              if (to_rewindable) {
                for (std::int64_t p = cursor.checkpoint_position; p <= cursor.position; ++p) {
                  ASSERT_TRUE(is_ok(target.copy(1, 0)));
                  ASSERT_TRUE(is_ok(target.truncate(0, p))) << where;
                  expect_loaded_continues(runner, 0, p,
                                          where + ", truncated to " + std::to_string(p));
                }
              }
              expect_loaded_continues(runner, 1, folded + live, where);
              if (::testing::Test::HasFailure()) return;
            }
          }
        }
      }
    }
  }
}

}  // namespace replayssm::testing
