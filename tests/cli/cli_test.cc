// The command line from its contract: what each subcommand prints and what its JSON says.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>
#include <string>

#include "cli/cli.h"

namespace replayssm::testing {
namespace {

const std::string kPrompt = "It is a truth universally acknowledged";

Json generate(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"generate", kTinyModel});
  return cli_json(std::move(arguments));
}

TEST(HelpTest, EverySubcommand) {
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{"--help"},
                                                    {"generate", "--help"},
                                                    {"compare", "--help"},
                                                    {"inspect", "--help"},
                                                    {"perplexity", "--help"},
                                                    {"generate", kTinyModel, "--help"}}) {
    const ProgramResult result = cli(arguments);
    EXPECT_EQ(result.status, 0) << arguments.front();
    EXPECT_GT(result.out.size(), 200u);
    EXPECT_TRUE(result.err.empty()) << result.err;
    for (const char c : result.out) EXPECT_TRUE(c == '\n' || static_cast<unsigned char>(c) >= 0x20);
  }
  const std::string help = cli({"--help"}).out;
  for (const char* name : {"generate", "compare", "inspect", "perplexity"}) {
    EXPECT_NE(help.find(name), std::string::npos) << name;
  }
  const ProgramResult version = cli({"--version"});
  EXPECT_EQ(version.status, 0);
  EXPECT_NE(version.out.find('.'), std::string::npos);
}

// ---- generate ----

TEST(GenerateTest, FieldsOfEveryMode) {
  Json tokens;
  for (const auto& [decode, state] : {std::pair{"plain", "f32"},
                                      {"replay", "f32"},
                                      {"auto", "f32"},
                                      {"plain", "bf16"},
                                      {"replay", "bf16"}}) {
    const Json run = generate({"--prompt", kPrompt, "--max-tokens", "20", "--decode", decode,
                               "--state", state, "--window", "8", "--threads", "2"});
    SCOPED_TRACE(run.dump());
    expect_run_fields(run);
    EXPECT_EQ(run["tokens"].size(), 20u);
    EXPECT_EQ(run["state"], state);
    EXPECT_EQ(run["threads"], 2);
    if (decode != std::string("auto")) {
      EXPECT_EQ(run["decode"], decode);
    }
    if (decode == std::string("replay")) {
      EXPECT_EQ(run["window"], 8);
    }
    if (state != std::string("f32")) continue;
    if (tokens.is_null()) tokens = run["tokens"];
    EXPECT_EQ(run["tokens"], tokens) << "greedy f32 tokens depend on how the state is kept";
  }
}

/// State bytes of plain decoding are the state, once in each direction, per decoded token.
TEST(GenerateTest, TrafficIsPerToken) {
  const double state = cli_json({"inspect", kTinyModel})["state_bytes"]["f32"];
  for (const char* count : {"2", "33"}) {
    const Json run =
        generate({"--prompt", kPrompt, "--max-tokens", count, "--decode", "plain", "--ignore-eos"});
    EXPECT_EQ(run["state_bytes_per_token"]["read"], state) << count;
    EXPECT_EQ(run["state_bytes_per_token"]["written"], state) << count;
    EXPECT_EQ(run["state_bytes_per_token"]["checkpoint_written"], state) << count;
  }
}

TEST(GenerateTest, MaxTokens) {
  Json longest;
  for (const std::size_t count : {17u, 5u, 2u, 1u}) {
    const Json run =
        generate({"--prompt", kPrompt, "--max-tokens", std::to_string(count), "--ignore-eos"});
    ASSERT_EQ(run["tokens"].size(), count);
    if (longest.is_null()) longest = run["tokens"];
    EXPECT_TRUE(std::equal(run["tokens"].begin(), run["tokens"].end(), longest.begin()));
  }
}

