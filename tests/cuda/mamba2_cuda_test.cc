// The Mamba-2 CUDA kernels against the fp64 oracle and against each other. Every buffer starts as
// NaN, pages are larger than their contents, and after every step memory that must not have changed
// is compared bit by bit. Without a GPU every case is skipped.
#include "ops/mamba2/cuda/launch.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/mamba2/reference.h"

namespace replayssm::cuda {
namespace {

#define ASSERT_CUDA(expr)                                                          \
  do {                                                                             \
    const cudaError_t error_ = (expr);                                             \
    ASSERT_EQ(error_, cudaSuccess) << #expr << ": " << cudaGetErrorString(error_); \
  } while (false)

void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    ADD_FAILURE() << what << ": " << cudaGetErrorString(error);
    throw std::runtime_error(what);
  }
}

class DeviceBytes {
 public:
  DeviceBytes() = default;
  explicit DeviceBytes(std::size_t bytes) : bytes_(bytes) {
    require(cudaMalloc(&data_, std::max<std::size_t>(bytes, 16)), "cudaMalloc");
  }
  DeviceBytes(DeviceBytes&& other) noexcept { *this = std::move(other); }
  DeviceBytes& operator=(DeviceBytes&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceBytes() { cudaFree(data_); }

  void fill(int byte) { require(cudaMemset(data_, byte, bytes_), "cudaMemset"); }
  void upload(const void* from, std::size_t bytes) {
    ASSERT_LE(bytes, bytes_);
    require(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice), "upload");
  }
  std::vector<unsigned char> download() const {
    std::vector<unsigned char> out(bytes_);
    require(cudaMemcpy(out.data(), data_, bytes_, cudaMemcpyDeviceToHost), "download");
    return out;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::size_t size() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

struct Case {
  Mamba2Shape shape;
  ReplayLimits limits;
  DType checkpoint = DType::kF32;
  DType activation = DType::kBF16;
  std::int64_t slots = 6;
  bool d = true, bias = true, z = false, dt_f32 = false, softplus = true, limits_on = false;
  std::int64_t slot_padding = 64;   // elements between pages
  std::int64_t token_padding = 32;  // elements between tokens of the packed operands
  std::uint64_t seed = 1;

  std::string name() const {
    std::ostringstream out;
    out << to_string(checkpoint) << "/" << to_string(activation) << " H" << shape.heads << " P"
        << shape.head_dim << " N" << shape.state_size << " G" << shape.groups << " L"
        << limits.window << " T" << limits.draft_capacity << (z ? " z" : "") << (d ? " D" : "")
        << (bias ? " bias" : "") << (dt_f32 ? " dt32" : "") << (limits_on ? " limits" : "");
    return std::move(out).str();
  }
};

double bound(const Case& c) {
  if (c.checkpoint == DType::kBF16) return 4e-2;
  return c.activation == DType::kBF16 ? 4e-3 : 2e-5;
}

float from_bits(const unsigned char* at, DType dtype) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  BF16 value;
  std::memcpy(&value, at, 2);
  return to_float(value);
}

void to_bits(unsigned char* at, float value, DType dtype) {
  if (dtype == DType::kF32) {
    std::memcpy(at, &value, 4);
  } else {
    const BF16 narrow = to_bf16(value);
    std::memcpy(at, &narrow, 2);
  }
}

/// A token's operands, already rounded to the activation type.
Mamba2Token random_token(const Case& c, std::mt19937_64& rng) {
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> raw(-4.0f, 1.5f);
  const auto round = [&](float v, DType dtype) {
    return dtype == DType::kBF16 ? to_float(to_bf16(v)) : v;
  };
  Mamba2Token token;
  const auto fill = [&](std::vector<float>& to, std::int64_t n) {
    to.resize(static_cast<std::size_t>(n));
    for (float& v : to) v = round(normal(rng), c.activation);
  };
  fill(token.x, c.shape.heads * c.shape.head_dim);
  fill(token.b, c.shape.groups * c.shape.state_size);
  fill(token.c, c.shape.groups * c.shape.state_size);
  if (c.z) fill(token.z, c.shape.heads * c.shape.head_dim);
  token.dt.resize(static_cast<std::size_t>(c.shape.heads));
  for (float& v : token.dt) v = round(raw(rng), c.dt_f32 ? DType::kF32 : c.activation);
  return token;
}

struct Row {
  RowKind kind = RowKind::kTentative;
  std::int32_t slot = -1;
  std::vector<Mamba2Token> tokens;
};

/// One layer's slots on the device with an oracle per slot.
class Harness {
 public:
  explicit Harness(const Case& config) : c(config), rng(config.seed) {
    const Mamba2Shape& s = c.shape;
    const std::int64_t places = c.limits.record_places();
    const auto state_bytes = static_cast<std::int64_t>(size_of(c.checkpoint));
    const auto act_bytes = static_cast<std::int64_t>(size_of(c.activation));
    p.heads = s.heads;
    p.head_dim = s.head_dim;
    p.state_size = s.state_size;
    p.groups = s.groups;
    p.limits = c.limits;
    p.checkpoint = c.checkpoint;
    p.activation = c.activation;
    p.state_head_stride = s.head_dim * s.state_size;
    p.state_slot_stride = s.heads * p.state_head_stride + c.slot_padding;
    p.ring_x_place_stride = s.head_dim;
    p.ring_x_head_stride = places * s.head_dim;
    p.ring_x_slot_stride = s.heads * p.ring_x_head_stride + c.slot_padding;
    p.ring_b_place_stride = s.state_size;
    p.ring_b_group_stride = places * s.state_size;
    p.ring_b_slot_stride = s.groups * p.ring_b_group_stride + c.slot_padding;
    p.ring_dt_head_stride = places;
    p.ring_dt_slot_stride = s.heads * places + c.slot_padding;
    state = DeviceBytes(static_cast<std::size_t>(c.slots * p.state_slot_stride * state_bytes));
    ring_x = DeviceBytes(static_cast<std::size_t>(c.slots * p.ring_x_slot_stride * act_bytes));
    ring_b = DeviceBytes(static_cast<std::size_t>(c.slots * p.ring_b_slot_stride * act_bytes));
    ring_dt = DeviceBytes(static_cast<std::size_t>(c.slots * p.ring_dt_slot_stride * 4));
    for (DeviceBytes* buffer : {&state, &ring_x, &ring_b, &ring_dt}) buffer->fill(0xff);
    p.state = state.as<void>();
    p.ring_x = ring_x.as<void>();
    p.ring_b = ring_b.as<void>();
    p.ring_dt = ring_dt.as<float>();

    std::uniform_real_distribution<float> a_range(0.05f, 2.0f);
    std::uniform_real_distribution<float> unit(-1.0f, 1.0f);
    const auto heads = static_cast<std::size_t>(s.heads);
    reference_params.a.resize(heads);
    for (float& v : reference_params.a) v = -a_range(rng);
    if (c.d) {
      reference_params.d.resize(heads);
      for (float& v : reference_params.d) v = unit(rng);
    }
    if (c.bias) {
      reference_params.dt_bias.resize(heads);
      for (float& v : reference_params.dt_bias) v = unit(rng);
    }
    reference_params.dt_softplus = c.softplus;
    if (c.limits_on) {
      p.dt_min = 0.1f;
      p.dt_max = 1.25f;
      reference_params.dt_min = 0.1f;
      reference_params.dt_max = 1.25f;
    }
    p.dt_softplus = c.softplus;
    p.dt_is_f32 = c.dt_f32;
    const auto floats = [&](DeviceBytes& to, const std::vector<float>& from) -> const float* {
      if (from.empty()) return nullptr;
      to = DeviceBytes(from.size() * 4);
      to.upload(from.data(), from.size() * 4);
      return to.as<float>();
    };
    p.a = floats(a, reference_params.a);
    p.d = floats(d, reference_params.d);
    p.dt_bias = floats(bias, reference_params.dt_bias);
    cursors.resize(static_cast<std::size_t>(c.slots));
    device_cursors = DeviceBytes(cursors.size() * sizeof(Cursor));
    put_cursors();
    error = DeviceBytes(sizeof(DeviceError));
    error.fill(0);
    for (std::int64_t i = 0; i < c.slots; ++i) {
      oracle.push_back(std::make_unique<Mamba2Reference>(s, reference_params));
    }
    auto queried = query_device(0);
    EXPECT_TRUE(queried.ok()) << queried.status().message();
    device = queried.value();
  }

