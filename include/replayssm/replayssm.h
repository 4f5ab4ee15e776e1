/* The C interface of ReplaySSM: pools, steps and ops on the CPU and on CUDA.
 *
 * The contracts (mathematics, shapes, what may be called when) are those of the C++ headers named
 * at each function. Here:
 *
 *  - Every call that can fail returns an rssm_status; its message, one line, is kept per thread
 *    until that thread's next failing call (rssm_last_error). Nothing is printed or thrown.
 *  - Handles are opaque and belong to the caller, who destroys them. Destroying NULL does nothing.
 *  - Structs that may grow begin with struct_size. Their rssm_..._init takes the caller's sizeof
 *    and fills in defaults. A size this library does not know, that of another version's header,
 *    is refused: by init, which then writes nothing, and by every call. Other structs do not grow.
 *  - A context says where a call runs. NULL is the CPU, on the calling thread. Calls on a CUDA pool
 *    take an RSSM_DEVICE_CUDA context with a stream.
 *  - Calls on one pool, its steps and one thread pool must not overlap; different pools are
 *    independent.
 */
#ifndef REPLAYSSM_REPLAYSSM_H_
#define REPLAYSSM_REPLAYSSM_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define RSSM_API __attribute__((visibility("default")))
#else
#define RSSM_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status ---- */

typedef enum rssm_status {
  RSSM_OK = 0,
  RSSM_INVALID_ARGUMENT = 1,    /* a value that can never be right */
  RSSM_FAILED_PRECONDITION = 2, /* a call in the wrong order */
  RSSM_UNSUPPORTED = 3,         /* well formed, but nothing here handles it */
  RSSM_RESOURCE_EXHAUSTED = 4,  /* memory, slots */
  RSSM_NOT_FOUND = 5,
  RSSM_DATA_LOSS = 6, /* truncated, corrupt or foreign data */
  RSSM_INTERNAL = 7
} rssm_status;

/* Message of this thread's last failing call; "" if none has failed. */
RSSM_API const char* rssm_last_error(void);

/* ---- Versions and devices ---- */

#define RSSM_VERSION_MAJOR 0
#define RSSM_VERSION_MINOR 1

/* Major * 1000 + minor of the library that is loaded; compare with the macros above. */
RSSM_API int rssm_version(void);

typedef enum rssm_device_kind { RSSM_DEVICE_CPU = 0, RSSM_DEVICE_CUDA = 1 } rssm_device_kind;

typedef struct rssm_device_properties {
  char name[128];
  int32_t compute_capability; /* 90 for sm_90, 0 for the CPU; kernels need at least 80 */
  int32_t multiprocessors;
  uint64_t memory; /* bytes; 0 for the CPU */
  uint64_t free_memory;
} rssm_device_properties;

/* Devices of a kind (rssm_device_kind) that can be used; fails, saying why, where there is none. */
RSSM_API rssm_status rssm_device_count(int32_t kind, int32_t* count);
RSSM_API rssm_status rssm_device_query(int32_t kind, int32_t index,
                                       rssm_device_properties* properties);

/* ---- Contexts ---- */

typedef struct rssm_threads rssm_threads;

/* Worker threads for CPU contexts; `count` includes the calling thread. */
RSSM_API rssm_status rssm_threads_create(int32_t count, rssm_threads** threads);
RSSM_API void rssm_threads_destroy(rssm_threads* threads);

typedef struct rssm_context {
  uint32_t struct_size;
  int32_t device_kind;   /* rssm_device_kind */
  int32_t device_index;  /* CUDA */
  void* stream;          /* CUDA: a cudaStream_t; NULL is the default stream */
  rssm_threads* threads; /* CPU; NULL: the calling thread */
} rssm_context;

/* The CPU, on the calling thread. */
RSSM_API rssm_status rssm_context_init(rssm_context* context, size_t size);

/* ---- Tensors ---- */

typedef enum rssm_dtype { RSSM_F32 = 0, RSSM_BF16 = 1, RSSM_F16 = 2 } rssm_dtype;

#define RSSM_MAX_RANK 5

/* A strided window on memory of the pool's device. Strides count elements. data == NULL: absent. */
typedef struct rssm_tensor {
  void* data;
  int32_t dtype; /* rssm_dtype */
  int32_t rank;
  int64_t shape[RSSM_MAX_RANK];
  int64_t strides[RSSM_MAX_RANK];
} rssm_tensor;

/* ---- Pools: state_pool.h ---- */

typedef struct rssm_pool rssm_pool;

/* read_copy.h */
typedef enum rssm_read_copy {
  RSSM_READ_COPY_NONE = 0,
  RSSM_READ_COPY_FP8_E4M3 = 1,
  RSSM_READ_COPY_INT8 = 2,
  RSSM_READ_COPY_NVFP4 = 3
} rssm_read_copy;

