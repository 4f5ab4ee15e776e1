// Blocks of CUDA threads on a CPU, for tests on machines without a GPU.
//
// A block's threads are fibers of one thread. Collective operations (shuffles, matrix products,
// barriers) bring the lanes of a warp or the threads of a block together; lanes that meet at
// different operations, or leave before one, end the program, as does a block in which nothing can
// go on. Shared memory is NaN when a block begins. Asynchronous copies land as late as what is
// waited for allows, or at once with EMULATION_EAGER=1, so that a missing wait shows in one of the
// two. Blocks of a launch run one after the other; a launch is over when it returns.
//
// This header is included before everything else, and the others of this folder take the places of
// CUDA's and of src/cuda's where those speak to the hardware.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <unordered_map>
#include <vector>

// ---- The language ----

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(bytes) alignas(bytes)
#define __CUDACC__ 1
#define __CUDA_ARCH__ 900

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace emulation {

inline constexpr int kLanes = 32;

/// What a lane brings to a collective operation.
struct Gift {
  std::uint32_t word[6];
  const void* pointer;
};

enum class Meeting { kNone, kShuffle, kWarp, kMatrices, kLoadMatrices };

struct Fiber {
  enum class State { kRunning, kAtWarp, kAtBlock, kDone };

  void* stack_pointer = nullptr;
  char* stack = nullptr;
  dim3 thread;
  int index = 0, lane = 0, warp = 0;
  State state = State::kDone;
  Meeting meeting = Meeting::kNone;
  unsigned long meetings = 0;
  bool advanced = false;             // has done more than look at a barrier
  std::vector<std::size_t> copies;   // asynchronous ones that nobody has waited for
  std::size_t committed_copies = 0;  // of those
};

/// The fiber that runs.
Fiber& current();
dim3 block_index();
dim3 block_extent();
dim3 grid_extent();
unsigned char* dynamic_shared();

/// Hands over to the others until the scheduler comes back.
void yield();
[[noreturn]] void fail(const char* what);

/// Waits for the warp; returns what its lanes have brought.
const Gift* meet(Meeting meeting, const Gift& gift);

/// An mbarrier, by its address in shared memory.
struct Barrier {
  unsigned expected_arrivals = 0, arrivals = 0;
  std::size_t expected_bytes = 0, announced_bytes = 0;
  unsigned phase = 0;
  std::vector<std::size_t> copies;
};
void make_barrier(const void* at, unsigned arrivals);
Barrier& barrier(const void* at);

/// Registers a copy of the running block; returns its number.
std::size_t add_copy(void* to, const void* from, std::size_t bytes);
/// Lets a copy land, once.
void land(std::size_t copy);

/// Runs, or while a stream is captured records, a grid of blocks.
void launch(dim3 grid, dim3 block, std::size_t shared_bytes, std::function<void()> thread);

}  // namespace emulation

#define threadIdx (::emulation::current().thread)
#define blockIdx (::emulation::block_index())
#define blockDim (::emulation::block_extent())
#define gridDim (::emulation::grid_extent())

void __syncthreads();
inline void __syncwarp(unsigned = 0xffffffffu) {
  ::emulation::meet(::emulation::Meeting::kWarp, {});
}

namespace emulation {
template <typename T>
T shuffle(T x, int from) {
  static_assert(sizeof(T) == 4);
  Gift gift{};
  std::memcpy(gift.word, &x, 4);
  const Gift* gifts = meet(Meeting::kShuffle, gift);
  T out;
  std::memcpy(&out, gifts[from].word, 4);
  return out;
}
}  // namespace emulation

// Among each `width` lanes, a power of two.
template <typename T>
T __shfl_sync(unsigned, T x, int from, int width = ::emulation::kLanes) {
  const int lane = ::emulation::current().lane;
  return ::emulation::shuffle(x, lane - lane % width + from % width);
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return ::emulation::shuffle(x, ::emulation::current().lane ^ mask);
}
template <typename T>
T __shfl_down_sync(unsigned, T x, int by, int width = ::emulation::kLanes) {
  const int lane = ::emulation::current().lane;
  return ::emulation::shuffle(x, lane % width + by < width ? lane + by : lane);
}

inline int __any_sync(unsigned, int predicate) {
  for (int mask = 1; mask < ::emulation::kLanes; mask *= 2) {
    predicate |= ::emulation::shuffle(predicate, ::emulation::current().lane ^ mask);
  }
  return predicate != 0;
}

// ---- Intrinsics ----

inline float __uint_as_float(unsigned x) {
  float out;
  std::memcpy(&out, &x, 4);
  return out;
}
inline unsigned __float_as_uint(float x) {
  unsigned out;
  std::memcpy(&out, &x, 4);
  return out;
}
inline float __int_as_float(int x) { return __uint_as_float(static_cast<unsigned>(x)); }
/// max(min(a + b, c), 0)
inline int __viaddmin_s32_relu(int a, int b, int c) { return std::max(std::min(a + b, c), 0); }
// The compiler must not fuse what these keep apart: -ffp-contract=off.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((std::uint64_t{a} * b) >> 32);
}
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const std::uint64_t bytes = std::uint64_t{high} << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  }
  return out;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}
template <typename T>
T atomicAdd(T* at, std::type_identity_t<T> value) {
  const T old = *at;
  *at = old + value;
  return old;
}
template <typename T>
T atomicMin(T* at, std::type_identity_t<T> value) {
  const T old = *at;
  *at = std::min(old, value);
  return old;
}
template <typename T>
T atomicCAS(T* at, std::type_identity_t<T> compare, std::type_identity_t<T> value) {
  const T old = *at;
  if (old == compare) *at = value;
  return old;
}
template <typename A, typename B>
constexpr auto min(A a, B b) {
  return std::min<std::common_type_t<A, B>>(a, b);
}
template <typename A, typename B>
constexpr auto max(A a, B b) {
  return std::max<std::common_type_t<A, B>>(a, b);
}
