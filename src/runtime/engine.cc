#include "runtime/engine.h"

#include <algorithm>
#include <utility>

#include "core/byte_io.h"

namespace replayssm {

const char* to_string(DecodeMode mode) {
  switch (mode) {
    case DecodeMode::kPlain:
      return "plain";
    case DecodeMode::kReplay:
      return "replay";
    case DecodeMode::kSnapshot:
      return "snapshot";
    case DecodeMode::kAuto:
      return "auto";
  }
  return "unknown";
}

namespace {

/// States kept per sequence: with snapshots one to start from and one after each token of a row.
std::int64_t states_per_sequence(const EngineOptions& options) {
  return options.decode == DecodeMode::kSnapshot ? options.draft_capacity + 1 : 1;
}

}  // namespace

StatePoolOptions pool_options(const ModelDescription& model, const EngineOptions& options) {
  StatePoolOptions pool;
  pool.layers = model.ssm_layers;
  pool.slots = options.sequences * states_per_sequence(options);
  // Snapshots are states decoded in place: nothing is replayed.
  if (options.decode == DecodeMode::kSnapshot) {
    pool.limits = {.window = 1, .draft_capacity = 1};
  } else {
    pool.limits = {.window = options.window, .draft_capacity = options.draft_capacity};
  }
  pool.checkpoint = options.state;
  pool.activation = DType::kF32;  // activations stay f32 between ops on the CPU
  pool.rewindable = options.rewindable;
  pool.poison = options.poison;
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
  bytes.states = states_per_sequence(options);
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
  if (options.decode == DecodeMode::kSnapshot &&
      (options.draft_capacity < 1 || options.draft_capacity > ReplayLimits::kMaxDraftCapacity)) {
    return invalid_argument("draft capacity is ", options.draft_capacity, ", expected 1..",
                            ReplayLimits::kMaxDraftCapacity);
  }
  const bool replays = options.decode == DecodeMode::kReplay || options.decode == DecodeMode::kAuto;
  if (replays && (options.window < 1 || options.window > ReplayLimits::kMaxWindow)) {
    return invalid_argument("window is ", options.window, ", expected 1..",
                            ReplayLimits::kMaxWindow);
  }
  if (replays && options.draft_capacity > options.window) {
    return invalid_argument("rows of ", options.draft_capacity,
                            " tokens (drafts and the token before them) do not fit into a window ",
                            "of ", options.window);
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

Engine::Engine(std::shared_ptr<Model> model, std::shared_ptr<SnapshotBackend> backend,
               const CpuContext& context, StatePool pool, KvCache cache,
               const EngineOptions& options, DecodePlan plan)
    : model_(std::move(model)),
      backend_(std::move(backend)),
      context_(context),
      pool_(std::move(pool)),
      cache_(std::move(cache)),
      options_(options),
      plan_(std::move(plan)) {
  if (snapshots()) lanes_.resize(static_cast<std::size_t>(options.sequences));
}

Result<std::unique_ptr<Engine>> Engine::create(std::shared_ptr<Model> model,
                                               std::shared_ptr<Backend> backend,
                                               const CpuContext& context,
                                               const EngineOptions& options) {
  RSSM_RETURN_IF_ERROR(check_options(options));
  EngineOptions resolved = options;
  DecodePlan plan;
  if (options.decode == DecodeMode::kAuto && options.draft_capacity > 1) {
    plan = {.replay = true, .window = options.window, .reason = "drafts are verified by replay"};
  } else if (options.decode == DecodeMode::kAuto) {
    RSSM_ASSIGN_OR_RETURN(plan, choose_decode(context, pool_options(model->description(), options),
                                              options.sequences));
  } else {
    plan.replay = options.decode == DecodeMode::kReplay;
    plan.window = plan.replay ? options.window : 0;
    plan.reason = "asked for";
  }
  // Plain decoding replays nothing: the smallest ring will do, unless drafts need more.
  resolved.window = plan.replay ? plan.window : std::max(1, options.draft_capacity);
  RSSM_RETURN_IF_ERROR(check_memory(model->description(), resolved));
  StatePoolOptions states = pool_options(model->description(), resolved);
  states.model_id = model->id();
  RSSM_ASSIGN_OR_RETURN(StatePool pool, StatePool::create(std::move(states)));
  RSSM_RETURN_IF_ERROR(model->bind(pool));
  RSSM_ASSIGN_OR_RETURN(KvCache cache, KvCache::create(kv_options(model->description(), resolved)));
  return std::unique_ptr<Engine>(
      new Engine(std::move(model), std::make_shared<SnapshotBackend>(std::move(backend), context),
                 context, std::move(pool), std::move(cache), resolved, std::move(plan)));
}

Result<SequenceBytes> Engine::bytes() const {
  return sequence_bytes(model_->description(), options_);
}

std::int32_t Engine::slot(std::int32_t sequence) const {
  if (!snapshots()) return sequence;
  if (sequence < 0 || static_cast<std::size_t>(sequence) >= lanes_.size()) return -1;
  const Lanes& lanes = lanes_[static_cast<std::size_t>(sequence)];
  return lanes.slots.empty() ? -1 : lanes.slots[lanes.current];
}

Result<std::int32_t> Engine::open() {
  if (!snapshots()) return pool_.acquire();
  const auto lanes =
      std::find_if(lanes_.begin(), lanes_.end(), [](const Lanes& l) { return l.slots.empty(); });
  if (lanes == lanes_.end()) {
    return resource_exhausted("all ", lanes_.size(), " sequences are in use");
  }
  for (std::int64_t i = 0; i < states_per_sequence(options_); ++i) {
    RSSM_ASSIGN_OR_RETURN(const std::int32_t slot, pool_.acquire());
    lanes->slots.push_back(slot);
  }
  lanes->current = 0;
  return static_cast<std::int32_t>(lanes - lanes_.begin());
}

Status Engine::close(std::int32_t sequence) {
  // Released now, the sequence would make the step stale, and with it the step of all the others.
  if (step_ && std::any_of(rows_.begin(), rows_.end(),
                           [&](const ForwardRow& row) { return row.slot == sequence; })) {
    return failed_precondition("sequence ", sequence, " is in a step that waits for its commit");
  }
  if (!snapshots()) return pool_.release(sequence);
  if (slot(sequence) < 0) return failed_precondition("sequence ", sequence, " is not open");
  Lanes& lanes = lanes_[static_cast<std::size_t>(sequence)];
  for (const std::int32_t slot : lanes.slots) RSSM_RETURN_IF_ERROR(pool_.release(slot));
  lanes.slots.clear();
  return {};
}

Status Engine::truncate(std::int32_t sequence, std::int64_t position) {
  if (snapshots() && slot(sequence) < 0)
    return failed_precondition("sequence ", sequence, " is not open");
  return pool_.truncate(slot(sequence), position);
}

Result<std::int64_t> Engine::position(std::int32_t sequence) const {
  // Without snapshots a sequence is its slot, and the pool says what is wrong with it.
  if (snapshots() && slot(sequence) < 0) {
    return failed_precondition("sequence ", sequence, " is not open");
  }
  RSSM_ASSIGN_OR_RETURN(const Cursor cursor, pool_.cursor(slot(sequence)));
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
    if (snapshots() && w.phase == Phase::kVerify && count > options_.draft_capacity) {
      return invalid_argument("row ", i, " carries ", count, " tokens, expected 1..",
                              options_.draft_capacity, " (draft capacity T)");
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
  verifies_.clear();
  std::vector<TokenSnapshots::Row> kept;
  std::int64_t wanted = 0;
  for (const Work& w : work) {
    const bool by_snapshots = snapshots() && w.phase == Phase::kVerify;
    verifies_.push_back(by_snapshots);
    const bool committed =
        w.phase == Phase::kPrompt || by_snapshots || (w.phase == Phase::kDecode && !plan_.replay);
    const RowKind kind = committed ? RowKind::kCommitted : RowKind::kTentative;
    const auto begin = static_cast<std::int64_t>(tokens_.size());
    const auto count = static_cast<std::int64_t>(w.tokens.size());
    if (by_snapshots) {
      const Lanes& lanes = lanes_[static_cast<std::size_t>(w.sequence)];
      kept.push_back({.from = slot(w.sequence), .token_begin = begin, .slots = {}});
      for (std::size_t i = 1; i <= w.tokens.size(); ++i) {
        kept.back().slots.push_back(lanes.slots[(lanes.current + i) % lanes.slots.size()]);
      }
    } else {
      step_rows_.push_back(
          {.slot = slot(w.sequence), .kind = kind, .token_begin = begin, .token_count = count});
    }
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
  if (!kept.empty()) {
    Result<TokenSnapshots> begun = TokenSnapshots::begin(pool_, kept);
    if (!begun.ok()) {
      static_cast<void>(pool_.abort(step).ok());
      return begun.status();
    }
    taken_ = std::move(begun).value();
  }
  const std::int64_t vocab = model_->description().vocab_size;
  logits_.resize(static_cast<std::size_t>(wanted * vocab));
  ForwardOutput out{.logits = TensorView::contiguous(logits_.data(), DType::kF32, {wanted, vocab}),
                    .hidden = {}};
  if (options_.hidden_states) {
    const auto tokens = static_cast<std::int64_t>(tokens_.size());
    const std::int64_t size = model_->description().hidden_size;
    hidden_.resize(static_cast<std::size_t>(tokens * size));
    out.hidden = TensorView::contiguous(hidden_.data(), DType::kF32, {tokens, size});
  }
  pool_.reset_traffic();
  backend_->attach(taken_ ? &*taken_ : nullptr);
  const Status status =
      model_->forward(*backend_, pool_, step, cache_,
                      {.rows = rows_, .tokens = tokens_, .logit_counts = logit_counts_}, out);
  backend_->attach(nullptr);
  if (!status.ok()) {
    // The first failure is what the caller needs to see; after it only the step's end matters.
    static_cast<void>(pool_.abort(step).ok());
    if (taken_) static_cast<void>(taken_->abort(pool_).ok());
    taken_.reset();
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
  if (!taken_) {
    RSSM_RETURN_IF_ERROR(pool_.commit(*step_, accepted));
    step_.reset();
    return {};
  }
  return commit_snapshots(accepted);
}

Status Engine::commit_snapshots(std::span<const std::int64_t> accepted) {
  if (accepted.size() != rows_.size()) {
    return invalid_argument("commit got ", accepted.size(), " accepted counts for ", rows_.size(),
                            " rows");
  }
  std::vector<std::int64_t> others;  // accepted counts of the rows in step_
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (!verifies_[i]) {
      others.push_back(accepted[i]);
    } else if (accepted[i] < 0 || accepted[i] > rows_[i].count) {
      return invalid_argument("row ", i, ": accepted ", accepted[i], " of ", rows_[i].count,
                              " tokens, expected 0..", rows_[i].count);
    }
  }
  RSSM_RETURN_IF_ERROR(pool_.commit(*step_, others));
  step_.reset();
  RSSM_RETURN_IF_ERROR(taken_->commit(pool_));
  taken_.reset();
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (!verifies_[i]) continue;
    Lanes& lanes = lanes_[static_cast<std::size_t>(rows_[i].slot)];
    lanes.current = (lanes.current + static_cast<std::size_t>(accepted[i])) % lanes.slots.size();
  }
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

// ---- Saved sequences ----

namespace {

/// What makes two KV caches' contents exchangeable, with names for messages.
std::vector<std::pair<const char*, std::int64_t>> kv_geometry(const KvCacheOptions& kv) {
  return {{"attention layers", kv.layers}, {"KV heads", kv.kv_heads}, {"head_dim", kv.head_dim}};
}

/// Calls visit(bytes, size) for what each head of each layer holds of the first `tokens`.
template <typename Cache, typename Visit>
void for_kv_runs(Cache& cache, std::int64_t slot, std::int64_t tokens, const Visit& visit) {
  const KvCacheOptions& kv = cache.options();
  const std::size_t size = static_cast<std::size_t>(tokens * kv.head_dim) * size_of(kv.dtype);
  for (int layer = 0; layer < kv.layers; ++layer) {
    for (std::int64_t head = 0; head < kv.kv_heads; ++head) {
      visit(cache.key(layer, slot, head, 0), size);
      visit(cache.value(layer, slot, head, 0), size);
    }
  }
}

}  // namespace

Result<std::vector<std::byte>> Engine::save(std::int32_t sequence) const {
  RSSM_ASSIGN_OR_RETURN(const std::int64_t at, position(sequence));
  RSSM_ASSIGN_OR_RETURN(const std::vector<std::byte> state, pool_.save(slot(sequence)));
  ByteWriter out;
  const KvCacheOptions& kv = cache_.options();
  constexpr std::size_t kHeader = 64;
  out.reserve(state.size() + kHeader + KvCache::bytes_per_token(kv) * static_cast<std::size_t>(at));
  out.value(static_cast<std::uint64_t>(state.size()));
  out.bytes(state.data(), state.size());
  out.value(at);
  out.value(static_cast<std::uint8_t>(kv.dtype));
  for (const auto& [name, value] : kv_geometry(kv)) out.value(value);
  for_kv_runs(cache_, sequence, at,
              [&](const std::byte* run, std::size_t size) { out.bytes(run, size); });
  return std::move(out).take();
}

Status Engine::load(std::int32_t sequence, std::span<const std::byte> image) {
  RSSM_RETURN_IF_ERROR(position(sequence).status());
  if (step_) return failed_precondition("a step is waiting for its commit");
  ByteReader in(image);
  const auto state = in.bytes(static_cast<std::size_t>(in.value<std::uint64_t>()));
  const auto at = in.value<std::int64_t>();
  const auto dtype = static_cast<DType>(in.value<std::uint8_t>());
  const KvCacheOptions& kv = cache_.options();
  if (in.ok() && dtype != kv.dtype) {
    return invalid_argument("saved sequence has keys and values in ", to_string(dtype),
                            ", expected ", to_string(kv.dtype));
  }
  for (const auto& [name, value] : kv_geometry(kv)) {
    const auto found = in.value<std::int64_t>();
    if (in.ok() && found != value) {
      return invalid_argument("saved sequence has ", found, " ", name, ", expected ", value);
    }
  }
  if (in.ok() && (at < 0 || at > options_.context)) {
    return resource_exhausted("saved sequence has ", at, " tokens, the context holds ",
                              options_.context);
  }
  if (!in.ok()) {
    return data_loss("saved sequence of ", image.size(), " bytes ends inside its header");
  }
  const std::size_t bytes = KvCache::bytes_per_token(kv) * static_cast<std::size_t>(at);
  if (in.rest() != bytes) {
    return data_loss("saved sequence has ", in.rest(), " bytes of keys and values, expected ",
                     bytes);
  }
  RSSM_RETURN_IF_ERROR(pool_.load(context_, slot(sequence), state));
  RSSM_ASSIGN_OR_RETURN(const std::int64_t loaded, position(sequence));
  if (loaded != at) {
    RSSM_RETURN_IF_ERROR(pool_.reset(slot(sequence)));
    return data_loss("saved sequence has a state after ", loaded, " tokens, keys and values of ",
                     at);
  }
  if (snapshots()) {
    // Snapshots start from a state without live records: fold what the image had.
    Lanes& lanes = lanes_[static_cast<std::size_t>(sequence)];
    const std::size_t next = (lanes.current + 1) % lanes.slots.size();
    RSSM_RETURN_IF_ERROR(pool_.materialize(context_, slot(sequence), at, lanes.slots[next]));
    lanes.current = next;
  }
  for_kv_runs(cache_, sequence, at, [&](std::byte* run, std::size_t size) {
    const auto from = in.bytes(size);
    std::copy(from.begin(), from.end(), run);
  });
  return {};
}

}  // namespace replayssm
