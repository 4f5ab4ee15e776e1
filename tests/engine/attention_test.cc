// Attention of the CPU backend against a naive double-precision loop, on every instruction set this
// processor has, and the cache of keys and values.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/kv_cache.h"
#include "engine/backend_support.h"

namespace replayssm {
namespace {

using test::BackendTest;
using test::kStorage;
using test::Operand;
using test::Output;

INSTANTIATE_TEST_SUITE_P(Isa, BackendTest, testing::ValuesIn(supported_isas()),
                         [](const auto& param) { return std::string(to_string(param.param)); });

// ---- attention ----

struct AttentionCase {
  std::int64_t query_heads;
  std::int64_t kv_heads;
  std::int64_t head_dim;
};

constexpr AttentionCase kAttentionCases[] = {{1, 1, 1},  {4, 2, 5},   {6, 2, 33}, {8, 1, 64},
                                             {2, 2, 80}, {3, 1, 128}, {70, 1, 16}};

/// One sequence: queries, keys and values of all its tokens, and the oracle's answer.
struct Sequence {
  Sequence(const AttentionCase& c, std::int64_t length, std::mt19937& rng, float spread = 1.0f)
      : shape{c.query_heads, c.kv_heads, c.head_dim,
              1.0f / std::sqrt(static_cast<float>(c.head_dim))},
        tokens(length),
        q(DType::kF32, length, c.query_heads * c.head_dim, rng, spread),
        k(DType::kF32, length, c.kv_heads * c.head_dim, rng, spread),
        v(DType::kF32, length, c.kv_heads * c.head_dim, rng) {}

  std::vector<double> expected(std::int64_t token, DType dtype) const {
    const auto stored = [&](float x) {
      return static_cast<double>(dtype == DType::kBF16  ? to_float(to_bf16(x))
                                 : dtype == DType::kF16 ? to_float(to_f16(x))
                                                        : x);
    };
    std::vector<double> out;
    for (std::int64_t h = 0; h < shape.query_heads; ++h) {
      const std::int64_t kv = h / (shape.query_heads / shape.kv_heads) * shape.head_dim;
      std::vector<double> p;
      double largest = -std::numeric_limits<double>::infinity();
      for (std::int64_t j = 0; j <= token; ++j) {
        double dot = 0;
        for (std::int64_t d = 0; d < shape.head_dim; ++d) {
          dot += q.at(token, h * shape.head_dim + d) * stored(k.at(j, kv + d));
        }
        p.push_back(dot * shape.scale);
        largest = std::max(largest, p.back());
      }
      double total = 0;
      for (double& score : p) total += score = std::exp(score - largest);
      for (std::int64_t d = 0; d < shape.head_dim; ++d) {
        double sum = 0;
        for (std::int64_t j = 0; j <= token; ++j) {
          sum += p[static_cast<std::size_t>(j)] * stored(v.at(j, kv + d));
        }
        out.push_back(sum / total);
      }
    }
    return out;
  }

  KvCache cache(DType dtype, std::int64_t slots = 3) const {
    Result<KvCache> cache = KvCache::create({.layers = 2,
                                             .slots = slots,
                                             .capacity = tokens + 60,
                                             .kv_heads = shape.kv_heads,
                                             .head_dim = shape.head_dim,
                                             .dtype = dtype});
    EXPECT_TRUE(cache.ok()) << cache.status().message();
    // What has not been written yet must not matter. All ones is a NaN in every type.
    const std::size_t bytes =
        static_cast<std::size_t>(2 * slots * (tokens + 60) * shape.kv_heads * shape.head_dim) *
        size_of(dtype);
    std::memset(cache->key(0, 0, 0, 0), 0xff, bytes);
    std::memset(cache->value(0, 0, 0, 0), 0xff, bytes);
    return std::move(cache).value();
  }

  /// Runs tokens [begin, begin + count) and puts their outputs into the same rows of `out`.
  void run(Backend& backend, KvCache& cache, std::int64_t begin, std::int64_t count, bool is_prompt,
           Output& out) const {
    TensorView rows = out.view();
    rows.data = out.row(begin);
    const ForwardRow row{
        .slot = 1, .prompt = is_prompt, .begin = 0, .count = count, .position = begin};
    backend.attention({&row, 1}, shape, q.rows_view(begin, count), k.rows_view(begin, count),
                      v.rows_view(begin, count), cache, 1, rows);
  }

