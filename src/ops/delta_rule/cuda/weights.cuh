// The weights of what a tentative row's outputs are sums of: the checkpoint, the window's records,
// the row's own tokens.
#pragma once

#include <cstdint>

#include "cuda/ptx/mma.cuh"
#include "ops/delta_rule/cuda/preparation.cuh"

namespace replayssm::cuda {

template <typename State, typename Act, bool kChannelDecay, DeltaRuleVariant kVariant>
class DeltaRuleWeights : protected DeltaRulePreparation<State, Act, kChannelDecay, kVariant> {
 protected:
  using Preparation = DeltaRulePreparation<State, Act, kChannelDecay, kVariant>;
  using Preparation::block_threads, Preparation::channel_decay;
  using Preparation::column_scale, Preparation::decays, Preparation::head_at;
  using Preparation::kBlocks, Preparation::key_dim, Preparation::key_scale, Preparation::kKeyDim;
  using Preparation::kMasked, Preparation::kMaxTokens, Preparation::kPerLane, Preparation::kUnroll;
  using Preparation::lane, Preparation::lane_has, Preparation::last_group,
      Preparation::later_decays;
  using Preparation::launch, Preparation::live, Preparation::load_lane, Preparation::own;
  using Preparation::p, Preparation::raw_key, Preparation::raw_token, Preparation::scale;
  using Preparation::scale_tokens, Preparation::store_scaled, Preparation::sum_of_squares;
  using Preparation::thread, Preparation::token_channel_decay, Preparation::token_row;
  using Preparation::vector;
  using Preparation::warp;
  using typename Preparation::Vector;

  __device__ __forceinline__ DeltaRuleWeights(const DeltaRuleCudaParams& params,
                                              const DeltaRuleLaunch& shape,
                                              unsigned char* shared_memory)
      : Preparation(params, shape, shared_memory) {}

  // ---- Shared memory ----

  /// k_e . column c by entry e; own tokens from own_score() on.
  __device__ __forceinline__ float* scores(int c) const {
    return this->template at<float>(launch.shared.scores) + c * launch.shared.score_stride;
  }
  __device__ __forceinline__ int own_score() const {
    return (static_cast<int>(p.limits.window) + 7) / 8 * 8;
  }
  __device__ __forceinline__ float* weights(int c) const {
    return this->template at<float>(head_at() + launch.shared.weights) +
           c * launch.shared.weight_stride;
  }
  __device__ __forceinline__ float* own_weights(int c) const {
    return weights(8 * kBlocks) + c * kMaxTokens;
  }
  __device__ __forceinline__ float* state_weights() const { return own_weights(8 * kBlocks); }

  /// What warps prepare for each other, of the row's `records` live records and its tokens. Then
  /// comes a barrier of the block, then finish_weights.
  __device__ __forceinline__ void share_weights(int records) const {
    if constexpr (kChannelDecay) {
      prepare_channel_weights(records);
    } else {
      scale_tokens(own, false);
      if (own > 0) prepare_scores(records);
    }
  }
  /// `deferred`: what the checkpoint is to be multiplied by.
  __device__ __forceinline__ void finish_weights(int records, DeferredDecay deferred) const {
    if constexpr (kChannelDecay) return;
    if (own == 0) return;
    if constexpr (kBlocks == 1) {
      prepare_few_weights<kVariant == DeltaRuleVariant::kSingle ? 1 : 4>(records, deferred);
    } else {
      prepare_weights(records, deferred);
    }
  }

 private:
  // ---- Scores, where a head has one decay: products of the window's keys with the columns,
  // without their scales ----

  /// Entries: `records` live records, then the row's own tokens.
  __device__ __forceinline__ void prepare_scores(int records) const {
    if constexpr (sizeof(Act) == 2) {
      multiply_scores(records);
    } else {
      add_up_scores(records);
    }
  }

