// The causal convolution against its oracle: every width, channel counts with tails, verify and
// rollback, prompts longer than the ring, chunkings, bf16.
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "ops/causal_conv1d/reference.h"
#include "replayssm/ops/causal_conv1d.h"
#include "replayssm/ops/mamba2.h"
#include "support/mamba2_harness.h"
#include "support/pool_access.h"

namespace replayssm::testing {
namespace {

struct ConvCase {
  std::int64_t channels = 9;
  int width = 4;
  ReplayLimits limits{8, 4};
  DType activation = DType::kF32;
  bool silu = true;
  bool bias = true;
  bool rewindable = false;
  std::int64_t pitch_padding = 0;

  std::string name() const {
    std::ostringstream out;
    out << 'C' << channels << "_W" << width << '_' << to_string(activation)
        << (silu ? "_silu" : "_linear") << (bias ? "" : "_no_bias")
        << (rewindable ? "_rewindable" : "") << (pitch_padding > 0 ? "_strided" : "") << "_L"
        << limits.window << "_T" << limits.draft_capacity;
    return out.str();
  }
};

/// Convolution layers of a pool whose recurrence runs on zeros.
class ConvRunner {
 public:
  ConvRunner(const ConvCase& c, std::int64_t slots, const CpuContext& context)
      : case_(c), context_(context), pool_(make_pool(c, slots)) {
    Rng rng(77);
    for (std::int64_t i = 0; i < c.width * c.channels; ++i) weight_.push_back(rng.normal());
    for (std::int64_t i = 0; c.bias && i < c.channels; ++i) bias_.push_back(rng.normal());
    const float a = -1.0f;
    EXPECT_TRUE(is_ok(pool_.set_mamba2_a(0, {&a, 1})));
  }

  std::vector<float> input(TokenId token) const {
    Rng rng(token);
    std::vector<float> u(static_cast<std::size_t>(case_.channels));
    for (float& x : u) x = round_to(case_.activation, rng.normal());
    return u;
  }

  /// By row: (count, channels).
  std::vector<std::vector<float>> step(std::span<const RowSpec> rows) {
    std::vector<std::vector<float>> output(rows.size());
    Result<Step> step = pool_.begin_step(step_rows(rows));
    EXPECT_TRUE(is_ok(step));
    if (!step.ok()) return output;
    const std::int64_t tokens = step->token_end();
    const std::int64_t pitch = case_.channels + case_.pitch_padding;
    TokenBuffer u(case_.activation, tokens, pitch);
    TokenBuffer out(case_.activation, tokens, pitch + case_.pitch_padding);
    CausalConv1dOperands operands;
    operands.u = u.slice(case_.pitch_padding / 2, case_.channels);
    operands.out = out.slice(case_.pitch_padding / 2, case_.channels);
    operands.weight =
        TensorView::contiguous(weight_.data(), DType::kF32, {case_.width, case_.channels});
    if (case_.bias) {
      operands.bias = TensorView::contiguous(bias_.data(), DType::kF32, {case_.channels});
    }
    operands.silu = case_.silu;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      for (std::int64_t t = 0; t < rows[i].count() && rows[i].slot >= 0; ++t) {
        set_token(operands.u, step->rows()[i].token_begin + t,
                  input(rows[i].tokens[static_cast<std::size_t>(t)]));
      }
    }
    const std::vector<std::byte> u_before = u.bytes();
    EXPECT_TRUE(is_ok(causal_conv1d_step(context_, pool_, 0, *step, operands)));
    EXPECT_TRUE(same_bytes(u.bytes(), u_before)) << "u was written";

    const std::vector<float> unwritten(static_cast<std::size_t>(case_.channels),
                                       round_to(case_.activation, kUnwritten));
    std::int64_t next = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      for (; next < step->rows()[i].token_begin; ++next) {
        EXPECT_TRUE(same_bits(get_token(operands.out, next), unwritten)) << "between rows";
      }
      for (std::int64_t t = 0; t < rows[i].count(); ++t, ++next) {
        const std::vector<float> values = get_token(operands.out, next);
        if (rows[i].slot < 0) {
          EXPECT_TRUE(same_bits(values, std::vector<float>(values.size(), 0.0f))) << "padding";
        }
        output[i].insert(output[i].end(), values.begin(), values.end());
      }
    }
    finish(*step, rows);
    return output;
  }
  std::vector<std::vector<float>> step(std::initializer_list<RowSpec> rows) {
    return step(std::span<const RowSpec>(rows.begin(), rows.size()));
  }

