// Scoring a text: the negative log-likelihood a model gives its tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "runtime/generate.h"
#include "text/tokenizer.h"

namespace replayssm {

struct TextScore {
  double nats = 0;          // sum of -ln p over the scored tokens
  std::int64_t tokens = 0;  // scored: all but the text's first
  std::int64_t bytes = 0;   // of text the scored tokens stand for
};

/// Windows of `context` tokens overlap by half: the second half of each window is scored, so that
/// every token but those of the first window has at least context / 2 tokens before it. The model
/// sees each window as a sequence of its own.
Result<TextScore> score_text(std::shared_ptr<Model> model, std::shared_ptr<Backend> backend,
                             const CpuContext& cpu, const Tokenizer& tokenizer,
                             std::span<const std::int32_t> tokens, std::int64_t context,
                             const PromptProgress& progress);

}  // namespace replayssm
