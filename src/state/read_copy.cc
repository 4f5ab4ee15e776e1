#include "state/read_copy.h"

#include <algorithm>
#include <array>

#include "ops/delta_rule/shape.h"
#include "state/read_copy_codec.h"

namespace replayssm {
namespace {

namespace rc = read_copy;

/// Rows of a tile in fp32, as many as there are, with zeros up to the end of the last block.
struct Tile {
  std::int64_t rows = 0;
  std::int64_t width = 0;
  float values[kReadCopyTile][kReadCopyMaxWidth];

  /// Largest magnitude of elements [first, last) of row r.
  std::uint32_t amax(std::int64_t r, std::int64_t first, std::int64_t last) const {
    std::int32_t bits = 0;  // signed: magnitudes are, and have vector comparisons everywhere
    for (std::int64_t i = first; i < last; ++i) {
      bits = std::max(bits, static_cast<std::int32_t>(rc::magnitude_bits(values[r][i])));
    }
    return static_cast<std::uint32_t>(bits);
  }
};

template <typename State>
void load_tile(const ReadCopyShape& shape, const State* checkpoint, std::int64_t head,
               std::int64_t row, Tile& tile) {
  tile.rows = std::min(kReadCopyTile, shape.rows - row);
  tile.width = shape.width;
  const State* state = checkpoint + head * shape.rows * shape.width;
  std::int64_t row_stride = shape.width;
  std::int64_t element_stride = 1;
  if (shape.checkpoint_tile == 0) {
    state += row * shape.width;
  } else {
    const std::int64_t first = row / shape.checkpoint_tile * shape.checkpoint_tile;
    row_stride = 1;
    element_stride = std::min(shape.checkpoint_tile, shape.rows - first);
    state += first * shape.width + (row - first);
  }
  const std::int64_t end = (tile.width + kReadCopyBlock - 1) / kReadCopyBlock * kReadCopyBlock;
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    std::fill(tile.values[r] + tile.width, tile.values[r] + end, 0.0f);
  }
  if (element_stride == 1) {
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const State* from = state + r * row_stride;
      for (std::int64_t i = 0; i < tile.width; ++i) tile.values[r][i] = to_float(from[i]);
    }
    return;
  }
  for (std::int64_t i = 0; i < tile.width; ++i) {
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      tile.values[r][i] = to_float(state[r * row_stride + i * element_stride]);
    }
  }
}

/// A byte per element and a scale per row.
template <typename Scale, typename Encode>
void encode_rows(const Tile& tile, std::uint8_t* codes, float* scales, Scale scale_of,
                 Encode encode) {
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    scales[r] = scale_of(tile.amax(r, 0, tile.width));
    const float inverse = rc::inverse_unit(scales[r]);
    std::uint8_t* to = codes + r * tile.width;
    for (std::int64_t i = 0; i < tile.width; ++i) {
      to[i] = static_cast<std::uint8_t>(encode(tile.values[r][i] * inverse));
    }
  }
}

void encode_nvfp4(const Tile& tile, std::uint8_t* codes, std::uint8_t* block_scales, float* scale) {
  std::uint32_t amax = 0;
  for (std::int64_t r = 0; r < tile.rows; ++r) amax = std::max(amax, tile.amax(r, 0, tile.width));
  *scale = rc::nvfp4_scale(amax);
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    for (std::int64_t first = 0; first < tile.width; first += kReadCopyBlock) {
      *block_scales = rc::nvfp4_block_scale(tile.amax(r, first, first + kReadCopyBlock), *scale);
      const float inverse = rc::inverse_unit(rc::nvfp4_unit(*block_scales++, *scale));
      std::uint8_t of_block[kReadCopyBlock];
      for (std::int64_t i = 0; i < kReadCopyBlock; ++i) {
        of_block[i] = rc::encode_e2m1(tile.values[r][first + i] * inverse);
      }
      const std::int64_t count = std::min(kReadCopyBlock, tile.width - first);
      for (std::int64_t i = 0; i < count; i += 2) {
        *codes++ = static_cast<std::uint8_t>(of_block[i] | of_block[i + 1] << 4);
      }
    }
  }
}

/// The values of codes 0, 1, ...
template <std::size_t kCodes>
std::array<float, kCodes> values_of(float (*decode)(std::uint8_t)) {
  std::array<float, kCodes> values{};
  for (std::size_t code = 0; code < kCodes; ++code) {
    values[code] = decode(static_cast<std::uint8_t>(code));
  }
  return values;
}

/// Where a tile's codes and scales begin.
struct TilePlaces {
  TilePlaces(const ReadCopy& copy, std::int64_t head, std::int64_t row)
      : codes(copy.codes + (head * copy.shape.rows + row) * copy.shape.code_row_bytes()),
        block_scales(copy.block_scales == nullptr
                         ? nullptr
                         : copy.block_scales +
                               (head * copy.shape.rows + row) * copy.shape.row_blocks()),
        scales(copy.scales + head * copy.shape.head_scales() +
               (copy.shape.format == ReadCopyFormat::kNvfp4 ? row / kReadCopyTile : row)) {}

  std::uint8_t* codes;
  std::uint8_t* block_scales;
  float* scales;
};

}  // namespace

const char* to_string(ReadCopyFormat format) {
  switch (format) {
    case ReadCopyFormat::kNone:
      return "none";
    case ReadCopyFormat::kFp8E4M3:
      return "fp8-e4m3";
    case ReadCopyFormat::kInt8:
      return "int8";
    case ReadCopyFormat::kNvfp4:
      return "nvfp4";
  }
  return "unknown";
}

