// Times the Mamba-2 CUDA step (step_bench.cuh).
//
//   mamba2_cuda_bench [--quick] [--sweep] [--filter TEXT] [--commit ID] [--out FILE]
#include "ops/deferred_decay.h"
#include "ops/mamba2/cuda/launch.h"
#include "replayssm/ops/mamba2.h"
#include "step_bench.cuh"

namespace replayssm::cuda {
namespace {

struct Geometry {
  const char* name;
  std::int64_t heads, head_dim, state_size, groups;

  Mamba2Shape shape() const { return {heads, head_dim, state_size, groups}; }
  std::int64_t x() const { return heads * head_dim; }
  std::int64_t b() const { return groups * state_size; }
};
constexpr Geometry kGeometries[] = {{"Nano-30B", 64, 64, 128, 8},
                                    {"Nano-4B", 96, 80, 128, 8},
                                    {"Super", 128, 64, 128, 8},
                                    {"Ultra", 256, 64, 128, 8}};

class Mamba2Family {
 public:
  using Geometry = cuda::Geometry;
  using Case = BenchCase<Geometry>;
  using Params = Mamba2CudaParams;
  using Tuning = Mamba2Tuning;
  static constexpr const char* kTitle = "Mamba-2";

  void create(cudaStream_t stream) {
    require(cudaMalloc(&a_, 4096 * 4), "cudaMalloc");
    require(cudaMalloc(&d_, 4096 * 4), "cudaMalloc");
    fill_uniform<<<8, 256, 0, stream>>>(a_, 4096, -1.0f, -0.1f);
    fill_uniform<<<8, 256, 0, stream>>>(d_, 4096, 0.5f, 1.0f);
  }
  static std::int64_t state_elements(const Geometry& g) { return g.shape().state_elements(); }
  static std::int64_t state_heads(const Geometry& g) { return g.heads; }
  static ReadCopyShape copy_shape(const Case& c) {
    return read_copy_shape(c.geometry.shape(), c.read_copy);
  }
  static std::int64_t outputs(const Geometry& g) { return g.x(); }
  static std::int64_t operand_bytes(const Case& c) {
    const Geometry& g = c.geometry;
    return (2 * g.x() + 2 * g.b() + g.heads) * c.act_bytes();
  }
  static StateTraffic traffic(const Case& c, const Cursor& cursor) {
    return mamba2_row_traffic(c.geometry.shape(), c.checkpoint, c.activation, c.limits(), c.kind(),
                              cursor, c.tokens);
  }

  Params layer(const Case& c, std::int64_t slots, Arenas& arenas) const {
    const Geometry& g = c.geometry;
    const std::int64_t places = c.limits().record_places();
    Params p;
    p.heads = g.heads;
    p.head_dim = g.head_dim;
    p.state_size = g.state_size;
    p.groups = g.groups;
    p.state_head_stride = g.head_dim * g.state_size;
    p.state_slot_stride = state_elements(g);
    p.ring_x_place_stride = g.head_dim;
    p.ring_x_head_stride = places * g.head_dim;
    p.ring_x_slot_stride = g.heads * p.ring_x_head_stride;
    p.ring_b_place_stride = g.state_size;
    p.ring_b_group_stride = places * g.state_size;
    p.ring_b_slot_stride = g.groups * p.ring_b_group_stride;
    p.ring_dt_head_stride = places;
    p.ring_dt_slot_stride = g.heads * places;
    p.state = arenas.states.take<char>(sized(slots * p.state_slot_stride) * size_of(c.checkpoint));
    p.ring_x = arenas.numbers.take<char>(sized(slots * p.ring_x_slot_stride * c.act_bytes()));
    p.ring_b = arenas.numbers.take<char>(sized(slots * p.ring_b_slot_stride * c.act_bytes()));
    p.ring_dt = arenas.positive.take<float>(sized(slots * p.ring_dt_slot_stride));
    p.deferred_slot_stride = g.heads * deferred_decay_count(c.checkpoint, g.head_dim);
    p.deferred = arenas.decays.take<float>(sized(slots * p.deferred_slot_stride));
    p.a = a_;
    p.d = d_;
    p.x_token_stride = p.y_token_stride = g.x();
    p.x_head_stride = p.y_head_stride = g.head_dim;
    p.b_token_stride = p.c_token_stride = g.b();
    p.b_group_stride = p.c_group_stride = g.state_size;
    p.dt_token_stride = g.heads;
    p.dt_is_f32 = false;
    return p;
  }
  void* take_operands(const Case& c, Arenas& arenas, Params& p) const {
    const Geometry& g = c.geometry;
    const auto take = [&](std::int64_t elements) {
      return arenas.numbers.take<char>(sized(c.batch * c.tokens * elements * c.act_bytes()));
    };
    p.x = take(g.x());
    p.b = take(g.b());
    p.c = take(g.b());
    p.dt = take(g.heads);
    return p.y = take(g.x());
  }
  static FlushPlaces flush_places(const Params& p, const CudaDeviceInfo& device) {
    return mamba2_flush_places(p, device);
  }
  static auto choose(const Params& p, const CudaDeviceInfo& device, const Tuning& tuning) {
    return choose_mamba2_config(p, device, tuning);
  }
  static Status step(const Params& p, const Mamba2CudaConfig& config, cudaStream_t stream) {
    return mamba2_cuda_step(p, config, stream);
  }
  static std::vector<Tuning> tunings(const Case& c) {
    std::vector<Tuning> all;
    for (const int warps : {1, 2, 4}) {
      all.push_back({.kernel = StepKernel::kDirect, .warps = warps});
    }
    for (const int warps : {1, 2, 4}) {
      for (const int stages : {1, 2, 3}) {
        for (const int tiles : {1, 2, 4, 8, 16}) {
          for (const int fold_tiles : {1, 2, 4, 8, 16}) {
            // Small batches only split further; big ones only want long runs.
            const bool small = c.batch < 64;
            if (small != (tiles < 4) || small != (fold_tiles < 4)) continue;
            all.push_back({.kernel = StepKernel::kStreamed,
                           .warps = warps,
                           .stages = stages,
                           .tiles_per_run = tiles,
                           .fold_tiles_per_run = fold_tiles});
          }
        }
      }
    }
    return all;
  }

