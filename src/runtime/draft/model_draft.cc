#include "runtime/draft/model_draft.h"

#include <algorithm>

#include "runtime/generate.h"

namespace replayssm {
namespace {

// A round's first row carries the last token of the text, and before it the last drafted token if
// all of them were accepted (that one was drawn but never fed).
constexpr int kCatchUp = 2;

}  // namespace

Result<std::unique_ptr<ModelDraft>> ModelDraft::create(std::shared_ptr<Model> model,
                                                       std::shared_ptr<Backend> backend,
                                                       const CpuContext& context,
                                                       const ModelDraftOptions& options) {
  if (options.draft_tokens < 1 || options.draft_tokens > kMaxDraftTokens) {
    return invalid_argument("draft tokens is ", options.draft_tokens, ", expected 1..",
                            kMaxDraftTokens);
  }
  EngineOptions engine;
  engine.decode = DecodeMode::kReplay;
  // A window holds a whole round, so that no flush falls between a drafted token and its verdict.
  engine.window = std::max(16, options.draft_tokens + kCatchUp);
  engine.draft_capacity = kCatchUp;
  engine.rewindable = true;
  engine.sequences = options.sequences;
  engine.context = options.context;
  engine.poison = options.poison;
  RSSM_ASSIGN_OR_RETURN(std::unique_ptr<Engine> created,
                        Engine::create(std::move(model), std::move(backend), context, engine));
  return std::unique_ptr<ModelDraft>(new ModelDraft(std::move(created), options));
}

Result<ModelDraft::Stream*> ModelDraft::find(std::int32_t sequence) {
  const auto entry = streams_.find(sequence);
  if (entry != streams_.end()) return &entry->second;
  return failed_precondition("sequence ", sequence, " is not open for drafts");
}

Status ModelDraft::open(std::int32_t sequence, std::span<const std::int32_t> tokens) {
  if (streams_.contains(sequence)) {
    return failed_precondition("sequence ", sequence, " is open for drafts already");
  }
  RSSM_ASSIGN_OR_RETURN(const std::int32_t own, engine_->open());
  Stream& stream = streams_[sequence];
  stream.sequence = own;
  if (tokens.empty()) return {};
  Status status = catch_up(stream, tokens);
  if (!status.ok()) RSSM_RETURN_IF_ERROR(close(sequence));
  return status;
}

Status ModelDraft::close(std::int32_t sequence) {
  RSSM_ASSIGN_OR_RETURN(const Stream* const stream, find(sequence));
  const std::int32_t own = stream->sequence;
  streams_.erase(sequence);
  return engine_->close(own);
}

Status ModelDraft::catch_up(Stream& stream, std::span<const std::int32_t> tokens) {
  const auto size = static_cast<std::int64_t>(tokens.size());
  if (stream.agreed > 0 && size == stream.agreed) {
    // The text has not grown since the last round: its last token is fed again like a drafted one.
    --stream.agreed;
    stream.drafted.insert(stream.drafted.begin(), tokens.back());
  }
  if (size < stream.agreed + 1) {
    return invalid_argument("the text has ", size, " tokens, expected more than the ",
                            stream.agreed, " the draft model has read");
  }
  // The last token is always fed again: its logits are where drafting starts.
  const std::span<const std::int32_t> news = tokens.subspan(
      static_cast<std::size_t>(stream.agreed), static_cast<std::size_t>(size - 1 - stream.agreed));
  const auto right =
      std::mismatch(news.begin(), news.end(), stream.drafted.begin(), stream.drafted.end()).first -
      news.begin();
  stream.agreed += right;
  if (!stream.drafted.empty()) {
    RSSM_RETURN_IF_ERROR(engine_->truncate(stream.sequence, stream.agreed));
    stream.drafted.clear();
  }
  if (size - stream.agreed > kCatchUp) {
    const std::span<const std::int32_t> known = news.subspan(static_cast<std::size_t>(right));
    RSSM_RETURN_IF_ERROR(feed_prompt(*engine_, stream.sequence, known, {}).status());
    stream.agreed = size - 1;
  }
  stream.unfed.assign(tokens.begin() + stream.agreed, tokens.end());
  return {};
}

Status ModelDraft::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  std::vector<Stream*> streams;
  for (const DraftRequest& request : requests) {
    RSSM_ASSIGN_OR_RETURN(Stream* const stream, find(request.sequence));
    if (request.limit > options_.draft_tokens) {
      return invalid_argument("sequence ", request.sequence, ": asks for ", request.limit,
                              " drafted tokens, expected at most ", options_.draft_tokens);
    }
    RSSM_RETURN_IF_ERROR(catch_up(*stream, request.tokens));
    streams.push_back(stream);
    // Everything live is accepted text now: the last chance to fold it before the round's tokens.
    RSSM_ASSIGN_OR_RETURN(const Cursor cursor, engine_->pool().cursor(stream->sequence));
    const auto round = static_cast<std::int64_t>(stream->unfed.size()) + request.limit;
    if (request.limit > 0 && cursor.live() + round > engine_->options().window) {
      RSSM_RETURN_IF_ERROR(engine_->pool().force_flush(stream->sequence));
    }
  }
  std::vector<Work> work;
  std::vector<std::size_t> rows;  // request of each row
  for (std::int64_t step = 0;; ++step) {
    work.clear();
    rows.clear();
    for (std::size_t i = 0; i < requests.size(); ++i) {
      if (step >= requests[i].limit) continue;
      rows.push_back(i);
      work.push_back({.sequence = streams[i]->sequence,
                      .phase = Phase::kVerify,
                      .tokens = step == 0 ? std::span<const std::int32_t>(streams[i]->unfed)
                                          : std::span(drafts[i].tokens).last(1)});
    }
    if (work.empty()) return {};
    RSSM_ASSIGN_OR_RETURN(const std::span<const float> logits, engine_->advance(work));
    const std::size_t vocab = logits.size() / rows.size();
    // Before any draw, which may fail: all rows have moved.
    for (const std::size_t row : rows) {
      Stream& stream = *streams[row];
      if (step == 0) {
        stream.agreed += static_cast<std::int64_t>(stream.unfed.size());
      } else {
        stream.drafted.push_back(drafts[row].tokens.back());
      }
    }
    for (std::size_t row = 0; row < rows.size(); ++row) {
      RSSM_RETURN_IF_ERROR(
          propose(requests[rows[row]], logits.subspan(row * vocab, vocab), drafts[rows[row]]));
    }
  }
}

}  // namespace replayssm