  void put_cursors() { device_cursors.upload(cursors.data(), cursors.size() * sizeof(Cursor)); }

  void force_flush(std::int32_t slot) {
    cursors[static_cast<std::size_t>(slot)].force_flush = true;
    put_cursors();
  }

  /// Packs the rows' operands as slices of one projection, with a gap of one token between rows.
  void put_operands(const std::vector<Row>& rows) {
    const Mamba2Shape& s = c.shape;
    const auto act = static_cast<std::int64_t>(size_of(c.activation));
    device_rows.clear();
    std::int64_t tokens = 0;
    for (const Row& row : rows) {
      device_rows.push_back({.token_begin = tokens,
                             .token_count = static_cast<std::int64_t>(row.tokens.size()),
                             .slot = row.slot,
                             .kind = row.kind});
      tokens += static_cast<std::int64_t>(row.tokens.size()) + 1;
    }
    const std::int64_t hp = s.heads * s.head_dim;
    const std::int64_t gn = s.groups * s.state_size;
    const std::int64_t stride = 2 * hp + 2 * gn + c.token_padding;
    const std::int64_t dt_bytes = c.dt_f32 ? 4 : act;
    std::vector<unsigned char> packed(static_cast<std::size_t>(tokens * stride * act), 0xff);
    std::vector<unsigned char> dt(static_cast<std::size_t>(tokens * s.heads * dt_bytes), 0xff);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      for (std::size_t t = 0; t < rows[r].tokens.size(); ++t) {
        const Mamba2Token& token = rows[r].tokens[t];
        const std::int64_t at = device_rows[r].token_begin + static_cast<std::int64_t>(t);
        const auto put = [&](const std::vector<float>& values, std::int64_t offset) {
          for (std::size_t i = 0; i < values.size(); ++i) {
            to_bits(packed.data() + (at * stride + offset + static_cast<std::int64_t>(i)) * act,
                    values[i], c.activation);
          }
        };
        put(token.x, 0);
        put(token.b, hp);
        put(token.c, hp + gn);
        put(token.z, hp + 2 * gn);
        for (std::size_t h = 0; h < token.dt.size(); ++h) {
          to_bits(dt.data() + (at * s.heads + static_cast<std::int64_t>(h)) * dt_bytes, token.dt[h],
                  c.dt_f32 ? DType::kF32 : c.activation);
        }
      }
    }
    reserve(operands, packed.size());
    operands.upload(packed.data(), packed.size());
    reserve(dts, dt.size());
    dts.upload(dt.data(), dt.size());
    reserve(rows_buffer, device_rows.size() * sizeof(DeviceRow));
    rows_buffer.upload(device_rows.data(), device_rows.size() * sizeof(DeviceRow));
    y_stride = hp + c.token_padding;
    reserve(y, static_cast<std::size_t>(tokens * y_stride * act));
    y.fill(0xff);
    unsigned char* base = operands.as<unsigned char>();
    reserve(planned, device_rows.size() * sizeof(PlannedRow));
    p.rows = planned.as<PlannedRow>();
    p.row_count = static_cast<std::int64_t>(rows.size());
    p.token_count = tokens;
    p.x = base;
    p.b = base + hp * act;
    p.c = base + (hp + gn) * act;
    p.z = c.z ? base + (hp + 2 * gn) * act : nullptr;
    p.dt = dts.as<void>();
    p.y = y.as<void>();
    p.x_token_stride = p.b_token_stride = p.c_token_stride = p.z_token_stride = stride;
    p.x_head_stride = p.z_head_stride = p.y_head_stride = s.head_dim;
    p.b_group_stride = p.c_group_stride = s.state_size;
    p.dt_token_stride = s.heads;
    p.y_token_stride = y_stride;
  }

