// Read copies of whole heads: where codes and scales lie, error bounds, states that are not finite.
#include "state/read_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "state/read_copy_codec.h"
#include "support/rng.h"

namespace replayssm {
namespace {

using testing::Rng;

constexpr ReadCopyFormat kFormats[] = {ReadCopyFormat::kFp8E4M3, ReadCopyFormat::kInt8,
                                       ReadCopyFormat::kNvfp4};

/// Heads of both layouts of a checkpoint; rows and widths that fill no tile or block.
struct Case {
  std::string name;
  RecurrenceShape shape;
  std::int64_t heads, rows, width;
};
const Case kCases[] = {
    {"mamba2_usual", Mamba2Shape{3, 64, 128, 1}, 3, 64, 128},
    {"mamba2_odd", Mamba2Shape{2, 24, 48, 1}, 2, 24, 48},
    {"mamba2_small", Mamba2Shape{2, 8, 16, 1}, 2, 8, 16},
    {"mamba2_wide", Mamba2Shape{1, 40, 256, 1}, 1, 40, 256},
    {"gdn_usual", GatedDeltaNetShape{1, 2, 128, 128}, 2, 128, 128},
    {"gdn_odd", GatedDeltaNetShape{1, 2, 40, 56}, 2, 56, 40},
    {"kda_small", KimiDeltaAttentionShape{2, 8, 24}, 2, 24, 8},
};

/// A copy with memory of its own, guarded behind.
class OwnedCopy {
 public:
  OwnedCopy(const Case& c, ReadCopyFormat format) {
    copy.shape = read_copy_shape(c.shape, format);
    const ReadCopyShape& s = copy.shape;
    codes_.assign(static_cast<std::size_t>(c.heads * s.rows * s.code_row_bytes()) + 16, 0xa5);
    blocks_.assign(static_cast<std::size_t>(c.heads * s.rows * s.row_blocks()) + 16, 0xa5);
    scales_.assign(static_cast<std::size_t>(c.heads * s.head_scales()) + 4, -1.0f);
    copy.codes = codes_.data();
    copy.block_scales = s.row_blocks() > 0 ? blocks_.data() : nullptr;
    copy.scales = scales_.data();
  }

  void expect_guards() const {
    for (std::size_t i = 0; i < 16; ++i) {
      EXPECT_EQ(codes_[codes_.size() - 1 - i], 0xa5);
      EXPECT_EQ(blocks_[blocks_.size() - 1 - i], 0xa5);
    }
    for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(scales_[scales_.size() - 1 - i], -1.0f);
  }
  bool same(const OwnedCopy& other) const {
    return codes_ == other.codes_ && blocks_ == other.blocks_ &&
           std::memcmp(scales_.data(), other.scales_.data(), scales_.size() * 4) == 0;
  }

  ReadCopy copy;

