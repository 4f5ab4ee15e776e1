// The bundled models at length: the same text by every way of decoding, and how well they read.
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <tuple>

#include "cli/cli.h"

namespace replayssm::testing {
namespace {

/// Model folder and prompt.
class LongCompareTest : public ::testing::TestWithParam<std::tuple<std::string, const char*>> {
 protected:
  static const std::string& folder() { return std::get<0>(GetParam()); }
  static const char* prompt() { return std::get<1>(GetParam()); }
};

TEST_P(LongCompareTest, SameTokensAndLessTraffic) {
  const ProgramResult text = cli({"compare", folder(), "--prompt", prompt(), "--max-tokens", "16",
                                  "--windows", "16", "--threads", "1"});
  EXPECT_EQ(text.status, 0) << text.err;
  EXPECT_NE(text.out.find("identical"), std::string::npos);

  const Json json = cli_json({"compare", folder(), "--prompt", prompt(), "--max-tokens", "512",
                              "--windows", "1,4,16,32", "--threads", "1"});
  EXPECT_EQ(json["identical"], true);
  const Json* plain = nullptr;
  const Json* window16 = nullptr;
  std::set<int> windows;
  int f32_runs = 0;
  for (const Json& run : json["runs"]) {
    expect_run_fields(run);
    EXPECT_EQ(run["tokens"].size(), 512u);
    if (run["state"] != "f32") continue;
    ++f32_runs;
    EXPECT_EQ(run["tokens"], json["runs"][0]["tokens"])
        << run["decode"] << " " << run["window"] << " differs";
    if (run["decode"] == "plain" && plain == nullptr) plain = &run;
    if (run["decode"] == "replay") windows.insert(run["window"].get<int>());
    if (run["decode"] == "replay" && run["window"] == 16) window16 = &run;
  }
  EXPECT_GE(f32_runs, 6) << "plain, four windows, auto";
  for (const int window : {1, 4, 16, 32}) EXPECT_TRUE(windows.contains(window)) << window;
  ASSERT_NE(plain, nullptr);
  ASSERT_NE(window16, nullptr);
  const Json& before = (*plain)["state_bytes_per_token"];
  const Json& after = (*window16)["state_bytes_per_token"];
  EXPECT_LE(after["checkpoint_written"].get<double>(),
            before["checkpoint_written"].get<double>() / 15);
  EXPECT_LE(1.65 * (after["read"].get<double>() + after["written"].get<double>()),
            before["read"].get<double>() + before["written"].get<double>());
}

/// 512 greedy tokens with drafts of 1 to 7 tokens, by n-grams, by a model and by the model's own
/// head if it has one, verified by replay and by snapshots: those of plain decoding (C96).
TEST_P(LongCompareTest, SameTokensWithDrafts) {
  std::vector<std::string> sources = {"ngram", folder()};
  if (has_mtp_head(folder())) sources.push_back("mtp");
  std::vector<std::string> command = {"compare",      folder(), "--prompt",       prompt(),
                                      "--max-tokens", "512",    "--threads",      "1",
                                      "--windows",    "16",     "--draft-tokens", "1,2,3,4,5,6,7"};
  for (const std::string& source : sources) command.insert(command.end(), {"--draft", source});
  const Json json = cli_json(command);
  EXPECT_EQ(json["identical"], true);
  std::set<Json> drafted;
  for (const Json& run : json["runs"]) {
    if (run["state"] != "f32") continue;
    EXPECT_EQ(run["tokens"].size(), 512u);
    EXPECT_EQ(run["tokens"], json["runs"][0]["tokens"])
        << run["decode"] << " with " << run["draft"].dump();
    const Json& draft = run["draft"];
    if (draft["source"] == "none") continue;
    EXPECT_GT(draft["accepted"], 0);
    if (draft["source"] == "mtp" && draft["tokens"] == 1) {
      // A head with weights that are missing or misread still drafts, and nothing else shows (C89).
      EXPECT_GT(draft["acceptance"], 0.8);
    }
    drafted.insert(Json::array({run["decode"], draft["source"], draft["tokens"]}));
  }
  EXPECT_EQ(drafted.size(), 2 * sources.size() * 7);
}

std::string name_of(const std::string& folder) {
  std::string name = std::filesystem::path(folder).filename().string();
  std::erase_if(name, [](char c) { return c == '-' || c == '.'; });
  return name;
}

INSTANTIATE_TEST_SUITE_P(Prompts, LongCompareTest,
                         ::testing::Combine(::testing::ValuesIn(bundled_models()),
                                            ::testing::Values("And it came to pass",
                                                              "KING RICHARD:\n",
                                                              "the sea, the sea, the sea, the")),
                         [](const auto& test) {
                           return name_of(std::get<0>(test.param)) + "_" +
                                  std::to_string(test.index);
                         });

class HeldOutTest : public ::testing::TestWithParam<std::string> {};

TEST_P(HeldOutTest, BitsPerByte) {
  const std::string path = GetParam() + "/heldout-sample.txt";
  const Json json = cli_json({"perplexity", GetParam(), path, "--context", "512"});
  // What the models were trained to on this sample; far below would mean that a token sees itself.
  EXPECT_NEAR(json["bits_per_byte"], GetParam() == kTinyModel ? 1.43 : 1.45, 0.03);
  // Without a token in front of the text, its first one is not scored.
  const bool has_bos = !read_config(GetParam()).value("bos_token_id", Json()).is_null();
  const auto size = static_cast<std::int64_t>(read_text(path).size());
  EXPECT_LE(json["bytes"], size);
  EXPECT_GE(json["bytes"], has_bos ? size : size - 16);
  EXPECT_GT(json["tokens"], 10'000);
}

INSTANTIATE_TEST_SUITE_P(Models, HeldOutTest, ::testing::ValuesIn(bundled_models()),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace
}  // namespace replayssm::testing
