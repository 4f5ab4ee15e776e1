/* What the C interface refuses, and how it says so. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#include "check.h"
#include "operands.h"

static rssm_layer good_layer(void) {
  rssm_layer layer;
  CHECK_OK(rssm_layer_init(&layer, sizeof layer));
  layer.family = RSSM_FAMILY_MAMBA2;
  layer.shape.mamba2 =
      (rssm_mamba2_shape){.heads = 2, .head_dim = 16, .state_size = 64, .groups = 1};
  return layer;
}

static rssm_pool_options good_options(void) {
  static rssm_layer layer;
  layer = good_layer();
  rssm_pool_options options = one_layer_options(&layer);
  options.slots = 2;
  return options;
}

/* A struct of another size than the library's is refused, and not written. */
#define CHECK_INIT(type, what)                                                                  \
  do {                                                                                          \
    type value_;                                                                                \
    type before_;                                                                               \
    memset(&value_, 0x5a, sizeof value_);                                                       \
    memcpy(&before_, &value_, sizeof value_);                                                   \
    char size_[32];                                                                             \
    snprintf(size_, sizeof size_, "%zu", sizeof value_);                                        \
    CHECK_REFUSED(type##_init(&value_, 4), RSSM_INVALID_ARGUMENT, what " has struct_size 4",    \
                  size_);                                                                       \
    CHECK_REFUSED(type##_init(&value_, sizeof value_ + 8), RSSM_INVALID_ARGUMENT, what, size_); \
    CHECK(memcmp(&value_, &before_, sizeof value_) == 0);                                       \
    CHECK_REFUSED(type##_init(NULL, sizeof value_), RSSM_INVALID_ARGUMENT, what, "NULL");       \
    CHECK_OK(type##_init(&value_, sizeof value_));                                              \
    CHECK(value_.struct_size == sizeof value_);                                                 \
  } while (0)

static void struct_sizes_are_checked(void) {
  CHECK_INIT(rssm_context, "context");
  CHECK_INIT(rssm_layer, "layer");
  CHECK_INIT(rssm_pool_options, "options");
  CHECK_INIT(rssm_mamba2_args, "args");
  CHECK_INIT(rssm_gated_delta_net_args, "args");
  CHECK_INIT(rssm_kimi_delta_attention_args, "args");
  CHECK_INIT(rssm_causal_conv1d_args, "args");
}

static void options_are_checked(void) {
  rssm_pool* pool = NULL;
  rssm_pool_options options = good_options();
  CHECK_REFUSED(rssm_pool_create(NULL, &pool), RSSM_INVALID_ARGUMENT, "options", "NULL");
  CHECK_REFUSED(rssm_pool_create(&options, NULL), RSSM_INVALID_ARGUMENT, "pool", "NULL");
  options.struct_size = 8;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "struct_size", "8");
  options = good_options();
  options.window = 2;
  options.draft_capacity = 4;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "2", "4");
  options = good_options();
  options.layers = NULL;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "layers", "NULL");
  options = good_options();
  options.layers = NULL;
  options.layer_count = -1;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "layers", "-1");
  options = good_options();
  options.checkpoint = 77;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "checkpoint", "77");
  options = good_options();
  options.activation = -1;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "activation", "-1");
  options = good_options();
  options.flush = RSSM_FLUSH_OF_POOL;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "flush is -1", "exact");
  options = good_options();
  options.device_kind = 9;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "device", "9");
  options = good_options();
  char storage[64];
  options.storage = storage;
  options.storage_bytes = sizeof storage;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "storage", "64");
  options = good_options();
  rssm_decode_plan plan;
  memset(&plan, 0x5a, sizeof plan);
  const rssm_decode_plan untouched = plan;
  CHECK_REFUSED(rssm_choose_decode(NULL, &options, 0, &plan), RSSM_INVALID_ARGUMENT,
                "sequences is 0", "at least 1");
  CHECK_REFUSED(rssm_choose_decode(NULL, &options, 1, NULL), RSSM_INVALID_ARGUMENT, "plan", "NULL");
  options.window = 99;
  CHECK_REFUSED(rssm_choose_decode(NULL, &options, 1, &plan), RSSM_INVALID_ARGUMENT, "99", "64");
  CHECK(memcmp(&plan, &untouched, sizeof plan) == 0);
  options = good_options();
  options.slots = INT64_MAX;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "slots",
                "9223372036854775807");
  CHECK(pool == NULL);
}

