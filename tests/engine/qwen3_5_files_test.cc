// What the qwen3_5 family makes of its files: spellings of the configuration, tensors under either
// prefix, and everything that must be refused before anything runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "support/model_test.h"
#include "support/qwen3_5_oracle.h"

namespace replayssm::testing {
namespace {

const Tokens kText = {3, 17, 250, 4, 4, 9, 101, 77, 12, 200, 31};

Result<ModelDescription> describe(const Json& config) {
  RSSM_ASSIGN_OR_RETURN(ConfigReader reader, ConfigReader::parse(config.dump(), "config.json"));
  RSSM_ASSIGN_OR_RETURN(const ModelFamily* family, find_family(reader));
  return family->describe(reader);
}

Json flat() { return qwen3_5_config({}); }

Json with(const std::string& key, Json value) {
  Json config = flat();
  config[key] = std::move(value);
  return config;
}

Json without(const std::string& key) {
  Json config = flat();
  config.erase(key);
  return config;
}

/// As vision-language wrappers have it.
Json nested(Json text) {
  return {{"model_type", "qwen3_5"},
          {"architectures", {"Qwen3_5ForConditionalGeneration"}},
          {"text_config", std::move(text)},
          {"vision_config", {{"depth", 12}}},
          {"tie_word_embeddings", false}};
}

// ---- Configuration ----

TEST(Qwen35ConfigTest, FlatAndNested) {
  Json renamed = flat();
  renamed["model_type"] = "qwen3_5";
  Json unnamed = flat();
  unnamed.erase("model_type");
  // What a wrapper leaves to its text model, and what it says for it.
  Json outer = flat();
  for (const char* key : {"dtype", "eos_token_id"}) outer.erase(key);
  Json wrapper = nested(outer);
  wrapper["torch_dtype"] = "float32";
  wrapper["eos_token_id"] = 2;
  for (const Json& config : {flat(), renamed, nested(flat()), nested(unnamed), wrapper}) {
    const auto d = describe(config);
    ASSERT_TRUE(is_ok(d)) << config;
    EXPECT_EQ(d->model_type, "qwen3_5");
    EXPECT_EQ(d->layers.ssm, 3);
    EXPECT_EQ(d->layers.attention, 2);
    EXPECT_EQ(d->layers.mlp, 5);
    EXPECT_EQ(d->layers.moe, 0);
    const LayerSpec spec{
        .recurrence =
            GatedDeltaNetShape{.key_heads = 2, .value_heads = 4, .key_dim = 16, .value_dim = 24},
        .conv = {.channels = 160, .width = 4}};
    EXPECT_EQ(d->ssm_layers, std::vector<LayerSpec>(3, spec));
    EXPECT_EQ(d->kv_heads, 2);
    EXPECT_EQ(d->kv_head_dim, 16);
    EXPECT_EQ(d->dtype, DType::kF32);
    EXPECT_EQ(d->hidden_size, 32);
    EXPECT_EQ(d->vocab_size, 264);
    EXPECT_EQ(d->mtp_layers, 1);
    EXPECT_EQ(d->eos, (std::vector<std::int32_t>{2}));
    EXPECT_FALSE(d->bos.has_value());
  }
}

/// Published numbers: Qwen3.5-4B has 24 states of 32 x 128 x 128 and 8 layers of 4 KV heads.
TEST(Qwen35ConfigTest, SizesOfAPublishedModel) {
  Json config = without("layer_types");
  config.update({{"num_hidden_layers", 32},
                 {"full_attention_interval", 4},
                 {"hidden_size", 2560},
                 {"intermediate_size", 9216},
                 {"vocab_size", 248320},
                 {"num_attention_heads", 16},
                 {"num_key_value_heads", 4},
                 {"head_dim", 256},
                 {"linear_num_key_heads", 16},
                 {"linear_num_value_heads", 32},
                 {"linear_key_head_dim", 128},
                 {"linear_value_head_dim", 128},
                 {"dtype", "bfloat16"}});
  const auto d = describe(nested(config));
  ASSERT_TRUE(is_ok(d));
  EXPECT_EQ(d->layers.ssm, 24);
  EXPECT_EQ(d->layers.attention, 8);
  const auto bytes = sequence_bytes(*d, {});
  ASSERT_TRUE(is_ok(bytes));
  EXPECT_EQ(bytes->state.checkpoint, 24u * 32 * (128 * 128 + 128 / 8) * 4);
  EXPECT_EQ(bytes->kv_per_token, 8u * 2 * 4 * 256 * 2);
  config.erase("full_attention_interval");
  EXPECT_EQ(describe(config)->layers.attention, 8) << "as published models have it";
}

TEST(Qwen35ConfigTest, OtherArchitecturesAreRefusedByName) {
  for (const char* type : {"qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "qwen3", "qwen4_exp"}) {
    EXPECT_TRUE(refused(describe(with("model_type", type)), StatusCode::kUnsupported,
                        {"model_type", type, "qwen3_5"}));
  }
  EXPECT_TRUE(refused(describe(nested(with("model_type", "qwen3_5_moe_text"))),
                      StatusCode::kUnsupported,
                      {"text_config", "qwen3_5_moe_text", "qwen3_5_text"}));
  EXPECT_TRUE(
      refused(describe(with("num_experts", 64)), StatusCode::kUnsupported, {"num_experts", "64"}));
  EXPECT_TRUE(is_ok(describe(with("num_experts", 0))));
}

TEST(Qwen35ConfigTest, UnsupportedSettingsAreRefused) {
  EXPECT_TRUE(refused(describe(with("attn_output_gate", false)), StatusCode::kUnsupported,
                      {"attn_output_gate", "false", "true"}));
  EXPECT_TRUE(is_ok(describe(without("attn_output_gate"))));
  EXPECT_TRUE(refused(describe(with("attention_bias", true)), StatusCode::kUnsupported,
                      {"attention_bias", "true"}));
  EXPECT_TRUE(refused(describe(with("hidden_act", "gelu")), StatusCode::kUnsupported,
                      {"hidden_act", "gelu", "silu"}));
  EXPECT_TRUE(refused(describe(with("output_gate_type", "sigmoid")), StatusCode::kUnsupported,
                      {"output_gate_type", "sigmoid", "swish"}));
  for (const char* name : {"swish", "silu"}) {
    EXPECT_TRUE(is_ok(describe(with("output_gate_type", name)))) << name;
  }
  EXPECT_TRUE(
      refused(describe(with("sliding_window", 128)), StatusCode::kUnsupported, {"sliding_window"}));
  EXPECT_TRUE(refused(describe(with("dtype", "float64")), StatusCode::kUnsupported, {"float64"}));
}

TEST(Qwen35ConfigTest, ContradictionsAreRefusedByBothValues) {
  EXPECT_TRUE(refused(describe(with("num_hidden_layers", 6)), StatusCode::kInvalidArgument,
                      {"num_hidden_layers", "6", "5"}));
  EXPECT_TRUE(refused(describe(with("linear_num_value_heads", 5)), StatusCode::kInvalidArgument,
                      {"linear_num_value_heads", "5", "linear_num_key_heads", "2"}));
  EXPECT_TRUE(refused(describe(with("num_key_value_heads", 3)), StatusCode::kInvalidArgument,
                      {"num_attention_heads", "4", "3"}));
  Json types = flat()["layer_types"];
  types[2] = "sliding_attention";
  EXPECT_TRUE(refused(describe(with("layer_types", types)), StatusCode::kUnsupported,
                      {"layer_types", "2", "sliding_attention"}));
  EXPECT_TRUE(refused(describe(with("layer_types", Json(5, "full_attention"))),
                      StatusCode::kInvalidArgument, {"5", "Gated DeltaNet"}));
  Json odd = flat();
  odd["rope_parameters"]["partial_rotary_factor"] = 0.2;  // 3 of 16
  EXPECT_TRUE(refused(describe(odd), StatusCode::kInvalidArgument,
                      {"partial_rotary_factor", "0.2", "16", "3"}));
  odd["rope_parameters"]["partial_rotary_factor"] = 0;
  EXPECT_TRUE(refused(describe(odd), StatusCode::kInvalidArgument, {"partial_rotary_factor", "0"}));
}

TEST(Qwen35ConfigTest, MissingAndMistypedKeysAreNamed) {
  for (const char* key : {"num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size",
                          "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
                          "linear_value_head_dim", "num_attention_heads", "head_dim"}) {
    EXPECT_TRUE(refused(describe(without(key)), StatusCode::kInvalidArgument, {key, "missing"}));
    EXPECT_TRUE(refused(describe(nested(without(key))), StatusCode::kInvalidArgument,
                        {"text_config", key, "missing"}));
    EXPECT_TRUE(refused(describe(with(key, 0)), StatusCode::kInvalidArgument, {key, "0"}));
    EXPECT_TRUE(refused(describe(with(key, "x")), StatusCode::kInvalidArgument, {key, "x"}));
  }
  EXPECT_TRUE(refused(describe(without("rope_parameters")), StatusCode::kInvalidArgument,
                      {"rope_theta", "missing"}));
  EXPECT_TRUE(refused(describe(with("rope_parameters", 7)), StatusCode::kInvalidArgument,
                      {"rope_parameters", "7", "object"}));
  EXPECT_TRUE(refused(describe(nested(7)), StatusCode::kInvalidArgument, {"text_config", "7"}));
  Json interval = without("layer_types");
  interval["full_attention_interval"] = 0;
  EXPECT_TRUE(
      refused(describe(interval), StatusCode::kInvalidArgument, {"full_attention_interval", "0"}));
}

// ---- Weights ----

struct Variant {
  TempDir folder;
  Json config = flat();
  StoredTensors tensors = Qwen35Weights({}).make();

  const std::string& write() {
    folder.write("config.json", config.dump());
    write_tensors(folder, tensors);
    return folder.path();
  }
  void remove(const std::string& name) {
    std::erase_if(tensors, [&](const StoredTensor& t) { return t.name == name; });
  }
};

CpuBackend& backend() {
  static CpuBackend made(CpuContext{.isa = supported_isas().back()});
  return made;
}

Result<std::unique_ptr<Model>> load(const std::string& folder) {
  return load_model(folder, backend());
}

Logits logits(const std::string& folder) {
  const LoadedModel loaded(folder);
  if (loaded.model == nullptr) return {};
  const auto e = loaded.engine({.kv = DType::kF32, .context = 32});
  return prompt_step(*e, open_sequence(*e), kText);
}

const Logits& base_logits() {
  static const Logits base = logits(model_folder(kRandomQwen35));
  return base;
}

/// Where theta and the rotated part stand does not matter, that they are read does.
TEST(Qwen35WeightsTest, SpellingsOfRotaryParameters) {
  const Json rope = flat()["rope_parameters"];
  const Json mrope = {{"mrope_section", {2, 1, 1}}, {"mrope_interleaved", true}};
  Json inside = rope;
  inside.update(mrope);
  Json old_type = mrope;
  old_type["type"] = "mrope";
  Json renamed = mrope;
  renamed["rope_type"] = "default";
  const Json beside = {{"rope_theta", rope["rope_theta"]},
                       {"partial_rotary_factor", rope["partial_rotary_factor"]}};
  std::vector<Json> spellings = {
      {{"rope_parameters", inside}},
      {{"rope_scaling", nullptr}},
      {{"rope_scaling", old_type}},
      {{"rope_scaling", renamed}},
      {{"rope_parameters", {{"rope_type", "default"}}}},
      {{"rope_parameters", {{"rope_theta", rope["rope_theta"]}}}},
  };
  for (std::size_t i = 0; i < spellings.size(); ++i) {
    Variant v;
    v.config.erase("rope_parameters");
    v.config.update(spellings[i]);
    if (i > 0) v.config.update(beside);
    EXPECT_TRUE(same_bits(logits(v.write()), base_logits())) << spellings[i];
  }
  for (const auto& [key, value] :
       {std::pair{"rope_theta", 500.0}, {"partial_rotary_factor", 0.25}}) {
    Variant v;
    v.config["rope_parameters"][key] = value;
    EXPECT_FALSE(near(logits(v.write()), base_logits(), 1e-3f)) << key;
  }
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    for (const char* type : {"yarn", "linear", "dynamic", "longrope"}) {
      Json config = flat();
      config[key] = rope;
      config[key]["rope_type"] = type;
      EXPECT_TRUE(
          refused(describe(config), StatusCode::kUnsupported, {key, "rope_type", type, "default"}));
    }
  }
}

std::string narrowed(const StoredTensor& tensor, DType dtype) {
  std::string bytes;
  for (std::size_t i = 0; i < tensor.count(); ++i) {
    const std::uint16_t half =
        dtype == DType::kBF16 ? to_bf16(tensor.at(i)).bits : to_f16(tensor.at(i)).bits;
    bytes.append(reinterpret_cast<const char*>(&half), sizeof half);
  }
  return bytes;
}

/// Wrapped, under the other prefix, beside a vision tower, tied, in any type of weights: the
/// formulas applied to the stored numbers (C88, C89).
TEST(Qwen35WeightsTest, WrappedAndTiedInEveryType) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const bool tied : {false, true}) {
      SCOPED_TRACE(std::string(to_string(dtype)) + (tied ? ", tied" : ""));
      const std::string body = "model.language_model.";
      Variant v;
      v.config["tie_word_embeddings"] = tied;
      v.config["dtype"] = dtype == DType::kF32    ? "float32"
                          : dtype == DType::kBF16 ? "bfloat16"
                                                  : "float16";
      v.config = nested(v.config);
      v.config["tie_word_embeddings"] = tied;
      v.tensors = Qwen35Weights({}).make(body);
      if (tied) v.remove("lm_head.weight");
      StoredTensors exact = v.tensors;
      for (std::size_t i = 0; dtype != DType::kF32 && i < v.tensors.size(); ++i) {
        StoredTensor& tensor = v.tensors[i];
        // Seen in either type whatever the rest has.
        if (tensor.name.ends_with("A_log")) continue;
        tensor.bytes = narrowed(exact[i], dtype);
        tensor.dtype = dtype == DType::kBF16 ? "BF16" : "F16";
        for (std::size_t k = 0; k < exact[i].count(); ++k) {
          const float value = exact[i].at(k);
          exact[i].set(k,
                       dtype == DType::kBF16 ? to_float(to_bf16(value)) : to_float(to_f16(value)));
        }
      }
      const Qwen35Oracle oracle({}, exact, body);
      v.tensors.push_back({"model.visual.patch_embed.proj.weight", "F32", {1}, "1234"});
      const Logits found = logits(v.write());
      const DoubleRows hidden = oracle.hidden(kText);
      ASSERT_EQ(found.size(), kText.size() * 264);
      for (std::size_t t = 0; t < kText.size(); ++t) {
        const Doubles want = oracle.logits(hidden[t]);
        ASSERT_TRUE(near(std::span(found).subspan(t * 264, 264),
                         std::vector<float>(want.begin(), want.end()), 1e-4f))
            << "token " << t;
      }
    }
  }
}

