// Nemotron-H and Nemotron 3 (model_type nemotron_h): one mixer per layer, x += mixer(RMSNorm(x)),
// with mixers Mamba-2 (M), attention without positional encoding (*), and squared-ReLU MLP (-).
// Mixture-of-experts blocks (E) are understood for sizing and refused at load.
#include <algorithm>
#include <cmath>
#include <memory>

#include "io/quote.h"
#include "model/activations.h"
#include "model/archs.h"
#include "model/config_fields.h"
#include "model/output_head.h"
#include "model/weights.h"

namespace replayssm {
namespace {

constexpr const char* kBodyPrefixes[] = {"backbone.", "model."};

enum class Block : char { kMamba = 'M', kAttention = '*', kMlp = '-', kMoe = 'E' };

struct Config {
  std::vector<Block> blocks;
  ModelDescription description;
  Mamba2Shape mamba;
  ConvShape conv;
  bool conv_bias = true;
  AttentionShape attention;
  std::int64_t mlp_size = 0;
  float eps = 1e-5f;
  float dt_min = 0.0f;
  float dt_max = std::numeric_limits<float>::infinity();
  bool tied = false;
  bool has_mtp = false;

  std::int64_t inner() const { return mamba.heads * mamba.head_dim; }
  std::int64_t projection() const { return inner() + conv.channels + mamba.heads; }
};

std::vector<Block> blocks_of_names(ConfigReader& config, const char* key) {
  std::vector<Block> blocks;
  for (const std::string& name : config.strings(key)) {
    if (name == "mamba" || name == "linear_attention") {
      blocks.push_back(Block::kMamba);
    } else if (name == "attention" || name == "full_attention") {
      blocks.push_back(Block::kAttention);
    } else if (name == "mlp") {
      blocks.push_back(Block::kMlp);
    } else if (name == "moe") {
      blocks.push_back(Block::kMoe);
    } else {
      config.fail(unsupported(config.name(), ": ", key, " entry ", blocks.size(), " is ",
                              quote(name), ", expected mamba, attention, mlp or moe"));
      return {};
    }
  }
  return blocks;
}

std::vector<Block> blocks_of_letters(ConfigReader& config, const char* key) {
  std::vector<Block> blocks;
  for (const char c : config.string_or(key, "")) {
    if (std::string_view("M*-E").find(c) == std::string_view::npos) {
      config.fail(unsupported(config.name(), ": ", key, " character ", blocks.size(), " is ",
                              quote(std::string_view(&c, 1)), ", expected M, *, - or E"));
      return {};
    }
    blocks.push_back(static_cast<Block>(c));
  }
  return blocks;
}

/// The three spellings of the layer pattern: a string of M*-E, or lists of either generation's
/// names. A file may have several that agree.
std::vector<Block> read_blocks(ConfigReader& config) {
  const char* const keys[] = {"layers_block_type", "layer_types", "hybrid_override_pattern"};
  const char* first = nullptr;
  std::vector<Block> blocks;
  for (const char* key : keys) {
    if (!config.has(key)) continue;
    std::vector<Block> found =
        key == keys[2] ? blocks_of_letters(config, key) : blocks_of_names(config, key);
    if (first == nullptr) {
      first = key;
      blocks = std::move(found);
    } else if (found != blocks) {
      config.fail(
          invalid_argument(config.name(), ": ", key, " and ", first, " name different layers"));
    }
  }
  if (std::find(blocks.begin(), blocks.end(), Block::kMamba) == blocks.end()) {
    config.fail(invalid_argument(
        config.name(), ": ", first == nullptr ? "hybrid_override_pattern" : first,
        first == nullptr ? " is missing" : " names no Mamba-2 layer", ", expected at least one"));
  } else if (config.has("num_hidden_layers")) {
    const std::int64_t layers = config.integer("num_hidden_layers", 1, kMaxDim);
    if (layers != static_cast<std::int64_t>(blocks.size())) {
      config.fail(invalid_argument(config.name(), ": num_hidden_layers is ", layers,
                                   ", but the layer pattern has ", blocks.size()));
    }
  }
  return blocks;
}

Result<Config> read_config(ConfigReader& config) {
  Config c;
  ModelDescription& d = c.description;
  d.model_type = "nemotron_h";
  c.blocks = read_blocks(config);
  const auto count = [&](Block block) {
    return static_cast<int>(std::count(c.blocks.begin(), c.blocks.end(), block));
  };
  d.layers = {.ssm = count(Block::kMamba),
              .attention = count(Block::kAttention),
              .mlp = count(Block::kMlp),
              .moe = count(Block::kMoe)};
  d.hidden_size = config.integer("hidden_size", 1, kMaxDim);
  d.vocab_size = config.integer("vocab_size", 1, kMaxDim);
  d.max_position = config.integer_or("max_position_embeddings", 1, std::int64_t{1} << 40, 0);
  d.dtype = read_dtype(config);
  d.eos = read_token_ids(config, "eos_token_id", d.vocab_size);
  const std::vector<std::int32_t> bos = read_token_ids(config, "bos_token_id", d.vocab_size);
  if (!bos.empty()) d.bos = bos.front();

  // `expand` is not read: the inner size is heads * head_dim, whatever it says.
  if (d.layers.ssm > 0) {
    c.mamba = {.heads = config.integer("mamba_num_heads", 1, kMaxDim),
               .head_dim = config.integer("mamba_head_dim", 1, kMaxDim),
               .state_size = config.integer("ssm_state_size", 1, kMaxDim),
               .groups = config.integer("n_groups", 1, kMaxDim)};
    c.conv = {.channels = c.inner() + 2 * c.mamba.groups * c.mamba.state_size,
              .width = static_cast<int>(config.integer_or("conv_kernel", 2, 8, 4))};
    if (config.status().ok() && c.mamba.heads % c.mamba.groups != 0) {
      config.fail(invalid_argument(config.name(), ": n_groups is ", c.mamba.groups,
                                   ", expected a divisor of mamba_num_heads ", c.mamba.heads));
    }
  }
  c.conv_bias = config.boolean_or("use_conv_bias", true);
  if (d.layers.attention > 0) {
    c.attention = read_attention_shape(config);
    d.kv_heads = c.attention.kv_heads;
    d.kv_head_dim = c.attention.head_dim;
  }
  if (d.layers.mlp > 0) c.mlp_size = config.integer("intermediate_size", 1, kMaxDim);

  c.eps = static_cast<float>(
      config.number_or("layer_norm_epsilon", 0, 1, config.number_or("norm_eps", 0, 1, 1e-5)));
  if (config.has("time_step_limit")) {
    const std::vector<double> limit = config.numbers("time_step_limit");
    if (limit.size() == 2) {
      c.dt_min = static_cast<float>(limit[0]);
      c.dt_max = static_cast<float>(limit[1]);  // 1e308 and the like become infinity
    }
    if (config.status().ok() &&
        (limit.size() != 2 || !(c.dt_min >= 0.0f) || !(c.dt_min <= c.dt_max))) {
      config.fail(invalid_argument(config.name(), ": time_step_limit is not a range of two ",
                                   "non-negative numbers"));
    }
  }
  c.tied = config.boolean_or("tie_word_embeddings", false);
  c.has_mtp = config.integer_or("num_nextn_predict_layers", 0, 16, 0) > 0;
  for (const char* bias : {"use_bias", "mamba_proj_bias", "mlp_bias", "attention_bias"}) {
    refuse_true(config, bias);
  }
  require_name(config, "mamba_hidden_act", "silu");
  require_name(config, "mlp_hidden_act", "relu2");
  RSSM_RETURN_IF_ERROR(config.status());

  d.ssm_layers.assign(static_cast<std::size_t>(d.layers.ssm),
                      LayerSpec{.recurrence = c.mamba, .conv = c.conv});
  return c;
}

Result<ModelDescription> describe(ConfigReader& config) {
  RSSM_ASSIGN_OR_RETURN(Config c, read_config(config));
  return std::move(c.description);
}

struct MambaWeights {
  TensorView in_proj, out_proj;
  std::vector<float> conv_weight;  // (width, channels)
  std::vector<float> conv_bias, a, d, dt_bias, norm;
};

struct AttentionWeights {
  TensorView q, k, v, o;
};

struct MlpWeights {
  TensorView up, down;
};

struct Layer {
  std::vector<float> norm;
  std::variant<MambaWeights, AttentionWeights, MlpWeights> mixer;
};

MambaWeights read_mamba(WeightReader& weights, const std::string& name, const Config& c) {
  const std::int64_t hidden = c.description.hidden_size;
  MambaWeights w;
  w.in_proj = weights.matrix(name + "in_proj.weight", c.projection(), hidden);
  w.out_proj = weights.matrix(name + "out_proj.weight", hidden, c.inner());
  w.conv_weight = weights.conv_taps(name + "conv1d.weight", c.conv);
  if (c.conv_bias) w.conv_bias = weights.values(name + "conv1d.bias", {c.conv.channels});
  w.a = weights.values(name + "A_log", {c.mamba.heads});
  for (float& a : w.a) a = -std::exp(a);
  w.d = weights.values(name + "D", {c.mamba.heads});
  w.dt_bias = weights.values(name + "dt_bias", {c.mamba.heads});
  w.norm = weights.values(name + "norm.weight", {c.inner()});
  return w;
}

AttentionWeights read_attention(WeightReader& weights, const std::string& name, const Config& c) {
  const std::int64_t hidden = c.description.hidden_size;
  const std::int64_t q = c.attention.query_heads * c.attention.head_dim;
  const std::int64_t kv = c.attention.kv_heads * c.attention.head_dim;
  return {.q = weights.matrix(name + "q_proj.weight", q, hidden),
          .k = weights.matrix(name + "k_proj.weight", kv, hidden),
          .v = weights.matrix(name + "v_proj.weight", kv, hidden),
          .o = weights.matrix(name + "o_proj.weight", hidden, q)};
}

MlpWeights read_mlp(WeightReader& weights, const std::string& name, const Config& c) {
  const std::int64_t hidden = c.description.hidden_size;
  return {.up = weights.matrix(name + "up_proj.weight", c.mlp_size, hidden),
          .down = weights.matrix(name + "down_proj.weight", hidden, c.mlp_size)};
}

class NemotronH final : public Model {
 public:
  static Result<std::unique_ptr<Model>> load(ConfigReader& reader,
                                             std::shared_ptr<const Checkpoint> checkpoint,
                                             Backend& backend) {
    RSSM_ASSIGN_OR_RETURN(Config config, read_config(reader));
    if (config.description.layers.moe > 0) {
      const auto first = std::find(config.blocks.begin(), config.blocks.end(), Block::kMoe);
      return unsupported(reader.name(), ": layer ", first - config.blocks.begin(),
                         " is a mixture of experts, which can be sized but not run yet");
    }
    auto model =
        std::unique_ptr<NemotronH>(new NemotronH(std::move(config), std::move(checkpoint)));
    RSSM_RETURN_IF_ERROR(model->read_weights(backend));
    return std::unique_ptr<Model>(std::move(model));
  }

