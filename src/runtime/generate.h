// Generation of text: prompt in chunks, then tokens until a stop.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "runtime/decoder.h"
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
  DraftSource* drafts = nullptr;  // must outlive the generation; null: none
  int draft_tokens = 0;           // most drafted per step
};

/// Takes each token as it is drawn; false ends the generation.
using TokenSink = std::function<Result<bool>(std::int32_t token)>;

struct Generation {
  std::vector<std::int32_t> tokens;  // generated, stop token included
  std::vector<float> margins;        // of each token, if asked for
  std::int64_t prompt_tokens = 0;
  DecodeCounts decode;  // what the steps after the prompt did; they moved `traffic`
  double prompt_seconds = 0;
  double decode_seconds = 0;
  StateTraffic traffic;  // of all decode steps
};

/// A text and the open sequence that holds its state: of all tokens (a prompt), or of all but the
/// last (one that was drawn and not yet read).
struct Conversation {
  std::int32_t sequence = -1;
  std::vector<std::int32_t> tokens;
  std::uint64_t seed = 0;  // of the random numbers, and how many were drawn
  std::uint64_t drawn = 0;
};

/// Feeds `tokens` to a sequence as prompt chunks; returns the logits after the last token. `drafts`
/// (null: none), for which the sequence is open, is told hidden states if it reads them.
Result<std::span<const float>> feed_prompt(Engine& engine, std::int32_t sequence,
                                           std::span<const std::int32_t> tokens,
                                           const PromptProgress& progress,
                                           DraftSource* drafts = nullptr);

/// Appends `prompt` to the conversation, which may be empty if the conversation's last token is not
/// yet read, and generates. Random numbers go on from the conversation's; options.sampling.seed is
/// not used. On failure the conversation is unspecified: close its sequence.
Result<Generation> continue_conversation(Engine& engine, Conversation& conversation,
                                         std::span<const std::int32_t> prompt,
                                         const GenerateOptions& options, const TokenSink& sink);

/// Generates on a sequence opened and closed here. The prompt must not be empty.
Result<Generation> generate(Engine& engine, std::span<const std::int32_t> prompt,
                            const GenerateOptions& options, const TokenSink& sink);

}  // namespace replayssm
