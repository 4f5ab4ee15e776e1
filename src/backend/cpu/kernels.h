// Kernels of the CPU backend, one table per instruction set.
//
// Every output element is computed by a fixed sequence of operations that depends on its own inputs
// only: not on how many rows a call carries, how outputs are cut into tasks, or what tile computes
// it. Nothing reads or writes past the end of an operand.
#pragma once

#include <cstdint>

#include "replayssm/cpu.h"
#include "replayssm/dtype.h"

namespace replayssm::cpu {

inline constexpr int kStorageTypes = 3;

constexpr bool is_storage_type(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

/// Index into the per-type entries of BackendKernels; dtype is f32, bf16 or f16.
constexpr int storage_index(DType dtype) {
  return dtype == DType::kF32 ? 0 : dtype == DType::kBF16 ? 1 : 2;
}

/// Some tokens of one sequence against its keys and values, for query heads that share a KV head.
struct AttentionTask {
  /// tokens * heads may not exceed this; lets kernels keep per-query tables on the stack.
  static constexpr std::int64_t kMaxQueries = 64;

  const void* keys = nullptr;    // (positions, head_dim) of the KV head
  const void* values = nullptr;  // same layout
  std::int64_t kv_stride = 0;    // elements between positions
  std::int64_t head_dim = 0;
  float scale = 1.0f;
  std::int64_t position = 0;  // of the first token
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  const float* q = nullptr;  // (tokens, heads, head_dim)
  std::int64_t q_stride = 0;
  float* out = nullptr;  // (tokens, heads, head_dim)
  std::int64_t out_stride = 0;
};

struct BackendKernels {
  /// y[r][y_first + o] = x[r] . w[o] for `rows` rows of x and `outs` rows of w, which are `in` long
  /// and w_stride apart.
  using Dots = void (*)(const float* const* x, std::int64_t rows, const void* w,
                        std::int64_t w_stride, std::int64_t outs, std::int64_t in, float* const* y,
                        std::int64_t y_first);
  using Widen = void (*)(const void* from, float* to, std::int64_t n);
  using Narrow = void (*)(const float* from, void* to, std::int64_t n);
  /// scratch: attention_scratch_floats of the task's size, 64-byte aligned.
  using Attention = void (*)(const AttentionTask& task, float* scratch);

  // By storage_index of the weights or the cache.
  Dots dots[kStorageTypes];
  Widen widen[kStorageTypes];
  Narrow narrow[kStorageTypes];
  Attention attention[kStorageTypes];

  /// out = x * rsqrt(mean(x^2) + eps) * weight. out may be x.
  void (*rms_norm)(const float* x, const float* weight, std::int64_t n, float eps, float* out);
  /// u = y * silu(z); out = u * rsqrt(mean(u^2) + eps) * weight. out may be y.
  void (*gated_rms_norm)(const float* y, const float* z, const float* weight, std::int64_t n,
                         float eps, float* out);
  void (*relu_squared)(float* x, std::int64_t n);
  void (*add)(float* x, const float* y, std::int64_t n);
  /// x *= silu(gate), and x *= sigmoid(gate).
  void (*multiply_silu)(float* x, const float* gate, std::int64_t n);
  void (*multiply_sigmoid)(float* x, const float* gate, std::int64_t n);
  /// Turns the pairs (x[j], x[j + n]) by the angles whose n cosines and then n sines `angles` has.
  void (*rotate)(const float* angles, std::int64_t n, float* x);
};

/// isa must be one that this build has: any of supported_isas().
const BackendKernels& backend_kernels(CpuIsa isa);

std::int64_t attention_scratch_floats(std::int64_t queries, std::int64_t head_dim);

}  // namespace replayssm::cpu
