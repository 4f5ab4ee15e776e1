// Saved states: the image format of StatePool::save and load.
//
//   magic, version | model id | types | geometry of every layer | cursor | first convolution
//   position per layer: checkpoint (absent at position 0), record fields oldest first, convolution
//   inputs oldest first | FNV-1a 64 of everything before
//
// Little-endian, fields packed. An entry of a ring is written as (outer, inner), so the geometry of
// the ring it came from leaves no trace.
#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "ops/fold.h"
#include "state/pool_impl.h"

namespace replayssm {
namespace {

static_assert(std::endian::native == std::endian::little, "saved states are little-endian");

constexpr char kMagic[8] = {'R', 'S', 'S', 'M', 'S', 'L', 'O', 'T'};
constexpr std::uint32_t kVersion = 1;

std::uint64_t fnv1a(std::span<const std::byte> bytes) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const std::byte b : bytes) {
    hash = (hash ^ static_cast<std::uint64_t>(b)) * 0x100000001b3u;
  }
  return hash;
}

class Writer {
 public:
  void bytes(const void* data, std::size_t size) {
    const auto* p = static_cast<const std::byte*>(data);
    out_.insert(out_.end(), p, p + size);
  }
  template <typename T>
  void value(T x) {
    bytes(&x, sizeof x);
  }
  void text(const std::string& s) {
    value(static_cast<std::uint32_t>(s.size()));
    bytes(s.data(), s.size());
  }
  std::vector<std::byte> finish() {
    value(fnv1a(out_));
    return std::move(out_);
  }

 private:
  std::vector<std::byte> out_;
};

