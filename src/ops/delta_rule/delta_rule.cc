#include "ops/delta_rule/delta_rule.h"

#include <cmath>
#include <sstream>

#include "cpu/dispatch.h"
#include "ops/deferred_decay.h"
#include "ops/delta_rule/cpu/kernel.h"
#include "ops/operands.h"
#include "ops/run_rows.h"
#include "state/pool_impl.h"

namespace replayssm {
namespace cpu {

const DeltaRuleKernels& delta_rule_kernels_generic(DType checkpoint, bool channel_decay);
const DeltaRuleKernels& delta_rule_kernels_avx2(DType checkpoint, bool channel_decay);
const DeltaRuleKernels& delta_rule_kernels_avx512(DType checkpoint, bool channel_decay);

const DeltaRuleKernels& delta_rule_kernels(CpuIsa isa, DType checkpoint, bool channel_decay) {
  return RSSM_DISPATCH_ISA(isa, delta_rule_kernels, checkpoint, channel_decay);
}

}  // namespace cpu

namespace {

using cpu::DeltaRuleKernels;
using cpu::DeltaRuleTask;

std::string named(const char* family, const char* what) { return std::string(family) + " " + what; }

Status check_parameters(const DeltaRuleShape& shape, const DeltaRuleParams& p) {
  if (!p.a_log.empty() || !p.lower_bound) {
    RSSM_RETURN_IF_ERROR(
        check_vector(named(p.family, "A_log").c_str(), p.a_log, shape.value_heads));
  }
  if (!p.dt_bias.empty()) {
    const std::string name = named(p.family, "dt_bias");
    RSSM_RETURN_IF_ERROR(
        shape.channel_decay
            ? check_packed(name.c_str(), p.dt_bias, DType::kF32, {shape.value_heads, shape.key_dim})
            : check_vector(name.c_str(), p.dt_bias, shape.value_heads));
    if (shape.channel_decay && p.dt_bias.strides[0] != shape.key_dim) {
      return invalid_argument(name, " has stride ", p.dt_bias.strides[0],
                              " on axis 0, expected key_dim ", shape.key_dim, " (contiguous)");
    }
  }
  if (p.lower_bound && !(*p.lower_bound < 0.0f && std::isfinite(*p.lower_bound))) {
    return invalid_argument(p.family, " lower_bound is ", *p.lower_bound,
                            ", expected a finite number below 0");
  }
  if (!(p.norm_epsilon >= 0.0f && std::isfinite(p.norm_epsilon))) {
    return invalid_argument(p.family, " norm_epsilon is ", p.norm_epsilon,
                            ", expected a finite number of at least 0");
  }
  if (p.scale && !std::isfinite(*p.scale)) {
    return invalid_argument(p.family, " scale is ", *p.scale, ", expected a finite number");
  }
  return {};
}

Status check_operands(const DeltaRuleShape& shape, const char* family, DType activation,
                      const DeltaRuleOperands& o) {
  const std::int64_t tokens = o.q.rank > 0 ? o.q.shape[0] : 0;
  const auto check = [&](const char* name, const TensorView& view, DType dtype,
                         std::initializer_list<std::int64_t> expected) {
    return check_packed(named(family, name).c_str(), view, dtype, expected);
  };
  const auto gate_type = [&](const TensorView& view) {
    return view.dtype == DType::kF32 ? DType::kF32 : activation;
  };
  RSSM_RETURN_IF_ERROR(check("q", o.q, activation, {tokens, shape.key_heads, shape.key_dim}));
  RSSM_RETURN_IF_ERROR(check("k", o.k, activation, {tokens, shape.key_heads, shape.key_dim}));
  RSSM_RETURN_IF_ERROR(check("v", o.v, activation, {tokens, shape.value_heads, shape.value_dim}));
  if (shape.channel_decay) {
    RSSM_RETURN_IF_ERROR(
        check("a", o.gate, gate_type(o.gate), {tokens, shape.value_heads, shape.key_dim}));
  } else {
    RSSM_RETURN_IF_ERROR(check("a", o.gate, gate_type(o.gate), {tokens, shape.value_heads}));
  }
  RSSM_RETURN_IF_ERROR(check("b", o.beta, gate_type(o.beta), {tokens, shape.value_heads}));
  RSSM_RETURN_IF_ERROR(check("o", o.o, activation, {tokens, shape.value_heads, shape.value_dim}));
  for (const TensorView& input : {o.q, o.k, o.v, o.gate, o.beta}) {
    if (!input.empty() && input.data == o.o.data) {
      return invalid_argument(family, " o is the same memory as an input, expected its own");
    }
  }
  return {};
}

DeltaRuleTask layer_task(const DeltaRuleShape& shape, const StatePoolOptions& options, int layer) {
  DeltaRuleTask task;
  task.flush = options.flush_mode(layer);
  task.activation = options.activation;
  task.key_dim = shape.key_dim;
  task.value_dim = shape.value_dim;
  return task;
}

/// `field` gives the address of a record field by name.
template <typename F>
void point_at_records(DeltaRuleTask& task, F field) {
  task.ring_k = field("k");
  task.ring_k_scale = reinterpret_cast<float*>(field("k_scale"));
  task.ring_decay = reinterpret_cast<float*>(field("decay"));
  task.ring_delta = field("delta");
  if (task.flush == FlushMode::kExact) {
    task.ring_v = field("v");
    task.ring_beta = reinterpret_cast<float*>(field("beta"));
  }
}

/// Points at slot 0's page. Fields are found by name, which is done once for all slots.
void point_at_first_slot(DeltaRuleTask& task, StatePool::Impl& pool, int layer) {
  const PageLayout& layout = pool.layout(layer);
  const auto field = [&](const char* name) { return pool.field(layer, 0, layout.field(name)); };
  std::byte* checkpoint = field("checkpoint");
  task.checkpoint = checkpoint;
  point_at_deferred(task, layout, nullptr, checkpoint);
  point_at_records(task, field);
  task.places = pool.options.limits.record_places();
}

/// From slot 0's page to that of `slot`.
void point_at_slot(DeltaRuleTask& task, StatePool::Impl& pool, int layer, std::int32_t slot,
                   const Cursor& cursor) {
  const std::size_t bytes =
      static_cast<std::size_t>(slot) * pool.stride[static_cast<std::size_t>(layer)];
  const auto move = [bytes]<typename T>(T*& field) {
    if (field != nullptr) {
      field = reinterpret_cast<T*>(reinterpret_cast<std::byte*>(field) + bytes);
    }
  };
  move(task.checkpoint);
  move(task.deferred);
  move(task.ring_k);
  move(task.ring_k_scale);
  move(task.ring_v);
  move(task.ring_decay);
  move(task.ring_beta);
  move(task.ring_delta);
  const bool zero = cursor.checkpoint_position == 0;
  task.checkpoint_in = zero ? nullptr : task.checkpoint;
  task.deferred_in = zero ? nullptr : task.deferred;
  task.copy = pool.read_copy(layer, slot);
  task.first_place = cursor.checkpoint_position % task.places;
  task.live = cursor.live();
}

void set_parameters(DeltaRuleTask& task, const DeltaRuleParams& params) {
  task.a_log = params.a_log.as<const float>();
  task.dt_bias = params.dt_bias.as<const float>();
  task.bounded = params.lower_bound.has_value();
  task.lower_bound = params.lower_bound.value_or(0.0f);
  task.beta_doubled = params.beta_doubled;
  task.normalize = params.normalize;
  task.norm_epsilon = params.norm_epsilon;
  task.q_scale = params.q_scale(task.key_dim);
}

void point_at_tokens(DeltaRuleTask& task, const StepRow& row, const DeltaRuleOperands& o) {
  task.tokens = row.token_count;
  task.q = at_token(o.q, row.token_begin);
  task.k = at_token(o.k, row.token_begin);
  task.v = at_token(o.v, row.token_begin);
  task.gate = at_token(o.gate, row.token_begin);
  task.beta = at_token(o.beta, row.token_begin);
  task.o = at_token(o.o, row.token_begin);
  task.gate_type = o.gate.dtype;
  task.beta_type = o.beta.dtype;
  task.q_token_stride = o.q.strides[0];
  task.q_head_stride = o.q.strides[1];
  task.k_token_stride = o.k.strides[0];
  task.k_head_stride = o.k.strides[1];
  task.v_token_stride = o.v.strides[0];
  task.v_head_stride = o.v.strides[1];
  task.gate_token_stride = o.gate.strides[0];
  task.gate_head_stride = o.gate.rank == 3 ? o.gate.strides[1] : 1;
  task.beta_token_stride = o.beta.strides[0];
  task.o_token_stride = o.o.strides[0];
  task.o_head_stride = o.o.strides[1];
}

void select(DeltaRuleTask& task, const WorkSplit::Item& item) {
  task.key_head = item.group;
  task.head_begin = item.head_begin;
  task.head_end = item.head_end;
  task.appends_key = item.first;
}

void count_traffic(StatePool::Impl& pool, int layer, const DeltaRuleShape& shape,
                   const Step& step) {
  const StatePoolOptions& options = pool.options;
  add_traffic(pool, layer, step, [&](const StepRow& row, const Cursor& cursor) {
    return delta_rule_row_traffic(shape, options.checkpoint, options.activation, options.limits,
                                  row.kind, cursor, row.token_count, options.flush_mode(layer));
  });
}

std::string describe(const char* family, const DeltaRuleShape& shape,
                     const StatePoolOptions& options, int layer) {
  std::ostringstream out;
  out << family << " " << shape.value_heads << "x" << shape.key_dim << "x" << shape.value_dim
      << ", " << shape.key_heads << " key heads, checkpoint " << to_string(options.checkpoint)
      << ", activation " << to_string(options.activation)
      << (options.flush_mode(layer) == FlushMode::kFast
              ? ", fast flush (one product of recorded deltas)"
              : ", exact flush (recurrence re-run from recorded k, v and gates)")
      << ", outputs from recorded deltas with "
      << (shape.channel_decay ? "running products of decays per channel (no pre-decayed keys, so "
                                "no bound on the gate is needed)"
                              : "running products of decays")
      << explain_read_copy(options.layers[static_cast<std::size_t>(layer)]);
  return std::move(out).str();
}

}  // namespace

Status delta_rule_step(const CpuContext& context, StatePool& pool, int layer, Step& step,
                       const DeltaRuleShape& shape, const DeltaRuleParams& params,
                       const DeltaRuleOperands& operands) {
  StatePool::Impl& impl = pool.impl();
  const StatePoolOptions& options = impl.options;
  RSSM_RETURN_IF_ERROR(impl.enter(nullptr, step, layer, StatePool::Impl::kRecurrencePart,
                                  operands.q.rank > 0 ? operands.q.shape[0] : 0));
  RSSM_RETURN_IF_ERROR(check_parameters(shape, params));
  RSSM_RETURN_IF_ERROR(check_operands(shape, params.family, options.activation, operands));

  const DeltaRuleKernels& kernels =
      cpu::delta_rule_kernels(context.isa, options.checkpoint, shape.channel_decay);
  DeltaRuleTask base = layer_task(shape, options, layer);
  set_parameters(base, params);
  point_at_first_slot(base, impl, layer);
  const WorkSplit split(shape.key_heads, shape.heads_per_key(),
                        static_cast<std::int64_t>(step.rows().size()), context.thread_count());
  run_rows(
      context, impl, step, split, kernels, operands.o,
      [&](const StepRow& row, const Cursor& cursor) {
        DeltaRuleTask task = base;
        point_at_slot(task, impl, layer, row.slot, cursor);
        point_at_tokens(task, row, operands);
        return task;
      },
      select);

  count_traffic(impl, layer, shape, step);
  StatePool::Impl::leave(step, layer, StatePool::Impl::kRecurrencePart);
  return {};
}

Status delta_rule_step(const CudaContext& context, StatePool& pool, int layer, Step& step,
                       const DeltaRuleShape& shape, const DeltaRuleParams& params,
                       const DeltaRuleOperands& operands) {
  StatePool::Impl& impl = pool.impl();
  RSSM_RETURN_IF_ERROR(impl.enter(&context, step, layer, StatePool::Impl::kRecurrencePart,
                                  operands.q.rank > 0 ? operands.q.shape[0] : 0));
  RSSM_RETURN_IF_ERROR(check_parameters(shape, params));
  RSSM_RETURN_IF_ERROR(check_operands(shape, params.family, impl.options.activation, operands));
  RSSM_RETURN_IF_ERROR(impl.select_rows(context, step));
  RSSM_RETURN_IF_ERROR(impl.gpu->delta_rule_step(context.stream, layer, params, operands));
  if (!impl.cursors_on_device) count_traffic(impl, layer, shape, step);
  StatePool::Impl::leave(step, layer, StatePool::Impl::kRecurrencePart);
  return {};
}

std::string delta_rule_explain(const CpuContext& context, const StatePoolOptions& options,
                               int layer, const char* family, const DeltaRuleShape& shape) {
  std::ostringstream out;
  out << describe(family, shape, options, layer) << ": cpu " << to_string(context.isa) << ", "
      << context.thread_count() << " threads over (row, key head)";
  return std::move(out).str();
}

Result<std::string> delta_rule_explain(const CudaContext& context, const StatePool& pool, int layer,
                                       const char* family, const DeltaRuleShape& shape,
                                       std::int64_t rows) {
  const StatePool::Impl& impl = pool.impl();
  RSSM_RETURN_IF_ERROR(impl.check_device(&context));
  RSSM_ASSIGN_OR_RETURN(const std::string kernel, impl.gpu->explain(layer, rows));
  return describe(family, shape, impl.options, layer) + ": " + to_string(impl.options.device) +
         " " + kernel;
}

StateTraffic delta_rule_row_traffic(const DeltaRuleShape& shape, DType checkpoint, DType activation,
                                    ReplayLimits limits, RowKind kind, const Cursor& cursor,
                                    std::int64_t token_count, FlushMode flush) {
  const auto act = static_cast<std::int64_t>(size_of(activation));
  constexpr auto kF32 = static_cast<std::int64_t>(sizeof(float));
  const std::int64_t deferred =
      shape.channel_decay ? 0 : deferred_decay_count(checkpoint, shape.value_dim);
  const std::int64_t state =
      shape.state_elements() * static_cast<std::int64_t>(size_of(checkpoint)) +
      shape.value_heads * deferred * kF32;
  const std::int64_t keys = shape.key_heads * (shape.key_dim * act + kF32);
  const std::int64_t decays = shape.value_heads * shape.decays() * kF32;
  const std::int64_t betas = shape.value_heads * kF32;
  const std::int64_t values = shape.value_heads * shape.value_dim * act;  // or deltas
  const bool folds = row_flushes(kind, cursor, limits);
  const bool exact = flush == FlushMode::kExact;
  StateTraffic traffic;
  if (cursor.checkpoint_position > 0) traffic.checkpoint_read = state;
  if (folds) traffic.checkpoint_written = state;
  // An exact fold reads values and betas; a fast one, like outputs, reads deltas.
  traffic.ring_read = cursor.live() * (keys + decays + values + (folds && exact ? betas : 0));
  if (kind == RowKind::kTentative) {
    traffic.ring_written = token_count * (keys + decays + values + (exact ? values + betas : 0));
  }
  return traffic;
}

void delta_rule_fold(const CpuContext& context, const StatePool::Impl& pool, int layer,
                     const DeltaRuleShape& shape, const FoldTask& fold) {
  const StatePoolOptions& options = pool.options;
  DeltaRuleTask base = layer_task(shape, options, layer);
  // Kernels write to the ring only where they append, which a fold does not.
  point_at_records(base, [&](const char* name) { return fold.records.at(name); });
  const DeltaRuleKernels& kernels =
      cpu::delta_rule_kernels(context.isa, options.checkpoint, shape.channel_decay);
  const WorkSplit split(shape.key_heads, shape.heads_per_key(), 1, context.thread_count());
  run_fold(context, split, kernels, pool.layout(layer), fold, base, select);
}

}  // namespace replayssm
