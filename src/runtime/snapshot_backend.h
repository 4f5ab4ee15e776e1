// A backend that can verify rows by token snapshots: every op is the other backend's, only the ops
// with state run token by token for those rows.
#pragma once

#include <memory>

#include "backend/backend.h"
#include "state/token_snapshots.h"

namespace replayssm {

class SnapshotBackend final : public Backend {
 public:
  SnapshotBackend(std::shared_ptr<Backend> inner, const CpuContext& context)
      : inner_(std::move(inner)), context_(context) {}

  /// Ops with state also run for these rows, until the next call; null: for none.
  void attach(TokenSnapshots* snapshots) { snapshots_ = snapshots; }

  Status causal_conv1d(StatePool& pool, int layer, Step& step,
                       const CausalConv1dOperands& operands) override {
    return with_snapshots(pool, layer, step, TokenSnapshots::Part::kConvolution,
                          [&](Step& s) { return inner_->causal_conv1d(pool, layer, s, operands); });
  }
  Status mamba2(StatePool& pool, int layer, Step& step, const Mamba2Params& params,
                const Mamba2Operands& operands) override {
    return with_snapshots(pool, layer, step, TokenSnapshots::Part::kRecurrence, [&](Step& s) {
      return inner_->mamba2(pool, layer, s, params, operands);
    });
  }
  Status gated_delta_net(StatePool& pool, int layer, Step& step, const GatedDeltaNetParams& params,
                         const GatedDeltaNetOperands& operands) override {
    return with_snapshots(pool, layer, step, TokenSnapshots::Part::kRecurrence, [&](Step& s) {
      return inner_->gated_delta_net(pool, layer, s, params, operands);
    });
  }

  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    return inner_->allocate(bytes);
  }
  Result<TensorView> place(const TensorView& host) override { return inner_->place(host); }
  void copy_rows(const TensorView& source, std::int64_t from, const TensorView& target,
                 std::int64_t to, std::int64_t count) override {
    inner_->copy_rows(source, from, target, to, count);
  }
  void embed(std::span<const std::int32_t> tokens, const TensorView& table,
             const TensorView& out) override {
    inner_->embed(tokens, table, out);
  }
  Status matmul(std::span<const ForwardRow> rows, const TensorView& x, const TensorView& w,
                const TensorView& y) override {
    return inner_->matmul(rows, x, w, y);
  }
  void rms_norm(const TensorView& x, const TensorView& weight, float eps,
                const TensorView& out) override {
    inner_->rms_norm(x, weight, eps, out);
  }
  void gated_rms_norm(const TensorView& y, const TensorView& z, const TensorView& weight,
                      std::int64_t groups, float eps, const TensorView& out) override {
    inner_->gated_rms_norm(y, z, weight, groups, eps, out);
  }
  void gate(const TensorView& x, const TensorView& gate, GateFunction f) override {
    inner_->gate(x, gate, f);
  }
  void relu_squared(const TensorView& x) override { inner_->relu_squared(x); }
  void add(const TensorView& x, const TensorView& y) override { inner_->add(x, y); }
  void rotary_table(std::span<const ForwardRow> rows, std::span<const double> frequencies,
                    const TensorView& table) override {
    inner_->rotary_table(rows, frequencies, table);
  }
  void rotate(const TensorView& table, const TensorView& x) override { inner_->rotate(table, x); }
  void attention(std::span<const ForwardRow> rows, const AttentionShape& shape, const TensorView& q,
                 const TensorView& k, const TensorView& v, KvCache& cache, int layer,
                 const TensorView& out) override {
    inner_->attention(rows, shape, q, k, v, cache, layer, out);
  }

 private:
  Status with_snapshots(StatePool& pool, int layer, Step& step, TokenSnapshots::Part part,
                        FunctionRef<Status(Step& step)> op) {
    RSSM_RETURN_IF_ERROR(op(step));
    return snapshots_ == nullptr ? Status() : snapshots_->run(context_, pool, layer, part, op);
  }

  std::shared_ptr<Backend> inner_;
  CpuContext context_;
  TokenSnapshots* snapshots_ = nullptr;
};

}  // namespace replayssm
