// Steps of layers with read copies: Mamba-2, Gated DeltaNet and Kimi Delta Attention.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "ops/delta_rule_cases.h"
#include "ops/mamba2_cases.h"
#include "support/delta_rule_harness.h"
#include "support/mamba2_harness.h"
#include "support/pool_access.h"
#include "support/read_copy_properties.h"
#include "support/rewinds.h"
#include "support/saves.h"
#include "support/step_properties.h"

namespace replayssm::testing {
namespace {

constexpr ReadCopyFormat kFormats[] = {ReadCopyFormat::kFp8E4M3, ReadCopyFormat::kInt8,
                                       ReadCopyFormat::kNvfp4};

std::string format_name(ReadCopyFormat format) {
  return format == ReadCopyFormat::kFp8E4M3 ? "fp8" : to_string(format);
}

template <typename Case>
Case named(Case c) {
  c.name += std::string("_") + format_name(c.read_copy) + "_" + to_string(c.checkpoint) + "_" +
            to_string(c.activation);
  return c;
}

/// Every format in every combination of types, and shapes that fill no tile or block.
std::vector<Mamba2Case> mamba2_copies() {
  std::vector<Mamba2Case> cases;
  for (const ReadCopyFormat format : kFormats) {
    for (const DType checkpoint : {DType::kF32, DType::kBF16}) {
      for (const DType activation : {DType::kF32, DType::kBF16}) {
        Mamba2Case c = small_case("conv", 8, 4);
        c.read_copy = format;
        c.shape = {4, 24, 48, 2};
        c.checkpoint = checkpoint;
        c.activation = activation;
        c.conv_width = 4;
        c.layers = 2;
        cases.push_back(named(c));
      }
    }
    for (const std::int64_t p : {8, 16, 64, 80}) {
      Mamba2Case c =
          small_case(std::string("P").append(std::to_string(p)), p == 64 ? 16 : 7, p == 16 ? 1 : 5);
      c.read_copy = format;
      c.shape = {p == 8 ? 3 : 2, p, p == 64 ? 128 : p == 80 ? 256 : 16, 1};
      c.strided = p == 80;
      c.z = p == 8;
      cases.push_back(named(c));
    }
  }
  return cases;
}

std::vector<DeltaCase> delta_copies() {
  std::vector<DeltaCase> cases;
  for (const DeltaFamily family : {DeltaFamily::kGated, DeltaFamily::kKimi}) {
    const bool channels = family == DeltaFamily::kKimi;
    for (const ReadCopyFormat format : kFormats) {
      for (const DType type : {DType::kF32, DType::kBF16}) {
        DeltaCase c = small_delta_case(family, "conv", 8, 4);
        c.read_copy = format;
        c.checkpoint = type;
        c.activation = type;
        c.conv_width = 4;
        c.layers = 2;
        cases.push_back(named(c));
      }
      // Tiles of 32, 16 and 8 columns; rows of 8 to 128 elements.
      for (const auto& [k, v] : {std::pair{24, 56}, {8, 8}, {128, 64}, {16, 40}}) {
        DeltaCase c = small_delta_case(
            family,
            std::string("K").append(std::to_string(k)).append("_V").append(std::to_string(v)),
            k == 8 ? 16 : 7, 5);
        c.read_copy = format;
        c.shape = {channels ? 2 : 1, 2, k, v, channels};
        if (k == 16) c.checkpoint = DType::kBF16;
        cases.push_back(named(c));
      }
    }
  }
  return cases;
}

class Mamba2Copies : public ::testing::TestWithParam<Mamba2Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, Mamba2Copies, ::testing::ValuesIn(mamba2_copies()),
                         [](const auto& test) { return test.param.name; });
class DeltaCopies : public ::testing::TestWithParam<DeltaCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, DeltaCopies, ::testing::ValuesIn(delta_copies()),
                         [](const auto& test) { return test.param.name; });

TEST_P(Mamba2Copies, OutputsReadTheCopyAndNothingElseDoes) {
  expect_outputs_read_the_copy(Mamba2Model(GetParam()));
}
TEST_P(DeltaCopies, OutputsReadTheCopyAndNothingElseDoes) {
  expect_outputs_read_the_copy(DeltaModel(GetParam()));
}

