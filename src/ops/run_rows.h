// Running a family's CPU kernels over the work items of a step or of a fold. A family's Task has
// head_begin and head_end, what a FoldTask names, and the fields of ops/deferred_fields.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/fold.h"
#include "ops/operands.h"
#include "ops/row_kernels.h"
#include "ops/work_split.h"
#include "replayssm/cpu.h"
#include "state/pool_impl.h"

namespace replayssm {

template <typename Task>
typename cpu::RowKernels<Task>::Function kernel_for(const cpu::RowKernels<Task>& kernels,
                                                    RowKind kind, const Cursor& cursor,
                                                    ReplayLimits limits) {
  if (kind == RowKind::kCommitted) return kernels.committed;
  return tentative_row_flushes(cursor, limits) ? kernels.flush : kernels.tentative;
}

/// The deferred decays that belong to checkpoints of the layout; `in`: null for a zero state.
template <typename Task>
void point_at_deferred(Task& task, const PageLayout& layout, const std::byte* in, std::byte* out) {
  const std::size_t offset = layout.deferred_decay_offset();
  if (offset == 0) return;
  task.deferred = reinterpret_cast<float*>(out + offset);
  if (in != nullptr) task.deferred_in = reinterpret_cast<const float*>(in + offset);
}

/// All rows of a step; padding rows get zeros. task_of(row, cursor) is the task of a whole row,
/// select(task, item) restricts it to an item's heads.
template <typename Task, typename TaskOf, typename Select>
void run_rows(const CpuContext& context, const StatePool::Impl& pool, const Step& step,
              const WorkSplit& split, const cpu::RowKernels<Task>& kernels,
              const TensorView& output, const TaskOf& task_of, const Select& select) {
  const std::vector<StepRow>& rows = step.rows();
  const std::int64_t items = split.items_per_row();
  context.parallel_for(static_cast<std::int64_t>(rows.size()) * items, [&](std::int64_t i, int) {
    const StepRow& row = rows[static_cast<std::size_t>(i / items)];
    if (row.slot < 0) {
      if (i % items == 0) zero_tokens(output, row);
      return;
    }
    const WorkSplit::Item item = split.item(i % items);
    if (item.head_begin == item.head_end) return;
    const Cursor& cursor = pool.slots[static_cast<std::size_t>(row.slot)].cursor;
    Task task = task_of(row, cursor);
    select(task, item);
    kernel_for(kernels, row.kind, cursor, pool.options.limits)(task);
  });
}

/// A fold outside of a step, of a layer with this layout; `base` points at the records and
/// parameters.
template <typename Task, typename Select>
void run_fold(const CpuContext& context, const WorkSplit& split,
              const cpu::RowKernels<Task>& kernels, const PageLayout& layout, const FoldTask& fold,
              Task base, const Select& select) {
  base.checkpoint_in = fold.checkpoint_in;
  base.checkpoint = fold.checkpoint;
  point_at_deferred(base, layout, fold.checkpoint_in, fold.checkpoint);
  base.copy = fold.copy;
  base.places = fold.places;
  base.first_place = fold.first_place;
  base.live = fold.count;
  context.parallel_for(split.items_per_row(), [&](std::int64_t i, int) {
    const WorkSplit::Item item = split.item(i);
    if (item.head_begin == item.head_end) return;
    Task task = base;
    select(task, item);
    kernels.fold(task);
  });
}

/// Adds row_traffic(row, cursor) of every row that is not padding. Where the layer has a read copy,
/// rows that leave the checkpoint as it is read the copy in its place, and the others write both.
template <typename RowTraffic>
void add_traffic(StatePool::Impl& pool, int layer, const Step& step,
                 const RowTraffic& row_traffic) {
  const auto copy = static_cast<std::int64_t>(pool.layout(layer).read_copy_bytes());
  for (const StepRow& row : step.rows()) {
    if (row.slot < 0) continue;
    StateTraffic t = row_traffic(row, pool.slots[static_cast<std::size_t>(row.slot)].cursor);
    if (copy > 0 && t.checkpoint_written > 0) {
      t.read_copy_written = copy;
    } else if (copy > 0 && t.checkpoint_read > 0) {
      t.read_copy_read = copy;
      t.checkpoint_read = 0;
    }
    pool.traffic += t;
  }
}

}  // namespace replayssm
