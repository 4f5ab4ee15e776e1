// Times the Mamba-2 CUDA step as serving runs it: CUDA-graph replay, a working set several times
// the L2 cache (every launch of a graph uses other slots), slots in random order, rows at the
// phases a long run would leave them at, so that as many of them flush as in life. Medians.
//
// The floor of a case is the bytes that must move (docs/kernels/mamba2-cuda.md) over the read
// bandwidth measured in the same run.
//
//   mamba2_cuda_bench [--quick] [--sweep] [--filter TEXT] [--commit ID] [--out FILE]
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdarg>
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

#include "ops/mamba2/cuda/launch.h"

namespace replayssm::cuda {
namespace {

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
void require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

std::FILE* log_file = nullptr;

__attribute__((format(printf, 1, 2))) void say(const char* format, ...) {
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

__device__ std::uint32_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return static_cast<std::uint32_t>(x ^ (x >> 31));
}

/// Words that are numbers of magnitude 1/4 to 1 both as an f32 and as two bf16.
__global__ void fill_random(std::uint32_t* words, std::size_t count, std::uint64_t seed) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const std::uint32_t bits = mix(seed + i * 0x9e3779b97f4a7c15ull);
    words[i] = (bits & 0x80ff80ffu) | 0x3e803e80u;
  }
}

__global__ void fill_uniform(float* to, std::size_t count, float low, float high) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = low + (high - low) * static_cast<float>(mix(i + 77) >> 8) * 0x1p-24f;
  }
}

