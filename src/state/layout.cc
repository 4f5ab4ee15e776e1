#include "state/layout.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "ops/deferred_decay.h"
#include "ops/delta_rule/shape.h"
#include "state/device_pool.h"

namespace replayssm {
namespace {

constexpr std::size_t kFieldAlignment = 64;

std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

Status check_recurrence(int layer, const Mamba2Shape& shape) {
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

/// Heads are checked by the families.
Status check_delta_rule(int layer, const char* family, const DeltaRuleShape& shape) {
  for (const auto& [what, found] :
       {std::pair{"key_dim", shape.key_dim}, std::pair{"value_dim", shape.value_dim}}) {
    if (found < 8 || found > 256 || found % 8 != 0) {
      return invalid_argument("layer ", layer, ": ", family, " ", what, " is ", found,
                              ", expected a multiple of 8 in 8..256");
    }
  }
  return {};
}

Status check_recurrence(int layer, const GatedDeltaNetShape& shape) {
  if (shape.key_heads < 1 || shape.key_heads > 65536) {
    return invalid_argument("layer ", layer, ": gated_delta_net key_heads is ", shape.key_heads,
                            ", expected 1..65536");
  }
  if (shape.value_heads < 1 || shape.value_heads > 65536 ||
      shape.value_heads % shape.key_heads != 0) {
    return invalid_argument("layer ", layer, ": gated_delta_net value_heads is ", shape.value_heads,
                            ", expected a multiple of key_heads ", shape.key_heads, " up to 65536");
  }
  return check_delta_rule(layer, "gated_delta_net", delta_rule(shape));
}

Status check_recurrence(int layer, const KimiDeltaAttentionShape& shape) {
  if (shape.heads < 1 || shape.heads > 65536) {
    return invalid_argument("layer ", layer, ": kimi_delta_attention heads is ", shape.heads,
                            ", expected 1..65536");
  }
  return check_delta_rule(layer, "kimi_delta_attention", delta_rule(shape));
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
    if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF16) {
      return unsupported(what, " type is ", to_string(dtype), ", supported: f32, bf16, f16");
    }
  }
  const std::size_t alignment = options.page_alignment;
  if (alignment < kFieldAlignment || alignment % kFieldAlignment != 0) {
    return invalid_argument("page_alignment is ", alignment, ", expected a multiple of ",
                            kFieldAlignment);
  }
  return {};
}

Status check_flush_mode(int layer, const StatePoolOptions& options) {
  const FlushMode mode = options.flush_mode(layer);
  if (mode == FlushMode::kExact) return {};
  if (mode != FlushMode::kFast) {
    return invalid_argument("layer ", layer, ": flush mode is ", static_cast<int>(mode),
                            ", expected 0 (exact) or 1 (fast)");
  }
  const LayerSpec& spec = options.layers[static_cast<std::size_t>(layer)];
  if (std::holds_alternative<Mamba2Shape>(spec.recurrence)) {
    return unsupported("layer ", layer, ": flush mode is fast, supported for ",
                       family_name(spec.recurrence), ": exact");
  }
  if (spec.read_copy != ReadCopyFormat::kNone) {
    // The deltas a fast flush folds are solved against the copy: its rounding would stay.
    return unsupported("layer ", layer, ": flush mode is fast and read_copy is ",
                       to_string(spec.read_copy), ", expected exact or none");
  }
  return {};
}

void add_field(PageLayout& layout, Field field) {
  field.offset = round_up(layout.bytes, kFieldAlignment);
  layout.bytes = field.offset + field.bytes();
  layout.fields.push_back(field);
}

class RecurrenceFields {
 public:
  RecurrenceFields(PageLayout& layout, const StatePoolOptions& options, FlushMode flush)
      : layout_(layout), options_(options), flush_(flush) {}

  void add(const LayerSpec& spec) {
    layout_.read_copy = read_copy_shape(spec.recurrence, spec.read_copy);
    std::visit([&](const auto& shape) { add(shape); }, spec.recurrence);
  }

