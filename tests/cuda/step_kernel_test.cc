// Which kernel a step takes, and whether its launch overlaps: decided on the host, so no GPU is
// needed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>

#include "cuda/step_kernel.h"
#include "ops/delta_rule/cuda/config.h"
#include "ops/delta_rule/cuda/launch.h"
#include "ops/mamba2/cuda/config.h"
#include "ops/mamba2/cuda/launch.h"
#include "state/cuda/layer_kernels.h"
#include "support/compare.h"

namespace replayssm::cuda {
namespace {

using testing::refused;

CudaDeviceInfo device_of(int compute_capability) {
  CudaDeviceInfo info;
  info.multiprocessors = 132;
  info.compute_capability = compute_capability;
  info.shared_per_block = 227 << 10;
  info.shared_per_multiprocessor = 228 << 10;
  return info;
}

Mamba2CudaParams mamba2_params(std::int64_t rows, int draft_capacity = 1) {
  Mamba2CudaParams p;
  p.heads = 64;
  p.head_dim = 64;
  p.state_size = 128;
  p.groups = 8;
  p.limits = {.window = 16, .draft_capacity = draft_capacity};
  p.activation = DType::kBF16;
  p.row_count = rows;
  return p;
}

DeltaRuleCudaParams delta_rule_params(std::int64_t rows, bool channel_decay,
                                      int draft_capacity = 1) {
  DeltaRuleCudaParams p;
  p.shape = {.key_heads = channel_decay ? 32 : 16,
             .value_heads = 32,
             .key_dim = 128,
             .value_dim = 128,
             .channel_decay = channel_decay};
  p.limits = {.window = 16, .draft_capacity = draft_capacity};
  p.activation = DType::kBF16;
  p.row_count = rows;
  return p;
}

bool takes_direct(const Mamba2CudaParams& p, const Mamba2Tuning& tuning = {}) {
  return choose_mamba2_config(p, device_of(90), tuning).value().variant == Mamba2Variant::kDirect;
}
bool takes_direct(const DeltaRuleCudaParams& p, const DeltaRuleTuning& tuning = {}) {
  return is_direct(choose_delta_rule_config(p, device_of(90), tuning).value().variant);
}

TEST(StepKernel, FewRowsAreDirectAndManyAreStreamed) {
  for (const int drafts : {1, 4, 8}) {
    EXPECT_TRUE(takes_direct(mamba2_params(1, drafts)));
    EXPECT_FALSE(takes_direct(mamba2_params(64, drafts)));
    for (const bool channel_decay : {false, true}) {
      EXPECT_TRUE(takes_direct(delta_rule_params(1, channel_decay, drafts)));
      EXPECT_FALSE(takes_direct(delta_rule_params(64, channel_decay, drafts)));
    }
  }
}

// Five rows of 32 heads are 155 state rows per multiprocessor.
TEST(StepKernel, DecaysAndDraftsSayHowManyRowsAreFew) {
  EXPECT_FALSE(takes_direct(delta_rule_params(4, false, 1)));
  EXPECT_FALSE(takes_direct(delta_rule_params(4, false, 4)));
  EXPECT_TRUE(takes_direct(delta_rule_params(4, false, 8)));
  EXPECT_TRUE(takes_direct(delta_rule_params(5, true, 1)));
  EXPECT_TRUE(takes_direct(delta_rule_params(4, true, 4)));
  EXPECT_FALSE(takes_direct(delta_rule_params(5, true, 4)));
}

// Where chunks are single tokens there is a kernel for them, in full blocks.
TEST(StepKernel, SingleTokensHaveADirectKernelOfTheirOwn) {
  const auto variant = [](const DeltaRuleCudaParams& p, int warps = 0) {
    const DeltaRuleTuning tuning{.kernel = StepKernel::kDirect, .warps = warps};
    return choose_delta_rule_config(p, device_of(90), tuning).value().variant;
  };
  for (const bool channel_decay : {false, true}) {
    EXPECT_EQ(variant(delta_rule_params(1, channel_decay, 1)), DeltaRuleVariant::kDirectSingle);
    EXPECT_EQ(variant(delta_rule_params(1, channel_decay, 2)), DeltaRuleVariant::kDirect);
    EXPECT_EQ(variant(delta_rule_params(1, channel_decay, 1), 2), DeltaRuleVariant::kDirect);
    DeltaRuleCudaParams p = delta_rule_params(1, channel_decay, 1);
    p.shape.value_dim = 16;  // two warps
    EXPECT_EQ(variant(p), DeltaRuleVariant::kDirect);
  }
}

// Sixteen warps of 128 registers are what a multiprocessor holds: shared memory leaves room for as
// many, also with a decay per channel, which takes half as much again.
TEST(StepKernel, SingleTokensFillAMultiprocessor) {
  for (const bool channel_decay : {false, true}) {
    for (const bool gate_is_f32 : {false, true}) {
      DeltaRuleCudaParams p = delta_rule_params(256, channel_decay);
      p.gate_is_f32 = gate_is_f32;
      const DeltaRuleCudaConfig config = choose_delta_rule_config(p, device_of(90)).value();
      EXPECT_EQ(config.blocks_per_multiprocessor * config.launch.warps, 16) << config.to_string();
    }
  }
}

// Registers allow for as many warps as a kernel has been compiled for: a block of more does not
// launch, and what tells how many blocks there are at once is to count on no more.
TEST(StepKernel, BlocksOfTheDeltaRuleHaveRegistersForTheirWarps) {
  for (const bool channel_decay : {false, true}) {
    for (const int drafts : {1, 2, 4, 8, 16}) {
      for (const DType checkpoint : {DType::kF32, DType::kBF16}) {
        for (const ReadCopyFormat copy : {ReadCopyFormat::kNone, ReadCopyFormat::kFp8E4M3}) {
          for (const std::int64_t rows : {1, 8, 64, 256}) {
            DeltaRuleCudaParams p = delta_rule_params(rows, channel_decay, drafts);
            p.checkpoint = checkpoint;
            p.copy.format = copy;
            const DeltaRuleWarps most = delta_rule_warps(p, delta_rule_variant(p));
            for (const int tiles : {0, 1, 8}) {
              const DeltaRuleTuning tuning{.kernel = StepKernel::kStreamed, .tiles = tiles};
              const DeltaRuleCudaConfig config =
                  choose_delta_rule_config(p, device_of(90), tuning).value();
              EXPECT_LE(config.launch.warps, most.of_block) << config.to_string();
              EXPECT_LE(config.blocks_per_multiprocessor * config.launch.warps,
                        most.of_multiprocessor)
                  << config.to_string();
            }
          }
        }
      }
    }
  }
}
TEST(StepKernel, BlocksOfMoreWarpsThanThereAreRegistersForAreRefused) {
  const DeltaRuleTuning tuning{.kernel = StepKernel::kStreamed, .warps = 8};
  const auto refusal =
      choose_delta_rule_config(delta_rule_params(64, false, 4), device_of(90), tuning);
  EXPECT_EQ(refusal.status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(refusal.status().message(), "blocks of 8 warps, the kernel has registers for 4");
  EXPECT_TRUE(
      choose_delta_rule_config(delta_rule_params(64, false, 1), device_of(90), tuning).ok());
}

TEST(StepKernel, PlainDecodingOfF32StatesIsDirectForAnyNumberOfRows) {
  Mamba2CudaParams m = mamba2_params(512);
  m.plain = true;
  EXPECT_TRUE(takes_direct(m));
  m.checkpoint = DType::kBF16;
  EXPECT_FALSE(takes_direct(m));
  for (const bool channel_decay : {false, true}) {
    DeltaRuleCudaParams d = delta_rule_params(512, channel_decay);
    d.plain = true;
    EXPECT_TRUE(takes_direct(d));
    d.checkpoint = DType::kBF16;
    EXPECT_FALSE(takes_direct(d));
  }
}

TEST(StepKernel, ExplanationsNameBothKernels) {
  const LayerSpec layer{Mamba2Shape{64, 64, 128, 8}, {}};
  StatePoolOptions options;
  options.activation = DType::kBF16;
  for (const DType checkpoint : {DType::kF32, DType::kBF16}) {
    options.checkpoint = checkpoint;
    LayerKernels kernels(layer, options);
    for (const std::int64_t rows : {1, 256}) {
      kernels.set_rows(nullptr, rows);
      const std::string text = kernels.explain(device_of(90)).value();
      EXPECT_EQ(text.find(direct_reason(true)) != std::string::npos,
                checkpoint == DType::kF32 && rows > 1)
          << text;
    }
  }
}

/// Bytes prefetched by a step, which the explanation names.
template <typename Config>
int prefetched(const Config& config) {
  const int bytes = config.launch.prefetch_bytes;
  EXPECT_EQ(config.to_string().find("prefetched") != std::string::npos, bytes != 0);
  return bytes;
}

TEST(StepKernel, StepsOfManyRowsPrefetchHalfOfAStatesTile) {
  const auto mamba2 = [](std::int64_t rows, int drafts, DType checkpoint) {
    Mamba2CudaParams p = mamba2_params(rows, drafts);
    p.checkpoint = checkpoint;
    p.state_head_stride = p.head_dim * p.state_size;
    return prefetched(choose_mamba2_config(p, device_of(90)).value());
  };
  EXPECT_EQ(mamba2(256, 1, DType::kF32), 4096);
  EXPECT_EQ(mamba2(256, 4, DType::kF32), 4096);
  EXPECT_EQ(mamba2(64, 1, DType::kF32), 0);
  EXPECT_EQ(mamba2(256, 1, DType::kBF16), 0);
  const auto delta_rule = [](std::int64_t rows, bool channel_decay, int drafts, DType checkpoint) {
    DeltaRuleCudaParams p = delta_rule_params(rows, channel_decay, drafts);
    p.checkpoint = checkpoint;
    return prefetched(choose_delta_rule_config(p, device_of(90)).value());
  };
  EXPECT_EQ(delta_rule(512, false, 1, DType::kF32), 4096);
  EXPECT_EQ(delta_rule(64, false, 1, DType::kF32), 0);
  EXPECT_EQ(delta_rule(512, true, 1, DType::kF32), 0);
  EXPECT_EQ(delta_rule(512, false, 4, DType::kF32), 4096);
  EXPECT_EQ(delta_rule(512, false, 8, DType::kF32), 0);
  EXPECT_EQ(delta_rule(512, false, 1, DType::kBF16), 0);
}

TEST(StepKernel, LongStepsOfTheDeltaRuleSpreadTheirFlushesWidely) {
  const auto places = [](std::int64_t rows, int drafts, DType checkpoint,
                         ReadCopyFormat copy = ReadCopyFormat::kNone) {
    DeltaRuleCudaParams p = delta_rule_params(rows, false, drafts);
    p.checkpoint = checkpoint;
    p.copy.format = copy;
    return delta_rule_flush_places(p, device_of(90));
  };
  using enum FlushPlaces;
  EXPECT_EQ(places(256, 1, DType::kF32), kFirstThreeQuarters);
  EXPECT_EQ(places(128, 1, DType::kF32), kFirstHalf);
  EXPECT_EQ(places(512, 4, DType::kF32), kFirstThreeQuarters);
  EXPECT_EQ(places(512, 8, DType::kF32), kFirstHalf);
  EXPECT_EQ(places(512, 1, DType::kBF16), kFirstHalf);
  EXPECT_EQ(places(512, 1, DType::kF32, ReadCopyFormat::kNvfp4), kFirstQuarter);
  EXPECT_EQ(places(64, 1, DType::kF32, ReadCopyFormat::kNvfp4), kFirstHalf);
}

TEST(StepKernel, LongStepsOfMamba2SpreadTheFlushesOfDraftsAndOfReadCopies) {
  const auto places = [](std::int64_t rows, int drafts, DType checkpoint,
                         ReadCopyFormat copy = ReadCopyFormat::kNone) {
    Mamba2CudaParams p = mamba2_params(rows, drafts);
    p.checkpoint = checkpoint;
    p.copy.format = copy;
    return mamba2_flush_places(p, device_of(90));
  };
  using enum FlushPlaces;
  EXPECT_EQ(places(256, 4, DType::kF32), kFirstHalf);
  EXPECT_EQ(places(64, 4, DType::kF32), kFirst);
  EXPECT_EQ(places(256, 4, DType::kBF16), kFirst);
  EXPECT_EQ(places(256, 1, DType::kF32), kFirst);
  EXPECT_EQ(places(256, 1, DType::kF32, ReadCopyFormat::kNvfp4), kFirstQuarter);
  EXPECT_EQ(places(64, 1, DType::kF32, ReadCopyFormat::kNvfp4), kFirst);
  EXPECT_EQ(places(256, 4, DType::kF32, ReadCopyFormat::kNvfp4), kFirst);
}

// One plan serves all layers, and takes the least.
TEST(StepKernel, LayersSayWhereTheyWantFlushes) {
  StatePoolOptions options;
  options.activation = DType::kBF16;
  options.limits = {.window = 16, .draft_capacity = 4};
  const auto places = [&](const LayerSpec& layer) {
    LayerKernels kernels(layer, options);
    kernels.set_rows(nullptr, 512);
    return kernels.flush_places(device_of(90));
  };
  using enum FlushPlaces;
  EXPECT_EQ(places(LayerSpec{Mamba2Shape{64, 64, 128, 8}, {}}), kFirstHalf);
  EXPECT_LT(kFirst, kFirstQuarter);
  EXPECT_LT(kFirstQuarter, kFirstHalf);
  EXPECT_LT(kFirstHalf, kFirstThreeQuarters);
}

// Strides are multiplied in 32 bits, to 64; those of slots are not.
template <typename Params>
struct NamedStride {
  std::int64_t Params::* stride;
  const char* name;
};

template <typename Params, std::size_t kCount>
void expect_reach(const Params& good, Status (*validate)(const Params&),
                  const NamedStride<Params> (&strides)[kCount]) {
  ASSERT_TRUE(validate(good).ok()) << validate(good).message();
  for (const auto& [stride, name] : strides) {
    Params p = good;
    p.*stride = std::int64_t{1} << 31;
    const Status status = validate(p);
    EXPECT_EQ(status.code(), StatusCode::kUnsupported) << name;
    EXPECT_EQ(status.message(),
              std::string(name) + " is 2147483648 elements, kernels take up to 2147482624");
    p.*stride = (std::int64_t{1} << 31) - 1024;
    EXPECT_TRUE(validate(p).ok()) << validate(p).message();
  }
  Params p = good;
  p.state_slot_stride = std::int64_t{1} << 40;
  EXPECT_TRUE(validate(p).ok()) << validate(p).message();
  p.token_count = std::int64_t{1} << 31;
  EXPECT_NE(validate(p).message().find("2147483648 tokens"), std::string::npos);
}

TEST(StepKernel, StridesBeyond32BitsAreRefusedButForSlots) {
  alignas(16) static float memory[4];
  static PlannedRow row;
  Mamba2CudaParams m = mamba2_params(1);
  m.rows = &row;
  m.token_count = 1;
  m.state = m.ring_x = m.ring_b = m.y = memory;
  m.ring_dt = m.deferred = memory;
  m.a = memory;
  m.x = m.b = m.c = m.dt = memory;
  using M = Mamba2CudaParams;
  expect_reach<M>(m, validate_mamba2,
                  {{&M::state_head_stride, "state head stride"},
                   {&M::ring_x_head_stride, "x ring head stride"},
                   {&M::ring_x_place_stride, "x ring place stride"},
                   {&M::ring_b_group_stride, "B ring group stride"},
                   {&M::ring_b_place_stride, "B ring place stride"},
                   {&M::ring_dt_head_stride, "dt ring head stride"},
                   {&M::x_token_stride, "x token stride"},
                   {&M::x_head_stride, "x head stride"},
                   {&M::b_token_stride, "B token stride"},
                   {&M::b_group_stride, "B group stride"},
                   {&M::c_token_stride, "C token stride"},
                   {&M::c_group_stride, "C group stride"},
                   {&M::dt_token_stride, "dt token stride"},
                   {&M::z_token_stride, "z token stride"},
                   {&M::z_head_stride, "z head stride"},
                   {&M::y_token_stride, "y token stride"},
                   {&M::y_head_stride, "y head stride"}});
  DeltaRuleCudaParams d = delta_rule_params(1, true);
  d.rows = &row;
  d.token_count = 1;
  d.state = d.ring_k = d.ring_v = d.ring_delta = d.o = memory;
  d.ring_k_scale = d.ring_decay = d.ring_beta = d.deferred = memory;
  d.q = d.k = d.v = d.gate = d.beta = memory;
  using D = DeltaRuleCudaParams;
  expect_reach<D>(d, validate_delta_rule,
                  {{&D::state_head_stride, "state head stride"},
                   {&D::ring_k_head_stride, "k ring head stride"},
                   {&D::ring_k_scale_head_stride, "k scale ring head stride"},
                   {&D::ring_v_head_stride, "v ring head stride"},
                   {&D::ring_decay_head_stride, "decay ring head stride"},
                   {&D::ring_beta_head_stride, "beta ring head stride"},
                   {&D::ring_delta_head_stride, "delta ring head stride"},
                   {&D::q_token_stride, "q token stride"},
                   {&D::q_head_stride, "q head stride"},
                   {&D::k_token_stride, "k token stride"},
                   {&D::k_head_stride, "k head stride"},
                   {&D::v_token_stride, "v token stride"},
                   {&D::v_head_stride, "v head stride"},
                   {&D::gate_token_stride, "a token stride"},
                   {&D::gate_head_stride, "a head stride"},
                   {&D::beta_token_stride, "b token stride"},
                   {&D::o_token_stride, "o token stride"},
                   {&D::o_head_stride, "o head stride"}});
}

// Whatever the shape: no run is longer than its group, blocks cover it, and a block has no warp
// that is without a run, be it to replay or to fold.
TEST(StepKernel, RunsSuitTheHeadsOfAGroup) {
  constexpr std::pair<DType, ReadCopyFormat> kStates[] = {{DType::kF32, ReadCopyFormat::kNone},
                                                          {DType::kBF16, ReadCopyFormat::kNone},
                                                          {DType::kF32, ReadCopyFormat::kNvfp4}};
  for (const std::int64_t head_dim : {16, 32, 64, 80, 112, 128}) {
    for (const std::int64_t groups : {1, 4, 8, 16, 32, 64}) {
      for (const int drafts : {1, 4, 16}) {
        for (const auto& [checkpoint, copy] : kStates) {
          for (const std::int64_t rows : {0, 1, 8, 64, 512}) {
            Mamba2CudaParams p = mamba2_params(rows, drafts);
            p.head_dim = head_dim;
            p.groups = groups;
            p.checkpoint = checkpoint;
            p.copy.format = copy;
            const Mamba2Tuning streamed{.kernel = StepKernel::kStreamed};
            const auto config = choose_mamba2_config(p, device_of(90), streamed).value();
            const Mamba2Launch& launch = config.launch;
            ASSERT_LE(launch.tiles_per_run, launch.tiles_per_group) << config.to_string();
            const int before_last = launch.warps - 1;
            ASSERT_LT(before_last * launch.tiles_per_run, launch.tiles_per_group)
                << config.to_string();
            ASSERT_LT(before_last * launch.fold_tiles_per_run, launch.tiles_per_group)
                << config.to_string();
            const auto shorter = std::min(launch.tiles_per_run, launch.fold_tiles_per_run);
            ASSERT_GE(shorter, 1);
            ASSERT_GE(config.blocks_per_group * launch.warps * shorter, launch.tiles_per_group);
          }
        }
      }
    }
  }
}

// Runs shorter than a head where there are few, and folds that do not last as long as the step.
TEST(StepKernel, FewRowsAreCutIntoShorterRuns) {
  const auto launch_of = [](std::int64_t rows) {
    return choose_mamba2_config(mamba2_params(rows), device_of(90)).value().launch;
  };
  EXPECT_EQ(launch_of(256).tiles_per_run, launch_of(256).tiles_per_head);
  EXPECT_LT(launch_of(64).tiles_per_run, launch_of(64).tiles_per_head);
  EXPECT_LT(launch_of(64).fold_tiles_per_run, launch_of(256).fold_tiles_per_run);
}

TEST(StepKernel, GroupsThatExceedAGridAreRefused) {
  Mamba2CudaParams p = mamba2_params(1);
  p.heads = 1 << 24;
  p.groups = 1;
  EXPECT_TRUE(refused(choose_mamba2_config(p, device_of(90)).status(), StatusCode::kUnsupported,
                      {"4194304 blocks", "65535"}));
  p.groups = 1 << 20;
  EXPECT_TRUE(choose_mamba2_config(p, device_of(90)).ok());
}

TEST(StepKernel, DraftsOfTwoByteStatesHaveThreeStages) {
  Mamba2CudaParams p = mamba2_params(256, 4);
  EXPECT_EQ(choose_mamba2_config(p, device_of(90)).value().launch.stages, 2);
  p.checkpoint = DType::kBF16;
  const Mamba2CudaConfig config = choose_mamba2_config(p, device_of(90)).value();
  EXPECT_EQ(config.launch.stages, 3);
  EXPECT_EQ(config.blocks_per_multiprocessor, 3);
}

// What a head needs is prepared once for eight tiles, but not by blocks of one or two warps.
TEST(StepKernel, DraftsHaveLongRunsWhereABlockHasSeveral) {
  const auto launch = [](std::int64_t value_heads, int drafts, DType checkpoint) {
    DeltaRuleCudaParams p = delta_rule_params(256, false, drafts);
    p.shape.value_heads = value_heads;
    p.checkpoint = checkpoint;
    const DeltaRuleCudaConfig config = choose_delta_rule_config(p, device_of(90)).value();
    return std::pair<int, int>(config.launch.warps, config.launch.tiles);
  };
  for (const int drafts : {4, 8}) {
    EXPECT_EQ(launch(64, drafts, DType::kF32), std::pair(4, 8));
    EXPECT_EQ(launch(48, drafts, DType::kF32), std::pair(3, 8));
    EXPECT_EQ(launch(32, drafts, DType::kF32), std::pair(4, 4));
  }
  EXPECT_EQ(launch(64, 8, DType::kBF16), std::pair(4, 8));
  EXPECT_EQ(launch(64, 4, DType::kBF16), std::pair(4, 4));
  EXPECT_EQ(launch(32, 8, DType::kBF16), std::pair(4, 4));
}
// A block has a head of few rows, too, where it has but four warps: two would prepare it twice.
TEST(StepKernel, BlocksOfDraftsHaveAWholeHeadOfChannels) {
  for (const std::int64_t rows : {16, 64, 256}) {
    const DeltaRuleTuning tuning{.kernel = StepKernel::kStreamed};
    const auto config =
        choose_delta_rule_config(delta_rule_params(rows, true, 4), device_of(90), tuning).value();
    EXPECT_EQ(config.blocks_per_key, 1) << config.to_string();
  }
}

// The blocks of a grid's places are each row's blocks, once, whatever the tail.
TEST(StepKernel, PlacesOfATailAreItsRowsBlocks) {
  for (const std::int64_t rows : {1, 7, 65535}) {
    for (const std::int64_t tail_rows : {0, 1, 3, 7, 100}) {
      for (const std::int64_t parts : {1, 2, 3, 4}) {
        const GridTail tail = grid_tail(rows, tail_rows, parts);
        const std::int64_t places = tail.places(rows);
        ASSERT_LE(places, 65535);
        std::int32_t row = 0;
        std::int32_t block = 0;
        for (std::int64_t z = 0; z < places; ++z) {
          for (std::int32_t x = 0; x < 3; ++x) {
            const GridPlace at = grid_place(tail, x, static_cast<std::int32_t>(z), 3);
            if (at.row != row) {
              ASSERT_GE(block, row >= tail.first_row ? 3 * parts : 3);
              row = at.row;
              block = 0;
            }
            ASSERT_EQ(at.in_tail, row >= tail.first_row);
            ASSERT_EQ(at.block, block++);
          }
        }
        ASSERT_EQ(row, rows - 1);
      }
    }
  }
  EXPECT_TRUE(grid_tail(65535, 1, 2).empty());  // no room
  EXPECT_TRUE(grid_tail(100'000, 1, 1).empty());
}

TEST(StepKernel, ManyRowsWithReadCopiesHaveATail) {
  const auto tail_of = [](std::int64_t rows, ReadCopyFormat format) {
    Mamba2CudaParams p = mamba2_params(rows);
    p.copy.format = format;
    const Mamba2CudaConfig config = choose_mamba2_config(p, device_of(90)).value();
    EXPECT_EQ(config.to_string().find("from row") == std::string::npos, config.launch.tail.empty());
    return config.launch;
  };
  const Mamba2Launch many = tail_of(512, ReadCopyFormat::kNvfp4);
  EXPECT_FALSE(many.tail.empty());
  EXPECT_LT(many.tail_tiles_per_run, many.tiles_per_run);
  EXPECT_TRUE(tail_of(16, ReadCopyFormat::kNvfp4).tail.empty());
  EXPECT_TRUE(tail_of(512, ReadCopyFormat::kNone).tail.empty());
}

// Two tiles of two-byte states, where they cost no block and a run has several fills.
TEST(StepKernel, LongRunsOfTwoByteTilesHaveTwoToAStage) {
  const auto config_of = [](std::int64_t rows, DType checkpoint, bool channel_decay) {
    DeltaRuleCudaParams p = delta_rule_params(rows, channel_decay);
    p.checkpoint = checkpoint;
    return choose_delta_rule_config(p, device_of(90)).value();
  };
  const DeltaRuleCudaConfig two = config_of(256, DType::kBF16, false);
  EXPECT_EQ(two.launch.fill_tiles, 2);
  EXPECT_EQ(two.blocks_per_multiprocessor * two.launch.warps, 16);
  EXPECT_NE(two.to_string().find("2 to a stage"), std::string::npos) << two.to_string();
  EXPECT_EQ(config_of(64, DType::kBF16, false).launch.fill_tiles, 1);  // runs of two
  EXPECT_EQ(config_of(256, DType::kF32, false).launch.fill_tiles, 1);
  EXPECT_EQ(config_of(256, DType::kBF16, true).launch.fill_tiles, 1);
}

// Warps that a key head's runs do not fill are left out, not left idle.
TEST(StepKernel, BlocksShareTheRunsOfAKeyHeadEvenly) {
  for (const std::int64_t value_heads : {16, 32, 48, 64, 80, 128}) {
    for (const DType checkpoint : {DType::kF32, DType::kBF16}) {
      DeltaRuleCudaParams p = delta_rule_params(256, false);
      p.shape.value_heads = value_heads;
      p.checkpoint = checkpoint;
      const DeltaRuleCudaConfig config = choose_delta_rule_config(p, device_of(90)).value();
      EXPECT_LT(config.blocks_per_key * config.launch.warps - config.launch.runs_per_key,
                config.blocks_per_key)
          << value_heads << " value heads: " << config.to_string();
    }
  }
}

TEST(StepKernel, WhatHasNoDirectKernelIsStreamedWhateverIsAsked) {
  const Mamba2Tuning direct{.kernel = StepKernel::kDirect};
  Mamba2CudaParams m = mamba2_params(1);
  m.state_size = 256;
  EXPECT_FALSE(takes_direct(m, direct));
  m = mamba2_params(1);
  m.copy.format = ReadCopyFormat::kNvfp4;
  EXPECT_FALSE(takes_direct(m, direct));
  EXPECT_FALSE(takes_direct(mamba2_params(1, 9), direct));
  DeltaRuleCudaParams d = delta_rule_params(1, true);
  d.activation = DType::kF32;
  EXPECT_FALSE(takes_direct(d, {.kernel = StepKernel::kDirect}));
}

TEST(StepKernel, OneCanBeForced) {
  EXPECT_FALSE(takes_direct(mamba2_params(1), {.kernel = StepKernel::kStreamed}));
  EXPECT_TRUE(takes_direct(mamba2_params(256), {.kernel = StepKernel::kDirect}));
  force_step_kernel(StepKernel::kStreamed);
  EXPECT_FALSE(takes_direct(mamba2_params(1)));
  EXPECT_FALSE(takes_direct(delta_rule_params(1, false)));
  force_step_kernel(StepKernel::kDirect);
  EXPECT_TRUE(takes_direct(delta_rule_params(256, true)));
  force_step_kernel(StepKernel::kAuto);
  EXPECT_TRUE(takes_direct(mamba2_params(1)));
}

TEST(StepKernel, TheEnvironmentsNameIsChecked) {
  const char* before = std::getenv("REPLAYSSM_CUDA_STEP");
  const std::string saved = before == nullptr ? "" : before;
  setenv("REPLAYSSM_CUDA_STEP", "fast", 1);
  EXPECT_TRUE(refused(requested_step_kernel(), StatusCode::kUnsupported,
                      {"REPLAYSSM_CUDA_STEP", "'fast'", "streamed or direct"}));
  setenv("REPLAYSSM_CUDA_STEP", "direct", 1);
  EXPECT_EQ(requested_step_kernel().value(), StepKernel::kDirect);
  setenv("REPLAYSSM_CUDA_STEP", "", 1);
  EXPECT_EQ(requested_step_kernel().value(), StepKernel::kAuto);
  setenv("REPLAYSSM_CUDA_STEP", saved.c_str(), 1);
}

// Blocks of two launches have room together, or the second one waits for the first.
TEST(StepKernel, LaunchesOverlapWhereTwoFindRoom) {
  const auto overlaps = [](std::int64_t rows, int compute_capability) {
    return choose_mamba2_config(mamba2_params(rows), device_of(compute_capability))
        .value()
        .overlaps;
  };
  EXPECT_TRUE(overlaps(1, 90));
  EXPECT_TRUE(overlaps(1, 100));
  EXPECT_FALSE(overlaps(1, 80));
  EXPECT_FALSE(overlaps(8, 90));
  EXPECT_FALSE(overlaps(256, 90));
}

// Every run of a block is one head's, and no warp is without one.
TEST(StepKernel, DirectBlocksHaveNoRest) {
  for (const std::int64_t dim : {16, 48, 64, 80, 128, 256}) {
    Mamba2CudaParams m = mamba2_params(1);
    m.head_dim = dim;
    const Mamba2CudaConfig config = choose_mamba2_config(m, device_of(90)).value();
    EXPECT_EQ(config.launch.runs_per_group, config.blocks_per_group * config.launch.warps);
    EXPECT_EQ(config.launch.runs_per_group, 8 * (dim / 8));
    DeltaRuleCudaParams d = delta_rule_params(1, false);
    d.shape.value_dim = dim;
    const DeltaRuleCudaConfig delta = choose_delta_rule_config(d, device_of(90)).value();
    EXPECT_EQ(delta.launch.runs_per_head % delta.launch.warps, 0) << dim;
  }
}

}  // namespace
}  // namespace replayssm::cuda
