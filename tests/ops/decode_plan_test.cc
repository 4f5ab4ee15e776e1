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

// A fast flush is one product where an exact one re-runs the recurrence; plain decoding is the
// same.
TEST(DecodePlan, FastFlushesCostLess) {
  for (std::size_t family : {1u, 2u}) {
    StatePoolOptions options = layers_of(kShapes[family], 1);
    const CpuContext generic{nullptr, CpuIsa::kGeneric};
    const DecodePlan exact = choose_decode(generic, options, 1).value();
    options.flush = FlushMode::kFast;
    const DecodePlan fast = choose_decode(generic, options, 1).value();
    EXPECT_LT(fast.replay_seconds, exact.replay_seconds);
    EXPECT_EQ(fast.plain_seconds, exact.plain_seconds);
  }
}

// Times of one layer's step as docs/kernels/results/*-h200-2026-12-01.md has them.
TEST(DecodePlan, OnAGpuItFollowsTheMeasurements) {
  struct Measured {
    RecurrenceShape shape;
    DType checkpoint;
    std::int64_t sequences;
    double plain, replay;  // us
  };
  const Mamba2Shape nano{64, 64, 128, 8};
  const Mamba2Shape super{128, 64, 128, 8};
  const GatedDeltaNetShape gdn32{16, 32, 128, 128};
  const GatedDeltaNetShape gdn64{16, 64, 128, 128};
  const KimiDeltaAttentionShape kda{32, 128, 128};
  const Measured cases[] = {
      {nano, DType::kF32, 1, 3.5, 3.7},     {nano, DType::kF32, 8, 12.3, 12.0},
      {nano, DType::kF32, 256, 282, 151},   {super, DType::kF32, 1, 4.6, 4.6},
      {super, DType::kF32, 8, 20.7, 14.6},  {super, DType::kF32, 256, 555, 290},
      {super, DType::kBF16, 256, 304, 163}, {nano, DType::kBF16, 256, 159, 87},
      {gdn32, DType::kF32, 1, 3.7, 4.4},    {gdn32, DType::kF32, 8, 13.3, 11.0},
      {gdn32, DType::kF32, 256, 289, 151},  {gdn64, DType::kF32, 256, 566, 289},
      {gdn32, DType::kBF16, 256, 156, 93},  {kda, DType::kF32, 1, 3.8, 4.9},
      {kda, DType::kF32, 8, 12.9, 14.9},    {kda, DType::kF32, 256, 295, 177},
      {kda, DType::kBF16, 256, 170, 155}};
  for (const Measured& c : cases) {
    StatePoolOptions options = layers_of(c.shape, 1);
    options.checkpoint = c.checkpoint;
    options.activation = DType::kBF16;
    const DecodePlan plan = choose_decode(CudaContext{0, nullptr}, options, c.sequences).value();
    const auto sequences = static_cast<double>(c.sequences);
    const double plain = 1e6 * plan.plain_seconds * sequences;
    const double replay = 1e6 * plan.replay_seconds * sequences;
    EXPECT_NEAR(plain, c.plain, 0.3 * c.plain) << c.plain << " us plain";
    EXPECT_NEAR(replay, c.replay, 0.3 * c.replay) << c.replay << " us replay";
    // Where the two differ by more than the estimates do.
    if (c.replay < 0.8 * c.plain) {
      EXPECT_TRUE(plan.replay) << c.replay << " us: " << plan.reason;
    }
    if (c.checkpoint == DType::kF32 && c.replay > 1.05 * c.plain) {
      EXPECT_FALSE(plan.replay) << c.replay << " us: " << plan.reason;
    }
  }
}

TEST(DecodePlan, OnAGpuFewSequencesAreDecodedInPlace) {
  for (const RecurrenceShape& shape : kShapes) {
    const StatePoolOptions options = layers_of(shape, 3);
    const CudaContext gpu{0, nullptr};
    const DecodePlan one = choose_decode(gpu, options, 1).value();
    const DecodePlan many = choose_decode(gpu, options, 4096).value();
    EXPECT_FALSE(one.replay) << one.reason;
    EXPECT_EQ(one.window, 0);
    EXPECT_TRUE(many.replay) << many.reason;
    EXPECT_EQ(many.window, 16);
    EXPECT_NEAR(one.plain_seconds,
                3 * choose_decode(gpu, layers_of(shape, 1), 1).value().plain_seconds, 1e-12);
  }
}

TEST(DecodePlan, WithoutSequencesIsRefused) {
  EXPECT_TRUE(refused(choose_decode(CudaContext{0, nullptr}, layers_of(kShapes[1], 1), -1),
                      StatusCode::kInvalidArgument, {"sequences is -1", "at least 1"}));
  EXPECT_TRUE(refused(choose_decode(kContext, layers_of(kShapes[1], 1), 0),
                      StatusCode::kInvalidArgument, {"sequences is 0", "at least 1"}));
}

}  // namespace
}  // namespace replayssm::testing
