// The kernels of a recurrence family: one table per instruction set and types.
#pragma once

namespace replayssm::cpu {

/// fold: checkpoint = checkpoint_in advanced by the live records.
/// tentative: outputs of the tokens from checkpoint_in and the live records; appends the tokens.
/// flush: fold, then tentative without live records, a piece of the state at a time.
/// committed: fold if anything is live, then the tokens one after the other.
///
/// Where the task has a read copy, whoever writes the checkpoint then writes the copy of what is
/// stored, and tentative and flush take it for checkpoint_in and the folded checkpoint in outputs.
template <typename Task>
struct RowKernels {
  using Function = void (*)(const Task&);
  Function fold;
  Function tentative;
  Function flush;
  Function committed;
};

}  // namespace replayssm::cpu
