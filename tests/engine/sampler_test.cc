#include "runtime/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <string>

namespace replayssm {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

SamplingOptions options(float temperature, int top_k = 0, float top_p = 1, float min_p = 0,
                        std::uint64_t seed = 0) {
  return {temperature, top_k, top_p, min_p, seed};
}

std::vector<float> logits_of(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (const double p : probabilities) logits.push_back(static_cast<float>(std::log(p)));
  return logits;
}

std::vector<std::int32_t> tokens_of(const Result<std::vector<Candidate>>& candidates) {
  std::vector<std::int32_t> tokens;
  for (const auto& [token, probability] : candidates.value()) tokens.push_back(token);
  return tokens;
}

using Tokens = std::vector<std::int32_t>;

TEST(Validate, NamesTheOptionAndItsValue) {
  EXPECT_TRUE(validate(SamplingOptions()).ok());
  EXPECT_TRUE(validate(options(0.7f, 40, 0.9f, 0.05f)).ok());
  const auto error = [](const SamplingOptions& o) { return validate(o).message(); };
  EXPECT_EQ(error(options(-1)), "temperature is -1, expected a finite number of at least 0");
  EXPECT_EQ(error(options(kNan)), "temperature is nan, expected a finite number of at least 0");
  EXPECT_EQ(error(options(kInfinity)),
            "temperature is inf, expected a finite number of at least 0");
  EXPECT_EQ(error(options(1, -3)), "top_k is -3, expected at least 0 (0 is off)");
  EXPECT_EQ(error(options(1, 0, 0)), "top_p is 0, expected above 0 and at most 1");
  EXPECT_EQ(error(options(1, 0, 1.5f)), "top_p is 1.5, expected above 0 and at most 1");
  EXPECT_EQ(error(options(1, 0, kNan)), "top_p is nan, expected above 0 and at most 1");
  EXPECT_EQ(error(options(1, 0, 1, 1)), "min_p is 1, expected at least 0 and below 1");
  EXPECT_EQ(error(options(1, 0, 1, -0.5f)), "min_p is -0.5, expected at least 0 and below 1");
  EXPECT_EQ(error(options(1, 0, 1, kNan)), "min_p is nan, expected at least 0 and below 1");
  Sampler sampler(options(1, -3));
  EXPECT_EQ(sampler.sample(std::vector<float>{1, 2}).status().code(), StatusCode::kInvalidArgument);
}

TEST(GreedyTest, LowestIndexAmongMaxima) {
  const std::vector<float> logits = {1, 5, -kInfinity, 5, 4.5f};
  EXPECT_EQ(greedy_with_margin(logits)->token, 1);
  EXPECT_EQ(greedy_with_margin(logits)->margin, 0);
  EXPECT_EQ(*Sampler(SamplingOptions()).sample(logits), 1);
  const Greedy last = *greedy_with_margin(std::vector<float>{-3, -2.5f, -1});
  EXPECT_EQ(last.token, 2);
  EXPECT_EQ(last.margin, 1.5f);
  const Greedy first = *greedy_with_margin(std::vector<float>{3, 1, 2});
  EXPECT_EQ(first.token, 0);
  EXPECT_EQ(first.margin, 1);
  EXPECT_EQ(greedy_with_margin(std::vector<float>{7})->margin, kInfinity);
}

TEST(Logits, NanAndInfinityAreErrors) {
  for (const float temperature : {0.0f, 1.0f}) {
    Sampler sampler(options(temperature, 2, 0.9f));
    const auto error = [&](const std::vector<float>& logits) {
      return sampler.sample(logits).status().message();
    };
    EXPECT_EQ(error({1, kNan, 2}), "logit 1 is nan");
    EXPECT_EQ(error({1, 2, 3, kInfinity}), "logit 3 is inf");
    EXPECT_EQ(error({}), "there are no logits");
    EXPECT_EQ(error({-kInfinity, -kInfinity}), "all 2 logits are -inf");
    EXPECT_EQ(error({-kInfinity, 0}), "");
  }
}

TEST(Candidates, GreedyIsOneToken) {
  const auto result = candidates(std::vector<float>{1, 3, 2}, options(0, 2, 0.5f));
  EXPECT_EQ(*result, (std::vector<Candidate>{{1, 1.0f}}));
}

TEST(Candidates, TemperatureIsASoftmax) {
  const std::vector<float> logits = {0, 1, -kInfinity, 3};
  for (const float temperature : {0.5f, 1.0f, 2.0f}) {
    double total = 0;
    for (const float logit : logits) total += std::exp(static_cast<double>(logit / temperature));
    const auto result = candidates(logits, options(temperature));
    ASSERT_EQ(tokens_of(result), (Tokens{0, 1, 3}));  // by id; the masked one is out
    for (const auto& [token, probability] : *result) {
      EXPECT_NEAR(probability, std::exp(static_cast<double>(logits[token] / temperature)) / total,
                  1e-7);
    }
  }
  // Far beyond what exp can take.
  const auto extreme = candidates(std::vector<float>{-1e30f, 1e30f, 1e30f}, options(1e-30f));
  EXPECT_EQ(*extreme, (std::vector<Candidate>{{1, 0.5f}, {2, 0.5f}}));
}

TEST(Candidates, TopK) {
  const std::vector<float> logits = logits_of({0.1, 0.4, 0.2, 0.3});
  const auto result = candidates(logits, options(1, 2));
  ASSERT_EQ(tokens_of(result), (Tokens{1, 3}));
  EXPECT_NEAR((*result)[0].second, 4.0 / 7, 1e-6);
  EXPECT_NEAR((*result)[1].second, 3.0 / 7, 1e-6);
  EXPECT_EQ(tokens_of(candidates(logits, options(1, 100))), (Tokens{1, 3, 2, 0}));
  // Ties go to the lower id.
  EXPECT_EQ(tokens_of(candidates(std::vector<float>{1, 2, 2, 2, 2}, options(1, 3))),
            (Tokens{1, 2, 3}));
}

TEST(Candidates, TopPKeepsTheTokenThatReachesIt) {
  const std::vector<float> logits = logits_of({0.1, 0.45, 0.15, 0.3});
  EXPECT_EQ(tokens_of(candidates(logits, options(1, 0, 0.4f))), (Tokens{1}));
  EXPECT_EQ(tokens_of(candidates(logits, options(1, 0, 0.5f))), (Tokens{1, 3}));
  EXPECT_EQ(tokens_of(candidates(logits, options(1, 0, 0.8f))), (Tokens{1, 3, 2}));
  EXPECT_EQ(tokens_of(candidates(logits, options(1, 0, 0.95f))), (Tokens{1, 3, 2, 0}));
  EXPECT_EQ(tokens_of(candidates(logits, options(1, 0, 1e-6f))), (Tokens{1}));
  // An exact half: two quarters reach it.
  EXPECT_EQ(tokens_of(candidates(std::vector<float>{0, 0, 0, 0}, options(1, 0, 0.5f))),
            (Tokens{0, 1}));
}

TEST(Candidates, MinPIsRelativeToTheLikeliest) {
  const std::vector<float> logits = logits_of({0.05, 0.5, 0.15, 0.3});
  EXPECT_EQ(tokens_of(candidates(logits, options(1, 0, 1, 0.2f))), (Tokens{1, 3, 2}));
  EXPECT_EQ(tokens_of(candidates(logits, options(1, 0, 1, 0.5f))), (Tokens{1, 3}));
  EXPECT_EQ(tokens_of(candidates(logits, options(1, 0, 1, 0.99f))), (Tokens{1}));
}

TEST(Candidates, FiltersApplyInOrder) {
  const std::vector<float> logits = logits_of({0.4, 0.3, 0.2, 0.1});
  // Of the top two, renormalised, the first has 4/7 > 0.55; without top_k it would not do.
  EXPECT_EQ(tokens_of(candidates(logits, options(1, 2, 0.55f))), (Tokens{0}));
  EXPECT_EQ(tokens_of(candidates(logits, options(1, 0, 0.55f))), (Tokens{0, 1}));
  // Temperature comes first: at 0.5 the probabilities are as 16 : 9 : 4 : 1.
  EXPECT_EQ(tokens_of(candidates(logits, options(0.5f, 0, 0.5f))), (Tokens{0}));
  EXPECT_EQ(tokens_of(candidates(logits, options(0.5f, 0, 1, 0.2f))), (Tokens{0, 1, 2}));
}

TEST(Candidates, AgreeWithASortOfEverything) {
  CounterRng random(11);
  for (int round = 0; round < 300; ++round) {
    std::vector<float> logits(1 + random.next() % 60);
    for (float& logit : logits) {
      // Coarse, so that there are ties.
      logit = static_cast<float>(std::floor(random.next_uniform() * 20) / 2);
    }
    const SamplingOptions o = options(
        0.3f + static_cast<float>(random.next_uniform()) * 2, static_cast<int>(random.next() % 30),
        random.next() % 3 == 0 ? 1 : 0.05f + 0.9f * static_cast<float>(random.next_uniform()),
        random.next() % 2 == 0 ? 0 : 0.3f * static_cast<float>(random.next_uniform()));
    std::vector<std::int32_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int32_t a, std::int32_t b) { return logits[a] > logits[b]; });
    if (o.top_k > 0 && static_cast<std::size_t>(o.top_k) < order.size()) order.resize(o.top_k);
    const auto weight = [&](std::int32_t token) {
      return std::exp(static_cast<double>(logits[token] - logits[order[0]]) /
                      static_cast<double>(o.temperature));
    };
    double total = 0;
    for (const std::int32_t token : order) total += weight(token);
    double sum = 0;
    std::size_t kept = 0;
    while (kept < order.size() &&
           (kept == 0 || sum < static_cast<double>(o.top_p) * total || o.top_p == 1)) {
      sum += weight(order[kept++]);
    }
    order.resize(kept);
    std::erase_if(order,
                  [&](std::int32_t token) { return weight(token) < static_cast<double>(o.min_p); });
    Tokens found = tokens_of(candidates(logits, o));
    if (o.top_k == 0 && o.top_p == 1 && o.min_p == 0) std::sort(order.begin(), order.end());
    EXPECT_EQ(found, order);
  }
}

