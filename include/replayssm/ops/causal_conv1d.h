// Causal depthwise convolution step on the position-addressed input ring.
//
//   out[t, c] = act(bias[c] + sum_{i < width} weight[i, c] u[t - (width - 1) + i, c])
//
// with act = SiLU or identity, in fp32, taps summed oldest first. u at positions before the row's
// first token comes from the slot's convolution ring, before the sequence's start it is zero. The
// row's inputs are then stored at their positions: rejected tokens are overwritten by the next
// step, so the ring rolls back with the sequence's position and no data moves on commit.
//
// Types: u, out of the pool's activation type; weight and bias f32. Results do not depend on how a
// prompt is chunked, on the other rows, or on the number of threads.
#pragma once

#include "replayssm/cpu.h"
#include "replayssm/state_pool.h"
#include "replayssm/tensor.h"

namespace replayssm {

struct CausalConv1dOperands {
  TensorView u;       // (tokens, channels), raw inputs; token stride is free
  TensorView weight;  // (width, channels) f32 contiguous: weight[width - 1] meets the newest input
  TensorView bias;    // (channels) f32; empty: none
  TensorView out;     // (tokens, channels); not the memory of u; zero for padding rows
  bool silu = true;
};

/// Runs the convolution of `layer` for all rows of `step`. Workspace: none. On error nothing has
/// been read or written.
Status causal_conv1d_step(const CpuContext& context, StatePool& pool, int layer, Step& step,
                          const CausalConv1dOperands& operands);

/// On a CUDA pool: operands are device memory of the pool's device. One launch on the context's
/// stream; it allocates nothing, does not wait, and may be captured in a graph. Results are bit
/// for bit those of the CPU's instruction sets that fuse multiply and add.
Status causal_conv1d_step(const CudaContext& context, StatePool& pool, int layer, Step& step,
                          const CausalConv1dOperands& operands);

}  // namespace replayssm