  /// On the tensor cores, exact products of bf16: a warp has eight entries.
  __device__ __forceinline__ void multiply_scores(int records) const {
    const int g = lane / 4;
    const int q = lane % 4;
    const int record_jobs = (records + 7) / 8;
#pragma unroll 1
    for (int job = warp; job < record_jobs + (own + 7) / 8; job += launch.warps) {
      const bool is_record = job < record_jobs;
      const int first = is_record ? 8 * job : 8 * (job - record_jobs);
      const Act* entry =
          is_record ? raw_key(min(first + g, records - 1)) : raw_token(2 * min(first + g, own - 1));
      constexpr int kTiles = (kBlocks + 1) / 2;  // of 16 columns
      float sums[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][i] = 0.0f;
      }
#pragma unroll kUnroll
      for (int s = 0; s < kKeyDim; s += 32) {
        if (kMasked && s >= key_dim()) break;
        const int n = s + 8 * q;
        Packed<Act, 8> e{};
        if (!kMasked || n < key_dim()) e = load_packed<Act, 8>(entry + n);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          if (m > 0 && 8 * m >= own) break;
          Packed<Act, 8> low{}, high{};
          if (!kMasked || n < key_dim()) {
            low = load_packed<Act, 8>(raw_token(token_row(16 * m + g)) + n);
            if (kBlocks > 1) high = load_packed<Act, 8>(raw_token(16 * m + 8 + g) + n);
          }
#pragma unroll
          for (int i = 0; i < 4; i += 2) {
            ptx::mma_bf16(sums[m], low.word[i], high.word[i], low.word[i + 1], high.word[i + 1],
                          e.word[i], e.word[i + 1]);
          }
        }
      }
      const int to = (is_record ? first : own_score() + first) + 2 * q;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        *reinterpret_cast<float2*>(scores(16 * m + g) + to) = {sums[m][0], sums[m][1]};
        if (kBlocks > 1) {
          *reinterpret_cast<float2*>(scores(16 * m + 8 + g) + to) = {sums[m][2], sums[m][3]};
        }
      }
    }
  }

  /// In fp32, four lanes to a product.
  __device__ __forceinline__ void add_up_scores(int records) const {
    const int shift = 32 - __clz(2 * own - 1);  // log2 of the number of columns, rounded up
    const int items = (records + own) << shift;
    constexpr int kQuads = kWarpLanes / 4;
#pragma unroll 1
    for (int first = warp * kQuads; first < items; first += launch.warps * kQuads) {
      const int item = min(first + lane / 4, items - 1);  // a warp stays together
      const int entry = item >> shift;
      const int c = min(item & ((1 << shift) - 1), 2 * own - 1);
      const int token = entry - records;
      const Act* key = token < 0 ? raw_key(entry) : raw_token(2 * token);
      float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
      for (int n = 4 * (lane % 4); n < kKeyDim; n += 16) {
        if (kMasked && n >= key_dim()) break;
        const auto x = load_packed<Act, 4>(key + n);
        const auto y = load_packed<Act, 4>(raw_token(c) + n);
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = fmaf(x[i], y[i], part[i]);
      }
      float sum = (part[0] + part[1]) + (part[2] + part[3]);
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (lane % 4 == 0) scores(c)[token < 0 ? entry : own_score() + token] = sum;
    }
  }

  // ---- Weights ----

  // Where every channel has its own decay, a warp goes through entries from the newest to the
  // oldest with all channels in its lanes, and the columns of several tokens.
  static constexpr int kGroup = kVariant == DeltaRuleVariant::kSingle ? 2 : kMasked ? 4 : 8;
  static constexpr int kRecordsAtOnce = kVariant == DeltaRuleVariant::kSingle ? 4 : kMasked ? 1 : 2;

  /// Of a row that has tokens.
  __device__ __forceinline__ int columns() const {
    return kVariant == DeltaRuleVariant::kSingle ? 2 : 2 * own;
  }

  /// Weights of records and own tokens, the columns of the checkpoint, and scales, which all but
  /// own tokens' weights have yet to be multiplied by (state_weights).
  __device__ __forceinline__ void prepare_channel_weights(int records) const {
    if constexpr (kVariant == DeltaRuleVariant::kSingle) {
      if (own > 0) weigh_columns(0, records);
    } else {
#pragma unroll 1
      for (int first = 0; first < 2 * own; first += kGroup) weigh_columns(first, records);
    }
    // Products take sixteen records at once: zeros up to the next multiple.
    const int padding = -records & 15;
#pragma unroll 1
    for (int i = thread; i < 32 * own; i += block_threads()) {
      if (i % 16 < padding) weights(i / 16)[records + i % 16] = 0.0f;
    }
  }

  static __device__ __forceinline__ void multiply_by(const Vector& factor, Vector& v) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) v.x[i] *= factor.x[i];
  }
  /// sums[i] = x . column i of the lane's channels.
  static __device__ __forceinline__ void multiply_columns(const Vector& x,
                                                          const Vector (&column)[kGroup],
                                                          float* sums) {
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      sums[c] = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sums[c] = fmaf(x.x[i], column[c].x[i], sums[c]);
    }
  }

  /// Weights of the warp's share of the records for columns first... Returns the product of the
  /// decays from the warp's first record on.
  __device__ __forceinline__ Vector weigh_records(int first, int records,
                                                  const Vector (&column)[kGroup]) const {
    constexpr int kSums = kRecordsAtOnce * kGroup;
    constexpr int kLanes = kWarpLanes / kSums;  // that get a sum
    const int c = lane / kLanes % kGroup;
    const int record = lane / kLanes / kGroup;  // of those at once, from the newest on
    // As many as are turned into weights at once, or a multiple: the last warp, which has more to
    // do, has none of few records.
    const int at_once = kRecordsAtOnce * launch.warps;
    const int share = (records + at_once - 1) / at_once * kRecordsAtOnce;
    const int begin = warp * share;
    const int end = min(begin + share, records);
    Vector later;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) later.x[i] = 1.0f;
