#include "runtime/generate.h"

#include <algorithm>
#include <chrono>

namespace replayssm {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// `unread`: tokens the sequence has yet to read, of which `prompt` are new.
Status generate_on(Engine& engine, Stream& stream, std::span<const std::int32_t> unread,
                   std::size_t prompt, const GenerateOptions& options, const TokenSink& sink,
                   double start, Generation& out) {
  double decode_start = 0;
  stream.sink = [&](std::int32_t token, std::span<const float> logits) -> Result<bool> {
    if (options.keep_margins) {
      RSSM_ASSIGN_OR_RETURN(const Greedy greedy, greedy_with_margin(logits));
      out.margins.push_back(greedy.margin);
    }
    out.tokens.push_back(token);
    out.decode_seconds = now() - decode_start;
    RSSM_ASSIGN_OR_RETURN(const bool more, sink(token));
    const bool stop = std::find(options.stop_tokens.begin(), options.stop_tokens.end(), token) !=
                      options.stop_tokens.end();
    return more && !stop;
  };
  Decoder decoder(engine, options.drafts, options.draft_tokens);
  std::span<const float> logits;
  if (prompt > 0) {
    RSSM_ASSIGN_OR_RETURN(
        logits, feed_prompt(engine, stream.sequence, unread, options.progress, options.drafts));
  }
  out.prompt_tokens = static_cast<std::int64_t>(prompt);
  static_cast<void>(engine.take_decode_traffic());
  decode_start = now();
  out.prompt_seconds = decode_start - start;
  if (prompt > 0) RSSM_RETURN_IF_ERROR(Decoder::draw(stream, logits));
  Stream* const streams[] = {&stream};
  while (stream.wanted > 0) RSSM_RETURN_IF_ERROR(decoder.step(streams));
  out.decode = decoder.counts();
  out.traffic = engine.take_decode_traffic();
  return {};
}

/// The same with the sequence open for drafts, if there are any.
Status generate_with_drafts(Engine& engine, Stream& stream, std::span<const std::int32_t> unread,
                            std::size_t prompt, const GenerateOptions& options,
                            const TokenSink& sink, Generation& out) {
  const double start = now();
  if (options.drafts == nullptr) {
    return generate_on(engine, stream, unread, prompt, options, sink, start, out);
  }
  // Before the prompt, whose hidden states the source may want.
  RSSM_RETURN_IF_ERROR(options.drafts->open(stream.sequence, stream.tokens));
  Status status = generate_on(engine, stream, unread, prompt, options, sink, start, out);
  Status closed = options.drafts->close(stream.sequence);
  return status.ok() ? closed : status;
}

}  // namespace

Result<std::span<const float>> feed_prompt(Engine& engine, std::int32_t sequence,
                                           std::span<const std::int32_t> tokens,
                                           const PromptProgress& progress, DraftSource* drafts) {
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
    if (drafts != nullptr && drafts->reads_hidden_states()) {
      RSSM_ASSIGN_OR_RETURN(const std::int64_t position, engine.position(sequence));
      RSSM_RETURN_IF_ERROR(drafts->read(sequence, position - count, engine.hidden_states()));
    }
    done += count;
    if (progress) progress(done, total);
  }
  return logits;
}

Result<Generation> continue_conversation(Engine& engine, Conversation& conversation,
                                         std::span<const std::int32_t> prompt,
                                         const GenerateOptions& options, const TokenSink& sink) {
  RSSM_RETURN_IF_ERROR(validate(options.sampling));
  if (options.max_tokens < 1) {
    return invalid_argument("max tokens is ", options.max_tokens, ", expected at least 1");
  }
  if (options.drafts != nullptr &&
      (options.draft_tokens < 1 || options.draft_tokens >= engine.options().draft_capacity)) {
    return invalid_argument("draft tokens is ", options.draft_tokens, ", expected 1..",
                            engine.options().draft_capacity - 1, " for a draft capacity of ",
                            engine.options().draft_capacity);
  }
  if (options.drafts != nullptr && options.drafts->reads_hidden_states() &&
      !engine.options().hidden_states) {
    return invalid_argument("drafts by ", options.drafts->name(),
                            " read hidden states, which the engine was not asked to keep");
  }
  RSSM_ASSIGN_OR_RETURN(const std::int64_t position, engine.position(conversation.sequence));
  const auto size = static_cast<std::int64_t>(conversation.tokens.size());
  if (position != size && position != size - 1) {
    return invalid_argument("the conversation has ", size, " tokens and its sequence has read ",
                            position, ", expected all of them or all but one");
  }
  if (prompt.empty() && position == size) {
    return invalid_argument("the prompt has 0 tokens, expected at least 1");
  }
  // The last token is not fed back, so it takes no place.
  const std::int64_t context = engine.options().context;
  if (options.max_tokens - 1 > context - size - static_cast<std::int64_t>(prompt.size())) {
    return resource_exhausted("a prompt of ", size + std::ssize(prompt), " tokens and ",
                              options.max_tokens - 1,
                              " tokens after it do not fit into the context of ", context);
  }
  Stream stream;
  stream.sequence = conversation.sequence;
  stream.tokens = std::move(conversation.tokens);
  stream.tokens.insert(stream.tokens.end(), prompt.begin(), prompt.end());
  SamplingOptions sampling = options.sampling;
  sampling.seed = conversation.seed;
  stream.sampler = Sampler(sampling, conversation.drawn);
  stream.wanted = options.max_tokens;
  const std::vector<std::int32_t> unread(stream.tokens.begin() + position, stream.tokens.end());
  Generation out;
  RSSM_RETURN_IF_ERROR(
      generate_with_drafts(engine, stream, unread, prompt.size(), options, sink, out));
  conversation.tokens = std::move(stream.tokens);
  conversation.drawn = stream.sampler.drawn();
  return out;
}

Result<Generation> generate(Engine& engine, std::span<const std::int32_t> prompt,
                            const GenerateOptions& options, const TokenSink& sink) {
  Conversation conversation{.seed = options.sampling.seed};
  RSSM_ASSIGN_OR_RETURN(conversation.sequence, engine.open());
  Result<Generation> out = continue_conversation(engine, conversation, prompt, options, sink);
  RSSM_RETURN_IF_ERROR(engine.close(conversation.sequence));
  return out;
}

}  // namespace replayssm
