// Mamba-2 steps: what a result may depend on, what a step may write, extreme gates.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "ops/mamba2_cases.h"
#include "support/mamba2_harness.h"
#include "support/pool_access.h"

namespace replayssm::testing {
namespace {

Mamba2Case with_types(Mamba2Case c, DType checkpoint, DType activation) {
  c.checkpoint = checkpoint;
  c.activation = activation;
  c.name += std::string("_") + to_string(checkpoint) + "_" + to_string(activation);
  return c;
}

/// A small case in every combination of types, with and without a convolution.
std::vector<Mamba2Case> type_cases() {
  std::vector<Mamba2Case> cases;
  for (const DType checkpoint : {DType::kF32, DType::kBF16}) {
    for (const DType activation : {DType::kF32, DType::kBF16}) {
      Mamba2Case c = small_case("plain", 8, 4);
      c.shape.head_dim = 24;
      cases.push_back(with_types(c, checkpoint, activation));
      c.name = "conv";
      c.conv_width = 4;
      c.layers = 2;
      cases.push_back(with_types(c, checkpoint, activation));
    }
  }
  return cases;
}

class Mamba2Types : public ::testing::TestWithParam<Mamba2Case> {};

INSTANTIATE_TEST_SUITE_P(Cases, Mamba2Types, ::testing::ValuesIn(type_cases()),
                         [](const auto& test) { return test.param.name; });

/// By layer, the outputs of a sequence fed in committed rows of these lengths.
std::vector<std::vector<float>> run_chunks(Mamba2Runner& runner, std::int32_t slot,
                                           const std::vector<TokenId>& tokens,
                                           const std::vector<std::int64_t>& chunks) {
  std::vector<std::vector<float>> all(static_cast<std::size_t>(runner.model().test_case().layers));
  auto next = tokens.begin();
  for (const std::int64_t chunk : chunks) {
    const StepOutput output = runner.step({committed(slot, {next, next + chunk})});
    next += chunk;
    for (std::size_t layer = 0; layer < all.size(); ++layer) {
      all[layer].insert(all[layer].end(), output[0][layer].begin(), output[0][layer].end());
    }
  }
  return all;
}

// C71, C77: one prompt in every chunking gives the same outputs, checkpoint and convolution window.
TEST_P(Mamba2Types, C71_ChunkingChangesNoBit) {
  const Mamba2Model model(GetParam());
  const std::vector<TokenId> tokens = names(1, 0, 40);
  const std::vector<std::int64_t> ones(40, 1);
  const std::vector<std::vector<std::int64_t>> chunkings = {
      ones, {40}, {17, 23}, {39, 1}, {1, 39}, {8, 8, 8, 8, 8}, {3, 5, 8, 2, 22}, {13, 27}};
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(static_cast<std::int64_t>(chunkings.size()));
    Mamba2Runner runner(model, pool, context);
    std::vector<std::vector<float>> first;
    for (std::size_t i = 0; i < chunkings.size(); ++i) {
      const auto slot = static_cast<std::int32_t>(i);
      ASSERT_TRUE(is_ok(pool.reset(slot)));
      const auto all = run_chunks(runner, slot, tokens, chunkings[i]);
      if (i == 0) {
        first = all;
        SequenceOracle oracle(model);
        expect_close(all, oracle.run(tokens), GetParam(), describe(context));
        continue;
      }
      for (int layer = 0; layer < GetParam().layers; ++layer) {
        const auto l = static_cast<std::size_t>(layer);
        EXPECT_TRUE(same_bits(all[l], first[l])) << "chunking " << i << ", " << describe(context);
        EXPECT_TRUE(
            same_bytes(checkpoint_bytes(pool, layer, slot), checkpoint_bytes(pool, layer, 0)))
            << "chunking " << i << ", " << describe(context);
      }
      EXPECT_EQ(pool.cursor(slot).value(), (Cursor{40, 40, false}));
    }
    // What follows depends on the convolution window, too.
    std::vector<RowSpec> rows;
    for (std::size_t i = 0; i < chunkings.size(); ++i) {
      rows.push_back(tentative(static_cast<std::int32_t>(i), names(1, 40, 3), 2));
    }
    const StepOutput next = runner.step(rows);
    for (std::size_t i = 1; i < chunkings.size(); ++i) {
      for (std::size_t layer = 0; layer < next[i].size(); ++layer) {
        EXPECT_TRUE(same_bits(next[i][layer], next[0][layer])) << "chunking " << i;
      }
    }
  }
}

// C55, C49, C77: prompts of different length packed in one step, with padding around them, equal
// their own runs bit for bit, y and state.
TEST_P(Mamba2Types, C55_PackedPromptsEqualTheirOwnRuns) {
  const Mamba2Model model(GetParam());
  const std::int64_t lengths[] = {5, 11, 16, 1};
  for (const CpuContext& context : Contexts()) {
    StatePool together = model.make_pool(4);
    StatePool alone = model.make_pool(4);
    Mamba2Runner all(model, together, context);
    Mamba2Runner single(model, alone, context);
    std::vector<RowSpec> rows = {padding(3, RowKind::kCommitted)};
    for (std::int32_t i = 0; i < 4; ++i) {
      ASSERT_TRUE(is_ok(together.reset(i)));
      ASSERT_TRUE(is_ok(alone.reset(3 - i)));
      rows.push_back(committed(i, names(static_cast<std::uint64_t>(i) + 1, 0, lengths[i])));
      rows.push_back(padding(i + 1));
    }
    const StepOutput packed = all.step(rows);
    for (std::int32_t i = 0; i < 4; ++i) {
      const std::size_t row = 1 + 2 * static_cast<std::size_t>(i);
      RowSpec own = rows[row];
      own.slot = 3 - i;
      const StepOutput output = single.step({own});
      for (int layer = 0; layer < GetParam().layers; ++layer) {
        EXPECT_TRUE(same_bits(packed[row][static_cast<std::size_t>(layer)],
                              output[0][static_cast<std::size_t>(layer)]));
        EXPECT_TRUE(same_bytes(checkpoint_bytes(together, layer, i),
                               checkpoint_bytes(alone, layer, 3 - i)));
      }
    }
  }
}

// C48, C49: what a row computes does not depend on the rows beside it, whatever their kinds.
TEST_P(Mamba2Types, C49_RowAloneEqualsRowAmongOthers) {
  const Mamba2Model model(GetParam());
  constexpr std::int32_t kSlots = 4;
  for (const CpuContext& context : Contexts()) {
    StatePool together = model.make_pool(kSlots);
    StatePool alone = model.make_pool(kSlots);
    Mamba2Runner all(model, together, context);
    Mamba2Runner single(model, alone, context);
    for (std::int32_t slot = 0; slot < kSlots; ++slot) {
      ASSERT_TRUE(is_ok(together.reset(slot)));
      ASSERT_TRUE(is_ok(alone.reset(slot)));
    }
    Rng rng(3);
    TokenId token = 1;
    for (int step = 0; step < 40; ++step) {
      std::vector<RowSpec> rows;
      for (std::int32_t i = 0; i < kSlots; ++i) {
        const std::int32_t slot = (i + step) % kSlots;
        if (rng.chance(0.2)) rows.push_back(padding(rng.between(1, 4)));
        const bool is_committed = rng.chance(0.2);
        std::vector<TokenId> tokens(static_cast<std::size_t>(rng.between(1, 4)));
        for (TokenId& t : tokens) t = token++;
        const std::int64_t accepted = rng.between(0, static_cast<std::int64_t>(tokens.size()));
        rows.push_back(is_committed ? committed(slot, std::move(tokens))
                                    : tentative(slot, std::move(tokens), accepted));
      }
      const StepOutput batch = all.step(rows);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        if (rows[i].slot < 0) continue;
        const StepOutput own = single.step({rows[i]});
        for (std::size_t layer = 0; layer < own[0].size(); ++layer) {
          ASSERT_TRUE(same_bits(batch[i][layer], own[0][layer]))
              << "step " << step << ", row " << i << ", " << describe(context);
        }
      }
    }
    for (std::int32_t slot = 0; slot < kSlots; ++slot) {
      EXPECT_TRUE(same_bytes(slot_bytes(together, slot), slot_bytes(alone, slot)));
    }
  }
}

