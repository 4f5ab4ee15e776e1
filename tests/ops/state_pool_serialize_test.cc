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
#include "support/saves.h"

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

class Serialize : public ::testing::TestWithParam<Mamba2Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, Serialize,
                         ::testing::Values(save_case(DType::kF32, DType::kF32),
                                           save_case(DType::kF32, DType::kBF16),
                                           save_case(DType::kBF16, DType::kF32),
                                           save_case(DType::kBF16, DType::kBF16),
                                           save_case(DType::kF16, DType::kF16)),
                         [](const auto& test) { return test.param.name; });

TEST_P(Serialize, C01_SameGeometryIsBitEqual) {
  expect_same_geometry_is_bit_equal(Mamba2Model(GetParam()));
}
// Other windows and draft capacities, rewindable or not: records that do not fit are folded, bit
TEST_P(Serialize, OtherWindowsKeepOrFoldTheRecords) {
  expect_other_windows_keep_or_fold(Mamba2Model(GetParam()));
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
  EXPECT_TRUE(refused(pool.load({}, 1, version), StatusCode::kUnsupported, {"99", "4"}));
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
