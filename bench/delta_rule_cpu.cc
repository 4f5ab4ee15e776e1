// Gated DeltaNet and Kimi Delta Attention steps on the CPU against the memory bandwidth this
// program measures itself, and against verification by one state snapshot per draft token.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "harness.h"
#include "ops/deferred_decay.h"
#include "ops/delta_rule/cpu/kernel.h"
#include "ops/delta_rule/shape.h"
#include "replayssm/ops/gated_delta_net.h"
#include "replayssm/ops/kimi_delta_attention.h"

namespace {

using namespace replayssm;         // NOLINT(google-build-using-namespace): a program, not a library
using namespace replayssm::bench;  // NOLINT(google-build-using-namespace)

constexpr GatedDeltaNetShape kGated{
    .key_heads = 16, .value_heads = 16, .key_dim = 128, .value_dim = 128};
constexpr KimiDeltaAttentionShape kKimi{.heads = 16, .key_dim = 128, .value_dim = 128};

/// Operands of either family: raw gates that give decays of about 0.9 to 0.99.
class DeltaOp : public BenchOp {
 public:
  DeltaOp(const DeltaRuleShape& shape, std::int64_t tokens) : shape_(shape) {
    std::mt19937 random(7);
    q_ = uniform_values(random, tokens * shape.key_heads * shape.key_dim);
    k_ = uniform_values(random, tokens * shape.key_heads * shape.key_dim);
    v_ = uniform_values(random, tokens * shape.value_heads * shape.value_dim);
    a_ = uniform_values(random, tokens * shape.value_heads * shape.decays());
    for (float& a : a_) a -= 3.5f;
    b_ = uniform_values(random, tokens * shape.value_heads);
    a_log_.resize(static_cast<std::size_t>(shape.value_heads));
    o_.resize(v_.size());
  }

  Status run(const CpuContext& context, StatePool& pool, int layer, Step& step,
             std::int64_t tokens) override {
    const auto f32 = [](auto& v, std::initializer_list<std::int64_t> shape) {
      return TensorView::contiguous(v.data(), DType::kF32, shape);
    };
    const TensorView a_log = f32(a_log_, {shape_.value_heads});
    const TensorView q = f32(q_, {tokens, shape_.key_heads, shape_.key_dim});
    const TensorView k = f32(k_, {tokens, shape_.key_heads, shape_.key_dim});
    const TensorView v = f32(v_, {tokens, shape_.value_heads, shape_.value_dim});
    const TensorView b = f32(b_, {tokens, shape_.value_heads});
    const TensorView o = f32(o_, {tokens, shape_.value_heads, shape_.value_dim});
    if (!shape_.channel_decay) {
      GatedDeltaNetParams params;
      params.a_log = a_log;
      return gated_delta_net_step(context, pool, layer, step, params,
                                  {q, k, v, f32(a_, {tokens, shape_.value_heads}), b, o});
    }
    KimiDeltaAttentionParams params;
    params.a_log = a_log;
    return kimi_delta_attention_step(
        context, pool, layer, step, params,
        {q, k, v, f32(a_, {tokens, shape_.value_heads, shape_.key_dim}), b, o});
  }

  /// The kernel's view of tokens first.. of a row, without a state.
  cpu::DeltaRuleTask task(std::int64_t first) const {
    cpu::DeltaRuleTask t;
    t.key_dim = shape_.key_dim;
    t.value_dim = shape_.value_dim;
    t.a_log = a_log_.data();
    t.norm_epsilon = 1e-6f;
    t.q_scale = 1.0f / std::sqrt(static_cast<float>(shape_.key_dim));
    t.q_head_stride = t.k_head_stride = shape_.key_dim;
    t.v_head_stride = t.o_head_stride = shape_.value_dim;
    t.gate_head_stride = shape_.decays();
    t.q_token_stride = t.k_token_stride = shape_.key_heads * shape_.key_dim;
    t.v_token_stride = t.o_token_stride = shape_.value_heads * shape_.value_dim;
    t.gate_token_stride = shape_.value_heads * shape_.decays();
    t.beta_token_stride = shape_.value_heads;
    t.tokens = 1;
    t.q = q_.data() + first * t.q_token_stride;
    t.k = k_.data() + first * t.k_token_stride;
    t.v = v_.data() + first * t.v_token_stride;
    t.gate = a_.data() + first * t.gate_token_stride;
    t.beta = b_.data() + first * t.beta_token_stride;
    t.o = o_.data() + first * t.o_token_stride;
    return t;
  }

