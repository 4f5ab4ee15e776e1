#include "runtime/draft/draft_source.h"

namespace replayssm {

Status propose(const DraftRequest& request, std::span<const float> logits, Draft& draft) {
  std::vector<Candidate> proposal;
  RSSM_ASSIGN_OR_RETURN(const std::int32_t token, request.sampler->propose(logits, &proposal));
  draft.tokens.push_back(token);
  draft.proposals.push_back(std::move(proposal));
  return {};
}

}  // namespace replayssm
