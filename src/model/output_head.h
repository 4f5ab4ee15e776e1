// The end of a forward pass: final norm, hidden states and logits of the tokens that ask for them.
#pragma once

#include <vector>

#include "backend/backend.h"
#include "model/model.h"

namespace replayssm {

class OutputHead {
 public:
  /// x: what the last layer left, (tokens, hidden_size); unspecified afterwards. norm (hidden_size)
  /// f32; lm_head (vocab_size, hidden_size).
  Status run(Backend& backend, const ForwardInput& input, const TensorView& x,
             const TensorView& norm, float eps, const TensorView& lm_head,
             const ForwardOutput& out) {
    const bool all = !out.hidden.empty();
    if (all) backend.rms_norm(x, norm, eps, out.hidden);
    rows_.clear();
    std::int64_t wanted = 0;
    for (std::size_t i = 0; i < input.rows.size(); ++i) {
      ForwardRow row = input.rows[i];
      const std::int64_t count = input.logit_counts[i];
      const std::int64_t from = row.begin + row.count - count;
      // Within x the destination never overtakes the source, so rows move up in place.
      backend.copy_rows(all ? out.hidden : x, from, x, wanted, count);
      row.begin = wanted;
      row.count = count;
      if (count > 0) rows_.push_back(row);
      wanted += count;
    }
    if (wanted == 0) return {};
    TensorView chosen = x;
    chosen.shape[0] = wanted;
    if (!all) backend.rms_norm(chosen, norm, eps, chosen);
    return backend.matmul(rows_, chosen, lm_head, out.logits);
  }

 private:
  std::vector<ForwardRow> rows_;
};

}  // namespace replayssm
