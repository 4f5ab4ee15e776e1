// choose_decode: what its estimates must obey for every recurrence family, and its refusals.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "replayssm/decode_plan.h"
#include "support/compare.h"

namespace replayssm::testing {
namespace {

StatePoolOptions layers_of(const RecurrenceShape& shape, std::size_t count) {
  StatePoolOptions options;
  options.layers.assign(count, LayerSpec{shape, {}});
  return options;
}

const CpuContext kContext{nullptr, CpuIsa::kAvx2};
const std::vector<RecurrenceShape> kShapes = {Mamba2Shape{16, 64, 128, 1},
                                              GatedDeltaNetShape{8, 8, 128, 128},
                                              KimiDeltaAttentionShape{8, 128, 128}};

TEST(DecodePlan, LayersAddUp) {
  for (const RecurrenceShape& shape : kShapes) {
    const DecodePlan one = choose_decode(kContext, layers_of(shape, 1), 4).value();
    const DecodePlan three = choose_decode(kContext, layers_of(shape, 3), 4).value();
    EXPECT_GT(one.plain_seconds, 0.0);
    EXPECT_NEAR(three.plain_seconds, 3 * one.plain_seconds, 1e-3 * one.plain_seconds);
    EXPECT_NEAR(three.replay_seconds, 3 * one.replay_seconds, 1e-3 * one.replay_seconds);
    EXPECT_EQ(one.window, one.replay ? 16 : 0);
    EXPECT_NE(one.reason.find("window of 16"), std::string::npos) << one.reason;
  }
}

// The delta needs a product with the state of its own, and decays per channel a larger ring.
TEST(DecodePlan, FamiliesAreOrderedByTheirWork) {
  StatePoolOptions mamba = layers_of(kShapes[0], 1);
  StatePoolOptions gated = layers_of(kShapes[1], 1);
  StatePoolOptions kimi = layers_of(kShapes[2], 1);
  const CpuContext generic{nullptr, CpuIsa::kGeneric};  // bound by arithmetic
  const DecodePlan m = choose_decode(generic, mamba, 1).value();
  const DecodePlan g = choose_decode(generic, gated, 1).value();
  const DecodePlan k = choose_decode(generic, kimi, 1).value();
  EXPECT_LT(m.plain_seconds, g.plain_seconds);
  EXPECT_LT(m.replay_seconds, g.replay_seconds);
  EXPECT_EQ(g.plain_seconds, k.plain_seconds);
  EXPECT_LT(g.replay_seconds, k.replay_seconds);
}

// Plain decoding would encode a copy per token that nobody reads.
TEST(DecodePlan, ReadCopiesAskForReplay) {
  for (const RecurrenceShape& shape : kShapes) {
    const DecodePlan without = choose_decode(kContext, layers_of(shape, 1), 64).value();
    for (const ReadCopyFormat format :
         {ReadCopyFormat::kFp8E4M3, ReadCopyFormat::kInt8, ReadCopyFormat::kNvfp4}) {
      StatePoolOptions options = layers_of(shape, 1);
      options.layers[0].read_copy = format;
      const DecodePlan with = choose_decode(kContext, options, 64).value();
      EXPECT_TRUE(with.replay) << with.reason;
      EXPECT_GT(with.plain_seconds, 2 * without.plain_seconds) << to_string(format);
    }
  }
}

TEST(DecodePlan, WithoutSequencesIsRefused) {
  EXPECT_TRUE(refused(choose_decode(kContext, layers_of(kShapes[1], 1), 0),
                      StatusCode::kInvalidArgument, {"sequences is 0", "at least 1"}));
}

}  // namespace
}  // namespace replayssm::testing
