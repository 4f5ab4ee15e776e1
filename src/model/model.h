// What the runtime knows of a model: its sizes, and a forward pass over packed rows.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "io/checkpoint.h"
#include "model/config_reader.h"
#include "replayssm/state_pool.h"

namespace replayssm {

/// Blocks by kind.
struct LayerCounts {
  int ssm = 0;
  int attention = 0;
  int mlp = 0;
  int moe = 0;
};

/// All that sizing needs, from config.json alone.
struct ModelDescription {
  std::string model_type;
  LayerCounts layers;
  std::vector<LayerSpec> ssm_layers;  // in order
  std::int64_t kv_heads = 0;
  std::int64_t kv_head_dim = 0;
  DType dtype = DType::kBF16;  // of the weights as published, and of the KV cache
  std::int64_t hidden_size = 0;
  std::int64_t vocab_size = 0;
  std::int64_t max_position = 0;  // longest context trained for; 0: unknown
  std::int64_t mtp_layers = 0;    // of the multi-token-prediction head; 0: none that can be used
  std::optional<std::int32_t> bos;
  std::vector<std::int32_t> eos;
};

/// Tokens of a forward pass: rows ascending and disjoint, covering [0, tokens.size()).
struct ForwardInput {
  std::span<const ForwardRow> rows;
  std::span<const std::int32_t> tokens;
  /// Of each row, how many of its last tokens need logits.
  std::span<const std::int64_t> logit_counts;
};

struct ForwardOutput {
  TensorView logits;  // (sum of logit_counts, vocab_size) f32, in row order
  /// (tokens, hidden_size) f32: what logits are computed from, after the final norm, of every
  /// token. Empty: not wanted.
  TensorView hidden;
};

/// A multi-token-prediction head: from the hidden state of a token and the token after it, it
/// predicts the one after both. Its attention has keys and values of its own: one layer, with the
/// model's number of KV heads and their dimension.
class MtpHead {
 public:
  virtual ~MtpHead() = default;

  /// Of the model it belongs to.
  virtual const ModelDescription& description() const = 0;

  /// Runs rows of pairs. input.tokens[i] is the token after the one that hidden[i] is of; positions
  /// are places in `cache`, of which only differences matter. hidden (tokens, hidden_size) f32: the
  /// model's, or what the head itself put out for the pair before. See ForwardOutput; the outputs
  /// overlap no input.
  virtual Status forward(Backend& backend, KvCache& cache, const ForwardInput& input,
                         const TensorView& hidden, const ForwardOutput& out) = 0;
};

class Model {
 public:
  virtual ~Model() = default;

  virtual const ModelDescription& description() const = 0;

  /// Says whose states a saved one is: the model type and a fingerprint of the weights.
  const std::string& id() const { return id_; }
  void set_id(std::string id) { id_ = std::move(id); }

  /// Hands the pool what its layers need beyond geometry.
  virtual Status bind(StatePool& pool) const = 0;

  /// Runs all layers for one step. On failure the step cannot be committed.
  virtual Status forward(Backend& backend, StatePool& pool, Step& step, KvCache& cache,
                         const ForwardInput& input, const ForwardOutput& out) = 0;

  /// The model's multi-token-prediction head, read from its checkpoint now: plain decoding does
  /// not need it, and copies without it are common. Refuses a model that has none, by name, and a
  /// head of which a tensor is missing, has another shape or is not known, by the tensor's.
  virtual Result<std::unique_ptr<MtpHead>> load_mtp_head(Backend& backend) const;

 private:
  std::string id_;
};

/// One architecture: how to read its configuration and its weights.
struct ModelFamily {
  const char* model_type;
  const char* text_model_type = nullptr;  // where the text model's configuration is on its own
  Result<ModelDescription> (*describe)(ConfigReader& config);
  Result<std::unique_ptr<Model>> (*load)(ConfigReader& config,
                                         std::shared_ptr<const Checkpoint> weights,
                                         Backend& backend);
};

/// The family of a configuration's model_type; kUnsupported naming it and what is supported.
Result<const ModelFamily*> find_family(ConfigReader& config);

/// A Hugging Face model folder's config.json, with end-of-text tokens from generation_config.json
/// where present.
Result<ModelDescription> describe_model(const std::string& folder);

/// Called with bytes read and in all.
using LoadProgress = std::function<void(std::uint64_t done, std::uint64_t total)>;

/// Reads config.json, maps the weights and brings them into memory.
Result<std::unique_ptr<Model>> load_model(const std::string& folder, Backend& backend,
                                          const LoadProgress& progress = {});

}  // namespace replayssm
