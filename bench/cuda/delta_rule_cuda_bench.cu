// Times the CUDA steps of Gated DeltaNet and Kimi Delta Attention (step_bench.cuh).
//
//   delta_rule_cuda_bench gdn|kda [--quick] [--sweep] [--filter TEXT] [--commit ID] [--out FILE]
#include "ops/deferred_decay.h"
#include "ops/delta_rule/cuda/launch.h"
#include "ops/delta_rule/delta_rule.h"
#include "step_bench.cuh"

namespace replayssm::cuda {
namespace {

struct Geometry {
  const char* name;
  DeltaRuleShape shape;
};
constexpr DeltaRuleShape gdn(std::int64_t key_heads, std::int64_t value_heads) {
  return {key_heads, value_heads, 128, 128, false};
}
constexpr DeltaRuleShape kda(std::int64_t heads) { return {heads, heads, 128, 128, true}; }

constexpr Geometry kGdn[] = {{"16:16", gdn(16, 16)},
                             {"16:32", gdn(16, 32)},
                             {"16:48", gdn(16, 48)},
                             {"16:64", gdn(16, 64)},
                             {"16:128", gdn(16, 128)}};
constexpr Geometry kKda[] = {{"K3-TP8 12", kda(12)},
                             {"Kimi-Linear 32", kda(32)},
                             {"GLM-5.3-Flash 64", kda(64)},
                             {"K3 96", kda(96)}};

template <bool kChannelDecay>
class DeltaRuleFamily {
 public:
  using Geometry = cuda::Geometry;
  using Case = BenchCase<Geometry>;
  using Params = DeltaRuleCudaParams;
  using Tuning = DeltaRuleTuning;
  static constexpr const char* kTitle = kChannelDecay ? "Kimi Delta Attention" : "Gated DeltaNet";

  void create(cudaStream_t stream) {
    require(cudaMalloc(&a_log_, 4096 * 4), "cudaMalloc");
    fill_uniform<<<8, 256, 0, stream>>>(a_log_, 4096, -1.0f, 0.5f);
  }
  static std::int64_t state_elements(const Geometry& g) { return g.shape.state_elements(); }
  static std::int64_t state_heads(const Geometry& g) { return g.shape.value_heads; }
  static ReadCopyShape copy_shape(const Case& c) {
    const DeltaRuleShape& s = c.geometry.shape;
    return read_copy_shape(GatedDeltaNetShape{s.key_heads, s.value_heads, s.key_dim, s.value_dim},
                           c.read_copy);
  }
  static std::int64_t outputs(const Geometry& g) { return g.shape.value_heads * g.shape.value_dim; }
  static std::int64_t keys(const Geometry& g) { return g.shape.key_heads * g.shape.key_dim; }
  static std::int64_t gates(const Geometry& g) { return g.shape.value_heads * g.shape.decays(); }
  static std::int64_t operand_bytes(const Case& c) {
    const Geometry& g = c.geometry;
    return (2 * keys(g) + 2 * outputs(g) + gates(g) + g.shape.value_heads) * c.act_bytes();
  }
  static StateTraffic traffic(const Case& c, const Cursor& cursor) {
    return delta_rule_row_traffic(c.geometry.shape, c.checkpoint, c.activation, c.limits(),
                                  c.kind(), cursor, c.tokens, c.flush);
  }

