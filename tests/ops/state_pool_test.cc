// Pools: what options are refused, sizing, slots.
#include "replayssm/state_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <limits>
#include <string>
#include <vector>

#include "ops/mamba2_cases.h"
#include "support/mamba2_harness.h"
#include "support/pool_access.h"
#include "support/virtual_memory.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define RSSM_TEST_SANITIZED 1
#endif

namespace replayssm::testing {
namespace {

StatePoolOptions small_options() {
  StatePoolOptions options;
  options.layers = {{Mamba2Shape{4, 8, 16, 2}, {96, 4}}};
  options.slots = 3;
  options.limits = {8, 4};
  return options;
}

TEST(StatePoolOptions, ImpossibleOnesAreRefusedNamingBothValues) {
  struct Case {
    std::string name;
    void (*edit)(StatePoolOptions&);
    StatusCode code;
    std::vector<std::string> parts;
  };
  const auto shape = [](StatePoolOptions& o) -> Mamba2Shape& {
    return std::get<Mamba2Shape>(o.layers[0].recurrence);
  };
  static const auto edit_shape = shape;
  constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
  const std::vector<Case> cases = {
      {"T > L", [](auto& o) { o.limits = {3, 4}; }, kInvalid, {"3", "4"}},
      {"T = 0", [](auto& o) { o.limits = {8, 0}; }, kInvalid, {"8", "0"}},
      {"T < 0", [](auto& o) { o.limits = {8, -1}; }, kInvalid, {"8", "-1"}},
      {"L = 0", [](auto& o) { o.limits = {0, 1}; }, kInvalid, {"0", "1"}},
      {"L < 0", [](auto& o) { o.limits = {-5, -5}; }, kInvalid, {"-5"}},
      {"L large", [](auto& o) { o.limits = {65, 4}; }, kInvalid, {"65", "64"}},
      {"T large", [](auto& o) { o.limits = {64, 17}; }, kInvalid, {"17", "16"}},
      {"no layers", [](auto& o) { o.layers.clear(); }, kInvalid, {"layers"}},
      {"heads 0", [](auto& o) { edit_shape(o).heads = 0; }, kInvalid, {"heads", "0"}},
      {"heads < 0", [](auto& o) { edit_shape(o).heads = -4; }, kInvalid, {"heads", "-4"}},
      {"groups", [](auto& o) { edit_shape(o).groups = 3; }, kInvalid, {"3", "4"}},
      {"groups 0", [](auto& o) { edit_shape(o).groups = 0; }, kInvalid, {"0", "4"}},
      {"groups > heads", [](auto& o) { edit_shape(o).groups = 8; }, kInvalid, {"8", "4"}},
      {"head_dim 12", [](auto& o) { edit_shape(o).head_dim = 12; }, kInvalid, {"12", "8"}},
      {"head_dim 0", [](auto& o) { edit_shape(o).head_dim = 0; }, kInvalid, {"0", "8"}},
      {"head_dim 264", [](auto& o) { edit_shape(o).head_dim = 264; }, kInvalid, {"264", "256"}},
      {"state 8", [](auto& o) { edit_shape(o).state_size = 8; }, kInvalid, {"8", "16"}},
      {"state 24", [](auto& o) { edit_shape(o).state_size = 24; }, kInvalid, {"24", "16"}},
      {"state 272", [](auto& o) { edit_shape(o).state_size = 272; }, kInvalid, {"272", "256"}},
      {"width 1", [](auto& o) { o.layers[0].conv.width = 1; }, kInvalid, {"1", "2"}},
      {"width 9", [](auto& o) { o.layers[0].conv.width = 9; }, kInvalid, {"9", "8"}},
      {"width < 0", [](auto& o) { o.layers[0].conv.width = -2; }, kInvalid, {"-2"}},
      {"width 0", [](auto& o) { o.layers[0].conv.width = 0; }, kInvalid, {"0"}},
      {"channels 0", [](auto& o) { o.layers[0].conv.channels = 0; }, kInvalid, {"0"}},
      {"second layer",
       [](auto& o) {
         o.layers.push_back(o.layers[0]);
         std::get<Mamba2Shape>(o.layers[1].recurrence).groups = 3;
       },
       kInvalid,
       {"1", "3", "4"}},
      {"checkpoint f64",
       [](auto& o) { o.checkpoint = DType::kF64; },
       StatusCode::kUnsupported,
       {"f64", "f32", "bf16", "f16"}},
      {"activation i32",
       [](auto& o) { o.activation = DType::kI32; },
       StatusCode::kUnsupported,
       {"i32", "f32", "bf16"}},
      {"alignment 0", [](auto& o) { o.page_alignment = 0; }, kInvalid, {"0", "64"}},
      {"alignment 32", [](auto& o) { o.page_alignment = 32; }, kInvalid, {"32", "64"}},
      {"alignment 100", [](auto& o) { o.page_alignment = 100; }, kInvalid, {"100", "64"}},
      {"no slots", [](auto& o) { o.slots = 0; }, kInvalid, {"0"}},
      {"slots < 0", [](auto& o) { o.slots = -1; }, kInvalid, {"-1"}},
      {"slots beyond 32 bits",
       [](auto& o) { o.slots = std::int64_t{1} << 32; },
       kInvalid,
       {"4294967296"}},
      {"slots at the end",
       [](auto& o) { o.slots = std::numeric_limits<std::int64_t>::max(); },
       kInvalid,
       {"9223372036854775807"}},
  };
  for (const Case& c : cases) {
    StatePoolOptions options = small_options();
    c.edit(options);
    const Result<StatePool> pool = StatePool::create(options);
    EXPECT_FALSE(pool.ok()) << c.name;
    if (pool.ok()) continue;
    EXPECT_EQ(pool.status().code(), c.code) << c.name << ": " << pool.status().message();
    for (const std::string& part : c.parts) {
      EXPECT_NE(pool.status().message().find(part), std::string::npos)
          << c.name << ": '" << pool.status().message() << "' does not contain '" << part << "'";
    }
    // Sizing refuses the same (it ignores slots).
    if (c.name.find("slots") == std::string::npos) {
      EXPECT_EQ(StatePool::bytes_per_slot(options).status().message(), pool.status().message());
      EXPECT_FALSE(StatePool::slots_for_budget(options, 1 << 20).ok());
    }
  }
}

// Where there is no GPU, or no kernels for one, creation says so. Sizes need kernels only.
TEST(StatePoolOptions, ADeviceThatIsNotThereIsRefused) {
  StatePoolOptions options = small_options();
  options.device = {DeviceKind::kCuda, 0};
  const Result<int> devices = device_count(DeviceKind::kCuda);
  if (devices.ok()) GTEST_SKIP() << "there is a CUDA device";
  EXPECT_TRUE(refused(devices, StatusCode::kUnsupported, {"cuda", "cpu"}));
  EXPECT_TRUE(
      refused(device_properties(options.device), StatusCode::kUnsupported, {"cuda", "cpu"}));
  const Result<StatePool> pool = StatePool::create(options);
  EXPECT_TRUE(refused(pool, StatusCode::kUnsupported, {"cuda", "cpu"}));
  const Result<SlotBytes> bytes = StatePool::bytes_per_slot(options);
  if (!bytes.ok()) {
    EXPECT_EQ(bytes.status().message(), pool.status().message());
  }
}

// A CPU pool takes no CudaContext, whatever the build.
TEST(StatePoolOptions, CudaCallsOnACpuPoolAreRefused) {
  Result<StatePool> pool = StatePool::create(small_options());
  ASSERT_TRUE(is_ok(pool));
  ASSERT_TRUE(is_ok(pool->reset(0)));
  const CudaContext context(3, nullptr);
  const auto wrong = [](const Status& status) {
    return refused(status, StatusCode::kInvalidArgument, {"cuda:3", "cpu"});
  };
  EXPECT_TRUE(wrong(pool->acquire(context).status()));
  EXPECT_TRUE(wrong(pool->reset(context, 0)));
  EXPECT_TRUE(wrong(pool->release(context, 0)));
  EXPECT_TRUE(wrong(pool->force_flush(context, 0)));
  EXPECT_TRUE(wrong(pool->cursor(context, 0).status()));
  EXPECT_TRUE(wrong(pool->copy(context, 0, 1)));
  EXPECT_TRUE(wrong(pool->materialize(context, 0, 0, 1)));
  EXPECT_TRUE(wrong(pool->truncate(context, 0, 0)));
  EXPECT_TRUE(wrong(pool->save(context, 0).status()));
  EXPECT_TRUE(wrong(pool->load(context, 0, {})));
  EXPECT_TRUE(wrong(pool->begin_step(context, DeviceRows{}).status()));
  EXPECT_TRUE(wrong(pool->take_device_error(context).status()));
  const std::vector<StepRow> rows = {{0, RowKind::kTentative, 0, 1, {}}};
  EXPECT_TRUE(wrong(pool->begin_step(context, std::span<const StepRow>(rows)).status()));
  Result<Step> step = pool->begin_step(rows);
  ASSERT_TRUE(is_ok(step));
  EXPECT_TRUE(wrong(causal_conv1d_step(context, *pool, 0, *step, {})));
  EXPECT_TRUE(wrong(mamba2_step(context, *pool, 0, *step, {}, {})));
  EXPECT_TRUE(wrong(mamba2_explain(context, *pool, 0, 1).status()));
  const std::vector<std::int64_t> accepted = {1};
  EXPECT_TRUE(wrong(pool->commit(context, *step, std::span<const std::int64_t>(accepted))));
  EXPECT_TRUE(wrong(pool->commit(context, *step, accepted.data())));
  EXPECT_TRUE(wrong(pool->abort(context, *step)));
  EXPECT_TRUE(is_ok(pool->abort(*step)));
  EXPECT_EQ(pool->cursor(0).value(), Cursor{});
}

// Every error word has a message that names row and values.
TEST(DeviceErrors, AreTextWithBothValues) {
  EXPECT_TRUE(is_ok(to_status(DeviceError{})));
  const auto text = [](DeviceError::What what, std::int64_t found, std::int64_t allowed) {
    return to_status(DeviceError{.what = what, .row = 7, .found = found, .allowed = allowed});
  };
  for (const auto what : {DeviceError::kSlot, DeviceError::kTokenRange, DeviceError::kTokenCount,
                          DeviceError::kAccepted, DeviceError::kDuplicate}) {
    EXPECT_TRUE(refused(text(what, 41, 52), StatusCode::kInvalidArgument, {"row 7", "41", "52"}));
  }
  EXPECT_TRUE(refused(text(DeviceError::kCursor, 41, 52), StatusCode::kFailedPrecondition,
                      {"row 7", "41", "52"}));
  EXPECT_TRUE(refused(text(DeviceError::kCondition, 2, 1), StatusCode::kFailedPrecondition,
                      {"row 7", "inside a step", "ready"}));
}

TEST(StatePoolOptions, SupportedExtremesWork) {
  for (const Mamba2Shape& shape :
       {Mamba2Shape{1, 8, 16, 1}, Mamba2Shape{2, 256, 256, 2}, Mamba2Shape{5, 40, 112, 5}}) {
    for (const ReplayLimits limits : {ReplayLimits{1, 1}, ReplayLimits{64, 16}}) {
      StatePoolOptions options = small_options();
      options.layers = {{shape, {}}, {shape, {1, 2}}, {shape, {3, 8}}};
      options.limits = limits;
      EXPECT_TRUE(is_ok(StatePool::create(options)));
    }
  }
}

// More than memory can hold is a status, not an exception. (Where the system lends any address
// space the pool may also come to be; it is then not touched.)
TEST(StatePoolOptions, ExhaustedMemoryIsAStatus) {
#if defined(RSSM_TEST_SANITIZED)
  GTEST_SKIP() << "sanitizers reserve address space of their own";
#else
  StatePoolOptions options = small_options();
  options.slots = std::numeric_limits<std::int32_t>::max();
  options.layers.assign(64, options.layers[0]);
  const std::size_t bytes = StatePool::bytes_per_slot(options).value().total;
  ASSERT_GT(bytes, std::size_t{64} * 1024);
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &old), 0);
  rlimit tight = old;
  tight.rlim_cur = std::size_t{4} << 30;
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &tight), 0);
  const Result<StatePool> own = StatePool::create(options);
  // With memory of the caller's (never touched) only the pool's own bookkeeping is left to fail.
  options.layers.resize(1);
  const std::size_t needed =
      StatePool::bytes_per_slot(options).value().total * static_cast<std::size_t>(options.slots);
  alignas(64) static std::byte somewhere[64];
  options.storage = {somewhere, needed};
  const Result<StatePool> bookkeeping = StatePool::create(options);
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &old), 0);
  EXPECT_TRUE(refused(own, StatusCode::kResourceExhausted, {"2147483647"}));
  EXPECT_TRUE(refused(bookkeeping, StatusCode::kResourceExhausted, {"2147483647"}));
