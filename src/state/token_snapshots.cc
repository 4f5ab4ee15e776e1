#include "state/token_snapshots.h"

#include <algorithm>
#include <cstring>

#include "state/pool_impl.h"

namespace replayssm {
namespace {

/// A state is large enough to be copied by all threads, as the ops that follow use all of them.
void copy_in_parallel(const CpuContext& context, const std::byte* from, std::byte* to,
                      std::size_t bytes) {
  constexpr std::size_t kPiece = std::size_t{64} << 10;
  const auto pieces = static_cast<std::int64_t>((bytes + kPiece - 1) / kPiece);
  context.parallel_for(pieces, [&](std::int64_t piece, int) {
    const std::size_t begin = static_cast<std::size_t>(piece) * kPiece;
    std::memcpy(to + begin, from + begin, std::min(kPiece, bytes - begin));
  });
}

/// A slot has the position of its token before it has the state.
void invalidate(StatePool& pool, std::int32_t slot) {
  static_cast<void>(pool.impl().invalidate(nullptr, slot).ok());
}

}  // namespace

Result<TokenSnapshots> TokenSnapshots::begin(StatePool& pool, std::span<const Row> rows) {
  TokenSnapshots out;
  std::size_t longest = 0;
  for (const Row& row : rows) {
    RSSM_RETURN_IF_ERROR(pool.impl().check_ready(row.from));
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
      for (const StepRow& row : step) invalidate(pool, row.slot);
      static_cast<void>(out.abort(pool).ok());
      return begun.status();
    }
    out.steps_.push_back(std::move(begun).value());
  }
  out.rows_.assign(rows.begin(), rows.end());
  return out;
}

void TokenSnapshots::hand_over(const CpuContext& context, StatePool::Impl& pool, int layer,
                               Part part, std::size_t token) {
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    const Row& row = rows_[r];
    const std::int64_t position = positions_[r] + static_cast<std::int64_t>(token);
    // The state before the first token is zero by definition and never loaded.
    if (token >= row.slots.size() || position == 0) continue;
    const std::int32_t from = token == 0 ? row.from : row.slots[token - 1];
    const std::int32_t to = row.slots[token];
    for (const Field& f : pool.layout(layer).fields) {
      if (part == Part::kConvolution && f.kind == FieldKind::kConv) {
        const Cursor cursor{.checkpoint_position = position, .position = position};
        pool.copy_entries(layer, f, from, to, pool.conv_first(layer, cursor), position);
      } else if (part == Part::kRecurrence && f.kind == FieldKind::kCheckpoint) {
        copy_in_parallel(context, pool.field(layer, from, f), pool.field(layer, to, f), f.bytes());
        pool.traffic.checkpoint_read += static_cast<std::int64_t>(f.bytes());
        pool.traffic.checkpoint_written += static_cast<std::int64_t>(f.bytes());
      }
    }
  }
}

Status TokenSnapshots::run(const CpuContext& context, StatePool& pool, int layer, Part part,
                           FunctionRef<Status(Step& step)> op) {
  RSSM_RETURN_IF_ERROR(pool.impl().check_layer(layer));
  for (std::size_t token = 0; token < steps_.size(); ++token) {
    hand_over(context, pool.impl(), layer, part, token);
    RSSM_RETURN_IF_ERROR(op(steps_[token]));
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
    std::vector<std::int32_t> slots;  // a slot that left the step is not its business any more
    for (const StepRow& row : step.rows()) {
      if (pool.impl().holds(step, row)) slots.push_back(row.slot);
    }
    if (Status ended = pool.abort(step); status.ok()) status = std::move(ended);
    for (const std::int32_t slot : slots) invalidate(pool, slot);
  }
  return status;
}

}  // namespace replayssm
