#include "runtime/engine.h"

#include <algorithm>

namespace replayssm {

const char* to_string(DecodeMode mode) {
  switch (mode) {
    case DecodeMode::kPlain:
      return "plain";
    case DecodeMode::kReplay:
      return "replay";
    case DecodeMode::kAuto:
      return "auto";
  }
  return "unknown";
}

StatePoolOptions pool_options(const ModelDescription& model, const EngineOptions& options) {
  StatePoolOptions pool;
  pool.layers = model.ssm_layers;
  pool.slots = options.sequences;
  pool.limits = {.window = options.window, .draft_capacity = options.draft_capacity};
  pool.checkpoint = options.state;
  pool.activation = DType::kF32;  // activations stay f32 between ops on the CPU
  pool.poison = options.poison;
  pool.model_id = model.model_type;
  return pool;
}

KvCacheOptions kv_options(const ModelDescription& model, const EngineOptions& options) {
  return {.layers = model.layers.attention,
          .slots = options.sequences,
          .capacity = options.context,
          .kv_heads = model.kv_heads,
          .head_dim = model.kv_head_dim,
          .dtype = options.kv.value_or(model.dtype)};
}

Result<SequenceBytes> sequence_bytes(const ModelDescription& model, const EngineOptions& options) {
  SequenceBytes bytes;
  if (!model.ssm_layers.empty()) {
    RSSM_ASSIGN_OR_RETURN(bytes.state, StatePool::bytes_per_slot(pool_options(model, options)));
  }
  if (model.layers.attention > 0) {
    bytes.kv_per_token = KvCache::bytes_per_token(kv_options(model, options));
  }
  return bytes;
}

namespace {

Status check_options(const EngineOptions& options) {
  if (options.sequences < 1 || options.sequences > (std::int64_t{1} << 20)) {
    return invalid_argument("sequences is ", options.sequences, ", expected 1..1048576");
  }
  if (options.context < 1 || options.context > (std::int64_t{1} << 40)) {
    return invalid_argument("context is ", options.context, ", expected 1..2^40 tokens");
  }
  if (options.decode != DecodeMode::kPlain &&
      (options.window < 1 || options.window > ReplayLimits::kMaxWindow)) {
    return invalid_argument("window is ", options.window, ", expected 1..",
                            ReplayLimits::kMaxWindow);
  }
  return {};
}

Status check_memory(const ModelDescription& model, const EngineOptions& options) {
  if (options.memory == 0) return {};
  RSSM_ASSIGN_OR_RETURN(const SequenceBytes bytes, sequence_bytes(model, options));
  const auto fit = static_cast<std::int64_t>(
      options.memory / std::max<std::size_t>(1, bytes.total(options.context)));
  if (options.sequences <= fit) return {};
  return resource_exhausted(options.sequences, " sequences of ", bytes.total(options.context),
                            " bytes do not fit into ", options.memory, " bytes; ", fit, " do");
}

}  // namespace

Engine::Engine(std::shared_ptr<Model> model, std::shared_ptr<Backend> backend, StatePool pool,
               KvCache cache, const EngineOptions& options, DecodePlan plan)
    : model_(std::move(model)),
      backend_(std::move(backend)),
      pool_(std::move(pool)),
      cache_(std::move(cache)),
      options_(options),
      plan_(std::move(plan)) {}

Result<std::unique_ptr<Engine>> Engine::create(std::shared_ptr<Model> model,
                                               std::shared_ptr<Backend> backend,
                                               const CpuContext& context,
                                               const EngineOptions& options) {
  RSSM_RETURN_IF_ERROR(check_options(options));
  EngineOptions resolved = options;
  DecodePlan plan;
  if (options.decode == DecodeMode::kAuto) {
    RSSM_ASSIGN_OR_RETURN(plan, choose_decode(context, pool_options(model->description(), options),
                                              options.sequences));
  } else {
    plan.replay = options.decode == DecodeMode::kReplay;
    plan.window = plan.replay ? options.window : 0;
    plan.reason = "asked for";
  }
  // Plain decoding replays nothing: the smallest ring will do, unless drafts need more.
  resolved.window = std::max(plan.replay ? plan.window : 1, options.draft_capacity);
  if (plan.replay && plan.window < resolved.window) {
    plan.window = resolved.window;
    plan.reason += ", as long as the draft capacity at least";
  }
  RSSM_RETURN_IF_ERROR(check_memory(model->description(), resolved));
  RSSM_ASSIGN_OR_RETURN(StatePool pool,
                        StatePool::create(pool_options(model->description(), resolved)));
  RSSM_RETURN_IF_ERROR(model->bind(pool));
  RSSM_ASSIGN_OR_RETURN(KvCache cache, KvCache::create(kv_options(model->description(), resolved)));
  return std::unique_ptr<Engine>(new Engine(std::move(model), std::move(backend), std::move(pool),
                                            std::move(cache), resolved, std::move(plan)));
}

Result<std::int32_t> Engine::open() { return pool_.acquire(); }

Status Engine::close(std::int32_t sequence) {
  // Released now, the sequence would make the step stale, and with it the step of all the others.
  if (step_ && std::any_of(step_->rows().begin(), step_->rows().end(),
                           [&](const StepRow& row) { return row.slot == sequence; })) {
    return failed_precondition("sequence ", sequence, " is in a step that waits for its commit");
  }
  return pool_.release(sequence);
}

Result<std::int64_t> Engine::position(std::int32_t sequence) const {
  RSSM_ASSIGN_OR_RETURN(const Cursor cursor, pool_.cursor(sequence));
  return cursor.position;
}

Status Engine::check(std::span<const Work> work) const {
  if (step_) return failed_precondition("a step is waiting for its commit");
  const ModelDescription& model = model_->description();
  for (std::size_t i = 0; i < work.size(); ++i) {
    const Work& w = work[i];
    const auto count = static_cast<std::int64_t>(w.tokens.size());
    if (count < 1 || (w.phase == Phase::kDecode && count != 1)) {
      return invalid_argument("row ", i, " carries ", count, " tokens, expected ",
                              w.phase == Phase::kDecode ? "1" : "at least 1");
    }
    if (w.logits < 0 || w.logits > count) {
      return invalid_argument("row ", i, " asks for logits of ", w.logits, " tokens, expected 0..",
                              count);
    }
    for (const std::int32_t token : w.tokens) {
      if (token < 0 || token >= model.vocab_size) {
        return invalid_argument("row ", i, ": token id ", token, " is out of range, expected 0..",
                                model.vocab_size - 1);
      }
    }
    RSSM_ASSIGN_OR_RETURN(const std::int64_t at, position(w.sequence));
    if (count > options_.context - at) {
      return resource_exhausted("sequence ", w.sequence, " at position ", at, " takes ", count,
                                " more tokens, its context holds ", options_.context);
    }
  }
  return {};
}

Result<std::span<const float>> Engine::run(std::span<const Work> work) {
  RSSM_RETURN_IF_ERROR(check(work));
  step_rows_.clear();
  rows_.clear();
  tokens_.clear();
  logit_counts_.clear();
  std::int64_t wanted = 0;
  for (const Work& w : work) {
    const bool committed =
        w.phase == Phase::kPrompt || (w.phase == Phase::kDecode && !plan_.replay);
    const RowKind kind = committed ? RowKind::kCommitted : RowKind::kTentative;
    const auto begin = static_cast<std::int64_t>(tokens_.size());
    const auto count = static_cast<std::int64_t>(w.tokens.size());
    step_rows_.push_back(
        {.slot = w.sequence, .kind = kind, .token_begin = begin, .token_count = count});
    RSSM_ASSIGN_OR_RETURN(const std::int64_t at, position(w.sequence));
    rows_.push_back({.slot = w.sequence,
                     .kind = kind,
                     .prompt = w.phase == Phase::kPrompt,
                     .begin = begin,
                     .count = count,
                     .position = at});
    tokens_.insert(tokens_.end(), w.tokens.begin(), w.tokens.end());
    logit_counts_.push_back(w.logits);
    wanted += w.logits;
  }
  RSSM_ASSIGN_OR_RETURN(Step step, pool_.begin_step(step_rows_));
  const std::int64_t vocab = model_->description().vocab_size;
  logits_.resize(static_cast<std::size_t>(wanted * vocab));
  pool_.reset_traffic();
  const Status status =
      model_->forward(*backend_, pool_, step, cache_,
                      {.rows = rows_, .tokens = tokens_, .logit_counts = logit_counts_},
                      TensorView::contiguous(logits_.data(), DType::kF32, {wanted, vocab}));
  if (!status.ok()) {
    // The first failure is what the caller needs to see; after it only the step's end matters.
    static_cast<void>(pool_.abort(step).ok());
    return status;
  }
  const bool decodes = std::any_of(work.begin(), work.end(),
                                   [](const Work& w) { return w.phase != Phase::kPrompt; });
  if (decodes) decode_traffic_ += pool_.traffic();
  step_ = std::move(step);
  return std::span<const float>(logits_);
}

Status Engine::commit(std::span<const std::int64_t> accepted) {
  if (!step_) return failed_precondition("no step is waiting for a commit");
  RSSM_RETURN_IF_ERROR(pool_.commit(*step_, accepted));
  step_.reset();
  return {};
}

Result<std::span<const float>> Engine::advance(std::span<const Work> work) {
  RSSM_ASSIGN_OR_RETURN(const std::span<const float> logits, run(work));
  std::vector<std::int64_t> accepted;
  for (const Work& w : work) accepted.push_back(static_cast<std::int64_t>(w.tokens.size()));
  RSSM_RETURN_IF_ERROR(commit(accepted));
  return logits;
}

StateTraffic Engine::take_decode_traffic() { return std::exchange(decode_traffic_, {}); }

}  // namespace replayssm
