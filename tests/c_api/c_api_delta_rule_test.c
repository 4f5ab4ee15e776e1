/* Gated DeltaNet and Kimi Delta Attention through the C interface on the CPU: layers of both with
 * either gate, flush mode and a read copy in one pool, against the recurrence in double. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "operands.h"

enum { kHeads = 4, kKey = 16, kValue = 8, kTokens = 40, kDrafts = 3 };
enum { kOutputs = kHeads * kValue, kProjected = 2 * kHeads * kKey + kOutputs };

/* What a layer is, and how close its outputs come. */
typedef struct layer_case {
  rssm_family family;
  rssm_flush flush;
  rssm_read_copy read_copy;
  int key_heads;
  int beta_doubled;
  float scale;
  float lower_bound;
  double tolerance;
} layer_case;

static const layer_case kCases[] = {
    {RSSM_FAMILY_GATED_DELTA_NET, RSSM_FLUSH_EXACT, RSSM_READ_COPY_NONE, 2, 0, 0.0f, 0.0f, 2e-5},
    {RSSM_FAMILY_GATED_DELTA_NET, RSSM_FLUSH_OF_POOL, RSSM_READ_COPY_NONE, 4, 1, 0.5f, 0.0f, 2e-5},
    {RSSM_FAMILY_GATED_DELTA_NET, RSSM_FLUSH_EXACT, RSSM_READ_COPY_INT8, 2, 0, 0.0f, 0.0f, 2e-2},
    {RSSM_FAMILY_KIMI_DELTA_ATTENTION, RSSM_FLUSH_EXACT, RSSM_READ_COPY_NONE, kHeads, 1, 0.0f, 0.0f,
     2e-5},
    {RSSM_FAMILY_KIMI_DELTA_ATTENTION, RSSM_FLUSH_OF_POOL, RSSM_READ_COPY_NONE, kHeads, 0, 0.0f,
     -5.0f, 2e-5},
};
enum { kLayers = sizeof kCases / sizeof kCases[0] };

static float a_log[kHeads];
static float dt_bias[kHeads * kKey];
static float projected[kTokens][kProjected]; /* q, k, v */
static float gates[kTokens][kHeads * kKey];
static float betas[kTokens][kHeads];

static double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

static double decay(const layer_case* c, int token, int head, int channel) {
  const int i = c->family == RSSM_FAMILY_KIMI_DELTA_ATTENTION ? head * kKey + channel : head;
  const double x = (double)gates[token][i] + (double)dt_bias[i];
  const double rate = exp((double)a_log[head]);
  if (c->lower_bound != 0.0f) return exp((double)c->lower_bound * sigmoid(rate * x));
  return exp(-rate * log1p(exp(x)));
}

static void normalized(const float* x, double scale, double* out) {
  double sum = 1e-6;
  for (int i = 0; i < kKey; ++i) sum += (double)x[i] * (double)x[i];
  for (int i = 0; i < kKey; ++i) out[i] = scale * (double)x[i] / sqrt(sum);
}

/* Outputs of all tokens. */
static void reference(const layer_case* c, double o[kTokens][kOutputs]) {
  static double state[kHeads][kKey][kValue];
  memset(state, 0, sizeof state);
  for (int t = 0; t < kTokens; ++t) {
    for (int h = 0; h < kHeads; ++h) {
      const float* from = projected[t] + h / (kHeads / c->key_heads) * kKey;
      double q[kKey];
      double k[kKey];
      normalized(from, c->scale != 0.0f ? (double)c->scale : 1.0 / sqrt((double)kKey), q);
      normalized(from + c->key_heads * kKey, 1.0, k);
      const double beta = (c->beta_doubled ? 2.0 : 1.0) * sigmoid((double)betas[t][h]);
      for (int j = 0; j < kValue; ++j) {
        double delta = (double)projected[t][2 * c->key_heads * kKey + h * kValue + j];
        for (int i = 0; i < kKey; ++i) {
          state[h][i][j] *= decay(c, t, h, i);
          delta -= state[h][i][j] * k[i];
        }
        double sum = 0.0;
        for (int i = 0; i < kKey; ++i) {
          state[h][i][j] += beta * delta * k[i];
          sum += state[h][i][j] * q[i];
        }
        o[t][h * kValue + j] = sum;
      }
    }
  }
}

