// Qwen3.5 and its successors of the same architecture, dense (model_type qwen3_5, or qwen3_5_text
// where the text model stands alone). Every layer is
//
//   x += mixer(RMSNorm(x)),  x += SwiGLU(RMSNorm(x))
//
// with three Gated DeltaNet mixers to one of gated attention, usually. All RMSNorms but the one
// inside Gated DeltaNet store their weight less one. Vision towers are passed over.
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

constexpr const char* kBodyPrefixes[] = {"model.language_model.", "model."};
constexpr const char* kMtpPrefix = "mtp.";
constexpr const char* kVisionPrefix = "model.visual.";

enum class Mixer : std::uint8_t { kGatedDeltaNet, kAttention };

struct Config {
  std::vector<Mixer> mixers;
  ModelDescription description;
  GatedDeltaNetShape delta_net;
  ConvShape conv;  // over q | k | v
  AttentionShape attention;
  std::vector<double> frequencies;  // of rotary position embedding, radians per position
  std::int64_t mlp_size = 0;
  float eps = 1e-6f;
  bool tied = false;
  bool mtp_embeddings = false;  // of its own

  std::int64_t keys() const { return delta_net.key_heads * delta_net.key_dim; }
  std::int64_t values() const { return delta_net.value_heads * delta_net.value_dim; }
};

// ---- Configuration ----

/// layer_types, or every full_attention_interval-th layer.
std::vector<Mixer> read_mixers(ConfigReader& config) {
  const std::int64_t layers = config.integer("num_hidden_layers", 1, kMaxDim);
  std::vector<Mixer> mixers;
  if (!config.has("layer_types")) {
    const std::int64_t interval = config.integer_or("full_attention_interval", 1, kMaxDim, 4);
    for (std::int64_t i = 1; i <= layers; ++i) {
      mixers.push_back(i % interval == 0 ? Mixer::kAttention : Mixer::kGatedDeltaNet);
    }
  } else {
    for (const std::string& name : config.strings("layer_types")) {
      if (name != "linear_attention" && name != "full_attention") {
        config.fail(unsupported(config.name(), ": layer_types entry ", mixers.size(), " is ",
                                quote(name), ", expected linear_attention or full_attention"));
        return {};
      }
      mixers.push_back(name == "full_attention" ? Mixer::kAttention : Mixer::kGatedDeltaNet);
    }
    if (config.status().ok() && std::ssize(mixers) != layers) {
      config.fail(invalid_argument(config.name(), ": num_hidden_layers is ", layers,
                                   ", but layer_types has ", mixers.size()));
    }
  }
  if (config.status().ok() &&
      std::find(mixers.begin(), mixers.end(), Mixer::kGatedDeltaNet) == mixers.end()) {
    config.fail(invalid_argument(config.name(), ": none of ", layers,
                                 " layers is Gated DeltaNet, expected at least one"));
  }
  return mixers;
}

/// What scales the angles beyond the plain rule changes texts of any length, so it is refused.
/// mRoPE's sections give a text's tokens the same position three times: the plain rule again.
void refuse_scaled_rope(ConfigReader& rope) {
  for (const char* key : {"rope_type", "type"}) {
    const std::string type = rope.string_or(key, "default");
    if (type != "default" && type != "mrope") {
      rope.fail(unsupported(rope.name(), ": ", key, " is ", quote(type), ", expected default"));
    }
  }
}