#endif
}

TEST(StatePoolOptions, StorageMustFitExactly) {
  StatePoolOptions options = small_options();
  const std::size_t needed = StatePool::bytes_per_slot(options).value().total * 3;
  AlignedBytes memory(needed + 64);
  options.storage = memory.span().first(needed - 1);
  EXPECT_TRUE(refused(StatePool::create(options), StatusCode::kInvalidArgument,
                      {std::to_string(needed - 1), std::to_string(needed)}));
  options.storage = memory.span().subspan(4, needed);
  EXPECT_TRUE(refused(StatePool::create(options), StatusCode::kInvalidArgument, {"4", "64"}));
  options.storage = memory.span().first(needed);
  EXPECT_TRUE(is_ok(StatePool::create(options)));
  options.storage = memory.span();
  EXPECT_TRUE(is_ok(StatePool::create(options)));
}

// C36, C90: sizes follow from shapes, types and limits alone, with the drafts' room included.
TEST(StatePoolSizing, C36_C90_SizesAreExact) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const bool rewindable : {false, true}) {
      std::size_t previous = 0;
      for (int draft = 0; draft <= 5; ++draft) {
        StatePoolOptions options = small_options();
        options.limits = {8, draft};
        options.checkpoint = options.activation = type;
        options.rewindable = rewindable;
        options.layers.push_back({Mamba2Shape{3, 24, 48, 1}, {}});
        const Result<SlotBytes> bytes = StatePool::bytes_per_slot(options);
        if (draft == 0) {
          EXPECT_TRUE(refused(bytes, StatusCode::kInvalidArgument, {"8", "0"}));
          continue;
        }
        ASSERT_TRUE(is_ok(bytes));
        const std::size_t element = size_of(type);
        const auto places = static_cast<std::size_t>(8 + draft);
        // Beside an f32 state a number for every eight of a head's rows.
        const std::size_t decays = type == DType::kF32 ? 4 + 3 * 3 : 0;
        EXPECT_EQ(bytes->checkpoint, (4 * 8 * 16 + 3 * 24 * 48) * element + 4 * decays);
        EXPECT_EQ(bytes->record_ring,
                  places * ((4 * 8 + 2 * 16) * element + 4 * 4 + (3 * 24 + 48) * element + 3 * 4));
        const auto conv_places = static_cast<std::size_t>(3 + draft + (rewindable ? 8 : 0));
        EXPECT_EQ(bytes->conv_ring, conv_places * 96 * element);
        const std::size_t contents = bytes->checkpoint + bytes->record_ring + bytes->conv_ring;
        EXPECT_GE(bytes->total, contents);
        EXPECT_LT(bytes->total, contents + 9 * 64);
        EXPECT_EQ(bytes->total % 64, 0u);
        EXPECT_GT(bytes->total, previous);
        previous = bytes->total;

        // The pool takes exactly that much.
        options.slots = 7;
        AlignedBytes memory(bytes->total * 7);
        options.storage = memory.span();
        const Result<StatePool> pool = StatePool::create(options);
        ASSERT_TRUE(is_ok(pool));
        std::size_t measured = 0;
        for (int layer = 0; layer < pool->layer_count(); ++layer) {
          measured += pool->impl().stride[static_cast<std::size_t>(layer)];
        }
        EXPECT_EQ(measured, bytes->total);
        for (const std::size_t slots : {0, 1, 2, 600, 1024}) {
          EXPECT_EQ(StatePool::slots_for_budget(options, bytes->total * slots).value(),
                    static_cast<std::int64_t>(slots));
          EXPECT_EQ(StatePool::slots_for_budget(options, bytes->total * slots + 1).value(),
                    static_cast<std::int64_t>(slots));
          EXPECT_EQ(
              StatePool::slots_for_budget(options, bytes->total * slots + bytes->total - 1).value(),
              static_cast<std::int64_t>(slots));
        }
      }
    }
  }
  EXPECT_GT(
      StatePool::slots_for_budget(small_options(), std::numeric_limits<std::size_t>::max()).value(),
      1'000'000);
}

