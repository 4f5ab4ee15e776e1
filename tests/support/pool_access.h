// What a pool's memory holds, for tests that check stored states and that nothing else was written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "replayssm/state_pool.h"
#include "state/layout.h"
#include "state/pool_impl.h"
#include "support/compare.h"
#include "support/operand.h"

namespace replayssm::testing {

/// Contents of a slot's page of a layer, without the padding up to the next one; of a device's too.
inline std::vector<std::byte> page_bytes(const StatePool& pool, int layer, std::int32_t slot) {
  const StatePool::Impl& impl = pool.impl();
  const PageLayout& layout = impl.layout(layer);
  std::vector<std::byte> page(layout.bytes);
  if (impl.gpu != nullptr) {
    EXPECT_TRUE(is_ok(impl.gpu->read_page(nullptr, layer, slot, page)));
  } else {
    const Field& first = layout.fields.front();
    std::memcpy(page.data(), impl.field(layer, slot, first) - first.offset, page.size());
  }
  return page;
}

inline std::vector<std::byte> field_bytes(const StatePool& pool, int layer, std::int32_t slot,
                                          const char* name) {
  const Field& field = pool.impl().layout(layer).field(name);
  const std::vector<std::byte> page = page_bytes(pool, layer, slot);
  const auto begin = page.begin() + static_cast<std::ptrdiff_t>(field.offset);
  return {begin, begin + static_cast<std::ptrdiff_t>(field.bytes())};
}

inline std::vector<std::byte> checkpoint_bytes(const StatePool& pool, int layer,
                                               std::int32_t slot) {
  return field_bytes(pool, layer, slot, "checkpoint");
}

/// The stored checkpoint (heads, head_dim, state_size), decoded.
inline std::vector<float> checkpoint_values(const StatePool& pool, int layer, std::int32_t slot) {
  const std::vector<std::byte> bytes = checkpoint_bytes(pool, layer, slot);
  const DType dtype = pool.options().checkpoint;
  std::vector<float> values(bytes.size() / size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = load_element(dtype, bytes.data(), static_cast<std::int64_t>(i));
  }
  return values;
}

/// Overwrites the stored checkpoint.
inline void set_checkpoint(StatePool& pool, int layer, std::int32_t slot,
                           std::span<const float> values) {
  const Field& field = pool.impl().layout(layer).field("checkpoint");
  std::byte* data = pool.impl().field(layer, slot, field);
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_element(field.dtype, data, static_cast<std::int64_t>(i), values[i]);
  }
}

/// Contents of all of a slot's pages, without the padding between pages.
inline std::vector<std::byte> slot_bytes(const StatePool& pool, std::int32_t slot) {
  std::vector<std::byte> all;
  for (int layer = 0; layer < pool.layer_count(); ++layer) {
    const std::vector<std::byte> page = page_bytes(pool, layer, slot);
    all.insert(all.end(), page.begin(), page.end());
  }
  return all;
}

inline std::vector<std::byte> pool_bytes(const StatePool& pool) {
  std::vector<std::byte> all;
  for (std::int32_t slot = 0; slot < pool.options().slots; ++slot) {
    const std::vector<std::byte> one = slot_bytes(pool, slot);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

}  // namespace replayssm::testing
