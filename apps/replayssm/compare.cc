#include <fmt/core.h>

#include <algorithm>
#include <optional>

#include "draft.h"
#include "progress.h"
#include "report.h"
#include "session.h"

namespace replayssm::app {
namespace {

constexpr int kWindow = 16;  // where --windows does not say

std::vector<RunSettings> settings(const CompareCommand& command,
                                  const std::vector<LoadedDraft>& drafts) {
  std::vector<RunSettings> list{{DecodeMode::kPlain, 1, DType::kF32}};
  for (const int window : command.windows) {
    list.push_back({DecodeMode::kReplay, window, DType::kF32});
  }
  list.push_back({DecodeMode::kAuto, kWindow, DType::kF32});
  for (const LoadedDraft& draft : drafts) {
    for (const int tokens : command.draft_tokens) {
      for (const DecodeMode decode : {DecodeMode::kReplay, DecodeMode::kSnapshot}) {
        list.push_back({decode, kWindow, DType::kF32, &draft, tokens});
      }
    }
  }
  list.push_back({DecodeMode::kPlain, 1, DType::kBF16});
  list.push_back({DecodeMode::kReplay, kWindow, DType::kBF16});
  list.push_back({DecodeMode::kAuto, kWindow, DType::kBF16});
  return list;
}

/// Where a run leaves the first run's tokens.
struct Difference {
  std::size_t index;
  std::int32_t expected;
  std::int32_t found;
  float margin;  // of the expected token over the runner-up, in logits
};

std::optional<Difference> first_difference(const Generation& reference, const Generation& other) {
  const std::size_t count = std::min(reference.tokens.size(), other.tokens.size());
  for (std::size_t i = 0; i < count; ++i) {
    if (reference.tokens[i] != other.tokens[i]) {
      return Difference{i, reference.tokens[i], other.tokens[i], reference.margins[i]};
    }
  }
  return std::nullopt;
}

Json difference_json(const std::optional<Difference>& difference) {
  if (!difference) return nullptr;
  return {{"index", difference->index},
          {"expected", difference->expected},
          {"found", difference->found},
          {"margin", difference->margin}};
}

std::string verdict(const std::optional<Difference>& difference) {
  if (!difference) return "same tokens";
  return fmt::format("differs at token {} (margin {:.2g})", difference->index, difference->margin);
}

void print_row(const Run& run, const Run& reference, std::size_t width, const std::string& tokens) {
  const TrafficPerToken traffic = traffic_per_token(run.generation);
  const std::string accepted =
      run.generation.decode.drafted > 0 ? fmt::format("{:.0f}%", 100 * acceptance(run)) : "-";
  fmt::print("{:<{}} {:<6} {:>9.1f} {:>7.2f}x {:>9} {:>11} {:>11} {:>14} {:>10}   {}\n",
             decode_text(run), width, to_string(run.state), tokens_per_second(run.generation),
             tokens_per_second(run.generation) / tokens_per_second(reference.generation), accepted,
             bytes_text(traffic.read), bytes_text(traffic.written),
             bytes_text(traffic.checkpoint_written),
             bytes_text(static_cast<double>(run.bytes.states) *
                        static_cast<double>(run.bytes.state.total)),
             tokens);
}

}  // namespace

Status check(const CompareCommand& command) {
  for (const std::string& source : command.drafts) {
    if (source == "none") return invalid_argument("--draft none: nothing to compare");
    for (const int tokens : command.draft_tokens) {
      RSSM_RETURN_IF_ERROR(check_draft(source, tokens, DecodeMode::kReplay, kWindow));
    }
  }
  return {};
}

Status run(const CompareCommand& command) {
  RSSM_ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, load_session(command.common));
  RSSM_ASSIGN_OR_RETURN(const std::vector<std::int32_t> prompt,
                        encode_prompt(*session, command.prompt));
  std::vector<LoadedDraft> drafts;
  for (const std::string& source : command.drafts) {
    RSSM_ASSIGN_OR_RETURN(LoadedDraft draft, load_draft(*session, source));
    drafts.push_back(std::move(draft));
  }
  const std::vector<RunSettings> list = settings(command, drafts);
  GenerateOptions options;
  options.max_tokens = command.max_tokens;  // end-of-text tokens do not end a comparison
  options.keep_margins = true;

  // Every setting runs twice, in turns, and its faster run counts: a slow spell of the machine then
  // does not decide which setting looks slow.
  constexpr int kRounds = 2;
  std::vector<Run> runs;
  Progress progress("comparing");
  const auto total =
      static_cast<double>(static_cast<std::int64_t>(kRounds * list.size()) * options.max_tokens);
  std::int64_t done = 0;
  const auto sink = [&](std::int32_t) -> Result<bool> {
    progress.show(static_cast<double>(++done), total);
    return true;
  };
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      RSSM_ASSIGN_OR_RETURN(Run run, run_generation(*session, prompt, list[i], options, sink));
      if (round == 0) {
        runs.push_back(std::move(run));
      } else if (run.generation.decode_seconds < runs[i].generation.decode_seconds) {
        runs[i] = std::move(run);
      }
    }
  }

  bool identical = true;
  Json json_runs = Json::array();
  std::vector<std::string> verdicts;
  for (const Run& run : runs) {
    const std::optional<Difference> difference =
        first_difference(runs.front().generation, run.generation);
    if (run.state == DType::kF32 && difference) identical = false;
    verdicts.push_back(verdict(difference));
    RSSM_ASSIGN_OR_RETURN(const std::string text,
                          session->tokenizer->decode(run.generation.tokens, true));
    Json json = run_json(*session, run, text);
    json["first_difference"] = difference_json(difference);
    json_runs.push_back(std::move(json));
  }
  if (command.common.json) {
    print_json({{"runs", std::move(json_runs)}, {"identical", identical}});
    return {};
  }

  RSSM_ASSIGN_OR_RETURN(const std::string text,
                        session->tokenizer->decode(runs.front().generation.tokens, true));
  fmt::print("{}\n\n", text);
  fmt::print("{} prompt + {} generated tokens each, greedy; {} thread(s), {}\n\n", prompt.size(),
             command.max_tokens, session->context.thread_count(), to_string(session->context.isa));
  std::size_t width = 18;
  for (const Run& run : runs) width = std::max(width, decode_text(run).size());
  fmt::print("{:<{}} {:<6} {:>9} {:>8} {:>9} {:>11} {:>11} {:>14} {:>10}   {}\n", "decode", width,
             "state", "tokens/s", "speed", "accepted", "read/token", "write/token",
             "state rewrites", "states", "against plain f32");
  for (std::size_t i = 0; i < runs.size(); ++i) {
    print_row(runs[i], runs.front(), width, verdicts[i]);
  }
  fmt::print("\nf32 runs: {}\n", identical ? "all tokens identical" : "tokens differ");
  return {};
}

}  // namespace replayssm::app
