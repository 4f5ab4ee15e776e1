// StatePool: the replay state of L layers x S slots on one device.
//
// A slot holds one sequence. Per layer it has a page with
//   checkpoint        the stored state after the first checkpoint_position tokens
//   read copy         optional: the checkpoint in few bits, for the outputs of tentative rows
//   record ring       window + draft_capacity records, that of position p at p mod places
//   convolution ring  raw inputs of the causal convolution, addressed by position as well
// and, shared by all layers, one Cursor. Rejecting a draft moves no data.
//
//   auto pool = StatePool::create(options);
//   pool->reset(slot);
//   auto step = pool->begin_step(rows);
//   for (layer ...) { causal_conv1d_step(...); mamba2_step(...); }  // or another family's step
//   pool->commit(*step, accepted);
//
// Memory a sequence does not own (free slots, places without a live record) is never read: masking
// is done by not loading. With `poison` set such memory is filled with NaN to prove it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "replayssm/cpu.h"
#include "replayssm/cuda.h"
#include "replayssm/cursor.h"
#include "replayssm/device.h"
#include "replayssm/dtype.h"
#include "replayssm/read_copy.h"
#include "replayssm/status.h"
#include "replayssm/step.h"

namespace replayssm {

/// Mamba-2 (SSD) recurrence: `heads` states of head_dim x state_size; B and C shared by the
/// heads / groups consecutive heads of a group.
struct Mamba2Shape {
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;    // P, a multiple of 8, at most 256
  std::int64_t state_size = 0;  // N, a multiple of 16, at most 256
  std::int64_t groups = 1;      // divides heads

  std::int64_t state_elements() const { return heads * head_dim * state_size; }

  friend bool operator==(const Mamba2Shape&, const Mamba2Shape&) = default;
};

/// Gated DeltaNet recurrence: `value_heads` states of key_dim x value_dim; q and k are shared by
/// the value_heads / key_heads consecutive value heads of a key head.
struct GatedDeltaNetShape {
  std::int64_t key_heads = 0;
  std::int64_t value_heads = 0;  // a multiple of key_heads
  std::int64_t key_dim = 0;      // K, a multiple of 8, at most 256
  std::int64_t value_dim = 0;    // V, a multiple of 8, at most 256

  std::int64_t state_elements() const { return value_heads * key_dim * value_dim; }

  friend bool operator==(const GatedDeltaNetShape&, const GatedDeltaNetShape&) = default;
};

/// Kimi Delta Attention recurrence: `heads` states of key_dim x value_dim, a decay per key channel.
struct KimiDeltaAttentionShape {
  std::int64_t heads = 0;
  std::int64_t key_dim = 0;    // K, a multiple of 8, at most 256
  std::int64_t value_dim = 0;  // V, a multiple of 8, at most 256

  std::int64_t state_elements() const { return heads * key_dim * value_dim; }

  friend bool operator==(const KimiDeltaAttentionShape&, const KimiDeltaAttentionShape&) = default;
};

/// Depthwise causal convolution in front of a recurrence; width 0 means none.
struct ConvShape {
  std::int64_t channels = 0;
  int width = 0;  // taps, 2..8

  friend bool operator==(const ConvShape&, const ConvShape&) = default;
};

/// One alternative per recurrence family. Saved states name a family by its index.
using RecurrenceShape = std::variant<Mamba2Shape, GatedDeltaNetShape, KimiDeltaAttentionShape>;

/// "mamba2", "gated_delta_net", "kimi_delta_attention".
const char* family_name(const RecurrenceShape& shape);

/// How records become part of the checkpoint: in flushes, before a committed row, and wherever else
/// a fold happens (materialize, load).
enum class FlushMode : std::uint8_t {
  /// The recurrence is re-run in fp32 in plain decoding's order: with an f32 checkpoint the state
  /// is plain decoding's, bit for bit.
  kExact = 0,
  /// Delta-rule layers: S = decay S + sum_i w_i k_i d_i^T as one product of the deltas that the
  /// steps have solved and stored in the activation type. Records hold no v and no beta. The
  /// rounding of a stored delta enters the state, where later deltas, solved from what is stored,
  /// correct it. docs/kernels/gdn-cpu.md has the drift. Refused with a read copy, whose rounding
  /// the deltas would bring into the state.
  kFast = 1,
};

/// "exact", "fast".
const char* to_string(FlushMode mode);

struct LayerSpec {
  RecurrenceShape recurrence;
  ConvShape conv;
  /// What tentative rows' outputs read of the checkpoint: itself, or a copy in few bits that is
  /// rewritten exactly when the checkpoint is. The checkpoint does not depend on it.
  ReadCopyFormat read_copy = ReadCopyFormat::kNone;
  /// Empty: the pool's. Mamba-2 layers are exact: what they record are the recurrence's own inputs.
  std::optional<FlushMode> flush;