// A tentative step that does not flush writes the ring places of its own tokens and nothing else.
TEST_P(Mamba2Types, TentativeStepWritesItsOwnPlacesOnly) {
  const Mamba2Model model(GetParam());
  StatePoolOptions options = GetParam().options(3);
  options.poison = false;  // a commit fills places it gives up with NaN
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(options);
    Mamba2Runner runner(model, pool, context);
    for (std::int32_t slot = 0; slot < 3; ++slot) {
      ASSERT_TRUE(is_ok(pool.reset(slot)));
      runner.step({committed(slot, names(5, 10 * slot, 7))});
      runner.step({tentative(slot, names(6, 10 * slot, 3), 2)});
    }
    const std::vector<std::byte> others[] = {slot_bytes(pool, 0), slot_bytes(pool, 2)};
    const std::vector<std::byte> before = slot_bytes(pool, 1);
    ASSERT_FALSE(tentative_row_flushes(pool.cursor(1).value(), GetParam().limits));
    runner.step({tentative(1, names(7, 0, 3), 1)});

    // Erase what may change from both images and compare the rest.
    const std::vector<std::byte> after = slot_bytes(pool, 1);
    std::vector<std::byte> expected = before;
    std::size_t page = 0;
    std::size_t written = 0;
    for (int layer = 0; layer < pool.layer_count(); ++layer) {
      const PageLayout& layout = pool.impl().layout(layer);
      for (const Field& field : layout.fields) {
        if (field.kind == FieldKind::kCheckpoint) continue;
        for (std::int64_t outer = 0; outer < field.outer; ++outer) {
          for (std::int64_t position = 9; position < 12; ++position) {
            const std::int64_t entry = outer * field.places + position % field.places;
            const std::size_t at =
                page + field.offset + static_cast<std::size_t>(entry) * field.inner_bytes();
            for (std::size_t i = at; i < at + field.inner_bytes(); ++i) {
              written += expected[i] != after[i];
              expected[i] = after[i];
            }
          }
        }
      }
      page += layout.bytes;
    }
    EXPECT_TRUE(same_bytes(after, expected)) << describe(context);
    EXPECT_GT(written, 0u);
    EXPECT_TRUE(same_bytes(slot_bytes(pool, 0), others[0]));
    EXPECT_TRUE(same_bytes(slot_bytes(pool, 2), others[1]));
  }
}

