#include "replayssm/ops/causal_conv1d.h"

#include <algorithm>
#include <cstring>

#include "cpu/dispatch.h"
#include "ops/causal_conv1d/cpu/kernel.h"
#include "ops/operands.h"
#include "state/pool_impl.h"

namespace replayssm {
namespace cpu {

CausalConv1dFunction causal_conv1d_kernel_generic(DType activation);
CausalConv1dFunction causal_conv1d_kernel_avx2(DType activation);
CausalConv1dFunction causal_conv1d_kernel_avx512(DType activation);

CausalConv1dFunction causal_conv1d_kernel(CpuIsa isa, DType activation) {
  return RSSM_DISPATCH_ISA(isa, causal_conv1d_kernel, activation);
}

}  // namespace cpu

namespace {

/// Channels per work item: a multiple of every vector length, enough to pay for a hand-over.
constexpr std::int64_t kChannelBlock = 512;

Status check_operands(const ConvShape& conv, DType activation, const CausalConv1dOperands& o) {
  const std::int64_t tokens = o.u.rank > 0 ? o.u.shape[0] : 0;
  RSSM_RETURN_IF_ERROR(check_packed("convolution u", o.u, activation, {tokens, conv.channels}));
  RSSM_RETURN_IF_ERROR(check_packed("convolution out", o.out, activation, {tokens, conv.channels}));
  RSSM_RETURN_IF_ERROR(
      check_packed("convolution weight", o.weight, DType::kF32, {conv.width, conv.channels}));
  if (o.weight.strides[0] != conv.channels) {
    return invalid_argument("convolution weight has row stride ", o.weight.strides[0],
                            ", expected ", conv.channels, " (contiguous)");
  }
  if (!o.bias.empty()) {
    RSSM_RETURN_IF_ERROR(check_vector("convolution bias", o.bias, conv.channels));
  }
  if (!o.u.empty() && o.u.data == o.out.data) {
    return invalid_argument("convolution out is the same memory as u, expected its own");
  }
  return {};
}

}  // namespace

Status causal_conv1d_step(const CpuContext& context, StatePool& pool, int layer, Step& step,
                          const CausalConv1dOperands& operands) {
  StatePool::Impl& impl = pool.impl();
  const StatePoolOptions& options = impl.options;
  RSSM_RETURN_IF_ERROR(impl.enter(nullptr, step, layer, StatePool::Impl::kConvPart,
                                  operands.u.rank > 0 ? operands.u.shape[0] : 0));
  const ConvShape& conv = options.layers[static_cast<std::size_t>(layer)].conv;
  RSSM_RETURN_IF_ERROR(check_operands(conv, options.activation, operands));

  const cpu::CausalConv1dFunction kernel =
      cpu::causal_conv1d_kernel(context.isa, options.activation);
  const Field& ring = impl.layout(layer).field("conv");
  const std::vector<StepRow>& rows = step.rows();
  const std::int64_t blocks = (conv.channels + kChannelBlock - 1) / kChannelBlock;
  context.parallel_for(static_cast<std::int64_t>(rows.size()) * blocks, [&](std::int64_t item,
                                                                            int) {
    const StepRow& row = rows[static_cast<std::size_t>(item / blocks)];
    cpu::CausalConv1dTask task;
    task.channels = conv.channels;
    task.channel_begin = item % blocks * kChannelBlock;
    task.channel_end = std::min(conv.channels, task.channel_begin + kChannelBlock);
    task.tokens = row.token_count;
    task.u = at_token(operands.u, row.token_begin);
    task.out = at_token(operands.out, row.token_begin);
    task.u_token_stride = operands.u.strides[0];
    task.out_token_stride = operands.out.strides[0];
    if (row.slot < 0) {
      const std::size_t element = size_of(options.activation);
      for (std::int64_t t = 0; t < task.tokens; ++t) {
        std::memset(
            static_cast<std::byte*>(task.out) +
                static_cast<std::size_t>(t * task.out_token_stride + task.channel_begin) * element,
            0, static_cast<std::size_t>(task.channel_end - task.channel_begin) * element);
      }
      return;
    }
    task.width = conv.width;
    task.weight = operands.weight.as<const float>();
    task.bias = operands.bias.as<const float>();
    task.silu = operands.silu;
    task.ring = impl.field(layer, row.slot, ring);
    task.places = ring.places;
    task.position = impl.slots[static_cast<std::size_t>(row.slot)].cursor.position;
    kernel(task);
  });
  StatePool::Impl::leave(step, layer, StatePool::Impl::kConvPart);
  return {};
}

Status causal_conv1d_step(const CudaContext& context, StatePool& pool, int layer, Step& step,
                          const CausalConv1dOperands& operands) {
  StatePool::Impl& impl = pool.impl();
  RSSM_RETURN_IF_ERROR(impl.enter(&context, step, layer, StatePool::Impl::kConvPart,
                                  operands.u.rank > 0 ? operands.u.shape[0] : 0));
  const ConvShape& conv = impl.options.layers[static_cast<std::size_t>(layer)].conv;
  RSSM_RETURN_IF_ERROR(check_operands(conv, impl.options.activation, operands));
  RSSM_RETURN_IF_ERROR(impl.select_rows(context, step));
  RSSM_RETURN_IF_ERROR(impl.gpu->causal_conv1d_step(context.stream, layer, operands));
  StatePool::Impl::leave(step, layer, StatePool::Impl::kConvPart);
  return {};
}

}  // namespace replayssm
