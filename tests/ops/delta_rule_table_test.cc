// Every case of the table against the fp64 oracle.
#include <gtest/gtest.h>

#include "ops/delta_rule_cases.h"
#include "support/delta_rule_harness.h"
#include "support/random_plan.h"

namespace replayssm::testing {
namespace {

class DeltaTable : public ::testing::TestWithParam<DeltaCase> {};

TEST_P(DeltaTable, MatchesOracleOnEveryContext) {
  expect_plan_matches_oracle(DeltaModel(GetParam(), 7), 11);
}

INSTANTIATE_TEST_SUITE_P(Cases, DeltaTable, ::testing::ValuesIn(delta_rule_cases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace replayssm::testing
