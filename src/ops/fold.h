// Folding records into a checkpoint outside of a step: the operation of a flush, bit-equal to one.
#pragma once

#include <cstdint>

#include "replayssm/cpu.h"
#include "state/pool_impl.h"

namespace replayssm {

/// dst's checkpoint = src's checkpoint advanced by its first `count` live records. Cursors are not
/// touched. src may be dst.
void fold_between_slots(const CpuContext& context, StatePool::Impl& pool, int layer,
                        std::int32_t src, std::int64_t count, std::int32_t dst);

/// dst's checkpoint = `checkpoint` (null: zero) advanced by `count` external records.
void fold_external(const CpuContext& context, StatePool::Impl& pool, int layer,
                   const ExternalRecords& records, const std::byte* checkpoint, std::int64_t count,
                   std::int32_t dst);

}  // namespace replayssm
