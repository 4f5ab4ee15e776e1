// Steps whose rows and counts live in device memory: graphs against eager steps, padding, and what
// becomes of rows that cannot run. Without a GPU every case is skipped.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "ops/mamba2_cases.h"
#include "state/cuda/step.h"
#include "support/cuda_runner.h"
#include "support/mamba2_harness.h"
#include "support/pool_access.h"

namespace replayssm::testing {
namespace {

using cuda::DeviceBytes;
using cuda::OnCuda;

/// A step of a fixed number of rows of up to T tokens, its rows, counts and operands in device
/// memory that stays where it is.
class DeviceStepper {
 public:
  DeviceStepper(const Mamba2Model& model, StatePool& pool, std::int64_t rows, cudaStream_t stream)
      : model_(&model),
        pool_(&pool),
        context_(0, stream),
        runner_(model, pool, stream),
        row_count_(rows),
        tokens_per_row_(pool.options().limits.draft_capacity),
        rows_(static_cast<std::size_t>(rows) * sizeof(DeviceRow)),
        accepted_(static_cast<std::size_t>(rows) * sizeof(std::int64_t)) {
    for (int layer = 0; layer < model.test_case().layers; ++layer) {
      auto buffers = runner_.buffers(layer, {}, tokens(), {});
      Layer& l = layers_.emplace_back();
      for (const TokenBuffer* buffer : {&buffers.u, &buffers.dt, &buffers.y, &buffers.conv_out}) {
        l.memory.emplace_back(buffer->bytes().size());
      }
      l.params = model.op_params(layer);
      l.params.d = l.floats.put(l.params.d);
      l.params.dt_bias = l.floats.put(l.params.dt_bias);
      if (model.test_case().conv_width > 0) {
        l.conv = runner_.conv_operands(layer, buffers);
        l.conv.u = moved(l.conv.u, buffers.u, l.memory[0]);
        l.conv.out = moved(l.conv.out, buffers.conv_out, l.memory[3]);
        l.conv.weight = l.floats.put(l.conv.weight);
        l.conv.bias = l.floats.put(l.conv.bias);
      }
      TokenBuffer& xbc = model.test_case().conv_width > 0 ? buffers.conv_out : buffers.u;
      const DeviceBytes& xbc_memory = l.memory[model.test_case().conv_width > 0 ? 3 : 0];
      l.operands = {
          moved(buffers.x, xbc, xbc_memory),        moved(buffers.b, xbc, xbc_memory),
          moved(buffers.c, xbc, xbc_memory),        moved(buffers.dt_view, buffers.dt, l.memory[1]),
          moved(buffers.z, buffers.u, l.memory[0]), moved(buffers.y_view, buffers.y, l.memory[2])};
    }
  }

  std::int64_t tokens() const { return row_count_ * tokens_per_row_; }
  /// Row i's tokens begin at i * T, so that a graph need not know the counts.
  std::vector<StepRow> placed(std::span<const RowSpec> rows) const {
    std::vector<StepRow> out;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      out.push_back({rows[i].slot,
                     rows[i].kind,
                     static_cast<std::int64_t>(i) * tokens_per_row_,
                     rows[i].count(),
                     {}});
    }
    return out;
  }