/// Frequencies theta^(-2j / n) of the first n = head_dim * partial_rotary_factor features. Both
/// numbers are in rope_parameters, as written now, or beside rope_scaling, as written before.
Status read_rope(ConfigReader& config, Config& c) {
  double theta = config.number_or("rope_theta", 1, 1e30, 0);
  double factor = config.number_or("partial_rotary_factor", 0, 1, 0.25);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!config.has(key)) continue;
    RSSM_ASSIGN_OR_RETURN(ConfigReader rope, config.object(key));
    refuse_scaled_rope(rope);
    theta = rope.number_or("rope_theta", 1, 1e30, theta);
    factor = rope.number_or("partial_rotary_factor", 0, 1, factor);
    RSSM_RETURN_IF_ERROR(rope.status());
  }
  RSSM_RETURN_IF_ERROR(config.status());
  if (theta == 0) {
    return invalid_argument(config.name(), ": rope_theta is missing, expected a number in ",
                            "rope_parameters or beside them");
  }
  const auto rotated =
      static_cast<std::int64_t>(static_cast<double>(c.attention.head_dim) * factor);
  if (rotated < 2 || rotated % 2 != 0) {
    return invalid_argument(config.name(), ": partial_rotary_factor ", factor, " of head_dim ",
                            c.attention.head_dim, " is ", rotated,
                            " features, expected an even number of at least 2");
  }
  for (std::int64_t j = 0; j < rotated; j += 2) {
    c.frequencies.push_back(
        std::pow(theta, -static_cast<double>(j) / static_cast<double>(rotated)));
  }
  return {};
}

void read_delta_net(ConfigReader& config, Config& c) {
  GatedDeltaNetShape& g = c.delta_net;
  g = {.key_heads = config.integer("linear_num_key_heads", 1, kMaxHeads),
       .value_heads = config.integer("linear_num_value_heads", 1, kMaxHeads),
       .key_dim = config.integer("linear_key_head_dim", 1, kMaxHeads),
       .value_dim = config.integer("linear_value_head_dim", 1, kMaxHeads)};
  if (config.status().ok() && g.value_heads % g.key_heads != 0) {
    config.fail(invalid_argument(config.name(), ": linear_num_value_heads is ", g.value_heads,
                                 ", expected a multiple of linear_num_key_heads ", g.key_heads));
  }
  c.conv = {.channels = 2 * c.keys() + c.values(),
            .width = static_cast<int>(config.integer_or("linear_conv_kernel_dim", 2, 8, 4))};
}

/// Settings that no published dense model has and nothing here computes.
void refuse_other_architectures(ConfigReader& config) {
  const std::string type = config.string_or("model_type", kQwen35.model_type);
  if (type != kQwen35.model_type && type != kQwen35.text_model_type) {
    config.fail(unsupported(config.name(), ": model_type is ", quote(type), ", expected ",
                            kQwen35.model_type, " or ", kQwen35.text_model_type));
  }
  if (const std::int64_t experts = config.integer_or("num_experts", 0, kMaxDim, 0); experts > 0) {
    config.fail(unsupported(config.name(), ": num_experts is ", experts,
                            ", mixtures of experts are not supported"));
  }
  if (!config.boolean_or("attn_output_gate", true)) {
    config.fail(unsupported(config.name(), ": attn_output_gate is false, expected true"));
  }
  refuse_true(config, "attention_bias");
  require_name(config, "hidden_act", "silu");
  // "swish" is what later files call the SiLU that gates Gated DeltaNet.
  if (config.string_or("output_gate_type", "swish") != "silu") {
    require_name(config, "output_gate_type", "swish");
  }
}

