// What every command that runs a model does first: threads, backend, weights, tokenizer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "commands.h"
#include "model/model.h"
#include "replayssm/cpu.h"
#include "runtime/generate.h"
#include "text/tokenizer.h"

namespace replayssm::app {

/// A loaded model. Not movable: the backend refers to the threads.
struct Session {
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
/// the model's begin-of-text token.
Result<std::vector<std::int32_t>> encode_prompt(const Session& session,
                                                const PromptOptions& prompt);

/// One generation on an engine of its own, and its settings, for reports.
struct Run {
  DecodeMode decode = DecodeMode::kPlain;  // as asked for
  DecodePlan plan;                         // as run
  DType state = DType::kF32;
  Generation generation;
};

Result<Run> run_generation(const Session& session, std::span<const std::int32_t> prompt,
                           DecodeMode decode, int window, DType state,
                           const GenerateOptions& options, const TokenSink& sink);

/// State bytes moved per decoded token.
struct TrafficPerToken {
  double read = 0;
  double written = 0;
  double checkpoint_written = 0;
};

TrafficPerToken traffic_per_token(const Generation& generation);
double tokens_per_second(const Generation& generation);

}  // namespace replayssm::app