static void layers_are_checked(void) {
  rssm_pool* pool = NULL;
  rssm_layer layers[2] = {good_layer(), good_layer()};
  rssm_layer* layer = &layers[1];
  rssm_pool_options options = good_options();
  options.layers = layers;
  options.layer_count = 2;
  layer->struct_size = 40;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "layer 1",
                "struct_size 40");
  *layer = good_layer();
  layer->family = 0;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "layer 1: family is 0",
                "1 (mamba2), 2 (gated_delta_net) or 3 (kimi_delta_attention)");
  layer->family = 4;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "layer 1: family is 4",
                "1 (mamba2), 2 (gated_delta_net) or 3 (kimi_delta_attention)");
  *layer = good_layer();
  layer->read_copy = 4;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "layer 1",
                "read_copy is 4");
  layer->read_copy = RSSM_READ_COPY_NVFP4;
  rssm_slot_bytes bytes;
  CHECK_OK(rssm_pool_bytes_per_slot(&options, &bytes));
  CHECK(bytes.read_copy == 2 * (16 * 64 / 2 + 16 * 4 + 4));

  /* 256 would be exact in a byte. */
  layer->flush = 256;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "layer 1",
                "flush is 256");
  *layer = good_layer();
  layer->flush = RSSM_FLUSH_FAST;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_UNSUPPORTED, "layer 1: flush mode is fast",
                "mamba2: exact");
  layer->family = RSSM_FAMILY_GATED_DELTA_NET;
  layer->shape.gated_delta_net =
      (rssm_gated_delta_net_shape){.key_heads = 2, .value_heads = 4, .key_dim = 16, .value_dim = 8};
  CHECK_OK(rssm_pool_bytes_per_slot(&options, &bytes));
  layer->read_copy = RSSM_READ_COPY_INT8;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_UNSUPPORTED, "flush mode is fast",
                "read_copy is int8");
  layer->read_copy = RSSM_READ_COPY_NONE;
  layer->shape.gated_delta_net.value_heads = 5;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT,
                "layer 1: gated_delta_net value_heads is 5", "key_heads 2");
  layer->family = RSSM_FAMILY_KIMI_DELTA_ATTENTION;
  layer->shape.kimi_delta_attention =
      (rssm_kimi_delta_attention_shape){.heads = 2, .key_dim = 12, .value_dim = 8};
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT,
                "layer 1: kimi_delta_attention key_dim is 12", "multiple of 8");
  CHECK(pool == NULL);
}

/* Without a GPU: the build or the machine says so. With one: it is there. */
static void devices_are_named(void) {
  int32_t count = 0;
  CHECK_OK(rssm_device_count(RSSM_DEVICE_CPU, &count));
  CHECK(count == 1);
  rssm_device_properties properties;
  CHECK_OK(rssm_device_query(RSSM_DEVICE_CPU, 0, &properties));
  CHECK(strncmp(properties.name, "cpu", 3) == 0 && properties.compute_capability == 0);
  CHECK_REFUSED(rssm_device_query(RSSM_DEVICE_CPU, 3, &properties), RSSM_INVALID_ARGUMENT, "cpu:3",
                "cpu:0");
  CHECK_REFUSED(rssm_device_count(5, &count), RSSM_INVALID_ARGUMENT, "kind", "5");
  if (rssm_device_count(RSSM_DEVICE_CUDA, &count) == RSSM_OK) {
    CHECK(count > 0);
    CHECK_OK(rssm_device_query(RSSM_DEVICE_CUDA, 0, &properties));
    CHECK(properties.compute_capability > 0);
    return;
  }
  CHECK_REFUSED(rssm_device_count(RSSM_DEVICE_CUDA, &count), RSSM_UNSUPPORTED, "cuda", "cpu");
  rssm_pool_options options = good_options();
  options.device_kind = RSSM_DEVICE_CUDA;
  rssm_pool* pool = NULL;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_UNSUPPORTED, "cuda", "cpu");
}

