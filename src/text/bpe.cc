#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <limits>

namespace replayssm {
namespace {

constexpr std::int32_t kNoRank = std::numeric_limits<std::int32_t>::max();

/// Pieces up to this many bytes are merged by scanning for the lowest rank; longer ones use a heap.
constexpr std::size_t kShortPiece = 48;

/// One remembered piece, a cache line. Longer pieces are rare and are not remembered.
struct CacheEntry {
  static constexpr std::size_t kMaxBytes = 30;
  static constexpr std::size_t kMaxIds = 8;
  std::uint8_t length = 0;  // 0: free
  std::uint8_t count = 0;
  std::array<char, kMaxBytes> bytes{};
  std::array<std::int32_t, kMaxIds> ids{};
};
static_assert(sizeof(CacheEntry) == 64);

constexpr std::size_t kCacheEntries = 8192;

/// A merge that was possible when it was queued.
struct Candidate {
  std::int32_t rank = 0;
  std::int32_t pos = 0;
  std::int32_t left = 0;
  std::int32_t right = 0;
  std::int32_t merged = 0;
};
struct LaterCandidate {
  bool operator()(const Candidate& a, const Candidate& b) const {
    return a.rank != b.rank ? a.rank > b.rank : a.pos > b.pos;
  }
};

}  // namespace

struct Bpe::Scratch::Impl {
  std::vector<CacheEntry> cache = std::vector<CacheEntry>(kCacheEntries);
  std::vector<std::int32_t> symbols;
  // Short pieces: the rank and the result of joining symbols i and i + 1.
  std::vector<std::int32_t> ranks;
  std::vector<std::int32_t> merged;
  // Long pieces: symbols as a linked list, -1 at both ends.
  std::vector<std::int32_t> prev;
  std::vector<std::int32_t> next;
  std::vector<Candidate> heap;
};

Bpe::Scratch::Scratch() : impl_(std::make_unique<Impl>()) {}
Bpe::Scratch::~Scratch() = default;
Bpe::Scratch::Scratch(Scratch&&) noexcept = default;
Bpe::Scratch& Bpe::Scratch::operator=(Scratch&&) noexcept = default;

void Bpe::set_alphabet(const Vocab& vocab) {
  for (int byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    byte_ids_[byte] = vocab.find(std::string_view(&c, 1));
  }
}

void Bpe::reserve_merges(std::size_t merges) {
  const std::size_t slots = std::bit_ceil(std::max<std::size_t>(3 * merges / 2 + 1, 16));
  if (slots <= merges_.size()) return;
  std::vector<Merge> old(slots);
  old.swap(merges_);
  shift_ = 64 - std::countr_zero(slots);
  for (const Merge& merge : old) {
    if (merge.pair != kNoPair) merges_[slot_of(merge.pair)] = merge;
  }
}

void Bpe::add_merge(std::int32_t left, std::int32_t right, std::int32_t rank, std::int32_t merged) {
  if (3 * (merge_count_ + 1) > 2 * merges_.size()) reserve_merges(2 * (merge_count_ + 1));
  const std::uint64_t pair = pair_of(left, right);
  Merge& slot = merges_[slot_of(pair)];
  if (slot.pair == kNoPair) ++merge_count_;
  slot = {pair, rank, merged};
}

/// The slot that holds `pair`, or the free one where it belongs.
std::size_t Bpe::slot_of(std::uint64_t pair) const {
  std::size_t at = home_of(pair);
  while (merges_[at].pair != pair && merges_[at].pair != kNoPair) {
    at = (at + 1) & (merges_.size() - 1);
  }
  return at;
}

const Bpe::Merge* Bpe::find_merge(std::int32_t left, std::int32_t right) const {
  if (merges_.empty()) return nullptr;
  const Merge& merge = merges_[slot_of(pair_of(left, right))];
  return merge.pair == kNoPair ? nullptr : &merge;
}

int Bpe::encode(std::string_view piece, const Vocab& vocab, Scratch& scratch,
                std::vector<std::int32_t>* ids) const {
  if (piece.empty()) return -1;
  Scratch::Impl& s = *scratch.impl_;
  CacheEntry* entry = nullptr;
  if (piece.size() <= CacheEntry::kMaxBytes) {
    entry = &s.cache[std::hash<std::string_view>()(piece) % kCacheEntries];
    if (entry->length == piece.size() &&
        std::memcmp(entry->bytes.data(), piece.data(), piece.size()) == 0) {
      ids->insert(ids->end(), entry->ids.begin(), entry->ids.begin() + entry->count);
      return -1;
    }
  }
  const std::size_t first = ids->size();
  const std::int32_t whole = ignore_merges_ ? vocab.find(piece) : -1;
  if (whole >= 0) {
    ids->push_back(whole);
  } else {
    s.symbols.clear();
    for (const char c : piece) {
      const std::int32_t id = byte_ids_[static_cast<unsigned char>(c)];
      if (id < 0) return static_cast<unsigned char>(c);
      s.symbols.push_back(id);
    }
    if (piece.size() <= kShortPiece) {
      merge_short(s);
    } else {
      merge_long(s);
    }
    ids->insert(ids->end(), s.symbols.begin(), s.symbols.end());
  }
  const std::size_t count = ids->size() - first;
  if (entry != nullptr && count <= CacheEntry::kMaxIds) {
    entry->length = static_cast<std::uint8_t>(piece.size());
    entry->count = static_cast<std::uint8_t>(count);
    std::memcpy(entry->bytes.data(), piece.data(), piece.size());
    std::copy(ids->begin() + static_cast<std::ptrdiff_t>(first), ids->end(), entry->ids.begin());
  }
  return -1;
}

void Bpe::merge_short(Scratch::Impl& s) const {
  std::size_t count = s.symbols.size();
  s.ranks.assign(count, kNoRank);
  s.merged.assign(count, -1);
  const auto look_up = [&](std::size_t i) {
    const Merge* merge = find_merge(s.symbols[i], s.symbols[i + 1]);
    s.ranks[i] = merge == nullptr ? kNoRank : merge->rank;
    s.merged[i] = merge == nullptr ? -1 : merge->merged;
  };
  for (std::size_t i = 0; i + 1 < count; ++i) look_up(i);
  while (count > 1) {
    std::size_t best = 0;
    for (std::size_t i = 1; i + 1 < count; ++i) {
      if (s.ranks[i] < s.ranks[best]) best = i;
    }
    if (s.ranks[best] == kNoRank) break;
    s.symbols[best] = s.merged[best];
    for (std::size_t i = best + 1; i + 1 < count; ++i) {
      s.symbols[i] = s.symbols[i + 1];
      s.ranks[i] = s.ranks[i + 1];
      s.merged[i] = s.merged[i + 1];
    }
    --count;
    if (best > 0) look_up(best - 1);
    if (best + 1 < count) look_up(best);
  }
  s.symbols.resize(count);
}

void Bpe::merge_long(Scratch::Impl& s) const {
  const std::int32_t count = static_cast<std::int32_t>(s.symbols.size());
  s.prev.resize(s.symbols.size());
  s.next.resize(s.symbols.size());
  s.heap.clear();
  for (std::int32_t i = 0; i < count; ++i) {
    s.prev[i] = i - 1;
    s.next[i] = i + 1 < count ? i + 1 : -1;
  }
  const auto candidate_at = [&](std::int32_t pos) -> std::optional<Candidate> {
    const std::int32_t right = s.next[pos];
    if (right < 0) return std::nullopt;
    const Merge* merge = find_merge(s.symbols[pos], s.symbols[right]);
    if (merge == nullptr) return std::nullopt;
    return Candidate{merge->rank, pos, s.symbols[pos], s.symbols[right], merge->merged};
  };
  const auto enqueue = [&](std::int32_t pos) {
    if (const auto candidate = candidate_at(pos)) {
      s.heap.push_back(*candidate);
      std::push_heap(s.heap.begin(), s.heap.end(), LaterCandidate());
    }
  };
  for (std::int32_t i = 0; i < count; ++i) {
    if (const auto candidate = candidate_at(i)) s.heap.push_back(*candidate);
  }
  std::make_heap(s.heap.begin(), s.heap.end(), LaterCandidate());
  while (!s.heap.empty()) {
    std::pop_heap(s.heap.begin(), s.heap.end(), LaterCandidate());
    const Candidate top = s.heap.back();
    s.heap.pop_back();
    // Either symbol may have been joined to another one since.
    const std::int32_t right = s.next[top.pos];
    if (s.symbols[top.pos] != top.left || right < 0 || s.symbols[right] != top.right) continue;
    s.symbols[top.pos] = top.merged;
    s.symbols[right] = -1;
    s.next[top.pos] = s.next[right];
    if (s.next[right] >= 0) s.prev[s.next[right]] = top.pos;
    if (s.prev[top.pos] >= 0) enqueue(s.prev[top.pos]);
    enqueue(top.pos);
  }
  std::erase(s.symbols, -1);
}

}  // namespace replayssm