  const ModelDescription& description() const override { return config_.description; }

  Status bind(StatePool& pool) const override {
    int index = 0;
    for (const Layer& layer : layers_) {
      if (const auto* mamba = std::get_if<MambaWeights>(&layer.mixer)) {
        RSSM_RETURN_IF_ERROR(pool.set_mamba2_a(index++, mamba->a));
      }
    }
    return {};
  }

  Status forward(Backend& backend, StatePool& pool, Step& step, KvCache& cache,
                 const ForwardInput& input, const ForwardOutput& out) override {
    const auto tokens = static_cast<std::int64_t>(input.tokens.size());
    const std::int64_t hidden = config_.description.hidden_size;
    RSSM_ASSIGN_OR_RETURN(const TensorView x, buffers_.matrix(backend, kHidden, tokens, hidden));
    RSSM_ASSIGN_OR_RETURN(const TensorView normed,
                          buffers_.matrix(backend, kNormed, tokens, hidden));
    RSSM_ASSIGN_OR_RETURN(const TensorView mixed, buffers_.matrix(backend, kOut, tokens, hidden));
    backend.embed(input.tokens, embeddings_, x);
    int ssm_layer = 0;
    int attention_layer = 0;
    for (const Layer& layer : layers_) {
      backend.rms_norm(x, vector_view(layer.norm), config_.eps, normed);
      if (const auto* mamba = std::get_if<MambaWeights>(&layer.mixer)) {
        RSSM_RETURN_IF_ERROR(
            run_mamba(backend, pool, step, ssm_layer++, input.rows, *mamba, normed, mixed));
      } else if (const auto* attention = std::get_if<AttentionWeights>(&layer.mixer)) {
        RSSM_RETURN_IF_ERROR(run_attention(backend, cache, attention_layer++, input.rows,
                                           *attention, normed, mixed));
      } else {
        RSSM_RETURN_IF_ERROR(
            run_mlp(backend, input.rows, std::get<MlpWeights>(layer.mixer), normed, mixed));
      }
      backend.add(x, mixed);
    }
    return head_.run(backend, input, x, vector_view(final_norm_), config_.eps, lm_head_, out);
  }