  static void reserve(DeviceBytes& buffer, std::size_t bytes) {
    if (buffer.size() != bytes) buffer = DeviceBytes(bytes);
  }

  Status launch(const Mamba2Tuning& tuning = {}, cudaStream_t stream = nullptr) {
    RSSM_RETURN_IF_ERROR(validate_mamba2(p));
    RSSM_ASSIGN_OR_RETURN(const Mamba2CudaConfig config, choose_mamba2_config(p, device, tuning));
    RSSM_RETURN_IF_ERROR(cuda_plan_step({.rows = rows_buffer.as<DeviceRow>(),
                                         .row_count = p.row_count,
                                         .token_count = p.token_count,
                                         .cursors = device_cursors.as<Cursor>(),
                                         .slots = c.slots,
                                         .limits = c.limits,
                                         .error = error.as<DeviceError>(),
                                         .planned = planned.as<PlannedRow>()},
                                        stream));
    return mamba2_cuda_step(p, config, stream);
  }

  /// y of a row, (tokens, heads * head_dim).
  std::vector<float> outputs(std::size_t row) const {
    const std::vector<unsigned char> bytes = y.download();
    return outputs(bytes, row);
  }
  std::vector<float> outputs(const std::vector<unsigned char>& bytes, std::size_t row) const {
    const auto act = static_cast<std::int64_t>(size_of(c.activation));
    const DeviceRow& r = device_rows[row];
    std::vector<float> out;
    for (std::int64_t t = 0; t < r.token_count; ++t) {
      for (std::int64_t i = 0; i < c.shape.heads * c.shape.head_dim; ++i) {
        out.push_back(
            from_bits(bytes.data() + ((r.token_begin + t) * y_stride + i) * act, c.activation));
      }
    }
    return out;
  }

