#include "model/weights.h"

#include <algorithm>
#include <cstring>

#include "io/quote.h"

namespace replayssm {
namespace {

bool is_weight_type(const TensorInfo& tensor) {
  return tensor.dtype == DType::kF32 || tensor.dtype == DType::kBF16 || tensor.dtype == DType::kF16;
}

template <typename T>
void convert(const TensorInfo& tensor, std::vector<float>& out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    T x;  // the file promises no alignment
    std::memcpy(&x, tensor.data.data() + i * sizeof x, sizeof x);
    out[i] = to_float(x);
  }
}

}  // namespace

WeightReader::WeightReader(const Checkpoint& checkpoint, Backend& backend,
                           std::initializer_list<std::string_view> prefixes)
    : checkpoint_(checkpoint), backend_(backend), prefix_(*prefixes.begin()) {
  for (const std::string_view prefix : prefixes) {
    const auto tensors = checkpoint.tensors();
    if (std::any_of(tensors.begin(), tensors.end(),
                    [&](const TensorInfo& t) { return t.name.starts_with(prefix); })) {
      prefix_ = prefix;
      return;
    }
  }
}

bool WeightReader::has(const std::string& name) const { return checkpoint_.find(name) != nullptr; }

const TensorInfo* WeightReader::find(const std::string& name,
                                     std::initializer_list<std::int64_t> shape) {
  if (!status_.ok()) return nullptr;
  const std::vector<std::int64_t> expected(shape);
  const TensorInfo* tensor = checkpoint_.find(name);
  if (tensor == nullptr) {
    status_ = not_found("tensor ", name, " is missing, expected shape ", shape_text(expected));
    return nullptr;
  }
  used_.insert(name);
  if (tensor->shape != expected) {
    status_ = invalid_argument(tensor->file, ": tensor ", name, " has shape ",
                               shape_text(tensor->shape), ", expected ", shape_text(expected));
    return nullptr;
  }
  if (!is_weight_type(*tensor)) {
    status_ = unsupported(tensor->file, ": tensor ", name, " has type ", tensor->dtype_name,
                          ", expected F32, BF16 or F16");
    return nullptr;
  }
  return tensor;
}

TensorView WeightReader::matrix(const std::string& name, std::int64_t rows, std::int64_t columns) {
  const TensorInfo* tensor = find(name, {rows, columns});
  if (tensor == nullptr) return {};
  // Built here rather than through as_view: a misaligned tensor is the backend's to copy.
  const TensorView host =
      TensorView::contiguous(tensor->data.data(), *tensor->dtype, {rows, columns});
  Result<TensorView> placed = backend_.place(host);
  if (!placed.ok()) {
    status_ = make_status(placed.status().code(), "tensor ", name, ": ", placed.status().message());
    return {};
  }
  return *placed;
}

std::vector<float> WeightReader::values(const std::string& name,
                                        std::initializer_list<std::int64_t> shape) {
  const TensorInfo* tensor = find(name, shape);
  if (tensor == nullptr) return {};
  std::vector<float> out(static_cast<std::size_t>(tensor->numel()));
  if (tensor->dtype == DType::kF32) {
    convert<float>(*tensor, out);
  } else if (tensor->dtype == DType::kBF16) {
    convert<BF16>(*tensor, out);
  } else {
    convert<F16>(*tensor, out);
  }
  return out;
}

std::vector<float> WeightReader::conv_taps(const std::string& name, const ConvShape& shape) {
  const std::vector<float> stored = values(name, {shape.channels, 1, shape.width});
  std::vector<float> taps(stored.size());
  const auto channels = static_cast<std::size_t>(shape.channels);
  const auto width = static_cast<std::size_t>(shape.width);
  for (std::size_t i = 0; i < stored.size(); ++i) {
    taps[i % width * channels + i / width] = stored[i];
  }
  return taps;
}

void WeightReader::check_all_used(std::string_view prefix,
                                  std::initializer_list<std::string_view> ignored) {
  if (!status_.ok()) return;
  for (const TensorInfo& tensor : checkpoint_.tensors()) {
    if (!tensor.name.starts_with(prefix) || used_.contains(tensor.name)) continue;
    if (std::any_of(ignored.begin(), ignored.end(),
                    [&](std::string_view other) { return tensor.name.starts_with(other); })) {
      continue;
    }
    status_ = invalid_argument(tensor.file, ": tensor ", quote(tensor.name), " of shape ",
                               shape_text(tensor.shape),
                               " is not part of the model the configuration describes");
    return;
  }
}

}  // namespace replayssm
