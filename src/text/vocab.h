// Vocab: the bytes of every token, by id, and the ids of model tokens, by bytes.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace replayssm {

class Vocab {
 public:
  /// Ids at or above it are refused: a corrupt id must not size a table.
  static constexpr std::int32_t kMaxTokens = 1 << 22;

  void reserve(std::size_t tokens, std::size_t bytes);

  /// Sets the bytes of `id`, which must be in [0, kMaxTokens); false when it has some already.
  bool define(std::int32_t id, std::string_view bytes);

  /// Makes a defined token findable by its bytes; false when another one has the same.
  bool index(std::int32_t id);

  /// The indexed token with these bytes, or -1.
  std::int32_t find(std::string_view bytes) const { return find(bytes, hash_of(bytes)); }

  // The same in two steps, for many look-ups that shall not wait for memory one by one.
  static std::uint32_t hash_of(std::string_view bytes) {
    return static_cast<std::uint32_t>(std::hash<std::string_view>()(bytes));
  }
  void prefetch(std::uint32_t hash) const {
    if (!slots_.empty()) __builtin_prefetch(&slots_[hash & (slots_.size() - 1)]);
  }
  std::int32_t find(std::string_view bytes, std::uint32_t hash) const;

  /// Nothing when the id is out of range or a hole.
  std::optional<std::string_view> bytes(std::int32_t id) const;

  /// One past the highest id.
  std::int32_t size() const { return static_cast<std::int32_t>(tokens_.size()); }

 private:
  struct Token {
    std::uint32_t offset = 0;
    std::uint32_t length = 0;
    bool defined = false;
  };
  /// Half a cache line. It has the beginning of the token, which mostly is all of it.
  struct alignas(32) Slot {
    static constexpr std::size_t kInline = 20;
    std::uint32_t hash = 0;
    std::int32_t id = -1;
    std::uint32_t length = 0;
    std::array<char, kInline> head{};
  };
  static_assert(sizeof(Slot) == 32);

  std::string_view view(std::int32_t id) const {
    return std::string_view(text_).substr(tokens_[id].offset, tokens_[id].length);
  }
  bool holds(const Slot& slot, std::string_view bytes, std::uint32_t hash) const;
  void grow(std::size_t tokens);

  std::string text_;
  std::vector<Token> tokens_;
  std::vector<Slot> slots_;  // open addressing, size a power of two, at most two thirds full
  std::size_t indexed_ = 0;
};

}  // namespace replayssm
