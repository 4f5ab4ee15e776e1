// Small random qwen3_5 models.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "support/model_folder.h"
#include "support/rng.h"

namespace replayssm::testing {

struct Qwen35Sizes {
  std::int64_t vocab = 264;
  std::int64_t hidden = 32;
  std::int64_t mlp = 40;
  std::int64_t key_heads = 2;
  std::int64_t value_heads = 4;
  std::int64_t key_dim = 16;
  std::int64_t value_dim = 24;  // unlike key_dim, so that a transposed state shows
  std::int64_t query_heads = 4;
  std::int64_t kv_heads = 2;
  std::int64_t head_dim = 16;
  std::int64_t rotary_dim = 8;
  std::vector<bool> attention = {false, true, false, false, true};  // by layer

  std::int64_t keys() const { return key_heads * key_dim; }
  std::int64_t values() const { return value_heads * value_dim; }
  std::int64_t conv_channels() const { return 2 * keys() + values(); }
};

constexpr double kQwen35Theta = 10000.0;
constexpr double kQwen35Eps = 1e-6;
constexpr std::int64_t kQwen35ConvWidth = 4;

/// A flat configuration in the spelling of transformers 5.
inline Json qwen3_5_config(const Qwen35Sizes& s) {
  Json types = Json::array();
  for (const bool attention : s.attention) {
    types.push_back(attention ? "full_attention" : "linear_attention");
  }
  return {{"model_type", "qwen3_5_text"},
          {"vocab_size", s.vocab},
          {"hidden_size", s.hidden},
          {"intermediate_size", s.mlp},
          {"num_hidden_layers", s.attention.size()},
          {"layer_types", types},
          {"linear_num_key_heads", s.key_heads},
          {"linear_num_value_heads", s.value_heads},
          {"linear_key_head_dim", s.key_dim},
          {"linear_value_head_dim", s.value_dim},
          {"linear_conv_kernel_dim", kQwen35ConvWidth},
          {"num_attention_heads", s.query_heads},
          {"num_key_value_heads", s.kv_heads},
          {"head_dim", s.head_dim},
          {"rope_parameters",
           {{"rope_type", "default"},
            {"rope_theta", kQwen35Theta},
            {"partial_rotary_factor",
             static_cast<double>(s.rotary_dim) / static_cast<double>(s.head_dim)}}},
          {"rms_norm_eps", kQwen35Eps},
          {"hidden_act", "silu"},
          {"attn_output_gate", true},
          {"tie_word_embeddings", false},
          {"mtp_num_hidden_layers", 1},
          {"dtype", "float32"},
          {"eos_token_id", 2}};
}

/// Random weights. A token's embedding dominates what follows it, and the MTP head starts from the
/// embedding too, so that it is often right and often wrong.
class Qwen35Weights {
 public:
  explicit Qwen35Weights(const Qwen35Sizes& sizes, std::uint64_t seed = 1)
      : sizes_(sizes), rng_(seed) {}

  StoredTensors make(const std::string& body = "model.") {
    const Qwen35Sizes& s = sizes_;
    add(body + "embed_tokens.weight", {s.vocab, s.hidden}, 1.0f);
    for (std::size_t i = 0; i < s.attention.size(); ++i) {
      add_layer(body + "layers." + std::to_string(i) + ".", s.attention[i], kQuiet);
    }
    add(body + "norm.weight", {s.hidden}, 0.3f);
    add("lm_head.weight", {s.vocab, s.hidden}, 0.6f);
    add("mtp.pre_fc_norm_embedding.weight", {s.hidden}, 0.1f);
    add("mtp.pre_fc_norm_hidden.weight", {s.hidden}, 0.3f);
    add("mtp.fc.weight", {s.hidden, 2 * s.hidden}, 0.1f);
    for (std::int64_t i = 0; i < s.hidden; ++i) {
      out_.back().set(static_cast<std::size_t>(i * 2 * s.hidden + i), 1.0f);
    }
    add_layer("mtp.layers.0.", true, kQuiet);
    add("mtp.norm.weight", {s.hidden}, 0.0f);
    out_.back().bytes = tensor_named(out_, body + "norm.weight").bytes;
    return std::move(out_);
  }

 private:
  static constexpr float kQuiet = 0.15f;  // of what a block adds to the residual stream

  /// centre + scale * normal.
  void add(const std::string& name, const std::vector<std::int64_t>& shape, float scale,
           float centre = 0.0f) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    StoredTensor tensor{name, "F32", shape,
                        std::string(static_cast<std::size_t>(count) * sizeof(float), '\0')};
    for (std::int64_t i = 0; i < count; ++i) {
      tensor.set(static_cast<std::size_t>(i), centre + scale * rng_.normal());
    }
    out_.push_back(std::move(tensor));
  }
  void add_matrix(const std::string& name, std::int64_t rows, std::int64_t columns,
                  float gain = 1.0f) {
    add(name, {rows, columns}, gain / std::sqrt(static_cast<float>(columns)));
  }

  void add_layer(const std::string& name, bool attention, float gain) {
    const Qwen35Sizes& s = sizes_;
    add(name + "input_layernorm.weight", {s.hidden}, 0.3f);
    add(name + "post_attention_layernorm.weight", {s.hidden}, 0.3f);
    if (attention) {
      const std::string a = name + "self_attn.";
      add_matrix(a + "q_proj.weight", s.query_heads * 2 * s.head_dim, s.hidden);
      add_matrix(a + "k_proj.weight", s.kv_heads * s.head_dim, s.hidden);
      add_matrix(a + "v_proj.weight", s.kv_heads * s.head_dim, s.hidden);
      add_matrix(a + "o_proj.weight", s.hidden, s.query_heads * s.head_dim, 3 * gain);
      add(a + "q_norm.weight", {s.head_dim}, 0.3f, 0.5f);
      add(a + "k_norm.weight", {s.head_dim}, 0.3f, 0.5f);
    } else {
      const std::string g = name + "linear_attn.";
      add_matrix(g + "in_proj_qkv.weight", s.conv_channels(), s.hidden);
      add_matrix(g + "in_proj_z.weight", s.values(), s.hidden);
      add_matrix(g + "in_proj_a.weight", s.value_heads, s.hidden);
      add_matrix(g + "in_proj_b.weight", s.value_heads, s.hidden);
      add_matrix(g + "out_proj.weight", s.hidden, s.values(), 2 * gain);
      add(g + "conv1d.weight", {s.conv_channels(), 1, kQwen35ConvWidth}, 0.5f);
      add(g + "A_log", {s.value_heads}, 0.5f, 0.5f);
      add(g + "dt_bias", {s.value_heads}, 1.0f, -3.0f);
      add(g + "norm.weight", {s.value_dim}, 0.2f, 1.0f);
    }
    add_matrix(name + "mlp.gate_proj.weight", s.mlp, s.hidden);
    add_matrix(name + "mlp.up_proj.weight", s.mlp, s.hidden);
    add_matrix(name + "mlp.down_proj.weight", s.hidden, s.mlp, 2 * gain);
  }

  Qwen35Sizes sizes_;
  Rng rng_;
  StoredTensors out_;
};

inline void write_qwen3_5(const TempDir& folder, const Qwen35Sizes& sizes = {},
                          std::uint64_t seed = 1) {
  folder.write("config.json", qwen3_5_config(sizes).dump());
  write_tensors(folder, Qwen35Weights(sizes, seed).make());
}

}  // namespace replayssm::testing
