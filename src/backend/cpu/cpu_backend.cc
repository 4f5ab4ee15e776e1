#include "backend/cpu/cpu_backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

namespace replayssm {
namespace {

// Below this many elements a pass is shorter than handing it to other threads.
constexpr std::int64_t kSerialWork = 16 * 1024;

float* row(const TensorView& view, std::int64_t index) {
  return view.as<float>() + index * view.strides[0];
}

const std::byte* table_row(const TensorView& view, std::int64_t index) {
  return view.as<std::byte>() +
         static_cast<std::size_t>(index * view.strides[0]) * size_of(view.dtype);
}

}  // namespace

CpuBackend::CpuBackend(const CpuContext& context)
    : context_(context),
      kernels_(cpu::backend_kernels(context.isa)),
      scratch_(context.thread_count()) {}

void CpuBackend::for_tokens(std::int64_t count, std::int64_t work,
                            FunctionRef<void(std::int64_t begin, std::int64_t end)> task) const {
  const std::int64_t per_task =
      std::max<std::int64_t>(1, kSerialWork / std::max<std::int64_t>(work, 1));
  if (context_.thread_count() == 1 || count <= per_task) {
    task(0, count);
    return;
  }
  context_.parallel_for((count + per_task - 1) / per_task, [&](std::int64_t i, int) {
    task(i * per_task, std::min(count, (i + 1) * per_task));
  });
}

std::shared_ptr<std::byte> CpuBackend::allocate(std::size_t bytes) {
  constexpr std::align_val_t kAlignment{64};
  auto* p = static_cast<std::byte*>(::operator new(bytes, kAlignment, std::nothrow));
  if (p == nullptr) return nullptr;
  return {p, [](std::byte* q) { ::operator delete(q, std::align_val_t{64}); }};
}

Result<TensorView> CpuBackend::place(const TensorView& host) {
  if (reinterpret_cast<std::uintptr_t>(host.data) % size_of(host.dtype) == 0) return host;
  const std::size_t bytes = static_cast<std::size_t>(host.numel()) * size_of(host.dtype);
  placed_.push_back(allocate(bytes));
  if (placed_.back() == nullptr) {
    return resource_exhausted("cannot allocate ", bytes, " bytes for a misaligned weight");
  }
  TensorView copy = host;
  copy.data = placed_.back().get();
  std::memcpy(copy.data, host.data, bytes);
  return copy;
}

void CpuBackend::copy_rows(const TensorView& source, std::int64_t from, const TensorView& target,
                           std::int64_t to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    // Front to back is safe because a range only ever moves towards the front.
    std::memmove(target.as<float>() + (to + i) * target.strides[0],
                 source.as<float>() + (from + i) * source.strides[0],
                 static_cast<std::size_t>(source.shape[1]) * sizeof(float));
  }
}

Status CpuBackend::causal_conv1d(StatePool& pool, int layer, Step& step,
                                 const CausalConv1dOperands& operands) {
  return causal_conv1d_step(context_, pool, layer, step, operands);
}

Status CpuBackend::mamba2(StatePool& pool, int layer, Step& step, const Mamba2Params& params,
                          const Mamba2Operands& operands) {
  return mamba2_step(context_, pool, layer, step, params, operands);
}

Status CpuBackend::gated_delta_net(StatePool& pool, int layer, Step& step,
                                   const GatedDeltaNetParams& params,
                                   const GatedDeltaNetOperands& operands) {
  return gated_delta_net_step(context_, pool, layer, step, params, operands);
}

void CpuBackend::embed(std::span<const std::int32_t> tokens, const TensorView& table,
                       const TensorView& out) {
  const std::int64_t features = table.shape[1];
  const auto widen = kernels_.widen[cpu::storage_index(table.dtype)];
  for_tokens(static_cast<std::int64_t>(tokens.size()), features,
             [&](std::int64_t begin, std::int64_t end) {
               for (std::int64_t t = begin; t < end; ++t) {
                 const std::int32_t token = tokens[static_cast<std::size_t>(t)];
                 widen(table_row(table, token), row(out, t), features);
               }
             });
}

