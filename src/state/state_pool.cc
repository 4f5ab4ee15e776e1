#include "replayssm/state_pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <limits>
#include <new>

#include "ops/fold.h"
#include "state/device_pool.h"
#include "state/memory.h"
#include "state/pool_impl.h"

namespace replayssm {
namespace {

/// All bits set is NaN in every floating-point type the pool stores.
constexpr int kPoisonByte = 0xff;

constexpr std::size_t kMaxBytes = std::numeric_limits<std::size_t>::max() / 2;

constexpr std::int64_t kMaxRows = std::int64_t{1} << 24;

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

/// A CPU pool's pages: the caller's storage or memory of its own.
Status place_in_memory(const StatePoolOptions& options, std::size_t per_slot, std::size_t bytes,
                       StatePool::Impl& impl) {
  if (options.storage.empty()) {
    impl.owned = reserve_memory(bytes);
    if (impl.owned == nullptr) {
      return resource_exhausted("cannot reserve ", bytes, " bytes for ", options.slots,
                                " slots of ", per_slot, " bytes");
    }
    impl.base = impl.owned.get();
    return {};
  }
  RSSM_RETURN_IF_ERROR(check_storage(options, per_slot, bytes));
  impl.base = options.storage.data();
  return {};
}

}  // namespace

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
  read_copy_read += other.read_copy_read;
  read_copy_written += other.read_copy_written;
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
       : field.kind == FieldKind::kReadCopy ? bytes.read_copy
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
  if (options.device.kind == DeviceKind::kCpu) {
    RSSM_RETURN_IF_ERROR(place_in_memory(options, slot_bytes.total, bytes, *impl));
  }
  impl->mamba2_a.resize(impl->layouts.size());
  try {
    impl->slots.resize(static_cast<std::size_t>(options.slots));
  } catch (const std::bad_alloc&) {
    return resource_exhausted("cannot keep the cursors of ", options.slots, " slots");
  }
  impl->options = std::move(options);
  if (impl->options.device.kind != DeviceKind::kCpu) {
    if (impl->options.max_rows < 0 || impl->options.max_rows > kMaxRows) {
      return invalid_argument("max_rows is ", impl->options.max_rows, ", expected 0..", kMaxRows);
    }
    RSSM_ASSIGN_OR_RETURN(impl->gpu, create_device_pool({.options = &impl->options,
                                                         .layouts = &impl->layouts,
                                                         .layer_offset = impl->layer_offset,
                                                         .stride = impl->stride,
                                                         .page_bytes = bytes,
                                                         .max_rows = impl->options.max_rows > 0
                                                                         ? impl->options.max_rows
                                                                         : impl->options.slots}));
    impl->base = impl->gpu->base();
  } else if (impl->options.poison) {
    for (std::int64_t slot = 0; slot < impl->options.slots; ++slot) {
      RSSM_RETURN_IF_ERROR(impl->poison_slot(nullptr, static_cast<std::int32_t>(slot)));
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
  if (impl_->gpu != nullptr) RSSM_RETURN_IF_ERROR(impl_->gpu->set_mamba2_a(layer, a));
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

Status StatePool::Impl::check_device(const CudaContext* cuda) const {
  const Device& device = options.device;
  if (device.kind == DeviceKind::kCpu) {
    if (cuda == nullptr) return {};
    return invalid_argument("the call is for cuda:", cuda->device, ", the pool is on cpu");
  }
  if (cuda == nullptr) {
    return invalid_argument("the pool is on ", to_string(device),
                            ", the call has no CudaContext and is for cpu");
  }
  if (cuda->device == device.index) return {};
  return invalid_argument("the call is for cuda:", cuda->device, ", the pool is on ",
                          to_string(device));
}

Result<Cursor> StatePool::Impl::ready_cursor(const CudaContext* cuda, std::int32_t slot) const {
  RSSM_RETURN_IF_ERROR(check_ready(slot));
  if (!cursors_on_device) return slots[static_cast<std::size_t>(slot)].cursor;
  RSSM_ASSIGN_OR_RETURN(const DeviceSlot found, gpu->fetch_slot(cuda->stream, slot));
  if (found.condition != SlotCondition::kReady) {
    return failed_precondition("slot ", slot, " is ", to_string(found.condition),
                               " on the device, expected ready");
  }
  return found.cursor;
}

Status StatePool::Impl::invalidate(const CudaContext* cuda, std::int32_t slot) {
  slots[static_cast<std::size_t>(slot)] = {
      .cursor = {}, .condition = SlotCondition::kInvalid, .generation = next_generation()};
  if (cuda == nullptr) return {};
  return gpu->set_slot(cuda->stream, slot, {}, SlotCondition::kInvalid);
}

Status StatePool::Impl::check_rewind(std::int32_t slot, const Cursor& cursor, std::int64_t position,
                                     const char* what) const {
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
  if (step.on_device_ && step.generation_ != device_rows_of) {
    return failed_precondition("the step with rows on the device, generation ", step.generation_,
                               ", has given way to another step, generation ", device_rows_of);
  }
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

Status StatePool::Impl::select_rows(const CudaContext& cuda, const Step& step) {
  // A graph that is replayed puts its own rows there without the host's knowledge.
  if (device_rows_of == step.generation_ && (step.on_device_ || !cursors_on_device)) return {};
  std::vector<StepRow> rows = step.rows_;
  for (StepRow& row : rows) {
    if (row.slot >= 0 && !holds(step, row)) row.slot = -1;  // it may be in another step by now
  }
  RSSM_RETURN_IF_ERROR(gpu->put_rows(cuda.stream, rows, step.token_end_, true));
  device_rows_of = step.generation_;
  return {};
}

Status StatePool::Impl::enter(const CudaContext* cuda, const Step& step, int layer,
                              Step::LayerPart part, std::int64_t token_rows) const {
  RSSM_RETURN_IF_ERROR(check_device(cuda));
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

Status StatePool::Impl::poison_slot(const CudaContext* cuda, std::int32_t slot) {
  if (!options.poison) return {};
  if (cuda != nullptr) return gpu->poison(cuda->stream, slot, true);
  for (int layer = 0; static_cast<std::size_t>(layer) < layouts.size(); ++layer) {
    for (const Field& f : layout(layer).fields) {
      std::memset(field(layer, slot, f), kPoisonByte, f.bytes());
    }
  }
  return {};
}

std::int64_t StatePool::Impl::conv_first(int layer, const Cursor& cursor) const {
  const int width = options.layers[static_cast<std::size_t>(layer)].conv.width;
  const std::int64_t from = options.rewindable ? cursor.checkpoint_position : cursor.position;
  return std::max<std::int64_t>(0, from - (width - 1));
}

Status StatePool::Impl::poison_unused(const CudaContext* cuda, std::int32_t slot) {
  if (!options.poison) return {};
  if (cuda != nullptr) return gpu->poison(cuda->stream, slot, false);
  const Cursor& cursor = slots[static_cast<std::size_t>(slot)].cursor;
  for (int layer = 0; static_cast<std::size_t>(layer) < layouts.size(); ++layer) {
    for (const Field& f : layout(layer).fields) {
      std::byte* data = field(layer, slot, f);
      if (f.is_state()) {
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
  return {};
}

Result<std::int32_t> StatePool::Impl::acquire(const CudaContext* cuda) {
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    if (slots[slot].condition == SlotCondition::kFree) {
      RSSM_RETURN_IF_ERROR(reset(cuda, static_cast<std::int32_t>(slot)));
      return static_cast<std::int32_t>(slot);
    }
  }
  return resource_exhausted("all ", slots.size(), " slots are in use");
}

Status StatePool::Impl::reset(const CudaContext* cuda, std::int32_t slot) {
  RSSM_RETURN_IF_ERROR(check_device(cuda));
  RSSM_RETURN_IF_ERROR(check_slot(slot));
  if (cuda != nullptr) {
    RSSM_RETURN_IF_ERROR(gpu->set_slot(cuda->stream, slot, Cursor{}, SlotCondition::kReady));
  }
  restart(slot, Cursor{});
  return poison_slot(cuda, slot);
}

Status StatePool::Impl::release(const CudaContext* cuda, std::int32_t slot) {
  RSSM_RETURN_IF_ERROR(check_device(cuda));
  RSSM_RETURN_IF_ERROR(check_slot(slot));
  Slot& meta = slots[static_cast<std::size_t>(slot)];
  if (meta.condition == SlotCondition::kFree) {
    return failed_precondition("slot ", slot, " is already free");
  }
  if (cuda != nullptr) {
    RSSM_RETURN_IF_ERROR(gpu->set_slot(cuda->stream, slot, Cursor{}, SlotCondition::kFree));
  }
  meta = {.cursor = {}, .condition = SlotCondition::kFree, .generation = next_generation()};
  return poison_slot(cuda, slot);
}

Result<Cursor> StatePool::cursor(std::int32_t slot) const {
  RSSM_RETURN_IF_ERROR(impl_->check_slot(slot));
  const Impl::Slot& meta = impl_->slots[static_cast<std::size_t>(slot)];
  if (meta.condition != SlotCondition::kReady && meta.condition != SlotCondition::kInStep) {
    return failed_precondition("slot ", slot, " is ", to_string(meta.condition),
                               " and has no position");
  }
  if (impl_->cursors_on_device) {
    return failed_precondition("the cursor of slot ", slot, " is known on ",
                               to_string(impl_->options.device),
                               " only since steps had their rows there: ask with a CudaContext");
  }
  return meta.cursor;
}

Result<Cursor> StatePool::cursor(const CudaContext& context, std::int32_t slot) const {
  RSSM_RETURN_IF_ERROR(impl_->check_device(&context));
  if (!impl_->cursors_on_device) RSSM_RETURN_IF_ERROR(cursor(slot).status());
  RSSM_RETURN_IF_ERROR(impl_->check_slot(slot));
  RSSM_ASSIGN_OR_RETURN(const DeviceSlot found, impl_->gpu->fetch_slot(context.stream, slot));
  return found.cursor;
}

Status StatePool::Impl::force_flush(const CudaContext* cuda, std::int32_t slot) {
  RSSM_RETURN_IF_ERROR(check_device(cuda));
  RSSM_RETURN_IF_ERROR(check_ready(slot));
  if (cuda != nullptr) RSSM_RETURN_IF_ERROR(gpu->force_flush(cuda->stream, slot));
  slots[static_cast<std::size_t>(slot)].cursor.force_flush = true;
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

Status StatePool::Impl::copy(const CudaContext* cuda, std::int32_t src, std::int32_t dst) {
  RSSM_RETURN_IF_ERROR(check_device(cuda));
  RSSM_RETURN_IF_ERROR(check_ready(src));
  RSSM_RETURN_IF_ERROR(check_slot(dst));
  if (src == dst) return invalid_argument("copy of slot ", src, " onto itself");
  const Cursor cursor = slots[static_cast<std::size_t>(src)].cursor;
  RSSM_RETURN_IF_ERROR(invalidate(cuda, dst));
  RSSM_RETURN_IF_ERROR(poison_slot(cuda, dst));
  if (cuda != nullptr) {
    RSSM_RETURN_IF_ERROR(gpu->copy(cuda->stream, src, dst, std::nullopt));
    restart(dst, cursor);
    return {};
  }
  for (int layer = 0; static_cast<std::size_t>(layer) < layouts.size(); ++layer) {
    for (const Field& f : layout(layer).fields) {
      if (f.is_state()) {
        if (cursor.checkpoint_position > 0) {
          std::memcpy(field(layer, dst, f), field(layer, src, f), f.bytes());
        }
      } else {
        const std::int64_t first =
            f.kind == FieldKind::kRecord ? cursor.checkpoint_position : conv_first(layer, cursor);
        copy_entries(layer, f, src, dst, first, cursor.position);
      }
    }
  }
  restart(dst, cursor);
  return {};
}

Status StatePool::Impl::materialize(const CpuContext& cpu, const CudaContext* cuda,
                                    std::int32_t src, std::int64_t prefix, std::int32_t dst) {
  RSSM_RETURN_IF_ERROR(check_device(cuda));
  RSSM_ASSIGN_OR_RETURN(const Cursor from, ready_cursor(cuda, src));
  RSSM_RETURN_IF_ERROR(check_rewind(src, from, prefix, "materialize"));
  RSSM_RETURN_IF_ERROR(check_slot(dst));
  if (src == dst) return invalid_argument("materialize of slot ", src, " onto itself");
  for (int layer = 0; static_cast<std::size_t>(layer) < layouts.size(); ++layer) {
    RSSM_RETURN_IF_ERROR(check_parameters(layer));
  }
  const Cursor to{.checkpoint_position = prefix, .position = prefix};
  RSSM_RETURN_IF_ERROR(invalidate(cuda, dst));
  RSSM_RETURN_IF_ERROR(poison_slot(cuda, dst));
  if (cuda != nullptr) {
    // On the device the records travel, and are folded where they arrive.
    RSSM_RETURN_IF_ERROR(gpu->copy(cuda->stream, src, dst, prefix));
    RSSM_RETURN_IF_ERROR(gpu->fold(cuda->stream, dst));
    restart(dst, to);
    return poison_unused(cuda, dst);
  }
  for (int layer = 0; static_cast<std::size_t>(layer) < layouts.size(); ++layer) {
    fold_between_slots(cpu, *this, layer, src, prefix - from.checkpoint_position, dst);
    for (const Field& f : layout(layer).fields) {
      if (f.kind == FieldKind::kConv) {
        copy_entries(layer, f, src, dst, conv_first(layer, to), prefix);
      }
    }
  }
  restart(dst, to);
  return {};
}

Status StatePool::Impl::truncate(const CudaContext* cuda, std::int32_t slot,
                                 std::int64_t position) {
  RSSM_RETURN_IF_ERROR(check_device(cuda));
  RSSM_ASSIGN_OR_RETURN(Cursor cursor, ready_cursor(cuda, slot));
  RSSM_RETURN_IF_ERROR(check_rewind(slot, cursor, position, "truncate"));
  cursor.position = position;
  if (cuda != nullptr) {
    RSSM_RETURN_IF_ERROR(gpu->set_slot(cuda->stream, slot, cursor, SlotCondition::kReady));
  }
  restart(slot, cursor);
  return poison_unused(cuda, slot);
}

// ---- Steps ----

Result<Step> StatePool::Impl::begin_step(const CudaContext* cuda, std::span<const StepRow> rows) {
  RSSM_RETURN_IF_ERROR(check_device(cuda));
  Step step;
  std::vector<std::int64_t> row_of_slot(slots.size(), -1);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const StepRow& row = rows[i];
    if (row.token_begin < step.token_end_ || row.token_count < 0 ||
        row.token_count > std::numeric_limits<std::int64_t>::max() - row.token_begin) {
      return invalid_argument("row ", i, ": tokens [", row.token_begin, ", +", row.token_count,
                              ") expected to begin at or after ", step.token_end_);
    }
    step.token_end_ = row.token_begin + row.token_count;
    if (row.slot < 0) continue;  // padding
    if (Status ready = check_ready(row.slot); !ready.ok()) {
      return make_status(ready.code(), "row ", i, ": ", ready.message());
    }
    std::int64_t& owner = row_of_slot[static_cast<std::size_t>(row.slot)];
    if (owner >= 0) {
      return invalid_argument("row ", i, ": slot ", row.slot, " is already in row ", owner);
    }
    owner = static_cast<std::int64_t>(i);
    RSSM_RETURN_IF_ERROR(check_parents(i, row));
    if (row.kind == RowKind::kTentative &&
        (row.token_count < 1 || row.token_count > options.limits.draft_capacity)) {
      return invalid_argument("row ", i, ": a tentative row carries ", row.token_count,
                              " tokens, expected 1..", options.limits.draft_capacity,
                              " (draft capacity T)");
    }
  }
  step.rows_.assign(rows.begin(), rows.end());
  for (StepRow& row : step.rows_) row.parents = {};  // a chain, and the caller's memory
  step.generation_ = next_generation();
  step.done_.assign(layouts.size(), 0);
  if (cuda != nullptr) {
    RSSM_RETURN_IF_ERROR(gpu->put_rows(cuda->stream, step.rows_, step.token_end_, false));
    device_rows_of = step.generation_;
  }
  for (const StepRow& row : rows) {
    if (row.slot < 0) continue;
    Slot& slot = slots[static_cast<std::size_t>(row.slot)];
    slot.condition = SlotCondition::kInStep;
    slot.generation = step.generation_;
  }
  return step;
}

Result<Step> StatePool::begin_step(const CudaContext& context, const DeviceRows& rows) {
  RSSM_RETURN_IF_ERROR(impl_->check_device(&context));
  RSSM_RETURN_IF_ERROR(impl_->gpu->put_rows(context.stream, rows));
  Step step;
  step.on_device_ = true;
  step.token_end_ = rows.token_count;
  step.generation_ = Impl::next_generation();
  step.done_.assign(impl_->layouts.size(), 0);
  impl_->device_rows_of = step.generation_;
  impl_->cursors_on_device = true;
  return step;
}

Status StatePool::Impl::check_complete(const Step& step) const {
  for (std::size_t layer = 0; layer < step.done_.size(); ++layer) {
    const bool conv = options.layers[layer].conv.width > 0;
    if (conv && (step.done_[layer] & Step::kConv) == 0) {
      return failed_precondition("commit before the convolution of layer ", layer, " has run");
    }
    if ((step.done_[layer] & Step::kRecurrence) == 0) {
      return failed_precondition("commit before the recurrence of layer ", layer, " has run");
    }
  }
  return {};
}

Status StatePool::Impl::commit(const CudaContext* cuda, Step& step,
                               std::span<const std::int64_t> accepted) {
  RSSM_RETURN_IF_ERROR(check_device(cuda));
  RSSM_RETURN_IF_ERROR(check_current(step));
  if (step.on_device_) {
    return invalid_argument("commit got accepted counts on cpu, the step's rows are on ",
                            to_string(options.device));
  }
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
  RSSM_RETURN_IF_ERROR(check_complete(step));
  if (cuda != nullptr) {
    RSSM_RETURN_IF_ERROR(select_rows(*cuda, step));
    RSSM_RETURN_IF_ERROR(gpu->commit(cuda->stream, accepted));
  }
  for (std::size_t i = 0; i < accepted.size(); ++i) {
    const StepRow& row = step.rows_[i];
    if (row.slot < 0) continue;
    Slot& slot = slots[static_cast<std::size_t>(row.slot)];
    slot.cursor = commit_cursor(slot.cursor, row.kind, accepted[i], options.limits);
    slot.condition = SlotCondition::kReady;
  }
  step.generation_ = 0;
  for (const StepRow& row : step.rows_) {
    if (row.slot >= 0) RSSM_RETURN_IF_ERROR(poison_unused(cuda, row.slot));
  }
  return {};
}

Status StatePool::commit(const CudaContext& context, Step& step, const std::int64_t* accepted) {
  RSSM_RETURN_IF_ERROR(impl_->check_device(&context));
  RSSM_RETURN_IF_ERROR(impl_->check_current(step));
  if (!step.on_device_) {
    return invalid_argument("commit got accepted counts on ", to_string(impl_->options.device),
                            ", the step's rows are on cpu");
  }
  RSSM_RETURN_IF_ERROR(impl_->check_complete(step));
  RSSM_RETURN_IF_ERROR(impl_->gpu->commit(context.stream, accepted));
  step.generation_ = 0;
  return {};
}

Status StatePool::Impl::abort(const CudaContext* cuda, Step& step) {
  RSSM_RETURN_IF_ERROR(check_device(cuda));
  RSSM_RETURN_IF_ERROR(check_open(step));
  const bool conv_ran = std::any_of(step.done_.begin(), step.done_.end(),
                                    [](auto done) { return (done & Step::kConv) != 0; });
  const bool recurrence_ran = std::any_of(step.done_.begin(), step.done_.end(), [](auto done) {
    return (done & Step::kRecurrence) != 0;
  });
  if (step.on_device_) {
    RSSM_RETURN_IF_ERROR(check_current(step));
    RSSM_RETURN_IF_ERROR(gpu->abort(cuda->stream, conv_ran, recurrence_ran));
    step.generation_ = 0;
    return {};
  }
  if (cuda != nullptr) {
    RSSM_RETURN_IF_ERROR(select_rows(*cuda, step));
    RSSM_RETURN_IF_ERROR(gpu->abort(cuda->stream, conv_ran, recurrence_ran));
  }
  for (const StepRow& row : step.rows_) {
    // A slot that left the step (reset, released, ...) is not the step's business any more; the
    // others must not stay inside it.
    if (row.slot < 0 || !holds(step, row)) continue;
    Slot& slot = slots[static_cast<std::size_t>(row.slot)];
    if (cursors_on_device) {
      RSSM_ASSIGN_OR_RETURN(const DeviceSlot found, gpu->fetch_slot(cuda->stream, row.slot));
      slot.cursor = found.cursor;
    }
    slot.condition = outlives_abort(row.kind, slot.cursor, options.limits, conv_ran, recurrence_ran)
                         ? SlotCondition::kReady
                         : SlotCondition::kInvalid;
    if (slot.condition == SlotCondition::kReady) {
      RSSM_RETURN_IF_ERROR(poison_unused(cuda, row.slot));
    }
  }
  step.generation_ = 0;
  return {};
}

Result<DeviceError> StatePool::take_device_error(const CudaContext& context) {
  RSSM_RETURN_IF_ERROR(impl_->check_device(&context));
  return impl_->gpu->take_error(context.stream);
}

// ---- The two spellings of every call ----

Result<std::int32_t> StatePool::acquire() { return impl_->acquire(nullptr); }
Result<std::int32_t> StatePool::acquire(const CudaContext& context) {
  return impl_->acquire(&context);
}
Status StatePool::reset(std::int32_t slot) { return impl_->reset(nullptr, slot); }
Status StatePool::reset(const CudaContext& context, std::int32_t slot) {
  return impl_->reset(&context, slot);
}
Status StatePool::release(std::int32_t slot) { return impl_->release(nullptr, slot); }
Status StatePool::release(const CudaContext& context, std::int32_t slot) {
  return impl_->release(&context, slot);
}
Status StatePool::force_flush(std::int32_t slot) { return impl_->force_flush(nullptr, slot); }
Status StatePool::force_flush(const CudaContext& context, std::int32_t slot) {
  return impl_->force_flush(&context, slot);
}
Status StatePool::copy(std::int32_t src, std::int32_t dst) {
  return impl_->copy(nullptr, src, dst);
}
Status StatePool::copy(const CudaContext& context, std::int32_t src, std::int32_t dst) {
  return impl_->copy(&context, src, dst);
}
Status StatePool::materialize(const CpuContext& context, std::int32_t src, std::int64_t prefix,
                              std::int32_t dst) {
  return impl_->materialize(context, nullptr, src, prefix, dst);
}
Status StatePool::materialize(const CudaContext& context, std::int32_t src, std::int64_t prefix,
                              std::int32_t dst) {
  return impl_->materialize({}, &context, src, prefix, dst);
}
Status StatePool::truncate(std::int32_t slot, std::int64_t position) {
  return impl_->truncate(nullptr, slot, position);
}
Status StatePool::truncate(const CudaContext& context, std::int32_t slot, std::int64_t position) {
  return impl_->truncate(&context, slot, position);
}
Result<std::vector<std::byte>> StatePool::save(std::int32_t slot) const {
  return impl_->save(nullptr, slot);
}
Result<std::vector<std::byte>> StatePool::save(const CudaContext& context,
                                               std::int32_t slot) const {
  return impl_->save(&context, slot);
}
Status StatePool::load(const CpuContext& context, std::int32_t slot,
                       std::span<const std::byte> image) {
  return impl_->load(context, nullptr, slot, image);
}
Status StatePool::load(const CudaContext& context, std::int32_t slot,
                       std::span<const std::byte> image) {
  return impl_->load({}, &context, slot, image);
}
Result<Step> StatePool::begin_step(std::span<const StepRow> rows) {
  return impl_->begin_step(nullptr, rows);
}
Result<Step> StatePool::begin_step(const CudaContext& context, std::span<const StepRow> rows) {
  return impl_->begin_step(&context, rows);
}
Status StatePool::commit(Step& step, std::span<const std::int64_t> accepted) {
  return impl_->commit(nullptr, step, accepted);
}
Status StatePool::commit(const CudaContext& context, Step& step,
                         std::span<const std::int64_t> accepted) {
  return impl_->commit(&context, step, accepted);
}
Status StatePool::abort(Step& step) { return impl_->abort(nullptr, step); }
Status StatePool::abort(const CudaContext& context, Step& step) {
  return impl_->abort(&context, step);
}

}  // namespace replayssm
