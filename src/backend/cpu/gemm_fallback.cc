#include <algorithm>

#include "backend/cpu/gemm.h"
#include "backend/cpu/kernels.h"

namespace replayssm::cpu {

namespace {

// Blocks that keep inputs in the first cache level and a slice of a panel in the second. The order
// of additions depends on kSlice only.
constexpr std::int64_t kRows = 4;
constexpr std::int64_t kPanel = 48;
constexpr std::int64_t kSlice = 512;

/// y[r][0, outs) of up to kRows rows from kSlice or fewer inputs; added to y unless they are first.
void multiply_slice(const BackendKernels& kernels, const GemmBlock& block, std::int64_t row,
                    std::int64_t first_in, std::int64_t ins, const float* w, std::int64_t first_out,
                    std::int64_t outs) {
  const std::int64_t rows = std::min(kRows, block.rows - row);
  float partial[kRows][kPanel];
  const float* x[kRows] = {};
  float* sums[kRows] = {};
  float* y[kRows] = {};
  for (std::int64_t r = 0; r < rows; ++r) {
    x[r] = block.x + (row + r) * block.x_stride + first_in;
    y[r] = block.y + (row + r) * block.y_stride + first_out;
    sums[r] = first_in == 0 ? y[r] : partial[r];
  }
  kernels.dots[storage_index(DType::kF32)](x, rows, w, ins, outs, ins, sums, 0);
  if (first_in == 0) return;
  for (std::int64_t r = 0; r < rows; ++r) kernels.add(y[r], partial[r], outs);
}

}  // namespace

Status gemm(const CpuContext& context, std::span<const GemmBlock> blocks,
            const GemmWeights& weights, Scratch& scratch) {
  if (blocks.empty()) return {};
  if (!scratch.reserve(kPanel * kSlice)) {
    return resource_exhausted("matmul: no memory for a panel of ", kPanel, " x ", kSlice,
                              " weights");
  }
  const BackendKernels& kernels = backend_kernels(context.isa);
  const std::size_t element = size_of(weights.dtype);
  const std::int64_t panels = (weights.out + kPanel - 1) / kPanel;
  context.parallel_for(panels, [&](std::int64_t panel, int worker) {
    const std::int64_t first_out = panel * kPanel;
    const std::int64_t outs = std::min(kPanel, weights.out - first_out);
    for (std::int64_t first_in = 0; first_in < weights.in; first_in += kSlice) {
      const std::int64_t ins = std::min(kSlice, weights.in - first_in);
      const auto* source = static_cast<const std::byte*>(weights.data) +
                           static_cast<std::size_t>(first_out * weights.in + first_in) * element;
      // f32 weights are copied too: rows of a power of two apart would share a few cache sets.
      float* w = scratch.get(worker);
      for (std::int64_t o = 0; o < outs; ++o) {
        kernels.widen[storage_index(weights.dtype)](
            source + static_cast<std::size_t>(o * weights.in) * element, w + o * ins, ins);
      }
      for (const GemmBlock& block : blocks) {
        for (std::int64_t row = 0; row < block.rows; row += kRows) {
          multiply_slice(kernels, block, row, first_in, ins, w, first_out, outs);
        }
      }
    }
  });
  return {};
}

const char* gemm_name() { return "built-in"; }

}  // namespace replayssm::cpu