// C39, C40, C09: slot 0 is live, all rows are padding: 100 steps leave the pool as it is, and y is
// 0 (checked by the runner) though operands and outputs start as NaN.
TEST_P(Mamba2Types, C39_PaddingTouchesNothing) {
  const Mamba2Model model(GetParam());
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(2);
    Mamba2Runner runner(model, pool, context);
    ASSERT_TRUE(is_ok(pool.reset(0)));
    runner.step({tentative(0, names(1, 0, 4), 3)});
    const std::vector<std::byte> before = pool_bytes(pool);
    const Cursor cursor = pool.cursor(0).value();
    for (int i = 0; i < 100; ++i) {
      std::vector<RowSpec> rows(5, padding(1 + i % 4));
      rows[1].slot = -2147483647 - 1;
      rows[2].slot = -7;
      rows[3].kind = RowKind::kCommitted;
      runner.step(rows);
    }
    EXPECT_TRUE(same_bytes(pool_bytes(pool), before));
    EXPECT_EQ(pool.cursor(0).value(), cursor);
  }
}

// C09: three live and five padding rows in a pool poisoned with NaN.
TEST_P(Mamba2Types, C09_LiveRowsAreExactBesidePadding) {
  const Mamba2Model model(GetParam());
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(8);
    Mamba2Runner runner(model, pool, context);
    std::vector<SequenceOracle> oracles(3, SequenceOracle(model));
    for (const std::int32_t slot : {7, 0, 3}) ASSERT_TRUE(is_ok(pool.reset(slot)));
    for (int step = 0; step < 20; ++step) {
      const auto tokens = [&](std::uint64_t s) { return names(s, 4 * step, 1 + step % 4); };
      std::vector<RowSpec> rows = {padding(1),
                                   committed(7, tokens(1)),
                                   padding(2),
                                   padding(1),
                                   tentative(0, tokens(2), step % 2),
                                   padding(4),
                                   tentative(3, tokens(3), 1 + step % 4),
                                   padding(1)};
      const StepOutput output = runner.step(rows);
      std::size_t oracle = 0;
      for (std::size_t i = 0; i < rows.size(); ++i) {
        if (rows[i].slot < 0) continue;
        const OracleOutput want =
            oracles[oracle++].run(rows[i].tokens, static_cast<std::size_t>(rows[i].accepts()));
        expect_close(output[i], want, GetParam(), "step " + std::to_string(step));
      }
    }
  }
}