  /// Rows (missing ones become padding), counts and operands of the next step.
  void put(std::vector<RowSpec> rows) {
    rows.resize(static_cast<std::size_t>(row_count_), padding(0));
    std::vector<DeviceRow> device_rows;
    std::vector<std::int64_t> accepted;
    const std::vector<StepRow> where = placed(rows);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      device_rows.push_back(
          {where[i].token_begin, where[i].token_count, where[i].slot, where[i].kind});
      accepted.push_back(rows[i].accepts());
    }
    put_rows(device_rows);
    put_accepted(accepted);
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      auto buffers = runner_.buffers(static_cast<int>(layer), where, tokens(), rows);
      std::size_t i = 0;
      for (const TokenBuffer* buffer : {&buffers.u, &buffers.dt, &buffers.y, &buffers.conv_out}) {
        layers_[layer].memory[i++].upload(buffer->bytes().data(), buffer->bytes().size());
      }
    }
  }
  void put_rows(const std::vector<DeviceRow>& rows) {
    rows_.upload(rows.data(), rows.size() * sizeof(DeviceRow));
  }
  void put_accepted(const std::vector<std::int64_t>& accepted) {
    accepted_.upload(accepted.data(), accepted.size() * sizeof(std::int64_t));
  }

  DeviceRows rows() const { return {rows_.as<DeviceRow>(), row_count_, tokens()}; }
  const std::int64_t* accepted() const { return accepted_.as<std::int64_t>(); }

  Status ops(Step& step) {
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      Layer& l = layers_[layer];
      const int index = static_cast<int>(layer);
      if (model_->test_case().conv_width > 0) {
        RSSM_RETURN_IF_ERROR(causal_conv1d_step(context_, *pool_, index, step, l.conv));
      }
      RSSM_RETURN_IF_ERROR(mamba2_step(context_, *pool_, index, step, l.params, l.operands));
    }
    return {};
  }
  /// The whole step, ready to be captured.
  Status enqueue() {
    RSSM_ASSIGN_OR_RETURN(Step step, pool_->begin_step(context_, rows()));
    RSSM_RETURN_IF_ERROR(ops(step));
    return pool_->commit(context_, step, accepted());
  }

  /// (T, heads, head_dim) of a row as it lies in the last layer's y.
  std::vector<float> outputs(std::size_t layer, std::int64_t row, std::int64_t count) const {
    const Layer& l = layers_[layer];
    const std::vector<unsigned char> bytes = l.memory[2].download();
    TensorView view = l.operands.y;
    view.data = const_cast<unsigned char*>(bytes.data()) +
                (static_cast<unsigned char*>(l.operands.y.data) - l.memory[2].as<unsigned char>());
    std::vector<float> out;
    for (std::int64_t t = 0; t < count; ++t) {
      const std::vector<float> token = get_token(view, row * tokens_per_row_ + t);
      out.insert(out.end(), token.begin(), token.end());
    }
    return out;
  }

 private:
  struct Layer {
    std::vector<DeviceBytes> memory;  // u, dt, y, conv_out
    DeviceFloats floats;
    Mamba2Params params;
    CausalConv1dOperands conv;
    Mamba2Operands operands;
  };
  static TensorView moved(TensorView view, TokenBuffer& from, const DeviceBytes& to) {
    if (view.empty()) return view;
    view.data = to.as<std::byte>() + (static_cast<std::byte*>(view.data) - from.data());
    return view;
  }

  const Mamba2Model* model_;
  StatePool* pool_;
  CudaContext context_;
  Mamba2CudaRunner runner_;
  std::int64_t row_count_;
  std::int64_t tokens_per_row_;
  DeviceBytes rows_, accepted_;
  std::vector<Layer> layers_;
};

class CudaDeviceRows : public OnCuda {};

