// What ops and the pool's own translation units see of a StatePool.
#pragma once

#include <memory>
#include <vector>

#include "replayssm/state_pool.h"
#include "state/device_pool.h"
#include "state/layout.h"

namespace replayssm {

struct StatePool::Impl {
  struct Slot {
    Cursor cursor;
    SlotCondition condition = SlotCondition::kFree;
    std::uint64_t generation = 0;  // of the step that holds it, or of its last change of hands
  };

  // Public calls come in two spellings, with a CudaContext and without; both arrive here. `cuda` is
  // null for a call without one.
  Result<std::int32_t> acquire(const CudaContext* cuda);
  Status reset(const CudaContext* cuda, std::int32_t slot);
  Status release(const CudaContext* cuda, std::int32_t slot);
  Status force_flush(const CudaContext* cuda, std::int32_t slot);
  Status copy(const CudaContext* cuda, std::int32_t src, std::int32_t dst);
  Status materialize(const CpuContext& cpu, const CudaContext* cuda, std::int32_t src,
                     std::int64_t prefix, std::int32_t dst);
  Status truncate(const CudaContext* cuda, std::int32_t slot, std::int64_t position);
  Result<std::vector<std::byte>> save(const CudaContext* cuda, std::int32_t slot) const;
  Status load(const CpuContext& cpu, const CudaContext* cuda, std::int32_t slot,
              std::span<const std::byte> image);
  Result<Step> begin_step(const CudaContext* cuda, std::span<const StepRow> rows);
  Status commit(const CudaContext* cuda, Step& step, std::span<const std::int64_t> accepted);
  Status abort(const CudaContext* cuda, Step& step);

  /// The call is one for this pool's device.
  Status check_device(const CudaContext* cuda) const;
  /// A ready slot's cursor, fetched from the device if the host does not know it.
  Result<Cursor> ready_cursor(const CudaContext* cuda, std::int32_t slot) const;
  /// Every layer has run in the step.
  Status check_complete(const Step& step) const;
  /// Makes the step's rows the device's current ones if another step's have taken their place.
  Status select_rows(const CudaContext& cuda, const Step& step);

  /// Address of a slot's page, in the memory of the pool's device.
  std::byte* page(int layer, std::int64_t slot) {
    return base + layer_offset[static_cast<std::size_t>(layer)] +
           static_cast<std::size_t>(slot) * stride[static_cast<std::size_t>(layer)];
  }
  /// Address of a field of a page.
  std::byte* field(int layer, std::int64_t slot, const Field& f) {
    return page(layer, slot) + f.offset;
  }
  const std::byte* field(int layer, std::int64_t slot, const Field& f) const {
    return const_cast<Impl*>(this)->field(layer, slot, f);
  }
  ReadCopy read_copy(int layer, std::int64_t slot) {
    return layout(layer).read_copy_in(page(layer, slot));
  }
  const RecurrenceShape& recurrence(int layer) const {
    return options.layers[static_cast<std::size_t>(layer)].recurrence;
  }
  const PageLayout& layout(int layer) const { return layouts[static_cast<std::size_t>(layer)]; }

  Status check_layer(int layer) const;
  Status check_slot(std::int32_t slot) const;
  /// kReady, or the reason why not.
  Status check_ready(std::int32_t slot) const;
  Status check_rewind(std::int32_t slot, const Cursor& cursor, std::int64_t position,
                      const char* what) const;
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

  /// An op's right to run: it is one for the pool's device, the layer exists and has the part, the
  /// step is current, and the part has not run in this step. `token_rows` is the shortest operand's
  /// extent.
  Status enter(const CudaContext* cuda, const Step& step, int layer, Step::LayerPart part,
               std::int64_t token_rows) const;
  static void leave(Step& step, int layer, Step::LayerPart part) {
    step.done_[static_cast<std::size_t>(layer)] |= part;
  }
  static constexpr Step::LayerPart kConvPart = Step::kConv;
  static constexpr Step::LayerPart kRecurrencePart = Step::kRecurrence;

  /// Unique among all pools of the process, so that a step is never mistaken for another pool's.
  static std::uint64_t next_generation();
  /// Before a slot's pages are overwritten: if that fails, nobody takes what is there for a state.
  Status invalidate(const CudaContext* cuda, std::int32_t slot);
  /// Gives `slot` a new sequence: the only place a slot becomes ready from scratch. (The device has
  /// been told already.)
  void restart(std::int32_t slot, const Cursor& cursor);
  Status poison_slot(const CudaContext* cuda, std::int32_t slot);
  /// Poisons ring places that hold no entry of the slot's live range.
  Status poison_unused(const CudaContext* cuda, std::int32_t slot);
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
  std::unique_ptr<DevicePool> gpu;  // null for a pool on the CPU
  /// Steps with rows on the device have been begun: the cursors in `slots` mean nothing any more.
  bool cursors_on_device = false;
  std::uint64_t device_rows_of = 0;  // generation of the step whose rows the device holds
  StateTraffic traffic;
};

}  // namespace replayssm