 private:
  enum Buffer { kHidden, kNormed, kOut, kProjection, kConv, kInner, kQ, kK, kV, kContext, kMlp };

  NemotronH(Config config, std::shared_ptr<const Checkpoint> checkpoint)
      : config_(std::move(config)), checkpoint_(std::move(checkpoint)) {}

  Status read_weights(Backend& backend) {
    const ModelDescription& d = config_.description;
    WeightReader weights(*checkpoint_, backend, {kBodyPrefixes[0], kBodyPrefixes[1]});
    const std::string& body = weights.prefix();
    embeddings_ = weights.matrix(body + "embeddings.weight", d.vocab_size, d.hidden_size);
    for (std::size_t i = 0; i < config_.blocks.size(); ++i) {
      const std::string name = body + "layers." + std::to_string(i) + ".";
      Layer layer;
      layer.norm = weights.values(name + "norm.weight", {d.hidden_size});
      const std::string mixer = name + "mixer.";
      switch (config_.blocks[i]) {
        case Block::kMamba:
          layer.mixer = read_mamba(weights, mixer, config_);
          break;
        case Block::kAttention:
          layer.mixer = read_attention(weights, mixer, config_);
          break;
        default:
          layer.mixer = read_mlp(weights, mixer, config_);
      }
      layers_.push_back(std::move(layer));
    }
    final_norm_ = weights.values(body + "norm_f.weight", {d.hidden_size});
    // A tied head may be stored all the same.
    lm_head_ = config_.tied && !weights.has("lm_head.weight")
                   ? embeddings_
                   : weights.matrix("lm_head.weight", d.vocab_size, d.hidden_size);
    if (config_.has_mtp) {
      weights.check_all_used("", {"mtp."});
    } else {
      weights.check_all_used("", {});
    }
    return weights.status();
  }