/* FlushMode in state_pool.h */
typedef enum rssm_flush {
  RSSM_FLUSH_OF_POOL = -1, /* of a layer: what the pool's options say */
  RSSM_FLUSH_EXACT = 0,
  RSSM_FLUSH_FAST = 1
} rssm_flush;

/* 0 is no family: a layer has to say which it is. */
typedef enum rssm_family {
  RSSM_FAMILY_MAMBA2 = 1,
  RSSM_FAMILY_GATED_DELTA_NET = 2,
  RSSM_FAMILY_KIMI_DELTA_ATTENTION = 3
} rssm_family;

typedef struct rssm_mamba2_shape {
  int64_t heads;
  int64_t head_dim;
  int64_t state_size;
  int64_t groups;
} rssm_mamba2_shape;

typedef struct rssm_gated_delta_net_shape {
  int64_t key_heads;
  int64_t value_heads;
  int64_t key_dim;
  int64_t value_dim;
} rssm_gated_delta_net_shape;

typedef struct rssm_kimi_delta_attention_shape {
  int64_t heads;
  int64_t key_dim;
  int64_t value_dim;
} rssm_kimi_delta_attention_shape;

typedef struct rssm_layer {
  uint32_t struct_size;
  int32_t family; /* rssm_family: the member of `shape` that counts */
  union {
    rssm_mamba2_shape mamba2;
    rssm_gated_delta_net_shape gated_delta_net;
    rssm_kimi_delta_attention_shape kimi_delta_attention;
    int64_t reserved[8]; /* room for families to come */
  } shape;
  int64_t conv_channels; /* 0 with conv_width 0: no convolution */
  int32_t conv_width;
  int32_t read_copy; /* rssm_read_copy */
  int32_t flush;     /* rssm_flush */
} rssm_layer;

/* No family, no convolution, no read copy, the pool's flush mode. */
RSSM_API rssm_status rssm_layer_init(rssm_layer* layer, size_t size);

typedef struct rssm_pool_options {
  uint32_t struct_size;
  int32_t window;         /* L */
  int32_t draft_capacity; /* T */
  int32_t checkpoint;     /* rssm_dtype */
  int32_t activation;     /* rssm_dtype */
  int32_t flush;          /* rssm_flush, of layers that do not say */
  int32_t rewindable;     /* a truth value, as is the next */
  int32_t poison;
  int32_t device_kind; /* rssm_device_kind */
  int32_t device_index;
  const rssm_layer* layers;
  int64_t layer_count;
  int64_t slots;
  int64_t max_rows;        /* CUDA; 0: as many as slots */
  uint64_t page_alignment; /* bytes */
  const char* model_id;    /* NULL: "" */
  void* storage;           /* the caller's memory on the device, or NULL: the pool's own */
  uint64_t storage_bytes;
} rssm_pool_options;

typedef struct rssm_slot_bytes {
  uint64_t checkpoint;
  uint64_t read_copy;
  uint64_t record_ring;
  uint64_t conv_ring;
  uint64_t total; /* with alignment, as allocated */
} rssm_slot_bytes;

typedef struct rssm_cursor {
  int64_t checkpoint_position;
  int64_t position;
  int32_t force_flush;
} rssm_cursor;

RSSM_API rssm_status rssm_pool_options_init(rssm_pool_options* options, size_t size);
RSSM_API rssm_status rssm_pool_bytes_per_slot(const rssm_pool_options* options,
                                              rssm_slot_bytes* bytes);
RSSM_API rssm_status rssm_pool_slots_for_budget(const rssm_pool_options* options, uint64_t budget,
                                                int64_t* slots);

typedef struct rssm_decode_plan {
  int32_t replay;       /* a truth value: by replay, else in place */
  int32_t window;       /* L; 0 in place */
  double plain_seconds; /* estimates per token of one sequence, over all layers */
  double replay_seconds;
  char reason[256]; /* one line for a person */
} rssm_decode_plan;

/* Whether `sequences` sequences are better decoded in place or by replay: decode_plan.h. */
RSSM_API rssm_status rssm_choose_decode(const rssm_context* context,
                                        const rssm_pool_options* options, int64_t sequences,
                                        rssm_decode_plan* plan);

RSSM_API rssm_status rssm_pool_create(const rssm_pool_options* options, rssm_pool** pool);
RSSM_API void rssm_pool_destroy(rssm_pool* pool);

/* a: `count` = heads values in host memory. Layers of the other families need no such call. */
RSSM_API rssm_status rssm_pool_set_mamba2_a(rssm_pool* pool, int32_t layer, const float* a,
                                            int64_t count);

