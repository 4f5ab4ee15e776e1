// What the two families of the delta rule share: Gated DeltaNet (a decay per value head) and Kimi
// Delta Attention (a decay per key channel; every head has keys of its own).
#pragma once

#include <cstdint>

#include "replayssm/state_pool.h"

namespace replayssm {

/// Columns of a head's state that are stored together on the CPU: the checkpoint is (value_heads,
/// tiles, key_dim, columns of the tile), and the last tile has what remains of value_dim. A
/// recurrence needs two passes over the state per token, the first to find the delta; a tile stays
/// in L1 between them. (On a CUDA device it is (value_heads, value_dim, key_dim).)
inline constexpr std::int64_t kDeltaRuleTile = 32;

struct DeltaRuleShape {
  std::int64_t key_heads = 0;
  std::int64_t value_heads = 0;  // a multiple of key_heads
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  bool channel_decay = false;

  std::int64_t state_elements() const { return value_heads * key_dim * value_dim; }
  std::int64_t heads_per_key() const { return value_heads / key_heads; }
  /// Log-decays of one head and token.
  std::int64_t decays() const { return channel_decay ? key_dim : 1; }
};

inline DeltaRuleShape delta_rule(const GatedDeltaNetShape& s) {
  return {s.key_heads, s.value_heads, s.key_dim, s.value_dim, false};
}
inline DeltaRuleShape delta_rule(const KimiDeltaAttentionShape& s) {
  return {s.heads, s.heads, s.key_dim, s.value_dim, true};
}

}  // namespace replayssm