/// One case per format, for what the format can hardly matter to.
Mamba2Case copied_case(ReadCopyFormat format) {
  Mamba2Case c = small_case("copied", 8, 4);
  c.read_copy = format;
  c.conv_width = 4;
  c.layers = 2;
  c.checkpoint = format == ReadCopyFormat::kInt8 ? DType::kBF16 : DType::kF32;
  return c;
}
DeltaCase copied_delta_case(ReadCopyFormat format) {
  DeltaCase c = small_delta_case(
      format == ReadCopyFormat::kInt8 ? DeltaFamily::kKimi : DeltaFamily::kGated, "copied", 8, 4);
  c.read_copy = format;
  c.conv_width = 4;
  c.layers = 2;
  return c;
}

template <typename Model>
void expect_steps_depend_on_their_rows_only(const Model& model) {
  expect_chunking_changes_no_bit(model);
  expect_packed_prompts_equal_their_own_runs(model);
  expect_row_alone_equals_row_among_others(model);
  expect_tentative_step_writes_its_own_places_only(model);
  expect_padding_touches_nothing(model);
  expect_append_that_wraps_is_stable(model);
  expect_recycled_memory_is_never_read(model);
}
TEST(ReadCopySteps, DependOnTheirRowsOnly) {
  for (const ReadCopyFormat format : kFormats) {
    expect_steps_depend_on_their_rows_only(Mamba2Model(copied_case(format)));
    expect_steps_depend_on_their_rows_only(DeltaModel(copied_delta_case(format)));
  }
}

// A poisoned page holds no copy: before the first flush nothing of it is read, and truncated and
// reset sequences do not see what is left.
TEST(ReadCopySteps, NoCopyIsReadBeforeThereIsOne) {
  for (const ReadCopyFormat format : kFormats) {
    Mamba2Case c = copied_case(format);
    c.rewindable = true;
    const Mamba2Model model(c);
    StatePool pool = model.make_pool(2);
    Mamba2Runner runner(model, pool, {});
    Mamba2Case exact = c;
    exact.read_copy = ReadCopyFormat::kNone;
    for (int again = 0; again < 2; ++again) {
      ASSERT_TRUE(is_ok(pool.reset(0)));
      SequenceOracle oracle(model);
      const std::vector<TokenId> tokens = names(1, 0, 4);
      const StepOutput output = runner.step({tentative(0, tokens, 3)});
      expect_close(output[0], oracle.run(tokens, 3), exact, "first step");
      runner.step({committed(0, names(2, 0, 4))});
    }
  }
}

// Teeth: a code that changes shows in tentative outputs and not in the checkpoint; a checkpoint
// that changes shows in the outputs from the next flush on.
TEST(ReadCopySteps, OutputsSeeTheCopyAndFlushesTheCheckpoint) {
  for (const ReadCopyFormat format : kFormats) {
    Mamba2Case c = small_case("teeth", 8, 2);
    c.read_copy = format;
    const Mamba2Model model(c);
    for (const CpuContext& context : Contexts({1})) {
      StatePool pool = model.make_pool(3);
      Mamba2Runner runner(model, pool, context);
      for (std::int32_t slot = 0; slot < 3; ++slot) {
        ASSERT_TRUE(is_ok(pool.reset(slot)));
        runner.step({committed(slot, names(1, 0, 5))});
      }
      pool.impl().read_copy(0, 1).codes[3] ^= 1;
      const Field& checkpoint = pool.impl().layout(0).field("checkpoint");
      std::byte* state = pool.impl().field(0, 2, checkpoint);
      store_element(checkpoint.dtype, state, 3, load_element(checkpoint.dtype, state, 3) + 0.5f);
      const auto step = [&](std::int64_t position) {
        std::vector<RowSpec> rows;
        for (std::int32_t slot = 0; slot < 3; ++slot) {
          rows.push_back(tentative(slot, names(1, position, 1), 1));
        }
        return runner.step(rows);
      };
      const StepOutput before = step(5);
      EXPECT_FALSE(same_bits(before[1][0], before[0][0]));
      EXPECT_TRUE(same_bits(before[2][0], before[0][0]));
      for (std::int32_t slot = 0; slot < 3; ++slot) ASSERT_TRUE(is_ok(pool.force_flush(slot)));
      const StepOutput after = step(6);
      EXPECT_TRUE(same_bits(after[1][0], after[0][0]));
      EXPECT_FALSE(same_bits(after[2][0], after[0][0]));
      EXPECT_TRUE(same_bytes(checkpoint_bytes(pool, 0, 1), checkpoint_bytes(pool, 0, 0)));
    }
  }
}

