/* What the C interface refuses, and how it says so. */
#include <pthread.h>
#include <stdlib.h>

#include "check.h"

static const rssm_layer kLayer = {.heads = 2, .head_dim = 16, .state_size = 64, .groups = 1};

static rssm_pool_options good_options(void) {
  rssm_pool_options options;
  rssm_pool_options_init(&options);
  options.layers = &kLayer;
  options.layer_count = 1;
  options.slots = 2;
  return options;
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
  rssm_layer layer = kLayer;
  layer.read_copy = 4;
  options.layers = &layer;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "layer 0",
                "read_copy is 4");
  layer.read_copy = RSSM_READ_COPY_NVFP4;
  rssm_slot_bytes bytes;
  CHECK_OK(rssm_pool_bytes_per_slot(&options, &bytes));
  CHECK(bytes.read_copy == 2 * (16 * 64 / 2 + 16 * 4 + 4));
  options.layers = NULL;
  options.layer_count = -1;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "layers", "-1");
  options = good_options();
  options.checkpoint = 77;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "checkpoint", "77");
  options = good_options();
  options.checkpoint = RSSM_F16;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_UNSUPPORTED, "f16", "bf16");
  options = good_options();
  options.device_kind = 9;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "device", "9");
  options = good_options();
  char storage[64];
  options.storage = storage;
  options.storage_bytes = sizeof storage;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "storage", "64");
  options = good_options();
  options.slots = INT64_MAX;
  CHECK_REFUSED(rssm_pool_create(&options, &pool), RSSM_INVALID_ARGUMENT, "slots",
                "9223372036854775807");
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
  rssm_context_init(&cuda);
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
  rssm_mamba2_args_init(&args);
  args.x.rank = 6;
  CHECK_REFUSED(rssm_mamba2_step(pool, NULL, 0, step, &args), RSSM_INVALID_ARGUMENT, "rank", "6");
  args.x.rank = 0;
  CHECK_REFUSED(rssm_mamba2_step(pool, NULL, 0, step, &args), RSSM_INVALID_ARGUMENT, "layer 0",
                "0 tokens");
  rssm_causal_conv1d_args conv;
  rssm_causal_conv1d_args_init(&conv);
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
  options_are_checked();
  devices_are_named();
  calls_are_checked();
  messages_are_per_thread();
  if (failures > 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