  Params layer(const Case& c, std::int64_t slots, Arenas& arenas) const {
    const DeltaRuleShape& s = c.geometry.shape;
    const std::int64_t places = c.limits().record_places();
    Params p;
    p.shape = s;
    p.fast_flush = c.flush == FlushMode::kFast;
    p.state_head_stride = s.key_dim * s.value_dim;
    p.state_slot_stride = s.state_elements();
    p.ring_k_head_stride = places * s.key_dim;
    p.ring_k_slot_stride = s.key_heads * p.ring_k_head_stride;
    p.ring_k_scale_head_stride = places;
    p.ring_k_scale_slot_stride = s.key_heads * places;
    p.ring_v_head_stride = p.ring_delta_head_stride = places * s.value_dim;
    p.ring_v_slot_stride = p.ring_delta_slot_stride = s.value_heads * p.ring_v_head_stride;
    p.ring_decay_head_stride = places * s.decays();
    p.ring_decay_slot_stride = s.value_heads * p.ring_decay_head_stride;
    p.ring_beta_head_stride = places;
    p.ring_beta_slot_stride = s.value_heads * places;
    if (!s.channel_decay) {
      p.deferred_slot_stride = s.value_heads * deferred_decay_count(c.checkpoint, s.value_dim);
      p.deferred = arenas.decays.take<float>(sized(slots * p.deferred_slot_stride));
    }
    p.state = arenas.states.take<char>(sized(slots * p.state_slot_stride) * size_of(c.checkpoint));
    p.ring_k = arenas.numbers.take<char>(sized(slots * p.ring_k_slot_stride * c.act_bytes()));
    p.ring_v = arenas.numbers.take<char>(sized(slots * p.ring_v_slot_stride * c.act_bytes()));
    p.ring_delta = arenas.numbers.take<char>(sized(slots * p.ring_v_slot_stride * c.act_bytes()));
    p.ring_k_scale = arenas.positive.take<float>(sized(slots * p.ring_k_scale_slot_stride));
    p.ring_beta = arenas.positive.take<float>(sized(slots * p.ring_beta_slot_stride));
    p.ring_decay = arenas.decays.take<float>(sized(slots * p.ring_decay_slot_stride));
    p.a_log = a_log_;
    p.normalize = true;
    p.norm_epsilon = 1e-6f;
    p.q_scale = 0.0883883f;  // 128^-1/2
    p.q_token_stride = p.k_token_stride = keys(c.geometry);
    p.q_head_stride = p.k_head_stride = s.key_dim;
    p.v_token_stride = p.o_token_stride = outputs(c.geometry);
    p.v_head_stride = p.o_head_stride = s.value_dim;
    p.gate_token_stride = gates(c.geometry);
    p.gate_head_stride = s.decays();
    p.beta_token_stride = s.value_heads;
    p.gate_is_f32 = p.beta_is_f32 = c.activation == DType::kF32;
    return p;
  }
  void* take_operands(const Case& c, Arenas& arenas, Params& p) const {
    const auto take = [&](std::int64_t elements) {
      return arenas.numbers.take<char>(sized(c.batch * c.tokens * elements * c.act_bytes()));
    };
    p.q = take(keys(c.geometry));
    p.k = take(keys(c.geometry));
    p.v = take(outputs(c.geometry));
    p.gate = take(gates(c.geometry));
    p.beta = take(c.geometry.shape.value_heads);
    return p.o = take(outputs(c.geometry));
  }
  static FlushPlaces flush_places(const Params& p, const CudaDeviceInfo& device) {
    return delta_rule_flush_places(p, device);
  }
  static auto choose(const Params& p, const CudaDeviceInfo& device, const Tuning& tuning) {
    return choose_delta_rule_config(p, device, tuning);
  }
  static Status step(const Params& p, const DeltaRuleCudaConfig& config, cudaStream_t stream) {
    return delta_rule_cuda_step(p, config, stream);
  }
  static std::vector<Tuning> tunings(const Case&) {
    std::vector<Tuning> all;
    for (const int warps : {2, 4, 8}) {
      all.push_back({.kernel = StepKernel::kDirect, .warps = warps});
      for (const int tiles : {1, 2, 4, 8}) {
        all.push_back({.kernel = StepKernel::kStreamed, .warps = warps, .tiles = tiles});
      }
    }
    return all;
  }

