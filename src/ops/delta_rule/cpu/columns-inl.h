// How the delta rule's kernels walk a head's state: in blocks of columns (of value_dim) that stay
// in L1. Within a block, rows (of key_dim) are contiguous or nearly so, and every column is a lane,
// so that products S^T x need no horizontal sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/simd/vec.h"
#include "ops/delta_rule/cpu/kernel.h"
#include "ops/delta_rule/shape.h"

namespace replayssm::cpu::delta {

inline constexpr int kMaxLive = ReplayLimits::kMaxWindow;
inline constexpr int kMaxTokens = ReplayLimits::kMaxDraftCapacity;
inline constexpr int kMaxKeyDim = 256;
inline constexpr int kMaxValueDim = 256;

/// Columns held in registers; divides a tile.
template <typename Isa>
inline constexpr std::int64_t kBlock = 2 * Vec<Isa>::kLanes;

/// N vectors of columns. Widths are multiples of 8, so the last vector may be half a 512-bit one.
template <typename Isa, int kVectors, bool kPartial>
struct Columns {
  using V = Vec<Isa>;
  static constexpr int N = kVectors;
  static constexpr int kRest = 8;
  static constexpr int kWidth = kPartial ? (N - 1) * V::kLanes + kRest : N * V::kLanes;

  template <typename T>
  static V load(const T* p, int i) {
    if constexpr (kPartial) {
      if (i == N - 1) return V::load_partial(p + i * V::kLanes, kRest);
    }
    return V::load(p + i * V::kLanes);
  }
  template <typename T>
  static void store(V x, T* p, int i) {
    if constexpr (kPartial) {
      if (i == N - 1) {
        x.store_partial(p + i * V::kLanes, kRest);
        return;
      }
    }
    x.store(p + i * V::kLanes);
  }
};

/// A block's place: its first column, the offset of (row 0, that column) in the head's state, and
/// the elements from row to row.
struct BlockPlace {
  std::int64_t column;
  std::int64_t offset;
  std::int64_t pitch;
};

/// f(Columns, BlockPlace) for every block of columns, in the order of memory.
template <typename Isa, typename F>
void for_each_block(const DeltaRuleTask& task, F f) {
  constexpr int kLanes = Vec<Isa>::kLanes;
  static_assert(kDeltaRuleTile % kBlock<Isa> == 0);
  for (std::int64_t tile = 0; tile < task.value_dim; tile += kDeltaRuleTile) {
    const std::int64_t rest = task.value_dim - tile;
    const std::int64_t pitch = rest < kDeltaRuleTile ? rest : kDeltaRuleTile;
    for (std::int64_t c = 0; c < pitch; c += kBlock<Isa>) {
      const std::int64_t width = pitch - c;
      const BlockPlace place{tile + c, tile * task.key_dim + c, pitch};
      if (width >= kBlock<Isa>) {
        f(Columns<Isa, 2, false>{}, place);
      } else if constexpr (kLanes > 8) {
        if (width > kLanes) {
          f(Columns<Isa, 2, true>{}, place);
        } else if (width == kLanes) {
          f(Columns<Isa, 1, false>{}, place);
        } else {
          f(Columns<Isa, 1, true>{}, place);
        }
      } else {
        f(Columns<Isa, 1, false>{}, place);
      }
    }
  }
}

/// Asks for the lines from `p` on, into L2 only: a miss that is to fill L1 holds one of the few
/// buffers that loads need as well, until memory answers. Inlined by force, as must be all that
/// only prefetches: GCC takes a function that does nothing else for one without effects, and drops
/// its calls.
RSSM_ALWAYS_INLINE void prefetch_lines(const void* p, std::int64_t bytes) {
  constexpr int kRead = 0;
  constexpr int kIntoL2 = 2;
  for (std::int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(static_cast<const std::byte*>(p) + i, kRead, kIntoL2);
  }
}

/// Asks for the same row of the next tile, while arithmetic on this one leaves memory idle. Heads
/// follow one another, so past the last tile this is the next head's; past the last head it is a
/// harmless hint.
template <typename C, typename T>
RSSM_ALWAYS_INLINE void prefetch_next_tile(const T* row, std::int64_t pitch, std::int64_t key_dim) {
  prefetch_lines(row + key_dim * pitch, C::N * C::V::kLanes * static_cast<std::int64_t>(sizeof(T)));
}

}  // namespace replayssm::cpu::delta
