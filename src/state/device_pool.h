// The part of a StatePool that lives on an accelerator: pages, cursors, conditions, the open step's
// rows. The pool's own code stays free of device types; a build without CUDA has no implementation
// of this interface, only a factory that says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ops/delta_rule/operands.h"
#include "replayssm/ops/causal_conv1d.h"
#include "replayssm/ops/mamba2.h"
#include "replayssm/state_pool.h"
#include "state/layout.h"

namespace replayssm {

/// What a device knows about a slot.
struct DeviceSlot {
  Cursor cursor;
  SlotCondition condition = SlotCondition::kFree;
};

/// Calls launch on `stream` and return; those that wait for it say so. The host has validated slots
/// and, where it knows them, positions.
class DevicePool {
 public:
  using Stream = void*;

  virtual ~DevicePool() = default;

  /// Address of slot 0's page of layer 0, in device memory.
  virtual std::byte* base() const = 0;

  /// Waits.
  virtual Status set_mamba2_a(int layer, std::span<const float> a) = 0;

  // ---- Slots ----

  virtual Status set_slot(Stream stream, std::int32_t slot, const Cursor& cursor,
                          SlotCondition condition) = 0;
  virtual Status force_flush(Stream stream, std::int32_t slot) = 0;
  /// Waits.
  virtual Result<DeviceSlot> fetch_slot(Stream stream, std::int32_t slot) = 0;
  /// Copies checkpoint, live records up to `prefix` (absent: all) and convolution inputs; dst
  /// becomes ready with the copied cursor. If src turns out not to be ready, dst becomes invalid.
  virtual Status copy(Stream stream, std::int32_t src, std::int32_t dst,
                      std::optional<std::int64_t> prefix) = 0;
  /// Folds a slot's live records into its checkpoint, all layers, and moves its checkpoint
  /// position.
  virtual Status fold(Stream stream, std::int32_t slot) = 0;
  /// Folds records from outside into a slot's checkpoint (zero if `from_zero`). Waits, allocates.
  virtual Status fold_external(Stream stream, int layer, const RecordPointers& records,
                               bool from_zero, std::int64_t count, std::int32_t slot) = 0;
  /// Fills a slot's pages with NaN: all, or what holds no entry of the slot's live range.
  virtual Status poison(Stream stream, std::int32_t slot, bool all) = 0;

  /// Between a slot's page of a layer and host memory. Wait.
  virtual Status read_page(Stream stream, int layer, std::int32_t slot,
                           std::span<std::byte> to) = 0;
  virtual Status write_page(Stream stream, int layer, std::int32_t slot,
                            std::span<const std::byte> from) = 0;

  // ---- Steps ----

  /// Makes these the rows ops see. `resumed`: their slots are already inside the step.
  virtual Status put_rows(Stream stream, std::span<const StepRow> rows, std::int64_t token_count,
                          bool resumed) = 0;
  virtual Status put_rows(Stream stream, const DeviceRows& rows) = 0;
  virtual Status commit(Stream stream, std::span<const std::int64_t> accepted) = 0;
  virtual Status commit(Stream stream, const std::int64_t* accepted) = 0;
  /// Ends the step of the current rows: slots become ready, or invalid where an op that ran has
  /// rewritten what is stored.
  virtual Status abort(Stream stream, bool conv_ran, bool recurrence_ran) = 0;
  /// Waits.
  virtual Result<DeviceError> take_error(Stream stream) = 0;

  // ---- Ops on the current rows; operands have been checked, but for what the device demands ----

  virtual Status mamba2_step(Stream stream, int layer, const Mamba2Params& params,
                             const Mamba2Operands& operands) = 0;
  virtual Status delta_rule_step(Stream stream, int layer, const DeltaRuleParams& params,
                                 const DeltaRuleOperands& operands) = 0;
  /// The launch of a layer's recurrence for a step of `rows` rows.
  virtual Result<std::string> explain(int layer, std::int64_t rows) const = 0;
  virtual Status causal_conv1d_step(Stream stream, int layer,
                                    const CausalConv1dOperands& operands) = 0;
};

/// What a pool has decided about its memory.
struct DevicePoolPlan {
  const StatePoolOptions* options = nullptr;
  const std::vector<PageLayout>* layouts = nullptr;
  std::vector<std::size_t> layer_offset;
  std::vector<std::size_t> stride;
  std::size_t page_bytes = 0;  // all pages of all layers
  std::int64_t max_rows = 0;
};

/// Whether this build has kernels for the kind of device.
bool has_kernels_for(DeviceKind kind);

/// Checks device, capability, kernels, memory or storage; allocates and clears. Waits. The layouts
/// and options must outlive the pool.
Result<std::unique_ptr<DevicePool>> create_device_pool(const DevicePoolPlan& plan);

}  // namespace replayssm
