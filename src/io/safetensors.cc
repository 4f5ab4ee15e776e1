#include "io/safetensors.h"

#include <simdjson.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "io/quote.h"

namespace replayssm {

namespace {

namespace dom = simdjson::dom;

constexpr std::size_t kLengthBytes = 8;
constexpr std::string_view kMetadataKey = "__metadata__";
constexpr std::string_view kGitLfsPointer = "version https://git-lfs";

struct FormatDType {
  std::string_view name;
  std::int64_t bits;
  std::optional<DType> dtype;
};

// Every dtype of the format. Only those that DType has can be viewed.
constexpr std::array<FormatDType, 20> kFormatDTypes = {{
    {"F64", 64, DType::kF64},     {"F32", 32, DType::kF32},     {"F16", 16, DType::kF16},
    {"BF16", 16, DType::kBF16},   {"I64", 64, DType::kI64},     {"I32", 32, DType::kI32},
    {"I16", 16, std::nullopt},    {"I8", 8, std::nullopt},      {"U64", 64, std::nullopt},
    {"U32", 32, std::nullopt},    {"U16", 16, std::nullopt},    {"U8", 8, DType::kU8},
    {"BOOL", 8, std::nullopt},    {"C64", 64, std::nullopt},    {"F8_E4M3", 8, std::nullopt},
    {"F8_E5M2", 8, std::nullopt}, {"F8_E8M0", 8, std::nullopt}, {"F6_E2M3", 6, std::nullopt},
    {"F6_E3M2", 6, std::nullopt}, {"F4", 4, std::nullopt},
}};

std::string dtype_list(bool viewable_only) {
  std::string out;
  for (const FormatDType& entry : kFormatDTypes) {
    if (viewable_only && !entry.dtype) continue;
    if (!out.empty()) out += ", ";
    out += entry.name;
  }
  return out;
}

const FormatDType* find_dtype(std::string_view name) {
  const auto* found = std::find_if(kFormatDTypes.begin(), kFormatDTypes.end(),
                                   [&](const FormatDType& entry) { return entry.name == name; });
  return found == kFormatDTypes.end() ? nullptr : found;
}

/// What a JSON value is, for "found ...". Cut, because a value may be as long as the header.
std::string json_text(dom::element value) {
  constexpr std::size_t kMaxBytes = 80;
  switch (value.type()) {
    case dom::element_type::ARRAY:
      return "an array";
    case dom::element_type::OBJECT:
      return "an object";
    case dom::element_type::STRING: {
      std::string_view text;
      if (value.get(text) != simdjson::SUCCESS) return "a string";
      return quote(text.substr(0, kMaxBytes));
    }
    default:
      return simdjson::minify(value);
  }
}

/// One tensor's entry of the header, with what the messages about it have in common.
class EntryParser {
 public:
  EntryParser(std::string_view file, std::string_view name, std::span<const std::byte> data)
      : file_(file), name_(name), data_(data) {}

  Result<TensorInfo> parse(dom::element value) {
    RSSM_RETURN_IF_ERROR(collect(value));
    TensorInfo tensor;
    tensor.name = name_;
    tensor.file = file_;
    RSSM_RETURN_IF_ERROR(parse_dtype(tensor));
    RSSM_RETURN_IF_ERROR(parse_shape(tensor));
    RSSM_RETURN_IF_ERROR(parse_offsets(tensor));
    return tensor;
  }

 private:
  struct Field {
    std::string_view key;
    std::optional<dom::element> value;
  };

  template <typename... Args>
  Status bad(const Args&... args) const {
    return data_loss(file_, ": tensor ", quote(name_), ": found ", args...);
  }

  Status collect(dom::element value) {
    dom::object object;
    if (value.get(object) != simdjson::SUCCESS) {
      return bad(json_text(value), ", expected an object");
    }
    for (const dom::key_value_pair member : object) {
      for (Field* field : {&dtype_, &shape_, &offsets_}) {
        if (member.key != field->key) continue;
        if (field->value) return bad("key ", quote(field->key), " twice, expected it once");
        field->value = member.value;
      }
    }
    for (const Field* field : {&dtype_, &shape_, &offsets_}) {
      if (!field->value) {
        return bad("no ", quote(field->key),
                   ", expected \"dtype\", \"shape\" and \"data_offsets\"");
      }
    }
    return {};
  }