// C39, C75: replays of one graph with rows, counts, slots and padding that change between them are
// bit for bit the eager steps with host rows.
TEST_F(CudaDeviceRows, C39_GraphReplayIsBitEqualToEagerSteps) {
  for (const auto& [checkpoint, activation] :
       {std::pair{DType::kF32, DType::kBF16}, {DType::kBF16, DType::kBF16}}) {
    const Mamba2Model model(usual_case(checkpoint, activation));
    StatePool eager = cuda_pool(model, 5);
    StatePool replayed = cuda_pool(model, 5);
    for (std::int32_t slot = 0; slot < 5; ++slot) {
      ASSERT_TRUE(is_ok(eager.reset(kCuda, slot)));
      ASSERT_TRUE(is_ok(replayed.reset(kCuda, slot)));
    }
    cudaStream_t stream = nullptr;
    ASSERT_CUDA(cudaStreamCreate(&stream));
    constexpr std::int64_t kRows = 6;
    Mamba2CudaRunner runner(model, eager);
    DeviceStepper stepper(model, replayed, kRows, stream);
    ASSERT_CUDA(cudaDeviceSynchronize());
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    const Status status = stepper.enqueue();
    ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
    ASSERT_TRUE(is_ok(status));
    ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    ASSERT_CUDA(cudaGraphDestroy(graph));

    Rng rng(9);
    std::uint64_t sequence = 1;
    for (int i = 0; i < 40; ++i) {
      std::vector<RowSpec> rows;
      std::int64_t before = 0;  // tokens left of the previous row's place
      std::vector<std::int32_t> order = {0, 1, 2, 3, 4};
      for (std::size_t k = order.size(); k-- > 1;) {
        std::swap(order[k], order[static_cast<std::size_t>(rng.below(std::int64_t(k) + 1))]);
      }
      for (const std::int32_t slot : order) {
        if (static_cast<std::int64_t>(rows.size()) == kRows) break;
        if (slot != 0 && rng.chance(0.4)) continue;
        RowSpec row;
        if (rng.chance(0.2)) {
          row = padding(rng.between(0, 3));
        } else {
          row.slot = slot;
          row.kind = rng.chance(0.25) ? RowKind::kCommitted : RowKind::kTentative;
          row.tokens = names(sequence++, 0, rng.between(1, 3));
          if (row.kind == RowKind::kTentative) row.accepted = rng.between(0, row.count());
        }
        row.gap = before;
        before = 3 - row.count();
        rows.push_back(row);
      }
      const StepOutput want = runner.step(rows);
      stepper.put(rows);
      ASSERT_CUDA(cudaDeviceSynchronize());
      ASSERT_CUDA(cudaGraphLaunch(exec, stream));
      ASSERT_CUDA(cudaStreamSynchronize(stream));
      for (std::size_t r = 0; r < rows.size(); ++r) {
        for (std::size_t layer = 0; layer < want[r].size(); ++layer) {
          ASSERT_TRUE(
              same_bits(stepper.outputs(layer, static_cast<std::int64_t>(r), rows[r].count()),
                        want[r][layer]))
              << "replay " << i << ", row " << r;
        }
      }
      for (std::int32_t slot = 0; slot < 5; ++slot) {
        ASSERT_EQ(replayed.cursor(kCuda, slot).value(), eager.cursor(slot).value());
        for (int layer = 0; layer < 2; ++layer) {
          // The eager pool fills what nobody owns with NaN after every commit; a graph does not.
          if (eager.cursor(slot).value().checkpoint_position > 0) {
            ASSERT_TRUE(same_bytes(checkpoint_bytes(replayed, layer, slot),
                                   checkpoint_bytes(eager, layer, slot)))
                << "replay " << i << ", slot " << slot;
          }
        }
        ASSERT_TRUE(same_bytes(replayed.save(kCuda, slot).value(), eager.save(kCuda, slot).value()))
            << "replay " << i << ", slot " << slot;
      }
    }
    EXPECT_EQ(replayed.take_device_error(kCuda).value().what, DeviceError::kNone);
    ASSERT_CUDA(cudaGraphExecDestroy(exec));
    ASSERT_CUDA(cudaStreamDestroy(stream));
  }
}

// C39: a live slot 0 beside padding, a hundred replays: byte-identical.
TEST_F(CudaDeviceRows, C39_PaddingTouchesNothing) {
  const Mamba2Model model(usual_case());
  StatePool pool = cuda_pool(model, 2);
  ASSERT_TRUE(is_ok(pool.reset(kCuda, 0)));
  Mamba2CudaRunner runner(model, pool);
  runner.step({committed(0, names(1, 0, 5))});
  runner.step({tentative(0, names(1, 5, 3), 2)});
  const std::vector<std::byte> before = pool_bytes(pool);
  DeviceStepper stepper(model, pool, 5, nullptr);
  stepper.put({padding(3), padding(0), padding(1), padding(3), padding(2)});
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(is_ok(stepper.enqueue()));
  for (const std::int64_t row : {0, 3}) {
    const std::vector<float> y = stepper.outputs(0, row, 3);
    EXPECT_TRUE(same_bits(y, std::vector<float>(y.size(), 0.0f)));
  }
  EXPECT_TRUE(same_bytes(pool_bytes(pool), before));
  EXPECT_EQ(pool.cursor(kCuda, 0).value(), (Cursor{5, 7, false}));
  EXPECT_EQ(pool.take_device_error(kCuda).value().what, DeviceError::kNone);
}

