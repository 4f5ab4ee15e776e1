// What may differ between builds and between paths, and by how much, for every recurrence family.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "ops/delta_rule_cases.h"
#include "ops/mamba2_cases.h"
#include "support/delta_rule_harness.h"
#include "support/mamba2_harness.h"
#include "support/pool_access.h"

namespace replayssm::testing {
namespace {

// ---- C18: a fold compiled otherwise ----
//
// Instruction sets stand for compilers. The vector ones fuse the same multiplications and
// additions, in the same order whatever the vector's length: equal bits. The portable build rounds
// a product before it adds, as a compiler without that instruction would: every record of a fold
// may then cost two units in the last place of the row's largest value, and no more after 256
// folds.

/// The largest |a - b| of any row in units in the last place of the row's largest value.
double worst_ulps(std::span<const float> a, std::span<const float> b, std::int64_t row_size) {
  const auto row = static_cast<std::size_t>(row_size);
  double worst = 0.0;
  for (std::size_t first = 0; first < a.size(); first += row) {
    double largest = 0.0;
    double difference = 0.0;
    for (std::size_t i = first; i < first + row; ++i) {
      largest = std::max(largest, std::abs(static_cast<double>(b[i])));
      difference = std::max(difference, std::abs(static_cast<double>(a[i]) - b[i]));
    }
    if (difference == 0.0) continue;
    worst = std::max(worst, difference / std::ldexp(1.0, std::ilogb(largest) - 23));
  }
  return worst;
}

/// One build's pool. Slot 0 takes the reference's image, 1 its fold, 2 the next of its own chain.
struct Build {
  CpuContext context;
  StatePool pool;
  std::vector<float> chain;  // the checkpoint after all folds by this build
  std::vector<float> folded;
};

/// One reference sequence with a full window before each of 256 folds. Every build folds the same
/// records into the same checkpoint, and also into the checkpoint that its own folds have made.
template <typename Model>
void expect_folds_agree_between_builds(const Model& model, std::int64_t row) {
  constexpr int kFolds = 256;
  const int window = model.test_case().limits.window;
  const CpuContext portable{nullptr, CpuIsa::kGeneric};
  StatePool source = model.make_pool(2);
  typename Model::Runner runner(model, source, portable);
  ASSERT_TRUE(is_ok(source.reset(0)));
  runner.step({committed(0, names(1, 0, 8))});
  std::vector<Build> builds;
  for (const CpuIsa isa : supported_isas()) {
    builds.push_back({{nullptr, isa}, model.make_pool(3), checkpoint_values(source, 0, 0), {}});
  }
  double worst_fold = 0.0;
  double worst_chain = 0.0;
  std::int64_t token = 8;
  for (int fold = 0; fold < kFolds; ++fold) {
    for (; source.cursor(0).value().live() < window; ++token) {
      runner.step({tentative(0, names(1, token, 1), 1)});
    }
    const std::int64_t position = source.cursor(0).value().position;
    const std::vector<std::byte> image = source.save(0).value();
    const std::vector<float> before = checkpoint_values(source, 0, 0);
    ASSERT_TRUE(is_ok(source.materialize(portable, 0, position, 1)));
    for (Build& build : builds) {
      ASSERT_TRUE(is_ok(build.pool.load(build.context, 0, image)));
      // A copy is exact on every build.
      EXPECT_TRUE(same_bits(checkpoint_values(build.pool, 0, 0), before));
      ASSERT_TRUE(is_ok(build.pool.materialize(build.context, 0, position, 1)));
      build.folded = checkpoint_values(build.pool, 0, 1);
      set_checkpoint(build.pool, 0, 0, build.chain);
      ASSERT_TRUE(is_ok(build.pool.materialize(build.context, 0, position, 2)));
      build.chain = checkpoint_values(build.pool, 0, 2);
      // supported_isas begins with the portable one; [1] is the first that fuses.
      EXPECT_TRUE(same_bits(build.folded, builds[&build == &builds[0] ? 0 : 1].folded));
      EXPECT_TRUE(same_bits(build.chain, builds[&build == &builds[0] ? 0 : 1].chain));
      worst_fold = std::max(worst_fold, worst_ulps(build.folded, builds[0].folded, row));
      worst_chain = std::max(worst_chain, worst_ulps(build.chain, builds[0].chain, row));
    }
    EXPECT_TRUE(same_bits(builds[0].folded, checkpoint_values(source, 0, 1)));
    ASSERT_TRUE(is_ok(source.copy(1, 0)));  // the reference goes on from its own fold
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_LE(worst_fold, 2.0 * window);
  EXPECT_LE(worst_chain, 2.0 * window);
  if (builds.size() > 1) {
    EXPECT_GT(worst_chain, 0.0) << "builds that never differ show nothing";
  }
}

class DeltaBuilds : public ::testing::TestWithParam<DeltaFamily> {};
INSTANTIATE_TEST_SUITE_P(Families, DeltaBuilds, ::testing::ValuesIn(kDeltaFamilies),
                         [](const auto& test) { return to_string(test.param); });

TEST_P(DeltaBuilds, C18_FoldsAgreeBetweenBuilds) {
  for (const FlushMode mode : {FlushMode::kExact, FlushMode::kFast}) {
    DeltaCase c = small_delta_case(GetParam(), "builds", 4, 1);
    c.flush = mode;
    SCOPED_TRACE(to_string(mode));
    expect_folds_agree_between_builds(DeltaModel(c), c.shape.value_dim);
  }
}

TEST(Mamba2Builds, C18_FoldsAgreeBetweenBuilds) {
  const Mamba2Case c = small_case("builds", 4, 1);
  expect_folds_agree_between_builds(Mamba2Model(c), c.shape.state_size);
}

// ---- C76: a whole pass against cached decoding ----
//
// A prompt in one row, plain decoding, decoding by replay and verification of four tokens at a time
// are four ways to the same outputs. In f32 they agree closely. With 16-bit types each is off by
// the rounding of the type, and the measure of the others is how far the whole pass itself is off:
// equality is not asked for, a larger error than that noise explains is not accepted.

constexpr std::int64_t kTokens = 96;

enum class Path { kWhole, kDecode, kReplay, kVerify };

template <typename Model>
std::vector<float> run_path(const Model& model, const CpuContext& context, Path path) {
  StatePool pool = model.make_pool(1);
  typename Model::Runner runner(model, pool, context);
  EXPECT_TRUE(is_ok(pool.reset(0)));
  const std::int64_t width = path == Path::kWhole ? kTokens : path == Path::kVerify ? 4 : 1;
  std::vector<float> all;
  for (std::int64_t token = 0; token < kTokens; token += width) {
    const std::vector<TokenId> tokens = names(1, token, width);
    const bool known = path == Path::kWhole || path == Path::kDecode;
    const StepOutput output =
        runner.step({known ? committed(0, tokens) : tentative(0, tokens, width)});
    all.insert(all.end(), output[0][0].begin(), output[0][0].end());
  }
  return all;
}

template <typename A, typename B>
double relative_difference(const std::vector<A>& got, const std::vector<B>& want) {
  double difference = 0.0;
  double reference = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double w = static_cast<double>(want[i]);
    const double d = static_cast<double>(got[i]) - w;
    difference += d * d;
    reference += w * w;
  }
  return std::sqrt(difference / reference);
}

/// Half a unit in the last place.
double rounding(DType type) {
  return type == DType::kBF16 ? 0x1p-9 : type == DType::kF16 ? 0x1p-12 : 0x1p-24;
}

template <typename Model>
void expect_paths_agree_within_noise(const Model& model) {
  const auto& c = model.test_case();
  OracleOf<Model> oracle(model);
  const std::vector<double> want = oracle.run(names(1, 0, kTokens))[0];
  for (const CpuContext& context : Contexts({1})) {
    const std::vector<float> whole = run_path(model, context, Path::kWhole);
    const double noise = relative_difference(whole, want);
    const double type = std::max(rounding(c.activation), rounding(c.checkpoint));
    EXPECT_LT(noise, 8.0 * type) << describe(context);
    for (const Path path : {Path::kDecode, Path::kReplay, Path::kVerify}) {
      const std::vector<float> other = run_path(model, context, path);
      const double error = relative_difference(other, want);
      const double apart = relative_difference(other, whole);
      const std::string where =
          describe(context) + ", path " + std::to_string(static_cast<int>(path));
      if (path == Path::kDecode) {
        EXPECT_TRUE(same_bits(other, whole)) << where;
      }
      EXPECT_LT(error, 2.0 * noise) << where;
      if (type < 1e-6) {
        EXPECT_LT(apart, 1e-6) << where;
      }
    }
  }
}

constexpr std::pair<DType, DType> kEveryKind[] = {
    {DType::kF32, DType::kF32},  {DType::kF32, DType::kBF16}, {DType::kF32, DType::kF16},
    {DType::kBF16, DType::kF32}, {DType::kF16, DType::kF32},  {DType::kBF16, DType::kBF16},
    {DType::kF16, DType::kF16}};

TEST_P(DeltaBuilds, C76_WholePassAndCachedDecodingAgreeWithinTheNoise) {
  for (const auto& [checkpoint, activation] : kEveryKind) {
    for (const FlushMode mode : {FlushMode::kExact, FlushMode::kFast}) {
      DeltaCase c = small_delta_case(
          GetParam(),
          std::string(to_string(checkpoint)) + "_" + to_string(activation) + "_" + to_string(mode),
          16, 4);
      c.checkpoint = checkpoint;
      c.activation = activation;
      c.flush = mode;
      SCOPED_TRACE(c.name);
      expect_paths_agree_within_noise(DeltaModel(c));
    }
  }
}

TEST(Mamba2Paths, C76_WholePassAndCachedDecodingAgreeWithinTheNoise) {
  for (const auto& [checkpoint, activation] : kEveryKind) {
    Mamba2Case c =
        small_case(std::string(to_string(checkpoint)) + "_" + to_string(activation), 16, 4);
    c.checkpoint = checkpoint;
    c.activation = activation;
    SCOPED_TRACE(c.name);
    expect_paths_agree_within_noise(Mamba2Model(c));
  }
}

}  // namespace
}  // namespace replayssm::testing