static void calls_are_checked(void) {
  rssm_pool_options options = good_options();
  rssm_pool* pool = NULL;
  CHECK_OK(rssm_pool_create(&options, &pool));
  rssm_context cuda;
  CHECK_OK(rssm_context_init(&cuda, sizeof cuda));
  cuda.device_kind = RSSM_DEVICE_CUDA;
  CHECK_REFUSED(rssm_pool_reset(pool, &cuda, 0), RSSM_INVALID_ARGUMENT, "cuda:0", "cpu");
  rssm_context old = cuda;
  old.struct_size = 4;
  CHECK_REFUSED(rssm_pool_reset(pool, &old, 0), RSSM_INVALID_ARGUMENT, "context", "4");
  CHECK_REFUSED(rssm_pool_reset(NULL, NULL, 0), RSSM_INVALID_ARGUMENT, "pool", "NULL");
  CHECK_REFUSED(rssm_pool_reset(pool, NULL, 7), RSSM_INVALID_ARGUMENT, "7", "1");
  CHECK_REFUSED(rssm_pool_copy(pool, NULL, 0, 1), RSSM_FAILED_PRECONDITION, "0", "free");
  const float a[3] = {-1.0f, -1.0f, -1.0f};
  CHECK_REFUSED(rssm_pool_set_mamba2_a(pool, 0, a, 3), RSSM_INVALID_ARGUMENT, "3", "2");
  CHECK_OK(rssm_pool_set_mamba2_a(pool, 0, a, 2));
  CHECK_OK(rssm_pool_reset(pool, NULL, 0));
  CHECK_REFUSED(rssm_pool_truncate(pool, NULL, 0, 4), RSSM_UNSUPPORTED, "4", "rewindable");
  CHECK_REFUSED(rssm_pool_load(pool, NULL, 0, "not a state at all, is it?", 26), RSSM_DATA_LOSS,
                "saved state", "RSSMSLOT");
  rssm_device_error error;
  CHECK_REFUSED(rssm_pool_take_device_error(pool, NULL, &error), RSSM_INVALID_ARGUMENT, "cuda",
                "cpu");

  rssm_row row = {.token_begin = 0, .token_count = 1, .slot = 0, .kind = 2};
  rssm_step* step = NULL;
  CHECK_REFUSED(rssm_step_begin(pool, NULL, &row, 1, &step), RSSM_INVALID_ARGUMENT, "kind", "2");
  row.kind = RSSM_ROW_TENTATIVE;
  CHECK_REFUSED(rssm_step_begin(pool, NULL, &row, -1, &step), RSSM_INVALID_ARGUMENT, "row_count",
                "-1");
  CHECK_REFUSED(rssm_step_begin_device(pool, NULL, &row, 1, 1, &step), RSSM_INVALID_ARGUMENT,
                "cuda", "cpu");
  row.token_count = 9;
  CHECK_REFUSED(rssm_step_begin(pool, NULL, &row, 1, &step), RSSM_INVALID_ARGUMENT, "9", "1");
  CHECK(step == NULL);
  row.token_count = 1;
  CHECK_OK(rssm_step_begin(pool, NULL, &row, 1, &step));
  int64_t accepted = 1;
  CHECK_REFUSED(rssm_step_commit(pool, NULL, step, &accepted), RSSM_FAILED_PRECONDITION,
                "recurrence", "layer 0");
  CHECK_REFUSED(rssm_step_commit(pool, NULL, step, NULL), RSSM_INVALID_ARGUMENT, "accepted",
                "NULL");
  rssm_mamba2_args args;
  CHECK_OK(rssm_mamba2_args_init(&args, sizeof args));
  args.x.rank = 6;
  CHECK_REFUSED(rssm_mamba2_step(pool, NULL, 0, step, &args), RSSM_INVALID_ARGUMENT, "rank", "6");
  args.x.rank = 0;
  CHECK_REFUSED(rssm_mamba2_step(pool, NULL, 0, step, &args), RSSM_INVALID_ARGUMENT, "layer 0",
                "0 tokens");
  rssm_causal_conv1d_args conv;
  CHECK_OK(rssm_causal_conv1d_args_init(&conv, sizeof conv));
  CHECK_REFUSED(rssm_causal_conv1d_step(pool, NULL, 0, step, &conv), RSSM_FAILED_PRECONDITION,
                "layer 0", "no convolution");
  CHECK_OK(rssm_step_abort(pool, NULL, step));
  CHECK_REFUSED(rssm_step_abort(pool, NULL, step), RSSM_FAILED_PRECONDITION, "ended", "step");
  rssm_step_destroy(step);
  rssm_step_destroy(NULL);
  rssm_image_destroy(NULL);
  rssm_threads* threads = NULL;
  CHECK_REFUSED(rssm_threads_create(0, &threads), RSSM_INVALID_ARGUMENT, "threads", "0");
  rssm_threads_destroy(threads);
  rssm_pool_destroy(pool);
  rssm_pool_destroy(NULL);
}

