/* The C interface at work on the CPU: replay decoding against a token-by-token recurrence in
 * double, with a convolution in front; moves, saved states, threads. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "operands.h"

enum { kHeads = 2, kHeadDim = 8, kState = 16, kWidth = 3, kTokens = 40 };
enum { kX = kHeads * kHeadDim, kChannels = kX + 2 * kState };

static const float kA[kHeads] = {-0.5f, -1.5f};
static float weight[kWidth * kChannels];
static float inputs[kTokens][kChannels];
static float time_steps[kTokens][kHeads];

/* Outputs of all tokens: (kTokens, kHeads, kHeadDim). */
static void reference(double y[kTokens][kX]) {
  static double state[kHeads][kHeadDim][kState];
  memset(state, 0, sizeof state);
  for (int t = 0; t < kTokens; ++t) {
    double u[kChannels];
    for (int c = 0; c < kChannels; ++c) {
      double sum = 0.0;
      for (int i = 0; i < kWidth; ++i) {
        const int from = t - (kWidth - 1) + i;
        if (from >= 0) sum += (double)weight[i * kChannels + c] * (double)inputs[from][c];
      }
      u[c] = sum / (1.0 + exp(-sum));
    }
    for (int h = 0; h < kHeads; ++h) {
      const double dt = log1p(exp((double)time_steps[t][h]));
      const double decay = exp((double)kA[h] * dt);
      for (int p = 0; p < kHeadDim; ++p) {
        double sum = 0.0;
        for (int n = 0; n < kState; ++n) {
          double* s = &state[h][p][n];
          *s = decay * *s + dt * u[h * kHeadDim + p] * u[kX + n];
          sum += *s * u[kX + kState + n];
        }
        y[t][h * kHeadDim + p] = sum;
      }
    }
  }
}

static rssm_layer mamba2_layer(void) {
  rssm_layer layer;
  CHECK_OK(rssm_layer_init(&layer, sizeof layer));
  layer.family = RSSM_FAMILY_MAMBA2;
  layer.shape.mamba2 =
      (rssm_mamba2_shape){.heads = kHeads, .head_dim = kHeadDim, .state_size = kState, .groups = 1};
  return layer;
}

static rssm_pool* make_pool(int32_t window) {
  rssm_layer layer = mamba2_layer();
  layer.conv_channels = kChannels;
  layer.conv_width = kWidth;
  rssm_pool_options options = one_layer_options(&layer);
  options.slots = 3;
  options.window = window;
  options.draft_capacity = 3;
  options.rewindable = 1;
  options.poison = 1;
  options.model_id = "c";
  rssm_pool* pool = NULL;
  CHECK_OK(rssm_pool_create(&options, &pool));
  CHECK_OK(rssm_pool_set_mamba2_a(pool, 0, kA, kHeads));
  rssm_slot_bytes bytes;
  CHECK_OK(rssm_pool_bytes_per_slot(&options, &bytes));
  /* With a number for every eight rows. */
  CHECK(bytes.checkpoint == kHeads * (kHeadDim * kState + kHeadDim / 8) * sizeof(float));
  CHECK(bytes.read_copy == 0);
  CHECK(bytes.total >= bytes.checkpoint + bytes.record_ring + bytes.conv_ring);
  int64_t slots = 0;
  CHECK_OK(rssm_pool_slots_for_budget(&options, 5 * bytes.total, &slots));
  CHECK(slots == 5);
  return pool;
}

/* On a GPU one sequence decodes in place and many by replay; no device is asked. On the CPU either
 * may come out, by the machine. */
static void decode_is_chosen(void) {
  rssm_layer layer = mamba2_layer();
  layer.shape.mamba2 = (rssm_mamba2_shape){64, 64, 128, 8};
  rssm_pool_options options = one_layer_options(&layer);
  options.window = 16;
  options.activation = RSSM_BF16;
  rssm_context gpu;
  CHECK_OK(rssm_context_init(&gpu, sizeof gpu));
  gpu.device_kind = RSSM_DEVICE_CUDA;
  rssm_decode_plan plan;
  memset(&plan, 0xff, sizeof plan);
  CHECK_OK(rssm_choose_decode(&gpu, &options, 1, &plan));
  CHECK(plan.replay == 0 && plan.window == 0);
  CHECK(plan.plain_seconds > 0 && plan.replay_seconds > plan.plain_seconds);
  CHECK(strstr(plan.reason, "window of 16") != NULL);
  CHECK_OK(rssm_choose_decode(&gpu, &options, 256, &plan));
  CHECK(plan.replay == 1 && plan.window == 16);
  CHECK(plan.replay_seconds > 0 && plan.replay_seconds < plan.plain_seconds);
  CHECK_OK(rssm_choose_decode(NULL, &options, 4, &plan));
  CHECK(plan.window == (plan.replay ? 16 : 0) && plan.reason[0] != '\0');
}