// A read copy is codes, nvfp4 block scales, and fp32 scales of rows or tiles of 16; nothing else
// changes.
TEST(StatePoolSizing, ReadCopiesAreExact) {
  StatePoolOptions options = small_options();
  // (heads, rows, width): the small layer's, then (3, 24, 48), (2, 40, 24) and (4, 8, 8).
  options.layers.push_back({Mamba2Shape{3, 24, 48, 1}, {}});
  options.layers.push_back({GatedDeltaNetShape{1, 2, 24, 40}, {}});
  options.layers.push_back({KimiDeltaAttentionShape{4, 8, 8}, {}});
  const SlotBytes plain = StatePool::bytes_per_slot(options).value();
  EXPECT_EQ(plain.read_copy, 0u);
  const auto with = [&](ReadCopyFormat format) {
    for (LayerSpec& layer : options.layers) layer.read_copy = format;
    return StatePool::bytes_per_slot(options).value();
  };
  const std::size_t elements = 4 * 8 * 16 + 3 * 24 * 48 + 2 * 40 * 24 + 4 * 8 * 8;
  const std::size_t rows = 4 * 8 + 3 * 24 + 2 * 40 + 4 * 8;
  const std::size_t blocks = 4 * 8 * 1 + 3 * 24 * 3 + 2 * 40 * 2 + 4 * 8 * 1;
  const std::size_t tiles = 4 * 1 + 3 * 2 + 2 * 3 + 4 * 1;
  EXPECT_EQ(with(ReadCopyFormat::kInt8).read_copy, elements + 4 * rows);
  EXPECT_EQ(with(ReadCopyFormat::kFp8E4M3).read_copy, elements + 4 * rows);
  const SlotBytes nvfp4 = with(ReadCopyFormat::kNvfp4);
  EXPECT_EQ(nvfp4.read_copy, elements / 2 + blocks + 4 * tiles);
  EXPECT_EQ(nvfp4.checkpoint, plain.checkpoint);
  EXPECT_EQ(nvfp4.record_ring, plain.record_ring);
  EXPECT_EQ(nvfp4.conv_ring, plain.conv_ring);
  EXPECT_GE(nvfp4.total, plain.total + nvfp4.read_copy);
  EXPECT_LE(nvfp4.total, plain.total + nvfp4.read_copy + 4 * 4 * 64);
}

