// What read copies change and what they do not, for any recurrence family: outputs of tentative
// rows are those of the copy that is stored, the copy is that of the checkpoint, and the checkpoint
// is that of a pool without copies.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "state/read_copy.h"
#include "support/pool_access.h"
#include "support/step_harness.h"

namespace replayssm::testing {

/// A copy of `heads` heads, decoded, in the order of the family's reference: (heads, rows, width)
/// of Mamba-2, (heads, width, rows) of the delta rule.
inline std::vector<double> read_copy_values(const ReadCopy& copy, std::int64_t heads) {
  const ReadCopyShape& s = copy.shape;
  const bool by_rows = s.checkpoint_tile == 0;
  std::vector<float> values(static_cast<std::size_t>(heads * s.rows * s.width));
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t row = 0; row < s.rows; row += kReadCopyTile) {
      decode_read_copy_tile(copy, head, row,
                            values.data() + head * s.rows * s.width + row * (by_rows ? s.width : 1),
                            by_rows ? s.width : 1, by_rows ? 1 : s.rows);
    }
  }
  return {values.begin(), values.end()};
}

/// The state that the copy of a slot stands for.
inline std::vector<double> read_copy_values(StatePool& pool, int layer, std::int32_t slot) {
  const PageLayout& layout = pool.impl().layout(layer);
  std::vector<double> values =
      read_copy_values(pool.impl().read_copy(layer, slot), layout.field("checkpoint").outer);
  multiply_deferred(deferred_decays(pool, layer, slot), values);
  return values;
}

/// Every layer's copy is what its stored checkpoint encodes to.
inline void expect_copy_of_checkpoint(StatePool& pool, std::int32_t slot,
                                      const std::string& where) {
  for (int layer = 0; layer < pool.layer_count(); ++layer) {
    StatePool::Impl& impl = pool.impl();
    const Field& checkpoint = impl.layout(layer).field("checkpoint");
    std::vector<std::byte> page(impl.layout(layer).bytes);
    const ReadCopy fresh = impl.layout(layer).read_copy_in(page.data());
    ASSERT_TRUE(fresh.exists());
    encode_read_copy(fresh, impl.field(layer, slot, checkpoint), checkpoint.dtype, 0,
                     checkpoint.outer);
    for (const Field& f : impl.layout(layer).fields) {
      if (f.kind != FieldKind::kReadCopy) continue;
      EXPECT_TRUE(same_bytes({impl.field(layer, slot, f), f.bytes()},
                             {page.data() + f.offset, f.bytes()}, size_of(f.dtype)))
          << where << ", layer " << layer << ", " << f.name;
    }
  }
}

/// A random stream of one sequence: tentative rows with and without flushes, forced ones too, and
/// committed rows. The oracle of a tentative row starts from the copy that the step left, one
/// window back, and sees no rounding but that.
template <typename Model>
void expect_outputs_read_the_copy(const Model& model) {
  const auto& c = model.test_case();
  auto exact_case = c;  // the bounds of what a copy does not touch
  exact_case.read_copy = ReadCopyFormat::kNone;
  auto seen_case = exact_case;  // the checkpoint's rounding is in the copy
  seen_case.checkpoint = DType::kF32;
  StatePoolOptions without = c.options(3);
  for (LayerSpec& layer : without.layers) layer.read_copy = ReadCopyFormat::kNone;

  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(3);
    StatePool twin = model.make_pool(without);
    typename Model::Runner runner(model, pool, context);
    typename Model::Runner twin_runner(model, twin, context);
    ASSERT_TRUE(is_ok(pool.reset(1)));
    ASSERT_TRUE(is_ok(twin.reset(1)));
    OracleOf<Model> exact(model);  // at the position
    OracleOf<Model> seen(model);   // there, from the copy over the live records
    const auto read_copy = [&] {
      for (int layer = 0; layer < c.layers; ++layer) {
        seen.state(layer) = read_copy_values(pool, layer, 1);
      }
    };
    Rng rng(33);
    TokenId token = 1;
    int flushes = 0;
    for (int step = 0; step < 40; ++step) {
      if (rng.chance(0.2)) {
        ASSERT_TRUE(is_ok(pool.force_flush(1)));
        ASSERT_TRUE(is_ok(twin.force_flush(1)));
      }
      const bool is_committed = step == 4 || rng.chance(0.1);
      std::vector<TokenId> tokens(static_cast<std::size_t>(
          is_committed ? rng.between(0, 9) : rng.between(1, c.limits.draft_capacity)));
      for (TokenId& t : tokens) t = token++;
      const auto count = static_cast<std::int64_t>(tokens.size());
      const std::int64_t accepted = is_committed || rng.chance(0.6) ? count : rng.between(0, count);
      const std::vector<RowSpec> rows = {
          padding(2), is_committed ? committed(1, tokens) : tentative(1, tokens, accepted)};
      const Cursor before = pool.cursor(1).value();
      const std::string where = describe(context) + ", step " + std::to_string(step);

      const StepOutput output = runner.step(rows);
      const StepOutput twin_output = twin_runner.step(rows);
      const OracleOutput want = exact.run(tokens, static_cast<std::size_t>(accepted));
      if (is_committed) {
        // The state itself, whatever the copy: the bits of a pool without one.
        expect_close(output[1], want, exact_case, where);
        for (std::size_t layer = 0; layer < output[1].size(); ++layer) {
          EXPECT_TRUE(same_bits(output[1][layer], twin_output[1][layer])) << where;
        }
        seen.run(tokens);
        if (pool.cursor(1).value().checkpoint_position > 0) read_copy();
      } else {
        if (tentative_row_flushes(before, c.limits)) {
          ++flushes;
          read_copy();
        }
        expect_close(output[1], seen.run(tokens, static_cast<std::size_t>(accepted)), seen_case,
                     where);
      }
      const Cursor cursor = pool.cursor(1).value();
      ASSERT_EQ(cursor, twin.cursor(1).value());
      if (cursor.checkpoint_position > 0) expect_copy_of_checkpoint(pool, 1, where);
      for (int layer = 0; layer < c.layers; ++layer) {
        EXPECT_TRUE(same_bytes(checkpoint_bytes(pool, layer, 1), checkpoint_bytes(twin, layer, 1)))
            << where << ": the copy has found its way into the checkpoint";
      }
      if (::testing::Test::HasFailure()) return;
    }
    EXPECT_GE(flushes, 4) << "the stream tests little";
  }
}

}  // namespace replayssm::testing