/// `config`: of the text model; `outer`: the file, which is the same where there is no wrapper.
Result<Config> read_text_config(ConfigReader& config, ConfigReader& outer) {
  Config c;
  ModelDescription& d = c.description;
  d.model_type = kQwen35.model_type;
  refuse_other_architectures(config);
  c.mixers = read_mixers(config);
  d.layers.attention =
      static_cast<int>(std::count(c.mixers.begin(), c.mixers.end(), Mixer::kAttention));
  d.layers.ssm = static_cast<int>(c.mixers.size()) - d.layers.attention;
  d.layers.mlp = static_cast<int>(c.mixers.size());
  d.hidden_size = config.integer("hidden_size", 1, kMaxDim);
  d.vocab_size = config.integer("vocab_size", 1, kMaxDim);
  d.max_position = config.integer_or("max_position_embeddings", 1, std::int64_t{1} << 40, 0);
  // A wrapper may say these for itself or leave them to the text model.
  const auto either = [&](const char* key) -> ConfigReader& {
    return config.has(key) ? config : outer;
  };
  d.dtype = read_dtype(either(config.has("torch_dtype") ? "torch_dtype" : "dtype"));
  d.eos = read_token_ids(either("eos_token_id"), "eos_token_id", d.vocab_size);
  const std::vector<std::int32_t> bos =
      read_token_ids(either("bos_token_id"), "bos_token_id", d.vocab_size);
  if (!bos.empty()) d.bos = bos.front();
  c.tied = either("tie_word_embeddings").boolean_or("tie_word_embeddings", false);

  read_delta_net(config, c);
  c.attention = read_attention_shape(config);
  d.kv_heads = c.attention.kv_heads;
  d.kv_head_dim = c.attention.head_dim;
  c.mlp_size = config.integer("intermediate_size", 1, kMaxDim);
  c.eps = static_cast<float>(config.number_or("rms_norm_eps", 0, 1, 1e-6));
  d.mtp_layers = config.integer_or("mtp_num_hidden_layers", 0, 16, 0);
  c.mtp_embeddings = config.boolean_or("mtp_use_dedicated_embeddings", false);
  RSSM_RETURN_IF_ERROR(read_rope(config, c));
  RSSM_RETURN_IF_ERROR(config.status());
  RSSM_RETURN_IF_ERROR(outer.status());
  d.ssm_layers.assign(static_cast<std::size_t>(d.layers.ssm),
                      LayerSpec{.recurrence = c.delta_net, .conv = c.conv});
  return c;
}

Result<Config> read_config(ConfigReader& config) {
  if (!config.has("text_config")) return read_text_config(config, config);
  RSSM_ASSIGN_OR_RETURN(ConfigReader text, config.object("text_config"));
  return read_text_config(text, config);
}

Result<ModelDescription> describe(ConfigReader& config) {
  RSSM_ASSIGN_OR_RETURN(Config c, read_config(config));
  return std::move(c.description);
}

// ---- Weights ----

struct DeltaNetWeights {
  TensorView in_qkv, in_z, in_a, in_b, out;
  std::vector<float> taps;  // (width, channels)
  std::vector<float> a_log, dt_bias;
  std::vector<float> norm;  // (value_dim), shared by the heads
};

struct AttentionWeights {
  TensorView q, k, v, o;
  std::vector<float> q_norm, k_norm;  // (head_dim), shared by the heads
};

struct Layer {
  std::vector<float> mixer_norm, mlp_norm;
  std::variant<DeltaNetWeights, AttentionWeights> mixer;
  TensorView gate, up, down;  // SwiGLU
};

/// The weight of an RMSNorm that stores it less one.
std::vector<float> read_norm(WeightReader& weights, const std::string& name, std::int64_t size) {
  std::vector<float> norm = weights.values(name, {size});
  for (float& w : norm) w += 1.0f;
  return norm;
}

DeltaNetWeights read_delta_net(WeightReader& weights, const std::string& name, const Config& c) {
  const std::int64_t hidden = c.description.hidden_size;
  const GatedDeltaNetShape& g = c.delta_net;
  DeltaNetWeights w;
  w.in_qkv = weights.matrix(name + "in_proj_qkv.weight", c.conv.channels, hidden);
  w.in_z = weights.matrix(name + "in_proj_z.weight", c.values(), hidden);
  w.in_a = weights.matrix(name + "in_proj_a.weight", g.value_heads, hidden);
  w.in_b = weights.matrix(name + "in_proj_b.weight", g.value_heads, hidden);
  w.out = weights.matrix(name + "out_proj.weight", hidden, c.values());
  w.taps = weights.conv_taps(name + "conv1d.weight", c.conv);
  w.a_log = weights.values(name + "A_log", {g.value_heads});
  w.dt_bias = weights.values(name + "dt_bias", {g.value_heads});
  w.norm = weights.values(name + "norm.weight", {g.value_dim});
  return w;
}

