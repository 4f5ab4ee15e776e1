#include <fmt/core.h>

#include <cstdio>

#include "draft.h"
#include "io/file.h"
#include "progress.h"
#include "report.h"
#include "session.h"
#include "text/stream_decoder.h"

namespace replayssm::app {
namespace {

constexpr std::uint64_t kMaxSessionBytes = std::uint64_t{1} << 40;

/// Text of a generation as it grows: whole characters, cut before a stop string.
class TextStream {
 public:
  TextStream(const Tokenizer& tokenizer, StopStrings stops, bool echo)
      : decoder_(tokenizer, true), stops_(std::move(stops)), echo_(echo) {}

  Result<bool> push(std::int32_t token) {
    RSSM_ASSIGN_OR_RETURN(const std::string piece, decoder_.push(token));
    emit(stops_.push(piece));
    return !stops_.stopped();
  }

  const std::string& finish() {
    emit(stops_.push(decoder_.finish()));
    emit(stops_.finish());
    return text_;
  }

 private:
  void emit(const std::string& piece) {
    text_ += piece;
    if (!echo_ || piece.empty()) return;
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
  }

  StreamDecoder decoder_;
  StopStrings stops_;
  bool echo_;
  std::string text_;
};

/// "61% of 120 drafted tokens accepted, ", or nothing where there were no drafts.
std::string drafts_text(const Run& run) {
  if (run.draft == "none") return "";
  return fmt::format("{:.0f}% of {} drafted tokens accepted, ", 100 * acceptance(run),
                     run.generation.decode.drafted);
}

}  // namespace

Status check(const GenerateCommand& command) {
  RSSM_RETURN_IF_ERROR(validate(command.sampling));
  RSSM_RETURN_IF_ERROR(
      check_draft(command.draft, command.draft_tokens, command.decode, command.window));
  if (!command.prompt.text && !command.prompt.file && !command.load_session) {
    return invalid_argument("one of --prompt, --prompt-file and --load-session is required");
  }
  return StopStrings::create(command.stop).status();
}

Status run(const GenerateCommand& command) {
  RSSM_ASSIGN_OR_RETURN(StopStrings stops, StopStrings::create(command.stop));
  RSSM_ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, load_session(command.common));
  std::optional<SavedSession> saved;
  if (command.load_session) {
    RSSM_ASSIGN_OR_RETURN(const std::string bytes,
                          read_file(*command.load_session, kMaxSessionBytes));
    RSSM_ASSIGN_OR_RETURN(
        saved, SavedSession::parse(std::as_bytes(std::span(bytes)), *command.load_session));
  }
  RSSM_ASSIGN_OR_RETURN(const std::vector<std::int32_t> prompt,
                        encode_prompt(*session, command.prompt, saved.has_value()));
  RSSM_ASSIGN_OR_RETURN(const LoadedDraft draft, load_draft(*session, command.draft));
  Progress progress("prompt");
  GenerateOptions options;
  options.max_tokens = command.max_tokens;
  options.sampling = command.sampling;
  if (!command.ignore_eos) options.stop_tokens = session->stop_tokens;
  options.progress = [&](std::int64_t done, std::int64_t total) {
    progress.show(static_cast<double>(done), static_cast<double>(total));
  };
  TextStream stream(*session->tokenizer, std::move(stops), !command.common.json);
  RSSM_ASSIGN_OR_RETURN(
      const Run run, run_generation(*session, prompt,
                                    {.decode = command.decode,
                                     .window = command.window,
                                     .state = command.state,
                                     .draft = command.draft == "none" ? nullptr : &draft,
                                     .draft_tokens = command.draft_tokens},
                                    options, [&](std::int32_t token) { return stream.push(token); },
                                    {.load = saved ? &*saved : nullptr,
                                     .new_seed = command.seed_given,
                                     .save = command.save_session}));
  const std::string& text = stream.finish();
  if (command.common.json) {
    print_json(run_json(*session, run, text));
    return run.saved;
  }
  const TrafficPerToken traffic = traffic_per_token(run.generation);
  fmt::print("\n");
  fmt::print(
      stderr,
      "{} prompt + {} generated tokens, {:.1f} tokens/s; {} ({}), state {}, {}{} thread(s), {}; "
      "state bytes per token: {} read, {} written\n",
      run.generation.prompt_tokens, run.generation.tokens.size(), tokens_per_second(run.generation),
      decode_text(run), run.plan.reason, to_string(run.state), drafts_text(run),
      session->context.thread_count(), to_string(session->context.isa), bytes_text(traffic.read),
      bytes_text(traffic.written));
  return run.saved;
}

}  // namespace replayssm::app
