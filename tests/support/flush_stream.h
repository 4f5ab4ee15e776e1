// What flushes store, over a random stream of one sequence.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/plain_shadow.h"
#include "support/pool_access.h"
#include "support/step_harness.h"

namespace replayssm::testing {

/// After every flush, forced ones included, the checkpoint is decode(checkpoint), the plain
/// recurrence over the records, one encode. With f32 that is plain decoding's state.
template <typename Model>
void expect_flushes_are_plain(const Model& model) {
  const auto& c = model.test_case();
  for (const CpuContext& context : Contexts({1})) {
    StatePool pool = model.make_pool(2);
    typename Model::Runner runner(model, pool, context);
    PlainShadow shadow(model, 1, context);
    ASSERT_TRUE(is_ok(pool.reset(1)));
    shadow.reset(0);
    Rng rng(21);
    TokenId token = 1;
    std::vector<TokenId> live;
    int flushes = 0;
    // Full-width streams fill the ring to the last place; others rarely accept anything.
    for (const double accept_all : {1.0, 0.5, 0.0}) {
      for (int step = 0; step < 3 * c.limits.window / c.limits.draft_capacity + 12; ++step) {
        if (rng.chance(0.06)) {
          ASSERT_TRUE(is_ok(pool.force_flush(1)));
        }
        const bool is_committed = accept_all == 0.5 && rng.chance(0.05);
        std::vector<TokenId> tokens(static_cast<std::size_t>(
            accept_all == 1.0 ? c.limits.draft_capacity : rng.between(1, c.limits.draft_capacity)));
        for (TokenId& t : tokens) t = token++;
        const std::int64_t accepted = is_committed || rng.chance(accept_all)
                                          ? static_cast<std::int64_t>(tokens.size())
                                          : rng.between(0, static_cast<int>(tokens.size()));
        const Cursor before = pool.cursor(1).value();
        ASSERT_EQ(before.live(), static_cast<std::int64_t>(live.size()));
        const std::string where = describe(context) + ", step " + std::to_string(step) + ", live " +
                                  std::to_string(live.size());
        if (is_committed) {
          runner.step({committed(1, tokens)});
          shadow.fold(0, live);
          shadow.decode(0, tokens);
          live.clear();
          shadow.expect_checkpoint(pool, 1, 0, where + ", committed");
          continue;
        }
        const bool flushes_now = tentative_row_flushes(before, c.limits);
        runner.step({tentative(1, tokens, accepted)});
        if (flushes_now) {
          ++flushes;
          shadow.fold(0, live);
          live.clear();
          shadow.expect_checkpoint(pool, 1, 0, where + ", flush");
        }
        live.insert(live.end(), tokens.begin(), tokens.begin() + accepted);
        if (::testing::Test::HasFailure()) return;
      }
    }
    EXPECT_GE(flushes, 5);
  }
}

}  // namespace replayssm::testing