// Planes follow the checkpoint in the page, each at a multiple of 64 bytes, heads one after
// another.
TEST(StatePoolLayout, ReadCopyFollowsTheCheckpoint) {
  StatePoolOptions options = small_options();
  options.layers = {LayerSpec{Mamba2Shape{3, 24, 48, 1}, {}, ReadCopyFormat::kNvfp4}};
  Result<StatePool> pool = StatePool::create(options);
  ASSERT_TRUE(is_ok(pool));
  StatePool::Impl& impl = pool->impl();
  const std::size_t codes_at = 3 * 24 * 48 * 4;
  const std::size_t blocks_at = codes_at + (3 * 24 * 24 + 63) / 64 * 64;
  const std::size_t scales_at = blocks_at + (3 * 24 * 3 + 63) / 64 * 64;
  for (const std::int32_t slot : {0, 2}) {
    const ReadCopy copy = impl.read_copy(0, slot);
    ASSERT_TRUE(copy.exists());
    std::byte* page = impl.page(0, slot);
    EXPECT_EQ(reinterpret_cast<std::byte*>(copy.codes), page + codes_at);
    EXPECT_EQ(reinterpret_cast<std::byte*>(copy.block_scales), page + blocks_at);
    EXPECT_EQ(reinterpret_cast<std::byte*>(copy.scales), page + scales_at);
  }
  EXPECT_EQ(impl.layout(0).read_copy.head_scales(), 2);
  options.layers[0].read_copy = ReadCopyFormat::kNone;
  Result<StatePool> plain = StatePool::create(options);
  ASSERT_TRUE(is_ok(plain));
  EXPECT_FALSE(plain->impl().read_copy(0, 0).exists());
}

