#include "replayssm/ops/mamba2.h"

#include "cpu/dispatch.h"
#include "ops/deferred_decay.h"
#include "ops/fold.h"
#include "ops/mamba2/cpu/kernel.h"
#include "ops/operands.h"
#include "ops/run_rows.h"
#include "state/pool_impl.h"

namespace replayssm {
namespace cpu {

const Mamba2Kernels& mamba2_kernels_generic(DType checkpoint, DType activation);
const Mamba2Kernels& mamba2_kernels_avx2(DType checkpoint, DType activation);
const Mamba2Kernels& mamba2_kernels_avx512(DType checkpoint, DType activation);

const Mamba2Kernels& mamba2_kernels(CpuIsa isa, DType checkpoint, DType activation) {
  return RSSM_DISPATCH_ISA(isa, mamba2_kernels, checkpoint, activation);
}

}  // namespace cpu

namespace {

using cpu::Mamba2Kernels;
using cpu::Mamba2Task;

Status check_parameters(const Mamba2Shape& shape, const Mamba2Params& params) {
  if (!params.d.empty()) RSSM_RETURN_IF_ERROR(check_vector("mamba2 D", params.d, shape.heads));
  if (!params.dt_bias.empty()) {
    RSSM_RETURN_IF_ERROR(check_vector("mamba2 dt_bias", params.dt_bias, shape.heads));
  }
  if (!(params.dt_min >= 0.0f && params.dt_min <= params.dt_max)) {
    return invalid_argument("mamba2 dt limits are ", params.dt_min, "..", params.dt_max,
                            ", expected 0 <= dt_min <= dt_max");
  }
  return {};
}

Status check_operands(const Mamba2Shape& shape, DType activation, const Mamba2Operands& o) {
  const std::int64_t tokens = o.x.rank > 0 ? o.x.shape[0] : 0;
  const std::int64_t heads = shape.heads;
  RSSM_RETURN_IF_ERROR(check_packed("mamba2 x", o.x, activation, {tokens, heads, shape.head_dim}));
  RSSM_RETURN_IF_ERROR(
      check_packed("mamba2 B", o.b, activation, {tokens, shape.groups, shape.state_size}));
  RSSM_RETURN_IF_ERROR(
      check_packed("mamba2 C", o.c, activation, {tokens, shape.groups, shape.state_size}));
  const DType dt_type = o.dt.dtype == DType::kF32 ? DType::kF32 : activation;
  RSSM_RETURN_IF_ERROR(check_packed("mamba2 dt", o.dt, dt_type, {tokens, heads}));
  if (!o.z.empty()) {
    RSSM_RETURN_IF_ERROR(
        check_packed("mamba2 z", o.z, activation, {tokens, heads, shape.head_dim}));
  }
  RSSM_RETURN_IF_ERROR(check_packed("mamba2 y", o.y, activation, {tokens, heads, shape.head_dim}));
  for (const TensorView& input : {o.x, o.b, o.c, o.dt, o.z}) {
    if (!input.empty() && input.data == o.y.data) {
      return invalid_argument("mamba2 y is the same memory as an input, expected its own");
    }
  }
  return {};
}

/// What every row of a layer shares.
Mamba2Task layer_task(const StatePool::Impl& pool, int layer, const Mamba2Shape& shape) {
  Mamba2Task task;
  task.head_dim = shape.head_dim;
  task.state_size = shape.state_size;
  task.a = pool.mamba2_a[static_cast<std::size_t>(layer)].data();
  return task;
}

void point_at_slot(Mamba2Task& task, StatePool::Impl& pool, int layer, std::int32_t slot,
                   const Cursor& cursor) {
  const PageLayout& layout = pool.layout(layer);
  std::byte* checkpoint = pool.field(layer, slot, layout.field("checkpoint"));
  const std::byte* checkpoint_in = cursor.checkpoint_position == 0 ? nullptr : checkpoint;
  task.checkpoint = checkpoint;
  task.checkpoint_in = checkpoint_in;
  point_at_deferred(task, layout, checkpoint_in, checkpoint);
  task.copy = pool.read_copy(layer, slot);
  task.ring_x = pool.field(layer, slot, layout.field("x"));
  task.ring_b = pool.field(layer, slot, layout.field("b"));
  task.ring_dt = reinterpret_cast<float*>(pool.field(layer, slot, layout.field("dt")));
  task.places = pool.options.limits.record_places();
  task.first_place = cursor.checkpoint_position % task.places;
  task.live = cursor.live();
}

void set_parameters(Mamba2Task& task, const Mamba2Params& params) {
  task.d = params.d.as<const float>();
  task.dt_bias = params.dt_bias.as<const float>();
  task.dt_softplus = params.dt_softplus;
  task.dt_min = params.dt_min;
  task.dt_max = params.dt_max;
}

void point_at_tokens(Mamba2Task& task, const StepRow& row, const Mamba2Operands& o) {
  task.tokens = row.token_count;
  task.x = at_token(o.x, row.token_begin);
  task.b = at_token(o.b, row.token_begin);
  task.c = at_token(o.c, row.token_begin);
  task.dt = at_token(o.dt, row.token_begin);
  task.dt_is_f32 = o.dt.dtype == DType::kF32;
  task.z = at_token(o.z, row.token_begin);
  task.y = at_token(o.y, row.token_begin);
  task.x_token_stride = o.x.strides[0];
  task.x_head_stride = o.x.strides[1];
  task.b_token_stride = o.b.strides[0];
  task.b_group_stride = o.b.strides[1];
  task.c_token_stride = o.c.strides[0];
  task.c_group_stride = o.c.strides[1];
  task.dt_token_stride = o.dt.strides[0];
  task.z_token_stride = o.z.strides[0];
  task.z_head_stride = o.z.strides[1];
  task.y_token_stride = o.y.strides[0];
  task.y_head_stride = o.y.strides[1];
}

void select(Mamba2Task& task, const WorkSplit::Item& item) {
  task.group = item.group;
  task.head_begin = item.head_begin;
  task.head_end = item.head_end;
  task.appends_b = item.first;
}

void count_traffic(StatePool::Impl& pool, int layer, const Mamba2Shape& shape, const Step& step) {
  const StatePoolOptions& options = pool.options;
  add_traffic(pool, layer, step, [&](const StepRow& row, const Cursor& cursor) {
    return mamba2_row_traffic(shape, options.checkpoint, options.activation, options.limits,
                              row.kind, cursor, row.token_count);
  });
}

std::string describe(const Mamba2Shape& shape, const StatePoolOptions& options, int layer) {
  std::ostringstream out;
  out << "mamba2 " << shape.heads << "x" << shape.head_dim << "x" << shape.state_size << ", "
      << shape.groups << " groups, checkpoint " << to_string(options.checkpoint) << ", activation "
      << to_string(options.activation) << ", exact flush"
      << explain_read_copy(options.layers[static_cast<std::size_t>(layer)]);
  return std::move(out).str();
}

}  // namespace

Status mamba2_step(const CpuContext& context, StatePool& pool, int layer, Step& step,
                   const Mamba2Params& params, const Mamba2Operands& operands) {
  StatePool::Impl& impl = pool.impl();
  const StatePoolOptions& options = impl.options;
  RSSM_RETURN_IF_ERROR(impl.enter(nullptr, step, layer, StatePool::Impl::kRecurrencePart,
                                  operands.x.rank > 0 ? operands.x.shape[0] : 0));
  RSSM_ASSIGN_OR_RETURN(const Mamba2Shape* found, impl.shape_of<Mamba2Shape>(layer, "mamba2"));
  const Mamba2Shape& shape = *found;
  RSSM_RETURN_IF_ERROR(check_parameters(shape, params));
  RSSM_RETURN_IF_ERROR(check_operands(shape, options.activation, operands));

  const Mamba2Kernels& kernels =
      cpu::mamba2_kernels(context.isa, options.checkpoint, options.activation);
  Mamba2Task base = layer_task(impl, layer, shape);
  set_parameters(base, params);
  const WorkSplit split(shape.groups, shape.heads / shape.groups,
                        static_cast<std::int64_t>(step.rows().size()), context.thread_count());
  run_rows(
      context, impl, step, split, kernels, operands.y,
      [&](const StepRow& row, const Cursor& cursor) {
        Mamba2Task task = base;
        point_at_slot(task, impl, layer, row.slot, cursor);
        point_at_tokens(task, row, operands);
        return task;
      },
      select);

  count_traffic(impl, layer, shape, step);
  StatePool::Impl::leave(step, layer, StatePool::Impl::kRecurrencePart);
  return {};
}

Status mamba2_step(const CudaContext& context, StatePool& pool, int layer, Step& step,
                   const Mamba2Params& params, const Mamba2Operands& operands) {
  StatePool::Impl& impl = pool.impl();
  RSSM_RETURN_IF_ERROR(impl.enter(&context, step, layer, StatePool::Impl::kRecurrencePart,
                                  operands.x.rank > 0 ? operands.x.shape[0] : 0));
  RSSM_ASSIGN_OR_RETURN(const Mamba2Shape* found, impl.shape_of<Mamba2Shape>(layer, "mamba2"));
  const Mamba2Shape& shape = *found;
  RSSM_RETURN_IF_ERROR(check_parameters(shape, params));
  RSSM_RETURN_IF_ERROR(check_operands(shape, impl.options.activation, operands));
  RSSM_RETURN_IF_ERROR(impl.select_rows(context, step));
  RSSM_RETURN_IF_ERROR(impl.gpu->mamba2_step(context.stream, layer, params, operands));
  if (!impl.cursors_on_device) count_traffic(impl, layer, shape, step);
  StatePool::Impl::leave(step, layer, StatePool::Impl::kRecurrencePart);
  return {};
}

Result<std::string> mamba2_explain(const CpuContext& context, const StatePool& pool, int layer) {
  const StatePool::Impl& impl = pool.impl();
  RSSM_RETURN_IF_ERROR(impl.check_device(nullptr));
  RSSM_ASSIGN_OR_RETURN(const Mamba2Shape* shape, impl.shape_of<Mamba2Shape>(layer, "mamba2"));
  std::ostringstream out;
  out << describe(*shape, impl.options, layer) << ": cpu " << to_string(context.isa) << ", "
      << context.thread_count() << " threads over (row, group)";
  return std::move(out).str();
}

Result<std::string> mamba2_explain(const CudaContext& context, const StatePool& pool, int layer,
                                   std::int64_t rows) {
  const StatePool::Impl& impl = pool.impl();
  RSSM_RETURN_IF_ERROR(impl.check_device(&context));
  RSSM_ASSIGN_OR_RETURN(const Mamba2Shape* shape, impl.shape_of<Mamba2Shape>(layer, "mamba2"));
  RSSM_ASSIGN_OR_RETURN(const std::string kernel, impl.gpu->explain(layer, rows));
  return describe(*shape, impl.options, layer) + ": " + to_string(impl.options.device) + " " +
         kernel;
}

StateTraffic mamba2_row_traffic(const Mamba2Shape& shape, DType checkpoint, DType activation,
                                ReplayLimits limits, RowKind kind, const Cursor& cursor,
                                std::int64_t token_count) {
  const auto state = shape.state_elements() * static_cast<std::int64_t>(size_of(checkpoint)) +
                     shape.heads * deferred_decay_count(checkpoint, shape.head_dim) *
                         static_cast<std::int64_t>(sizeof(float));
  const std::int64_t record = (shape.heads * shape.head_dim + shape.groups * shape.state_size) *
                                  static_cast<std::int64_t>(size_of(activation)) +
                              shape.heads * static_cast<std::int64_t>(sizeof(float));
  StateTraffic traffic;
  if (cursor.checkpoint_position > 0) traffic.checkpoint_read = state;
  if (row_flushes(kind, cursor, limits)) traffic.checkpoint_written = state;
  traffic.ring_read = cursor.live() * record;
  if (kind == RowKind::kTentative) traffic.ring_written = token_count * record;
  return traffic;
}

void fold_records(const CpuContext& context, const StatePool::Impl& pool, int layer,
                  const Mamba2Shape& shape, const FoldTask& fold) {
  Mamba2Task base = layer_task(pool, layer, shape);
  // Kernels write to the ring only where they append, which a fold does not.
  base.ring_x = fold.records.at("x");
  base.ring_b = fold.records.at("b");
  base.ring_dt = reinterpret_cast<float*>(fold.records.at("dt"));
  const Mamba2Kernels& kernels =
      cpu::mamba2_kernels(context.isa, pool.options.checkpoint, pool.options.activation);
  const WorkSplit split(shape.groups, shape.heads / shape.groups, 1, context.thread_count());
  run_fold(context, split, kernels, pool.layout(layer), fold, base, select);
}

}  // namespace replayssm
