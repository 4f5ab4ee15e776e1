// Running the command line and reading what it says.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "support/model_folder.h"
#include "support/run_program.h"

namespace replayssm::testing {

inline const std::string kTinyModel = RSSM_SOURCE_DIR "/models/nemotron-h-tiny";

/// The folders of the bundled models that are there.
inline std::vector<std::string> bundled_models() {
  std::vector<std::string> folders;
  for (const char* name : {"nemotron-h-tiny", "qwen3.5-tiny"}) {
    const std::string folder = std::string(RSSM_SOURCE_DIR "/models/") + name;
    if (std::filesystem::exists(folder + "/config.json")) folders.push_back(folder);
  }
  return folders;
}

/// Whether the model's configuration promises a multi-token-prediction head.
inline bool has_mtp_head(const std::string& folder) {
  const Json config = read_config(folder);
  const Json& text = config.contains("text_config") ? config["text_config"] : config;
  return text.value("mtp_num_hidden_layers", 0) > 0;
}

inline ProgramResult cli(std::vector<std::string> arguments, const RunOptions& options = {}) {
  return run_program(RSSM_CLI, std::move(arguments), options);
}

/// Status 0 and stdout one line with one JSON object.
inline Json cli_json(std::vector<std::string> arguments, const RunOptions& options = {}) {
  arguments.push_back("--json");
  const ProgramResult result = cli(arguments, options);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 1) << result.out;
  Json json = Json::parse(result.out, nullptr, false);
  EXPECT_TRUE(json.is_object()) << result.out;
  return json.is_object() ? json : Json::object();
}

/// Fails with this status, nothing on stdout, and one line on stderr that contains all `parts`.
inline ::testing::AssertionResult fails(const ProgramResult& result, int status,
                                        const std::vector<std::string>& parts) {
  const auto shown = [&] {
    return "status " + std::to_string(result.status) + ", stderr '" + result.err + "', stdout '" +
           result.out.substr(0, 200) + "'";
  };
  if (result.status != status) {
    return ::testing::AssertionFailure() << "expected status " << status << ": " << shown();
  }
  if (!result.out.empty()) return ::testing::AssertionFailure() << "stdout: " << shown();
  if (std::count(result.err.begin(), result.err.end(), '\n') != 1 || result.err.back() != '\n') {
    return ::testing::AssertionFailure() << "not one line: " << shown();
  }
  for (const char c : result.err.substr(0, result.err.size() - 1)) {
    if (static_cast<unsigned char>(c) < 0x20) {
      return ::testing::AssertionFailure() << "control characters: " << shown();
    }
  }
  for (const std::string& part : parts) {
    if (result.err.find(part) == std::string::npos) {
      return ::testing::AssertionFailure() << "no '" << part << "': " << shown();
    }
  }
  return ::testing::AssertionSuccess();
}

/// The fields of every run, and that their values make sense together.
inline void expect_run_fields(const Json& run) {
  for (const char* key :
       {"tokens", "text", "prompt_tokens", "decode", "window", "state", "isa", "threads", "seconds",
        "tokens_per_second", "state_bytes_per_token", "draft", "state_memory", "restored_tokens"}) {
    ASSERT_TRUE(run.contains(key)) << key << " in " << run.dump();
  }
  ASSERT_TRUE(run["tokens"].is_array());
  for (const Json& token : run["tokens"]) {
    EXPECT_TRUE(token.is_number_integer());
    EXPECT_GE(token, 0);
  }
  EXPECT_TRUE(run["text"].is_string());
  EXPECT_GE(run["prompt_tokens"].get<int>() + run["restored_tokens"].get<int>(), 1);
  const bool replay = run["decode"] == "replay";
  EXPECT_TRUE(replay || run["decode"] == "plain" || run["decode"] == "snapshot") << run["decode"];
  EXPECT_GE(run["window"], replay ? 1 : 0);
  EXPECT_LE(run["window"], replay ? 64 : 0);
  EXPECT_TRUE(run["state"] == "f32" || run["state"] == "bf16") << run["state"];
  EXPECT_FALSE(run["isa"].get<std::string>().empty());
  EXPECT_GE(run["threads"], 1);
  for (const char* key : {"load", "prompt", "decode"}) {
    ASSERT_TRUE(run["seconds"].contains(key)) << key;
    EXPECT_GE(run["seconds"][key], 0.0);
    EXPECT_LT(run["seconds"][key], 600.0);
  }
  const double seconds = run["seconds"]["decode"];
  const auto tokens = static_cast<double>(run["tokens"].size());
  if (seconds > 0) {
    EXPECT_NEAR(run["tokens_per_second"].get<double>() * seconds / tokens, 1.0, 1e-6);
  }
  const Json& traffic = run["state_bytes_per_token"];
  for (const char* key : {"read", "written", "checkpoint_written"}) {
    ASSERT_TRUE(traffic.contains(key)) << key;
    EXPECT_GE(traffic[key], 0.0);
  }
  EXPECT_GE(traffic["written"], traffic["checkpoint_written"]);
}

}  // namespace replayssm::testing
