/* What the host and the kernels share: the whole contract.
 *
 * Plain C, so that bindgen can read it. Every struct is laid out without hidden padding, and each size and offset
 * that the host relies on is asserted below.
 *
 * Operation:   out[M, N] = activation(a[M, K] * b[N, K]^T (+ bias[N])) (+ residual[M, N]),   all of it in f32, rounded once or
 *              stored as it is;
 *              for each of several weights `b`, which have outputs of their own: GemmeshOutput;
 *              or of two of them, gate and up, if it is gated:
 *                 out = activation(a * gate^T (+ bias of gate)) * (a * up^T (+ bias of up)) (+ residual);
 *              of a kernel that adds partials: blocks of these rows are partials for others, rounded and as they are multiplied, and
 *              the others are added to what has come from there: GemmeshBlock. Or all rows are partials, sent as they are made,
 *              and `out` has the sums of this rank's rows: GemmeshLowLatency. Bias, activation and residual come after the adding.
 *
 * Kernel:      extern "C" void <name>(CUtensorMap a, CUtensorMap b, CUtensorMap out, GemmeshParams params,
 *                              struct {CUtensorMap b[GEMMESH_MAX_WEIGHTS - 1], out[GEMMESH_MAX_WEIGHTS - 1];} more)
 *              or, if it adds partials,
 *                              <name>(CUtensorMap a, CUtensorMap b, CUtensorMap added, GemmeshParams params,
 *                                     struct {CUtensorMap maps[2 * GEMMESH_MAX_TARGETS];} targets, GemmeshSums sums)
 *              every argument is __grid_constant__; kernels.rs lists the kernels, and says what is meant here by their
 *              tile_m, tile_n, cluster and split.
 *
 * Launch:      grid    whole clusters of cluster * split CTAs, at most one to a multiprocessor: as many as the device
 *                      holds at a time, and no more than tile_count unless they have rows to push
 *              block   GEMMESH_THREADS
 *              cluster compiled into the kernel; no launch attribute is needed
 *              shared  Family::shared_bytes of kernels.rs, dynamic; raise
 *                      CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES to it first
 *
 * Tensor maps: rank 2, dimension 0 the contiguous one, element strides 1, interleave none, swizzle 128B, out-of-bounds
 *              fill zeros. Base addresses and row pitches are multiples of 16 bytes; the sizes are the logical ones, so
 *              that what a tile reads past an edge is zero and what it writes there is dropped.
 *
 *              map   sizes    box                                             L2 promotion
 *              a     {K, M}   {GEMMESH_TILE_K, tile_m}                        256B
 *              b     {K, N}   {GEMMESH_TILE_K, tile_n / cluster}              256B
 *              out   {N, M}   {GEMMESH_STORE_COLUMNS, GEMMESH_STORE_ROWS}     none
 *               f32  {N, M}   {GEMMESH_STORE_COLUMNS / 2, GEMMESH_STORE_ROWS} none
 *
 *              `more` has the maps of the weights behind the first, and of what is made with them. A gated product has gate's
 *              as `b` and up's as more.b[0], with boxes of Shape::gate_box of kernels.rs rows. Where `b` is given as [K, N]:
 *
 *              b     {N, K}   {64, GEMMESH_TILE_K}                            256B
 *
 *              Maps that nothing is loaded or stored with may hold anything: `out` of kernels that swap operands, of f32 sums, and of
 *              gated products of the element type where Shape::gate_rows is less than GEMMESH_STORE_COLUMNS.
 *
 *              `added` is this rank's matrix of partials, with the boxes of `a`. The targets, with the boxes of `out`, are the
 *              matrices of partials of this rank and of those behind it in the ring; then, from GEMMESH_MAX_TARGETS on, those
 *              of sums, with the rows that are written there and no more.
 *
 *              TMA drops columns in pieces of 16 bytes: where N is no multiple of 8, a row's columns from N to the next
 *              multiple of 8 are written, with numbers of no meaning: zeros, or NaN where the row of `a` is not finite, and what
 *              stands behind the residual's. Of f32 the pieces are 4 columns. They are padding, for pitches are multiples too.
 */
#ifndef GEMMESH_ABI_H
#define GEMMESH_ABI_H

#include <assert.h> /* static_assert */
#include <stddef.h> /* offsetof */
#include <stdint.h>

/* Columns of `a` and `b` that one pipeline stage holds: 128 bytes, the width of the swizzle. */
#define GEMMESH_TILE_K 64
/* Threads of a CTA: a producer warpgroup and two consumer warpgroups. */
#define GEMMESH_THREADS 384

