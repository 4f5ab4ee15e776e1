#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "replayssm/cpu.h"

namespace replayssm {
namespace {

// A decode step issues a parallel_for every few tens of microseconds, so a worker spins for 50 to
// 200 microseconds (a pause is 40 cycles on some processors, 140 on others) before it sleeps:
// waking a sleeping thread costs more than most parts of a step take.
constexpr int kSpins = 4000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

struct ThreadPool::Impl {
  explicit Impl(int threads) : spin(std::thread::hardware_concurrency() >= unsigned(threads)) {
    try {
      for (int worker = 1; worker < threads; ++worker) {
        workers.emplace_back([this, worker] { run(worker); });
      }
    } catch (...) {
      shut_down();  // a machine out of threads is the caller's to handle, not the end of the
                    // process
      throw;
    }
  }

  ~Impl() { shut_down(); }

  void shut_down() {
    {
      std::lock_guard lock(mutex);
      stop = true;
      generation.fetch_add(1, std::memory_order_release);
    }
    wake.notify_all();
    for (std::thread& thread : workers) thread.join();
  }

  void run(int worker) {
    std::uint64_t seen = 0;
    while (true) {
      for (int i = 0; spin && i < kSpins && generation.load(std::memory_order_acquire) == seen;
           ++i) {
        pause();
      }
      if (generation.load(std::memory_order_acquire) == seen) {
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return generation.load(std::memory_order_acquire) != seen; });
      }
      seen = generation.load(std::memory_order_acquire);
      if (stop) return;
      work(worker);
      if (pending.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        std::lock_guard lock(mutex);
        done.notify_one();
      }
    }
  }

  void work(int worker) {
    for (std::int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < tasks;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      (*task)(i, worker);
    }
  }

  void parallel_for(std::int64_t count, FunctionRef<void(std::int64_t, int)> function) {
    if (workers.empty() || count <= 1) {
      for (std::int64_t i = 0; i < count; ++i) function(i, 0);
      return;
    }
    {
      std::lock_guard lock(mutex);
      tasks = count;
      task = &function;
      next.store(0, std::memory_order_relaxed);
      pending.store(static_cast<int>(workers.size()), std::memory_order_relaxed);
      generation.fetch_add(1, std::memory_order_release);
    }
    wake.notify_all();
    work(0);
    for (int i = 0; spin && i < kSpins && pending.load(std::memory_order_acquire) != 0; ++i) {
      pause();
    }
    if (pending.load(std::memory_order_acquire) != 0) {
      std::unique_lock lock(mutex);
      done.wait(lock, [&] { return pending.load(std::memory_order_acquire) == 0; });
    }
  }

  const bool spin;  // spinning only helps when every thread has a core of its own
  std::vector<std::thread> workers;
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable done;
  std::atomic<std::uint64_t> generation{0};
  std::atomic<std::int64_t> next{0};
  std::atomic<int> pending{0};
  std::int64_t tasks = 0;
  FunctionRef<void(std::int64_t, int)>* task = nullptr;
  bool stop = false;
};

ThreadPool::ThreadPool(int threads) : impl_(std::make_unique<Impl>(threads)) {}
ThreadPool::~ThreadPool() = default;

int ThreadPool::size() const { return static_cast<int>(impl_->workers.size()) + 1; }

void ThreadPool::parallel_for(std::int64_t tasks, FunctionRef<void(std::int64_t, int)> task) {
  impl_->parallel_for(tasks, task);
}

}  // namespace replayssm
