/* The C interface at work on the CPU: replay decoding against a token-by-token recurrence in
 * double, with a convolution in front; moves, saved states, threads. */
#include <math.h>
#include <stdlib.h>

#include "check.h"

enum { kHeads = 2, kHeadDim = 8, kState = 16, kWidth = 3, kTokens = 40 };
enum { kX = kHeads * kHeadDim, kChannels = kX + 2 * kState };

static const float kA[kHeads] = {-0.5f, -1.5f};
static float weight[kWidth * kChannels];
static float inputs[kTokens][kChannels];
static float time_steps[kTokens][kHeads];

static float pseudo_random(void) {
  static uint32_t state = 12345u;
  state = state * 1664525u + 1013904223u;
  return (float)(state >> 8) / 8388608.0f - 1.0f;
}

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

static rssm_tensor tensor(void* data, int32_t rank, const int64_t* shape, int64_t row) {
  rssm_tensor t = {0};
  t.data = data;
  t.dtype = RSSM_F32;
  t.rank = rank;
  int64_t stride = 1;
  for (int32_t i = rank - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.strides[i] = stride;
    stride *= shape[i];
  }
  if (row > 0) t.strides[0] = row;
  return t;
}

static rssm_pool* make_pool(int32_t window) {
  rssm_layer layer = {.heads = kHeads,
                      .head_dim = kHeadDim,
                      .state_size = kState,
                      .groups = 1,
                      .conv_channels = kChannels,
                      .conv_width = kWidth};
  rssm_pool_options options;
  rssm_pool_options_init(&options);
  options.layers = &layer;
  options.layer_count = 1;
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
  CHECK(bytes.checkpoint == kHeads * kHeadDim * kState * sizeof(float));
  CHECK(bytes.read_copy == 0);
  CHECK(bytes.total >= bytes.checkpoint + bytes.record_ring + bytes.conv_ring);
  int64_t slots = 0;
  CHECK_OK(rssm_pool_slots_for_budget(&options, 5 * bytes.total, &slots));
  CHECK(slots == 5);
  return pool;
}

/* One step of one row: tokens [first, first + count) of the sequence; y (count, kX). */
static void step(rssm_pool* pool, const rssm_context* context, int32_t slot, int first, int count,
                 rssm_row_kind kind, int64_t accepted, float* y) {
  rssm_row row = {.token_begin = 0, .token_count = count, .slot = slot, .kind = (uint8_t)kind};
  rssm_step* open = NULL;
  CHECK_OK(rssm_step_begin(pool, context, &row, 1, &open));
  float mixed[kTokens][kChannels];
  rssm_causal_conv1d_args conv;
  rssm_causal_conv1d_args_init(&conv);
  conv.u = tensor(inputs[first], 2, (int64_t[]){count, kChannels}, 0);
  conv.weight = tensor(weight, 2, (int64_t[]){kWidth, kChannels}, 0);
  conv.out = tensor(mixed, 2, (int64_t[]){count, kChannels}, 0);
  CHECK_OK(rssm_causal_conv1d_step(pool, context, 0, open, &conv));
  rssm_mamba2_args args;
  rssm_mamba2_args_init(&args);
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

int main(void) {
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
  rssm_context_init(&context);
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