static rssm_layer make_layer(const layer_case* c) {
  rssm_layer layer;
  CHECK_OK(rssm_layer_init(&layer, sizeof layer));
  CHECK(layer.family == 0 && layer.flush == RSSM_FLUSH_OF_POOL);
  layer.family = c->family;
  layer.flush = c->flush;
  layer.read_copy = c->read_copy;
  if (c->family == RSSM_FAMILY_GATED_DELTA_NET) {
    layer.shape.gated_delta_net = (rssm_gated_delta_net_shape){
        .key_heads = c->key_heads, .value_heads = kHeads, .key_dim = kKey, .value_dim = kValue};
  } else {
    layer.shape.kimi_delta_attention =
        (rssm_kimi_delta_attention_shape){.heads = kHeads, .key_dim = kKey, .value_dim = kValue};
  }
  return layer;
}

static rssm_pool* make_pool(int32_t window) {
  rssm_layer layers[kLayers];
  for (int l = 0; l < kLayers; ++l) layers[l] = make_layer(&kCases[l]);
  rssm_pool_options options;
  CHECK_OK(rssm_pool_options_init(&options, sizeof options));
  CHECK(options.flush == RSSM_FLUSH_EXACT);
  options.flush = RSSM_FLUSH_FAST;
  options.layers = layers;
  options.layer_count = kLayers;
  options.slots = 2;
  options.window = window;
  options.draft_capacity = kDrafts;
  options.poison = 1;
  rssm_pool* pool = NULL;
  CHECK_OK(rssm_pool_create(&options, &pool));
  return pool;
}

/* What the families' arguments have in common; `a` is the gate. */
#define SET_ARGS(args, c, first, count, gate, out)                                           \
  do {                                                                                       \
    const int64_t keys_[] = {count, (c)->key_heads, kKey};                                   \
    const int64_t values_[] = {count, kHeads, kValue};                                       \
    CHECK((args).normalize == 1 && (args).norm_epsilon == 1e-6f && (args).scale == 0.0f);    \
    (args).beta_doubled = (c)->beta_doubled;                                                 \
    (args).scale = (c)->scale;                                                               \
    (args).a_log = tensor(a_log, 1, (int64_t[]){kHeads}, 0);                                 \
    (args).q = tensor(projected[first], 3, keys_, kProjected);                               \
    (args).k = tensor(projected[first] + (c)->key_heads * kKey, 3, keys_, kProjected);       \
    (args).v = tensor(projected[first] + 2 * (c)->key_heads * kKey, 3, values_, kProjected); \
    (args).a = gate;                                                                         \
    (args).b = tensor(betas[first], 2, (int64_t[]){count, kHeads}, 0);                       \
    (args).o = tensor(out, 3, values_, 0);                                                   \
  } while (0)

static rssm_status run_layer(rssm_pool* pool, const rssm_context* context, int layer,
                             rssm_step* step, int first, int count, float* o) {
  const layer_case* c = &kCases[layer];
  if (c->family == RSSM_FAMILY_GATED_DELTA_NET) {
    rssm_gated_delta_net_args args;
    CHECK_OK(rssm_gated_delta_net_args_init(&args, sizeof args));
    SET_ARGS(args, c, first, count,
             tensor(gates[first], 2, (int64_t[]){count, kHeads}, kHeads * kKey), o);
    args.dt_bias = tensor(dt_bias, 1, (int64_t[]){kHeads}, 0);
    return rssm_gated_delta_net_step(pool, context, layer, step, &args);
  }
  rssm_kimi_delta_attention_args args;
  CHECK_OK(rssm_kimi_delta_attention_args_init(&args, sizeof args));
  SET_ARGS(args, c, first, count, tensor(gates[first], 3, (int64_t[]){count, kHeads, kKey}, 0), o);
  args.dt_bias = tensor(dt_bias, 2, (int64_t[]){kHeads, kKey}, 0);
  args.lower_bound = c->lower_bound;
  return rssm_kimi_delta_attention_step(pool, context, layer, step, &args);
}