/// A tied head may be stored all the same, and is then the one to use.
TEST(Qwen35WeightsTest, StoredTiedHead) {
  Variant v;
  v.config["tie_word_embeddings"] = true;
  EXPECT_TRUE(same_bits(logits(v.write()), base_logits()));
}

/// Without any one tensor, or with one of another shape or type, nothing loads; the message names
/// the tensor and both shapes. The MTP head's are asked for when the head is (C89).
TEST(Qwen35WeightsTest, EveryTensorIsRequired) {
  const StoredTensors all = Variant().tensors;
  ASSERT_GT(all.size(), 60u);
  const auto load_all = [&](const std::string& folder, bool head) -> Status {
    const auto model = load(folder);
    if (!head || !model.ok()) return model.status();
    return (*model)->load_mtp_head(backend()).status();
  };
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::string& name = all[i].name;
    const bool head = name.starts_with("mtp.");
    {
      Variant v;
      v.remove(name);
      const std::string folder = v.write();
      EXPECT_TRUE(refused(load_all(folder, head), StatusCode::kNotFound, {name, "missing"}));
      if (head) {
        EXPECT_TRUE(is_ok(load(folder))) << "plain decoding does not need " << name;
      }
    }
    {
      Variant v;
      v.tensors[i].shape[0] += 1;
      v.tensors[i].bytes += std::string(v.tensors[i].bytes.size() / (v.tensors[i].shape[0] - 1), 0);
      EXPECT_TRUE(
          refused(load_all(v.write(), head), StatusCode::kInvalidArgument,
                  {name, std::to_string(all[i].shape[0]), std::to_string(all[i].shape[0] + 1)}));
    }
  }
}

