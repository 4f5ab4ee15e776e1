// Backend on the CPU: kernels for one instruction set, spread over the context's threads.
#pragma once

#include <vector>

#include "backend/backend.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/scratch.h"
#include "replayssm/cpu.h"

namespace replayssm {

/// Results do not depend on the number of threads. Calls must not overlap: scratch is shared.
class CpuBackend : public Backend {
 public:
  explicit CpuBackend(const CpuContext& context);

  std::shared_ptr<std::byte> allocate(std::size_t bytes) override;
  Result<TensorView> place(const TensorView& host) override;
  void copy_rows(const TensorView& source, std::int64_t from, const TensorView& target,
                 std::int64_t to, std::int64_t count) override;
  Status causal_conv1d(StatePool& pool, int layer, Step& step,
                       const CausalConv1dOperands& operands) override;
  Status mamba2(StatePool& pool, int layer, Step& step, const Mamba2Params& params,
                const Mamba2Operands& operands) override;
  Status gated_delta_net(StatePool& pool, int layer, Step& step, const GatedDeltaNetParams& params,
                         const GatedDeltaNetOperands& operands) override;
  void embed(std::span<const std::int32_t> tokens, const TensorView& table,
             const TensorView& out) override;
  Status matmul(std::span<const ForwardRow> rows, const TensorView& x, const TensorView& w,
                const TensorView& y) override;
  void rms_norm(const TensorView& x, const TensorView& weight, float eps,
                const TensorView& out) override;
  void gated_rms_norm(const TensorView& y, const TensorView& z, const TensorView& weight,
                      std::int64_t groups, float eps, const TensorView& out) override;
  void gate(const TensorView& x, const TensorView& gate, GateFunction f) override;
  void relu_squared(const TensorView& x) override;
  void add(const TensorView& x, const TensorView& y) override;
  void rotary_table(std::span<const ForwardRow> rows, std::span<const double> frequencies,
                    const TensorView& table) override;
  void rotate(const TensorView& table, const TensorView& x) override;
  void attention(std::span<const ForwardRow> rows, const AttentionShape& shape, const TensorView& q,
                 const TensorView& k, const TensorView& v, KvCache& cache, int layer,
                 const TensorView& out) override;

 private:
  /// Some tokens of a row and some query heads of one KV head.
  struct AttentionPiece {
    const ForwardRow* row;
    std::int64_t token;  // within the row
    std::int64_t tokens;
    std::int64_t head;  // query head
    std::int64_t heads;
  };

  /// Calls task(begin, end) for ranges that cover [0, count); `work` is a token's elements.
  void for_tokens(std::int64_t count, std::int64_t work,
                  FunctionRef<void(std::int64_t begin, std::int64_t end)> task) const;
  void multiply_gathered(const TensorView& w);
  void write_cache(std::span<const ForwardRow> rows, const TensorView& k, const TensorView& v,
                   KvCache& cache, int layer) const;

  CpuContext context_;
  const cpu::BackendKernels& kernels_;
  cpu::Scratch scratch_;
  std::vector<std::shared_ptr<std::byte>> placed_;  // copies of misaligned weights
  // Lists a call builds; members so that a step does not allocate once they have grown.
  std::vector<const float*> inputs_;
  std::vector<float*> outputs_;
  std::vector<cpu::GemmBlock> blocks_;
  std::vector<AttentionPiece> pieces_;
};

}  // namespace replayssm
