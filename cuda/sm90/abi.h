/* The contract between the host and the kernels of family sm90, on top of cuda/abi.h.
 *
 * Kernel:      extern "C" void <name>(CUtensorMap a, CUtensorMap b, CUtensorMap out, GemmeshParams params,
 *                              struct {CUtensorMap b[GEMMESH_MAX_WEIGHTS - 1], out[GEMMESH_MAX_WEIGHTS - 1];} more,
 *                              struct {CUtensorMap a, b[GEMMESH_MAX_WEIGHTS];} tails)
 *              or, if it adds partials,
 *                              <name>(CUtensorMap a, CUtensorMap b, CUtensorMap added, GemmeshParams params,
 *                                     struct {CUtensorMap maps[2 * GEMMESH_MAX_TARGETS];} targets, GemmeshSums sums)
 *
 *              Every argument is __grid_constant__. kernels.rs lists the kernels, with the tile_m, tile_n, cluster_m,
 *              cluster_n and split of each. <name>_plain, <name>_alone and <name>_low_latency have the arguments of
 *              <name>. The first is for products whose params.activation, is_gated, is_f32, stored_type and
 *              b_is_kn are zero, without bias and residual. The second is for those of them that wait for no flags, and whose
 *              peers.push_epoch, slices and trace are null. The third is for those whose low_latency.share is not zero,
 *              which the others take for zero.
 *
 * Launch:      grid    whole clusters of cluster_m * cluster_n * split CTAs, at most one on a multiprocessor: as many
 *                      as the device holds at a time, and no more than tile_count unless they have rows to push
 *              block   GEMMESH_THREADS
 *              cluster compiled into the kernel
 *              attrs   PROGRAMMATIC_STREAM_SERIALIZATION, if params.constant_weights is not zero and the kernel adds no
 *                      partials: it waits for the kernels before it; otherwise none
 *              shared  shared_bytes of kernels.rs, dynamic; raise
 *                      CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES to it first
 *
 * Tensor maps: rank 2, dimension 0 the contiguous one, element strides 1, interleave none, swizzle 128B, out-of-bounds
 *              fill zeros. Base addresses and row pitches are multiples of 16 bytes. Sizes are the logical ones, so
 *              a box reads zeros past an edge, and writes there are dropped.
 *
 *              map   sizes    box                                             L2 promotion
 *              a     {K, M}   {GEMMESH_STAGE_ROW bytes, tile_m / cluster_n}   128B
 *              b     {K, N}   {GEMMESH_STAGE_ROW bytes, tile_n / cluster_m}   128B
 *              out   {N, M}   {GEMMESH_STORE_COLUMNS, GEMMESH_STORE_ROWS}     none
 *               f32  {N, M}   {GEMMESH_STORE_COLUMNS / 2, GEMMESH_STORE_ROWS} none
 *
 *              `more` has the maps of the other weights and their outputs. In a gated product, `b` is gate's map,
 *              more.b[0] is up's, and their boxes have gate_box rows (kernels.rs). If `b` is [K, N]:
 *
 *              b     {N, K}   {64, 64}                                        128B
 *
 *              `tails` has maps of `a` and, by weight, of `b`, for tiles that have fewer rows than their boxes. TMA
 *              takes several times as long to write a row of zeros past an edge as to load a row. So the box of
 *              tails.a has M % (tile_m / cluster_n) rows, and that of tails.b the next multiple of 8 from
 *              N % (tile_n / cluster_m) on.
 *              A kernel that adds partials loads whole boxes, and so does every kernel from `b` that is gated or
 *              [K, N].
 *
 *              A map that no load or store uses may hold anything. This is so for `out` of kernels that swap operands,
 *              of f32 sums, of results of 8 bits, and of gated products of the element type if gate_rows is less
 *              than GEMMESH_STORE_COLUMNS; and for tails of matrices that end with a whole box, or
 *              that are loaded by whole boxes.
 *
 *              `added` is this rank's matrix of partials, with the boxes of `a`. The targets have the boxes of `out`.
 *              They are the matrices of partials of this rank and of the ranks after it in the ring. From
 *              GEMMESH_MAX_TARGETS on they are the matrices of sums, with only the rows that are written there.
 *
 *              TMA drops columns in pieces of 16 bytes. If N is no multiple of 8, a row's columns from N to the next
 *              multiple of 8 are written too. (Pieces of f32 are 4 columns.) These columns are padding, because
 *              pitches are multiples of 16 bytes too. Their numbers have no meaning: zeros, or NaN if the row of `a`
 *              is not finite, plus the residual's padding.
 */
#ifndef GEMMESH_SM90_ABI_H
#define GEMMESH_SM90_ABI_H

/* Bytes of each row of `a` and `b` that one pipeline stage holds: the width of the swizzle. They are a step through K. */
#define GEMMESH_STAGE_ROW 128
/* Threads of a CTA: a warpgroup with the producers, and two consumer warpgroups. */
#define GEMMESH_THREADS 384

/* The columns of the box of one store, of GEMMESH_STORE_ROWS rows: what one warp writes at a time. */
#define GEMMESH_STORE_COLUMNS 64

/* The widest tiles of kernels that know GemmeshParams.is_fast. */
#define GEMMESH_FAST_COLUMNS 176

#endif
