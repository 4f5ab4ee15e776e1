// replayssm: the command line. Results go to stdout, everything else to stderr. Exit status: 0, 2
// for a wrong command line, 1 for any other failure.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "commands.h"
#include "replayssm/cursor.h"
#include "runtime/draft/draft_source.h"

namespace {

using namespace replayssm;       // NOLINT(google-build-using-namespace): a program
using namespace replayssm::app;  // NOLINT(google-build-using-namespace)

using Names = std::vector<std::string>;
const std::map<std::string, DecodeMode> kDecodeModes{{"plain", DecodeMode::kPlain},
                                                     {"replay", DecodeMode::kReplay},
                                                     {"snapshot", DecodeMode::kSnapshot},
                                                     {"auto", DecodeMode::kAuto}};
const std::map<std::string, DType> kStateTypes{{"f32", DType::kF32}, {"bf16", DType::kBF16}};

const CLI::Range kWindow(1, ReplayLimits::kMaxWindow);

void add_common(CLI::App& app, CommonOptions& common) {
  app.add_option("DIR", common.folder, "Model folder: config.json, *.safetensors, tokenizer.json")
      ->required();
  app.add_flag("--json", common.json, "Print one JSON object to stdout and nothing else there");
}

void add_threads(CLI::App& app, CommonOptions& common) {
  app.add_option("--threads", common.threads, "Threads to compute with (default: one per core)")
      ->check(CLI::Range(1, 1024));
}

CLI::Option_group* add_prompt(CLI::App& app, PromptOptions& prompt, std::int64_t& max_tokens) {
  CLI::Option_group* group = app.add_option_group("Prompt");
  group->add_option("--prompt", prompt.text, "Prompt text");
  group->add_option("--prompt-file", prompt.file, "File with the prompt text");
  app.add_option("--max-tokens", max_tokens, "Most tokens to generate")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 32))
      ->capture_default_str();
  return group;
}

void add_generate(CLI::App& app, GenerateCommand& command) {
  add_common(app, command.common);
  add_prompt(app, command.prompt, command.max_tokens)->require_option(0, 1);
  app.add_option_function<std::string>(
         "--decode", [&](const std::string& name) { command.decode = kDecodeModes.at(name); },
         "plain: rewrite the state for every token; replay: read a checkpoint and a ring of recent "
         "inputs, rewrite once per window; snapshot: as plain, drafts verified with a copy of the "
         "state per token (for comparison); auto: whichever should be faster, replay with drafts")
      ->check(CLI::IsMember(Names{"plain", "replay", "snapshot", "auto"}))
      ->option_text("plain|replay|snapshot|auto [auto]");
  app.add_option("--window", command.window, "Records replayed before the state is rewritten")
      ->check(kWindow)
      ->capture_default_str();
  app.add_option_function<std::string>(
         "--state", [&](const std::string& name) { command.state = kStateTypes.at(name); },
         "Type of the stored state")
      ->check(CLI::IsMember(Names{"f32", "bf16"}))
      ->option_text("f32|bf16 [f32]");
  CLI::Option* draft =
      app.add_option("--draft", command.draft,
                     "Source of drafts: ngram (what followed the last 2 to 5 tokens before; "
                     "ngram:MIN-MAX for other lengths), the folder of a smaller model of the same "
                     "vocabulary, or mtp (the model's own multi-token-prediction head)")
          ->option_text("none|ngram|mtp|DIR [none]");
  app.add_option("--draft-tokens", command.draft_tokens, "Most tokens drafted per step")
      ->check(CLI::Range(1, kMaxDraftTokens))
      ->needs(draft)
      ->capture_default_str();
  app.add_option("--temperature", command.sampling.temperature, "0: greedy")->capture_default_str();
  app.add_option("--top-k", command.sampling.top_k, "Sample among the k likeliest; 0: all")
      ->capture_default_str();
  app.add_option("--top-p", command.sampling.top_p, "Sample among the likeliest with this much")
      ->capture_default_str();
  app.add_option("--min-p", command.sampling.min_p,
                 "Sample among tokens at least this likely relative to the likeliest")
      ->capture_default_str();
  app.add_option("--seed", command.sampling.seed,
                 "Seed of the sampling (default: 0, or to go on with the session's)")
      ->check(CLI::NonNegativeNumber.description(""))
      ->each([&](const std::string&) { command.seed_given = true; });
  app.add_option("--stop", command.stop, "Stop before this text (may be repeated)")
      ->allow_extra_args(false);
  app.add_flag("--ignore-eos", command.ignore_eos, "Do not stop at the model's end-of-text tokens");
  app.add_option("--load-session", command.load_session,
                 "Go on with a saved conversation; a prompt is then optional");
  app.add_option("--save-session", command.save_session,
                 "Save the conversation and its state afterwards");
  add_threads(app, command.common);
}