TEST(Candidates, SumToOne) {
  std::vector<float> logits(5000);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    logits[i] = static_cast<float>(8 * std::sin(static_cast<double>(i)));
  }
  for (const SamplingOptions& o : {options(1), options(1, 50), options(1, 0, 0.9f),
                                   options(1, 0, 1, 0.1f), options(0.7f, 40, 0.95f, 0.05f)}) {
    const auto result = candidates(logits, o);
    double total = 0;
    for (const Candidate& candidate : *result) total += static_cast<double>(candidate.second);
    EXPECT_NEAR(total, 1, 1e-5);
    EXPECT_GT(result->size(), 1u);
  }
}

TEST(CounterRngTest, IsTheSameEverywhere) {
  // SplitMix64 of the key that seed 0 gives. These numbers are part of the interface: a seed
  // must give the same text on every platform and in every release.
  constexpr std::uint64_t kExpectedFirst = 0xA706DD2F4D197E6Full;
  constexpr std::uint64_t kExpectedSecond = 0xB382A305F4414F5Eull;
  CounterRng rng(0);
  EXPECT_EQ(rng.next(), kExpectedFirst);
  EXPECT_EQ(rng.next(), kExpectedSecond);
  EXPECT_EQ(rng.drawn(), 2u);
  CounterRng resumed(0, 1);
  EXPECT_EQ(resumed.next(), kExpectedSecond);
  EXPECT_NE(CounterRng(1).next(), kExpectedFirst);
}

