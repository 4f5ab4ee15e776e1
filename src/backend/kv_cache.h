// Keys and values of the attention layers. Its length is a function of the sequence's position, so
// nothing here needs rolling back: rejected tokens are overwritten by the next step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "replayssm/dtype.h"
#include "replayssm/status.h"

namespace replayssm {

struct KvCacheOptions {
  int layers = 0;
  std::int64_t slots = 0;
  std::int64_t capacity = 0;  // tokens a slot can hold
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  DType dtype = DType::kF32;  // f32, bf16 or f16
};

/// K and V as (layers, slots, kv_heads, capacity, head_dim) each, so that what one head attends to
/// is one run of memory. Memory is reserved when created and touched as tokens arrive.
class KvCache {
 public:
  static Result<KvCache> create(const KvCacheOptions& options);

  /// Bytes one token of one sequence occupies over all layers: 2 * layers * kv_heads * head_dim *
  /// size_of(dtype).
  static std::size_t bytes_per_token(const KvCacheOptions& options);

  const KvCacheOptions& options() const { return options_; }

  /// First element of (layer, slot, head, position): head_dim elements follow; consecutive
  /// positions are adjacent.
  std::byte* key(int layer, std::int64_t slot, std::int64_t head, std::int64_t position);
  std::byte* value(int layer, std::int64_t slot, std::int64_t head, std::int64_t position);
  const std::byte* key(int layer, std::int64_t slot, std::int64_t head,
                       std::int64_t position) const;
  const std::byte* value(int layer, std::int64_t slot, std::int64_t head,
                         std::int64_t position) const;

 private:
  struct Unmap {
    std::size_t bytes;  // no initialiser: it would leave the class without a default constructor
    void operator()(std::byte* p) const;
  };
  using Storage = std::unique_ptr<std::byte[], Unmap>;

  std::size_t offset(int layer, std::int64_t slot, std::int64_t head, std::int64_t position) const;

  KvCacheOptions options_;
  Storage keys_;
  Storage values_;
};

}  // namespace replayssm
