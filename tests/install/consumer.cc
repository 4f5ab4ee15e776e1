// Ten tokens of one Mamba-2 layer by replay, through the installed library alone.
#include <cstdio>
#include <vector>

#include "replayssm/cpu.h"
#include "replayssm/ops/mamba2.h"
#include "replayssm/state_pool.h"

using namespace replayssm;

namespace {

constexpr Mamba2Shape kShape{.heads = 2, .head_dim = 8, .state_size = 16, .groups = 1};

Status decode(StatePool& pool) {
  const std::vector<float> a(2, -0.5f);
  RSSM_RETURN_IF_ERROR(pool.set_mamba2_a(0, a));
  RSSM_ASSIGN_OR_RETURN(const std::int32_t slot, pool.acquire());
  std::vector<float> x(16, 0.5f), b(16, 0.25f), c(16, 0.125f), dt(2, 0.0f), y(16);
  RSSM_ASSIGN_OR_RETURN(const CpuIsa isa, select_isa());
  for (int token = 0; token < 10; ++token) {
    const StepRow row{
        .slot = slot, .kind = RowKind::kTentative, .token_begin = 0, .token_count = 1};
    RSSM_ASSIGN_OR_RETURN(Step step, pool.begin_step(std::span(&row, 1)));
    Mamba2Operands operands;
    operands.x = TensorView::contiguous(x.data(), DType::kF32, {1, 2, 8});
    operands.b = TensorView::contiguous(b.data(), DType::kF32, {1, 1, 16});
    operands.c = TensorView::contiguous(c.data(), DType::kF32, {1, 1, 16});
    operands.dt = TensorView::contiguous(dt.data(), DType::kF32, {1, 2});
    operands.y = TensorView::contiguous(y.data(), DType::kF32, {1, 2, 8});
    RSSM_RETURN_IF_ERROR(
        mamba2_step({.threads = nullptr, .isa = isa}, pool, 0, step, {}, operands));
    const std::int64_t accepted = 1;
    RSSM_RETURN_IF_ERROR(pool.commit(step, std::span(&accepted, 1)));
  }
  std::printf("consumer: y[0] = %.6f after 10 tokens\n", static_cast<double>(y[0]));
  return {};
}

}  // namespace

int main() {
  StatePoolOptions options;
  options.layers = {LayerSpec{.recurrence = kShape, .conv = {}}};
  options.slots = 1;
  options.limits = {.window = 4, .draft_capacity = 1};
  auto pool = StatePool::create(options);
  const Status status = pool.ok() ? decode(*pool) : pool.status();
  if (!status.ok()) std::fprintf(stderr, "consumer: %s\n", status.message().c_str());
  return status.ok() ? 0 : 1;
}
