// Verification of drafts the way it is done without replay: in place, token by token, keeping the
// state after every token so that a rejection can go back to it. A row of n tokens takes n slots
// besides the one it starts from, each as large as a whole state.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "replayssm/cpu.h"
#include "replayssm/state_pool.h"

namespace replayssm {

class TokenSnapshots {
 public:
  /// Tokens [token_begin, token_begin + slots.size()) of the packed operands, after the state of
  /// slot `from`, which has no live records and stays as it is. The state after token i goes to
  /// slots[i], in whatever condition that is; slots are distinct.
  struct Row {
    std::int32_t from = -1;
    std::int64_t token_begin = 0;
    std::vector<std::int32_t> slots;
  };

  enum class Part : std::uint8_t { kConvolution, kRecurrence };

  static Result<TokenSnapshots> begin(StatePool& pool, std::span<const Row> rows);

  /// Runs `op` on the steps of the first tokens, the second ones and so on, each after copying what
  /// the part reads of the layer from the token before.
  Status run(const CpuContext& context, StatePool& pool, int layer, Part part,
             FunctionRef<Status(Step& step)> op);

  /// Every slot now holds the state after its token.
  Status commit(StatePool& pool);
  /// The slots hold nothing: each is to be reset before it is used again.
  Status abort(StatePool& pool);

 private:
  /// Gives the steps of a token the state after the token before.
  void hand_over(const CpuContext& context, StatePool::Impl& pool, int layer, Part part,
                 std::size_t token);

  std::vector<Row> rows_;
  std::vector<std::int64_t> positions_;  // of each row's `from`
  std::vector<Step> steps_;              // by index of the token in its row
};

}  // namespace replayssm
