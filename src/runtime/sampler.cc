#include "runtime/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>

namespace replayssm {
namespace {

struct Weighted {
  double weight = 0;
  std::int32_t token = 0;
};

/// Heap order: the likeliest token, of equals the lowest id, on top.
bool less_likely(const Weighted& a, const Weighted& b) {
  return a.weight != b.weight ? a.weight < b.weight : a.token > b.token;
}

std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

constexpr std::uint64_t kGamma = 0x9E3779B97F4A7C15ull;

bool filters(const SamplingOptions& options) {
  return options.top_k > 0 || options.top_p < 1 || options.min_p > 0;
}

/// The top_k likeliest tokens (all of them where it is off) with unnormalised weights.
std::vector<Weighted> weigh(std::span<const float> logits, float highest,
                            const SamplingOptions& options) {
  std::vector<Weighted> tokens;
  tokens.reserve(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] == -std::numeric_limits<float>::infinity()) continue;
    tokens.push_back({logits[i], static_cast<std::int32_t>(i)});
  }
  if (options.top_k > 0 && static_cast<std::size_t>(options.top_k) < tokens.size()) {
    std::nth_element(tokens.begin(), tokens.begin() + options.top_k - 1, tokens.end(),
                     [](const Weighted& a, const Weighted& b) { return less_likely(b, a); });
    tokens.resize(options.top_k);
  }
  const double temperature = options.temperature;
  for (Weighted& token : tokens) {
    token.weight = std::exp((token.weight - static_cast<double>(highest)) / temperature);
  }
  return tokens;
}

/// Moves what top_p and min_p keep to the front, likeliest first; returns how many that are.
std::size_t keep_likeliest(const SamplingOptions& options, std::vector<Weighted>* tokens) {
  double total = 0;
  for (const Weighted& token : *tokens) total += token.weight;
  const double enough = options.top_p < 1 ? static_cast<double>(options.top_p) * total
                                          : std::numeric_limits<double>::infinity();
  // A heap, because the kept part is small as a rule. It shrinks from the end of the vector, so
  // what was taken lies there, in ascending order.
  const auto begin = tokens->begin();
  auto end = tokens->end();
  std::make_heap(begin, end, less_likely);
  const double least = static_cast<double>(options.min_p) * begin->weight;
  double sum = 0;
  std::size_t kept = 0;
  while (end != begin) {
    if (kept > 0 && (sum >= enough || begin->weight < least || begin->weight == 0)) break;
    sum += begin->weight;
    std::pop_heap(begin, end, less_likely);
    --end;
    ++kept;
  }
  std::reverse(begin, tokens->end());
  return kept;
}

double probability(std::span<const Candidate> candidates, std::int32_t token) {
  for (const auto& [candidate, p] : candidates) {
    if (candidate == token) return static_cast<double>(p);
  }
  return 0;
}

/// max(0, p - q), not normalised.
std::vector<Candidate> excess(std::span<const Candidate> p, std::span<const Candidate> q) {
  std::unordered_map<std::int32_t, float> taken(q.begin(), q.end());
  std::vector<Candidate> rest;
  for (const auto& [token, probability] : p) {
    const auto found = taken.find(token);
    const float left = found == taken.end() ? probability : probability - found->second;
    if (left > 0) rest.emplace_back(token, left);
  }
  return rest;
}

}  // namespace

Status validate(const SamplingOptions& options) {
  if (!(options.temperature >= 0) || std::isinf(options.temperature)) {
    return invalid_argument("temperature is ", options.temperature,
                            ", expected a finite number of at least 0");
  }
  if (options.top_k < 0) {
    return invalid_argument("top_k is ", options.top_k, ", expected at least 0 (0 is off)");
  }
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    return invalid_argument("top_p is ", options.top_p, ", expected above 0 and at most 1");
  }
  if (!(options.min_p >= 0 && options.min_p < 1)) {
    return invalid_argument("min_p is ", options.min_p, ", expected at least 0 and below 1");
  }
  return Status();
}