// C20: accepted counts 0, 1, 3, 0 in one batch. Rows with 0 stay where they were: offered the same
// tokens again they compute the same bits.
TEST_P(Mamba2Types, C20_AcceptingNothingKeepsTheState) {
  const Mamba2Model model(GetParam());
  const std::int64_t accepted[] = {0, 1, 3, 0};
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(4);
    Mamba2Runner runner(model, pool, context);
    std::vector<SequenceOracle> oracles(4, SequenceOracle(model));
    for (std::int32_t slot = 0; slot < 4; ++slot) {
      ASSERT_TRUE(is_ok(pool.reset(slot)));
      const std::vector<TokenId> prompt = names(slot + 1u, 0, slot * 3 + 1);
      runner.step({committed(slot, prompt)});
      oracles[static_cast<std::size_t>(slot)].run(prompt);
    }
    std::vector<RowSpec> rows;
    for (std::int32_t slot = 0; slot < 4; ++slot) {
      rows.push_back(tentative(slot, names(slot + 10u, 0, 3), accepted[slot]));
    }
    const StepOutput first = runner.step(rows);
    const Cursor cursor = pool.cursor(0).value();
    EXPECT_EQ(cursor.position, 1);
    for (std::int32_t slot = 1; slot < 3; ++slot) {
      rows[static_cast<std::size_t>(slot)] = tentative(slot, names(slot + 20u, 0, 3), 0);
    }
    for (std::size_t slot = 0; slot < 4; ++slot) {
      oracles[slot].run(names(slot + 10u, 0, 3), static_cast<std::size_t>(accepted[slot]));
    }
    const StepOutput second = runner.step(rows);
    for (const std::size_t slot : {0u, 3u}) {
      for (std::size_t layer = 0; layer < first[slot].size(); ++layer) {
        EXPECT_TRUE(same_bits(second[slot][layer], first[slot][layer])) << describe(context);
      }
    }
    for (const std::size_t slot : {1u, 2u}) {
      expect_close(second[slot], oracles[slot].run(rows[slot].tokens, 0), GetParam(),
                   describe(context));
    }
  }
}

// C10: a step whose records wrap around the ring while it reads the ring, 1,000 times: its tokens
// are rejected each time, so every repetition computes the same bits.
TEST_P(Mamba2Types, C10_AppendThatWrapsIsStable) {
  const Mamba2Model model(GetParam());
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(1);
    Mamba2Runner runner(model, pool, context);
    ASSERT_TRUE(is_ok(pool.reset(0)));
    runner.step({committed(0, names(1, 0, 7))});
    runner.step({tentative(0, names(1, 7, 3), 3)});
    // Ring of 12 places: the next tokens are positions 10 .. 13.
    ASSERT_FALSE(tentative_row_flushes(pool.cursor(0).value(), GetParam().limits));
    const std::vector<RowSpec> row = {tentative(0, names(1, 10, 4), 0)};
    const StepOutput first = runner.step(row);
    const std::vector<std::byte> memory = pool_bytes(pool);
    const int repeats = context.thread_count() == 1 ? 1000 : 100;
    for (int i = 0; i < repeats; ++i) {
      const StepOutput again = runner.step(row);
      for (std::size_t layer = 0; layer < first[0].size(); ++layer) {
        ASSERT_TRUE(same_bits(again[0][layer], first[0][layer])) << "repetition " << i;
      }
    }
    EXPECT_TRUE(same_bytes(pool_bytes(pool), memory));
  }
}

// C07, C45, C23, C42: whatever bytes memory held before (NaN, infinity, 0x7f, another sequence's
// state), a new sequence computes what it computes in fresh memory. Also for a prompt of one token.
TEST_P(Mamba2Types, C07_C23_C42_C45_RecycledMemoryIsNeverRead) {
  const Mamba2Case& c = GetParam();
  const Mamba2Model model(c);
  const auto run = [&](StatePool& pool, const CpuContext& context) {
    std::vector<float> all;
    Mamba2Runner runner(model, pool, context);
    Rng rng(9);
    TokenId token = 100;
    for (int step = 0; step < 24; ++step) {
      std::vector<TokenId> tokens(static_cast<std::size_t>(step == 0 ? 1 : rng.between(1, 4)));
      for (TokenId& t : tokens) t = token++;
      const std::int64_t accepted = rng.between(0, static_cast<std::int64_t>(tokens.size()));
      const bool prompt = step == 0 || step == 15;
      const StepOutput output =
          runner.step({prompt ? committed(1, tokens) : tentative(1, tokens, accepted)});
      for (const std::vector<float>& y : output[0]) all.insert(all.end(), y.begin(), y.end());
    }
    return all;
  };
  StatePoolOptions options = c.options(2);
  options.poison = false;
  const std::size_t bytes = StatePool::bytes_per_slot(options).value().total * 2;
  for (const CpuContext& context : Contexts()) {
    StatePool fresh = model.make_pool(options);
    ASSERT_TRUE(is_ok(fresh.reset(1)));
    const std::vector<float> want = run(fresh, context);
    for (const float fill : {std::bit_cast<float>(0x7f7f7f7fu), std::bit_cast<float>(0xffffffffu),
                             std::bit_cast<float>(0x7f807f80u), -0.0f, 1e30f}) {
      AlignedBytes memory(bytes);
      for (std::size_t i = 0; i < bytes; i += 4) std::memcpy(memory.data() + i, &fill, 4);
      StatePoolOptions dirty = options;
      dirty.storage = memory.span();
      StatePool pool = model.make_pool(dirty);
      ASSERT_TRUE(is_ok(pool.reset(1)));
      EXPECT_TRUE(same_bits(run(pool, context), want)) << "filled with " << fill;
      // The slot is now dirty with a sequence: start over, twice, also in the middle of a window.
      for (int again = 0; again < 2; ++again) {
        ASSERT_TRUE(is_ok(pool.reset(1)));
        EXPECT_TRUE(same_bits(run(pool, context), want)) << "second sequence";
      }
    }
  }
}

