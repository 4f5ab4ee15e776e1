// The Mamba-2 CUDA kernels against the fp64 oracle and against each other. Without a GPU every case
// is skipped.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "support/mamba2_cuda_harness.h"

namespace replayssm::cuda {
namespace {

class Mamba2Cuda : public OnCuda {};

struct Types {
  DType checkpoint, activation;
};
constexpr Types kTypes[] = {{DType::kF32, DType::kF32},  {DType::kF32, DType::kBF16},
                            {DType::kBF16, DType::kF32}, {DType::kBF16, DType::kBF16},
                            {DType::kF16, DType::kF32},  {DType::kF16, DType::kBF16}};

constexpr ReplayLimits limits_of(int window, int draft) {
  return {.window = window, .draft_capacity = draft};
}

/// Gives every slot a random position, so that ring starts differ and wrap around.
void scatter(Harness& h) {
  std::vector<Row> rows;
  std::vector<std::int64_t> accepted;
  for (std::int32_t slot = 0; slot < h.c.slots; ++slot) {
    const std::int64_t n = h.uniform(0, h.c.limits.record_places() + 3);
    if (n == 0) continue;  // a slot at position 0: its checkpoint is zero and stays unread
    rows.push_back({RowKind::kCommitted, slot, h.tokens(n)});
    accepted.push_back(n);
  }
  if (rows.empty()) return;
  h.step(rows);
  if (::testing::Test::HasFatalFailure()) return;
  h.commit(accepted);
}

void run_random_steps(Harness& h, int steps) {
  scatter(h);
  for (int i = 0; i < steps && !::testing::Test::HasFatalFailure(); ++i) {
    if (h.uniform(0, 3) == 0) h.force_flush(static_cast<std::int32_t>(h.uniform(0, h.c.slots - 1)));
    const std::vector<Row> rows = h.random_rows();
    h.step(rows);
    if (::testing::Test::HasFatalFailure()) return;
    h.commit(h.random_accepts(rows));
  }
  ASSERT_EQ(h.device_error().what, DeviceError::kNone);
}

TEST_F(Mamba2Cuda, MixedRowsMatchTheOracle) {
  const Mamba2Shape shapes[] = {
      {.heads = 8, .head_dim = 64, .state_size = 128, .groups = 2},
      {.heads = 8, .head_dim = 80, .state_size = 128, .groups = 8},
      {.heads = 4, .head_dim = 16, .state_size = 64, .groups = 1},
      {.heads = 4, .head_dim = 64, .state_size = 256, .groups = 2},
      {.heads = 6, .head_dim = 80, .state_size = 64, .groups = 2},
      {.heads = 3, .head_dim = 16, .state_size = 128, .groups = 1},
  };
  const ReplayLimits limits[] = {limits_of(16, 1), limits_of(1, 1),  limits_of(16, 4),
                                 limits_of(64, 1), limits_of(20, 7), limits_of(16, 16),
                                 limits_of(64, 16)};
  std::uint64_t seed = 1;
  for (const Types types : kTypes) {
    double worst = 0.0;
    for (const Mamba2Shape& shape : shapes) {
      for (const ReplayLimits& limit : limits) {
        Case c{.shape = shape,
               .limits = limit,
               .checkpoint = types.checkpoint,
               .activation = types.activation,
               .seed = ++seed};
        c.z = seed % 2 == 0;
        c.d = seed % 3 != 0;
        c.bias = seed % 5 != 0;
        c.dt_f32 = seed % 4 == 1;
        c.limits_on = seed % 7 == 3;
        c.softplus = seed % 11 != 5 || !c.limits_on ? true : false;
        Harness h(c);
        Result<Mamba2CudaConfig> config = choose_mamba2_config(h.p, h.device);
        if (!config.ok()) {
          EXPECT_EQ(config.status().code(), StatusCode::kUnsupported);
          std::printf("  refused %s: %s\n", c.name().c_str(), config.status().message().c_str());
          continue;
        }
        run_random_steps(h, limit.window > 16 ? 24 : 14);
        if (HasFatalFailure()) return;
        worst = std::max(worst, h.worst);
      }
    }
    std::printf("  %s/%s worst relative error %.3g\n", to_string(types.checkpoint),
                to_string(types.activation), worst);
  }
}

TEST_F(Mamba2Cuda, EveryTokenCount) {
  for (const Types types : kTypes) {
    for (int count = 1; count <= 16; ++count) {
      Case c{.shape = {.heads = 4, .head_dim = 64, .state_size = 128, .groups = 2},
             .limits = limits_of(32, 16),
             .checkpoint = types.checkpoint,
             .activation = types.activation,
             .slots = 3,
             .seed = 100 + static_cast<std::uint64_t>(count)};
      Harness h(c);
      scatter(h);
      for (int i = 0; i < 4 && !HasFatalFailure(); ++i) {
        std::vector<Row> rows;
        for (std::int32_t slot = 0; slot < 3; ++slot) {
          rows.push_back({RowKind::kTentative, slot, h.tokens(count)});
        }
        h.step(rows);
        if (HasFatalFailure()) return;
        h.commit(h.random_accepts(rows));
      }
      if (HasFatalFailure()) return;
    }
  }
}

// To f32 accuracy: the bounds of other tests allow for the rounding of checkpoints, and would for
// an output that loses a bit of them once more.
TEST_F(Mamba2Cuda, TwoByteCheckpointsAreReadAsTheyAre) {
  for (const DType checkpoint : {DType::kBF16, DType::kF16}) {
    for (const std::int64_t state_size : {64, 128}) {
      for (const int drafts : {1, 4, 16}) {
        Case c{.shape = {.heads = 4, .head_dim = 64, .state_size = state_size, .groups = 2},
               .limits = limits_of(16, drafts),
               .checkpoint = checkpoint,
               .activation = DType::kF32,
               .seed = 51};
        Harness h(c);
        h.step({{RowKind::kCommitted, 0, h.tokens(3)}});
        if (HasFatalFailure()) return;
        h.commit({3});
        // The oracle goes on from what is stored.
        const std::vector<unsigned char> stored = h.state.download();
        std::vector<double>& state = h.oracle[0]->state();
        for (std::size_t i = 0; i < state.size(); ++i) {
          state[i] = from_bits(stored.data() + 2 * i, checkpoint);
        }
        h.worst = 0.0;
        h.step({{RowKind::kTentative, 0, h.tokens(std::min(drafts, 3))}});
        if (HasFatalFailure()) return;
        EXPECT_LE(h.worst, 2e-5) << c.name();
      }
    }
  }
}

TEST_F(Mamba2Cuda, CommittedRowIsBitEqualToItsTokens) {
  for (const Types types : kTypes) {
    for (const std::int64_t state_size : {64, 128, 256}) {
      Case c{.shape = {.heads = 4, .head_dim = 32, .state_size = state_size, .groups = 2},
             .limits = limits_of(8, 2),
             .checkpoint = types.checkpoint,
             .activation = types.activation,
             .slots = 2,
             .z = true,
             .seed = 7};
      Harness h(c);
      // Live records in both slots first: the same ones.
      const std::vector<Mamba2Token> live = h.tokens(2);
      h.step({{RowKind::kTentative, 0, live}, {RowKind::kTentative, 1, live}});
      if (HasFatalFailure()) return;
      h.commit({2, 2});
      const std::vector<Mamba2Token> tokens = h.tokens(70);
      h.step({{RowKind::kCommitted, 0, tokens}});
      if (HasFatalFailure()) return;
      const std::vector<float> whole = h.outputs(0);
      h.commit({70});
      std::vector<float> parts;
      for (std::size_t t = 0; t < tokens.size(); ++t) {
        h.step({{RowKind::kCommitted, 1, {tokens[t]}}});
        if (HasFatalFailure()) return;
        const std::vector<float> y = h.outputs(0);
        parts.insert(parts.end(), y.begin(), y.end());
        h.commit({1});
      }
      ASSERT_EQ(std::memcmp(whole.data(), parts.data(), whole.size() * 4), 0) << c.name();
      ASSERT_EQ(h.state_of(0), h.state_of(1)) << c.name();
    }
  }
}

/// One kernel or the other by the throw of a coin.
Mamba2Tuning any_kernel(Harness& h) {
  return {.kernel = h.uniform(0, 1) == 0 ? StepKernel::kStreamed : StepKernel::kDirect};
}

TEST_F(Mamba2Cuda, FlushIsBitEqualToPlainDecoding) {
  std::vector<Case> cases;
  for (const DType activation : {DType::kF32, DType::kBF16}) {
    for (const ReplayLimits limits : {limits_of(16, 4), limits_of(16, 1), limits_of(5, 3)}) {
      cases.push_back({.shape = {.heads = 4, .head_dim = 80, .state_size = 128, .groups = 2},
                       .limits = limits,
                       .activation = activation});
      // Decays that vanish.
      if (limits.window == 5) cases.back().most_a = 200.0f;
    }
  }
  // Several times more records than are folded, or tokens than are prepared, together.
  for (const std::int64_t state_size : {64, 128, 256}) {
    cases.push_back({.shape = {.heads = 2, .head_dim = 16, .state_size = state_size, .groups = 1},
                     .limits = limits_of(40, 8)});
    cases.back().most_a = 60.0f;
  }
  for (Case& c : cases) {
    c.slots = 2;
    c.seed = 11;
    const int steps = c.limits.window > 16 ? 150 : 300;
    Harness h(c);
    std::vector<Mamba2Token> waiting;  // accepted by slot 0, not yet given to slot 1
    int flushes = 0;
    for (int i = 0; i < steps; ++i) {
      const bool flushes_now = tentative_row_flushes(h.cursors[0], c.limits);
      const std::vector<Mamba2Token> tokens = h.tokens(h.uniform(1, c.limits.draft_capacity));
      h.step({{RowKind::kTentative, 0, tokens}}, any_kernel(h), i % 37 == 0);
      if (HasFatalFailure()) return;
      if (flushes_now) {
        ++flushes;
        h.pending.clear();  // the commit below belongs to slot 0's row
        const std::vector<unsigned char> flushed = h.state_of(0);
        const std::vector<DeviceRow> rows = h.device_rows;
        // Plain decoding of the same tokens, in rows of random length.
        std::size_t done = 0;
        Cursor saved = h.cursors[0];
        while (done < waiting.size()) {
          const auto n = static_cast<std::size_t>(
              h.uniform(1, static_cast<std::int64_t>(waiting.size() - done)));
          const auto first = waiting.begin() + static_cast<std::ptrdiff_t>(done);
          h.step({{RowKind::kCommitted, 1, {first, first + static_cast<std::ptrdiff_t>(n)}}},
                 any_kernel(h), false);
          if (HasFatalFailure()) return;
          h.commit({static_cast<std::int64_t>(n)});
          if (HasFatalFailure()) return;
          done += n;
        }
        waiting.clear();
        ASSERT_TRUE(saved == h.cursors[0]);
        ASSERT_EQ(flushed, h.state_of(1)) << c.name() << ", flush " << flushes;
        // Bring slot 0's row back for its commit.
        h.put_operands({{RowKind::kTentative, 0, tokens}});
        h.pending = {{RowKind::kTentative, 0, tokens}};
      }
      const std::int64_t accepted = h.uniform(0, static_cast<std::int64_t>(tokens.size()));
      h.commit({accepted});
      if (HasFatalFailure()) return;
      waiting.insert(waiting.end(), tokens.begin(), tokens.begin() + accepted);
    }
    EXPECT_GT(flushes, 5);
  }
}

TEST_F(Mamba2Cuda, EveryConfigurationGivesTheSameBits) {
  for (const Types types : kTypes) {
    for (const std::int64_t head_dim : {64, 80}) {
      Case c{.shape = {.heads = 12, .head_dim = head_dim, .state_size = 128, .groups = 2},
             .limits = limits_of(16, 6),
             .checkpoint = types.checkpoint,
             .activation = types.activation,
             .seed = 21};
      Harness h(c);
      run_random_steps(h, 9);
      if (HasFatalFailure()) return;
      std::vector<Row> rows = h.random_rows();
      rows.push_back({RowKind::kTentative, -1, h.tokens(1)});
      const auto buffers = h.buffers();
      std::array<std::vector<unsigned char>, buffers.size()> before, want;
      for (std::size_t i = 0; i < buffers.size(); ++i) before[i] = buffers[i]->download();
      h.step(rows, {.kernel = StepKernel::kStreamed});
      if (HasFatalFailure()) return;
      const std::vector<unsigned char> want_y = h.y.download();
      for (std::size_t i = 0; i < buffers.size(); ++i) want[i] = buffers[i]->download();
      for (const int warps : {1, 2, 3, 4}) {
        for (const int stages : {1, 2, 3}) {
          for (const int tiles : {1, 3, 4, 16, 1000}) {
            for (std::size_t i = 0; i < buffers.size(); ++i) {
              buffers[i]->upload(before[i].data(), before[i].size());
            }
            h.y.fill(0xff);
            const int tail_rows = (warps + stages) % 3 * static_cast<int>(rows.size()) / 2;
            const Status status = h.launch({.kernel = StepKernel::kStreamed,
                                            .warps = warps,
                                            .stages = stages,
                                            .tiles_per_run = tiles,
                                            .fold_tiles_per_run = tiles % 4 == 0 ? 3 : 0,
                                            .tail_rows = tail_rows});
            ASSERT_TRUE(status.ok()) << status.message();
            ASSERT_CUDA(cudaDeviceSynchronize());
            const auto label = [&] {
              return c.name() + " warps " + std::to_string(warps) + " stages " +
                     std::to_string(stages) + " tiles " + std::to_string(tiles) + " tail " +
                     std::to_string(tail_rows);
            };
            ASSERT_TRUE(h.y.download() == want_y) << label();
            for (std::size_t i = 0; i < buffers.size(); ++i) {
              ASSERT_TRUE(buffers[i]->download() == want[i]) << label() << " buffer " << i;
            }
          }
        }
      }
    }
  }
}

TEST_F(Mamba2Cuda, ManyRowHeads) {
  struct Size {
    std::int64_t rows, heads;
  };
  for (const Size size : {Size{1023, 1}, Size{1024, 1}, Size{1025, 1}, Size{1024, 64}}) {
    Case c{.shape = {.heads = size.heads, .head_dim = 16, .state_size = 64, .groups = 1},
           .limits = limits_of(4, 2),
           .slots = size.rows,
           .seed = 31};
    Harness h(c);
    for (int i = 0; i < 4; ++i) {
      std::vector<Row> rows;
      std::vector<std::int64_t> accepted;
      for (std::int64_t slot = size.rows - 1; slot >= 0; --slot) {
        const bool committed = (slot + i) % 5 == 0;
        rows.push_back({committed ? RowKind::kCommitted : RowKind::kTentative,
                        static_cast<std::int32_t>(slot), h.tokens(1 + (slot + i) % 2)});
        const auto n = static_cast<std::int64_t>(rows.back().tokens.size());
        accepted.push_back(committed ? n : h.uniform(0, n));
      }
      h.step(rows, {}, i == 3 && size.heads == 1);
      if (HasFatalFailure()) return;
      h.commit(accepted);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(Mamba2Cuda, GraphReplayIsBitEqualToEager) {
  Case c{.shape = {.heads = 8, .head_dim = 64, .state_size = 128, .groups = 2},
         .limits = limits_of(6, 2),
         .slots = 4,
         .seed = 41};
  Harness eager(c);
  Harness graph(c);
  const std::vector<std::int64_t> counts = {2, 1, 2, 2};
  const auto rows_of = [&](Harness& h) {
    std::vector<Row> rows;
    for (std::int32_t slot = 0; slot < 4; ++slot) {
      rows.push_back({slot == 1 ? RowKind::kCommitted : RowKind::kTentative, slot,
                      h.tokens(counts[static_cast<std::size_t>(slot)])});
    }
    return rows;
  };
  cudaStream_t stream = nullptr;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  DeviceBytes accepted(4 * 8);
  cudaGraphExec_t exec = nullptr;
  for (int i = 0; i < 24; ++i) {
    const std::vector<Row> rows = rows_of(eager);
    const std::vector<Row> same = rows_of(graph);
    const std::vector<std::int64_t> accept = {i % 3, 1, (i + 1) % 3, (i / 3) % 3};
    eager.step(rows, {}, false);
    if (HasFatalFailure()) return;
    eager.commit(accept);
    graph.put_operands(same);
    accepted.upload(accept.data(), accept.size() * 8);
    if (exec == nullptr) {
      cudaGraph_t captured = nullptr;
      ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
      const Status status = graph.launch({}, stream);
      const Status committed = cuda_commit({.rows = graph.rows_buffer.as<DeviceRow>(),
                                            .accepted = accepted.as<std::int64_t>(),
                                            .row_count = 4,
                                            .cursors = graph.device_cursors.as<Cursor>(),
                                            .slots = c.slots,
                                            .limits = c.limits,
                                            .error = graph.error.as<DeviceError>()},
                                           stream);
      ASSERT_CUDA(cudaStreamEndCapture(stream, &captured));
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_TRUE(committed.ok()) << committed.message();
      ASSERT_CUDA(cudaGraphInstantiate(&exec, captured, 0));
      ASSERT_CUDA(cudaGraphDestroy(captured));
    }
    ASSERT_CUDA(cudaDeviceSynchronize());
    ASSERT_CUDA(cudaGraphLaunch(exec, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    ASSERT_TRUE(graph.y.download() == eager.y.download()) << "replay " << i;
    for (std::size_t b = 0; b < graph.buffers().size(); ++b) {
      ASSERT_TRUE(graph.buffers()[b]->download() == eager.buffers()[b]->download())
          << "replay " << i << " buffer " << b;
    }
    std::vector<Cursor> found(4);
    ASSERT_CUDA(cudaMemcpy(found.data(), graph.device_cursors.as<void>(), 4 * sizeof(Cursor),
                           cudaMemcpyDeviceToHost));
    for (std::size_t s = 0; s < 4; ++s) ASSERT_TRUE(found[s] == eager.cursors[s]) << "slot " << s;
  }
  ASSERT_CUDA(cudaGraphExecDestroy(exec));
  ASSERT_CUDA(cudaStreamDestroy(stream));
}

TEST_F(Mamba2Cuda, OffsetsBeyond32Bits) {
  std::size_t available = 0;
  std::size_t total = 0;
  ASSERT_CUDA(cudaMemGetInfo(&available, &total));
  Case c{.shape = {.heads = 2, .head_dim = 16, .state_size = 64, .groups = 1},
         .limits = limits_of(4, 2),
         .slots = 3,
         .seed = 51};
  c.slot_padding = std::int64_t{1} << 30;  // slot 2 starts past 2^31 elements in every buffer
  if (available < (std::size_t{48} << 30)) GTEST_SKIP() << "needs 48 GiB";
  Harness h(c);
  for (int i = 0; i < 8; ++i) {
    std::vector<Row> rows;
    for (const std::int32_t slot : {2, 1}) {
      rows.push_back({i == 0 ? RowKind::kCommitted : RowKind::kTentative, slot, h.tokens(2)});
    }
    h.step(rows, {}, false);
    if (HasFatalFailure()) return;
    h.commit({2, i == 0 ? 2 : 1});
    if (HasFatalFailure()) return;
  }
}

TEST_F(Mamba2Cuda, BadRowsBecomePaddingAndAreReported) {
  Case c{.shape = {.heads = 4, .head_dim = 64, .state_size = 128, .groups = 2},
         .limits = limits_of(8, 2),
         .slots = 3,
         .seed = 61};
  const auto expect_padding = [&](Harness& h, Row row, DeviceError::What what) {
    h.put_operands({row, {RowKind::kTentative, 1, h.tokens(1)}});
    const Status status = h.launch();
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_CUDA(cudaDeviceSynchronize());
    for (const float v : h.outputs(0)) ASSERT_EQ(v, 0.0f);
    for (const float v : h.outputs(1)) ASSERT_TRUE(std::isfinite(v));
    EXPECT_EQ(h.device_error().what, what);
    EXPECT_EQ(h.device_error().row, 0);
  };
  {
    Harness h(c);
    expect_padding(h, {RowKind::kTentative, 3, h.tokens(1)}, DeviceError::kSlot);
    EXPECT_EQ(h.device_error().found, 3);
    EXPECT_EQ(h.device_error().allowed, 2);
  }
  {
    Harness h(c);
    expect_padding(h, {RowKind::kTentative, 0, h.tokens(3)}, DeviceError::kTokenCount);
  }
  {
    Harness h(c);
    h.cursors[0].position = 9;
    h.put_cursors();
    expect_padding(h, {RowKind::kTentative, 0, h.tokens(1)}, DeviceError::kCursor);
  }
  {
    Harness h(c);
    const std::vector<Row> rows = {{RowKind::kTentative, 0, h.tokens(2)}};
    h.step(rows);
    if (HasFatalFailure()) return;
    h.pending.clear();
    h.commit({3});
    EXPECT_EQ(h.device_error().what, DeviceError::kAccepted);
    EXPECT_EQ(h.device_error().found, 3);
    EXPECT_EQ(h.device_error().allowed, 2);
  }
}

TEST_F(Mamba2Cuda, HostKnownMistakesAreRefused) {
  Case c{.shape = {.heads = 4, .head_dim = 64, .state_size = 128, .groups = 2},
         .limits = limits_of(8, 2),
         .slots = 3};
  Harness h(c);
  h.put_operands({{RowKind::kTentative, 0, h.tokens(1)}});
  const Mamba2CudaParams good = h.p;
  ASSERT_TRUE(validate_mamba2(good).ok()) << validate_mamba2(good).message();
  const auto refused = [&](auto change, const char* expected) {
    Mamba2CudaParams p = good;
    change(p);
    const Status status = validate_mamba2(p);
    EXPECT_FALSE(status.ok()) << expected;
    EXPECT_NE(status.message().find(expected), std::string::npos) << status.message();
  };
  refused([](auto& p) { p.groups = 3; }, "multiple of groups 3");
  refused([](auto& p) { p.head_dim = 24; }, "head_dim is 24");
  refused([](auto& p) { p.state_size = 96; }, "state_size is 96");
  refused([](auto& p) { p.limits = {.window = 4, .draft_capacity = 5}; }, "L = 4");
  refused([](auto& p) { p.limits.window = 65; }, "window 65");
  refused([](auto& p) { p.activation = DType::kF16; }, "f16 activations");
  refused(
      [](auto& p) {
        p.checkpoint = DType::kF16;
        p.copy.format = ReadCopyFormat::kNvfp4;
      },
      "f16 checkpoint with bf16 activations and read copy nvfp4");
  refused([](auto& p) { p.x_token_stride += 1; }, "x token stride");
  refused([](auto& p) { p.ring_b = nullptr; }, "ring_b is null");
  refused([](auto& p) { p.state = static_cast<char*>(p.state) + 4; }, "4 mod 16");
}

}  // namespace
}  // namespace replayssm::cuda
