// out[M, N] = activation(a[M, K] * b[N, K]^T (+ bias)) (+ residual), fused with its communication among GPUs (ranks).
//
// Either rows of `a` come from the peers while the kernel multiplies those that are there. Or each rank makes partial
// sums of the output, sends them to the ranks that own the rows, and adds the peers' partial sums to its own rows.
// Flags in this GPU's memory say what has come: a flag has arrived when it holds the operation's number, the epoch
// (protocol/flags.cuh). If the operation pushes or stores to peers, the epoch is counted on the device, and each CTA
// finds it when it enters (protocol/push.cuh).
//
// With constant weights the kernel may begin before those before it on its stream have ended (programmatic dependent
// launch). Until they have, it reads nothing but its arguments, the table and `b`, and writes nothing outside its shared
// memory. Each warp waits for itself. As every CTA has warps that wait, this kernel ends after those before it, and
// whoever waits for this kernel's end need not ask for theirs.
//
// One persistent kernel. A cluster of one to eight CTAs takes entry after entry of the host's table. In each CTA two
// producer warps feed a ring of stages by TMA, one with rows of `a` and one with rows of `b`. Two consumer warpgroups
// multiply what arrives and store it. They share each tile, or take tiles by turns (Config::kPingpong). Only the
// producer of `a` waits for a tile's flags. The ring fills with the next tile while the consumers store this one, and
// with `b` before a tile's flags are there. If the operation pushes or stores to peers, the other warps of the
// producers' warpgroup tell the peers that this kernel runs, and push rows to them.
//
// In a kernel with block sums (kSums), the rows of `a` are cut into blocks. A block's product is stored to one or
// several places on this GPU or on others, as partial sums or, if this rank owns the rows, as sums (block_sums.cuh).
// The producers load a tile's operands without waiting. Then the one of `a` waits for the tile's flags, which stand for
// the addends, and loads these through the same ring.
//
// The CTAs of a cluster have neighbouring tiles. Those of a column have the same columns of the output, so they share
// `b`: each loads its part and multicasts it to the others. Those of a row share `a` in the same way. They wait for the
// same flags, each before it loads its part.
//
// If a problem has too few tiles, the CTAs of a cluster share K instead. Each multiplies its part of K, and then adds
// up and stores a part of the tile (cluster_split_k.cuh). Or entries of the table have a slice of K each. For each
// warp's rows, the last of the tile's entries to get there adds up the slices through memory (k_slices.cuh).
//
// There may be several `b` (weights), each with an output of its own. An entry says which of them its tile belongs to.
// In a gated product a tile has rows of two weights, gate and up. They are laid out so that each thread has both
// factors of its results, or gets one of them from one other thread (Config::kGateRows).
//
// Sums of elements of 8 bits are promoted to f32 after each step through K, and scaled (promoted.cuh), unless the caller
// wants them fast. The scales of blocks come through the ring with their rows (scales.cuh). Scales of whole rows and columns
// are applied at the end.
//
// A plain kernel (kPlain) has no code for bias, activation, gate, residual, f32 and [K, N]. Most products need none of
// them, and pay for code that they do not use (Config::kPlain). If it promotes sums, it may quantise them. A kernel for a
// product alone (kAlone) is plain, and has no code for that, flags, peers, slices of K and traces either.
//
// In a low-latency kernel (kLowLatency) there are few rows of partial sums. They go through low-latency areas, whose
// words hold data and flag. The warp that has made rows of a tile sends them, adds the peers' parts, and stores the
// sums (low_latency_sums.cuh).
#pragma once

#include "../abi.h"
#include "../protocol/push.cuh"
#include "../protocol/tile_table.cuh"
#include "abi.h"
#include "block_sums.cuh"
#include "config.cuh"
#include "family.cuh"
#include "load.cuh"
#include "promoted.cuh"
#include "ptx.cuh"
#include "scales.cuh"
#include "store.cuh"
#include "tile.cuh"
#include "turn.cuh"
#include "weights.cuh"
#include "wgmma.cuh"

