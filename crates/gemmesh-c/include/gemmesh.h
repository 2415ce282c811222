// gemmesh: multi-GPU matrix products that hide their communication.
//
// Ranks are the workers of a group, numbered from 0 to W - 1, and each is a process or a thread. A collective call is
// one that all ranks make, and all make the same collective calls in the same order. Matrices are row-major. M is rows,
// N is output features, K is input features. A weight is [N, K].
//
// Errors. A function that can fail returns a gemmesh_status, and writes its results through its last pointers only if
// it returns GEMMESH_OK. gemmesh_last_error() has the sentence. After GEMMESH_ERROR_ARGUMENT and GEMMESH_ERROR_MISUSE
// nothing has been done, and the call may be made again with different arguments. If an argument of a collective call is
// refused and the call is not made again, ranks that wait for it get GEMMESH_ERROR_RANK half a second later, and the
// group has failed. (Of a freed handle they are not told.) Most other failures end the group on every rank, and every
// rank learns which rank is at fault.
//
// Ownership. A handle is freed once, by its free function. Using a freed handle is an error. Matrices and prepared
// products keep their group alive, so handles are freed in any order. Structs and arrays are read before a function
// returns, and are not kept. A gemmesh_memory owns nothing.
//
// Threads. Any thread may use any handle. The calls of one group run one after the other. The error is that of the
// thread.
//
// Callbacks run on the thread of the call. They must not throw, and must not call functions of the same group.


#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

// What a call returns: GEMMESH_OK, or what kind of failure it was.
enum gemmesh_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Done.
  GEMMESH_OK = 0,
  // An argument does not fit, or asks for something that is not supported. Nothing has been done.
  GEMMESH_ERROR_ARGUMENT = 1,
  // The call may not be made here or now. Nothing has been done.
  GEMMESH_ERROR_MISUSE = 2,
  // The environment does not say who this rank is.
  GEMMESH_ERROR_ENVIRONMENT = 3,
  // The ranks did not find one another, or do not fit together.
  GEMMESH_ERROR_RENDEZVOUS = 4,
  // The ranks made different calls.
  GEMMESH_ERROR_CALL_MISMATCH = 5,
  // There is no memory.
  GEMMESH_ERROR_OUT_OF_MEMORY = 6,
  // A rank died, left, was refused a call that others made, or its program or callback failed.
  GEMMESH_ERROR_RANK = 7,
  // A deadline has passed.
  GEMMESH_ERROR_TIMEOUT = 8,
  // A GPU or its driver lacks something or failed.
  GEMMESH_ERROR_DEVICE = 9,
  // The operating system refused something.
  GEMMESH_ERROR_SYSTEM = 10,
  // A bug of this library.
  GEMMESH_ERROR_INTERNAL = 11,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gemmesh_status gemmesh_status;
#else
typedef uint32_t gemmesh_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Where a group's matrices are and its operations run.
enum gemmesh_backend
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // In the process's memory, on its cores.
  GEMMESH_HOST = 0,
  // On an NVIDIA GPU, if the library was built for it. Addresses are those of the device (CUdeviceptr).
  GEMMESH_CUDA = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gemmesh_backend gemmesh_backend;
#else
typedef uint32_t gemmesh_backend;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What the bits of results may depend on.
enum gemmesh_numerics
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // As GEMMESH_NUMERICS_FAST; for a part of a group, as that group.
  GEMMESH_NUMERICS_DEFAULT = 0,
  // On all that affects speed.
  GEMMESH_NUMERICS_FAST = 1,
  // On K, the type of the elements and the device only. A row has the same bits in every batch.
  GEMMESH_NUMERICS_INVARIANT = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gemmesh_numerics gemmesh_numerics;
#else
typedef uint32_t gemmesh_numerics;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The type of elements.
enum gemmesh_dtype
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // No type is given.
  GEMMESH_NO_DTYPE = 0,
  // bfloat16: 8 bits of exponent, 7 of fraction.
  GEMMESH_BF16 = 1,
  // IEEE 754 binary16.
  GEMMESH_F16 = 2,
  // IEEE 754 binary32.
  GEMMESH_F32 = 3,
  // fp8 with 4 bits of exponent and 3 of fraction, up to 448, without infinity.
  GEMMESH_F8E4M3 = 4,
  // fp8 with 5 bits of exponent and 2 of fraction, up to 57344.
  GEMMESH_F8E5M2 = 5,
  // A byte.
  GEMMESH_U8 = 6,
  // 16 bits.
  GEMMESH_U16 = 7,
  // 32 bits.
  GEMMESH_U32 = 8,
  // 64 bits.
  GEMMESH_U64 = 9,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gemmesh_dtype gemmesh_dtype;
