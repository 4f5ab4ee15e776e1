#include "emulation.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <utility>

#include "cuda_runtime_api.h"

// Leaves one stack for another: pushes what a function must preserve, exchanges the pointers, pops.
extern "C" void emulation_switch(void** from, void* to);
asm(R"(
.text
.globl emulation_switch
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulation {
namespace {

constexpr std::size_t kStackBytes = std::size_t{256} << 10;
constexpr int kSavedRegisters = 6;
constexpr unsigned char kPoison = 0xff;  // NaN in every floating-point type
constexpr std::size_t kGuardBytes = 1024;

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
  bool landed;
};

/// What the lanes of a warp bring, of this meeting and the one before.
struct Warp {
  Gift gifts[2][kLanes];
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Copy> copies;
  std::unordered_map<const void*, Barrier> barriers;
  std::vector<unsigned char> shared_storage;
  unsigned char* shared = nullptr;
  dim3 grid, block, index;
  std::function<void()> thread;
  Fiber* running = nullptr;
  void* scheduler = nullptr;  // its stack pointer
  const bool eager = std::getenv("EMULATION_EAGER") != nullptr;
};

Machine& machine() {
  static Machine all;
  return all;
}

void enter_thread() {
  machine().thread();
  current().state = Fiber::State::kDone;
  yield();
  std::abort();  // nobody comes back to a thread that has ended
}

void start(Fiber& fiber, int index) {
  fiber.index = index;
  fiber.lane = index % kLanes;
  fiber.warp = index / kLanes;
  fiber.thread = dim3(static_cast<unsigned>(index), 0, 0);
  fiber.state = Fiber::State::kRunning;
  fiber.meeting = Meeting::kNone;
  fiber.meetings = 0;
  fiber.copies.clear();
  if (fiber.stack == nullptr) {
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) fail("no memory for a stack");
    fiber.stack = static_cast<char*>(stack);
  }
  // What emulation_switch pops: registers, then where to go on. One place more keeps the stack
  // aligned as after a call.
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&enter_thread);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
}

/// Runs a fiber until it waits; whether anything has changed.
bool resume(Fiber& fiber) {
  Machine& m = machine();
  fiber.advanced = false;
  m.running = &fiber;
  emulation_switch(&m.scheduler, fiber.stack_pointer);
  m.running = nullptr;
  return fiber.state != Fiber::State::kRunning || fiber.advanced;
}

/// Lets a warp go on once all its lanes are at one collective operation.
bool release_warp(Fiber* first, int lanes) {
  int waiting = 0;
  int alive = 0;
  for (int i = 0; i < lanes; ++i) {
    waiting += first[i].state == Fiber::State::kAtWarp;
    alive += first[i].state != Fiber::State::kDone;
  }
  if (waiting == 0 || waiting < alive) return false;
  machine().running = first;
  if (alive < lanes) fail("lanes have left before a collective operation of their warp");
  for (int i = 0; i < lanes; ++i) {
    machine().running = &first[i];
    if (first[i].meeting != first->meeting || first[i].meetings != first->meetings) {
      fail("the lanes of a warp are at different collective operations");
    }
    first[i].state = Fiber::State::kRunning;
  }
  machine().running = nullptr;
  return true;
}

void run_block() {
  Machine& m = machine();
  const int threads = static_cast<int>(m.block.x);
  const int warps = (threads + kLanes - 1) / kLanes;
  if (m.fibers.size() < static_cast<std::size_t>(threads)) {
    m.fibers.resize(static_cast<std::size_t>(threads));
  }
  m.warps.resize(static_cast<std::size_t>(warps));
  m.copies.clear();
  m.barriers.clear();
  std::fill(m.shared_storage.begin(), m.shared_storage.end(), kPoison);
  for (int i = 0; i < threads; ++i) start(m.fibers[static_cast<std::size_t>(i)], i);
  for (;;) {
    bool advanced = false;
    int alive = 0;
    int at_block = 0;
    for (int warp = 0; warp < warps; ++warp) {
      Fiber* first = &m.fibers[static_cast<std::size_t>(warp * kLanes)];
      const int lanes = std::min(kLanes, threads - warp * kLanes);
      bool again = true;
      while (again) {
        again = false;
        for (int i = 0; i < lanes; ++i) {
          if (first[i].state == Fiber::State::kRunning) again |= resume(first[i]);
        }
        again |= release_warp(first, lanes);
        advanced |= again;
      }
      for (int i = 0; i < lanes; ++i) {
        alive += first[i].state != Fiber::State::kDone;
        at_block += first[i].state == Fiber::State::kAtBlock;
      }
    }
    if (alive == 0) return;
    if (at_block == alive) {
      for (int i = 0; i < threads; ++i) {
        Fiber& fiber = m.fibers[static_cast<std::size_t>(i)];
        if (fiber.state == Fiber::State::kAtBlock) fiber.state = Fiber::State::kRunning;
      }
    } else if (!advanced) {
      fail("nothing in the block can go on");
    }
  }
}

void run_grid(dim3 grid, dim3 block, std::size_t shared_bytes,
              const std::function<void()>& thread) {
  Machine& m = machine();
  m.grid = grid;
  m.block = block;
  m.thread = thread;
  constexpr std::size_t kAlignment = 1024;
  m.shared_storage.resize(kAlignment + shared_bytes + kGuardBytes);
  const auto at = reinterpret_cast<std::uintptr_t>(m.shared_storage.data());
  m.shared = m.shared_storage.data() + (kAlignment - at % kAlignment) % kAlignment;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        m.index = dim3(x, y, z);
        run_block();
        const unsigned char* end = m.shared + shared_bytes;
        if (std::any_of(end, end + kGuardBytes, [](unsigned char b) { return b != kPoison; })) {
          fail("a write beyond shared memory");
        }
      }
    }
  }
}

