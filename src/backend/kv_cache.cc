#include "backend/kv_cache.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <limits>

namespace replayssm {
namespace {

Result<std::byte*> reserve(std::size_t bytes) {
  // Not counted against the machine's memory until touched, so that a pool may be as large as its
  // longest sequences could ever need.
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    return resource_exhausted("KV cache: cannot reserve ", bytes,
                              " bytes of address space: ", std::strerror(errno));
  }
  return static_cast<std::byte*>(p);
}

}  // namespace

void KvCache::Unmap::operator()(std::byte* p) const { ::munmap(p, bytes); }

Result<KvCache> KvCache::create(const KvCacheOptions& options) {
  if (options.dtype != DType::kF32 && options.dtype != DType::kBF16 &&
      options.dtype != DType::kF16) {
    return unsupported("KV cache: dtype ", to_string(options.dtype), ", expected f32, bf16 or f16");
  }
  const struct {
    const char* name;
    std::int64_t value;
  } extents[] = {{"layers", options.layers},
                 {"slots", options.slots},
                 {"capacity", options.capacity},
                 {"kv_heads", options.kv_heads},
                 {"head_dim", options.head_dim}};
  KvCache cache;
  cache.options_ = options;
  if (options.layers == 0) return cache;  // a model without attention
  auto bytes = static_cast<std::int64_t>(size_of(options.dtype));
  for (const auto& extent : extents) {
    if (extent.value < 1) {
      return invalid_argument("KV cache: ", extent.name, " is ", extent.value,
                              ", expected at least 1");
    }
    if (__builtin_mul_overflow(bytes, extent.value, &bytes)) {
      return resource_exhausted("KV cache: ", options.layers, " layers x ", options.slots,
                                " slots x ", options.capacity, " tokens x ", options.kv_heads,
                                " heads x ", options.head_dim, " x ", size_of(options.dtype),
                                " bytes exceeds the limit of ",
                                std::numeric_limits<std::int64_t>::max(), " bytes");
    }
  }
  const auto size = static_cast<std::size_t>(bytes);
  RSSM_ASSIGN_OR_RETURN(std::byte* const keys, reserve(size));
  cache.keys_ = Storage(keys, Unmap{size});
  RSSM_ASSIGN_OR_RETURN(std::byte* const values, reserve(size));
  cache.values_ = Storage(values, Unmap{size});
  return cache;
}

std::size_t KvCache::bytes_per_token(const KvCacheOptions& options) {
  return 2 * static_cast<std::size_t>(options.layers) * static_cast<std::size_t>(options.kv_heads) *
         static_cast<std::size_t>(options.head_dim) * size_of(options.dtype);
}

std::size_t KvCache::offset(int layer, std::int64_t slot, std::int64_t head,
                            std::int64_t position) const {
  const std::int64_t stream = (layer * options_.slots + slot) * options_.kv_heads + head;
  return static_cast<std::size_t>((stream * options_.capacity + position) * options_.head_dim) *
         size_of(options_.dtype);
}

std::byte* KvCache::key(int layer, std::int64_t slot, std::int64_t head, std::int64_t position) {
  return keys_.get() + offset(layer, slot, head, position);
}

std::byte* KvCache::value(int layer, std::int64_t slot, std::int64_t head, std::int64_t position) {
  return values_.get() + offset(layer, slot, head, position);
}

const std::byte* KvCache::key(int layer, std::int64_t slot, std::int64_t head,
                              std::int64_t position) const {
  return keys_.get() + offset(layer, slot, head, position);
}

const std::byte* KvCache::value(int layer, std::int64_t slot, std::int64_t head,
                                std::int64_t position) const {
  return values_.get() + offset(layer, slot, head, position);
}

}  // namespace replayssm
