// Drafts from the model's own multi-token-prediction head.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "backend/kv_cache.h"
#include "model/model.h"
#include "runtime/draft/draft_source.h"

namespace replayssm {

struct MtpDraftOptions {
  int draft_tokens = 4;         // most per request
  std::int64_t sequences = 1;   // that can be open at once
  std::int64_t context = 4096;  // tokens a text can have
  std::optional<DType> kv;      // type of the head's KV cache; the model's if not set
};

/// The head's KV cache; the source and sizing both use it.
KvCacheOptions kv_options(const ModelDescription& model, const MtpDraftOptions& options);

/// The head sees pairs (hidden state of the token at p, token at p + 1) and has no recurrence:
///
///   fill    the pairs of all accepted tokens, prompts included, as one row per chunk or step; the
///           last pair of a row predicts the first drafted token
///   chain   a drafted token with what the head put out for the pair before, for the next one
///
/// Chained pairs stand behind the accepted ones in the head's KV cache. Once the text shows what
/// was accepted, the next fill overwrites them: that is all there is to roll back.
///
/// Where a text begins without hidden states (a saved session goes on), the head drafts from what
/// it has seen since, and nothing before it has seen a token.
class MtpDraft final : public DraftSource {
 public:
  /// Refuses draft_tokens out of 1..kMaxDraftTokens. One source at a time may use a head.
  static Result<std::unique_ptr<MtpDraft>> create(std::shared_ptr<MtpHead> head,
                                                  std::shared_ptr<Backend> backend,
                                                  const MtpDraftOptions& options);

  const std::string& name() const override { return name_; }
  Status open(std::int32_t sequence, std::span<const std::int32_t> tokens) override;
  Status close(std::int32_t sequence) override;
  bool reads_hidden_states() const override { return true; }
  Status read(std::int32_t sequence, std::int64_t position, std::span<const float> hidden) override;
  Status draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;

 private:
  struct Stream {
    std::int32_t slot = -1;     // of the head's KV cache
    std::int64_t begin = -1;    // position of the first token there is a hidden state of
    std::int64_t filled = 0;    // accepted pairs in the cache, from place 0 on
    std::vector<float> hidden;  // of accepted tokens whose pairs are not: (tokens, hidden_size)
    std::vector<std::int32_t> text;  // known when the sequence was opened, until it is read
  };

  MtpDraft(std::shared_ptr<MtpHead> head, std::shared_ptr<Backend> backend, KvCache cache,
           const MtpDraftOptions& options);

  std::int64_t hidden_size() const { return head_->description().hidden_size; }
  /// How many accepted tokens wait with their hidden states.
  std::int64_t waiting(const Stream& stream) const {
    return static_cast<std::int64_t>(stream.hidden.size()) / hidden_size();
  }
  Result<Stream*> find(std::int32_t sequence);
  /// Whether the stream can draft for the request now: it has new hidden states.
  Result<bool> check(const Stream& stream, const DraftRequest& request) const;

  void begin_pass();
  /// A row of the pass: pairs from `place` on. Their hidden states are in hidden_, in row order.
  void add_row(const Stream& stream, bool prompt, std::int64_t place,
               std::span<const std::int32_t> tokens);
  /// Runs the rows. Of each, the last pair's logits are then in logits_ and its output in hidden_,
  /// where a chained pair takes it from; a prompt leaves neither.
  Status run();

  std::string name_ = "mtp";
  std::shared_ptr<MtpHead> head_;
  std::shared_ptr<Backend> backend_;
  KvCache cache_;
  MtpDraftOptions options_;
  std::vector<std::int32_t> free_slots_;
  std::unordered_map<std::int32_t, Stream> streams_;  // by the model's sequence
  // Of a pass.
  std::vector<ForwardRow> rows_;
  std::vector<std::int32_t> tokens_;
  std::vector<std::int64_t> logit_counts_;
  std::vector<float> hidden_, out_, logits_;
};

}  // namespace replayssm
