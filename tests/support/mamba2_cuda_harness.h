// The Mamba-2 CUDA kernels on buffers of their own, without a pool, and an fp64 oracle per slot.
// Every buffer starts as NaN, pages are larger than their contents, and after every step memory
// that must not have changed is compared bit by bit.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "ops/deferred_decay.h"
#include "ops/mamba2/cuda/launch.h"
#include "ops/mamba2/reference.h"
#include "support/cuda_device.h"

namespace replayssm::cuda {

struct Case {
  Mamba2Shape shape;
  ReplayLimits limits;
  DType checkpoint = DType::kF32;
  DType activation = DType::kBF16;
  std::int64_t slots = 6;
  bool d = true, bias = true, z = false, dt_f32 = false, softplus = true, limits_on = false;
  float most_a = 2.0f;              // largest -A; decays of 100 times dt and more are zero
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

inline double bound(const Case& c) {
  if (c.checkpoint == DType::kBF16) return 4e-2;
  if (c.checkpoint == DType::kF16) return 5e-3;
  return c.activation == DType::kBF16 ? 4e-3 : 2e-5;
}

inline float from_bits(const unsigned char* at, DType dtype) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  if (dtype == DType::kF16) {
    F16 value;
    std::memcpy(&value, at, 2);
    return to_float(value);
  }
  BF16 value;
  std::memcpy(&value, at, 2);
  return to_float(value);
}

inline void to_bits(unsigned char* at, float value, DType dtype) {
  if (dtype == DType::kF32) {
    std::memcpy(at, &value, 4);
  } else {
    const BF16 narrow = to_bf16(value);
    std::memcpy(at, &narrow, 2);
  }
}

/// A token's operands, already rounded to the activation type.
inline Mamba2Token random_token(const Case& c, std::mt19937_64& rng) {
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
    if (deferred_count() > 0) p.deferred_slot_stride = deferred_count() + c.slot_padding;
    deferred = DeviceBytes(static_cast<std::size_t>(c.slots * p.deferred_slot_stride * 4));
    for (DeviceBytes* buffer : buffers()) buffer->fill(0xff);
    p.state = state.as<void>();
    if (deferred_count() > 0) p.deferred = deferred.as<float>();
    p.ring_x = ring_x.as<void>();
    p.ring_b = ring_b.as<void>();
    p.ring_dt = ring_dt.as<float>();

    std::uniform_real_distribution<float> a_range(0.05f, c.most_a);
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
    std::vector<std::vector<unsigned char>> before;
    if (check) {
      for (const DeviceBytes* buffer : buffers()) before.push_back(buffer->download());
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
      for (std::size_t i = 0; i < before.size(); ++i) {
        check_untouched(static_cast<int>(i), rows, before[i], buffers()[i]->download());
      }
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
      if (buffer == 0 || buffer == 4) {
        if (!row_flushes(row.kind, cursor, c.limits)) continue;
        if (buffer == 0) {
          allow(row.slot * p.state_slot_stride, s.state_elements(),
                static_cast<std::int64_t>(size_of(c.checkpoint)));
        } else {
          allow(row.slot * p.deferred_slot_stride, deferred_count(), 4);
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
    static const char* const kNames[] = {"state", "x ring", "B ring", "dt ring", "deferred decays"};
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

  /// Of a slot.
  std::int64_t deferred_count() const {
    return c.shape.heads * deferred_decay_count(c.checkpoint, c.shape.head_dim);
  }

  /// A slot's checkpoint, and the decays deferred in it.
  std::vector<unsigned char> state_of(std::int32_t slot) const {
    const auto bytes = static_cast<std::int64_t>(size_of(c.checkpoint));
    const auto states = static_cast<std::size_t>(c.shape.state_elements() * bytes);
    const auto decays = static_cast<std::size_t>(deferred_count() * 4);
    std::vector<unsigned char> out(states + decays);
    require(cudaMemcpy(out.data(), state.as<unsigned char>() + slot * p.state_slot_stride * bytes,
                       states, cudaMemcpyDeviceToHost),
            "download");
    if (decays == 0) return out;
    require(cudaMemcpy(out.data() + states,
                       deferred.as<unsigned char>() + slot * p.deferred_slot_stride * 4, decays,
                       cudaMemcpyDeviceToHost),
            "download");
    return out;
  }

  /// Everything that a slot has.
  std::array<DeviceBytes*, 5> buffers() { return {&state, &ring_x, &ring_b, &ring_dt, &deferred}; }

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
  DeviceBytes state, ring_x, ring_b, ring_dt, deferred, a, d, bias, device_cursors, error;
  DeviceBytes operands, dts, rows_buffer, planned, y;
  std::int64_t y_stride = 0;
  std::vector<DeviceRow> device_rows;
  std::vector<Cursor> cursors;
  std::vector<std::unique_ptr<Mamba2Reference>> oracle;
  std::vector<Row> pending;
  double worst = 0.0;
};

}  // namespace replayssm::cuda
