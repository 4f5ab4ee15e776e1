// Saved states: the image format of StatePool::save and load.
//
// Read copies are not part of it: they are functions of the checkpoint.
//
//   magic, version | model id | types | geometry and flush mode of every layer | cursor | first
//   convolution position per layer: checkpoint fields (absent at position 0), record fields oldest
//   first, convolution inputs oldest first | FNV-1a 64 of everything before
//
// Little-endian, fields packed. An entry of a ring is written as (outer, inner), so the geometry of
// the ring it came from leaves no trace.
#include <algorithm>
#include <cstring>
#include <string>

#include "core/byte_io.h"
#include "ops/fold.h"
#include "state/pool_impl.h"

namespace replayssm {
namespace {

constexpr char kMagic[8] = {'R', 'S', 'S', 'M', 'S', 'L', 'O', 'T'};
constexpr std::uint32_t kVersion = 4;

/// The numbers that make two layers' states exchangeable, with names for messages.
struct Geometry {
  const char* name;
  std::int64_t value;
};

void add_geometry(std::vector<Geometry>& out, const Mamba2Shape& s) {
  out.push_back({"heads", s.heads});
  out.push_back({"head_dim", s.head_dim});
  out.push_back({"state_size", s.state_size});
  out.push_back({"groups", s.groups});
}

void add_geometry(std::vector<Geometry>& out, const GatedDeltaNetShape& s) {
  out.push_back({"key_heads", s.key_heads});
  out.push_back({"value_heads", s.value_heads});
  out.push_back({"key_dim", s.key_dim});
  out.push_back({"value_dim", s.value_dim});
}

void add_geometry(std::vector<Geometry>& out, const KimiDeltaAttentionShape& s) {
  out.push_back({"heads", s.heads});
  out.push_back({"key_dim", s.key_dim});
  out.push_back({"value_dim", s.value_dim});
}

std::vector<Geometry> geometry(const LayerSpec& spec) {
  std::vector<Geometry> out{{"family", static_cast<std::int64_t>(spec.recurrence.index())}};
  std::visit([&](const auto& s) { add_geometry(out, s); }, spec.recurrence);
  out.push_back({"convolution channels", spec.conv.channels});
  out.push_back({"convolution width", spec.conv.width});
  return out;
}

/// Entries [first, last) of a ring field.
void write_entries(ByteWriter& out, const Field& f, const std::byte* data, std::int64_t first,
                   std::int64_t last) {
  for (std::int64_t p = first; p < last; ++p) {
    for (std::int64_t o = 0; o < f.outer; ++o) {
      out.bytes(data + static_cast<std::size_t>(o * f.places + p % f.places) * f.inner_bytes(),
                f.inner_bytes());
    }
  }
}

/// Inverse of write_entries for a field of any number of places, into places (first + i) mod
/// places.
void read_entries(const Field& f, std::int64_t places, std::byte* data,
                  std::span<const std::byte> entries, std::int64_t first, std::int64_t count) {
  const std::byte* from = entries.data();
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t o = 0; o < f.outer; ++o) {
      std::memcpy(
          data + static_cast<std::size_t>(o * places + (first + i) % places) * f.inner_bytes(),
          from, f.inner_bytes());
      from += f.inner_bytes();
    }
  }
}

/// A saved state after every check, pointing into the image.
struct Image {
  Cursor cursor;
  std::int64_t conv_from = 0;  // convolution history reaches back width-1 tokens before this
  std::vector<std::vector<std::span<const std::byte>>> fields;  // by layer and field
};

std::int64_t conv_history_begin(const LayerSpec& spec, std::int64_t conv_from) {
  return std::max<std::int64_t>(0, conv_from - (spec.conv.width - 1));
}