  Status run_mamba(Backend& backend, StatePool& pool, Step& step, int layer,
                   std::span<const ForwardRow> rows, const MambaWeights& w, const TensorView& in,
                   const TensorView& out) {
    const Mamba2Shape& m = config_.mamba;
    const std::int64_t tokens = in.shape[0];
    const std::int64_t inner = config_.inner();
    const std::int64_t bc = m.groups * m.state_size;
    RSSM_ASSIGN_OR_RETURN(const TensorView projection,
                          buffers_.matrix(backend, kProjection, tokens, config_.projection()));
    RSSM_ASSIGN_OR_RETURN(const TensorView conv,
                          buffers_.matrix(backend, kConv, tokens, config_.conv.channels));
    RSSM_ASSIGN_OR_RETURN(const TensorView y, buffers_.matrix(backend, kInner, tokens, inner));

    // in_proj rows: z | x | B | C | dt; the convolution runs over x | B | C.
    RSSM_RETURN_IF_ERROR(backend.matmul(rows, in, w.in_proj, projection));
    RSSM_RETURN_IF_ERROR(backend.causal_conv1d(
        pool, layer, step,
        {.u = columns(projection, inner, config_.conv.channels),
         .weight = TensorView::contiguous(w.conv_weight.data(), DType::kF32,
                                          {config_.conv.width, config_.conv.channels}),
         .bias = vector_view(w.conv_bias),
         .out = conv,
         .silu = true}));
    RSSM_RETURN_IF_ERROR(
        backend.mamba2(pool, layer, step,
                       {.d = vector_view(w.d),
                        .dt_bias = vector_view(w.dt_bias),
                        .dt_softplus = true,
                        .dt_min = config_.dt_min,
                        .dt_max = config_.dt_max},
                       {.x = split(columns(conv, 0, inner), m.heads),
                        .b = split(columns(conv, inner, bc), m.groups),
                        .c = split(columns(conv, inner + bc, bc), m.groups),
                        .dt = columns(projection, inner + config_.conv.channels, m.heads),
                        .z = {},
                        .y = split(y, m.heads)}));
    backend.gated_rms_norm(y, columns(projection, 0, inner), vector_view(w.norm), m.groups,
                           config_.eps, y);
    return backend.matmul(rows, y, w.out_proj, out);
  }