  /// Runs the rows on the device and in the oracle, compares, and leaves cursors uncommitted.
  void step(const std::vector<Row>& rows, const Mamba2Tuning& tuning = {}, bool check = true) {
    put_operands(rows);
    std::vector<unsigned char> before[4];
    const DeviceBytes* buffers[4] = {&state, &ring_x, &ring_b, &ring_dt};
    if (check) {
      for (int i = 0; i < 4; ++i) before[i] = buffers[i]->download();
    }
    const Status status = launch(tuning);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_CUDA(cudaDeviceSynchronize());
    const std::vector<unsigned char> bytes = y.download();
    pending.clear();
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const Row& row = rows[r];
      const std::vector<float> got = outputs(bytes, r);
      std::vector<double> want;
      if (row.slot < 0) {
        want.assign(got.size(), 0.0);
      } else {
        Mamba2Reference run = *oracle[static_cast<std::size_t>(row.slot)];
        for (const Mamba2Token& token : row.tokens) {
          const std::vector<double> y_token = run.step(token);
          want.insert(want.end(), y_token.begin(), y_token.end());
        }
      }
      double difference = 0.0;
      double reference = 0.0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        ASSERT_TRUE(std::isfinite(got[i])) << c.name() << ", row " << r << ", element " << i
                                           << " of " << got.size() << " is " << got[i];
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        reference += want[i] * want[i];
      }
      ASSERT_LE(std::sqrt(difference), bound(c) * std::sqrt(reference))
          << c.name() << ", row " << r << " slot " << row.slot << " kind " << to_string(row.kind)
          << " tokens " << row.tokens.size() << ": relative "
          << std::sqrt(difference / std::max(reference, 1e-300));
      worst = std::max(worst, std::sqrt(difference / std::max(reference, 1e-300)));
    }
    if (check) {
      for (int i = 0; i < 4; ++i) check_untouched(i, rows, before[i], buffers[i]->download());
    }
    pending = rows;
  }

  /// Which bytes of a buffer the step may have changed.
  void check_untouched(int buffer, const std::vector<Row>& rows,
                       const std::vector<unsigned char>& before,
                       const std::vector<unsigned char>& after) {
    const Mamba2Shape& s = c.shape;
    const auto act = static_cast<std::int64_t>(size_of(c.activation));
    const std::int64_t places = c.limits.record_places();
    std::vector<bool> free(before.size(), false);
    for (const Row& row : rows) {
      if (row.slot < 0) continue;
      const Cursor& cursor = cursors[static_cast<std::size_t>(row.slot)];
      const auto allow = [&](std::int64_t element, std::int64_t count, std::int64_t bytes) {
        for (std::int64_t i = element * bytes; i < (element + count) * bytes; ++i) {
          free[static_cast<std::size_t>(i)] = true;
        }
      };
      if (buffer == 0) {
        if (row_flushes(row.kind, cursor, c.limits)) {
          allow(row.slot * p.state_slot_stride, s.state_elements(),
                static_cast<std::int64_t>(size_of(c.checkpoint)));
        }
        continue;
      }
      if (row.kind == RowKind::kCommitted) continue;
      for (std::size_t t = 0; t < row.tokens.size(); ++t) {
        const std::int64_t place = (cursor.position + static_cast<std::int64_t>(t)) % places;
        for (std::int64_t h = 0; h < s.heads && buffer != 2; ++h) {
          if (buffer == 1) {
            allow(row.slot * p.ring_x_slot_stride + h * p.ring_x_head_stride +
                      place * p.ring_x_place_stride,
                  s.head_dim, act);
          } else {
            allow(row.slot * p.ring_dt_slot_stride + h * p.ring_dt_head_stride + place, 1, 4);
          }
        }
        for (std::int64_t g = 0; g < s.groups && buffer == 2; ++g) {
          allow(row.slot * p.ring_b_slot_stride + g * p.ring_b_group_stride +
                    place * p.ring_b_place_stride,
                s.state_size, act);
        }
      }
    }
    static const char* const kNames[] = {"state", "x ring", "B ring", "dt ring"};
    for (std::size_t i = 0; i < before.size(); ++i) {
      if (before[i] == after[i] || free[i]) continue;
      FAIL() << c.name() << ": byte " << i << " of the " << kNames[buffer] << " changed";
    }
  }

  void commit(const std::vector<std::int64_t>& accepted) {
    DeviceBytes device_accepted(accepted.size() * 8);
    device_accepted.upload(accepted.data(), accepted.size() * 8);
    const CommitParams params{.rows = rows_buffer.as<DeviceRow>(),
                              .accepted = device_accepted.as<std::int64_t>(),
                              .row_count = p.row_count,
                              .cursors = device_cursors.as<Cursor>(),
                              .slots = c.slots,
                              .limits = c.limits,
                              .error = error.as<DeviceError>()};
    const Status status = cuda_commit(params, nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_CUDA(cudaDeviceSynchronize());
    for (std::size_t r = 0; r < pending.size(); ++r) {
      const Row& row = pending[r];
      if (row.slot < 0) continue;
      const auto slot = static_cast<std::size_t>(row.slot);
      for (std::int64_t t = 0; t < accepted[r]; ++t) {
        oracle[slot]->step(row.tokens[static_cast<std::size_t>(t)]);
      }
      cursors[slot] = commit_cursor(cursors[slot], row.kind, accepted[r], c.limits);
    }
    std::vector<Cursor> found(cursors.size());
    require(cudaMemcpy(found.data(), device_cursors.as<void>(), cursors.size() * sizeof(Cursor),
                       cudaMemcpyDeviceToHost),
            "download");
    for (std::size_t i = 0; i < cursors.size(); ++i) {
      ASSERT_TRUE(found[i] == cursors[i]) << c.name() << ": cursor of slot " << i;
    }
  }

  DeviceError device_error() const {
    DeviceError found;
    const auto bytes = error.download();
    std::memcpy(&found, bytes.data(), sizeof(found));
    return found;
  }

  std::vector<unsigned char> state_of(std::int32_t slot) const {
    const auto bytes = static_cast<std::int64_t>(size_of(c.checkpoint));
    std::vector<unsigned char> out(static_cast<std::size_t>(c.shape.state_elements() * bytes));
    require(cudaMemcpy(out.data(), state.as<unsigned char>() + slot * p.state_slot_stride * bytes,
                       out.size(), cudaMemcpyDeviceToHost),
            "download");
    return out;
  }

  std::vector<Mamba2Token> tokens(std::int64_t n) {
    std::vector<Mamba2Token> out;
    for (std::int64_t i = 0; i < n; ++i) out.push_back(random_token(c, rng));
    return out;
  }
  std::int64_t uniform(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(rng);
  }

  /// Rows of random kinds for a random subset of slots in random order, and some padding.
  std::vector<Row> random_rows() {
    std::vector<std::int32_t> order(static_cast<std::size_t>(c.slots));
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
    std::shuffle(order.begin(), order.end(), rng);
    order.resize(static_cast<std::size_t>(uniform(1, c.slots - 1)));
    std::vector<Row> rows;
    for (const std::int32_t slot : order) {
      if (uniform(0, 4) == 0) rows.push_back({RowKind::kTentative, -1, tokens(uniform(0, 2))});
      if (uniform(0, 5) == 0) {
        rows.push_back({RowKind::kCommitted, slot, tokens(uniform(1, 5))});
      } else {
        rows.push_back({RowKind::kTentative, slot, tokens(uniform(1, c.limits.draft_capacity))});
      }
    }
    return rows;
  }

  std::vector<std::int64_t> random_accepts(const std::vector<Row>& rows) {
    std::vector<std::int64_t> out;
    for (const Row& row : rows) {
      const auto n = static_cast<std::int64_t>(row.tokens.size());
      out.push_back(row.kind == RowKind::kCommitted || uniform(0, 2) == 0 ? n : uniform(0, n));
    }
    return out;
  }

  Case c;
  std::mt19937_64 rng;
  Mamba2CudaParams p;
  Mamba2ReferenceParams reference_params;
  CudaDeviceInfo device;
  DeviceBytes state, ring_x, ring_b, ring_dt, a, d, bias, device_cursors, error;
  DeviceBytes operands, dts, rows_buffer, y, planned;
  std::int64_t y_stride = 0;
  std::vector<DeviceRow> device_rows;
  std::vector<Cursor> cursors;
  std::vector<std::unique_ptr<Mamba2Reference>> oracle;
  std::vector<Row> pending;
  double worst = 0.0;
};

