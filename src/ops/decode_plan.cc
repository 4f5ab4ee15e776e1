#include "replayssm/decode_plan.h"

#include <algorithm>
#include <sstream>

#include "ops/deferred_decay.h"
#include "ops/delta_rule/shape.h"

#if defined(__linux__)
#include <unistd.h>
#endif

namespace replayssm {
namespace {

// Nominal rates of one core. Only their proportions matter; docs/kernels/ holds the
// measurements they come from.
constexpr double kClock = 3e9;             // Hz
constexpr double kMemoryBandwidth = 10e9;  // bytes/s read from memory
constexpr double kCacheBandwidth = 60e9;   // bytes/s read from the last-level cache
constexpr double kWriteShare = 0.02;       // of a read's time, to write back a line just read
constexpr double kOpsPerCycle = 2;         // vector multiplications or additions
/// A 16-bit state is rounded once per token in place and once per window by replay; that is worth
/// this much time.
constexpr double kNarrowPatience = 1.25;

/// Vector operations to widen a state and to round to it. There are instructions for f16.
struct Conversion {
  double decode = 0;
  double encode = 0;
};

Conversion conversion(DType checkpoint) {
  return checkpoint == DType::kF32    ? Conversion{}
         : checkpoint == DType::kBF16 ? Conversion{.decode = 2, .encode = 7}
                                      : Conversion{.decode = 1, .encode = 1};
}

/// What an element of a read copy costs, in scalar code on one core.
struct CopyCost {
  double bits = 0;
  double decode = 0;  // seconds
  double encode = 0;
};

CopyCost copy_cost(ReadCopyFormat format) {
  switch (format) {
    case ReadCopyFormat::kNone:
      return {};
    case ReadCopyFormat::kFp8E4M3:
      return {.bits = 8.25, .decode = 0.25e-9, .encode = 2.5e-9};
    case ReadCopyFormat::kInt8:
      return {.bits = 8.25, .decode = 0.1e-9, .encode = 1.7e-9};
    case ReadCopyFormat::kNvfp4:
      return {.bits = 4.52, .decode = 0.45e-9, .encode = 4.5e-9};
  }
  return {};
}

double lanes(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kGeneric:
      return 2;  // four lanes, and a multiply-add is two operations
    case CpuIsa::kAvx2:
      return 8;
    case CpuIsa::kAvx512:
      return 16;
  }
  return 1;
}

double last_level_cache_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  if (const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE); bytes > 0) {
    return static_cast<double>(bytes);
  }
#endif
  return 32.0 * (1 << 20);
}

struct Machine {
  double threads;
  double bandwidth;  // bytes/s
  double ops;        // element operations/s
};

struct Seconds {
  double plain = 0;
  double replay = 0;

  Seconds& operator+=(const Seconds& other) {
    plain += other.plain;
    replay += other.replay;
    return *this;
  }
};

/// What a family asks for, per token of one sequence in one layer. Operations are vector operations
/// per element of the state.
struct Work {
  double elements = 0;
  double record_bytes = 0;  // what outputs read of a record
  double plain_ops = 0;     // a token in place
  double read_ops = 0;      // a token's products with the checkpoint
  double fold_ops = 0;      // a record into the checkpoint
  double gpu_element = 0;   // seconds of an element in a replay step bound by issue
};

/// In place, states that are stored as they are take a product more (deferred_decay.h).
Work work_of(const Mamba2Shape& shape, double activation, DType checkpoint, FlushMode) {
  const auto heads = static_cast<double>(shape.heads);
  return {.elements = static_cast<double>(shape.state_elements()),
          .record_bytes = (heads * static_cast<double>(shape.head_dim) +
                           static_cast<double>(shape.groups * shape.state_size)) *
                              activation +
                          heads * sizeof(float),
          .plain_ops = defers_decay(checkpoint) ? 2.0 : 3.0,
          .read_ops = 1,
          .fold_ops = 1,
          .gpu_element = 0.62e-12};
}

/// The delta comes from a product with the state of its own, hence an operation more for
/// everything but a fast flush, which has the deltas. Gated DeltaNet's deferred decays save one,
/// but take no less time (docs/kernels/gdn-cpu.md).
Work work_of(const DeltaRuleShape& shape, double activation, FlushMode flush) {
  const auto keys = static_cast<double>(shape.key_heads * shape.key_dim);
  const auto values = static_cast<double>(shape.value_heads * shape.value_dim);
  const auto decays = static_cast<double>(shape.value_heads * shape.decays());
  return {.elements = static_cast<double>(shape.state_elements()),
          .record_bytes = (keys + values) * activation + decays * sizeof(float),
          .plain_ops = 4,
          .read_ops = 2,
          .fold_ops = flush == FlushMode::kFast ? 1.0 : 3.0,
          .gpu_element = shape.channel_decay ? 1.1e-12 : 0.64e-12};
}
Work work_of(const GatedDeltaNetShape& shape, double activation, DType, FlushMode flush) {
  return work_of(delta_rule(shape), activation, flush);
}
Work work_of(const KimiDeltaAttentionShape& shape, double activation, DType, FlushMode flush) {
  return work_of(delta_rule(shape), activation, flush);
}