// C28, C38: draft capacity 5, rows of 1..5 tokens in one batch, every accepted count of each.
TEST(Mamba2, C28_RowsNarrowerThanTheCapacity) {
  Mamba2Case c = small_case("narrow", 9, 5);
  c.conv_width = 4;
  const Mamba2Model model(c);
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(32);
    Mamba2Runner runner(model, pool, context);
    std::vector<RowSpec> rows;
    std::vector<SequenceOracle> oracles;
    for (std::int64_t count = 1; count <= 5; ++count) {
      for (std::int64_t accepted = 0; accepted <= count; ++accepted) {
        const auto slot = static_cast<std::int32_t>(rows.size());
        ASSERT_TRUE(is_ok(pool.reset(slot)));
        rows.push_back(tentative(slot, names(rows.size() + 1u, 0, count), accepted));
        oracles.emplace_back(model);
      }
    }
    for (int step = 0; step < 8; ++step) {
      for (std::size_t i = 0; i < rows.size(); ++i) {
        rows[i].tokens = names(i + 1, step * 8, rows[i].count());
      }
      const StepOutput output = runner.step(rows);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        expect_close(output[i],
                     oracles[i].run(rows[i].tokens, static_cast<std::size_t>(rows[i].accepted)), c,
                     "step " + std::to_string(step) + ", row " + std::to_string(i));
        EXPECT_EQ(pool.cursor(static_cast<std::int32_t>(i)).value().position,
                  oracles[i].position());
      }
    }
  }
}

// C22: a prompt's tail of one real token and three placeholders beside a verifying row.
TEST(Mamba2, C22_PlaceholdersAreNotCommitted) {
  Mamba2Case c = small_case("tail", 8, 4);
  c.conv_width = 4;
  const Mamba2Model model(c);
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(3);
    Mamba2Runner runner(model, pool, context);
    for (std::int32_t slot = 0; slot < 3; ++slot) ASSERT_TRUE(is_ok(pool.reset(slot)));
    runner.step({committed(0, names(1, 0, 6)), committed(1, names(2, 0, 5))});
    runner.step({committed(0, names(1, 6, 1)), padding(3), tentative(1, names(2, 5, 4), 2)});
    EXPECT_EQ(pool.cursor(0).value(), (Cursor{7, 7, false}));
    runner.step({committed(2, names(1, 0, 7))});
    EXPECT_TRUE(same_bytes(checkpoint_bytes(pool, 0, 0), checkpoint_bytes(pool, 0, 2)));
  }
}

// C68: decays of 1e-12 and exactly 0 over 64 tokens, replayed and folded; positive A in a small
// window. Nothing overflows, and 0 x infinity never happens.
TEST(Mamba2, C68_ExtremeDecaysStayFinite) {
  for (const Decay decay : {Decay::kTiny, Decay::kZero, Decay::kGrowing}) {
    const bool growing = decay == Decay::kGrowing;
    Mamba2Case c = small_case("extreme", growing ? 4 : 64, growing ? 2 : 4);
    c.decay = decay;
    c.softplus = c.dt_bias = false;
    const Mamba2Model model(c);
    for (const CpuContext& context : Contexts()) {
      StatePool pool = model.make_pool(2);
      Mamba2Runner runner(model, pool, context);
      SequenceOracle replayed(model);
      SequenceOracle plain(model);
      ASSERT_TRUE(is_ok(pool.reset(0)));
      ASSERT_TRUE(is_ok(pool.reset(1)));
      // e^(5 * 14) is near the square root of the largest float; e^(5 * 18) is beyond it.
      const int steps = growing ? 7 : 40;
      for (int i = 0; i < steps; ++i) {
        const std::vector<TokenId> tokens = names(1, 2 * i, 2);
        const StepOutput output = runner.step({tentative(0, tokens, 2), committed(1, tokens)});
        expect_close(output[0], replayed.run(tokens), c, "replayed step " + std::to_string(i));
        expect_close(output[1], plain.run(tokens), c, "plain step " + std::to_string(i));
      }
    }
  }
}

