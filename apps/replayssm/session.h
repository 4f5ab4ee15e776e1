// What every command that runs a model does first: threads, backend, weights, tokenizer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "commands.h"
#include "model/model.h"
#include "replayssm/cpu.h"
#include "runtime/generate.h"
#include "runtime/saved_session.h"
#include "text/tokenizer.h"

namespace replayssm::app {

/// A loaded model. Not movable: the backend refers to the threads.
struct Session {
  std::string folder;
  std::unique_ptr<ThreadPool> threads;
  CpuContext context;
  std::shared_ptr<Backend> backend;
  std::shared_ptr<Model> model;
  std::unique_ptr<Tokenizer> tokenizer;
  std::vector<std::int32_t> stop_tokens;  // the model's end-of-text tokens
  double load_seconds = 0;
};

Result<std::unique_ptr<Session>> load_session(const CommonOptions& options);

/// Token ids of the prompt, with what the tokenizer puts in front of a text; for an empty prompt
/// the model's begin-of-text token. What continues a text has nothing in front and may be empty.
Result<std::vector<std::int32_t>> encode_prompt(const Session& session, const PromptOptions& prompt,
                                                bool continues = false);

struct LoadedDraft;

/// How a generation is to run.
struct RunSettings {
  DecodeMode decode = DecodeMode::kPlain;
  int window = 16;
  DType state = DType::kF32;
  const LoadedDraft* draft = nullptr;  // null: none
  int draft_tokens = 0;
};

/// One generation on an engine of its own, and its settings, for reports.
struct Run {
  DecodeMode decode = DecodeMode::kPlain;  // as asked for
  DecodePlan plan;                         // as run
  DType state = DType::kF32;
  std::string draft = "none";
  int draft_tokens = 0;
  SequenceBytes bytes;
  std::int64_t restored_tokens = 0;  // of the session that went on
  Generation generation;
  Status saved;  // of RunSessions::save: what was generated outlives a file that cannot be written
};

/// Sessions around a run: one to go on with, and where to save what it became.
struct RunSessions {
  const SavedSession* load = nullptr;
  bool new_seed = false;  // draw by options.sampling.seed, not by the session's
  std::optional<std::string> save;
};

Result<Run> run_generation(const Session& session, std::span<const std::int32_t> prompt,
                           const RunSettings& settings, const GenerateOptions& options,
                           const TokenSink& sink, const RunSessions& sessions = {});

/// State bytes moved per token that a decode step drew, by the target; a draft model's own are not
/// counted.
struct TrafficPerToken {
  double read = 0;
  double written = 0;
  double checkpoint_written = 0;
};

TrafficPerToken traffic_per_token(const Generation& generation);
double tokens_per_second(const Generation& generation);

}  // namespace replayssm::app