/// A pool with slots 0 and 1 at five tokens and slot 2 free, and a stepper of three rows.
struct Misuse {
  Misuse() : model(usual_case()), pool(cuda_pool(model, 3)), stepper(model, pool, 3, nullptr) {
    Mamba2CudaRunner runner(model, pool);
    for (const std::int32_t slot : {0, 1}) {
      EXPECT_TRUE(is_ok(pool.reset(kCuda, slot)));
      runner.step({committed(slot, names(1, 0, 5))});
    }
    good = {tentative(0, names(2, 0, 2), 2), tentative(1, names(3, 0, 2), 1)};
  }
  /// Runs the step after `edit`ing row 1; it must be padding with this error, and row 0 unharmed.
  template <typename Edit>
  void expect_padding(Edit edit, const DeviceError& want, std::int64_t outputs = 2) {
    stepper.put(good);
    std::vector<DeviceRow> rows = {{0, 2, 0, RowKind::kTentative},
                                   {3, 2, 1, RowKind::kTentative},
                                   {9, 0, -1, RowKind::kTentative}};
    edit(rows[1]);
    stepper.put_rows(rows);
    const std::vector<std::byte> before = slot_bytes(pool, 1);
    const Cursor cursor = pool.cursor(kCuda, 0).value();
    ASSERT_TRUE(is_ok(stepper.enqueue()));
    const std::vector<float> y = stepper.outputs(1, 1, outputs);
    EXPECT_TRUE(same_bits(y, std::vector<float>(y.size(), 0.0f)));
    EXPECT_TRUE(same_bytes(slot_bytes(pool, 1), before));
    EXPECT_EQ(pool.cursor(kCuda, 0).value().position, cursor.position + 2);
    EXPECT_EQ(pool.cursor(kCuda, 1).value(), (Cursor{5, 5, false}));
    expect_error(want);
  }
  /// The first error is kept, returned once, and forgotten.
  void expect_error(const DeviceError& want) {
    const DeviceError found = pool.take_device_error(kCuda).value();
    EXPECT_EQ(found.what, want.what) << to_status(found).message();
    EXPECT_EQ(found.row, want.row);
    EXPECT_EQ(found.found, want.found);
    EXPECT_EQ(found.allowed, want.allowed);
    EXPECT_FALSE(to_status(found).ok());
    EXPECT_EQ(pool.take_device_error(kCuda).value().what, DeviceError::kNone);
  }

  Mamba2Model model;
  StatePool pool;
  DeviceStepper stepper;
  std::vector<RowSpec> good;
};

TEST_F(CudaDeviceRows, BadRowsBecomePaddingAndAreReported) {
  constexpr auto kReady = static_cast<std::int64_t>(SlotCondition::kReady);
  Misuse m;
  m.expect_padding([](DeviceRow& row) { row.slot = 3; }, {DeviceError::kSlot, 1, 3, 2});
  m.expect_padding([](DeviceRow& row) { row.slot = 1 << 30; }, {DeviceError::kSlot, 1, 1 << 30, 2});
  m.expect_padding([](DeviceRow& row) { row.slot = 0; }, {DeviceError::kDuplicate, 1, 0, 0});
  m.expect_padding(
      [](DeviceRow& row) { row.slot = 2; },
      {DeviceError::kCondition, 1, static_cast<std::int64_t>(SlotCondition::kFree), kReady});
  m.expect_padding([](DeviceRow& row) { row.token_count = 0; }, {DeviceError::kTokenCount, 1, 0, 3},
                   0);
  m.expect_padding([](DeviceRow& row) { row.token_count = 4; }, {DeviceError::kTokenCount, 1, 4, 3},
                   2);
  m.expect_padding([](DeviceRow& row) { row.token_begin = 8; },
                   {DeviceError::kTokenRange, 1, 10, 9}, 0);
  m.expect_padding([](DeviceRow& row) { row.token_begin = 1; }, {DeviceError::kTokenRange, 1, 1, 2},
                   0);
  m.expect_padding(
      [](DeviceRow& row) { row.token_count = std::numeric_limits<std::int64_t>::max(); },
      {DeviceError::kTokenRange, 1, std::numeric_limits<std::int64_t>::max(), 9}, 0);
}