/* The box of one store: what one warp writes at a time. */
#define GEMMESH_STORE_ROWS 16
#define GEMMESH_STORE_COLUMNS 64

/* The most weights that one operation multiplies the rows of `a` with. */
#define GEMMESH_MAX_WEIGHTS 4

/* GemmeshParams.activation. GELU is x * Phi(x), GELU_TANH its approximation by tanh, and SILU x * sigmoid(x). */
#define GEMMESH_IDENTITY 0
#define GEMMESH_RELU 1
#define GEMMESH_GELU 2
#define GEMMESH_GELU_TANH 3
#define GEMMESH_SILU 4

/* The most ranks of a group. */
#define GEMMESH_MAX_WORLD 64
/* The most chunk flags of a rank. */
#define GEMMESH_MAX_FLAGS 4096
/* How many epochs apart all chunk flags are brought up to date, so that no idle one comes to look like the future. */
#define GEMMESH_REFRESH (1u << 28)

/* Values of the abort word. A kernel has given up: no kernel waits any more; and the group has failed: copies are not held
 * back either, for nobody uses what they overwrite. */
#define GEMMESH_GIVEN_UP 1
#define GEMMESH_GROUP_FAILED 2

/* GemmeshFault.flag of a wait for `ready`, and for what comes to a low-latency area. */
#define GEMMESH_READY 0xffffffffu
#define GEMMESH_LOW_LATENCY 0xfffffffeu

#define GEMMESH_FAULT_NONE 0
#define GEMMESH_FAULT_CLAIMED 1
#define GEMMESH_FAULT_RECORDED 2

/* One entry of the table that the host computes: what one cluster works on next.
 *
 * Clusters take the entries in turn (cluster c of C: entries c, c + C, ...), so the table is in the order in which
 * tiles become ready, and neighbours in it run at the same time: group them for the L2 cache. Where K is cut into slices, each has an
 * entry of its own: GemmeshSlice. */
typedef struct GemmeshTile {
    uint32_t m;          /* tile row, in units of tile_m * cluster rows; CTA r of the cluster takes the r-th part;
                          * or all of it, and a part of K */
    uint32_t n;          /* tile column, in units of tile_n columns; of tile_n / 2 columns of `out` if the product is gated */
    uint32_t block;      /* of a kernel that adds partials: whose rows m counts; of another: the number of the weight */
    uint16_t flag_begin; /* rows of `a`, or what is added, are there once flags[flag_begin..flag_end) have all reached the */
    uint16_t flag_end;   /* epoch; an empty range waits for nothing */
} GemmeshTile;

/* What an entry makes of its tile, where K is cut. */
typedef struct GemmeshSlice {
    uint32_t begin;  /* the first step through K, GEMMESH_TILE_K columns each, */
    uint32_t end;    /* and the one behind the last; operands behind K are zero. At least one step */
    uint32_t place;  /* where the tile's first slice leaves what it has added up; the others behind it, in their order */
    uint16_t number; /* of this slice of the tile's, from 0 */
    uint16_t count;  /* of the tile's slices; 1: nothing is left anywhere */
} GemmeshSlice;

/* The first wait that ran into its deadline. The host zeroes the record, and may read it once it is marked. */
typedef struct GemmeshFault {
    uint32_t state;     /* GEMMESH_FAULT_*; the first to give up claims the record, fills it, then marks it recorded */
    uint32_t flag;      /* index of the chunk flag that did not arrive, or GEMMESH_READY, or GEMMESH_LOW_LATENCY */
    uint32_t expected;  /* the epoch it should have reached */
    uint32_t seen;      /* the value it had; nothing of GEMMESH_LOW_LATENCY */
    uint64_t waited_ns; /* how long it was waited for */
    uint32_t peer;      /* the rank whose rows, or whose word, did not come */
    uint32_t pushed;    /* nonzero: the epoch is one of those that are counted on the device */
    uint32_t operation; /* GemmeshParams.epoch */
    uint32_t recording; /* GemmeshParams.recording */
} GemmeshFault;

/* What the peers write into a rank's memory when rows are pushed: flags that hold epochs. */
typedef struct GemmeshMailbox {
    uint32_t ready[GEMMESH_MAX_WORLD]; /* by rank: its kernel runs, so what it gathered before may be overwritten */
    uint32_t chunk[GEMMESH_MAX_FLAGS]; /* its rows have arrived */
} GemmeshMailbox;