Result<Greedy> greedy_with_margin(std::span<const float> logits) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (logits.empty()) return invalid_argument("there are no logits");
  float first = -kInfinity;
  float second = -kInfinity;
  std::int32_t token = -1;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const float logit = logits[i];
    if (!(logit < kInfinity)) return invalid_argument("logit ", i, " is ", logit);
    if (logit > first) {
      second = first;
      first = logit;
      token = static_cast<std::int32_t>(i);
    } else {
      second = std::max(second, logit);
    }
  }
  if (token < 0) return invalid_argument("all ", logits.size(), " logits are -inf");
  return Greedy{token, first - second};
}

Result<std::vector<Candidate>> candidates(std::span<const float> logits,
                                          const SamplingOptions& options) {
  RSSM_RETURN_IF_ERROR(validate(options));
  RSSM_ASSIGN_OR_RETURN(const Greedy greedy, greedy_with_margin(logits));
  if (options.temperature == 0) return std::vector<Candidate>{{greedy.token, 1.0f}};
  std::vector<Weighted> tokens = weigh(logits, logits[greedy.token], options);
  if (filters(options)) tokens.resize(keep_likeliest(options, &tokens));
  double total = 0;
  for (const Weighted& token : tokens) total += token.weight;
  std::vector<Candidate> result;
  result.reserve(tokens.size());
  for (const Weighted& token : tokens) {
    const float probability = static_cast<float>(token.weight / total);
    if (probability > 0) result.emplace_back(token.token, probability);
  }
  return result;
}

CounterRng::CounterRng(std::uint64_t seed, std::uint64_t drawn)
    // Mixed, because streams whose keys differ by a multiple of kGamma would overlap.
    : key_(mix(seed + kGamma)), drawn_(drawn) {}

std::uint64_t CounterRng::next() { return mix(key_ + ++drawn_ * kGamma); }

std::int32_t pick(std::span<const Candidate> candidates, double u) {
  // Against the sum as rounding left it, so that the last candidate gets no more than its share.
  double total = 0;
  for (const Candidate& candidate : candidates) total += static_cast<double>(candidate.second);
  double rest = u * total;
  for (const auto& [token, probability] : candidates) {
    rest -= static_cast<double>(probability);
    if (rest < 0) return token;
  }
  return candidates.back().first;
}

Result<std::int32_t> Sampler::sample(std::span<const float> logits) {
  RSSM_RETURN_IF_ERROR(validate(options_));
  if (options_.temperature == 0) {
    RSSM_ASSIGN_OR_RETURN(const Greedy greedy, greedy_with_margin(logits));
    return greedy.token;
  }
  RSSM_ASSIGN_OR_RETURN(const std::vector<Candidate> kept, candidates(logits, options_));
  return pick(kept, rng_.next_uniform());
}

Result<std::int32_t> Sampler::propose(std::span<const float> logits,
                                      std::vector<Candidate>* proposal) {
  proposal->clear();
  if (options_.temperature == 0) return sample(logits);
  RSSM_ASSIGN_OR_RETURN(*proposal, candidates(logits, options_));
  return pick(*proposal, rng_.next_uniform());
}

Result<Verdict> Sampler::verify(std::span<const float> logits, std::int32_t drafted,
                                std::span<const Candidate> proposal) {
  if (proposal.empty()) {
    RSSM_ASSIGN_OR_RETURN(const std::int32_t token, sample(logits));
    return Verdict{token, token == drafted};
  }
  RSSM_ASSIGN_OR_RETURN(const std::vector<Candidate> target, candidates(logits, options_));
  const double q = probability(proposal, drafted);
  if (q <= 0) return invalid_argument("token ", drafted, " is not in its own proposal");
  if (rng_.next_uniform() * q < probability(target, drafted)) return Verdict{drafted, true};
  const std::vector<Candidate> rest = excess(target, proposal);
  // Rounding can reject a token of two equal distributions; nothing is left to draw from then.
  return Verdict{pick(rest.empty() ? target : rest, rng_.next_uniform()), false};
}

}  // namespace replayssm
