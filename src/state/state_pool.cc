#include "replayssm/state_pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <limits>
#include <new>

#include "ops/fold.h"
#include "state/memory.h"
#include "state/pool_impl.h"

namespace replayssm {
namespace {

const char* to_string(SlotCondition condition) {
  switch (condition) {
    case SlotCondition::kFree:
      return "free";
    case SlotCondition::kReady:
      return "ready";
    case SlotCondition::kInStep:
      return "inside a step";
    case SlotCondition::kInvalid:
      return "invalid after a failed step";
  }
  return "unknown";
}

/// All bits set is NaN in every floating-point type the pool stores.
constexpr int kPoisonByte = 0xff;

constexpr std::size_t kMaxBytes = std::numeric_limits<std::size_t>::max() / 2;

Status check_parents(std::size_t index, const StepRow& row) {
  if (row.parents.empty()) return {};
  if (row.parents.size() != static_cast<std::size_t>(row.token_count)) {
    return invalid_argument("row ", index, ": ", row.parents.size(), " parents for ",
                            row.token_count, " tokens");
  }
  bool chain = true;
  for (std::int32_t i = 0; static_cast<std::size_t>(i) < row.parents.size(); ++i) {
    const std::int32_t parent = row.parents[static_cast<std::size_t>(i)];
    if (parent < -1 || parent >= i) {
      return invalid_argument("row ", index, ": the parent of token ", i, " is ", parent,
                              ", expected -1..", i - 1);
    }
    chain = chain && parent == i - 1;
  }
  if (!chain) {
    return unsupported("row ", index, ": draft trees are not supported, expected a chain");
  }
  return {};
}

Result<std::size_t> pool_bytes(const StatePoolOptions& options, std::size_t per_slot) {
  if (options.slots < 1 || options.slots > std::numeric_limits<std::int32_t>::max()) {
    return invalid_argument("slots is ", options.slots, ", expected 1..2147483647");
  }
  const auto slots = static_cast<std::size_t>(options.slots);
  if (per_slot > kMaxBytes / slots) {
    return resource_exhausted(slots, " slots of ", per_slot, " bytes exceed the address space");
  }
  return per_slot * slots;
}

}  // namespace

const char* family_name(const RecurrenceShape& shape) {
  constexpr const char* kNames[] = {"mamba2", "gated_delta_net", "kimi_delta_attention"};
  static_assert(std::size(kNames) == std::variant_size_v<RecurrenceShape>);
  return kNames[shape.index()];
}

const char* to_string(RowKind kind) {
  switch (kind) {
    case RowKind::kCommitted:
      return "committed";
    case RowKind::kTentative:
      return "tentative";
  }
  return "unknown";
}

StateTraffic& StateTraffic::operator+=(const StateTraffic& other) {
  checkpoint_read += other.checkpoint_read;
  checkpoint_written += other.checkpoint_written;
  ring_read += other.ring_read;
  ring_written += other.ring_written;
  return *this;
}

// ---- Creation and sizing ----

StatePool::StatePool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
StatePool::StatePool(StatePool&&) noexcept = default;
StatePool& StatePool::operator=(StatePool&&) noexcept = default;
StatePool::~StatePool() = default;

Result<SlotBytes> StatePool::bytes_per_slot(const StatePoolOptions& options) {
  RSSM_ASSIGN_OR_RETURN(const std::vector<PageLayout> layouts, page_layouts(options));
  SlotBytes bytes;
  for (const PageLayout& layout : layouts) {
    for (const Field& field : layout.fields) {
      (field.kind == FieldKind::kCheckpoint ? bytes.checkpoint
       : field.kind == FieldKind::kRecord   ? bytes.record_ring
                                            : bytes.conv_ring) += field.bytes();
    }
    bytes.total += page_stride(layout, options);
  }
  return bytes;
}

Result<std::int64_t> StatePool::slots_for_budget(const StatePoolOptions& options,
                                                 std::size_t budget) {
  RSSM_ASSIGN_OR_RETURN(const SlotBytes bytes, bytes_per_slot(options));
  return static_cast<std::int64_t>(std::min<std::size_t>(
      budget / bytes.total, static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())));
}

