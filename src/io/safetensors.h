// Reader of the safetensors format: https://github.com/huggingface/safetensors#format
//
//   8 bytes        N, the length of the header, little endian
//   N bytes        JSON: {"NAME": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
//   ...},
//                  with an optional "__metadata__" of strings, possibly padded with spaces
//   rest           the data section; offsets count from its start, and the tensors cover it exactly
//
// Nothing in a file is trusted: every refusal is one line with the file, the tensor, what was found
// and what was expected.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "replayssm/dtype.h"
#include "replayssm/status.h"
#include "replayssm/tensor.h"

namespace replayssm {

/// The reference implementation's limit on the length of the header.
inline constexpr std::uint64_t kMaxSafetensorsHeader = 100'000'000;

/// One tensor of a file. `data` has exactly the bytes that dtype and shape ask for; the format does
/// not align it.
struct TensorInfo {
  std::string name;
  std::string file;            // where it was found, for messages
  std::string dtype_name;      // as in the file: "BF16", "F8_E4M3", ...
  std::optional<DType> dtype;  // absent: the format has it, DType does not
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;

  /// Product of shape; 1 for a scalar. Never overflows for a parsed tensor.
  std::int64_t numel() const;
};

struct SafetensorsFile {
  std::vector<TensorInfo> tensors;              // sorted by name
  std::map<std::string, std::string> metadata;  // "__metadata__"

  /// Null if the file has no such tensor.
  const TensorInfo* find(std::string_view name) const;
};

/// Parses a whole file. The tensors point into `file`, which must outlive them; `name` stands for
/// the file in messages. dtypes that DType lacks (I8, BOOL, F8_E4M3, ...) are listed and become an
/// error only when used. Keys of a tensor other than the three above are ignored, as the reference
/// implementation does. Errors (kDataLoss unless said otherwise): file shorter than 8 bytes; header
/// longer than the file or than kMaxSafetensorsHeader; header that is not a JSON object in UTF-8; a
/// name or key twice; dtype that the format does not have (kUnsupported); shape that is negative or
/// whose product overflows int64; data_offsets that are not two integers 0 <= begin <= end <= size
/// of the data section; byte length other than dtype times shape; tensors that overlap or leave a
/// hole; bytes after the last tensor.
Result<SafetensorsFile> parse_safetensors(std::span<const std::byte> file, std::string_view name);

/// The tensor where it lies, densely packed, read-only. Errors (kUnsupported): dtype that DType
/// lacks, rank above TensorView::kMaxRank, data not aligned for the dtype (copy it instead).
Result<TensorView> as_view(const TensorInfo& tensor);

/// The element of `sorted_tensors` (by name) called `name`, or null.
const TensorInfo* find_tensor(std::span<const TensorInfo> sorted_tensors, std::string_view name);

}  // namespace replayssm
