// Offsets beyond 2^31, pages larger than their contents, memory shared with others.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "ops/delta_rule_cases.h"
#include "ops/mamba2_cases.h"
#include "support/delta_rule_harness.h"
#include "support/mamba2_harness.h"
#include "support/pool_access.h"
#include "support/virtual_memory.h"

namespace replayssm::testing {
namespace {

/// A history that uses everything that writes to a pool.
template <typename Model>
std::vector<float> exercise(const Model& model, StatePool& pool, const CpuContext& context,
                            std::span<const std::int32_t> slots) {
  typename Model::Runner runner(model, pool, context);
  std::vector<float> all;
  const auto add = [&](const StepOutput& output) {
    for (const auto& row : output) {
      for (const std::vector<float>& y : row) all.insert(all.end(), y.begin(), y.end());
    }
  };
  for (const std::int32_t slot : slots) EXPECT_TRUE(is_ok(pool.reset(slot)));
  for (int step = 0; step < 14; ++step) {
    std::vector<RowSpec> rows;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const bool is_committed = (static_cast<std::size_t>(step) + i) % 5 == 0;
      rows.push_back(is_committed
                         ? committed(slots[i], names(i + 1, step * 20, step == 5 ? 19 : 3))
                         : tentative(slots[i], names(i + 1, step * 20, 3), (step + 1) % 4));
    }
    add(runner.step(rows));
  }
  const std::int32_t a = slots[0];
  const std::int32_t b = slots[1];
  const std::int32_t c = slots[2];
  EXPECT_TRUE(is_ok(pool.copy(a, b)));
  const Cursor cursor = pool.cursor(a).value();
  EXPECT_TRUE(is_ok(pool.materialize(context, a, cursor.position, c)));
  if (pool.options().rewindable && cursor.live() > 0) {
    EXPECT_TRUE(is_ok(pool.truncate(b, cursor.position - 1)));
  }
  const Result<std::vector<std::byte>> image = pool.save(a);
  EXPECT_TRUE(is_ok(image));
  EXPECT_TRUE(is_ok(pool.release(a)));
  EXPECT_TRUE(is_ok(pool.load(context, a, *image)));
  for (int step = 0; step < 6; ++step) {
    std::vector<RowSpec> rows;
    for (const std::int32_t slot : {a, b, c}) {
      rows.push_back(tentative(slot, names(9, step * 4, 4), 1 + step % 4));
    }
    add(runner.step(rows));
  }
  return all;
}

Mamba2Case addressing_case(DType type) {
  Mamba2Case c = small_case("addressing", 8, 4);
  c.layers = 3;
  c.conv_width = 4;
  c.rewindable = true;
  c.checkpoint = c.activation = type;
  return c;
}

std::vector<DeltaModel> delta_models(DType type) {
  std::vector<DeltaModel> models;
  for (const DeltaFamily family : kDeltaFamilies) {
    DeltaCase c = small_delta_case(family, "addressing", 8, 4);
    c.layers = 3;
    c.conv_width = 4;
    c.rewindable = true;
    c.checkpoint = c.activation = type;
    models.emplace_back(c);
  }
  return models;
}

/// C81: pages of 1.5 times their contents and more, layers one after the other in one allocation:
/// bytes that belong to nobody keep their value, and results do not depend on the distance.
template <typename Model>
void expect_guard_bytes_survive(const Model& model) {
  for (const CpuContext& context : Contexts()) {
    StatePool reference = model.make_pool(4);
    const std::vector<std::int32_t> slots = {3, 0, 2};
    const std::vector<float> want = exercise(model, reference, context, slots);
    const std::size_t contents = reference.impl().layout(0).bytes;
    for (const bool poison : {false, true}) {
      for (const std::size_t alignment :
           {std::size_t{64}, std::size_t{4096}, contents * 3 / 2 / 64 * 64 + 64}) {
        StatePoolOptions options = model.test_case().options(4);
        options.poison = poison;
        options.page_alignment = alignment;
        const std::size_t bytes = StatePool::bytes_per_slot(options).value().total * 4;
        constexpr std::size_t kMargin = 640;
        constexpr std::byte kGuard{0xa5};
        AlignedBytes memory(bytes + 2 * kMargin, kGuard);
        options.storage = memory.span().subspan(kMargin, bytes + 64);
        {
          StatePool pool = model.make_pool(options);
          EXPECT_TRUE(same_bits(exercise(model, pool, context, slots), want));
          // Erase the pages' contents; what is left must be the guard value.
          for (std::int32_t slot = 0; slot < 4; ++slot) {
            for (int layer = 0; layer < pool.layer_count(); ++layer) {
              for (const Field& field : pool.impl().layout(layer).fields) {
                std::byte* data = pool.impl().field(layer, slot, field);
                ASSERT_GE(data, options.storage.data());
                ASSERT_LE(data + field.bytes(), options.storage.data() + bytes);
                std::memset(data, static_cast<int>(kGuard), field.bytes());
              }
            }
          }
        }
        const std::vector<std::byte> guard(memory.span().size(), kGuard);
        EXPECT_TRUE(same_bytes(memory.span(), guard))
            << "alignment " << alignment << ", poison " << poison;
      }
    }
  }
}

TEST(Addressing, C81_GuardBytesSurvive) {
  for (const DType type : {DType::kF32, DType::kBF16}) {
    expect_guard_bytes_survive(Mamba2Model(addressing_case(type)));
    for (const DeltaModel& model : delta_models(type)) expect_guard_bytes_survive(model);
  }
}

/// C82: slots so far apart that slot x stride exceeds 2^31 elements and 2^32 bytes.
template <typename Model>
void expect_slots_beyond_32_bits(const Model& model) {
  StatePool small = model.make_pool(6);
  StatePoolOptions options = model.test_case().options(6);
  options.page_alignment = (std::size_t{3} << 30) + 64;
  const std::size_t bytes = StatePool::bytes_per_slot(options).value().total * 6;
  ASSERT_GT(bytes, std::size_t{36} << 30);
  for (const CpuContext& context : Contexts({1})) {
    const VirtualMemory memory(bytes);
    if (memory.data() == nullptr) GTEST_SKIP() << "no " << bytes << " bytes of address space";
    options.storage = memory.span();
    StatePool pool = model.make_pool(options);
    const std::vector<std::int32_t> slots = {5, 0, 4};
    EXPECT_TRUE(
        same_bits(exercise(model, pool, context, slots), exercise(model, small, context, slots)));
    for (std::int32_t slot = 0; slot < 6; ++slot) {
      EXPECT_TRUE(same_bytes(slot_bytes(pool, slot), slot_bytes(small, slot))) << slot;
    }
  }
}

TEST(Addressing, C82_SlotsBeyond32Bits) {
  for (const DType type : {DType::kF32, DType::kBF16}) {
    expect_slots_beyond_32_bits(Mamba2Model(addressing_case(type)));
    for (const DeltaModel& model : delta_models(type)) expect_slots_beyond_32_bits(model);
  }
}

// The same in memory of the pool's own.
TEST(Addressing, C82_OwnMemoryBeyond32Bits) {
  Mamba2Case c = addressing_case(DType::kF32);
  c.layers = 1;
  const Mamba2Model model(c);
  StatePoolOptions options = c.options(4);
  options.page_alignment = (std::size_t{3} << 30) + 64;
  Result<StatePool> created = StatePool::create(options);
  if (!created.ok()) GTEST_SKIP() << created.status().message();
  ASSERT_TRUE(is_ok(model.set_a(*created)));
  StatePool small = model.make_pool(4);
  const std::vector<std::int32_t> slots = {3, 1, 2};
  EXPECT_TRUE(same_bits(exercise(model, *created, {}, slots), exercise(model, small, {}, slots)));
}

// C83: operands with a token stride of 36,864 and 60,000 tokens: element offsets beyond 2^31. Rows
// at both ends compute what they compute in a small buffer.
TEST(Addressing, C83_TokensBeyond32Bits) {
  for (const DType type : {DType::kF32, DType::kBF16}) {
    Mamba2Case c = small_case("far", 8, 4);
    c.conv_width = 4;
    c.z = true;
    c.activation = c.dt_type = type;
    const Mamba2Model model(c);
    constexpr std::int64_t kTokens = 60'000;
    constexpr std::int64_t kPitch = 36'864;
    const std::size_t bytes = static_cast<std::size_t>(kTokens * kPitch) * size_of(type);
    for (const CpuContext& context : Contexts({1})) {
      const VirtualMemory in(bytes);
      const VirtualMemory mid(bytes);
      const VirtualMemory out(bytes);
      if (in.data() == nullptr || mid.data() == nullptr || out.data() == nullptr) {
        GTEST_SKIP() << "no " << 3 * bytes << " bytes of address space";
      }
      const auto slice = [&](const VirtualMemory& memory, std::int64_t column, std::int64_t outer,
                             std::int64_t inner) {
        TensorView view;
        view.data = memory.data() + static_cast<std::size_t>(column) * size_of(type);
        view.dtype = type;
        view.rank = outer == 0 ? 2 : 3;
        if (outer == 0) {
          view.shape = {kTokens, inner};
          view.strides = {kPitch, 1};
        } else {
          view.shape = {kTokens, outer, inner};
          view.strides = {kPitch, inner, 1};
        }
        return view;
      };
      const std::int64_t channels = c.conv_channels();
      const TensorView u = slice(in, 0, 0, channels);
      const TensorView dt = slice(in, channels, 0, 4);
      const TensorView z = slice(in, kPitch - 32, 4, 8);
      const TensorView conv = slice(mid, kPitch - channels, 0, channels);
      const TensorView y = slice(out, kPitch - 32, 4, 8);

      // A committed row and a tentative one at each end, with nothing in between.
      std::vector<RowSpec> rows = {committed(0, names(1, 0, 9)), tentative(1, names(2, 0, 4), 2),
                                   committed(2, names(3, 0, 15)), tentative(3, names(4, 0, 4), 3)};
      rows[2].gap = kTokens - (9 + 4 + 15 + 4);
      StatePool far = model.make_pool(4);
      StatePool near = model.make_pool(4);
      for (std::int32_t slot = 0; slot < 4; ++slot) {
        ASSERT_TRUE(is_ok(far.reset(slot)));
        ASSERT_TRUE(is_ok(near.reset(slot)));
      }
      Mamba2Runner far_runner(model, far, context);
      Mamba2Runner near_runner(model, near, context);

      Result<Step> step = far.begin_step(step_rows(rows));
      ASSERT_TRUE(is_ok(step));
      ASSERT_EQ(step->token_end(), kTokens);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        for (std::int64_t t = 0; t < rows[i].count(); ++t) {
          const Mamba2Model::Inputs inputs =
              model.inputs(0, rows[i].tokens[static_cast<std::size_t>(t)]);
          const std::int64_t token = step->rows()[i].token_begin + t;
          set_token(u, token, inputs.u);
          set_token(dt, token, inputs.dt);
          set_token(z, token, inputs.z);
        }
      }
      Mamba2Operands operands;
      operands.x = slice(mid, kPitch - channels, 4, 8);
      operands.b = slice(mid, kPitch - channels + 32, 2, 16);
      operands.c = slice(mid, kPitch - channels + 64, 2, 16);
      operands.dt = dt;
      operands.z = z;
      operands.y = y;
      const Mamba2Model::Layer& weights = model.layer(0);
      CausalConv1dOperands conv_operands;
      conv_operands.u = u;
      conv_operands.out = conv;
      conv_operands.weight =
          TensorView::contiguous(weights.conv_weight.data(), DType::kF32, {4, channels});
      conv_operands.bias =
          TensorView::contiguous(weights.conv_bias.data(), DType::kF32, {channels});
      ASSERT_TRUE(is_ok(causal_conv1d_step(context, far, 0, *step, conv_operands)));
      ASSERT_TRUE(is_ok(mamba2_step(context, far, 0, *step, model.op_params(0), operands)));
      ASSERT_TRUE(is_ok(far_runner.commit(*step, rows)));

      std::vector<RowSpec> packed = rows;
      packed[2].gap = 0;
      const StepOutput want = near_runner.step(packed);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        for (std::int64_t t = 0; t < rows[i].count(); ++t) {
          const auto at = static_cast<std::size_t>(t) * 32;
          EXPECT_TRUE(same_bits(get_token(y, step->rows()[i].token_begin + t),
                                std::span(want[i][0]).subspan(at, 32)))
              << "row " << i << ", token " << t << ", " << describe(context);
        }
      }
      EXPECT_TRUE(same_bytes(pool_bytes(far), pool_bytes(near)));
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
