// The C interface on a CUDA device: steps with rows on the host and on the device against the same
// steps on the CPU, states that travel, errors. Without a GPU every case is skipped.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "replayssm/replayssm.h"
#include "support/cuda_device.h"
#include "support/rng.h"

namespace replayssm::testing {
namespace {

using cuda::DeviceBytes;

constexpr int kHeads = 4;
constexpr int kHeadDim = 32;
constexpr int kState = 64;
constexpr int kX = kHeads * kHeadDim;
constexpr int kTokens = 3;

#define ASSERT_RSSM(call) ASSERT_EQ((call), RSSM_OK) << #call << ": " << rssm_last_error()

rssm_tensor tensor(void* data, std::vector<std::int64_t> shape) {
  rssm_tensor t{};
  t.data = data;
  t.rank = static_cast<std::int32_t>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    t.shape[i] = shape[i];
    t.strides[i] = stride;
    stride *= shape[i];
  }
  return t;
}

/// One layer's pool on one device, with its operands where its kernels can read them.
class Side {
 public:
  explicit Side(bool cuda) : cuda_(cuda) {
    rssm_context_init(&context_);
    context_.device_kind = cuda ? RSSM_DEVICE_CUDA : RSSM_DEVICE_CPU;
    const rssm_layer layer{kHeads, kHeadDim, kState, 1, 0, 0};
    rssm_pool_options options;
    rssm_pool_options_init(&options);
    options.layers = &layer;
    options.layer_count = 1;
    options.slots = 2;
    options.window = 6;
    options.draft_capacity = kTokens;
    options.device_kind = context_.device_kind;
    EXPECT_EQ(rssm_pool_create(&options, &pool_), RSSM_OK) << rssm_last_error();
    const std::vector<float> a(kHeads, -0.7f);
    EXPECT_EQ(rssm_pool_set_mamba2_a(pool_, 0, a.data(), kHeads), RSSM_OK) << rssm_last_error();
    for (const std::size_t count : {kX, kState, kState, kHeads, kX}) {
      host_.emplace_back(count * kTokens);
      device_.emplace_back(count * kTokens * sizeof(float));
    }
  }
  ~Side() { rssm_pool_destroy(pool_); }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  void draw(std::uint64_t seed) {
    Rng rng(seed);
    for (std::size_t i = 0; i < 4; ++i) {
      for (float& v : host_[i]) v = rng.normal();
      device_[i].upload(host_[i].data(), host_[i].size() * sizeof(float));
    }
  }
  void op(rssm_step* step) {
    const auto at = [&](std::size_t i) -> void* {
      return cuda_ ? device_[i].as<void>() : host_[i].data();
    };
    rssm_mamba2_args args;
    rssm_mamba2_args_init(&args);
    args.x = tensor(at(0), {kTokens, kHeads, kHeadDim});
    args.b = tensor(at(1), {kTokens, 1, kState});
    args.c = tensor(at(2), {kTokens, 1, kState});
    args.dt = tensor(at(3), {kTokens, kHeads});
    args.y = tensor(at(4), {kTokens, kHeads, kHeadDim});
    ASSERT_RSSM(rssm_mamba2_step(pool_, &context_, 0, step, &args));
  }
  /// A step of slot 0's row of all tokens.
  void step(rssm_row_kind kind, std::int64_t accepted) {
    const rssm_row row = make_row(kind);
    rssm_step* open = nullptr;
    ASSERT_RSSM(rssm_step_begin(pool_, &context_, &row, 1, &open));
    op(open);
    ASSERT_RSSM(rssm_step_commit(pool_, &context_, open, &accepted));
    rssm_step_destroy(open);
  }
  static rssm_row make_row(rssm_row_kind kind, std::int32_t slot = 0) {
    rssm_row row{};
    row.token_count = kTokens;
    row.slot = slot;
    row.kind = static_cast<std::uint8_t>(kind);
    return row;
  }
  std::vector<float> outputs() const {
    if (!cuda_) return host_[4];
    const std::vector<unsigned char> bytes = device_[4].download();
    std::vector<float> out(bytes.size() / sizeof(float));
    std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }

  rssm_pool* pool() const { return pool_; }
  const rssm_context* context() const { return &context_; }

