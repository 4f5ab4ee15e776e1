// Rows of a step: which sequences advance, by how many tokens, and how certain those tokens are.
#pragma once

#include <cstdint>
#include <span>

namespace replayssm {

/// Data from the scheduler, never guessed from a token count.
enum class RowKind : std::uint8_t {
  kCommitted,  // tokens known to be accepted (prompt, plain decode): folded into the checkpoint
  kTentative,  // tokens that may be rejected (replay decode, verify): appended to the record ring
};

const char* to_string(RowKind kind);

/// What a slot of a pool may do: a step takes ready slots, and a commit gives them back.
enum class SlotCondition : std::uint8_t { kFree, kReady, kInStep, kInvalid };

/// "free", "ready", "inside a step", "invalid after a failed step".
const char* to_string(SlotCondition condition);

/// One sequence's share of a step. Its tokens are rows [token_begin, token_begin + token_count) of
/// the packed (tokens, ...) operands of every op of the step.
struct StepRow {
  /// Slot of the state pool, or negative for padding: nothing is read or written for a padding row
  /// and its outputs are zero.
  std::int32_t slot = -1;
  RowKind kind = RowKind::kTentative;
  std::int64_t token_begin = 0;
  std::int64_t token_count = 0;
  /// Of each token, the index in the row of the token it follows, -1 for the accepted prefix. Empty
  /// means a chain. Chains are what the kernels replay: a tree is refused, never flattened.
  std::span<const std::int32_t> parents;
};

}  // namespace replayssm