Result<StatePool> StatePool::create(StatePoolOptions options) {
  RSSM_ASSIGN_OR_RETURN(const SlotBytes slot_bytes, bytes_per_slot(options));
  RSSM_ASSIGN_OR_RETURN(const std::size_t bytes, pool_bytes(options, slot_bytes.total));

  auto impl = std::make_unique<Impl>();
  RSSM_ASSIGN_OR_RETURN(impl->layouts, page_layouts(options));
  std::size_t offset = 0;
  for (const PageLayout& layout : impl->layouts) {
    const std::size_t stride = page_stride(layout, options);
    impl->layer_offset.push_back(offset);
    impl->stride.push_back(stride);
    offset += stride * static_cast<std::size_t>(options.slots);
  }
  if (options.storage.empty()) {
    impl->owned = reserve_memory(bytes);
    if (impl->owned == nullptr) {
      return resource_exhausted("cannot reserve ", bytes, " bytes for ", options.slots,
                                " slots of ", slot_bytes.total, " bytes");
    }
    impl->base = impl->owned.get();
  } else {
    if (options.storage.size() < bytes) {
      return invalid_argument("storage holds ", options.storage.size(), " bytes, expected ", bytes,
                              " for ", options.slots, " slots of ", slot_bytes.total, " bytes");
    }
    const auto misalignment = reinterpret_cast<std::uintptr_t>(options.storage.data()) % 64;
    if (misalignment != 0) {
      return invalid_argument("storage is ", misalignment,
                              " bytes past a multiple of 64, expected 0");
    }
    impl->base = options.storage.data();
  }
  impl->mamba2_a.resize(impl->layouts.size());
  try {
    impl->slots.resize(static_cast<std::size_t>(options.slots));
  } catch (const std::bad_alloc&) {
    return resource_exhausted("cannot keep the cursors of ", options.slots, " slots");
  }
  impl->options = std::move(options);
  if (impl->options.poison) {
    for (std::int64_t slot = 0; slot < impl->options.slots; ++slot) {
      impl->poison_slot(static_cast<std::int32_t>(slot));
    }
  }
  return StatePool(std::move(impl));
}

const StatePoolOptions& StatePool::options() const { return impl_->options; }
int StatePool::layer_count() const { return static_cast<int>(impl_->layouts.size()); }
const StateTraffic& StatePool::traffic() const { return impl_->traffic; }
void StatePool::reset_traffic() { impl_->traffic = {}; }

std::int64_t StatePool::free_slots() const {
  return std::count_if(impl_->slots.begin(), impl_->slots.end(), [](const Impl::Slot& slot) {
    return slot.condition == SlotCondition::kFree;
  });
}

Status StatePool::set_mamba2_a(int layer, std::span<const float> a) {
  RSSM_ASSIGN_OR_RETURN(const Mamba2Shape* shape, impl_->shape_of<Mamba2Shape>(layer, "mamba2"));
  if (a.size() != static_cast<std::size_t>(shape->heads)) {
    return invalid_argument("layer ", layer, ": mamba2 A has ", a.size(), " values, expected ",
                            shape->heads, " (heads)");
  }
  impl_->mamba2_a[static_cast<std::size_t>(layer)].assign(a.begin(), a.end());
  return {};
}

// ---- Checks ----

Status StatePool::Impl::check_layer(int layer) const {
  if (layer >= 0 && static_cast<std::size_t>(layer) < layouts.size()) return {};
  return invalid_argument("layer ", layer, " is out of range, expected 0..", layouts.size() - 1);
}

Status StatePool::Impl::check_parameters(int layer) const {
  if (!std::holds_alternative<Mamba2Shape>(recurrence(layer))) return {};
  if (!mamba2_a[static_cast<std::size_t>(layer)].empty()) return {};
  return failed_precondition("layer ", layer, ": mamba2 A has not been set");
}

Status StatePool::Impl::check_slot(std::int32_t slot) const {
  if (slot >= 0 && static_cast<std::size_t>(slot) < slots.size()) return {};
  return invalid_argument("slot ", slot, " is out of range, expected 0..", slots.size() - 1);
}