/* The epochs of pushed operations are counted here, so that an operation in a graph has another at each replay. */
typedef struct GemmeshPushEpoch {
    uint32_t epoch;   /* of the last operation whose rows have all come */
    uint32_t entered; /* CTAs of the next one that have begun: written with `epoch` at the end, at once; */
    uint32_t taken;   /* tasks that they have taken, and */
    uint32_t left;    /* its CTAs that have pushed what they took, and for whose tiles all rows have come */
    uint32_t current; /* the epoch of the operation whose rows the copy engine pushes: what it copies into flags */
    uint32_t permit;   /* set by the kernel when every peer is ready, or when the group has failed; reset by the copy stream
                       * when it has pushed */
    uint32_t low_latency;   /* how many pushed operations have used low-latency areas */
    uint32_t reserved;
} GemmeshPushEpoch;

/* What the warps of a CTA push together: a chunk. */
typedef struct GemmeshCopyTask {
    uint64_t offset; /* bytes from the beginning of `a`, the same on every rank; a multiple of 16 */
    uint32_t bytes;  /* a multiple of 16 */
    uint32_t peer;   /* whom it is for */
    uint32_t flag;   /* the peer's chunk flag */
    uint32_t reserved[3];
} GemmeshCopyTask;

/* What one CTA of gemmesh_collective_<dtype> stores to a rank at a time: rows of one matrix, to rows of another, or parts of them. */
typedef struct GemmeshSend {
    uint32_t from_row;
    uint32_t to_row;
    uint32_t column; /* bytes from where a row begins, in both; a multiple of 16 */
    uint32_t width;  /* bytes of each row; a multiple of 16 */
    uint32_t rows;
    uint32_t peer; /* whom it is for: GemmeshPeers.rows has the other matrix of each rank */
    uint32_t flag; /* the peer's chunk flag */
    uint32_t area_row; /* in a low-latency area: how many rows of what goes from this rank to the peer, or the other way, come before */
} GemmeshSend;

/* What the grid stores, and waits for. Any grid of CTAs of GEMMESH_COLLECTIVE_THREADS threads, which all run at the same time. */
#define GEMMESH_COLLECTIVE_THREADS 512
typedef struct GemmeshSends {
    const GemmeshSend *sends; /* behind them, if low-latency areas are used, what comes: `peer` sends it, and `from_row` means nothing */
    const void *from;
    uint64_t from_pitch; /* bytes from row to row */
    uint64_t to_pitch;
    uint32_t count; /* of sends */
    uint32_t flags; /* how many of this rank's chunk flags say that all has come to it: one for each thing that comes */
    uint32_t pieces; /* of 16 bytes, of a whole row */
    uint32_t reserved;
} GemmeshSends;

/* How rows are pushed. */
typedef struct GemmeshPeers {
    GemmeshPushEpoch *push_epoch;     /* null: rows are pulled, and nothing below is used */
    const GemmeshCopyTask *tasks;     /* what the kernel pushes itself; none if the copy engine does */
    uint32_t *started;                /* the host's: where GemmeshParams.epoch is written when the kernel runs, and */
    uint32_t *completed;              /* when all that it waits for has come; null where somebody else does, or nobody is to know */
    uint32_t task_count;
    uint32_t copies; /* nonzero: the copy engine pushes, and waits for push_epoch->permit */
    uint32_t rank;
    uint32_t world;
    GemmeshMailbox *mailboxes[GEMMESH_MAX_WORLD]; /* by rank, as this GPU maps them */
    void *rows[GEMMESH_MAX_WORLD];                /* every rank's `a`, likewise */
} GemmeshPeers;

/* What one CTA did with one table entry; nanoseconds of %globaltimer. Event [entry * CTAs of a cluster + rank in
 * the cluster]. */
typedef struct GemmeshTraceEvent {
    uint64_t wait_begin; /* the producer turned to this tile */
    uint64_t wait_end;   /* its flags were there, or were given up */
    uint64_t load_begin; /* a stage was free and the first load of `a` was issued; of `b` perhaps before */
    uint64_t math_begin; /* the first stage had arrived */
    uint64_t math_end;   /* the accumulators were complete */
    uint64_t done;       /* the first warp that stores rows of this CTA's has issued its stores */
    uint32_t sm;         /* %smid */
    uint32_t tile;       /* index into the table */
} GemmeshTraceEvent;

/* The most ranks whose memory a kernel stores tiles to, its own among them. */
#define GEMMESH_MAX_TARGETS 8
/* Bytes of a rank's low-latency area. */
#define GEMMESH_LOW_LATENCY_BYTES (8u << 20)

