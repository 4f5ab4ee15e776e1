// The one description of what a slot's page holds. Sizing, allocation, copy, poison, save and the
// kernels' pointers all come from here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "replayssm/state_pool.h"
#include "state/read_copy.h"

namespace replayssm {

enum class FieldKind : std::uint8_t {
  kCheckpoint,  // places == 1; a layer may have more than one, the states first
  kReadCopy,    // places == 1; made from the checkpoint
  kRecord,      // a ring over positions, window + draft_capacity places
  kConv,        // a ring over positions of raw convolution inputs
};

/// A tensor (outer, places, inner) inside a page: the entry of position p is (:, p mod places, :).
struct Field {
  const char* name = "";
  FieldKind kind = FieldKind::kCheckpoint;
  DType dtype = DType::kF32;
  std::int64_t outer = 0;
  std::int64_t places = 1;
  std::int64_t inner = 0;
  std::size_t offset = 0;  // bytes from the page's start

  /// Not a ring: one entry, which means something once a sequence has a checkpoint.
  bool is_state() const { return kind == FieldKind::kCheckpoint || kind == FieldKind::kReadCopy; }
  std::size_t inner_bytes() const { return static_cast<std::size_t>(inner) * size_of(dtype); }
  std::size_t entry_bytes() const { return static_cast<std::size_t>(outer) * inner_bytes(); }
  std::size_t bytes() const { return static_cast<std::size_t>(places) * entry_bytes(); }
};

struct PageLayout {
  std::vector<Field> fields;
  std::size_t bytes = 0;  // from the first field's start to the last one's end
  ReadCopyShape read_copy;

  const Field& field(const char* name) const;
  /// Bytes from a page's checkpoint to the decays that were deferred in it
  /// (ops/deferred_decay.h); 0 if there are none.
  std::size_t deferred_decay_offset() const;
  /// Where the read copy lies in a page; one that does not exist if the layer has none.
  ReadCopy read_copy_in(std::byte* page) const;
  std::size_t read_copy_bytes() const;
};

/// The record fields of one layer by name, each (outer, places, inner).
class RecordPointers {
 public:
  void add(const char* name, std::byte* data) { fields_[count_++] = {name, data}; }
  std::byte* at(const char* name) const {
    for (std::size_t i = 0; i < count_; ++i) {
      if (std::strcmp(fields_[i].name, name) == 0) return fields_[i].data;
    }
    return nullptr;  // unreachable: names are those of the layout
  }

 private:
  static constexpr std::size_t kMaxFields = 8;
  struct Field {
    const char* name;
    std::byte* data;
  };
  std::array<Field, kMaxFields> fields_{};
  std::size_t count_ = 0;
};

/// A page's checkpoint on a CUDA device to a saved state's order of elements, and back. Saved
/// states have the order of pages on the CPU; a recurrence whose kernels want another one on the
/// device says so here and nowhere else. `from` and `to` do not overlap.
void checkpoint_from_cuda(const RecurrenceShape& shape, const Field& field, const std::byte* from,
                          std::byte* to);
void checkpoint_to_cuda(const RecurrenceShape& shape, const Field& field, const std::byte* from,
                        std::byte* to);

/// Checks geometry, types and limits; the layouts of all layers in order.
Result<std::vector<PageLayout>> page_layouts(const StatePoolOptions& options);

/// The caller's storage holds `bytes` for the pages and is aligned.
Status check_storage(const StatePoolOptions& options, std::size_t per_slot, std::size_t bytes);

/// Bytes from one page to the next: the contents rounded up to the options' alignment.
std::size_t page_stride(const PageLayout& layout, const StatePoolOptions& options);

}  // namespace replayssm
