// Every case of the table against the fp64 oracle.
#include <gtest/gtest.h>

#include "ops/mamba2_cases.h"
#include "support/mamba2_harness.h"
#include "support/random_plan.h"

namespace replayssm::testing {
namespace {

class Mamba2Table : public ::testing::TestWithParam<Mamba2Case> {};

TEST_P(Mamba2Table, MatchesOracleOnEveryContext) {
  expect_plan_matches_oracle(Mamba2Model(GetParam(), 7), 11);
}

INSTANTIATE_TEST_SUITE_P(Cases, Mamba2Table, ::testing::ValuesIn(mamba2_cases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace replayssm::testing