AttentionWeights read_attention(WeightReader& weights, const std::string& name, const Config& c) {
  const std::int64_t hidden = c.description.hidden_size;
  const AttentionShape& a = c.attention;
  AttentionWeights w;
  w.q = weights.matrix(name + "q_proj.weight", a.query_heads * 2 * a.head_dim, hidden);
  w.k = weights.matrix(name + "k_proj.weight", a.kv_heads * a.head_dim, hidden);
  w.v = weights.matrix(name + "v_proj.weight", a.kv_heads * a.head_dim, hidden);
  w.o = weights.matrix(name + "o_proj.weight", hidden, a.query_heads * a.head_dim);
  w.q_norm = read_norm(weights, name + "q_norm.weight", a.head_dim);
  w.k_norm = read_norm(weights, name + "k_norm.weight", a.head_dim);
  return w;
}

Layer read_layer(WeightReader& weights, const std::string& name, Mixer mixer, const Config& c) {
  const std::int64_t hidden = c.description.hidden_size;
  Layer layer;
  layer.mixer_norm = read_norm(weights, name + "input_layernorm.weight", hidden);
  layer.mlp_norm = read_norm(weights, name + "post_attention_layernorm.weight", hidden);
  if (mixer == Mixer::kAttention) {
    layer.mixer = read_attention(weights, name + "self_attn.", c);
  } else {
    layer.mixer = read_delta_net(weights, name + "linear_attn.", c);
  }
  layer.gate = weights.matrix(name + "mlp.gate_proj.weight", c.mlp_size, hidden);
  layer.up = weights.matrix(name + "mlp.up_proj.weight", c.mlp_size, hidden);
  layer.down = weights.matrix(name + "mlp.down_proj.weight", hidden, c.mlp_size);
  return layer;
}

// ---- Forward passes ----

/// Where the mixers of a pass keep what they remember. An MTP head has no recurrence: no pool.
struct Memory {
  StatePool* pool = nullptr;
  Step* step = nullptr;
  KvCache* cache = nullptr;
};

/// The arithmetic of layers and the activations it needs, for the model and for its MTP head.
class Layers {
 public:
  explicit Layers(const Config& config) : config_(config) {}

  /// The residual stream of a pass, (tokens, hidden_size), to be filled; angles of its positions.
  Result<TensorView> begin(Backend& backend, const ForwardInput& input) {
    const auto tokens = static_cast<std::int64_t>(input.tokens.size());
    const std::int64_t hidden = config_.description.hidden_size;
    const auto angles = static_cast<std::int64_t>(2 * config_.frequencies.size());
    RSSM_ASSIGN_OR_RETURN(angles_, buffers_.matrix(backend, kAngles, tokens, angles));
    RSSM_ASSIGN_OR_RETURN(normed_, buffers_.matrix(backend, kNormed, tokens, hidden));
    RSSM_ASSIGN_OR_RETURN(out_, buffers_.matrix(backend, kOut, tokens, hidden));
    backend.rotary_table(input.rows, config_.frequencies, angles_);
    return buffers_.matrix(backend, kHidden, tokens, hidden);
  }

  /// x through a layer, in place. `index` counts the layers of its kind.
  Status run(Backend& backend, const Memory& memory, int index, std::span<const ForwardRow> rows,
             const Layer& layer, const TensorView& x) {
    backend.rms_norm(x, vector_view(layer.mixer_norm), config_.eps, normed_);
    if (const auto* w = std::get_if<AttentionWeights>(&layer.mixer)) {
      RSSM_RETURN_IF_ERROR(run_attention(backend, *memory.cache, index, rows, *w));
    } else {
      RSSM_RETURN_IF_ERROR(
          run_delta_net(backend, memory, index, rows, std::get<DeltaNetWeights>(layer.mixer)));
    }
    backend.add(x, out_);
    backend.rms_norm(x, vector_view(layer.mlp_norm), config_.eps, normed_);
    RSSM_RETURN_IF_ERROR(run_mlp(backend, rows, layer));
    backend.add(x, out_);
    return {};
  }

 private:
  enum Buffer {
    kHidden,
    kNormed,
    kOut,
    kAngles,
    kQkv,
    kConv,
    kZ,
    kA,
    kB,
    kO,
    kQGate,
    kQ,
    kK,
    kV,
    kContext,
    kMlpGate,
    kMlpUp
  };