// The error of an output is at most that of the state's elements times |C|: the decay is at most 1.
TEST(ReadCopySteps, OutputErrorsAreWithinTheFormatsBound) {
  for (const ReadCopyFormat format : kFormats) {
    Mamba2Case c = small_case("bound", 8, 2, 1);
    c.shape = {2, 24, 64, 1};
    c.read_copy = format;
    const Mamba2Model model(c);
    StatePoolOptions without = c.options(1);
    without.layers[0].read_copy = ReadCopyFormat::kNone;
    StatePool pool = model.make_pool(1);
    StatePool exact = model.make_pool(without);
    Mamba2Runner runner(model, pool, {});
    Mamba2Runner exact_runner(model, exact, {});
    ASSERT_TRUE(is_ok(pool.reset(0)));
    ASSERT_TRUE(is_ok(exact.reset(0)));
    runner.step({committed(0, names(1, 0, 30))});
    exact_runner.step({committed(0, names(1, 0, 30))});
    const ReadCopyError error = read_copy_error(format);
    const std::vector<float> state = checkpoint_values(pool, 0, 0);
    const auto amax = [&](std::int64_t row, std::int64_t rows, std::int64_t first,
                          std::int64_t count) {
      double out = 0;
      for (std::int64_t r = row; r < row + rows; ++r) {
        for (std::int64_t n = first; n < first + count; ++n) {
          const float x = state[static_cast<std::size_t>(r * 64 + n)];
          out = std::max(out, std::abs(static_cast<double>(x)));
        }
      }
      return out;
    };
    double largest = 0;
    for (std::int64_t i = 0; i < 20; ++i) {
      const std::vector<TokenId> token = names(1, 100 + i, 1);
      const std::vector<float> u = model.inputs(0, token[0]).u;  // x, B, C
      const StepOutput got = runner.step({tentative(0, token, 0)});
      const StepOutput want = exact_runner.step({tentative(0, token, 0)});
      for (std::int64_t row = 0; row < 2 * 24; ++row) {
        const std::int64_t in_head = row % 24;
        const std::int64_t tile = row - in_head + in_head / 16 * 16;
        double bound = 1e-5;
        for (std::int64_t n = 0; n < 64; ++n) {
          const double of_scale =
              format == ReadCopyFormat::kNvfp4
                  ? amax(tile, std::min<std::int64_t>(16, 24 - tile % 24), 0, 64)
                  : amax(row, 1, 0, 64);
          const double x = state[static_cast<std::size_t>(row * 64 + n)];
          const double cn = u[static_cast<std::size_t>(2 * 24 + 64 + n)];
          bound += std::abs(cn) * error.bound(x, amax(row, 1, n / 16 * 16, 16), of_scale);
        }
        const auto at = static_cast<std::size_t>(row);
        const double difference =
            std::abs(static_cast<double>(got[0][0][at]) - static_cast<double>(want[0][0][at]));
        EXPECT_LE(difference, bound) << to_string(format) << ", row " << row;
        largest = std::max(largest, difference / bound);
      }
    }
    EXPECT_GT(largest, 0.02) << to_string(format) << ": nothing was rounded";
  }
}

// ---- The pool's own operations ----

TEST(ReadCopyPool, SavedStatesContinueBitForBit) {
  for (const ReadCopyFormat format : kFormats) {
    expect_same_geometry_is_bit_equal(Mamba2Model(copied_case(format)));
    expect_same_geometry_is_bit_equal(DeltaModel(copied_delta_case(format)));
  }
}

TEST(ReadCopyPool, LoadFoldsRecordsThatDoNotFit) {
  expect_other_windows_keep_or_fold(Mamba2Model(copied_case(ReadCopyFormat::kNvfp4)));
}

// The image has no copy in it, so any pool of the model loads it and makes its own.
TEST(ReadCopyPool, ImagesDoNotDependOnTheCopy) {
  const Mamba2Model model(copied_case(ReadCopyFormat::kNone));
  StatePool plain = model.make_pool(1);
  Mamba2Runner runner(model, plain, {});
  for (const std::int64_t folded : {0, 5}) {
    for (const std::int64_t live : {0, 3, 8}) {
      prepare(runner, 0, folded, live);
      const std::vector<std::byte> image = plain.save(0).value();
      for (const ReadCopyFormat format : kFormats) {
        for (const int window : {8, 4}) {  // 4: some are folded
          Mamba2Case c = copied_case(ReadCopyFormat::kNone);
          c.read_copy = format;
          c.limits.window = window;
          c.limits.draft_capacity = 4;
          const Mamba2Model copied(c);
          StatePool pool = copied.make_pool(2);
          for (const CpuContext& context : Contexts()) {
            ASSERT_TRUE(is_ok(pool.load(context, 1, image)));
            const Cursor cursor = pool.cursor(1).value();
            if (cursor.checkpoint_position > 0) {
              expect_copy_of_checkpoint(pool, 1, to_string(format));
            }
            if (cursor.checkpoint_position == folded) {
              EXPECT_TRUE(same_bytes(pool.save(1).value(), image)) << to_string(format);
            }
          }
        }
      }
    }
  }
}

