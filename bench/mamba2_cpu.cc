// Mamba-2 step on the CPU against the memory bandwidth this program measures itself.
#include <cmath>
#include <initializer_list>

#include "harness.h"
#include "replayssm/ops/mamba2.h"

namespace {

using namespace replayssm;         // NOLINT(google-build-using-namespace): a program, not a library
using namespace replayssm::bench;  // NOLINT(google-build-using-namespace)

constexpr Mamba2Shape kShape{.heads = 64, .head_dim = 64, .state_size = 128, .groups = 8};

class Mamba2Op : public BenchOp {
 public:
  explicit Mamba2Op(std::int64_t tokens) {
    std::mt19937 random(7);
    x_ = uniform_values(random, tokens * kShape.heads * kShape.head_dim);
    b_ = uniform_values(random, tokens * kShape.groups * kShape.state_size);
    c_ = uniform_values(random, tokens * kShape.groups * kShape.state_size);
    dt_ = uniform_values(random, tokens * kShape.heads);
    d_ = uniform_values(random, kShape.heads);
    a_ = uniform_values(random, kShape.heads);
    for (float& a : a_) a = -0.1f - 0.1f * std::abs(a);
    y_.resize(x_.size());
  }

  void prepare(StatePool& pool, int layer) override { check(pool.set_mamba2_a(layer, a_)); }

  Status run(const CpuContext& context, StatePool& pool, int layer, Step& step,
             std::int64_t tokens) override {
    Mamba2Params params;
    params.d = TensorView::contiguous(d_.data(), DType::kF32, {kShape.heads});
    const auto f32 = [](auto& v, std::initializer_list<std::int64_t> shape) {
      return TensorView::contiguous(v.data(), DType::kF32, shape);
    };
    Mamba2Operands o;
    o.x = f32(x_, {tokens, kShape.heads, kShape.head_dim});
    o.b = f32(b_, {tokens, kShape.groups, kShape.state_size});
    o.c = f32(c_, {tokens, kShape.groups, kShape.state_size});
    o.dt = f32(dt_, {tokens, kShape.heads});
    o.y = f32(y_, {tokens, kShape.heads, kShape.head_dim});
    return mamba2_step(context, pool, layer, step, params, o);
  }

 private:
  std::vector<float> x_, b_, c_, dt_, d_, a_, y_;
};

std::vector<StepCaseOptions> all_cases() {
  std::vector<StepCaseOptions> cases;
  for (const DType checkpoint : {DType::kF32, DType::kBF16}) {
    const std::string type = to_string(checkpoint);
    cases.push_back({"plain " + type, RowKind::kCommitted, 1, checkpoint, kPlainLimits, true});
    cases.push_back(
        {"replay L=16 " + type, RowKind::kTentative, 1, checkpoint, kDecodeLimits, true});
    cases.push_back({"verify T=4 " + type + ", no flush", RowKind::kTentative, 4, checkpoint,
                     kVerifyLimits, false});
    cases.push_back(
        {"verify T=4 " + type, RowKind::kTentative, 4, checkpoint, kVerifyLimits, true});
  }
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const BenchFamily family{"mamba2_cpu_bench", "mamba2 step, 64 heads of 64x128, 8 groups", kShape,
                           [](std::int64_t tokens) { return std::make_unique<Mamba2Op>(tokens); }};
  return bench_main(argc, argv, family, [&](std::int64_t batch, const CpuContext& context) {
    std::vector<std::unique_ptr<BenchCase>> cases;
    for (const StepCaseOptions& options : all_cases()) {
      cases.push_back(make_step_case(family, options, batch, context));
    }
    return cases;
  });
}