/* One step of one row: tokens [first, first + count) of the sequence; y (count, kX). */
static void step(rssm_pool* pool, const rssm_context* context, int32_t slot, int first, int count,
                 rssm_row_kind kind, int64_t accepted, float* y) {
  rssm_row row = {.token_begin = 0, .token_count = count, .slot = slot, .kind = (uint8_t)kind};
  rssm_step* open = NULL;
  CHECK_OK(rssm_step_begin(pool, context, &row, 1, &open));
  float mixed[kTokens][kChannels];
  rssm_causal_conv1d_args conv;
  CHECK_OK(rssm_causal_conv1d_args_init(&conv, sizeof conv));
  conv.u = tensor(inputs[first], 2, (int64_t[]){count, kChannels}, 0);
  conv.weight = tensor(weight, 2, (int64_t[]){kWidth, kChannels}, 0);
  conv.out = tensor(mixed, 2, (int64_t[]){count, kChannels}, 0);
  CHECK_OK(rssm_causal_conv1d_step(pool, context, 0, open, &conv));
  rssm_mamba2_args args;
  CHECK_OK(rssm_mamba2_args_init(&args, sizeof args));
  CHECK(args.dt_softplus == 1 && args.dt_min == 0.0f && isinf(args.dt_max));
  args.x = tensor(mixed, 3, (int64_t[]){count, kHeads, kHeadDim}, kChannels);
  args.b = tensor(mixed[0] + kX, 3, (int64_t[]){count, 1, kState}, kChannels);
  args.c = tensor(mixed[0] + kX + kState, 3, (int64_t[]){count, 1, kState}, kChannels);
  args.dt = tensor(time_steps[first], 2, (int64_t[]){count, kHeads}, 0);
  args.y = tensor(y, 3, (int64_t[]){count, kHeads, kHeadDim}, 0);
  CHECK_OK(rssm_mamba2_step(pool, context, 0, open, &args));
  CHECK_OK(rssm_step_commit(pool, context, open, &accepted));
  rssm_step_destroy(open);
}

static void check_close(const float* y, double want[kTokens][kX], int first, int count) {
  for (int t = 0; t < count; ++t) {
    for (int i = 0; i < kX; ++i) {
      const double found = (double)y[t * kX + i];
      CHECK(fabs(found - want[first + t][i]) <= 2e-5 * (1.0 + fabs(want[first + t][i])));
    }
  }
}

/* Tokens from `position` on by verify steps of three, of which one or all are accepted. */
static void check_continues(rssm_pool* pool, const rssm_context* context, int32_t slot,
                            int position, double want[kTokens][kX]) {
  float y[3 * kX];
  while (position + 3 <= kTokens) {
    const int accepted = position % 2 == 0 ? 1 : 3;
    step(pool, context, slot, position, 3, RSSM_ROW_TENTATIVE, accepted, y);
    check_close(y, want, position, 3);
    position += accepted;
  }
  rssm_cursor cursor;
  CHECK_OK(rssm_pool_cursor(pool, context, slot, &cursor));
  CHECK(cursor.position == position && cursor.force_flush == 0);
}

/* f16 operands, records and checkpoint: with x = B = C = 1 and a zero state, one token gives
 * y = dt N, dt = log(2). */
static void f16_step(void) {
  enum { kOne = 0x3c00 };
  const rssm_layer layer = mamba2_layer();
  rssm_pool_options options = one_layer_options(&layer);
  options.slots = 1;
  options.checkpoint = options.activation = RSSM_F16;
  rssm_slot_bytes bytes;
  CHECK_OK(rssm_pool_bytes_per_slot(&options, &bytes));
  CHECK(bytes.checkpoint == kHeads * kHeadDim * kState * 2);
  rssm_pool* pool = NULL;
  CHECK_OK(rssm_pool_create(&options, &pool));
  CHECK_OK(rssm_pool_set_mamba2_a(pool, 0, kA, kHeads));
  CHECK_OK(rssm_pool_reset(pool, NULL, 0));

  uint16_t ones[kX];
  uint16_t y[kX] = {0};
  for (int i = 0; i < kX; ++i) ones[i] = kOne;
  float raw_dt[kHeads] = {0.0f, 0.0f};
  const int64_t x_shape[] = {1, kHeads, kHeadDim};
  const int64_t b_shape[] = {1, 1, kState};
  const int64_t dt_shape[] = {1, kHeads};
  rssm_mamba2_args args;
  CHECK_OK(rssm_mamba2_args_init(&args, sizeof args));
  args.x = tensor(ones, 3, x_shape, 0);
  args.b = args.c = tensor(ones, 3, b_shape, 0);
  args.dt = tensor(raw_dt, 2, dt_shape, 0);
  args.y = tensor(y, 3, x_shape, 0);
  rssm_row row = {.token_begin = 0, .token_count = 1, .slot = 0, .kind = RSSM_ROW_TENTATIVE};
  rssm_step* step = NULL;
  CHECK_OK(rssm_step_begin(pool, NULL, &row, 1, &step));
  CHECK_REFUSED(rssm_mamba2_step(pool, NULL, 0, step, &args), RSSM_INVALID_ARGUMENT, "f32", "f16");
  args.x.dtype = args.b.dtype = args.c.dtype = args.y.dtype = RSSM_F16;
  CHECK_OK(rssm_mamba2_step(pool, NULL, 0, step, &args));
  const int64_t accepted = 1;
  CHECK_OK(rssm_step_commit(pool, NULL, step, &accepted));
  rssm_step_destroy(step);
  for (int i = 0; i < kX; ++i) {
    const double value = ldexp(1024 + (y[i] & 0x3ff), (y[i] >> 10) - 25); /* positive, normal */
    CHECK(fabs(value - kState * log(2.0)) < 0x1p-7);
  }
  rssm_pool_destroy(pool);
}