TEST(Qwen35WeightsTest, UnknownTensorsAreNamed) {
  for (const char* name : {"model.layers.0.linear_attn.in_proj_qkvz.weight", "model.extra",
                           "model.layers.9.input_layernorm.weight", "visual"}) {
    Variant v;
    v.tensors.push_back({name, "F32", {1}, "1234"});
    EXPECT_TRUE(refused(load(v.write()), StatusCode::kInvalidArgument, {name, "[1]"}));
  }
  Variant head;
  head.tensors.push_back({"mtp.layers.1.input_layernorm.weight", "F32", {1}, "1234"});
  const auto model = load(head.write());
  ASSERT_TRUE(is_ok(model));
  EXPECT_TRUE(refused((*model)->load_mtp_head(backend()), StatusCode::kInvalidArgument,
                      {"mtp.layers.1.input_layernorm.weight"}));
}

/// The configuration says whether there is a head; a file that says otherwise is refused (C89).
TEST(Qwen35WeightsTest, HeadsByConfiguration) {
  for (const Json& layers : {Json(0), Json(nullptr)}) {
    Variant v;
    v.config["mtp_num_hidden_layers"] = layers;
    EXPECT_TRUE(refused(load(v.write()), StatusCode::kInvalidArgument, {"mtp."}));
    std::erase_if(v.tensors, [](const StoredTensor& t) { return t.name.starts_with("mtp."); });
    const auto model = load(v.write());
    ASSERT_TRUE(is_ok(model));
    EXPECT_TRUE(refused((*model)->load_mtp_head(backend()), StatusCode::kUnsupported,
                        {"mtp_num_hidden_layers", "0", "qwen3_5"}));
  }
  Variant two;
  two.config["mtp_num_hidden_layers"] = 2;
  auto model = load(two.write());
  ASSERT_TRUE(is_ok(model));
  EXPECT_TRUE(refused((*model)->load_mtp_head(backend()), StatusCode::kUnsupported,
                      {"mtp_num_hidden_layers", "2", "1"}));
  Variant own;
  own.config["mtp_use_dedicated_embeddings"] = true;
  model = load(own.write());
  ASSERT_TRUE(is_ok(model));
  EXPECT_TRUE(refused((*model)->load_mtp_head(backend()), StatusCode::kUnsupported,
                      {"mtp_use_dedicated_embeddings"}));
  // Another architecture's model says that it has none.
  const auto other = load(parity_folder("nemotron-h-a"));
  ASSERT_TRUE(is_ok(other));
  EXPECT_TRUE(
      refused((*other)->load_mtp_head(backend()), StatusCode::kUnsupported, {"nemotron_h"}));
}

