#include "state/token_snapshots.h"

#include <algorithm>
#include <cstring>

#include "state/pool_impl.h"

namespace replayssm {

Result<TokenSnapshots> TokenSnapshots::begin(StatePool& pool, std::span<const Row> rows) {
  TokenSnapshots out;
  std::size_t longest = 0;
  for (const Row& row : rows) {
    RSSM_ASSIGN_OR_RETURN(const Cursor cursor, pool.cursor(row.from));
    if (cursor.live() != 0) {
      return failed_precondition("slot ", row.from, " has ", cursor.live(),
                                 " live records, expected 0 to keep snapshots from");
    }
    out.positions_.push_back(cursor.position);
    longest = std::max(longest, row.slots.size());
    for (const std::int32_t slot : row.slots) RSSM_RETURN_IF_ERROR(pool.reset(slot));
  }
  for (std::size_t i = 0; i < longest; ++i) {
    std::vector<StepRow> step;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      if (i >= rows[r].slots.size()) continue;
      const auto token = static_cast<std::int64_t>(i);
      const std::int64_t position = out.positions_[r] + token;
      pool.impl().restart(rows[r].slots[i],
                          {.checkpoint_position = position, .position = position});
      step.push_back({.slot = rows[r].slots[i],
                      .kind = RowKind::kCommitted,
                      .token_begin = rows[r].token_begin + token,
                      .token_count = 1});
    }
    Result<Step> begun = pool.begin_step(step);
    if (!begun.ok()) {
      static_cast<void>(out.abort(pool).ok());
      return begun.status();
    }
    out.steps_.push_back(std::move(begun).value());
  }
  out.rows_.assign(rows.begin(), rows.end());
  return out;
}

Status TokenSnapshots::run(StatePool& pool, int layer, Part part,
                           FunctionRef<Status(Step& step)> op) {
  StatePool::Impl& impl = pool.impl();
  RSSM_RETURN_IF_ERROR(impl.check_layer(layer));
  const FieldKind kind = part == Part::kConvolution ? FieldKind::kConv : FieldKind::kCheckpoint;
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      const Row& row = rows_[r];
      if (i >= row.slots.size()) continue;
      const std::int32_t from = i == 0 ? row.from : row.slots[i - 1];
      const std::int64_t position = positions_[r] + static_cast<std::int64_t>(i);
      for (const Field& f : impl.layout(layer).fields) {
        // The state before the first token is zero by definition and never loaded.
        if (f.kind != kind || position == 0) continue;
        const std::int64_t first =
            kind == FieldKind::kConv
                ? impl.conv_first(layer, {.checkpoint_position = position, .position = position})
                : position - 1;
        impl.copy_entries(layer, f, from, row.slots[i], first, position);
        if (kind == FieldKind::kCheckpoint) {
          impl.traffic.checkpoint_read += static_cast<std::int64_t>(f.bytes());
          impl.traffic.checkpoint_written += static_cast<std::int64_t>(f.bytes());
        }
      }
    }
    RSSM_RETURN_IF_ERROR(op(steps_[i]));
  }
  return {};
}

Status TokenSnapshots::commit(StatePool& pool) {
  for (Step& step : steps_) {
    const std::vector<std::int64_t> accepted(step.rows().size(), 1);
    RSSM_RETURN_IF_ERROR(pool.commit(step, accepted));
  }
  return {};
}

Status TokenSnapshots::abort(StatePool& pool) {
  Status status;
  for (Step& step : steps_) {
    if (Status ended = pool.abort(step); status.ok()) status = std::move(ended);
  }
  return status;
}

}  // namespace replayssm