/* One step of one row through all layers: tokens [first, first + count) of the sequence. */
static void step(rssm_pool* pool, const rssm_context* context, int32_t slot, int first, int count,
                 rssm_row_kind kind, int64_t accepted, double want[kLayers][kTokens][kOutputs]) {
  rssm_row row = {.token_begin = 0, .token_count = count, .slot = slot, .kind = (uint8_t)kind};
  rssm_step* open = NULL;
  CHECK_OK(rssm_step_begin(pool, context, &row, 1, &open));
  for (int l = 0; l < kLayers; ++l) {
    float o[kTokens][kOutputs];
    CHECK_OK(run_layer(pool, context, l, open, first, count, o[0]));
    for (int t = 0; t < count; ++t) {
      for (int i = 0; i < kOutputs; ++i) {
        const double expected = want[l][first + t][i];
        CHECK(fabs((double)o[t][i] - expected) <= kCases[l].tolerance * (1.0 + fabs(expected)));
      }
    }
  }
  CHECK_OK(rssm_step_commit(pool, context, open, &accepted));
  rssm_step_destroy(open);
}

/* Tokens from `position` on by verify steps of three, of which one or all are accepted. */
static void continue_from(rssm_pool* pool, const rssm_context* context, int32_t slot, int position,
                          double want[kLayers][kTokens][kOutputs]) {
  while (position + kDrafts <= kTokens) {
    const int accepted = position % 2 == 0 ? 1 : kDrafts;
    step(pool, context, slot, position, kDrafts, RSSM_ROW_TENTATIVE, accepted, want);
    position += accepted;
  }
}

static void all_layers_match_the_recurrence(void) {
  static double want[kLayers][kTokens][kOutputs];
  for (int h = 0; h < kHeads; ++h) a_log[h] = pseudo_random() - 1.0f;
  for (int i = 0; i < kHeads * kKey; ++i) dt_bias[i] = pseudo_random();
  for (int t = 0; t < kTokens; ++t) {
    for (int i = 0; i < kProjected; ++i) projected[t][i] = pseudo_random();
    for (int i = 0; i < kHeads * kKey; ++i) gates[t][i] = 2.0f * pseudo_random();
    for (int h = 0; h < kHeads; ++h) betas[t][h] = 2.0f * pseudo_random();
  }
  for (int l = 0; l < kLayers; ++l) reference(&kCases[l], want[l]);

  rssm_threads* threads = NULL;
  CHECK_OK(rssm_threads_create(2, &threads));
  rssm_context context;
  CHECK_OK(rssm_context_init(&context, sizeof context));
  context.threads = threads;
  rssm_pool* pool = make_pool(8);
  int32_t slot = -1;
  CHECK_OK(rssm_pool_acquire(pool, &context, &slot));
  step(pool, &context, slot, 0, 7, RSSM_ROW_COMMITTED, 7, want);
  step(pool, NULL, slot, 7, 3, RSSM_ROW_TENTATIVE, 2, want);

  /* The state goes on in another slot, and in a pool whose window is too small for its records. */
  CHECK_OK(rssm_pool_materialize(pool, &context, slot, 9, 1));
  rssm_pool* small = make_pool(kDrafts);
  step(pool, &context, slot, 9, 3, RSSM_ROW_TENTATIVE, 3, want);
  rssm_image* image = NULL;
  CHECK_OK(rssm_pool_save(pool, &context, slot, &image));
  CHECK_OK(rssm_pool_load(small, &context, 0, rssm_image_data(image), rssm_image_size(image)));
  rssm_image_destroy(image);
  continue_from(pool, &context, slot, 12, want);
  continue_from(pool, &context, 1, 9, want);
  continue_from(small, &context, 0, 12, want);

  char text[512];
  uint64_t needed = 0;
  CHECK_OK(rssm_gated_delta_net_explain(pool, &context, 1, 1, text, sizeof text, &needed));
  CHECK(needed == strlen(text) + 1 && strstr(text, "gated_delta_net 4x16x8") != NULL);
  CHECK(strstr(text, "fast flush") != NULL);
  CHECK_OK(rssm_kimi_delta_attention_explain(pool, NULL, 3, 1, text, sizeof text, NULL));
  CHECK(strstr(text, "kimi_delta_attention 4x16x8") != NULL);
  CHECK(strstr(text, "exact flush") != NULL);
  char cut[8];
  CHECK_OK(rssm_kimi_delta_attention_explain(pool, &context, 3, 1, cut, sizeof cut, NULL));
  CHECK(strcmp(cut, "kimi_de") == 0);

  rssm_pool_destroy(small);
  rssm_pool_destroy(pool);
  rssm_threads_destroy(threads);
}