__global__ void count_bad(const std::uint16_t* y, std::size_t count, bool is_f32, unsigned* bad) {
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

__global__ void read_kernel(const uint4* from, std::size_t count, unsigned* sink) {
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
__global__ void copy_kernel(const uint4* from, uint4* to, std::size_t count) {
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

Bandwidth measure_bandwidth(const Arena& arena, const CudaDeviceInfo& device, cudaStream_t stream) {
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

struct Geometry {
  const char* name;
  std::int64_t heads, head_dim, state_size, groups;
};
constexpr Geometry kGeometries[] = {{"Nano-30B", 64, 64, 128, 8},
                                    {"Nano-4B", 96, 80, 128, 8},
                                    {"Super", 128, 64, 128, 8},
                                    {"Ultra", 256, 64, 128, 8}};

enum class Mode { kPlain, kReplay };

struct BenchCase {
  Geometry geometry;
  std::int64_t batch = 1;
  DType checkpoint = DType::kF32;
  DType activation = DType::kBF16;
  Mode mode = Mode::kReplay;
  int window = 16;
  int tokens = 1;           // T: every row carries T
  bool accept_all = false;  // else uniform in 1..T
};

struct Outcome {
  double us = 0;
  double bytes = 0;  // of one step, by the formula
  double flush_rate = 0;
  std::string config;
};

class Runner {
 public:
  Runner(const CudaDeviceInfo& info, cudaStream_t s) : device(info), stream(s), rng(12345) {
    states.create(std::size_t{19} << 30);
    small.create(std::size_t{6} << 30);
    fill_random<<<4096, 256, 0, stream>>>(reinterpret_cast<std::uint32_t*>(states.data),
                                          states.bytes / 4, 1);
    fill_random<<<4096, 256, 0, stream>>>(reinterpret_cast<std::uint32_t*>(small.data),
                                          small.bytes / 4, 2);
    dts.create(std::size_t{1} << 30);
    fill_uniform<<<4096, 256, 0, stream>>>(reinterpret_cast<float*>(dts.data), dts.bytes / 4, 0.01f,
                                           0.4f);
    require(cudaMalloc(&a, 4096 * 4), "cudaMalloc");
    require(cudaMalloc(&d, 4096 * 4), "cudaMalloc");
    fill_uniform<<<8, 256, 0, stream>>>(a, 4096, -1.0f, -0.1f);
    fill_uniform<<<8, 256, 0, stream>>>(d, 4096, 0.5f, 1.0f);
    require(cudaMalloc(&error, sizeof(DeviceError)), "cudaMalloc");
    require(cudaMemset(error, 0, sizeof(DeviceError)), "memset");
    require(cudaMalloc(&bad, 4), "cudaMalloc");
    require(cudaStreamSynchronize(stream), "fill");
  }

  Outcome run(const BenchCase& c, const Mamba2Tuning& tuning, int repeats) {
    states.used = small.used = dts.used = 0;
    const Geometry& g = c.geometry;
    const auto state_bytes = static_cast<std::int64_t>(size_of(c.checkpoint));
    const auto act_bytes = static_cast<std::int64_t>(size_of(c.activation));
    const std::int64_t elements = g.heads * g.head_dim * g.state_size;
    // At least 400 MB of state between two uses of a slot.
    const std::int64_t step_bytes = c.batch * elements * state_bytes;
    const std::int64_t copies =
        std::clamp<std::int64_t>((400'000'000 + step_bytes - 1) / step_bytes, 2, 256);
    const std::int64_t slots = copies * c.batch;
    const std::int64_t tokens = c.batch * c.tokens;
    const std::int64_t hp = g.heads * g.head_dim;
    const std::int64_t gn = g.groups * g.state_size;

    Mamba2CudaParams p;
    p.heads = g.heads;
    p.head_dim = g.head_dim;
    p.state_size = g.state_size;
    p.groups = g.groups;
    p.limits = {.window = c.window, .draft_capacity = c.tokens};
    p.checkpoint = c.checkpoint;
    p.activation = c.activation;
    p.row_count = c.batch;
    p.token_count = tokens;
    const std::int64_t places = p.limits.record_places();
    p.state_head_stride = g.head_dim * g.state_size;
    p.state_slot_stride = elements;
    p.ring_x_place_stride = g.head_dim;
    p.ring_x_head_stride = places * g.head_dim;
    p.ring_x_slot_stride = g.heads * p.ring_x_head_stride;
    p.ring_b_place_stride = g.state_size;
    p.ring_b_group_stride = places * g.state_size;
    p.ring_b_slot_stride = g.groups * p.ring_b_group_stride;
    p.ring_dt_head_stride = places;
    p.ring_dt_slot_stride = g.heads * places;
    const auto sized = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    p.state = states.take<char>(sized(slots * elements * state_bytes));
    p.ring_x = small.take<char>(sized(slots * p.ring_x_slot_stride * act_bytes));
    p.ring_b = small.take<char>(sized(slots * p.ring_b_slot_stride * act_bytes));
    p.ring_dt = dts.take<float>(sized(slots * p.ring_dt_slot_stride));
    p.a = a;
    p.d = d;
    p.x_token_stride = p.y_token_stride = hp;
    p.x_head_stride = p.y_head_stride = g.head_dim;
    p.b_token_stride = p.c_token_stride = gn;
    p.b_group_stride = p.c_group_stride = g.state_size;
    p.dt_token_stride = g.heads;
    p.dt_is_f32 = false;

    // One long run's phases, dealt out to the slots in random order.
    std::vector<Cursor> cursors(sized(slots));
    Cursor cursor{.checkpoint_position = 1000, .position = 1000};
    Outcome out;
    std::int64_t bytes = 0;
    std::int64_t flushes = 0;
    const std::int64_t record_bytes = (hp + gn) * act_bytes + g.heads * 4;
    const std::int64_t operand_bytes = (2 * hp + 2 * gn + g.heads) * act_bytes;
    for (std::int64_t i = -64; i < slots; ++i) {
      if (i >= 0) {
        cursors[sized(i)] = cursor;
        const bool flush = c.mode == Mode::kPlain || tentative_row_flushes(cursor, p.limits);
        bytes += elements * state_bytes * (flush ? 2 : 1) + c.tokens * operand_bytes;
        if (c.mode == Mode::kReplay) bytes += (cursor.live() + c.tokens) * record_bytes;
        flushes += flush;
      }
      const std::int64_t accepted =
          c.accept_all ? c.tokens : std::uniform_int_distribution<std::int64_t>(1, c.tokens)(rng);
      if (c.mode == Mode::kPlain) {
        cursor.position += accepted;
        cursor.checkpoint_position = cursor.position;
      } else {
        cursor = commit_cursor(cursor, RowKind::kTentative, accepted, p.limits);
      }
    }
    out.bytes = static_cast<double>(bytes) / static_cast<double>(copies);
    out.flush_rate = static_cast<double>(flushes) / static_cast<double>(slots);
    std::shuffle(cursors.begin(), cursors.end(), rng);
    auto* device_cursors = small.take<Cursor>(cursors.size());
    require(cudaMemcpy(device_cursors, cursors.data(), cursors.size() * sizeof(Cursor),
                       cudaMemcpyHostToDevice),
            "upload");
    std::vector<std::int32_t> order(sized(slots));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    std::vector<DeviceRow> rows(sized(slots));
    for (std::int64_t i = 0; i < slots; ++i) {
      rows[sized(i)] = {.token_begin = (i % c.batch) * c.tokens,
                        .token_count = c.tokens,
                        .slot = order[sized(i)],
                        .kind = c.mode == Mode::kPlain ? RowKind::kCommitted : RowKind::kTentative};
    }
    auto* device_rows = small.take<DeviceRow>(rows.size());
    require(cudaMemcpy(device_rows, rows.data(), rows.size() * sizeof(DeviceRow),
                       cudaMemcpyHostToDevice),
            "upload");

    // A step plans its rows once for all its layers; that is not timed.
    auto* planned = small.take<PlannedRow>(rows.size());
    for (std::int64_t i = 0; i < copies; ++i) {
      require(cuda_plan_step({.rows = device_rows + i * c.batch,
                              .row_count = c.batch,
                              .token_count = tokens,
                              .cursors = device_cursors,
                              .slots = slots,
                              .limits = p.limits,
                              .error = error,
                              .planned = planned + i * c.batch},
                             stream));
    }

    Result<Mamba2CudaConfig> config = [&] {
      p.rows = planned;
      return choose_mamba2_config(p, device, tuning);
    }();
    if (!config.ok()) return out;  // the sweep asks for what does not fit
    out.config = config->to_string();

    const auto take_operands = [&] {
      p.x = small.take<char>(sized(tokens * hp * act_bytes));
      p.b = small.take<char>(sized(tokens * gn * act_bytes));
      p.c = small.take<char>(sized(tokens * gn * act_bytes));
      p.dt = small.take<char>(sized(tokens * g.heads * act_bytes));
      p.y = small.take<char>(sized(tokens * hp * act_bytes));
    };
    take_operands();
    require(mamba2_cuda_step(p, *config, stream));  // loads the kernel, outside the capture
    require(cudaStreamSynchronize(stream), "first launch");
    std::vector<void*> outputs;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    for (std::int64_t i = 0; i < copies; ++i) {
      p.rows = planned + i * c.batch;
      take_operands();
      outputs.push_back(p.y);
      const Status status = mamba2_cuda_step(p, *config, stream);
      require(status);
    }
    require(cudaStreamEndCapture(stream, &graph), "capture");
    require(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    for (void* y : outputs) {
      require(cudaMemsetAsync(y, 0xff, sized(tokens * hp * act_bytes), stream), "memset");
    }
    out.us = median_us(stream, repeats,
                       [&] { require(cudaGraphLaunch(exec, stream), "graph launch"); }) /
             static_cast<double>(copies);
    require(cudaGraphExecDestroy(exec), "graph");
    require(cudaGraphDestroy(graph), "graph");
    require(cudaMemsetAsync(bad, 0, 4, stream), "memset");
    for (void* y : outputs) {
      count_bad<<<256, 256, 0, stream>>>(static_cast<const std::uint16_t*>(y), sized(tokens * hp),
                                         c.activation == DType::kF32, bad);
    }
    unsigned found = 0;
    DeviceError device_error;
    require(cudaMemcpyAsync(&found, bad, 4, cudaMemcpyDeviceToHost, stream), "download");
    require(cudaMemcpyAsync(&device_error, error, sizeof(error), cudaMemcpyDeviceToHost, stream),
            "download");
    require(cudaStreamSynchronize(stream), "run");
    if (found != 0 || device_error.what != DeviceError::kNone) {
      say("FAILED: %u outputs not written or not finite, error word %d\n", found,
          static_cast<int>(device_error.what));
      failed = true;
    }
    // What a step wrote is data for the next case: outputs go back to being ordinary numbers.
    fill_random<<<2048, 256, 0, stream>>>(reinterpret_cast<std::uint32_t*>(small.data),
                                          (small.used + 3) / 4, 3);
    fill_uniform<<<2048, 256, 0, stream>>>(reinterpret_cast<float*>(dts.data), (dts.used + 3) / 4,
                                           0.01f, 0.4f);
    fill_random<<<4096, 256, 0, stream>>>(reinterpret_cast<std::uint32_t*>(states.data),
                                          (states.used + 3) / 4, 4);
    require(cudaStreamSynchronize(stream), "refill");
    return out;
  }

  Arena states, small, dts;
  bool failed = false;

 private:
  CudaDeviceInfo device;
  cudaStream_t stream;
  std::mt19937_64 rng;
  float* a = nullptr;
  float* d = nullptr;
  DeviceError* error = nullptr;
  unsigned* bad = nullptr;
};

std::string label(const BenchCase& c) {
  char text[160];
  std::snprintf(text, sizeof(text), "%s %s/%s %s batch %lld", c.geometry.name,
                to_string(c.checkpoint), to_string(c.activation),
                c.mode == Mode::kPlain ? "plain"
                                       : (c.tokens == 1 ? "replay"
                                                        : ("verify T=" + std::to_string(c.tokens) +
                                                           (c.accept_all ? " all accepted" : ""))
                                                              .c_str()),
                static_cast<long long>(c.batch));
  return text;
}

class Table {
 public:
  Table(Runner& r, const Bandwidth& b, int n) : runner(r), bandwidth(b), repeats(n) {
    say("\n| case | us | MB | flush | floor us | x floor | plain x T us | speed-up | GB/s | "
        "configuration |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
  }

  void row(const BenchCase& c) {
    const Outcome out = runner.run(c, {}, repeats);
    // What the same tokens cost one after the other in place.
    double plain = 0;
    if (c.mode == Mode::kReplay) {
      const auto key = std::make_tuple(std::string(c.geometry.name), c.batch, c.checkpoint);
      if (plain_us.count(key) == 0) {
        BenchCase plain_case = c;
        plain_case.mode = Mode::kPlain;
        plain_case.tokens = 1;
        plain_us[key] = runner.run(plain_case, {}, repeats).us;
      }
      plain = plain_us[key] * c.tokens;
    }
    const double floor = out.bytes / bandwidth.read;
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
  Runner& runner;
  Bandwidth bandwidth;
  int repeats;
  std::map<std::tuple<std::string, std::int64_t, DType>, double> plain_us;
};

void sweep(Runner& runner, const Bandwidth& bandwidth, const BenchCase& c) {
  struct Entry {
    double us;
    std::string config;
  };
  std::vector<Entry> entries;
  Outcome last;
  for (const int warps : {1, 2, 3, 4}) {
    for (const int stages : {1, 2, 3, 4}) {
      for (const int tiles : {1, 2, 4, 8, 16, 32}) {
        // Small batches only split further; big ones only want long runs.
        if (c.batch >= 64 ? tiles < 4 : tiles > 4) continue;
        if (stages > tiles) continue;
        last = runner.run(c, {.warps = warps, .stages = stages, .tiles_per_run = tiles}, 3);
        if (!last.config.empty()) entries.push_back({last.us, last.config});
      }
    }
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

int main_program(int argc, char** argv) {
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
  say("# Mamba-2 CUDA step\n\n%s, %d multiprocessors, commit %s, %s\n\n", properties.name,
      device->multiprocessors, commit, date);

  cudaStream_t stream;
  require(cudaStreamCreate(&stream), "stream");
  Runner runner(*device, stream);
  const Bandwidth bandwidth = measure_bandwidth(runner.states, *device, stream);
  say("Bandwidth: read %.0f GB/s, copy %.0f GB/s, in place %.0f GB/s\n", bandwidth.read * 1e-3,
      bandwidth.copy * 1e-3, bandwidth.in_place * 1e-3);

  const auto wanted = [&](const BenchCase& c) {
    return label(c).find(filter) != std::string::npos;
  };
  const Geometry& nano30 = kGeometries[0];
  const Geometry& super = kGeometries[2];
  const auto f32 = [&](const Geometry& g, std::int64_t batch, int tokens = 1, bool all = false) {
    return BenchCase{.geometry = g, .batch = batch, .tokens = tokens, .accept_all = all};
  };
  const auto bf16 = [&](const Geometry& g, std::int64_t batch, int tokens = 1) {
    return BenchCase{.geometry = g, .batch = batch, .checkpoint = DType::kBF16, .tokens = tokens};
  };
  std::vector<BenchCase> targets = {
      f32(super, 256),   bf16(super, 256),    f32(super, 256, 4),  f32(super, 256, 4, true),
      f32(nano30, 256),  f32(nano30, 64),     f32(nano30, 8),      f32(nano30, 1),
      f32(super, 8),     f32(super, 1),       f32(nano30, 64, 4),  f32(nano30, 8, 4),
      f32(nano30, 1, 4), bf16(super, 256, 4), bf16(nano30, 256, 8)};
  {
    Table table(runner, bandwidth, quick ? 7 : 11);
    for (const BenchCase& c : targets) {
      if (wanted(c)) table.row(c);
    }
    if (!quick) {
      for (const Geometry& g : kGeometries) {
        for (const DType checkpoint : {DType::kF32, DType::kBF16}) {
          for (const std::int64_t batch : {1, 8, 64, 256, 512}) {
            for (const int tokens : {1, 4, 8}) {
              BenchCase c = f32(g, batch, tokens);
              c.checkpoint = checkpoint;
              if (wanted(c)) table.row(c);
            }
            BenchCase plain = f32(g, batch);
            plain.checkpoint = checkpoint;
            plain.mode = Mode::kPlain;
            if (wanted(plain)) table.row(plain);
          }
        }
      }
    }
  }
  if (sweeps) {
    BenchCase plain = f32(super, 256);
    plain.mode = Mode::kPlain;
    for (const BenchCase& c : {f32(super, 256), bf16(super, 256), f32(super, 256, 4), f32(super, 8),
                               f32(super, 1), f32(nano30, 64), f32(nano30, 1), plain}) {
      if (wanted(c)) sweep(runner, bandwidth, c);
    }
  }
  if (log_file != nullptr) std::fclose(log_file);
  return runner.failed ? 1 : 0;
}

}  // namespace
}  // namespace replayssm::cuda

int main(int argc, char** argv) { return replayssm::cuda::main_program(argc, argv); }