TEST(CounterRngTest, IsUniform) {
  constexpr int kBins = 64;
  constexpr int kDraws = 64'000;
  for (const std::uint64_t seed : {0ull, 1ull, 0x9E3779B97F4A7C15ull}) {
    CounterRng rng(seed);
    std::vector<int> bins(kBins);
    for (int i = 0; i < kDraws; ++i) {
      const double u = rng.next_uniform();
      ASSERT_GE(u, 0);
      ASSERT_LT(u, 1);
      ++bins[static_cast<std::size_t>(u * kBins)];
    }
    double chi2 = 0;
    for (const int n : bins) chi2 += std::pow(n - kDraws / kBins, 2) / (kDraws / kBins);
    // 63 degrees of freedom: above 120 with a probability of 2e-5, below 25 of 1e-5.
    EXPECT_LT(chi2, 120);
    EXPECT_GT(chi2, 25);
  }
}

TEST(Pick, TakesTheCandidateAtU) {
  const std::vector<Candidate> three = {{7, 0.5f}, {3, 0.25f}, {9, 0.25f}};
  EXPECT_EQ(pick(three, 0), 7);
  EXPECT_EQ(pick(three, 0.4999), 7);
  EXPECT_EQ(pick(three, 0.5), 3);
  EXPECT_EQ(pick(three, 0.7499), 3);
  EXPECT_EQ(pick(three, 0.75), 9);
  EXPECT_EQ(pick(three, std::nextafter(1.0, 0.0)), 9);
}

