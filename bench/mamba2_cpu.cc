// Mamba-2 step on the CPU against the memory bandwidth this program measures itself.
//
// Every case cycles over enough layers that the states exceed the last-level cache, as in real
// decoding, where a layer's state is cold when its turn comes. Cases that are compared run
// interleaved, round by round, and the table gives medians, so that a slow spell of a shared
// machine hits both sides of a ratio.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#if defined(__linux__)
#include <unistd.h>
#endif

#include "replayssm/cpu.h"
#include "replayssm/ops/mamba2.h"
#include "replayssm/state_pool.h"

namespace {

using namespace replayssm;  // NOLINT(google-build-using-namespace): a program, not a library

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "mamba2_cpu_bench: %s\n", message.c_str());
  std::exit(1);
}

void check(const Status& status) {
  if (!status.ok()) fail(status.message());
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// ---- Memory bandwidth ----

/// The bandwidth of a loop over `bytes` split over the context's threads in 1 MiB pieces.
struct Bandwidth {
  double read = 0;        // GB/s
  double read_write = 0;  // GB/s, both directions counted
};

#if defined(__x86_64__)
#define BENCH_AVX2 __attribute__((target("avx2")))
#else
#define BENCH_AVX2
#endif

BENCH_AVX2 float read_piece(const float* p, std::size_t n) {
  float sum[32] = {};
  for (std::size_t i = 0; i < n; i += 32) {
    for (int j = 0; j < 32; ++j) sum[j] += p[i + static_cast<std::size_t>(j)];
  }
  float total = 0;
  for (const float s : sum) total += s;
  return total;
}

BENCH_AVX2 void scale_piece(float* p, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) p[i] *= 1.0000001f;
}

class Memory {
 public:
  explicit Memory(std::size_t bytes) : data_(bytes / sizeof(float), 1.0f) {}

  double read_seconds(const CpuContext& context) {
    return timed(context, [&](float* p) { sink_ = sink_ + read_piece(p, kPiece); });
  }
  double read_write_seconds(const CpuContext& context) {
    return timed(context, [&](float* p) { scale_piece(p, kPiece); });
  }
  double bytes() const { return static_cast<double>(data_.size() * sizeof(float)); }

 private:
  static constexpr std::size_t kPiece = std::size_t{1} << 18;

  double timed(const CpuContext& context, const std::function<void(float*)>& piece) {
    const double start = now();
    context.parallel_for(
        static_cast<std::int64_t>(data_.size() / kPiece),
        [&](std::int64_t i, int) { piece(data_.data() + static_cast<std::size_t>(i) * kPiece); });
    return now() - start;
  }

  std::vector<float> data_;
  volatile float sink_ = 0;
};

// ---- Cases ----

constexpr Mamba2Shape kShape{.heads = 64, .head_dim = 64, .state_size = 128, .groups = 8};

/// Bytes of states per case, and of the bandwidth loops: more than the last-level cache, which is
/// shared by the whole socket, as far as a machine with a huge one allows.
std::size_t resident_bytes() {
  constexpr std::size_t kLeast = std::size_t{256} << 20;
  constexpr std::size_t kMost = std::size_t{1} << 30;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (cache > 0) return std::clamp(static_cast<std::size_t>(cache) / 4 * 5, kLeast, kMost);
#endif
  return kLeast;
}

struct CaseOptions {
  std::string name;
  RowKind kind = RowKind::kCommitted;
  std::int64_t tokens = 1;
  DType checkpoint = DType::kF32;
  ReplayLimits limits{};
  bool flushes = true;  // false: windows are truncated before they fill
};