 private:
  void add(const Mamba2Shape& shape) {
    checkpoint(shape.heads, shape.head_dim * shape.state_size);
    deferred_decay(shape.heads, shape.head_dim);
    record("x", options_.activation, shape.heads, shape.head_dim);
    record("b", options_.activation, shape.groups, shape.state_size);
    record("dt", DType::kF32, shape.heads, 1);
  }
  void add(const GatedDeltaNetShape& shape) { add(delta_rule(shape)); }
  void add(const KimiDeltaAttentionShape& shape) { add(delta_rule(shape)); }
  void add(const DeltaRuleShape& shape) {
    checkpoint(shape.value_heads, shape.key_dim * shape.value_dim);
    if (!shape.channel_decay) deferred_decay(shape.value_heads, shape.value_dim);
    // k as the op received it, and its scale to unit length. Decays rather than their logarithms:
    // every step weighs records by running products, and would take an exponential of each anew.
    record("k", options_.activation, shape.key_heads, shape.key_dim);
    record("k_scale", DType::kF32, shape.key_heads, 1);
    record("decay", DType::kF32, shape.value_heads, shape.decays());
    if (flush_ == FlushMode::kExact) {
      // What the recurrence is re-run from.
      record("v", options_.activation, shape.value_heads, shape.value_dim);
      record("beta", DType::kF32, shape.value_heads, 1);
    }
    // What the token's step solved, for later outputs and fast flushes.
    record("delta", options_.activation, shape.value_heads, shape.value_dim);
  }

  void checkpoint(std::int64_t outer, std::int64_t inner) {
    add_field(layout_, {.name = "checkpoint",
                        .kind = FieldKind::kCheckpoint,
                        .dtype = options_.checkpoint,
                        .outer = outer,
                        .inner = inner});
    const ReadCopyShape& copy = layout_.read_copy;
    if (copy.format == ReadCopyFormat::kNone) return;
    read_copy("copy_codes", DType::kU8, outer, copy.rows * copy.code_row_bytes());
    if (copy.row_blocks() > 0) {
      read_copy("copy_block_scales", DType::kU8, outer, copy.rows * copy.row_blocks());
    }
    read_copy("copy_scales", DType::kF32, outer, copy.head_scales());
  }
  /// Of heads with so many rows, where the checkpoint defers decays.
  void deferred_decay(std::int64_t heads, std::int64_t rows) {
    const std::int64_t count = deferred_decay_count(options_.checkpoint, rows);
    if (count == 0) return;
    add_field(layout_, {.name = "deferred_decay",
                        .kind = FieldKind::kCheckpoint,
                        .dtype = DType::kF32,
                        .outer = heads,
                        .inner = count});
  }
  void read_copy(const char* name, DType dtype, std::int64_t outer, std::int64_t inner) {
    add_field(layout_, {.name = name,
                        .kind = FieldKind::kReadCopy,
                        .dtype = dtype,
                        .outer = outer,
                        .inner = inner});
  }
  void record(const char* name, DType dtype, std::int64_t outer, std::int64_t inner) {
    add_field(layout_, {.name = name,
                        .kind = FieldKind::kRecord,
                        .dtype = dtype,
                        .outer = outer,
                        .places = options_.limits.record_places(),
                        .inner = inner});
  }

  PageLayout& layout_;
  const StatePoolOptions& options_;
  FlushMode flush_;
};

}  // namespace

const Field& PageLayout::field(const char* name) const {
  for (const Field& field : fields) {
    if (std::strcmp(field.name, name) == 0) return field;
  }
  return fields.front();  // unreachable: names are the literals above
}