/// "1,4,16", each 1 to `largest`. By hand, because CLI11's lists pass over empty entries.
std::vector<int> number_list(const std::string& option, const std::string& list, int largest) {
  std::vector<int> out;
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    const std::string entry = list.substr(begin, end - begin);
    int number = 0;
    const auto [rest, error] = std::from_chars(entry.data(), entry.data() + entry.size(), number);
    if (error != std::errc() || rest != entry.data() + entry.size() || number < 1 ||
        number > largest) {
      throw CLI::ValidationError(
          option, "'" + entry + "' is out of range, expected 1 to " + std::to_string(largest));
    }
    out.push_back(number);
    begin = end + 1;
  }
  return out;
}

void add_compare(CLI::App& app, CompareCommand& command) {
  add_common(app, command.common);
  add_prompt(app, command.prompt, command.max_tokens)->require_option(1);
  app.add_option_function<std::string>(
         "--windows",
         [&](const std::string& list) {
           command.windows = number_list("--windows", list, ReplayLimits::kMaxWindow);
         },
         "Replay windows to try")
      ->option_text("LIST [1,4,16,32]");
  CLI::Option* draft =
      app.add_option("--draft", command.drafts,
                     "Source of drafts to compare, verified by replay and by snapshots: ngram, the "
                     "folder of a smaller model, or mtp (may be repeated)")
          ->allow_extra_args(false)
          ->option_text("ngram|mtp|DIR");
  app.add_option_function<std::string>(
         "--draft-tokens",
         [&](const std::string& list) {
           command.draft_tokens = number_list("--draft-tokens", list, kMaxDraftTokens);
         },
         "Most tokens drafted per step, to try")
      ->needs(draft)
      ->option_text("LIST [4]");
  add_threads(app, command.common);
}

void add_inspect(CLI::App& app, InspectCommand& command) {
  add_common(app, command.common);
  app.add_option("--memory", command.memory,
                 "Memory for sequences, such as 8GiB: says how many fit (weights not counted)");
  app.add_option("--context", command.context, "Tokens a sequence can hold")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
      ->capture_default_str();
  app.add_option("--window", command.window, "Replay window")
      ->check(kWindow)
      ->capture_default_str();
  app.add_option("--draft", command.draft, "Draft capacity: most tokens verified at once")
      ->check(CLI::Range(1, ReplayLimits::kMaxDraftCapacity))
      ->capture_default_str();
}

void add_perplexity(CLI::App& app, PerplexityCommand& command) {
  add_common(app, command.common);
  app.add_option("FILE", command.file, "UTF-8 text to score")->required();
  app.add_option("--context", command.context,
                 "Tokens of a scoring window (default: the model's, at most 2048)")
      ->check(CLI::Range(std::int64_t{2}, std::int64_t{1} << 20));
  add_threads(app, command.common);
}

template <typename Command>
Status check_command(const Command& command) {
  if constexpr (requires { check(command); }) {
    return check(command);
  } else {
    return {};
  }
}

/// One line on stderr, whatever the message quotes.
int fail(std::string message, int exit_status) {
  for (char& c : message) {
    if (static_cast<unsigned char>(c) < 0x20) c = '?';
  }
  std::fprintf(stderr, "replayssm: %s\n", message.c_str());
  return exit_status;
}

/// The standard library's exceptions: no memory, or stdout gone while fmt writes to it.
Status run_command(const std::function<Status()>& command) {
  try {
    RSSM_RETURN_IF_ERROR(command());
  } catch (const std::exception& error) {
    return Status(StatusCode::kInternal, error.what());
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    return Status(StatusCode::kInternal, "cannot write to the standard output");
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Runs hybrid state-space language models with replay decoding.", "replayssm");
  app.require_subcommand(0, 1);  // none is refused below: CLI11 would not name an unknown one
  app.set_version_flag("--version", RSSM_VERSION);

  GenerateCommand generate;
  CompareCommand compare;
  InspectCommand inspect;
  PerplexityCommand perplexity;
  struct Functions {
    std::function<Status()> check, run;
  };
  std::map<CLI::App*, Functions> commands;
  const auto add = [&](const char* name, const char* help, auto add_options, auto& command) {
    CLI::App* sub = app.add_subcommand(name, help);
    add_options(*sub, command);
    commands[sub] = {[&command] { return check_command(command); },
                     [&command] { return run(command); }};
  };
  add("generate", "Generate text", add_generate, generate);
  add("compare",
      "Decode the same text in place, by replay and with drafts, and compare tokens, speed, "
      "acceptance and traffic",
      add_compare, compare);
  add("inspect", "Show a model's sizes per sequence, from its config.json alone", add_inspect,
      inspect);
  add("perplexity", "Score a text file", add_perplexity, perplexity);

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {  // --help, --version
    return app.exit(done);
  } catch (const CLI::ParseError& error) {
    return fail(error.what() + std::string(" (see --help)"), 2);
  }
  if (app.get_subcommands().empty()) return fail("a subcommand is required (see --help)", 2);
  const Functions& command = commands.at(app.get_subcommands().front());
  if (const Status status = command.check(); !status.ok()) return fail(status.message(), 2);
  const Status status = run_command(command.run);
  return status.ok() ? 0 : fail(status.message(), 1);
}