class Mamba2Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      cudaGetLastError();
      GTEST_SKIP() << "no CUDA device";
    }
  }
};

struct Types {
  DType checkpoint, activation;
};
constexpr Types kTypes[] = {
    {DType::kF32, DType::kF32}, {DType::kF32, DType::kBF16}, {DType::kBF16, DType::kBF16}};

constexpr ReplayLimits limits_of(int window, int draft) {
  return {.window = window, .draft_capacity = draft};
}

/// Gives every slot a random position, so that ring starts differ and wrap around.
void scatter(Harness& h) {
  std::vector<Row> rows;
  std::vector<std::int64_t> accepted;
  for (std::int32_t slot = 0; slot < h.c.slots; ++slot) {
    const std::int64_t n = h.uniform(0, h.c.limits.record_places() + 3);
    if (n == 0) continue;  // a slot at position 0: its checkpoint is zero and stays unread
    rows.push_back({RowKind::kCommitted, slot, h.tokens(n)});
    accepted.push_back(n);
  }
  if (rows.empty()) return;
  h.step(rows);
  if (::testing::Test::HasFatalFailure()) return;
  h.commit(accepted);
}

void run_random_steps(Harness& h, int steps) {
  scatter(h);
  for (int i = 0; i < steps && !::testing::Test::HasFatalFailure(); ++i) {
    if (h.uniform(0, 3) == 0) h.force_flush(static_cast<std::int32_t>(h.uniform(0, h.c.slots - 1)));
    const std::vector<Row> rows = h.random_rows();
    h.step(rows);
    if (::testing::Test::HasFatalFailure()) return;
    h.commit(h.random_accepts(rows));
  }
  ASSERT_EQ(h.device_error().what, DeviceError::kNone);
}

TEST_F(Mamba2Cuda, MixedRowsMatchTheOracle) {
  const Mamba2Shape shapes[] = {
      {.heads = 8, .head_dim = 64, .state_size = 128, .groups = 2},
      {.heads = 8, .head_dim = 80, .state_size = 128, .groups = 8},
      {.heads = 4, .head_dim = 16, .state_size = 64, .groups = 1},
      {.heads = 4, .head_dim = 64, .state_size = 256, .groups = 2},
      {.heads = 6, .head_dim = 80, .state_size = 64, .groups = 2},
      {.heads = 3, .head_dim = 16, .state_size = 128, .groups = 1},
  };
  const ReplayLimits limits[] = {limits_of(16, 1), limits_of(1, 1),  limits_of(16, 4),
                                 limits_of(64, 1), limits_of(20, 7), limits_of(16, 16),
                                 limits_of(64, 16)};
  std::uint64_t seed = 1;
  for (const Types types : kTypes) {
    double worst = 0.0;
    for (const Mamba2Shape& shape : shapes) {
      for (const ReplayLimits& limit : limits) {
        Case c{.shape = shape,
               .limits = limit,
               .checkpoint = types.checkpoint,
               .activation = types.activation,
               .seed = ++seed};
        c.z = seed % 2 == 0;
        c.d = seed % 3 != 0;
        c.bias = seed % 5 != 0;
        c.dt_f32 = seed % 4 == 1;
        c.limits_on = seed % 7 == 3;
        c.softplus = seed % 11 != 5 || !c.limits_on ? true : false;
        Harness h(c);
        Result<Mamba2CudaConfig> config = choose_mamba2_config(h.p, h.device);
        if (!config.ok()) {
          EXPECT_EQ(config.status().code(), StatusCode::kUnsupported);
          std::printf("  refused %s: %s\n", c.name().c_str(), config.status().message().c_str());
          continue;
        }
        run_random_steps(h, limit.window > 16 ? 24 : 14);
        if (HasFatalFailure()) return;
        worst = std::max(worst, h.worst);
      }
    }
    std::printf("  %s/%s worst relative error %.3g\n", to_string(types.checkpoint),
                to_string(types.activation), worst);
  }
}