Seconds layer_seconds(const Machine& machine, const Work& work, const StatePoolOptions& options,
                      ReadCopyFormat copy) {
  const auto width = static_cast<double>(size_of(options.checkpoint));
  const auto [decode, encode] = conversion(options.checkpoint);
  const double window = options.limits.window;
  const double read = work.elements * width / machine.bandwidth;
  const double rewrite = read * (1 + kWriteShare);
  const auto time = [&](double memory, double ops_per_element) {
    return std::max(memory, work.elements * ops_per_element / machine.ops);
  };
  // Steps of replay read the copy where there is one; whoever writes the checkpoint writes it, too.
  const CopyCost cost = copy_cost(copy);
  const double copy_read = work.elements * cost.bits / 8 / machine.bandwidth;
  const double copy_decode = work.elements * cost.decode / machine.threads;
  const double copy_encode = work.elements * cost.encode / machine.threads;
  const double replay_read = copy == ReadCopyFormat::kNone
                                 ? time(read, work.read_ops + decode)
                                 : time(copy_read, work.read_ops) + copy_decode;
  const double ring = (window + 1) / 2 * work.record_bytes / machine.bandwidth;
  Seconds seconds;
  seconds.plain = time(rewrite, work.plain_ops + decode + encode) + copy_encode;
  seconds.replay = ((window - 1) * replay_read +
                    time(rewrite, work.read_ops + work.fold_ops * window + decode + encode) +
                    copy_encode + copy_decode) /
                       window +
                   ring;
  return seconds;
}

/// A layer's step of a GPU, shared out to its sequences.
Seconds gpu_layer_seconds(const Work& work, const StatePoolOptions& options, ReadCopyFormat copy,
                          double sequences) {
  // Measured on an H200: what a step takes beside its bytes, and bytes/s behind that. The direct
  // kernels of few sequences begin sooner and take in-place decoding's time per sequence.
  constexpr double kPlainStart = 2.8e-6, kPlainBandwidth = 3.7e12;
  constexpr double kDirectStart = 3.0e-6, kDirectShare = 1.1;
  constexpr double kStreamedStart = 7.5e-6, kStreamedBandwidth = 4.0e12;
  const double window = options.limits.window;
  const double state = work.elements * static_cast<double>(size_of(options.checkpoint));
  const double copied = work.elements * copy_cost(copy).bits / 8;
  const double read = copy == ReadCopyFormat::kNone ? state : copied;
  const double replayed =
      ((window - 1) * read + 2 * state + copied) / window + (window + 1) / 2 * work.record_bytes;
  const double plain = (2 * state + copied) / kPlainBandwidth;
  const double streamed = kStreamedStart + sequences * std::max(replayed / kStreamedBandwidth,
                                                                work.elements * work.gpu_element);
  const double direct = kDirectStart + sequences * kDirectShare * plain;
  const double replay = copy == ReadCopyFormat::kNone ? std::min(streamed, direct) : streamed;
  return {.plain = kPlainStart / sequences + plain, .replay = replay / sequences};
}

/// Adds up the layers and decides; `of_layer(work, copy)`: a layer's estimates. `what`: of which
/// they are, `where`: a remark for people.
template <typename OfLayer>
DecodePlan decide(const StatePoolOptions& options, OfLayer of_layer, const char* what,
                  const char* where) {
  const auto activation = static_cast<double>(size_of(options.activation));
  Seconds sum;
  for (int layer = 0; static_cast<std::size_t>(layer) < options.layers.size(); ++layer) {
    const LayerSpec& spec = options.layers[static_cast<std::size_t>(layer)];
    const Work work = std::visit(
        [&](const auto& shape) {
          return work_of(shape, activation, options.checkpoint, options.flush_mode(layer));
        },
        spec.recurrence);
    sum += of_layer(work, spec.read_copy);
  }
  DecodePlan plan;
  plan.plain_seconds = sum.plain;
  plan.replay_seconds = sum.replay;
  const double patience = options.checkpoint == DType::kF32 ? 1.0 : kNarrowPatience;
  plan.replay = sum.replay < patience * sum.plain;
  plan.window = plan.replay ? options.limits.window : 0;
  std::ostringstream reason;
  reason.precision(2);
  reason << "replay with a window of " << options.limits.window << " is estimated at "
         << sum.replay / sum.plain << " times plain decoding's " << what << where;
  if (plan.replay && sum.replay >= sum.plain) {
    reason << "; chosen because it rounds the " << to_string(options.checkpoint)
           << " state once per window";
  }
  plan.reason = std::move(reason).str();
  return plan;
}

Status check_sequences(std::int64_t sequences) {
  if (sequences >= 1) return {};
  return invalid_argument("sequences is ", sequences, ", expected at least 1");
}

}  // namespace

Result<DecodePlan> choose_decode(const CpuContext& context, const StatePoolOptions& options,
                                 std::int64_t sequences) {
  RSSM_RETURN_IF_ERROR(check_sequences(sequences));
  RSSM_ASSIGN_OR_RETURN(const SlotBytes bytes, StatePool::bytes_per_slot(options));
  const double resident = static_cast<double>(bytes.checkpoint) * static_cast<double>(sequences);
  const bool cached = resident < last_level_cache_bytes();
  const double threads = context.thread_count();
  const Machine machine{.threads = threads,
                        .bandwidth = threads * (cached ? kCacheBandwidth : kMemoryBandwidth),
                        .ops = threads * kClock * kOpsPerCycle * lanes(context.isa)};
  return decide(
      options,
      [&](const Work& work, ReadCopyFormat copy) {
        return layer_seconds(machine, work, options, copy);
      },
      "state time", cached ? ", states in cache" : ", states in memory");
}

Result<DecodePlan> choose_decode(const CudaContext&, const StatePoolOptions& options,
                                 std::int64_t sequences) {
  RSSM_RETURN_IF_ERROR(check_sequences(sequences));
  RSSM_RETURN_IF_ERROR(StatePool::bytes_per_slot(options).status());
  return decide(
      options,
      [&](const Work& work, ReadCopyFormat copy) {
        return gpu_layer_seconds(work, options, copy, static_cast<double>(sequences));
      },
      "step", "");
}

}  // namespace replayssm
