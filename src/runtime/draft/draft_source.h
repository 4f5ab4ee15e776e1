// DraftSource: guesses how texts go on, for the model to verify many tokens in one step.
//
// A source keeps what it needs per sequence and follows the accepted text: each request carries all
// of it, so that what was rejected is seen by its absence and there is no second way of telling.
// A source that reads the model's hidden states (a multi-token-prediction head) is given those of
// every accepted token as soon as it is: a prompt's, which may be long, are used chunk by chunk and
// never kept as a whole.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "replayssm/status.h"
#include "runtime/sampler.h"

namespace replayssm {

/// Longest draft: with the token before it, a row of ReplayLimits::kMaxDraftCapacity.
inline constexpr int kMaxDraftTokens = 15;

struct DraftRequest {
  std::int32_t sequence = -1;            // the model's
  std::span<const std::int32_t> tokens;  // the text, never shorter than in the request before
  std::int64_t limit = 0;                // most tokens to draft
  Sampler* sampler = nullptr;            // draws where the source proposes by chance
};

struct Draft {
  std::vector<std::int32_t> tokens;
  /// Of each token, the distribution it was drawn from (see Sampler::verify), empty where it was
  /// certain. No more than there are tokens; those that lack are empty.
  std::vector<std::vector<Candidate>> proposals;

  std::span<const Candidate> proposal(std::size_t i) const {
    return i < proposals.size() ? std::span<const Candidate>(proposals[i])
                                : std::span<const Candidate>();
  }
};

/// Draws the next token of a draft from logits of the source's model, by the request's sampler.
Status propose(const DraftRequest& request, std::span<const float> logits, Draft& draft);

class DraftSource {
 public:
  virtual ~DraftSource() = default;

  /// For reports: "ngram", or the folder of a model.
  virtual const std::string& name() const = 0;

  /// Takes up a sequence with the text it has so far, of which the model may have read a part only.
  virtual Status open(std::int32_t sequence, std::span<const std::int32_t> tokens) = 0;
  virtual Status close(std::int32_t sequence) = 0;

  /// Whether read() is to be called, which takes an engine with EngineOptions::hidden_states.
  virtual bool reads_hidden_states() const { return false; }

  /// The model has accepted tokens of an open sequence, those from `position` on: hidden (tokens,
  /// hidden_size), valid during the call. Told without gaps, before the next draft is asked for.
  virtual Status read(std::int32_t /*sequence*/, std::int64_t /*position*/,
                      std::span<const float> /*hidden*/) {
    return {};
  }

  /// Drafts 0..limit tokens for each request, each of a sequence of its own that is open, with a
  /// text of at least one token. `drafts` has as many entries as `requests`.
  virtual Status draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) = 0;
};

}  // namespace replayssm