  /// normed_ through one projection.
  Result<TensorView> project(Backend& backend, std::span<const ForwardRow> rows,
                             const TensorView& weight, Buffer buffer) {
    RSSM_ASSIGN_OR_RETURN(const TensorView y,
                          buffers_.matrix(backend, buffer, normed_.shape[0], weight.shape[0]));
    RSSM_RETURN_IF_ERROR(backend.matmul(rows, normed_, weight, y));
    return y;
  }

  Status run_delta_net(Backend& backend, const Memory& memory, int index,
                       std::span<const ForwardRow> rows, const DeltaNetWeights& w) {
    const GatedDeltaNetShape& g = config_.delta_net;
    const std::int64_t tokens = normed_.shape[0];
    const std::int64_t keys = config_.keys();
    const std::int64_t values = config_.values();
    RSSM_ASSIGN_OR_RETURN(const TensorView qkv, project(backend, rows, w.in_qkv, kQkv));
    RSSM_ASSIGN_OR_RETURN(const TensorView z, project(backend, rows, w.in_z, kZ));
    RSSM_ASSIGN_OR_RETURN(const TensorView a, project(backend, rows, w.in_a, kA));
    RSSM_ASSIGN_OR_RETURN(const TensorView b, project(backend, rows, w.in_b, kB));
    RSSM_ASSIGN_OR_RETURN(const TensorView conv,
                          buffers_.matrix(backend, kConv, tokens, config_.conv.channels));
    RSSM_ASSIGN_OR_RETURN(const TensorView o, buffers_.matrix(backend, kO, tokens, values));
    RSSM_RETURN_IF_ERROR(backend.causal_conv1d(
        *memory.pool, index, *memory.step,
        {.u = qkv,
         .weight = TensorView::contiguous(w.taps.data(), DType::kF32,
                                          {config_.conv.width, config_.conv.channels}),
         .bias = {},
         .out = conv,
         .silu = true}));
    RSSM_RETURN_IF_ERROR(backend.gated_delta_net(
        *memory.pool, index, *memory.step,
        {.a_log = vector_view(w.a_log), .dt_bias = vector_view(w.dt_bias), .scale = {}},
        {.q = split(columns(conv, 0, keys), g.key_heads),
         .k = split(columns(conv, keys, keys), g.key_heads),
         .v = split(columns(conv, 2 * keys, values), g.value_heads),
         .a = a,
         .b = b,
         .o = split(o, g.value_heads)}));
    const TensorView heads = part_rows(o, g.value_heads);
    backend.rms_norm(heads, vector_view(w.norm), config_.eps, heads);
    backend.gate(heads, part_rows(z, g.value_heads), GateFunction::kSilu);
    return backend.matmul(rows, o, w.out, out_);
  }

  Status run_attention(Backend& backend, KvCache& cache, int index,
                       std::span<const ForwardRow> rows, const AttentionWeights& w) {
    const AttentionShape& s = config_.attention;
    const std::int64_t tokens = normed_.shape[0];
    const std::int64_t width = s.query_heads * s.head_dim;
    RSSM_ASSIGN_OR_RETURN(const TensorView q_gate, project(backend, rows, w.q, kQGate));
    RSSM_ASSIGN_OR_RETURN(const TensorView k, project(backend, rows, w.k, kK));
    RSSM_ASSIGN_OR_RETURN(const TensorView v, project(backend, rows, w.v, kV));
    RSSM_ASSIGN_OR_RETURN(const TensorView q, buffers_.matrix(backend, kQ, tokens, width));
    RSSM_ASSIGN_OR_RETURN(const TensorView context,
                          buffers_.matrix(backend, kContext, tokens, width));

    // Rows of q_proj: for every head its query, then its gate.
    const TensorView heads = part_rows(q_gate, s.query_heads);
    const TensorView k_heads = part_rows(k, s.kv_heads);
    backend.rms_norm(columns(heads, 0, s.head_dim), vector_view(w.q_norm), config_.eps,
                     part_rows(q, s.query_heads));
    backend.rms_norm(k_heads, vector_view(w.k_norm), config_.eps, k_heads);
    backend.rotate(angles_, split(q, s.query_heads));
    backend.rotate(angles_, split(k, s.kv_heads));
    backend.attention(rows, s, q, k, v, cache, index, context);
    backend.gate(part_rows(context, s.query_heads), columns(heads, s.head_dim, s.head_dim),
                 GateFunction::kSigmoid);
    return backend.matmul(rows, context, w.o, out_);
  }

