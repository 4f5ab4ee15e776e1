// A small random qwen3_5 model with a multi-token-prediction head on the command line: drafts by
// the head beside other sources, sessions, and heads that must be refused.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "cli/cli.h"
#include "support/qwen3_5_model.h"

namespace replayssm::testing {
namespace {

using Arguments = std::vector<std::string>;

const std::string kPrompt = "the king and the lord of the land, the king and";

/// A folder with the bundled model's vocabulary.
struct RandomModel {
  TempDir folder;
  Qwen35Sizes sizes{.vocab = 2304};
  StoredTensors tensors = Qwen35Weights(sizes).make();

  RandomModel() {
    link_files(folder, kTinyModel);
    replace_file(folder, "config.json", qwen3_5_config(sizes).dump());
    replace_tensors(folder, tensors);
  }
};

const std::string& model() {
  static const RandomModel made;
  return made.folder.path();
}

Arguments arguments(const std::string& folder, Arguments more) {
  more.insert(more.begin(), {"generate", folder, "--threads", "1"});
  return more;
}

Json generate(Arguments more) {
  more.push_back("--ignore-eos");
  return cli_json(arguments(model(), std::move(more)));
}

TEST(MtpCliTest, SameTextAsWithoutDrafts) {
  const Json plain = generate({"--prompt", kPrompt, "--max-tokens", "60", "--decode", "plain"});
  expect_run_fields(plain);
  int accepted = 0;
  for (const char* decode : {"auto", "replay", "snapshot"}) {
    for (const int tokens : {1, 2, 3, 4, 5, 6, 7, 15}) {
      const Json run = generate({"--prompt", kPrompt, "--max-tokens", "60", "--decode", decode,
                                 "--draft", "mtp", "--draft-tokens", std::to_string(tokens)});
      SCOPED_TRACE(run.dump());
      expect_run_fields(run);
      EXPECT_EQ(run["tokens"], plain["tokens"]);
      const Json& draft = run["draft"];
      EXPECT_EQ(draft["source"], "mtp");
      EXPECT_EQ(draft["tokens"], tokens);
      EXPECT_GT(draft["drafted"], 0);
      EXPECT_EQ(draft["steps"].get<int>() + draft["accepted"].get<int>(), 59);
      EXPECT_EQ(run["state_memory"]["states"], decode == std::string("snapshot") ? tokens + 2 : 1);
      accepted += draft["accepted"].get<int>();
    }
  }
  EXPECT_GT(accepted, 0);
}

TEST(MtpCliTest, CompareShowsAllSourcesInOneTable) {
  const Arguments command = {"compare",  model(),          "--threads", "1",         "--prompt",
                             kPrompt,    "--max-tokens",   "40",        "--windows", "8",
                             "--draft",  "ngram",          "--draft",   "mtp",       "--draft",
                             kTinyModel, "--draft-tokens", "2,5"};
  const Json json = cli_json(command);
  EXPECT_EQ(json["identical"], true);
  std::set<std::string> shown;
  for (const Json& run : json["runs"]) {
    if (run["state"] != "f32") continue;
    EXPECT_EQ(run["tokens"], json["runs"][0]["tokens"]);
    shown.insert(run["decode"].get<std::string>() + " " +
                 run["draft"]["source"].get<std::string>() + " " + run["draft"]["tokens"].dump());
  }
  for (const std::string& source : {std::string("ngram"), std::string("mtp"), kTinyModel}) {
    for (const char* decode : {"replay", "snapshot"}) {
      for (const char* tokens : {"2", "5"}) {
        EXPECT_TRUE(shown.contains(std::string(decode) + " " + source + " " + tokens)) << source;
      }
    }
  }
  const ProgramResult text = cli(command);
  EXPECT_EQ(text.status, 0) << text.err;
  for (const char* part : {"replay 16 + mtp 2", "snapshot + mtp 5", "all tokens identical"}) {
    EXPECT_NE(text.out.find(part), std::string::npos) << part << "\n" << text.out;
  }
}

/// A seed gives one text every time; a greedy head is certain, and then no draw changes.
TEST(MtpCliTest, SampledText) {
  const Arguments options = {"--prompt", kPrompt, "--max-tokens", "60", "--temperature", "0.7",
                             "--top-k",  "5",     "--seed",       "5",  "--draft",       "mtp"};
  const Json run = generate(options);
  EXPECT_GT(run["draft"]["drafted"], 0);
  EXPECT_EQ(generate(options)["tokens"], run["tokens"]);
}

/// A saved text goes on with drafts by the head, which has seen nothing of it, and the other way.
TEST(MtpCliTest, SessionsGoOn) {
  const TempDir folder;
  const std::string file = folder / "session";
  const Json whole = generate({"--prompt", kPrompt, "--max-tokens", "50"});
  const std::vector<Arguments> ways = {{"--decode", "plain"},
                                       {"--draft", "mtp"},
                                       {"--draft", "mtp", "--decode", "snapshot"},
                                       {"--decode", "replay", "--draft", "ngram"}};
  const Json last(std::vector<Json>(whole["tokens"].begin() + 20, whole["tokens"].end()));
  for (const Arguments& from : ways) {
    Arguments save = {"--prompt", kPrompt, "--max-tokens", "20", "--save-session", file};
    save.insert(save.end(), from.begin(), from.end());
    generate(save);
    for (const Arguments& to : ways) {
      Arguments load = {"--load-session", file, "--max-tokens", "30"};
      load.insert(load.end(), to.begin(), to.end());
      const Json run = generate(load);
      EXPECT_EQ(run["tokens"], last) << from[1] << " to " << to[1];
      if (run["draft"]["source"] == "mtp") {
        EXPECT_GT(run["draft"]["drafted"], 0);
      }
    }
  }
}

TEST(MtpCliTest, InspectAndPerplexity) {
  const Json sizes = cli_json({"inspect", model()});
  EXPECT_EQ(sizes["model_type"], "qwen3_5");
  EXPECT_EQ(sizes["layers"]["ssm"], 3);
  EXPECT_EQ(sizes["layers"]["attention"], 2);
  EXPECT_EQ(sizes["state_bytes"]["f32"], 3 * 4 * (16 * 24 + 24 / 8) * 4);
  EXPECT_EQ(sizes["kv_bytes_per_token"], 2 * 2 * 2 * 16 * 4);
  EXPECT_EQ(sizes["mtp_kv_bytes_per_token"], 2 * 2 * 16 * 4);
  EXPECT_EQ(cli_json({"inspect", kTinyModel})["mtp_kv_bytes_per_token"], 0);
  const TempDir folder;
  const std::string file = folder.write("text", kPrompt);
  EXPECT_GT(cli_json({"perplexity", model(), file})["bits_per_byte"], 0.0);
}

/// No head, a head without a tensor, one of another shape: refused at start by name, and nothing
/// runs (C89); without --draft mtp the same folders run.
TEST(MtpCliErrorTest, Heads) {
  const auto draft = [](const std::string& folder) {
    return cli(arguments(folder, {"--prompt", "x", "--max-tokens", "2", "--draft", "mtp"}));
  };
  const auto plain = [](const std::string& folder) {
    return cli(arguments(folder, {"--prompt", "x", "--max-tokens", "2"})).status;
  };
  EXPECT_TRUE(fails(draft(kTinyModel), 1, {"--draft mtp", kTinyModel, "nemotron_h"}));
  const StoredTensors all = read_tensors(model());
  const std::string q_norm = "mtp.layers.0.self_attn.q_norm.weight";

  RandomModel none;
  Json config = qwen3_5_config(none.sizes);
  config["mtp_num_hidden_layers"] = 0;
  replace_file(none.folder, "config.json", config.dump());
  std::erase_if(none.tensors, [](const StoredTensor& t) { return t.name.starts_with("mtp."); });
  replace_tensors(none.folder, none.tensors);
  EXPECT_TRUE(fails(draft(none.folder.path()), 1,
                    {"--draft mtp", none.folder.path(), "mtp_num_hidden_layers", "0"}));
  EXPECT_EQ(plain(none.folder.path()), 0);

  for (const std::string& name : {std::string("mtp.fc.weight"), q_norm}) {
    RandomModel missing;
    std::erase_if(missing.tensors, [&](const StoredTensor& t) { return t.name == name; });
    replace_tensors(missing.folder, missing.tensors);
    EXPECT_TRUE(fails(draft(missing.folder.path()), 1,
                      {"--draft mtp", missing.folder.path(), name, "missing"}));
    EXPECT_EQ(plain(missing.folder.path()), 0);
  }

  RandomModel reshaped;
  StoredTensor& tensor = tensor_named(reshaped.tensors, q_norm);
  tensor.shape = {8};
  tensor.bytes.resize(8 * sizeof(float));
  replace_tensors(reshaped.folder, reshaped.tensors);
  EXPECT_TRUE(fails(draft(reshaped.folder.path()), 1, {"--draft mtp", q_norm, "[8]", "[16]"}));
  EXPECT_EQ(plain(reshaped.folder.path()), 0);

  EXPECT_TRUE(
      fails(cli(arguments(model(), {"--prompt", "x", "--draft", "mtp", "--decode", "plain"})), 2,
            {"--decode plain", "--draft mtp"}));
  EXPECT_TRUE(fails(cli(arguments(model(), {"--prompt", "x", "--draft", "mtp", "--window", "3"})),
                    2, {"--draft-tokens 4", "--window 3"}));
}

}  // namespace
}  // namespace replayssm::testing