ReadCopyError read_copy_error(ReadCopyFormat format) {
  constexpr double kFloor = 0.5 * static_cast<double>(rc::kMinScale);
  constexpr double kRounding = 0x1p-20;  // of scales, their inverses and products, in fp32
  switch (format) {
    case ReadCopyFormat::kNone:
      return {};
    case ReadCopyFormat::kFp8E4M3:
      return {.element = 0x1p-4 + kRounding, .scale = 0x1p-10 / 448.0, .floor = kFloor};
    case ReadCopyFormat::kInt8:
      return {.scale = 0.5 / 127.0 + kRounding, .floor = kFloor};
    case ReadCopyFormat::kNvfp4:
      return {.block = 17.0 / 96.0 + kRounding, .scale = 0x1p-10 / 448.0, .floor = kFloor};
  }
  return {};
}

std::string explain_read_copy(const LayerSpec& layer) {
  if (layer.read_copy == ReadCopyFormat::kNone) return "";
  return std::string(", tentative rows' outputs from an ") + to_string(layer.read_copy) + " copy";
}

ReadCopyShape read_copy_shape(const RecurrenceShape& recurrence, ReadCopyFormat format) {
  struct {
    ReadCopyFormat format;
    ReadCopyShape operator()(const Mamba2Shape& s) const {
      return {.format = format, .rows = s.head_dim, .width = s.state_size};
    }
    ReadCopyShape operator()(const GatedDeltaNetShape& s) const { return (*this)(delta_rule(s)); }
    ReadCopyShape operator()(const KimiDeltaAttentionShape& s) const {
      return (*this)(delta_rule(s));
    }
    ReadCopyShape operator()(const DeltaRuleShape& s) const {
      return {.format = format,
              .rows = s.value_dim,
              .width = s.key_dim,
              .checkpoint_tile = kDeltaRuleTile};
    }
  } const shape_of{format};
  static_assert(kDeltaRuleTile % kReadCopyTile == 0);  // a tile of rows lies in one of columns
  return std::visit(shape_of, recurrence);
}

void encode_read_copy_tile(const ReadCopy& copy, const void* checkpoint, DType dtype,
                           std::int64_t head, std::int64_t row) {
  Tile tile;
  if (dtype == DType::kBF16) {
    load_tile(copy.shape, static_cast<const BF16*>(checkpoint), head, row, tile);
  } else if (dtype == DType::kF16) {
    load_tile(copy.shape, static_cast<const F16*>(checkpoint), head, row, tile);
  } else {
    load_tile(copy.shape, static_cast<const float*>(checkpoint), head, row, tile);
  }
  const TilePlaces at(copy, head, row);
  switch (copy.shape.format) {
    case ReadCopyFormat::kNone:
      break;
    case ReadCopyFormat::kFp8E4M3:
      encode_rows(tile, at.codes, at.scales, rc::fp8_scale,
                  [](float x) { return rc::encode_e4m3(x); });
      break;
    case ReadCopyFormat::kInt8:
      encode_rows(tile, at.codes, at.scales, rc::int8_scale,
                  [](float x) { return rc::encode_int8(x); });
      break;
    case ReadCopyFormat::kNvfp4:
      encode_nvfp4(tile, at.codes, at.block_scales, at.scales);
      break;
  }
}

void encode_read_copy(const ReadCopy& copy, const void* checkpoint, DType dtype,
                      std::int64_t head_begin, std::int64_t head_end) {
  for (std::int64_t head = head_begin; head < head_end; ++head) {
    for (std::int64_t row = 0; row < copy.shape.rows; row += kReadCopyTile) {
      encode_read_copy_tile(copy, checkpoint, dtype, head, row);
    }
  }
}

void encode_read_copy(const CpuContext& context, const ReadCopy& copy, const void* checkpoint,
                      DType dtype, std::int64_t heads) {
  if (!copy.exists()) return;
  context.parallel_for(heads, [&](std::int64_t head, int) {
    encode_read_copy(copy, checkpoint, dtype, head, head + 1);
  });
}

void decode_read_copy_tile(const ReadCopy& copy, std::int64_t head, std::int64_t row, float* out,
                           std::int64_t row_stride, std::int64_t element_stride) {
  static const std::array<float, 256> kE4M3 = values_of<256>(rc::decode_e4m3);
  static const std::array<float, 16> kE2M1 = values_of<16>(rc::decode_e2m1);
  const ReadCopyShape& shape = copy.shape;
  const TilePlaces at(copy, head, row);
  const std::int64_t rows = std::min(kReadCopyTile, shape.rows - row);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::uint8_t* codes = at.codes + r * shape.code_row_bytes();
    float* to = out + r * row_stride;
    if (shape.format == ReadCopyFormat::kNvfp4) {
      const std::uint8_t* block_scales = at.block_scales + r * shape.row_blocks();
      for (std::int64_t first = 0; first < shape.width; first += kReadCopyBlock) {
        const float unit = kE4M3[*block_scales++] * *at.scales;
        const std::int64_t last = std::min(first + kReadCopyBlock, shape.width);
        for (std::int64_t i = first; i < last; i += 2) {
          const std::uint8_t pair = *codes++;
          to[i * element_stride] = kE2M1[pair & 15] * unit;
          to[(i + 1) * element_stride] = kE2M1[pair >> 4] * unit;
        }
      }
    } else if (shape.format == ReadCopyFormat::kInt8) {
      for (std::int64_t i = 0; i < shape.width; ++i) {
        to[i * element_stride] =
            static_cast<float>(static_cast<std::int8_t>(codes[i])) * at.scales[r];
      }
    } else {
      for (std::int64_t i = 0; i < shape.width; ++i) {
        to[i * element_stride] = kE4M3[codes[i]] * at.scales[r];
      }
    }
  }
}

}  // namespace replayssm
