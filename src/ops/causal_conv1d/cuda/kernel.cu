// The causal convolution on the GPU: a thread takes a few neighbouring channels of one row through
// all of the row's tokens, with the last inputs in registers. It is the only one that touches its
// channels of the ring, so a row longer than the ring needs no care: what it reads there is read
// before the first place is overwritten.
#include <algorithm>

#include "cuda/gates.cuh"
#include "cuda/language.cuh"
#include "cuda/vector.cuh"
#include "ops/causal_conv1d/cuda/launch.h"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMaxWidth = 8;
constexpr int kAhead = 4;  // tokens whose inputs are loaded before the first is used

template <typename Act, int kVector>
struct alignas(sizeof(Act) * kVector) Channels {
  Act value[kVector];
};

template <typename Act, int kVector>
__global__ void __launch_bounds__(kThreads)
    causal_conv1d_kernel(const __grid_constant__ CausalConv1dCudaParams p,
                         std::int64_t blocks_per_row) {
  using Vector = Channels<Act, kVector>;
  const std::int64_t index = blockIdx.x / blocks_per_row;
  const std::int64_t channel =
      ((blockIdx.x - index * blocks_per_row) * kThreads + threadIdx.x) * kVector;
  if (channel >= p.channels) return;
  const DeviceRow row = p.rows[index];
  const auto output = [&](std::int64_t t) {
    return reinterpret_cast<Vector*>(static_cast<Act*>(p.out) +
                                     (row.token_begin + t) * p.out_token_stride + channel);
  };
  if (row.slot < 0) {
    Vector zero;
#pragma unroll
    for (int i = 0; i < kVector; ++i) zero.value[i] = narrow<Act>(0.0f);
    for (std::int64_t t = 0; t < row.token_count; ++t) *output(t) = zero;
    return;
  }
  const auto input = [&](std::int64_t t) {
    return reinterpret_cast<const Vector*>(static_cast<const Act*>(p.u) +
                                           (row.token_begin + t) * p.u_token_stride + channel);
  };
  const std::int64_t position = p.cursors[row.slot].position;
  Act* ring = static_cast<Act*>(p.ring) + row.slot * p.ring_slot_stride + channel;
  const auto place = [&](std::int64_t at) {
    return reinterpret_cast<Vector*>(ring + at % p.places * p.channels);
  };

  // Tap `width - 1` meets the newest input; unused taps and slots stay at the front.
  const int first_tap = kMaxWidth - p.width;
  float weight[kMaxWidth][kVector];
  float window[kMaxWidth][kVector];
  float bias[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) bias[i] = p.bias == nullptr ? 0.0f : p.bias[channel + i];
#pragma unroll
  for (int tap = 0; tap < kMaxWidth; ++tap) {
    const std::int64_t before = position - (kMaxWidth - 1 - tap);  // for the row's first token
    const bool stored = tap >= first_tap && tap < kMaxWidth - 1 && before >= 0;
    Vector history;
    if (stored) history = *place(before);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      weight[tap][i] =
          tap < first_tap ? 0.0f : p.weight[(tap - first_tap) * p.channels + channel + i];
      window[tap][i] = stored ? widen(history.value[i]) : 0.0f;
    }
  }

  for (std::int64_t t0 = 0; t0 < row.token_count; t0 += kAhead) {
    Vector next[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (t0 + j < row.token_count) next[j] = *input(t0 + j);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const std::int64_t t = t0 + j;
      if (t >= row.token_count) break;
#pragma unroll
      for (int i = 0; i < kVector; ++i) window[kMaxWidth - 1][i] = widen(next[j].value[i]);
      // A tap before the sequence's start contributes nothing, not zero times a weight.
      const std::int64_t reach = position + t;
      const int oldest =
          max(first_tap, reach < kMaxWidth ? kMaxWidth - 1 - static_cast<int>(reach) : 0);
      Vector result;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        float sum = bias[i];
#pragma unroll
        for (int tap = 0; tap < kMaxWidth; ++tap) {
          if (tap >= oldest) sum = __fmaf_rn(weight[tap][i], window[tap][i], sum);
        }
        result.value[i] = narrow<Act>(p.silu ? silu(sum) : sum);
      }
      *output(t) = result;
#pragma unroll
      for (int tap = 0; tap + 1 < kMaxWidth; ++tap) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) window[tap][i] = window[tap + 1][i];
      }
      if (t >= row.token_count - p.places) *place(position + t) = next[j];
    }
  }
}

template <typename Act, int kVector>
void launch(const CausalConv1dCudaParams& p, cudaStream_t stream) {
  constexpr std::int64_t kChannels = std::int64_t{kThreads} * kVector;
  const std::int64_t per_row = (p.channels + kChannels - 1) / kChannels;
  launch_kernel(causal_conv1d_kernel<Act, kVector>, static_cast<unsigned>(p.row_count * per_row),
                kThreads, 0, stream, p, per_row);
}

template <typename Act>
void choose_vector(const CausalConv1dCudaParams& p, cudaStream_t stream) {
  constexpr std::int64_t kVector = 4;
  constexpr std::size_t kBytes = kVector * sizeof(Act);
  const bool aligned = p.channels % kVector == 0 && p.u_token_stride % kVector == 0 &&
                       p.out_token_stride % kVector == 0 &&
                       reinterpret_cast<std::uintptr_t>(p.u) % kBytes == 0 &&
                       reinterpret_cast<std::uintptr_t>(p.out) % kBytes == 0;
  aligned ? launch<Act, kVector>(p, stream) : launch<Act, 1>(p, stream);
}

}  // namespace

void launch_causal_conv1d(const CausalConv1dCudaParams& params, cudaStream_t stream) {
  params.activation == DType::kF32 ? choose_vector<float>(params, stream)
                                   : choose_vector<BF16>(params, stream);
}

}  // namespace replayssm::cuda