/// A pool with rows of random phase and operands; step() runs one token step of one layer.
class Case {
 public:
  Case(const CaseOptions& options, std::int64_t batch, const CpuContext& context)
      : options_(options), batch_(batch), context_(context) {
    const std::size_t state_bytes =
        static_cast<std::size_t>(kShape.state_elements()) * size_of(options.checkpoint);
    layers_ = std::max<std::size_t>(
        2, resident_bytes() / (state_bytes * static_cast<std::size_t>(batch)));
    StatePoolOptions pool_options;
    pool_options.layers.assign(layers_, LayerSpec{.recurrence = kShape, .conv = {}});
    pool_options.slots = batch;
    pool_options.limits = options.limits;
    pool_options.checkpoint = options.checkpoint;
    pool_options.rewindable = !options.flushes;
    auto pool = StatePool::create(pool_options);
    check(pool.status());
    pool_ = std::make_unique<StatePool>(std::move(pool).value());

    std::mt19937 random(7);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    const auto fill = [&](std::vector<float>& v, std::int64_t n) {
      v.resize(static_cast<std::size_t>(n));
      for (float& x : v) x = uniform(random);
    };
    const std::int64_t rows = batch * std::max<std::int64_t>(options.tokens, 1);
    fill(x_, rows * kShape.heads * kShape.head_dim);
    fill(b_, rows * kShape.groups * kShape.state_size);
    fill(c_, rows * kShape.groups * kShape.state_size);
    fill(dt_, rows * kShape.heads);
    fill(d_, kShape.heads);
    y_.resize(x_.size());
    std::vector<float> a(static_cast<std::size_t>(kShape.heads));
    for (float& v : a) v = -0.1f - 0.1f * std::abs(uniform(random));
    for (std::size_t layer = 0; layer < layers_; ++layer) {
      check(pool_->set_mamba2_a(static_cast<int>(layer), a));
    }
    for (std::int64_t slot = 0; slot < batch; ++slot) {
      check(pool_->reset(static_cast<std::int32_t>(slot)));
    }
    random_.seed(11);
    // A first committed token makes every state non-zero; then phases drift apart.
    run(RowKind::kCommitted, 1);
    if (options.kind == RowKind::kTentative) {
      for (int i = 0; i < 3 * options.limits.window; ++i) run(options.kind, options.tokens, true);
    }
  }

  /// Seconds per layer step over one pass through all layers (commit included).
  double step() {
    const double start = now();
    run(options_.kind, options_.tokens);
    const double seconds = now() - start;
    keep_from_flushing();
    return seconds / static_cast<double>(layers_);
  }

  const CaseOptions& options() const { return options_; }

 private:
  void run(RowKind kind, std::int64_t tokens, bool warm_up = false) {
    std::vector<StepRow> rows;
    for (std::int64_t i = 0; i < batch_; ++i) {
      rows.push_back({.slot = static_cast<std::int32_t>(i),
                      .kind = kind,
                      .token_begin = i * tokens,
                      .token_count = tokens});
    }
    auto step = pool_->begin_step(rows);
    check(step.status());
    const std::int64_t n = batch_ * tokens;
    Mamba2Params params;
    params.d = TensorView::contiguous(d_.data(), DType::kF32, {kShape.heads});
    Mamba2Operands o;
    const auto f32 = [](auto& v, std::initializer_list<std::int64_t> shape) {
      return TensorView::contiguous(v.data(), DType::kF32, shape);
    };
    o.x = f32(x_, {n, kShape.heads, kShape.head_dim});
    o.b = f32(b_, {n, kShape.groups, kShape.state_size});
    o.c = f32(c_, {n, kShape.groups, kShape.state_size});
    o.dt = f32(dt_, {n, kShape.heads});
    o.y = f32(y_, {n, kShape.heads, kShape.head_dim});
    for (std::size_t layer = 0; layer < layers_; ++layer) {
      check(mamba2_step(context_, *pool_, static_cast<int>(layer), *step, params, o));
    }
    std::uniform_int_distribution<std::int64_t> accept(1, tokens);
    std::vector<std::int64_t> accepted;
    for (std::int64_t i = 0; i < batch_; ++i) {
      accepted.push_back(kind == RowKind::kCommitted ? tokens
                         : warm_up ? std::uniform_int_distribution<std::int64_t>(0, tokens)(random_)
                                   : accept(random_));
    }
    check(pool_->commit(*step, accepted));
  }

  /// Without-flush cases measure steps with a half-full window on average and never a full one.
  void keep_from_flushing() {
    if (options_.flushes || options_.kind == RowKind::kCommitted) return;
    for (std::int32_t slot = 0; slot < batch_; ++slot) {
      const auto cursor = pool_->cursor(slot);
      check(cursor.status());
      if (cursor->live() + 2 * options_.limits.draft_capacity > options_.limits.window) {
        check(pool_->truncate(slot, cursor->checkpoint_position));
      }
    }
  }

  CaseOptions options_;
  std::int64_t batch_;
  CpuContext context_;
  std::size_t layers_ = 0;
  std::unique_ptr<StatePool> pool_;
  std::vector<float> x_, b_, c_, dt_, d_, y_;
  std::mt19937 random_;
};

// ---- Table ----

constexpr ReplayLimits kPlainLimits{.window = 1, .draft_capacity = 1};
constexpr ReplayLimits kDecodeLimits{.window = 16, .draft_capacity = 1};
constexpr ReplayLimits kVerifyLimits{.window = 16, .draft_capacity = 4};