 private:
  std::vector<std::uint8_t> codes_, blocks_;
  std::vector<float> scales_;
};

/// By the definition of the layouts: index of (head, row, element) in a checkpoint.
std::size_t checkpoint_index(const Case& c, std::int64_t head, std::int64_t row, std::int64_t i) {
  std::int64_t at = head * c.rows * c.width;
  if (std::holds_alternative<Mamba2Shape>(c.shape)) {
    at += row * c.width + i;
  } else {
    const std::int64_t tile = row / 32;
    const std::int64_t columns = std::min<std::int64_t>(32, c.rows - tile * 32);
    at += tile * 32 * c.width + i * columns + row % 32;
  }
  return static_cast<std::size_t>(at);
}

/// (heads, rows, width)
std::vector<float> decoded(const Case& c, const ReadCopy& copy) {
  std::vector<float> out(static_cast<std::size_t>(c.heads * c.rows * c.width));
  for (std::int64_t head = 0; head < c.heads; ++head) {
    for (std::int64_t row = 0; row < c.rows; row += kReadCopyTile) {
      decode_read_copy_tile(copy, head, row, out.data() + (head * c.rows + row) * c.width, c.width,
                            1);
    }
  }
  return out;
}

/// Rows of very different sizes, with zeros, blocks of zeros and one row of denormals.
std::vector<float> random_state(const Case& c, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<float> state(static_cast<std::size_t>(c.heads * c.rows * c.width));
  for (std::int64_t head = 0; head < c.heads; ++head) {
    for (std::int64_t row = 0; row < c.rows; ++row) {
      const float size = std::exp(3.0f * rng.normal());
      for (std::int64_t i = 0; i < c.width; ++i) {
        float& x = state[checkpoint_index(c, head, row, i)];
        x = rng.chance(0.1) || (row == 2 && i < 16) ? 0.0f : size * rng.normal();
        if (row == 3) x *= 1e-39f;
        if (row == 5 && i % 16 == 0) x *= 1e4f;
      }
    }
  }
  return state;
}

float amax(const Case& c, const std::vector<float>& state, std::int64_t head, std::int64_t row,
           std::int64_t rows, std::int64_t first, std::int64_t count) {
  float out = 0.0f;
  for (std::int64_t r = row; r < std::min(row + rows, c.rows); ++r) {
    for (std::int64_t i = first; i < std::min(first + count, c.width); ++i) {
      out = std::max(out, std::abs(state[checkpoint_index(c, head, r, i)]));
    }
  }
  return out;
}

TEST(ReadCopy, ErrorsAreWithinTheBoundAndReachIt) {
  for (const ReadCopyFormat format : kFormats) {
    const ReadCopyError error = read_copy_error(format);
    const bool nvfp4 = format == ReadCopyFormat::kNvfp4;
    double worst = 0;
    for (const Case& c : kCases) {
      for (std::uint64_t seed = 1; seed <= 4; ++seed) {
        const std::vector<float> state = random_state(c, seed);
        OwnedCopy owned(c, format);
        encode_read_copy(owned.copy, state.data(), DType::kF32, 0, c.heads);
        owned.expect_guards();
        const std::vector<float> got = decoded(c, owned.copy);
        for (std::int64_t head = 0; head < c.heads; ++head) {
          for (std::int64_t row = 0; row < c.rows; ++row) {
            for (std::int64_t i = 0; i < c.width; ++i) {
              const double x = state[checkpoint_index(c, head, row, i)];
              const double y = got[static_cast<std::size_t>((head * c.rows + row) * c.width + i)];
              const double bound =
                  error.bound(x, amax(c, state, head, row, 1, i / 16 * 16, 16),
                              nvfp4 ? amax(c, state, head, row / 16 * 16, 16, 0, c.width)
                                    : amax(c, state, head, row, 1, 0, c.width));
              ASSERT_LE(std::abs(x - y), bound)
                  << c.name << ", " << to_string(format) << ", head " << head << ", row " << row
                  << ", element " << i << ": " << x << " became " << y;
              if (std::abs(x) > 1e-20) worst = std::max(worst, std::abs(x - y) / bound);
            }
          }
        }
      }
    }
    EXPECT_GT(worst, 0.9) << to_string(format) << ": the bound is loose";
  }
}

// The planes by their description, read without the decoder.
TEST(ReadCopy, PlanesAreLaidOutAsDescribed) {
  namespace rc = read_copy;
  for (const Case& c : kCases) {
    const std::vector<float> state = random_state(c, 7);
    for (const ReadCopyFormat format : kFormats) {
      OwnedCopy owned(c, format);
      const ReadCopy& copy = owned.copy;
      encode_read_copy(copy, state.data(), DType::kF32, 0, c.heads);
      const std::vector<float> got = decoded(c, copy);
      for (std::int64_t head = 0; head < c.heads; ++head) {
        for (std::int64_t row = 0; row < c.rows; ++row) {
          for (std::int64_t i = 0; i < c.width; ++i) {
            const std::int64_t r = head * c.rows + row;
            float want = 0;
            if (format == ReadCopyFormat::kNvfp4) {
              const std::uint8_t byte = copy.codes[r * (c.width / 2) + i / 2];
              const std::int64_t blocks = (c.width + 15) / 16;
              const std::int64_t tiles = (c.rows + 15) / 16;
              want = rc::decode_e2m1(i % 2 == 0 ? byte & 15 : byte >> 4) *
                     (rc::decode_e4m3(copy.block_scales[r * blocks + i / 16]) *
                      copy.scales[head * tiles + row / 16]);
            } else if (format == ReadCopyFormat::kInt8) {
              want = static_cast<float>(static_cast<std::int8_t>(copy.codes[r * c.width + i])) *
                     copy.scales[r];
            } else {
              want = rc::decode_e4m3(copy.codes[r * c.width + i]) * copy.scales[r];
            }
            ASSERT_EQ(got[static_cast<std::size_t>(r * c.width + i)], want) << c.name;
          }
        }
      }
    }
  }
}

TEST(ReadCopy, DecodesToAnyStrides) {
  const Case& c = kCases[1];
  OwnedCopy owned(c, ReadCopyFormat::kNvfp4);
  encode_read_copy(owned.copy, random_state(c, 3).data(), DType::kF32, 0, c.heads);
  const std::vector<float> want = decoded(c, owned.copy);
  std::vector<float> columns(static_cast<std::size_t>(c.width * 19), -1.0f);
  decode_read_copy_tile(owned.copy, 1, 16, columns.data(), 1, 19);  // rows 16..23 of head 1
  for (std::int64_t i = 0; i < c.width; ++i) {
    for (std::int64_t r = 0; r < 19; ++r) {
      const auto at = static_cast<std::size_t>((c.rows + 16 + r) * c.width + i);
      EXPECT_EQ(columns[static_cast<std::size_t>(i * 19 + r)], r < 8 ? want[at] : -1.0f);
    }
  }
}

template <typename Narrow>
void expect_copy_of_narrow_values() {
  for (const Case& c : kCases) {
    std::vector<float> state = random_state(c, 5);
    std::vector<Narrow> narrow;
    for (float& x : state) {
      narrow.push_back(from_float<Narrow>(x));
      x = to_float(narrow.back());
    }
    for (const ReadCopyFormat format : kFormats) {
      OwnedCopy from_f32(c, format);
      OwnedCopy from_narrow(c, format);
      encode_read_copy(from_f32.copy, state.data(), DType::kF32, 0, c.heads);
      encode_read_copy(from_narrow.copy, narrow.data(), DTypeOf<Narrow>::value, 0, c.heads);
      EXPECT_TRUE(from_narrow.same(from_f32)) << c.name << ", " << to_string(format);
    }
  }
}
TEST(ReadCopy, OfANarrowCheckpointIsThatOfItsValues) {
  expect_copy_of_narrow_values<BF16>();
  expect_copy_of_narrow_values<F16>();
}

// The largest element is exact in fp8-e4m3 and int8, so the scale is found again and every code.
TEST(ReadCopy, OfADecodedCopyIsTheSame) {
  const Case& c = kCases[1];
  for (const ReadCopyFormat format : {ReadCopyFormat::kFp8E4M3, ReadCopyFormat::kInt8}) {
    OwnedCopy once(c, format);
    OwnedCopy twice(c, format);
    encode_read_copy(once.copy, random_state(c, 9).data(), DType::kF32, 0, c.heads);
    const std::vector<float> values = decoded(c, once.copy);
    encode_read_copy(twice.copy, values.data(), DType::kF32, 0, c.heads);
    const std::vector<float> again = decoded(c, twice.copy);
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(again[i], values[i], 1e-6 * std::abs(static_cast<double>(values[i])))
          << to_string(format);
    }
  }
}

TEST(ReadCopy, OfZerosIsZeroWhateverWasThere) {
  for (const Case& c : kCases) {
    const std::vector<float> state(static_cast<std::size_t>(c.heads * c.rows * c.width));
    for (const ReadCopyFormat format : kFormats) {
      OwnedCopy owned(c, format);
      encode_read_copy(owned.copy, state.data(), DType::kF32, 0, c.heads);
      for (const float x : decoded(c, owned.copy)) ASSERT_EQ(x, 0.0f);
    }
  }
}

// A state that is not finite is seen, not clipped: its row, or nvfp4 tile, is NaN and no other.
TEST(ReadCopy, OfWhatIsNotFiniteIsNan) {
  const Case& c = kCases[1];  // tiles of 16 and 8 rows
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    for (const ReadCopyFormat format : kFormats) {
      std::vector<float> state = random_state(c, 11);
      state[checkpoint_index(c, 1, 20, 17)] = bad;
      OwnedCopy owned(c, format);
      encode_read_copy(owned.copy, state.data(), DType::kF32, 0, c.heads);
      const std::vector<float> got = decoded(c, owned.copy);
      for (std::int64_t r = 0; r < c.heads * c.rows; ++r) {
        const std::int64_t head = r / c.rows;
        const std::int64_t row = r % c.rows;
        const bool spoilt = head == 1 && (format == ReadCopyFormat::kNvfp4 ? row >= 16 : row == 20);
        for (std::int64_t i = 0; i < c.width; ++i) {
          ASSERT_EQ(std::isnan(got[static_cast<std::size_t>(r * c.width + i)]), spoilt)
              << to_string(format) << ", head " << head << ", row " << row;
        }
      }
    }
  }
}

// Largest magnitudes for which the bound is promised.
TEST(ReadCopy, OfHugeStatesIsFinite) {
  const Case& c = kCases[2];
  for (const ReadCopyFormat format : kFormats) {
    std::vector<float> state(static_cast<std::size_t>(c.heads * c.rows * c.width), 0x1p127f);
    OwnedCopy owned(c, format);
    encode_read_copy(owned.copy, state.data(), DType::kF32, 0, c.heads);
    for (const float x : decoded(c, owned.copy)) {
      ASSERT_NEAR(x, 0x1p127f, 1e-6 * 0x1p127) << to_string(format);
    }
  }
}

TEST(ReadCopy, Names) {
  EXPECT_STREQ(to_string(ReadCopyFormat::kNone), "none");
  EXPECT_STREQ(to_string(ReadCopyFormat::kFp8E4M3), "fp8-e4m3");
  EXPECT_STREQ(to_string(ReadCopyFormat::kInt8), "int8");
  EXPECT_STREQ(to_string(ReadCopyFormat::kNvfp4), "nvfp4");
  EXPECT_EQ(read_copy_error(ReadCopyFormat::kNone).bound(1e30, 1e30, 1e30), 0.0);
}

}  // namespace
}  // namespace replayssm