/// A head goes on without its model.
TEST(Qwen35WeightsTest, HeadOutlivesItsModel) {
  std::unique_ptr<MtpHead> head;
  {
    auto model = load(model_folder(kRandomQwen35));
    ASSERT_TRUE(is_ok(model));
    auto loaded = (*model)->load_mtp_head(backend());
    ASSERT_TRUE(is_ok(loaded));
    head = std::move(loaded).value();
  }
  EXPECT_EQ(head->description().vocab_size, 264);
  auto cache =
      KvCache::create({.layers = 1, .slots = 1, .capacity = 1, .kv_heads = 2, .head_dim = 16});
  ASSERT_TRUE(is_ok(cache));
  std::vector<float> hidden(32, 1.0f);
  std::vector<float> out(264);
  const ForwardRow row{.slot = 0, .prompt = false, .begin = 0, .count = 1, .position = 0};
  const std::int64_t one = 1;
  const std::int32_t token = 7;
  ASSERT_TRUE(is_ok(head->forward(
      backend(), *cache,
      {.rows = std::span(&row, 1),
       .tokens = std::span(&token, 1),
       .logit_counts = std::span(&one, 1)},
      TensorView::contiguous(hidden.data(), DType::kF32, {1, 32}),
      {.logits = TensorView::contiguous(out.data(), DType::kF32, {1, 264}), .hidden = {}})));
  for (const float value : out) ASSERT_TRUE(std::isfinite(value));
}

}  // namespace
}  // namespace replayssm::testing