  Status parse_dtype(TensorInfo& tensor) {
    std::string_view text;
    if (dtype_.value->get(text) != simdjson::SUCCESS) {
      return bad("dtype ", json_text(*dtype_.value), ", expected a string");
    }
    const FormatDType* entry = find_dtype(text);
    if (entry == nullptr) {
      return unsupported(file_, ": tensor ", quote(name_), ": found dtype ", quote(text),
                         ", expected one of ", dtype_list(false));
    }
    tensor.dtype_name = text;
    tensor.dtype = entry->dtype;
    bits_ = entry->bits;
    return {};
  }

  Status parse_shape(TensorInfo& tensor) {
    dom::array extents;
    if (shape_.value->get(extents) != simdjson::SUCCESS) {
      return bad("shape ", json_text(*shape_.value), ", expected an array of integers");
    }
    for (const dom::element element : extents) {
      std::int64_t extent = 0;
      if (element.get(extent) != simdjson::SUCCESS || extent < 0) {
        return bad("extent ", json_text(element), " in shape, expected an integer from 0 to ",
                   std::numeric_limits<std::int64_t>::max());
      }
      tensor.shape.push_back(extent);
    }
    // An extent of 0 hides no overflow: strides are products of a part of the extents.
    std::int64_t product = 1;
    for (const std::int64_t extent : tensor.shape) {
      if (extent == 0) continue;
      if (product > std::numeric_limits<std::int64_t>::max() / extent) {
        return bad("shape ", shape_text(tensor.shape), ", expected a product of at most ",
                   std::numeric_limits<std::int64_t>::max());
      }
      product *= extent;
    }
    return {};
  }

  Status parse_offsets(TensorInfo& tensor) {
    dom::array pair;
    if (offsets_.value->get(pair) != simdjson::SUCCESS) {
      return bad("data_offsets ", json_text(*offsets_.value), ", expected two integers");
    }
    std::array<std::int64_t, 2> offsets{};
    std::size_t count = 0;
    for (const dom::element element : pair) {
      std::int64_t offset = 0;
      if (element.get(offset) != simdjson::SUCCESS || offset < 0) {
        return bad("data offset ", json_text(element), ", expected an integer from 0 to ",
                   std::numeric_limits<std::int64_t>::max());
      }
      if (count < offsets.size()) offsets[count] = offset;
      ++count;
    }
    if (count != offsets.size()) return bad(count, " data_offsets, expected 2");
    const auto begin = static_cast<std::uint64_t>(offsets[0]);
    const auto end = static_cast<std::uint64_t>(offsets[1]);
    if (begin > end) {
      return bad("data_offsets ", shape_text(offsets), ", expected begin at most end");
    }
    if (end > data_.size()) {
      return bad("data_offsets ", shape_text(offsets), ", expected an end of at most ",
                 data_.size(), ", the size of the data section (is the file truncated?)");
    }
    RSSM_RETURN_IF_ERROR(check_length(tensor, end - begin));
    tensor.data =
        data_.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
    return {};
  }

  Status check_length(const TensorInfo& tensor, std::uint64_t length) const {
    const std::int64_t numel = tensor.numel();
    if (numel > std::numeric_limits<std::int64_t>::max() / bits_) {
      return bad(length, " bytes, expected ", numel, " elements of ", bits_, " bits for ",
                 tensor.dtype_name, " ", shape_text(tensor.shape));
    }
    const std::int64_t bits = numel * bits_;
    if (bits % 8 != 0) {
      return bad(tensor.dtype_name, " ", shape_text(tensor.shape), " of ", bits,
                 " bits, expected whole bytes");
    }
    if (length != static_cast<std::uint64_t>(bits / 8)) {
      return bad(length, " bytes, expected ", bits / 8, " for ", tensor.dtype_name, " ",
                 shape_text(tensor.shape));
    }
    return {};
  }

