// What ops and the pool's own translation units see of a StatePool.
#pragma once

#include <memory>
#include <vector>

#include "replayssm/state_pool.h"
#include "state/layout.h"

namespace replayssm {

enum class SlotCondition : std::uint8_t { kFree, kReady, kInStep, kInvalid };

struct StatePool::Impl {
  struct Slot {
    Cursor cursor;
    SlotCondition condition = SlotCondition::kFree;
    std::uint64_t generation = 0;  // of the step that holds it, or of its last change of hands
  };

  /// Address of a field of a page.
  std::byte* field(int layer, std::int64_t slot, const Field& f) {
    return base + layer_offset[static_cast<std::size_t>(layer)] +
           static_cast<std::size_t>(slot) * stride[static_cast<std::size_t>(layer)] + f.offset;
  }
  const std::byte* field(int layer, std::int64_t slot, const Field& f) const {
    return const_cast<Impl*>(this)->field(layer, slot, f);
  }
  const RecurrenceShape& recurrence(int layer) const {
    return options.layers[static_cast<std::size_t>(layer)].recurrence;
  }
  const PageLayout& layout(int layer) const { return layouts[static_cast<std::size_t>(layer)]; }

  Status check_layer(int layer) const;
  Status check_slot(std::int32_t slot) const;
  /// kReady, or the reason why not.
  Status check_ready(std::int32_t slot) const;
  Status check_rewind(std::int32_t slot, std::int64_t position, const char* what) const;
  /// The step is one of this pool and has not ended; its slots may have left it.
  Status check_open(const Step& step) const;
  /// The row's slot is still inside the step.
  bool holds(const Step& step, const StepRow& row) const;
  /// check_open, and the step holds every slot of its rows.
  Status check_current(const Step& step) const;
  /// What a fold of the layer's records needs besides the records.
  Status check_parameters(int layer) const;

  /// The layer's shape if it exists and is of this family.
  template <typename Shape>
  Result<const Shape*> shape_of(int layer, const char* family) const {
    RSSM_RETURN_IF_ERROR(check_layer(layer));
    const Shape* shape = std::get_if<Shape>(&recurrence(layer));
    if (shape == nullptr) {
      return failed_precondition("layer ", layer, " is a ", family_name(recurrence(layer)),
                                 " layer, expected ", family);
    }
    return shape;
  }

  /// An op's right to run: the layer exists and has the part, the step is current, and the part has
  /// not run in this step. `token_rows` is the shortest operand's extent.
  Status enter(const Step& step, int layer, Step::LayerPart part, std::int64_t token_rows) const;
  static void leave(Step& step, int layer, Step::LayerPart part) {
    step.done_[static_cast<std::size_t>(layer)] |= part;
  }
  static constexpr Step::LayerPart kConvPart = Step::kConv;
  static constexpr Step::LayerPart kRecurrencePart = Step::kRecurrence;

  /// Unique among all pools of the process, so that a step is never mistaken for another pool's.
  static std::uint64_t next_generation();

  /// Gives `slot` a new sequence: the only place a slot becomes ready from scratch.
  void restart(std::int32_t slot, const Cursor& cursor);
  void poison_slot(std::int32_t slot);
  /// Poisons ring places that hold no entry of the slot's live range.
  void poison_unused(std::int32_t slot);
  /// Copies ring entries [first, last) from one slot to another within this pool.
  void copy_entries(int layer, const Field& f, std::int32_t src, std::int32_t dst,
                    std::int64_t first, std::int64_t last);
  /// First position whose convolution input is kept for a sequence at `cursor`.
  std::int64_t conv_first(int layer, const Cursor& cursor) const;

  StatePoolOptions options;
  std::vector<PageLayout> layouts;
  std::vector<std::size_t> layer_offset;  // bytes, of slot 0's page
  std::vector<std::size_t> stride;        // bytes between a layer's pages
  std::vector<Slot> slots;
  std::vector<std::vector<float>> mamba2_a;  // by layer; empty: not set, or another family
  std::byte* base = nullptr;
  std::shared_ptr<std::byte> owned;
  StateTraffic traffic;
};

}  // namespace replayssm