TEST(StatePoolSizing, AlignmentCountsTowardsTheTotal) {
  StatePoolOptions options = small_options();
  const SlotBytes tight = StatePool::bytes_per_slot(options).value();
  options.page_alignment = 1 << 16;
  const SlotBytes padded = StatePool::bytes_per_slot(options).value();
  EXPECT_EQ(padded.checkpoint, tight.checkpoint);
  EXPECT_EQ(padded.record_ring, tight.record_ring);
  EXPECT_EQ(padded.conv_ring, tight.conv_ring);
  EXPECT_EQ(padded.total, std::size_t{1} << 16);
}

// C44, C90, C91: slots are handed out up to exactly the capacity, lowest first.
TEST(StatePoolSlots, C44_AcquireUpToTheCapacity) {
  Result<StatePool> pool = StatePool::create(small_options());
  ASSERT_TRUE(is_ok(pool));
  EXPECT_EQ(pool->free_slots(), 3);
  for (std::int32_t slot = 0; slot < 3; ++slot) {
    EXPECT_EQ(pool->acquire().value(), slot);
    EXPECT_EQ(pool->cursor(slot).value(), Cursor{});
  }
  EXPECT_EQ(pool->free_slots(), 0);
  EXPECT_TRUE(refused(pool->acquire(), StatusCode::kResourceExhausted, {"3"}));
  EXPECT_TRUE(is_ok(pool->release(1)));
  EXPECT_EQ(pool->free_slots(), 1);
  EXPECT_EQ(pool->acquire().value(), 1);
  // reset takes a slot too.
  EXPECT_TRUE(is_ok(pool->release(0)));
  EXPECT_TRUE(is_ok(pool->release(2)));
  EXPECT_TRUE(is_ok(pool->reset(2)));
  EXPECT_EQ(pool->free_slots(), 1);
  EXPECT_EQ(pool->acquire().value(), 0);
}

