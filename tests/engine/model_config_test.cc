// config.json of the nemotron_h family: what is read, what is refused, and the sizes that follow;
// and of the published models of all families.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <regex>
#include <string>

#include "model/model.h"
#include "runtime/engine.h"
#include "support/compare.h"
#include "support/model_folder.h"

namespace replayssm::testing {
namespace {

/// A configuration of two Mamba-2 blocks, two of attention, one MLP.
Json small_config() {
  return {{"model_type", "nemotron_h"},
          {"hybrid_override_pattern", "M*-*M"},
          {"hidden_size", 32},
          {"vocab_size", 264},
          {"mamba_num_heads", 4},
          {"mamba_head_dim", 8},
          {"ssm_state_size", 16},
          {"n_groups", 2},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"head_dim", 8},
          {"intermediate_size", 48},
          {"torch_dtype", "bfloat16"},
          {"eos_token_id", 2}};
}

Result<ModelDescription> describe(const std::string& text) {
  const TempDir folder;
  folder.write("config.json", text);
  return describe_model(folder.path());
}
Result<ModelDescription> describe(const Json& config) { return describe(config.dump()); }

/// The same without a file.
Result<ModelDescription> describe_text(const std::string& text) {
  RSSM_ASSIGN_OR_RETURN(ConfigReader config, ConfigReader::parse(text, "config.json"));
  RSSM_ASSIGN_OR_RETURN(const ModelFamily* family, find_family(config));
  return family->describe(config);
}

Json with(const char* key, Json value) {
  Json config = small_config();
  config[key] = std::move(value);
  return config;
}

/// The small configuration's text with `value`, which need not be JSON, at `key`.
std::string with_text(const std::string& key, const std::string& value) {
  Json config = small_config();
  config.erase(key);
  std::string text = config.dump();
  text.insert(1, "\"" + key + "\": " + value + ", ");
  return text;
}

TEST(ConfigTest, SmallModel) {
  const auto d = describe(small_config());
  ASSERT_TRUE(is_ok(d));
  EXPECT_EQ(d->model_type, "nemotron_h");
  EXPECT_EQ(d->layers.ssm, 2);
  EXPECT_EQ(d->layers.attention, 2);
  EXPECT_EQ(d->layers.mlp, 1);
  EXPECT_EQ(d->layers.moe, 0);
  ASSERT_EQ(d->ssm_layers.size(), 2u);
  const LayerSpec spec{
      .recurrence = Mamba2Shape{.heads = 4, .head_dim = 8, .state_size = 16, .groups = 2},
      .conv = {.channels = 96, .width = 4}};
  EXPECT_EQ(d->ssm_layers[0], spec);
  EXPECT_EQ(d->ssm_layers[1], spec);
  EXPECT_EQ(d->kv_heads, 2);
  EXPECT_EQ(d->kv_head_dim, 8);
  EXPECT_EQ(d->dtype, DType::kBF16);
  EXPECT_EQ(d->hidden_size, 32);
  EXPECT_EQ(d->vocab_size, 264);
  EXPECT_EQ(d->max_position, 0);
  EXPECT_EQ(d->eos, (std::vector<std::int32_t>{2}));
  EXPECT_FALSE(d->bos.has_value());
}

TEST(ConfigTest, SpellingsOfThePattern) {
  Json config = small_config();
  config.erase("hybrid_override_pattern");
  const Json spellings[] = {
      {{"hybrid_override_pattern", "M*-*M"}},
      {{"layers_block_type", {"mamba", "attention", "mlp", "attention", "mamba"}}},
      {{"layers_block_type",
        {"linear_attention", "full_attention", "mlp", "full_attention", "linear_attention"}}},
      {{"layer_types",
        {"linear_attention", "full_attention", "mlp", "full_attention", "linear_attention"}}},
      // Both at once, as some writers do, and a null for the one that is not used.
      {{"hybrid_override_pattern", "M*-*M"},
       {"layers_block_type", {"mamba", "attention", "mlp", "attention", "mamba"}}},
      {{"hybrid_override_pattern", "M*-*M"}, {"layers_block_type", nullptr}},
      {{"hybrid_override_pattern", "M*-*M"}, {"num_hidden_layers", 5}},
      {{"hybrid_override_pattern", "M*-*M"}, {"num_hidden_layers", nullptr}},
  };
  for (const Json& spelling : spellings) {
    Json c = config;
    c.update(spelling);
    const auto d = describe(c);
    ASSERT_TRUE(is_ok(d)) << spelling;
    EXPECT_EQ(d->layers.ssm, 2) << spelling;
    EXPECT_EQ(d->layers.attention, 2) << spelling;
    EXPECT_EQ(d->layers.mlp, 1) << spelling;
  }
  const auto moe = describe(with("hybrid_override_pattern", "MEEM*"));
  ASSERT_TRUE(is_ok(moe));
  EXPECT_EQ(moe->layers.moe, 2);
}

TEST(ConfigTest, ContradictionsAreRefused) {
  EXPECT_TRUE(refused(describe(with("num_hidden_layers", 6)), StatusCode::kInvalidArgument,
                      {"config.json", "num_hidden_layers", "6", "5"}));
  EXPECT_TRUE(refused(describe(with("num_key_value_heads", 3)), StatusCode::kInvalidArgument,
                      {"num_key_value_heads", "3", "4"}));
  EXPECT_TRUE(refused(describe(with("num_key_value_heads", 8)), StatusCode::kInvalidArgument,
                      {"num_key_value_heads", "8", "4"}));
  EXPECT_TRUE(
      refused(describe(with("n_groups", 3)), StatusCode::kInvalidArgument, {"n_groups", "3", "4"}));
  EXPECT_TRUE(
      refused(describe(with("n_groups", 8)), StatusCode::kInvalidArgument, {"n_groups", "8", "4"}));
  // Two spellings of the pattern that disagree.
  EXPECT_TRUE(refused(
      describe(with("layers_block_type", {"mamba", "attention", "mlp", "mamba", "attention"})),
      StatusCode::kInvalidArgument, {"layers_block_type", "hybrid_override_pattern"}));
}

TEST(ConfigTest, UnknownBlocksAreRefused) {
  EXPECT_TRUE(refused(describe(with("hybrid_override_pattern", "M*xM")), StatusCode::kUnsupported,
                      {"hybrid_override_pattern", "2", "x"}));
  EXPECT_TRUE(refused(describe(with("hybrid_override_pattern", "M*\nM")), StatusCode::kUnsupported,
                      {"hybrid_override_pattern", "2"}));
  EXPECT_TRUE(refused(describe(with("hybrid_override_pattern", "M*\u00e9")),
                      StatusCode::kUnsupported, {"hybrid_override_pattern", "2"}));
  EXPECT_TRUE(refused(describe(with("layers_block_type", {"mamba", "mamba3"})),
                      StatusCode::kUnsupported, {"layers_block_type", "1", "mamba3"}));
  EXPECT_TRUE(refused(describe(with("layers_block_type", {"mamba", "a\nb"})),
                      StatusCode::kUnsupported, {"layers_block_type", "1"}));
  Json none = small_config();
  none.erase("hybrid_override_pattern");
  EXPECT_TRUE(refused(describe(none), StatusCode::kInvalidArgument, {"hybrid_override_pattern"}));
  EXPECT_FALSE(describe(with("hybrid_override_pattern", "")).ok());
  EXPECT_FALSE(describe(with("layers_block_type", Json::array())).ok());
  EXPECT_FALSE(describe(with("hybrid_override_pattern", Json::array({"M"}))).ok());
  // Nothing here decodes a model without a recurrence, and its sizes would be none at all.
  EXPECT_FALSE(describe(with("hybrid_override_pattern", "-")).ok());
  EXPECT_FALSE(describe(with("hybrid_override_pattern", "**--")).ok());
}

TEST(ConfigTest, OtherModelTypesAreRefusedByName) {
  for (const char* type : {"mamba2", "qwen3_next", "llama", "nemotron", "NEMOTRON_H", "a\nb"}) {
    const auto d = describe(with("model_type", type));
    EXPECT_TRUE(refused(d, StatusCode::kUnsupported, {"config.json", "model_type", "nemotron_h"}));
    if (std::string(type) != "a\nb") {
      EXPECT_TRUE(refused(d, StatusCode::kUnsupported, {type}));
    }
  }
  Json none = small_config();
  none.erase("model_type");
  EXPECT_TRUE(refused(describe(none), StatusCode::kUnsupported, {"model_type", "nemotron_h"}));
  EXPECT_TRUE(
      refused(describe(with("model_type", 7)), StatusCode::kInvalidArgument, {"model_type", "7"}));
}

TEST(ConfigTest, UnsupportedSettingsAreRefused) {
  for (const char* key : {"use_bias", "mamba_proj_bias", "mlp_bias", "attention_bias"}) {
    EXPECT_TRUE(refused(describe(with(key, true)), StatusCode::kUnsupported, {key, "true"}));
    EXPECT_TRUE(is_ok(describe(with(key, false)))) << key;
    EXPECT_TRUE(is_ok(describe(with(key, nullptr)))) << key;
    EXPECT_TRUE(refused(describe(with(key, 1)), StatusCode::kInvalidArgument, {key, "1"}));
  }
  EXPECT_TRUE(refused(describe(with("mamba_hidden_act", "gelu")), StatusCode::kUnsupported,
                      {"mamba_hidden_act", "gelu", "silu"}));
  EXPECT_TRUE(refused(describe(with("mlp_hidden_act", "si\nlu")), StatusCode::kUnsupported,
                      {"mlp_hidden_act", "relu2"}));
  EXPECT_TRUE(
      refused(describe(with("torch_dtype", "float64")), StatusCode::kUnsupported, {"float64"}));
  EXPECT_TRUE(refused(describe(with("dtype", "a\nb")), StatusCode::kUnsupported, {"dtype"}));
  EXPECT_TRUE(refused(describe(with("sliding_window", 4096)), StatusCode::kUnsupported,
                      {"sliding_window"}));
  EXPECT_TRUE(is_ok(describe(with("sliding_window", nullptr))));
}

/// C72: the type of weights and KV cache is what the file says, under either key.
TEST(ConfigTest, DataTypes) {
  for (const char* key : {"torch_dtype", "dtype"}) {
    for (const auto& [name, type] : {std::pair{"float32", DType::kF32},
                                     {"bfloat16", DType::kBF16},
                                     {"float16", DType::kF16}}) {
      Json config = small_config();
      config.erase("torch_dtype");
      config[key] = name;
      const auto d = describe(config);
      ASSERT_TRUE(is_ok(d)) << key << " " << name;
      EXPECT_EQ(d->dtype, type) << key << " " << name;
    }
  }
}

/// Python's numbers that JSON does not have, where they may stand and where not.
TEST(ConfigTest, InfinityAndNaN) {
  for (const char* limit : {"[0.0, Infinity]", "[0, 1e308]", R"([0.0, {"__float__": "Infinity"}])",
                            "[0.001, 0.1]", "null"}) {
    EXPECT_TRUE(is_ok(describe(with_text("time_step_limit", limit)))) << limit;
  }
  for (const char* limit :
       {"[0.1, 0.001]", "[-1, 1]", "[0.0]", "[0, 1, 2]", "[]", "[NaN, 1]", "[0, NaN]", "NaN7",
        "0.1", "\"x\"", "[0, \"Infinity\"]", "[-Infinity, Infinity]", "[0, -Infinity]",
        R"([0, {"__float__": "NaN"}])", R"([0, {"__float__": 1}])", R"([{}, 1])", "[0, null]"}) {
    const auto d = describe(with_text("time_step_limit", limit));
    EXPECT_FALSE(d.ok()) << limit;
    EXPECT_NE(d.status().message().find("config.json"), std::string::npos) << limit;
    EXPECT_EQ(d.status().message().find('\n'), std::string::npos) << limit;
  }
  // A NaN is a value, not an absence: no default may stand in for it.
  for (const char* key : {"layer_norm_epsilon", "norm_eps", "hidden_size", "time_step_limit"}) {
    EXPECT_FALSE(describe(with_text(key, "NaN")).ok()) << key;
  }
  for (const char* value : {"Infinity", "-Infinity", "-1", "-1e-5", "1e308", "\"1e-5\"", "[1e-5]",
                            R"({"__float__": "Infinity"})"}) {
    const auto d = describe(with_text("layer_norm_epsilon", value));
    EXPECT_TRUE(refused(d, StatusCode::kInvalidArgument, {"layer_norm_epsilon"})) << value;
  }
  for (const char* value : {"Infinity", "1e3", "32.0", "\"32\"", "true", "[32]", "{}"}) {
    EXPECT_TRUE(refused(describe(with_text("hidden_size", value)), StatusCode::kInvalidArgument,
                        {"hidden_size"}))
        << value;
  }
  // Inside of strings, and in keys nobody reads, they are just text.
  EXPECT_TRUE(is_ok(describe(with("name", "NaN, Infinity and \\\" NaN"))));
  EXPECT_TRUE(is_ok(describe(with_text("unread", "[NaN, -Infinity, Infinity]"))));
  EXPECT_TRUE(is_ok(describe(with_text("unread", R"("\\", "other": NaN)"))));
}

TEST(ConfigTest, RequiredKeysAndTheirDomains) {
  for (const char* key :
       {"hidden_size", "vocab_size", "mamba_num_heads", "mamba_head_dim", "ssm_state_size",
        "n_groups", "num_attention_heads", "head_dim", "intermediate_size"}) {
    Json config = small_config();
    config.erase(key);
    EXPECT_TRUE(refused(describe(config), StatusCode::kInvalidArgument, {"config.json", key}));
    EXPECT_TRUE(refused(describe(with(key, nullptr)), StatusCode::kInvalidArgument, {key}));
    for (const char* value : {"0", "-1", "9223372036854775807", "-9223372036854775808",
                              "9223372036854775808", "18446744073709551615", "18446744073709551616",
                              "1e30", "123456789012345678901234567890"}) {
      EXPECT_TRUE(refused(describe(with_text(key, value)), StatusCode::kInvalidArgument, {key}))
          << value;
    }
  }
  for (const char* value : {"1", "9", "-4", "4.0", "1000000000000"}) {
    EXPECT_TRUE(refused(describe(with_text("conv_kernel", value)), StatusCode::kInvalidArgument,
                        {"conv_kernel"}))
        << value;
  }
  for (const char* key : {"eos_token_id", "bos_token_id"}) {
    for (const char* value : {"264", "-1", "[2, 264]", "[\"2\"]", "2.0", "\"2\"",
                              "18446744073709551618", "{}", "true"}) {
      EXPECT_TRUE(refused(describe(with_text(key, value)), StatusCode::kInvalidArgument, {key}))
          << value;
    }
  }
  EXPECT_EQ(describe(with("eos_token_id", {2, 11}))->eos, (std::vector<std::int32_t>{2, 11}));
  EXPECT_TRUE(describe(with("eos_token_id", nullptr))->eos.empty());
  EXPECT_EQ(describe(with("bos_token_id", 1))->bos, 1);
}

/// Sizes stay numbers whatever a file says: refused, or right, never wrapped.
TEST(ConfigTest, HugeSizesDoNotWrap) {
  Json config = small_config();
  for (const char* key : {"num_attention_heads", "num_key_value_heads", "head_dim"}) {
    config[key] = 1 << 24;
  }
  const auto d = describe(config);
  if (!d.ok()) return;
  const auto bytes = sequence_bytes(*d, {});
  if (!bytes.ok()) return;
  EXPECT_GE(bytes->kv_per_token, std::size_t{1} << 49);
  EXPECT_GE(bytes->total(std::int64_t{1} << 40), std::size_t{1} << 62);
}

/// C15 of files: a configuration cut anywhere is refused, and says which file.
TEST(ConfigTest, TruncatedAnywhere) {
  const std::string text = small_config().dump(1);
  for (std::size_t size = 0; size < text.size(); ++size) {
    const auto d = describe_text(text.substr(0, size));
    ASSERT_TRUE(refused(d, StatusCode::kDataLoss, {"config.json"})) << size << " bytes";
  }
  EXPECT_TRUE(is_ok(describe_text(text)));
}

/// Every byte replaced by others: refused or read, never a crash, always one line.
TEST(ConfigTest, DamagedAnywhere) {
  const std::string text = small_config().dump();
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (const char c : {'\0', '"', '{', '}', '[', '-', '9', '\\', '\n', '\x80', '\xff'}) {
      std::string damaged = text;
      damaged[i] = c;
      const auto d = describe_text(damaged);
      if (d.ok()) continue;
      ASSERT_FALSE(d.status().message().empty());
      ASSERT_EQ(d.status().message().find('\n'), std::string::npos) << d.status().message();
    }
  }
}