#else
typedef uint32_t gemmesh_dtype;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Which product. W is the number of ranks.
enum gemmesh_product_kind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // out [M, N] = a [M, K] * weight [N, K]^T, on this rank alone.
  GEMMESH_MATMUL = 0,
  // The same, where a is sharded: its rows are gathered while they are multiplied. Afterwards a holds all rows on
  // every rank. N may differ between ranks. Collective.
  GEMMESH_ALL_GATHER_MATMUL = 1,
  // Each rank has a part of K. Each rank gets its rows of the sum of all ranks' products: out is [own rows, N], or a
  // sharded matrix [M, N], of which this rank's rows are written. Collective.
  GEMMESH_MATMUL_REDUCE_SCATTER = 2,
  // Each rank has a part of K. Every rank gets the whole sum, in a sharded matrix [M, N]. Collective.
  GEMMESH_MATMUL_ALL_REDUCE = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gemmesh_product_kind gemmesh_product_kind;
#else
typedef uint32_t gemmesh_product_kind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What is applied to a product, or to a sum of products, after the bias and before the residual.
enum gemmesh_activation
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // x
  GEMMESH_IDENTITY = 0,
  // max(x, 0)
  GEMMESH_RELU = 1,
  // x * Phi(x), with the distribution function of the standard normal distribution.
  GEMMESH_GELU = 2,
  // The tanh approximation of GELU.
  GEMMESH_GELU_TANH = 3,
  // x / (1 + exp(-x)), also called swish.
  GEMMESH_SILU = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gemmesh_activation gemmesh_activation;
#else
typedef uint32_t gemmesh_activation;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// How weights are stored.
enum gemmesh_weight_layout
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // [N, K], as PyTorch's linear layers store it.
  GEMMESH_WEIGHTS_NK = 0,
  // [K, N].
  GEMMESH_WEIGHTS_KN = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gemmesh_weight_layout gemmesh_weight_layout;
#else
typedef uint32_t gemmesh_weight_layout;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// How products of fp8 are summed on GPUs.
enum gemmesh_accumulation
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Every 128 of K are summed separately. These sums are then added in f32.
  GEMMESH_ACCUMULATION_PROMOTED = 0,
  // Tensor cores may sum all of K, with about 13 bits. It takes less time, and the error grows with K.
  GEMMESH_ACCUMULATION_FAST = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gemmesh_accumulation gemmesh_accumulation;
#else
typedef uint32_t gemmesh_accumulation;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Who moves rows between ranks.
enum gemmesh_route
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // The library chooses.
  GEMMESH_ROUTE_DEFAULT = 0,
  // The copy engine of the rank that needs them.
  GEMMESH_ROUTE_PULL = 1,
  // The copy engine of the rank that owns them.
  GEMMESH_ROUTE_PUSH = 2,
  // A kernel of the rank that owns them.
  GEMMESH_ROUTE_STORE = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gemmesh_route gemmesh_route;
#else
typedef uint32_t gemmesh_route;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Which values of an operand of fp8 share a scale. A value is its fp8 number times its scale. Scales are f32.
enum gemmesh_scaling_kind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // There are no scales.
  GEMMESH_SCALING_NONE = 0,
  // All: [1, 1].
  GEMMESH_SCALING_TENSOR = 1,
  // Those of a row: [1, M] for a, [1, N] for a weight.
  GEMMESH_SCALING_ROWS = 2,
  // Those of a block. A block of a is 1 x 128: [M, ceil((first_column + K)/128)]. A block of a weight is 128 x 128:
  // [ceil((first_row + N)/128), ceil((first_column + K)/128)].
  GEMMESH_SCALING_BLOCKS = 3,
  // Blocks of a, with the scales of a row in a column: [ceil(K/128), M].
  GEMMESH_SCALING_TRANSPOSED_BLOCKS = 4,
  // Those of a row of a sharded a. The scales are sharded with it: [M, gemmesh_scale_columns()].
  GEMMESH_SCALING_SHARDED_ROWS = 5,
  // Blocks of a sharded a. The scales are sharded with it: [M, gemmesh_scale_columns()].
  GEMMESH_SCALING_SHARDED_BLOCKS = 6,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gemmesh_scaling_kind gemmesh_scaling_kind;
#else
typedef uint32_t gemmesh_scaling_kind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// How an output becomes fp8.
enum gemmesh_quantization_kind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // It does not, or it is rounded without a scale.
  GEMMESH_QUANTIZATION_NONE = 0,
  // By one scale, [1, 1], that the caller gives.
  GEMMESH_QUANTIZATION_TENSOR = 1,
  // By a scale for each 128 columns of a row, which the call makes: [M, ceil(N/128)].
  GEMMESH_QUANTIZATION_BLOCKS = 2,
  // The same, with the scales of a row in a column: [ceil(N/128), M].
  GEMMESH_QUANTIZATION_TRANSPOSED_BLOCKS = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gemmesh_quantization_kind gemmesh_quantization_kind;