/* How few rows of partial sums go through low-latency areas, four elements and two tags a unit of 16 bytes, by the warps that make them, in
 * tiles of 64 rows. */
typedef struct GemmeshLowLatency {
    void *areas[GEMMESH_MAX_TARGETS];    /* by rank, as this GPU maps them: two halves, each with a share for every rank that writes */
    uint32_t begin[GEMMESH_MAX_TARGETS]; /* by rank: the first of the rows whose sums it gets, */
    uint32_t end[GEMMESH_MAX_TARGETS];   /* and the one behind the last. `out` has this rank's */
    uint32_t share;                      /* of a rank in half an area, in units; 0: nothing goes through them */
    uint32_t reserved;
} GemmeshLowLatency;

/* Where the product with one weight goes. Rows are counted as those of `a`, where kernels have only some of them too. Base addresses
 * and pitches are multiples of 16 bytes, and behind an odd last column of `residual`, as of `out`, there is padding. */
typedef struct GemmeshOutput {
    const void *bias;        /* [n] of the element type, or null */
    void *out;               /* as its map says, for those who store without it: kernels that swap operands, sums in low-latency areas, and
                              * f32 sums */
    uint64_t out_pitch;      /* bytes from row to row */
    const void *residual;    /* added last, of the element type, or null */
    uint64_t residual_pitch; /* bytes from row to row */
    uint32_t n;              /* rows of the weight, columns of `out` */
    uint32_t reserved;
} GemmeshOutput;

/* The problem and everything a kernel may wait for or report to. All pointers are device addresses. */
typedef struct GemmeshParams {
    const GemmeshTile *tiles;       /* the table, 16-byte aligned */
    const volatile uint32_t *flags; /* in this GPU's memory; written while the kernel runs */
    const uint32_t *sources;        /* by flag: the rank whose rows it guards */
    uint32_t *abort;                /* nonzero: stop waiting. GEMMESH_GROUP_FAILED is the host's to write */
    GemmeshFault *fault;
    GemmeshTraceEvent *trace;       /* [tile_count * CTAs of a cluster], to be filled; or null */
    const GemmeshSlice *slices;     /* by entry; null where K is not cut, a cluster's CTAs share it, or partials are added */
    float *partials;                /* what slices of K have added up: for each place and CTA of the cluster tile_m * tile_n of them */
    uint32_t *arrived;              /* for each place, CTA of the cluster and consumer warp; that of a tile's first slice counts how many
                                     * have stored theirs. Zero between operations */
    uint64_t deadline_ns;           /* the longest that a single wait may last */
    uint32_t tile_count;
    uint32_t epoch;                 /* a flag has arrived when (int32_t)(flag - epoch) >= 0; where rows are pushed,
                                     * when it has reached push_epoch->epoch, and this one is for the host */
    uint32_t m;                     /* rows of `a` and `out`; m, n and k are at least 1 */
    uint32_t k;                     /* columns of `a` and `b` */
    uint32_t deferred_flag;         /* the one flag that tiles which need it wait for only */
    uint32_t deferred_step;         /* before this step through K, GEMMESH_TILE_K columns each; none: UINT32_MAX */
    uint32_t activation;            /* GEMMESH_IDENTITY, ... */
    uint32_t is_gated;              /* nonzero: outputs[0] is gate's, and all that is stored, and outputs[1] has up's bias. Not of kernels
                                     * that add partials, nor with low-latency areas */
    uint32_t is_f32;                /* nonzero: `out` is of f32, and partials are still of the element type */
    uint32_t b_is_kn;               /* nonzero: `b` is [K, N] in memory; what a CTA loads of it is a multiple of 64 columns */
    uint32_t recording;             /* nonzero: it is in a graph, `epoch` means nothing, and this is what the host calls it */
    uint32_t reserved;
    GemmeshOutput outputs[GEMMESH_MAX_WEIGHTS]; /* by weight */
    GemmeshPeers peers;
    GemmeshLowLatency low_latency;
} GemmeshParams;

/* GemmeshStore.flag of rows that nobody waits for, and of those that the copy stream sends. */
#define GEMMESH_UNTOLD 0xffffffffu
#define GEMMESH_COPIED 0xfffffffeu

