// The causal convolution, vectorised over channels.
#pragma once

#include <cstring>

#include "cpu/simd/vec_math.h"
#include "ops/causal_conv1d/cpu/kernel.h"

namespace replayssm::cpu {

template <typename Isa, typename Act>
struct CausalConv1dKernel {
  using V = Vec<Isa>;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kMaxWidth = 8;

  static void run(const CausalConv1dTask& task) {
    for (std::int64_t t = 0; t < task.tokens; ++t) {
      const Act* input[kMaxWidth];
      for (int i = 0; i < task.width; ++i) input[i] = input_at(task, t - (task.width - 1) + i);
      output_token(task, t, input);
    }
    // Only now: the row's first outputs read the places its last inputs take.
    const std::int64_t first = task.tokens > task.places ? task.tokens - task.places : 0;
    for (std::int64_t t = first; t < task.tokens; ++t) {
      Act* place = static_cast<Act*>(task.ring) +
                   (task.position + t) % task.places * task.channels + task.channel_begin;
      std::memcpy(place,
                  static_cast<const Act*>(task.u) + t * task.u_token_stride + task.channel_begin,
                  sizeof(Act) * static_cast<std::size_t>(task.channel_end - task.channel_begin));
    }
  }

 private:
  /// Input of the token `offset` places after the row's first; null before the sequence's start.
  static const Act* input_at(const CausalConv1dTask& task, std::int64_t offset) {
    if (offset >= 0) return static_cast<const Act*>(task.u) + offset * task.u_token_stride;
    const std::int64_t position = task.position + offset;
    if (position < 0) return nullptr;
    return static_cast<const Act*>(task.ring) + position % task.places * task.channels;
  }

  static void output_token(const CausalConv1dTask& task, std::int64_t t, const Act* const* input) {
    Act* out = static_cast<Act*>(task.out) + t * task.out_token_stride;
    std::int64_t c = task.channel_begin;
    for (; c + kLanes <= task.channel_end; c += kLanes) {
      V sum = task.bias == nullptr ? V::zero() : V::load(task.bias + c);
      for (int i = 0; i < task.width; ++i) {
        if (input[i] == nullptr) continue;
        sum = fma(V::load(task.weight + i * task.channels + c), V::load(input[i] + c), sum);
      }
      (task.silu ? silu<Isa>(sum) : sum).store(out + c);
    }
    if (const int rest = static_cast<int>(task.channel_end - c); rest > 0) {
      V sum = task.bias == nullptr ? V::zero() : V::load_partial(task.bias + c, rest);
      for (int i = 0; i < task.width; ++i) {
        if (input[i] == nullptr) continue;
        sum = fma(V::load_partial(task.weight + i * task.channels + c, rest),
                  V::load_partial(input[i] + c, rest), sum);
      }
      (task.silu ? silu<Isa>(sum) : sum).store_partial(out + c, rest);
    }
  }
};

template <typename Isa>
CausalConv1dFunction causal_conv1d_function(DType activation) {
  return activation == DType::kF32    ? CausalConv1dKernel<Isa, float>::run
         : activation == DType::kBF16 ? CausalConv1dKernel<Isa, BF16>::run
                                      : CausalConv1dKernel<Isa, F16>::run;
}

}  // namespace replayssm::cpu
