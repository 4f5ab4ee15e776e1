// The C interface over the C++ one: messages, devices, contexts, pools, steps. ops.cc has the ops.
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "c_api/boundary.h"
#include "replayssm/decode_plan.h"
#include "replayssm/read_copy.h"

namespace {

// Every second word below is a name of the C++ interface.
using namespace replayssm;         // NOLINT(google-build-using-namespace)
using namespace replayssm::c_api;  // NOLINT(google-build-using-namespace)

static_assert(static_cast<int>(StatusCode::kOk) == RSSM_OK);
static_assert(static_cast<int>(StatusCode::kInvalidArgument) == RSSM_INVALID_ARGUMENT);
static_assert(static_cast<int>(StatusCode::kFailedPrecondition) == RSSM_FAILED_PRECONDITION);
static_assert(static_cast<int>(StatusCode::kUnsupported) == RSSM_UNSUPPORTED);
static_assert(static_cast<int>(StatusCode::kResourceExhausted) == RSSM_RESOURCE_EXHAUSTED);
static_assert(static_cast<int>(StatusCode::kNotFound) == RSSM_NOT_FOUND);
static_assert(static_cast<int>(StatusCode::kDataLoss) == RSSM_DATA_LOSS);
static_assert(static_cast<int>(StatusCode::kInternal) == RSSM_INTERNAL);
static_assert(static_cast<int>(DType::kF32) == RSSM_F32);
static_assert(static_cast<int>(DType::kBF16) == RSSM_BF16);
static_assert(static_cast<int>(DType::kF16) == RSSM_F16);
static_assert(static_cast<int>(ReadCopyFormat::kNone) == RSSM_READ_COPY_NONE);
static_assert(static_cast<int>(ReadCopyFormat::kFp8E4M3) == RSSM_READ_COPY_FP8_E4M3);
static_assert(static_cast<int>(ReadCopyFormat::kInt8) == RSSM_READ_COPY_INT8);
static_assert(static_cast<int>(ReadCopyFormat::kNvfp4) == RSSM_READ_COPY_NVFP4);
static_assert(static_cast<int>(FlushMode::kExact) == RSSM_FLUSH_EXACT);
static_assert(static_cast<int>(FlushMode::kFast) == RSSM_FLUSH_FAST);
static_assert(static_cast<int>(RowKind::kCommitted) == RSSM_ROW_COMMITTED);
static_assert(static_cast<int>(RowKind::kTentative) == RSSM_ROW_TENTATIVE);
static_assert(sizeof(rssm_layer::shape) == sizeof(rssm_layer::shape.reserved));
// Rows in device memory are read as they are.
static_assert(sizeof(rssm_row) == sizeof(DeviceRow));
static_assert(offsetof(rssm_row, token_begin) == offsetof(DeviceRow, token_begin));
static_assert(offsetof(rssm_row, token_count) == offsetof(DeviceRow, token_count));
static_assert(offsetof(rssm_row, slot) == offsetof(DeviceRow, slot));
static_assert(offsetof(rssm_row, kind) == offsetof(DeviceRow, kind));
static_assert(static_cast<int>(DeviceError::kCondition) == RSSM_DEVICE_BAD_CONDITION);

/// A thread's last message. Text too long for it is cut: keeping it must not be able to fail.
thread_local char last_error[1024] = "";

Result<RecurrenceShape> recurrence(std::int64_t index, const rssm_layer& layer) {
  switch (layer.family) {
    case RSSM_FAMILY_MAMBA2: {
      const rssm_mamba2_shape& s = layer.shape.mamba2;
      return RecurrenceShape(Mamba2Shape{.heads = s.heads,
                                         .head_dim = s.head_dim,
                                         .state_size = s.state_size,
                                         .groups = s.groups});
    }
    case RSSM_FAMILY_GATED_DELTA_NET: {
      const rssm_gated_delta_net_shape& s = layer.shape.gated_delta_net;
      return RecurrenceShape(GatedDeltaNetShape{.key_heads = s.key_heads,
                                                .value_heads = s.value_heads,
                                                .key_dim = s.key_dim,
                                                .value_dim = s.value_dim});
    }
    case RSSM_FAMILY_KIMI_DELTA_ATTENTION: {
      const rssm_kimi_delta_attention_shape& s = layer.shape.kimi_delta_attention;
      return RecurrenceShape(KimiDeltaAttentionShape{
          .heads = s.heads, .key_dim = s.key_dim, .value_dim = s.value_dim});
    }
    default:
      return invalid_argument("layer ", index, ": family is ", layer.family,
                              ", expected 1 (mamba2), 2 (gated_delta_net) or ",
                              "3 (kimi_delta_attention)");
  }
}

Result<LayerSpec> layer_spec(std::int64_t index, const rssm_layer& layer) {
  RSSM_RETURN_IF_ERROR(check_struct(("layer " + std::to_string(index)).c_str(), &layer));
  LayerSpec out;
  RSSM_ASSIGN_OR_RETURN(out.recurrence, recurrence(index, layer));
  out.conv = {.channels = layer.conv_channels, .width = layer.conv_width};
  if (layer.read_copy < RSSM_READ_COPY_NONE || layer.read_copy > RSSM_READ_COPY_NVFP4) {
    return invalid_argument("layer ", index, ": read_copy is ", layer.read_copy,
                            ", expected 0 (none), 1 (fp8-e4m3), 2 (int8) or 3 (nvfp4)");
  }
  out.read_copy = static_cast<ReadCopyFormat>(layer.read_copy);
  if (layer.flush < RSSM_FLUSH_OF_POOL || layer.flush > RSSM_FLUSH_FAST) {
    return invalid_argument("layer ", index, ": flush is ", layer.flush,
                            ", expected -1 (of the pool), 0 (exact) or 1 (fast)");
  }
  if (layer.flush != RSSM_FLUSH_OF_POOL) out.flush = static_cast<FlushMode>(layer.flush);
  return out;
}

Result<StatePoolOptions> pool_options(const rssm_pool_options* o) {
  RSSM_RETURN_IF_ERROR(check_struct("options", o));
  if (o->layer_count < 0 || (o->layer_count > 0 && o->layers == nullptr)) {
    return invalid_argument("layers is ", o->layers == nullptr ? "NULL" : "given", " for ",
                            o->layer_count, " layers");
  }
  StatePoolOptions out;
  for (std::int64_t i = 0; i < o->layer_count; ++i) {
    RSSM_ASSIGN_OR_RETURN(const LayerSpec layer, layer_spec(i, o->layers[i]));
    out.layers.push_back(layer);
  }
  out.slots = o->slots;
  out.limits = {.window = o->window, .draft_capacity = o->draft_capacity};
  RSSM_ASSIGN_OR_RETURN(out.checkpoint, dtype(o->checkpoint, "checkpoint"));
  RSSM_ASSIGN_OR_RETURN(out.activation, dtype(o->activation, "activation"));
  if (o->flush != RSSM_FLUSH_EXACT && o->flush != RSSM_FLUSH_FAST) {
    return invalid_argument("flush is ", o->flush, ", expected 0 (exact) or 1 (fast)");
  }
  out.flush = static_cast<FlushMode>(o->flush);
  out.rewindable = o->rewindable != 0;
  out.poison = o->poison != 0;
  RSSM_ASSIGN_OR_RETURN(out.device.kind, device_kind(o->device_kind));
  out.device.index = o->device_index;
  out.max_rows = o->max_rows;
  out.page_alignment = o->page_alignment;
  if (o->model_id != nullptr) out.model_id = o->model_id;
  if (o->storage != nullptr) {
    out.storage = {static_cast<std::byte*>(o->storage), static_cast<std::size_t>(o->storage_bytes)};
  }
  return out;
}

}  // namespace

