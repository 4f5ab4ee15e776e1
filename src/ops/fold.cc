#include "ops/fold.h"

#include <algorithm>

namespace replayssm {
namespace {

void run(const CpuContext& context, const StatePool::Impl& pool, int layer, const FoldTask& fold) {
  std::visit([&](const auto& shape) { fold_records(context, pool, layer, shape, fold); },
             pool.recurrence(layer));
}

}  // namespace

void fold_between_slots(const CpuContext& context, StatePool::Impl& pool, int layer,
                        std::int32_t src, std::int64_t count, std::int32_t dst) {
  const Cursor& cursor = pool.slots[static_cast<std::size_t>(src)].cursor;
  const PageLayout& layout = pool.layout(layer);
  const Field& checkpoint = layout.field("checkpoint");
  FoldTask fold;
  if (cursor.checkpoint_position > 0) fold.checkpoint_in = pool.field(layer, src, checkpoint);
  fold.checkpoint = pool.field(layer, dst, checkpoint);
  fold.copy = pool.read_copy(layer, dst);
  for (const Field& f : layout.fields) {
    if (f.kind == FieldKind::kRecord) fold.records.add(f.name, pool.field(layer, src, f));
  }
  fold.places = pool.options.limits.record_places();
  fold.first_place = cursor.checkpoint_position % fold.places;
  fold.count = count;
  run(context, pool, layer, fold);
}

void fold_external(const CpuContext& context, StatePool::Impl& pool, int layer,
                   const RecordPointers& records, const std::byte* checkpoint, std::int64_t count,
                   std::int32_t dst) {
  FoldTask fold;
  fold.checkpoint_in = checkpoint;
  fold.checkpoint = pool.field(layer, dst, pool.layout(layer).field("checkpoint"));
  fold.copy = pool.read_copy(layer, dst);
  fold.records = records;
  fold.places = std::max<std::int64_t>(1, count);
  fold.count = count;
  run(context, pool, layer, fold);
}

}  // namespace replayssm
