#include "replayssm/decode_plan.h"

#include <algorithm>

namespace replayssm {

Result<DecodePlan> choose_decode(const CpuContext& context, const StatePoolOptions& options,
                                 std::int64_t sequences) {
  static_cast<void>(context);
  static_cast<void>(sequences);
  RSSM_ASSIGN_OR_RETURN(const SlotBytes bytes, StatePool::bytes_per_slot(options));
  static_cast<void>(bytes);
  return DecodePlan{};
}

}  // namespace replayssm
