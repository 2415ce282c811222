/* The contract between the host and the kernels: all that they share.
 *
 * Plain C, so that bindgen can read it. Every struct is laid out without hidden padding, and each size and offset
 * that the host relies on is asserted below.
 *
 * Operation:   out[M, N] = activation(a[M, K] * b[N, K]^T (+ bias[N])) (+ residual[M, N])
 *
 *              All of it is computed in f32, and the result is rounded once, or stored as f32. Several weights `b` have
 *              an output each (GemmeshOutput). In a gated operation there are two weights, gate and up:
 *
 *              out = activation(a * gate^T (+ bias of gate)) * (a * up^T (+ bias of up)) (+ residual)
 *
 *              Elements of 8 bits may have scales (GemmeshScales). Their bias, residual and partials are bf16.
 *
 *              A kernel may add partials (GemmeshBlock). Then some blocks of these rows are partials for peers. They
 *              are rounded and sent as they are made. The peers' partials are added to the other blocks.
 *              Or all rows are partials, sent as they are made, and `out` has the sums of this rank's rows
 *              (GemmeshLowLatency). Bias, activation and residual follow the sum.
 *
 * The abi.h of a family (cuda/sm90) has what its products share with the host besides: the kernels' arguments, and how
 * they are launched.
 */
#ifndef GEMMESH_ABI_H
#define GEMMESH_ABI_H

#include <assert.h> /* static_assert */
#include <stddef.h> /* offsetof */
#include <stdint.h>

/* Rows that one warp stores at a time. */
#define GEMMESH_STORE_ROWS 16

/* The most weights that one operation multiplies the rows of `a` with. */
#define GEMMESH_MAX_WEIGHTS 4

/* GemmeshParams.activation. GELU is x * Phi(x), GELU_TANH its approximation by tanh, and SILU x * sigmoid(x). */
#define GEMMESH_IDENTITY 0
#define GEMMESH_RELU 1
#define GEMMESH_GELU 2
#define GEMMESH_GELU_TANH 3
#define GEMMESH_SILU 4

/* GemmeshParams.stored_type and GemmeshReduction.stored_type. The output type of operands of 8 bits is bf16. */
#define GEMMESH_STORED_OUTPUT 0
#define GEMMESH_STORED_F16 1
#define GEMMESH_STORED_E4M3 2
#define GEMMESH_STORED_F32 3 /* of reductions */

/* The most ranks of a group. */
#define GEMMESH_MAX_WORLD 64
/* The most chunk flags of a rank. */
#define GEMMESH_MAX_FLAGS 4096
/* After this many epochs all chunk flags are brought up to date, so that no idle flag comes to look like the future. */
#define GEMMESH_REFRESH (1u << 28)

/* Values of the abort word. GIVEN_UP: a kernel has given up, and no kernel waits any more. GROUP_FAILED: copies are not
 * held back either, because no one uses the rows that they overwrite. */
#define GEMMESH_GIVEN_UP 1
#define GEMMESH_GROUP_FAILED 2

/* GemmeshFault.flag of a wait for `ready`, and of a wait for words of a low-latency area. */
#define GEMMESH_READY 0xffffffffu
#define GEMMESH_LOW_LATENCY 0xfffffffeu

#define GEMMESH_FAULT_NONE 0
#define GEMMESH_FAULT_CLAIMED 1
#define GEMMESH_FAULT_RECORDED 2

/* One entry of the table that the host computes: the next tile of one cluster.
 *
 * Clusters take the entries in turn (cluster c of C: entries c, c + C, ...). So the table is in the order in which
 * tiles become ready. Neighbours in it run at the same time, so they are grouped for the L2 cache. If K is cut into
 * slices, each slice has an entry of its own (GemmeshSlice). */
typedef struct GemmeshTile {
    uint32_t m;          /* tile row, in units of tile_m * cluster_m rows */
    uint32_t n;          /* tile column, in units of tile_n * cluster_n columns, or of half as many columns of `out` if
                          * the product is gated. CTA r of the cluster takes row r % cluster_m and column
                          * r / cluster_m of the entry's tiles, or all of its tile and a part of K */
    uint32_t block;      /* the block whose rows m counts if the kernel adds partials; otherwise the weight's number */
    uint16_t flag_begin; /* rows of `a`, or addends, are there when flags[flag_begin..flag_end) have all reached the */
    uint16_t flag_end;   /* epoch; an empty range waits for nothing */
} GemmeshTile;