/* Fast records hold no v and no beta; a copy has its bytes. */
static void sizes_follow_the_layer(void) {
  rssm_layer layer = make_layer(&kCases[0]);
  rssm_pool_options options = one_layer_options(&layer);
  rssm_slot_bytes exact;
  rssm_slot_bytes fast;
  CHECK_OK(rssm_pool_bytes_per_slot(&options, &exact));
  /* With a deferred decay for eight columns. */
  CHECK(exact.checkpoint == kHeads * (kKey * kValue + kValue / 8) * sizeof(float));
  CHECK(exact.read_copy == 0);
  layer.flush = RSSM_FLUSH_FAST;
  CHECK_OK(rssm_pool_bytes_per_slot(&options, &fast));
  CHECK(fast.checkpoint == exact.checkpoint && fast.record_ring < exact.record_ring);
  layer = make_layer(&kCases[2]);
  CHECK_OK(rssm_pool_bytes_per_slot(&options, &fast));
  CHECK(fast.read_copy == kHeads * kValue * (kKey + sizeof(float)));
}

/* f16 operands, records and checkpoint: with q = k = v = 1, gates of 0 and a zero state, one token
 * gives o = K^(-1/2) (q . k) beta v = 4 / 2. */
static void f16_step(const layer_case* c) {
  enum { kOne = 0x3c00, kTwo = 0x4000 };
  const rssm_layer layer = make_layer(c);
  rssm_pool_options options = one_layer_options(&layer);
  options.slots = 1;
  options.checkpoint = options.activation = RSSM_F16;
  rssm_pool* pool = NULL;
  CHECK_OK(rssm_pool_create(&options, &pool));
  rssm_row row = {.token_begin = 0, .token_count = 1, .slot = 0, .kind = RSSM_ROW_TENTATIVE};
  CHECK_OK(rssm_pool_acquire(pool, NULL, &row.slot));
  rssm_step* open = NULL;
  CHECK_OK(rssm_step_begin(pool, NULL, &row, 1, &open));

  uint16_t ones[kHeads * kKey];
  for (int i = 0; i < kHeads * kKey; ++i) ones[i] = kOne;
  float zeros[kHeads * kKey] = {0};
  uint16_t o[kOutputs] = {0};
  rssm_tensor keys = tensor(ones, 3, (int64_t[]){1, c->key_heads, kKey}, 0);
  rssm_tensor values = tensor(ones, 3, (int64_t[]){1, kHeads, kValue}, 0);
  rssm_tensor out = tensor(o, 3, (int64_t[]){1, kHeads, kValue}, 0);
  keys.dtype = values.dtype = out.dtype = RSSM_F16;
  if (c->family == RSSM_FAMILY_GATED_DELTA_NET) {
    rssm_gated_delta_net_args args;
    CHECK_OK(rssm_gated_delta_net_args_init(&args, sizeof args));
    args.normalize = 0;
    args.a_log = tensor(zeros, 1, (int64_t[]){kHeads}, 0);
    args.q = args.k = keys;
    args.v = values;
    args.a = args.b = tensor(zeros, 2, (int64_t[]){1, kHeads}, 0);
    args.o = out;
    CHECK_OK(rssm_gated_delta_net_step(pool, NULL, 0, open, &args));
  } else {
    rssm_kimi_delta_attention_args args;
    CHECK_OK(rssm_kimi_delta_attention_args_init(&args, sizeof args));
    args.normalize = 0;
    args.lower_bound = c->lower_bound; /* without A_log */
    args.q = args.k = keys;
    args.v = values;
    args.a = tensor(zeros, 3, (int64_t[]){1, kHeads, kKey}, 0);
    args.b = tensor(zeros, 2, (int64_t[]){1, kHeads}, 0);
    args.o = out;
    CHECK_OK(rssm_kimi_delta_attention_step(pool, NULL, 0, open, &args));
  }
  const int64_t accepted = 1;
  CHECK_OK(rssm_step_commit(pool, NULL, open, &accepted));
  for (int i = 0; i < kOutputs; ++i) CHECK(o[i] == kTwo);
  rssm_step_destroy(open);
  rssm_pool_destroy(pool);
}

int main(void) {
  all_layers_match_the_recurrence();
  sizes_follow_the_layer();
  f16_step(&kCases[0]);
  f16_step(&kCases[4]);
  if (failures > 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