  std::string_view file_;
  std::string_view name_;
  std::span<const std::byte> data_;
  Field dtype_{"dtype", {}};
  Field shape_{"shape", {}};
  Field offsets_{"data_offsets", {}};
  std::int64_t bits_ = 0;
};

Status parse_metadata(std::string_view file, dom::element value,
                      std::map<std::string, std::string>& metadata) {
  dom::object object;
  if (value.get(object) != simdjson::SUCCESS) {
    return data_loss(file, ": ", kMetadataKey, ": found ", json_text(value),
                     ", expected an object of strings");
  }
  for (const dom::key_value_pair member : object) {
    std::string_view text;
    if (member.value.get(text) != simdjson::SUCCESS) {
      return data_loss(file, ": ", kMetadataKey, ": key ", quote(member.key), ": found ",
                       json_text(member.value), ", expected a string");
    }
    if (!metadata.emplace(member.key, text).second) {
      return data_loss(file, ": ", kMetadataKey, ": found key ", quote(member.key),
                       " twice, expected it once");
    }
  }
  return {};
}

/// Splits the file into header and data section.
Status split(std::span<const std::byte> file, std::string_view name, std::string_view& header,
             std::span<const std::byte>& data) {
  if (file.size() < kLengthBytes) {
    return data_loss(name, ": found ", file.size(), " bytes, expected at least ", kLengthBytes,
                     " for the header length");
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
  if (text.starts_with(kGitLfsPointer)) {
    return data_loss(name,
                     ": found a Git LFS pointer, expected the safetensors file it stands for");
  }
  std::uint64_t length = 0;
  for (std::size_t i = kLengthBytes; i-- > 0;) {
    length = length << 8 | std::to_integer<std::uint64_t>(file[i]);
  }
  if (length > kMaxSafetensorsHeader) {
    return data_loss(name, ": found header length ", length, ", expected at most ",
                     kMaxSafetensorsHeader);
  }
  if (length > file.size() - kLengthBytes) {
    return data_loss(name, ": found header length ", length, ", expected at most ",
                     file.size() - kLengthBytes, ", the bytes left in the file");
  }
  header = text.substr(kLengthBytes, static_cast<std::size_t>(length));
  data = file.subspan(kLengthBytes + static_cast<std::size_t>(length));
  return {};
}

/// Checks that the tensors, in the order of their data, cover the data section exactly.
Status check_coverage(std::string_view file, std::span<const TensorInfo> tensors,
                      std::span<const std::byte> data) {
  std::vector<const TensorInfo*> order;
  order.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) order.push_back(&tensor);
  const auto begin_of = [&](const TensorInfo* tensor) { return tensor->data.data() - data.data(); };
  // Empty tensors come before the one that starts where they are, as if they were in its place.
  std::sort(order.begin(), order.end(), [&](const TensorInfo* a, const TensorInfo* b) {
    return std::pair(begin_of(a), a->data.size()) < std::pair(begin_of(b), b->data.size());
  });
  std::ptrdiff_t covered = 0;
  const TensorInfo* last = nullptr;
  const auto where = [&] {
    return last == nullptr ? std::string("the start of the data section")
                           : "the end of tensor " + quote(last->name);
  };
  for (const TensorInfo* tensor : order) {
    const std::ptrdiff_t begin = begin_of(tensor);
    if (begin != covered) {
      return data_loss(file, ": tensor ", quote(tensor->name), ": found data at offset ", begin,
                       ", expected ", covered, ", ", where(),
                       begin < covered ? " (tensors overlap)" : " (a hole between tensors)");
    }
    covered += static_cast<std::ptrdiff_t>(tensor->data.size());
    last = tensor;
  }
  if (static_cast<std::size_t>(covered) != data.size()) {
    return data_loss(file, ": found a data section of ", data.size(), " bytes, expected ", covered,
                     ", ", where(), " (trailing bytes)");
  }
  return {};
}

}  // namespace

std::int64_t TensorInfo::numel() const {
  std::int64_t product = 1;
  for (const std::int64_t extent : shape) product *= extent;
  return product;
}

const TensorInfo* find_tensor(std::span<const TensorInfo> sorted_tensors, std::string_view name) {
  const auto found = std::lower_bound(
      sorted_tensors.begin(), sorted_tensors.end(), name,
      [](const TensorInfo& tensor, std::string_view wanted) { return tensor.name < wanted; });
  return found != sorted_tensors.end() && found->name == name ? &*found : nullptr;
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  return find_tensor(tensors, name);
}

Result<SafetensorsFile> parse_safetensors(std::span<const std::byte> file, std::string_view name) {
  std::string_view header;
  std::span<const std::byte> data;
  RSSM_RETURN_IF_ERROR(split(file, name, header, data));

  // simdjson reads past the end of its input, hence the padded copy.
  dom::parser parser;
  dom::element root;
  const simdjson::padded_string padded(header);
  if (const auto error = parser.parse(padded).get(root); error != simdjson::SUCCESS) {
    return data_loss(
        name, ": found a header of ", header.size(),
        " bytes that is not JSON, expected a JSON object: ", simdjson::error_message(error));
  }
  dom::object object;
  if (root.get(object) != simdjson::SUCCESS) {
    return data_loss(name, ": found ", json_text(root), " as header, expected a JSON object");
  }
  if (header.front() != '{') {
    return data_loss(name, ": found a header that begins with ", quote(header.substr(0, 1)),
                     ", expected \"{\"");
  }

  SafetensorsFile result;
  bool has_metadata = false;
  for (const dom::key_value_pair member : object) {
    if (member.key == kMetadataKey) {
      if (std::exchange(has_metadata, true)) {
        return data_loss(name, ": found ", kMetadataKey, " twice, expected it once");
      }
      RSSM_RETURN_IF_ERROR(parse_metadata(name, member.value, result.metadata));
      continue;
    }
    RSSM_ASSIGN_OR_RETURN(TensorInfo tensor,
                          EntryParser(name, member.key, data).parse(member.value));
    result.tensors.push_back(std::move(tensor));
  }
  std::sort(result.tensors.begin(), result.tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  const auto twin =
      std::adjacent_find(result.tensors.begin(), result.tensors.end(),
                         [](const TensorInfo& a, const TensorInfo& b) { return a.name == b.name; });
  if (twin != result.tensors.end()) {
    return data_loss(name, ": tensor ", quote(twin->name), ": found twice, expected it once");
  }
  RSSM_RETURN_IF_ERROR(check_coverage(name, result.tensors, data));
  return result;
}

Result<TensorView> as_view(const TensorInfo& tensor) {
  if (!tensor.dtype) {
    return unsupported(tensor.file, ": tensor ", quote(tensor.name), ": found dtype ",
                       tensor.dtype_name, ", expected one of ", dtype_list(true));
  }
  if (tensor.shape.size() > TensorView::kMaxRank) {
    return unsupported(tensor.file, ": tensor ", quote(tensor.name), ": found rank ",
                       tensor.shape.size(), ", expected at most ", TensorView::kMaxRank);
  }
  const std::size_t alignment = size_of(*tensor.dtype);
  const std::size_t excess = reinterpret_cast<std::uintptr_t>(tensor.data.data()) % alignment;
  if (!tensor.data.empty() && excess != 0) {
    return unsupported(tensor.file, ": tensor ", quote(tensor.name), ": found data ", excess,
                       " bytes past a multiple of ", alignment, ", expected ", tensor.dtype_name,
                       " data aligned to ", alignment, " bytes");
  }
  TensorView view;
  view.data = const_cast<std::byte*>(tensor.data.data());  // ops document which operands they write
  view.dtype = *tensor.dtype;
  view.rank = static_cast<int>(tensor.shape.size());
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.shape[i] = tensor.shape[i];
    view.strides[i] = stride;
    stride *= view.shape[i];
  }
  return view;
}

}  // namespace replayssm
