// What the command line refuses: status 2 for a wrong command line, 1 for anything else, one line
// that names the thing, nothing on stdout, and never a crash.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "cli/cli.h"

namespace replayssm::testing {
namespace {

using Arguments = std::vector<std::string>;

Arguments generate(Arguments more) {
  more.insert(more.begin(), {"generate", kTinyModel, "--max-tokens", "4", "--json"});
  return more;
}

TEST(UsageErrorTest, CommandLines) {
  struct Case {
    Arguments arguments;
    Arguments parts;
  };
  const std::string nul_byte = "\x01";
  const Case cases[] = {
      {{}, {"subcommand"}},
      {{"frobnicate"}, {"frobnicate"}},
      {{"generate"}, {"DIR"}},
      {{"inspect"}, {"DIR"}},
      {{"perplexity", kTinyModel}, {"FILE"}},
      {{"generate", kTinyModel, "--json"}, {"prompt"}},
      {generate({"--prompt", "x", "--prompt-file", "y"}), {"prompt"}},
      {generate({"--prompt", "x", "--nonsense"}), {"--nonsense"}},
      {generate({"--prompt", "x", "stray"}), {"stray"}},
      {generate({"--prompt"}), {"--prompt"}},
      {generate({"--prompt", "x", "--window", "0"}), {"--window", "0"}},
      {generate({"--prompt", "x", "--window", "65"}), {"--window", "65"}},
      {generate({"--prompt", "x", "--window", "-1"}), {"--window", "-1"}},
      {generate({"--prompt", "x", "--window", "3.5"}), {"--window", "3.5"}},
      {generate({"--prompt", "x", "--window", "many"}), {"--window", "many"}},
      {generate({"--prompt", "x", "--window", ""}), {"--window"}},
      {generate({"--prompt", "x", "--window", "a\nb"}), {"--window"}},
      {generate({"--prompt", "x", "--window", "99999999999999999999"}), {"--window"}},
      {generate({"--prompt", "x", "--threads", "0"}), {"--threads", "0"}},
      {generate({"--prompt", "x", "--threads", "-2"}), {"--threads", "-2"}},
      {generate({"--prompt", "x", "--threads", "1025"}), {"--threads", "1025"}},
      {generate({"--prompt", "x", "--threads", "two"}), {"--threads", "two"}},
      {{"generate", kTinyModel, "--prompt", "x", "--max-tokens", "0"}, {"--max-tokens", "0"}},
      {{"generate", kTinyModel, "--prompt", "x", "--max-tokens", "-5"}, {"--max-tokens", "-5"}},
      {{"generate", kTinyModel, "--prompt", "x", "--max-tokens", "1e3"}, {"--max-tokens"}},
      {{"generate", kTinyModel, "--prompt", "x", "--max-tokens", "99999999999999999999"},
       {"--max-tokens"}},
      {generate({"--prompt", "x", "--decode", "fast"}), {"--decode", "fast", "plain", "replay"}},
      {generate({"--prompt", "x", "--decode", "0"}), {"--decode", "0", "plain"}},
      {generate({"--prompt", "x", "--decode", ""}), {"--decode"}},
      {generate({"--prompt", "x", "--state", "f16"}), {"--state", "f16", "bf16"}},
      {generate({"--prompt", "x", "--temperature", "-1"}), {"temperature", "-1"}},
      {generate({"--prompt", "x", "--temperature", "nan"}), {"temperature", "nan"}},
      {generate({"--prompt", "x", "--temperature", "inf"}), {"temperature", "inf"}},
      {generate({"--prompt", "x", "--temperature", "warm"}), {"--temperature", "warm"}},
      {generate({"--prompt", "x", "--top-k", "-1"}), {"top_k", "-1"}},
      {generate({"--prompt", "x", "--top-k", "99999999999"}), {"--top-k"}},
      {generate({"--prompt", "x", "--top-p", "0"}), {"top_p", "0"}},
      {generate({"--prompt", "x", "--top-p", "1.5"}), {"top_p", "1.5"}},
      {generate({"--prompt", "x", "--min-p", "1"}), {"min_p", "1"}},
      {generate({"--prompt", "x", "--seed", "-1"}), {"--seed", "-1"}},
      {generate({"--prompt", "x", "--seed", "x"}), {"--seed", "x"}},
      {generate({"--prompt", "x", "--stop", ""}), {"stop"}},
      {generate({"--prompt", "x", "--stop", "\xff"}), {"stop", "UTF-8"}},
      {{"compare", kTinyModel, "--json"}, {"prompt"}},
      {{"compare", kTinyModel, "--prompt", "x", "--windows", "1,0"}, {"--windows", "0"}},
      {{"compare", kTinyModel, "--prompt", "x", "--windows", "1,65"}, {"--windows", "65"}},
      {{"compare", kTinyModel, "--prompt", "x", "--windows", "1,,4"}, {"--windows"}},
      {{"compare", kTinyModel, "--prompt", "x", "--windows", "1,x"}, {"--windows", "x"}},
      {{"compare", kTinyModel, "--prompt", "x", "--windows", "1;4"}, {"--windows"}},
      {{"compare", kTinyModel, "--prompt", "x", "--windows", ""}, {"--windows"}},
      {{"inspect", kTinyModel, "--memory", "nonsense"}, {"--memory", "nonsense"}},
      {{"inspect", kTinyModel, "--memory", "8 GiB"}, {"--memory", "8 GiB"}},
      {{"inspect", kTinyModel, "--memory", "-8GiB"}, {"--memory", "-8GiB"}},
      {{"inspect", kTinyModel, "--memory", "0"}, {"--memory", "0"}},
      {{"inspect", kTinyModel, "--memory", "0x10"}, {"--memory", "0x10"}},
      {{"inspect", kTinyModel, "--memory", "nan"}, {"--memory", "nan"}},
      {{"inspect", kTinyModel, "--memory", "inf"}, {"--memory", "inf"}},
      {{"inspect", kTinyModel, "--memory", "1e300GiB"}, {"--memory", "1e300GiB"}},
      {{"inspect", kTinyModel, "--memory", "GiB"}, {"--memory", "GiB"}},
      {{"inspect", kTinyModel, "--memory", "8GiBs"}, {"--memory", "8GiBs"}},
      {{"inspect", kTinyModel, "--memory", ""}, {"--memory"}},
      {{"inspect", kTinyModel, "--memory", "0.1"}, {"--memory", "0.1"}},
      {{"inspect", kTinyModel, "--memory", nul_byte}, {"--memory"}},
      {{"inspect", kTinyModel, "--context", "0"}, {"--context", "0"}},
      {{"inspect", kTinyModel, "--draft", "0"}, {"--draft", "0"}},
      {{"inspect", kTinyModel, "--draft", "17"}, {"--draft", "17"}},
      {{"inspect", kTinyModel, "--threads", "2"}, {"--threads"}},
      {{"perplexity", kTinyModel, "f", "--context", "1"}, {"--context", "1"}},
  };
  for (const Case& c : cases) {
    std::string line;
    for (const std::string& argument : c.arguments) line += " '" + argument + "'";
    EXPECT_TRUE(fails(cli(c.arguments), 2, c.parts)) << "replayssm" << line;
  }
}

TEST(RunErrorTest, Folders) {
  const TempDir folder;
  for (const Arguments& command : {Arguments{"generate", "DIR", "--prompt", "x"},
                                   {"compare", "DIR", "--prompt", "x"},
                                   {"inspect", "DIR"},
                                   {"perplexity", "DIR", kTinyModel + "/heldout-sample.txt"}}) {
    SCOPED_TRACE(command[0]);
    const auto run = [&](const std::string& dir) {
      Arguments arguments = command;
      arguments[1] = dir;
      return cli(arguments);
    };
    EXPECT_TRUE(fails(run("/nonexistent/model"), 1, {"/nonexistent/model"}));
    EXPECT_TRUE(fails(run(folder.path()), 1, {folder.path()}));
    EXPECT_TRUE(fails(run(kTinyModel + "/config.json"), 1, {"config.json"}));
    EXPECT_TRUE(fails(run(""), 1, {"config.json"}));
    EXPECT_TRUE(fails(run(std::string(5000, 'a')), 1, {"aaa"}));
  }
}

TEST(RunErrorTest, DamagedModels) {
  struct Case {
    const char* what;
    const char* file;  // replaced, or removed where `contents` is null
    const char* contents;
    Arguments parts;
  };
  const Case cases[] = {
      {"no weights", "model.safetensors", nullptr, {"model.safetensors"}},
      {"empty weights", "model.safetensors", "", {"model.safetensors"}},
      {"no tokenizer", "tokenizer.json", nullptr, {"tokenizer.json"}},
      {"empty tokenizer", "tokenizer.json", "", {"tokenizer.json"}},
      {"a tokenizer that is no object", "tokenizer.json", "[]", {"tokenizer.json"}},
      {"no configuration", "config.json", nullptr, {"config.json"}},
      {"no JSON", "config.json", "{", {"config.json"}},
      {"another model", "config.json", R"({"model_type": "llama"})", {"llama", "nemotron_h"}},
      {"an index without shards",
       "model.safetensors.index.json",
       R"({"weight_map": {"a": "model-00001-of-00002.safetensors"}})",
       {"model.safetensors"}},
      {"wrong end tokens",
       "generation_config.json",
       R"({"eos_token_id": 99999})",
       {"generation_config.json", "99999"}},
  };
  for (const Case& c : cases) {
    const TempDir folder;
    link_files(folder, kTinyModel);
    std::filesystem::remove(folder / c.file);
    if (c.contents != nullptr) folder.write(c.file, c.contents);
    EXPECT_TRUE(fails(cli({"generate", folder.path(), "--prompt", "x", "--json"}), 1, c.parts))
        << c.what;
  }
}

TEST(RunErrorTest, TruncatedWeights) {
  const std::string whole = read_text(kTinyModel + "/model.safetensors");
  const TempDir folder;
  link_files(folder, kTinyModel);
  for (const std::size_t size : {1u, 7u, 8u, 9u, 5000u, 20000u}) {
    replace_file(folder, "model.safetensors", whole.substr(0, size));
    EXPECT_TRUE(fails(cli({"generate", folder.path(), "--prompt", "x"}), 1, {"model.safetensors"}));
  }
  for (const std::size_t missing : {1u, 2u, 4096u, 4'000'000u}) {
    replace_file(folder, "model.safetensors", whole.substr(0, whole.size() - missing));
    EXPECT_TRUE(fails(cli({"generate", folder.path(), "--prompt", "x"}), 1, {"model.safetensors"}))
        << missing << " bytes missing";
  }
  replace_file(folder, "model.safetensors", whole + "x");
  EXPECT_TRUE(fails(cli({"generate", folder.path(), "--prompt", "x"}), 1, {"model.safetensors"}));
}

TEST(RunErrorTest, Prompts) {
  const TempDir folder;
  EXPECT_TRUE(fails(cli(generate({"--prompt", "ab\xff"})), 1, {"--prompt", "UTF-8", "2"}));
  EXPECT_TRUE(fails(cli(generate({"--prompt", "\xc3"})), 1, {"--prompt", "UTF-8", "0"}));
  const std::string bad = folder.write("bad.txt", "good\nand \xed\xa0\x80");
  EXPECT_TRUE(fails(cli(generate({"--prompt-file", bad})), 1, {"bad.txt", "UTF-8", "9"}));
  EXPECT_TRUE(fails(cli(generate({"--prompt-file", folder / "absent"})), 1, {"absent"}));
  EXPECT_TRUE(fails(cli(generate({"--prompt-file", folder.path()})), 1, {folder.path()}));
  // A file name that is empty (an unset variable in a script) is not an empty prompt.
  const ProgramResult empty = cli(generate({"--prompt-file", ""}));
  EXPECT_TRUE(fails(empty, empty.status == 2 ? 2 : 1, {}));
  const std::string scored = folder.write("scored.txt", "abc\x80");
  EXPECT_TRUE(fails(cli({"perplexity", kTinyModel, scored}), 1, {"scored.txt", "UTF-8", "3"}));
  EXPECT_TRUE(fails(cli({"perplexity", kTinyModel, folder / "absent"}), 1, {"absent"}));
  EXPECT_TRUE(
      fails(cli({"perplexity", kTinyModel, folder.write("empty", "")}), 1, {"empty", "tokens"}));
}

TEST(RunErrorTest, Environment) {
  for (const char* isa : {"nonsense", "AVX2 ", "avx1024", "\n"}) {
    EXPECT_TRUE(fails(cli(generate({"--prompt", "x"}), {.environment = {{"REPLAYSSM_ISA", isa}}}),
                      1, {"REPLAYSSM_ISA"}))
        << isa;
  }
  EXPECT_TRUE(
      fails(cli(generate({"--prompt", "x"}), {.environment = {{"REPLAYSSM_ISA", "nonsense"}}}), 1,
            {"nonsense"}));
}

/// More than any machine has is an error, not a crash.
TEST(RunErrorTest, SizesBeyondTheMachine) {
  const ProgramResult generated =
      cli({"generate", kTinyModel, "--prompt", "x", "--max-tokens", "4294967296", "--stop", "a"},
          {.limit = 60});
  // Address space may be there for it; then the text ends at the stop string, or the model's end.
  EXPECT_TRUE(generated.status == 0 || generated.status == 1) << generated.status;
  const Json json =
      cli_json({"inspect", kTinyModel, "--context", "1099511627776", "--memory", "1TiB"});
  EXPECT_EQ(json["sequences"], 0);
}

/// Weights that are not numbers do not become a text or a score.
TEST(RunErrorTest, NaNWeights) {
  const TempDir folder;
  link_files(folder, kTinyModel);
  StoredTensors tensors = read_tensors(kTinyModel);
  StoredTensor& head = tensor_named(tensors, "lm_head.weight");
  for (std::size_t i = 0; i < 2 * 160; ++i) head.bytes[i] = '\xff';
  replace_tensors(folder, tensors);
  EXPECT_TRUE(fails(cli({"generate", folder.path(), "--prompt", "x", "--json"}), 1, {"nan"}));
  EXPECT_TRUE(
      fails(cli({"compare", folder.path(), "--prompt", "x", "--max-tokens", "4"}), 1, {"nan"}));
  const std::string text = folder.write("text", "And it came to pass");
  EXPECT_TRUE(fails(cli({"perplexity", folder.path(), text, "--json"}), 1, {"nan"}));
}

/// Configurations that are JSON and still no model: sizes of nothing, nesting, numbers.
TEST(RunErrorTest, HostileConfigurations) {
  const Json config = read_config(kTinyModel);
  const auto inspect = [](const std::string& text) {
    const TempDir folder;
    folder.write("config.json", text);
    return cli({"inspect", folder.path(), "--memory", "1GiB"});
  };
  Json no_state = config;
  for (const char* key : {"num_hidden_layers", "layers_block_type"}) no_state.erase(key);
  no_state["hybrid_override_pattern"] = "-";
  const ProgramResult nothing = inspect(no_state.dump());
  EXPECT_LE(nothing.status, 1) << "status " << nothing.status;
  no_state["hybrid_override_pattern"] = std::string(100'000, '*');
  EXPECT_LE(inspect(no_state.dump()).status, 1);
  Json large = config;
  for (const char* key : {"num_attention_heads", "num_key_value_heads", "head_dim"}) {
    large[key] = 1 << 24;
  }
  EXPECT_LE(inspect(large.dump()).status, 1);
  const std::string deep(1'000'000, '[');
  EXPECT_TRUE(fails(inspect(deep), 1, {"config.json"}));
  std::string text = config.dump();
  text.insert(1, "\"hidden_size\": " + deep + std::string(deep.size(), ']') + ",");
  EXPECT_TRUE(fails(inspect(text), 1, {"config.json"}));
}

/// Results that cannot be written are not a success.
TEST(RunErrorTest, StandardOutputFull) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  for (const Arguments& arguments :
       {Arguments{"inspect", kTinyModel, "--json"},
        {"inspect", kTinyModel},
        generate({"--prompt", "x"}),
        {"generate", kTinyModel, "--prompt", "x", "--max-tokens", "4"},
        {"compare", kTinyModel, "--prompt", "x", "--max-tokens", "4"}}) {
    const ProgramResult result = cli(arguments, {.stdout_to = "/dev/full"});
    EXPECT_EQ(result.status, 1) << arguments[0] << ": " << result.err;
    EXPECT_EQ(result.err.find("terminate"), std::string::npos) << result.err;
  }
}

}  // namespace
}  // namespace replayssm::testing