/* The part of its tile that an entry computes, if K is cut. */
typedef struct GemmeshSlice {
    uint32_t begin;  /* the first step through K, tile_k columns each, */
    uint32_t end;    /* and the one after the last; operands after K are zero. At least one step */
    uint32_t place;  /* where the tile's first slice leaves its sums; the other slices follow, in their order */
    uint16_t number; /* of this slice in its tile, from 0 */
    uint16_t count;  /* of the tile's slices; if it is 1, no sums are left anywhere */
} GemmeshSlice;

/* The first wait that ran into its deadline. The host zeroes the record, and may read it once it is marked. */
typedef struct GemmeshFault {
    uint32_t state;     /* GEMMESH_FAULT_*; the first to give up claims the record, fills it, then marks it recorded */
    uint32_t flag;      /* index of the chunk flag that did not arrive, or GEMMESH_READY, or GEMMESH_LOW_LATENCY */
    uint32_t expected;  /* the epoch it should have reached */
    uint32_t seen;      /* the value it had; without meaning for GEMMESH_LOW_LATENCY */
    uint64_t waited_ns; /* how long the wait lasted */
    uint32_t peer;      /* the rank whose rows, or whose word, did not come */
    uint32_t pushed;    /* nonzero: the epoch was counted on the device */
    uint32_t operation; /* GemmeshParams.epoch */
    uint32_t recording; /* GemmeshParams.recording */
} GemmeshFault;

/* The flags that peers write into a rank's memory when rows are pushed. Flags hold epochs. */
typedef struct GemmeshMailbox {
    uint32_t ready[GEMMESH_MAX_WORLD]; /* by rank: its kernel runs, and its gathered rows may be overwritten */
    uint32_t chunk[GEMMESH_MAX_FLAGS]; /* its rows have arrived */
} GemmeshMailbox;

/* The count of pushed operations on the device. So an operation in a graph has a new epoch at each replay. */
typedef struct GemmeshPushEpoch {
    uint32_t epoch;   /* of the last operation whose rows have all come */
    uint32_t entered; /* CTAs of the next operation that have begun; written at once with `epoch`, at the end */
    uint32_t taken;   /* tasks that these CTAs have taken */
    uint32_t left;    /* of these CTAs, those that have pushed their tasks and whose tiles' rows have all come */
    uint32_t current; /* the epoch of the operation whose rows the copy engine pushes, which it copies into flags */
    uint32_t permit;   /* set by the kernel when every peer is ready, or when the group has failed; reset by the copy
                        * stream when it has pushed */
    uint32_t low_latency;   /* how many pushed operations have used low-latency areas */
    uint32_t reserved;
} GemmeshPushEpoch;

/* A chunk that the warps of a CTA push together. */
typedef struct GemmeshCopyTask {
    uint64_t offset; /* bytes from the beginning of `a`, the same on every rank; a multiple of 16 */
    uint32_t bytes;  /* a multiple of 16 */
    uint32_t peer;   /* the rank that gets it */
    uint32_t flag;   /* the peer's chunk flag */
    uint32_t beside_bytes;  /* the same of a second matrix, whose rows come with those of `a`; 0 if there is none */
    uint64_t beside_offset;
} GemmeshCopyTask;

/* A task of one CTA of gemmesh_collective_<dtype>. It stores rows of one matrix, or parts of them, to rows of a rank's
 * matrix. */
typedef struct GemmeshSend {
    uint32_t from_row;
    uint32_t to_row;
    uint32_t column; /* bytes from the beginning of a row, in both matrices; a multiple of 16 */
    uint32_t width;  /* bytes of each row; a multiple of 16 */
    uint32_t rows;
    uint32_t peer; /* the rank that gets them; GemmeshPeers.rows has its matrix */
    uint32_t flag; /* the peer's chunk flag */
    uint32_t area_row; /* in a low-latency area: how many rows between this rank and the peer, in the same direction,
                        * come before these */
} GemmeshSend;

/* What the grid stores and waits for. The grid may have any number of CTAs of GEMMESH_COLLECTIVE_THREADS threads, if
 * all of them can run at the same time. */
#define GEMMESH_COLLECTIVE_THREADS 512
typedef struct GemmeshSends {
    const GemmeshSend *sends; /* if low-latency areas are used, the arrivals follow: `peer` sends them, and `from_row`
                               * has no meaning */
    const void *from;
    uint64_t from_pitch; /* bytes from row to row */
    uint64_t to_pitch;
    uint32_t count; /* of sends */
    uint32_t flags; /* how many chunk flags this rank waits for: one for each arrival */
    uint32_t pieces; /* of 16 bytes, of a whole row */
    uint32_t reserved;
} GemmeshSends;

