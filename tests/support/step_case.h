// What a case of a step test has whatever the recurrence family.
#pragma once

#include <cstdint>
#include <string>

#include "replayssm/cursor.h"
#include "replayssm/dtype.h"
#include "replayssm/state_pool.h"

namespace replayssm::testing {

struct StepCase {
  std::string name;
  ReplayLimits limits;
  DType checkpoint = DType::kF32;
  DType activation = DType::kF32;
  ReadCopyFormat read_copy = ReadCopyFormat::kNone;
  int layers = 1;
  int conv_width = 0;  // taps of a convolution that makes the op's inputs; 0: they are the inputs
  bool conv_silu = true;
  bool rewindable = false;
  bool strided = false;  // operands are slices of one buffer, rows of heads spread out
  /// Operands begin at, and their rows are spread by, multiples of this many elements; the gaps of
  /// 1 are odd.
  std::int64_t unit = 1;

  /// Elements in front of a strided operand, and between its heads.
  std::int64_t guard() const { return !strided ? 0 : unit == 1 ? 3 : unit; }
  std::int64_t spread() const { return !strided || conv_width > 0 ? 0 : unit == 1 ? 5 : unit; }

  /// At least this much of bound(), where outputs read a copy of the state: its rounding, more
  /// where terms cancel. Close comparisons know the copy (read_copy_properties.h).
  double read_copy_bound() const {
    switch (read_copy) {
      case ReadCopyFormat::kNone:
        return 0;
      case ReadCopyFormat::kInt8:
        return 5e-2;
      case ReadCopyFormat::kFp8E4M3:
        return 1.5e-1;
      case ReadCopyFormat::kNvfp4:
        return 5e-1;
    }
    return 0;
  }

 protected:
  /// A poisoned pool of the case's layers.
  StatePoolOptions pool_options(const RecurrenceShape& recurrence, std::int64_t conv_channels,
                                std::int64_t slots) const {
    StatePoolOptions options;
    options.layers.assign(static_cast<std::size_t>(layers),
                          LayerSpec{recurrence, {conv_channels, conv_width}, read_copy});
    options.slots = slots;
    options.limits = limits;
    options.checkpoint = checkpoint;
    options.activation = activation;
    options.rewindable = rewindable;
    options.poison = true;
    options.model_id = "test";
    return options;
  }
};

}  // namespace replayssm::testing