#else
typedef uint32_t gemmesh_quantization_kind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// A group of ranks, which make collective calls together. Made by gemmesh_group_from_env, gemmesh_group_connect,
// gemmesh_group_connect_with or gemmesh_group_split, freed by gemmesh_group_free.
typedef struct gemmesh_group gemmesh_group;

// A matrix in memory of this rank that gemmesh has allocated. Made by gemmesh_matrix_zeros, freed by
// gemmesh_matrix_free. It keeps its group alive.
typedef struct gemmesh_matrix gemmesh_matrix;

// A product that has been planned for a shape, so that it can run many times. Made by gemmesh_prepare, freed by
// gemmesh_prepared_free. It keeps its group alive.
typedef struct gemmesh_prepared gemmesh_prepared;

// A matrix whose rows are spread over the ranks. Every rank has memory for all rows, owns some, and gets the others by
// gathers. Made by the gemmesh_sharded_new functions, freed by gemmesh_sharded_free. It keeps its group alive.
typedef struct gemmesh_sharded gemmesh_sharded;

// Options of a group. gemmesh_group_options_default() returns the default ones.
typedef struct gemmesh_group_options {
  // sizeof(gemmesh_group_options)
  size_t struct_size;
  // Where the group's matrices are. Ignored by gemmesh_group_split, whose part has its group's.
  gemmesh_backend backend;
  // What the bits of results may depend on.
  gemmesh_numerics numerics;
  // How long a rank waits in a call that all ranks have begun, in milliseconds. 0: 30 seconds.
  uint64_t timeout_ms;
  // How long a rank waits for ranks that have not come to a call, in milliseconds. 0: as long as they live, and ten
  // minutes until all have joined.
  uint64_t arrival_timeout_ms;
  // How long the system of another host may acknowledge nothing before the host is lost, in milliseconds. 0: 1250.
  // Less than 500 is taken for 500.
  uint64_t host_timeout_ms;
  // Threads that work for this rank on the host backend. 0: this rank's part of the cores.
  size_t workers;
  // The GPU, as CUDA numbers it in this process. Negative: the ranks take the visible GPUs in turn.
  int64_t device;
  // How many CTAs a product's kernel has at most. 0: as many as the GPU takes.
  size_t max_ctas;
  // The group's name in errors, or NULL. All ranks give the same.
  const char *name;
} gemmesh_group_options;

// A function that sends this rank's `bytes` bytes to all ranks, and writes those of all ranks to `all`, by rank: as
// MPI_Allgather. It returns 0 or an error. It must not throw.
typedef int (*gemmesh_gather)(const void *mine, void *all, size_t bytes, void *context);

// How an operand is scaled.
typedef struct gemmesh_scaling {
  // Which values share a scale.
  gemmesh_scaling_kind kind;
  // Of the blocks of a weight: the weight's first row within its first block, a multiple of 16 below 128.
  size_t first_row;
  // Of GEMMESH_SCALING_BLOCKS: the first column within its first block, a multiple of 16 below 128. It is the same for
  // a and all weights.
  size_t first_column;
} gemmesh_scaling;

// A row-major matrix in this rank's memory. It describes memory and owns none. The memory stays valid until the calls
// that get it are complete (gemmesh_synchronize), and no one else writes it meanwhile.
typedef struct gemmesh_memory {
  // The first element. On the CUDA backend an address of the device.
  void *address;
  // The type of the elements.
  gemmesh_dtype dtype;
  // The number of rows.
  size_t rows;
  // The number of columns.
  size_t columns;
  // Bytes from row to row, a multiple of gemmesh_group_row_alignment. 0: the rows lie one after the other.
  size_t pitch;
} gemmesh_memory;

// Consecutive rows.
typedef struct gemmesh_range {
  // The first row.
  size_t first;
  // The number of rows.
  size_t count;
} gemmesh_range;

// How an output is quantised.
typedef struct gemmesh_quantization {
  // By which scales.
  gemmesh_quantization_kind kind;
  // Not 0: scales that are made are rounded up to powers of two.
  int power_of_two;
  // Of GEMMESH_QUANTIZATION_BLOCKS: the first column within its first block, a multiple of 16 below 128. The scales are
  // then [M, ceil((first_column + N)/128)].
  size_t first_column;
} gemmesh_quantization;