#pragma unroll 4
    for (int e = records - 1; e >= end; --e) multiply_by(load_lane(channel_decay(e)), later);
#pragma unroll 1
    for (int newest = end - 1; newest >= begin; newest -= kRecordsAtOnce) {
      float sums[kSums];
#pragma unroll
      for (int r = 0; r < kRecordsAtOnce; ++r) {
        const int e = max(newest - r, begin);
        Vector key = load_lane(raw_key(e));
        multiply_by(later, key);
        multiply_columns(key, column, sums + r * kGroup);
        if (newest - r >= begin) multiply_by(load_lane(channel_decay(e)), later);
      }
      const float sum = team_sum<kWarpLanes>(sums, lane);
      const int e = newest - record;
      if (lane % kLanes == 0 && e >= begin && first + c < columns()) {
        weights(first + c)[e] = key_scale()[e] * sum;
      }
    }
    return later;
  }

  /// Columns first.. of a group. Own tokens are the last warp's, the checkpoint's columns the first
  /// one's, which has the oldest records.
  __device__ __forceinline__ void weigh_columns(int first, int records) const {
    const bool is_last_warp = warp == launch.warps - 1;
    constexpr int kLanes = kWarpLanes / kGroup;  // that get the sums of a column
    const int mine = first + lane / kLanes;
    const bool writes = lane % kLanes == 0 && mine < columns();
    Vector column[kGroup];
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      column[c] = load_lane(raw_token(min(first + c, columns() - 1)));
    }
    float sums[kGroup];
    float unit = 0.0f;
    if (is_last_warp) {
#pragma unroll
      for (int c = 0; c < kGroup; ++c) sums[c] = sum_of_squares(column[c]);
      unit = column_scale(mine, team_sum<kWarpLanes>(sums, lane));
      if (writes) scale()[mine] = state_weights()[mine] = unit;
      __syncwarp();
    }
    // A column takes decays along on its way: of tokens up to its own, then of records.
