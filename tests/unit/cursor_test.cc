// The rules that place records, for every small window and draft capacity (C15).
#include "replayssm/cursor.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "support/rng.h"

namespace replayssm {
namespace {

using testing::Rng;

/// A ring that remembers which position each place holds, and the tokens of a sequence.
struct Model {
  std::map<std::int64_t, std::int64_t> place_holds;  // place -> position
  Cursor cursor;
};

TEST(Cursor, C15_EveryWindowAndDraftCapacity) {
  for (int window = 1; window <= 8; ++window) {
    for (int draft = 1; draft <= window; ++draft) {
      const ReplayLimits limits{window, draft};
      EXPECT_EQ(limits.record_places(), window + draft);
      Rng rng(static_cast<std::uint64_t>(window * 100 + draft));
      Model model;
      for (int round = 0; round < 200; ++round) {
        SCOPED_TRACE("L " + std::to_string(window) + ", T " + std::to_string(draft) + ", round " +
                     std::to_string(round));
        const Cursor before = model.cursor;
        const std::int64_t live = before.position - before.checkpoint_position;
        ASSERT_EQ(before.live(), live);
        ASSERT_GE(live, 0);
        ASSERT_LE(live, window);
        // Every live record is still in its place.
        for (std::int64_t p = before.checkpoint_position; p < before.position; ++p) {
          const auto place = model.place_holds.find(p % limits.record_places());
          ASSERT_NE(place, model.place_holds.end());
          ASSERT_EQ(place->second, p);
        }
        Cursor cursor = before;
        cursor.force_flush = rng.chance(0.1);
        const bool flushes = live > 0 && (live + draft > window || cursor.force_flush);
        ASSERT_EQ(tentative_row_flushes(cursor, limits), flushes);
        ASSERT_EQ(row_flushes(RowKind::kTentative, cursor, limits), flushes);
        ASSERT_TRUE(row_flushes(RowKind::kCommitted, cursor, limits));

        if (rng.chance(0.1)) {
          const std::int64_t count = rng.between(1, 2 * window);
          const Cursor after = commit_cursor(cursor, RowKind::kCommitted, count, limits);
          ASSERT_EQ(after, (Cursor{before.position + count, before.position + count, false}));
          model.cursor = after;
          continue;
        }
        const std::int64_t count = rng.between(1, draft);
        std::set<std::int64_t> taken;
        for (std::int64_t p = before.checkpoint_position; p < before.position; ++p) {
          taken.insert(p % limits.record_places());
        }
        for (std::int64_t p = before.position; p < before.position + count; ++p) {
          ASSERT_TRUE(taken.insert(p % limits.record_places()).second) << "records collide";
          model.place_holds[p % limits.record_places()] = p;
        }
        const std::int64_t accepted = rng.between(0, count);
        const Cursor after = commit_cursor(cursor, RowKind::kTentative, accepted, limits);
        ASSERT_EQ(after.position, before.position + accepted);
        ASSERT_EQ(after.checkpoint_position,
                  flushes ? before.position : before.checkpoint_position);
        ASSERT_FALSE(after.force_flush);
        model.cursor = after;
      }
    }
  }
}

// Whatever is accepted: one step from any reachable state leaves at most a window of live records.
TEST(Cursor, LiveNeverExceedsTheWindow) {
  for (int window = 1; window <= ReplayLimits::kMaxWindow; ++window) {
    for (int draft = 1; draft <= std::min(window, ReplayLimits::kMaxDraftCapacity); ++draft) {
      const ReplayLimits limits{window, draft};
      for (std::int64_t live = 0; live <= window; ++live) {
        const Cursor cursor{1000, 1000 + live, false};
        for (std::int64_t accepted = 0; accepted <= draft; ++accepted) {
          const Cursor after = commit_cursor(cursor, RowKind::kTentative, accepted, limits);
          ASSERT_LE(after.live(), window) << window << ' ' << draft << ' ' << live;
          ASSERT_GE(after.live(), 0);
        }
      }
    }
  }
}

TEST(Cursor, PlainReplayFlushesOncePerWindow) {
  const ReplayLimits limits{16, 1};
  Cursor cursor;
  int flushes = 0;
  for (int i = 0; i < 16 * 10; ++i) {
    flushes += tentative_row_flushes(cursor, limits);
    cursor = commit_cursor(cursor, RowKind::kTentative, 1, limits);
  }
  EXPECT_EQ(flushes, 9);  // the tenth comes with the next token
  EXPECT_EQ(cursor.live(), 16);
}

TEST(Cursor, PositionsBeyond32Bits) {
  const ReplayLimits limits{16, 4};
  Cursor cursor{(std::int64_t{1} << 40) - 3, (std::int64_t{1} << 40) + 9, false};
  EXPECT_FALSE(tentative_row_flushes(cursor, limits));
  cursor = commit_cursor(cursor, RowKind::kTentative, 1, limits);
  EXPECT_TRUE(tentative_row_flushes(cursor, limits));
  cursor = commit_cursor(cursor, RowKind::kTentative, 4, limits);
  EXPECT_EQ(cursor.checkpoint_position, (std::int64_t{1} << 40) + 10);
  EXPECT_EQ(cursor.live(), 4);
}

// C29: the convolution ring keeps width - 1 inputs in front of a row of T tokens; a rewindable one
// those in front of every live token.
TEST(Cursor, C29_ConvolutionPlaces) {
  for (int width = 2; width <= 8; ++width) {
    EXPECT_EQ((ReplayLimits{16, 4}.conv_places(width, false)), width - 1 + 4);
    EXPECT_EQ((ReplayLimits{16, 4}.conv_places(width, true)), width - 1 + 16 + 4);
  }
}

static_assert(tentative_row_flushes(Cursor{0, 0, true}, ReplayLimits{4, 4}) == false,
              "nothing is live, so nothing flushes");
static_assert(tentative_row_flushes(Cursor{0, 1, false}, ReplayLimits{4, 4}));
static_assert(tentative_row_flushes(Cursor{0, 1, true}, ReplayLimits{4, 1}));
static_assert(!tentative_row_flushes(Cursor{0, 3, false}, ReplayLimits{4, 1}));
static_assert(tentative_row_flushes(Cursor{0, 4, false}, ReplayLimits{4, 1}));

}  // namespace
}  // namespace replayssm
