#include "runtime/perplexity.h"

#include <algorithm>
#include <cmath>

namespace replayssm {
namespace {

/// -ln softmax(logits)[token].
double negative_log_likelihood(std::span<const float> logits, std::int32_t token) {
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(double(logit) - largest);
  return std::log(sum) + largest - logits[static_cast<std::size_t>(token)];
}

/// Scores tokens [from, window.size()) of a window, each by the logits after its predecessor.
Status score_window(Engine& engine, std::span<const std::int32_t> window, std::int64_t from,
                    TextScore& score) {
  const auto vocab = static_cast<std::size_t>(engine.model().vocab_size);
  RSSM_ASSIGN_OR_RETURN(const std::int32_t sequence, engine.open());
  const auto end = static_cast<std::int64_t>(window.size()) - 1;  // the last token predicts nothing
  for (std::int64_t begin = 0; begin < end;) {
    const std::int64_t count = std::min(kPromptChunk, end - begin);
    const std::int64_t first = std::max(begin, from - 1);  // first position whose logits are used
    const std::int64_t wanted = std::max<std::int64_t>(0, begin + count - first);
    const Work work{
        .sequence = sequence,
        .phase = Phase::kPrompt,
        .tokens = window.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count)),
        .logits = wanted};
    RSSM_ASSIGN_OR_RETURN(const std::span<const float> logits, engine.advance(std::span(&work, 1)));
    for (std::int64_t i = 0; i < wanted; ++i) {
      const std::int32_t next = window[static_cast<std::size_t>(begin + count - wanted + i + 1)];
      score.nats +=
          negative_log_likelihood(logits.subspan(static_cast<std::size_t>(i) * vocab, vocab), next);
      ++score.tokens;
    }
    begin += count;
  }
  return engine.close(sequence);
}

}  // namespace

Result<TextScore> score_text(std::shared_ptr<Model> model, std::shared_ptr<Backend> backend,
                             const CpuContext& cpu, const Tokenizer& tokenizer,
                             std::span<const std::int32_t> tokens, std::int64_t context,
                             const PromptProgress& progress) {
  if (tokens.size() < 2) {
    return invalid_argument("the text has ", tokens.size(), " tokens, expected at least 2");
  }
  if (context < 2) return invalid_argument("context is ", context, ", expected at least 2");
  RSSM_ASSIGN_OR_RETURN(
      const std::unique_ptr<Engine> engine,
      Engine::create(std::move(model), std::move(backend), cpu,
                     {.decode = DecodeMode::kPlain, .sequences = 1, .context = context}));
  TextScore score;
  const auto total = static_cast<std::int64_t>(tokens.size());
  for (std::int64_t scored = 1; scored < total;) {
    const std::int64_t begin = scored == 1 ? 0 : scored - context / 2;
    const std::int64_t size = std::min(context, total - begin);
    RSSM_RETURN_IF_ERROR(score_window(
        *engine, tokens.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(size)),
        scored - begin, score));
    scored = begin + size;
    if (progress) progress(scored, total);
  }
  if (!std::isfinite(score.nats)) {
    return data_loss("the likelihood of the text is ", score.nats, ", expected a finite number");
  }
  for (const std::int32_t token : tokens.subspan(1)) {
    RSSM_ASSIGN_OR_RETURN(const std::string_view bytes, tokenizer.token_bytes(token));
    score.bytes += static_cast<std::int64_t>(bytes.size());
  }
  return score;
}

}  // namespace replayssm
