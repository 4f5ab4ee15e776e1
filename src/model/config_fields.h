// Fields that the configurations of many architectures share.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "model/config_reader.h"

namespace replayssm {

inline constexpr std::int64_t kMaxDim = std::int64_t{1} << 24;
inline constexpr std::int64_t kMaxHeads = std::int64_t{1} << 16;  // and their dimension

/// dtype or, as it was called before, torch_dtype; bf16 if there is neither.
DType read_dtype(ConfigReader& config);

/// A token id or a list of them, each in [0, vocab).
std::vector<std::int32_t> read_token_ids(ConfigReader& config, const char* key, std::int64_t vocab);

/// num_attention_heads, num_key_value_heads, head_dim, with scale head_dim^-1/2. Refuses
/// sliding_window.
AttentionShape read_attention_shape(ConfigReader& config);

/// Refuses a setting that is true.
void refuse_true(ConfigReader& config, const char* key);

/// Refuses a name other than `expected`, which is also what absence means.
void require_name(ConfigReader& config, const char* key, const char* expected);

}  // namespace replayssm
