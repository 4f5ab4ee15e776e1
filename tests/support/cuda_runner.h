// Steps of a pool in device memory: what a family's runner does on the CPU, with the operands
// carried to the device and the outputs back.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "support/cuda_device.h"
#include "support/mamba2_harness.h"

namespace replayssm::testing {

/// The case's pool on cuda:0.
inline StatePoolOptions on_cuda(StatePoolOptions options) {
  options.device = {DeviceKind::kCuda, 0};
  return options;
}

/// Host memory's image on the device, and views of it there.
class DeviceImage {
 public:
  explicit DeviceImage(const std::vector<std::byte>& host)
      : host_(host.data()), memory_(host.size()) {
    memory_.upload(host.data(), host.size());
  }
  TensorView view(const TensorView& of) const {
    TensorView out = of;
    if (!of.empty()) {
      out.data = memory_.as<std::byte>() + (static_cast<const std::byte*>(of.data) - host_);
    }
    return out;
  }
  void download(std::byte* to) const {
    const std::vector<unsigned char> bytes = memory_.download();
    std::memcpy(to, bytes.data(), bytes.size());
  }

 private:
  const std::byte* host_;
  cuda::DeviceBytes memory_;
};

/// Floats on the device for as long as this lives.
class DeviceFloats {
 public:
  TensorView put(const TensorView& host) {
    if (host.empty()) return host;
    const auto bytes = static_cast<std::size_t>(host.numel()) * sizeof(float);
    memory_.emplace_back(bytes);
    memory_.back().upload(host.data, bytes);
    TensorView out = host;
    out.data = memory_.back().as<void>();
    return out;
  }

 private:
  std::vector<cuda::DeviceBytes> memory_;
};

/// A family's runner with steps, commits and convolutions on the device.
template <typename Base>
class CudaRunnerOf : public Base {
 public:
  using typename Base::LayerBuffers;

  template <typename Model>
  CudaRunnerOf(const Model& model, StatePool& pool, cudaStream_t stream = nullptr)
      : Base(model, pool, {}), cuda_(0, stream) {}

  const CudaContext& cuda() const { return cuda_; }

  Result<Step> begin(const std::vector<StepRow>& rows) override {
    return this->pool().begin_step(cuda_, std::span<const StepRow>(rows));
  }
  Status end(Step& step, const std::vector<std::int64_t>& accepted) override {
    return this->pool().commit(cuda_, step, std::span<const std::int64_t>(accepted));
  }
  Status convolve(int layer, Step& step, LayerBuffers& b) override {
    const DeviceImage u(b.u.bytes());
    const DeviceImage conv(b.conv_out.bytes());
    DeviceFloats floats;
    CausalConv1dOperands o = this->conv_operands(layer, b);
    o.u = u.view(o.u);
    o.out = conv.view(o.out);
    o.weight = floats.put(o.weight);
    o.bias = floats.put(o.bias);
    RSSM_RETURN_IF_ERROR(causal_conv1d_step(cuda_, this->pool(), layer, step, o));
    RSSM_RETURN_IF_ERROR(wait());
    u.download(b.u.data());
    conv.download(b.conv_out.data());
    return {};
  }

 protected:
  Status wait() const {
    const cudaError_t error = cudaStreamSynchronize(static_cast<cudaStream_t>(cuda_.stream));
    if (error == cudaSuccess) return {};
    return make_status(StatusCode::kInternal, "test step: ", cudaGetErrorString(error));
  }

  CudaContext cuda_;
};

class Mamba2CudaRunner : public CudaRunnerOf<Mamba2Runner> {
 public:
  using CudaRunnerOf::CudaRunnerOf;

  Status recurrence(int layer, Step& step, LayerBuffers& b) override {
    // Operands of no tokens have no memory to carry.
    const DeviceImage u(b.u.bytes());
    const DeviceImage dt(b.dt.bytes());
    const DeviceImage y(b.y.bytes());
    const DeviceImage conv(b.conv_out.bytes());
    DeviceFloats floats;
    const DeviceImage& xbc = model().test_case().conv_width > 0 ? conv : u;
    Mamba2Params params = model().op_params(layer);
    params.d = floats.put(params.d);
    params.dt_bias = floats.put(params.dt_bias);
    const bool shared_dt =
        b.dt_view.data >= b.u.data() && b.dt_view.data < b.u.data() + b.u.bytes().size();
    const Mamba2Operands o{xbc.view(b.x), xbc.view(b.b),
                           xbc.view(b.c), (shared_dt ? u : dt).view(b.dt_view),
                           u.view(b.z),   y.view(b.y_view)};
    RSSM_RETURN_IF_ERROR(mamba2_step(cuda_, pool(), layer, step, params, o));
    RSSM_RETURN_IF_ERROR(wait());
    u.download(b.u.data());
    dt.download(b.dt.data());
    y.download(b.y.data());
    conv.download(b.conv_out.data());
    return {};
  }
};

/// A case in the shapes and types that CUDA kernels take.
inline Mamba2Case for_cuda(Mamba2Case c) {
  c.shape.head_dim = (c.shape.head_dim + 15) / 16 * 16;
  c.shape.state_size = c.shape.state_size <= 64 ? 64 : c.shape.state_size <= 128 ? 128 : 256;
  for (DType* type : {&c.activation, &c.dt_type}) {
    if (*type == DType::kF16) *type = DType::kBF16;
  }
  c.unit = 8;
  return c;
}

/// Four heads of 32x64 behind a convolution, two layers.
inline Mamba2Case usual_case(DType checkpoint = DType::kF32, DType activation = DType::kF32) {
  Mamba2Case c = for_cuda(small_case("usual", 6, 3));
  c.shape.head_dim = 32;
  c.checkpoint = checkpoint;
  c.activation = activation;
  c.conv_width = 4;
  c.layers = 2;
  c.rewindable = true;
  return c;
}

inline StatePool cuda_pool(const Mamba2Model& model, std::int64_t slots,
                           std::int64_t max_rows = 64) {
  StatePoolOptions options = on_cuda(model.test_case().options(slots));
  options.max_rows = max_rows;
  return model.make_pool(options);
}

inline const CudaContext kCuda(0, nullptr);

/// The best instruction set there is: like the GPU, all but the generic one fuse multiply and add.
inline CpuContext best_cpu() { return {.threads = nullptr, .isa = supported_isas().back()}; }

}  // namespace replayssm::testing