TEST(StatePoolSlots, CallsOnFreeOrAbsentSlotsAreRefused) {
  Mamba2Case c = small_case("slots", 8, 4);
  const Mamba2Model model(c);
  StatePool pool = model.make_pool(3);
  ASSERT_TRUE(is_ok(pool.reset(1)));
  const std::vector<std::byte> image = pool.save(1).value();
  const std::vector<std::byte> memory = pool_bytes(pool);
  for (const std::int32_t slot : {-1, 3, 100, std::numeric_limits<std::int32_t>::max(),
                                  std::numeric_limits<std::int32_t>::min()}) {
    const auto bad = [&](const Status& status) {
      return refused(status, StatusCode::kInvalidArgument, {std::to_string(slot), "2"});
    };
    EXPECT_TRUE(bad(pool.reset(slot)));
    EXPECT_TRUE(bad(pool.release(slot)));
    EXPECT_TRUE(bad(pool.cursor(slot).status()));
    EXPECT_TRUE(bad(pool.force_flush(slot)));
    EXPECT_TRUE(bad(pool.copy(slot, 1)));
    EXPECT_TRUE(bad(pool.copy(1, slot)));
    EXPECT_TRUE(bad(pool.materialize({}, slot, 0, 1)));
    EXPECT_TRUE(bad(pool.materialize({}, 1, 0, slot)));
    EXPECT_TRUE(bad(pool.truncate(slot, 0)));
    EXPECT_TRUE(bad(pool.save(slot).status()));
    EXPECT_TRUE(bad(pool.load({}, slot, image)));
    if (slot >= 0) {
      const std::vector<StepRow> rows = {{slot, RowKind::kTentative, 0, 1, {}}};
      EXPECT_TRUE(bad(pool.begin_step(rows).status()));
    }
  }
  const auto free = [](const Status& status) {
    return refused(status, StatusCode::kFailedPrecondition, {"0", "free"});
  };
  EXPECT_TRUE(free(pool.release(0)));
  EXPECT_TRUE(free(pool.cursor(0).status()));
  EXPECT_TRUE(free(pool.force_flush(0)));
  EXPECT_TRUE(free(pool.copy(0, 1)));
  EXPECT_TRUE(free(pool.materialize({}, 0, 0, 1)));
  EXPECT_TRUE(free(pool.truncate(0, 0)));
  EXPECT_TRUE(free(pool.save(0).status()));
  const std::vector<StepRow> rows = {{0, RowKind::kTentative, 0, 1, {}}};
  EXPECT_TRUE(free(pool.begin_step(rows).status()));
  EXPECT_TRUE(refused(pool.copy(1, 1), StatusCode::kInvalidArgument, {"1"}));
  EXPECT_TRUE(same_bytes(pool_bytes(pool), memory));
  EXPECT_EQ(pool.cursor(1).value(), Cursor{});
}

