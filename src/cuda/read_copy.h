// Where a layer's read copy lies in device memory (state/read_copy.h has the planes).
#pragma once

#include <cstdint>

#include "replayssm/read_copy.h"

namespace replayssm::cuda {

struct ReadCopyParams {
  ReadCopyFormat format = ReadCopyFormat::kNone;
  std::uint8_t* codes = nullptr;         // (slots, heads, rows, width), nvfp4: half a byte each
  std::uint8_t* block_scales = nullptr;  // (slots, heads, rows, width / 16), nvfp4 only
  float* scales = nullptr;               // (slots, heads, rows), nvfp4: (slots, heads, rows / 16)
  std::int64_t slot_stride = 0;          // bytes
};

/// Bytes of a tile of 16 rows where a kernel stages it: codes, block scales, scales.
constexpr std::int64_t staged_copy_bytes(ReadCopyFormat format, std::int64_t width) {
  return format == ReadCopyFormat::kNone    ? 0
         : format == ReadCopyFormat::kNvfp4 ? 8 * width + width + 16
                                            : 16 * width + 64;
}

}  // namespace replayssm::cuda
