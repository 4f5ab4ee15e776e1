// Bpe: byte-pair encoding of one pre-token. Starting from single bytes, the adjacent pair with the
// lowest merge rank (the leftmost of equals) is joined until no pair has a merge.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "text/vocab.h"

namespace replayssm {

class Bpe {
 public:
  /// Working memory of one encoder, reused from call to call: what it remembers of recent
  /// pieces is bounded.
  class Scratch {
   public:
    Scratch();
    ~Scratch();
    Scratch(Scratch&&) noexcept;
    Scratch& operator=(Scratch&&) noexcept;

   private:
    friend class Bpe;
    struct Impl;
    std::unique_ptr<Impl> impl_;
  };

  /// Looks up the single-byte tokens; call once, when the vocabulary is complete.
  void set_alphabet(const Vocab& vocab);

  void reserve_merges(std::size_t merges);

  /// Joining `left` and `right` gives `merged`; lower ranks come first. A pair given twice keeps
  /// its later rank, as in Hugging Face tokenizers.
  void add_merge(std::int32_t left, std::int32_t right, std::int32_t rank, std::int32_t merged);

  /// Fetches what add_merge will touch, for many merges that shall not wait for memory one by one.
  void prefetch_merge(std::int32_t left, std::int32_t right) const {
    if (!merges_.empty()) __builtin_prefetch(&merges_[home_of(pair_of(left, right))]);
  }

  /// A piece that is a token as a whole is that token, whatever the merges say.
  void set_ignore_merges(bool ignore) { ignore_merges_ = ignore; }

  /// Appends the tokens of `piece`. Returns -1, or the value of a byte that has no token.
  int encode(std::string_view piece, const Vocab& vocab, Scratch& scratch,
             std::vector<std::int32_t>* ids) const;

 private:
  struct Merge {
    std::uint64_t pair = kNoPair;
    std::int32_t rank = 0;
    std::int32_t merged = -1;
  };
  static constexpr std::uint64_t kNoPair = ~0ull;
  static std::uint64_t pair_of(std::int32_t left, std::int32_t right) {
    return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32) |
           static_cast<std::uint32_t>(right);
  }

  std::size_t home_of(std::uint64_t pair) const { return (pair * 0x9E3779B97F4A7C15ull) >> shift_; }
  std::size_t slot_of(std::uint64_t pair) const;
  const Merge* find_merge(std::int32_t left, std::int32_t right) const;
  void merge_short(Scratch::Impl& scratch) const;
  void merge_long(Scratch::Impl& scratch) const;

  std::array<std::int32_t, 256> byte_ids_{};
  std::vector<Merge> merges_;  // open addressing, size a power of two, at most two thirds full
  std::size_t merge_count_ = 0;
  int shift_ = 64;  // 64 - log2(merges_.size())
  bool ignore_merges_ = false;
};

}  // namespace replayssm