rssm_status replayssm::c_api::report(StatusCode code, const char* message) noexcept {
  if (code == StatusCode::kOk) return RSSM_OK;
  std::strncpy(last_error, message, sizeof last_error - 1);
  last_error[sizeof last_error - 1] = '\0';
  return static_cast<rssm_status>(code);
}

extern "C" {

const char* rssm_last_error(void) { return last_error; }

int rssm_version(void) { return RSSM_VERSION_MAJOR * 1000 + RSSM_VERSION_MINOR; }

rssm_status rssm_device_count(int32_t kind, int32_t* count) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("count", count));
    RSSM_ASSIGN_OR_RETURN(const DeviceKind k, device_kind(kind));
    RSSM_ASSIGN_OR_RETURN(*count, device_count(k));
    return {};
  });
}

rssm_status rssm_device_query(int32_t kind, int32_t index, rssm_device_properties* properties) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("properties", properties));
    RSSM_ASSIGN_OR_RETURN(const DeviceKind k, device_kind(kind));
    RSSM_ASSIGN_OR_RETURN(const DeviceProperties found, device_properties({k, index}));
    *properties = {};
    found.name.copy(properties->name, sizeof properties->name - 1);
    properties->compute_capability = found.compute_capability;
    properties->multiprocessors = found.multiprocessors;
    properties->memory = found.memory;
    properties->free_memory = found.free_memory;
    return {};
  });
}

