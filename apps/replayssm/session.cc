#include "session.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "backend/cpu/cpu_backend.h"
#include "draft.h"
#include "io/file.h"
#include "progress.h"

namespace replayssm::app {
namespace {

constexpr std::uint64_t kMaxPromptBytes = std::uint64_t{256} << 20;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int default_threads() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

}  // namespace

Result<std::unique_ptr<Session>> load_session(const CommonOptions& options) {
  auto session = std::make_unique<Session>();
  session->folder = options.folder;
  const double start = now();
  RSSM_ASSIGN_OR_RETURN(const CpuIsa isa, select_isa());
  session->threads =
      std::make_unique<ThreadPool>(options.threads > 0 ? options.threads : default_threads());
  session->context = {.threads = session->threads.get(), .isa = isa};
  session->backend = std::make_shared<CpuBackend>(session->context);

  Progress progress("loading");
  RSSM_ASSIGN_OR_RETURN(
      session->model,
      load_model(options.folder, *session->backend, [&](std::uint64_t done, std::uint64_t total) {
        progress.show(static_cast<double>(done), static_cast<double>(total));
      }));
  RSSM_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::load(options.folder + "/tokenizer.json"));
  if (tokenizer.vocab_size() > session->model->description().vocab_size) {
    return invalid_argument(options.folder, "/tokenizer.json: has ", tokenizer.vocab_size(),
                            " token ids, the model's vocabulary has ",
                            session->model->description().vocab_size);
  }
  session->tokenizer = std::make_unique<Tokenizer>(std::move(tokenizer));
  RSSM_ASSIGN_OR_RETURN(const ModelDescription description, describe_model(options.folder));
  session->stop_tokens = description.eos;
  session->load_seconds = now() - start;
  return session;
}

Result<std::vector<std::int32_t>> encode_prompt(const Session& session, const PromptOptions& prompt,
                                                bool continues) {
  std::string text = prompt.text.value_or("");
  if (prompt.file) {
    RSSM_ASSIGN_OR_RETURN(text, read_file(*prompt.file, kMaxPromptBytes));
  }
  Result<std::vector<std::int32_t>> ids = session.tokenizer->encode(text, !continues);
  if (!ids.ok()) {
    return make_status(ids.status().code(), prompt.file.value_or("--prompt"), ": ",
                       ids.status().message());
  }
  if (ids->empty() && !continues) {
    const std::optional<std::int32_t> bos = session.model->description().bos;
    if (!bos) return invalid_argument("the prompt is empty and the model names no bos_token_id");
    ids->push_back(*bos);
  }
  return ids;
}

Result<Run> run_generation(const Session& session, std::span<const std::int32_t> prompt,
                           const RunSettings& settings, const GenerateOptions& options,
                           const TokenSink& sink, const RunSessions& sessions) {
  EngineOptions engine_options;
  engine_options.decode = settings.decode;
  engine_options.window = settings.window;
  engine_options.state = settings.state;
  engine_options.draft_capacity = settings.draft != nullptr ? settings.draft_tokens + 1 : 1;
  engine_options.hidden_states = settings.draft != nullptr && settings.draft->head != nullptr;
  const std::size_t restored = sessions.load != nullptr ? sessions.load->tokens().size() : 0;
  engine_options.context = static_cast<std::int64_t>(restored + prompt.size()) + options.max_tokens;
  RSSM_ASSIGN_OR_RETURN(
      const std::unique_ptr<Engine> engine,
      Engine::create(session.model, session.backend, session.context, engine_options));
  GenerateOptions generate_options = options;
  std::unique_ptr<DraftSource> source;
  Run run;
  if (settings.draft != nullptr) {
    RSSM_ASSIGN_OR_RETURN(source, create_draft(session, *settings.draft, settings.draft_tokens,
                                               engine_options.context));
    generate_options.drafts = source.get();
    generate_options.draft_tokens = settings.draft_tokens;
    run.draft = source->name();
    run.draft_tokens = settings.draft_tokens;
  }
  run.decode = settings.decode;
  run.plan = engine->plan();
  run.state = settings.state;
  RSSM_ASSIGN_OR_RETURN(run.bytes, engine->bytes());
  Conversation conversation{.seed = options.sampling.seed};
  if (sessions.load != nullptr) {
    RSSM_ASSIGN_OR_RETURN(conversation, sessions.load->restore(*engine));
    if (sessions.new_seed) {
      conversation.seed = options.sampling.seed;
      conversation.drawn = 0;
    }
    run.restored_tokens = static_cast<std::int64_t>(restored);
  } else {
    RSSM_ASSIGN_OR_RETURN(conversation.sequence, engine->open());
  }
  RSSM_ASSIGN_OR_RETURN(
      run.generation, continue_conversation(*engine, conversation, prompt, generate_options, sink));
  if (sessions.save) {
    const Result<std::vector<std::byte>> bytes = save_session(*engine, conversation);
    run.saved = bytes.ok() ? write_file_atomically(*sessions.save, *bytes) : bytes.status();
  }
  return run;
}

TrafficPerToken traffic_per_token(const Generation& generation) {
  const StateTraffic& t = generation.traffic;
  const double drawn = static_cast<double>(std::max<std::int64_t>(1, generation.decode.drawn));
  return {
      .read = static_cast<double>(t.checkpoint_read + t.read_copy_read + t.ring_read) / drawn,
      .written =
          static_cast<double>(t.checkpoint_written + t.read_copy_written + t.ring_written) / drawn,
      .checkpoint_written = static_cast<double>(t.checkpoint_written) / drawn};
}

double tokens_per_second(const Generation& generation) {
  return generation.decode_seconds > 0
             ? static_cast<double>(generation.tokens.size()) / generation.decode_seconds
             : 0.0;
}

}  // namespace replayssm::app