// A product. gemmesh_product_default() returns one with default options.
//
// A result is activation(a * weight + bias) + residual in f32, rounded once.
typedef struct gemmesh_product {
  // sizeof(gemmesh_product)
  size_t struct_size;
  // Which product.
  gemmesh_product_kind kind;
  // The type of a: GEMMESH_BF16, GEMMESH_F16, GEMMESH_F8E4M3 or GEMMESH_F8E5M2.
  gemmesh_dtype dtype;
  // What is applied to the result.
  gemmesh_activation activation;
  // How the weights are stored.
  gemmesh_weight_layout weight_layout;
  // How products of fp8 are summed.
  gemmesh_accumulation accumulation;
  // Not 0: of two weights, activation(a * first) * (a * second) is the one output. The first is the gate.
  int gated;
  // Not 0: the weights do not change from call to call. GPUs then load them before the rank's earlier work is done.
  int constant_weights;
  // In how many stages GEMMESH_ALL_GATHER_MATMUL gathers. 0: one.
  size_t stages;
  // How many rows of the sum each rank gets of GEMMESH_MATMUL_REDUCE_SCATTER, one number for each rank. NULL:
  // evenly.
  const size_t *rows;
  // How many numbers `rows` has.
  size_t row_count;
  // For gemmesh_prepare and gemmesh_supported: the type of the weights. GEMMESH_NO_DTYPE: that of a, or
  // GEMMESH_F8E4M3 if a is fp8.
  gemmesh_dtype weight_dtype;
  // For gemmesh_prepare and gemmesh_supported: the type of the outputs. GEMMESH_NO_DTYPE: GEMMESH_F8E4M3 if they are
  // quantised, otherwise that of a, or GEMMESH_BF16 if a is fp8.
  gemmesh_dtype output_dtype;
  // For gemmesh_prepare and gemmesh_supported: how a is scaled.
  struct gemmesh_scaling scaling;
  // For gemmesh_prepare and gemmesh_supported: how the weights are scaled, one entry for each or one for all.
  const struct gemmesh_scaling *weight_scaling;
  // How many entries `weight_scaling` has.
  size_t weight_scaling_count;
  // For gemmesh_prepare and gemmesh_supported: how the outputs are quantised.
  struct gemmesh_quantization quantization;
  // For gemmesh_prepare: who moves rows. All ranks give the same. A gather that pulls cannot be captured in a CUDA
  // graph.
  gemmesh_route route;
} gemmesh_product;

// An operand in this rank's memory.
typedef struct gemmesh_operand {
  // The values.
  struct gemmesh_memory values;
  // Their scales, or NULL if there are none.
  const struct gemmesh_memory *scales;
  // How the scales belong to the values.
  struct gemmesh_scaling scaling;
} gemmesh_operand;

// A sharded operand. At most one of the two kinds of scales is given.
typedef struct gemmesh_sharded_operand {
  // The values.
  const struct gemmesh_sharded *values;
  // Scales that this rank has for all rows, or NULL.
  const struct gemmesh_memory *own_scales;
  // Scales that are gathered with the rows, or NULL.
  const struct gemmesh_sharded *sharded_scales;
  // How the scales belong to the values.
  struct gemmesh_scaling scaling;
} gemmesh_sharded_operand;

// An output in this rank's memory.
typedef struct gemmesh_output {
  // The values.
  struct gemmesh_memory values;
  // The scales of a quantised output, or NULL.
  const struct gemmesh_memory *scales;
  // How the output is quantised, if it has scales.
  struct gemmesh_quantization quantization;
} gemmesh_output;

// The arguments of a product. gemmesh_product_call_default() returns one without arguments.
typedef struct gemmesh_product_call {
  // sizeof(gemmesh_product_call)
  size_t struct_size;
  // a, if it is this rank's own. Otherwise NULL.
  const struct gemmesh_operand *a;
  // a, if it is sharded. Otherwise NULL.
  const struct gemmesh_sharded_operand *sharded_a;
  // From one weight to four.
  const struct gemmesh_operand *weights;
  // How many weights there are.
  size_t weight_count;
  // An output for each weight, or one if the product is gated. NULL if the output is sharded.
  const struct gemmesh_output *outputs;
  // How many outputs there are.
  size_t output_count;
  // The sums, if they go to a sharded matrix. Otherwise NULL.
  const struct gemmesh_sharded *sharded_output;
  // [1, N], or NULL. Either all ranks give one or none does.
  const struct gemmesh_memory *bias;
  // Of the shape of the result, or NULL. Either all ranks give one or none does.
  const struct gemmesh_memory *residual;
} gemmesh_product_call;

// Rows that a callback gets.
typedef struct gemmesh_rows {
  // Their numbers. Rows that have arrived are numbered in the matrix. Rows to be made are numbered among the rows of
  // the sum or, for gemmesh_produce_and_all_to_all, among those for the rank.
  struct gemmesh_range rows;
  // The rank that owns rows that have arrived, or that gets rows to be made.
  size_t rank;
  // Where they are, or have to be written.
  struct gemmesh_memory memory;
  // The CUstream for the work that reads or makes them. NULL on the host backend.
  void *stream;
} gemmesh_rows;

