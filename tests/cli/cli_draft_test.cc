// Drafts and sessions on the command line: the same text as without them, what the reports say, and
// what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>

#include "cli/cli.h"

namespace replayssm::testing {
namespace {

using Arguments = std::vector<std::string>;

const std::string kRepeating =
    "the king and the lord of the land, the king and the lord of the land, the king and";

Arguments arguments(const std::string& folder, Arguments more) {
  more.insert(more.begin(), {"generate", folder, "--threads", "1"});
  return more;
}

Json generate(Arguments more) { return cli_json(arguments(kTinyModel, std::move(more))); }

/// The bundled model with a third of its vocabulary made unlikely.
void make_forgetful_model(const TempDir& folder) {
  link_files(folder, kTinyModel);
  StoredTensors tensors = read_tensors(kTinyModel);
  StoredTensor& head = tensor_named(tensors, "lm_head.weight");
  constexpr std::size_t kRow = 160 * 2;
  for (std::size_t row = 1; row < 2304; row += 3) {
    std::fill_n(head.bytes.begin() + static_cast<std::ptrdiff_t>(row * kRow), kRow, '\0');
  }
  replace_tensors(folder, tensors);
}

void expect_draft_fields(const Json& run, const std::string& source, int tokens) {
  expect_run_fields(run);
  const Json& draft = run["draft"];
  EXPECT_EQ(draft["source"], source);
  EXPECT_EQ(draft["tokens"], tokens);
  const std::int64_t drafted = draft["drafted"];
  const std::int64_t accepted = draft["accepted"];
  const std::int64_t steps = draft["steps"];
  EXPECT_GE(accepted, 0);
  EXPECT_LE(accepted, drafted);
  EXPECT_LE(drafted, steps * tokens);
  if (drafted > 0) {
    EXPECT_DOUBLE_EQ(draft["acceptance"],
                     static_cast<double>(accepted) / static_cast<double>(drafted));
  } else {
    EXPECT_TRUE(draft["acceptance"].is_null());
  }
}

// ---- Drafts ----

TEST(DraftTest, EverySourceAndItsFields) {
  const TempDir forgetful;
  make_forgetful_model(forgetful);
  const Json plain =
      generate({"--prompt", kRepeating, "--max-tokens", "60", "--decode", "plain", "--ignore-eos"});
  expect_draft_fields(plain, "none", 0);
  EXPECT_EQ(plain["draft"]["steps"], 59);
  EXPECT_EQ(plain["state_memory"]["states"], 1);
  for (const std::string& source :
       {std::string("ngram"), std::string("ngram:1-3"), kTinyModel, forgetful.path()}) {
    for (const char* decode : {"auto", "replay", "snapshot"}) {
      for (const int tokens : {1, 4, 15}) {
        const Json run =
            generate({"--prompt", kRepeating, "--max-tokens", "60", "--ignore-eos", "--decode",
                      decode, "--draft", source, "--draft-tokens", std::to_string(tokens)});
        SCOPED_TRACE(run.dump());
        EXPECT_EQ(run["tokens"], plain["tokens"]);
        EXPECT_EQ(run["text"], plain["text"]);
        expect_draft_fields(run, source, tokens);
        EXPECT_EQ(run["decode"], decode == std::string("snapshot") ? "snapshot" : "replay");
        EXPECT_EQ(run["draft"]["steps"].get<int>() + run["draft"]["accepted"].get<int>(), 59);
        EXPECT_GT(run["draft"]["accepted"], 0);
        if (source == kTinyModel) {
          EXPECT_EQ(run["draft"]["acceptance"], 1.0);
        }
        if (source == forgetful.path()) {
          EXPECT_LT(run["draft"]["acceptance"], 1.0);
        }
        // One state whatever the drafts, against one more than a row has tokens.
        EXPECT_EQ(run["state_memory"]["states"],
                  decode == std::string("snapshot") ? tokens + 2 : 1);
      }
    }
  }
}

TEST(DraftTest, TextModeSaysHowManyWereAccepted) {
  const ProgramResult result = cli(
      arguments(kTinyModel, {"--prompt", kRepeating, "--max-tokens", "30", "--draft", "ngram"}));
  EXPECT_EQ(result.status, 0);
  EXPECT_NE(result.err.find("ngram 4"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("drafted tokens accepted"), std::string::npos) << result.err;
}

/// Stop strings and end tokens inside an accepted run cut text and tokens where decoding token by
/// token does.
TEST(DraftTest, StopsLikePlainDecoding) {
  const Json whole = generate({"--prompt", kRepeating, "--max-tokens", "48", "--ignore-eos"});
  const std::string text = whole["text"];
  ASSERT_GT(text.size(), 60u);
  int inside = 0;
  for (std::size_t at = 3; at + 4 < text.size() && at < 63; at += 6) {
    const Arguments options = {"--prompt",     kRepeating, "--max-tokens",    "48",
                               "--ignore-eos", "--stop",   text.substr(at, 4)};
    const Json plain = generate(options);
    for (const char* decode : {"replay", "snapshot"}) {
      Arguments with_drafts = options;
      with_drafts.insert(with_drafts.end(),
                         {"--decode", decode, "--draft", kTinyModel, "--draft-tokens", "7"});
      const Json run = generate(with_drafts);
      EXPECT_EQ(run["text"], plain["text"]);
      EXPECT_EQ(run["tokens"], plain["tokens"]);
      EXPECT_LE(run["draft"]["accepted"], run["draft"]["drafted"]);
      if (run["draft"]["accepted"] < run["draft"]["drafted"]) ++inside;
    }
  }
  EXPECT_GT(inside, 5) << "no text ended inside an accepted run";

  const TempDir folder;
  link_files(folder, kTinyModel);
  const std::int32_t end = whole["tokens"][9];
  replace_file(folder, "generation_config.json",
               R"({"eos_token_id": )" + std::to_string(end) + "}");
  const Arguments options = {"--prompt", kRepeating, "--max-tokens", "48"};
  const Json plain = cli_json(arguments(folder.path(), options));
  EXPECT_EQ(plain["tokens"].back(), end);
  Arguments with_drafts = options;
  with_drafts.insert(with_drafts.end(), {"--draft", kTinyModel, "--draft-tokens", "7"});
  const Json run = cli_json(arguments(folder.path(), with_drafts));
  EXPECT_EQ(run["tokens"], plain["tokens"]);
  EXPECT_EQ(run["text"], plain["text"]);
}

/// n-gram drafts are certain: a seed draws the same text with and without them.
TEST(DraftTest, SampledText) {
  const Arguments options = {"--prompt",      kRepeating, "--max-tokens", "60",     "--ignore-eos",
                             "--temperature", "0.7",      "--top-k",      "40",     "--top-p",
                             "0.9",           "--min-p",  "0.02",         "--seed", "5"};
  const Json plain = generate(options);
  for (const char* decode : {"replay", "snapshot"}) {
    Arguments more = options;
    more.insert(more.end(), {"--decode", decode, "--draft", "ngram", "--draft-tokens", "5"});
    const Json run = generate(more);
    EXPECT_EQ(run["tokens"], plain["tokens"]);
    EXPECT_GT(run["draft"]["accepted"], 0);
  }
  // A draft model's proposals draw numbers too: another text of the same distribution, the same
  // one every time.
  Arguments more = options;
  more.insert(more.end(), {"--draft", kTinyModel});
  const Json run = generate(more);
  EXPECT_EQ(run["draft"]["acceptance"], 1.0) << "equal distributions accept everything";
  EXPECT_EQ(generate(more)["tokens"], run["tokens"]);
}

TEST(DraftTest, CompareShowsEverySource) {
  const TempDir forgetful;
  make_forgetful_model(forgetful);
  const Arguments command = {"compare",        kTinyModel,
                             "--threads",      "1",
                             "--prompt",       kRepeating,
                             "--max-tokens",   "40",
                             "--windows",      "8",
                             "--draft",        "ngram",
                             "--draft",        forgetful.path(),
                             "--draft-tokens", "2,6"};
  const Json json = cli_json(command);
  EXPECT_EQ(json["identical"], true);
  std::set<std::string> shown;
  for (const Json& run : json["runs"]) {
    expect_run_fields(run);
    if (run["state"] != "f32") continue;
    EXPECT_EQ(run["tokens"], json["runs"][0]["tokens"]);
    shown.insert(run["decode"].get<std::string>() + " " +
                 run["draft"]["source"].get<std::string>() + " " + run["draft"]["tokens"].dump());
  }
  for (const std::string& source : {std::string("ngram"), forgetful.path()}) {
    for (const char* decode : {"replay", "snapshot"}) {
      for (const char* tokens : {"2", "6"}) {
        const std::string run = std::string(decode) + " " + source + " " + tokens;
        EXPECT_TRUE(shown.contains(run)) << run;
      }
    }
  }
  EXPECT_TRUE(shown.contains("plain none 0"));
  EXPECT_TRUE(shown.contains("replay none 0"));
  const ProgramResult text = cli(command);
  EXPECT_EQ(text.status, 0) << text.err;
  for (const char* part : {"replay 16 + ngram 2", "snapshot + ngram 6", "accepted", "%",
                           "same tokens", "all tokens identical"}) {
    EXPECT_NE(text.out.find(part), std::string::npos) << part << "\n" << text.out;
  }
}

/// Options that contradict each other, and drafts that do not fit, are refused at start by both
/// values (C31, C32, C97).
TEST(DraftErrorTest, CommandLines) {
  struct Case {
    Arguments more;
    Arguments parts;
  };
  const Case cases[] = {
      {{"--draft", "tree"}, {"tree", "not supported"}},
      {{"--draft", ""}, {"--draft", "empty"}},
      {{"--draft"}, {"--draft"}},
      {{"--draft", "ngram:5-2"}, {"5 to 2"}},
      {{"--draft", "ngram:0-3"}, {"0 to 3"}},
      {{"--draft", "ngram:2-99"}, {"2 to 99", "16"}},
      {{"--draft", "ngram:2"}, {"ngram:2", "MIN-MAX"}},
      {{"--draft", "ngram:2-x"}, {"ngram:2-x"}},
      {{"--draft-tokens", "3"}, {"--draft-tokens", "--draft"}},
      {{"--draft", "ngram", "--draft-tokens", "0"}, {"--draft-tokens", "0"}},
      {{"--draft", "ngram", "--draft-tokens", "16"}, {"--draft-tokens", "16", "15"}},
      {{"--draft", "ngram", "--draft-tokens", "x"}, {"--draft-tokens", "x"}},
      {{"--draft", "ngram", "--draft-tokens", "4", "--window", "4"},
       {"--draft-tokens 4", "5", "--window 4"}},
      {{"--draft", "ngram", "--decode", "plain"}, {"--decode plain", "--draft ngram"}},
      {{"--decode", "snapshot"}, {"snapshot", "--draft"}},
      {{"--decode", "snapshot", "--draft", "none"}, {"snapshot", "--draft"}},
  };
  for (const Case& c : cases) {
    Arguments line = {"--prompt", "x", "--json"};
    line.insert(line.end(), c.more.begin(), c.more.end());
    EXPECT_TRUE(fails(cli(arguments(kTinyModel, line)), 2, c.parts)) << c.more.back();
  }
  for (const Case& c : {Case{{"--draft", "tree"}, {"tree"}}, Case{{"--draft", "none"}, {"none"}},
                        Case{{"--draft-tokens", "2"}, {"--draft"}},
                        Case{{"--draft", "ngram", "--draft-tokens", "2,16"}, {"16", "15"}},
                        Case{{"--draft", "ngram", "--draft-tokens", "2,,3"}, {"--draft-tokens"}}}) {
    Arguments line = {"compare", kTinyModel, "--prompt", "x"};
    line.insert(line.end(), c.more.begin(), c.more.end());
    EXPECT_TRUE(fails(cli(line), 2, c.parts)) << c.more.back();
  }
}

/// A draft model must speak the same tokens; both folders and the first difference are named.
TEST(DraftErrorTest, DraftModels) {
  const auto draft = [](const std::string& source) {
    return cli(arguments(kTinyModel, {"--prompt", "x", "--draft", source, "--json"}));
  };
  EXPECT_TRUE(fails(draft("mtp"), 1, {"--draft mtp", kTinyModel, "nemotron_h"}));
  EXPECT_TRUE(fails(draft("/nonexistent/model"), 1, {"/nonexistent/model"}));

  const TempDir swapped;
  link_files(swapped, kTinyModel);
  Json tokenizer = Json::parse(read_text(kTinyModel + "/tokenizer.json"));
  std::string names[2];
  for (const auto& [token, id] : tokenizer["model"]["vocab"].items()) {
    if (id == 1000 || id == 1001) names[id == 1001] = token;
  }
  tokenizer["model"]["vocab"][names[0]] = 1001;
  tokenizer["model"]["vocab"][names[1]] = 1000;
  replace_file(swapped, "tokenizer.json", tokenizer.dump());
  EXPECT_TRUE(fails(draft(swapped.path()), 1, {swapped.path(), kTinyModel, "1000"}));

  // The same tokens, but rows for more of them than the model has.
  const TempDir larger;
  link_files(larger, kTinyModel);
  Json config = read_config(kTinyModel);
  config["vocab_size"] = 2305;
  replace_file(larger, "config.json", config.dump());
  StoredTensors tensors = read_tensors(kTinyModel);
  int widened = 0;
  for (StoredTensor& tensor : tensors) {
    if (tensor.shape != std::vector<std::int64_t>{2304, 160}) continue;
    tensor.shape[0] = 2305;
    tensor.bytes += std::string(160 * 2, '\0');
    ++widened;
  }
  ASSERT_EQ(widened, 2);
  replace_tensors(larger, tensors);
  EXPECT_TRUE(fails(draft(larger.path()), 1, {larger.path(), "2305", "2304"}));

  const TempDir damaged;
  link_files(damaged, kTinyModel);
  replace_file(damaged, "model.safetensors", "");
  EXPECT_TRUE(fails(draft(damaged.path()), 1, {damaged.path(), "model.safetensors"}));
}

// ---- Sessions ----

/// Saved in one process and continued in another: the same tokens as in one go, with nothing read
/// again (C61), whatever way of decoding goes on.
TEST(SessionTest, GoesOnInAnotherProcess) {
  const std::string prompt = "And it came to pass";
  const Json whole = generate({"--prompt", prompt, "--max-tokens", "60", "--ignore-eos"});
  const Json first_tokens(std::vector<Json>(whole["tokens"].begin(), whole["tokens"].begin() + 21));
  const Json last_tokens(std::vector<Json>(whole["tokens"].begin() + 21, whole["tokens"].end()));
  const std::vector<Arguments> ways = {{"--decode", "plain"},
                                       {"--decode", "replay", "--window", "16"},
                                       {"--decode", "replay", "--window", "2"},
                                       {"--decode", "snapshot", "--draft", "ngram"},
                                       {"--draft", kTinyModel}};
  for (const Arguments& from : ways) {
    const TempDir folder;
    const std::string file = folder / "session";
    Arguments save = {"--prompt",       prompt, "--max-tokens", "21", "--ignore-eos",
                      "--save-session", file};
    save.insert(save.end(), from.begin(), from.end());
    const Json saved = generate(save);
    EXPECT_EQ(saved["tokens"], first_tokens);
    EXPECT_EQ(saved["restored_tokens"], 0);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1)
        << "something was left beside the session";
    for (const Arguments& to : ways) {
      Arguments load = {"--load-session", file, "--max-tokens", "39", "--ignore-eos"};
      load.insert(load.end(), to.begin(), to.end());
      const Json run = generate(load);
      EXPECT_EQ(run["tokens"], last_tokens) << from[1] << " to " << to[1];
      EXPECT_EQ(run["prompt_tokens"], 0);
      EXPECT_EQ(run["restored_tokens"],
                saved["prompt_tokens"].get<int>() + saved["tokens"].get<std::vector<int>>().size());
    }
  }
}

/// A conversation: prompts and answers in turn, saved over the same file.
TEST(SessionTest, TurnsAndSeeds) {
  const TempDir folder;
  const std::string file = folder / "session";
  const Arguments sampling = {"--temperature", "0.8", "--top-k", "30", "--ignore-eos"};
  const auto run = [&](Arguments more) {
    more.insert(more.end(), sampling.begin(), sampling.end());
    return generate(more);
  };
  const Json whole = run({"--prompt", "KING RICHARD:", "--max-tokens", "40", "--seed", "3"});
  const Json first = run(
      {"--prompt", "KING RICHARD:", "--max-tokens", "15", "--seed", "3", "--save-session", file});
  const Json next = run({"--load-session", file, "--max-tokens", "25"});
  EXPECT_EQ(next["tokens"],
            Json(std::vector<Json>(whole["tokens"].begin() + 15, whole["tokens"].end())))
      << "random numbers go on";
  EXPECT_NE(run({"--load-session", file, "--max-tokens", "25", "--seed", "4"})["tokens"],
            next["tokens"]);
  const Json answer = run({"--load-session", file, "--prompt", "\nQUEEN:", "--max-tokens", "10",
                           "--save-session", file});
  EXPECT_GT(answer["prompt_tokens"], 0);
  EXPECT_EQ(answer["restored_tokens"], first["prompt_tokens"].get<int>() + 15);
  const Json again = run({"--load-session", file, "--max-tokens", "5"});
  EXPECT_EQ(again["restored_tokens"],
            first["prompt_tokens"].get<int>() + 25 + answer["prompt_tokens"].get<int>());
}

/// A session that cannot go on says why, by both values, and nothing is written.
TEST(SessionErrorTest, RefusedSessions) {
  const TempDir folder;
  const std::string file = folder / "session";
  generate({"--prompt", "And it came to pass", "--max-tokens", "5", "--save-session", file});
  const std::string bytes = read_text(file);
  const auto load = [&](const std::string& model, const std::string& session, Arguments more = {}) {
    more.insert(more.begin(), {"--load-session", session, "--max-tokens", "4", "--json"});
    return cli(arguments(model, more));
  };
  EXPECT_EQ(load(kTinyModel, file).status, 0);

  EXPECT_TRUE(fails(load(kTinyModel, folder / "absent"), 1, {"absent"}));
  EXPECT_TRUE(fails(load(kTinyModel, folder.path()), 1, {folder.path()}));
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{4}, std::size_t{12}, bytes.size() / 2, bytes.size() - 1}) {
    const std::string cut = folder.write("cut", bytes.substr(0, size));
    EXPECT_TRUE(fails(load(kTinyModel, cut), 1, {cut})) << size << " bytes";
  }
  for (const std::size_t at : {std::size_t{30}, bytes.size() / 3, bytes.size() - 3}) {
    std::string damaged = bytes;
    damaged[at] = static_cast<char>(damaged[at] + 1);
    EXPECT_TRUE(fails(load(kTinyModel, folder.write("damaged", damaged)), 1,
                      {"damaged", "corrupt", "checksum"}))
        << at;
  }
  std::string version = bytes;
  version[8] = 9;
  EXPECT_TRUE(fails(load(kTinyModel, folder.write("newer", version)), 1, {"version 9", "1"}));
  EXPECT_TRUE(fails(load(kTinyModel, kTinyModel + "/config.json"), 1, {"config.json", "RSSMSESS"}));
  EXPECT_TRUE(fails(load(kTinyModel, file, {"--state", "bf16"}), 1, {file, "f32", "bf16"}));
  const TempDir other;
  make_forgetful_model(other);
  EXPECT_TRUE(fails(load(other.path(), file), 1, {file, "model", "nemotron_h-"}));

  // A failed run leaves the file that was there, and nothing beside it.
  EXPECT_TRUE(fails(load(other.path(), file, {"--save-session", file}), 1, {"model"}));
  EXPECT_EQ(read_text(file), bytes);
  // What was generated is printed all the same; only the file is missing.
  const std::string nowhere = folder / "no/such/folder";
  ProgramResult unsaved = load(kTinyModel, file, {"--save-session", nowhere});
  EXPECT_EQ(unsaved.out.rfind("{\"tokens\":[", 0), 0u) << unsaved.out;
  unsaved.out.clear();
  EXPECT_TRUE(fails(unsaved, 1, {nowhere}));
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    const std::string name = entry.path().filename().string();
    EXPECT_EQ(name.find(".replayssm"), std::string::npos) << name;
  }
  EXPECT_TRUE(fails(cli(arguments(kTinyModel, {"--json"})), 2, {"--prompt", "--load-session"}));
}

}  // namespace
}  // namespace replayssm::testing