rssm_status rssm_threads_create(int32_t count, rssm_threads** threads) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("threads", threads));
    if (count < 1) return invalid_argument("threads is ", count, ", expected at least 1");
    *threads = new rssm_threads{ThreadPool(count)};
    return {};
  });
}

void rssm_threads_destroy(rssm_threads* threads) { delete threads; }

rssm_status rssm_context_init(rssm_context* context, size_t size) {
  return init_struct("context", context, size, {});
}

// ---- Pools ----

rssm_status rssm_layer_init(rssm_layer* layer, size_t size) {
  rssm_layer defaults{};
  defaults.flush = RSSM_FLUSH_OF_POOL;
  return init_struct("layer", layer, size, defaults);
}

rssm_status rssm_pool_options_init(rssm_pool_options* options, size_t size) {
  const StatePoolOptions from;
  rssm_pool_options defaults{};
  defaults.window = from.limits.window;
  defaults.draft_capacity = from.limits.draft_capacity;
  defaults.page_alignment = from.page_alignment;
  return init_struct("options", options, size, defaults);
}

rssm_status rssm_pool_bytes_per_slot(const rssm_pool_options* options, rssm_slot_bytes* bytes) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("bytes", bytes));
    RSSM_ASSIGN_OR_RETURN(const StatePoolOptions o, pool_options(options));
    RSSM_ASSIGN_OR_RETURN(const SlotBytes found, StatePool::bytes_per_slot(o));
    *bytes = {.checkpoint = found.checkpoint,
              .read_copy = found.read_copy,
              .record_ring = found.record_ring,
              .conv_ring = found.conv_ring,
              .total = found.total};
    return {};
  });
}

rssm_status rssm_pool_slots_for_budget(const rssm_pool_options* options, uint64_t budget,
                                       int64_t* slots) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("slots", slots));
    RSSM_ASSIGN_OR_RETURN(const StatePoolOptions o, pool_options(options));
    RSSM_ASSIGN_OR_RETURN(*slots, StatePool::slots_for_budget(o, budget));
    return {};
  });
}

rssm_status rssm_choose_decode(const rssm_context* context, const rssm_pool_options* options,
                               int64_t sequences, rssm_decode_plan* plan) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("plan", plan));
    RSSM_ASSIGN_OR_RETURN(const StatePoolOptions o, pool_options(options));
    DecodePlan found;
    RSSM_RETURN_IF_ERROR(with_context(context, [&](const auto& c) -> Status {
      RSSM_ASSIGN_OR_RETURN(found, choose_decode(c, o, sequences));
      return {};
    }));
    *plan = {};
    plan->replay = found.replay ? 1 : 0;
    plan->window = found.window;
    plan->plain_seconds = found.plain_seconds;
    plan->replay_seconds = found.replay_seconds;
    found.reason.copy(plan->reason, sizeof plan->reason - 1);
    return {};
  });
}

rssm_status rssm_pool_create(const rssm_pool_options* options, rssm_pool** pool) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    RSSM_ASSIGN_OR_RETURN(StatePoolOptions o, pool_options(options));
    RSSM_ASSIGN_OR_RETURN(StatePool made, StatePool::create(std::move(o)));
    *pool = new rssm_pool{std::move(made)};
    return {};
  });
}

void rssm_pool_destroy(rssm_pool* pool) { delete pool; }

rssm_status rssm_pool_set_mamba2_a(rssm_pool* pool, int32_t layer, const float* a, int64_t count) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    RSSM_RETURN_IF_ERROR(check_not_null("a", a));
    if (count < 0) return invalid_argument("mamba2 A has ", count, " values");
    return pool->pool.set_mamba2_a(layer, {a, static_cast<std::size_t>(count)});
  });
}

rssm_status rssm_pool_free_slots(const rssm_pool* pool, int64_t* count) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    RSSM_RETURN_IF_ERROR(check_not_null("count", count));
    *count = pool->pool.free_slots();
    return {};
  });
}