TEST(GenerateTest, TextModePrintsTheTextOfJsonMode) {
  const Json run = generate({"--prompt", kPrompt, "--max-tokens", "24"});
  const ProgramResult text =
      cli({"generate", kTinyModel, "--prompt", kPrompt, "--max-tokens", "24"});
  EXPECT_EQ(text.status, 0);
  EXPECT_EQ(text.out, run["text"].get<std::string>() + "\n");
  EXPECT_EQ(std::count(text.err.begin(), text.err.end(), '\n'), 1) << text.err;
  EXPECT_EQ(text.err.find('\r'), std::string::npos) << "a progress bar where there is no terminal";
}

TEST(GenerateTest, StopStringCutsTheText) {
  const Json whole = generate({"--prompt", kPrompt, "--max-tokens", "40", "--ignore-eos"});
  const std::string text = whole["text"];
  ASSERT_GT(text.size(), 60u);
  // From the middle of a word into the next, so that it lies across tokens.
  const std::string stop = text.substr(31, 5);
  const std::string expected = text.substr(0, text.find(stop));
  const Json run = generate({"--prompt", kPrompt, "--max-tokens", "40", "--ignore-eos", "--stop",
                             "never in this text", "--stop", stop});
  EXPECT_EQ(run["text"], expected);
  EXPECT_LT(run["tokens"].size(), whole["tokens"].size());
  EXPECT_TRUE(std::equal(run["tokens"].begin(), run["tokens"].end(), whole["tokens"].begin()));
  const ProgramResult shown = cli({"generate", kTinyModel, "--prompt", kPrompt, "--max-tokens",
                                   "40", "--ignore-eos", "--stop", stop});
  EXPECT_EQ(shown.out, expected + "\n");
}

/// An end-of-text token ends the text, is one of the tokens, and is not in the text.
TEST(GenerateTest, EndOfTextToken) {
  const Json whole = generate({"--prompt", kPrompt, "--max-tokens", "12", "--ignore-eos"});
  // Any token will do as the model's end: say it is the one drawn seventh.
  const std::int32_t end = whole["tokens"][6];
  const TempDir folder;
  link_files(folder, kTinyModel);
  replace_file(folder, "generation_config.json",
               R"({"eos_token_id": [0, )" + std::to_string(end) + "]}");
  const auto run = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments = {"generate", folder.path(),  "--prompt",
                                          kPrompt,    "--max-tokens", "12"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return cli_json(arguments);
  };
  const auto first = std::find(whole["tokens"].begin(), whole["tokens"].end(), end);
  const Json ended = run({});
  EXPECT_EQ(ended["tokens"], Json(std::vector<Json>(whole["tokens"].begin(), first + 1)));
  EXPECT_EQ(run({"--ignore-eos"})["tokens"], whole["tokens"]);
  // The bundled model's own end of text is special: it never shows.
  EXPECT_EQ(whole["text"].get<std::string>().find("</s>"), std::string::npos);
}

TEST(GenerateTest, SeedsAndTemperature) {
  const auto sampled = [](const std::string& seed, const std::string& threads) {
    return generate({"--prompt", kPrompt, "--max-tokens", "24", "--temperature", "0.9", "--top-k",
                     "50", "--top-p", "0.95", "--min-p", "0.01", "--seed", seed, "--ignore-eos",
                     "--threads", threads})["tokens"];
  };
  const Json one = sampled("1", "2");
  EXPECT_EQ(sampled("1", "2"), one) << "the same seed";
  EXPECT_EQ(sampled("1", "1"), one) << "other threads";
  EXPECT_EQ(sampled("18446744073709551615", "2").size(), 24u);
  std::set<Json> different;
  for (const char* seed : {"1", "2", "3", "4"}) different.insert(sampled(seed, "2"));
  EXPECT_EQ(different.size(), 4u);
  const Json greedy =
      generate({"--prompt", kPrompt, "--max-tokens", "24", "--ignore-eos"})["tokens"];
  EXPECT_NE(one, greedy);
  EXPECT_EQ(generate({"--prompt", kPrompt, "--max-tokens", "24", "--ignore-eos", "--seed",
                      "9"})["tokens"],
            greedy)
      << "greedy decoding draws nothing";
  EXPECT_EQ(generate({"--prompt", kPrompt, "--max-tokens", "24", "--ignore-eos", "--temperature",
                      "1.5", "--top-k", "1"})["tokens"],
            greedy);
}