TEST_F(CudaDeviceRows, BadCountsAcceptNothing) {
  Misuse m;
  for (const std::int64_t bad : {std::int64_t{3}, std::int64_t{-1}}) {
    m.stepper.put(m.good);
    m.stepper.put_accepted({1, bad, 0});
    const Cursor before = m.pool.cursor(kCuda, 1).value();
    ASSERT_TRUE(is_ok(m.stepper.enqueue()));
    m.expect_error({DeviceError::kAccepted, 1, bad, 2});
    EXPECT_EQ(m.pool.cursor(kCuda, 1).value(), before);
  }
  // A committed row has rewritten its slot: only reset, load or copy revive it.
  m.stepper.put({committed(1, names(3, 0, 2))});
  m.stepper.put_accepted({1, 0, 0});
  ASSERT_TRUE(is_ok(m.stepper.enqueue()));
  m.expect_error({DeviceError::kAccepted, 0, 1, 2});
  m.stepper.put(m.good);
  ASSERT_TRUE(is_ok(m.stepper.enqueue()));
  m.expect_error({DeviceError::kCondition, 1, static_cast<std::int64_t>(SlotCondition::kInvalid),
                  static_cast<std::int64_t>(SlotCondition::kReady)});
  // What needs the cursor asks the device, and is told; a copy finds out there. Neither spreads
  // what is broken.
  const std::int64_t position = m.pool.cursor(kCuda, 1).value().position;
  for (const Status& status :
       {m.pool.materialize(kCuda, 1, position, 2), m.pool.truncate(kCuda, 1, position),
        m.pool.save(kCuda, 1).status()}) {
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_NE(status.message().find("slot 1 is invalid"), std::string::npos) << status.message();
  }
  ASSERT_TRUE(is_ok(m.pool.copy(kCuda, 1, 2)));
  m.expect_error({DeviceError::kCondition, -1, static_cast<std::int64_t>(SlotCondition::kInvalid),
                  static_cast<std::int64_t>(SlotCondition::kReady)});
  m.stepper.put({tentative(2, names(3, 0, 2), 1)});
  ASSERT_TRUE(is_ok(m.stepper.enqueue()));
  m.expect_error({DeviceError::kCondition, 0, static_cast<std::int64_t>(SlotCondition::kInvalid),
                  static_cast<std::int64_t>(SlotCondition::kReady)});
  m.stepper.put(m.good);
  ASSERT_TRUE(is_ok(m.pool.copy(kCuda, 0, 1)));
  ASSERT_TRUE(is_ok(m.stepper.enqueue()));
  EXPECT_EQ(m.pool.take_device_error(kCuda).value().what, DeviceError::kNone);
}

// Two commits, a step without commit, a slot reset inside a step: reported, never silent.
TEST_F(CudaDeviceRows, StepsOutOfOrderAreReported) {
  constexpr auto kReady = static_cast<std::int64_t>(SlotCondition::kReady);
  constexpr auto kInStep = static_cast<std::int64_t>(SlotCondition::kInStep);
  Misuse m;
  m.stepper.put({m.good[0]});
  Result<Step> open = m.pool.begin_step(kCuda, m.stepper.rows());
  ASSERT_TRUE(is_ok(open));
  ASSERT_TRUE(is_ok(m.stepper.ops(*open)));
  // A flush forced now would make the commit believe that this step has flushed.
  ASSERT_TRUE(is_ok(m.pool.force_flush(kCuda, m.good[0].slot)));
  m.expect_error({DeviceError::kCondition, -1, kInStep, kReady});
  // Another begin without a commit: the row is inside the first step.
  Result<Step> second = m.pool.begin_step(kCuda, m.stepper.rows());
  ASSERT_TRUE(is_ok(second));
  m.expect_error({DeviceError::kCondition, 0, kInStep, kReady});
  EXPECT_TRUE(refused(m.pool.commit(kCuda, *open, m.stepper.accepted()),
                      StatusCode::kFailedPrecondition, {"another step"}));
}