rssm_status rssm_pool_acquire(rssm_pool* pool, const rssm_context* context, int32_t* slot) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    RSSM_RETURN_IF_ERROR(check_not_null("slot", slot));
    return with_context(context, [&]<typename Context>(const Context& c) -> Status {
      if constexpr (kIsCuda<Context>) {
        RSSM_ASSIGN_OR_RETURN(*slot, pool->pool.acquire(c));
      } else {
        RSSM_ASSIGN_OR_RETURN(*slot, pool->pool.acquire());
      }
      return {};
    });
  });
}

rssm_status rssm_pool_reset(rssm_pool* pool, const rssm_context* context, int32_t slot) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    return with_context(context, [&]<typename Context>(const Context& c) {
      if constexpr (kIsCuda<Context>) return pool->pool.reset(c, slot);
      return pool->pool.reset(slot);
    });
  });
}

rssm_status rssm_pool_release(rssm_pool* pool, const rssm_context* context, int32_t slot) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    return with_context(context, [&]<typename Context>(const Context& c) {
      if constexpr (kIsCuda<Context>) return pool->pool.release(c, slot);
      return pool->pool.release(slot);
    });
  });
}

rssm_status rssm_pool_force_flush(rssm_pool* pool, const rssm_context* context, int32_t slot) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    return with_context(context, [&]<typename Context>(const Context& c) {
      if constexpr (kIsCuda<Context>) return pool->pool.force_flush(c, slot);
      return pool->pool.force_flush(slot);
    });
  });
}

rssm_status rssm_pool_cursor(const rssm_pool* pool, const rssm_context* context, int32_t slot,
                             rssm_cursor* cursor) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    RSSM_RETURN_IF_ERROR(check_not_null("cursor", cursor));
    Cursor found;
    RSSM_RETURN_IF_ERROR(with_context(context, [&]<typename Context>(const Context& c) -> Status {
      if constexpr (kIsCuda<Context>) {
        RSSM_ASSIGN_OR_RETURN(found, pool->pool.cursor(c, slot));
      } else {
        RSSM_ASSIGN_OR_RETURN(found, pool->pool.cursor(slot));
      }
      return {};
    }));
    *cursor = {found.checkpoint_position, found.position, found.force_flush ? 1 : 0};
    return {};
  });
}

rssm_status rssm_pool_copy(rssm_pool* pool, const rssm_context* context, int32_t src, int32_t dst) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    return with_context(context, [&]<typename Context>(const Context& c) {
      if constexpr (kIsCuda<Context>) return pool->pool.copy(c, src, dst);
      return pool->pool.copy(src, dst);
    });
  });
}

rssm_status rssm_pool_materialize(rssm_pool* pool, const rssm_context* context, int32_t src,
                                  int64_t prefix, int32_t dst) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    return with_context(context,
                        [&](const auto& c) { return pool->pool.materialize(c, src, prefix, dst); });
  });
}

rssm_status rssm_pool_truncate(rssm_pool* pool, const rssm_context* context, int32_t slot,
                               int64_t position) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    return with_context(context, [&]<typename Context>(const Context& c) {
      if constexpr (kIsCuda<Context>) return pool->pool.truncate(c, slot, position);
      return pool->pool.truncate(slot, position);
    });
  });
}

rssm_status rssm_pool_save(const rssm_pool* pool, const rssm_context* context, int32_t slot,
                           rssm_image** image) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    RSSM_RETURN_IF_ERROR(check_not_null("image", image));
    std::vector<std::byte> bytes;
    RSSM_RETURN_IF_ERROR(with_context(context, [&]<typename Context>(const Context& c) -> Status {
      if constexpr (kIsCuda<Context>) {
        RSSM_ASSIGN_OR_RETURN(bytes, pool->pool.save(c, slot));
      } else {
        RSSM_ASSIGN_OR_RETURN(bytes, pool->pool.save(slot));
      }
      return {};
    }));
    *image = new rssm_image{std::move(bytes)};
    return {};
  });
}

const void* rssm_image_data(const rssm_image* image) {
  return image == nullptr ? nullptr : image->bytes.data();
}

uint64_t rssm_image_size(const rssm_image* image) {
  return image == nullptr ? 0 : image->bytes.size();
}

void rssm_image_destroy(rssm_image* image) { delete image; }

rssm_status rssm_pool_load(rssm_pool* pool, const rssm_context* context, int32_t slot,
                           const void* data, uint64_t size) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    RSSM_RETURN_IF_ERROR(check_not_null("data", data));
    const std::span image(static_cast<const std::byte*>(data), static_cast<std::size_t>(size));
    return with_context(context, [&](const auto& c) { return pool->pool.load(c, slot, image); });
  });
}