#pragma unroll 1
    for (int i = min(columns(), first + kGroup) / 2 - 1; i >= 0; --i) {
      if (is_last_warp) {
        multiply_columns(load_lane(raw_token(2 * i)), column, sums);
        const float sum = team_sum<kWarpLanes>(sums, lane);
        if (writes && i <= mine / 2) own_weights(mine)[i] = scale()[2 * i] * unit * sum;
      }
      const Vector decay = load_lane(token_channel_decay(i));
#pragma unroll
      for (int c = 0; c < kGroup; ++c) {
        if (i <= (first + c) / 2) multiply_by(decay, column[c]);
      }
    }
    const Vector later = weigh_records(first, records, column);
    if (warp != 0) return;
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      multiply_by(later, column[c]);
      if (first + c < columns()) store_scaled(column[c], 1.0f, vector(first + c));
    }
  }

  /// The weights of the warp's head, which has one decay: scores with their scales, times the
  /// decays between entry and token. The checkpoint's weight takes the scale of k or q along, and
  /// what is deferred.
  __device__ __forceinline__ void prepare_weights(int records, DeferredDecay deferred) const {
    const int columns = 2 * own;
    // A lane has a column, then a record, then a pair of own tokens.
    float column = lane < columns ? scale()[lane] : 0.0f;
    for (int s = 0; s <= min(lane / 2, own - 1); ++s) column *= decays()[live + s];
    float later = 1.0f;
#pragma unroll 1
    for (int first = last_group(records); first >= 0; first -= kWarpLanes) {
      const int entry = first + lane;
      const bool is_record = entry < records;
      float factor = is_record ? key_scale()[entry] : 0.0f;
      factor *= later_decays(first, records, later);
      const bool is_padding = entry < (records + 15) / 16 * 16;
      for (int c = 0; c < columns; ++c) {
        const float weight = factor * __shfl_sync(kAllLanes, column, c);
        if (is_padding) weights(c)[entry] = is_record ? weight * scores(c)[entry] : 0.0f;
      }
    }
    // Records that have been folded are in the checkpoint already.
    if (lane < columns) state_weights()[lane] = column * later * deferred.value();
#pragma unroll 1
    for (int item = lane; item < columns * kMaxTokens; item += kWarpLanes) {
      const int c = item / kMaxTokens;
      const int i = item % kMaxTokens;
      const int t = c / 2;
      if (i > t) continue;
      float weight = scale()[c] * scale()[2 * i];
      for (int s = i + 1; s <= t; ++s) weight *= decays()[live + s];
      own_weights(c)[i] = weight * scores(c)[own_score() + i];
    }
    __syncwarp();
  }
  /// The same for up to kTokens tokens, whose columns fit into a lane's registers.
  template <int kTokens>
  __device__ __forceinline__ void prepare_few_weights(int records, DeferredDecay deferred) const {
    constexpr int kColumns = 2 * kTokens;
    float decay[kTokens], column[kColumns];
    float product = 1.0f;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      decay[t] = t < own ? decays()[live + t] : 1.0f;
      product *= decay[t];
      column[2 * t] = scale()[2 * t] * product;
      column[2 * t + 1] = scale()[2 * t + 1] * product;
    }
    float later = 1.0f;
#pragma unroll 1
    for (int first = last_group(records); first >= 0; first -= kWarpLanes) {
      const int entry = first + lane;
      const bool is_record = entry < records;
      float factor = is_record ? key_scale()[entry] : 0.0f;
      factor *= later_decays(first, records, later);
      if (entry >= (records + 15) / 16 * 16) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        weights(c)[entry] = is_record ? factor * column[c] * scores(c)[entry] : 0.0f;
      }
    }
    // A lane has a column, then a column and an own token.
    float mine = column[0];
#pragma unroll
    for (int c = 1; c < kColumns; ++c) mine = lane == c ? column[c] : mine;
    if (lane < kColumns) state_weights()[lane] = mine * later * deferred.value();
    const int c = lane / kTokens;
    const int i = lane % kTokens;
    const int t = c / 2;
    if (i <= t && t < own) {
      float weight = scale()[c] * scale()[2 * i];
#pragma unroll
      for (int s = 1; s < kTokens; ++s) {
        if (s > i && s <= t) weight *= decay[s];
      }
      own_weights(c)[i] = weight * scores(c)[own_score() + i];
    }
    __syncwarp();
  }
};

}  // namespace replayssm::cuda
