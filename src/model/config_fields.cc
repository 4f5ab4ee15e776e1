#include "model/config_fields.h"

#include <cmath>

#include "io/quote.h"

namespace replayssm {

DType read_dtype(ConfigReader& config) {
  const std::string name =
      config.string_or(config.has("dtype") ? "dtype" : "torch_dtype", "bfloat16");
  if (name == "float32") return DType::kF32;
  if (name == "float16") return DType::kF16;
  if (name != "bfloat16") {
    config.fail(unsupported(config.name(), ": dtype is ", quote(name),
                            ", expected float32, bfloat16 or float16"));
  }
  return DType::kBF16;
}

std::vector<std::int32_t> read_token_ids(ConfigReader& config, const char* key,
                                         std::int64_t vocab) {
  std::vector<std::int32_t> out;
  for (const std::int64_t id : config.integers(key)) {
    if (id < 0 || id >= vocab) {
      config.fail(
          invalid_argument(config.name(), ": ", key, " is ", id, ", expected 0..", vocab - 1));
    }
    out.push_back(static_cast<std::int32_t>(id));
  }
  return out;
}

AttentionShape read_attention_shape(ConfigReader& config) {
  AttentionShape shape;
  shape.query_heads = config.integer("num_attention_heads", 1, kMaxHeads);
  shape.kv_heads = config.integer_or("num_key_value_heads", 1, kMaxHeads, shape.query_heads);
  shape.head_dim = config.integer("head_dim", 1, kMaxHeads);
  shape.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  if (config.status().ok() && shape.query_heads % shape.kv_heads != 0) {
    config.fail(invalid_argument(config.name(), ": num_attention_heads is ", shape.query_heads,
                                 ", expected a multiple of num_key_value_heads ", shape.kv_heads));
  }
  if (config.has("sliding_window")) {
    config.fail(unsupported(config.name(), ": sliding_window is not supported"));
  }
  return shape;
}

void refuse_true(ConfigReader& config, const char* key) {
  if (config.boolean_or(key, false)) {
    config.fail(unsupported(config.name(), ": ", key, " is true, which is not supported"));
  }
}

void require_name(ConfigReader& config, const char* key, const char* expected) {
  if (const std::string found = config.string_or(key, expected); found != expected) {
    config.fail(
        unsupported(config.name(), ": ", key, " is ", quote(found), ", expected ", expected));
  }
}

}  // namespace replayssm
