// The exact mode: what a flush stores, bit for bit.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ops/delta_rule_cases.h"
#include "support/delta_rule_harness.h"
#include "support/flush_stream.h"

namespace replayssm::testing {
namespace {

std::vector<DeltaCase> flush_cases() {
  std::vector<DeltaCase> cases;
  for (const DeltaFamily family : kDeltaFamilies) {
    for (const auto& [checkpoint, activation] : kTypePairs) {
      const std::string types =
          std::string(to_string(checkpoint)) + "_" + to_string(activation) + "_";
      for (const auto& [window, draft] :
           {std::pair{1, 1}, {2, 2}, {5, 3}, {8, 1}, {16, 4}, {7, 7}, {64, 16}}) {
        DeltaCase c = small_delta_case(
            family, types + "L" + std::to_string(window) + "_T" + std::to_string(draft), window,
            draft);
        c.checkpoint = checkpoint;
        c.activation = activation;
        c.gate_type = window == 16 ? activation : DType::kF32;
        c.conv_width = window == 16 || window == 2 ? 4 : 0;
        c.layers = window == 16 ? 2 : 1;
        cases.push_back(std::move(c));
      }
    }
    for (const DType checkpoint : {DType::kF32, DType::kBF16, DType::kF16}) {
      // Every width of the last block of columns, and keys that are no multiple of a vector.
      for (const auto& [k, v] : {std::pair{128, 128}, {24, 72}, {8, 48}, {80, 56}}) {
        DeltaCase c = small_delta_case(family,
                                       std::string(to_string(checkpoint)) + "_K" +
                                           std::to_string(k) + "_V" + std::to_string(v),
                                       4, 2);
        c.shape.key_dim = k;
        c.shape.value_dim = v;
        c.checkpoint = checkpoint;
        cases.push_back(std::move(c));
      }
    }
  }
  return cases;
}

class DeltaFlush : public ::testing::TestWithParam<DeltaCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, DeltaFlush, ::testing::ValuesIn(flush_cases()),
                         [](const auto& test) { return test.param.name; });

// C04 as well: the folded state is held against plain decoding's, not its outputs.
TEST_P(DeltaFlush, C04_CheckpointIsThePlainRecurrence) {
  expect_flushes_are_plain(DeltaModel(GetParam()));
}

}  // namespace
}  // namespace replayssm::testing
