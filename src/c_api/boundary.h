// What every function of the C interface is made of: handles, the guard that lets nothing be thrown
// across, checks of what C callers pass, contexts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <optional>
#include <type_traits>
#include <vector>

#include "replayssm/cpu.h"
#include "replayssm/cuda.h"
#include "replayssm/device.h"
#include "replayssm/dtype.h"
#include "replayssm/replayssm.h"
#include "replayssm/state_pool.h"
#include "replayssm/status.h"

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

namespace replayssm::c_api {

/// Keeps the message of a code that is not ok as this thread's last one.
rssm_status report(StatusCode code, const char* message) noexcept;

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

/// A struct's size tells its versions apart: a member that is added makes it larger, it never goes
/// into padding.
template <typename T>
Status check_struct_size(const char* what, std::size_t size) {
  if (size == sizeof(T)) return {};
  return invalid_argument(what, " has struct_size ", size, ", this library knows ", sizeof(T),
                          " (set by the struct's init function, from this library's header)");
}

template <typename T>
Status check_struct(const char* what, const T* pointer) {
  RSSM_RETURN_IF_ERROR(check_not_null(what, pointer));
  return check_struct_size<T>(what, pointer->struct_size);
}

/// Defaults into a struct that is `size` bytes to the caller.
template <typename T>
rssm_status init_struct(const char* what, T* out, std::size_t size, T defaults) {
  return guarded([&]() -> Status {
    RSSM_RETURN_IF_ERROR(check_not_null(what, out));
    RSSM_RETURN_IF_ERROR(check_struct_size<T>(what, size));
    defaults.struct_size = sizeof(T);
    *out = defaults;
    return {};
  });
}

inline Result<DeviceKind> device_kind(std::int32_t kind) {
  if (kind == RSSM_DEVICE_CPU) return DeviceKind::kCpu;
  if (kind == RSSM_DEVICE_CUDA) return DeviceKind::kCuda;
  return invalid_argument("device kind is ", kind, ", expected 0 (cpu) or 1 (cuda)");
}

template <typename... What>
Result<DType> dtype(std::int32_t value, const What&... what) {
  if (value >= RSSM_F32 && value <= RSSM_F16) return static_cast<DType>(value);
  return invalid_argument(what..., " has element type ", value,
                          ", expected 0 (f32), 1 (bf16) or 2 (f16)");
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

}  // namespace replayssm::c_api
