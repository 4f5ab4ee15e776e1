// What the benchmarks of the recurrent steps share: cases over a StatePool, the memory bandwidth
// that the program measures beside them, and the table.
//
// Every case cycles over enough layers that the states exceed the last-level cache, as in real
// decoding, where a layer's state is cold when its turn comes. Cases that are compared run
// interleaved, round by round, and the table gives medians, so that a slow spell of a shared
// machine hits both sides of a ratio.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "replayssm/cpu.h"
#include "replayssm/state_pool.h"

namespace replayssm::bench {

/// Prints "program: message" and exits with 1.
[[noreturn]] void fail(const std::string& message);
void check(const Status& status);
double now();

/// Bytes of states per case, and of the bandwidth loops: more than the last-level cache, which is
/// shared by the whole socket, as far as a machine with a huge one allows.
std::size_t resident_bytes();

/// `n` numbers in [-1, 1).
std::vector<float> uniform_values(std::mt19937& random, std::int64_t n);

/// A recurrence's operands for steps of up to a number of tokens.
class BenchOp {
 public:
  virtual ~BenchOp() = default;
  /// Parameters the pool keeps, if any.
  virtual void prepare(StatePool&, int /*layer*/) {}
  virtual Status run(const CpuContext& context, StatePool& pool, int layer, Step& step,
                     std::int64_t tokens) = 0;
};

struct BenchFamily {
  std::string program;
  std::string title;  // of the geometry, "mamba2 step, 64 heads of ..."
  RecurrenceShape shape;
  std::function<std::unique_ptr<BenchOp>(std::int64_t tokens)> make_op;

  std::int64_t state_elements() const;
};

/// One row of the table.
class BenchCase {
 public:
  virtual ~BenchCase() = default;
  /// Seconds per layer step over one pass through all layers (commit included).
  virtual double step() = 0;

  std::string name;
  DType checkpoint = DType::kF32;
  bool is_plain = false;  // what the rows of its type are compared with
};

struct StepCaseOptions {
  std::string name;
  RowKind kind = RowKind::kCommitted;
  std::int64_t tokens = 1;
  DType checkpoint = DType::kF32;
  ReplayLimits limits{};
  bool flushes = true;  // false: windows are truncated before they fill
  FlushMode flush = FlushMode::kExact;
};

std::unique_ptr<BenchCase> make_step_case(const BenchFamily& family, const StepCaseOptions& options,
                                          std::int64_t batch, const CpuContext& context);

inline constexpr ReplayLimits kPlainLimits{.window = 1, .draft_capacity = 1};
inline constexpr ReplayLimits kDecodeLimits{.window = 16, .draft_capacity = 1};
inline constexpr ReplayLimits kVerifyLimits{.window = 16, .draft_capacity = 4};

/// All rows for a batch size.
using MakeCases = std::function<std::vector<std::unique_ptr<BenchCase>>(std::int64_t batch,
                                                                        const CpuContext& context)>;

/// The program: parses --threads, --batch, --seconds, runs and prints a table for each.
int bench_main(int argc, char** argv, const BenchFamily& family, const MakeCases& make_cases);

}  // namespace replayssm::bench
