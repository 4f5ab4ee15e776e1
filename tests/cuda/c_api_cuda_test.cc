// The C interface on a CUDA device: every family's steps with rows on the host and on the device
// against the same steps on the CPU, states that travel, errors. Without a GPU every case is
// skipped.
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

/// A family's layer and how its op is called.
struct Family {
  const char* name;
  void (*describe)(rssm_layer& layer);
  std::size_t parameters;                         // of the operands, those that steps share
  std::vector<std::vector<std::int64_t>> shapes;  // of the operands; the last one is written
  rssm_status (*step)(rssm_pool* pool, const rssm_context* context, rssm_step* step,
                      const std::vector<rssm_tensor>& operands);
  decltype(&rssm_mamba2_explain) explain;
};

Family mamba2() {
  constexpr int kHeadDim = 32;
  constexpr int kState = 64;
  return {.name = "mamba2",
          .describe =
              [](rssm_layer& layer) {
                layer.family = RSSM_FAMILY_MAMBA2;
                layer.shape.mamba2 = {
                    .heads = kHeads, .head_dim = kHeadDim, .state_size = kState, .groups = 1};
              },
          .parameters = 0,
          .shapes = {{kTokens, kHeads, kHeadDim},
                     {kTokens, 1, kState},
                     {kTokens, 1, kState},
                     {kTokens, kHeads},
                     {kTokens, kHeads, kHeadDim}},
          .step =
              [](rssm_pool* pool, const rssm_context* context, rssm_step* step,
                 const std::vector<rssm_tensor>& operands) {
                rssm_mamba2_args args;
                const rssm_status status = rssm_mamba2_args_init(&args, sizeof args);
                if (status != RSSM_OK) return status;
                args.x = operands[0];
                args.b = operands[1];
                args.c = operands[2];
                args.dt = operands[3];
                args.y = operands[4];
                return rssm_mamba2_step(pool, context, 0, step, &args);
              },
          .explain = rssm_mamba2_explain};
}

/// The families of the delta rule name their operands alike.
template <typename Args>
void set_delta_rule(Args& args, const std::vector<rssm_tensor>& operands) {
  args.a_log = operands[0];
  args.dt_bias = operands[1];
  args.q = operands[2];
  args.k = operands[3];
  args.v = operands[4];
  args.a = operands[5];
  args.b = operands[6];
  args.o = operands[7];
}

constexpr int kKeyDim = 64;
constexpr int kValueDim = 32;

Family gated_delta_net() {
  constexpr int kKeyHeads = 2;
  return {.name = "gated_delta_net",
          .describe =
              [](rssm_layer& layer) {
                layer.family = RSSM_FAMILY_GATED_DELTA_NET;
                layer.shape.gated_delta_net = {.key_heads = kKeyHeads,
                                               .value_heads = kHeads,
                                               .key_dim = kKeyDim,
                                               .value_dim = kValueDim};
              },
          .parameters = 2,
          .shapes = {{kHeads},
                     {kHeads},
                     {kTokens, kKeyHeads, kKeyDim},
                     {kTokens, kKeyHeads, kKeyDim},
                     {kTokens, kHeads, kValueDim},
                     {kTokens, kHeads},
                     {kTokens, kHeads},
                     {kTokens, kHeads, kValueDim}},
          .step =
              [](rssm_pool* pool, const rssm_context* context, rssm_step* step,
                 const std::vector<rssm_tensor>& operands) {
                rssm_gated_delta_net_args args;
                const rssm_status status = rssm_gated_delta_net_args_init(&args, sizeof args);
                if (status != RSSM_OK) return status;
                set_delta_rule(args, operands);
                return rssm_gated_delta_net_step(pool, context, 0, step, &args);
              },
          .explain = rssm_gated_delta_net_explain};
}

Family kimi_delta_attention() {
  return {.name = "kimi_delta_attention",
          .describe =
              [](rssm_layer& layer) {
                layer.family = RSSM_FAMILY_KIMI_DELTA_ATTENTION;
                layer.shape.kimi_delta_attention = {
                    .heads = kHeads, .key_dim = kKeyDim, .value_dim = kValueDim};
              },
          .parameters = 2,
          .shapes = {{kHeads},
                     {kHeads, kKeyDim},
                     {kTokens, kHeads, kKeyDim},
                     {kTokens, kHeads, kKeyDim},
                     {kTokens, kHeads, kValueDim},
                     {kTokens, kHeads, kKeyDim},
                     {kTokens, kHeads},
                     {kTokens, kHeads, kValueDim}},
          .step =
              [](rssm_pool* pool, const rssm_context* context, rssm_step* step,
                 const std::vector<rssm_tensor>& operands) {
                rssm_kimi_delta_attention_args args;
                const rssm_status status = rssm_kimi_delta_attention_args_init(&args, sizeof args);
                if (status != RSSM_OK) return status;
                set_delta_rule(args, operands);
                args.lower_bound = -5.0f;
                return rssm_kimi_delta_attention_step(pool, context, 0, step, &args);
              },
          .explain = rssm_kimi_delta_attention_explain};
}

