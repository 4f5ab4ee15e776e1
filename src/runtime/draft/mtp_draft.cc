#include "runtime/draft/mtp_draft.h"

#include <algorithm>
#include <utility>

namespace replayssm {

KvCacheOptions kv_options(const ModelDescription& model, const MtpDraftOptions& options) {
  return {.layers = 1,
          .slots = options.sequences,
          .capacity = options.context,
          .kv_heads = model.kv_heads,
          .head_dim = model.kv_head_dim,
          .dtype = options.kv.value_or(model.dtype)};
}

MtpDraft::MtpDraft(std::shared_ptr<MtpHead> head, std::shared_ptr<Backend> backend, KvCache cache,
                   const MtpDraftOptions& options)
    : head_(std::move(head)),
      backend_(std::move(backend)),
      cache_(std::move(cache)),
      options_(options) {
  for (std::int64_t slot = options.sequences; slot > 0; --slot) {
    free_slots_.push_back(static_cast<std::int32_t>(slot - 1));
  }
}

Result<std::unique_ptr<MtpDraft>> MtpDraft::create(std::shared_ptr<MtpHead> head,
                                                   std::shared_ptr<Backend> backend,
                                                   const MtpDraftOptions& options) {
  if (options.draft_tokens < 1 || options.draft_tokens > kMaxDraftTokens) {
    return invalid_argument("draft tokens is ", options.draft_tokens, ", expected 1..",
                            kMaxDraftTokens);
  }
  RSSM_ASSIGN_OR_RETURN(KvCache cache, KvCache::create(kv_options(head->description(), options)));
  return std::unique_ptr<MtpDraft>(
      new MtpDraft(std::move(head), std::move(backend), std::move(cache), options));
}

Result<MtpDraft::Stream*> MtpDraft::find(std::int32_t sequence) {
  const auto entry = streams_.find(sequence);
  if (entry != streams_.end()) return &entry->second;
  return failed_precondition("sequence ", sequence, " is not open for drafts");
}

Status MtpDraft::open(std::int32_t sequence, std::span<const std::int32_t> tokens) {
  if (streams_.contains(sequence)) {
    return failed_precondition("sequence ", sequence, " is open for drafts already");
  }
  if (free_slots_.empty()) {
    return resource_exhausted("all ", options_.sequences, " sequences are in use for drafts");
  }
  Stream& stream = streams_[sequence];
  stream.slot = free_slots_.back();
  free_slots_.pop_back();
  stream.text.assign(tokens.begin(), tokens.end());
  return {};
}

Status MtpDraft::close(std::int32_t sequence) {
  RSSM_ASSIGN_OR_RETURN(const Stream* const stream, find(sequence));
  free_slots_.push_back(stream->slot);
  streams_.erase(sequence);
  return {};
}

Status MtpDraft::read(std::int32_t sequence, std::int64_t position, std::span<const float> hidden) {
  RSSM_ASSIGN_OR_RETURN(Stream* const stream, find(sequence));
  if (stream->begin < 0) stream->begin = position;
  const std::int64_t first = stream->begin + stream->filled;  // whose pair is the next
  if (position != first + waiting(*stream)) {
    return invalid_argument("sequence ", sequence, ": hidden states of position ", position,
                            ", expected ", first + waiting(*stream));
  }
  stream->hidden.insert(stream->hidden.end(), hidden.begin(), hidden.end());
  // Of a prompt the next tokens are known: its pairs need not wait in memory. The text's last pair
  // does, because drafts start from its logits.
  const std::int64_t pairs = std::min(waiting(*stream), std::ssize(stream->text) - 2 - first);
  if (pairs <= 0) return {};
  if (stream->filled + pairs > options_.context) {
    return resource_exhausted("sequence ", sequence, ": ", stream->filled + pairs,
                              " tokens do not fit into the context of ", options_.context);
  }
  const auto values = static_cast<std::ptrdiff_t>(pairs * hidden_size());
  begin_pass();
  hidden_.assign(stream->hidden.begin(), stream->hidden.begin() + values);
  add_row(*stream, true, stream->filled,
          std::span(stream->text)
              .subspan(static_cast<std::size_t>(first + 1), static_cast<std::size_t>(pairs)));
  RSSM_RETURN_IF_ERROR(run());
  stream->filled += pairs;
  stream->hidden.erase(stream->hidden.begin(), stream->hidden.begin() + values);
  return {};
}

Result<bool> MtpDraft::check(const Stream& stream, const DraftRequest& request) const {
  if (request.limit > options_.draft_tokens) {
    return invalid_argument("sequence ", request.sequence, ": asks for ", request.limit,
                            " drafted tokens, expected at most ", options_.draft_tokens);
  }
  const std::int64_t fresh = waiting(stream);
  if (request.limit <= 0 || fresh == 0) return false;
  const std::int64_t seen = stream.begin + stream.filled + fresh;
  if (seen != std::ssize(request.tokens) - 1) {
    return invalid_argument("sequence ", request.sequence, ": the text has ", request.tokens.size(),
                            " tokens and hidden states of ", seen,
                            ", expected them of all tokens but the last");
  }
  if (const std::int64_t pairs = stream.filled + fresh + request.limit - 1;
      pairs > options_.context) {
    return resource_exhausted("sequence ", request.sequence, ": ", pairs,
                              " tokens do not fit into the context of ", options_.context);
  }
  return true;
}

void MtpDraft::begin_pass() {
  rows_.clear();
  tokens_.clear();
  logit_counts_.clear();
}

void MtpDraft::add_row(const Stream& stream, bool prompt, std::int64_t place,
                       std::span<const std::int32_t> tokens) {
  rows_.push_back({.slot = stream.slot,
                   .kind = RowKind::kCommitted,
                   .prompt = prompt,
                   .begin = std::ssize(tokens_),
                   .count = std::ssize(tokens),
                   .position = place});
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  logit_counts_.push_back(prompt ? 0 : 1);
}

Status MtpDraft::run() {
  const auto size = static_cast<std::size_t>(hidden_size());
  const std::int64_t vocab = head_->description().vocab_size;
  const std::int64_t wanted = std::count(logit_counts_.begin(), logit_counts_.end(), 1);
  const std::int64_t tokens = std::ssize(tokens_);
  const auto matrix = [](std::vector<float>& values, std::int64_t rows, std::int64_t columns) {
    return TensorView::contiguous(values.data(), DType::kF32, {rows, columns});
  };
  logits_.resize(static_cast<std::size_t>(wanted * vocab));
  ForwardOutput out{.logits = matrix(logits_, wanted, vocab), .hidden = {}};
  if (wanted > 0) {
    out_.resize(hidden_.size());
    out.hidden = matrix(out_, tokens, hidden_size());
  }
  const Status status = head_->forward(
      *backend_, cache_, {.rows = rows_, .tokens = tokens_, .logit_counts = logit_counts_},
      matrix(hidden_, tokens, hidden_size()), out);
  hidden_.clear();
  for (std::size_t i = 0; i < rows_.size() && wanted > 0; ++i) {
    const auto last = static_cast<std::size_t>(rows_[i].begin + rows_[i].count - 1);
    const std::span<const float> row = std::span(out_).subspan(last * size, size);
    hidden_.insert(hidden_.end(), row.begin(), row.end());
  }
  return status;
}

Status MtpDraft::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  std::vector<Stream*> streams;
  std::vector<std::size_t> drafting;  // requests of the pass's rows
  for (std::size_t i = 0; i < requests.size(); ++i) {
    RSSM_ASSIGN_OR_RETURN(Stream* const stream, find(requests[i].sequence));
    streams.push_back(stream);
    RSSM_ASSIGN_OR_RETURN(const bool drafts_now, check(*stream, requests[i]));
    if (drafts_now) drafting.push_back(i);
  }
  begin_pass();
  hidden_.clear();
  for (const std::size_t i : drafting) {
    const Stream& stream = *streams[i];
    hidden_.insert(hidden_.end(), stream.hidden.begin(), stream.hidden.end());
    add_row(stream, false, stream.filled,
            requests[i].tokens.last(static_cast<std::size_t>(waiting(stream))));
  }
  for (std::int64_t step = 0; !drafting.empty(); ++step) {
    RSSM_RETURN_IF_ERROR(run());
    if (step == 0) {
      for (const std::size_t i : drafting) {
        streams[i]->filled += waiting(*streams[i]);
        streams[i]->hidden.clear();
        streams[i]->text.clear();
      }
    }
    const auto vocab = static_cast<std::size_t>(head_->description().vocab_size);
    const auto size = static_cast<std::size_t>(hidden_size());
    std::vector<std::size_t> going_on;
    std::size_t kept = 0;
    begin_pass();
    for (std::size_t row = 0; row < drafting.size(); ++row) {
      const std::size_t i = drafting[row];
      RSSM_RETURN_IF_ERROR(
          propose(requests[i], std::span(logits_).subspan(row * vocab, vocab), drafts[i]));
      if (step + 1 >= requests[i].limit) continue;
      std::copy_n(hidden_.begin() + static_cast<std::ptrdiff_t>(row * size), size,
                  hidden_.begin() + static_cast<std::ptrdiff_t>(kept++ * size));
      add_row(*streams[i], false, streams[i]->filled + step, std::span(drafts[i].tokens).last(1));
      going_on.push_back(i);
    }
    hidden_.resize(kept * size);
    drafting = std::move(going_on);
  }
  return {};
}

}  // namespace replayssm