RSSM_API rssm_status rssm_pool_free_slots(const rssm_pool* pool, int64_t* count);
RSSM_API rssm_status rssm_pool_acquire(rssm_pool* pool, const rssm_context* context, int32_t* slot);
RSSM_API rssm_status rssm_pool_reset(rssm_pool* pool, const rssm_context* context, int32_t slot);
RSSM_API rssm_status rssm_pool_release(rssm_pool* pool, const rssm_context* context, int32_t slot);
RSSM_API rssm_status rssm_pool_force_flush(rssm_pool* pool, const rssm_context* context,
                                           int32_t slot);
RSSM_API rssm_status rssm_pool_cursor(const rssm_pool* pool, const rssm_context* context,
                                      int32_t slot, rssm_cursor* cursor);
RSSM_API rssm_status rssm_pool_copy(rssm_pool* pool, const rssm_context* context, int32_t src,
                                    int32_t dst);
RSSM_API rssm_status rssm_pool_materialize(rssm_pool* pool, const rssm_context* context,
                                           int32_t src, int64_t prefix, int32_t dst);
RSSM_API rssm_status rssm_pool_truncate(rssm_pool* pool, const rssm_context* context, int32_t slot,
                                        int64_t position);

/* A saved state, readable until it is destroyed. */
typedef struct rssm_image rssm_image;

RSSM_API rssm_status rssm_pool_save(const rssm_pool* pool, const rssm_context* context,
                                    int32_t slot, rssm_image** image);
RSSM_API const void* rssm_image_data(const rssm_image* image);
RSSM_API uint64_t rssm_image_size(const rssm_image* image);
RSSM_API void rssm_image_destroy(rssm_image* image);
RSSM_API rssm_status rssm_pool_load(rssm_pool* pool, const rssm_context* context, int32_t slot,
                                    const void* data, uint64_t size);

/* ---- Steps: step.h, state_pool.h; with rows on the device: cuda.h ---- */

typedef enum rssm_row_kind { RSSM_ROW_COMMITTED = 0, RSSM_ROW_TENTATIVE = 1 } rssm_row_kind;

/* In host memory, or in device memory for rssm_step_begin_device. */
typedef struct rssm_row {
  int64_t token_begin;
  int64_t token_count;
  int32_t slot; /* negative: padding */
  uint8_t kind; /* rssm_row_kind */
  uint8_t reserved[11];
} rssm_row;

typedef struct rssm_step rssm_step;

RSSM_API rssm_status rssm_step_begin(rssm_pool* pool, const rssm_context* context,
                                     const rssm_row* rows, int64_t row_count, rssm_step** step);
/* rows: device memory. The step's tokens lie in [0, token_count). */
RSSM_API rssm_status rssm_step_begin_device(rssm_pool* pool, const rssm_context* context,
                                            const rssm_row* rows, int64_t row_count,
                                            int64_t token_count, rssm_step** step);
/* accepted: (row_count) in host memory, or in device memory for a step with rows there. */
RSSM_API rssm_status rssm_step_commit(rssm_pool* pool, const rssm_context* context, rssm_step* step,
                                      const int64_t* accepted);
RSSM_API rssm_status rssm_step_abort(rssm_pool* pool, const rssm_context* context, rssm_step* step);
/* Frees the handle. A step that is still open stays so: commit or abort it first. */
RSSM_API void rssm_step_destroy(rssm_step* step);

typedef enum rssm_device_misuse {
  RSSM_DEVICE_NO_ERROR = 0,
  RSSM_DEVICE_BAD_SLOT = 1,
  RSSM_DEVICE_BAD_TOKEN_RANGE = 2,
  RSSM_DEVICE_BAD_TOKEN_COUNT = 3,
  RSSM_DEVICE_BAD_ACCEPTED = 4,
  RSSM_DEVICE_BAD_CURSOR = 5,
  RSSM_DEVICE_DUPLICATE_SLOT = 6,
  RSSM_DEVICE_BAD_CONDITION = 7
} rssm_device_misuse;

typedef struct rssm_device_error {
  int32_t what; /* rssm_device_misuse */
  int32_t row;
  int64_t found;
  int64_t allowed;
} rssm_device_error;

/* The first misuse kernels have found since the last call. Waits for the stream. */
RSSM_API rssm_status rssm_pool_take_device_error(rssm_pool* pool, const rssm_context* context,
                                                 rssm_device_error* error);

/* ---- Ops: the headers in ops/ of the same names ----
 *
 * rssm_..._step runs an op of `layer` for all rows of `step`. rssm_..._explain writes which kernel
 * runs for steps of `rows` rows, and why, to `buffer` (cut to capacity, always terminated);
 * *needed, if not NULL, is the whole text's size with its end. */