  Status run_attention(Backend& backend, KvCache& cache, int layer,
                       std::span<const ForwardRow> rows, const AttentionWeights& w,
                       const TensorView& in, const TensorView& out) {
    const AttentionShape& a = config_.attention;
    const std::int64_t tokens = in.shape[0];
    RSSM_ASSIGN_OR_RETURN(const TensorView q,
                          buffers_.matrix(backend, kQ, tokens, a.query_heads * a.head_dim));
    RSSM_ASSIGN_OR_RETURN(const TensorView k,
                          buffers_.matrix(backend, kK, tokens, a.kv_heads * a.head_dim));
    RSSM_ASSIGN_OR_RETURN(const TensorView v,
                          buffers_.matrix(backend, kV, tokens, a.kv_heads * a.head_dim));
    RSSM_ASSIGN_OR_RETURN(const TensorView context,
                          buffers_.matrix(backend, kContext, tokens, a.query_heads * a.head_dim));
    RSSM_RETURN_IF_ERROR(backend.matmul(rows, in, w.q, q));
    RSSM_RETURN_IF_ERROR(backend.matmul(rows, in, w.k, k));
    RSSM_RETURN_IF_ERROR(backend.matmul(rows, in, w.v, v));
    backend.attention(rows, a, q, k, v, cache, layer, context);
    return backend.matmul(rows, context, w.o, out);
  }

  Status run_mlp(Backend& backend, std::span<const ForwardRow> rows, const MlpWeights& w,
                 const TensorView& in, const TensorView& out) {
    RSSM_ASSIGN_OR_RETURN(const TensorView up,
                          buffers_.matrix(backend, kMlp, in.shape[0], config_.mlp_size));
    RSSM_RETURN_IF_ERROR(backend.matmul(rows, in, w.up, up));
    backend.relu_squared(up);
    return backend.matmul(rows, up, w.down, out);
  }

  Config config_;
  std::shared_ptr<const Checkpoint> checkpoint_;  // keeps the mapped weights alive
  TensorView embeddings_, lm_head_;
  std::vector<Layer> layers_;
  std::vector<float> final_norm_;
  Activations buffers_;
  OutputHead head_;
};

}  // namespace

const ModelFamily kNemotronH = {
    .model_type = "nemotron_h", .describe = describe, .load = NemotronH::load};

}  // namespace replayssm
