// Matrix product of prompt tokens.
#pragma once

#include <cstdint>
#include <span>

#include "backend/cpu/scratch.h"
#include "replayssm/cpu.h"
#include "replayssm/dtype.h"
#include "replayssm/status.h"

namespace replayssm::cpu {

/// Tokens multiplied together: y (rows, out) = x (rows, in) w^T.
struct GemmBlock {
  const float* x = nullptr;
  std::int64_t x_stride = 0;
  float* y = nullptr;
  std::int64_t y_stride = 0;
  std::int64_t rows = 0;
};

struct GemmWeights {
  const void* data = nullptr;  // (out, in) contiguous; nothing beyond the last element is read
  DType dtype = DType::kF32;   // f32, bf16 or f16
  std::int64_t out = 0;
  std::int64_t in = 0;
};

/// Multiplies every block by the same weights. Weights are widened to f32 a panel of output rows at
/// a time, once for all blocks; each block is a product of its own. Panels depend on the shape of
/// the weights only, so a result does not change with the threads or with the other blocks.
/// `scratch` has a buffer per worker of `context`.
Status gemm(const CpuContext& context, std::span<const GemmBlock> blocks,
            const GemmWeights& weights, Scratch& scratch);

/// "oneDNN 2.6.3" or "built-in": what multiplies, for reports.
const char* gemm_name();

}  // namespace replayssm::cpu