/// Everything up to the cursor; `modes` are the layers' flush modes.
Status check_identity(ByteReader& in, const StatePoolOptions& options,
                      std::vector<FlushMode>& modes) {
  if (const std::string model = in.text(); in.ok() && model != options.model_id) {
    return invalid_argument("saved state is of model '", model, "', expected '", options.model_id,
                            "'");
  }
  for (const auto& [what, expected] : {std::pair{"checkpoint type", options.checkpoint},
                                       std::pair{"activation type", options.activation}}) {
    const auto found = static_cast<DType>(in.value<std::uint8_t>());
    if (in.ok() && found != expected) {
      return invalid_argument("saved state has ", what, " ", to_string(found), ", expected ",
                              to_string(expected));
    }
  }
  const auto layers = in.value<std::uint32_t>();
  if (in.ok() && layers != options.layers.size()) {
    return invalid_argument("saved state has ", layers, " layers, expected ",
                            options.layers.size());
  }
  for (std::size_t layer = 0; layer < options.layers.size() && in.ok(); ++layer) {
    for (const Geometry& g : geometry(options.layers[layer])) {
      const auto found = in.value<std::int64_t>();
      if (in.ok() && found != g.value) {
        return invalid_argument("saved state, layer ", layer, ": ", g.name, " is ", found,
                                ", expected ", g.value);
      }
    }
    modes.push_back(static_cast<FlushMode>(in.value<std::uint8_t>()));
  }
  return {};
}

/// Records of one flush mode say nothing to a fold of the other: the fast ones lack v and beta, and
/// folding the exact ones from their deltas would not be exact. Without records nothing differs.
Status check_flush_modes(const std::vector<FlushMode>& modes, const StatePoolOptions& options,
                         std::int64_t live) {
  for (std::size_t layer = 0; layer < modes.size() && live > 0; ++layer) {
    const FlushMode expected = options.flush_mode(static_cast<int>(layer));
    if (modes[layer] == expected) continue;
    return invalid_argument("saved state, layer ", layer, ": ", live, " records for ",
                            to_string(modes[layer]), " flushes, expected ", to_string(expected),
                            "; a state saved without records (see materialize) suits both");
  }
  return {};
}

Result<Image> parse(std::span<const std::byte> bytes, const StatePool::Impl& pool) {
  constexpr std::size_t kSmallest = sizeof kMagic + sizeof kVersion + sizeof(std::uint64_t);
  if (bytes.size() < kSmallest) {
    return data_loss("saved state is ", bytes.size(), " bytes, expected at least ", kSmallest);
  }
  if (std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0) {
    return data_loss("saved state does not begin with 'RSSMSLOT'");
  }
  ByteReader in(bytes.first(bytes.size() - sizeof(std::uint64_t)));
  in.bytes(sizeof kMagic);
  if (const auto version = in.value<std::uint32_t>(); version != kVersion) {
    return unsupported("saved state has layout version ", version, ", expected ", kVersion);
  }
  RSSM_RETURN_IF_ERROR(check_checksum(bytes, "saved state"));
  std::vector<FlushMode> modes;
  RSSM_RETURN_IF_ERROR(check_identity(in, pool.options, modes));

  Image image;
  image.cursor.checkpoint_position = in.value<std::int64_t>();
  image.cursor.position = in.value<std::int64_t>();
  image.cursor.force_flush = in.value<std::uint8_t>() != 0;
  image.conv_from = in.value<std::int64_t>();
  const Cursor& cursor = image.cursor;
  if (!in.ok() || cursor.checkpoint_position < 0 || cursor.checkpoint_position > cursor.position ||
      cursor.live() > ReplayLimits::kMaxWindow || image.conv_from < cursor.checkpoint_position ||
      image.conv_from > cursor.position) {
    return data_loss("saved state has positions ", cursor.checkpoint_position, ", ",
                     cursor.position, " and ", image.conv_from, " that contradict each other");
  }
  RSSM_RETURN_IF_ERROR(check_flush_modes(modes, pool.options, cursor.live()));
  for (std::size_t layer = 0; layer < pool.layouts.size(); ++layer) {
    auto& fields = image.fields.emplace_back();
    for (const Field& f : pool.layouts[layer].fields) {
      const std::int64_t entries =
          f.kind == FieldKind::kReadCopy     ? 0
          : f.kind == FieldKind::kCheckpoint ? (cursor.checkpoint_position > 0 ? 1 : 0)
          : f.kind == FieldKind::kRecord
              ? cursor.live()
              : cursor.position - conv_history_begin(pool.options.layers[layer], image.conv_from);
      fields.push_back(in.bytes(static_cast<std::size_t>(entries) * f.entry_bytes()));
    }
  }
  if (!in.ok() || in.rest() != 0) {
    return data_loss("saved state is ", in.ok() ? "longer" : "shorter",
                     " than its positions ask for");
  }
  return image;
}

}  // namespace

