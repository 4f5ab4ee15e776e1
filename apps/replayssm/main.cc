// replayssm: the command line. Results go to stdout, everything else to stderr. Exit status: 0, 2
// for a wrong command line, 1 for any other failure.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <map>

#include "commands.h"
#include "replayssm/cursor.h"

namespace {

using namespace replayssm;       // NOLINT(google-build-using-namespace): a program
using namespace replayssm::app;  // NOLINT(google-build-using-namespace)

const std::map<std::string, DecodeMode> kDecodeModes{
    {"plain", DecodeMode::kPlain}, {"replay", DecodeMode::kReplay}, {"auto", DecodeMode::kAuto}};
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

void add_prompt(CLI::App& app, PromptOptions& prompt, std::int64_t& max_tokens) {
  CLI::Option_group* group = app.add_option_group("Prompt");
  group->add_option("--prompt", prompt.text, "Prompt text");
  group->add_option("--prompt-file", prompt.file, "File with the prompt text");
  group->require_option(1);
  app.add_option("--max-tokens", max_tokens, "Most tokens to generate")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 32))
      ->capture_default_str();
}

void add_generate(CLI::App& app, GenerateCommand& command) {
  add_common(app, command.common);
  add_prompt(app, command.prompt, command.max_tokens);
  app.add_option("--decode", command.decode,
                 "plain: rewrite the state for every token; replay: read a checkpoint and a ring "
                 "of recent inputs, rewrite once per window; auto: whichever should be faster")
      ->transform(CLI::CheckedTransformer(kDecodeModes).description(""))
      ->option_text("plain|replay|auto [auto]");
  app.add_option("--window", command.window, "Records replayed before the state is rewritten")
      ->check(kWindow)
      ->capture_default_str();
  app.add_option("--state", command.state, "Type of the stored state")
      ->transform(CLI::CheckedTransformer(kStateTypes).description(""))
      ->option_text("f32|bf16 [f32]");
  app.add_option("--temperature", command.sampling.temperature, "0: greedy")->capture_default_str();
  app.add_option("--top-k", command.sampling.top_k, "Sample among the k likeliest; 0: all")
      ->capture_default_str();
  app.add_option("--top-p", command.sampling.top_p, "Sample among the likeliest with this much")
      ->capture_default_str();
  app.add_option("--min-p", command.sampling.min_p,
                 "Sample among tokens at least this likely relative to the likeliest")
      ->capture_default_str();
  app.add_option("--seed", command.sampling.seed, "Seed of the sampling")->capture_default_str();
  app.add_option("--stop", command.stop, "Stop before this text (may be repeated)")
      ->allow_extra_args(false);
  app.add_flag("--ignore-eos", command.ignore_eos, "Do not stop at the model's end-of-text tokens");
  add_threads(app, command.common);
}

void add_compare(CLI::App& app, CompareCommand& command) {
  add_common(app, command.common);
  add_prompt(app, command.prompt, command.max_tokens);
  app.add_option("--windows", command.windows, "Replay windows to try")
      ->delimiter(',')
      ->check(kWindow)
      ->capture_default_str();
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

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Runs hybrid state-space language models with replay decoding.", "replayssm");
  app.require_subcommand(1);
  app.set_version_flag("--version", RSSM_VERSION);

  GenerateCommand generate;
  CompareCommand compare;
  InspectCommand inspect;
  PerplexityCommand perplexity;
  std::map<CLI::App*, std::function<Status()>> commands;
  const auto add = [&](const char* name, const char* help, auto add_options, auto& command) {
    CLI::App* sub = app.add_subcommand(name, help);
    add_options(*sub, command);
    commands[sub] = [&command] { return run(command); };
  };
  add("generate", "Generate text", add_generate, generate);
  add("compare",
      "Decode the same text in place and by replay and compare tokens, speed and traffic",
      add_compare, compare);
  add("inspect", "Show a model's sizes per sequence, from its config.json alone", add_inspect,
      inspect);
  add("perplexity", "Score a text file", add_perplexity, perplexity);

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {  // --help, --version
    return app.exit(done);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "replayssm: %s (see --help)\n", error.what());
    return 2;
  }
  const Status status = commands.at(app.get_subcommands().front())();
  if (status.ok()) return 0;
  std::fprintf(stderr, "replayssm: %s\n", status.message().c_str());
  return 1;
}
