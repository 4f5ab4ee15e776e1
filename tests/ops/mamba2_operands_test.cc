// Operands that cannot be right are refused, both values named, before anything is written; the
// step stays open and runs when the operands are right.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "ops/mamba2_cases.h"
#include "support/mamba2_harness.h"
#include "support/pool_access.h"

namespace replayssm::testing {
namespace {

Mamba2Case operands_case() {
  Mamba2Case c = small_case("operands", 8, 4);
  c.z = true;
  c.conv_width = 4;
  return c;
}

class OperandChecks : public ::testing::Test {
 protected:
  OperandChecks()
      : model_(operands_case()),
        pool_(model_.make_pool(3)),
        runner_(model_, pool_, {}),
        rows_{committed(0, names(1, 5, 2)), padding(1), tentative(1, names(2, 5, 3), 1)} {
    for (std::int32_t slot = 0; slot < 2; ++slot) {
      EXPECT_TRUE(is_ok(pool_.reset(slot)));
      runner_.step({committed(slot, names(slot + 1u, 0, 5))});
    }
  }

  struct Edit {
    std::string name;
    std::function<void(Mamba2Operands&, Mamba2Params&)> apply;
    std::vector<std::string> parts;  // what the message must contain
  };

  static Edit dtype(const char* name, TensorView Mamba2Operands::* view, DType dtype) {
    return {name,
            [=](Mamba2Operands& o, Mamba2Params&) { (o.*view).dtype = dtype; },
            {to_string(dtype), "f32"}};
  }
  static Edit extent(const char* name, TensorView Mamba2Operands::* view, std::size_t axis,
                     std::int64_t found, std::int64_t expected) {
    return {name,
            [=](Mamba2Operands& o, Mamba2Params&) { (o.*view).shape[axis] = found; },
            {std::to_string(found), std::to_string(expected)}};
  }
  static Edit stride(const char* name, TensorView Mamba2Operands::* view, std::size_t axis,
                     std::int64_t found) {
    return {name,
            [=](Mamba2Operands& o, Mamba2Params&) { (o.*view).strides[axis] = found; },
            {std::to_string(found)}};
  }
  static Edit rank(const char* name, TensorView Mamba2Operands::* view, int found) {
    return {name, [=](Mamba2Operands& o, Mamba2Params&) { (o.*view).rank = found; }, {}};
  }
  static Edit empty(const char* name, TensorView Mamba2Operands::* view) {
    return {std::string("no ") + name,
            [=](Mamba2Operands& o, Mamba2Params&) { o.*view = {}; },
            {"expected"}};
  }