// C46: a thousand steps begun and aborted leak no slot and change no cursor.
TEST(StatePoolSlots, C46_AbortsLeakNothing) {
  const Mamba2Model model(small_case("aborts", 8, 4));
  StatePool pool = model.make_pool(4);
  Mamba2Runner runner(model, pool, {});
  ASSERT_EQ(pool.acquire().value(), 0);
  ASSERT_EQ(pool.acquire().value(), 1);
  runner.step({committed(0, names(1, 0, 5)), tentative(1, names(2, 0, 3), 2)});
  const Cursor cursors[] = {pool.cursor(0).value(), pool.cursor(1).value()};
  for (int i = 0; i < 1000; ++i) {
    const std::vector<RowSpec> rows = {committed(0, names(1, 5, 1)),
                                       tentative(1, names(2, 2, 2), 0)};
    Result<Step> step = pool.begin_step(step_rows(rows));
    ASSERT_TRUE(is_ok(step));
    ASSERT_TRUE(is_ok(pool.abort(*step)));
  }
  EXPECT_EQ(pool.free_slots(), 2);
  EXPECT_EQ(pool.cursor(0).value(), cursors[0]);
  EXPECT_EQ(pool.cursor(1).value(), cursors[1]);
}

// Pools move; steps begun before stay valid.
TEST(StatePoolSlots, MovedPoolKeepsItsSlotsAndSteps) {
  const Mamba2Model model(small_case("moved", 8, 4));
  StatePool first = model.make_pool(2);
  ASSERT_TRUE(is_ok(first.reset(0)));
  const std::vector<RowSpec> rows = {tentative(0, names(1, 0, 2), 1)};
  Result<Step> step = first.begin_step(step_rows(rows));
  ASSERT_TRUE(is_ok(step));
  StatePool second = std::move(first);
  Mamba2Runner runner(model, second, {});
  StepOutput output(1);
  Step moved = std::move(step).value();
  runner.layer(0, moved, rows, output);
  EXPECT_TRUE(is_ok(runner.commit(moved, rows)));
  EXPECT_EQ(second.cursor(0).value().position, 1);
}

// C15: every window and draft capacity up to 8 runs 200 random rounds right, or is refused.
TEST(StatePoolLimits, C15_EveryWindowAndDraftCapacity) {
  for (int window = 1; window <= 8; ++window) {
    for (int draft = 1; draft <= 8; ++draft) {
      Mamba2Case c = small_case("limits", window, draft, 1);
      c.shape.heads = 1;
      c.conv_width = 3;
      if (draft > window) {
        EXPECT_TRUE(refused(StatePool::create(c.options(1)), StatusCode::kInvalidArgument,
                            {std::to_string(window), std::to_string(draft)}));
        continue;
      }
      const Mamba2Model model(c);
      StatePool pool = model.make_pool(1);
      Mamba2Runner runner(model, pool, {nullptr, supported_isas().back()});
      SequenceOracle oracle(model);
      ASSERT_TRUE(is_ok(pool.reset(0)));
      Rng rng(static_cast<std::uint64_t>(window * 10 + draft));
      TokenId token = 0;
      for (int round = 0; round < 200; ++round) {
        std::vector<TokenId> tokens(static_cast<std::size_t>(rng.between(1, draft)));
        for (TokenId& t : tokens) t = ++token;
        const std::int64_t accepted = rng.between(0, static_cast<std::int64_t>(tokens.size()));
        const StepOutput output = runner.step({tentative(0, tokens, accepted)});
        expect_close(output[0], oracle.run(tokens, static_cast<std::size_t>(accepted)), c,
                     "L " + std::to_string(window) + ", T " + std::to_string(draft) + ", round " +
                         std::to_string(round));
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