  friend bool operator==(const LayerSpec&, const LayerSpec&) = default;
};

struct StatePoolOptions {
  std::vector<LayerSpec> layers;
  std::int64_t slots = 0;
  ReplayLimits limits;
  DType checkpoint = DType::kF32;  // f32, bf16 or f16; beyond 65504 an f16 state becomes infinite
  DType activation = DType::kF32;  // f32, bf16 or f16: records, convolution inputs, op operands
  FlushMode flush = FlushMode::kExact;  // of layers that do not say
  /// Keep convolution inputs for the whole window, so that truncate and materialize accept any
  /// prefix in [checkpoint_position, position] instead of `position` only.
  bool rewindable = false;
  /// Fill memory no sequence owns with NaN, for tests and debugging.
  bool poison = false;
  /// The CPU, or a CUDA device: then pages and cursors are in its memory, and every call that
  /// reads or writes them takes a CudaContext.
  Device device;
  /// CUDA: most rows of a step, padding included; 0: as many as slots.
  std::int64_t max_rows = 0;
  /// Pages start at multiples of this many bytes; may be larger than their contents.
  std::size_t page_alignment = 64;
  /// Identifies the model in saved states; a state of another model is refused.
  std::string model_id;
  /// Caller-owned memory of the device, at least bytes_per_slot() * slots, aligned to 64; empty:
  /// the pool reserves its own. (A CUDA pool keeps cursors and rows, under 200 bytes a slot and its
  /// row, in memory of its own.)
  std::span<std::byte> storage;

  /// Of one of `layers`.
  FlushMode flush_mode(int layer) const {
    return layers[static_cast<std::size_t>(layer)].flush.value_or(flush);
  }
};

/// Bytes ops moved for states and rings, by the formula of what must move (not by counters in
/// hardware). Sums over rows and layers since the last reset_traffic(). Steps of a CUDA pool count
/// while the host knows its cursors.
struct StateTraffic {
  std::int64_t checkpoint_read = 0;
  std::int64_t checkpoint_written = 0;
  std::int64_t read_copy_read = 0;
  std::int64_t read_copy_written = 0;
  std::int64_t ring_read = 0;
  std::int64_t ring_written = 0;

  StateTraffic& operator+=(const StateTraffic& other);
};

/// Bytes of one slot over all layers.
struct SlotBytes {
  std::size_t checkpoint = 0;
  std::size_t read_copy = 0;
  std::size_t record_ring = 0;
  std::size_t conv_ring = 0;
  std::size_t total = 0;  // with alignment, as allocated
};

/// The rows of a step between begin_step and commit. Rows are validated when the step begins; ops
/// check that the step is still current for every slot, so a stale step is refused, never applied.
class Step {
 public:
  Step(Step&&) = default;
  Step& operator=(Step&&) = default;
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  /// Empty for a step whose rows are on the device.
  const std::vector<StepRow>& rows() const { return rows_; }
  /// One past the last token of any row: operands need at least this many token rows.
  std::int64_t token_end() const { return token_end_; }
  bool on_device() const { return on_device_; }

 private:
  friend class StatePool;
  enum LayerPart : std::uint8_t { kConv = 1, kRecurrence = 2 };

  Step() = default;

  std::vector<StepRow> rows_;
  std::int64_t token_end_ = 0;
  std::uint64_t generation_ = 0;
  bool on_device_ = false;
  std::vector<std::uint8_t> done_;  // LayerPart bits per layer
};

class StatePool {
 public:
  /// Refuses options that cannot work (T > L, groups that do not divide heads, storage too small,
  /// ...) naming both values; nothing is allocated then.
  static Result<StatePool> create(StatePoolOptions options);

  /// Sizing from the layout the pool uses. `slots` and `storage` of the options are ignored.
  static Result<SlotBytes> bytes_per_slot(const StatePoolOptions& options);
  /// How many slots fit into `budget` bytes; 0 if not even one does.
  static Result<std::int64_t> slots_for_budget(const StatePoolOptions& options, std::size_t budget);

  StatePool(StatePool&&) noexcept;
  StatePool& operator=(StatePool&&) noexcept;
  ~StatePool();

  const StatePoolOptions& options() const;
  int layer_count() const;
  std::int64_t free_slots() const;

  /// Gives a Mamba-2 layer its A = -exp(A_log), (heads). The pool keeps it because decays are a
  /// function of A and the recorded dt, and folds happen outside of steps too (materialize, load).
  /// Steps and folds of the layer are refused before. A CUDA pool uploads them, and waits. Layers
  /// of the other families need nothing of the kind: their records hold everything a fold asks for.
  Status set_mamba2_a(int layer, std::span<const float> a);

  // ---- Slots. A slot is free, ready, inside a step, or invalid (after a failed step): see
  // SlotCondition. ----

  /// Resets the lowest free slot and returns it; kResourceExhausted when none is free.
  Result<std::int32_t> acquire();
  /// Makes `slot`, in whatever condition, the start of a new sequence at position 0. Its memory is
  /// not touched: a checkpoint at position 0 is zero by definition and never loaded.
  Status reset(std::int32_t slot);
  /// Gives `slot` back. Steps that still hold it become stale.
  Status release(std::int32_t slot);