/// Reads past the end yield zeros and a failed ok(), so that one check at the end suffices.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> in) : in_(in) {}

  bool ok() const { return ok_; }
  std::size_t rest() const { return in_.size(); }

  std::span<const std::byte> bytes(std::size_t size) {
    if (size > in_.size()) {
      ok_ = false;
      return {};
    }
    const auto taken = in_.first(size);
    in_ = in_.subspan(size);
    return taken;
  }
  template <typename T>
  T value() {
    T x{};
    const auto taken = bytes(sizeof x);
    if (taken.size() == sizeof x) std::memcpy(&x, taken.data(), sizeof x);
    return x;
  }
  std::string text() {
    const auto size = value<std::uint32_t>();
    const auto taken = bytes(size);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }

 private:
  std::span<const std::byte> in_;
  bool ok_ = true;
};

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
void write_entries(Writer& out, const Field& f, const std::byte* data, std::int64_t first,
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

Status check_identity(Reader& in, const StatePoolOptions& options) {
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
  Reader in(bytes.first(bytes.size() - sizeof(std::uint64_t)));
  in.bytes(sizeof kMagic);
  if (const auto version = in.value<std::uint32_t>(); version != kVersion) {
    return unsupported("saved state has layout version ", version, ", expected ", kVersion);
  }
  const auto expected = fnv1a(bytes.first(bytes.size() - sizeof(std::uint64_t)));
  if (const auto found = Reader(bytes.last(sizeof expected)).value<std::uint64_t>();
      found != expected) {
    return data_loss("saved state is truncated or corrupt: checksum ", found, ", expected ",
                     expected);
  }
  RSSM_RETURN_IF_ERROR(check_identity(in, pool.options));

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
  for (std::size_t layer = 0; layer < pool.layouts.size(); ++layer) {
    auto& fields = image.fields.emplace_back();
    for (const Field& f : pool.layouts[layer].fields) {
      const std::int64_t entries =
          f.kind == FieldKind::kCheckpoint ? (cursor.checkpoint_position > 0 ? 1 : 0)
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

Result<std::vector<std::byte>> StatePool::save(std::int32_t slot) const {
  const Impl& pool = *impl_;
  RSSM_RETURN_IF_ERROR(pool.check_ready(slot));
  const Cursor& cursor = pool.slots[static_cast<std::size_t>(slot)].cursor;
  const std::int64_t conv_from =
      pool.options.rewindable ? cursor.checkpoint_position : cursor.position;

  Writer out;
  out.bytes(kMagic, sizeof kMagic);
  out.value(kVersion);
  out.text(pool.options.model_id);
  out.value(static_cast<std::uint8_t>(pool.options.checkpoint));
  out.value(static_cast<std::uint8_t>(pool.options.activation));
  out.value(static_cast<std::uint32_t>(pool.layouts.size()));
  for (const LayerSpec& spec : pool.options.layers) {
    for (const Geometry& g : geometry(spec)) out.value(g.value);
  }
  out.value(cursor.checkpoint_position);
  out.value(cursor.position);
  out.value(static_cast<std::uint8_t>(cursor.force_flush));
  out.value(conv_from);
  for (int layer = 0; layer < layer_count(); ++layer) {
    const LayerSpec& spec = pool.options.layers[static_cast<std::size_t>(layer)];
    for (const Field& f : pool.layout(layer).fields) {
      const std::byte* data = pool.field(layer, slot, f);
      if (f.kind == FieldKind::kCheckpoint) {
        if (cursor.checkpoint_position > 0) out.bytes(data, f.bytes());
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

Status StatePool::load(const CpuContext& context, std::int32_t slot,
                       std::span<const std::byte> bytes) {
  Impl& pool = *impl_;
  RSSM_RETURN_IF_ERROR(pool.check_slot(slot));
  RSSM_ASSIGN_OR_RETURN(const Image image, parse(bytes, pool));
  Cursor cursor = image.cursor;
  // Fold when the records do not fit, or when this pool promises to rewind over them and the image
  // lacks the convolution inputs for that.
  const bool folds = cursor.live() > pool.options.limits.window ||
                     (pool.options.rewindable && image.conv_from > cursor.checkpoint_position);
  for (int layer = 0; folds && layer < layer_count(); ++layer) {
    RSSM_RETURN_IF_ERROR(pool.check_parameters(layer));
  }
  if (folds) cursor.checkpoint_position = cursor.position;

  if (pool.options.poison) pool.poison_slot(slot);
  for (int layer = 0; layer < layer_count(); ++layer) {
    const PageLayout& layout = pool.layout(layer);
    const LayerSpec& spec = pool.options.layers[static_cast<std::size_t>(layer)];
    RecordPointers records;
    std::vector<std::vector<std::byte>> owned;
    const std::byte* checkpoint = nullptr;
    for (std::size_t i = 0; i < layout.fields.size(); ++i) {
      const Field& f = layout.fields[i];
      const auto saved = image.fields[static_cast<std::size_t>(layer)][i];
      std::byte* data = pool.field(layer, slot, f);
      if (f.kind == FieldKind::kCheckpoint) {
        if (saved.empty()) continue;
        std::memcpy(data, saved.data(), saved.size());
        checkpoint = data;
      } else if (f.kind == FieldKind::kConv) {
        const std::int64_t begin = conv_history_begin(spec, image.conv_from);
        const std::int64_t first = std::max(begin, pool.conv_first(layer, cursor));
        const auto skipped = static_cast<std::size_t>(first - begin) * f.entry_bytes();
        read_entries(f, f.places, data, saved.subspan(skipped), first, cursor.position - first);
      } else if (folds) {
        owned.emplace_back(saved.size());
        read_entries(f, image.cursor.live(), owned.back().data(), saved, 0, image.cursor.live());
        records.add(f.name, owned.back().data());
      } else {
        read_entries(f, f.places, data, saved, cursor.checkpoint_position, cursor.live());
      }
    }
    if (folds) fold_external(context, pool, layer, records, checkpoint, image.cursor.live(), slot);
  }
  pool.restart(slot, cursor);
  return {};
}

}  // namespace replayssm
