// The thread pool: every task once, whatever the sizes, again and again.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "replayssm/cpu.h"

namespace replayssm {
namespace {

TEST(ThreadPool, EveryTaskRunsOnce) {
  for (const int threads : {1, 2, 3, 4, 7}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.size(), threads);
    for (const std::int64_t tasks : {0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 100, 1000, 4097}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
      std::atomic<bool> worker_in_range = true;
      pool.parallel_for(tasks, [&](std::int64_t task, int worker) {
        runs[static_cast<std::size_t>(task)].fetch_add(1);
        if (worker < 0 || worker >= threads) worker_in_range = false;
      });
      for (std::int64_t i = 0; i < tasks; ++i) {
        ASSERT_EQ(runs[static_cast<std::size_t>(i)].load(), 1)
            << "task " << i << " of " << tasks << ", " << threads << " threads";
      }
      EXPECT_TRUE(worker_in_range);
    }
  }
}

// Writes of tasks are visible when parallel_for returns, and what the caller wrote before is
// visible to tasks: no atomics here, so a data race is for the thread sanitizer to find.
TEST(ThreadPool, TenThousandRounds) {
  ThreadPool pool(3);
  std::vector<std::int64_t> values(17);
  std::int64_t expected = 0;
  for (std::int64_t round = 0; round < 10'000; ++round) {
    const std::int64_t tasks = round % 18;
    pool.parallel_for(tasks, [&](std::int64_t task, int) {
      values[static_cast<std::size_t>(task)] += round + task;
    });
    expected += tasks * round + tasks * (tasks - 1) / 2;
    if (round % 1000 == 0) {
      ASSERT_EQ(std::accumulate(values.begin(), values.end(), std::int64_t{0}), expected);
    }
  }
  EXPECT_EQ(std::accumulate(values.begin(), values.end(), std::int64_t{0}), expected);
}

// Workers have separate scratch: one worker never runs two tasks at a time.
TEST(ThreadPool, WorkerIndicesAreExclusive) {
  ThreadPool pool(4);
  std::vector<std::atomic<int>> inside(4);
  std::atomic<bool> overlapped = false;
  for (int round = 0; round < 200; ++round) {
    pool.parallel_for(64, [&](std::int64_t, int worker) {
      auto& mine = inside[static_cast<std::size_t>(worker)];
      if (mine.fetch_add(1) != 0) overlapped = true;
      std::this_thread::yield();
      mine.fetch_sub(1);
    });
  }
  EXPECT_FALSE(overlapped);
}

TEST(ThreadPool, PoolOfOneRunsOnTheCaller) {
  ThreadPool pool(1);
  const std::thread::id caller = std::this_thread::get_id();
  int runs = 0;
  pool.parallel_for(100, [&](std::int64_t, int worker) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(worker, 0);
    ++runs;
  });
  EXPECT_EQ(runs, 100);
}

TEST(ThreadPool, TheCallerIsWorkerZero) {
  ThreadPool pool(2);
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<bool> right = true;
  for (int round = 0; round < 200; ++round) {
    pool.parallel_for(8, [&](std::int64_t, int worker) {
      if ((std::this_thread::get_id() == caller) != (worker == 0)) right = false;
    });
  }
  EXPECT_TRUE(right);
}

TEST(ThreadPool, ManyPoolsStartAndStop) {
  for (int i = 0; i < 200; ++i) {
    ThreadPool pool(1 + i % 4);
    if (i % 3 == 0) continue;  // stopped without ever having run
    std::atomic<int> runs = 0;
    pool.parallel_for(i % 7, [&](std::int64_t, int) { ++runs; });
    EXPECT_EQ(runs.load(), i % 7);
  }
}

// Different pools may be used by different threads at the same time.
TEST(ThreadPool, PoolsAreIndependent) {
  std::atomic<std::int64_t> total = 0;
  std::vector<std::thread> callers;
  for (int t = 0; t < 3; ++t) {
    callers.emplace_back([&] {
      ThreadPool pool(2);
      for (int round = 0; round < 300; ++round) {
        pool.parallel_for(11, [&](std::int64_t, int) { ++total; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total.load(), 3 * 300 * 11);
}

TEST(CpuContext, RunsWithoutAPool) {
  const CpuContext context;
  EXPECT_EQ(context.thread_count(), 1);
  std::int64_t sum = 0;
  context.parallel_for(10, [&](std::int64_t task, int worker) { sum += task + worker; });
  EXPECT_EQ(sum, 45);
  ThreadPool pool(3);
  EXPECT_EQ((CpuContext{&pool, CpuIsa::kGeneric}.thread_count()), 3);
}

}  // namespace
}  // namespace replayssm
