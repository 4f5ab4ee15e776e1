#include "io/checkpoint.h"

#include <simdjson.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <system_error>
#include <utility>

#include "core/byte_io.h"
#include "io/file.h"
#include "io/quote.h"

namespace replayssm {

namespace {

namespace dom = simdjson::dom;

constexpr std::string_view kSingleName = "model.safetensors";
constexpr std::string_view kIndexName = "model.safetensors.index.json";
constexpr std::uint64_t kMaxIndexBytes = 100'000'000;

/// Tensor name -> shard name.
using WeightMap = std::map<std::string, std::string, std::less<>>;

std::string join(const std::string& dir, std::string_view name) {
  return (std::filesystem::path(dir) / name).string();
}

/// True also for a dangling link, so that the error names the link instead of denying it exists.
bool present(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(std::filesystem::symlink_status(path, error));
}

/// A shard lies in the folder itself: no name from the index may reach outside it, and none may
/// break the line of a message that contains its path.
bool is_plain_file_name(std::string_view name) {
  if (name.empty() || name == "." || name == "..") return false;
  return std::none_of(name.begin(), name.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x20 || byte == 0x7f || c == '/' || c == '\\';
  });
}

Result<WeightMap> read_index(const std::string& path) {
  RSSM_ASSIGN_OR_RETURN(const std::string text, read_file(path, kMaxIndexBytes));
  dom::parser parser;
  dom::element root;
  if (const auto error = parser.parse(text).get(root); error != simdjson::SUCCESS) {
    return data_loss(path, ": found ", text.size(), " bytes that are not JSON, expected a JSON ",
                     "object: ", simdjson::error_message(error));
  }
  dom::object object;
  if (root["weight_map"].get(object) != simdjson::SUCCESS) {
    return data_loss(path, ": found no object \"weight_map\", expected one from tensor to file");
  }
  WeightMap map;
  for (const dom::key_value_pair member : object) {
    std::string_view shard;
    if (member.value.get(shard) != simdjson::SUCCESS || !is_plain_file_name(shard)) {
      const bool is_string = member.value.is_string();
      return data_loss(path, ": tensor ", quote(member.key), ": found ",
                       is_string ? quote(shard) : "a value that is not a string",
                       ", expected the plain name of a file in the folder");
    }
    if (!map.emplace(member.key, shard).second) {
      return data_loss(path, ": tensor ", quote(member.key),
                       ": found twice in weight_map, expected it once");
    }
  }
  if (map.empty()) {
    return data_loss(path, ": found an empty weight_map, expected at least one tensor");
  }
  return map;
}

/// Checks that the shard has the tensors that `expected` (sorted) lists, and no others.
Status check_shard(const std::string& path, std::string_view shard, const SafetensorsFile& file,
                   std::span<const std::string_view> expected, const WeightMap& map) {
  for (const std::string_view name : expected) {
    if (file.find(name) == nullptr) {
      return data_loss(path, ": tensor ", quote(name), ": found no such tensor among ",
                       file.tensors.size(), ", expected it because ", kIndexName,
                       " places it in this file");
    }
  }
  for (const TensorInfo& tensor : file.tensors) {
    const auto entry = map.find(tensor.name);
    if (entry == map.end()) {
      return data_loss(path, ": tensor ", quote(tensor.name), ": found in this file, expected ",
                       "only tensors that the weight_map of ", kIndexName, " names");
    }
    if (entry->second != shard) {
      return data_loss(path, ": tensor ", quote(tensor.name), ": found in this file, expected ",
                       "only in ", quote(entry->second), ", where ", kIndexName, " places it");
    }
  }
  return {};
}

}  // namespace

Result<Checkpoint> Checkpoint::open(const std::string& dir) {
  std::error_code error;
  if (!std::filesystem::is_directory(dir, error)) {
    return not_found(dir, ": found no folder of this name, expected one with ", kSingleName, " or ",
                     kIndexName);
  }
  Checkpoint checkpoint;
  if (present(join(dir, kIndexName))) {
    RSSM_RETURN_IF_ERROR(checkpoint.open_sharded(dir));
  } else if (present(join(dir, kSingleName))) {
    RSSM_RETURN_IF_ERROR(checkpoint.open_single(join(dir, kSingleName)));
  } else {
    return not_found(dir, ": found no weights, expected ", kSingleName, " or ", kIndexName);
  }
  checkpoint.finish();
  return checkpoint;
}

Status Checkpoint::open_single(const std::string& path) {
  RSSM_ASSIGN_OR_RETURN(MappedFile mapping, MappedFile::open(path));
  RSSM_ASSIGN_OR_RETURN(SafetensorsFile file, parse_safetensors(mapping.bytes(), path));
  files_.push_back(std::move(mapping));
  tensors_ = std::move(file.tensors);
  return {};
}

Status Checkpoint::open_sharded(const std::string& dir) {
  const std::string index = join(dir, kIndexName);
  RSSM_ASSIGN_OR_RETURN(const WeightMap map, read_index(index));
  std::map<std::string_view, std::vector<std::string_view>> shards;  // shard -> tensors, sorted
  for (const auto& [tensor, shard] : map) shards[shard].push_back(tensor);
  if (!shards.contains(kSingleName) && present(join(dir, kSingleName))) {
    return data_loss(dir, ": found ", kSingleName, " and ", kIndexName,
                     " which does not name it, expected only one set of weights");
  }
  for (const auto& [shard, expected] : shards) {
    const std::string path = join(dir, shard);
    Result<MappedFile> mapping = MappedFile::open(path);
    if (!mapping.ok()) {
      return make_status(mapping.status().code(), mapping.status().message(), ", expected because ",
                         kIndexName, " places tensor ", quote(expected.front()), " in it");
    }
    RSSM_ASSIGN_OR_RETURN(SafetensorsFile file, parse_safetensors(mapping->bytes(), path));
    RSSM_RETURN_IF_ERROR(check_shard(path, shard, file, expected, map));
    files_.push_back(std::move(mapping).value());
    std::move(file.tensors.begin(), file.tensors.end(), std::back_inserter(tensors_));
  }
  return {};
}

void Checkpoint::finish() {
  std::sort(tensors_.begin(), tensors_.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  for (const TensorInfo& tensor : tensors_) total_bytes_ += tensor.data.size();
}

std::vector<std::string_view> Checkpoint::names() const {
  std::vector<std::string_view> names;
  names.reserve(tensors_.size());
  for (const TensorInfo& tensor : tensors_) names.push_back(tensor.name);
  return names;
}

std::uint64_t Checkpoint::fingerprint() const {
  constexpr std::size_t kSample = 1024;
  std::uint64_t hash = fnv1a({});
  for (const TensorInfo& tensor : tensors_) {
    ByteWriter head;
    head.text(tensor.name);
    head.text(tensor.dtype_name);
    for (const std::int64_t extent : tensor.shape) head.value(extent);
    hash = fnv1a(std::move(head).take(), hash);
    const std::size_t sample = std::min(kSample, tensor.data.size());
    hash = fnv1a(tensor.data.first(sample), hash);
    hash = fnv1a(tensor.data.last(sample), hash);
  }
  return hash;
}

}  // namespace replayssm