// A function that gets rows or makes them. It returns 0, or an error, after which the group has failed: other ranks get
// GEMMESH_ERROR_RANK from this call or their next one. It may say why by gemmesh_set_reason. It must not throw, nor call
// a function of the same group.
typedef int (*gemmesh_on_rows)(const struct gemmesh_rows *rows, void *context);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library, such as "0.1.0".
const char *gemmesh_version(void);

// The whole sentence of the last call on this thread that failed. It names the rank at fault. Empty if none has
// failed. It is valid until the next call on this thread fails, or the thread ends.
const char *gemmesh_last_error(void);

// The first rank at fault of the last call on this thread that failed, or -1 if no rank is.
int64_t gemmesh_last_error_rank(void);

// The name of the last call on this thread that failed, or NULL if none has failed. It is valid as long as the
// sentence. It may be the name of another rank's call.
const char *gemmesh_last_error_call(void);

// Joins the group that a launcher (torchrun, mpirun, srun) describes in the environment. `options` may be NULL.
// Collective.
gemmesh_status gemmesh_group_from_env(const struct gemmesh_group_options *options, struct gemmesh_group **group);

// Joins a group of `world` ranks of one host, which give the same address: a name of their choice. This process is
// rank `rank`, from 0 to world - 1. `options` may be NULL. Collective.
gemmesh_status gemmesh_group_connect(size_t rank,
                                     size_t world,
                                     const char *address,
                                     const struct gemmesh_group_options *options,
                                     struct gemmesh_group **group);

// Joins a group whose ranks have no common address, but can send one another bytes, as by MPI or by a store. `gather`
// is called once, with `context`. gemmesh_mpi.h has one for MPI. `options` may be NULL. Collective.
gemmesh_status gemmesh_group_connect_with(size_t rank,
                                          size_t world,
                                          gemmesh_gather gather,
                                          void *context,
                                          const struct gemmesh_group_options *options,
                                          struct gemmesh_group **group);

// Splits a group into parts. The ranks that give the same `color` are a group of their own, numbered by `key`, then by
// rank. `options` may be NULL; the part then has those of the group. Collective.
gemmesh_status gemmesh_group_split(const struct gemmesh_group *group,
                                   size_t color,
                                   size_t key,
                                   const struct gemmesh_group_options *options,
                                   struct gemmesh_group **part);

// Frees a group's handle; NULL is none. The group ends when its matrices and prepared products are freed too.
gemmesh_status gemmesh_group_free(struct gemmesh_group *group);

// The number of this rank in the group.
gemmesh_status gemmesh_group_rank(const struct gemmesh_group *group, size_t *rank);

// The number of ranks.
gemmesh_status gemmesh_group_world_size(const struct gemmesh_group *group, size_t *world);

// The group's name, or NULL if it has none. It is valid until the handle is freed.
gemmesh_status gemmesh_group_name(const struct gemmesh_group *group, const char **name);

// The group's backend.
gemmesh_status gemmesh_group_backend(const struct gemmesh_group *group, gemmesh_backend *backend);

// The number of this rank's GPU in this process. 0 on the host backend.
gemmesh_status gemmesh_group_device(const struct gemmesh_group *group, int32_t *device);

// Addresses and pitches of matrices are multiples of so many bytes.
gemmesh_status gemmesh_group_row_alignment(const struct gemmesh_group *group, size_t *bytes);

// How many of `m` rows each rank owns, if they are split evenly. `rows` has room for a number for each rank, `count`
// of them.
gemmesh_status gemmesh_group_even_rows(const struct gemmesh_group *group, size_t m, size_t *rows, size_t count);

// Waits until this rank's operations are complete.
gemmesh_status gemmesh_synchronize(const struct gemmesh_group *group);

// Waits until all ranks have come to the barrier. Collective.
gemmesh_status gemmesh_barrier(const struct gemmesh_group *group);

// Sends this rank's `bytes` bytes to all ranks, and writes those of all ranks to `all`, by rank. All ranks send the
// same number of bytes, so `all` has room for W times as many. Collective.
gemmesh_status gemmesh_all_gather_bytes(const struct gemmesh_group *group, const void *mine, void *all, size_t bytes);

// How long this rank has waited for each other rank in operations, in nanoseconds, by rank. `times` has room for
// `count` numbers, one for each rank.
gemmesh_status gemmesh_wait_times(const struct gemmesh_group *group, uint64_t *times, size_t count);

// Returns the group's failure, if it has failed.
gemmesh_status gemmesh_check(const struct gemmesh_group *group);

// Says that this rank's program has failed, and why. The group fails on every rank. Returns the status of that
// failure, so that a program can return it.
gemmesh_status gemmesh_fail(const struct gemmesh_group *group, const char *reason);