TEST(ReadCopyPool, MaterializeTruncateAndCopyCarryIt) {
  for (const ReadCopyFormat format : {ReadCopyFormat::kInt8, ReadCopyFormat::kNvfp4}) {
    Mamba2Case c = copied_case(format);
    c.limits = {6, 3};
    c.rewindable = true;
    const Mamba2Model model(c);
    expect_chains_of_rewinds(model);
    expect_copy_moves_ring_and_cursor(model);
    for (const CpuContext& context : Contexts()) {
      StatePool pool = model.make_pool(4);
      Mamba2Runner runner(model, pool, context);
      for (const std::int64_t folded : {0, 5}) {
        prepare(runner, 0, folded, 5);
        for (std::int64_t prefix = folded; prefix <= folded + 5; ++prefix) {
          ASSERT_TRUE(is_ok(pool.materialize(context, 0, prefix, 1)));
          if (prefix > 0) expect_copy_of_checkpoint(pool, 1, "materialized");
          ASSERT_TRUE(is_ok(pool.copy(0, 2)));
          ASSERT_TRUE(is_ok(pool.truncate(2, prefix)));
          if (folded > 0) expect_copy_of_checkpoint(pool, 2, "copied and truncated");
        }
      }
    }
  }
}

TEST(ReadCopyPool, TrafficReadsTheCopyBetweenFlushes) {
  Mamba2Case c = small_case("traffic", 4, 2);
  c.read_copy = ReadCopyFormat::kNvfp4;
  const Mamba2Model model(c);
  StatePool pool = model.make_pool(1);
  Mamba2Runner runner(model, pool, {});
  const SlotBytes bytes = StatePool::bytes_per_slot(c.options(1)).value();
  const auto state = static_cast<std::int64_t>(bytes.checkpoint);
  const auto copy = static_cast<std::int64_t>(bytes.read_copy);
  const auto expect = [&](RowSpec row, std::int64_t read, std::int64_t written,
                          std::int64_t copy_read, std::int64_t copy_written) {
    pool.reset_traffic();
    runner.step({std::move(row)});
    const StateTraffic& t = pool.traffic();
    EXPECT_EQ(t.checkpoint_read, read);
    EXPECT_EQ(t.checkpoint_written, written);
    EXPECT_EQ(t.read_copy_read, copy_read);
    EXPECT_EQ(t.read_copy_written, copy_written);
  };
  ASSERT_TRUE(is_ok(pool.reset(0)));
  expect(tentative(0, names(1, 0, 1), 0), 0, 0, 0, 0);
  expect(committed(0, names(1, 0, 3)), 0, state, 0, copy);
  expect(tentative(0, names(1, 3, 2), 2), 0, 0, copy, 0);
  expect(tentative(0, names(1, 5, 2), 2), 0, 0, copy, 0);
  expect(tentative(0, names(1, 7, 2), 1), state, state, 0, copy);
}

TEST(ReadCopyPool, ExplainNamesTheFormat) {
  for (const ReadCopyFormat format : kFormats) {
    const Mamba2Model mamba2(copied_case(format));
    StatePool pool = mamba2.make_pool(1);
    const std::string text = mamba2_explain({}, pool, 1).value();
    EXPECT_NE(text.find(to_string(format)), std::string::npos) << text;
    DeltaCase c = copied_delta_case(format);
    c.family = DeltaFamily::kGated;
    c.shape.channel_decay = false;
    StatePool delta = DeltaModel(c).make_pool(1);
    const std::string delta_text = gated_delta_net_explain({}, delta, 0).value();
    EXPECT_NE(delta_text.find(to_string(format)), std::string::npos) << delta_text;
  }
  StatePool plain = Mamba2Model(copied_case(ReadCopyFormat::kNone)).make_pool(1);
  EXPECT_EQ(mamba2_explain({}, plain, 0).value().find("copy"), std::string::npos);
}

}  // namespace
}  // namespace replayssm::testing