  Status run_mlp(Backend& backend, std::span<const ForwardRow> rows, const Layer& layer) {
    RSSM_ASSIGN_OR_RETURN(const TensorView gate, project(backend, rows, layer.gate, kMlpGate));
    RSSM_ASSIGN_OR_RETURN(const TensorView up, project(backend, rows, layer.up, kMlpUp));
    backend.gate(up, gate, GateFunction::kSilu);
    return backend.matmul(rows, up, layer.down, out_);
  }

  const Config& config_;
  Activations buffers_;
  TensorView normed_, out_, angles_;  // of the pass
};

/// Everything that the model and its MTP head share. Kept by both: a head may outlive its model.
struct Shared {
  Config config;
  std::shared_ptr<const Checkpoint> checkpoint;  // keeps the mapped weights alive
  TensorView embeddings, lm_head;
};

class Qwen35MtpHead final : public MtpHead {
 public:
  static Result<std::unique_ptr<MtpHead>> load(std::shared_ptr<const Shared> shared,
                                               Backend& backend) {
    auto head = std::unique_ptr<Qwen35MtpHead>(new Qwen35MtpHead(std::move(shared)));
    RSSM_RETURN_IF_ERROR(head->read_weights(backend));
    return std::unique_ptr<MtpHead>(std::move(head));
  }

  const ModelDescription& description() const override { return shared_->config.description; }

  Status forward(Backend& backend, KvCache& cache, const ForwardInput& input,
                 const TensorView& hidden, const ForwardOutput& out) override {
    const Config& c = shared_->config;
    const std::int64_t size = c.description.hidden_size;
    const auto tokens = static_cast<std::int64_t>(input.tokens.size());
    RSSM_ASSIGN_OR_RETURN(const TensorView x, layers_.begin(backend, input));
    RSSM_ASSIGN_OR_RETURN(const TensorView pair, buffers_.matrix(backend, kPair, tokens, 2 * size));
    const TensorView embedded = columns(pair, 0, size);
    backend.embed(input.tokens, shared_->embeddings, embedded);
    backend.rms_norm(embedded, vector_view(embedding_norm_), c.eps, embedded);
    backend.rms_norm(hidden, vector_view(hidden_norm_), c.eps, columns(pair, size, size));
    RSSM_RETURN_IF_ERROR(backend.matmul(input.rows, pair, fc_, x));
    RSSM_RETURN_IF_ERROR(layers_.run(backend, {.cache = &cache}, 0, input.rows, layer_, x));
    return output_.run(backend, input, x, vector_view(norm_), c.eps, shared_->lm_head, out);
  }

 private:
  enum Buffer { kPair };

  explicit Qwen35MtpHead(std::shared_ptr<const Shared> shared)
      : shared_(std::move(shared)), layers_(shared_->config) {}

  Status read_weights(Backend& backend) {
    const std::int64_t size = shared_->config.description.hidden_size;
    WeightReader weights(*shared_->checkpoint, backend, {kMtpPrefix});
    const std::string name = kMtpPrefix;
    fc_ = weights.matrix(name + "fc.weight", size, 2 * size);
    embedding_norm_ = read_norm(weights, name + "pre_fc_norm_embedding.weight", size);
    hidden_norm_ = read_norm(weights, name + "pre_fc_norm_hidden.weight", size);
    layer_ = read_layer(weights, name + "layers.0.", Mixer::kAttention, shared_->config);
    norm_ = read_norm(weights, name + "norm.weight", size);
    weights.check_all_used(kMtpPrefix, {});
    return weights.status();
  }

  std::shared_ptr<const Shared> shared_;
  TensorView fc_;
  std::vector<float> embedding_norm_, hidden_norm_, norm_;
  Layer layer_;
  Layers layers_;
  Activations buffers_;
  OutputHead output_;
};