  /// The cursor of a ready slot or of one inside a step (then as before the step).
  Result<Cursor> cursor(std::int32_t slot) const;
  /// Makes the next tentative row of `slot` flush. Only between a commit and the next step.
  Status force_flush(std::int32_t slot);

  /// Bit copy of checkpoint, read copy, live records, convolution inputs and cursor onto `dst`,
  /// which may be in any condition. src == dst is refused.
  Status copy(std::int32_t src, std::int32_t dst);
  /// Writes the state after `prefix` accepted tokens into `dst` as a checkpoint without records.
  /// `src` is left untouched. See StatePoolOptions::rewindable for the prefixes allowed.
  Status materialize(const CpuContext& context, std::int32_t src, std::int64_t prefix,
                     std::int32_t dst);
  /// Drops accepted tokens at the end. See StatePoolOptions::rewindable for the positions allowed.
  Status truncate(std::int32_t slot, std::int64_t position);

  /// Self-describing image of a ready slot: records oldest first, positions, dtypes, layout
  /// version, checksum. Ring geometry is not part of it, nor are read copies: load makes them anew
  /// from the checkpoint, in the format of the pool it loads into.
  Result<std::vector<std::byte>> save(std::int32_t slot) const;
  /// Replaces `slot`, in whatever condition, by a saved state. Everything is checked before
  /// anything is written. Records that do not fit this pool's window are folded. Records of a layer
  /// whose flush mode is another than this pool's are refused.
  Status load(const CpuContext& context, std::int32_t slot, std::span<const std::byte> image);

  // ---- Steps ----

  /// Validates the rows and marks their slots as inside a step. Rows are ascending and disjoint in
  /// tokens; a slot appears once; a tentative row carries 1..T tokens.
  Result<Step> begin_step(std::span<const StepRow> rows);
  /// Accepts accepted[i] of row i's tokens for all layers at once: 0..count of a tentative row, all
  /// of a committed row; padding rows are ignored. Every layer must have run. On error nothing
  /// changes and the step stays open.
  Status commit(Step& step, std::span<const std::int64_t> accepted);
  /// Ends a step that cannot be completed. Rows whose stored state no layer has rewritten go back
  /// to where they were; the others become invalid until reset, load or copy revives them.
  Status abort(Step& step);

  // ---- CUDA pools: the same calls with a CudaContext in front. A call without one is refused on a
  // CUDA pool, and one with one on a CPU pool. Calls launch kernels on the context's stream, may be
  // captured in a graph and do not wait, except where stated. ----

  Result<std::int32_t> acquire(const CudaContext& context);
  Status reset(const CudaContext& context, std::int32_t slot);
  Status release(const CudaContext& context, std::int32_t slot);
  Status force_flush(const CudaContext& context, std::int32_t slot);
  /// The cursor as the stream's work leaves it. Waits for the stream.
  Result<Cursor> cursor(const CudaContext& context, std::int32_t slot) const;
  Status copy(const CudaContext& context, std::int32_t src, std::int32_t dst);
  /// After steps with rows on the device the host no longer knows cursors: materialize, truncate
  /// and abort then wait for the stream to fetch them.
  Status materialize(const CudaContext& context, std::int32_t src, std::int64_t prefix,
                     std::int32_t dst);
  Status truncate(const CudaContext& context, std::int32_t slot, std::int64_t position);
  /// Images are the same on every device. Both wait for the stream; load may allocate device memory
  /// for the call's duration if records have to be folded.
  Result<std::vector<std::byte>> save(const CudaContext& context, std::int32_t slot) const;
  Status load(const CudaContext& context, std::int32_t slot, std::span<const std::byte> image);

  Result<Step> begin_step(const CudaContext& context, std::span<const StepRow> rows);
  Status commit(const CudaContext& context, Step& step, std::span<const std::int64_t> accepted);
  Status abort(const CudaContext& context, Step& step);

  /// A step whose rows are in device memory, to be captured with its ops and its commit in a graph
  /// (or run as it is). The kernel this launches reads `rows` once and makes padding of every row
  /// that names a slot that is absent, duplicate or not ready, or tokens it cannot have; ops and
  /// commit see the result. From then on the host does not know cursors, and cursor(slot) without a
  /// context says so. One step with rows on the device is open at a time.
  Result<Step> begin_step(const CudaContext& context, const DeviceRows& rows);
  /// Commits such a step: `accepted` is device memory, (row_count), read by the kernel.
  Status commit(const CudaContext& context, Step& step, const std::int64_t* accepted);
  /// Returns the first misuse that kernels have found since the last call, and forgets it. Waits
  /// for the stream; errors of earlier CUDA work are returned as a status.
  Result<DeviceError> take_device_error(const CudaContext& context);

  const StateTraffic& traffic() const;
  void reset_traffic();

  // ---- For ops ----

  struct Impl;
  Impl& impl() { return *impl_; }
  const Impl& impl() const { return *impl_; }

 private:
  explicit StatePool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace replayssm