// The CUstream on which the group's operations run. NULL on the host backend.
gemmesh_status gemmesh_group_stream(const struct gemmesh_group *group, void **stream);

// Puts later operations on a CUstream of the group's device, which stays valid until the group ends or has another.
// They begin after the earlier ones. Nothing is done on the host backend.
gemmesh_status gemmesh_group_set_stream(const struct gemmesh_group *group, void *stream);

// Records a CUevent after all operations so far. Nothing is done on the host backend.
gemmesh_status gemmesh_record_event(const struct gemmesh_group *group, void *event);

// Makes later operations wait for a CUevent. Nothing is done on the host backend.
gemmesh_status gemmesh_wait_for_event(const struct gemmesh_group *group, void *event);

// The columns of scales that are sharded with an operand [M, K], whose scaling is GEMMESH_SCALING_SHARDED_ROWS or
// GEMMESH_SCALING_SHARDED_BLOCKS. Those after the scales have no meaning.
gemmesh_status gemmesh_scale_columns(const struct gemmesh_group *group,
                                     const struct gemmesh_scaling *scaling,
                                     size_t k,
                                     size_t *columns);

// Allocates a matrix of zeros.
gemmesh_status gemmesh_matrix_zeros(const struct gemmesh_group *group,
                                    gemmesh_dtype dtype,
                                    size_t rows,
                                    size_t columns,
                                    struct gemmesh_matrix **matrix);

// Describes a matrix. The description is valid until the matrix is freed.
gemmesh_status gemmesh_matrix_memory(const struct gemmesh_matrix *matrix, struct gemmesh_memory *memory);

// Frees a matrix; NULL is none. Its memory is freed when the operations that use it are complete.
gemmesh_status gemmesh_matrix_free(struct gemmesh_matrix *matrix);

// Copies from the host, when all work on the group's stream is complete. The host's rows lie one after the other,
// `bytes` bytes in all.
gemmesh_status gemmesh_copy_from_host(const struct gemmesh_group *group,
                                      const struct gemmesh_memory *to,
                                      const void *from,
                                      size_t bytes);

// Copies to the host, when all work on the group's stream is complete. The host's rows lie one after the other,
// `bytes` bytes in all.
gemmesh_status gemmesh_copy_to_host(const struct gemmesh_group *group,
                                    const struct gemmesh_memory *from,
                                    void *to,
                                    size_t bytes);

// Copies a matrix to another of the same shape and type, after the earlier operations and before the later ones.
gemmesh_status gemmesh_copy(const struct gemmesh_group *group,
                            const struct gemmesh_memory *from,
                            const struct gemmesh_memory *to);

// Allocates a sharded matrix [m, k], whose rows are split evenly. Collective.
gemmesh_status gemmesh_sharded_new(const struct gemmesh_group *group,
                                   gemmesh_dtype dtype,
                                   size_t m,
                                   size_t k,
                                   struct gemmesh_sharded **matrix);

// Allocates a sharded matrix of which each rank owns as many rows as `rows` says: `count` numbers, by rank, the same
// on every rank. Collective.
gemmesh_status gemmesh_sharded_new_by_rank(const struct gemmesh_group *group,
                                           gemmesh_dtype dtype,
                                           const size_t *rows,
                                           size_t count,
                                           size_t k,
                                           struct gemmesh_sharded **matrix);

// Allocates a sharded matrix with room for `capacity` rows, split evenly at first. gemmesh_sharded_set_rows says how
// many there are. Collective.
gemmesh_status gemmesh_sharded_new_with_capacity(const struct gemmesh_group *group,
                                                 gemmesh_dtype dtype,
                                                 size_t capacity,
                                                 size_t k,
                                                 struct gemmesh_sharded **matrix);

// Allocates a sharded matrix that is gathered in `stages` stages. Each rank's rows are cut into as many blocks, and
// memory has the first block of each rank, then the second of each: gemmesh_sharded_blocks_of. Collective.
gemmesh_status gemmesh_sharded_new_staged(const struct gemmesh_group *group,
                                          gemmesh_dtype dtype,
                                          size_t m,
                                          size_t k,
                                          size_t stages,
                                          struct gemmesh_sharded **matrix);

// Frees a sharded matrix; NULL is none. Its memory is freed when the operations that use it are complete on all ranks.
gemmesh_status gemmesh_sharded_free(struct gemmesh_sharded *matrix);

// Describes this rank's copy of the whole matrix [M, K]. The rows of other ranks are those of the last gather. The
// description is valid until the matrix has other rows or is freed.
gemmesh_status gemmesh_sharded_whole(const struct gemmesh_sharded *matrix, struct gemmesh_memory *memory);