typedef struct rssm_mamba2_args {
  uint32_t struct_size;
  int32_t dt_softplus; /* a truth value */
  float dt_min;
  float dt_max;
  rssm_tensor d;       /* (heads) f32, or absent */
  rssm_tensor dt_bias; /* (heads) f32, or absent */
  rssm_tensor x;       /* (tokens, heads, head_dim) */
  rssm_tensor b;       /* (tokens, groups, state_size) */
  rssm_tensor c;       /* (tokens, groups, state_size) */
  rssm_tensor dt;      /* (tokens, heads) */
  rssm_tensor z;       /* (tokens, heads, head_dim), or absent */
  rssm_tensor y;       /* (tokens, heads, head_dim), written */
} rssm_mamba2_args;

RSSM_API rssm_status rssm_mamba2_args_init(rssm_mamba2_args* args, size_t size);
RSSM_API rssm_status rssm_mamba2_step(rssm_pool* pool, const rssm_context* context, int32_t layer,
                                      rssm_step* step, const rssm_mamba2_args* args);
RSSM_API rssm_status rssm_mamba2_explain(const rssm_pool* pool, const rssm_context* context,
                                         int32_t layer, int64_t rows, char* buffer,
                                         uint64_t capacity, uint64_t* needed);

typedef struct rssm_gated_delta_net_args {
  uint32_t struct_size;
  int32_t beta_doubled; /* a truth value, as is the next */
  int32_t normalize;
  float norm_epsilon;
  float scale;         /* of q; 0: key_dim^-1/2 */
  rssm_tensor a_log;   /* (value_heads) f32 */
  rssm_tensor dt_bias; /* (value_heads) f32, or absent */
  rssm_tensor q;       /* (tokens, key_heads, key_dim) */
  rssm_tensor k;       /* (tokens, key_heads, key_dim) */
  rssm_tensor v;       /* (tokens, value_heads, value_dim) */
  rssm_tensor a;       /* (tokens, value_heads) */
  rssm_tensor b;       /* (tokens, value_heads) */
  rssm_tensor o;       /* (tokens, value_heads, value_dim), written */
} rssm_gated_delta_net_args;

RSSM_API rssm_status rssm_gated_delta_net_args_init(rssm_gated_delta_net_args* args, size_t size);
RSSM_API rssm_status rssm_gated_delta_net_step(rssm_pool* pool, const rssm_context* context,
                                               int32_t layer, rssm_step* step,
                                               const rssm_gated_delta_net_args* args);
RSSM_API rssm_status rssm_gated_delta_net_explain(const rssm_pool* pool,
                                                  const rssm_context* context, int32_t layer,
                                                  int64_t rows, char* buffer, uint64_t capacity,
                                                  uint64_t* needed);

typedef struct rssm_kimi_delta_attention_args {
  uint32_t struct_size;
  int32_t beta_doubled; /* a truth value, as is the next */
  int32_t normalize;
  float norm_epsilon;
  float scale;         /* of q; 0: key_dim^-1/2 */
  float lower_bound;   /* below 0: the bounded gate; 0: the other one */
  rssm_tensor a_log;   /* (heads) f32, or, with lower_bound, absent */
  rssm_tensor dt_bias; /* (heads, key_dim) f32, or absent */
  rssm_tensor q;       /* (tokens, heads, key_dim) */
  rssm_tensor k;       /* (tokens, heads, key_dim) */
  rssm_tensor v;       /* (tokens, heads, value_dim) */
  rssm_tensor a;       /* (tokens, heads, key_dim) */
  rssm_tensor b;       /* (tokens, heads) */
  rssm_tensor o;       /* (tokens, heads, value_dim), written */
} rssm_kimi_delta_attention_args;

RSSM_API rssm_status rssm_kimi_delta_attention_args_init(rssm_kimi_delta_attention_args* args,
                                                         size_t size);
RSSM_API rssm_status rssm_kimi_delta_attention_step(rssm_pool* pool, const rssm_context* context,
                                                    int32_t layer, rssm_step* step,
                                                    const rssm_kimi_delta_attention_args* args);
RSSM_API rssm_status rssm_kimi_delta_attention_explain(const rssm_pool* pool,
                                                       const rssm_context* context, int32_t layer,
                                                       int64_t rows, char* buffer,
                                                       uint64_t capacity, uint64_t* needed);

typedef struct rssm_causal_conv1d_args {
  uint32_t struct_size;
  int32_t silu;       /* a truth value */
  rssm_tensor u;      /* (tokens, channels) */
  rssm_tensor weight; /* (width, channels) f32 */
  rssm_tensor bias;   /* (channels) f32, or absent */
  rssm_tensor out;    /* (tokens, channels), written */
} rssm_causal_conv1d_args;

RSSM_API rssm_status rssm_causal_conv1d_args_init(rssm_causal_conv1d_args* args, size_t size);
RSSM_API rssm_status rssm_causal_conv1d_step(rssm_pool* pool, const rssm_context* context,
                                             int32_t layer, rssm_step* step,
                                             const rssm_causal_conv1d_args* args);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* REPLAYSSM_REPLAYSSM_H_ */
