#include "harness.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string_view>

#if defined(__linux__)
#include <unistd.h>
#endif

namespace replayssm::bench {
namespace {

std::string program = "bench";

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// ---- Memory bandwidth ----

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

// ---- Steps ----

/// A pool with rows of random phase; step() runs one token step of every layer.
class StepCase : public BenchCase {
 public:
  StepCase(const BenchFamily& family, const StepCaseOptions& options, std::int64_t batch,
           const CpuContext& context)
      : options_(options),
        batch_(batch),
        context_(context),
        op_(family.make_op(batch * std::max<std::int64_t>(options.tokens, 1))) {
    name = options.name;
    checkpoint = options.checkpoint;
    is_plain = options.kind == RowKind::kCommitted;
    const std::size_t state_bytes =
        static_cast<std::size_t>(family.state_elements()) * size_of(options.checkpoint);
    layers_ = std::max<std::size_t>(
        2, resident_bytes() / (state_bytes * static_cast<std::size_t>(batch)));
    StatePoolOptions pool_options;
    pool_options.layers.assign(layers_, LayerSpec{.recurrence = family.shape, .conv = {}});
    pool_options.slots = batch;
    pool_options.limits = options.limits;
    pool_options.checkpoint = options.checkpoint;
    pool_options.flush = options.flush;
    pool_options.rewindable = !options.flushes;
    auto pool = StatePool::create(pool_options);
    check(pool.status());
    pool_ = std::make_unique<StatePool>(std::move(pool).value());
    for (std::size_t layer = 0; layer < layers_; ++layer) {
      op_->prepare(*pool_, static_cast<int>(layer));
    }
    for (std::int64_t slot = 0; slot < batch; ++slot) {
      check(pool_->reset(static_cast<std::int32_t>(slot)));
    }
    random_.seed(11);
    // A first committed token makes every state non-zero; then phases drift apart.
    run(RowKind::kCommitted, 1);
    if (options.kind == RowKind::kTentative) {
      for (int i = 0; i < 3 * options.limits.window / options.tokens; ++i)
        run(options.kind, options.tokens, true);
    }
  }

  double step() override {
    const double start = now();
    run(options_.kind, options_.tokens);
    const double seconds = now() - start;
    keep_from_flushing();
    return seconds / static_cast<double>(layers_);
  }

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
    for (std::size_t layer = 0; layer < layers_; ++layer) {
      check(op_->run(context_, *pool_, static_cast<int>(layer), *step, batch_ * tokens));
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

  StepCaseOptions options_;
  std::int64_t batch_;
  CpuContext context_;
  std::unique_ptr<BenchOp> op_;
  std::size_t layers_ = 0;
  std::unique_ptr<StatePool> pool_;
  std::mt19937 random_;
};

void run_group(const BenchFamily& family, const MakeCases& make_cases, const CpuContext& context,
               std::int64_t batch, double seconds) {
  Memory memory(resident_bytes());
  const std::vector<std::unique_ptr<BenchCase>> cases = make_cases(batch, context);
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
    const BenchCase& row = *cases[i];
    const double per_row = median(times[i]) / static_cast<double>(batch);
    const double state =
        static_cast<double>(family.state_elements()) * static_cast<double>(size_of(row.checkpoint));
    if (row.is_plain) {
      plain = per_row;
      const double rate = 2 * state / per_row * 1e-9;
      std::printf("| %s | %.1f | 1.00 | %.1f | %.0f%% |\n", row.name.c_str(), per_row * 1e6, rate,
                  100 * rate / read_write_rate);
    } else {
      std::printf("| %s | %.1f | %.2f | %.1f | - |\n", row.name.c_str(), per_row * 1e6,
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

Arguments parse(int argc, char** argv, const BenchFamily& family) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--help" || i + 1 == argc) {
      std::printf(
          "%s [--threads N] [--batch N] [--seconds S]\n"
          "Times the %s beside the memory bandwidth of the same run.\n"
          "Defaults: 1 and 2 threads, batch 1, 8, 32, 5 s for each.\n",
          family.program.c_str(), family.title.c_str());
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

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "%s: %s\n", program.c_str(), message.c_str());
  std::exit(1);
}

void check(const Status& status) {
  if (!status.ok()) fail(status.message());
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::size_t resident_bytes() {
  constexpr std::size_t kLeast = std::size_t{256} << 20;
  constexpr std::size_t kMost = std::size_t{1} << 30;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (cache > 0) return std::clamp(static_cast<std::size_t>(cache) / 4 * 5, kLeast, kMost);
#endif
  return kLeast;
}

std::vector<float> uniform_values(std::mt19937& random, std::int64_t n) {
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> values(static_cast<std::size_t>(n));
  for (float& x : values) x = uniform(random);
  return values;
}

std::int64_t BenchFamily::state_elements() const {
  return std::visit([](const auto& s) { return s.state_elements(); }, shape);
}

std::unique_ptr<BenchCase> make_step_case(const BenchFamily& family, const StepCaseOptions& options,
                                          std::int64_t batch, const CpuContext& context) {
  return std::make_unique<StepCase>(family, options, batch, context);
}

int bench_main(int argc, char** argv, const BenchFamily& family, const MakeCases& make_cases) {
  program = family.program;
  const Arguments arguments = parse(argc, argv, family);
  const Result<CpuIsa> isa = select_isa();
  check(isa.status());
  std::printf("%s, activations f32, %s; states of all layers together exceed the cache\n",
              family.title.c_str(), to_string(*isa));
  for (const int threads : arguments.threads) {
    ThreadPool pool(threads);
    for (const std::int64_t batch : arguments.batches) {
      run_group(family, make_cases, {.threads = &pool, .isa = *isa}, batch, arguments.seconds);
    }
  }
  return 0;
}

}  // namespace replayssm::bench