// Describes the rows that this rank owns, to be read or written. They must lie in one place, so the matrix has one
// stage. The description is valid until the matrix has other rows or is freed.
gemmesh_status gemmesh_sharded_own_rows(const struct gemmesh_sharded *matrix, struct gemmesh_memory *memory);

// The rows that `rank` owns, counted rank after rank. There are none if the group has no such rank.
gemmesh_status gemmesh_sharded_rows_of(const struct gemmesh_sharded *matrix, size_t rank, struct gemmesh_range *rows);

// Where the rows that `rank` owns lie in the matrix: one range, or one for each stage of a staged matrix. `count` gets
// their number. `blocks` has room for `room` ranges; the first ones are written.
gemmesh_status gemmesh_sharded_blocks_of(const struct gemmesh_sharded *matrix,
                                         size_t rank,
                                         struct gemmesh_range *blocks,
                                         size_t room,
                                         size_t *count);

// How many rows fit into the matrix.
gemmesh_status gemmesh_sharded_capacity(const struct gemmesh_sharded *matrix, size_t *capacity);

// Changes how many rows each rank owns. `rows` has `count` numbers, one for each rank. The contents are lost. It is
// not collective, but all ranks give the same numbers. No call that uses the matrix may be running on another thread.
gemmesh_status gemmesh_sharded_set_rows(struct gemmesh_sharded *matrix, const size_t *rows, size_t count);

// Runs a product: matmul, all_gather_matmul, matmul_reduce_scatter or matmul_all_reduce. It returns when the operation
// has been begun: wait by gemmesh_synchronize before the host reads the outputs. Collective, unless it is
// GEMMESH_MATMUL.
gemmesh_status gemmesh_run(const struct gemmesh_group *group,
                           const struct gemmesh_product *product,
                           const struct gemmesh_product_call *call);

// Plans a product, so that it can run many times. The weights have the N of `widths`, `width_count` numbers.
//
// GEMMESH_MATMUL: a is [m, k], and `sharded` is NULL. GEMMESH_ALL_GATHER_MATMUL: a is like `sharded`, and m and k are
// not read. GEMMESH_MATMUL_REDUCE_SCATTER: a is [m, k], and `sharded` is NULL, although sums may go to a sharded
// matrix. GEMMESH_MATMUL_ALL_REDUCE: a is [m, k], and sums go to a matrix like `sharded`.
gemmesh_status gemmesh_prepare(const struct gemmesh_group *group,
                               const struct gemmesh_product *product,
                               size_t m,
                               size_t k,
                               const struct gemmesh_sharded *sharded,
                               const size_t *widths,
                               size_t width_count,
                               struct gemmesh_prepared **prepared);

// Runs a prepared product, as gemmesh_run.
gemmesh_status gemmesh_prepared_run(const struct gemmesh_prepared *prepared, const struct gemmesh_product_call *call);

// How a prepared product is cut up, and how long that is expected to take: some lines of text. They are valid until it
// is freed.
gemmesh_status gemmesh_prepared_explain(const struct gemmesh_prepared *prepared, const char **explanation);

// Frees a prepared product; NULL is none.
gemmesh_status gemmesh_prepared_free(struct gemmesh_prepared *prepared);

// Returns GEMMESH_OK if the group can multiply rows [m, k] with weights of the N of `widths`, `width_count` numbers.
// Otherwise the status and the sentence are those that the call would give. `rows` is NULL, or says how many rows each
// rank owns, `row_count` numbers; `m` is not read then. Each rank asks for itself.
gemmesh_status gemmesh_supported(const struct gemmesh_group *group,
                                 const struct gemmesh_product *product,
                                 size_t m,
                                 size_t k,
                                 const size_t *rows,
                                 size_t row_count,
                                 const size_t *widths,
                                 size_t width_count);

// Makes fp8 and its scales of bf16, f16 or f32. `out` is GEMMESH_F8E4M3, of the shape of `x`. `scales` is written,
// unless the quantization is GEMMESH_QUANTIZATION_TENSOR. All three may be own rows of sharded matrices.
gemmesh_status gemmesh_quantize(const struct gemmesh_group *group,
                                const struct gemmesh_memory *x,
                                const struct gemmesh_memory *out,
                                const struct gemmesh_memory *scales,
                                const struct gemmesh_quantization *quantization);

// Gathers the rows of a sharded matrix on every rank. Collective.
gemmesh_status gemmesh_all_gather(const struct gemmesh_group *group, const struct gemmesh_sharded *a);

// Gives every rank all rows of a sharded matrix as rank `root` has them. Collective.
gemmesh_status gemmesh_broadcast(const struct gemmesh_group *group, const struct gemmesh_sharded *a, size_t root);

