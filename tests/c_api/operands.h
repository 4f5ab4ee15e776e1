/* What C programs hand over: options, numbers, and tensors around them. */
#ifndef REPLAYSSM_TESTS_C_API_OPERANDS_H_
#define REPLAYSSM_TESTS_C_API_OPERANDS_H_

#include "check.h"
#include "replayssm/replayssm.h"

/* The defaults for a pool of one layer, which has to stay where it is. */
static inline rssm_pool_options one_layer_options(const rssm_layer* layer) {
  rssm_pool_options options;
  CHECK_OK(rssm_pool_options_init(&options, sizeof options));
  options.layers = layer;
  options.layer_count = 1;
  return options;
}

/* In [-1, 1), the same in every run. */
static inline float pseudo_random(void) {
  static uint32_t state = 12345u;
  state = state * 1664525u + 1013904223u;
  return (float)(state >> 8) / 8388608.0f - 1.0f;
}

/* f32, packed but for the first axis, whose stride is `row` where that is not 0. */
static inline rssm_tensor tensor(void* data, int32_t rank, const int64_t* shape, int64_t row) {
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

#endif /* REPLAYSSM_TESTS_C_API_OPERANDS_H_ */