namespace gemmesh {

// The warps beside the producers: push rows. In the first CTA that has entered, one of them also tells the peers that
// this kernel runs. If tiles are stored or sent to peers, it then waits until the peers are ready.
template <class C>
__device__ __forceinline__ void serve_peers(const GemmeshParams& params, Shared<C>& shared) {
    const uint32_t pusher = threadIdx.x - (kWarpgroupThreads - Pushers::kThreads);
    if (!has_peers<C>(params)) return;
    const auto epoch = [&] { return shared.entrance.get().epoch; };
    if (pusher < 32 && shared.entrance.get().first) {
        announce(params, epoch(), pusher);
        if (C::kSums || C::kLowLatency) await_peers(params, epoch(), pusher);
    }
    if constexpr (!C::kLowLatency) push(params, shared.pushers, epoch, pusher);
}

// One warpgroup: the products of `count` steps through K, of all its bands. `a` and `b` are its operands in the first
// stage. There is one loop for `b` as [N, K] and one for [K, N], because the instructions differ.
template <class C, bool BIsKn>
__device__ __forceinline__ void multiply(Bands<C>& bands, Shared<C>& shared, RingPosition<C::kStages>& at,
                                         const Turn<C>& turn, Placed<C>& placed, uint32_t a, uint32_t b, uint32_t count,
                                         uint32_t lane, uint32_t cta) {
    constexpr uint32_t kStageA = operand_distance(sizeof(shared.a[0]));
    constexpr uint32_t kStageB = operand_distance(sizeof(shared.b[0]));
    constexpr uint32_t kNextBand = operand_distance(kBandRows * GEMMESH_STAGE_ROW);
    uint32_t previous = 0;
    uint32_t step = 0;
    // There is at least one step, and `do` tells the compiler so. Then it puts no other instruction on the
    // accumulators.
    do {
        // wait for the stage's bytes
        shared.pipeline.wait_full(at);

        // multiply; meanwhile the stage before is finished and can be loaded again
        const uint32_t stage_a = a + at.stage * kStageA;
        const uint32_t stage_b = b + at.stage * kStageB;
#pragma unroll
        for (uint32_t band = 0; band < C::kBands; ++band) {
            if constexpr (C::kSwapAb) {
                bands[band].template multiply<typename C::Swapped, BIsKn, false>(stage_b + band * kNextBand, stage_a, step == 0);
            } else {
                bands[band].template multiply<typename C::Element, false, BIsKn>(stage_a + band * kNextBand, stage_b, step == 0);
            }
        }
        if (step > 0) {
            ptx::wgmma_wait_group<C::kBands>();
            shared.pipeline.release(previous, lane, cta);
            if constexpr (C::kSums) {
                if (step == placed.kReportStep) placed.report(lane);
            }
        }
        previous = at.stage;
        at.advance();
    } while (++step < count);
    turn.end();
#pragma unroll
    for (uint32_t band = 0; band < C::kBands; ++band) bands[band].wait();
    shared.pipeline.release(previous, lane, cta);
}

// One warpgroup: the same, with the loop for what this call asks for: the layout of `b`, or sums that are promoted. `left`
// is as in multiply_promoted.
template <class C>
__device__ __forceinline__ void multiply_tile(Bands<C>& bands, const GemmeshParams& params, Shared<C>& shared,
                                              RingPosition<C::kStages>& at, const Turn<C>& turn, Placed<C>& placed,
                                              const ConsumerWarp<C>& self, uint32_t a, uint32_t b, uint32_t count,
                                              uint32_t weight, uint32_t left) {
    const auto plain = [&] { multiply<C, false>(bands, shared, at, turn, placed, a, b, count, self.lane, self.cta); };
    const auto promoted = [&] {
        multiply_promoted<C>(bands, params, shared, at, turn, placed, self, a, b, count, weight, left);
    };
    if constexpr (C::kPromotes && !C::kCanBeFast) {
        promoted();
    } else if constexpr (C::kPromotes) {
        params.is_fast != 0 ? plain() : promoted();
    } else if constexpr (C::kTakesKn) {
        if (params.b_is_kn == 0) return plain();
        multiply<C, true>(bands, shared, at, turn, placed, a, b, count, self.lane, self.cta);
    } else {
        plain();
    }
}

// One warp: loads the bias of its columns, while the product is made. With block sums only this rank's blocks have a
// bias, and store_sums loads it. Where consumers take turns, it also fetches the residual into the cache. Elsewhere that
// takes longer than it saves, because these tiles are large. `row` is the tile's first row, and `left` the warp's first
// column.
template <class C>
__device__ __forceinline__ void load_addends(Addends<C>& bias, const GemmeshParams& params, const ConsumerWarp<C>& self,
                                             uint32_t weight, uint32_t row, uint32_t left) {
    if constexpr (!C::kSums) bias.load(params, params.outputs[weight], is_gated<C>(params), left, self.lane);
    if constexpr (C::kPingpong) {
#pragma unroll
        for (uint32_t band = 0; band < C::kBands; ++band) {
            const uint32_t own = row + self.row(band);
            prefetch_residual<typename C::Output, C::kConsumerN>(params.outputs[weight], params.m, own, left, self.lane);
        }
    }
}

// One warp: the same for swapped operands, by band. With low-latency areas, other lanes add than those that multiply,
// so SwapAbLowLatencySums loads. Of CTAs that share K, the one that stores the warp's columns loads. `column` is the
// tile's first column.
template <class C>
__device__ __forceinline__ void load_swap_ab_addends(Addends<C> (&addends)[C::kBands], const GemmeshParams& params,
                                                     const ConsumerWarp<C>& self, uint32_t weight, uint32_t row,
                                                     uint32_t column) {
    if (C::kLowLatency || !self.stores()) return;
#pragma unroll
    for (uint32_t band = 0; band < C::kBands; ++band) {
        const SwapAbPart<C> part(params, self, band);
        const void* bias = part.bias(params, weight);
        addends[band].load(params, params.outputs[weight], bias, row, column + part.column(), self.lane);
    }
}

// One warp: the scales of whole sums that are the weight's, by band. They are loaded while the tensor cores multiply.
template <class C>
__device__ __forceinline__ void load_column_scales(SumScales<C> (&scales)[C::kBands], const GemmeshParams& params,
                                                   const ConsumerWarp<C>& self, uint32_t weight, uint32_t column,
                                                   uint32_t left) {
    if (!C::kPromotes || C::kFinishesLate || has_block_scales<C>(params)) return;
#pragma unroll
    for (uint32_t band = 0; band < C::kBands; ++band) scales[band].load_columns(params, self, weight, band, column, left);
}

// One warp: those of rows of `a`, which may come with the rows. So they are read when the tile's first stage is there, as its
// producer has waited for the rows. `row` is the tile's first row in `a`.
template <class C>
__device__ __forceinline__ void load_row_scales(SumScales<C> (&scales)[C::kBands], const GemmeshParams& params,
                                                Shared<C>& shared, const RingPosition<C::kStages>& at,
                                                const ConsumerWarp<C>& self, uint32_t row) {
    if (!C::kPromotes || C::kFinishesLate || has_block_scales<C>(params)) return;
    if constexpr (!C::kAlone) shared.pipeline.wait_full(at);
#pragma unroll
    for (uint32_t band = 0; band < C::kBands; ++band) scales[band].load_rows(params, self, band, row);
}

// One warp: both of a band, after its products.
template <class C>
__device__ __forceinline__ void load_scales_late(SumScales<C>& scales, const GemmeshParams& params,
                                                 const ConsumerWarp<C>& self, uint32_t weight, uint32_t band, uint32_t row,
                                                 uint32_t column, uint32_t left) {
    if (!C::kFinishesLate || has_block_scales<C>(params)) return;
    scales.load_rows(params, self, band, row);
    scales.load_columns(params, self, weight, band, column, left);
}

// Notes in a trace that a tile's first operands have come.
template <class C>
__device__ __forceinline__ void note_begin(const GemmeshParams& params, const TableWalk& walk, Shared<C>& shared,
                                           const RingPosition<C::kStages>& at, uint32_t cta, bool tracer) {
    if (is_traced<C>(params)) {
        shared.pipeline.wait_full(at);
        if (tracer) event_of<C>(params, walk.index(), cta).math_begin = ptx::globaltimer();
    }
}

// Notes in a trace that a tile is stored.
__device__ __forceinline__ void note_done(GemmeshTraceEvent& event, uint32_t index) {
    event.done = ptx::globaltimer();
    event.sm = ptx::smid();
    event.tile = index;
}

// One warp: adds up the parts of K of a band of its tile, and stores the band. `row` and `column` are the tile's first
// ones, and `left` is the warp's first column.
template <class C>
__device__ __forceinline__ void store_band(Accumulators<C::kColumns>& accumulators, const Maps& maps,
                                           const GemmeshParams& params, const TableWalk& walk, Shared<C>& shared,
                                           SumScales<C>& scales, Addends<C>& addends,
                                           const ConsumerWarp<C>& self, uint32_t turn, uint32_t band, uint32_t row,
                                           uint32_t column, uint32_t left) {
    const uint32_t own = row + self.row(band);
    bool has_all_of_k;
    if constexpr (C::kSliced) {
        has_all_of_k = add_slices<C>(accumulators, params, walk, self, band, own < params.m);
    } else {
        has_all_of_k = shared.sum.gather(accumulators, turn, self.cta, self.number(), self.lane);
    }
    if (!has_all_of_k) return;
    const uint32_t weight = weight_of<C>(walk.tile());
    load_scales_late<C>(scales, params, self, weight, band, row, column, left);
    if constexpr (C::kPromotes) scales.apply(accumulators, params, self.lane);
    if constexpr (C::kFinishesLate && !C::kPlain) load_addends<C>(addends, params, self, weight, row, left);
    store_product<C>(accumulators, maps, params, shared, addends, weight, self, band, own, column, left);
}

// One warpgroup: stores its bands of the `turn`-th tile. As store_band.
template <class C>
__device__ __forceinline__ void store_tile(Bands<C>& bands, const Maps& maps, const GemmeshParams& params,
                                           const TableWalk& walk, Shared<C>& shared, SumScales<C> (&scales)[C::kBands],
                                           Addends<C> (&addends)[C::kSwapAb ? C::kBands : 1],
                                           const ConsumerWarp<C>& self, uint32_t turn, uint32_t row, uint32_t column,
                                           uint32_t left) {
    if constexpr (C::kMakesRowScales) {
        const uint32_t weight = weight_of<C>(walk.tile());
        if (makes_row_scales<C>(params, weight)) {
            store_quantized<C>(bands, params, shared, scales, addends, weight, self, row, column);
            return;
        }
    }
#pragma unroll 1
    for (uint32_t band = 0; band < C::kBands; ++band) {
        store_band<C>(bands[0], maps, params, walk, shared, scales[0], addends[0], self, turn, band, row, column, left);
        // one code stores all bands
        if constexpr (C::kBands > 1) bands[0] = bands[1];
        if constexpr (C::kBands > 1 && C::kPromotes) scales[0] = scales[1];
        if constexpr (C::kBands > 1 && C::kSwapAb) addends[0] = addends[1];
    }
}

// One warpgroup: adds up the parts of K of the `turn`-th tile, and stores it with its addends. `row` is the tile's first
// row in the block. As store_band.
template <class C>
__device__ __forceinline__ void sum_tile(Bands<C>& bands, const GemmeshParams& params, const TableWalk& walk,
                                         Shared<C>& shared, RingPosition<C::kStages>& at, Placed<C>& placed,
                                         SumScales<C> (&scales)[C::kBands], Addends<C>& addends,
                                         const ConsumerWarp<C>& self, const GemmeshBlock& block, uint32_t turn,
                                         uint32_t row, uint32_t column, uint32_t left) {
    const bool has_all_of_k = shared.sum.gather(bands[0], turn, self.cta, self.number(), self.lane);
    load_scales_late<C>(scales[0], params, self, weight_of<C>(walk.tile()), 0, block.row + row, column, left);
    if constexpr (C::kPromotes) scales[0].apply(bands[0], params, self.lane);
    const uint32_t index = walk.tile().block;
    store_sums<C>(bands[0], params, block, index, shared, at, placed, addends, self, row, left, has_all_of_k);
}

// The number of this warp in its warpgroup.
//
// The shuffle tells the compiler that a warp's lanes branch alike on their rows. Else it takes all that follows for
// divergent, computes each operand's address in vector registers, and moves four of them before each wgmma. Low-latency
// kernels of the largest tiles have no register for it.
template <class C>
__device__ __forceinline__ uint32_t warp_of_group() {
    uint32_t warp = threadIdx.x / 32 % 4;
    if constexpr (!C::kLowLatency) warp = __shfl_sync(~0u, warp, 0);
    return warp;
}

// One warpgroup: multiplies its part of each tile, or each tile whose turn it is, and stores it.
template <class C>
__device__ __forceinline__ void consume(const Maps& maps, const GemmeshParams& params, const SumArguments& partials,
                                        TableWalk& walk, Shared<C>& shared, uint32_t cta, uint32_t consumer) {
    const ConsumerWarp<C> self{cta, consumer, warp_of_group<C>(), threadIdx.x % 32};
    // where the consumer's part of a tile begins, if it shares the tile
    const uint32_t own = C::kPingpong ? 0 : consumer * (C::kSideBySide ? C::kConsumerN : kBandRows);
    const uint32_t own_row = C::kSideBySide || C::kSwapAb ? 0 : own;
    const uint32_t own_column = own - own_row;
    const uint32_t a = operand_address(&shared.a[0][own_row * GEMMESH_STAGE_ROW]);
    const uint32_t b = operand_address(&shared.b[0][own_column * GEMMESH_STAGE_ROW]);
    const bool tracer = is_traced<C>(params) && self.is_first();
    Bands<C> bands;
    RingPosition<C::kStages> at;
    const Turn<C> turn(consumer);
    Placed<C> placed(params, partials, shared.entrance, shared.boxes[self.box()]);

    for (uint32_t number = 0; walk.valid(); walk.advance(), ++number) {
        const GemmeshBlock block = begin_block<C>(placed, partials, walk.tile(), self.lane);
        const Steps steps = steps_of<C>(params, walk.index(), cta);
        const uint32_t count = steps.end - steps.begin;
        if (!turn.is_of(number)) {
            at.skip(count);
            continue;
        }
        const uint32_t row = first_row<C>(walk.tile(), cta);
        const uint32_t column = first_column<C>(params, walk.tile(), cta);
        const uint32_t left = column + (is_gated<C>(params) ? own_column / 2 : own_column);
        const uint32_t weight = weight_of<C>(walk.tile());
        Addends<C> addends[C::kSwapAb ? C::kBands : 1];  // all bands of rows have the same bias
        SumScales<C> scales[C::kBands];
        // what follows the product comes while it is made
        if constexpr (C::kSwapAb && !C::kPlain) {
            load_swap_ab_addends<C>(addends, params, self, weight, row, column);
        } else if constexpr (!C::kPlain && !C::kFinishesLate) {
            load_addends<C>(addends[0], params, self, weight, row, left);
        }
        load_column_scales<C>(scales, params, self, weight, column, left);
        turn.begin();
        note_begin<C>(params, walk, shared, at, cta, tracer);
        load_row_scales<C>(scales, params, shared, at, self, row);
        multiply_tile<C>(bands, params, shared, at, turn, placed, self, a, b, count, weight, left);
        if (tracer) event_of<C>(params, walk.index(), cta).math_end = ptx::globaltimer();

        // store the tile; the producers are loading the next one
        if constexpr (C::kSums) {
            sum_tile<C>(bands, params, walk, shared, at, placed, scales, addends[0], self, block, number, row, column, left);
        } else {
            store_tile<C>(bands, maps, params, walk, shared, scales, addends, self, number, row, column, left);
        }
        if (tracer) note_done(event_of<C>(params, walk.index(), cta), walk.index());
    }

    if constexpr (C::kSums) placed.report(self.lane);
    if constexpr (C::kLowLatency) ptx::barrier_arrive<kLeaveBarrier, GEMMESH_THREADS>();
    // shared memory must outlive the stores that read it
    ptx::cp_async_bulk_wait_group_read<0>();
}

// Waits until every thread of the cluster has come here.
template <class C>
__device__ __forceinline__ void meet() {
    if constexpr (C::kCtas == 1) {
        __syncthreads();
    } else {
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();
    }
}

template <class C>
__device__ __forceinline__ void matmul(const Maps& maps, const GemmeshParams& params, const SumArguments& partials) {
    // The swizzle needs this alignment. It holds because no static shared memory stands in front.
    extern __shared__ __align__(1024) uint8_t dynamic_shared[];
    Shared<C>& shared = *reinterpret_cast<Shared<C>*>(dynamic_shared);
    // A kernel that waits for peers leaves the multiprocessors beside it to kernels that the peers may wait for.
    if (!has_peers<C>(params)) family::launch_dependents();
    const uint32_t warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
    const uint32_t cta = C::kCtas == 1 ? 0 : __shfl_sync(~0u, ptx::cluster_ctarank(), 0);

    if (threadIdx.x == 0) {
        ptx::prefetch_tensormap(maps.a);
        ptx::prefetch_tensormap(maps.b);
        if (!C::kSums && params.m % C::kTileM != 0) ptx::prefetch_tensormap(&maps.tails->a);
        if constexpr (C::kSums) {
            ptx::prefetch_tensormap(partials.added);
        } else {
            if (!C::kSwapAb && !is_f32<C>(params)) ptx::prefetch_tensormap(maps.out);
            if (is_gated<C>(params)) ptx::prefetch_tensormap(maps.b_of(1));
        }
        shared.pipeline.init(C::kSharing * 4, has_block_scales<C>(params) ? kProducers * 32 : 0);
        shared.sum.init();
        shared.entrance.init();
        ptx::fence_mbarrier_init();
    }
    // the first entry is on its way from memory while the CTAs meet
    TableWalk walk(params, C::kCtas, C::kComputesEntries ? params.tile_rows : 0, C::kClusterN * columns_of<C>(params));
    meet<C>();

    if (warpgroup == 0) {
        ptx::setmaxnreg_dec<kProducerRegisters>();
        // A warp that produces nothing enters and publishes the epoch, so that first loads, which need no epoch, do not
        // wait.
        constexpr uint32_t kProducerThreads = kProducers * 32;
        if (threadIdx.x < 32) {
            produce_rows<C>(maps, params, partials, walk, shared, cta);
        } else if (threadIdx.x < kProducerThreads) {
            produce_weights<C>(maps, params, partials, walk, shared, cta);
        } else {
            await_predecessors(params);
            if (!C::kAlone && threadIdx.x == kProducerThreads) shared.entrance.publish(enter_push(params));
            serve_peers(params, shared);
        }
        __syncwarp();
        if (has_peers<C>(params)) {
            // wait until the other warps of this warpgroup have pushed their tasks and, with low-latency areas, the
            // consumers have got the peers' parts
            ptx::barrier_sync<kLeaveBarrier, C::kLowLatency ? GEMMESH_THREADS : kWarpgroupThreads>();
            if (threadIdx.x == 0) leave_push(params, shared.entrance.get().epoch);
        }
    } else {
        ptx::setmaxnreg_inc<kConsumerRegisters>();
        await_predecessors(params);
        consume<C>(maps, params, partials, walk, shared, cta, warpgroup - 1);
    }

    // A neighbour may still signal this CTA's barriers, so no one leaves before all are done.
    if constexpr (C::kCtas > 1) meet<C>();
}

}  // namespace gemmesh