TEST_F(Mamba2Cuda, EveryTokenCount) {
  for (const Types types : kTypes) {
    for (int count = 1; count <= 16; ++count) {
      Case c{.shape = {.heads = 4, .head_dim = 64, .state_size = 128, .groups = 2},
             .limits = limits_of(32, 16),
             .checkpoint = types.checkpoint,
             .activation = types.activation,
             .slots = 3,
             .seed = 100 + static_cast<std::uint64_t>(count)};
      Harness h(c);
      scatter(h);
      for (int i = 0; i < 4 && !HasFatalFailure(); ++i) {
        std::vector<Row> rows;
        for (std::int32_t slot = 0; slot < 3; ++slot) {
          rows.push_back({RowKind::kTentative, slot, h.tokens(count)});
        }
        h.step(rows);
        if (HasFatalFailure()) return;
        h.commit(h.random_accepts(rows));
      }
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(Mamba2Cuda, CommittedRowIsBitEqualToItsTokens) {
  for (const Types types : kTypes) {
    for (const std::int64_t state_size : {64, 128, 256}) {
      Case c{.shape = {.heads = 4, .head_dim = 32, .state_size = state_size, .groups = 2},
             .limits = limits_of(8, 2),
             .checkpoint = types.checkpoint,
             .activation = types.activation,
             .slots = 2,
             .z = true,
             .seed = 7};
      Harness h(c);
      // Live records in both slots first: the same ones.
      const std::vector<Mamba2Token> live = h.tokens(2);
      h.step({{RowKind::kTentative, 0, live}, {RowKind::kTentative, 1, live}});
      if (HasFatalFailure()) return;
      h.commit({2, 2});
      const std::vector<Mamba2Token> tokens = h.tokens(70);
      h.step({{RowKind::kCommitted, 0, tokens}});
      if (HasFatalFailure()) return;
      const std::vector<float> whole = h.outputs(0);
      h.commit({70});
      std::vector<float> parts;
      for (std::size_t t = 0; t < tokens.size(); ++t) {
        h.step({{RowKind::kCommitted, 1, {tokens[t]}}});
        if (HasFatalFailure()) return;
        const std::vector<float> y = h.outputs(0);
        parts.insert(parts.end(), y.begin(), y.end());
        h.commit({1});
      }
      ASSERT_EQ(std::memcmp(whole.data(), parts.data(), whole.size() * 4), 0) << c.name();
      ASSERT_EQ(h.state_of(0), h.state_of(1)) << c.name();
    }
  }
}

TEST_F(Mamba2Cuda, FlushIsBitEqualToPlainDecoding) {
  for (const DType activation : {DType::kF32, DType::kBF16}) {
    for (const ReplayLimits limit : {limits_of(16, 4), limits_of(16, 1), limits_of(5, 3)}) {
      Case c{.shape = {.heads = 4, .head_dim = 80, .state_size = 128, .groups = 2},
             .limits = limit,
             .activation = activation,
             .slots = 2,
             .seed = 11};
      Harness h(c);
      std::vector<Mamba2Token> waiting;  // accepted by slot 0, not yet given to slot 1
      int flushes = 0;
      for (int i = 0; i < 300; ++i) {
        const bool flushes_now = tentative_row_flushes(h.cursors[0], c.limits);
        const std::vector<Mamba2Token> tokens = h.tokens(h.uniform(1, limit.draft_capacity));
        h.step({{RowKind::kTentative, 0, tokens}}, {}, i % 37 == 0);
        if (HasFatalFailure()) return;
        if (flushes_now) {
          ++flushes;
          h.pending.clear();  // the commit below belongs to slot 0's row
          const std::vector<unsigned char> flushed = h.state_of(0);
          const std::vector<DeviceRow> rows = h.device_rows;
          // Plain decoding of the same tokens, in rows of random length.
          std::size_t done = 0;
          Cursor saved = h.cursors[0];
          while (done < waiting.size()) {
            const auto n = static_cast<std::size_t>(
                h.uniform(1, static_cast<std::int64_t>(waiting.size() - done)));
            const auto first = waiting.begin() + static_cast<std::ptrdiff_t>(done);
            h.step({{RowKind::kCommitted, 1, {first, first + static_cast<std::ptrdiff_t>(n)}}}, {},
                   false);
            if (HasFatalFailure()) return;
            h.commit({static_cast<std::int64_t>(n)});
            if (HasFatalFailure()) return;
            done += n;
          }
          waiting.clear();
          ASSERT_TRUE(saved == h.cursors[0]);
          ASSERT_EQ(flushed, h.state_of(1)) << c.name() << ", flush " << flushes;
          // Bring slot 0's row back for its commit.
          h.put_operands({{RowKind::kTentative, 0, tokens}});
          h.pending = {{RowKind::kTentative, 0, tokens}};
        }
        const std::int64_t accepted = h.uniform(0, static_cast<std::int64_t>(tokens.size()));
        h.commit({accepted});
        if (HasFatalFailure()) return;
        waiting.insert(waiting.end(), tokens.begin(), tokens.begin() + accepted);
      }
      EXPECT_GT(flushes, 5);
    }
  }
}

TEST_F(Mamba2Cuda, EveryConfigurationGivesTheSameBits) {
  for (const Types types : kTypes) {
    for (const std::int64_t head_dim : {64, 80}) {
      Case c{.shape = {.heads = 12, .head_dim = head_dim, .state_size = 128, .groups = 2},
             .limits = limits_of(16, 6),
             .checkpoint = types.checkpoint,
             .activation = types.activation,
             .seed = 21};
      Harness h(c);
      run_random_steps(h, 9);
      if (HasFatalFailure()) return;
      std::vector<Row> rows = h.random_rows();
      rows.push_back({RowKind::kTentative, -1, h.tokens(1)});
      DeviceBytes* buffers[] = {&h.state, &h.ring_x, &h.ring_b, &h.ring_dt};
      std::vector<unsigned char> before[4];
      for (int i = 0; i < 4; ++i) before[i] = buffers[i]->download();
      h.step(rows);
      if (HasFatalFailure()) return;
      const std::vector<unsigned char> want_y = h.y.download();
      std::vector<unsigned char> want[4];
      for (int i = 0; i < 4; ++i) want[i] = buffers[i]->download();
      for (const int warps : {1, 2, 3, 4}) {
        for (const int stages : {1, 2, 3}) {
          for (const int tiles : {1, 3, 4, 16, 1000}) {
            for (int i = 0; i < 4; ++i) buffers[i]->upload(before[i].data(), before[i].size());
            h.y.fill(0xff);
            const Status status =
                h.launch({.warps = warps, .stages = stages, .tiles_per_run = tiles});
            ASSERT_TRUE(status.ok()) << status.message();
            ASSERT_CUDA(cudaDeviceSynchronize());
            const auto label = [&] {
              return c.name() + " warps " + std::to_string(warps) + " stages " +
                     std::to_string(stages) + " tiles " + std::to_string(tiles);
            };
            ASSERT_TRUE(h.y.download() == want_y) << label();
            for (int i = 0; i < 4; ++i) {
              ASSERT_TRUE(buffers[i]->download() == want[i]) << label() << " buffer " << i;
            }
          }
        }
      }
    }
  }
}

TEST_F(Mamba2Cuda, ManyRowHeads) {
  struct Size {
    std::int64_t rows, heads;
  };
  for (const Size size : {Size{1023, 1}, Size{1024, 1}, Size{1025, 1}, Size{1024, 64}}) {
    Case c{.shape = {.heads = size.heads, .head_dim = 16, .state_size = 64, .groups = 1},
           .limits = limits_of(4, 2),
           .slots = size.rows,
           .seed = 31};
    Harness h(c);
    for (int i = 0; i < 4; ++i) {
      std::vector<Row> rows;
      std::vector<std::int64_t> accepted;
      for (std::int64_t slot = size.rows - 1; slot >= 0; --slot) {
        const bool committed = (slot + i) % 5 == 0;
        rows.push_back({committed ? RowKind::kCommitted : RowKind::kTentative,
                        static_cast<std::int32_t>(slot), h.tokens(1 + (slot + i) % 2)});
        const auto n = static_cast<std::int64_t>(rows.back().tokens.size());
        accepted.push_back(committed ? n : h.uniform(0, n));
      }
      h.step(rows, {}, i == 3 && size.heads == 1);
      if (HasFatalFailure()) return;
      h.commit(accepted);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(Mamba2Cuda, GraphReplayIsBitEqualToEager) {
  Case c{.shape = {.heads = 8, .head_dim = 64, .state_size = 128, .groups = 2},
         .limits = limits_of(6, 2),
         .slots = 4,
         .seed = 41};
  Harness eager(c);
  Harness graph(c);
  const std::vector<std::int64_t> counts = {2, 1, 2, 2};
  const auto rows_of = [&](Harness& h) {
    std::vector<Row> rows;
    for (std::int32_t slot = 0; slot < 4; ++slot) {
      rows.push_back({slot == 1 ? RowKind::kCommitted : RowKind::kTentative, slot,
                      h.tokens(counts[static_cast<std::size_t>(slot)])});
    }
    return rows;
  };
  cudaStream_t stream = nullptr;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  DeviceBytes accepted(4 * 8);
  cudaGraphExec_t exec = nullptr;
  for (int i = 0; i < 24; ++i) {
    const std::vector<Row> rows = rows_of(eager);
    const std::vector<Row> same = rows_of(graph);
    const std::vector<std::int64_t> accept = {i % 3, 1, (i + 1) % 3, (i / 3) % 3};
    eager.step(rows, {}, false);
    if (HasFatalFailure()) return;
    eager.commit(accept);
    graph.put_operands(same);
    accepted.upload(accept.data(), accept.size() * 8);
    if (exec == nullptr) {
      cudaGraph_t captured = nullptr;
      ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
      const Status status = graph.launch({}, stream);
      const Status committed = cuda_commit({.rows = graph.rows_buffer.as<DeviceRow>(),
                                            .accepted = accepted.as<std::int64_t>(),
                                            .row_count = 4,
                                            .cursors = graph.device_cursors.as<Cursor>(),
                                            .slots = c.slots,
                                            .limits = c.limits,
                                            .error = graph.error.as<DeviceError>()},
                                           stream);
      ASSERT_CUDA(cudaStreamEndCapture(stream, &captured));
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_TRUE(committed.ok()) << committed.message();
      ASSERT_CUDA(cudaGraphInstantiate(&exec, captured, 0));
      ASSERT_CUDA(cudaGraphDestroy(captured));
    }
    ASSERT_CUDA(cudaDeviceSynchronize());
    ASSERT_CUDA(cudaGraphLaunch(exec, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    ASSERT_TRUE(graph.y.download() == eager.y.download()) << "replay " << i;
    ASSERT_TRUE(graph.state.download() == eager.state.download()) << "replay " << i;
    ASSERT_TRUE(graph.ring_x.download() == eager.ring_x.download()) << "replay " << i;
    ASSERT_TRUE(graph.ring_b.download() == eager.ring_b.download()) << "replay " << i;
    ASSERT_TRUE(graph.ring_dt.download() == eager.ring_dt.download()) << "replay " << i;
    std::vector<Cursor> found(4);
    ASSERT_CUDA(cudaMemcpy(found.data(), graph.device_cursors.as<void>(), 4 * sizeof(Cursor),
                           cudaMemcpyDeviceToHost));
    for (std::size_t s = 0; s < 4; ++s) ASSERT_TRUE(found[s] == eager.cursors[s]) << "slot " << s;
  }
  ASSERT_CUDA(cudaGraphExecDestroy(exec));
  ASSERT_CUDA(cudaStreamDestroy(stream));
}

TEST_F(Mamba2Cuda, OffsetsBeyond32Bits) {
  std::size_t available = 0;
  std::size_t total = 0;
  ASSERT_CUDA(cudaMemGetInfo(&available, &total));
  Case c{.shape = {.heads = 2, .head_dim = 16, .state_size = 64, .groups = 1},
         .limits = limits_of(4, 2),
         .slots = 3,
         .seed = 51};
  c.slot_padding = std::int64_t{1} << 30;  // slot 2 starts past 2^31 elements in every buffer
  if (available < (std::size_t{48} << 30)) GTEST_SKIP() << "needs 48 GiB";
  Harness h(c);
  for (int i = 0; i < 8; ++i) {
    std::vector<Row> rows;
    for (const std::int32_t slot : {2, 1}) {
      rows.push_back({i == 0 ? RowKind::kCommitted : RowKind::kTentative, slot, h.tokens(2)});
    }
    h.step(rows, {}, false);
    if (HasFatalFailure()) return;
    h.commit({2, i == 0 ? 2 : 1});
    if (HasFatalFailure()) return;
  }
}

TEST_F(Mamba2Cuda, BadRowsBecomePaddingAndAreReported) {
  Case c{.shape = {.heads = 4, .head_dim = 64, .state_size = 128, .groups = 2},
         .limits = limits_of(8, 2),
         .slots = 3,
         .seed = 61};
  const auto expect_padding = [&](Harness& h, Row row, DeviceError::What what) {
    h.put_operands({row, {RowKind::kTentative, 1, h.tokens(1)}});
    const Status status = h.launch();
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_CUDA(cudaDeviceSynchronize());
    for (const float v : h.outputs(0)) ASSERT_EQ(v, 0.0f);
    for (const float v : h.outputs(1)) ASSERT_TRUE(std::isfinite(v));
    EXPECT_EQ(h.device_error().what, what);
    EXPECT_EQ(h.device_error().row, 0);
  };
  {
    Harness h(c);
    expect_padding(h, {RowKind::kTentative, 3, h.tokens(1)}, DeviceError::kSlot);
    EXPECT_EQ(h.device_error().found, 3);
    EXPECT_EQ(h.device_error().allowed, 2);
  }
  {
    Harness h(c);
    expect_padding(h, {RowKind::kTentative, 0, h.tokens(3)}, DeviceError::kTokenCount);
  }
  {
    Harness h(c);
    h.cursors[0].position = 9;
    h.put_cursors();
    expect_padding(h, {RowKind::kTentative, 0, h.tokens(1)}, DeviceError::kCursor);
  }
  {
    Harness h(c);
    const std::vector<Row> rows = {{RowKind::kTentative, 0, h.tokens(2)}};
    h.step(rows);
    if (HasFatalFailure()) return;
    h.pending.clear();
    h.commit({3});
    EXPECT_EQ(h.device_error().what, DeviceError::kAccepted);
    EXPECT_EQ(h.device_error().found, 3);
    EXPECT_EQ(h.device_error().allowed, 2);
  }
}

TEST_F(Mamba2Cuda, HostKnownMistakesAreRefused) {
  Case c{.shape = {.heads = 4, .head_dim = 64, .state_size = 128, .groups = 2},
         .limits = limits_of(8, 2),
         .slots = 3};
  Harness h(c);
  h.put_operands({{RowKind::kTentative, 0, h.tokens(1)}});
  const Mamba2CudaParams good = h.p;
  ASSERT_TRUE(validate_mamba2(good).ok()) << validate_mamba2(good).message();
  const auto refused = [&](auto change, const char* expected) {
    Mamba2CudaParams p = good;
    change(p);
    const Status status = validate_mamba2(p);
    EXPECT_FALSE(status.ok()) << expected;
    EXPECT_NE(status.message().find(expected), std::string::npos) << status.message();
  };
  refused([](auto& p) { p.groups = 3; }, "multiple of groups 3");
  refused([](auto& p) { p.head_dim = 24; }, "head_dim is 24");
  refused([](auto& p) { p.state_size = 96; }, "state_size is 96");
  refused([](auto& p) { p.limits = {.window = 4, .draft_capacity = 5}; }, "L = 4");
  refused([](auto& p) { p.limits.window = 65; }, "window 65");
  refused([](auto& p) { p.checkpoint = DType::kF16; }, "f16");
  refused([](auto& p) { p.x_token_stride += 1; }, "x token stride");
  refused([](auto& p) { p.ring_b = nullptr; }, "ring_b is null");
  refused([](auto& p) { p.state = static_cast<char*>(p.state) + 4; }, "4 mod 16");
}

}  // namespace
}  // namespace replayssm::cuda