/* How rows are pushed. */
typedef struct GemmeshPeers {
    GemmeshPushEpoch *push_epoch;     /* null: rows are pulled, and nothing below is used */
    const GemmeshCopyTask *tasks;     /* the chunks that the kernel pushes; none if the copy engine pushes */
    uint32_t *started;                /* a word of the host; gets GemmeshParams.epoch when the kernel runs */
    uint32_t *completed;              /* gets it when all that the kernel waits for has come; null if something else
                                       * writes it, or if no one reads it */
    uint32_t task_count;
    uint32_t copies; /* nonzero: the copy engine pushes or the network brings rows, and waits for push_epoch->permit */
    uint32_t rank;
    uint32_t world;
    GemmeshMailbox *mailboxes[GEMMESH_MAX_WORLD]; /* by rank, as this GPU maps them; null for ranks of other hosts */
    void *rows[GEMMESH_MAX_WORLD];                /* every rank's `a`, likewise */
    void *beside[GEMMESH_MAX_WORLD];              /* and its second matrix, if tasks push that */
} GemmeshPeers;

/* The times at which one CTA worked on one table entry, in nanoseconds of %globaltimer. It is the event
 * [entry * CTAs of a cluster + rank in the cluster]. */
typedef struct GemmeshTraceEvent {
    uint64_t wait_begin; /* the producer of `a` turned to this tile */
    uint64_t wait_end;   /* its flags had arrived, or the wait was given up */
    uint64_t load_begin; /* a stage was free, and the first load of `a` was issued; loads of `b` may come before */
    uint64_t math_begin; /* the first stage had arrived */
    uint64_t math_end;   /* the accumulators were complete */
    uint64_t done;       /* the first warp that stores rows of this CTA has issued its stores */
    uint32_t sm;         /* %smid */
    uint32_t tile;       /* index into the table */
} GemmeshTraceEvent;

/* The most ranks whose memory a kernel stores tiles to, its own among them. */
#define GEMMESH_MAX_TARGETS 8
/* Bytes of a rank's low-latency area. */
#define GEMMESH_LOW_LATENCY_BYTES (8u << 20)

/* How a few rows of partials go through low-latency areas. The warps that make them, in low tiles, store them. A unit of
 * 16 bytes has four elements and two tags. */
typedef struct GemmeshLowLatency {
    void *areas[GEMMESH_MAX_TARGETS];    /* by rank, as this GPU maps them: two halves, each with a share for every
                                          * rank that writes */
    uint32_t begin[GEMMESH_MAX_TARGETS]; /* by rank: the first of the rows whose sums it gets, */
    uint32_t end[GEMMESH_MAX_TARGETS];   /* and the one after the last. `out` has this rank's */
    uint32_t share;                      /* units of a rank's share of half an area; 0: the areas are not used */
    uint32_t reserved;
} GemmeshLowLatency;

/* How rows are quantised to e4m3. GEMMESH_SCALE_BLOCK columns of a row have one scale, of f32: their largest absolute value,
 * 1e-4 at least, divided by 448. A value x becomes x * (1 / scale), and what is above 448 becomes 448. */
#define GEMMESH_SCALE_BLOCK 128
typedef struct GemmeshOutputScales {
    float *scales;         /* null: rows are not quantised */
    uint32_t row;          /* floats from the scale of a row to that of the next; */
    uint32_t block;        /* and from that of a block; both zero: there is one scale, which is given */
    uint32_t power_of_two; /* nonzero: scales are rounded up to powers of two */
    uint32_t first_column; /* the place of the first column in its block: a multiple of 16. Only gemmesh_quantize_<dtype>
                            * takes others than 0 */
} GemmeshOutputScales;

/* Where the product with one weight goes. Rows are counted like those of `a`, also if a kernel has only some of them.
 *
 * Base addresses and pitches are multiples of 16 bytes, so rows of `residual` and `out` are padded to 16 bytes. */
