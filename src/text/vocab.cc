#include "text/vocab.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace replayssm {

void Vocab::reserve(std::size_t tokens, std::size_t bytes) {
  text_.reserve(bytes);
  tokens_.reserve(tokens);
  grow(tokens);
}

bool Vocab::define(std::int32_t id, std::string_view bytes) {
  if (id >= size()) tokens_.resize(static_cast<std::size_t>(id) + 1);
  Token& token = tokens_[id];
  if (token.defined) return false;
  token = {static_cast<std::uint32_t>(text_.size()), static_cast<std::uint32_t>(bytes.size()),
           true};
  text_.append(bytes);
  return true;
}

bool Vocab::index(std::int32_t id) {
  grow(indexed_ + 1);
  const std::string_view bytes = view(id);
  const std::uint32_t hash = hash_of(bytes);
  std::size_t at = hash & (slots_.size() - 1);
  for (; slots_[at].id >= 0; at = (at + 1) & (slots_.size() - 1)) {
    if (holds(slots_[at], bytes, hash)) return false;
  }
  Slot& slot = slots_[at];
  slot.hash = hash;
  slot.id = id;
  slot.length = static_cast<std::uint32_t>(bytes.size());
  std::copy_n(bytes.begin(), std::min(bytes.size(), Slot::kInline), slot.head.begin());
  ++indexed_;
  return true;
}

std::int32_t Vocab::find(std::string_view bytes, std::uint32_t hash) const {
  if (slots_.empty()) return -1;
  for (std::size_t at = hash & (slots_.size() - 1); slots_[at].id >= 0;
       at = (at + 1) & (slots_.size() - 1)) {
    if (holds(slots_[at], bytes, hash)) return slots_[at].id;
  }
  return -1;
}

bool Vocab::holds(const Slot& slot, std::string_view bytes, std::uint32_t hash) const {
  if (slot.hash != hash || slot.length != bytes.size()) return false;
  const std::size_t head = std::min(bytes.size(), Slot::kInline);
  if (std::memcmp(slot.head.data(), bytes.data(), head) != 0) return false;
  return head == bytes.size() || view(slot.id) == bytes;
}

std::optional<std::string_view> Vocab::bytes(std::int32_t id) const {
  if (id < 0 || id >= size() || !tokens_[id].defined) return std::nullopt;
  return view(id);
}

/// Makes room for `tokens` indexed ones.
void Vocab::grow(std::size_t tokens) {
  if (3 * tokens <= 2 * slots_.size()) return;
  std::vector<Slot> old(std::bit_ceil(std::max<std::size_t>(3 * tokens / 2 + 1, 1024)));
  old.swap(slots_);
  for (const Slot& slot : old) {
    if (slot.id < 0) continue;
    std::size_t at = slot.hash & (slots_.size() - 1);
    while (slots_[at].id >= 0) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = slot;
  }
}

}  // namespace replayssm