Status StatePool::Impl::check_ready(std::int32_t slot) const {
  RSSM_RETURN_IF_ERROR(check_slot(slot));
  const SlotCondition condition = slots[static_cast<std::size_t>(slot)].condition;
  if (condition == SlotCondition::kReady) return {};
  return failed_precondition("slot ", slot, " is ", to_string(condition), ", expected ready");
}

Status StatePool::Impl::check_rewind(std::int32_t slot, std::int64_t position,
                                     const char* what) const {
  RSSM_RETURN_IF_ERROR(check_ready(slot));
  const Cursor& cursor = slots[static_cast<std::size_t>(slot)].cursor;
  if (position == cursor.position) return {};
  if (!options.rewindable) {
    return unsupported(what, " of slot ", slot, " to position ", position,
                       ": the pool is not rewindable, so only its position ", cursor.position,
                       " can be reached without re-evaluation");
  }
  if (position < cursor.checkpoint_position || position > cursor.position) {
    return invalid_argument(what, " of slot ", slot, " to position ", position,
                            " needs re-evaluation: the ring reaches positions ",
                            cursor.checkpoint_position, "..", cursor.position);
  }
  return {};
}

std::uint64_t StatePool::Impl::next_generation() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

Status StatePool::Impl::check_open(const Step& step) const {
  if (step.generation_ == 0) return failed_precondition("the step has already ended");
  if (step.done_.size() != layouts.size()) {
    return failed_precondition("the step belongs to a pool of ", step.done_.size(),
                               " layers, this one has ", layouts.size());
  }
  return {};
}

bool StatePool::Impl::holds(const Step& step, const StepRow& row) const {
  if (static_cast<std::size_t>(row.slot) >= slots.size()) return false;
  const Slot& slot = slots[static_cast<std::size_t>(row.slot)];
  return slot.condition == SlotCondition::kInStep && slot.generation == step.generation_;
}

Status StatePool::Impl::check_current(const Step& step) const {
  RSSM_RETURN_IF_ERROR(check_open(step));
  for (const StepRow& row : step.rows_) {
    if (row.slot < 0) continue;
    if (static_cast<std::size_t>(row.slot) >= slots.size()) {
      return failed_precondition("the step names slot ", row.slot, " but this pool has ",
                                 slots.size(), " slots");
    }
    const Slot& slot = slots[static_cast<std::size_t>(row.slot)];
    if (!holds(step, row)) {
      return failed_precondition("slot ", row.slot, " is ", to_string(slot.condition),
                                 " at generation ", slot.generation,
                                 ", but the step holds it at generation ", step.generation_);
    }
  }
  return {};
}

Status StatePool::Impl::enter(const Step& step, int layer, Step::LayerPart part,
                              std::int64_t token_rows) const {
  RSSM_RETURN_IF_ERROR(check_layer(layer));
  if (part == Step::kRecurrence) RSSM_RETURN_IF_ERROR(check_parameters(layer));
  if (part == Step::kConv && options.layers[static_cast<std::size_t>(layer)].conv.width == 0) {
    return failed_precondition("layer ", layer, " has no convolution");
  }
  RSSM_RETURN_IF_ERROR(check_current(step));
  if ((step.done_[static_cast<std::size_t>(layer)] & part) != 0) {
    return failed_precondition("layer ", layer, ": the ",
                               part == Step::kConv ? "convolution" : "recurrence",
                               " has already run in this step");
  }
  if (token_rows < step.token_end_) {
    return invalid_argument("layer ", layer, ": operands hold ", token_rows,
                            " tokens, the step's rows reach to ", step.token_end_);
  }
  return {};
}

// ---- Slots ----

void StatePool::Impl::restart(std::int32_t slot, const Cursor& cursor) {
  slots[static_cast<std::size_t>(slot)] = {
      .cursor = cursor, .condition = SlotCondition::kReady, .generation = next_generation()};
}

void StatePool::Impl::poison_slot(std::int32_t slot) {
  for (int layer = 0; static_cast<std::size_t>(layer) < layouts.size(); ++layer) {
    for (const Field& f : layout(layer).fields) {
      std::memset(field(layer, slot, f), kPoisonByte, f.bytes());
    }
  }
}

