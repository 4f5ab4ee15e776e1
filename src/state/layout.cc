#include "state/layout.h"

#include <cstring>

#include "state/device_pool.h"

namespace replayssm {
namespace {

constexpr std::size_t kFieldAlignment = 64;

std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

Status check_mamba2(int layer, const Mamba2Shape& shape) {
  const auto refuse = [&](const char* what, std::int64_t found, const char* expected) {
    return invalid_argument("layer ", layer, ": mamba2 ", what, " is ", found, ", expected ",
                            expected);
  };
  if (shape.heads < 1 || shape.heads > 65536) return refuse("heads", shape.heads, "1..65536");
  if (shape.head_dim < 8 || shape.head_dim > 256 || shape.head_dim % 8 != 0) {
    return refuse("head_dim", shape.head_dim, "a multiple of 8 in 8..256");
  }
  if (shape.state_size < 16 || shape.state_size > 256 || shape.state_size % 16 != 0) {
    return refuse("state_size", shape.state_size, "a multiple of 16 in 16..256");
  }
  if (shape.groups < 1 || shape.heads % shape.groups != 0) {
    return invalid_argument("layer ", layer, ": mamba2 groups is ", shape.groups,
                            ", expected a divisor of heads ", shape.heads);
  }
  return {};
}

Status check_conv(int layer, const ConvShape& conv) {
  if (conv.width == 0 && conv.channels == 0) return {};
  if (conv.width < 2 || conv.width > 8) {
    return invalid_argument("layer ", layer, ": convolution width is ", conv.width,
                            ", expected 2..8 (or no convolution: width 0, channels 0)");
  }
  if (conv.channels < 1 || conv.channels > (std::int64_t{1} << 24)) {
    return invalid_argument("layer ", layer, ": convolution channels is ", conv.channels,
                            ", expected 1..16777216");
  }
  return {};
}

Status check_limits(const StatePoolOptions& options) {
  const auto [window, draft] = options.limits;
  if (draft < 1 || window < draft || window > ReplayLimits::kMaxWindow ||
      draft > ReplayLimits::kMaxDraftCapacity) {
    return invalid_argument("window L = ", window, " and draft capacity T = ", draft,
                            " cannot work together: expected 1 <= T <= L, T <= ",
                            ReplayLimits::kMaxDraftCapacity, ", L <= ", ReplayLimits::kMaxWindow);
  }
  return {};
}

Status check_options(const StatePoolOptions& options) {
  if (!has_kernels_for(options.device.kind)) {
    return unsupported("device is ", to_string(options.device), ", this build has: cpu");
  }
  if (options.layers.empty()) return invalid_argument("layers is empty, expected at least 1");
  RSSM_RETURN_IF_ERROR(check_limits(options));
  for (const auto& [what, dtype] :
       {std::pair{"checkpoint", options.checkpoint}, std::pair{"activation", options.activation}}) {
    if (dtype != DType::kF32 && dtype != DType::kBF16) {
      return unsupported(what, " type is ", to_string(dtype), ", supported: f32, bf16");
    }
  }
  const std::size_t alignment = options.page_alignment;
  if (alignment < kFieldAlignment || alignment % kFieldAlignment != 0) {
    return invalid_argument("page_alignment is ", alignment, ", expected a multiple of ",
                            kFieldAlignment);
  }
  return {};
}

void add_field(PageLayout& layout, Field field) {
  field.offset = round_up(layout.bytes, kFieldAlignment);
  layout.bytes = field.offset + field.bytes();
  layout.fields.push_back(field);
}

void add_recurrence(PageLayout& layout, const Mamba2Shape& shape, const StatePoolOptions& options) {
  const std::int64_t places = options.limits.record_places();
  add_field(layout, {.name = "checkpoint",
                     .kind = FieldKind::kCheckpoint,
                     .dtype = options.checkpoint,
                     .outer = shape.heads,
                     .inner = shape.head_dim * shape.state_size});
  add_field(layout, {.name = "x",
                     .kind = FieldKind::kRecord,
                     .dtype = options.activation,
                     .outer = shape.heads,
                     .places = places,
                     .inner = shape.head_dim});
  add_field(layout, {.name = "b",
                     .kind = FieldKind::kRecord,
                     .dtype = options.activation,
                     .outer = shape.groups,
                     .places = places,
                     .inner = shape.state_size});
  add_field(layout, {.name = "dt",
                     .kind = FieldKind::kRecord,
                     .dtype = DType::kF32,
                     .outer = shape.heads,
                     .places = places,
                     .inner = 1});
}

}  // namespace

const Field& PageLayout::field(const char* name) const {
  for (const Field& field : fields) {
    if (std::strcmp(field.name, name) == 0) return field;
  }
  return fields.front();  // unreachable: names are the literals above
}

Result<std::vector<PageLayout>> page_layouts(const StatePoolOptions& options) {
  RSSM_RETURN_IF_ERROR(check_options(options));
  std::vector<PageLayout> layouts;
  for (std::size_t i = 0; i < options.layers.size(); ++i) {
    const LayerSpec& spec = options.layers[i];
    const int layer = static_cast<int>(i);
    RSSM_RETURN_IF_ERROR(
        std::visit([&](const auto& s) { return check_mamba2(layer, s); }, spec.recurrence));
    RSSM_RETURN_IF_ERROR(check_conv(layer, spec.conv));
    PageLayout layout;
    std::visit([&](const auto& s) { add_recurrence(layout, s, options); }, spec.recurrence);
    if (spec.conv.width > 0) {
      add_field(layout, {.name = "conv",
                         .kind = FieldKind::kConv,
                         .dtype = options.activation,
                         .outer = 1,
                         .places = options.limits.conv_places(spec.conv.width, options.rewindable),
                         .inner = spec.conv.channels});
    }
    layouts.push_back(std::move(layout));
  }
  return layouts;
}

Status check_storage(const StatePoolOptions& options, std::size_t per_slot, std::size_t bytes) {
  if (options.storage.size() < bytes) {
    return invalid_argument("storage holds ", options.storage.size(), " bytes, expected ", bytes,
                            " for ", options.slots, " slots of ", per_slot, " bytes");
  }
  const auto misalignment =
      reinterpret_cast<std::uintptr_t>(options.storage.data()) % kFieldAlignment;
  if (misalignment != 0) {
    return invalid_argument("storage is ", misalignment, " bytes past a multiple of ",
                            kFieldAlignment, ", expected 0");
  }
  return {};
}

std::size_t page_stride(const PageLayout& layout, const StatePoolOptions& options) {
  return round_up(layout.bytes, options.page_alignment);
}

}  // namespace replayssm
