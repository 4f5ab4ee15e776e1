// What the benchmarks of CUDA steps share. They time a step as serving runs it: CUDA-graph replay,
// a working set several times the L2 cache (every launch of a graph uses other slots), slots in
// random order, rows at the phases a long run would leave them at, so that as many of them flush as
// in life. Medians.
//
// The floor of a case is the bytes that must move (the ops' *_row_traffic, and the operands) over
// the read bandwidth measured in the same run.
//
// A Family names its geometries, fills in a layer's parameters, and launches.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/query.h"
#include "replayssm/state_pool.h"
#include "state/cuda/step.h"
#include "state/read_copy.h"

namespace replayssm::cuda {

inline void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
inline void require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

inline std::FILE* log_file = nullptr;

__attribute__((format(printf, 1, 2))) inline void say(const char* format, ...) {
  for (std::FILE* to : {stdout, log_file}) {
    if (to == nullptr) continue;
    va_list args;
    va_start(args, format);
    std::vfprintf(to, format, args);
    va_end(args);
    std::fflush(to);
  }
}

// ---- Data ----

__device__ inline std::uint32_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return static_cast<std::uint32_t>(x ^ (x >> 31));
}

/// Words that are numbers of magnitude 1/4 to 1 both as an f32 and as two bf16, and finite as e4m3.
static __global__ void fill_random(std::uint32_t* words, std::size_t count, std::uint64_t seed) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const std::uint32_t bits = mix(seed + i * 0x9e3779b97f4a7c15ull);
    words[i] = (bits & 0x80fe80feu) | 0x3e803e80u;
  }
}

static __global__ void fill_uniform(float* to, std::size_t count, float low, float high) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = low + (high - low) * static_cast<float>(mix(i + 77) >> 8) * 0x1p-24f;
  }
}

static __global__ void count_bad(const std::uint16_t* y, std::size_t count, bool is_f32,
                                 unsigned* bad) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    // An exponent of all ones is an infinity, a NaN, or an element nobody wrote.
    const std::uint32_t high = is_f32 ? y[2 * i + 1] : y[i];
    if ((high & 0x7f80u) == 0x7f80u) atomicAdd(bad, 1u);
  }
}

struct Arena {
  char* data = nullptr;
  std::size_t bytes = 0;
  std::size_t used = 0;

  void create(std::size_t size) {
    bytes = size;
    require(cudaMalloc(&data, size), "cudaMalloc");
  }
  template <typename T>
  T* take(std::size_t count) {
    used = (used + 255) / 256 * 256;
    T* at = reinterpret_cast<T*>(data + used);
    used += count * sizeof(T);
    if (used > bytes) {
      std::fprintf(stderr, "the bench needs %zu bytes of an arena of %zu\n", used, bytes);
      std::exit(1);
    }
    return at;
  }
};

// ---- Bandwidth ----

constexpr int kUnroll = 8;

static __global__ void read_kernel(const uint4* from, std::size_t count, unsigned* sink) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  unsigned sum = 0;
  for (; i + (kUnroll - 1) * step < count; i += kUnroll * step) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = __ldcs(from + i + u * step);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  if (sum == 0x12345678u) *sink = sum;
}

/// to == from: in place.
static __global__ void copy_kernel(const uint4* from, uint4* to, std::size_t count) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + (kUnroll - 1) * step < count; i += kUnroll * step) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = __ldcs(from + i + u * step);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      v[u].x ^= 1;
      __stcs(to + i + u * step, v[u]);
    }
  }
}