TEST(SamplerTest, FollowsTheDistribution) {
  const std::vector<double> p = {0.05, 0.4, 0.02, 0.3, 0.1, 0.13};
  const std::vector<float> logits = logits_of(p);
  constexpr int kDraws = 20'000;
  for (const SamplingOptions& o : {options(1, 0, 1, 0, 42), options(1, 4, 1, 0, 43),
                                   options(1.5f, 0, 0.8f, 0, 44), options(0.8f, 0, 1, 0.2f, 45)}) {
    const auto expected = candidates(logits, o);
    std::vector<int> counts(p.size());
    Sampler sampler(o);
    for (int i = 0; i < kDraws; ++i) ++counts[*sampler.sample(logits)];
    double chi2 = 0;
    int seen = 0;
    for (const auto& [token, probability] : *expected) {
      const double mean = static_cast<double>(probability) * kDraws;
      chi2 += (counts[token] - mean) * (counts[token] - mean) / mean;
      seen += counts[token];
    }
    EXPECT_EQ(seen, kDraws);  // nothing outside the filters
    EXPECT_LT(chi2, 25);      // at most 5 degrees of freedom: probability 1.4e-4
  }
}

TEST(SamplerTest, ASeedIsASequence) {
  const std::vector<float> logits(1000, 0);
  const auto draw = [&](std::uint64_t seed) {
    Sampler sampler(options(1, 0, 1, 0, seed));
    Tokens tokens;
    for (int i = 0; i < 8; ++i) tokens.push_back(*sampler.sample(logits));
    return tokens;
  };
  EXPECT_EQ(draw(1), draw(1));
  EXPECT_NE(draw(1), draw(2));
  const Tokens tokens = draw(1);
  EXPECT_GT(std::set<std::int32_t>(tokens.begin(), tokens.end()).size(), 5u);
}

TEST(SamplerTest, GreedyDrawsNothing) {
  Sampler sampler(SamplingOptions{});
  EXPECT_EQ(*sampler.sample(std::vector<float>{0, 1}), 1);
  EXPECT_EQ(sampler.drawn(), 0u);
}

// ---- Drafted tokens ----

/// Pearson's statistic of counts against a distribution; infinite where it gives no probability.
double chi_square(const std::vector<int>& counts, const std::vector<Candidate>& expected,
                  int draws) {
  std::vector<double> mean(counts.size());
  for (const auto& [token, p] : expected) mean[token] = static_cast<double>(p) * draws;
  double chi2 = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (mean[i] > 0) {
      chi2 += (counts[i] - mean[i]) * (counts[i] - mean[i]) / mean[i];
    } else if (counts[i] > 0) {
      return std::numeric_limits<double>::infinity();
    }
  }
  return chi2;
}

/// What comes after a token drawn from q is distributed as p, filters included, and is the drafted
/// one with probability sum min(p, q): the most there can be. At most 7 degrees of freedom, so a
/// statistic above 30 has probability 1e-4; the seeds are fixed.
TEST(VerifyTest, KeepsTheDistribution) {
  const std::vector<float> target = logits_of({0.3, 0.25, 0.05, 0.02, 0.13, 0.1, 0.1, 0.05});
  const std::vector<float> drafter = logits_of({0.1, 0.3, 0.2, 0.1, 0.02, 0.18, 0.05, 0.05});
  constexpr int kDraws = 100'000;
  for (const SamplingOptions& o :
       {options(1, 0, 1, 0, 50), options(0.7f, 0, 1, 0, 51), options(1.6f, 5, 1, 0, 52),
        options(1, 0, 0.7f, 0, 53), options(1, 0, 1, 0.3f, 54), options(0.9f, 6, 0.9f, 0.1f, 55)}) {
    const std::vector<Candidate> p = *candidates(target, o);
    const std::vector<Candidate> q = *candidates(drafter, o);
    double overlap = 0;
    for (const auto& [token, probability] : p) {
      for (const auto& [other, proposed] : q) {
        if (token == other) overlap += static_cast<double>(std::min(probability, proposed));
      }
    }
    std::vector<int> drafted(target.size());
    std::vector<int> next(target.size());
    int accepted = 0;
    Sampler sampler(o);
    std::vector<Candidate> proposal;
    for (int i = 0; i < kDraws; ++i) {
      const std::int32_t token = *sampler.propose(drafter, &proposal);
      ++drafted[token];
      const auto verdict = sampler.verify(target, token, proposal);
      ASSERT_TRUE(verdict.ok());
      ++next[verdict->token];
      accepted += verdict->accepted ? 1 : 0;
      ASSERT_TRUE(!verdict->accepted || verdict->token == token);
    }
    EXPECT_LT(chi_square(next, p, kDraws), 30) << "temperature " << o.temperature;
    EXPECT_GT(chi_square(drafted, p, kDraws), 1000) << "drafts that are right anyway test nothing";
    // Four standard deviations of a binomial.
    EXPECT_NEAR(accepted, overlap * kDraws, 4 * std::sqrt(overlap * (1 - overlap) * kDraws));
  }
}

