// What a checkpoint must hold: plain decoding, one committed token at a time, with the state in
// f32; rounded to the checkpoint type exactly where the contract says it is encoded. Bit for bit,
// or with fast flushes within the case's bound.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "support/pool_access.h"
#include "support/step_harness.h"

namespace replayssm::testing {

template <typename Model>
class PlainShadow {
 public:
  PlainShadow(const Model& model, std::int64_t slots, const CpuContext& context)
      : model_(model.plain()),
        checkpoint_(model.test_case().checkpoint),
        bound_(model.test_case().bound()),
        pool_(model_.make_pool(slots)),
        runner_(model_, pool_, context) {}
  PlainShadow(const PlainShadow&) = delete;
  PlainShadow& operator=(const PlainShadow&) = delete;

  void reset(std::int32_t slot) { EXPECT_TRUE(is_ok(pool_.reset(slot))); }
  void copy(std::int32_t src, std::int32_t dst) { EXPECT_TRUE(is_ok(pool_.copy(src, dst))); }

  /// decode, the recurrence over `tokens`, one encode.
  void fold(std::int32_t slot, std::span<const TokenId> tokens) {
    for (const TokenId token : tokens) runner_.step({committed(slot, {token})});
    if (!tokens.empty()) encode(slot);
  }
  /// The tokens of a committed row: each one's state is encoded.
  void decode(std::int32_t slot, std::span<const TokenId> tokens) {
    for (const TokenId token : tokens) fold(slot, {&token, 1});
  }

  /// The checkpoints of `slot` in `pool` are the shadow's.
  void expect_checkpoint(const StatePool& pool, std::int32_t slot, std::int32_t shadow_slot,
                         const std::string& where) const {
    const auto shape = model_.test_case().state_shape();
    for (int layer = 0; layer < model_.test_case().layers; ++layer) {
      const std::vector<float> found = checkpoint_values(pool, layer, slot);
      const std::vector<float> want = checkpoint_values(pool_, layer, shadow_slot);
      if (pool.options().flush_mode(layer) == FlushMode::kExact) {
        EXPECT_TRUE(same_bits(found, want, shape)) << where << ", layer " << layer;
        if (checkpoint_ != DType::kF32) continue;
        // Not only their product is the same.
        EXPECT_TRUE(same_bits(stored_values(pool, layer, slot),
                              stored_values(pool_, layer, shadow_slot), shape))
            << where << ", layer " << layer;
        EXPECT_TRUE(same_bits(deferred_decays(pool, layer, slot),
                              deferred_decays(pool_, layer, shadow_slot)))
            << where << ", layer " << layer;
      } else {
        EXPECT_TRUE(close(found, std::vector<double>(want.begin(), want.end()), bound_, shape))
            << where << ", layer " << layer;
      }
    }
  }

 private:
  void encode(std::int32_t slot) {
    if (checkpoint_ == DType::kF32) return;
    for (int layer = 0; layer < model_.test_case().layers; ++layer) {
      std::vector<float> values = checkpoint_values(pool_, layer, slot);
      for (float& x : values) x = round_to(checkpoint_, x);
      set_checkpoint(pool_, layer, slot, values);
    }
  }

  Model model_;
  DType checkpoint_;
  double bound_;
  StatePool pool_;
  typename Model::Runner runner_;
};

}  // namespace replayssm::testing
