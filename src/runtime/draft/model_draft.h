// Drafts from a second, smaller model of the same vocabulary.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/draft/draft_source.h"
#include "runtime/engine.h"

namespace replayssm {

struct ModelDraftOptions {
  std::string name;             // for reports
  int draft_tokens = 4;         // most per request
  std::int64_t sequences = 1;   // that can be open at once
  std::int64_t context = 4096;  // tokens a text can have
  bool poison = false;
};

/// Runs the draft model with an engine of its own. Drafted tokens are tentative rows: their records
/// wait in the ring, never in a checkpoint, until the text shows which of them were accepted; the
/// others are dropped by truncating the sequence, which moves no data.
class ModelDraft final : public DraftSource {
 public:
  /// `context.threads` must outlive the source. Refuses draft_tokens out of 1..kMaxDraftTokens.
  static Result<std::unique_ptr<ModelDraft>> create(std::shared_ptr<Model> model,
                                                    std::shared_ptr<Backend> backend,
                                                    const CpuContext& context,
                                                    const ModelDraftOptions& options);

  const std::string& name() const override { return options_.name; }
  Status open(std::int32_t sequence, std::span<const std::int32_t> tokens) override;
  Status close(std::int32_t sequence) override;
  Status draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;

 private:
  struct Stream {
    std::int32_t sequence = -1;         // of the draft model's engine
    std::int64_t agreed = 0;            // tokens of the text its state has, drafted ones not
    std::vector<std::int32_t> drafted;  // fed after those
    std::vector<std::int32_t> unfed;    // of the text, for the next row
  };

  ModelDraft(std::unique_ptr<Engine> engine, ModelDraftOptions options)
      : engine_(std::move(engine)), options_(std::move(options)) {}

  Result<Stream*> find(std::int32_t sequence);
  /// Brings the state to all of `tokens` but the last one or two, which become `unfed`.
  Status catch_up(Stream& stream, std::span<const std::int32_t> tokens);

  std::unique_ptr<Engine> engine_;
  ModelDraftOptions options_;
  std::unordered_map<std::int32_t, Stream> streams_;  // by the target's sequence
};

}  // namespace replayssm