Status CpuBackend::matmul(std::span<const ForwardRow> rows, const TensorView& x,
                          const TensorView& w, const TensorView& y) {
  if (!cpu::is_storage_type(w.dtype)) {
    return unsupported("matmul: weights are ", to_string(w), ", expected f32, bf16 or f16");
  }
  inputs_.clear();
  outputs_.clear();
  blocks_.clear();
  for (const ForwardRow& r : rows) {
    if (r.slot < 0 || r.count == 0) continue;
    if (r.prompt) {
      blocks_.push_back({.x = row(x, r.begin),
                         .x_stride = x.strides[0],
                         .y = row(y, r.begin),
                         .y_stride = y.strides[0],
                         .rows = r.count});
    } else {
      for (std::int64_t t = r.begin; t < r.begin + r.count; ++t) {
        inputs_.push_back(row(x, t));
        outputs_.push_back(row(y, t));
      }
    }
  }
  RSSM_RETURN_IF_ERROR(
      cpu::gemm(context_, blocks_,
                {.data = w.data, .dtype = w.dtype, .out = w.shape[0], .in = w.shape[1]}, scratch_));
  if (!inputs_.empty()) multiply_gathered(w);
  return {};
}

void CpuBackend::multiply_gathered(const TensorView& w) {
  const auto dots = kernels_.dots[cpu::storage_index(w.dtype)];
  const std::int64_t out = w.shape[0];
  const std::int64_t in = w.shape[1];
  const auto tokens = static_cast<std::int64_t>(inputs_.size());
  if (context_.thread_count() == 1 || out * in * tokens <= kSerialWork) {
    dots(inputs_.data(), tokens, w.data, w.strides[0], out, in, outputs_.data(), 0);
    return;
  }
  // Many tasks per thread, so that a thread that starts late or is interrupted costs little; whole
  // tiles per task.
  constexpr std::int64_t kTile = 12;
  const std::int64_t share = out / (context_.thread_count() * std::int64_t{16});
  const std::int64_t chunk = std::max<std::int64_t>(1, (share + kTile - 1) / kTile) * kTile;
  context_.parallel_for((out + chunk - 1) / chunk, [&](std::int64_t i, int) {
    const std::int64_t first = i * chunk;
    dots(inputs_.data(), tokens, table_row(w, first), w.strides[0], std::min(chunk, out - first),
         in, outputs_.data(), first);
  });
}

void CpuBackend::rms_norm(const TensorView& x, const TensorView& weight, float eps,
                          const TensorView& out) {
  const std::int64_t features = x.shape[1];
  for_tokens(x.shape[0], features, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      kernels_.rms_norm(row(x, t), weight.as<float>(), features, eps, row(out, t));
    }
  });
}

void CpuBackend::gated_rms_norm(const TensorView& y, const TensorView& z, const TensorView& weight,
                                std::int64_t groups, float eps, const TensorView& out) {
  const std::int64_t features = y.shape[1] / groups;
  for_tokens(y.shape[0], y.shape[1], [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t c = 0; c < groups * features; c += features) {
        kernels_.gated_rms_norm(row(y, t) + c, row(z, t) + c, weight.as<float>() + c, features, eps,
                                row(out, t) + c);
      }
    }
  });
}

void CpuBackend::gate(const TensorView& x, const TensorView& gate, GateFunction f) {
  const auto multiply =
      f == GateFunction::kSilu ? kernels_.multiply_silu : kernels_.multiply_sigmoid;
  for_tokens(x.shape[0], x.shape[1], [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) multiply(row(x, t), row(gate, t), x.shape[1]);
  });
}

void CpuBackend::relu_squared(const TensorView& x) {
  for_tokens(x.shape[0], x.shape[1], [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) kernels_.relu_squared(row(x, t), x.shape[1]);
  });
}

void CpuBackend::add(const TensorView& x, const TensorView& y) {
  for_tokens(x.shape[0], x.shape[1], [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) kernels_.add(row(x, t), row(y, t), x.shape[1]);
  });
}

void CpuBackend::rotary_table(std::span<const ForwardRow> rows, std::span<const double> frequencies,
                              const TensorView& table) {
  const auto n = static_cast<std::int64_t>(frequencies.size());
  // A sine costs far more than the element of a copy that kSerialWork counts.
  constexpr std::int64_t kCost = 32;
  for (const ForwardRow& r : rows) {
    if (r.slot < 0) continue;
    for_tokens(r.count, n * kCost, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        float* const angles = row(table, r.begin + t);
        for (std::int64_t j = 0; j < n; ++j) {
          const double angle =
              static_cast<double>(r.position + t) * frequencies[static_cast<std::size_t>(j)];
          angles[j] = static_cast<float>(std::cos(angle));
          angles[n + j] = static_cast<float>(std::sin(angle));
        }
      }
    });
  }
}