template <typename Launch>
double median_us(cudaStream_t stream, int repeats, Launch launch) {
  cudaEvent_t begin;
  cudaEvent_t end;
  require(cudaEventCreate(&begin), "event");
  require(cudaEventCreate(&end), "event");
  std::vector<double> times;
  for (int i = -2; i < repeats; ++i) {
    require(cudaEventRecord(begin, stream), "record");
    launch();
    require(cudaEventRecord(end, stream), "record");
    require(cudaEventSynchronize(end), "run");
    float ms = 0;
    require(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    if (i >= 0) times.push_back(1e3 * ms);
  }
  require(cudaEventDestroy(begin), "event");
  require(cudaEventDestroy(end), "event");
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

struct Bandwidth {
  double read = 0, copy = 0, in_place = 0;  // bytes per microsecond, both directions counted
};

inline Bandwidth measure_bandwidth(const Arena& arena, const CudaDeviceInfo& device,
                                   cudaStream_t stream) {
  const std::size_t bytes = std::size_t{2} << 30;
  const std::size_t count = bytes / 16;
  auto* data = reinterpret_cast<uint4*>(arena.data);
  auto* sink = reinterpret_cast<unsigned*>(arena.data + arena.bytes - 256);
  Bandwidth best;
  for (const int per_sm : {2, 4, 8}) {
    const unsigned blocks = static_cast<unsigned>(device.multiprocessors * per_sm);
    const double read =
        median_us(stream, 5, [&] { read_kernel<<<blocks, 512, 0, stream>>>(data, count, sink); });
    const double copy = median_us(
        stream, 5, [&] { copy_kernel<<<blocks, 512, 0, stream>>>(data, data + count, count); });
    const double in_place =
        median_us(stream, 5, [&] { copy_kernel<<<blocks, 512, 0, stream>>>(data, data, count); });
    best.read = std::max(best.read, static_cast<double>(bytes) / read);
    best.copy = std::max(best.copy, 2.0 * static_cast<double>(bytes) / copy);
    best.in_place = std::max(best.in_place, 2.0 * static_cast<double>(bytes) / in_place);
  }
  return best;
}

// ---- Cases ----

enum class Mode { kPlain, kReplay };

template <typename Geometry>
struct BenchCase {
  Geometry geometry;
  std::int64_t batch = 1;
  DType checkpoint = DType::kF32;
  DType activation = DType::kBF16;
  ReadCopyFormat read_copy = ReadCopyFormat::kNone;
  Mode mode = Mode::kReplay;
  int window = 16;
  int tokens = 1;           // T: every row carries T
  bool accept_all = false;  // else uniform in 1..T
  FlushMode flush = FlushMode::kExact;

  ReplayLimits limits() const { return {.window = window, .draft_capacity = tokens}; }
  RowKind kind() const { return mode == Mode::kPlain ? RowKind::kCommitted : RowKind::kTentative; }
  std::int64_t act_bytes() const { return static_cast<std::int64_t>(size_of(activation)); }
};

template <typename Geometry>
std::string label(const BenchCase<Geometry>& c) {
  std::string mode = "plain";
  if (c.mode == Mode::kReplay) {
    mode = c.tokens == 1 ? "replay" : "verify T=" + std::to_string(c.tokens);
    if (c.tokens > 1 && c.accept_all) mode += " all accepted";
    if (c.window != 16) mode += " L=" + std::to_string(c.window);
    if (c.flush == FlushMode::kFast) mode += " fast flush";
  }
  const std::string copy =
      c.read_copy == ReadCopyFormat::kNone ? "" : std::string("+") + to_string(c.read_copy);
  return std::string(c.geometry.name) + " " + to_string(c.checkpoint) + copy + "/" +
         to_string(c.activation) + " " + mode + " batch " + std::to_string(c.batch);
}

/// Memory by what it holds: numbers of magnitude 1/4 to 1 in either type, floats of 0.01 to 0.4,
/// and decays of a token, floats of 0.8 to 1.
struct Arenas {
  Arena states, numbers, positive, decays;

  void create() {
    states.create(std::size_t{19} << 30);
    numbers.create(std::size_t{8} << 30);
    positive.create(std::size_t{2} << 30);
    decays.create(std::size_t{4} << 30);
    clear();
  }
  void clear() { states.used = numbers.used = positive.used = decays.used = 0; }
  /// Makes the first bytes of every arena what they should be.
  void fill(cudaStream_t stream, std::size_t states_bytes, std::size_t numbers_bytes,
            std::size_t positive_bytes, std::size_t decay_bytes) const {
    fill_random<<<4096, 256, 0, stream>>>(reinterpret_cast<std::uint32_t*>(states.data),
                                          (states_bytes + 3) / 4, 1);
    fill_random<<<4096, 256, 0, stream>>>(reinterpret_cast<std::uint32_t*>(numbers.data),
                                          (numbers_bytes + 3) / 4, 2);
    fill_uniform<<<4096, 256, 0, stream>>>(reinterpret_cast<float*>(positive.data),
                                           (positive_bytes + 3) / 4, 0.01f, 0.4f);
    fill_uniform<<<4096, 256, 0, stream>>>(reinterpret_cast<float*>(decays.data),
                                           (decay_bytes + 3) / 4, 0.8f, 1.0f);
  }
  void fill_all(cudaStream_t stream) const {
    fill(stream, states.bytes, numbers.bytes, positive.bytes, decays.bytes);
  }
  void fill_used(cudaStream_t stream) const {
    fill(stream, states.used, numbers.used, positive.used, decays.used);
  }
};

inline std::size_t sized(std::int64_t n) { return static_cast<std::size_t>(n); }

struct Outcome {
  double us = 0;
  double bytes = 0;  // of one step, by the formula
  double flush_rate = 0;
  std::string config;  // empty: this configuration does not fit
};

template <typename Family>
class Runner {
 public:
  using Case = BenchCase<typename Family::Geometry>;

  Runner(const CudaDeviceInfo& info, cudaStream_t s) : device_(info), stream_(s), rng_(12345) {
    arenas.create();
    arenas.fill_all(stream_);
    family_.create(stream_);
    require(cudaMalloc(&error_, sizeof(DeviceError)), "cudaMalloc");
    require(cudaMemset(error_, 0, sizeof(DeviceError)), "memset");
    require(cudaMalloc(&bad_, 4), "cudaMalloc");
    require(cudaStreamSynchronize(stream_), "fill");
  }

  Outcome run(const Case& c, const typename Family::Tuning& tuning, int repeats) {
    arenas.clear();
    const auto elements = Family::state_elements(c.geometry);
    // At least 400 MB of state between two uses of a slot.
    const std::int64_t step_bytes =
        c.batch * elements * static_cast<std::int64_t>(size_of(c.checkpoint));
    const std::int64_t copies =
        std::clamp<std::int64_t>((400'000'000 + step_bytes - 1) / step_bytes, 2, 256);
    const std::int64_t slots = copies * c.batch;
    const std::int64_t tokens = c.batch * c.tokens;
    typename Family::Params p = family_.layer(c, slots, arenas);
    p.limits = c.limits();
    p.checkpoint = c.checkpoint;
    p.activation = c.activation;
    p.copy = take_copy(c, slots);
    p.row_count = c.batch;
    p.token_count = tokens;
    p.plain = c.mode == Mode::kPlain;

    Outcome out;
    const std::vector<PlannedRow*> planned =
        plan(c, slots, copies, Family::flush_places(p, device_), out);
    p.rows = planned[0];
    const auto config = Family::choose(p, device_, tuning);
    if (!config.ok()) return out;  // the sweep asks for what does not fit
    out.config = config->to_string();

    family_.take_operands(c, arenas, p);
    require(Family::step(p, *config, stream_));  // loads the kernel, outside the capture
    require(cudaStreamSynchronize(stream_), "first launch");
    std::vector<void*> outputs;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    require(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "capture");
    for (std::int64_t i = 0; i < copies; ++i) {
      p.rows = planned[sized(i)];
      outputs.push_back(family_.take_operands(c, arenas, p));
      const Status status = Family::step(p, *config, stream_);
      require(status);
    }
    require(cudaStreamEndCapture(stream_, &graph), "capture");
    require(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    const std::int64_t output_elements = tokens * Family::outputs(c.geometry);
    for (void* y : outputs) {
      require(cudaMemsetAsync(y, 0xff, sized(output_elements * c.act_bytes()), stream_), "memset");
    }
    out.us = median_us(stream_, repeats,
                       [&] { require(cudaGraphLaunch(exec, stream_), "graph launch"); }) /
             static_cast<double>(copies);
    require(cudaGraphExecDestroy(exec), "graph");
    require(cudaGraphDestroy(graph), "graph");
    check(c, outputs, output_elements);
    // What a step wrote is data for the next case: it goes back to being ordinary numbers.
    arenas.fill_used(stream_);
    require(cudaStreamSynchronize(stream_), "refill");
    return out;
  }

  Arenas arenas;
  bool failed = false;

 private:
  ReadCopyParams take_copy(const Case& c, std::int64_t slots) {
    ReadCopyParams copy;
    copy.format = c.read_copy;
    if (c.read_copy == ReadCopyFormat::kNone) return copy;
    // A page of codes, block scales and scales per slot; the scales are numbers of any size.
    const ReadCopyShape shape = Family::copy_shape(c);
    const std::int64_t heads = Family::state_heads(c.geometry);
    const auto rounded = [](std::int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const std::int64_t codes = rounded(heads * shape.rows * shape.code_row_bytes());
    const std::int64_t blocks = rounded(heads * shape.rows * shape.row_blocks());
    const std::int64_t scales = rounded(heads * shape.head_scales() * 4);
    copy.slot_stride = codes + blocks + scales;
    auto* page = arenas.numbers.template take<std::uint8_t>(sized(slots * copy.slot_stride));
    copy.codes = page;
    copy.block_scales = page + codes;
    copy.scales = reinterpret_cast<float*>(page + codes + blocks);
    return copy;
  }

  /// A step plans its rows once for all its layers; that is not timed. One long run's phases are
  /// dealt out to the slots in random order.
  std::vector<PlannedRow*> plan(const Case& c, std::int64_t slots, std::int64_t copies,
                                FlushPlaces flush_places, Outcome& out) {
    const ReplayLimits limits = c.limits();
    std::vector<Cursor> cursors(sized(slots));
    Cursor cursor{.checkpoint_position = 1000, .position = 1000};
    std::int64_t bytes = 0;
    std::int64_t flushes = 0;
    for (std::int64_t i = -64; i < slots; ++i) {
      if (i >= 0) {
        cursors[sized(i)] = cursor;
        StateTraffic traffic = Family::traffic(c, cursor);
        add_read_copy(c, cursor, traffic);
        bytes += traffic.checkpoint_read + traffic.checkpoint_written + traffic.ring_read +
                 traffic.ring_written + traffic.read_copy_read + traffic.read_copy_written +
                 c.tokens * Family::operand_bytes(c);
        flushes += row_flushes(c.kind(), cursor, limits);
      }
      const std::int64_t accepted =
          c.accept_all || c.mode == Mode::kPlain
              ? c.tokens
              : std::uniform_int_distribution<std::int64_t>(1, c.tokens)(rng_);
      cursor = commit_cursor(cursor, c.kind(), accepted, limits);
    }
    out.bytes = static_cast<double>(bytes) / static_cast<double>(copies);
    out.flush_rate = static_cast<double>(flushes) / static_cast<double>(slots);
    std::shuffle(cursors.begin(), cursors.end(), rng_);
    std::vector<std::int32_t> order(sized(slots));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng_);
    std::vector<DeviceRow> rows(sized(slots));
    for (std::int64_t i = 0; i < slots; ++i) {
      rows[sized(i)] = {.token_begin = (i % c.batch) * c.tokens,
                        .token_count = c.tokens,
                        .slot = order[sized(i)],
                        .kind = c.kind()};
    }
    const auto upload = [&](const auto& values) {
      using T = typename std::decay_t<decltype(values)>::value_type;
      T* to = arenas.numbers.template take<T>(values.size());
      require(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
              "upload");
      return to;
    };
    const Cursor* device_cursors = upload(cursors);
    const DeviceRow* device_rows = upload(rows);
    auto* all = arenas.numbers.template take<PlannedRow>(rows.size());
    std::vector<PlannedRow*> planned;
    for (std::int64_t i = 0; i < copies; ++i) {
      planned.push_back(all + i * c.batch);
      require(cuda_plan_step({.rows = device_rows + i * c.batch,
                              .row_count = c.batch,
                              .token_count = c.batch * c.tokens,
                              .cursors = device_cursors,
                              .slots = slots,
                              .limits = limits,
                              .error = error_,
                              .planned = planned.back(),
                              .flushes = flush_places},
                             stream_));
    }
    return planned;
  }

  /// A replay reads the copy instead of the checkpoint; what writes the one writes the other.
  static void add_read_copy(const Case& c, const Cursor& cursor, StateTraffic& traffic) {
    if (c.read_copy == ReadCopyFormat::kNone) return;
    const ReadCopyShape shape = Family::copy_shape(c);
    const std::int64_t bytes =
        Family::state_heads(c.geometry) *
        (shape.rows * (shape.code_row_bytes() + shape.row_blocks()) + 4 * shape.head_scales());
    if (c.mode == Mode::kPlain || row_flushes(c.kind(), cursor, c.limits())) {
      traffic.read_copy_written = bytes;
    } else {
      traffic.read_copy_read = bytes;
      traffic.checkpoint_read = 0;
    }
  }

  void check(const Case& c, const std::vector<void*>& outputs, std::int64_t elements) {
    require(cudaMemsetAsync(bad_, 0, 4, stream_), "memset");
    for (void* y : outputs) {
      count_bad<<<256, 256, 0, stream_>>>(static_cast<const std::uint16_t*>(y), sized(elements),
                                          c.activation == DType::kF32, bad_);
    }
    unsigned found = 0;
    DeviceError device_error;
    require(cudaMemcpyAsync(&found, bad_, 4, cudaMemcpyDeviceToHost, stream_), "download");
    require(cudaMemcpyAsync(&device_error, error_, sizeof(device_error), cudaMemcpyDeviceToHost,
                            stream_),
            "download");
    require(cudaStreamSynchronize(stream_), "run");
    if (found != 0 || device_error.what != DeviceError::kNone) {
      say("FAILED: %u outputs not written or not finite, error word %d\n", found,
          static_cast<int>(device_error.what));
      failed = true;
    }
  }

  Family family_;
  CudaDeviceInfo device_;
  cudaStream_t stream_;
  std::mt19937_64 rng_;
  DeviceError* error_ = nullptr;
  unsigned* bad_ = nullptr;
};

template <typename Family>
class Table {
 public:
  using Case = BenchCase<typename Family::Geometry>;

  Table(Runner<Family>& runner, const Bandwidth& bandwidth, int repeats)
      : runner_(runner), bandwidth_(bandwidth), repeats_(repeats) {
    say("\n| case | us | MB | flush | floor us | x floor | plain x T us | speed-up | GB/s | "
        "configuration |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
  }

  void row(const Case& c) {
    const Outcome out = runner_.run(c, {}, repeats_);
    // What the same tokens cost one after the other in place.
    double plain = 0;
    if (c.mode == Mode::kReplay) {
      const auto key =
          std::make_tuple(std::string(c.geometry.name), c.batch, c.checkpoint, c.activation);
      if (plain_us_.count(key) == 0) {
        Case plain_case = c;
        plain_case.read_copy = ReadCopyFormat::kNone;
        plain_case.mode = Mode::kPlain;
        plain_case.tokens = 1;
        plain_us_[key] = runner_.run(plain_case, {}, repeats_).us;
      }
      plain = plain_us_[key] * c.tokens;
    }
    const double floor = out.bytes / bandwidth_.read;
    say("| %s | %.2f | %.1f | %.3f | %.1f | %.3f | ", label(c).c_str(), out.us, out.bytes * 1e-6,
        out.flush_rate, floor, out.us / floor);
    if (plain > 0) {
      say("%.2f | %.2f | ", plain, plain / out.us);
    } else {
      say("- | - | ");
    }
    say("%.0f | %s |\n", out.bytes / out.us * 1e-3, out.config.c_str());
  }

 private:
  Runner<Family>& runner_;
  Bandwidth bandwidth_;
  int repeats_;
  std::map<std::tuple<std::string, std::int64_t, DType, DType>, double> plain_us_;
};

template <typename Family>
void sweep(Runner<Family>& runner, const Bandwidth& bandwidth,
           const BenchCase<typename Family::Geometry>& c) {
  struct Entry {
    double us;
    std::string config;
  };
  std::vector<Entry> entries;
  for (const typename Family::Tuning& tuning : Family::tunings(c)) {
    const Outcome out = runner.run(c, tuning, 3);
    if (!out.config.empty()) entries.push_back({out.us, out.config});
  }
  if (entries.empty()) return;
  std::sort(entries.begin(), entries.end(),
            [](const Entry& x, const Entry& y) { return x.us < y.us; });
  const Outcome now = runner.run(c, {}, 5);
  const double floor = now.bytes / bandwidth.read;
  say("\n%s: floor %.1f us; default %.2f us (%.3f)\n", label(c).c_str(), floor, now.us,
      now.us / floor);
  for (std::size_t i = 0; i < std::min<std::size_t>(entries.size(), 8); ++i) {
    say("  %.2f us (%.3f)  %s\n", entries[i].us, entries[i].us / floor, entries[i].config.c_str());
  }
  say("  slowest %.2f us  %s\n", entries.back().us, entries.back().config.c_str());
}

/// `targets` are timed always, `others` unless --quick, `swept` with --sweep.
template <typename Family>
struct Cases {
  std::vector<BenchCase<typename Family::Geometry>> targets, others, swept;
};

template <typename Family>
int bench_main(int argc, char** argv, const Cases<Family>& cases) {
  bool quick = false;
  bool sweeps = false;
  const char* commit = "unknown";
  const char* path = nullptr;
  std::string filter;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--quick") {
      quick = true;
    } else if (arg == "--sweep") {
      sweeps = true;
    } else if (arg == "--filter" && i + 1 < argc) {
      filter = argv[++i];
    } else if (arg == "--commit" && i + 1 < argc) {
      commit = argv[++i];
    } else if (arg == "--out" && i + 1 < argc) {
      path = argv[++i];
    } else {
      std::fprintf(stderr,
                   "usage: %s [--quick] [--sweep] [--filter TEXT] [--commit ID] [--out FILE]\n"
                   "--filter: only the cases whose label contains TEXT\n",
                   argv[0]);
      return 2;
    }
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no CUDA device: skipped\n");
    return 0;
  }
  if (path != nullptr && (log_file = std::fopen(path, "w")) == nullptr) {
    std::fprintf(stderr, "cannot write %s\n", path);
    return 2;
  }
  Result<CudaDeviceInfo> device = query_device(0);
  require(device.status());
  cudaDeviceProp properties;
  require(cudaGetDeviceProperties(&properties, 0), "properties");
  const std::time_t now = std::time(nullptr);
  char date[32];
  std::strftime(date, sizeof(date), "%Y-%m-%d %H:%M UTC", std::gmtime(&now));
  say("# %s CUDA step\n\n%s, %d multiprocessors, commit %s, %s\n\n", Family::kTitle,
      properties.name, device->multiprocessors, commit, date);

  cudaStream_t stream;
  require(cudaStreamCreate(&stream), "stream");
  Runner<Family> runner(*device, stream);
  const Bandwidth bandwidth = measure_bandwidth(runner.arenas.states, *device, stream);
  say("Bandwidth: read %.0f GB/s, copy %.0f GB/s, in place %.0f GB/s\n", bandwidth.read * 1e-3,
      bandwidth.copy * 1e-3, bandwidth.in_place * 1e-3);
  const auto wanted = [&](const auto& c) { return label(c).find(filter) != std::string::npos; };
  {
    Table<Family> table(runner, bandwidth, quick ? 7 : 11);
    for (const auto& c : cases.targets) {
      if (wanted(c)) table.row(c);
    }
    for (const auto& c : cases.others) {
      if (!quick && wanted(c)) table.row(c);
    }
  }
  for (const auto& c : cases.swept) {
    if (sweeps && wanted(c)) sweep(runner, bandwidth, c);
  }
  if (log_file != nullptr) std::fclose(log_file);
  return runner.failed ? 1 : 0;
}

}  // namespace replayssm::cuda