  AttentionShape shape;
  std::int64_t tokens;
  Operand q;
  Operand k;
  Operand v;
};

TEST_P(BackendTest, AttentionIsRightAndTheSameForAnyChunking) {
  ThreadPool pool(2);
  for (const DType dtype : kStorage) {
    for (const AttentionCase& c : kAttentionCases) {
      const std::int64_t length = c.query_heads * c.head_dim > 200 ? 101 : 150;
      const Sequence sequence(c, length, rng_);
      const std::int64_t features = c.query_heads * c.head_dim;
      CpuBackend backend(context());
      KvCache cache = sequence.cache(dtype);
      Output whole(length, features);
      sequence.run(backend, cache, 0, length, true, whole);
      EXPECT_TRUE(whole.guards_intact());
      for (const std::int64_t t : {std::int64_t{0}, std::int64_t{1}, std::int64_t{46},
                                   std::int64_t{47}, std::int64_t{48}, length - 1}) {
        const std::vector<double> expected = sequence.expected(t, dtype);
        for (std::int64_t f = 0; f < features; ++f) {
          ASSERT_NEAR(whole.at(t, f), expected[static_cast<std::size_t>(f)], 3e-6)
              << "token " << t << " feature " << f;
        }
      }
      CpuBackend threaded(context(&pool));
      for (const std::int64_t chunk : {1, 5, 64, 150}) {
        KvCache other_cache = sequence.cache(dtype);
        Output other(length, features);
        for (std::int64_t t = 0; t < length; t += chunk) {
          sequence.run(threaded, other_cache, t, std::min(chunk, length - t), t == 0, other);
        }
        EXPECT_TRUE(other.guards_intact());
        for (std::int64_t t = 0; t < length; ++t) {
          ASSERT_EQ(other.row_bits(t), whole.row_bits(t)) << "chunk " << chunk << " token " << t;
        }
      }
    }
  }
}

TEST_P(BackendTest, AttentionRowsAreIndependentAndPaddingIsUntouched) {
  ThreadPool pool(2);
  const AttentionCase c{6, 2, 33};
  const std::int64_t features = c.query_heads * c.head_dim;
  constexpr std::int64_t kTokens = 100;
  for (const DType dtype : kStorage) {
    const Sequence batch(c, kTokens, rng_);
    const std::vector<ForwardRow> rows = {
        {.slot = 2, .prompt = true, .begin = 0, .count = 60, .position = 0},
        {.slot = -1, .begin = 60, .count = 2, .position = 1000000},
        {.slot = 0, .begin = 62, .count = 1, .position = 0},
        {.slot = 3, .begin = 64, .count = 4, .position = 0},
        {.slot = 1, .prompt = true, .begin = 70, .count = 30, .position = 0}};
    CpuBackend backend(context(&pool));
    KvCache cache = batch.cache(dtype, 5);
    Output out(kTokens, features);
    backend.attention(rows, batch.shape, batch.q.view(), batch.k.view(), batch.v.view(), cache, 0,
                      out.view());
    EXPECT_TRUE(out.guards_intact());
    for (const std::int64_t t : {60, 61, 63, 68, 69}) EXPECT_TRUE(out.row_untouched(t)) << t;
    // Slot 4 belongs to nobody; all ones is what the cache was filled with.
    const std::vector<std::uint8_t> ones(static_cast<std::size_t>(c.head_dim) * size_of(dtype),
                                         0xff);
    for (std::int64_t i = 0; i < c.kv_heads * kTokens; ++i) {
      const std::int64_t h = i / kTokens;
      const std::int64_t p = i % kTokens;
      ASSERT_EQ(std::memcmp(cache.key(0, 4, h, p), ones.data(), ones.size()), 0);
      ASSERT_EQ(std::memcmp(cache.value(0, 4, h, p), ones.data(), ones.size()), 0);
    }
    CpuBackend single(context());
    for (const ForwardRow& row : rows) {
      if (row.slot < 0) continue;
      KvCache own = batch.cache(dtype, 5);
      Output alone(kTokens, features);
      single.attention({&row, 1}, batch.shape, batch.q.view(), batch.k.view(), batch.v.view(), own,
                       0, alone.view());
      for (std::int64_t t = row.begin; t < row.begin + row.count; ++t) {
        ASSERT_EQ(alone.row_bits(t), out.row_bits(t)) << t;
      }
    }
  }
}

TEST_P(BackendTest, RejectedTokensAreOverwritten) {
  const AttentionCase c{4, 2, 16};
  const Sequence sequence(c, 20, rng_);
  const Sequence draft(c, 20, rng_);
  CpuBackend backend(context());
  KvCache plain_cache = sequence.cache(DType::kBF16);
  Output plain(20, 64);
  sequence.run(backend, plain_cache, 0, 20, true, plain);
  KvCache cache = sequence.cache(DType::kBF16);
  Output out(20, 64);
  sequence.run(backend, cache, 0, 8, true, out);
  draft.run(backend, cache, 8, 5, false, out);
  sequence.run(backend, cache, 8, 12, false, out);
  for (std::int64_t t = 0; t < 20; ++t) EXPECT_EQ(out.row_bits(t), plain.row_bits(t)) << t;
}

TEST_P(BackendTest, AttentionSurvivesLargeScores) {
  for (const float spread : {1e2f, 1e9f, 1e17f}) {
    const AttentionCase c{4, 2, 40};
    const std::int64_t length = 101;
    const Sequence sequence(c, length, rng_, spread);
    CpuBackend backend(context());
    KvCache cache = sequence.cache(DType::kF32);
    Output out(length, c.query_heads * c.head_dim);
    sequence.run(backend, cache, 0, length, true, out);
    for (const std::int64_t t : {std::int64_t{0}, std::int64_t{50}, length - 1}) {
      const std::vector<double> expected = sequence.expected(t, DType::kF32);
      for (std::size_t f = 0; f < expected.size(); ++f) {
        // Scores of 1e4 carry an error of 1e-3 in fp32, which the exponential passes on.
        ASSERT_NEAR(out.at(t, static_cast<std::int64_t>(f)), expected[f], 2e-2) << t;
      }
    }
  }
}

TEST_P(BackendTest, ASingleKeyGivesItsValue) {
  for (const DType dtype : kStorage) {
    const AttentionCase c{6, 2, 33};
    Sequence sequence(c, 1, rng_, 1e4f);
    CpuBackend backend(context());
    KvCache cache = sequence.cache(dtype);
    Output out(1, c.query_heads * c.head_dim);
    sequence.run(backend, cache, 0, 1, false, out);
    const std::vector<double> expected = sequence.expected(0, dtype);
    for (std::size_t f = 0; f < expected.size(); ++f) {
      EXPECT_EQ(out.at(0, static_cast<std::int64_t>(f)), static_cast<float>(expected[f]));
    }
  }
}

// ---- KV cache ----

TEST(KvCacheTest, PlacesAreAdjacentAndDisjoint) {
  const KvCacheOptions options{
      .layers = 3, .slots = 4, .capacity = 5, .kv_heads = 2, .head_dim = 8, .dtype = DType::kBF16};
  EXPECT_EQ(KvCache::bytes_per_token(options), 2u * 3 * 2 * 8 * 2);
  Result<KvCache> cache = KvCache::create(options);
  ASSERT_TRUE(cache.ok()) << cache.status().message();
  const std::byte* key = cache->key(0, 0, 0, 0);
  const std::byte* value = cache->value(0, 0, 0, 0);
  std::ptrdiff_t offset = 0;
  for (int layer = 0; layer < 3; ++layer) {
    for (std::int64_t slot = 0; slot < 4; ++slot) {
      for (std::int64_t head = 0; head < 2; ++head) {
        for (std::int64_t position = 0; position < 5; ++position, offset += 16) {
          EXPECT_EQ(cache->key(layer, slot, head, position) - key, offset);
          EXPECT_EQ(cache->value(layer, slot, head, position) - value, offset);
        }
      }
    }
  }
  std::memset(cache->key(0, 0, 0, 0), 1, static_cast<std::size_t>(offset));
  std::memset(cache->value(0, 0, 0, 0), 2, static_cast<std::size_t>(offset));
  KvCache moved = std::move(cache).value();
  EXPECT_EQ(moved.key(0, 0, 0, 0), key);
  EXPECT_EQ(moved.key(2, 3, 1, 4)[15], std::byte{1});
  EXPECT_EQ(moved.value(2, 3, 1, 4)[15], std::byte{2});
}

TEST(KvCacheTest, ReservesWithoutTouching) {
  Result<KvCache> cache = KvCache::create({.layers = 1,
                                           .slots = 1024,
                                           .capacity = 8192,
                                           .kv_heads = 8,
                                           .head_dim = 64});  // 16 GiB each
  ASSERT_TRUE(cache.ok()) << cache.status().message();
  *cache->key(0, 1023, 7, 8191) = std::byte{3};
  EXPECT_EQ(*cache->key(0, 1023, 7, 8191), std::byte{3});
}

TEST(KvCacheTest, AModelWithoutAttentionNeedsNothing) {
  const Result<KvCache> cache = KvCache::create({});
  ASSERT_TRUE(cache.ok()) << cache.status().message();
  EXPECT_EQ(KvCache::bytes_per_token(cache->options()), 0u);
}

TEST(KvCacheTest, ErrorsNameBothValues) {
  const KvCacheOptions good{.layers = 1, .slots = 1, .capacity = 1, .kv_heads = 1, .head_dim = 1};
  const auto message = [](const KvCacheOptions& options, StatusCode code) {
    const Result<KvCache> cache = KvCache::create(options);
    EXPECT_FALSE(cache.ok());
    EXPECT_EQ(cache.status().code(), code);
    return cache.status().message();
  };
  const auto expect_contains = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  KvCacheOptions options = good;
  options.layers = -2;
  expect_contains(message(options, StatusCode::kInvalidArgument),
                  "layers is -2, expected at least");
  options = good;
  options.slots = 0;
  expect_contains(message(options, StatusCode::kInvalidArgument),
                  "slots is 0, expected at least 1");
  options = good;
  options.head_dim = -1;
  expect_contains(message(options, StatusCode::kInvalidArgument), "head_dim is -1");
  options = good;
  options.dtype = DType::kI32;
  expect_contains(message(options, StatusCode::kUnsupported), "dtype i32, expected f32");
  options = good;
  options.capacity = std::numeric_limits<std::int64_t>::max() / 2;
  expect_contains(message(options, StatusCode::kResourceExhausted), "4611686018427387903 tokens");
  options.capacity = std::int64_t{1} << 55;  // a size that exists, address space that does not
  expect_contains(message(options, StatusCode::kResourceExhausted), "cannot reserve");
}

}  // namespace
}  // namespace replayssm
