// How a recurrent layer's rows become work items.
#pragma once

#include <algorithm>
#include <cstdint>

namespace replayssm {

/// Work items are (row, group, part of the group's heads). What the heads of a group share (B and
/// C, or q and k) is prepared once per item, so a group is split only to keep threads busy.
class WorkSplit {
 public:
  struct Item {
    std::int64_t group = 0;
    std::int64_t head_begin = 0;
    std::int64_t head_end = 0;
    bool first = false;  // exactly one item of a (row, group), never an empty one
  };

  WorkSplit(std::int64_t groups, std::int64_t heads_per_group, std::int64_t rows, int threads)
      : groups_(groups), heads_per_group_(heads_per_group) {
    constexpr std::int64_t kItemsPerThread = 4;
    const std::int64_t items = std::max<std::int64_t>(1, rows * groups_);
    const std::int64_t wanted = threads == 1 ? 1 : threads * kItemsPerThread;
    parts_ = std::clamp<std::int64_t>((wanted + items - 1) / items, 1, heads_per_group_);
  }

  std::int64_t items_per_row() const { return groups_ * parts_; }

  Item item(std::int64_t index) const {
    const std::int64_t part = index % parts_;
    const std::int64_t group = index / parts_;
    const std::int64_t begin = group * heads_per_group_;
    return {group, begin + heads_per_group_ * part / parts_,
            begin + heads_per_group_ * (part + 1) / parts_, part == 0};
  }

 private:
  std::int64_t groups_;
  std::int64_t heads_per_group_;
  std::int64_t parts_;
};

}  // namespace replayssm