typedef struct GemmeshOutput {
    const void *bias;        /* [n] of the element type, or null */
    void *out;               /* the same matrix as its map's, for stores without the map: of kernels that swap operands,
                              * of narrow gated tiles, of sums in low-latency areas, of f32 sums, and of 8 bits */
    uint64_t out_pitch;      /* bytes from row to row */
    const void *residual;    /* added last, of the element type, or null */
    uint64_t residual_pitch; /* bytes from row to row */
    const float *scales;     /* of the weight: GemmeshScales */
    uint32_t n;              /* rows of the weight, columns of `out` */
    uint32_t scale_row;      /* floats from a row's scale, or that of a block of rows, to the next; 0: all have one */
    uint32_t scale_first;    /* the place of the first row in its block of GEMMESH_SCALE_BLOCK rows; a multiple of 16 */
    uint32_t reserved;
    GemmeshOutputScales quantized; /* of results that are stored as e4m3. Scales are made only if the family
                                    * `quantizes` */
} GemmeshOutput;

/* How operands of 8 bits are scaled. Scales are f32.
 *
 * Sums are promoted to f32 every GEMMESH_SCALE_BLOCK columns of K, because the tensor cores' accumulators keep fewer
 * bits; except if GemmeshParams.is_fast is not zero. If `a_block` is zero, a sum is multiplied by its weight's scale and
 * then by that of its row of `a`. Otherwise each promoted part is multiplied by the product of its blocks' scales: of
 * 1 x GEMMESH_SCALE_BLOCK elements of `a`, and of GEMMESH_SCALE_BLOCK x GEMMESH_SCALE_BLOCK of `b`, whose scales are side
 * by side along K. Steps through K begin where blocks do. If the operands begin inside a block, so does the first step, in
 * front of their first column. They are read as zeros. */
typedef struct GemmeshScales {
    const float *a;      /* null: 1, as GemmeshOutput.scales */
    uint32_t a_row;      /* floats from the scale of a row of `a` to that of the next; 0: all have one */
    uint32_t a_block;    /* floats from the scale of a row's block to that of the next; 0: blocks have no scales */
    uint32_t first_column; /* the place of both operands' first column in its block; 0 if blocks have no scales */
    uint32_t reserved;
} GemmeshScales;

/* The problem and everything a kernel may wait for or report to. All pointers are device addresses. */
typedef struct GemmeshParams {
    const GemmeshTile *tiles;       /* the table, 16-byte aligned */
    const volatile uint32_t *flags; /* in this GPU's memory; written while the kernel runs */
    const uint32_t *sources;        /* by flag: the rank whose rows it guards */
    uint32_t *abort;                /* nonzero: stop waiting. Only the host writes GEMMESH_GROUP_FAILED */
    GemmeshFault *fault;
    GemmeshTraceEvent *trace;       /* [tile_count * CTAs of a cluster], to be filled; or null */
    const GemmeshSlice *slices;     /* by entry; null if K is not cut, if a cluster's CTAs share it, or if partials are
                                     * added */
    float *partials;                /* the sums of slices of K: tile_m * tile_n for each place and CTA of the cluster */
    uint32_t *arrived;              /* for each place, CTA of the cluster and warp's part of its tile; the one of a
                                     * tile's first slice counts how many have stored their sums. Zero between
                                     * operations */
    uint64_t deadline_ns;           /* the longest that a single wait may last */
    uint32_t tile_count;
    uint32_t epoch;                 /* a flag has arrived when (int32_t)(flag - epoch) >= 0. If rows are pushed, flags
                                     * are compared with the epoch that push_epoch counts; this one is for the host */
    uint32_t m;                     /* rows of `a` and `out`; m, n and k are at least 1 */
    uint32_t k;                     /* columns of `a` and `b`, and the GemmeshScales.first_column before them */
    uint32_t deferred_flag;         /* the one flag that tiles await only before `deferred_step` */
    uint32_t deferred_step;         /* a step through K, of tile_k columns; UINT32_MAX if there is none */
    uint32_t activation;            /* GEMMESH_IDENTITY, ... */
    uint32_t is_gated;              /* nonzero: outputs[0] is gate's and the only one that is stored, and outputs[1] has
                                     * up's bias. Zero for kernels that add partials, and with low-latency areas */
    uint32_t is_f32;                /* nonzero: `out` is f32, and partials still have the element type */
    uint32_t stored_type;           /* GEMMESH_STORED_OUTPUT, or another type if operands have 8 bits and is_f32 is zero.
                                     * Partials have the output type */
    uint32_t b_is_kn;               /* nonzero: `b` is [K, N] in memory; a CTA loads a multiple of 64 columns of it */
    uint32_t recording;             /* nonzero: the operation is in a graph, `epoch` has no meaning, and this is the
                                     * host's number of the recording */
    uint32_t tile_rows;             /* nonzero: the table has so many rows of tiles, walked column by column, those of
                                     * each weight after those of the weight before, and each tile waits for
                                     * `row_flags`. K is not cut */
    uint32_t row_flags;             /* flag_begin and, in the upper half, flag_end */
    uint32_t is_fast;               /* nonzero: sums of operands of 8 bits are not promoted. `a_block` is zero */
    uint32_t constant_weights;      /* nonzero: no kernel that may still be running writes `b`, so it is read before
                                     * the kernels before this one have ended */
    GemmeshOutput outputs[GEMMESH_MAX_WEIGHTS]; /* by weight */
    GemmeshScales scales;
    GemmeshPeers peers;
    GemmeshLowLatency low_latency;
} GemmeshParams;

