// The state pool with layers of the delta rule: rewinds, copies, saved states, sizes, refusals.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ops/delta_rule_cases.h"
#include "support/delta_rule_harness.h"
#include "support/mamba2_harness.h"
#include "support/pool_access.h"
#include "support/rewinds.h"
#include "support/saves.h"

namespace replayssm::testing {
namespace {

std::vector<DeltaCase> pool_cases(int window) {
  std::vector<DeltaCase> cases;
  for (const DeltaFamily family : kDeltaFamilies) {
    for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
      DeltaCase c = small_delta_case(family, to_string(type), window, 3);
      c.checkpoint = c.activation = type;
      c.conv_width = 4;
      c.layers = 2;
      c.rewindable = true;
      cases.push_back(std::move(c));
    }
  }
  return cases;
}

const auto kName = [](const auto& test) { return test.param.name; };

class DeltaRewind : public ::testing::TestWithParam<DeltaCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, DeltaRewind, ::testing::ValuesIn(pool_cases(6)), kName);

TEST_P(DeltaRewind, C14_MaterializeEveryPrefix) {
  expect_materialize_reaches_every_prefix(DeltaModel(GetParam()));
}
// C33, C35, C62: position and state change together, for exactly the kept length.
TEST_P(DeltaRewind, C33_TruncateToEveryPrefix) {
  expect_truncate_reaches_every_prefix(DeltaModel(GetParam()));
}
TEST_P(DeltaRewind, ChainsOfRewinds) { expect_chains_of_rewinds(DeltaModel(GetParam())); }
TEST_P(DeltaRewind, C01_CopyMovesRingAndCursor) {
  expect_copy_moves_ring_and_cursor(DeltaModel(GetParam()));
}

class DeltaSave : public ::testing::TestWithParam<DeltaCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, DeltaSave, ::testing::ValuesIn(pool_cases(8)), kName);

TEST_P(DeltaSave, C61_SameGeometryIsBitEqual) {
  expect_same_geometry_is_bit_equal(DeltaModel(GetParam()));
}
TEST_P(DeltaSave, C61_OtherWindowsKeepOrFoldTheRecords) {
  expect_other_windows_keep_or_fold(DeltaModel(GetParam()));
}

// Images of one family or geometry are refused by pools of another, both values named.
TEST(DeltaSave, ForeignImagesAreRefused) {
  const DeltaModel gated(small_delta_case(DeltaFamily::kGated, "save", 8, 3));
  StatePool source = gated.make_pool(1);
  DeltaRunner runner(gated, source, {});
  ASSERT_TRUE(is_ok(source.reset(0)));
  runner.step({committed(0, names(1, 0, 5))});
  const std::vector<std::byte> image = source.save(0).value();

  StatePool kimi = DeltaModel(small_delta_case(DeltaFamily::kKimi, "save", 8, 3)).make_pool(1);
  EXPECT_TRUE(refused(kimi.load({}, 0, image), StatusCode::kInvalidArgument, {"family", "1", "2"}));
  DeltaCase other = small_delta_case(DeltaFamily::kGated, "save", 8, 3);
  other.shape.value_dim = 32;
  StatePool wide = DeltaModel(other).make_pool(1);
  EXPECT_TRUE(
      refused(wide.load({}, 0, image), StatusCode::kInvalidArgument, {"value_dim", "24", "32"}));
}

// C36: one size function, exact, for both families; draft head-room counts.
TEST(DeltaSizing, C36_SizesAreExact) {
  for (const DeltaFamily family : kDeltaFamilies) {
    for (const DType type : {DType::kF32, DType::kBF16}) {
      for (int draft = 1; draft <= 5; ++draft) {
        DeltaCase c = small_delta_case(family, "size", 8, draft);
        c.checkpoint = c.activation = type;
        c.conv_width = 4;
        const Result<SlotBytes> bytes = StatePool::bytes_per_slot(c.options(1));
        ASSERT_TRUE(is_ok(bytes));
        const std::size_t element = size_of(type);
        const auto places = static_cast<std::size_t>(8 + draft);
        const std::size_t key_heads = family == DeltaFamily::kGated ? 2 : 4;
        const std::size_t decays = family == DeltaFamily::kGated ? 1 : 16;
        // With a deferred decay for eight columns.
        const bool defers = family == DeltaFamily::kGated && type == DType::kF32;
        EXPECT_EQ(bytes->checkpoint, 4 * 16 * 24 * element + (defers ? 4 * 24 / 8 * 4 : 0));
        EXPECT_EQ(bytes->record_ring, places * (key_heads * (16 * element + 4) +
                                                4 * (2 * 24 * element + 4 * decays + 4)));
        EXPECT_EQ(bytes->conv_ring,
                  static_cast<std::size_t>(3 + draft) * (2 * key_heads * 16 + 4 * 24) * element);
        StatePoolOptions options = c.options(3);
        AlignedBytes memory(bytes->total * 3);
        options.storage = memory.span();
        EXPECT_TRUE(is_ok(StatePool::create(options)));
      }
    }
  }
}

