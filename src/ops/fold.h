// Folding records into a checkpoint outside of a step: the operation of a flush, bit-equal to one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "replayssm/cpu.h"
#include "state/pool_impl.h"

namespace replayssm {

/// checkpoint = checkpoint_in (null: zero) advanced by `count` records, of which record i lies at
/// place (first_place + i) mod places.
struct FoldTask {
  const std::byte* checkpoint_in = nullptr;
  std::byte* checkpoint = nullptr;
  ReadCopy copy;  // of `checkpoint`, written if it exists
  RecordPointers records;
  std::int64_t places = 1;
  std::int64_t first_place = 0;
  std::int64_t count = 0;
};

/// dst's checkpoint = src's checkpoint advanced by its first `count` live records. Cursors are not
/// touched. src may be dst.
void fold_between_slots(const CpuContext& context, StatePool::Impl& pool, int layer,
                        std::int32_t src, std::int64_t count, std::int32_t dst);

/// dst's checkpoint = `checkpoint` (null: zero) advanced by `count` records outside the pool,
/// oldest first.
void fold_external(const CpuContext& context, StatePool::Impl& pool, int layer,
                   const RecordPointers& records, const std::byte* checkpoint, std::int64_t count,
                   std::int32_t dst);

// Of the families.
void fold_records(const CpuContext& context, const StatePool::Impl& pool, int layer,
                  const Mamba2Shape& shape, const FoldTask& fold);
void fold_records(const CpuContext& context, const StatePool::Impl& pool, int layer,
                  const GatedDeltaNetShape& shape, const FoldTask& fold);
void fold_records(const CpuContext& context, const StatePool::Impl& pool, int layer,
                  const KimiDeltaAttentionShape& shape, const FoldTask& fold);

}  // namespace replayssm