/* GemmeshStore.flag of rows that nobody waits for, and of rows that the copy stream sends. */
#define GEMMESH_UNTOLD 0xffffffffu
#define GEMMESH_COPIED 0xfffffffeu

/* One place where the rows of a block are stored. */
typedef struct GemmeshStore {
    uint32_t map;  /* number among the targets */
    uint32_t row;  /* where the block's first row goes. If the block's rows are no multiple of GEMMESH_STORE_ROWS, rows
                    * up to the next multiple are written too, as far as the map has them */
    uint32_t to;   /* the rank whose memory it is */
    uint32_t flag; /* its chunk flag, written when the whole block is there; or GEMMESH_UNTOLD or GEMMESH_COPIED */
} GemmeshStore;

/* GemmeshBlock.sum: the rows are stored as rounded partials. */
#define GEMMESH_PARTIAL 0
/* Rounded addends are added in the order of the ranks: peers' partials, the product, and further peers' partials. Their sum
 * is a partial of a further sum, and is stored as one. */
#define GEMMESH_ADDED 1
/* Addends are added likewise, and bias, activation and residual follow. A sum of another type than partials is not stored
 * in the block's places but in outputs[0], and no one waits for it. */
#define GEMMESH_FINISHED 2

/* Rows of the product that go to the same places. Tiles are counted from the first row, and end with the last. */
typedef struct GemmeshBlock {
    uint32_t row;         /* the first: row of `a` */
    uint32_t rows;        /* how many */
    uint32_t addend;      /* the first row of the first addend: row of `added` */
    uint32_t addend_step; /* rows from there to the next addend */
    uint16_t addends;     /* how many, */
    uint16_t before;      /* and how many of them before the product */
    uint32_t store_begin; /* where they go: stores[store_begin..+stores), at most GEMMESH_MAX_TARGETS */
    uint16_t stores;
    uint16_t sum;         /* GEMMESH_PARTIAL, GEMMESH_ADDED or GEMMESH_FINISHED */
    uint32_t reports;     /* if somebody waits for the block: one for each tile and each warp that stores its rows;
                           * otherwise 0 */
} GemmeshBlock;

/* What a kernel that adds partials needs beside GemmeshParams. All pointers are device addresses. */
typedef struct GemmeshSums {
    const GemmeshBlock *blocks; /* by number */
    const GemmeshStore *stores;
    uint32_t *reports;   /* by block: how many reports have come; zero between operations */
    uint32_t *stored;    /* by block: 1 when all reports have come; the copy stream waits for it and resets it */
    uint32_t flag_begin; /* no tile waits for flags[flag_begin..flag_end), but the kernel does before it ends */
    uint32_t flag_end;
} GemmeshSums;

/* The argument of gemmesh_reduce_<dtype>, which adds up rows in f32, one addend after the other.
 *
 * Bias, activation and residual follow. The result is rounded once. The grid may have any number of
 * CTAs of GEMMESH_REDUCE_THREADS threads.
 *
 * Base addresses and pitches are multiples of 16 bytes. */
#define GEMMESH_REDUCE_THREADS 256
typedef struct GemmeshReduction {
    const void *addends[GEMMESH_MAX_WORLD]; /* in their order */
    uint64_t addend_pitches[GEMMESH_MAX_WORLD]; /* of each: bytes from row to row */
    const void *bias;                       /* [n] of the element type, or null */
    void *out;
    uint64_t out_pitch;
    const void *residual;    /* of the element type, or null; its rows are those of `out` */
    uint64_t residual_pitch; /* bytes from row to row */
    uint32_t count; /* of addends: 1 at least */
    uint32_t rows;
    uint32_t n;
    uint32_t activation; /* GEMMESH_IDENTITY, ... */
    uint32_t stored_type; /* GEMMESH_STORED_OUTPUT: the element type */
    uint32_t reserved;   /* zero */
} GemmeshReduction;