std::int64_t StatePool::Impl::conv_first(int layer, const Cursor& cursor) const {
  const int width = options.layers[static_cast<std::size_t>(layer)].conv.width;
  const std::int64_t from = options.rewindable ? cursor.checkpoint_position : cursor.position;
  return std::max<std::int64_t>(0, from - (width - 1));
}

void StatePool::Impl::poison_unused(std::int32_t slot) {
  const Cursor& cursor = slots[static_cast<std::size_t>(slot)].cursor;
  for (int layer = 0; static_cast<std::size_t>(layer) < layouts.size(); ++layer) {
    for (const Field& f : layout(layer).fields) {
      std::byte* data = field(layer, slot, f);
      if (f.kind == FieldKind::kCheckpoint) {
        if (cursor.checkpoint_position == 0) std::memset(data, kPoisonByte, f.bytes());
        continue;
      }
      const std::int64_t first =
          f.kind == FieldKind::kRecord ? cursor.checkpoint_position : conv_first(layer, cursor);
      // Every place not in [first, position) is that of exactly one position past the end.
      for (std::int64_t p = cursor.position; p < first + f.places; ++p) {
        const auto place = static_cast<std::size_t>(p % f.places);
        for (std::int64_t o = 0; o < f.outer; ++o) {
          std::memset(data + (static_cast<std::size_t>(o * f.places) + place) * f.inner_bytes(),
                      kPoisonByte, f.inner_bytes());
        }
      }
    }
  }
}

Result<std::int32_t> StatePool::acquire() {
  for (std::size_t slot = 0; slot < impl_->slots.size(); ++slot) {
    if (impl_->slots[slot].condition == SlotCondition::kFree) {
      RSSM_RETURN_IF_ERROR(reset(static_cast<std::int32_t>(slot)));
      return static_cast<std::int32_t>(slot);
    }
  }
  return resource_exhausted("all ", impl_->slots.size(), " slots are in use");
}

Status StatePool::reset(std::int32_t slot) {
  RSSM_RETURN_IF_ERROR(impl_->check_slot(slot));
  impl_->restart(slot, Cursor{});
  if (impl_->options.poison) impl_->poison_slot(slot);
  return {};
}

Status StatePool::release(std::int32_t slot) {
  RSSM_RETURN_IF_ERROR(impl_->check_slot(slot));
  Impl::Slot& meta = impl_->slots[static_cast<std::size_t>(slot)];
  if (meta.condition == SlotCondition::kFree) {
    return failed_precondition("slot ", slot, " is already free");
  }
  meta = {.cursor = {}, .condition = SlotCondition::kFree, .generation = Impl::next_generation()};
  if (impl_->options.poison) impl_->poison_slot(slot);
  return {};
}

Result<Cursor> StatePool::cursor(std::int32_t slot) const {
  RSSM_RETURN_IF_ERROR(impl_->check_slot(slot));
  const Impl::Slot& meta = impl_->slots[static_cast<std::size_t>(slot)];
  if (meta.condition != SlotCondition::kReady && meta.condition != SlotCondition::kInStep) {
    return failed_precondition("slot ", slot, " is ", to_string(meta.condition),
                               " and has no position");
  }
  return meta.cursor;
}

Status StatePool::force_flush(std::int32_t slot) {
  RSSM_RETURN_IF_ERROR(impl_->check_ready(slot));
  impl_->slots[static_cast<std::size_t>(slot)].cursor.force_flush = true;
  return {};
}

void StatePool::Impl::copy_entries(int layer, const Field& f, std::int32_t src, std::int32_t dst,
                                   std::int64_t first, std::int64_t last) {
  const std::byte* from = field(layer, src, f);
  std::byte* to = field(layer, dst, f);
  for (std::int64_t p = first; p < last; ++p) {
    for (std::int64_t o = 0; o < f.outer; ++o) {
      const std::size_t at =
          static_cast<std::size_t>(o * f.places + p % f.places) * f.inner_bytes();
      std::memcpy(to + at, from + at, f.inner_bytes());
    }
  }
}