TEST_F(CudaDeviceRows, CommitsOutOfOrderAreReported) {
  constexpr auto kReady = static_cast<std::int64_t>(SlotCondition::kReady);
  constexpr auto kInStep = static_cast<std::int64_t>(SlotCondition::kInStep);
  Misuse m;
  m.stepper.put({m.good[0]});
  // A captured commit replayed once too often.
  cudaStream_t stream = nullptr;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  const CudaContext context(0, stream);
  Result<Step> step = m.pool.begin_step(kCuda, m.stepper.rows());
  ASSERT_TRUE(is_ok(step));
  ASSERT_TRUE(is_ok(m.stepper.ops(*step)));
  ASSERT_CUDA(cudaDeviceSynchronize());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  const Status status = m.pool.commit(context, *step, m.stepper.accepted());
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  ASSERT_TRUE(is_ok(status));
  ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  ASSERT_CUDA(cudaGraphDestroy(graph));
  ASSERT_CUDA(cudaGraphLaunch(exec, stream));
  ASSERT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(m.pool.take_device_error(kCuda).value().what, DeviceError::kNone);
  const Cursor committed_once = m.pool.cursor(kCuda, 0).value();
  EXPECT_EQ(committed_once, (Cursor{5, 7, false}));
  ASSERT_CUDA(cudaGraphLaunch(exec, stream));
  ASSERT_CUDA(cudaStreamSynchronize(stream));
  m.expect_error({DeviceError::kCondition, 0, kReady, kInStep});
  EXPECT_EQ(m.pool.cursor(kCuda, 0).value(), committed_once);

  // A slot that is reset inside a step stays at its start.
  Result<Step> broken = m.pool.begin_step(kCuda, m.stepper.rows());
  ASSERT_TRUE(is_ok(broken));
  ASSERT_TRUE(is_ok(m.stepper.ops(*broken)));
  ASSERT_TRUE(is_ok(m.pool.reset(kCuda, 0)));
  ASSERT_TRUE(is_ok(m.pool.commit(kCuda, *broken, m.stepper.accepted())));
  m.expect_error({DeviceError::kCondition, 0, kReady, kInStep});
  EXPECT_EQ(m.pool.cursor(kCuda, 0).value(), Cursor{});
  ASSERT_CUDA(cudaGraphExecDestroy(exec));
  ASSERT_CUDA(cudaStreamDestroy(stream));
}

TEST_F(CudaDeviceRows, TheHostKnowsWhatItDoesNotKnow) {
  Misuse m;
  EXPECT_EQ(m.pool.cursor(0).value(), (Cursor{5, 5, false}));
  m.stepper.put(m.good);
  ASSERT_TRUE(is_ok(m.stepper.enqueue()));
  EXPECT_TRUE(refused(m.pool.cursor(0), StatusCode::kFailedPrecondition, {"slot 0", "cuda:0"}));
  EXPECT_EQ(m.pool.cursor(kCuda, 0).value(), (Cursor{5, 7, false}));
  // Calls that need the cursor fetch it; steps with host rows still work.
  ASSERT_TRUE(is_ok(m.pool.truncate(kCuda, 0, 6)));
  EXPECT_EQ(m.pool.cursor(kCuda, 0).value(), (Cursor{5, 6, false}));
  ASSERT_TRUE(is_ok(m.pool.materialize(kCuda, 0, 6, 2)));
  EXPECT_EQ(m.pool.cursor(kCuda, 2).value(), (Cursor{6, 6, false}));
  EXPECT_TRUE(refused(m.pool.truncate(kCuda, 0, 4), StatusCode::kInvalidArgument, {"4", "5..6"}));
  Mamba2CudaRunner runner(m.model, m.pool);
  runner.step({tentative(0, names(2, 1, 2), 1)});
  EXPECT_EQ(m.pool.cursor(kCuda, 0).value(), (Cursor{5, 7, false}));
  // Commits are for the step's own kind of rows.
  Result<Step> device = m.pool.begin_step(kCuda, m.stepper.rows());
  ASSERT_TRUE(is_ok(device));
  ASSERT_TRUE(is_ok(m.stepper.ops(*device)));
  const std::vector<std::int64_t> counts(3, 0);
  EXPECT_TRUE(refused(m.pool.commit(kCuda, *device, std::span<const std::int64_t>(counts)),
                      StatusCode::kInvalidArgument, {"cpu", "cuda:0"}));
  ASSERT_TRUE(is_ok(m.pool.abort(kCuda, *device)));
  EXPECT_EQ(m.pool.take_device_error(kCuda).value().what, DeviceError::kNone);
  EXPECT_EQ(m.pool.cursor(kCuda, 0).value(), (Cursor{5, 7, false}));
  ASSERT_TRUE(is_ok(m.stepper.enqueue()));
  EXPECT_EQ(m.pool.take_device_error(kCuda).value().what, DeviceError::kNone);
}

