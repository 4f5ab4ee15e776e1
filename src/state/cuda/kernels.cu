#include "state/cuda/kernels.h"

#include <algorithm>

#include "cuda/device_error.cuh"
#include "cuda/language.cuh"
#include "state/cuda/row_check.cuh"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 256;

// ---- Slots ----

__global__ void set_slot_kernel(SlotTable table, std::int32_t slot, Cursor cursor,
                                SlotCondition condition) {
  table.cursors[slot] = cursor;
  table.conditions[slot] = condition;
}

/// Only between steps: the rows of a begun one have been planned, and its commit would believe that
/// they flushed.
__global__ void force_flush_kernel(SlotTable table, std::int32_t slot) {
  if (table.conditions[slot] != SlotCondition::kReady) {
    report_error(table.error, DeviceError::kCondition, -1,
                 static_cast<std::int64_t>(table.conditions[slot]),
                 static_cast<std::int64_t>(SlotCondition::kReady));
    return;
  }
  table.cursors[slot].force_flush = true;
}

__global__ void end_fold_kernel(SlotTable table, std::int32_t slot) {
  Cursor& cursor = table.cursors[slot];
  cursor.checkpoint_position = cursor.position;
  cursor.force_flush = false;
}

/// First position whose entry of a ring field a sequence at `cursor` owns.
__device__ std::int64_t first_owned(const SlotTable& table, const DeviceField& f,
                                    const Cursor& cursor) {
  if (f.kind == DeviceField::kRecord) return cursor.checkpoint_position;
  const std::int64_t from = table.rewindable ? cursor.checkpoint_position : cursor.position;
  return max(std::int64_t{0}, from - f.history);
}

/// Calls body(byte offset in the slot's field) for the words this block is to handle of entries
/// [first, last) of a field.
template <typename Body>
__device__ void for_words(const SlotTable& table, const DeviceField& f, std::int64_t first,
                          std::int64_t last, Body body) {
  const std::int64_t words = f.inner / f.word;  // of an inner row
  const std::int64_t total = (last - first) * f.outer * words;
  const std::int64_t step = std::int64_t{table.blocks_per_field} * blockDim.x;
  const std::int64_t block = blockIdx.x % table.blocks_per_field;
  for (std::int64_t i = block * blockDim.x + threadIdx.x; i < total; i += step) {
    const std::int64_t row = i / words;
    const std::int64_t place = (first + row / f.outer) % f.places;
    body((row % f.outer * f.places + place) * f.inner + i % words * f.word);
  }
}

__device__ void copy_word(std::byte* to, const std::byte* from, int word) {
  switch (word) {
    case 16:
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      break;
    case 4:
      *reinterpret_cast<std::uint32_t*>(to) = *reinterpret_cast<const std::uint32_t*>(from);
      break;
    default:
      *reinterpret_cast<std::uint16_t*>(to) = *reinterpret_cast<const std::uint16_t*>(from);
  }
}

__device__ void poison_word(std::byte* to, int word) {
  constexpr unsigned kOnes = 0xffffffffu;  // NaN in every floating-point type
  switch (word) {
    case 16:
      *reinterpret_cast<uint4*>(to) = {kOnes, kOnes, kOnes, kOnes};
      break;
    case 4:
      *reinterpret_cast<std::uint32_t*>(to) = kOnes;
      break;
    default:
      *reinterpret_cast<std::uint16_t*>(to) = 0xffffu;
  }
}

__global__ void copy_slot_kernel(SlotTable table, std::int32_t src, std::int32_t dst,
                                 std::int64_t prefix) {
  const bool first_thread = blockIdx.x == 0 && threadIdx.x == 0;
  if (table.conditions[src] != SlotCondition::kReady) {
    if (first_thread) {
      report_error(table.error, DeviceError::kCondition, -1,
                   static_cast<std::int64_t>(table.conditions[src]),
                   static_cast<std::int64_t>(SlotCondition::kReady));
      table.cursors[dst] = Cursor{};
      table.conditions[dst] = SlotCondition::kInvalid;
    }
    return;
  }
  Cursor cursor = table.cursors[src];
  if (prefix >= 0) {
    cursor.position = prefix;
    cursor.force_flush = false;
  }
  const DeviceField f = table.fields[blockIdx.x / table.blocks_per_field];
  const std::byte* from = table.base + f.offset + src * f.slot_stride;
  std::byte* to = table.base + f.offset + dst * f.slot_stride;
  const bool state = f.kind == DeviceField::kState;
  const std::int64_t first = state ? 0 : first_owned(table, f, cursor);
  const std::int64_t last = state ? (cursor.checkpoint_position > 0 ? 1 : 0) : cursor.position;
  for_words(table, f, first, last, [&](std::int64_t at) { copy_word(to + at, from + at, f.word); });
  if (first_thread) {
    table.cursors[dst] = cursor;
    table.conditions[dst] = SlotCondition::kReady;
  }
}

__global__ void poison_kernel(SlotTable table, std::int32_t slot, bool all) {
  const DeviceField f = table.fields[blockIdx.x / table.blocks_per_field];
  const Cursor cursor = table.cursors[slot];
  std::byte* to = table.base + f.offset + slot * f.slot_stride;
  std::int64_t first = 0;
  std::int64_t last = f.places;
  if (!all) {
    if (f.kind == DeviceField::kState) {
      last = cursor.checkpoint_position > 0 ? 0 : 1;
    } else {
      // Every place that holds none of the owned entries is that of one position past the end.
      first = cursor.position;
      last = first_owned(table, f, cursor) + f.places;
    }
  }
  for_words(table, f, first, last, [&](std::int64_t at) { poison_word(to + at, f.word); });
}