TEST(ConfigTest, NotAnObject) {
  for (const char* text : {"", " ", "null", "7", "[]", "\"x\"", "{} {}", "{'a': 1}", "\xff", "{"}) {
    EXPECT_TRUE(refused(describe(std::string(text)), StatusCode::kDataLoss, {"config.json"}))
        << text;
  }
}

/// Nesting that a recursive reader would take for a stack to fill.
TEST(ConfigTest, DeepNesting) {
  constexpr std::size_t kDepth = 1'000'000;
  const std::string deep = std::string(kDepth, '[') + std::string(kDepth, ']');
  for (const char* key : {"unread", "hidden_size", "eos_token_id", "time_step_limit", "model_type",
                          "layers_block_type"}) {
    const auto d = describe(with_text(key, deep));
    EXPECT_FALSE(d.ok()) << key;
  }
  EXPECT_FALSE(describe(std::string(kDepth, '[')).ok());
  std::string objects;
  for (std::size_t i = 0; i < 100'000; ++i) objects += "{\"a\":";
  EXPECT_FALSE(describe(objects).ok());
}

TEST(ConfigTest, MissingFiles) {
  EXPECT_TRUE(refused(describe_model("/nonexistent/folder"), StatusCode::kNotFound,
                      {"/nonexistent/folder/config.json"}));
  const TempDir folder;
  EXPECT_TRUE(refused(describe_model(folder.path()), StatusCode::kNotFound, {"config.json"}));
  std::filesystem::create_directory(folder / "config.json");
  EXPECT_FALSE(describe_model(folder.path()).ok());
}

TEST(ConfigTest, EndTokensOfTheGenerationConfiguration) {
  const TempDir folder;
  folder.write("config.json", small_config().dump());
  folder.write("generation_config.json", R"({"eos_token_id": [2, 11]})");
  EXPECT_EQ(describe_model(folder.path())->eos, (std::vector<std::int32_t>{2, 11}));
  folder.write("generation_config.json", R"({"eos_token_id": 7})");
  EXPECT_EQ(describe_model(folder.path())->eos, (std::vector<std::int32_t>{7}));
  folder.write("generation_config.json", "{}");
  EXPECT_EQ(describe_model(folder.path())->eos, (std::vector<std::int32_t>{2}));
  for (const char* text : {R"({"eos_token_id": 264})", R"({"eos_token_id": "2"})", "{", ""}) {
    folder.write("generation_config.json", text);
    const auto d = describe_model(folder.path());
    ASSERT_FALSE(d.ok()) << text;
    EXPECT_NE(d.status().message().find("generation_config.json"), std::string::npos);
  }
}

// ---- Published configurations ----

std::string configs_folder() {
  const char* data = std::getenv("REPLAYSSM_SHARED_DATA");
  return (data != nullptr ? std::string(data) : RSSM_SOURCE_DIR "/../shared/data") + "/configs";
}

struct Published {
  const char* name;
  LayerCounts layers;
  std::size_t state;  // bytes of all layers in f32
  std::int64_t conv_channels;
  std::size_t kv_per_token;
  std::int64_t hidden;
};

constexpr Published kPublished[] = {
    {"NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {23, 6, 0, 23}, 48'234'496, 6144, 6144, 2688},
    {"NVIDIA-Nemotron-3-Super-120B-A12B-FP8", {40, 8, 0, 40}, 167'772'160, 10240, 8192, 4096},
    {"NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", {48, 12, 0, 48}, 402'653'184, 18432, 12288, 8192},
};

TEST(PublishedConfigsTest, SizesOfNemotron3) {
  if (!std::filesystem::is_directory(configs_folder())) {
    GTEST_SKIP() << configs_folder() << " is absent";
  }
  for (const Published& p : kPublished) {
    SCOPED_TRACE(p.name);
    const auto d = describe_model(configs_folder() + "/" + p.name);
    ASSERT_TRUE(is_ok(d));
    EXPECT_EQ(d->layers.ssm, p.layers.ssm);
    EXPECT_EQ(d->layers.attention, p.layers.attention);
    EXPECT_EQ(d->layers.mlp, p.layers.mlp);
    EXPECT_EQ(d->layers.moe, p.layers.moe);
    EXPECT_EQ(d->hidden_size, p.hidden);
    EXPECT_EQ(d->vocab_size, 131072);
    EXPECT_EQ(d->max_position, 262144);
    EXPECT_EQ(d->dtype, DType::kBF16);
    EXPECT_EQ(d->bos, 1);
    for (const LayerSpec& layer : d->ssm_layers) {
      EXPECT_EQ(layer.conv, (ConvShape{.channels = p.conv_channels, .width = 4}));
      EXPECT_EQ(std::get<Mamba2Shape>(layer.recurrence).groups, 8);
    }
    const auto f32 = sequence_bytes(*d, {});
    const auto bf16 = sequence_bytes(*d, {.state = DType::kBF16});
    ASSERT_TRUE(is_ok(f32));
    ASSERT_TRUE(is_ok(bf16));
    // With a number of four bytes for every eight rows of 128.
    EXPECT_EQ(f32->state.checkpoint, p.state + p.state / (8 * 128));
    EXPECT_EQ(bf16->state.checkpoint, p.state / 2);
    EXPECT_EQ(f32->kv_per_token, p.kv_per_token);
    // A convolution ring of window 1, one token and f32 inputs: 4 places of 4 bytes a channel.
    EXPECT_EQ(f32->state.conv_ring,
              static_cast<std::size_t>(p.layers.ssm * p.conv_channels * 4 * 4));
  }
}

TEST(PublishedConfigsTest, SizesOfQwen35) {
  if (!std::filesystem::is_directory(configs_folder())) {
    GTEST_SKIP() << configs_folder() << " is absent";
  }
  struct Case {
    const char* name;
    int ssm;
    int attention;
    GatedDeltaNetShape shape;
    std::int64_t kv_heads;
    std::int64_t hidden;
  };
  for (const Case& c : {Case{"Qwen3.5-0.8B", 18, 6, {16, 16, 128, 128}, 2, 1024},
                        Case{"Qwen3.5-27B", 48, 16, {16, 48, 128, 128}, 4, 5120}}) {
    SCOPED_TRACE(c.name);
    const auto d = describe_model(configs_folder() + "/" + c.name);
    ASSERT_TRUE(is_ok(d));
    EXPECT_EQ(d->layers.ssm, c.ssm);
    EXPECT_EQ(d->layers.attention, c.attention);
    EXPECT_EQ(d->layers.mlp, c.ssm + c.attention);
    EXPECT_EQ(d->hidden_size, c.hidden);
    EXPECT_EQ(d->vocab_size, 248320);
    EXPECT_EQ(d->max_position, 262144);
    EXPECT_EQ(d->dtype, DType::kBF16);
    EXPECT_EQ(d->eos, (std::vector<std::int32_t>{248044}));
    const LayerSpec spec{.recurrence = c.shape,
                         .conv = {.channels = (2 * 16 + c.shape.value_heads) * 128, .width = 4}};
    EXPECT_EQ(d->ssm_layers, std::vector<LayerSpec>(static_cast<std::size_t>(c.ssm), spec));
    const auto bytes = sequence_bytes(*d, {});
    ASSERT_TRUE(is_ok(bytes));
    // With a number of four bytes for every eight columns of 128.
    EXPECT_EQ(bytes->state.checkpoint,
              static_cast<std::size_t>(c.ssm * c.shape.value_heads * (128 * 128 + 128 / 8) * 4));
    EXPECT_EQ(bytes->kv_per_token,
              static_cast<std::size_t>(c.attention * 2 * c.kv_heads * 256 * 2));
  }
}

TEST(PublishedConfigsTest, OtherFamiliesAreRefusedByName) {
  if (!std::filesystem::is_directory(configs_folder())) {
    GTEST_SKIP() << configs_folder() << " is absent";
  }
  int others = 0;
  for (const auto& entry : std::filesystem::directory_iterator(configs_folder())) {
    // Not through the JSON library, which refuses the Infinity in some of them. The first
    // model_type of a nested configuration is the outer one here.
    const std::string text = read_text(entry.path().string() + "/config.json");
    std::smatch match;
    ASSERT_TRUE(std::regex_search(text, match, std::regex("\"model_type\": *\"([^\"]*)\"")));
    const std::string type = match[1];
    const auto d = describe_model(entry.path().string());
    if (type == "nemotron_h" || type == "qwen3_5") {
      EXPECT_TRUE(is_ok(d)) << entry.path();
    } else {
      ++others;
      EXPECT_TRUE(refused(d, StatusCode::kUnsupported, {"config.json", type, "nemotron_h"}));
    }
  }
  EXPECT_GT(others, 0);
}

}  // namespace
}  // namespace replayssm::testing
