#include "state/cuda/layer_kernels.h"

#include <cstring>

#include "ops/delta_rule/cuda/launch.h"
#include "ops/mamba2/cuda/launch.h"

namespace replayssm::cuda {
namespace {

Mamba2CudaParams params_of(const Mamba2Shape& shape) {
  Mamba2CudaParams p;
  p.heads = shape.heads;
  p.head_dim = shape.head_dim;
  p.state_size = shape.state_size;
  p.groups = shape.groups;
  return p;
}
template <typename Shape>
DeltaRuleCudaParams params_of(const Shape& shape) {
  DeltaRuleCudaParams p;
  p.shape = delta_rule(shape);
  return p;
}

// One spelling for every family.
Status check_support(const Mamba2CudaParams& p) { return check_mamba2_support(p); }
Status check_support(const DeltaRuleCudaParams& p) { return check_delta_rule_support(p); }
auto choose_config(const Mamba2CudaParams& p, const CudaDeviceInfo& device) {
  return choose_mamba2_config(p, device);
}
auto choose_config(const DeltaRuleCudaParams& p, const CudaDeviceInfo& device) {
  return choose_delta_rule_config(p, device);
}
Status launch(const Mamba2CudaParams& p, const CudaDeviceInfo& device, cudaStream_t stream) {
  return mamba2_cuda_step(p, device, stream);
}
Status launch(const DeltaRuleCudaParams& p, const CudaDeviceInfo& device, cudaStream_t stream) {
  return delta_rule_cuda_step(p, device, stream);
}

void** address_of(float*& pointer) { return reinterpret_cast<void**>(&pointer); }

}  // namespace

LayerKernels::LayerKernels(const LayerSpec& spec, const StatePoolOptions& options) {
  std::visit([&](const auto& s) { params_ = params_of(s); }, spec.recurrence);
  std::visit(
      [&](auto& p) {
        p.limits = options.limits;
        p.checkpoint = options.checkpoint;
        p.activation = options.activation;
        p.copy.format = spec.read_copy;
      },
      params_);
  if (auto* p = std::get_if<DeltaRuleCudaParams>(&params_)) {
    p->fast_flush = spec.flush.value_or(options.flush) == FlushMode::kFast;
  }
}

LayerKernels::Rings LayerKernels::rings() {
  if (auto* p = std::get_if<Mamba2CudaParams>(&params_)) {
    return {{{{"x", &p->ring_x, &p->ring_x_slot_stride, &p->ring_x_head_stride,
               &p->ring_x_place_stride},
              {"b", &p->ring_b, &p->ring_b_slot_stride, &p->ring_b_group_stride,
               &p->ring_b_place_stride},
              {"dt", address_of(p->ring_dt), &p->ring_dt_slot_stride, &p->ring_dt_head_stride,
               nullptr}}},
            3};
  }
  auto& p = std::get<DeltaRuleCudaParams>(params_);
  // Fast flushes have no use for the last two.
  return {{{{"k", &p.ring_k, &p.ring_k_slot_stride, &p.ring_k_head_stride, nullptr},
            {"k_scale", address_of(p.ring_k_scale), &p.ring_k_scale_slot_stride,
             &p.ring_k_scale_head_stride, nullptr},
            {"decay", address_of(p.ring_decay), &p.ring_decay_slot_stride,
             &p.ring_decay_head_stride, nullptr},
            {"delta", &p.ring_delta, &p.ring_delta_slot_stride, &p.ring_delta_head_stride, nullptr},
            {"v", &p.ring_v, &p.ring_v_slot_stride, &p.ring_v_head_stride, nullptr},
            {"beta", address_of(p.ring_beta), &p.ring_beta_slot_stride, &p.ring_beta_head_stride,
             nullptr}}},
          p.fast_flush ? 4u : 6u};
}

void LayerKernels::point_at_pages(const PageLayout& layout, std::byte* page,
                                  std::size_t page_stride) {
  const auto stride = [&](const Field& f) {
    return static_cast<std::int64_t>(page_stride / size_of(f.dtype));
  };
  const Field& state = layout.field("checkpoint");
  std::visit(
      [&](auto& p) {
        p.state = page + state.offset;
        p.state_slot_stride = stride(state);
        p.state_head_stride = state.inner;
        if (const std::size_t offset = layout.deferred_decay_offset(); offset > 0) {
          p.deferred = reinterpret_cast<float*>(page + state.offset + offset);
          p.deferred_slot_stride = static_cast<std::int64_t>(page_stride / sizeof(float));
        }
        if (p.copy.format == ReadCopyFormat::kNone) return;
        const ReadCopy copy = layout.read_copy_in(page);
        p.copy.codes = copy.codes;
        p.copy.block_scales = copy.block_scales;
        p.copy.scales = copy.scales;
        p.copy.slot_stride = static_cast<std::int64_t>(page_stride);
      },
      params_);
  const Rings all = rings();
  for (std::size_t i = 0; i < all.count; ++i) {
    const Field& field = layout.field(all.ring[i].name);
    point_at_ring(field, page + field.offset, field.places);
    *all.ring[i].slot_stride = stride(field);
  }
}

void LayerKernels::point_at_ring(const Field& field, void* ring, std::int64_t places) {
  const Rings all = rings();
  for (std::size_t i = 0; i < all.count; ++i) {
    const Ring& to = all.ring[i];
    if (std::strcmp(to.name, field.name) != 0) continue;
    *to.data = ring;
    *to.outer_stride = places * field.inner;
    if (to.place_stride != nullptr) *to.place_stride = field.inner;
  }
}

void LayerKernels::set_limits(ReplayLimits limits) {
  std::visit([&](auto& p) { p.limits = limits; }, params_);
}
void LayerKernels::set_rows(const PlannedRow* rows, std::int64_t row_count, bool plain) {
  std::visit(
      [&](auto& p) {
        p.rows = rows;
        p.row_count = row_count;
        p.plain = plain;
      },
      params_);
}
void LayerKernels::set_mamba2_a(const float* a) {
  if (auto* p = std::get_if<Mamba2CudaParams>(&params_)) p->a = a;
}

FlushPlaces LayerKernels::flush_places(const CudaDeviceInfo& device) const {
  if (const auto* p = std::get_if<Mamba2CudaParams>(&params_)) {
    return mamba2_flush_places(*p, device);
  }
  return delta_rule_flush_places(std::get<DeltaRuleCudaParams>(params_), device);
}

Status LayerKernels::check(const CudaDeviceInfo& device) const {
  return std::visit(
      [&](auto p) -> Status {
        RSSM_RETURN_IF_ERROR(check_support(p));
        p.row_count = 1;
        return choose_config(p, device).status();
      },
      params_);
}

Status LayerKernels::run(const CudaDeviceInfo& device, cudaStream_t stream) const {
  return std::visit([&](const auto& p) { return launch(p, device, stream); }, params_);
}

Result<std::string> LayerKernels::explain(const CudaDeviceInfo& device) const {
  return std::visit(
      [&](const auto& p) -> Result<std::string> {
        RSSM_ASSIGN_OR_RETURN(const auto config, choose_config(p, device));
        auto plain = p;
        plain.plain = true;
        RSSM_ASSIGN_OR_RETURN(const auto plain_config, choose_config(plain, device));
        std::string out =
            "sm_" + std::to_string(device.compute_capability) + ", " + config.to_string();
        if (plain_config.variant != config.variant) {
          out += "; plain decoding, where the host knows the rows: " + plain_config.to_string();
        }
        return out;
      },
      params_);
}

}  // namespace replayssm::cuda
