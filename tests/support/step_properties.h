// What the outputs and writes of steps may depend on, for any recurrence family. Cases have a draft
// capacity of 4 and a window of 8 unless said.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "support/pool_access.h"
#include "support/step_harness.h"

namespace replayssm::testing {

/// By layer, the outputs of a sequence fed in committed rows of these lengths.
template <typename Runner>
std::vector<std::vector<float>> run_chunks(Runner& runner, std::int32_t slot,
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

/// C71, C77: one prompt in every chunking gives the same outputs, checkpoint and convolution
/// window.
template <typename Model>
void expect_chunking_changes_no_bit(const Model& model) {
  const std::vector<TokenId> tokens = names(1, 0, 40);
  const std::vector<std::int64_t> ones(40, 1);
  const std::vector<std::vector<std::int64_t>> chunkings = {
      ones, {40}, {17, 23}, {39, 1}, {1, 39}, {8, 8, 8, 8, 8}, {3, 5, 8, 2, 22}, {13, 27}};
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(static_cast<std::int64_t>(chunkings.size()));
    typename Model::Runner runner(model, pool, context);
    std::vector<std::vector<float>> first;
    for (std::size_t i = 0; i < chunkings.size(); ++i) {
      const auto slot = static_cast<std::int32_t>(i);
      ASSERT_TRUE(is_ok(pool.reset(slot)));
      const auto all = run_chunks(runner, slot, tokens, chunkings[i]);
      if (i == 0) {
        first = all;
        OracleOf<Model> oracle(model);
        expect_close(all, oracle.run(tokens), model.test_case(), describe(context));
        continue;
      }
      for (int layer = 0; layer < model.test_case().layers; ++layer) {
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

/// their own runs bit for bit, y and state.
template <typename Model>
void expect_packed_prompts_equal_their_own_runs(const Model& model) {
  const std::int64_t lengths[] = {5, 11, 16, 1};
  for (const CpuContext& context : Contexts()) {
    StatePool together = model.make_pool(4);
    StatePool alone = model.make_pool(4);
    typename Model::Runner all(model, together, context);
    typename Model::Runner single(model, alone, context);
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
      for (int layer = 0; layer < model.test_case().layers; ++layer) {
        EXPECT_TRUE(same_bits(packed[row][static_cast<std::size_t>(layer)],
                              output[0][static_cast<std::size_t>(layer)]));
        EXPECT_TRUE(same_bytes(checkpoint_bytes(together, layer, i),
                               checkpoint_bytes(alone, layer, 3 - i)));
      }
    }
  }
}

template <typename Model>
void expect_row_alone_equals_row_among_others(const Model& model) {
  constexpr std::int32_t kSlots = 4;
  for (const CpuContext& context : Contexts()) {
    StatePool together = model.make_pool(kSlots);
    StatePool alone = model.make_pool(kSlots);
    typename Model::Runner all(model, together, context);
    typename Model::Runner single(model, alone, context);
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

template <typename Model>
void expect_tentative_step_writes_its_own_places_only(const Model& model) {
  StatePoolOptions options = model.test_case().options(3);
  options.poison = false;  // a commit fills places it gives up with NaN
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(options);
    typename Model::Runner runner(model, pool, context);
    for (std::int32_t slot = 0; slot < 3; ++slot) {
      ASSERT_TRUE(is_ok(pool.reset(slot)));
      runner.step({committed(slot, names(5, 10 * slot, 7))});
      runner.step({tentative(slot, names(6, 10 * slot, 3), 2)});
    }
    const std::vector<std::byte> others[] = {slot_bytes(pool, 0), slot_bytes(pool, 2)};
    const std::vector<std::byte> before = slot_bytes(pool, 1);
    ASSERT_FALSE(tentative_row_flushes(pool.cursor(1).value(), model.test_case().limits));
    runner.step({tentative(1, names(7, 0, 3), 1)});

    // Erase what may change from both images and compare the rest.
    const std::vector<std::byte> after = slot_bytes(pool, 1);
    std::vector<std::byte> expected = before;
    std::size_t page = 0;
    std::size_t written = 0;
    for (int layer = 0; layer < pool.layer_count(); ++layer) {
      const PageLayout& layout = pool.impl().layout(layer);
      for (const Field& field : layout.fields) {
        if (field.is_state()) continue;
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

/// 0 (checked by the runner) though operands and outputs start as NaN.
template <typename Model>
void expect_padding_touches_nothing(const Model& model) {
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(2);
    typename Model::Runner runner(model, pool, context);
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

template <typename Model>
void expect_live_rows_are_exact_beside_padding(const Model& model) {
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(8);
    typename Model::Runner runner(model, pool, context);
    std::vector<OracleOf<Model>> oracles(3, OracleOf<Model>(model));
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
        expect_close(output[i], want, model.test_case(), "step " + std::to_string(step));
      }
    }
  }
}

/// tokens again they compute the same bits.
template <typename Model>
void expect_accepting_nothing_keeps_the_state(const Model& model) {
  const std::int64_t accepted[] = {0, 1, 3, 0};
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(4);
    typename Model::Runner runner(model, pool, context);
    std::vector<OracleOf<Model>> oracles(4, OracleOf<Model>(model));
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
      expect_close(second[slot], oracles[slot].run(rows[slot].tokens, 0), model.test_case(),
                   describe(context));
    }
  }
}

/// are rejected each time, so every repetition computes the same bits.
template <typename Model>
void expect_append_that_wraps_is_stable(const Model& model) {
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(1);
    typename Model::Runner runner(model, pool, context);
    ASSERT_TRUE(is_ok(pool.reset(0)));
    runner.step({committed(0, names(1, 0, 7))});
    runner.step({tentative(0, names(1, 7, 3), 3)});
    // Ring of 12 places: the next tokens are positions 10 .. 13.
    ASSERT_FALSE(tentative_row_flushes(pool.cursor(0).value(), model.test_case().limits));
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

/// state), a new sequence computes what it computes in fresh memory. Also for a prompt of one
/// token.
template <typename Model>
void expect_recycled_memory_is_never_read(const Model& model) {
  const auto& c = model.test_case();
  const auto run = [&](StatePool& pool, const CpuContext& context) {
    std::vector<float> all;
    typename Model::Runner runner(model, pool, context);
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

template <typename Model>
void expect_rows_narrower_than_the_capacity(const Model& model) {
  const auto& c = model.test_case();
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(32);
    typename Model::Runner runner(model, pool, context);
    std::vector<RowSpec> rows;
    std::vector<OracleOf<Model>> oracles;
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

template <typename Model>
void expect_placeholders_are_not_committed(const Model& model) {
  for (const CpuContext& context : Contexts()) {
    StatePool pool = model.make_pool(3);
    typename Model::Runner runner(model, pool, context);
    for (std::int32_t slot = 0; slot < 3; ++slot) ASSERT_TRUE(is_ok(pool.reset(slot)));
    runner.step({committed(0, names(1, 0, 6)), committed(1, names(2, 0, 5))});
    runner.step({committed(0, names(1, 6, 1)), padding(3), tentative(1, names(2, 5, 4), 2)});
    EXPECT_EQ(pool.cursor(0).value(), (Cursor{7, 7, false}));
    runner.step({committed(2, names(1, 0, 7))});
    EXPECT_TRUE(same_bytes(checkpoint_bytes(pool, 0, 0), checkpoint_bytes(pool, 0, 2)));
  }
}

/// A flush by hand and a committed row with live records leave the same, in a batch of both and
/// with 2 threads, and so does a row per token.
template <typename Model>
void expect_committed_row_folds_live_records_first(const Model& model) {
  constexpr std::int64_t kTokens = 10;
  for (const CpuContext& context : Contexts({2})) {
    StatePool pool = model.make_pool(3);
    typename Model::Runner runner(model, pool, context);
    for (std::int32_t slot = 0; slot < 3; ++slot) {
      ASSERT_TRUE(is_ok(pool.reset(slot)));
      runner.step({committed(slot, names(1, 0, 5))});
      runner.step({tentative(slot, names(1, 5, 1), 1)});
    }
    // Slot 0 is flushed by hand, then decodes; slot 1 does both in one row; slot 2 token by token.
    ASSERT_TRUE(is_ok(pool.force_flush(0)));
    runner.step({tentative(0, names(9, 0, 1), 0), committed(1, names(1, 6, kTokens))});
    EXPECT_EQ(pool.cursor(0).value(), (Cursor{6, 6, false}));
    for (std::int64_t i = 0; i < kTokens; ++i) {
      runner.step({committed(2, names(1, 6 + i, 1)), committed(0, names(1, 6 + i, 1))});
    }
    for (int layer = 0; layer < model.test_case().layers; ++layer) {
      for (const std::int32_t slot : {0, 2}) {
        EXPECT_TRUE(
            same_bytes(checkpoint_bytes(pool, layer, slot), checkpoint_bytes(pool, layer, 1)));
      }
    }
  }
}

}  // namespace replayssm::testing