// ---- Steps ----

rssm_status rssm_step_begin(rssm_pool* pool, const rssm_context* context, const rssm_row* rows,
                            int64_t row_count, rssm_step** step) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    RSSM_RETURN_IF_ERROR(check_not_null("step", step));
    if (row_count < 0) return invalid_argument("row_count is ", row_count, ", expected 0 or more");
    if (row_count > 0) RSSM_RETURN_IF_ERROR(check_not_null("rows", rows));
    std::vector<StepRow> converted;
    for (std::int64_t i = 0; i < row_count; ++i) {
      const rssm_row& row = rows[i];
      if (row.kind > RSSM_ROW_TENTATIVE) {
        return invalid_argument("row ", i, ": kind is ", int{row.kind},
                                ", expected 0 (committed) or 1 (tentative)");
      }
      converted.push_back({.slot = row.slot,
                           .kind = static_cast<RowKind>(row.kind),
                           .token_begin = row.token_begin,
                           .token_count = row.token_count,
                           .parents = {}});
    }
    return with_context(context, [&]<typename Context>(const Context& c) -> Status {
      const std::span<const StepRow> all(converted);
      // The handle comes first: a step that has begun must not be lost for want of one.
      auto handle = std::make_unique<rssm_step>(std::nullopt, row_count);
      if constexpr (kIsCuda<Context>) {
        RSSM_ASSIGN_OR_RETURN(handle->step, pool->pool.begin_step(c, all));
      } else {
        RSSM_ASSIGN_OR_RETURN(handle->step, pool->pool.begin_step(all));
      }
      *step = handle.release();
      return {};
    });
  });
}

rssm_status rssm_step_begin_device(rssm_pool* pool, const rssm_context* context,
                                   const rssm_row* rows, int64_t row_count, int64_t token_count,
                                   rssm_step** step) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    RSSM_RETURN_IF_ERROR(check_not_null("step", step));
    return with_context(context, [&]<typename Context>(const Context& c) -> Status {
      if constexpr (kIsCuda<Context>) {
        const DeviceRows device_rows{.rows = reinterpret_cast<const DeviceRow*>(rows),
                                     .row_count = row_count,
                                     .token_count = token_count};
        auto handle = std::make_unique<rssm_step>(std::nullopt, row_count);
        RSSM_ASSIGN_OR_RETURN(handle->step, pool->pool.begin_step(c, device_rows));
        *step = handle.release();
        return {};
      } else {
        return invalid_argument("rows on the device need a context of cuda, the call is for cpu");
      }
    });
  });
}

rssm_status rssm_step_commit(rssm_pool* pool, const rssm_context* context, rssm_step* step,
                             const int64_t* accepted) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    RSSM_RETURN_IF_ERROR(check_not_null("step", step));
    if (step->row_count > 0) RSSM_RETURN_IF_ERROR(check_not_null("accepted", accepted));
    const std::span counts(accepted, static_cast<std::size_t>(step->row_count));
    return with_context(context, [&]<typename Context>(const Context& c) {
      if constexpr (kIsCuda<Context>) {
        return step->step->on_device() ? pool->pool.commit(c, *step->step, accepted)
                                       : pool->pool.commit(c, *step->step, counts);
      } else {
        return pool->pool.commit(*step->step, counts);
      }
    });
  });
}

rssm_status rssm_step_abort(rssm_pool* pool, const rssm_context* context, rssm_step* step) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    RSSM_RETURN_IF_ERROR(check_not_null("step", step));
    return with_context(context, [&]<typename Context>(const Context& c) {
      if constexpr (kIsCuda<Context>) return pool->pool.abort(c, *step->step);
      return pool->pool.abort(*step->step);
    });
  });
}

void rssm_step_destroy(rssm_step* step) { delete step; }

rssm_status rssm_pool_take_device_error(rssm_pool* pool, const rssm_context* context,
                                        rssm_device_error* error) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    RSSM_RETURN_IF_ERROR(check_not_null("error", error));
    return with_context(context, [&]<typename Context>(const Context& c) -> Status {
      if constexpr (kIsCuda<Context>) {
        RSSM_ASSIGN_OR_RETURN(const DeviceError found, pool->pool.take_device_error(c));
        *error = {found.what, found.row, found.found, found.allowed};
        return {};
      } else {
        return invalid_argument("device errors need a context of cuda, the call is for cpu");
      }
    });
  });
}

}  // extern "C"