 private:
  DeltaRuleShape shape_;
  std::vector<float> q_, k_, v_, a_, b_, a_log_;
  mutable std::vector<float> o_;
};

/// The conventional way to verify T drafts: plain decoding that leaves the state after every token
/// in a plane of its own, T + 1 planes per sequence; accepting a token makes its plane the start of
/// the next step. A head goes through all its tokens before the next head, so that a plane just
/// written is read back from cache: one read and T writes of the state from memory.
class SnapshotCase : public BenchCase {
 public:
  SnapshotCase(const DeltaRuleShape& shape, std::int64_t tokens, std::int64_t batch,
               const CpuContext& context)
      : shape_(shape),
        tokens_(tokens),
        batch_(batch),
        context_(context),
        op_(shape, batch * tokens),
        base_(static_cast<std::size_t>(batch), 0),
        random_(11) {
    name = "snapshots T=" + std::to_string(tokens) + " f32";
    const auto plane = static_cast<std::size_t>(shape.state_elements());
    const std::size_t layer = plane * static_cast<std::size_t>(batch * (tokens + 1));
    layers_ = std::max<std::size_t>(2, resident_bytes() / (layer * sizeof(float)));
    // Values of a decayed state's size, not zeros that share one page.
    planes_.assign(layers_ * layer, 0.01f);
    if (!shape.channel_decay) {
      const std::int64_t planes = batch * (tokens + 1) * static_cast<std::int64_t>(layers_);
      deferred_.assign(static_cast<std::size_t>(planes * plane_decays()), 1.0f);
    }
  }

  double step() override {
    const double start = now();
    for (std::size_t layer = 0; layer < layers_; ++layer) run(static_cast<std::int64_t>(layer));
    std::uniform_int_distribution<std::int64_t> accept(1, tokens_);
    for (std::int64_t& base : base_) base = (base + accept(random_)) % (tokens_ + 1);
    return (now() - start) / static_cast<double>(layers_);
  }

 private:
  std::int64_t plane_at(std::int64_t layer, std::int64_t row, std::int64_t index) const {
    return (layer * batch_ + row) * (tokens_ + 1) + index % (tokens_ + 1);
  }
  float* plane(std::int64_t at) { return planes_.data() + at * shape_.state_elements(); }
  /// Decays deferred in a plane.
  std::int64_t plane_decays() const {
    return shape_.value_heads * deferred_decay_count(DType::kF32, shape_.value_dim);
  }

  void run(std::int64_t layer) {
    const cpu::DeltaRuleKernels& kernels =
        cpu::delta_rule_kernels(context_.isa, DType::kF32, shape_.channel_decay);
    context_.parallel_for(batch_ * shape_.key_heads, [&](std::int64_t item, int) {
      const std::int64_t row = item / shape_.key_heads;
      const std::int64_t base = base_[static_cast<std::size_t>(row)];
      for (std::int64_t t = 0; t < tokens_; ++t) {
        cpu::DeltaRuleTask task = op_.task(row * tokens_ + t);
        task.key_head = item % shape_.key_heads;
        task.head_begin = task.key_head * shape_.heads_per_key();
        task.head_end = task.head_begin + shape_.heads_per_key();
        const std::int64_t from = plane_at(layer, row, base + t);
        const std::int64_t to = plane_at(layer, row, base + t + 1);
        task.checkpoint_in = plane(from);
        task.checkpoint = plane(to);
        if (!deferred_.empty()) {
          task.deferred_in = deferred_.data() + from * plane_decays();
          task.deferred = deferred_.data() + to * plane_decays();
        }
        kernels.committed(task);
      }
    });
  }

