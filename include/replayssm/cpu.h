// CPU execution: instruction set selection and the worker threads ops run on.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <type_traits>
#include <vector>

#include "replayssm/status.h"

namespace replayssm {

enum class CpuIsa : std::uint8_t { kGeneric = 0, kAvx2 = 1, kAvx512 = 2 };

/// "generic", "avx2" (AVX2, FMA, F16C) or "avx512" (F, BW, DQ, VL).
const char* to_string(CpuIsa isa);

/// Instruction sets this processor can run, worst first; kGeneric is always among them.
std::vector<CpuIsa> supported_isas();

/// The instruction set to run: the value of the environment variable REPLAYSSM_ISA if set, else the
/// best supported one. An unknown or unsupported value is an error naming it and what is supported.
Result<CpuIsa> select_isa();

/// Non-owning reference to a callable; the callable must outlive the call it is passed to.
template <typename Signature>
class FunctionRef;
template <typename R, typename... Args>
class FunctionRef<R(Args...)> {
 public:
  template <typename F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>)
  FunctionRef(F&& f)  // NOLINT(google-explicit-constructor)
      : object_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* object, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(object))(args...);
        }) {}
  R operator()(Args... args) const { return call_(object_, args...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

/// A fixed set of persistent workers. The calling thread is worker 0, so a pool of one starts no
/// thread. Not re-entrant, and one caller at a time: parallel_for must not be called from a task.
class ThreadPool {
 public:
  /// `threads` counts the caller and must be at least 1.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  /// Runs task(i, worker) for every i in [0, tasks), each exactly once, and returns when all are
  /// done. Which worker runs which task is unspecified; results must not depend on it.
  void parallel_for(std::int64_t tasks, FunctionRef<void(std::int64_t task, int worker)> task);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// What a CPU op runs on. Both pointers and the choice are the caller's; ops start no threads.
struct CpuContext {
  ThreadPool* threads = nullptr;  // null: run on the calling thread
  CpuIsa isa = CpuIsa::kGeneric;

  int thread_count() const { return threads == nullptr ? 1 : threads->size(); }

  void parallel_for(std::int64_t tasks,
                    FunctionRef<void(std::int64_t task, int worker)> task) const {
    if (threads != nullptr) {
      threads->parallel_for(tasks, task);
    } else {
      for (std::int64_t i = 0; i < tasks; ++i) task(i, 0);
    }
  }
};

}  // namespace replayssm