// A decay of exactly 0 in the middle of a window forgets everything before it and nothing after.
TEST(Mamba2, C68_ZeroDecayAmongOrdinaryOnes) {
  Mamba2Case c = small_case("one_zero", 16, 4);
  c.softplus = false;
  c.dt_bias = false;
  Mamba2Model model(c);
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(1);
    // exp(-3e4 * dt): 0 for ordinary tokens' dt, but tokens with dt = 0 keep the state.
    ASSERT_TRUE(is_ok(pool.reset(0)));
    Mamba2Reference oracle(c.shape, model.layer(0).params);
    for (int i = 0; i < 60; ++i) {
      const std::vector<StepRow> rows = {{0, RowKind::kTentative, 0, 1, {}}};
      Mamba2Model::Inputs in = model.inputs(0, static_cast<TokenId>(i + 1));
      const float dt = i % 7 == 3 ? 3e4f : i % 5 == 0 ? 0.0f : in.dt[0];
      for (float& x : in.dt) x = dt;
      const auto inner = static_cast<std::ptrdiff_t>(c.inner());
      const auto bc = static_cast<std::ptrdiff_t>(c.bc());
      Mamba2Token token;
      token.x.assign(in.u.begin(), in.u.begin() + inner);
      token.b.assign(in.u.begin() + inner, in.u.begin() + inner + bc);
      token.c.assign(in.u.begin() + inner + bc, in.u.end());
      token.dt = in.dt;
      const std::vector<double> want = oracle.step(token);
      std::vector<float> y(static_cast<std::size_t>(inner), kUnwritten);
      Mamba2Operands operands;
      operands.x = TensorView::contiguous(token.x.data(), DType::kF32, {1, 4, 8});
      operands.b = TensorView::contiguous(token.b.data(), DType::kF32, {1, 2, 16});
      operands.c = TensorView::contiguous(token.c.data(), DType::kF32, {1, 2, 16});
      operands.dt = TensorView::contiguous(token.dt.data(), DType::kF32, {1, 4});
      operands.y = TensorView::contiguous(y.data(), DType::kF32, {1, 4, 8});
      Result<Step> step = pool.begin_step(rows);
      ASSERT_TRUE(is_ok(step));
      ASSERT_TRUE(is_ok(mamba2_step(context, pool, 0, *step, model.op_params(0), operands)));
      const std::int64_t one[] = {1};
      ASSERT_TRUE(is_ok(pool.commit(*step, one)));
      const std::int64_t shape[] = {4, 8};
      ASSERT_TRUE(close(y, want, 1e-5, shape)) << "token " << i << ", " << describe(context);
    }
  }
}

// C70: without limits a dt of 1e-5 passes as it is; the same in prompt, decode and replay.
TEST(Mamba2, C70_SmallDtIsNotClamped) {
  for (const bool limited : {false, true}) {
    Mamba2Case c = small_case("small_dt", 8, 4);
    c.softplus = false;
    c.dt_bias = false;
    c.d = false;
    if (limited) c.dt_min = 0.001f, c.dt_max = 0.1f;
    const Mamba2Model model(c);
    for (const CpuContext& context : Contexts()) {
      StatePool pool = model.make_pool(3);
      const float expected_dt = limited ? 0.001f : 1e-5f;
      const std::vector<float> dt(4, 1e-5f);
      const Mamba2Model::Inputs in = model.inputs(0, 1);
      const float* x = in.u.data();
      const float* b = x + c.inner();
      const float* cc = b + c.bc();
      for (std::int32_t slot = 0; slot < 2; ++slot) {
        ASSERT_TRUE(is_ok(pool.reset(slot)));
        const std::vector<StepRow> rows = {
            {slot, slot == 0 ? RowKind::kCommitted : RowKind::kTentative, 0, 1, {}}};
        std::vector<float> y(32, kUnwritten);
        Mamba2Operands operands;
        operands.x = TensorView::contiguous(x, DType::kF32, {1, 4, 8});
        operands.b = TensorView::contiguous(b, DType::kF32, {1, 2, 16});
        operands.c = TensorView::contiguous(cc, DType::kF32, {1, 2, 16});
        operands.dt = TensorView::contiguous(dt.data(), DType::kF32, {1, 4});
        operands.y = TensorView::contiguous(y.data(), DType::kF32, {1, 4, 8});
        Result<Step> step = pool.begin_step(rows);
        ASSERT_TRUE(is_ok(step));
        ASSERT_TRUE(is_ok(mamba2_step(context, pool, 0, *step, model.op_params(0), operands)));
        const std::int64_t one[] = {1};
        ASSERT_TRUE(is_ok(pool.commit(*step, one)));
        std::vector<double> want(32);
        for (int h = 0; h < 4; ++h) {
          double bc = 0.0;
          for (int n = 0; n < 16; ++n) {
            bc += static_cast<double>(b[h / 2 * 16 + n]) * static_cast<double>(cc[h / 2 * 16 + n]);
          }
          for (int p = 0; p < 8; ++p) {
            const auto i = static_cast<std::size_t>(h * 8 + p);
            want[i] = static_cast<double>(expected_dt) * static_cast<double>(x[i]) * bc;
          }
        }
        const std::int64_t shape[] = {4, 8};
        EXPECT_TRUE(close(y, want, 1e-5, shape)) << "limited " << limited << ", slot " << slot;
      }
    }
  }
}