TEST(GenerateTest, PromptFile) {
  const TempDir folder;
  const std::string path = folder.write("prompt.txt", kPrompt);
  const Json direct = generate({"--prompt", kPrompt, "--max-tokens", "8"});
  const Json file = generate({"--prompt-file", path, "--max-tokens", "8"});
  EXPECT_EQ(file["tokens"], direct["tokens"]);
  EXPECT_EQ(file["prompt_tokens"], direct["prompt_tokens"]);
  // Longer than a chunk, of exactly a chunk, and one token more: any length is one text.
  std::string text;
  for (int i = 0; i < 300; ++i) text += "the king and ";
  const Json longer =
      generate({"--prompt-file", folder.write("long.txt", text), "--max-tokens", "4"});
  EXPECT_GT(longer["prompt_tokens"], 600);
  EXPECT_EQ(longer["tokens"].size(), 4u);
}

TEST(GenerateTest, EmptyPromptStartsFromTheBeginningOfText) {
  const Json run = generate({"--prompt", "", "--max-tokens", "8"});
  EXPECT_EQ(run["prompt_tokens"], 1);
  EXPECT_EQ(run["tokens"].size(), 8u);
  const TempDir folder;
  const Json file = generate({"--prompt-file", folder.write("empty", ""), "--max-tokens", "8"});
  EXPECT_EQ(file["tokens"], run["tokens"]);
}

/// Every instruction set the machine has gives a text, by name.
TEST(GenerateTest, InstructionSets) {
  int ran = 0;
  for (const char* isa : {"generic", "avx2", "avx512"}) {
    const ProgramResult result =
        cli({"generate", kTinyModel, "--prompt", kPrompt, "--max-tokens", "6", "--json"},
            {.environment = {{"REPLAYSSM_ISA", isa}}});
    if (result.status != 0) {
      EXPECT_TRUE(fails(result, 1, {"REPLAYSSM_ISA", isa}));
      continue;
    }
    ++ran;
    EXPECT_EQ(Json::parse(result.out)["isa"], isa);
  }
  EXPECT_GT(ran, 0);
}

// ---- inspect ----

TEST(InspectTest, ExactNumbers) {
  const Json json = cli_json({"inspect", kTinyModel});
  EXPECT_EQ(json["layers"], (Json{{"ssm", 6}, {"attention", 2}, {"mlp", 4}, {"moe", 0}}));
  // 6 layers of 8 heads of 64 x 128; 8 * 64 + 2 * 2 * 128 channels of width 4.
  EXPECT_EQ(json["state_bytes"],
            (Json{{"f32", 6 * 8 * (64 * 128 + 64 / 8) * 4}, {"bf16", 6 * 8 * 64 * 128 * 2}}));
  EXPECT_EQ(json["conv_bytes"], 6 * 3 * 1024 * 2);
  // 17 records of x, B and dt and 4 convolution inputs, in f32.
  EXPECT_EQ(json["ring_bytes"], 6 * 17 * (512 + 256 + 8) * 4);
  EXPECT_EQ(json["conv_ring_bytes"], 6 * 4 * 1024 * 4);
  EXPECT_EQ(json["kv_bytes_per_token"], 2 * 2 * 2 * 64 * 2);
}

TEST(InspectTest, WindowAndDraftMoveTheRings) {
  for (const auto& [window, draft] : {std::pair{1, 1}, {32, 1}, {64, 16}, {8, 4}}) {
    const Json json = cli_json({"inspect", kTinyModel, "--window", std::to_string(window),
                                "--draft", std::to_string(draft)});
    EXPECT_EQ(json["ring_bytes"], 6 * (window + draft) * (512 + 256 + 8) * 4);
    EXPECT_EQ(json["conv_ring_bytes"], 6 * (3 + draft) * 1024 * 4);
    EXPECT_EQ(json["state_bytes"]["f32"], 1574400);
  }
}