unsigned field_blocks(const SlotTable& table) {
  return static_cast<unsigned>(table.field_count) * static_cast<unsigned>(table.blocks_per_field);
}

// ---- Values from the host ----

/// As many values as fit beside a table into the 4 KiB that kernel parameters may take everywhere.
template <typename T>
struct Parcel {
  static constexpr int kCapacity = 3072 / static_cast<int>(sizeof(T));
  T values[kCapacity];
};

template <typename T>
__global__ void unpack_kernel(const __grid_constant__ Parcel<T> parcel, int count, T* to) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    to[i] = parcel.values[i];
  }
}

template <typename T, typename Get>
void put_values(std::size_t count, Get get, T* to, cudaStream_t stream) {
  for (std::size_t first = 0; first < count; first += Parcel<T>::kCapacity) {
    Parcel<T> parcel{};
    const std::size_t n = std::min<std::size_t>(count - first, Parcel<T>::kCapacity);
    for (std::size_t i = 0; i < n; ++i) parcel.values[i] = get(first + i);
    launch_kernel(unpack_kernel<T>, 1, kThreads, 0, stream, parcel, static_cast<int>(n),
                  to + first);
  }
}

// ---- Steps ----

constexpr int kStepThreads = 1024;

/// One block, so that a row can see which other rows name its slot.
__global__ void __launch_bounds__(kStepThreads)
    begin_rows_kernel(SlotTable table, RowCheck check, std::int64_t row_count) {
  for (std::int64_t i = threadIdx.x; i < row_count; i += blockDim.x) {
    const DeviceRow row = checked_row(check, i);
    table.rows[i] = row;
    if (row.slot >= 0) atomicMin(&table.owners[row.slot], static_cast<std::int32_t>(i));
  }
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < row_count; i += blockDim.x) {
    const std::int32_t slot = table.rows[i].slot;
    if (slot < 0) continue;
    const std::int32_t owner = table.owners[slot];
    if (owner != static_cast<std::int32_t>(i)) {
      report_error(table.error, DeviceError::kDuplicate, i, slot, owner);
      table.rows[i].slot = -1;
    }
  }
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < row_count; i += blockDim.x) {
    const std::int32_t slot = table.rows[i].slot;
    if (slot < 0) continue;
    table.conditions[slot] = SlotCondition::kInStep;
    table.owners[slot] = 0x01010101 * kNoRowByte;
  }
}

__global__ void abort_kernel(SlotTable table, std::int64_t row_count, bool conv_ran,
                             bool recurrence_ran) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= row_count) return;
  const DeviceRow row = table.rows[i];
  if (row.slot < 0 || table.conditions[row.slot] != SlotCondition::kInStep) return;
  table.conditions[row.slot] =
      outlives_abort(row.kind, table.cursors[row.slot], table.limits, conv_ran, recurrence_ran)
          ? SlotCondition::kReady
          : SlotCondition::kInvalid;
}

}  // namespace

void launch_set_slot(const SlotTable& table, std::int32_t slot, const Cursor& cursor,
                     SlotCondition condition, cudaStream_t stream) {
  launch_kernel(set_slot_kernel, 1, 1, 0, stream, table, slot, cursor, condition);
}

void launch_force_flush(const SlotTable& table, std::int32_t slot, cudaStream_t stream) {
  launch_kernel(force_flush_kernel, 1, 1, 0, stream, table, slot);
}

void launch_end_fold(const SlotTable& table, std::int32_t slot, cudaStream_t stream) {
  launch_kernel(end_fold_kernel, 1, 1, 0, stream, table, slot);
}

void launch_copy_slot(const SlotTable& table, std::int32_t src, std::int32_t dst,
                      std::int64_t prefix, cudaStream_t stream) {
  launch_kernel(copy_slot_kernel, field_blocks(table), kThreads, 0, stream, table, src, dst,
                prefix);
}

void launch_poison(const SlotTable& table, std::int32_t slot, bool all, cudaStream_t stream) {
  launch_kernel(poison_kernel, field_blocks(table), kThreads, 0, stream, table, slot, all);
}

void launch_put_rows(const SlotTable& table, std::span<const StepRow> rows, cudaStream_t stream) {
  put_values<DeviceRow>(
      rows.size(),
      [&](std::size_t i) {
        return DeviceRow{.token_begin = rows[i].token_begin,
                         .token_count = rows[i].token_count,
                         .slot = rows[i].slot,
                         .kind = rows[i].kind};
      },
      table.incoming, stream);
}

void launch_put_accepted(const SlotTable& table, std::span<const std::int64_t> accepted,
                         cudaStream_t stream) {
  put_values<std::int64_t>(
      accepted.size(), [&](std::size_t i) { return accepted[i]; }, table.accepted, stream);
}

void launch_begin_rows(const SlotTable& table, const DeviceRow* rows, std::int64_t row_count,
                       std::int64_t token_count, SlotCondition expected, cudaStream_t stream) {
  const auto threads =
      static_cast<unsigned>(std::min<std::int64_t>(kStepThreads, (row_count + 31) / 32 * 32));
  launch_kernel(begin_rows_kernel, 1, threads, 0, stream, table,
                {.rows = rows,
                 .token_count = token_count,
                 .cursors = table.cursors,
                 .conditions = table.conditions,
                 .expected = expected,
                 .slots = table.slots,
                 .limits = table.limits,
                 .error = table.error},
                row_count);
}

void launch_abort(const SlotTable& table, std::int64_t row_count, bool conv_ran,
                  bool recurrence_ran, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((row_count + kThreads - 1) / kThreads);
  launch_kernel(abort_kernel, blocks, kThreads, 0, stream, table, row_count, conv_ran,
                recurrence_ran);
}

}  // namespace replayssm::cuda