// Softplus far from 0 on both sides, where log1p(exp(x)) overflows or vanishes.
TEST(Mamba2, SoftplusOfLargeArguments) {
  Mamba2Case c = small_case("softplus", 8, 4);
  c.d = false;
  c.dt_bias = false;
  const Mamba2Model model(c);
  Mamba2Reference oracle(c.shape, model.layer(0).params);
  for (const CpuContext& context : Contexts()) {
    for (const float raw :
         {-90.0f, -30.0f, -16.0f, -5.0f, 0.0f, 5.0f, 19.9f, 20.1f, 80.0f, 100.0f}) {
      for (const RowKind kind : {RowKind::kCommitted, RowKind::kTentative}) {
        StatePool pool = model.make_pool(1);
        ASSERT_TRUE(is_ok(pool.reset(0)));
        Mamba2Model::Inputs in = model.inputs(0, 1);
        in.dt.assign(4, raw);
        Mamba2Token token;
        token.x.assign(in.u.begin(), in.u.begin() + 32);
        token.b.assign(in.u.begin() + 32, in.u.begin() + 64);
        token.c.assign(in.u.begin() + 64, in.u.end());
        token.dt = in.dt;
        Mamba2Reference fresh(c.shape, model.layer(0).params);
        const std::vector<double> want = fresh.step(token);
        std::vector<float> y(32, kUnwritten);
        Mamba2Operands operands;
        operands.x = TensorView::contiguous(token.x.data(), DType::kF32, {1, 4, 8});
        operands.b = TensorView::contiguous(token.b.data(), DType::kF32, {1, 2, 16});
        operands.c = TensorView::contiguous(token.c.data(), DType::kF32, {1, 2, 16});
        operands.dt = TensorView::contiguous(token.dt.data(), DType::kF32, {1, 4});
        operands.y = TensorView::contiguous(y.data(), DType::kF32, {1, 4, 8});
        const std::vector<StepRow> rows = {{0, kind, 0, 1, {}}};
        Result<Step> step = pool.begin_step(rows);
        ASSERT_TRUE(is_ok(step));
        ASSERT_TRUE(is_ok(mamba2_step(context, pool, 0, *step, model.op_params(0), operands)));
        const std::int64_t shape[] = {4, 8};
        EXPECT_TRUE(close(y, want, 1e-5, shape)) << "dt_raw " << raw;
      }
    }
  }
}

// C78: the stored state itself, not only outputs, from a non-zero start and with head_dim != state.
TEST(Mamba2, C78_StoredStateIsHeadsByHeadDimByStateSize) {
  Mamba2Case c = small_case("layout", 8, 4);
  c.shape = {6, 24, 16, 3};
  const Mamba2Model model(c);
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(1);
    Mamba2Runner runner(model, pool, context);
    ASSERT_TRUE(is_ok(pool.reset(0)));
    SequenceOracle oracle(model);
    for (int step = 0; step < 3; ++step) {
      const std::vector<TokenId> tokens = names(1, step * 9, 9);
      runner.step({committed(0, tokens)});
      oracle.run(tokens);
      const std::int64_t shape[] = {6, 24, 16};
      EXPECT_TRUE(close(checkpoint_values(pool, 0, 0), oracle.state(0), 1e-6, shape))
          << describe(context);
    }
  }
}

// The tests can fail: one changed record, one changed checkpoint element, one changed gate is seen.
TEST(Mamba2, ChangedStateIsSeen) {
  const Mamba2Case c = small_case("teeth", 8, 4);
  const Mamba2Model model(c);
  for (const char* name : {"checkpoint", "x", "b", "dt"}) {
    for (const CpuContext& context : Contexts()) {
      StatePool pool = model.make_pool(2);
      Mamba2Runner runner(model, pool, context);
      for (std::int32_t slot = 0; slot < 2; ++slot) {
        ASSERT_TRUE(is_ok(pool.reset(slot)));
        runner.step({committed(slot, names(1, 0, 3))});
        runner.step({tentative(slot, names(1, 3, 2), 2)});
      }
      const Field& field = pool.impl().layout(0).field(name);
      const std::int64_t place = field.kind == FieldKind::kCheckpoint ? 0 : 4 % field.places;
      std::byte* data = pool.impl().field(0, 1, field);
      const std::int64_t at = place * field.inner;
      store_element(field.dtype, data, at, load_element(field.dtype, data, at) + 0.01f);
      const StepOutput output =
          runner.step({tentative(0, names(1, 5, 1), 1), tentative(1, names(1, 5, 1), 1)});
      SequenceOracle oracle(model);
      oracle.run(names(1, 0, 5));
      const OracleOutput want = oracle.run(names(1, 5, 1));
      const std::int64_t shape[] = {4, 8};
      EXPECT_TRUE(close(output[0][0], want[0], 1e-5, shape));
      EXPECT_FALSE(close(output[1][0], want[0], 1e-5, shape)) << name;
    }
  }
}