  Mamba2Model model_;
  StatePool pool_;
  Mamba2Runner runner_;
  std::vector<RowSpec> rows_;
};

TEST_F(OperandChecks, WrongOnesAreRefusedAndNothingIsWritten) {
  using O = Mamba2Operands;
  static float wrong_size[5] = {};
  const auto vector_of = [](std::int64_t size, DType type = DType::kF32) {
    return TensorView::contiguous(static_cast<void*>(wrong_size), type, {size});
  };
  std::vector<Edit> edits = {
      dtype("x", &O::x, DType::kBF16),
      dtype("b", &O::b, DType::kF16),
      dtype("c", &O::c, DType::kF64),
      dtype("z", &O::z, DType::kBF16),
      dtype("y", &O::y, DType::kBF16),
      dtype("dt", &O::dt, DType::kBF16),
      dtype("dt", &O::dt, DType::kI32),
      extent("x", &O::x, 0, 5, 6),
      extent("b", &O::b, 0, 5, 6),
      extent("c", &O::c, 0, 0, 6),
      extent("dt", &O::dt, 0, 5, 6),
      extent("z", &O::z, 0, 5, 6),
      extent("y", &O::y, 0, 5, 6),
      extent("x heads", &O::x, 1, 3, 4),
      extent("x dim", &O::x, 2, 16, 8),
      extent("b groups", &O::b, 1, 1, 2),
      extent("b state", &O::b, 2, 8, 16),
      extent("c groups", &O::c, 1, 4, 2),
      extent("c state", &O::c, 2, 17, 16),
      extent("dt heads", &O::dt, 1, 5, 4),
      extent("z heads", &O::z, 1, 2, 4),
      extent("z dim", &O::z, 2, 7, 8),
      extent("y heads", &O::y, 1, 5, 4),
      extent("y dim", &O::y, 2, 9, 8),
      stride("x", &O::x, 2, 2),
      stride("b", &O::b, 2, 3),
      stride("c", &O::c, 2, 2),
      stride("dt", &O::dt, 1, 2),
      stride("z", &O::z, 2, 2),
      stride("y", &O::y, 2, 2),
      stride("x", &O::x, 0, -64),
      stride("y", &O::y, 1, -8),
      stride("dt", &O::dt, 0, -4),
      rank("x", &O::x, 2),
      rank("b", &O::b, 2),
      rank("c", &O::c, 4),
      rank("dt", &O::dt, 3),
      rank("z", &O::z, 1),
      rank("y", &O::y, 2),
      empty("b", &O::b),
      empty("c", &O::c),
      empty("dt", &O::dt),
      empty("y", &O::y),
  };
  const auto parameter = [&](const char* name, std::vector<std::string> parts, auto edit) {
    edits.push_back({name, [=](Mamba2Operands&, Mamba2Params& p) { edit(p); }, std::move(parts)});
  };
  // Without x there is no token count to compare with the step's.
  edits.push_back({"no x", [](O& o, Mamba2Params&) { o.x = {}; }, {"0", "6"}});
  parameter("d", {"D", "5", "4"}, [=](Mamba2Params& p) { p.d = vector_of(5); });
  parameter("d", {"bf16", "f32"}, [=](Mamba2Params& p) { p.d = vector_of(4, DType::kBF16); });
  parameter("d", {"2"}, [=](Mamba2Params& p) {
    p.d = vector_of(4);
    p.d.strides[0] = 2;
  });
  parameter("dt_bias", {"dt_bias", "3", "4"}, [=](Mamba2Params& p) { p.dt_bias = vector_of(3); });
  parameter("dt_bias", {"f16", "f32"},
            [=](Mamba2Params& p) { p.dt_bias = vector_of(4, DType::kF16); });
  parameter("dt limits", {"0.5", "0.25"}, [](Mamba2Params& p) {
    p.dt_min = 0.5f;
    p.dt_max = 0.25f;
  });
  parameter("dt limits", {"nan"},
            [](Mamba2Params& p) { p.dt_min = std::numeric_limits<float>::quiet_NaN(); });

  Result<Step> step = pool_.begin_step(step_rows(rows_));
  ASSERT_TRUE(is_ok(step));
  ASSERT_EQ(step->token_end(), 6);
  auto b = runner_.buffers(0, *step, rows_);
  ASSERT_TRUE(is_ok(causal_conv1d_step({}, pool_, 0, *step, runner_.conv_operands(0, b))));
  const std::vector<std::byte> memory = pool_bytes(pool_);
  const std::vector<std::byte> y = b.y.bytes();
  for (const Edit& edit : edits) {
    Mamba2Operands operands = b.mamba2();
    Mamba2Params params = model_.op_params(0);
    edit.apply(operands, params);
    const Status status = mamba2_step({}, pool_, 0, *step, params, operands);
    ASSERT_FALSE(status.ok()) << edit.name << " accepted";
    EXPECT_TRUE(status.code() == StatusCode::kInvalidArgument ||
                status.code() == StatusCode::kUnsupported)
        << to_string(status.code()) << ": " << status.message();
    for (const std::string& part : edit.parts) {
      EXPECT_NE(status.message().find(part), std::string::npos)
          << edit.name << ": '" << status.message() << "' does not contain '" << part << "'";
    }
    ASSERT_TRUE(same_bytes(pool_bytes(pool_), memory)) << edit.name;
    ASSERT_TRUE(same_bytes(b.y.bytes(), y)) << edit.name;
  }
  for (const int layer : {-1, 1, 1000}) {
    EXPECT_TRUE(refused(mamba2_step({}, pool_, layer, *step, model_.op_params(0), b.mamba2()),
                        StatusCode::kInvalidArgument, {std::to_string(layer)}));
  }
  EXPECT_TRUE(same_bytes(pool_bytes(pool_), memory));

  // The step is still open and right operands work.
  ASSERT_TRUE(is_ok(mamba2_step({}, pool_, 0, *step, model_.op_params(0), b.mamba2())));
  ASSERT_TRUE(is_ok(runner_.commit(*step, rows_)));
  EXPECT_EQ(pool_.cursor(0).value(), (Cursor{7, 7, false}));
  EXPECT_EQ(pool_.cursor(1).value(), (Cursor{5, 6, false}));
}

TEST_F(OperandChecks, WrongConvolutionOperandsAreRefused) {
  using O = CausalConv1dOperands;
  const std::int64_t channels = model_.test_case().conv_channels();
  struct ConvEdit {
    std::string name;
    std::function<void(O&)> apply;
    std::vector<std::string> parts;
  };
  const std::string found = std::to_string(channels - 1);
  const std::string expected = std::to_string(channels);
  const std::vector<ConvEdit> edits = {
      {"u type", [](O& o) { o.u.dtype = DType::kBF16; }, {"bf16", "f32"}},
      {"u channels", [=](O& o) { o.u.shape[1] = channels - 1; }, {found, expected}},
      {"u tokens", [](O& o) { o.u.shape[0] = 5; }, {"5", "6"}},
      {"u rank", [](O& o) { o.u.rank = 1; }, {}},
      {"u stride", [](O& o) { o.u.strides[1] = 2; }, {"2"}},
      {"u backwards", [](O& o) { o.u.strides[0] = -1; }, {"-1"}},
      {"no u", [](O& o) { o.u = {}; }, {"0", "6"}},
      {"out type", [](O& o) { o.out.dtype = DType::kF16; }, {"f16", "f32"}},
      {"out channels", [=](O& o) { o.out.shape[1] = channels - 1; }, {found, expected}},
      {"out tokens", [](O& o) { o.out.shape[0] = 5; }, {"5", "6"}},
      {"out stride", [](O& o) { o.out.strides[1] = 3; }, {"3"}},
      {"no out", [](O& o) { o.out = {}; }, {"out"}},
      {"weight taps", [](O& o) { o.weight.shape[0] = 3; }, {"3", "4"}},
      {"weight channels", [=](O& o) { o.weight.shape[1] = channels - 1; }, {found, expected}},
      {"weight type", [](O& o) { o.weight.dtype = DType::kBF16; }, {"bf16", "f32"}},
      {"weight rank", [](O& o) { o.weight.rank = 1; }, {}},
      {"weight stride", [=](O& o) { o.weight.strides[0] = channels + 1; }, {}},
      {"no weight", [](O& o) { o.weight = {}; }, {"weight"}},
      {"bias size", [=](O& o) { o.bias.shape[0] = channels - 1; }, {found, expected}},
      {"bias type", [](O& o) { o.bias.dtype = DType::kBF16; }, {"bf16", "f32"}},
      {"in place", [](O& o) { o.out = o.u; }, {}},
  };
  Result<Step> step = pool_.begin_step(step_rows(rows_));
  ASSERT_TRUE(is_ok(step));
  auto b = runner_.buffers(0, *step, rows_);
  const std::vector<std::byte> memory = pool_bytes(pool_);
  const std::vector<std::byte> out = b.conv_out.bytes();
  for (const ConvEdit& edit : edits) {
    O operands = runner_.conv_operands(0, b);
    edit.apply(operands);
    const Status status = causal_conv1d_step({}, pool_, 0, *step, operands);
    EXPECT_FALSE(status.ok()) << edit.name << " accepted";
    if (status.ok()) return;
    for (const std::string& part : edit.parts) {
      EXPECT_NE(status.message().find(part), std::string::npos)
          << edit.name << ": '" << status.message() << "' does not contain '" << part << "'";
    }
    ASSERT_TRUE(same_bytes(pool_bytes(pool_), memory)) << edit.name;
    ASSERT_TRUE(same_bytes(b.conv_out.bytes(), out)) << edit.name;
  }
  const O right = runner_.conv_operands(0, b);
  for (const int layer : {-1, 1}) {
    EXPECT_TRUE(refused(causal_conv1d_step({}, pool_, layer, *step, right),
                        StatusCode::kInvalidArgument, {std::to_string(layer)}));
  }
  ASSERT_TRUE(is_ok(causal_conv1d_step({}, pool_, 0, *step, right)));
  ASSERT_TRUE(is_ok(mamba2_step({}, pool_, 0, *step, model_.op_params(0), b.mamba2())));
  ASSERT_TRUE(is_ok(runner_.commit(*step, rows_)));
}

TEST_F(OperandChecks, PartsRunOncePerStep) {
  Result<Step> step = pool_.begin_step(step_rows(rows_));
  ASSERT_TRUE(is_ok(step));
  auto b = runner_.buffers(0, *step, rows_);
  const auto conv = runner_.conv_operands(0, b);
  ASSERT_TRUE(is_ok(causal_conv1d_step({}, pool_, 0, *step, conv)));
  ASSERT_TRUE(is_ok(mamba2_step({}, pool_, 0, *step, model_.op_params(0), b.mamba2())));
  const std::vector<std::byte> memory = pool_bytes(pool_);
  EXPECT_TRUE(refused(causal_conv1d_step({}, pool_, 0, *step, conv),
                      StatusCode::kFailedPrecondition, {"0"}));
  EXPECT_TRUE(refused(mamba2_step({}, pool_, 0, *step, model_.op_params(0), b.mamba2()),
                      StatusCode::kFailedPrecondition, {"0"}));
  EXPECT_TRUE(same_bytes(pool_bytes(pool_), memory));
  EXPECT_TRUE(is_ok(runner_.commit(*step, rows_)));
}

TEST(Mamba2Parameters, AIsNeededAndChecked) {
  const Mamba2Model model(small_case("a", 8, 4));
  Result<StatePool> created = StatePool::create(model.test_case().options(1));
  ASSERT_TRUE(is_ok(created));
  StatePool& pool = *created;
  Mamba2Runner runner(model, pool, {});
  ASSERT_TRUE(is_ok(pool.reset(0)));
  const std::vector<RowSpec> rows = {tentative(0, names(1, 0, 2), 2)};
  Result<Step> step = pool.begin_step(step_rows(rows));
  ASSERT_TRUE(is_ok(step));
  auto b = runner.buffers(0, *step, rows);
  EXPECT_TRUE(refused(mamba2_step({}, pool, 0, *step, model.op_params(0), b.mamba2()),
                      StatusCode::kFailedPrecondition, {"0"}));
  const std::vector<float> a(5, -1.0f);
  const std::span<const float> all(a);
  EXPECT_TRUE(refused(pool.set_mamba2_a(0, all), StatusCode::kInvalidArgument, {"5", "4"}));
  EXPECT_TRUE(
      refused(pool.set_mamba2_a(0, all.first(3)), StatusCode::kInvalidArgument, {"3", "4"}));
  EXPECT_TRUE(refused(pool.set_mamba2_a(1, all.first(4)), StatusCode::kInvalidArgument, {"1"}));
  EXPECT_TRUE(refused(pool.set_mamba2_a(-1, all.first(4)), StatusCode::kInvalidArgument, {"-1"}));
  ASSERT_TRUE(is_ok(pool.set_mamba2_a(0, all.first(4))));
  ASSERT_TRUE(is_ok(mamba2_step({}, pool, 0, *step, model.op_params(0), b.mamba2())));
  ASSERT_TRUE(is_ok(runner.commit(*step, rows)));
}

// A convolution of a layer that has none.
TEST(Mamba2Parameters, LayerWithoutConvolution) {
  const Mamba2Model model(small_case("none", 8, 4));
  StatePool pool = model.make_pool(1);
  ASSERT_TRUE(is_ok(pool.reset(0)));
  const std::vector<StepRow> rows = {{0, RowKind::kTentative, 0, 1, {}}};
  Result<Step> step = pool.begin_step(rows);
  ASSERT_TRUE(is_ok(step));
  float data[4] = {};
  CausalConv1dOperands conv;
  conv.u = TensorView::contiguous(static_cast<void*>(data), DType::kF32, {1, 1});
  conv.out = TensorView::contiguous(static_cast<void*>(data + 1), DType::kF32, {1, 1});
  conv.weight = TensorView::contiguous(static_cast<void*>(data + 2), DType::kF32, {2, 1});
  const Status status = causal_conv1d_step({}, pool, 0, *step, conv);
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find('0'), std::string::npos) << status.message();
}

// Operands of more tokens than the step has are fine; the rest is not touched.
TEST_F(OperandChecks, LongerOperandsAreFine) {
  Result<Step> step = pool_.begin_step(step_rows(rows_));
  ASSERT_TRUE(is_ok(step));
  auto b = runner_.buffers(0, *step, rows_, 3);
  ASSERT_TRUE(is_ok(causal_conv1d_step({}, pool_, 0, *step, runner_.conv_operands(0, b))));
  ASSERT_TRUE(is_ok(mamba2_step({}, pool_, 0, *step, model_.op_params(0), b.mamba2())));
  for (std::int64_t token = 6; token < 9; ++token) {
    EXPECT_TRUE(same_bits(get_token(b.y_view, token), std::vector<float>(32, kUnwritten)));
    EXPECT_TRUE(same_bits(get_token(b.conv_view, token), std::vector<float>(96, kUnwritten)));
  }
  ASSERT_TRUE(is_ok(runner_.commit(*step, rows_)));
}

// Operands whose token counts differ from each other are one mistake or another.
TEST_F(OperandChecks, OperandsOfDifferentLengthsAreRefused) {
  Result<Step> step = pool_.begin_step(step_rows(rows_));
  ASSERT_TRUE(is_ok(step));
  auto b = runner_.buffers(0, *step, rows_, 3);
  Mamba2Operands operands = b.mamba2();
  operands.y.shape[0] = 8;
  EXPECT_TRUE(refused(mamba2_step({}, pool_, 0, *step, model_.op_params(0), operands),
                      StatusCode::kInvalidArgument, {"y", "8", "9"}));
  EXPECT_TRUE(is_ok(pool_.abort(*step)));
}

// A step of no rows, and one whose rows are all padding, run and commit; memory of no tokens is
// null.
TEST(Mamba2Parameters, StepWithoutTokens) {
  Mamba2Case c = small_case("none", 8, 4);
  c.conv_width = 4;
  const Mamba2Model model(c);
  StatePool pool = model.make_pool(1);
  ASSERT_TRUE(is_ok(pool.reset(0)));
  const std::vector<std::byte> before = pool_bytes(pool);
  Mamba2Runner runner(model, pool, {});
  Result<Step> step = pool.begin_step({});
  ASSERT_TRUE(is_ok(step));
  EXPECT_EQ(step->token_end(), 0);
  auto b = runner.buffers(0, *step, {});
  EXPECT_TRUE(is_ok(causal_conv1d_step({}, pool, 0, *step, runner.conv_operands(0, b))));
  EXPECT_TRUE(is_ok(mamba2_step({}, pool, 0, *step, model.op_params(0), b.mamba2())));
  EXPECT_TRUE(is_ok(pool.commit(*step, {})));
  EXPECT_TRUE(same_bytes(pool_bytes(pool), before));
  EXPECT_EQ(pool.cursor(0).value(), Cursor{});
}

}  // namespace
}  // namespace replayssm::testing