 private:
  bool cuda_;
  rssm_context context_{};
  rssm_pool* pool_ = nullptr;
  std::vector<std::vector<float>> host_;  // x, B, C, dt, y
  std::vector<DeviceBytes> device_;
};

void expect_close(const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], 2e-5f * (1.0f + std::abs(want[i]))) << "element " << i;
  }
}

class CApiCuda : public cuda::OnCuda {};

TEST_F(CApiCuda, BothKindsOfStepsMatchTheCpu) {
  Side host(false);
  Side device(true);
  for (Side* side : {&host, &device}) {
    std::int32_t slot = -1;
    ASSERT_RSSM(rssm_pool_acquire(side->pool(), side->context(), &slot));
    ASSERT_EQ(slot, 0);
  }
  std::uint64_t seed = 0;
  for (const auto& [kind, accepted] : {std::pair{RSSM_ROW_COMMITTED, 3},
                                       {RSSM_ROW_TENTATIVE, 2},
                                       {RSSM_ROW_TENTATIVE, 3},
                                       {RSSM_ROW_TENTATIVE, 0}}) {
    ++seed;
    for (Side* side : {&host, &device}) {
      side->draw(seed);
      side->step(kind, accepted);
      if (HasFatalFailure()) return;
    }
    expect_close(device.outputs(), host.outputs());
  }

  // Rows and counts on the device; the second one names a slot that does not exist.
  rssm_row bad = Side::make_row(RSSM_ROW_TENTATIVE, 9);
  bad.token_begin = kTokens;
  bad.token_count = 0;
  const std::vector<rssm_row> all = {Side::make_row(RSSM_ROW_TENTATIVE), bad};
  DeviceBytes device_rows(all.size() * sizeof(rssm_row));
  device_rows.upload(all.data(), all.size() * sizeof(rssm_row));
  const std::vector<std::int64_t> counts = {1, 0};
  DeviceBytes device_counts(counts.size() * sizeof(std::int64_t));
  device_counts.upload(counts.data(), counts.size() * sizeof(std::int64_t));
  host.draw(++seed);
  host.step(RSSM_ROW_TENTATIVE, 1);
  device.draw(seed);
  rssm_step* open = nullptr;
  ASSERT_RSSM(rssm_step_begin_device(device.pool(), device.context(), device_rows.as<rssm_row>(), 2,
                                     kTokens, &open));
  device.op(open);
  ASSERT_RSSM(
      rssm_step_commit(device.pool(), device.context(), open, device_counts.as<std::int64_t>()));
  rssm_step_destroy(open);
  expect_close(device.outputs(), host.outputs());
  rssm_device_error error{};
  ASSERT_RSSM(rssm_pool_take_device_error(device.pool(), device.context(), &error));
  EXPECT_EQ(error.what, RSSM_DEVICE_BAD_SLOT);
  EXPECT_EQ(error.row, 1);
  EXPECT_EQ(error.found, 9);
  EXPECT_EQ(error.allowed, 1);

  rssm_cursor here{};
  rssm_cursor there{};
  ASSERT_RSSM(rssm_pool_cursor(host.pool(), host.context(), 0, &here));
  ASSERT_RSSM(rssm_pool_cursor(device.pool(), device.context(), 0, &there));
  EXPECT_EQ(there.position, here.position);
  EXPECT_EQ(there.checkpoint_position, here.checkpoint_position);

  // The device's state goes on on the CPU.
  rssm_image* image = nullptr;
  ASSERT_RSSM(rssm_pool_save(device.pool(), device.context(), 0, &image));
  ASSERT_RSSM(rssm_pool_load(host.pool(), host.context(), 0, rssm_image_data(image),
                             rssm_image_size(image)));
  rssm_image_destroy(image);
  for (Side* side : {&host, &device}) {
    side->draw(77);
    side->step(RSSM_ROW_COMMITTED, 3);
    if (HasFatalFailure()) return;
  }
  expect_close(device.outputs(), host.outputs());

  std::vector<char> text(512);
  ASSERT_RSSM(rssm_mamba2_explain(device.pool(), device.context(), 0, 1, text.data(), text.size(),
                                  nullptr));
  EXPECT_NE(std::string(text.data()).find("cuda:0"), std::string::npos) << text.data();
  EXPECT_EQ(rssm_pool_reset(device.pool(), host.context(), 0), RSSM_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace replayssm::testing