/// The same for a token that is proposed for certain, each of them, and one that p does not have.
TEST(VerifyTest, CertainTokensKeepTheDistribution) {
  const std::vector<float> logits = logits_of({0.3, 0.25, 0.05, 0.02, 0.13, 0.1, 0.1, 0.05});
  constexpr int kDraws = 50'000;
  for (const SamplingOptions& o : {options(1, 0, 1, 0, 60), options(0.8f, 4, 1, 0.05f, 61)}) {
    const std::vector<Candidate> p = *candidates(logits, o);
    for (std::int32_t token = 0; token < 8; ++token) {
      std::vector<int> next(logits.size());
      int accepted = 0;
      Sampler sampler(o);
      Sampler plain(o);
      for (int i = 0; i < kDraws; ++i) {
        const auto verdict = sampler.verify(logits, token, {});
        ASSERT_TRUE(verdict.ok());
        ++next[verdict->token];
        ASSERT_EQ(verdict->accepted, verdict->token == token);
        accepted += verdict->accepted ? 1 : 0;
        ASSERT_EQ(verdict->token, *plain.sample(logits)) << "drafts change the text";
      }
      EXPECT_LT(chi_square(next, p, kDraws), 30) << "token " << token;
      EXPECT_EQ(accepted, next[token]);
    }
  }
}

/// Equal distributions accept everything; disjoint ones nothing, and then draw from p alone.
TEST(VerifyTest, EqualAndDisjointDistributions) {
  const SamplingOptions o = options(1, 0, 1, 0, 70);
  const std::vector<float> left = {1, 2, 0.5f, -kInfinity, -kInfinity};
  const std::vector<float> right = {-kInfinity, -kInfinity, -kInfinity, 0, 1};
  Sampler sampler(o);
  std::vector<Candidate> proposal;
  for (int i = 0; i < 2000; ++i) {
    std::int32_t token = *sampler.propose(left, &proposal);
    ASSERT_TRUE(sampler.verify(left, token, proposal)->accepted);
    token = *sampler.propose(right, &proposal);
    const auto verdict = sampler.verify(left, token, proposal);
    ASSERT_FALSE(verdict->accepted);
    ASSERT_LT(verdict->token, 3);
  }
  EXPECT_EQ(sampler.verify(left, 4, *candidates(left, o)).status().code(),
            StatusCode::kInvalidArgument)
      << "a token its proposal does not have";
}

TEST(VerifyTest, GreedyComparesAndDrawsNothing) {
  Sampler sampler(SamplingOptions{});
  const std::vector<float> logits = {0, 3, 1};
  std::vector<Candidate> proposal = {{0, 1.0f}};
  EXPECT_EQ(*sampler.propose(logits, &proposal), 1);
  EXPECT_TRUE(proposal.empty()) << "a greedy draft is certain";
  EXPECT_TRUE(sampler.verify(logits, 1, {})->accepted);
  const auto verdict = sampler.verify(logits, 2, {});
  EXPECT_FALSE(verdict->accepted);
  EXPECT_EQ(verdict->token, 1);
  EXPECT_EQ(sampler.drawn(), 0u);
  EXPECT_FALSE(sampler.verify({}, 0, {}).ok());
  EXPECT_FALSE(sampler.verify(std::vector<float>{kNan, 0}, 0, {}).ok());
}

/// Random numbers go on where an earlier sampler of the same seed stopped.
TEST(SamplerTest, ResumesAfterWhatWasDrawn) {
  const std::vector<float> logits(50, 0);
  const SamplingOptions o = options(1, 0, 1, 0, 80);
  Sampler whole(o);
  Tokens expected;
  for (int i = 0; i < 20; ++i) expected.push_back(*whole.sample(logits));
  Sampler first(o);
  Tokens found;
  for (int i = 0; i < 7; ++i) found.push_back(*first.sample(logits));
  Sampler second(o, first.drawn());
  for (int i = 7; i < 20; ++i) found.push_back(*second.sample(logits));
  EXPECT_EQ(found, expected);
}

}  // namespace
}  // namespace replayssm