  /// Outputs of the last `count` tokens of a sequence.
  std::vector<double> reference(const std::vector<TokenId>& sequence, std::size_t count) const {
    std::vector<float> u;
    for (const TokenId token : sequence) {
      const std::vector<float> x = input(token);
      u.insert(u.end(), x.begin(), x.end());
    }
    const auto channels = static_cast<std::size_t>(case_.channels);
    const std::vector<double> all = causal_conv1d_reference(
        u, weight_, bias_, channels, static_cast<std::size_t>(case_.width), case_.silu);
    return {all.end() - static_cast<std::ptrdiff_t>(count * channels), all.end()};
  }

  StatePool& pool() { return pool_; }

 private:
  static StatePool make_pool(const ConvCase& c, std::int64_t slots) {
    StatePoolOptions options;
    options.layers = {{Mamba2Shape{1, 8, 16, 1}, {c.channels, c.width}}};
    options.slots = slots;
    options.limits = c.limits;
    options.activation = c.activation;
    options.rewindable = c.rewindable;
    options.poison = true;
    Result<StatePool> pool = StatePool::create(options);
    EXPECT_TRUE(is_ok(pool));
    return std::move(pool).value();
  }

  void finish(Step& step, std::span<const RowSpec> rows) {
    const std::int64_t tokens = step.token_end();
    std::vector<std::byte> zeros(static_cast<std::size_t>(tokens) * 16 * 4);
    std::vector<std::byte> y(static_cast<std::size_t>(tokens) * 8 * 4);
    const DType type = case_.activation;
    Mamba2Operands operands;
    operands.x = TensorView::contiguous(zeros.data(), type, {tokens, 1, 8});
    operands.b = TensorView::contiguous(zeros.data(), type, {tokens, 1, 16});
    operands.c = operands.b;
    operands.dt = TensorView::contiguous(zeros.data(), DType::kF32, {tokens, 1});
    operands.y = TensorView::contiguous(y.data(), type, {tokens, 1, 8});
    EXPECT_TRUE(is_ok(mamba2_step(context_, pool_, 0, step, {}, operands)));
    std::vector<std::int64_t> accepted;
    for (const RowSpec& row : rows) accepted.push_back(row.accepts());
    EXPECT_TRUE(is_ok(pool_.commit(step, accepted)));
  }

  ConvCase case_;
  CpuContext context_;
  StatePool pool_;
  std::vector<float> weight_;  // (width, channels)
  std::vector<float> bias_;
};

void expect_close(const std::vector<float>& got, const std::vector<double>& want, DType activation,
                  const std::string& where) {
  ASSERT_EQ(got.size(), want.size()) << where;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double bound = 4e-6 * (1.0 + std::abs(want[i])) + (activation == DType::kBF16  ? 0x1p-8
                                                             : activation == DType::kF16 ? 0x1p-11
                                                                                         : 0.0) *
                                                                std::abs(want[i]);
    const double difference = std::abs(static_cast<double>(got[i]) - want[i]);
    ASSERT_TRUE(difference <= bound)
        << where << ", element " << i << ": found " << got[i] << ", expected " << want[i];
  }
}

std::vector<ConvCase> conv_cases() {
  std::vector<ConvCase> cases;
  for (int width = 2; width <= 8; ++width) {
    for (const std::int64_t channels : {1, 7, 8, 9, 16, 17, 31, 513, 1029}) {
      ConvCase c;
      c.width = width;
      c.channels = channels;
      c.activation = static_cast<DType>((width + channels) % 3);
      c.silu = channels % 4 != 1 || width % 2 == 0;
      c.bias = channels % 5 != 3;
      c.rewindable = width % 2 == 1;
      c.pitch_padding = channels % 2 == 1 ? 6 : 0;
      cases.push_back(c);
    }
  }
  for (const auto& [window, draft] : {std::pair{1, 1}, {2, 2}, {4, 1}, {16, 16}, {64, 3}}) {
    for (const DType activation : {DType::kF32, DType::kBF16, DType::kF16}) {
      ConvCase c;
      c.limits = {window, draft};
      c.activation = activation;
      c.channels = 40;
      cases.push_back(c);
      c.width = 8;
      c.rewindable = true;
      cases.push_back(c);
    }
  }
  return cases;
}