static void delta_rule_calls_are_checked(void) {
  rssm_layer layers[2] = {good_layer(), good_layer()};
  layers[0].family = RSSM_FAMILY_GATED_DELTA_NET;
  layers[0].shape.gated_delta_net =
      (rssm_gated_delta_net_shape){.key_heads = 1, .value_heads = 2, .key_dim = 16, .value_dim = 8};
  layers[1].family = RSSM_FAMILY_KIMI_DELTA_ATTENTION;
  layers[1].shape.kimi_delta_attention =
      (rssm_kimi_delta_attention_shape){.heads = 2, .key_dim = 16, .value_dim = 8};
  rssm_pool_options options = good_options();
  options.layers = layers;
  options.layer_count = 2;
  rssm_pool* pool = NULL;
  CHECK_OK(rssm_pool_create(&options, &pool));
  CHECK_OK(rssm_pool_reset(pool, NULL, 0));
  rssm_row row = {.token_begin = 0, .token_count = 1, .slot = 0, .kind = RSSM_ROW_TENTATIVE};
  rssm_step* step = NULL;
  CHECK_OK(rssm_step_begin(pool, NULL, &row, 1, &step));

  float x[32] = {0};
  float o[16];
  rssm_gated_delta_net_args gated;
  CHECK_OK(rssm_gated_delta_net_args_init(&gated, sizeof gated));
  gated.a_log = tensor(x, 1, (int64_t[]){2}, 0);
  gated.q = gated.k = tensor(x, 3, (int64_t[]){1, 1, 16}, 0);
  gated.v = tensor(x, 3, (int64_t[]){1, 2, 8}, 0);
  gated.a = gated.b = tensor(x, 2, (int64_t[]){1, 2}, 0);
  gated.o = tensor(o, 3, (int64_t[]){1, 2, 8}, 0);
  rssm_kimi_delta_attention_args kimi;
  CHECK_OK(rssm_kimi_delta_attention_args_init(&kimi, sizeof kimi));
  kimi.q = kimi.k = kimi.a = tensor(x, 3, (int64_t[]){1, 2, 16}, 0);
  kimi.v = gated.v;
  kimi.b = gated.b;
  kimi.o = gated.o;

#define CHECK_GATED_REFUSED(member, value, status, part_a, part_b)                                \
  do {                                                                                            \
    rssm_gated_delta_net_args bad_ = gated;                                                       \
    bad_.member = value;                                                                          \
    CHECK_REFUSED(rssm_gated_delta_net_step(pool, NULL, 0, step, &bad_), status, part_a, part_b); \
  } while (0)
  CHECK_GATED_REFUSED(struct_size, 4, RSSM_INVALID_ARGUMENT, "args", "struct_size 4");
  CHECK_GATED_REFUSED(q.rank, 6, RSSM_INVALID_ARGUMENT, "gated_delta_net q has rank 6", "0..5");
  CHECK_GATED_REFUSED(a_log.dtype, 3, RSSM_INVALID_ARGUMENT,
                      "gated_delta_net A_log has element type 3", "2 (f16)");
  CHECK_GATED_REFUSED(v.dtype, RSSM_F16, RSSM_INVALID_ARGUMENT, "gated_delta_net v is f16",
                      "expected f32 (1, 2, 8)");
  CHECK_GATED_REFUSED(b.shape[1], 3, RSSM_INVALID_ARGUMENT, "gated_delta_net b is f32 (1, 3)",
                      "expected f32 (1, 2)");
  CHECK_GATED_REFUSED(a_log, (rssm_tensor){0}, RSSM_INVALID_ARGUMENT,
                      "gated_delta_net A_log is empty", "(2)");
  CHECK_GATED_REFUSED(o, gated.v, RSSM_INVALID_ARGUMENT, "gated_delta_net o", "same memory");
  CHECK_GATED_REFUSED(scale, NAN, RSSM_INVALID_ARGUMENT, "gated_delta_net scale", "finite");
  CHECK_GATED_REFUSED(norm_epsilon, -1.0f, RSSM_INVALID_ARGUMENT,
                      "gated_delta_net norm_epsilon is -1", "at least 0");
#undef CHECK_GATED_REFUSED
  CHECK_REFUSED(rssm_gated_delta_net_step(pool, NULL, 1, step, &gated), RSSM_FAILED_PRECONDITION,
                "layer 1 is a kimi_delta_attention", "expected gated_delta_net");
  CHECK_REFUSED(rssm_gated_delta_net_step(pool, NULL, 2, step, &gated), RSSM_INVALID_ARGUMENT,
                "layer 2", "0..1");
  CHECK_REFUSED(rssm_gated_delta_net_step(pool, NULL, 0, NULL, &gated), RSSM_INVALID_ARGUMENT,
                "step", "NULL");
  CHECK_REFUSED(rssm_kimi_delta_attention_step(pool, NULL, 1, step, NULL), RSSM_INVALID_ARGUMENT,
                "args", "NULL");
  CHECK_REFUSED(rssm_kimi_delta_attention_step(pool, NULL, 1, step, &kimi), RSSM_INVALID_ARGUMENT,
                "kimi_delta_attention A_log is empty", "(2)");
  kimi.lower_bound = 5.0f;
  CHECK_REFUSED(rssm_kimi_delta_attention_step(pool, NULL, 1, step, &kimi), RSSM_INVALID_ARGUMENT,
                "lower_bound is 5", "below 0");
  kimi.lower_bound = -5.0f;
  CHECK_REFUSED(rssm_kimi_delta_attention_step(pool, NULL, 0, step, &kimi),
                RSSM_FAILED_PRECONDITION, "layer 0 is a gated_delta_net",
                "expected kimi_delta_attention");
  char text[8];
  CHECK_REFUSED(rssm_kimi_delta_attention_explain(pool, NULL, 0, 1, text, sizeof text, NULL),
                RSSM_FAILED_PRECONDITION, "layer 0 is a gated_delta_net",
                "expected kimi_delta_attention");
  CHECK_REFUSED(rssm_gated_delta_net_explain(pool, NULL, 0, 1, NULL, 8, NULL),
                RSSM_INVALID_ARGUMENT, "buffer", "NULL");
  CHECK_REFUSED(rssm_pool_set_mamba2_a(pool, 0, x, 2), RSSM_FAILED_PRECONDITION,
                "layer 0 is a gated_delta_net", "expected mamba2");

  /* Nothing refused has run: the step can be completed. */
  CHECK_OK(rssm_gated_delta_net_step(pool, NULL, 0, step, &gated));
  CHECK_REFUSED(rssm_gated_delta_net_step(pool, NULL, 0, step, &gated), RSSM_FAILED_PRECONDITION,
                "layer 0", "already");
  CHECK_OK(rssm_kimi_delta_attention_step(pool, NULL, 1, step, &kimi));
  const int64_t accepted = 1;
  CHECK_OK(rssm_step_commit(pool, NULL, step, &accepted));
  rssm_step_destroy(step);
  rssm_pool_destroy(pool);
}

static void* another_thread(void* unused) {
  (void)unused;
  static char seen[64];
  strncpy(seen, rssm_last_error(), sizeof seen - 1);
  return seen;
}

/* A message belongs to the thread whose call failed, and outlives calls that succeed. */
static void messages_are_per_thread(void) {
  rssm_pool_options options = good_options();
  rssm_pool* pool = NULL;
  CHECK_REFUSED(rssm_pool_create(NULL, &pool), RSSM_INVALID_ARGUMENT, "options", "NULL");
  CHECK_OK(rssm_pool_create(&options, &pool));
  CHECK(strstr(rssm_last_error(), "options") != NULL);
  pthread_t thread;
  void* seen = NULL;
  CHECK(pthread_create(&thread, NULL, another_thread, NULL) == 0);
  CHECK(pthread_join(thread, &seen) == 0);
  CHECK(seen != NULL && strcmp(seen, "") == 0);
  rssm_pool_destroy(pool);
}

int main(void) {
  struct_sizes_are_checked();
  options_are_checked();
  layers_are_checked();
  devices_are_named();
  calls_are_checked();
  delta_rule_calls_are_checked();
  messages_are_per_thread();
  if (failures > 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