void CpuBackend::rotate(const TensorView& table, const TensorView& x) {
  const std::int64_t n = table.shape[1] / 2;
  const std::int64_t heads = x.shape[1];
  for_tokens(x.shape[0], heads * 2 * n, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t h = 0; h < heads; ++h) {
        kernels_.rotate(row(table, t), n, row(x, t) + h * x.strides[1]);
      }
    }
  });
}

void CpuBackend::write_cache(std::span<const ForwardRow> rows, const TensorView& k,
                             const TensorView& v, KvCache& cache, int layer) const {
  const std::int64_t heads = cache.options().kv_heads;
  const std::int64_t dim = cache.options().head_dim;
  const auto narrow = kernels_.narrow[cpu::storage_index(cache.options().dtype)];
  for (const ForwardRow& r : rows) {
    if (r.slot < 0) continue;
    for_tokens(r.count, 2 * heads * dim, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        for (std::int64_t h = 0; h < heads; ++h) {
          const std::int64_t position = r.position + t;
          narrow(row(k, r.begin + t) + h * dim, cache.key(layer, r.slot, h, position), dim);
          narrow(row(v, r.begin + t) + h * dim, cache.value(layer, r.slot, h, position), dim);
        }
      }
    });
  }
}

void CpuBackend::attention(std::span<const ForwardRow> rows, const AttentionShape& shape,
                           const TensorView& q, const TensorView& k, const TensorView& v,
                           KvCache& cache, int layer, const TensorView& out) {
  using cpu::AttentionTask;
  write_cache(rows, k, v, cache, layer);

  // Long pieces share the reading of keys and values; there should still be a few per thread.
  const std::int64_t group = shape.query_heads / shape.kv_heads;
  std::int64_t tokens = 0;
  for (const ForwardRow& r : rows) tokens += r.slot < 0 ? 0 : r.count;
  if (tokens == 0) return;
  const std::int64_t wanted = context_.thread_count() == 1 ? 1 : context_.thread_count() * 4;
  const std::int64_t share = std::max<std::int64_t>(1, tokens * shape.query_heads / wanted);
  const std::int64_t queries = std::min(share, AttentionTask::kMaxQueries);
  const std::int64_t parts = (group + queries - 1) / queries;
  const std::int64_t heads = (group + parts - 1) / parts;
  const std::int64_t piece_tokens = std::max<std::int64_t>(1, queries / heads);
  pieces_.clear();
  for (const ForwardRow& r : rows) {
    if (r.slot < 0) continue;
    for (std::int64_t t = 0; t < r.count; t += piece_tokens) {
      for (std::int64_t kv = 0; kv < shape.kv_heads; ++kv) {
        for (std::int64_t h = 0; h < group; h += heads) {
          pieces_.push_back({&r, t, std::min(piece_tokens, r.count - t), kv * group + h,
                             std::min(heads, group - h)});
        }
      }
    }
  }
  if (!scratch_.reserve(
          cpu::attention_scratch_floats(AttentionTask::kMaxQueries, shape.head_dim))) {
    throw std::bad_alloc();  // a few kilobytes: as any container that cannot grow
  }

  const cpu::BackendKernels::Attention run =
      kernels_.attention[cpu::storage_index(cache.options().dtype)];
  context_.parallel_for(static_cast<std::int64_t>(pieces_.size()), [&](std::int64_t i, int worker) {
    // Later tokens see more keys: starting with them keeps the last tasks short.
    const AttentionPiece& piece = pieces_[pieces_.size() - 1 - static_cast<std::size_t>(i)];
    const ForwardRow& r = *piece.row;
    const std::int64_t head = piece.head / group;
    run({.keys = cache.key(layer, r.slot, head, 0),
         .values = cache.value(layer, r.slot, head, 0),
         .kv_stride = shape.head_dim,
         .head_dim = shape.head_dim,
         .scale = shape.scale,
         .position = r.position + piece.token,
         .tokens = piece.tokens,
         .heads = piece.heads,
         .q = row(q, r.begin + piece.token) + piece.head * shape.head_dim,
         .q_stride = q.strides[0],
         .out = row(out, r.begin + piece.token) + piece.head * shape.head_dim,
         .out_stride = out.strides[0]},
        scratch_.get(worker));
  });
}

}  // namespace replayssm