class CausalConv1d : public ::testing::TestWithParam<ConvCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, CausalConv1d, ::testing::ValuesIn(conv_cases()),
                         [](const auto& test) { return test.param.name(); });

// Random steps of several sequences: prompts longer than the ring, verify with every kind of
// rejection, padding. One and two threads agree bit for bit.
TEST_P(CausalConv1d, MatchesOracle) {
  const ConvCase& c = GetParam();
  std::vector<std::pair<CpuIsa, std::vector<float>>> results;
  for (const CpuContext& context : Contexts()) {
    ConvRunner runner(c, 3, context);
    std::vector<std::vector<TokenId>> sequences(3);
    for (std::int32_t slot = 0; slot < 3; ++slot) ASSERT_TRUE(is_ok(runner.pool().reset(slot)));
    Rng rng(5);
    TokenId token = 0;
    std::vector<float> all;
    const int steps = c.channels > 500 ? 12 : 40;
    for (int step = 0; step < steps; ++step) {
      std::vector<RowSpec> rows;
      for (std::int32_t slot = 0; slot < 3; ++slot) {
        if (rng.chance(0.2)) rows.push_back(padding(rng.between(1, 2)));
        if (rng.chance(0.2)) continue;
        const bool is_committed = rng.chance(slot == 2 ? 0.6 : 0.15);
        const std::int64_t longest =
            rng.chance(0.2) ? c.limits.conv_places(c.width, c.rewindable) + 9 : 3;
        RowSpec row;
        row.slot = slot;
        row.kind = is_committed ? RowKind::kCommitted : RowKind::kTentative;
        row.tokens.resize(static_cast<std::size_t>(
            rng.between(1, is_committed ? longest : c.limits.draft_capacity)));
        for (TokenId& t : row.tokens) t = ++token;
        if (!is_committed) row.accepted = rng.between(0, row.count());
        row.gap = rng.chance(0.2) ? 1 : 0;
        rows.push_back(std::move(row));
      }
      if (rows.empty()) continue;
      const auto output = runner.step(rows);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        all.insert(all.end(), output[i].begin(), output[i].end());
        if (rows[i].slot < 0) continue;
        std::vector<TokenId>& sequence = sequences[static_cast<std::size_t>(rows[i].slot)];
        sequence.insert(sequence.end(), rows[i].tokens.begin(), rows[i].tokens.end());
        // The oracle needs no more than the inputs the taps reach.
        const std::size_t reach = rows[i].tokens.size() + static_cast<std::size_t>(c.width);
        const std::vector<TokenId> tail(
            sequence.end() - static_cast<std::ptrdiff_t>(std::min(reach, sequence.size())),
            sequence.end());
        expect_close(output[i], runner.reference(tail, rows[i].tokens.size()), c.activation,
                     describe(context) + ", step " + std::to_string(step));
        if (HasFatalFailure()) return;
        sequence.resize(sequence.size() - static_cast<std::size_t>(rows[i].count()) +
                        static_cast<std::size_t>(rows[i].accepts()));
      }
    }
    for (const auto& [isa, values] : results) {
      if (isa != context.isa) continue;
      ASSERT_TRUE(same_bits(all, values)) << describe(context);
    }
    results.emplace_back(context.isa, std::move(all));
  }
}

// C29: every accepted count of every row width, among them fewer than width - 1, also at the very
// start of a sequence; the next tokens see exactly the accepted inputs.
TEST_P(CausalConv1d, C29_RollbackOfEveryAcceptedCount) {
  const ConvCase& c = GetParam();
  if (c.channels > 40) return;  // more channels are no other case here
  for (const CpuContext& context : Contexts({1})) {
    ConvRunner runner(c, 1, context);
    for (const std::int64_t prompt : {0, 1, c.width - 2, c.width + 3}) {
      for (std::int64_t accepted = 0; accepted <= c.limits.draft_capacity; ++accepted) {
        ASSERT_TRUE(is_ok(runner.pool().reset(0)));
        std::vector<TokenId> sequence = names(1, 0, prompt);
        if (prompt > 0) runner.step({committed(0, sequence)});
        for (int round = 0; round < 3; ++round) {
          const std::vector<TokenId> draft =
              names(2, round * 100 + accepted * 10, c.limits.draft_capacity);
          const auto output = runner.step({tentative(0, draft, accepted)});
          std::vector<TokenId> with_draft = sequence;
          with_draft.insert(with_draft.end(), draft.begin(), draft.end());
          expect_close(output[0], runner.reference(with_draft, draft.size()), c.activation,
                       "prompt " + std::to_string(prompt) + ", accepted " +
                           std::to_string(accepted) + ", round " + std::to_string(round));
          if (HasFatalFailure()) return;
          sequence.insert(sequence.end(), draft.begin(), draft.begin() + accepted);
        }
      }
    }
  }
}

