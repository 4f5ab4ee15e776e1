// Weights by name, checked against the shapes a configuration asks for.
#pragma once

#include <initializer_list>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "io/checkpoint.h"
#include "replayssm/status.h"
#include "replayssm/tensor.h"

namespace replayssm {

/// A vector of weights as ops take it; empty for none.
inline TensorView vector_view(const std::vector<float>& values) {
  return values.empty() ? TensorView{}
                        : TensorView::contiguous(values.data(), DType::kF32,
                                                 {static_cast<std::int64_t>(values.size())});
}

/// Takes tensors from a checkpoint. The first one that is missing, has another shape or type is
/// remembered (see status()), so that a model reads all its weights and checks once.
class WeightReader {
 public:
  /// `prefixes`: spellings of the body's name prefix; the first one a tensor exists under is used.
  WeightReader(const Checkpoint& checkpoint, Backend& backend,
               std::initializer_list<std::string_view> prefixes);

  const Status& status() const { return status_; }
  const std::string& prefix() const { return prefix_; }

  bool has(const std::string& name) const;

  /// A matrix in its stored type (f32, bf16 or f16), placed for the backend.
  TensorView matrix(const std::string& name, std::int64_t rows, std::int64_t columns);

  /// Any tensor of this shape as f32 values.
  std::vector<float> values(const std::string& name, std::initializer_list<std::int64_t> shape);

  /// A convolution's (channels, 1, width) as f32 (width, channels), which is how the op takes it.
  std::vector<float> conv_taps(const std::string& name, const ConvShape& shape);

  /// Fails if the checkpoint holds a tensor nobody asked for whose name starts with `prefix` and
  /// with none of `ignored`.
  void check_all_used(std::string_view prefix, std::initializer_list<std::string_view> ignored);

 private:
  const TensorInfo* find(const std::string& name, std::initializer_list<std::int64_t> shape);

  const Checkpoint& checkpoint_;
  Backend& backend_;
  std::string prefix_;
  std::set<std::string, std::less<>> used_;
  Status status_;
};

}  // namespace replayssm