// Each of these two defines a kernel of the list in kernels.rs, which says how much shared memory it is launched with,
// and how many CTAs a cluster has. The arguments after that are its Config's. build.rs writes a source that
// includes this one and has such a line for each kernel.
#define GEMMESH_MATMUL(name, shared_bytes, ctas, ...)                                                      \
    GEMMESH_HEAD(name, shared_bytes, ctas, gemmesh::Config<__VA_ARGS__>)                                   \
    (const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,                         \
     const __grid_constant__ CUtensorMap out, const __grid_constant__ GemmeshParams params,                \
     const __grid_constant__ gemmesh::MoreWeights more, const __grid_constant__ gemmesh::Tails tails) {    \
        gemmesh::matmul<gemmesh::Config<__VA_ARGS__>>(gemmesh::Maps{&a, &b, &out, &more, &tails}, params,  \
                                                      gemmesh::SumArguments{});                            \
    }

#define GEMMESH_MATMUL_SUMS(name, shared_bytes, ctas, ...)                                                 \
    GEMMESH_HEAD(name, shared_bytes, ctas, gemmesh::Config<__VA_ARGS__>)                                   \
    (const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,                         \
     const __grid_constant__ CUtensorMap added, const __grid_constant__ GemmeshParams params,              \
     const __grid_constant__ gemmesh::Targets targets, const __grid_constant__ GemmeshSums sums) {         \
        gemmesh::matmul<gemmesh::Config<__VA_ARGS__>>(gemmesh::Maps{&a, &b, nullptr, nullptr, nullptr}, params, \
                                                      gemmesh::SumArguments{&added, &targets, &sums});     \
    }

// The configuration is the variadic argument, because the preprocessor splits it at its commas.
#define GEMMESH_HEAD(name, shared_bytes, ctas, ...)                                                        \
    static_assert(sizeof(gemmesh::Shared<__VA_ARGS__>) == shared_bytes,                                    \
                  #name ": cuda/sm90/kernels.rs gives it less shared memory than it uses, or more");       \
    static_assert(__VA_ARGS__::kCtas == ctas, #name ": a cluster has other CTAs");                         \
    extern "C" __global__ void GEMMESH_CLUSTER_OF_##ctas __launch_bounds__(GEMMESH_THREADS, 1) name

// A kernel of single CTAs has no cluster, not one of a single CTA. Without clusters, CTAs with successive numbers lie on
// one GPC, 16 at a time, and what several of them read at about the same time reaches the GPC once. Clusters, even of
// one CTA, go to the GPCs in turn.
#define GEMMESH_CLUSTER_OF_1
#define GEMMESH_CLUSTER_OF_2 __cluster_dims__(2, 1, 1)
#define GEMMESH_CLUSTER_OF_4 __cluster_dims__(4, 1, 1)
#define GEMMESH_CLUSTER_OF_8 __cluster_dims__(8, 1, 1)