// Adds the matrices [M, N] of all ranks. Each rank gets its rows of the sum in `out`, whose rows say how many.
// Collective.
gemmesh_status gemmesh_reduce_scatter(const struct gemmesh_group *group,
                                      const struct gemmesh_memory *a,
                                      const struct gemmesh_memory *out);

// Adds the matrices [M, N] of all ranks. Every rank gets the whole sum, in a sharded matrix [M, N]. Collective.
gemmesh_status gemmesh_all_reduce(const struct gemmesh_group *group,
                                  const struct gemmesh_memory *a,
                                  const struct gemmesh_sharded *out);

// Sends each rank its block of `a`: block r of rank s becomes block s of rank r, in a sharded matrix. Collective.
//
// `counts` is NULL if a rank sends every rank as many rows as it has of `out`. Otherwise rank s sends rank r
// `counts[s * W + r]` rows, `pair_count` numbers, W * W in all, the same on every rank. The blocks follow one another in
// `a`, and in the first rows of `out`. Its other rows stay as they are.
gemmesh_status gemmesh_all_to_all(const struct gemmesh_group *group,
                                  const struct gemmesh_memory *a,
                                  const struct gemmesh_sharded *out,
                                  const size_t *counts,
                                  size_t pair_count);

// Says why the callback that runs on this thread is about to return an error. The words are copied.
gemmesh_status gemmesh_set_reason(const char *reason);

// Gathers the rows of `a`, and calls `consume` for each chunk of rows that arrives, first for this rank's own. On the
// host the rows have arrived when it is called. On GPUs it puts its work on the chunk's stream.
//
// Each other rank's rows are cut into `chunks` chunks, from 1 to 64, and gathered in `stages` stages. 0: the default.
// Collective.
gemmesh_status gemmesh_all_gather_and_consume(const struct gemmesh_group *group,
                                              const struct gemmesh_sharded *a,
                                              size_t chunks,
                                              size_t stages,
                                              gemmesh_on_rows consume,
                                              void *context);

// Adds the rows [m, N] that `produce` makes on all ranks. Each rank gets its rows of the sum in `out`. `produce` is
// called block by block, last for this rank's own rows, and a block is sent while the next is made. On the host it
// writes the block's memory before it returns. On GPUs it puts its work on the block's stream.
//
// `rows` is NULL if the rows are split evenly, or says how many each rank gets, `row_count` numbers, m in all. The
// rows of each other rank are made in at most `chunks` blocks, from 1 to 64, the same on every rank. 0: the default.
// Collective.
gemmesh_status gemmesh_produce_and_reduce_scatter(const struct gemmesh_group *group,
                                                  size_t m,
                                                  const size_t *rows,
                                                  size_t row_count,
                                                  const struct gemmesh_memory *out,
                                                  size_t chunks,
                                                  gemmesh_on_rows produce,
                                                  void *context);

// Sends the rows that `produce` makes for each rank to that rank. Block s of `out` gets what rank s has made for this
// rank. `counts` is as of gemmesh_all_to_all, and `produce` is called as by gemmesh_produce_and_reduce_scatter.
// Collective.
gemmesh_status gemmesh_produce_and_all_to_all(const struct gemmesh_group *group,
                                              const struct gemmesh_sharded *out,
                                              const size_t *counts,
                                              size_t pair_count,
                                              size_t chunks,
                                              gemmesh_on_rows produce,
                                              void *context);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

// The default options of a group.
static inline gemmesh_group_options gemmesh_group_options_default(void) {
    gemmesh_group_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.device = -1;
    return options;
}

// A product with default options. `dtype` is the type of a.
static inline gemmesh_product gemmesh_product_default(gemmesh_product_kind kind, gemmesh_dtype dtype) {
    gemmesh_product product;
    memset(&product, 0, sizeof product);
    product.struct_size = sizeof product;
    product.kind = kind;
    product.dtype = dtype;
    return product;
}

// The arguments of a product, none of which is given.
static inline gemmesh_product_call gemmesh_product_call_default(void) {
    gemmesh_product_call call;
    memset(&call, 0, sizeof call);
    call.struct_size = sizeof call;
    return call;
}

// An operand without scales.
static inline gemmesh_operand gemmesh_operand_of(gemmesh_memory values) {
    gemmesh_operand operand;
    memset(&operand, 0, sizeof operand);
    operand.values = values;
    return operand;
}

// A sharded operand without scales.
static inline gemmesh_sharded_operand gemmesh_sharded_operand_of(const gemmesh_sharded *values) {
    gemmesh_sharded_operand operand;
    memset(&operand, 0, sizeof operand);
    operand.values = values;
    return operand;
}

// An output that is not quantised.
static inline gemmesh_output gemmesh_output_of(gemmesh_memory values) {
    gemmesh_output output;
    memset(&output, 0, sizeof output);
    output.values = values;
    return output;
}
