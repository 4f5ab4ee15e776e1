// The delta rule's side of cuda_runner.h.
#pragma once

#include <algorithm>

#include "cuda/step_kernel.h"
#include "support/cuda_runner.h"
#include "support/delta_rule_harness.h"

namespace replayssm::testing {

/// Runs of the streamed kernel are of any length: by itself it chooses long ones for many rows.
class AnyRuns {
 public:
  ~AnyRuns() { cuda::force_run_tiles(0); }
  void choose() {
    constexpr int kTiles[] = {0, 2, 4, 8};
    cuda::force_run_tiles(kTiles[rng_.between(0, 3)]);
  }

 private:
  Rng rng_{19};
};

class DeltaCudaRunner : public CudaRunnerOf<DeltaRunner> {
 public:
  using CudaRunnerOf::CudaRunnerOf;

  Status recurrence(int layer, Step& step, LayerBuffers& b) override {
    const DeviceImage u(b.u.bytes());
    const DeviceImage conv(b.conv_out.bytes());
    const DeviceImage a(b.a.bytes());
    const DeviceImage beta(b.b.bytes());
    const DeviceImage y(b.y.bytes());
    const DeviceImage& qkv = model().test_case().conv_width > 0 ? conv : u;
    LayerBuffers on_device = b;
    on_device.q = qkv.view(b.q);
    on_device.k = qkv.view(b.k);
    on_device.v = qkv.view(b.v);
    on_device.a_view = a.view(b.a_view);
    on_device.b_view = beta.view(b.b_view);
    on_device.y_view = y.view(b.y_view);
    RSSM_RETURN_IF_ERROR(step_on_device(layer, step, on_device));
    RSSM_RETURN_IF_ERROR(wait());
    u.download(b.u.data());
    conv.download(b.conv_out.data());
    a.download(b.a.data());
    beta.download(b.b.data());
    y.download(b.y.data());
    return {};
  }

 private:
  template <typename Params>
  Params params_on_device(int layer, DeviceFloats& floats) const {
    auto params = model().template op_params<Params>(layer);
    params.a_log = floats.put(params.a_log);
    params.dt_bias = floats.put(params.dt_bias);
    return params;
  }
  Status step_on_device(int layer, Step& step, const LayerBuffers& b) {
    DeviceFloats floats;
    const Status status =
        model().test_case().family == DeltaFamily::kGated
            ? gated_delta_net_step(cuda_, pool(), layer, step,
                                   params_on_device<GatedDeltaNetParams>(layer, floats),
                                   b.operands<GatedDeltaNetOperands>())
            : kimi_delta_attention_step(cuda_, pool(), layer, step,
                                        params_on_device<KimiDeltaAttentionParams>(layer, floats),
                                        b.operands<KimiDeltaAttentionOperands>());
    RSSM_RETURN_IF_ERROR(status);
    return wait();  // before the parameters go
  }
};

/// A case in the shapes and types that CUDA kernels take.
inline DeltaCase for_cuda(DeltaCase c) {
  c.shape.key_dim = (c.shape.key_dim + 15) / 16 * 16;
  c.shape.value_dim = (c.shape.value_dim + 15) / 16 * 16;
  for (DType* type : {&c.activation, &c.gate_type}) {
    if (*type == DType::kF16) *type = DType::kBF16;
  }
  c.unit = 8;
  c.f32_bound = 2e-5;  // scores are sums of unscaled products
  return c;
}

/// Two key and four value heads of 128 x 32 behind a convolution, two layers.
inline DeltaCase usual_delta_case(DeltaFamily family, DType checkpoint = DType::kF32,
                                  DType activation = DType::kF32,
                                  FlushMode flush = FlushMode::kExact) {
  DeltaCase c = for_cuda(small_delta_case(family, "usual", 6, 3));
  c.shape.key_dim = 128;
  c.shape.value_dim = 32;
  c.checkpoint = checkpoint;
  c.activation = activation;
  c.flush = flush;
  c.conv_width = 4;
  c.layers = 2;
  c.rewindable = true;
  return c;
}

inline StatePool cuda_pool(const DeltaModel& model, std::int64_t slots,
                           std::int64_t max_rows = 64) {
  StatePoolOptions options = on_cuda(model.test_case().options(slots));
  options.max_rows = max_rows;
  return model.make_pool(options);
}

}  // namespace replayssm::testing