TEST(DeltaShapes, ImpossibleOnesAreRefusedNamingBothValues) {
  const auto create = [](const RecurrenceShape& shape) {
    StatePoolOptions options;
    options.layers = {{shape, {}}};
    options.slots = 1;
    return StatePool::create(options);
  };
  using G = GatedDeltaNetShape;
  using K = KimiDeltaAttentionShape;
  constexpr StatusCode kBad = StatusCode::kInvalidArgument;
  EXPECT_TRUE(is_ok(create(G{2, 4, 16, 24})));
  EXPECT_TRUE(is_ok(create(K{4, 16, 24})));
  EXPECT_TRUE(refused(create(G{3, 4, 16, 16}), kBad, {"value_heads is 4", "key_heads 3"}));
  EXPECT_TRUE(refused(create(G{4, 2, 16, 16}), kBad, {"value_heads is 2", "key_heads 4"}));
  EXPECT_TRUE(refused(create(G{0, 4, 16, 16}), kBad, {"key_heads is 0", "1..65536"}));
  EXPECT_TRUE(refused(create(G{1, 65537, 16, 16}), kBad, {"value_heads is 65537", "65536"}));
  EXPECT_TRUE(refused(create(G{2, 4, 12, 16}), kBad, {"key_dim is 12", "multiple of 8"}));
  EXPECT_TRUE(refused(create(G{2, 4, 16, 264}), kBad, {"value_dim is 264", "8..256"}));
  EXPECT_TRUE(refused(create(K{0, 16, 16}), kBad, {"heads is 0", "1..65536"}));
  EXPECT_TRUE(refused(create(K{4, 0, 16}), kBad, {"key_dim is 0", "8..256"}));
  EXPECT_TRUE(refused(create(K{4, 16, 20}), kBad, {"value_dim is 20", "multiple of 8"}));
}

// A step or parameters of another family than the layer's are refused with both named.
TEST(DeltaShapes, OpsOfAnotherFamilyAreRefused) {
  constexpr StatusCode kBad = StatusCode::kFailedPrecondition;
  const DeltaModel gated(small_delta_case(DeltaFamily::kGated, "family", 8, 3));
  const DeltaModel kimi(small_delta_case(DeltaFamily::kKimi, "family", 8, 3));
  const Mamba2Model mamba(small_case("family", 8, 3));
  StatePool pool = gated.make_pool(1);
  ASSERT_TRUE(is_ok(pool.reset(0)));
  Result<Step> step = pool.begin_step(step_rows(std::vector{committed(0, names(1, 0, 1))}));
  ASSERT_TRUE(is_ok(step));
  EXPECT_TRUE(refused(kimi_delta_attention_step({}, pool, 0, *step, {}, {}), kBad,
                      {"gated_delta_net", "kimi_delta_attention"}));
  Mamba2Operands operands;
  std::vector<float> x(64);
  operands.x = TensorView::contiguous(x.data(), DType::kF32, {1, 4, 8});
  EXPECT_TRUE(
      refused(mamba2_step({}, pool, 0, *step, {}, operands), kBad, {"gated_delta_net", "mamba2"}));
  EXPECT_TRUE(refused(pool.set_mamba2_a(0, x), kBad, {"gated_delta_net", "mamba2"}));
  EXPECT_TRUE(refused(mamba2_explain({}, pool, 0), kBad, {"gated_delta_net", "mamba2"}));
  StatePool other = mamba.make_pool(1);
  EXPECT_TRUE(refused(gated_delta_net_explain({}, other, 0), kBad, {"mamba2", "gated_delta_net"}));
  EXPECT_TRUE(refused(gated_delta_net_explain({}, pool, 1), StatusCode::kInvalidArgument,
                      {"layer 1", "0..0"}));
}

}  // namespace
}  // namespace replayssm::testing