class Qwen35 final : public Model {
 public:
  static Result<std::unique_ptr<Model>> load(ConfigReader& reader,
                                             std::shared_ptr<const Checkpoint> checkpoint,
                                             Backend& backend) {
    RSSM_ASSIGN_OR_RETURN(Config config, read_config(reader));
    auto shared = std::make_shared<Shared>();
    shared->config = std::move(config);
    shared->checkpoint = std::move(checkpoint);
    auto model = std::unique_ptr<Qwen35>(new Qwen35(shared));
    RSSM_RETURN_IF_ERROR(model->read_weights(*shared, backend));
    return std::unique_ptr<Model>(std::move(model));
  }

  const ModelDescription& description() const override { return shared_->config.description; }

  /// Records of Gated DeltaNet hold everything a fold asks for.
  Status bind(StatePool&) const override { return {}; }

  Status forward(Backend& backend, StatePool& pool, Step& step, KvCache& cache,
                 const ForwardInput& input, const ForwardOutput& out) override {
    RSSM_ASSIGN_OR_RETURN(const TensorView x, layers_.begin(backend, input));
    backend.embed(input.tokens, shared_->embeddings, x);
    const Memory memory{.pool = &pool, .step = &step, .cache = &cache};
    int attention = 0;
    int ssm = 0;
    for (const Layer& layer : weights_) {
      int& index = std::holds_alternative<AttentionWeights>(layer.mixer) ? attention : ssm;
      RSSM_RETURN_IF_ERROR(layers_.run(backend, memory, index++, input.rows, layer, x));
    }
    return output_.run(backend, input, x, vector_view(norm_), shared_->config.eps, shared_->lm_head,
                       out);
  }

  Result<std::unique_ptr<MtpHead>> load_mtp_head(Backend& backend) const override {
    const ModelDescription& d = description();
    if (d.mtp_layers == 0) {
      return unsupported("mtp_num_hidden_layers is 0: this ", d.model_type,
                         " model has no multi-token-prediction head to draft with");
    }
    if (d.mtp_layers > 1) {
      return unsupported("mtp_num_hidden_layers is ", d.mtp_layers, ", expected 1");
    }
    if (shared_->config.mtp_embeddings) {
      return unsupported("mtp_use_dedicated_embeddings is true, which is not supported");
    }
    return Qwen35MtpHead::load(shared_, backend);
  }

 private:
  explicit Qwen35(std::shared_ptr<const Shared> shared)
      : shared_(std::move(shared)), layers_(shared_->config) {}

  Status read_weights(Shared& shared, Backend& backend) {
    const Config& c = shared.config;
    const ModelDescription& d = c.description;
    WeightReader weights(*shared.checkpoint, backend, {kBodyPrefixes[0], kBodyPrefixes[1]});
    const std::string& body = weights.prefix();
    shared.embeddings = weights.matrix(body + "embed_tokens.weight", d.vocab_size, d.hidden_size);
    for (std::size_t i = 0; i < c.mixers.size(); ++i) {
      weights_.push_back(
          read_layer(weights, body + "layers." + std::to_string(i) + ".", c.mixers[i], c));
    }
    norm_ = read_norm(weights, body + "norm.weight", d.hidden_size);
    // A tied head may be stored all the same.
    shared.lm_head = c.tied && !weights.has("lm_head.weight")
                         ? shared.embeddings
                         : weights.matrix("lm_head.weight", d.vocab_size, d.hidden_size);
    if (d.mtp_layers > 0) {
      weights.check_all_used("", {kVisionPrefix, kMtpPrefix});
    } else {
      weights.check_all_used("", {kVisionPrefix});
    }
    return weights.status();
  }

  std::shared_ptr<const Shared> shared_;
  std::vector<Layer> weights_;
  std::vector<float> norm_;
  Layers layers_;
  OutputHead output_;
};

}  // namespace

const ModelFamily kQwen35 = {.model_type = "qwen3_5",
                             .text_model_type = "qwen3_5_text",
                             .describe = describe,
                             .load = Qwen35::load};

}  // namespace replayssm