namespace {

/// f(offset on the CPU, offset on a CUDA device) in elements of every element of a head's state.
template <typename F>
void for_each_element(const DeltaRuleShape& shape, F f) {
  for (std::int64_t tile = 0; tile < shape.value_dim; tile += kDeltaRuleTile) {
    const std::int64_t pitch = std::min(kDeltaRuleTile, shape.value_dim - tile);
    for (std::int64_t k = 0; k < shape.key_dim; ++k) {
      for (std::int64_t c = 0; c < pitch; ++c) {
        f(tile * shape.key_dim + k * pitch + c, (tile + c) * shape.key_dim + k);
      }
    }
  }
}

template <std::size_t kBytes>
void reorder(const DeltaRuleShape& shape, const std::byte* from, std::byte* to, bool to_cuda) {
  const auto head_bytes = static_cast<std::size_t>(shape.key_dim * shape.value_dim) * kBytes;
  for (std::int64_t head = 0; head < shape.value_heads; ++head) {
    for_each_element(shape, [&](std::int64_t cpu, std::int64_t cuda) {
      const std::int64_t source = to_cuda ? cpu : cuda;
      const std::int64_t target = to_cuda ? cuda : cpu;
      std::memcpy(to + static_cast<std::size_t>(target) * kBytes,
                  from + static_cast<std::size_t>(source) * kBytes, kBytes);
    });
    from += head_bytes;
    to += head_bytes;
  }
}

void convert_checkpoint(const RecurrenceShape& shape, const Field& field, const std::byte* from,
                        std::byte* to, bool to_cuda) {
  std::visit(
      [&](const auto& s) {
        if constexpr (!std::is_same_v<std::decay_t<decltype(s)>, Mamba2Shape>) {
          if (std::strcmp(field.name, "checkpoint") == 0) {
            const auto reorder_state =
                size_of(field.dtype) == 4 ? reorder<sizeof(float)> : reorder<sizeof(BF16)>;
            return reorder_state(delta_rule(s), from, to, to_cuda);
          }
        }
        std::memcpy(to, from, field.bytes());
      },
      shape);
}

}  // namespace

void checkpoint_from_cuda(const RecurrenceShape& shape, const Field& field, const std::byte* from,
                          std::byte* to) {
  convert_checkpoint(shape, field, from, to, false);
}

void checkpoint_to_cuda(const RecurrenceShape& shape, const Field& field, const std::byte* from,
                        std::byte* to) {
  convert_checkpoint(shape, field, from, to, true);
}

std::size_t PageLayout::deferred_decay_offset() const {
  for (const Field& f : fields) {
    if (std::strcmp(f.name, "deferred_decay") == 0) return f.offset - field("checkpoint").offset;
  }
  return 0;
}

ReadCopy PageLayout::read_copy_in(std::byte* page) const {
  ReadCopy copy;
  copy.shape = read_copy;
  if (read_copy.format == ReadCopyFormat::kNone) return copy;
  copy.codes = reinterpret_cast<std::uint8_t*>(page + field("copy_codes").offset);
  if (read_copy.row_blocks() > 0) {
    copy.block_scales = reinterpret_cast<std::uint8_t*>(page + field("copy_block_scales").offset);
  }
  copy.scales = reinterpret_cast<float*>(page + field("copy_scales").offset);
  return copy;
}

std::size_t PageLayout::read_copy_bytes() const {
  std::size_t sum = 0;
  for (const Field& f : fields) {
    if (f.kind == FieldKind::kReadCopy) sum += f.bytes();
  }
  return sum;
}

Result<std::vector<PageLayout>> page_layouts(const StatePoolOptions& options) {
  RSSM_RETURN_IF_ERROR(check_options(options));
  std::vector<PageLayout> layouts;
  for (std::size_t i = 0; i < options.layers.size(); ++i) {
    const LayerSpec& spec = options.layers[i];
    const int layer = static_cast<int>(i);
    RSSM_RETURN_IF_ERROR(
        std::visit([&](const auto& s) { return check_recurrence(layer, s); }, spec.recurrence));
    RSSM_RETURN_IF_ERROR(check_conv(layer, spec.conv));
    RSSM_RETURN_IF_ERROR(check_flush_mode(layer, options));
    PageLayout layout;
    RecurrenceFields(layout, options, options.flush_mode(layer)).add(spec);
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
