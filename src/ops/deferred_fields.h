// The deferred decays of a CPU task's heads (ops/deferred_decay.h). A family's Task has deferred_in
// and deferred, (heads, rows / kDeferredRows) of checkpoint_in and of checkpoint. On the CPU all of
// a head's are one number. They are null where nothing is deferred, and deferred_in with
// checkpoint_in: c is 1 then.
#pragma once

#include <cstdint>

#include "ops/deferred_decay.h"

namespace replayssm {

/// Of the head, which has so many rows, as task.checkpoint_in has it.
template <typename Task>
RSSM_ALWAYS_INLINE DeferredDecay deferred_in(const Task& task, std::int64_t head,
                                             std::int64_t rows) {
  if (task.deferred_in == nullptr) return {};
  return DeferredDecay(task.deferred_in[head * (rows / kDeferredRows)]);
}

/// Of the head as task.checkpoint has it, written before.
template <typename Task>
RSSM_ALWAYS_INLINE DeferredDecay deferred_out(const Task& task, std::int64_t head,
                                              std::int64_t rows) {
  if (task.deferred == nullptr) return {};
  return DeferredDecay(task.deferred[head * (rows / kDeferredRows)]);
}

template <typename Task>
RSSM_ALWAYS_INLINE void store_deferred(const Task& task, std::int64_t head, std::int64_t rows,
                                       DeferredDecay deferred) {
  if (task.deferred == nullptr) return;
  const std::int64_t count = rows / kDeferredRows;
  for (std::int64_t i = 0; i < count; ++i) task.deferred[head * count + i] = deferred.value();
}

}  // namespace replayssm
