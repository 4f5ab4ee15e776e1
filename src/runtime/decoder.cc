#include "runtime/decoder.h"

#include <algorithm>

namespace replayssm {
namespace {

Status append(Stream& stream, std::int32_t token, std::span<const float> logits) {
  stream.tokens.push_back(token);
  --stream.wanted;
  RSSM_ASSIGN_OR_RETURN(const bool more, stream.sink(token, logits));
  if (!more) stream.wanted = 0;
  return {};
}

}  // namespace

Status Decoder::draw(Stream& stream, std::span<const float> logits) {
  RSSM_ASSIGN_OR_RETURN(const std::int32_t token, stream.sampler.sample(logits));
  return append(stream, token, logits);
}

Status Decoder::draft(std::span<Stream* const> streams) {
  drafts_.assign(streams.size(), {});
  if (source_ == nullptr) return {};
  std::vector<DraftRequest> requests;
  for (Stream* const stream : streams) {
    RSSM_ASSIGN_OR_RETURN(const std::int64_t position, engine_.position(stream->sequence));
    // A step draws one token more than it accepts drafts, and the last one takes no place.
    const std::int64_t limit =
        std::min({static_cast<std::int64_t>(draft_tokens_), stream->wanted - 1,
                  engine_.options().context - position - 1});
    requests.push_back({.sequence = stream->sequence,
                        .tokens = stream->tokens,
                        .limit = std::max<std::int64_t>(0, limit),
                        .sampler = &stream->sampler});
  }
  return source_->draft(requests, drafts_);
}

Status Decoder::accept(Stream& stream, const Draft& draft, std::span<const float> logits,
                       std::int64_t* accepted) {
  const std::size_t vocab = logits.size() / (draft.tokens.size() + 1);
  ++counts_.steps;
  counts_.drafted += static_cast<std::int64_t>(draft.tokens.size());
  for (std::size_t i = 0; stream.wanted > 0; ++i) {
    const std::span<const float> row = logits.subspan(i * vocab, vocab);
    Verdict next;
    if (i < draft.tokens.size()) {
      RSSM_ASSIGN_OR_RETURN(next, stream.sampler.verify(row, draft.tokens[i], draft.proposal(i)));
    } else {
      RSSM_ASSIGN_OR_RETURN(next.token, stream.sampler.sample(row));
    }
    // The row's token i has been accepted; the one drawn after it is not in the state yet.
    *accepted = static_cast<std::int64_t>(i) + 1;
    ++counts_.drawn;
    if (next.accepted) ++counts_.accepted;
    RSSM_RETURN_IF_ERROR(append(stream, next.token, row));
    if (!next.accepted) break;
  }
  return {};
}

Status Decoder::tell(std::span<Stream* const> streams, std::span<const std::int64_t> accepted) {
  if (source_ == nullptr || !source_->reads_hidden_states()) return {};
  std::span<const float> hidden = engine_.hidden_states();
  const auto size = static_cast<std::size_t>(engine_.model().hidden_size);
  for (std::size_t i = 0; i < streams.size(); ++i) {
    const std::int32_t sequence = streams[i]->sequence;
    RSSM_ASSIGN_OR_RETURN(const std::int64_t position, engine_.position(sequence));
    RSSM_RETURN_IF_ERROR(source_->read(sequence, position - accepted[i],
                                       hidden.first(static_cast<std::size_t>(accepted[i]) * size)));
    hidden = hidden.subspan(rows_[i].size() * size);
  }
  return {};
}

Status Decoder::step(std::span<Stream* const> streams) {
  RSSM_RETURN_IF_ERROR(draft(streams));
  std::vector<Work> work;
  std::vector<std::int64_t> accepted;
  rows_.resize(streams.size());
  for (std::size_t i = 0; i < streams.size(); ++i) {
    const std::vector<std::int32_t>& drafted = drafts_[i].tokens;
    rows_[i].assign(1, streams[i]->tokens.back());
    rows_[i].insert(rows_[i].end(), drafted.begin(), drafted.end());
    // Where nothing was drafted there is nothing to take back.
    work.push_back({.sequence = streams[i]->sequence,
                    .phase = drafted.empty() ? Phase::kDecode : Phase::kVerify,
                    .tokens = rows_[i],
                    .logits = static_cast<std::int64_t>(rows_[i].size())});
    accepted.push_back(1);
  }
  RSSM_ASSIGN_OR_RETURN(std::span<const float> logits, engine_.run(work));
  const std::int64_t vocab = engine_.model().vocab_size;
  // Every stream draws, also after one has failed: the step is committed for all of them.
  Status status;
  for (std::size_t i = 0; i < streams.size(); ++i) {
    const auto size = rows_[i].size() * static_cast<std::size_t>(vocab);
    Status drawn = accept(*streams[i], drafts_[i], logits.first(size), &accepted[i]);
    if (status.ok()) status = std::move(drawn);
    logits = logits.subspan(size);
  }
  RSSM_RETURN_IF_ERROR(engine_.commit(accepted));
  Status told = tell(streams, accepted);
  return status.ok() ? told : status;
}

}  // namespace replayssm
