// What tests of moved states (copies, prefixes, truncation, other backends) do before and after.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/step_harness.h"

namespace replayssm::testing {

/// Brings `slot` to `live` records after `folded` committed tokens of sequence 1.
template <typename Runner>
void bring(Runner& runner, std::int32_t slot, std::int64_t folded, std::int64_t live) {
  if (folded > 0) runner.step({committed(slot, names(1, 0, folded))});
  for (std::int64_t done = 0; done < live;) {
    const std::int64_t n = std::min<std::int64_t>(live - done, live - done <= 3 ? 3 : 1);
    runner.step({tentative(slot, names(1, folded + done, n), n)});
    done += n;
  }
}

/// More tokens in rows of both kinds, behind `position` tokens of sequence 1, against the oracle.
template <typename Runner>
void expect_continues(Runner& runner, std::int32_t slot, std::int64_t position,
                      const std::string& where) {
  OracleOf<std::decay_t<decltype(runner.model())>> oracle(runner.model());
  if (position > 0) oracle.run(names(1, 0, position));
  std::uint64_t sequence = 50;
  for (const auto& [count, accepted] : {std::pair{3, 2}, {3, 0}, {2, 2}, {3, 3}, {3, 1}}) {
    const std::vector<TokenId> tokens = names(sequence++, 0, count);
    const StepOutput output = runner.step({tentative(slot, tokens, accepted)});
    expect_close(output[0], oracle.run(tokens, static_cast<std::size_t>(accepted)),
                 runner.model().test_case(), where);
  }
  const std::vector<TokenId> tokens = names(sequence, 0, 5);
  const StepOutput output = runner.step({committed(slot, tokens)});
  expect_close(output[0], oracle.run(tokens), runner.model().test_case(), where + ", committed");
}

}  // namespace replayssm::testing