// One prompt in any chunking, by committed or fully accepted tentative rows: the same bits.
TEST_P(CausalConv1d, C71_ChunkingChangesNoBit) {
  const ConvCase& c = GetParam();
  for (const CpuContext& context : Contexts({1})) {
    ConvRunner runner(c, 1, context);
    const std::vector<TokenId> tokens = names(3, 0, 40);
    const std::vector<std::vector<std::int64_t>> chunkings = {
        {40}, std::vector<std::int64_t>(40, 1), {17, 23}, {39, 1}, {1, 39}, {2, 30, 8}};
    std::vector<float> first;
    for (std::size_t i = 0; i <= chunkings.size(); ++i) {
      ASSERT_TRUE(is_ok(runner.pool().reset(0)));
      std::vector<float> all;
      auto next = tokens.begin();
      const bool is_tentative = i == chunkings.size();
      while (next != tokens.end()) {
        for (std::size_t k = 0; next != tokens.end(); ++k) {
          const auto left = static_cast<std::int64_t>(tokens.end() - next);
          const std::int64_t count = is_tentative
                                         ? std::min<std::int64_t>(left, c.limits.draft_capacity)
                                         : chunkings[i][k];
          const std::vector<TokenId> chunk(next, next + count);
          const auto output =
              runner.step({is_tentative ? tentative(0, chunk, count) : committed(0, chunk)});
          all.insert(all.end(), output[0].begin(), output[0].end());
          next += count;
        }
      }
      if (i == 0) {
        first = all;
      } else {
        EXPECT_TRUE(same_bits(all, first)) << "chunking " << i << ", " << describe(context);
      }
    }
  }
}

// SiLU far from zero: no overflow, no NaN.
TEST(CausalConv1dSilu, LargeArguments) {
  for (const CpuContext& context : Contexts({1})) {
    StatePoolOptions options;
    options.layers = {{Mamba2Shape{1, 8, 16, 1}, {16, 2}}};
    options.slots = 1;
    Result<StatePool> pool = StatePool::create(options);
    ASSERT_TRUE(is_ok(pool));
    ASSERT_TRUE(is_ok(pool->reset(0)));
    const std::vector<float> u = {-1e30f, -1000.0f, -104.0f, -88.0f, -87.0f, -20.0f, -1.0f, -0.0f,
                                  0.0f,   1e-30f,   1.0f,    20.0f,  88.0f,  104.0f, 1e4f,  1e30f};
    std::vector<float> weight(32, 0.0f);
    std::fill(weight.begin() + 16, weight.end(), 1.0f);
    std::vector<float> out(16, kUnwritten);
    CausalConv1dOperands operands;
    operands.u = TensorView::contiguous(u.data(), DType::kF32, {1, 16});
    operands.weight = TensorView::contiguous(weight.data(), DType::kF32, {2, 16});
    operands.out = TensorView::contiguous(out.data(), DType::kF32, {1, 16});
    const std::vector<StepRow> rows = {{0, RowKind::kCommitted, 0, 1, {}}};
    Result<Step> step = pool->begin_step(rows);
    ASSERT_TRUE(is_ok(step));
    ASSERT_TRUE(is_ok(causal_conv1d_step(context, *pool, 0, *step, operands)));
    for (std::size_t i = 0; i < 16; ++i) {
      const auto x = static_cast<double>(u[i]);
      const double want = x / (1.0 + std::exp(-x));
      EXPECT_NEAR(static_cast<double>(out[i]), want, 1e-6 * std::abs(want) + 1e-30)
          << "silu(" << u[i] << "), " << describe(context);
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
