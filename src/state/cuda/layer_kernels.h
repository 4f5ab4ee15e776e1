// A layer's recurrence as the device pool sees it: parameters filled in from the page layout, and
// one entry for support, launch and description whatever the family.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>

#include "cuda/query.h"
#include "ops/delta_rule/cuda/params.h"
#include "ops/mamba2/cuda/params.h"
#include "state/layout.h"

namespace replayssm::cuda {

class LayerKernels {
 public:
  /// Geometry and types; no addresses yet.
  LayerKernels(const LayerSpec& spec, const StatePoolOptions& options);

  /// Points at the fields of slot 0's page; `page_stride` in bytes.
  void point_at_pages(const PageLayout& layout, std::byte* page, std::size_t page_stride);
  /// Points a record field at a ring of its own, (outer, places, inner) of one slot.
  void point_at_ring(const Field& field, void* ring, std::int64_t places);
  void set_limits(ReplayLimits limits);
  /// `plain`: as the kernels' parameters have it.
  void set_rows(const PlannedRow* rows, std::int64_t row_count, bool plain = false);
  void set_mamba2_a(const float* a);

  template <typename Params>
  Params& as() {
    return std::get<Params>(params_);
  }

  /// Where the layer wants the flushes of the rows that are set. Mamba-2 gives them runs of their
  /// own length, and has them first.
  FlushPlaces flush_places(const CudaDeviceInfo& device) const;

  Status check(const CudaDeviceInfo& device) const;
  Status run(const CudaDeviceInfo& device, cudaStream_t stream) const;
  /// The launch for the rows that are set.
  Result<std::string> explain(const CudaDeviceInfo& device) const;

 private:
  struct Ring {
    const char* name;
    void** data;
    std::int64_t* slot_stride;
    std::int64_t* outer_stride;
    std::int64_t* place_stride;  // or null: inner
  };
  static constexpr std::size_t kMostRings = 6;
  struct Rings {
    std::array<Ring, kMostRings> ring;
    std::size_t count;
  };
  Rings rings();

  std::variant<Mamba2CudaParams, DeltaRuleCudaParams> params_;
};

}  // namespace replayssm::cuda
