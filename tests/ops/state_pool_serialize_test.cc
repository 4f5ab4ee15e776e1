// Saved states: back into the same pool, another slot, other windows; damaged or foreign images.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "ops/mamba2_cases.h"
#include "support/mamba2_harness.h"
#include "support/plain_shadow.h"
#include "support/pool_access.h"

namespace replayssm::testing {
namespace {

Mamba2Case save_case(DType checkpoint = DType::kF32, DType activation = DType::kF32) {
  Mamba2Case c = small_case(std::string(to_string(checkpoint)) + "_" + to_string(activation), 8, 3);
  c.checkpoint = checkpoint;
  c.activation = activation;
  c.conv_width = 4;
  c.layers = 2;
  return c;
}

void expect_continues(Mamba2Runner& runner, std::int32_t slot, std::int64_t position,
                      const std::string& where) {
  SequenceOracle oracle(runner.model());
  oracle.run(names(1, 0, position));
  const int draft = runner.model().test_case().limits.draft_capacity;
  for (int i = 0; i < 9; ++i) {
    const std::vector<TokenId> tokens = names(60u + static_cast<unsigned>(i), 0, 1 + i % draft);
    const auto accepted = static_cast<std::int64_t>(i % 3 == 0 ? 0 : tokens.size());
    const StepOutput output = runner.step({tentative(slot, tokens, accepted)});
    expect_close(output[0], oracle.run(tokens, static_cast<std::size_t>(accepted)),
                 runner.model().test_case(), where + ", step " + std::to_string(i));
  }
}

class Serialize : public ::testing::TestWithParam<Mamba2Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, Serialize,
                         ::testing::Values(save_case(DType::kF32, DType::kF32),
                                           save_case(DType::kF32, DType::kBF16),
                                           save_case(DType::kBF16, DType::kF32),
                                           save_case(DType::kBF16, DType::kBF16)),
                         [](const auto& test) { return test.param.name; });

constexpr std::int64_t kFolded[] = {0, 1, 2, 6, 10, 11, 12};

// C01, C61: save, let somebody else use the slot, load into this and another slot: bit for bit the
// uninterrupted sequence. Wrapped rings, position 0, sequences shorter than the convolution; twice.
TEST_P(Serialize, C01_SameGeometryIsBitEqual) {
  Mamba2Case c = GetParam();
  for (const bool rewindable : {false, true}) {
    c.rewindable = rewindable;
    const Mamba2Model model(c);
    for (const CpuContext& context : Contexts({1})) {
      StatePool pool = model.make_pool(4);
      Mamba2Runner runner(model, pool, context);
      for (const std::int64_t folded : kFolded) {
        for (const std::int64_t live : {0, 1, 3, 5, 8}) {
          const std::string where =
              "folded " + std::to_string(folded) + ", live " + std::to_string(live);
          prepare(runner, 3, folded, live);
          const std::vector<std::byte> before = slot_bytes(pool, 3);
          const Result<std::vector<std::byte>> image = pool.save(3);
          ASSERT_TRUE(is_ok(image));
          EXPECT_TRUE(same_bytes(slot_bytes(pool, 3), before)) << "save writes nothing";
          ASSERT_TRUE(is_ok(pool.copy(3, 0)));  // goes on without interruption
          ASSERT_TRUE(is_ok(pool.reset(3)));
          runner.step({committed(3, names(9, 0, 7))});
          runner.step({tentative(3, names(9, 7, 3), 3)});
          ASSERT_TRUE(is_ok(pool.load(context, 1, *image)));
          ASSERT_TRUE(is_ok(pool.load(context, 3, *image)));
          EXPECT_EQ(pool.cursor(1).value(), (Cursor{folded, folded + live, false}));
          EXPECT_TRUE(same_bytes(slot_bytes(pool, 1), before)) << where;
          EXPECT_TRUE(same_bytes(slot_bytes(pool, 3), before)) << where;
          EXPECT_TRUE(same_bytes(pool.save(1).value(), *image)) << where;
          for (int step = 0; step < 5; ++step) {
            std::vector<RowSpec> rows;
            for (const std::int32_t slot : {0, 1, 3}) {
              rows.push_back(tentative(slot, names(2, step * 3, 3), 1 + step % 3));
            }
            const StepOutput output = runner.step(rows);
            for (std::size_t layer = 0; layer < 2; ++layer) {
              EXPECT_TRUE(same_bits(output[1][layer], output[0][layer])) << where;
              EXPECT_TRUE(same_bits(output[2][layer], output[0][layer])) << where;
            }
            if (step == 2) {  // a second backup, of the restored sequence
              ASSERT_TRUE(is_ok(pool.load(context, 1, pool.save(1).value())));
            }
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Other windows and draft capacities, rewindable or not: records that do not fit are folded, bit
// for bit a flush; those that fit are kept.
TEST_P(Serialize, OtherWindowsKeepOrFoldTheRecords) {
  Mamba2Case from = GetParam();
  for (const CpuContext& context : {CpuContext{nullptr, supported_isas().back()}}) {
    for (const bool from_rewindable : {false, true}) {
      from.rewindable = from_rewindable;
      const Mamba2Model model(from);
      StatePool source = model.make_pool(1);
      Mamba2Runner source_runner(model, source, context);
      PlainShadow shadow(model, 1, context);
      for (const bool to_rewindable : {false, true}) {
        for (const ReplayLimits limits :
             {ReplayLimits{1, 1}, {2, 2}, {4, 1}, {5, 5}, {8, 3}, {16, 4}, {64, 16}}) {
          Mamba2Case to = GetParam();
          to.limits = limits;
          to.rewindable = to_rewindable;
          const Mamba2Model to_model(to);
          StatePool target = to_model.make_pool(2);
          Mamba2Runner runner(to_model, target, context);
          for (const std::int64_t folded : {0, 2, 11}) {
            for (const std::int64_t live : {0, 1, 4, 5, 8}) {
              const std::string where = "L " + std::to_string(limits.window) + ", folded " +
                                        std::to_string(folded) + ", live " + std::to_string(live) +
                                        (from_rewindable ? ", from rewindable" : "") +
                                        (to_rewindable ? ", to rewindable" : "");
              prepare(source_runner, 0, folded, live);
              ASSERT_TRUE(is_ok(target.load(context, 1, source.save(0).value()))) << where;
              const Cursor cursor = target.cursor(1).value();
              EXPECT_EQ(cursor.position, folded + live) << where;
              ASSERT_LE(cursor.live(), limits.window) << where;
              if (live <= limits.window && (from_rewindable || !to_rewindable)) {
                EXPECT_EQ(cursor.checkpoint_position, folded) << where;
              }
              if (cursor.checkpoint_position != folded) {
                EXPECT_EQ(cursor.live(), 0) << where;
                shadow.reset(0);
                shadow.decode(0, names(1, 0, folded));
                shadow.fold(0, names(1, folded, live));
                shadow.expect_checkpoint(target, 1, 0, where);
              }
              // Whatever prefix the pool now says it can reach must be right.
              if (to_rewindable) {
                for (std::int64_t p = cursor.checkpoint_position; p <= cursor.position; ++p) {
                  ASSERT_TRUE(is_ok(target.copy(1, 0)));
                  ASSERT_TRUE(is_ok(target.truncate(0, p))) << where;
                  expect_continues(runner, 0, p, where + ", truncated to " + std::to_string(p));
                }
              }
              expect_continues(runner, 1, folded + live, where);
              if (HasFailure()) return;
            }
          }
        }
      }
    }
  }
}

// Damage: cut off anywhere, one bit changed anywhere, bytes appended. Refused, and the slot and the
// pool stay as they are.
TEST(SerializeDamage, TruncatedImagesAreRefused) {
  const Mamba2Model model(save_case());
  StatePool pool = model.make_pool(3);
  Mamba2Runner runner(model, pool, {});
  prepare(runner, 0, 5, 3);
  prepare(runner, 1, 2, 1);
  const std::vector<std::byte> image = pool.save(0).value();
  const std::vector<std::byte> memory = pool_bytes(pool);
  for (std::size_t size = 0; size < image.size(); ++size) {
    for (const std::int32_t slot : {1, 2}) {
      const Status status = pool.load({}, slot, std::span(image).first(size));
      ASSERT_TRUE(refused(status, StatusCode::kDataLoss)) << size << " of " << image.size();
    }
  }
  for (const std::size_t more : {1, 8, 100}) {
    std::vector<std::byte> longer = image;
    longer.resize(image.size() + more);
    EXPECT_TRUE(refused(pool.load({}, 1, longer), StatusCode::kDataLoss));
  }
  EXPECT_TRUE(same_bytes(pool_bytes(pool), memory));
  EXPECT_EQ(pool.cursor(1).value(), (Cursor{2, 3, false}));
  EXPECT_FALSE(pool.cursor(2).ok());
  EXPECT_EQ(pool.free_slots(), 1);
}

TEST(SerializeDamage, FlippedBitsAreRefused) {
  const Mamba2Model model(save_case());
  StatePool pool = model.make_pool(2);
  Mamba2Runner runner(model, pool, {});
  prepare(runner, 0, 5, 3);
  prepare(runner, 1, 2, 1);
  std::vector<std::byte> image = pool.save(0).value();
  const std::vector<std::byte> memory = pool_bytes(pool);
  for (std::size_t at = 0; at < image.size(); ++at) {
    const auto bit = std::byte{static_cast<unsigned char>(1u << (at * 5 % 8))};
    image[at] ^= bit;
    const Status status = pool.load({}, 1, image);
    ASSERT_FALSE(status.ok()) << "byte " << at;
    EXPECT_TRUE(status.code() == StatusCode::kDataLoss || status.code() == StatusCode::kUnsupported)
        << status.message();
    image[at] ^= bit;
  }
  EXPECT_TRUE(same_bytes(pool_bytes(pool), memory));
  EXPECT_EQ(pool.cursor(1).value(), (Cursor{2, 3, false}));
  EXPECT_TRUE(is_ok(pool.load({}, 1, image)));
}

/// The checksum of an image made right again after a change: FNV-1a 64 of everything before it.
void reseal(std::vector<std::byte>& image) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (std::size_t i = 0; i + 8 < image.size(); ++i) {
    hash = (hash ^ static_cast<std::uint64_t>(image[i])) * 0x100000001b3u;
  }
  std::memcpy(image.data() + image.size() - 8, &hash, 8);
}

// Changed bytes under a right checksum: nothing but records, states and inputs may change without a
// refusal, and nothing crashes.
TEST(SerializeDamage, ResealedImagesNeverCrash) {
  const Mamba2Model model(save_case());
  StatePool pool = model.make_pool(2);
  Mamba2Runner runner(model, pool, {});
  prepare(runner, 0, 5, 3);
  const std::vector<std::byte> image = pool.save(0).value();
  const std::size_t header = 8 + 4 + 4 + 4 + 2 + 4 + 2 * 7 * 8 + 8 + 8 + 1 + 8;
  Rng rng(4);
  for (std::size_t at = 0; at < header; ++at) {
    for (const int value : {0x00, 0x01, 0x7f, 0x80, 0xff}) {
      std::vector<std::byte> changed = image;
      if (changed[at] == std::byte(value)) continue;
      changed[at] = std::byte(value);
      reseal(changed);
      const std::vector<std::byte> memory = pool_bytes(pool);
      const Status status = pool.load({}, 1, changed);
      if (!status.ok()) {
        EXPECT_TRUE(same_bytes(pool_bytes(pool), memory)) << "byte " << at;
        continue;
      }
      const Cursor cursor = pool.cursor(1).value();
      EXPECT_GE(cursor.live(), 0) << "byte " << at;
      EXPECT_LE(cursor.live(), 8) << "byte " << at;
      runner.step({tentative(1, names(2, 0, 2), 1)});
    }
  }
  // The version, with the message's two values.
  std::vector<std::byte> version = image;
  version[8] = std::byte{99};
  reseal(version);
  EXPECT_TRUE(refused(pool.load({}, 1, version), StatusCode::kUnsupported, {"99", "1"}));
}

// Foreign states are refused with both values, whatever else differs.
TEST(SerializeForeign, C45_OtherModelsAreRefused) {
  const Mamba2Case c = save_case();
  const Mamba2Model model(c);
  StatePool pool = model.make_pool(1);
  Mamba2Runner runner(model, pool, {});
  prepare(runner, 0, 5, 3);
  const std::vector<std::byte> image = pool.save(0).value();
  struct Case {
    const char* name;
    void (*edit)(StatePoolOptions&);
    std::vector<std::string> parts;
  };
  const std::vector<Case> cases = {
      {"model", [](StatePoolOptions& o) { o.model_id = "other"; }, {"test", "other"}},
      {"no model", [](StatePoolOptions& o) { o.model_id = ""; }, {"test"}},
      {"checkpoint", [](StatePoolOptions& o) { o.checkpoint = DType::kBF16; }, {"f32", "bf16"}},
      {"activation", [](StatePoolOptions& o) { o.activation = DType::kBF16; }, {"f32", "bf16"}},
      {"fewer layers", [](StatePoolOptions& o) { o.layers.pop_back(); }, {"2", "1"}},
      {"more layers", [](StatePoolOptions& o) { o.layers.push_back(o.layers[0]); }, {"2", "3"}},
      {"heads",
       [](StatePoolOptions& o) { std::get<Mamba2Shape>(o.layers[1].recurrence).heads = 6; },
       {"heads", "4", "6"}},
      {"head_dim",
       [](StatePoolOptions& o) { std::get<Mamba2Shape>(o.layers[0].recurrence).head_dim = 16; },
       {"head_dim", "8", "16"}},
      {"state_size",
       [](StatePoolOptions& o) { std::get<Mamba2Shape>(o.layers[0].recurrence).state_size = 32; },
       {"state_size", "16", "32"}},
      {"groups",
       [](StatePoolOptions& o) { std::get<Mamba2Shape>(o.layers[0].recurrence).groups = 1; },
       {"groups", "2", "1"}},
      {"channels", [](StatePoolOptions& o) { o.layers[1].conv.channels = 95; }, {"96", "95"}},
      {"width", [](StatePoolOptions& o) { o.layers[1].conv.width = 3; }, {"4", "3"}},
      {"no convolution", [](StatePoolOptions& o) { o.layers[1].conv = {}; }, {"96", "0"}},
      // Transposed heads and columns: the same number of elements.
      {"transposed",
       [](StatePoolOptions& o) {
         auto& shape = std::get<Mamba2Shape>(o.layers[0].recurrence);
         shape.head_dim = 16;
         shape.state_size = 16;
         shape.heads = 2;
       },
       {"heads", "4", "2"}},
  };
  for (const Case& foreign : cases) {
    StatePoolOptions options = c.options(2);
    foreign.edit(options);
    Result<StatePool> other = StatePool::create(options);
    ASSERT_TRUE(is_ok(other)) << foreign.name;
    const std::vector<std::byte> memory = pool_bytes(*other);
    const Status status = other->load({}, 1, image);
    ASSERT_FALSE(status.ok()) << foreign.name;
    for (const std::string& part : foreign.parts) {
      EXPECT_NE(status.message().find(part), std::string::npos)
          << foreign.name << ": '" << status.message() << "' does not contain '" << part << "'";
    }
    EXPECT_TRUE(same_bytes(pool_bytes(*other), memory)) << foreign.name;
    EXPECT_EQ(other->free_slots(), 2) << foreign.name;
  }
}

TEST(SerializeForeign, FoldingOnLoadNeedsA) {
  Mamba2Case c = save_case();
  const Mamba2Model model(c);
  StatePool source = model.make_pool(1);
  Mamba2Runner runner(model, source, {});
  prepare(runner, 0, 5, 4);
  c.limits = {2, 1};
  Result<StatePool> pool = StatePool::create(c.options(1));
  ASSERT_TRUE(is_ok(pool));
  const std::vector<std::byte> memory = pool_bytes(*pool);
  EXPECT_TRUE(
      refused(pool->load({}, 0, source.save(0).value()), StatusCode::kFailedPrecondition, {"0"}));
  EXPECT_TRUE(same_bytes(pool_bytes(*pool), memory));
  EXPECT_EQ(pool->free_slots(), 1);
}

// An image does not depend on the slot, the ring's phase or the padding of the pool it comes from.
TEST(SerializeForeign, ImagesAreCanonical) {
  const Mamba2Case c = save_case();
  const Mamba2Model model(c);
  StatePool first = model.make_pool(3);
  StatePoolOptions options = c.options(5);
  options.page_alignment = 4096;
  options.limits = {8, 2};
  options.poison = false;
  StatePool second = model.make_pool(options);
  Mamba2Runner a(model, first, {});
  Mamba2Runner b(model, second, {});
  prepare(a, 2, 6, 4);
  prepare(b, 4, 6, 4);
  EXPECT_TRUE(same_bytes(first.save(2).value(), second.save(4).value()));
}

}  // namespace
}  // namespace replayssm::testing