/// As many sequences as the parts say, to the byte, and in every spelling of the size.
TEST(InspectTest, Sequences) {
  const Json json = cli_json({"inspect", kTinyModel, "--context", "1000", "--memory", "1GiB"});
  const std::int64_t parts = json["state_bytes"]["f32"].get<std::int64_t>() +
                             json["ring_bytes"].get<std::int64_t>() +
                             json["conv_ring_bytes"].get<std::int64_t>() +
                             1000 * json["kv_bytes_per_token"].get<std::int64_t>();
  const std::int64_t fit = json["sequences"];
  EXPECT_LE(fit * parts, std::int64_t{1} << 30);
  const std::int64_t each = json["bytes_per_sequence"];
  EXPECT_GE(each, parts);
  EXPECT_LT(each, parts + parts / 100) << "alignment is small";
  EXPECT_EQ(fit, (std::int64_t{1} << 30) / each);
  const auto sequences = [&](const std::string& memory) {
    return cli_json({"inspect", kTinyModel, "--context", "1000", "--memory", memory})["sequences"]
        .get<std::int64_t>();
  };
  EXPECT_EQ(sequences(std::to_string(7 * each)), 7);
  EXPECT_EQ(sequences(std::to_string(7 * each - 1)), 6);
  EXPECT_EQ(sequences(std::to_string(each - 1)), 0);
  EXPECT_EQ(sequences("1073741824"), fit);
  EXPECT_EQ(sequences("1073741824B"), fit);
  EXPECT_EQ(sequences("1024MiB"), fit);
  EXPECT_EQ(sequences("1048576KiB"), fit);
  EXPECT_EQ(sequences("1GB"), 1'000'000'000 / each);
  EXPECT_EQ(sequences("0.5GiB"), (std::int64_t{1} << 29) / each);
  // More state per sequence, fewer sequences.
  EXPECT_LT(cli_json({"inspect", kTinyModel, "--context", "1000", "--memory", "1GiB", "--window",
                      "64"})["sequences"],
            fit);
}

TEST(InspectTest, NeedsNoWeights) {
  const TempDir folder;
  folder.write("config.json", read_text(kTinyModel + "/config.json"));
  EXPECT_EQ(cli_json({"inspect", folder.path()})["state_bytes"]["f32"], 1574400);
  const ProgramResult text = cli({"inspect", folder.path(), "--memory", "1GiB"});
  EXPECT_EQ(text.status, 0);
  for (const char* number : {"1574400", "786432", "36864", "316608", "98304"}) {
    EXPECT_NE(text.out.find(number), std::string::npos) << number;
  }
}

// ---- perplexity ----

TEST(PerplexityTest, FieldsAndWindows) {
  const TempDir folder;
  const std::string sample = read_text(kTinyModel + "/heldout-sample.txt").substr(0, 1500);
  const std::string path = folder.write("text", sample);
  Json tokens;
  double best = 1e9;
  double worst = 0;
  for (const char* context : {"2", "3", "64", "255", "256", "257", "4096"}) {
    const Json json = cli_json({"perplexity", kTinyModel, path, "--context", context});
    SCOPED_TRACE(json.dump());
    // Each token counts once, however the text is cut into windows.
    if (tokens.is_null()) tokens = json["tokens"];
    EXPECT_EQ(json["tokens"], tokens);
    EXPECT_EQ(json["bytes"], sample.size());
    const double bits = json["bits_per_byte"];
    const double nats = bits * std::log(2.0) * static_cast<double>(sample.size());
    EXPECT_NEAR(json["perplexity"], std::exp(nats / tokens.get<double>()),
                1e-6 * std::exp(nats / tokens.get<double>()));
    EXPECT_GT(bits, 1.0);
    best = std::min(best, bits);
    worst = std::max(worst, bits);
  }
  EXPECT_LT(best, 2.0) << "a trained model";
  EXPECT_GT(worst, best + 0.5) << "without context it knows less";
  // Once a window holds the whole text, more changes nothing.
  EXPECT_EQ(cli_json({"perplexity", kTinyModel, path, "--context", "4096"})["bits_per_byte"],
            cli_json({"perplexity", kTinyModel, path, "--context", "8192"})["bits_per_byte"]);
  const ProgramResult text = cli({"perplexity", kTinyModel, path, "--context", "256"});
  EXPECT_EQ(text.status, 0);
  EXPECT_NE(text.out.find("bits per byte"), std::string::npos);
}

// ---- compare ----

TEST(CompareTest, RunsAndTheirFields) {
  const Json json = cli_json(
      {"compare", kTinyModel, "--prompt", kPrompt, "--max-tokens", "40", "--windows", "1,7,64"});
  EXPECT_EQ(json["identical"], true);
  ASSERT_TRUE(json["runs"].is_array());
  std::set<int> windows;
  bool plain = false;
  for (const Json& run : json["runs"]) {
    SCOPED_TRACE(run.dump());
    expect_run_fields(run);
    EXPECT_EQ(run["tokens"].size(), 40u);
    EXPECT_EQ(run["prompt_tokens"], json["runs"][0]["prompt_tokens"]);
    if (run["state"] != "f32") continue;
    EXPECT_EQ(run["tokens"], json["runs"][0]["tokens"]);
    EXPECT_EQ(run["text"], json["runs"][0]["text"]);
    if (run["decode"] == "plain") plain = true;
    windows.insert(run["window"].get<int>());
  }
  EXPECT_TRUE(plain);
  for (const int window : {1, 7, 64}) EXPECT_TRUE(windows.contains(window)) << window;
  const Json single =
      cli_json({"generate", kTinyModel, "--prompt", kPrompt, "--max-tokens", "40", "--ignore-eos"});
  EXPECT_EQ(single["tokens"], json["runs"][0]["tokens"]) << "generate and compare disagree";
}

/// A head whose rows differ by less than rounding: which token wins is decided by the last bits,
/// and these depend on how the state was kept. Then `compare` must say that the runs differ.
TEST(CompareTest, SaysWhenRunsDiffer) {
  const TempDir folder;
  link_files(folder, kTinyModel);
  StoredTensors tensors = read_tensors(kTinyModel);
  StoredTensor& head = tensor_named(tensors, "lm_head.weight");
  ASSERT_EQ(head.dtype, "BF16");
  ASSERT_EQ(head.shape, (std::vector<std::int64_t>{2304, 160}));
  const auto bf16 = [](float value) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<std::uint16_t>(bits >> 16);
  };
  std::uint32_t random = 1;
  for (std::size_t row = 0; row < 2304; ++row) {
    for (std::size_t i = 0; i < 160; ++i) {
      random = random * 1664525u + 1013904223u;
      const float noise = (static_cast<float>(random >> 8) * 0x1p-24f - 0.5f) * 1e-7f;
      const std::uint16_t value = bf16(i < 8 ? 1.0f : noise);
      std::memcpy(head.bytes.data() + 2 * (row * 160 + i), &value, sizeof value);
    }
  }
  replace_tensors(folder, tensors);
  const std::vector<std::string> arguments = {"compare",      folder.path(), "--prompt",  kPrompt,
                                              "--max-tokens", "64",          "--windows", "4,16"};
  const Json json = cli_json(arguments);
  std::set<Json> f32;
  for (const Json& run : json["runs"]) {
    if (run["state"] == "f32") f32.insert(run["tokens"]);
  }
  ASSERT_GT(f32.size(), 1u) << "this head was meant to make runs differ";
  EXPECT_EQ(json["identical"], false);
  const ProgramResult text = cli(arguments);
  EXPECT_EQ(text.status, 0);
  // The generated text has no such word either, or this could not be asked.
  EXPECT_EQ(json["runs"][0]["text"].get<std::string>().find("identical"), std::string::npos);
  EXPECT_EQ(text.out.find("identical"), std::string::npos) << text.out;
}

}  // namespace
}  // namespace replayssm::testing