 private:
  float* a_ = nullptr;
  float* d_ = nullptr;
};

Cases<Mamba2Family> cases() {
  using Case = Mamba2Family::Case;
  const Geometry& nano30 = kGeometries[0];
  const Geometry& super = kGeometries[2];
  const auto f32 = [&](const Geometry& g, std::int64_t batch, int tokens = 1, bool all = false) {
    return Case{.geometry = g, .batch = batch, .tokens = tokens, .accept_all = all};
  };
  const auto bf16 = [&](const Geometry& g, std::int64_t batch, int tokens = 1) {
    return Case{.geometry = g, .batch = batch, .checkpoint = DType::kBF16, .tokens = tokens};
  };
  const auto copied = [&](const Geometry& g, std::int64_t batch, ReadCopyFormat format,
                          int tokens = 1) {
    Case c = f32(g, batch, tokens);
    c.read_copy = format;
    return c;
  };
  Cases<Mamba2Family> out;
  out.targets = {copied(super, 256, ReadCopyFormat::kNvfp4),
                 copied(super, 256, ReadCopyFormat::kFp8E4M3),
                 copied(super, 256, ReadCopyFormat::kInt8),
                 copied(super, 256, ReadCopyFormat::kNvfp4, 4),

                 f32(super, 256),
                 bf16(super, 256),
                 f32(super, 256, 4),
                 f32(super, 256, 4, true),
                 f32(nano30, 256),
                 f32(nano30, 64),
                 f32(nano30, 8),
                 f32(nano30, 1),
                 f32(super, 8),
                 f32(super, 1),
                 f32(nano30, 64, 4),
                 f32(nano30, 8, 4),
                 f32(nano30, 1, 4),
                 bf16(super, 256, 4),
                 bf16(nano30, 256, 8)};
  for (const Geometry& g : kGeometries) {
    for (const DType checkpoint : {DType::kF32, DType::kBF16}) {
      for (const std::int64_t batch : {1, 8, 64, 256, 512}) {
        for (const int tokens : {1, 4, 8}) {
          out.others.push_back(f32(g, batch, tokens));
          out.others.back().checkpoint = checkpoint;
        }
        out.others.push_back(f32(g, batch));
        out.others.back().checkpoint = checkpoint;
        out.others.back().mode = Mode::kPlain;
      }
    }
  }
  Case plain = f32(super, 256);
  plain.mode = Mode::kPlain;
  out.swept = {f32(super, 256),
               bf16(super, 256),
               f32(super, 256, 4),
               bf16(super, 256, 4),
               bf16(nano30, 64),
               bf16(nano30, 256),
               bf16(nano30, 256, 4),
               f32(nano30, 64, 4),
               f32(super, 8),
               f32(super, 1),
               f32(nano30, 64),
               f32(nano30, 1),
               plain,
               copied(super, 256, ReadCopyFormat::kNvfp4),
               copied(super, 256, ReadCopyFormat::kFp8E4M3),
               bf16(nano30, 256, 8)};
  return out;
}

}  // namespace
}  // namespace replayssm::cuda

int main(int argc, char** argv) {
  return replayssm::cuda::bench_main(argc, argv, replayssm::cuda::cases());
}
