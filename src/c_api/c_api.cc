// The C interface over the C++ one: conversions, and the guard that lets nothing be thrown across.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "replayssm/cpu.h"
#include "replayssm/cuda.h"
#include "replayssm/device.h"
#include "replayssm/ops/causal_conv1d.h"
#include "replayssm/ops/mamba2.h"
#include "replayssm/read_copy.h"
#include "replayssm/replayssm.h"
#include "replayssm/state_pool.h"

struct rssm_threads {
  replayssm::ThreadPool pool;
};
struct rssm_pool {
  replayssm::StatePool pool;
};
struct rssm_step {
  std::optional<replayssm::Step> step;  // always there once the handle is the caller's
  std::int64_t row_count;
};
struct rssm_image {
  std::vector<std::byte> bytes;
};

namespace {

// Every second word below is a name of the C++ interface.
using namespace replayssm;  // NOLINT(google-build-using-namespace)

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
static_assert(static_cast<int>(RowKind::kCommitted) == RSSM_ROW_COMMITTED);
static_assert(static_cast<int>(RowKind::kTentative) == RSSM_ROW_TENTATIVE);
static_assert(TensorView::kMaxRank == RSSM_MAX_RANK);
// Rows in device memory are read as they are.
static_assert(sizeof(rssm_row) == sizeof(DeviceRow));
static_assert(offsetof(rssm_row, token_begin) == offsetof(DeviceRow, token_begin));
static_assert(offsetof(rssm_row, token_count) == offsetof(DeviceRow, token_count));
static_assert(offsetof(rssm_row, slot) == offsetof(DeviceRow, slot));
static_assert(offsetof(rssm_row, kind) == offsetof(DeviceRow, kind));
static_assert(static_cast<int>(DeviceError::kCondition) == RSSM_DEVICE_BAD_CONDITION);

/// A thread's last message. Text too long for it is cut: keeping it must not be able to fail.
thread_local char last_error[1024] = "";

rssm_status report(StatusCode code, const char* message) noexcept {
  if (code == StatusCode::kOk) return RSSM_OK;
  std::strncpy(last_error, message, sizeof last_error - 1);
  last_error[sizeof last_error - 1] = '\0';
  return static_cast<rssm_status>(code);
}

/// Runs body, a function that returns a Status, and turns whatever happens into a status of ours.
template <typename Body>
rssm_status guarded(Body body) noexcept {
  try {
    const Status status = body();
    return report(status.code(), status.message().c_str());
  } catch (const std::bad_alloc&) {
    return report(StatusCode::kResourceExhausted, "out of host memory");
  } catch (const std::exception& error) {
    return report(StatusCode::kInternal, error.what());
  } catch (...) {
    return report(StatusCode::kInternal, "unknown exception");
  }
}

template <typename T>
Status check_not_null(const char* what, const T* pointer) {
  if (pointer != nullptr) return {};
  return invalid_argument(what, " is NULL");
}

template <typename T>
Status check_struct(const char* what, const T* pointer) {
  RSSM_RETURN_IF_ERROR(check_not_null(what, pointer));
  if (pointer->struct_size == sizeof(T)) return {};
  return invalid_argument(what, " has struct_size ", pointer->struct_size, ", this library knows ",
                          sizeof(T), " (use the struct's init function)");
}

Result<DeviceKind> device_kind(std::int32_t kind) {
  if (kind == RSSM_DEVICE_CPU) return DeviceKind::kCpu;
  if (kind == RSSM_DEVICE_CUDA) return DeviceKind::kCuda;
  return invalid_argument("device kind is ", kind, ", expected 0 (cpu) or 1 (cuda)");
}

Result<DType> dtype(const char* what, std::int32_t value) {
  if (value >= RSSM_F32 && value <= RSSM_F16) return static_cast<DType>(value);
  return invalid_argument(what, " has element type ", value, ", expected 0 (f32), 1 (bf16) or ",
                          "2 (f16)");
}

/// Calls `body` with the CpuContext or the CudaContext that `context` describes.
template <typename Body>
Status with_context(const rssm_context* context, Body body) {
  if (context != nullptr) RSSM_RETURN_IF_ERROR(check_struct("context", context));
  DeviceKind kind = DeviceKind::kCpu;
  if (context != nullptr) {
    RSSM_ASSIGN_OR_RETURN(kind, device_kind(context->device_kind));
  }
  if (kind == DeviceKind::kCuda) {
    return body(CudaContext(context->device_index, context->stream));
  }
  RSSM_ASSIGN_OR_RETURN(const CpuIsa isa, select_isa());
  ThreadPool* threads =
      context == nullptr || context->threads == nullptr ? nullptr : &context->threads->pool;
  return body(CpuContext{.threads = threads, .isa = isa});
}

template <typename Context>
constexpr bool kIsCuda = std::is_same_v<Context, CudaContext>;

Result<TensorView> view(const char* what, const rssm_tensor& t) {
  TensorView out;
  if (t.data == nullptr && t.rank == 0) return out;
  if (t.rank < 0 || t.rank > RSSM_MAX_RANK) {
    return invalid_argument(what, " has rank ", t.rank, ", expected 0..", RSSM_MAX_RANK);
  }
  RSSM_ASSIGN_OR_RETURN(out.dtype, dtype(what, t.dtype));
  out.data = t.data;
  out.rank = t.rank;
  std::copy_n(t.shape, t.rank, out.shape.begin());
  std::copy_n(t.strides, t.rank, out.strides.begin());
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
    const rssm_layer& l = o->layers[i];
    if (l.read_copy < RSSM_READ_COPY_NONE || l.read_copy > RSSM_READ_COPY_NVFP4) {
      return invalid_argument("layer ", i, ": read_copy is ", l.read_copy,
                              ", expected 0 (none), 1 (fp8-e4m3), 2 (int8) or 3 (nvfp4)");
    }
    out.layers.push_back({.recurrence = Mamba2Shape{.heads = l.heads,
                                                    .head_dim = l.head_dim,
                                                    .state_size = l.state_size,
                                                    .groups = l.groups},
                          .conv = {.channels = l.conv_channels, .width = l.conv_width},
                          .read_copy = static_cast<ReadCopyFormat>(l.read_copy)});
  }
  out.slots = o->slots;
  out.limits = {.window = o->window, .draft_capacity = o->draft_capacity};
  RSSM_ASSIGN_OR_RETURN(out.checkpoint, dtype("checkpoint", o->checkpoint));
  RSSM_ASSIGN_OR_RETURN(out.activation, dtype("activation", o->activation));
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

void rssm_context_init(rssm_context* context) {
  if (context == nullptr) return;
  *context = {};
  context->struct_size = sizeof *context;
}

// ---- Pools ----

void rssm_pool_options_init(rssm_pool_options* options) {
  if (options == nullptr) return;
  const StatePoolOptions defaults;
  *options = {};
  options->struct_size = sizeof *options;
  options->window = defaults.limits.window;
  options->draft_capacity = defaults.limits.draft_capacity;
  options->page_alignment = defaults.page_alignment;
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

// ---- Ops ----

void rssm_mamba2_args_init(rssm_mamba2_args* args) {
  if (args == nullptr) return;
  const Mamba2Params defaults;
  *args = {};
  args->struct_size = sizeof *args;
  args->dt_softplus = defaults.dt_softplus ? 1 : 0;
  args->dt_min = defaults.dt_min;
  args->dt_max = defaults.dt_max;
}

rssm_status rssm_mamba2_step(rssm_pool* pool, const rssm_context* context, int32_t layer,
                             rssm_step* step, const rssm_mamba2_args* args) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    RSSM_RETURN_IF_ERROR(check_not_null("step", step));
    RSSM_RETURN_IF_ERROR(check_struct("args", args));
    Mamba2Params params;
    RSSM_ASSIGN_OR_RETURN(params.d, view("mamba2 D", args->d));
    RSSM_ASSIGN_OR_RETURN(params.dt_bias, view("mamba2 dt_bias", args->dt_bias));
    params.dt_softplus = args->dt_softplus != 0;
    params.dt_min = args->dt_min;
    params.dt_max = args->dt_max;
    Mamba2Operands operands;
    RSSM_ASSIGN_OR_RETURN(operands.x, view("mamba2 x", args->x));
    RSSM_ASSIGN_OR_RETURN(operands.b, view("mamba2 B", args->b));
    RSSM_ASSIGN_OR_RETURN(operands.c, view("mamba2 C", args->c));
    RSSM_ASSIGN_OR_RETURN(operands.dt, view("mamba2 dt", args->dt));
    RSSM_ASSIGN_OR_RETURN(operands.z, view("mamba2 z", args->z));
    RSSM_ASSIGN_OR_RETURN(operands.y, view("mamba2 y", args->y));
    return with_context(context, [&](const auto& c) {
      return mamba2_step(c, pool->pool, layer, *step->step, params, operands);
    });
  });
}

