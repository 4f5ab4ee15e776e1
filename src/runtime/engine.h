// Engine: a loaded model, its state pool and KV cache, and the step that advances sequences.
//
// An engine knows slots, positions and rows; text, sampling and stopping belong to generate.h. Many
// sequences share one step with prompt chunks, plain, replay and verify rows mixed at will, and no
// sequence's numbers depend on the others.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/kv_cache.h"
#include "model/model.h"
#include "replayssm/decode_plan.h"
#include "replayssm/state_pool.h"
#include "runtime/snapshot_backend.h"

namespace replayssm {

enum class DecodeMode : std::uint8_t {
  kPlain,     // in place
  kReplay,    // checkpoint and ring; drafts are verified by replay as well
  kSnapshot,  // in place; drafts are verified with a copy of the state per token, for comparison
  kAuto,      // kPlain or kReplay, whichever should be faster; kReplay where there are drafts
};

const char* to_string(DecodeMode mode);

struct EngineOptions {
  DecodeMode decode = DecodeMode::kAuto;
  int window = 16;         // L, for replay
  int draft_capacity = 1;  // T: most tokens a verify row carries
  DType state = DType::kF32;
  std::optional<DType> kv;      // type of the KV cache; the model's if not set
  std::int64_t sequences = 1;   // that can be open at once
  std::int64_t context = 4096;  // tokens a sequence can hold
  bool rewindable = false;      // see truncate()
  bool hidden_states = false;   // see hidden_states()
  bool poison = false;
  /// Bytes states, rings and KV cache of all sequences may take; 0: no limit.
  std::size_t memory = 0;
};

/// Bytes per sequence, by the functions that allocate them.
struct SequenceBytes {
  SlotBytes state;          // of one state
  std::int64_t states = 1;  // kept per sequence: T + 1 for snapshots
  std::size_t kv_per_token = 0;

  /// The largest size_t if it is more than that.
  std::size_t total(std::int64_t context) const {
    std::size_t bytes = 0;
    std::size_t all_states = 0;
    const bool overflow =
        __builtin_mul_overflow(kv_per_token, static_cast<std::size_t>(context), &bytes) ||
        __builtin_mul_overflow(state.total, static_cast<std::size_t>(states), &all_states) ||
        __builtin_add_overflow(bytes, all_states, &bytes);
    return overflow ? std::numeric_limits<std::size_t>::max() : bytes;
  }
};

/// The pool an engine with these options creates; the engine and sizing both use it.
StatePoolOptions pool_options(const ModelDescription& model, const EngineOptions& options);
KvCacheOptions kv_options(const ModelDescription& model, const EngineOptions& options);
Result<SequenceBytes> sequence_bytes(const ModelDescription& model, const EngineOptions& options);

/// What a row of a step is for.
enum class Phase : std::uint8_t {
  kPrompt,  // known tokens: folded into the checkpoint
  kDecode,  // one token after the prompt: in place or by replay, as the engine decodes
  kVerify,  // one accepted token and drafts: by replay, or by snapshots if the engine does
};

struct Work {
  std::int32_t sequence = -1;
  Phase phase = Phase::kDecode;
  std::span<const std::int32_t> tokens;
  std::int64_t logits = 1;  // how many of the last tokens need logits
};

class Engine {
 public:
  /// `threads` must outlive the engine. Fails before any large allocation if the sequences do not
  /// fit into options.memory, naming how many would.
  static Result<std::unique_ptr<Engine>> create(std::shared_ptr<Model> model,
                                                std::shared_ptr<Backend> backend,
                                                const CpuContext& context,
                                                const EngineOptions& options);

  const ModelDescription& model() const { return model_->description(); }
  const std::string& model_id() const { return model_->id(); }
  const EngineOptions& options() const { return options_; }
  /// How kDecode rows run, and why.
  const DecodePlan& plan() const { return plan_; }
  StatePool& pool() { return pool_; }
  /// Of one sequence, as allocated.
  Result<SequenceBytes> bytes() const;

  Result<std::int32_t> open();
  /// Not between run() and commit() of a step the sequence is in.
  Status close(std::int32_t sequence);
  /// Drops accepted tokens at the end: states, convolution inputs and KV cache are all functions of
  /// the position. A rewindable engine reaches back to the sequence's checkpoint.
  Status truncate(std::int32_t sequence, std::int64_t position);
  /// Tokens accepted so far.
  Result<std::int64_t> position(std::int32_t sequence) const;

  /// Image of a sequence: the state pool's, and keys and values of all positions. Says whose it is
  /// and which types it has; not protected by a checksum of its own.
  Result<std::vector<std::byte>> save(std::int32_t sequence) const;
  /// Replaces an open sequence by a saved one, of an engine with whatever way of decoding, window
  /// and context. Refuses other models and types, and positions beyond the context, by both values;
  /// nothing is written then. State and keys of different positions are refused too; the sequence
  /// is then at its beginning.
  Status load(std::int32_t sequence, std::span<const std::byte> image);

  /// Runs one step and commits it. Verify rows need run() and commit() apart; here all tokens are
  /// accepted. Logits: (sum of work.logits, vocab_size), in order, valid until the next step. On
  /// failure sequences whose state was touched are invalid: close them.
  Result<std::span<const float>> advance(std::span<const Work> work);

  /// The two halves of advance, for callers that decide after seeing logits how many of a row's
  /// tokens to accept.
  Result<std::span<const float>> run(std::span<const Work> work);
  Status commit(std::span<const std::int64_t> accepted);

  /// What the last step's logits were, or would have been, computed from: (tokens of all its rows,
  /// hidden_size), in order, valid until the next step. Empty without options.hidden_states.
  std::span<const float> hidden_states() const { return hidden_; }

  /// State traffic of decode and verify steps since the last call.
  StateTraffic take_decode_traffic();

 private:
  /// The slots of a sequence that keeps snapshots: its state is in one of them, the others are
  /// free for the states after the next tokens.
  struct Lanes {
    std::vector<std::int32_t> slots;
    std::size_t current = 0;
  };

  Engine(std::shared_ptr<Model> model, std::shared_ptr<SnapshotBackend> backend,
         const CpuContext& context, StatePool pool, KvCache cache, const EngineOptions& options,
         DecodePlan plan);

  bool snapshots() const { return options_.decode == DecodeMode::kSnapshot; }
  /// The slot that holds the sequence's state; the sequence itself unless there are snapshots.
  /// Negative for one that cannot exist.
  std::int32_t slot(std::int32_t sequence) const;
  Status check(std::span<const Work> work) const;
  Status commit_snapshots(std::span<const std::int64_t> accepted);

  std::shared_ptr<Model> model_;
  std::shared_ptr<SnapshotBackend> backend_;
  CpuContext context_;
  StatePool pool_;
  KvCache cache_;
  EngineOptions options_;
  DecodePlan plan_;
  std::optional<Step> step_;             // between run and commit
  std::vector<Lanes> lanes_;             // by sequence; empty unless there are snapshots
  std::optional<TokenSnapshots> taken_;  // beside step_, of the rows that are verified by them
  std::vector<StepRow> step_rows_;
  std::vector<ForwardRow> rows_;
  std::vector<bool> verifies_;  // of each row: by snapshots
  std::vector<std::int32_t> tokens_;
  std::vector<std::int64_t> logit_counts_;
  std::vector<float> logits_;
  std::vector<float> hidden_;
  StateTraffic decode_traffic_;
};

}  // namespace replayssm
