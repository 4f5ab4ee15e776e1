// The CUDA implementation of DevicePool: one block of device memory and kernels on the caller's
// stream.
#include "state/device_pool.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "cuda/runtime.h"
#include "ops/causal_conv1d/cuda/launch.h"
#include "state/cuda/kernels.h"
#include "state/cuda/layer_kernels.h"

namespace replayssm {

bool has_kernels_for(DeviceKind) { return true; }

namespace cuda {
namespace {

constexpr int kLeastCapability = 80;
constexpr std::size_t kAlignment = 256;

std::size_t round_up(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// Device memory that is given back.
class DeviceBlock {
 public:
  DeviceBlock() = default;
  DeviceBlock(DeviceBlock&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  DeviceBlock& operator=(DeviceBlock&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~DeviceBlock() { cudaFree(data_); }

  Status allocate(std::size_t bytes) {
    return to_status(cudaMalloc(&data_, bytes), "allocation of device memory");
  }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
};

/// Hands out parts of a block; with a null block it only counts.
class Partition {
 public:
  explicit Partition(std::byte* block) : block_(block) {}

  template <typename T>
  T* take(std::size_t count) {
    const std::size_t at = used_;
    used_ += round_up(count * sizeof(T));
    return block_ == nullptr ? nullptr : reinterpret_cast<T*>(block_ + at);
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* block_;
  std::size_t used_ = 0;
};

Status check_device(const Device& device) {
  RSSM_ASSIGN_OR_RETURN(const DeviceProperties properties, replayssm::device_properties(device));
  if (properties.compute_capability < kLeastCapability) {
    return unsupported(to_string(device), " (", properties.name, ") has compute capability ",
                       properties.compute_capability / 10, ".", properties.compute_capability % 10,
                       ", expected at least ", kLeastCapability / 10, ".", kLeastCapability % 10);
  }
  return {};
}

Status check_storage_device(const StatePoolOptions& options) {
  cudaPointerAttributes found{};
  RSSM_RETURN_IF_ERROR(
      to_status(cudaPointerGetAttributes(&found, options.storage.data()), "storage query"));
  if (found.type != cudaMemoryTypeDevice) {
    return invalid_argument("storage is host memory, expected memory of ",
                            to_string(options.device));
  }
  if (found.device == options.device.index) return {};
  return invalid_argument("storage is memory of cuda:", found.device, ", expected ",
                          to_string(options.device));
}

class CudaPool final : public DevicePool {
 public:
  CudaPool(const DevicePoolPlan& plan, CudaDeviceInfo info)
      : plan_(plan), info_(info), options_(*plan.options), layouts_(*plan.layouts) {}

  Status create() {
    for (int layer = 0; static_cast<std::size_t>(layer) < layouts_.size(); ++layer) {
      RSSM_RETURN_IF_ERROR(check_layer(layer));
    }
    const bool owns_pages = options_.storage.empty();
    Partition count(nullptr);
    partition(count, owns_pages);
    std::size_t available = 0;
    std::size_t total = 0;
    RSSM_RETURN_IF_ERROR(to_status(cudaMemGetInfo(&available, &total), "memory query"));
    if (count.used() > available) {
      return resource_exhausted("the pool needs ", count.used(), " bytes for ", options_.slots,
                                " slots, ", to_string(options_.device), " has ", available,
                                " of its ", total, " free");
    }
    RSSM_RETURN_IF_ERROR(block_.allocate(count.used()));
    Partition parts(block_.data());
    partition(parts, owns_pages);
    if (!owns_pages) table_.base = options_.storage.data();
    return initialize();
  }

  std::byte* base() const override { return table_.base; }

  Status set_mamba2_a(int layer, std::span<const float> a) override {
    return with_device("upload of mamba2 A", [&]() -> Status {
      RSSM_RETURN_IF_ERROR(
          to_status(cudaMemcpy(a_[index(layer)], a.data(), a.size_bytes(), cudaMemcpyHostToDevice),
                    "upload of mamba2 A"));
      // From pageable memory the copy may return before the device has it.
      return to_status(cudaStreamSynchronize(nullptr), "upload of mamba2 A");
    });
  }

  // ---- Slots ----

  Status set_slot(Stream stream, std::int32_t slot, const Cursor& cursor,
                  SlotCondition condition) override {
    return launch("change of a slot",
                  [&] { launch_set_slot(table_, slot, cursor, condition, cuda_stream(stream)); });
  }
  Status force_flush(Stream stream, std::int32_t slot) override {
    return launch("forced flush", [&] { launch_force_flush(table_, slot, cuda_stream(stream)); });
  }
  Result<DeviceSlot> fetch_slot(Stream stream, std::int32_t slot) override {
    DeviceSlot out;
    RSSM_RETURN_IF_ERROR(read(stream, table_.cursors + slot, &out.cursor, sizeof out.cursor));
    RSSM_RETURN_IF_ERROR(
        read(stream, table_.conditions + slot, &out.condition, sizeof out.condition));
    return out;
  }
  Status copy(Stream stream, std::int32_t src, std::int32_t dst,
              std::optional<std::int64_t> prefix) override {
    return launch("copy of a slot", [&] {
      launch_copy_slot(table_, src, dst, prefix.value_or(-1), cuda_stream(stream));
    });
  }
  Status fold(Stream stream, std::int32_t slot) override {
    return with_device("fold", [&]() -> Status {
      RSSM_RETURN_IF_ERROR(plan(fold_rows_ + slot, 1, 0, fold_plan_, cuda_stream(stream)));
      for (int layer = 0; static_cast<std::size_t>(layer) < layouts_.size(); ++layer) {
        LayerKernels kernels = layer_kernels(layer);
        kernels.set_rows(fold_plan_, 1);
        RSSM_RETURN_IF_ERROR(kernels.run(info_, cuda_stream(stream)));
      }
      launch_end_fold(table_, slot, cuda_stream(stream));
      return to_status(cudaGetLastError(), "fold");
    });
  }
  Status fold_external(Stream stream, int layer, const RecordPointers& records, bool from_zero,
                       std::int64_t count, std::int32_t slot) override;
  Status poison(Stream stream, std::int32_t slot, bool all) override {
    return launch("poison of a slot",
                  [&] { launch_poison(table_, slot, all, cuda_stream(stream)); });
  }
  Status read_page(Stream stream, int layer, std::int32_t slot, std::span<std::byte> to) override {
    return read(stream, page(layer, slot), to.data(), to.size());
  }
  Status write_page(Stream stream, int layer, std::int32_t slot,
                    std::span<const std::byte> from) override {
    return write(stream, page(layer, slot), from.data(), from.size());
  }

  // ---- Steps ----

  Status put_rows(Stream stream, std::span<const StepRow> rows, std::int64_t token_count,
                  bool resumed) override {
    RSSM_RETURN_IF_ERROR(check_row_count(static_cast<std::int64_t>(rows.size())));
    RSSM_RETURN_IF_ERROR(launch("upload of a step's rows",
                                [&] { launch_put_rows(table_, rows, cuda_stream(stream)); }));
    plain_ = std::all_of(rows.begin(), rows.end(), [](const StepRow& row) {
      return row.slot < 0 || (row.kind == RowKind::kCommitted && row.token_count <= 1);
    });
    return begin(stream,
                 {.rows = table_.incoming,
                  .row_count = static_cast<std::int64_t>(rows.size()),
                  .token_count = token_count},
                 resumed ? SlotCondition::kInStep : SlotCondition::kReady);
  }
  Status put_rows(Stream stream, const DeviceRows& rows) override {
    RSSM_RETURN_IF_ERROR(check_row_count(rows.row_count));
    if (rows.token_count < 0) {
      return invalid_argument("token_count is ", rows.token_count, ", expected 0 or more");
    }
    if (rows.row_count > 0 && rows.rows == nullptr) {
      return invalid_argument("rows is null, expected device memory of ", rows.row_count, " rows");
    }
    const auto rest = reinterpret_cast<std::uintptr_t>(rows.rows) % alignof(DeviceRow);
    if (rest != 0) {
      return invalid_argument("rows is at an address that is ", rest, " mod ", alignof(DeviceRow),
                              ", expected 0");
    }
    plain_ = false;
    return begin(stream, rows, SlotCondition::kReady);
  }
  Status commit(Stream stream, std::span<const std::int64_t> accepted) override {
    RSSM_RETURN_IF_ERROR(launch("upload of accepted counts", [&] {
      launch_put_accepted(table_, accepted, cuda_stream(stream));
    }));
    return commit(stream, table_.accepted);
  }
  Status commit(Stream stream, const std::int64_t* accepted) override {
    return with_device("commit", [&] {
      return cuda_commit({.rows = table_.rows,
                          .accepted = accepted,
                          .row_count = row_count_,
                          .cursors = table_.cursors,
                          .conditions = table_.conditions,
                          .slots = table_.slots,
                          .limits = table_.limits,
                          .error = table_.error},
                         cuda_stream(stream));
    });
  }
  Status abort(Stream stream, bool conv_ran, bool recurrence_ran) override {
    if (row_count_ == 0) return {};
    return launch("end of a step", [&] {
      launch_abort(table_, row_count_, conv_ran, recurrence_ran, cuda_stream(stream));
    });
  }
  Result<DeviceError> take_error(Stream stream) override {
    DeviceError error;
    RSSM_RETURN_IF_ERROR(read(stream, table_.error, &error, sizeof error));
    if (error.what != DeviceError::kNone) {
      const DeviceError none;
      RSSM_RETURN_IF_ERROR(write(stream, table_.error, &none, sizeof none));
    }
    return error;
  }

  // ---- Ops ----

  Status mamba2_step(Stream stream, int layer, const Mamba2Params& params,
                     const Mamba2Operands& operands) override;
  Status delta_rule_step(Stream stream, int layer, const DeltaRuleParams& params,
                         const DeltaRuleOperands& operands) override;
  Result<std::string> explain(int layer, std::int64_t rows) const override {
    LayerKernels kernels = layer_kernels(layer);
    kernels.set_rows(planned_, rows);
    return kernels.explain(info_);
  }
  Status causal_conv1d_step(Stream stream, int layer,
                            const CausalConv1dOperands& operands) override;

 private:
  static std::size_t index(int layer) { return static_cast<std::size_t>(layer); }
  static cudaStream_t cuda_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }

  /// Runs body with the pool's device as the current one, after a look at what went wrong before.
  template <typename Body>
  Status with_device(const char* what, Body body) const {
    const CurrentDevice current(options_.device.index);
    RSSM_RETURN_IF_ERROR(current.status());
    RSSM_RETURN_IF_ERROR(check_earlier(what));
    return body();
  }
  template <typename Body>
  Status launch(const char* what, Body body) const {
    return with_device(what, [&] {
      body();
      return to_status(cudaGetLastError(), what);
    });
  }
  Status read(Stream stream, const void* from, void* to, std::size_t bytes) const {
    return transfer(stream, from, to, bytes, cudaMemcpyDeviceToHost, "reading device memory");
  }
  Status write(Stream stream, void* to, const void* from, std::size_t bytes) const {
    return transfer(stream, from, to, bytes, cudaMemcpyHostToDevice, "writing device memory");
  }
  Status transfer(Stream stream, const void* from, void* to, std::size_t bytes, cudaMemcpyKind kind,
                  const char* what) const {
    return with_device(what, [&]() -> Status {
      RSSM_RETURN_IF_ERROR(
          to_status(cudaMemcpyAsync(to, from, bytes, kind, cuda_stream(stream)), what));
      return to_status(cudaStreamSynchronize(cuda_stream(stream)), what);
    });
  }

  Status check_layer(int layer) const;
  void partition(Partition& parts, bool owns_pages);
  Status initialize();
  std::vector<DeviceField> device_fields() const;

  Status check_row_count(std::int64_t rows) const {
    if (rows >= 0 && rows <= plan_.max_rows) return {};
    return invalid_argument("the step has ", rows, " rows, expected 0..", plan_.max_rows,
                            " (max_rows)");
  }
  Status begin(Stream stream, const DeviceRows& rows, SlotCondition expected) {
    if (rows.row_count > 0) {
      RSSM_RETURN_IF_ERROR(launch("begin of a step", [&] {
        launch_begin_rows(table_, rows.rows, rows.row_count, rows.token_count, expected,
                          cuda_stream(stream));
      }));
      RSSM_RETURN_IF_ERROR(with_device("plan of a step", [&] {
        return plan(table_.rows, rows.row_count, rows.token_count, planned_, cuda_stream(stream));
      }));
    }
    row_count_ = rows.row_count;
    return {};
  }

  Status plan(const DeviceRow* rows, std::int64_t row_count, std::int64_t token_count,
              PlannedRow* to, cudaStream_t stream) const {
    return cuda_plan_step({.rows = rows,
                           .row_count = row_count,
                           .token_count = token_count,
                           .cursors = table_.cursors,
                           .slots = table_.slots,
                           .limits = table_.limits,
                           .error = table_.error,
                           .planned = to,
                           .flushes = flush_places(row_count)},
                          stream);
  }

  /// One plan serves all layers: what the most demanding of them wants.
  FlushPlaces flush_places(std::int64_t row_count) const {
    FlushPlaces places = FlushPlaces::kFirstThreeQuarters;
    for (LayerKernels kernels : geometries_) {
      kernels.set_rows(nullptr, row_count);
      places = std::min(places, kernels.flush_places(info_));
    }
    return places;
  }

  std::byte* page(int layer, std::int64_t slot) const {
    return table_.base + plan_.layer_offset[index(layer)] +
           static_cast<std::size_t>(slot) * plan_.stride[index(layer)];
  }
  std::int64_t slot_stride(int layer, const Field& f) const {
    return static_cast<std::int64_t>(plan_.stride[index(layer)] / size_of(f.dtype));
  }
  void* field(int layer, const Field& f) const { return page(layer, 0) + f.offset; }

  /// Everything about a layer but the step's operands.
  LayerKernels layer_kernels(int layer) const {
    LayerKernels kernels(options_.layers[index(layer)], options_);
    kernels.point_at_pages(layouts_[index(layer)], page(layer, 0), plan_.stride[index(layer)]);
    kernels.set_rows(planned_, row_count_, plain_);
    kernels.set_mamba2_a(a_[index(layer)]);
    return kernels;
  }

  DevicePoolPlan plan_;
  CudaDeviceInfo info_;
  const StatePoolOptions& options_;
  const std::vector<PageLayout>& layouts_;
  DeviceBlock block_;
  SlotTable table_;
  DeviceField* fields_ = nullptr;
  PlannedRow* planned_ = nullptr;    // (max_rows) the step's rows as ops use them
  DeviceRow* fold_rows_ = nullptr;   // (slots) a committed row of no tokens for every slot
  PlannedRow* fold_plan_ = nullptr;  // one of them, planned
  std::vector<float*> a_;            // by layer: (heads), or null: not a Mamba-2 layer
  std::int64_t row_count_ = 0;
  bool plain_ = false;                    // whether the step's rows are known to be plain decoding
  std::vector<LayerKernels> geometries_;  // of layers that differ
};

Status CudaPool::check_layer(int layer) const {
  const LayerKernels kernels(options_.layers[index(layer)], options_);
  const Status status = kernels.check(info_);
  if (status.ok()) return {};
  return make_status(status.code(), "layer ", layer, ": ", status.message());
}

void CudaPool::partition(Partition& parts, bool owns_pages) {
  const auto slots = static_cast<std::size_t>(options_.slots);
  const auto rows = static_cast<std::size_t>(plan_.max_rows);
  std::size_t field_count = 0;
  for (const PageLayout& layout : layouts_) field_count += layout.fields.size();
  if (owns_pages) table_.base = parts.take<std::byte>(plan_.page_bytes);
  table_.cursors = parts.take<Cursor>(slots);
  table_.conditions = parts.take<SlotCondition>(slots);
  table_.owners = parts.take<std::int32_t>(slots);
  table_.incoming = parts.take<DeviceRow>(rows);
  table_.rows = parts.take<DeviceRow>(rows);
  table_.accepted = parts.take<std::int64_t>(rows);
  table_.error = parts.take<DeviceError>(1);
  fields_ = parts.take<DeviceField>(field_count);
  planned_ = parts.take<PlannedRow>(rows);
  fold_rows_ = parts.take<DeviceRow>(slots);
  fold_plan_ = parts.take<PlannedRow>(1);
  a_.clear();
  for (const LayerSpec& layer : options_.layers) {
    const auto* mamba2 = std::get_if<Mamba2Shape>(&layer.recurrence);
    a_.push_back(mamba2 == nullptr ? nullptr
                                   : parts.take<float>(static_cast<std::size_t>(mamba2->heads)));
  }
}

std::vector<DeviceField> CudaPool::device_fields() const {
  std::vector<DeviceField> out;
  for (std::size_t layer = 0; layer < layouts_.size(); ++layer) {
    for (const Field& f : layouts_[layer].fields) {
      DeviceField field;
      field.offset = static_cast<std::int64_t>(plan_.layer_offset[layer] + f.offset);
      field.slot_stride = static_cast<std::int64_t>(plan_.stride[layer]);
      field.outer = f.outer;
      field.places = f.places;
      field.inner = static_cast<std::int64_t>(f.inner_bytes());
      field.word = field.inner % 16 == 0 ? 16 : field.inner % 4 == 0 ? 4 : 2;
      field.kind = f.is_state()                   ? DeviceField::kState
                   : f.kind == FieldKind::kRecord ? DeviceField::kRecord
                                                  : DeviceField::kConv;
      if (f.kind == FieldKind::kConv) field.history = options_.layers[layer].conv.width - 1;
      out.push_back(field);
    }
  }
  return out;
}

Status CudaPool::initialize() {
  table_.slots = options_.slots;
  table_.limits = options_.limits;
  table_.rewindable = options_.rewindable;
  table_.fields = fields_;
  for (auto layer = options_.layers.begin(); layer != options_.layers.end(); ++layer) {
    if (std::find(options_.layers.begin(), layer, *layer) == layer) {
      geometries_.emplace_back(*layer, options_);
    }
  }

  const std::vector<DeviceField> fields = device_fields();
  table_.field_count = static_cast<std::int32_t>(fields.size());
  // A slot's largest field in a handful of words per thread, and no more blocks than fill a device.
  std::int64_t largest = 1;
  for (const DeviceField& f : fields) {
    largest = std::max(largest, f.outer * f.places * f.inner / f.word);
  }
  constexpr std::int64_t kWordsPerBlock = 2048;
  table_.blocks_per_field = static_cast<std::int32_t>(
      std::clamp<std::int64_t>(largest / kWordsPerBlock, 1, info_.multiprocessors));

  std::vector<DeviceRow> fold_rows(static_cast<std::size_t>(options_.slots));
  for (std::size_t slot = 0; slot < fold_rows.size(); ++slot) {
    fold_rows[slot].slot = static_cast<std::int32_t>(slot);
    fold_rows[slot].kind = RowKind::kCommitted;
  }
  const auto slots = static_cast<std::size_t>(options_.slots);
  const auto upload = [&](void* to, const auto& values) {
    return to_status(
        cudaMemcpy(to, values.data(), values.size() * sizeof(values[0]), cudaMemcpyHostToDevice),
        "set-up of the pool");
  };
  RSSM_RETURN_IF_ERROR(upload(fields_, fields));
  RSSM_RETURN_IF_ERROR(upload(fold_rows_, fold_rows));
  const auto fill = [&](void* to, int byte, std::size_t bytes) {
    return to_status(cudaMemset(to, byte, bytes), "set-up of the pool");
  };
  RSSM_RETURN_IF_ERROR(fill(table_.cursors, 0, slots * sizeof(Cursor)));
  static_assert(static_cast<int>(SlotCondition::kFree) == 0);
  RSSM_RETURN_IF_ERROR(fill(table_.conditions, 0, slots * sizeof(SlotCondition)));
  RSSM_RETURN_IF_ERROR(fill(table_.owners, kNoRowByte, slots * sizeof(std::int32_t)));
  RSSM_RETURN_IF_ERROR(fill(table_.error, 0, sizeof(DeviceError)));
  if (options_.poison) RSSM_RETURN_IF_ERROR(fill(table_.base, 0xff, plan_.page_bytes));
  // The first launch: a binary without code for this device is found out here.
  launch_set_slot(table_, 0, {}, SlotCondition::kFree, nullptr);
  RSSM_RETURN_IF_ERROR(to_status(cudaGetLastError(), "first kernel of the pool"));
  return to_status(cudaDeviceSynchronize(), "set-up of the pool");
}

Status CudaPool::fold_external(Stream stream, int layer, const RecordPointers& records,
                               bool from_zero, std::int64_t count, std::int32_t slot) {
  return with_device("fold of loaded records", [&]() -> Status {
    const PageLayout& layout = layouts_[index(layer)];
    LayerKernels kernels = layer_kernels(layer);
    // A pool of one slot whose ring holds exactly these records.
    const ReplayLimits limits{.window = static_cast<int>(std::max<std::int64_t>(1, count)),
                              .draft_capacity = 1};
    const std::int64_t places = limits.record_places();
    kernels.set_limits(limits);
    kernels.point_at_pages(layout, page(layer, slot), plan_.stride[index(layer)]);
    DeviceBlock block;
    const auto bytes_of = [&](const Field& f) {
      return round_up(static_cast<std::size_t>(f.outer * places) * f.inner_bytes());
    };
    std::size_t bytes = round_up(sizeof(PlannedRow));
    for (const Field& f : layout.fields) {
      if (f.kind == FieldKind::kRecord) bytes += bytes_of(f);
    }
    RSSM_RETURN_IF_ERROR(block.allocate(bytes));
    Partition parts(block.data());
    auto* row = parts.take<PlannedRow>(1);
    const PlannedRow host_row{.slot = 0,
                              .live = static_cast<std::int16_t>(count),
                              .kind = PlannedRow::kCommitted,
                              .zero = from_zero};
    RSSM_RETURN_IF_ERROR(write(stream, row, &host_row, sizeof host_row));
    for (const Field& f : layout.fields) {
      if (f.kind != FieldKind::kRecord) continue;
      auto* ring = parts.take<std::byte>(bytes_of(f));
      const auto pitch = static_cast<std::size_t>(places) * f.inner_bytes();
      const auto width = static_cast<std::size_t>(count) * f.inner_bytes();
      RSSM_RETURN_IF_ERROR(to_status(cudaMemcpy2DAsync(ring, pitch, records.at(f.name), width,
                                                       width, static_cast<std::size_t>(f.outer),
                                                       cudaMemcpyHostToDevice, cuda_stream(stream)),
                                     "upload of loaded records"));
      kernels.point_at_ring(f, ring, places);
    }
    kernels.set_rows(row, 1);
    RSSM_RETURN_IF_ERROR(kernels.run(info_, cuda_stream(stream)));
    return to_status(cudaStreamSynchronize(cuda_stream(stream)), "fold of loaded records");
  });
}

Status CudaPool::mamba2_step(Stream stream, int layer, const Mamba2Params& params,
                             const Mamba2Operands& o) {
  return with_device("mamba2_step", [&] {
    LayerKernels kernels = layer_kernels(layer);
    auto& p = kernels.as<Mamba2CudaParams>();
    p.d = params.d.as<const float>();
    p.dt_bias = params.dt_bias.as<const float>();
    p.dt_softplus = params.dt_softplus;
    p.dt_min = params.dt_min;
    p.dt_max = params.dt_max;
    p.token_count = o.x.shape[0];
    p.x = o.x.data;
    p.b = o.b.data;
    p.c = o.c.data;
    p.dt = o.dt.data;
    p.z = o.z.data;
    p.y = o.y.data;
    p.dt_is_f32 = o.dt.dtype == DType::kF32;
    p.x_token_stride = o.x.strides[0];
    p.x_head_stride = o.x.strides[1];
    p.b_token_stride = o.b.strides[0];
    p.b_group_stride = o.b.strides[1];
    p.c_token_stride = o.c.strides[0];
    p.c_group_stride = o.c.strides[1];
    p.dt_token_stride = o.dt.strides[0];
    p.z_token_stride = o.z.strides[0];
    p.z_head_stride = o.z.strides[1];
    p.y_token_stride = o.y.strides[0];
    p.y_head_stride = o.y.strides[1];
    return kernels.run(info_, cuda_stream(stream));
  });
}

Status CudaPool::delta_rule_step(Stream stream, int layer, const DeltaRuleParams& params,
                                 const DeltaRuleOperands& o) {
  return with_device(params.family, [&] {
    LayerKernels kernels = layer_kernels(layer);
    auto& p = kernels.as<DeltaRuleCudaParams>();
    p.a_log = params.a_log.as<const float>();
    p.dt_bias = params.dt_bias.as<const float>();
    p.bounded = params.lower_bound.has_value();
    p.lower_bound = params.lower_bound.value_or(0.0f);
    p.beta_doubled = params.beta_doubled;
    p.normalize = params.normalize;
    p.norm_epsilon = params.norm_epsilon;
    p.q_scale = params.q_scale(p.shape.key_dim);
    p.token_count = o.q.shape[0];
    p.q = o.q.data;
    p.k = o.k.data;
    p.v = o.v.data;
    p.gate = o.gate.data;
    p.beta = o.beta.data;
    p.o = o.o.data;
    p.gate_is_f32 = o.gate.dtype == DType::kF32;
    p.beta_is_f32 = o.beta.dtype == DType::kF32;
    p.q_token_stride = o.q.strides[0];
    p.q_head_stride = o.q.strides[1];
    p.k_token_stride = o.k.strides[0];
    p.k_head_stride = o.k.strides[1];
    p.v_token_stride = o.v.strides[0];
    p.v_head_stride = o.v.strides[1];
    p.gate_token_stride = o.gate.strides[0];
    p.gate_head_stride = o.gate.rank == 3 ? o.gate.strides[1] : 1;
    p.beta_token_stride = o.beta.strides[0];
    p.o_token_stride = o.o.strides[0];
    p.o_head_stride = o.o.strides[1];
    return kernels.run(info_, cuda_stream(stream));
  });
}

Status CudaPool::causal_conv1d_step(Stream stream, int layer, const CausalConv1dOperands& o) {
  const Field& ring = layouts_[index(layer)].field("conv");
  CausalConv1dCudaParams p;
  p.rows = table_.rows;
  p.row_count = row_count_;
  p.cursors = table_.cursors;
  p.ring = field(layer, ring);
  p.ring_slot_stride = slot_stride(layer, ring);
  p.places = ring.places;
  p.channels = ring.inner;
  p.width = options_.layers[index(layer)].conv.width;
  p.activation = options_.activation;
  p.u = o.u.data;
  p.out = o.out.data;
  p.u_token_stride = o.u.strides[0];
  p.out_token_stride = o.out.strides[0];
  p.weight = o.weight.as<const float>();
  p.bias = o.bias.as<const float>();
  p.silu = o.silu;
  if (p.row_count == 0) return {};
  if (p.row_count > std::numeric_limits<std::int32_t>::max() / p.channels) {
    return unsupported("a convolution step of ", p.row_count, " rows of ", p.channels,
                       " channels; a launch allows ", std::numeric_limits<std::int32_t>::max(),
                       " of both");
  }
  return launch("causal_conv1d_step", [&] { launch_causal_conv1d(p, cuda_stream(stream)); });
}

}  // namespace
}  // namespace cuda

Result<std::unique_ptr<DevicePool>> create_device_pool(const DevicePoolPlan& plan) {
  const StatePoolOptions& options = *plan.options;
  RSSM_RETURN_IF_ERROR(cuda::check_device(options.device));
  const cuda::CurrentDevice current(options.device.index);
  RSSM_RETURN_IF_ERROR(current.status());
  RSSM_RETURN_IF_ERROR(cuda::check_earlier("creation of a pool"));
  if (!options.storage.empty()) {
    RSSM_RETURN_IF_ERROR(check_storage(
        options, plan.page_bytes / static_cast<std::size_t>(options.slots), plan.page_bytes));
    RSSM_RETURN_IF_ERROR(cuda::check_storage_device(options));
  }
  RSSM_ASSIGN_OR_RETURN(const cuda::CudaDeviceInfo info, cuda::query_device(options.device.index));
  auto pool = std::make_unique<cuda::CudaPool>(plan, info);
  RSSM_RETURN_IF_ERROR(pool->create());
  return std::unique_ptr<DevicePool>(std::move(pool));
}

}  // namespace replayssm
