// What a pool's memory holds, for tests that check stored states and that nothing else was written.
#pragma once

#include <algorithm>
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

/// A checkpoint as it is stored, with what is deferred in it.
inline std::vector<std::byte> checkpoint_bytes(const StatePool& pool, int layer,
                                               std::int32_t slot) {
  std::vector<std::byte> bytes = field_bytes(pool, layer, slot, "checkpoint");
  if (pool.impl().layout(layer).deferred_decay_offset() != 0) {
    const std::vector<std::byte> decays = field_bytes(pool, layer, slot, "deferred_decay");
    bytes.insert(bytes.end(), decays.begin(), decays.end());
  }
  return bytes;
}

/// What a page's stored state is to be multiplied by (ops/deferred_decay.h), each for as
/// many elements as the next; one of 1 where nothing is deferred.
inline std::vector<float> deferred_decays(const PageLayout& layout, const std::byte* page) {
  const std::size_t offset = layout.deferred_decay_offset();
  if (offset == 0) return {1.0f};
  const Field& f = layout.field("deferred_decay");
  std::vector<float> out(f.bytes() / sizeof(float));
  std::memcpy(out.data(), page + f.offset, f.bytes());
  return out;
}
template <typename T>
void multiply_deferred(const std::vector<float>& decays, std::vector<T>& state) {
  const std::size_t each = state.size() / decays.size();
  for (std::size_t i = 0; i < state.size(); ++i) state[i] *= decays[i / each];
}

/// What a checkpoint stores (heads, head_dim, state_size), decoded.
inline std::vector<float> stored_values(const StatePool& pool, int layer, std::int32_t slot) {
  const std::vector<std::byte> page = page_bytes(pool, layer, slot);
  const PageLayout& layout = pool.impl().layout(layer);
  const Field& field = layout.field("checkpoint");
  std::vector<float> values(field.bytes() / size_of(field.dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = load_element(field.dtype, page.data() + field.offset, static_cast<std::int64_t>(i));
  }
  return values;
}

inline std::vector<float> deferred_decays(const StatePool& pool, int layer, std::int32_t slot) {
  return deferred_decays(pool.impl().layout(layer), page_bytes(pool, layer, slot).data());
}

/// The state of a checkpoint.
inline std::vector<float> checkpoint_values(const StatePool& pool, int layer, std::int32_t slot) {
  std::vector<float> values = stored_values(pool, layer, slot);
  multiply_deferred(deferred_decays(pool, layer, slot), values);
  return values;
}

/// Overwrites the checkpoint.
inline void set_checkpoint(StatePool& pool, int layer, std::int32_t slot,
                           std::span<const float> values) {
  const PageLayout& layout = pool.impl().layout(layer);
  const Field& field = layout.field("checkpoint");
  std::byte* data = pool.impl().field(layer, slot, field);
  if (const std::size_t offset = layout.deferred_decay_offset(); offset != 0) {
    auto* decays = reinterpret_cast<float*>(data + offset);
    std::fill_n(decays, layout.field("deferred_decay").bytes() / sizeof(float), 1.0f);
  }
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