rssm_status rssm_mamba2_explain(const rssm_pool* pool, const rssm_context* context, int32_t layer,
                                int64_t rows, char* buffer, uint64_t capacity, uint64_t* needed) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    if (capacity > 0) RSSM_RETURN_IF_ERROR(check_not_null("buffer", buffer));
    std::string text;
    RSSM_RETURN_IF_ERROR(with_context(context, [&]<typename Context>(const Context& c) -> Status {
      if constexpr (kIsCuda<Context>) {
        RSSM_ASSIGN_OR_RETURN(text, mamba2_explain(c, pool->pool, layer, rows));
      } else {
        RSSM_ASSIGN_OR_RETURN(text, mamba2_explain(c, pool->pool, layer));
      }
      return {};
    }));
    if (needed != nullptr) *needed = text.size() + 1;
    if (capacity > 0) {
      buffer[text.copy(buffer, static_cast<std::size_t>(capacity - 1))] = '\0';
    }
    return {};
  });
}

void rssm_causal_conv1d_args_init(rssm_causal_conv1d_args* args) {
  if (args == nullptr) return;
  *args = {};
  args->struct_size = sizeof *args;
  args->silu = 1;
}

rssm_status rssm_causal_conv1d_step(rssm_pool* pool, const rssm_context* context, int32_t layer,
                                    rssm_step* step, const rssm_causal_conv1d_args* args) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null("pool", pool));
    RSSM_RETURN_IF_ERROR(check_not_null("step", step));
    RSSM_RETURN_IF_ERROR(check_struct("args", args));
    CausalConv1dOperands operands;
    RSSM_ASSIGN_OR_RETURN(operands.u, view("convolution u", args->u));
    RSSM_ASSIGN_OR_RETURN(operands.weight, view("convolution weight", args->weight));
    RSSM_ASSIGN_OR_RETURN(operands.bias, view("convolution bias", args->bias));
    RSSM_ASSIGN_OR_RETURN(operands.out, view("convolution out", args->out));
    operands.silu = args->silu != 0;
    return with_context(context, [&](const auto& c) {
      return causal_conv1d_step(c, pool->pool, layer, *step->step, operands);
    });
  });
}

}  // extern "C"