/// One layer's pool on one device, with its operands where its kernels can read them.
class Side {
 public:
  Side(Family family, bool cuda) : family_(std::move(family)), cuda_(cuda) {
    EXPECT_EQ(rssm_context_init(&context_, sizeof context_), RSSM_OK);
    context_.device_kind = cuda ? RSSM_DEVICE_CUDA : RSSM_DEVICE_CPU;
    rssm_layer layer;
    EXPECT_EQ(rssm_layer_init(&layer, sizeof layer), RSSM_OK);
    family_.describe(layer);
    rssm_pool_options options;
    EXPECT_EQ(rssm_pool_options_init(&options, sizeof options), RSSM_OK);
    options.layers = &layer;
    options.layer_count = 1;
    options.slots = 2;
    options.window = 6;
    options.draft_capacity = kTokens;
    options.device_kind = context_.device_kind;
    EXPECT_EQ(rssm_pool_create(&options, &pool_), RSSM_OK) << rssm_last_error();
    if (layer.family == RSSM_FAMILY_MAMBA2) {
      const std::vector<float> a(kHeads, -0.7f);
      EXPECT_EQ(rssm_pool_set_mamba2_a(pool_, 0, a.data(), kHeads), RSSM_OK) << rssm_last_error();
    }
    for (const auto& shape : family_.shapes) {
      std::size_t count = 1;
      for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
      host_.emplace_back(count);
      if (cuda) device_.emplace_back(count * sizeof(float));
      operands_.push_back(tensor(cuda ? device_.back().as<void>() : host_.back().data(), shape));
    }
    draw(0, 0, family_.parameters);
  }
  ~Side() { rssm_pool_destroy(pool_); }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  /// New inputs.
  void draw(std::uint64_t seed) { draw(seed, family_.parameters, host_.size() - 1); }
  void op(rssm_step* step) { ASSERT_RSSM(family_.step(pool_, &context_, step, operands_)); }
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
    if (!cuda_) return host_.back();
    const std::vector<unsigned char> bytes = device_.back().download();
    std::vector<float> out(bytes.size() / sizeof(float));
    std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }

  rssm_pool* pool() const { return pool_; }
  const rssm_context* context() const { return &context_; }

 private:
  void draw(std::uint64_t seed, std::size_t begin, std::size_t end) {
    Rng rng(seed);
    for (std::size_t i = begin; i < end; ++i) {
      for (float& v : host_[i]) v = rng.normal();
      if (cuda_) device_[i].upload(host_[i].data(), host_[i].size() * sizeof(float));
    }
  }

  Family family_;
  bool cuda_;
  rssm_context context_{};
  rssm_pool* pool_ = nullptr;
  std::vector<std::vector<float>> host_;
  std::vector<DeviceBytes> device_;
  std::vector<rssm_tensor> operands_;
};

void expect_close(const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], 5e-5f * (1.0f + std::abs(want[i]))) << "element " << i;
  }
}

class CApiCuda : public cuda::OnCuda, public ::testing::WithParamInterface<Family (*)()> {};
INSTANTIATE_TEST_SUITE_P(Families, CApiCuda,
                         ::testing::Values(mamba2, gated_delta_net, kimi_delta_attention),
                         [](const auto& test) { return std::string(test.param().name); });

TEST_P(CApiCuda, BothKindsOfStepsMatchTheCpu) {
  const Family family = GetParam()();
  Side host(family, false);
  Side device(family, true);
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
  ASSERT_RSSM(
      family.explain(device.pool(), device.context(), 0, 1, text.data(), text.size(), nullptr));
  EXPECT_EQ(std::string(text.data()).find(family.name), 0u) << text.data();
  EXPECT_NE(std::string(text.data()).find("cuda:0"), std::string::npos) << text.data();
  EXPECT_EQ(rssm_pool_reset(device.pool(), host.context(), 0), RSSM_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace replayssm::testing
