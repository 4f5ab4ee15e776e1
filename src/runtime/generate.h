// Generation of text: prompt in chunks, then token by token until a stop.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "runtime/engine.h"
#include "runtime/sampler.h"

namespace replayssm {

/// Called while a prompt is processed with tokens done and in all.
using PromptProgress = std::function<void(std::int64_t done, std::int64_t total)>;

/// Tokens of a prompt chunk. Large enough for the matrix library, small enough for activations.
inline constexpr std::int64_t kPromptChunk = 256;

struct GenerateOptions {
  std::int64_t max_tokens = 128;
  SamplingOptions sampling;
  /// Token ids that end the text; they are part of the tokens.
  std::vector<std::int32_t> stop_tokens;
  /// Keep the top-1 margin of every token's logits (for comparing runs).
  bool keep_margins = false;
  PromptProgress progress;
};

/// Takes each token as it is drawn; false ends the generation.
using TokenSink = std::function<Result<bool>(std::int32_t token)>;

struct Generation {
  std::vector<std::int32_t> tokens;  // generated, stop token included
  std::vector<float> margins;        // of each token, if asked for
  std::int64_t prompt_tokens = 0;
  std::int64_t decode_steps = 0;  // that moved `traffic`
  double prompt_seconds = 0;
  double decode_seconds = 0;
  StateTraffic traffic;  // of all decode steps
};

/// Feeds `tokens` to a sequence as prompt chunks; returns the logits after the last token.
Result<std::span<const float>> feed_prompt(Engine& engine, std::int32_t sequence,
                                           std::span<const std::int32_t> tokens,
                                           const PromptProgress& progress);

/// Generates on a sequence opened and closed here. The prompt must not be empty.
Result<Generation> generate(Engine& engine, std::span<const std::int32_t> prompt,
                            const GenerateOptions& options, const TokenSink& sink);

}  // namespace replayssm