std::vector<CaseOptions> all_cases() {
  std::vector<CaseOptions> cases;
  for (const DType checkpoint : {DType::kF32, DType::kBF16}) {
    const std::string type = to_string(checkpoint);
    cases.push_back({"plain " + type, RowKind::kCommitted, 1, checkpoint, kPlainLimits, true});
    cases.push_back(
        {"replay L=16 " + type, RowKind::kTentative, 1, checkpoint, kDecodeLimits, true});
    cases.push_back({"verify T=4 " + type + ", no flush", RowKind::kTentative, 4, checkpoint,
                     kVerifyLimits, false});
    cases.push_back(
        {"verify T=4 " + type, RowKind::kTentative, 4, checkpoint, kVerifyLimits, true});
  }
  return cases;
}

void run_group(const CpuContext& context, std::int64_t batch, double seconds) {
  Memory memory(resident_bytes());
  std::vector<std::unique_ptr<Case>> cases;
  for (const CaseOptions& options : all_cases()) {
    cases.push_back(std::make_unique<Case>(options, batch, context));
  }
  std::vector<double> read, read_write;
  std::vector<std::vector<double>> times(cases.size());
  const double end = now() + seconds;
  do {
    read.push_back(memory.read_seconds(context));
    read_write.push_back(memory.read_write_seconds(context));
    for (std::size_t i = 0; i < cases.size(); ++i) times[i].push_back(cases[i]->step());
  } while (now() < end || read.size() < 5);

  const double read_rate = memory.bytes() / median(read) * 1e-9;
  const double read_write_rate = 2 * memory.bytes() / median(read_write) * 1e-9;
  std::printf(
      "\n%d thread%s, batch %lld: read %.1f GB/s, in-place read+write %.1f GB/s (%zu rounds)\n\n",
      context.thread_count(), context.thread_count() == 1 ? "" : "s", static_cast<long long>(batch),
      read_rate, read_write_rate, read.size());
  std::printf(
      "| case | us per row and layer | times plain of its type | state GB/s | of in-place "
      "bandwidth |\n");
  std::printf("| --- | --- | --- | --- | --- |\n");
  double plain = 0;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const CaseOptions& options = cases[i]->options();
    const double per_row = median(times[i]) / static_cast<double>(batch);
    const double state = static_cast<double>(kShape.state_elements()) *
                         static_cast<double>(size_of(options.checkpoint));
    if (options.kind == RowKind::kCommitted) {
      plain = per_row;
      const double rate = 2 * state / per_row * 1e-9;
      std::printf("| %s | %.1f | 1.00 | %.1f | %.0f%% |\n", options.name.c_str(), per_row * 1e6,
                  rate, 100 * rate / read_write_rate);
    } else {
      std::printf("| %s | %.1f | %.2f | %.1f | - |\n", options.name.c_str(), per_row * 1e6,
                  per_row / plain, state / per_row * 1e-9);
    }
  }
  std::fflush(stdout);
}

struct Arguments {
  std::vector<int> threads{1, 2};
  std::vector<std::int64_t> batches{1, 8, 32};
  double seconds = 5;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--help" || i + 1 == argc) {
      std::printf(
          "mamba2_cpu_bench [--threads N] [--batch N] [--seconds S]\n"
          "Times the Mamba-2 step (64 heads of 64x128, 2 MiB of f32 state) beside the memory\n"
          "bandwidth of the same run. Defaults: 1 and 2 threads, batch 1, 8, 32, 5 s for each.\n");
      std::exit(name == "--help" ? 0 : 2);
    }
    const std::string value = argv[++i];
    char* rest = nullptr;
    const double number = std::strtod(value.c_str(), &rest);
    if (*rest != '\0' || !(number > 0))
      fail(std::string(name) + ": '" + value + "' is not a positive number");
    if (name == "--threads") {
      arguments.threads = {static_cast<int>(number)};
    } else if (name == "--batch") {
      arguments.batches = {static_cast<std::int64_t>(number)};
    } else if (name == "--seconds") {
      arguments.seconds = number;
    } else {
      fail("unknown option " + std::string(name));
    }
  }
  return arguments;
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments = parse(argc, argv);
  const Result<CpuIsa> isa = select_isa();
  check(isa.status());
  std::printf(
      "mamba2 step, %lld heads of %lldx%lld, %lld groups, activations f32, %s; states of all "
      "layers together exceed the cache\n",
      static_cast<long long>(kShape.heads), static_cast<long long>(kShape.head_dim),
      static_cast<long long>(kShape.state_size), static_cast<long long>(kShape.groups),
      to_string(*isa));
  for (const int threads : arguments.threads) {
    ThreadPool pool(threads);
    for (const std::int64_t batch : arguments.batches) {
      run_group({.threads = &pool, .isa = *isa}, batch, arguments.seconds);
    }
  }
}