Result<std::vector<std::byte>> StatePool::Impl::save(const CudaContext* cuda,
                                                     std::int32_t slot) const {
  const Impl& pool = *this;
  RSSM_RETURN_IF_ERROR(check_device(cuda));
  RSSM_ASSIGN_OR_RETURN(const Cursor cursor, ready_cursor(cuda, slot));
  const std::int64_t conv_from =
      pool.options.rewindable ? cursor.checkpoint_position : cursor.position;

  ByteWriter out;
  out.bytes(kMagic, sizeof kMagic);
  out.value(kVersion);
  out.text(pool.options.model_id);
  out.value(static_cast<std::uint8_t>(pool.options.checkpoint));
  out.value(static_cast<std::uint8_t>(pool.options.activation));
  out.value(static_cast<std::uint32_t>(pool.layouts.size()));
  for (int layer = 0; static_cast<std::size_t>(layer) < layouts.size(); ++layer) {
    const LayerSpec& spec = pool.options.layers[static_cast<std::size_t>(layer)];
    for (const Geometry& g : geometry(spec)) out.value(g.value);
    out.value(static_cast<std::uint8_t>(pool.options.flush_mode(layer)));
  }
  out.value(cursor.checkpoint_position);
  out.value(cursor.position);
  out.value(static_cast<std::uint8_t>(cursor.force_flush));
  out.value(conv_from);
  std::vector<std::byte> staging;    // a device's page
  std::vector<std::byte> reordered;  // its checkpoint
  for (int layer = 0; static_cast<std::size_t>(layer) < layouts.size(); ++layer) {
    const LayerSpec& spec = pool.options.layers[static_cast<std::size_t>(layer)];
    if (cuda != nullptr) {
      staging.resize(pool.layout(layer).bytes);
      RSSM_RETURN_IF_ERROR(gpu->read_page(cuda->stream, layer, slot, staging));
    }
    for (const Field& f : pool.layout(layer).fields) {
      const std::byte* data =
          cuda != nullptr ? staging.data() + f.offset : pool.field(layer, slot, f);
      if (f.kind == FieldKind::kReadCopy) continue;
      if (f.kind == FieldKind::kCheckpoint) {
        if (cursor.checkpoint_position == 0) continue;
        if (cuda != nullptr) {
          reordered.resize(f.bytes());
          checkpoint_from_cuda(spec.recurrence, f, data, reordered.data());
          data = reordered.data();
        }
        out.bytes(data, f.bytes());
      } else {
        const std::int64_t first = f.kind == FieldKind::kRecord
                                       ? cursor.checkpoint_position
                                       : conv_history_begin(spec, conv_from);
        write_entries(out, f, data, first, cursor.position);
      }
    }
  }
  return out.finish();
}