int main(void) {
  f16_step();
  decode_is_chosen();
  static double want[kTokens][kX];
  for (int i = 0; i < kWidth * kChannels; ++i) weight[i] = pseudo_random();
  for (int t = 0; t < kTokens; ++t) {
    for (int c = 0; c < kChannels; ++c) inputs[t][c] = pseudo_random();
    for (int h = 0; h < kHeads; ++h) time_steps[t][h] = pseudo_random() - 1.0f;
  }
  reference(want);
  CHECK(rssm_version() == RSSM_VERSION_MAJOR * 1000 + RSSM_VERSION_MINOR);

  rssm_threads* threads = NULL;
  CHECK_OK(rssm_threads_create(2, &threads));
  rssm_context context;
  CHECK_OK(rssm_context_init(&context, sizeof context));
  context.threads = threads;

  rssm_pool* pool = make_pool(8);
  int32_t slot = -1;
  int64_t free_slots = 0;
  CHECK_OK(rssm_pool_acquire(pool, &context, &slot));
  CHECK(slot == 0);
  CHECK_OK(rssm_pool_free_slots(pool, &free_slots));
  CHECK(free_slots == 2);

  /* A prompt, then a few drafts; then the state goes everywhere a state can go. */
  float y[kTokens * kX];
  step(pool, &context, slot, 0, 7, RSSM_ROW_COMMITTED, 7, y);
  check_close(y, want, 0, 7);
  step(pool, NULL, slot, 7, 3, RSSM_ROW_TENTATIVE, 2, y);
  check_close(y, want, 7, 3);
  CHECK_OK(rssm_pool_copy(pool, &context, slot, 1));
  CHECK_OK(rssm_pool_truncate(pool, &context, 1, 8));
  CHECK_OK(rssm_pool_materialize(pool, &context, slot, 9, 2));
  rssm_cursor cursor;
  CHECK_OK(rssm_pool_cursor(pool, &context, 2, &cursor));
  CHECK(cursor.checkpoint_position == 9 && cursor.position == 9);

  rssm_pool* small = make_pool(3);
  rssm_image* image = NULL;
  CHECK_OK(rssm_pool_save(pool, &context, slot, &image));
  CHECK(rssm_image_size(image) > 0);
  CHECK_OK(rssm_pool_load(small, &context, 0, rssm_image_data(image), rssm_image_size(image)));
  rssm_image_destroy(image);

  CHECK_OK(rssm_pool_force_flush(pool, &context, slot));
  CHECK_OK(rssm_pool_cursor(pool, &context, slot, &cursor));
  CHECK(cursor.force_flush == 1);
  check_continues(pool, &context, slot, 9, want);
  check_continues(pool, &context, 1, 8, want);
  check_continues(pool, &context, 2, 9, want);
  check_continues(small, &context, 0, 9, want);
  CHECK_OK(rssm_pool_reset(pool, &context, 1));
  check_continues(pool, &context, 1, 0, want);

  /* An aborted step leaves a tentative row where it was. */
  rssm_row row = {.token_begin = 0, .token_count = 1, .slot = 1, .kind = RSSM_ROW_TENTATIVE};
  rssm_step* open = NULL;
  CHECK_OK(rssm_step_begin(pool, &context, &row, 1, &open));
  CHECK_OK(rssm_step_abort(pool, &context, open));
  rssm_step_destroy(open);
  CHECK_OK(rssm_pool_release(pool, &context, 1));
  CHECK_OK(rssm_pool_free_slots(pool, &free_slots));
  CHECK(free_slots == 1);

  char text[256];
  uint64_t needed = 0;
  CHECK_OK(rssm_mamba2_explain(pool, &context, 0, 1, text, sizeof text, &needed));
  CHECK(needed == strlen(text) + 1 && strstr(text, "mamba2 2x8x16") != NULL);
  char cut[8];
  CHECK_OK(rssm_mamba2_explain(pool, &context, 0, 1, cut, sizeof cut, NULL));
  CHECK(strcmp(cut, "mamba2 ") == 0);

  rssm_pool_destroy(small);
  rssm_pool_destroy(pool);
  rssm_threads_destroy(threads);
  if (failures > 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
