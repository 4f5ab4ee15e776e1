#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <limits>

#include "model/model.h"
#include "report.h"
#include "runtime/draft/mtp_draft.h"
#include "runtime/engine.h"

namespace replayssm::app {
namespace {

/// "8GiB", "500MB", "1073741824": bytes.
Result<std::size_t> parse_bytes(const std::string& text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  const std::string unit(rest, end);
  const std::pair<const char*, double> units[] = {
      {"", 1},      {"B", 1},        {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},
      {"TB", 1e12}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  for (const auto& [name, factor] : units) {
    if (error == std::errc() && unit == name && value * factor >= 1 && value * factor < 0x1p62) {
      return static_cast<std::size_t>(value * factor);
    }
  }
  return invalid_argument("--memory is '", text,
                          "', expected a size such as 8GiB, 500MB or a number of bytes");
}

struct Sizes {
  SequenceBytes f32;
  std::size_t state_bf16 = 0;
  std::size_t conv = 0;  // width - 1 columns in bf16, as serving engines keep them
  std::size_t mtp_kv_per_token = 0;
};

Result<Sizes> sizes(const ModelDescription& model, EngineOptions options) {
  Sizes out;
  RSSM_ASSIGN_OR_RETURN(out.f32, sequence_bytes(model, options));
  options.state = DType::kBF16;
  RSSM_ASSIGN_OR_RETURN(const SequenceBytes bf16, sequence_bytes(model, options));
  out.state_bf16 = bf16.state.checkpoint;
  if (model.mtp_layers > 0) {
    out.mtp_kv_per_token = KvCache::bytes_per_token(kv_options(model, MtpDraftOptions{}));
  }
  for (const LayerSpec& layer : model.ssm_layers) {
    out.conv += static_cast<std::size_t>((layer.conv.width - 1) * layer.conv.channels) *
                size_of(DType::kBF16);
  }
  return out;
}

}  // namespace

Status check(const InspectCommand& command) {
  return command.memory ? parse_bytes(*command.memory).status() : Status();
}

Status run(const InspectCommand& command) {
  std::size_t memory = 0;  // not asked
  if (command.memory) {
    RSSM_ASSIGN_OR_RETURN(memory, parse_bytes(*command.memory));
  }
  RSSM_ASSIGN_OR_RETURN(const ModelDescription model, describe_model(command.common.folder));
  EngineOptions options;
  options.window = command.window;
  options.draft_capacity = command.draft;
  options.context = command.context;
  RSSM_ASSIGN_OR_RETURN(const Sizes size, sizes(model, options));
  const std::size_t per_sequence = size.f32.total(command.context);
  const std::size_t sequences = memory / per_sequence;

  if (command.common.json) {
    Json json;
    json["model_type"] = model.model_type;
    json["layers"] = {{"ssm", model.layers.ssm},
                      {"attention", model.layers.attention},
                      {"mlp", model.layers.mlp},
                      {"moe", model.layers.moe}};
    json["state_bytes"] = {{"f32", size.f32.state.checkpoint}, {"bf16", size.state_bf16}};
    json["conv_bytes"] = size.conv;
    json["window"] = command.window;
    json["draft"] = command.draft;
    json["ring_bytes"] = size.f32.state.record_ring;
    json["conv_ring_bytes"] = size.f32.state.conv_ring;
    json["ring_type"] = to_string(pool_options(model, options).activation);
    json["kv_bytes_per_token"] = size.f32.kv_per_token;
    json["kv_type"] = to_string(model.dtype);
    json["mtp_kv_bytes_per_token"] = size.mtp_kv_per_token;
    json["context"] = command.context;
    json["bytes_per_sequence"] = per_sequence;
    if (memory > 0) {
      json["memory"] = memory;
      json["sequences"] = sequences;
    }
    print_json(json);
    return {};
  }
  const auto show = [](const char* what, std::size_t bytes, const std::string& note) {
    fmt::print("{:<28} {:>14} B  {:>10}  {}\n", what, bytes, bytes_text(static_cast<double>(bytes)),
               note);
  };
  fmt::print("{}: {} SSM, {} attention, {} MLP and {} MoE blocks\n\nper sequence, all layers\n",
             model.model_type, model.layers.ssm, model.layers.attention, model.layers.mlp,
             model.layers.moe);
  show("state, f32", size.f32.state.checkpoint, "");
  show("state, bf16", size.state_bf16, "");
  show("convolution", size.conv, "last inputs in bf16, as engines without replay keep them");
  show("record ring", size.f32.state.record_ring,
       fmt::format("window {}, draft capacity {}", command.window, command.draft));
  show("convolution ring", size.f32.state.conv_ring, "");
  show("KV cache, per token", size.f32.kv_per_token, to_string(model.dtype));
  if (model.mtp_layers > 0) {
    show("MTP head's, per token", size.mtp_kv_per_token, "with --draft mtp, not counted below");
  }
  show("sequence", per_sequence,
       fmt::format("f32 state, rings, KV cache of {} tokens", command.context));
  if (memory > 0) {
    fmt::print("\n{} sequences fit into {} (weights not counted)\n", sequences,
               bytes_text(static_cast<double>(memory)));
  }
  return {};
}

}  // namespace replayssm::app