Status StatePool::Impl::load(const CpuContext& cpu, const CudaContext* cuda, std::int32_t slot,
                             std::span<const std::byte> bytes) {
  Impl& pool = *this;
  RSSM_RETURN_IF_ERROR(check_device(cuda));
  RSSM_RETURN_IF_ERROR(pool.check_slot(slot));
  RSSM_ASSIGN_OR_RETURN(const Image image, parse(bytes, pool));
  Cursor cursor = image.cursor;
  // Fold when the records do not fit, or when this pool promises to rewind over them and the image
  // lacks the convolution inputs for that.
  const bool folds = cursor.live() > pool.options.limits.window ||
                     (pool.options.rewindable && image.conv_from > cursor.checkpoint_position);
  for (int layer = 0; folds && static_cast<std::size_t>(layer) < layouts.size(); ++layer) {
    RSSM_RETURN_IF_ERROR(pool.check_parameters(layer));
  }
  if (folds) cursor.checkpoint_position = cursor.position;

  // Until all of it is there the slot holds nothing.
  RSSM_RETURN_IF_ERROR(pool.invalidate(cuda, slot));
  RSSM_RETURN_IF_ERROR(pool.poison_slot(cuda, slot));
  std::vector<std::byte> staging;    // a device's page; what the image does not fill is never read
  std::vector<std::byte> reordered;  // its checkpoint
  for (int layer = 0; static_cast<std::size_t>(layer) < layouts.size(); ++layer) {
    const PageLayout& layout = pool.layout(layer);
    if (cuda != nullptr) staging.assign(layout.bytes, std::byte{0xff});
    std::byte* page = cuda != nullptr ? staging.data() : pool.page(layer, slot);
    const LayerSpec& spec = pool.options.layers[static_cast<std::size_t>(layer)];
    RecordPointers records;
    std::vector<std::vector<std::byte>> repacked;
    const std::byte* checkpoint = nullptr;
    for (std::size_t i = 0; i < layout.fields.size(); ++i) {
      const Field& f = layout.fields[i];
      const auto saved = image.fields[static_cast<std::size_t>(layer)][i];
      std::byte* data = page + f.offset;
      if (f.kind == FieldKind::kReadCopy) continue;
      if (f.kind == FieldKind::kCheckpoint) {
        if (saved.empty()) continue;
        if (cuda != nullptr) {
          checkpoint_to_cuda(spec.recurrence, f, saved.data(), data);
        } else {
          std::memcpy(data, saved.data(), saved.size());
        }
        if (checkpoint == nullptr) checkpoint = data;
      } else if (f.kind == FieldKind::kConv) {
        const std::int64_t begin = conv_history_begin(spec, image.conv_from);
        const std::int64_t first = std::max(begin, pool.conv_first(layer, cursor));
        const auto skipped = static_cast<std::size_t>(first - begin) * f.entry_bytes();
        read_entries(f, f.places, data, saved.subspan(skipped), first, cursor.position - first);
      } else if (folds) {
        repacked.emplace_back(saved.size());
        read_entries(f, image.cursor.live(), repacked.back().data(), saved, 0, image.cursor.live());
        records.add(f.name, repacked.back().data());
      } else {
        read_entries(f, f.places, data, saved, cursor.checkpoint_position, cursor.live());
      }
    }
    // A fold makes the copy of what it stores.
    if (checkpoint != nullptr && !folds) {
      const std::byte* in_order = checkpoint;
      if (cuda != nullptr) {
        // The encoder knows the order of pages on the CPU.
        const auto saved = image.fields[static_cast<std::size_t>(layer)][0];
        reordered.assign(saved.begin(), saved.end());
        in_order = reordered.data();
      }
      encode_read_copy(cpu, layout.read_copy_in(page), in_order, pool.options.checkpoint,
                       layout.field("checkpoint").outer);
    }
    const std::int64_t live = image.cursor.live();
    if (cuda != nullptr) {
      RSSM_RETURN_IF_ERROR(gpu->write_page(cuda->stream, layer, slot, staging));
      if (folds) {
        RSSM_RETURN_IF_ERROR(
            gpu->fold_external(cuda->stream, layer, records, checkpoint == nullptr, live, slot));
      }
    } else if (folds) {
      fold_external(cpu, pool, layer, records, checkpoint, live, slot);
    }
  }
  if (cuda != nullptr) {
    RSSM_RETURN_IF_ERROR(gpu->set_slot(cuda->stream, slot, cursor, SlotCondition::kReady));
  }
  pool.restart(slot, cursor);
  return {};
}

}  // namespace replayssm
