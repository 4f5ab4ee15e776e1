#include "runtime/generate.h"

#include <algorithm>
#include <chrono>

namespace replayssm {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Status generate_on(Engine& engine, std::int32_t sequence, std::span<const std::int32_t> prompt,
                   const GenerateOptions& options, const TokenSink& sink, Generation& out) {
  Sampler sampler(options.sampling);
  const double start = now();
  RSSM_ASSIGN_OR_RETURN(std::span<const float> logits,
                        feed_prompt(engine, sequence, prompt, options.progress));
  out.prompt_tokens = static_cast<std::int64_t>(prompt.size());
  static_cast<void>(engine.take_decode_traffic());
  const double decode_start = now();
  out.prompt_seconds = decode_start - start;
  while (true) {
    RSSM_ASSIGN_OR_RETURN(const std::int32_t token, sampler.sample(logits));
    if (options.keep_margins) {
      RSSM_ASSIGN_OR_RETURN(const Greedy greedy, greedy_with_margin(logits));
      out.margins.push_back(greedy.margin);
    }
    out.tokens.push_back(token);
    out.decode_seconds = now() - decode_start;
    RSSM_ASSIGN_OR_RETURN(const bool more, sink(token));
    const bool stop = std::find(options.stop_tokens.begin(), options.stop_tokens.end(), token) !=
                      options.stop_tokens.end();
    if (!more || stop || static_cast<std::int64_t>(out.tokens.size()) == options.max_tokens) break;
    const Work work{
        .sequence = sequence, .phase = Phase::kDecode, .tokens = std::span(&token, 1), .logits = 1};
    RSSM_ASSIGN_OR_RETURN(logits, engine.advance(std::span(&work, 1)));
    ++out.decode_steps;
  }
  out.traffic = engine.take_decode_traffic();
  return {};
}

}  // namespace

Result<std::span<const float>> feed_prompt(Engine& engine, std::int32_t sequence,
                                           std::span<const std::int32_t> tokens,
                                           const PromptProgress& progress) {
  const auto total = static_cast<std::int64_t>(tokens.size());
  std::span<const float> logits;
  for (std::int64_t done = 0; done < total;) {
    const std::int64_t count = std::min(kPromptChunk, total - done);
    const bool last = done + count == total;
    const Work work{
        .sequence = sequence,
        .phase = Phase::kPrompt,
        .tokens = tokens.subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(count)),
        .logits = last ? 1 : 0};
    RSSM_ASSIGN_OR_RETURN(logits, engine.advance(std::span(&work, 1)));
    done += count;
    if (progress) progress(done, total);
  }
  return logits;
}

Result<Generation> generate(Engine& engine, std::span<const std::int32_t> prompt,
                            const GenerateOptions& options, const TokenSink& sink) {
  RSSM_RETURN_IF_ERROR(validate(options.sampling));
  if (options.max_tokens < 1) {
    return invalid_argument("max tokens is ", options.max_tokens, ", expected at least 1");
  }
  if (prompt.empty()) {
    return invalid_argument("the prompt has 0 tokens, expected at least 1");
  }
  // The last token is not fed back, so it takes no place.
  const std::int64_t context = engine.options().context;
  if (options.max_tokens - 1 > context - static_cast<std::int64_t>(prompt.size())) {
    return resource_exhausted("a prompt of ", prompt.size(), " tokens and ", options.max_tokens - 1,
                              " tokens after it do not fit into the context of ", context);
  }
  RSSM_ASSIGN_OR_RETURN(const std::int32_t sequence, engine.open());
  Generation out;
  const Status status = generate_on(engine, sequence, prompt, options, sink, out);
  RSSM_RETURN_IF_ERROR(engine.close(sequence));
  RSSM_RETURN_IF_ERROR(status);
  return out;
}

}  // namespace replayssm