/* The argument of gemmesh_quantize_<dtype>, which quantises rows. The grid may have any number of CTAs of
 * GEMMESH_REDUCE_THREADS threads.
 *
 * Base addresses and pitches of both matrices are multiples of 16 bytes. */
typedef struct GemmeshQuantization {
    const void *from;
    uint64_t from_pitch; /* bytes from row to row, as the next */
    void *to;
    uint64_t to_pitch;
    GemmeshOutputScales scales;
    uint32_t rows;
    uint32_t columns;
} GemmeshQuantization;

/* The argument of gemmesh_align, which aligns ranks for benchmarks. It is one CTA of GEMMESH_MAX_WORLD threads.
 *
 * The kernel ends on all ranks at the same time, to within a microsecond. Words of streams would let ranks go on up to
 * ten microseconds apart. */
typedef struct GemmeshAlignment {
    uint32_t *words[GEMMESH_MAX_WORLD]; /* by rank, as this GPU maps them: its words, by the rank that writes them */
    const uint32_t *abort;              /* nonzero: stop waiting */
    uint64_t deadline_ns;               /* the longest that it waits */
    uint32_t count;                     /* the number of this alignment, which is written and waited for */
    uint32_t rank;
    uint32_t world;
    uint32_t reserved;
} GemmeshAlignment;

static_assert(sizeof(GemmeshTile) == 16, "a table entry is one 16-byte load");
static_assert(offsetof(GemmeshTile, flag_begin) == 12, "");
static_assert(sizeof(GemmeshSlice) == 16, "a slice is two 8-byte loads");
static_assert(offsetof(GemmeshSlice, place) == 8, "");
static_assert(sizeof(GemmeshFault) == 40, "");
static_assert(offsetof(GemmeshFault, waited_ns) == 16, "");
static_assert(sizeof(GemmeshTraceEvent) == 56, "");
static_assert(offsetof(GemmeshTraceEvent, sm) == 48, "");
static_assert(sizeof(GemmeshMailbox) == 4 * (GEMMESH_MAX_WORLD + GEMMESH_MAX_FLAGS), "");
static_assert(sizeof(GemmeshPushEpoch) == 32, "");
static_assert(offsetof(GemmeshPushEpoch, entered) == 4, "it is written with the word before");
static_assert(sizeof(GemmeshCopyTask) == 32, "a task is two 16-byte loads");
static_assert(sizeof(GemmeshSend) == 32, "a task is two 16-byte loads");
static_assert(sizeof(GemmeshSends) == 48, "");
static_assert(sizeof(GemmeshPeers) == 48 + 24 * GEMMESH_MAX_WORLD, "");
static_assert(offsetof(GemmeshPeers, task_count) == 32, "");
static_assert(sizeof(GemmeshLowLatency) == 8 + 16 * GEMMESH_MAX_TARGETS, "");
static_assert(sizeof(GemmeshOutputScales) == 24, "");
static_assert(sizeof(GemmeshOutput) == 88, "");
static_assert(offsetof(GemmeshOutput, n) == 48, "");
static_assert(sizeof(GemmeshScales) == 24, "");
static_assert(sizeof(GemmeshParams) == 168 + 88 * GEMMESH_MAX_WEIGHTS + sizeof(GemmeshPeers) + sizeof(GemmeshLowLatency), "");
static_assert(offsetof(GemmeshParams, trace) == 40, "");
static_assert(offsetof(GemmeshParams, tile_count) == 80, "");
static_assert(offsetof(GemmeshParams, outputs) == 144, "");
static_assert(offsetof(GemmeshParams, peers) == 168 + 88 * GEMMESH_MAX_WEIGHTS, "");
static_assert(sizeof(GemmeshBlock) == 32, "a block is two 16-byte loads");
static_assert(sizeof(GemmeshStore) == 16, "a store is one 16-byte load");
static_assert(sizeof(GemmeshSums) == 40, "");
static_assert(sizeof(GemmeshReduction) == 64 + 16 * GEMMESH_MAX_WORLD, "");
static_assert(sizeof(GemmeshQuantization) == 64, "");
static_assert(offsetof(GemmeshReduction, count) == 40 + 16 * GEMMESH_MAX_WORLD, "");
static_assert(sizeof(GemmeshAlignment) == 32 + 8 * GEMMESH_MAX_WORLD, "");

#endif