TEST(Mamba2, ExplainNamesTheKernel) {
  const Mamba2Model model(small_case("explain", 8, 4));
  StatePool pool = model.make_pool(1);
  for (const CpuContext& context : Contexts({1})) {
    const Result<std::string> text = mamba2_explain(context, pool, 0);
    ASSERT_TRUE(is_ok(text));
    EXPECT_NE(text.value().find(to_string(context.isa)), std::string::npos) << text.value();
  }
  EXPECT_TRUE(refused(mamba2_explain({}, pool, 1), StatusCode::kInvalidArgument, {"1"}));
  EXPECT_TRUE(refused(mamba2_explain({}, pool, -1), StatusCode::kInvalidArgument, {"-1"}));
}

// State traffic is what must move: checkpoint once per read or write, records once.
TEST(Mamba2, TrafficIsWhatMustMove) {
  const Mamba2Shape shape{4, 8, 16, 2};
  const std::int64_t state = 4 * 8 * 16 * 4;
  const std::int64_t record = 4 * (4 * 8 + 2 * 16 + 4);
  const ReplayLimits limits{8, 4};
  const auto traffic = [&](RowKind kind, Cursor cursor, std::int64_t tokens) {
    return mamba2_row_traffic(shape, DType::kF32, DType::kF32, limits, kind, cursor, tokens);
  };
  // Nothing is read for a sequence that starts.
  StateTraffic t = traffic(RowKind::kTentative, {0, 0, false}, 3);
  EXPECT_EQ(t.checkpoint_read, 0);
  EXPECT_EQ(t.checkpoint_written, 0);
  EXPECT_EQ(t.ring_written, 3 * record);
  // A step between flushes reads the checkpoint and the live records.
  t = traffic(RowKind::kTentative, {10, 13, false}, 2);
  EXPECT_EQ(t.checkpoint_read, state);
  EXPECT_EQ(t.checkpoint_written, 0);
  EXPECT_EQ(t.ring_written, 2 * record);
  EXPECT_GT(t.ring_read, 0);
  EXPECT_EQ(traffic(RowKind::kTentative, {10, 14, false}, 2).ring_read - t.ring_read,
            t.ring_read / 3);
  // A flush also writes it.
  t = traffic(RowKind::kTentative, {10, 15, false}, 2);
  EXPECT_EQ(t.checkpoint_read, state);
  EXPECT_EQ(t.checkpoint_written, state);
  EXPECT_EQ(t.ring_written, 2 * record);
  t = traffic(RowKind::kCommitted, {10, 10, false}, 100);
  EXPECT_EQ(t.checkpoint_read, state);
  EXPECT_EQ(t.checkpoint_written, state);
  EXPECT_EQ(t.ring_read, 0);
  EXPECT_EQ(t.ring_written, 0);

  // The pool adds them up over rows and layers.
  Mamba2Case c = small_case("traffic", 8, 4);
  c.layers = 2;
  const Mamba2Model model(c);
  StatePool pool = model.make_pool(2);
  Mamba2Runner runner(model, pool, {});
  ASSERT_TRUE(is_ok(pool.reset(0)));
  ASSERT_TRUE(is_ok(pool.reset(1)));
  runner.step({committed(0, names(1, 0, 5)), tentative(1, names(2, 0, 4), 3)});
  EXPECT_EQ(pool.traffic().checkpoint_written, 2 * state);
  EXPECT_EQ(pool.traffic().ring_written, 2 * 4 * record);
  pool.reset_traffic();
  EXPECT_EQ(pool.traffic().ring_written, 0);
  runner.step({padding(4), tentative(1, names(2, 4, 1), 1)});
  EXPECT_EQ(pool.traffic().checkpoint_read, 0);  // position 0 is zero by definition
  EXPECT_EQ(pool.traffic().ring_written, 2 * record);
}

}  // namespace
}  // namespace replayssm::testing
