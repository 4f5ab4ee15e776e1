// One layer's read copy in memory: where codes and scales lie, and the passage between them and a
// checkpoint.
#pragma once

#include <cstdint>
#include <string>

#include "replayssm/cpu.h"
#include "replayssm/dtype.h"
#include "replayssm/read_copy.h"
#include "replayssm/state_pool.h"

namespace replayssm {

/// Rows of a head that an nvfp4 scale covers, and the rows every format is encoded by.
inline constexpr std::int64_t kReadCopyTile = 16;
/// Elements of a row that share an nvfp4 block scale; a row's last block may be shorter.
inline constexpr std::int64_t kReadCopyBlock = 16;
/// Of a row: the limit of state_size and key_dim.
inline constexpr std::int64_t kReadCopyMaxWidth = 256;

/// Sizes of a head's planes. Heads follow one another in each plane, rows in each head:
///
///   codes         (heads, rows, code_row_bytes): elements of a row in order, a byte each; nvfp4
///                 has element 2i in the low half of byte i and element 2i + 1 in the high half
///   block scales  (heads, rows, row_blocks), E4M3; nvfp4 only
///   scales        (heads, head_scales) fp32: of rows; nvfp4: of tiles of 16 rows, the last of
///                 which may be shorter
struct ReadCopyShape {
  ReadCopyFormat format = ReadCopyFormat::kNone;
  std::int64_t rows = 0;   // of a head
  std::int64_t width = 0;  // of a row
  /// How the checkpoint stores a head: 0 as (rows, width), otherwise as (tiles, width, rows of the
  /// tile) with this many rows to a tile, of which the last has what remains.
  std::int64_t checkpoint_tile = 0;

  std::int64_t code_row_bytes() const {
    return format == ReadCopyFormat::kNvfp4 ? width / 2 : width;
  }
  std::int64_t row_blocks() const {
    return format == ReadCopyFormat::kNvfp4 ? (width + kReadCopyBlock - 1) / kReadCopyBlock : 0;
  }
  std::int64_t head_scales() const {
    return format == ReadCopyFormat::kNvfp4 ? (rows + kReadCopyTile - 1) / kReadCopyTile : rows;
  }
};

/// What explain texts say of a layer's read copy; "" without one.
std::string explain_read_copy(const LayerSpec& layer);

ReadCopyShape read_copy_shape(const RecurrenceShape& recurrence, ReadCopyFormat format);

/// A slot's read copy of a layer. Pointers are to head 0.
struct ReadCopy {
  ReadCopyShape shape;
  std::uint8_t* codes = nullptr;         // null: the layer has no read copy
  std::uint8_t* block_scales = nullptr;  // nvfp4
  float* scales = nullptr;

  bool exists() const { return codes != nullptr; }
};

/// Writes the copy of rows [row, row + 16) of a head, or of those there are, from the checkpoint of
/// head 0 (f32, bf16 or f16); row is a multiple of 16.
void encode_read_copy_tile(const ReadCopy& copy, const void* checkpoint, DType dtype,
                           std::int64_t head, std::int64_t row);
/// The same for whole heads.
void encode_read_copy(const ReadCopy& copy, const void* checkpoint, DType dtype,
                      std::int64_t head_begin, std::int64_t head_end);
/// For all heads, on the context's threads. Does nothing for a copy that does not exist.
void encode_read_copy(const CpuContext& context, const ReadCopy& copy, const void* checkpoint,
                      DType dtype, std::int64_t heads);

/// The rows' decoded values: that of row + r, element i goes to out[r * row_stride + i *
/// element_stride].
void decode_read_copy_tile(const ReadCopy& copy, std::int64_t head, std::int64_t row, float* out,
                           std::int64_t row_stride, std::int64_t element_stride);

}  // namespace replayssm
