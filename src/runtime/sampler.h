// Sampler: from logits to the next token.
//
// Filters apply in the usual order, each to the renormalised rest of the one before:
//   temperature  p = softmax(logits / temperature); 0 means greedy, the other filters are then idle
//   top_k        keep the k likeliest tokens (Fan et al., 2018)
//   top_p        keep the likeliest tokens until their probabilities reach top_p, the one that
//                reaches it included (nucleus sampling, Holtzman et al., 2020)
//   min_p        keep tokens at least min_p times as likely as the likeliest (Nguyen et al., 2024)
// Ties go to the lower id, so a distribution never depends on the order of a sort.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "replayssm/status.h"

namespace replayssm {

struct SamplingOptions {
  float temperature = 0;   // 0: greedy
  std::int32_t top_k = 0;  // 0: off
  float top_p = 1;         // 1: off
  float min_p = 0;         // 0: off
  std::uint64_t seed = 0;
};

/// Names the first option that is out of its domain, and its value.
Status validate(const SamplingOptions& options);

/// The likeliest token and its lead on the second, in logits.
struct Greedy {
  std::int32_t token = 0;  // the lowest id of equals
  float margin = 0;        // infinite where there is no second
};

/// Logits: at least one, no NaN, no +infinity, not all -infinity (which masks a token).
Result<Greedy> greedy_with_margin(std::span<const float> logits);

/// A token and its probability.
using Candidate = std::pair<std::int32_t, float>;

/// The distribution that is sampled from: filtered, normalised, zero probabilities left out.
/// Likeliest first if a filter is on, else by id.
Result<std::vector<Candidate>> candidates(std::span<const float> logits,
                                          const SamplingOptions& options);

/// Random numbers that are the same on every platform. They are a function of the seed and of how
/// many were drawn (SplitMix64: Steele, Lea and Flood, 2014), so a stream can be resumed anywhere.
class CounterRng {
 public:
  explicit CounterRng(std::uint64_t seed, std::uint64_t drawn = 0);

  std::uint64_t next();
  /// In [0, 1), a multiple of 2^-53.
  double next_uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  std::uint64_t drawn() const { return drawn_; }

 private:
  std::uint64_t key_;
  std::uint64_t drawn_;
};

/// The candidate at `u` in [0, 1) of the cumulative distribution; `candidates` must not be empty.
std::int32_t pick(std::span<const Candidate> candidates, double u);

/// What comes after a text for which a token was drafted.
struct Verdict {
  std::int32_t token = 0;
  bool accepted = false;  // it is the drafted token
};

/// Draws tokens one after the other. Options that `validate` refuses are an error of every draw.
class Sampler {
 public:
  /// `drawn`: random numbers that earlier draws of the same text took.
  explicit Sampler(const SamplingOptions& options, std::uint64_t drawn = 0)
      : options_(options), rng_(options.seed, drawn) {}

  Result<std::int32_t> sample(std::span<const float> logits);

  /// Draws a token to propose, from a draft model's logits. `proposal` becomes the distribution it
  /// was drawn from, or empty where the token was certain (greedy).
  Result<std::int32_t> propose(std::span<const float> logits, std::vector<Candidate>* proposal);

  /// What follows by `logits` where `drafted` was proposed, distributed as sample() would draw it
  /// (Leviathan et al., 2023; Chen et al., 2023). With p the filtered distribution of the logits
  /// and q the proposal `drafted` was drawn from:
  ///
  ///   accepted with probability min(1, p(drafted) / q(drafted)),
  ///   else drawn from max(0, p - q), normalised.
  ///
  /// An empty proposal says that the token was certain, q(drafted) = 1. The rule is then one draw
  /// from p and a comparison: accepted with probability p(drafted), else distributed as the rest of
  /// p. The token is the one that sample() would have drawn, so drafts do not
  /// change the text as long as they do not change the logits.
  Result<Verdict> verify(std::span<const float> logits, std::int32_t drafted,
                         std::span<const Candidate> proposal);

  const SamplingOptions& options() const { return options_; }
  std::uint64_t drawn() const { return rng_.drawn(); }

 private:
  SamplingOptions options_;
  CounterRng rng_;
};

}  // namespace replayssm
