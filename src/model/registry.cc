#include <filesystem>
#include <sstream>

#include "io/file.h"
#include "io/quote.h"
#include "model/archs.h"
#include "model/config_fields.h"
#include "model/model.h"

namespace replayssm {
namespace {

// One line per architecture. A table rather than static registration: in a static library a file
// nobody references is not linked, and its registration silently never runs.
const ModelFamily* const kFamilies[] = {&kNemotronH, &kQwen35};

constexpr std::uint64_t kMaxConfigBytes = std::uint64_t{16} << 20;

Result<ConfigReader> read_config(const std::string& path) {
  RSSM_ASSIGN_OR_RETURN(const std::string text, read_file(path, kMaxConfigBytes));
  return ConfigReader::parse(text, path);
}

Status read_end_tokens(const std::string& folder, ModelDescription& description) {
  const std::string path = folder + "/generation_config.json";
  if (!std::filesystem::exists(path)) return {};
  RSSM_ASSIGN_OR_RETURN(ConfigReader config, read_config(path));
  std::vector<std::int32_t> eos = read_token_ids(config, "eos_token_id", description.vocab_size);
  RSSM_RETURN_IF_ERROR(config.status());
  if (!eos.empty()) description.eos = std::move(eos);
  return {};
}

/// Reads a byte of every page of the weights, so that the wait for the disk happens here, where it
/// can be shown, and not inside the first token.
void touch(const Checkpoint& weights, const LoadProgress& progress) {
  constexpr std::size_t kPage = 4096;
  constexpr std::uint64_t kReport = std::uint64_t{8} << 20;
  std::uint64_t done = 0;
  std::uint64_t reported = 0;
  for (const TensorInfo& tensor : weights.tensors()) {
    for (std::size_t at = 0; at < tensor.data.size(); at += kPage) {
      static_cast<void>(*static_cast<const volatile std::byte*>(tensor.data.data() + at));
      if (progress && done + at - reported >= kReport) {
        reported = done + at;
        progress(reported, weights.total_bytes());
      }
    }
    done += tensor.data.size();
  }
  if (progress) progress(done, weights.total_bytes());
}

}  // namespace

Result<std::unique_ptr<MtpHead>> Model::load_mtp_head(Backend&) const {
  return unsupported("model_type ", description().model_type,
                     " has no multi-token-prediction head to draft with");
}

Result<const ModelFamily*> find_family(ConfigReader& config) {
  const std::string type = config.string_or("model_type", "");
  RSSM_RETURN_IF_ERROR(config.status());
  std::string known;
  for (const ModelFamily* family : kFamilies) {
    for (const char* name : {family->model_type, family->text_model_type}) {
      if (name == nullptr) continue;
      if (type == name) return family;
      known += known.empty() ? "" : ", ";
      known += name;
    }
  }
  return unsupported(config.name(), ": model_type ", type.empty() ? "is missing" : quote(type),
                     " is not supported, expected one of: ", known);
}

Result<ModelDescription> describe_model(const std::string& folder) {
  RSSM_ASSIGN_OR_RETURN(ConfigReader config, read_config(folder + "/config.json"));
  RSSM_ASSIGN_OR_RETURN(const ModelFamily* family, find_family(config));
  RSSM_ASSIGN_OR_RETURN(ModelDescription description, family->describe(config));
  RSSM_RETURN_IF_ERROR(read_end_tokens(folder, description));
  return description;
}

Result<std::unique_ptr<Model>> load_model(const std::string& folder, Backend& backend,
                                          const LoadProgress& progress) {
  RSSM_ASSIGN_OR_RETURN(ConfigReader config, read_config(folder + "/config.json"));
  RSSM_ASSIGN_OR_RETURN(const ModelFamily* family, find_family(config));
  RSSM_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::open(folder));
  auto weights = std::make_shared<const Checkpoint>(std::move(checkpoint));
  RSSM_ASSIGN_OR_RETURN(std::unique_ptr<Model> model, family->load(config, weights, backend));
  touch(*weights, progress);
  std::ostringstream id;
  id << family->model_type << '-' << std::hex << weights->fingerprint();
  model->set_id(std::move(id).str());
  return model;
}

}  // namespace replayssm