Status StatePool::copy(std::int32_t src, std::int32_t dst) {
  RSSM_RETURN_IF_ERROR(impl_->check_ready(src));
  RSSM_RETURN_IF_ERROR(impl_->check_slot(dst));
  if (src == dst) return invalid_argument("copy of slot ", src, " onto itself");
  const Cursor cursor = impl_->slots[static_cast<std::size_t>(src)].cursor;
  if (impl_->options.poison) impl_->poison_slot(dst);
  for (int layer = 0; layer < layer_count(); ++layer) {
    for (const Field& f : impl_->layout(layer).fields) {
      if (f.kind == FieldKind::kCheckpoint) {
        if (cursor.checkpoint_position > 0) {
          std::memcpy(impl_->field(layer, dst, f), impl_->field(layer, src, f), f.bytes());
        }
      } else {
        const std::int64_t first = f.kind == FieldKind::kRecord ? cursor.checkpoint_position
                                                                : impl_->conv_first(layer, cursor);
        impl_->copy_entries(layer, f, src, dst, first, cursor.position);
      }
    }
  }
  impl_->restart(dst, cursor);
  return {};
}

Status StatePool::materialize(const CpuContext& context, std::int32_t src, std::int64_t prefix,
                              std::int32_t dst) {
  RSSM_RETURN_IF_ERROR(impl_->check_rewind(src, prefix, "materialize"));
  RSSM_RETURN_IF_ERROR(impl_->check_slot(dst));
  if (src == dst) return invalid_argument("materialize of slot ", src, " onto itself");
  for (int layer = 0; layer < layer_count(); ++layer) {
    RSSM_RETURN_IF_ERROR(impl_->check_parameters(layer));
  }
  const Cursor from = impl_->slots[static_cast<std::size_t>(src)].cursor;
  const Cursor to{.checkpoint_position = prefix, .position = prefix};
  if (impl_->options.poison) impl_->poison_slot(dst);
  for (int layer = 0; layer < layer_count(); ++layer) {
    fold_between_slots(context, *impl_, layer, src, prefix - from.checkpoint_position, dst);
    for (const Field& f : impl_->layout(layer).fields) {
      if (f.kind == FieldKind::kConv) {
        impl_->copy_entries(layer, f, src, dst, impl_->conv_first(layer, to), prefix);
      }
    }
  }
  impl_->restart(dst, to);
  return {};
}

Status StatePool::truncate(std::int32_t slot, std::int64_t position) {
  RSSM_RETURN_IF_ERROR(impl_->check_rewind(slot, position, "truncate"));
  Impl::Slot& meta = impl_->slots[static_cast<std::size_t>(slot)];
  meta.cursor.position = position;
  meta.generation = Impl::next_generation();
  if (impl_->options.poison) impl_->poison_unused(slot);
  return {};
}

// ---- Steps ----

Result<Step> StatePool::begin_step(std::span<const StepRow> rows) {
  Step step;
  std::vector<std::int64_t> row_of_slot(impl_->slots.size(), -1);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const StepRow& row = rows[i];
    if (row.token_begin < step.token_end_ || row.token_count < 0 ||
        row.token_count > std::numeric_limits<std::int64_t>::max() - row.token_begin) {
      return invalid_argument("row ", i, ": tokens [", row.token_begin, ", +", row.token_count,
                              ") expected to begin at or after ", step.token_end_);
    }
    step.token_end_ = row.token_begin + row.token_count;
    if (row.slot < 0) continue;  // padding
    if (Status ready = impl_->check_ready(row.slot); !ready.ok()) {
      return make_status(ready.code(), "row ", i, ": ", ready.message());
    }
    std::int64_t& owner = row_of_slot[static_cast<std::size_t>(row.slot)];
    if (owner >= 0) {
      return invalid_argument("row ", i, ": slot ", row.slot, " is already in row ", owner);
    }
    owner = static_cast<std::int64_t>(i);
    RSSM_RETURN_IF_ERROR(check_parents(i, row));
    if (row.kind == RowKind::kTentative &&
        (row.token_count < 1 || row.token_count > impl_->options.limits.draft_capacity)) {
      return invalid_argument("row ", i, ": a tentative row carries ", row.token_count,
                              " tokens, expected 1..", impl_->options.limits.draft_capacity,
                              " (draft capacity T)");
    }
  }
  step.rows_.assign(rows.begin(), rows.end());
  for (StepRow& row : step.rows_) row.parents = {};  // a chain, and the caller's memory
  step.generation_ = Impl::next_generation();
  step.done_.assign(impl_->layouts.size(), 0);
  for (const StepRow& row : rows) {
    if (row.slot < 0) continue;
    Impl::Slot& slot = impl_->slots[static_cast<std::size_t>(row.slot)];
    slot.condition = SlotCondition::kInStep;
    slot.generation = step.generation_;
  }
  return step;
}

