// Draft sources as the command line names them: none, ngram or ngram:MIN-MAX, mtp, or the folder of
// a model.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "commands.h"
#include "runtime/draft/draft_source.h"
#include "runtime/draft/ngram_draft.h"
#include "session.h"

namespace replayssm::app {

/// Refuses, by name, what no model can have; and drafts that do not go with the way of decoding or
/// do not fit into the window, by both values.
Status check_draft(const std::string& source, int tokens, DecodeMode decode, int window);

/// What a source needs that outlives a run.
struct LoadedDraft {
  std::string source = "none";
  std::optional<NgramOptions> ngram;
  std::shared_ptr<Model> model;   // of a folder
  std::shared_ptr<MtpHead> head;  // of the session's model
};

/// Loads a draft model, or the model's own head. Refuses a model with another vocabulary than the
/// session's, naming both, and heads as Model::load_mtp_head does.
Result<LoadedDraft> load_draft(const Session& session, const std::string& source);

/// A source for a run; null for none. `context`: most tokens of a text.
Result<std::unique_ptr<DraftSource>> create_draft(const Session& session, const LoadedDraft& draft,
                                                  int tokens, std::int64_t context);

}  // namespace replayssm::app