class PlansOfSteps : public OnCuda {};

// Every row has one place, and rows that flush are where they were asked for: first, or among the
// first of them with as many others between one and the next, give or take one.
TEST_F(PlansOfSteps, HaveEveryRowOnceAndFlushesWhereTheyAreAskedFor) {
  using cuda::FlushPlaces;
  using cuda::PlannedRow;
  constexpr ReplayLimits kLimits{.window = 4, .draft_capacity = 1};
  for (const int count : {1, 2, 3, 7, 64, 1000, 1500}) {
    for (const int every : {1, 2, 3, 16, 2000}) {
      std::vector<DeviceRow> rows(static_cast<std::size_t>(count));
      std::vector<Cursor> cursors(rows.size());
      int flushes = 0;
      for (int i = 0; i < count; ++i) {
        const bool is_full = i % every == 0;
        flushes += is_full ? 1 : 0;
        rows[static_cast<std::size_t>(i)] = {
            .token_begin = i, .token_count = 1, .slot = i, .kind = RowKind::kTentative};
        cursors[static_cast<std::size_t>(i)] = {8, is_full ? 12 : 10, false};
      }
      DeviceBytes device_rows(rows.size() * sizeof(DeviceRow));
      DeviceBytes device_cursors(cursors.size() * sizeof(Cursor));
      DeviceBytes planned(rows.size() * sizeof(PlannedRow));
      device_rows.upload(rows.data(), device_rows.size());
      device_cursors.upload(cursors.data(), device_cursors.size());
      for (const auto& [places, quarters] :
           {std::pair{FlushPlaces::kFirst, 0}, std::pair{FlushPlaces::kFirstQuarter, 1},
            std::pair{FlushPlaces::kFirstHalf, 2},
            std::pair{FlushPlaces::kFirstThreeQuarters, 3}}) {
        planned.fill(0xff);
        ASSERT_TRUE(is_ok(cuda::cuda_plan_step({.rows = device_rows.as<DeviceRow>(),
                                                .row_count = count,
                                                .token_count = count,
                                                .cursors = device_cursors.as<Cursor>(),
                                                .slots = count,
                                                .limits = kLimits,
                                                .planned = planned.as<PlannedRow>(),
                                                .flushes = places},
                                               nullptr)));
        const std::vector<unsigned char> bytes = planned.download();
        const int span = std::max(flushes, (count * quarters + 3) / 4);
        std::vector<int> seen(rows.size());
        int before = 0;
        for (int i = 0; i < count; ++i) {
          PlannedRow row;
          std::memcpy(&row, bytes.data() + static_cast<std::size_t>(i) * sizeof row, sizeof row);
          ASSERT_GE(row.slot, 0) << "place " << i << " of " << count << ", one in " << every;
          ASSERT_LT(row.slot, count);
          ++seen[static_cast<std::size_t>(row.slot)];
          ASSERT_EQ(row.kind == PlannedRow::kFlush, row.slot % every == 0);
          if (row.kind != PlannedRow::kFlush) continue;
          ASSERT_LT(i, span);
          ASSERT_NEAR(i, static_cast<double>(before) * span / flushes, 1.0);
          ++before;
        }
        EXPECT_EQ(before, flushes);
        EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), count);
      }
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
