// Operands and parameters that cannot be right are refused, both values named, before anything is
// written; the step stays open and runs when they are right.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "ops/delta_rule_cases.h"
#include "support/delta_rule_harness.h"
#include "support/pool_access.h"

namespace replayssm::testing {
namespace {

/// gated_delta_net_step and kimi_delta_attention_step under one name.
Status run_step(StatePool& pool, Step& step, const GatedDeltaNetParams& params,
                const GatedDeltaNetOperands& operands) {
  return gated_delta_net_step({}, pool, 0, step, params, operands);
}
Status run_step(StatePool& pool, Step& step, const KimiDeltaAttentionParams& params,
                const KimiDeltaAttentionOperands& operands) {
  return kimi_delta_attention_step({}, pool, 0, step, params, operands);
}

template <typename Params, typename Operands>
struct Edit {
  std::string name;
  std::function<void(Operands&, Params&)> apply;
  std::vector<std::string> parts;  // what the message must contain
};

template <typename Params, typename Operands>
std::vector<Edit<Params, Operands>> common_edits(std::int64_t key_heads) {
  using O = Operands;
  std::vector<Edit<Params, O>> edits;
  const auto dtype = [&](const char* name, TensorView O::* view, DType type) {
    edits.push_back({std::string(name) + " type",
                     [=](O& o, Params&) { (o.*view).dtype = type; },
                     {std::string(" ") + name + " is", to_string(type), "f32"}});
  };
  const auto extent = [&](const char* name, TensorView O::* view, std::size_t axis,
                          std::int64_t found, std::int64_t expected) {
    edits.push_back({std::string(name) + " extent",
                     [=](O& o, Params&) { (o.*view).shape[axis] = found; },
                     {std::to_string(found), std::to_string(expected)}});
  };
  const auto stride = [&](const char* name, TensorView O::* view, std::size_t axis,
                          std::int64_t found) {
    edits.push_back({std::string(name) + " stride",
                     [=](O& o, Params&) { (o.*view).strides[axis] = found; },
                     {name, std::to_string(found)}});
  };
  for (const auto& [name, view] :
       {std::pair{"q", &O::q}, {"k", &O::k}, {"v", &O::v}, {"o", &O::o}}) {
    dtype(name, view, DType::kBF16);
    if (view != &O::q) extent(name, view, 0, 5, 6);
    extent(name, view, 1, 7, view == &O::v || view == &O::o ? 4 : key_heads);
    extent(name, view, 2, 32, view == &O::v || view == &O::o ? 24 : 16);
    stride(name, view, 2, 2);
    stride(name, view, 0, -64);
    // Without q the step does not know how many tokens there are.
    edits.push_back({std::string("no ") + name,
                     [view = view](O& o, Params&) { o.*view = {}; },
                     {view == &O::q ? "hold 0 tokens" : "expected"}});
  }
  dtype("a", &O::a, DType::kF16);
  dtype("b", &O::b, DType::kF16);
  extent("a", &O::a, 0, 5, 6);
  extent("a", &O::a, 1, 3, 4);
  extent("b", &O::b, 1, 3, 4);
  extent("b", &O::b, 0, 7, 6);
  edits.push_back(
      {"o is v", [](O& o, Params&) { o.o = o.v; }, {"o is the same memory as an input"}});
  static float vector[5] = {};
  edits.push_back({"A_log size",
                   [](O&, Params& p) {
                     p.a_log = TensorView::contiguous(static_cast<void*>(vector), DType::kF32, {5});
                   },
                   {"A_log", "5", "4"}});
  edits.push_back({"dt_bias size",
                   [](O&, Params& p) {
                     p.dt_bias =
                         TensorView::contiguous(static_cast<void*>(vector), DType::kF32, {3});
                   },
                   {"dt_bias", "3", "4"}});
  edits.push_back({"no A_log", [](O&, Params& p) { p.a_log = {}; }, {"A_log", "empty"}});
  edits.push_back(
      {"epsilon", [](O&, Params& p) { p.norm_epsilon = -0.5f; }, {"-0.5", "at least 0"}});
  edits.push_back({"scale",
                   [](O&, Params& p) { p.scale = std::numeric_limits<float>::infinity(); },
                   {"scale is inf", "finite"}});
  return edits;
}

template <typename Params, typename Operands>
void expect_edits_are_refused(const DeltaCase& c, std::vector<Edit<Params, Operands>> edits) {
  const DeltaModel model(c);
  StatePool pool = model.make_pool(3);
  DeltaRunner runner(model, pool, {});
  for (std::int32_t slot = 0; slot < 2; ++slot) {
    ASSERT_TRUE(is_ok(pool.reset(slot)));
    runner.step({committed(slot, names(slot + 1u, 0, 5))});
  }
  const std::vector<RowSpec> rows = {committed(0, names(1, 5, 2)), padding(1),
                                     tentative(1, names(2, 5, 3), 1)};
  Result<Step> step = pool.begin_step(step_rows(rows));
  ASSERT_TRUE(is_ok(step));
  auto b = runner.buffers(0, *step, rows);
  const std::vector<std::byte> memory = pool_bytes(pool);
  const std::vector<std::byte> outputs = b.y.bytes();
  for (const auto& edit : edits) {
    Params params = model.op_params<Params>(0);
    Operands operands = b.operands<Operands>();
    edit.apply(operands, params);
    const Status status = run_step(pool, *step, params, operands);
    EXPECT_TRUE(refused(status, StatusCode::kInvalidArgument)) << edit.name;
    for (const std::string& part : edit.parts) {
      EXPECT_NE(status.message().find(part), std::string::npos)
          << edit.name << ": no '" << part << "' in '" << status.message() << "'";
    }
    EXPECT_TRUE(same_bytes(pool_bytes(pool), memory)) << edit.name;
    EXPECT_TRUE(same_bytes(b.y.bytes(), outputs)) << edit.name;
  }
  EXPECT_TRUE(is_ok(runner.recurrence(0, *step, b)));
  EXPECT_TRUE(is_ok(runner.commit(*step, rows)));
}

TEST(DeltaOperands, GatedDeltaNet) {
  expect_edits_are_refused(small_delta_case(DeltaFamily::kGated, "operands", 8, 4),
                           common_edits<GatedDeltaNetParams, GatedDeltaNetOperands>(2));
}

TEST(DeltaOperands, KimiDeltaAttention) {
  using P = KimiDeltaAttentionParams;
  using O = KimiDeltaAttentionOperands;
  DeltaCase c = small_delta_case(DeltaFamily::kKimi, "operands", 8, 4);
  std::vector<Edit<P, O>> edits = common_edits<P, O>(4);
  edits.push_back({"a channels", [](O& o, P&) { o.a.shape[2] = 8; }, {"8", "16"}});
  edits.push_back(
      {"bound 0", [](O&, P& p) { p.lower_bound = 0.0f; }, {"lower_bound is 0", "below 0"}});
  edits.push_back({"bound 5", [](O&, P& p) { p.lower_bound = 5.0f; }, {"lower_bound is 5"}});
  edits.push_back({"bound nan",
                   [](O&, P& p) { p.lower_bound = std::numeric_limits<float>::quiet_NaN(); },
                   {"lower_bound is nan"}});
  expect_edits_are_refused(c, std::move(edits));
}

}  // namespace
}  // namespace replayssm::testing