  DeltaRuleShape shape_;
  std::int64_t tokens_;
  std::int64_t batch_;
  CpuContext context_;
  DeltaOp op_;
  std::vector<std::int64_t> base_;
  std::mt19937 random_;
  std::size_t layers_ = 0;
  std::vector<float> planes_;
  std::vector<float> deferred_;  // with one decay per head
};

std::vector<std::unique_ptr<BenchCase>> all_cases(const BenchFamily& family,
                                                  const DeltaRuleShape& shape, std::int64_t batch,
                                                  const CpuContext& context) {
  std::vector<std::unique_ptr<BenchCase>> cases;
  const auto add = [&](std::string name, RowKind kind, std::int64_t tokens, DType checkpoint,
                       ReplayLimits limits, bool flushes = true,
                       FlushMode flush = FlushMode::kExact) {
    const StepCaseOptions options{std::move(name), kind,    tokens, checkpoint,
                                  limits,          flushes, flush};
    cases.push_back(make_step_case(family, options, batch, context));
  };
  const auto verify = [&](std::int64_t tokens, DType checkpoint, bool flushes,
                          FlushMode flush = FlushMode::kExact) {
    add("verify T=" + std::to_string(tokens) + " " + to_string(checkpoint) +
            (!flushes                    ? ", no flush"
             : flush == FlushMode::kFast ? ", fast flush"
                                         : ""),
        RowKind::kTentative, tokens, checkpoint,
        {.window = 16, .draft_capacity = static_cast<int>(tokens)}, flushes, flush);
  };
  const auto snapshots = [&](std::int64_t tokens) {
    cases.push_back(std::make_unique<SnapshotCase>(shape, tokens, batch, context));
  };
  add("plain f32", RowKind::kCommitted, 1, DType::kF32, kPlainLimits);
  add("replay L=16 f32", RowKind::kTentative, 1, DType::kF32, kDecodeLimits);
  verify(4, DType::kF32, false);
  verify(4, DType::kF32, true);
  verify(4, DType::kF32, true, FlushMode::kFast);
  snapshots(4);
  verify(8, DType::kF32, true);
  verify(8, DType::kF32, true, FlushMode::kFast);
  snapshots(8);
  add("plain bf16", RowKind::kCommitted, 1, DType::kBF16, kPlainLimits);
  add("replay L=16 bf16", RowKind::kTentative, 1, DType::kBF16, kDecodeLimits);
  verify(4, DType::kBF16, true);
  return cases;
}

int run_family(int argc, char** argv, const char* title, const RecurrenceShape& recurrence,
               const DeltaRuleShape& shape) {
  const BenchFamily family{"delta_rule_cpu_bench", title, recurrence, [&](std::int64_t tokens) {
                             return std::make_unique<DeltaOp>(shape, tokens);
                           }};
  return bench_main(argc, argv, family, [&](std::int64_t batch, const CpuContext& context) {
    return all_cases(family, shape, batch, context);
  });
}

}  // namespace

int main(int argc, char** argv) {
  // The family comes first; the rest is the harness's.
  const std::string family = argc > 1 ? argv[1] : "";
  if (family == "gated_delta_net") {
    return run_family(argc - 1, argv + 1, "gated_delta_net step, 16 heads of 128x128", kGated,
                      delta_rule(kGated));
  }
  if (family == "kimi_delta_attention") {
    return run_family(argc - 1, argv + 1, "kimi_delta_attention step, 16 heads of 128x128", kKimi,
                      delta_rule(kKimi));
  }
  fail("expected gated_delta_net or kimi_delta_attention as the first argument, found '" + family +
       "'");
}