// Work of a stream that is captured.
struct Recording {
  std::vector<std::function<void()>> work;
};
std::unique_ptr<Recording> recording;

void run_or_record(std::function<void()> work) {
  if (recording != nullptr) {
    recording->work.push_back(std::move(work));
  } else {
    work();
  }
}

std::map<std::uintptr_t, std::size_t> allocations;
cudaError_t last_error = cudaSuccess;

}  // namespace

Fiber& current() { return *machine().running; }
dim3 block_index() { return machine().index; }
dim3 block_extent() { return machine().block; }
dim3 grid_extent() { return machine().grid; }
unsigned char* dynamic_shared() { return machine().shared; }

void yield() {
  Machine& m = machine();
  emulation_switch(&m.running->stack_pointer, m.scheduler);
}

void fail(const char* what) {
  const Machine& m = machine();
  std::fprintf(stderr, "emulation of CUDA: %s; block (%u, %u, %u), thread %d\n", what, m.index.x,
               m.index.y, m.index.z, m.running == nullptr ? -1 : m.running->index);
  std::abort();
}

const Gift* meet(Meeting meeting, const Gift& gift) {
  Fiber& fiber = current();
  Warp& warp = machine().warps[static_cast<std::size_t>(fiber.warp)];
  // A lane brings its next gift only after all have taken this one: two sets suffice.
  Gift* gifts = warp.gifts[++fiber.meetings % 2];
  gifts[fiber.lane] = gift;
  fiber.meeting = meeting;
  fiber.state = Fiber::State::kAtWarp;
  yield();
  return gifts;
}

void make_barrier(const void* at, unsigned arrivals) {
  if (machine().barriers.contains(at)) fail("a barrier is initialised twice");
  machine().barriers[at].expected_arrivals = arrivals;
}

Barrier& barrier(const void* at) {
  const auto found = machine().barriers.find(at);
  if (found == machine().barriers.end()) fail("a barrier has not been initialised");
  return found->second;
}

std::size_t add_copy(void* to, const void* from, std::size_t bytes) {
  const std::size_t alignment = std::min<std::size_t>(bytes, 16);
  if (reinterpret_cast<std::uintptr_t>(to) % alignment != 0 ||
      reinterpret_cast<std::uintptr_t>(from) % alignment != 0) {
    fail("a misaligned copy");
  }
  std::vector<Copy>& copies = machine().copies;
  copies.push_back({to, from, bytes, false});
  if (machine().eager) land(copies.size() - 1);
  return copies.size() - 1;
}

void land(std::size_t number) {
  Copy& copy = machine().copies[number];
  if (!copy.landed) std::memcpy(copy.to, copy.from, copy.bytes);
  copy.landed = true;
}

void launch(dim3 grid, dim3 block, std::size_t shared_bytes, std::function<void()> thread) {
  run_or_record([=] { run_grid(grid, block, shared_bytes, thread); });
}

}  // namespace emulation

void __syncthreads() {
  emulation::current().state = emulation::Fiber::State::kAtBlock;
  emulation::yield();
}

// ---- The runtime ----

struct CUgraph_st {
  std::vector<std::function<void()>> work;
};
struct CUgraphExec_st {
  std::vector<std::function<void()>> work;
};

cudaError_t cudaGetLastError() { return std::exchange(emulation::last_error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess                 ? "no error"
         : error == cudaErrorMemoryAllocation ? "out of memory"
                                              : "unknown error";
}

namespace {
constexpr std::size_t kMemory = std::size_t{8} << 30;
}
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  *memory = nullptr;
  constexpr std::size_t kAlignment = 512;
  if (bytes <= kMemory) {
    *memory = std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment);
  }
  if (*memory == nullptr) return emulation::last_error = cudaErrorMemoryAllocation;
  emulation::allocations[reinterpret_cast<std::uintptr_t>(*memory)] = bytes;
  std::memset(*memory, emulation::kPoison, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  emulation::allocations.erase(reinterpret_cast<std::uintptr_t>(memory));
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* memory) {
  const auto at = reinterpret_cast<std::uintptr_t>(memory);
  const auto next = emulation::allocations.upper_bound(at);
  const bool known = next != emulation::allocations.begin() &&
                     at < std::prev(next)->first + std::prev(next)->second;
  *out = {known ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered, 0};
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* available, std::size_t* total) {
  *available = *total = kMemory;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  emulation::run_or_record([=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind, cudaStream_t) {
  emulation::run_or_record([=] {
    for (std::size_t row = 0; row < height; ++row) {
      std::memcpy(static_cast<char*>(to) + row * to_pitch,
                  static_cast<const char*>(from) + row * from_pitch, width);
    }
  });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int byte, std::size_t bytes) {
  std::memset(memory, byte, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  emulation::recording = std::make_unique<emulation::Recording>();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = new CUgraph_st{std::move(emulation::recording->work)};
  emulation::recording.reset();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st{graph->work};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
  for (const auto& work : exec->work) work();
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int) {
  std::strcpy(out->name, "emulation");
  out->major = 9;
  out->minor = 0;
  out->multiProcessorCount = 132;
  return cudaSuccess;
}
// An H100's.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = 233472;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 232448;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
  }
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
