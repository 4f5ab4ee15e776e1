// The subcommands. main.cc turns arguments into these structs; everything after that is here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "replayssm/status.h"
#include "runtime/engine.h"
#include "runtime/sampler.h"

namespace replayssm::app {

struct CommonOptions {
  std::string folder;
  int threads = 0;  // 0: one per core
  bool json = false;
};

/// One of the two; neither where a session goes on as it is.
struct PromptOptions {
  std::optional<std::string> text;
  std::optional<std::string> file;
};

struct GenerateCommand {
  CommonOptions common;
  PromptOptions prompt;
  std::int64_t max_tokens = 128;
  DecodeMode decode = DecodeMode::kAuto;
  int window = 16;
  DType state = DType::kF32;
  std::string draft = "none";
  int draft_tokens = 4;
  SamplingOptions sampling;
  bool seed_given = false;
  std::vector<std::string> stop;
  bool ignore_eos = false;
  std::optional<std::string> load_session, save_session;
};

struct CompareCommand {
  CommonOptions common;
  PromptOptions prompt;
  std::int64_t max_tokens = 128;
  std::vector<int> windows{1, 4, 16, 32};
  std::vector<std::string> drafts;
  std::vector<int> draft_tokens{4};
};

struct InspectCommand {
  CommonOptions common;
  std::optional<std::string> memory;  // such as 8GiB
  std::int64_t context = 4096;
  int window = 16;
  int draft = 1;
};

struct PerplexityCommand {
  CommonOptions common;
  std::string file;
  std::int64_t context = 0;  // 0: what the model was trained for, at most 2048
};

/// What a parser of options cannot see: a failure is one of the command line.
Status check(const GenerateCommand& command);
Status check(const CompareCommand& command);
Status check(const InspectCommand& command);

Status run(const GenerateCommand& command);
Status run(const CompareCommand& command);
Status run(const InspectCommand& command);
Status run(const PerplexityCommand& command);

}  // namespace replayssm::app
