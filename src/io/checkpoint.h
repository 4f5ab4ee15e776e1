// Checkpoint: the tensors of a model folder in the Hugging Face layout, mapped, not read.
//
//   model.safetensors              all tensors in one file, or
//   model.safetensors.index.json   {"weight_map": {"NAME": "model-00001-of-00002.safetensors",
//   ...}}
//                                  and the shards that it names
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/mapped_file.h"
#include "io/safetensors.h"
#include "replayssm/status.h"

namespace replayssm {

/// Owns the mappings that its tensors point into; moving it keeps every pointer.
class Checkpoint {
 public:
  /// Opens the folder's weights; links to files elsewhere are followed, as in a snapshot of the Hub
  /// cache. If there is an index, it is what counts: model.safetensors beside an index that does
  /// not name it is an error, because no choice between two sets of weights would be safe. Errors,
  /// each with file and tensor: no weights (kNotFound); everything parse_safetensors refuses; an
  /// index that is not JSON, has no weight_map or names a tensor twice; a shard name that is not a
  /// plain file name; a missing shard; a tensor that weight_map names but its shard lacks, or that
  /// a shard has but weight_map does not place there. The index's total_size is not checked:
  /// writers disagree on what it counts.
  static Result<Checkpoint> open(const std::string& dir);

  /// Null if no file has such a tensor.
  const TensorInfo* find(std::string_view name) const { return find_tensor(tensors_, name); }

  /// Sorted by name.
  std::span<const TensorInfo> tensors() const { return tensors_; }
  std::vector<std::string_view> names() const;

  /// Bytes of all tensors.
  std::uint64_t total_bytes() const { return total_bytes_; }

  /// Tells one model's weights from another's without reading them all: a hash of every tensor's
  /// name, type, shape, and first and last kilobyte. Does not depend on the folder or the shards.
  std::uint64_t fingerprint() const;

 private:
  Checkpoint() = default;
  Status open_single(const std::string& path);
  Status open_sharded(const std::string& dir);
  void finish();

  std::vector<MappedFile> files_;
  std::vector<TensorInfo> tensors_;
  std::uint64_t total_bytes_ = 0;
};

}  // namespace replayssm