/* One place where the rows of a block are stored. */
typedef struct GemmeshStore {
    uint32_t map;  /* number among the targets */
    uint32_t row;  /* where the block's first row goes. Where the block has no whole number of GEMMESH_STORE_ROWS, and the map
                    * more rows, the rows up to the next are written too */
    uint32_t to;   /* the rank whose memory it is */
    uint32_t flag; /* its chunk flag, written when all of the block is there; or GEMMESH_UNTOLD, or GEMMESH_COPIED */
} GemmeshStore;

/* Rows of the product that go the same ways. Tiles are counted from the first of them, and end with the last.
 *
 * They are stored as partials, rounded; or what is added up is, in the order of the ranks, each rounded before: rows of other
 * ranks' partials, the product itself, and the others' again; then bias, activation and residual follow. Sums of f32 are not stored
 * in these places but to outputs[0], and nobody waits for them. */
typedef struct GemmeshBlock {
    uint32_t row;         /* the first: row of `a` */
    uint32_t rows;        /* how many */
    uint32_t addend;      /* the first of what is added to it: row of `added` */
    uint32_t addend_step; /* from there to the next */
    uint16_t addends;     /* how many, */
    uint16_t before;      /* and how many of them before the product */
    uint32_t store_begin; /* where they go: stores[store_begin..+stores), GEMMESH_MAX_TARGETS at the most */
    uint16_t stores;
    uint16_t sum;         /* nonzero: what is stored is the sum */
    uint32_t reports;     /* of a block that somebody waits for: one for each tile and each warp that stores rows of it; else 0 */
} GemmeshBlock;

/* What a kernel that adds partials needs beside GemmeshParams. All pointers are device addresses. */
typedef struct GemmeshSums {
    const GemmeshBlock *blocks; /* by number */
    const GemmeshStore *stores;
    uint32_t *reports;   /* by block: how many there are; zero between operations */
    uint32_t *stored;    /* by block: 1 once all are there, for the copy stream, which waits for it and resets it */
    uint32_t flag_begin; /* no tile waits for flags[flag_begin..flag_end), but the kernel does before it ends */
    uint32_t flag_end;
} GemmeshSums;

/* gemmesh_reduce_<dtype>: rows that are added up in f32, one addend after the other, then bias, activation and residual; rounded once,
 * or stored as f32. Any grid of CTAs of GEMMESH_REDUCE_THREADS threads.
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
    uint32_t is_f32;     /* nonzero: `out` is of f32 */
    uint32_t reserved;   /* zero */
} GemmeshReduction;

/* For benchmarks: gemmesh_align, one CTA of GEMMESH_MAX_WORLD threads with this argument, ends on all ranks at the same
 * time, give or take a microsecond. Words of streams would let them go on up to ten apart. */
typedef struct GemmeshAlignment {
    uint32_t *words[GEMMESH_MAX_WORLD]; /* by rank, as this GPU maps them: its words, by the rank that writes them */
    const uint32_t *abort;              /* nonzero: stop waiting */
    uint64_t deadline_ns;               /* the longest that it waits */
    uint32_t count;                     /* the number of this alignment: what is written, and waited for */
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
static_assert(sizeof(GemmeshPeers) == 48 + 16 * GEMMESH_MAX_WORLD, "");
static_assert(offsetof(GemmeshPeers, task_count) == 32, "");
static_assert(sizeof(GemmeshLowLatency) == 8 + 16 * GEMMESH_MAX_TARGETS, "");
static_assert(sizeof(GemmeshOutput) == 48, "");
static_assert(offsetof(GemmeshOutput, n) == 40, "");
static_assert(sizeof(GemmeshParams) == 128 + 48 * GEMMESH_MAX_WEIGHTS + sizeof(GemmeshPeers) + sizeof(GemmeshLowLatency), "");
static_assert(offsetof(GemmeshParams, trace) == 40, "");
static_assert(offsetof(GemmeshParams, tile_count) == 80, "");
static_assert(offsetof(GemmeshParams, outputs) == 128, "");
static_assert(offsetof(GemmeshParams, peers) == 128 + 48 * GEMMESH_MAX_WEIGHTS, "");
static_assert(sizeof(GemmeshBlock) == 32, "a block is two 16-byte loads");
static_assert(sizeof(GemmeshStore) == 16, "a store is one 16-byte load");
static_assert(sizeof(GemmeshSums) == 40, "");
static_assert(sizeof(GemmeshReduction) == 64 + 16 * GEMMESH_MAX_WORLD, "");
static_assert(offsetof(GemmeshReduction, count) == 40 + 16 * GEMMESH_MAX_WORLD, "");
static_assert(sizeof(GemmeshAlignment) == 32 + 8 * GEMMESH_MAX_WORLD, "");

#endif