 private:
  float* a_log_ = nullptr;
};

template <bool kChannelDecay>
Cases<DeltaRuleFamily<kChannelDecay>> cases() {
  using Case = BenchCase<Geometry>;
  const auto f32 = [](const Geometry& g, std::int64_t batch, int tokens = 1, bool all = false) {
    return Case{.geometry = g, .batch = batch, .tokens = tokens, .accept_all = all};
  };
  const auto bf16 = [](const Geometry& g, std::int64_t batch, int tokens = 1) {
    return Case{.geometry = g, .batch = batch, .checkpoint = DType::kBF16, .tokens = tokens};
  };
  const auto copied = [&](const Geometry& g, ReadCopyFormat format) {
    Case c = f32(g, 256);
    c.read_copy = format;
    return c;
  };
  const auto fast = [&](const Geometry& g, int tokens) {
    Case c = f32(g, 256, tokens);
    c.flush = FlushMode::kFast;
    return c;
  };
  Cases<DeltaRuleFamily<kChannelDecay>> out;
  if constexpr (kChannelDecay) {
    const Geometry& kimi = kKda[1];
    out.targets = {f32(kimi, 256),    f32(kimi, 256, 4), bf16(kimi, 256),  f32(kimi, 64),
                   f32(kimi, 8),      f32(kimi, 1),      f32(kimi, 8, 4),  f32(kimi, 1, 4),
                   f32(kKda[0], 256), f32(kKda[3], 64),  f32(kKda[2], 64), bf16(kimi, 256, 4)};
    out.targets.push_back(f32(kimi, 256));
    out.targets.back().window = 8;
    for (const ReadCopyFormat format : {ReadCopyFormat::kNvfp4, ReadCopyFormat::kFp8E4M3}) {
      out.targets.push_back(copied(kimi, format));
    }
    for (const int tokens : {1, 4}) out.targets.push_back(fast(kimi, tokens));
  } else {
    const Geometry& g32 = kGdn[1];
    const Geometry& g64 = kGdn[3];
    out.targets = {f32(g64, 256),    bf16(g32, 256),   f32(g64, 256, 4),      bf16(g32, 256, 4),
                   f32(g32, 256),    f32(g32, 64),     f32(g32, 8),           f32(g32, 1),
                   f32(g32, 256, 4), f32(g64, 8),      f32(g64, 1),           f32(g32, 8, 4),
                   f32(g32, 1, 4),   f32(g64, 256, 8), f32(g64, 256, 4, true)};
    for (const ReadCopyFormat format : {ReadCopyFormat::kNvfp4, ReadCopyFormat::kFp8E4M3}) {
      out.targets.push_back(copied(g64, format));
    }
    for (const int tokens : {1, 4}) out.targets.push_back(fast(g64, tokens));
  }
  const auto add = [&](const Geometry& g) {
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
  };
  if constexpr (kChannelDecay) {
    for (const Geometry& g : kKda) add(g);
  } else {
    for (const Geometry& g : kGdn) add(g);
  }
  Case plain = f32(kChannelDecay ? kKda[1] : kGdn[3], 256);
  plain.mode = Mode::kPlain;
  const Geometry& small = kChannelDecay ? kKda[1] : kGdn[1];
  Case small_plain = f32(small, 1);
  small_plain.mode = Mode::kPlain;
  out.swept = {out.targets[0], out.targets[1], out.targets[2], out.targets[3],   plain,
               f32(small, 1),  f32(small, 8),  f32(small, 64), f32(small, 1, 4), f32(small, 8, 4),
               small_plain};
  if constexpr (!kChannelDecay) out.swept.push_back(f32(kGdn[3], 256, 8));
  return out;
}

}  // namespace
}  // namespace replayssm::cuda

int main(int argc, char** argv) {
  using namespace replayssm::cuda;
  const std::string family = argc > 1 ? argv[1] : "";
  if (family == "gdn") return bench_main(argc - 1, argv + 1, cases<false>());
  if (family == "kda") return bench_main(argc - 1, argv + 1, cases<true>());
  std::fprintf(stderr,
               "usage: %s gdn|kda [--quick] [--sweep] [--filter TEXT] [--commit ID] "
               "[--out FILE]\n",
               argv[0]);
  return 2;
}
