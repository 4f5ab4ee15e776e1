// Read copies: a low-precision image of a checkpoint, which outputs of tentative rows read in its
// place. The recurrence, folds and saved states know the checkpoint only, so that rounding in a
// copy is seen once, by the outputs until the next flush, and never comes back.
//
// A head's state is a matrix of rows along the axis that outputs sum over:
//
//   Mamba-2                            (head_dim, state_size)
//   Gated DeltaNet, Kimi Delta Att.    (value_dim, key_dim)
//
//   format     bits/element             value of an element
//   int8       8 + 32/width             code * scale[row]
//   fp8-e4m3   8 + 32/width             code * scale[row]
//   nvfp4      4 + 8/16 + 32/(16 width) code * (block scale * scale[tile])
//
// with fp32 scales of rows or of tiles of 16 rows, and an E4M3 block scale per 16 elements of a
// row. E4M3 and E2M1 are the OCP formats (8-bit floating point 1.0; microscaling formats 1.0): E4M3
// has 3 mantissa bits, exponent bias 7, largest value 448, no infinities; E2M1 holds 0, 0.5,
// 1, 1.5, 2, 3, 4, 6 and their negatives. Codes are rounded to nearest, ties to even, and saturate.
//
// docs/read-copies.md says how scales are chosen and which format to use.
#pragma once

#include <cmath>
#include <cstdint>

namespace replayssm {

enum class ReadCopyFormat : std::uint8_t {
  kNone = 0,
  kFp8E4M3 = 1,
  kInt8 = 2,
  kNvfp4 = 3,
};

/// "none", "fp8-e4m3", "int8", "nvfp4".
const char* to_string(ReadCopyFormat format);

/// Bound of an element's rounding error, for finite states of magnitudes up to 2^127 (above, a
/// decoded value may overflow to infinity). A row or tile with an infinity or NaN in it decodes to
/// NaN, all of it.
struct ReadCopyError {
  double element = 0;  // of |x|
  double block = 0;    // of the largest magnitude in the element's block of 16
  double scale = 0;    // of the largest magnitude under the element's fp32 scale
  double floor = 0;    // absolute: scales do not become arbitrarily small

  double bound(double x, double block_max, double scale_max) const {
    return element * std::abs(x) + block * block_max + scale * scale_max + floor;
  }
};

/// The bound of a format; all zero for kNone. The numbers are derived in docs/read-copies.md.
ReadCopyError read_copy_error(ReadCopyFormat format);

}  // namespace replayssm
