// Decoder: draws the texts of many sequences, a step of the engine at a time. With a draft source a
// step verifies a drafted continuation of each text and accepts what the model would have drawn.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "runtime/draft/draft_source.h"
#include "runtime/engine.h"
#include "runtime/sampler.h"

namespace replayssm {

/// A text that grows. The engine holds the state of all its tokens but the last.
struct Stream {
  /// Takes each token and the logits it was drawn from; false ends the text after that token.
  using Sink = std::function<Result<bool>(std::int32_t token, std::span<const float> logits)>;

  std::int32_t sequence = -1;  // of the engine
  std::vector<std::int32_t> tokens;
  Sampler sampler{SamplingOptions{}};
  std::int64_t wanted = 0;  // most tokens still to draw; 0 once the text has ended
  Sink sink;
};

struct DecodeCounts {
  std::int64_t steps = 0;     // rows decoded or verified: steps of each text
  std::int64_t drawn = 0;     // tokens they drew
  std::int64_t drafted = 0;   // tokens proposed
  std::int64_t accepted = 0;  // of these, how many are in the text
};

class Decoder {
 public:
  /// Without a source (null) every step draws one token per text. Engine and source must outlive
  /// the decoder; the source has each stream's sequence open.
  Decoder(Engine& engine, DraftSource* source, int draft_tokens)
      : engine_(engine), source_(source), draft_tokens_(draft_tokens) {}

  /// Draws a token after a prompt, from the logits of its last token.
  static Status draw(Stream& stream, std::span<const float> logits);

  /// One step of the engine for all streams, each of at least one token and with wanted > 0:
  ///
  ///   draft    0..draft_tokens tokens per stream, never more than it can still take
  ///   verify   a row of the text's last token and the draft, all rows in one forward pass
  ///   accept   by Sampler::verify, to the first rejection or the end of the text
  ///   commit   what was drawn: SSM states, convolutions and KV cache follow from the position
  ///   tell     a source that reads them the hidden states of the accepted tokens
  ///
  /// A token after the end is neither drawn, nor given to the sink, nor counted. When a sink fails
  /// the step is committed for all streams, as far as each went, and the first error returned; the
  /// others can go on. A stream whose draw failed has to be closed.
  Status step(std::span<Stream* const> streams);

  const DecodeCounts& counts() const { return counts_; }

 private:
  Status draft(std::span<Stream* const> streams);
  Status accept(Stream& stream, const Draft& draft, std::span<const float> logits,
                std::int64_t* accepted);
  Status tell(std::span<Stream* const> streams, std::span<const std::int64_t> accepted);

  Engine& engine_;
  DraftSource* source_;
  int draft_tokens_;
  DecodeCounts counts_;
  std::vector<Draft> drafts_;                    // of the step's streams
  std::vector<std::vector<std::int32_t>> rows_;  // their tokens
};

}  // namespace replayssm
