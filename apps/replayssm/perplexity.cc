#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "io/file.h"
#include "progress.h"
#include "report.h"
#include "runtime/perplexity.h"
#include "session.h"

namespace replayssm::app {
namespace {

constexpr std::uint64_t kMaxTextBytes = std::uint64_t{1} << 30;
constexpr std::int64_t kLongestDefaultContext = 2048;

}  // namespace

Status run(const PerplexityCommand& command) {
  RSSM_ASSIGN_OR_RETURN(const std::string text, read_file(command.file, kMaxTextBytes));
  RSSM_ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, load_session(command.common));
  Result<std::vector<std::int32_t>> tokens = session->tokenizer->encode(text);
  if (!tokens.ok()) {
    return make_status(tokens.status().code(), command.file, ": ", tokens.status().message());
  }
  // With a begin-of-text token in front, the text's first token is scored too.
  if (const std::optional<std::int32_t> bos = session->model->description().bos) {
    tokens->insert(tokens->begin(), *bos);
  }
  std::int64_t context = command.context;
  if (context == 0) {
    const std::int64_t trained = session->model->description().max_position;
    context = trained > 1 ? std::min(trained, kLongestDefaultContext) : kLongestDefaultContext;
  }
  Progress progress("scoring");
  Result<TextScore> score =
      score_text(session->model, session->backend, session->context, *session->tokenizer, *tokens,
                 context, [&](std::int64_t done, std::int64_t total) {
                   progress.show(static_cast<double>(done), static_cast<double>(total));
                 });
  if (!score.ok()) {
    return make_status(score.status().code(), command.file, ": ", score.status().message());
  }
  const double bits_per_byte = score->nats / std::log(2.0) / static_cast<double>(score->bytes);
  const double perplexity = std::exp(score->nats / static_cast<double>(score->tokens));
  if (command.common.json) {
    print_json({{"bits_per_byte", bits_per_byte},
                {"perplexity", perplexity},
                {"tokens", score->tokens},
                {"bytes", score->bytes},
                {"context", context}});
    return {};
  }
  fmt::print("{:.4f} bits per byte, perplexity {:.3f} over {} tokens ({} bytes), windows of {}\n",
             bits_per_byte, perplexity, score->tokens, score->bytes, context);
  return {};
}

}  // namespace replayssm::app