Status StatePool::commit(Step& step, std::span<const std::int64_t> accepted) {
  RSSM_RETURN_IF_ERROR(impl_->check_current(step));
  if (accepted.size() != step.rows_.size()) {
    return invalid_argument("commit got ", accepted.size(), " accepted counts for ",
                            step.rows_.size(), " rows");
  }
  for (std::size_t i = 0; i < accepted.size(); ++i) {
    const StepRow& row = step.rows_[i];
    if (row.slot < 0) continue;
    const bool all = row.kind == RowKind::kCommitted;
    if (accepted[i] < (all ? row.token_count : 0) || accepted[i] > row.token_count) {
      return invalid_argument("row ", i, ": accepted ", accepted[i], " of a ", to_string(row.kind),
                              " row of ", row.token_count, " tokens, expected ",
                              all ? "all of them" : "0..",
                              all ? "" : std::to_string(row.token_count));
    }
  }
  for (std::size_t layer = 0; layer < step.done_.size(); ++layer) {
    const bool conv = impl_->options.layers[layer].conv.width > 0;
    if (conv && (step.done_[layer] & Step::kConv) == 0) {
      return failed_precondition("commit before the convolution of layer ", layer, " has run");
    }
    if ((step.done_[layer] & Step::kRecurrence) == 0) {
      return failed_precondition("commit before the recurrence of layer ", layer, " has run");
    }
  }
  for (std::size_t i = 0; i < accepted.size(); ++i) {
    const StepRow& row = step.rows_[i];
    if (row.slot < 0) continue;
    Impl::Slot& slot = impl_->slots[static_cast<std::size_t>(row.slot)];
    slot.cursor = commit_cursor(slot.cursor, row.kind, accepted[i], impl_->options.limits);
    slot.condition = SlotCondition::kReady;
    if (impl_->options.poison) impl_->poison_unused(row.slot);
  }
  step.generation_ = 0;
  return {};
}

Status StatePool::abort(Step& step) {
  RSSM_RETURN_IF_ERROR(impl_->check_open(step));
  const bool conv_ran = std::any_of(step.done_.begin(), step.done_.end(),
                                    [](auto done) { return (done & Step::kConv) != 0; });
  const bool recurrence_ran = std::any_of(step.done_.begin(), step.done_.end(), [](auto done) {
    return (done & Step::kRecurrence) != 0;
  });
  for (const StepRow& row : step.rows_) {
    // A slot that left the step (reset, released, ...) is not the step's business any more; the
    // others must not stay inside it.
    if (row.slot < 0 || !impl_->holds(step, row)) continue;
    Impl::Slot& slot = impl_->slots[static_cast<std::size_t>(row.slot)];
    // Tentative tokens lie past the position, where nothing reads; a rewritten checkpoint, or a
    // committed row's inputs over the convolution's history, cannot be taken back.
    const bool rewritten =
        (recurrence_ran && row_flushes(row.kind, slot.cursor, impl_->options.limits)) ||
        (conv_ran && row.kind == RowKind::kCommitted);
    slot.condition = rewritten ? SlotCondition::kInvalid : SlotCondition::kReady;
    if (impl_->options.poison && !rewritten) impl_->poison_unused(row.slot);
  }
  step.generation_ = 0;
  return {};
}

}  // namespace replayssm
