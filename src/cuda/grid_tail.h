// The end of a step's grid, which may be cut finer than the rest.
//
// When the last blocks have begun, multiprocessors run empty one after the other, for as long as a
// block takes: a twentieth of a step of many rows. Where what a block prepares is cheap, the last
// rows are cut into shorter runs and more blocks. Such a row has several places on the grid's third
// axis, where others have one.
#pragma once

#include <cstdint>
#include <limits>

#include "cuda/block_shape.h"
#include "replayssm/dtype.h"
#include "replayssm/host_device.h"

namespace replayssm::cuda {

struct GridTail {
  std::int32_t first_row = std::numeric_limits<std::int32_t>::max();  // of those cut finer
  std::int32_t parts_log2 = 0;  // of the places that each of them has

  bool empty() const { return first_row == std::numeric_limits<std::int32_t>::max(); }
  /// Extent of the third axis of a grid of `rows` rows.
  std::int64_t places(std::int64_t rows) const {
    if (first_row >= rows) return rows;
    return first_row + ((rows - first_row) << parts_log2);
  }
};

/// The last `tail_rows` of `rows` rows, of at least `parts` places each; none where a grid has no
/// room for them.
inline GridTail grid_tail(std::int64_t rows, std::int64_t tail_rows, std::int64_t parts) {
  GridTail tail;
  while ((std::int64_t{1} << tail.parts_log2) < parts) ++tail.parts_log2;
  if (rows > kMostInGrid) return {};
  tail.first_row = static_cast<std::int32_t>(rows < tail_rows ? 0 : rows - tail_rows);
  return tail.places(rows) > kMostInGrid ? GridTail{} : tail;
}

/// What a block has: one of a row's blocks, which are counted over all of the row's places.
struct GridPlace {
  std::int32_t row;
  std::int32_t block;
  bool in_tail;
};

/// `block` of the `blocks` at `place` of the grid's third axis.
RSSM_ALWAYS_INLINE RSSM_HOST_DEVICE GridPlace grid_place(const GridTail& tail, std::int32_t block,
                                                         std::int32_t place, std::int32_t blocks) {
  if (place < tail.first_row) return {place, block, false};
  const std::int32_t after = place - tail.first_row;
  const std::int32_t row = after >> tail.parts_log2;
  return {tail.first_row + row, (after - (row << tail.parts_log2)) * blocks + block, true};
}

}  // namespace replayssm::cuda
