/* One token of one Mamba-2 layer through the installed C interface alone. */
#include <stdio.h>

#include <replayssm/replayssm.h>

static int check(rssm_status status) {
  if (status != RSSM_OK) fprintf(stderr, "consumer_c: %s\n", rssm_last_error());
  return status == RSSM_OK;
}

/* (1, outer, inner), packed */
static rssm_tensor tensor(float* data, int64_t outer, int64_t inner) {
  rssm_tensor t = {.data = data,
                   .dtype = RSSM_F32,
                   .rank = 3,
                   .shape = {1, outer, inner},
                   .strides = {outer * inner, inner, 1}};
  return t;
}

int main(void) {
  float a = -0.5f, x[8], b[16], c[16], dt = 0.0f, y[8] = {0};
  for (int i = 0; i < 8; ++i) x[i] = 0.5f;
  for (int i = 0; i < 16; ++i) b[i] = c[i] = 0.25f;
  rssm_layer layer;
  rssm_pool_options options;
  rssm_mamba2_args args;
  if (!check(rssm_layer_init(&layer, sizeof layer)) ||
      !check(rssm_pool_options_init(&options, sizeof options)) ||
      !check(rssm_mamba2_args_init(&args, sizeof args))) {
    return 1;
  }
  layer.family = RSSM_FAMILY_MAMBA2;
  layer.shape.mamba2 =
      (rssm_mamba2_shape){.heads = 1, .head_dim = 8, .state_size = 16, .groups = 1};
  options.layers = &layer;
  options.layer_count = 1;
  options.slots = 1;
  rssm_pool* pool = NULL;
  rssm_step* step = NULL;
  rssm_row row = {.token_count = 1, .kind = RSSM_ROW_TENTATIVE};
  const int64_t accepted = 1;
  args.x = tensor(x, 1, 8);
  args.b = tensor(b, 1, 16);
  args.c = tensor(c, 1, 16);
  args.dt = tensor(&dt, 1, 1);
  args.dt.rank = 2;
  args.y = tensor(y, 1, 8);
  const int ok = check(rssm_pool_create(&options, &pool)) &&
                 check(rssm_pool_set_mamba2_a(pool, 0, &a, 1)) &&
                 check(rssm_pool_acquire(pool, NULL, &row.slot)) &&
                 check(rssm_step_begin(pool, NULL, &row, 1, &step)) &&
                 check(rssm_mamba2_step(pool, NULL, 0, step, &args)) &&
                 check(rssm_step_commit(pool, NULL, step, &accepted));
  rssm_step_destroy(step);
  rssm_pool_destroy(pool);
  if (ok) printf("consumer_c: y[0] = %.6f after 1 token\n", (double)y[0]);
  return ok ? 0 : 1;
}
