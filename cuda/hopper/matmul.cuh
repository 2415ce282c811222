// out[M, N] = a[M, K] * b[N, K]^T (+ bias), while the rows of `a` are still arriving; or while what is made of others' rows is
// on its way to them, and what they have made of this rank's on its way here, to be added.
//
// One persistent kernel. A cluster of one to eight CTAs takes entry after entry of the host's table; in each CTA a
// producer warp waits for the flags of the tile and feeds a ring of stages by TMA, and two consumer warpgroups
// multiply what arrives and store the tile. Only the producer ever waits for a tile's flags, and the ring keeps filling
// with the next tile while the consumers store this one; the first tile's `b` fills it before its flags are there. The producer
// warpgroup's other warps tell the peers that this kernel runs and push rows to them, where rows are pushed and not pulled.
//
// A kernel that adds partials (kSums) has tiles of blocks, which go to places of their own, on this GPU or on others: sums.cuh.
// What is added comes through the same ring behind the tile's operands, and then it is what the producer waits for, not `a`.
//
// The CTAs of a cluster work on neighbouring rows and the same columns, so they share `b`: each loads its part and
// multicasts it to both. Every producer waits for the flags itself, because it alone loads its CTA's rows of `a`; what
// a neighbour loads on its behalf is `b`, which needs no flag. Or, for problems of too few tiles, they share K: each
// multiplies its part of it, and then adds up and stores some of the rows. Or entries of the table have a slice of K each, and what
// they make is added through memory, by the last of a tile's: slices.cuh.
//
// Where few rows of partial sums are exchanged, the warp that has made rows of a tile sends them, adds what comes, and stores the sums:
// landing.cuh.
#pragma once

#include "../abi.h"
#include "../common/flags.cuh"
#include "../common/push.cuh"
#include "../common/schedule.cuh"
#include "epilogue.cuh"
#include "landing.cuh"
#include "pipeline.cuh"
#include "ptx.cuh"
#include "slices.cuh"
#include "split.cuh"
#include "sums.cuh"
#include "wgmma.cuh"

namespace gemmesh {

// The element types, as the list names them.
using bf16 = __nv_bfloat16;
using f16 = __half;

constexpr int kWarpgroupThreads = 128;
constexpr int kLeaveBarrier = 1;  // 0 is __syncthreads()
static_assert(kLeaveBarrier != Pushers::kBarrier);
constexpr int kConsumers = 2;
constexpr int kConsumerWarps = kConsumers * kWarpgroupThreads / 32;
static_assert(GEMMESH_THREADS == (1 + kConsumers) * kWarpgroupThreads);

// The warpgroups share out what the CTA is launched with: 65536 registers by its threads, in steps of 8. A warpgroup that
// asks for more than the others have given up waits for ever. The products need most of them.
constexpr int kLaunchRegisters = 65536 / GEMMESH_THREADS / 8 * 8;
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = ((1 + kConsumers) * kLaunchRegisters - kProducerRegisters) / kConsumers / 8 * 8;
static_assert(kConsumerRegisters == 224);

// Each consumer multiplies 64 rows, the height of a wgmma, by all columns of the tile: of all ways to split a tile in
// two this one reads the fewest bytes of shared memory for a product. Of a tile that is no higher, each takes half of the columns.
// Or the operands are exchanged, and rows of `b` are the wgmma's rows: then a tile may have any number of rows that a wgmma has of
// columns, and fits a product of few of them.
constexpr int kConsumerRows = 64;

template <class Element_, int TileM, int TileN, int Stages, int Cluster, int Split, int Boxes, bool Sums, bool Trace>
struct Config {
    using Element = Element_;
    static constexpr int kTileM = TileM;
    static constexpr int kTileN = TileN;
    static constexpr bool kSideBySide = TileM == kConsumerRows;  // consumers, not one above the other
    static constexpr bool kExchanged = TileM != kConsumerRows && TileM != kConsumers * kConsumerRows;
    static constexpr int kConsumerN = kSideBySide ? TileN / kConsumers : TileN;
    static constexpr int kColumns = kExchanged ? TileM : kConsumerN;  // of a consumer's accumulators
    static_assert(!kExchanged || (TileN == kConsumers * kConsumerRows && TileM % 16 == 0 && TileM <= 256 && !Sums));
    static constexpr int kStages = Stages;
    static constexpr int kCluster = Cluster;        // CTAs that share the loads of b, on rows of their own
    static constexpr int kSplit = Split;            // or: CTAs that share a tile, each with a part of K
    static constexpr int kCtas = Cluster * Split;   // in a cluster, as the hardware sees it
    static constexpr int kBoxes = Boxes;            // that a consumer warp has to store through
    static constexpr bool kSums = Sums;             // adds partials
    static constexpr bool kSliced = Split == 1 && !Sums;  // slices of K may be added through memory
    static constexpr bool kLands = kSideBySide && !Sums;  // few rows of partial sums may be exchanged as they are made
    static constexpr bool kTrace = Trace;
    static_assert(Cluster == 1 || Split == 1);

    static constexpr int kPartN = TileN / Cluster;  // what one CTA loads of the tile's b
    static_assert(TileN % 16 == 0 && TileN <= 256);
    static_assert(kPartN % 8 == 0, "a part of b begins on a whole swizzle pattern");
};

template <class C>
struct Shared {
    using Element = typename C::Element;
    alignas(1024) Element a[C::kStages][C::kTileM * GEMMESH_TILE_K];
    alignas(1024) Element b[C::kStages][C::kTileN * GEMMESH_TILE_K];
    StoreBox<Element> boxes[kConsumerWarps][C::kBoxes];
    SplitSum<C::kSplit, C::kColumns, kConsumerWarps> sum;
    Pipeline<C::kStages, C::kCluster> pipeline;
    Published<Entrance> entrance;
    Pushers pushers;
};

// The steps through K that a CTA makes.
struct Steps {
    uint32_t begin;
    uint32_t end;
};

template <class C>
__device__ __forceinline__ Steps steps_of(const GemmeshParams& params, uint32_t index, uint32_t rank) {
    const uint32_t all = (params.k + GEMMESH_TILE_K - 1) / GEMMESH_TILE_K;
    if constexpr (C::kSplit > 1) {
        const Steps part{all * rank / C::kSplit, all * (rank + 1) / C::kSplit};
        // Where K is too short to be shared, a step behind its end, where TMA reads zeros.
        return part.begin < part.end ? part : Steps{all, all + 1};
    } else if (C::kSliced && params.slices != nullptr) {
        const uint2 steps = __ldg(reinterpret_cast<const uint2*>(params.slices + index));
        return {steps.x, steps.y};
    } else {
        return {0, all};
    }
}

template <class C>
__device__ __forceinline__ uint32_t first_row(const GemmeshTile& tile, uint32_t rank) {
    return (tile.m * C::kCluster + (C::kSplit == 1 ? rank : 0)) * C::kTileM;
}

template <class C>
__device__ __forceinline__ GemmeshTraceEvent& event_of(const GemmeshParams& params, uint32_t index, uint32_t rank) {
    return params.trace[index * C::kCtas + rank];
}

// One warp: waits for each tile's rows, and one thread of it loads them, stage by stage.
template <class C>
__device__ __forceinline__ void produce(const CUtensorMap& map_a, const CUtensorMap& map_b,
                                        const GemmeshParams& params, const SumArguments& partials, TableWalk& walk,
                                        Shared<C>& shared, uint32_t rank) {
    constexpr uint32_t kStageBytes = sizeof(shared.a[0]) + sizeof(shared.b[0]);
    constexpr uint16_t kEveryCta = (1 << C::kCluster) - 1;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t part = C::kCluster == 1 ? 0 : rank * C::kPartN;
    ChunkFlags flags(params, lane);
    RingPosition<C::kStages> at;
    GemmeshBlock block;
    GemmeshBlock next_block;

    // Waits until the stage is free, and loads `b` into it, whose rows nobody waits for.
    const auto load_b = [&](const RingPosition<C::kStages>& to, uint32_t step) {
        shared.pipeline.acquire(to, kStageBytes);
        auto* b = &shared.b[to.stage][part * GEMMESH_TILE_K];
        const uint32_t column = walk.tile().n * C::kTileN + part;
        uint64_t* full = &shared.pipeline.full[to.stage];
        if constexpr (C::kCluster == 1) {
            ptx::cp_async_bulk_tensor_2d_load(b, &map_b, step * GEMMESH_TILE_K, column, full);
        } else {
            ptx::cp_async_bulk_tensor_2d_load_multicast(b, &map_b, step * GEMMESH_TILE_K, column, full, kEveryCta);
        }
    };
    const auto event = [&]() -> GemmeshTraceEvent& { return event_of<C>(params, walk.index(), rank); };

    if constexpr (C::kSums) next_block = load_block(*partials.sums, walk.tile().block);
    for (bool first = true; walk.valid(); walk.advance(), first = false) {
        const Steps steps = steps_of<C>(params, walk.index(), rank);
        const bool waits = walk.tile().flag_begin < walk.tile().flag_end;
        const auto wait_for_flags = [&] {
            if (C::kTrace && lane == 0) event().wait_begin = ptx::globaltimer();
            if (waits) flags.wait(walk.tile(), shared.entrance.get().epoch);
            if (C::kTrace && lane == 0) event().wait_end = ptx::globaltimer();
        };
        uint32_t row = first_row<C>(walk.tile(), rank);
        uint32_t ahead = steps.begin;  // the first step whose `b` has not been asked for
        if constexpr (C::kSums) {
            // the next tile's is on its way while this one is multiplied
            block = next_block;
            next_block = load_block(*partials.sums, walk.next().block);
            row += block.row;
        } else {
            // wait for the tile's rows; meanwhile the first tile's `b` fills the ring
            if (first && waits && lane == 0) {
                const uint32_t end = min(steps.end, steps.begin + C::kStages);
                for (RingPosition<C::kStages> to = at; ahead < end; ++ahead, to.advance()) load_b(to, ahead);
            }
            wait_for_flags();
        }

        if (lane == 0) {
            const uint32_t deferred_step = max(flags.deferred_step(walk.tile()), steps.begin);
            for (uint32_t step = steps.begin; step < steps.end; ++step) {
                if (step == deferred_step) flags.wait_deferred(shared.entrance.get().epoch);
                if (step >= ahead) load_b(at, step);
                if (C::kTrace && step == steps.begin) event().load_begin = ptx::globaltimer();
                uint64_t* full = &shared.pipeline.full[at.stage];
                ptx::cp_async_bulk_tensor_2d_load(shared.a[at.stage], &map_a, step * GEMMESH_TILE_K, row, full);
                at.advance();
            }
        }

        if constexpr (C::kSums) {
            // wait for what is added, while the consumers multiply
            wait_for_flags();
            if (lane == 0) {
                const uint32_t column = walk.tile().n * C::kTileN;
                load_addends<C>(*partials.added, block, shared, at, row - block.row, column);
            }
        }
    }
    if constexpr (C::kSums) {
        const GemmeshSums& sums = *partials.sums;
        if (sums.flag_begin < sums.flag_end) flags.wait(sums.flag_begin, sums.flag_end, shared.entrance.get().epoch);
    }
}

// The warps beside the producer's: tell the peers, and push rows. Where tiles are stored to peers, or exchanged with them, the operation
// is not complete before these are ready.
template <class C>
__device__ __forceinline__ void exchange(const GemmeshParams& params, Shared<C>& shared) {
    const uint32_t pusher = threadIdx.x - (kWarpgroupThreads - Pushers::kThreads);
    if (params.exchange.push_epoch == nullptr) return;
    const auto epoch = [&] { return shared.entrance.get().epoch; };
    if (pusher < 32 && shared.entrance.get().first) {
        announce(params, epoch(), pusher);
        if (C::kSums || (C::kLands && params.landing.share != 0)) await_peers(params, epoch(), pusher);
    }
    push(params, shared.pushers, epoch, pusher);
}

// One warpgroup: multiplies its rows of each tile and stores them.
template <class C>
__device__ __forceinline__ void consume(const CUtensorMap* map_out, const GemmeshParams& params,
                                        const SumArguments& partials, TableWalk& walk, Shared<C>& shared,
                                        uint32_t rank, uint32_t consumer) {
    using Element = typename C::Element;
    constexpr uint32_t kStepA = operand_step(sizeof(shared.a[0]));
    constexpr uint32_t kStepB = operand_step(sizeof(shared.b[0]));
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = threadIdx.x / 32 % 4;
    const uint32_t own_row = C::kSideBySide || C::kExchanged ? 0 : consumer * kConsumerRows;
    const uint32_t own_column = C::kSideBySide ? consumer * C::kConsumerN : C::kExchanged ? consumer * kConsumerRows : 0;
    const uint32_t a = operand(&shared.a[0][own_row * GEMMESH_TILE_K]);
    const uint32_t b = operand(&shared.b[0][own_column * GEMMESH_TILE_K]);
    // The first warp whose rows this CTA stores.
    const uint32_t first_warp = C::kSplit == 1 ? 0 : rank * (kConsumerWarps / C::kSplit);
    const bool tracer = C::kTrace && consumer * 4 + warp == first_warp && lane == 0;
    auto& boxes = shared.boxes[consumer * 4 + warp];
    Accumulators<Element, C::kColumns> accumulators;
    RingPosition<C::kStages> at;
    PlacedStores<Element, C::kColumns, C::kBoxes> placed(params, partials, shared.entrance, boxes);

    uint32_t turn = 0;
    for (; walk.valid(); walk.advance(), ++turn) {
        GemmeshBlock block;
        if constexpr (C::kSums) {
            block = load_block(*partials.sums, walk.tile().block);
            placed.turn_to(block, lane);
        }

        const Steps steps = steps_of<C>(params, walk.index(), rank);
        const uint32_t count = steps.end - steps.begin;
        uint32_t previous = 0;
        for (uint32_t step = 0; step < count; ++step) {
            // wait for the stage's bytes
            shared.pipeline.wait_full(at);
            if (tracer && step == 0) event_of<C>(params, walk.index(), rank).math_begin = ptx::globaltimer();

            // multiply; meanwhile the stage before is finished and can be loaded again
            const uint32_t stage_a = a + at.stage * kStepA;
            const uint32_t stage_b = b + at.stage * kStepB;
            if constexpr (C::kExchanged) {
                accumulators.multiply(stage_b, stage_a, step == 0);
            } else {
                accumulators.multiply(stage_a, stage_b, step == 0);
            }
            if (step > 0) {
                accumulators.template wait<1>();
                shared.pipeline.release(previous, lane);
                if constexpr (C::kSums) {
                    if (step == placed.kReportStep) placed.report(lane);
                }
            }
            previous = at.stage;
            at.advance();
        }
        accumulators.template wait<0>();
        shared.pipeline.release(previous, lane);
        if (tracer) event_of<C>(params, walk.index(), rank).math_end = ptx::globaltimer();

        // store the tile; the producer is loading the next one
        const uint32_t own = C::kExchanged ? 0 : own_row + warp * GEMMESH_STORE_ROWS;
        const auto row_of_warp = [&] { return first_row<C>(walk.tile(), rank) + own; };
        bool has_sums;
        if constexpr (C::kSliced) {
            const SliceSum<C::kCluster * kConsumerWarps> sum{walk.index(), rank * kConsumerWarps + consumer * 4 + warp};
            has_sums = sum.add(accumulators, params, row_of_warp() < params.m, lane);
        } else {
            has_sums = shared.sum.gather(accumulators, turn, rank, consumer * 4 + warp, lane);
        }
        const uint32_t row = row_of_warp();
        const uint32_t column = walk.tile().n * C::kTileN + own_column;
        if constexpr (C::kExchanged) {
            if (has_sums) store_columns(accumulators, params, boxes[0], row, column + warp * 16, lane);
        } else if constexpr (C::kSums) {
            const bool has_rows = has_sums && row < block.rows;
            // a tile of few steps through K has not reported the one before
            placed.report(lane);
            const bool is_sum = block.sum != 0;
            if (is_sum) add<C>(accumulators, block, shared, at, has_rows, consumer, own, lane);
            if (is_sum && has_rows && params.bias != nullptr) add_bias(accumulators, params, column, lane);
            placed.await_ready(row, column);
            if (has_rows) store_rows(accumulators, placed, lane);
            if (has_sums) placed.note(block, walk.tile().block);
        } else if (has_sums && row < params.m) {
            if (C::kLands && params.landing.share != 0) {
                const Landing<Element, C::kConsumerN> landing(params, shared.entrance.get(), row, column, lane);
                landing.exchange(accumulators);
                if (params.bias != nullptr) add_bias(accumulators, params, column, lane);
                landing.store(accumulators);
            } else {
                if (params.bias != nullptr) add_bias(accumulators, params, column, lane);
                OwnStores<Element, C::kConsumerN, C::kBoxes> stores{map_out, boxes, row, column, lane};
                store_rows(accumulators, stores, lane);
            }
        }
        if (tracer) {
            GemmeshTraceEvent& event = event_of<C>(params, walk.index(), rank);
            event.done = ptx::globaltimer();
            event.sm = ptx::smid();
            event.tile = walk.index();
        }
    }

    if constexpr (C::kSums) placed.report(lane);
    if constexpr (C::kLands) {
        if (params.landing.share != 0) ptx::barrier_arrive<kLeaveBarrier, GEMMESH_THREADS>();
    }
    // shared memory must outlive the stores that read it
    ptx::cp_async_bulk_wait_group_read<0>();
}

// Every thread of the cluster has reached this point.
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
__device__ __forceinline__ void matmul(const CUtensorMap& map_a, const CUtensorMap& map_b, const CUtensorMap* map_out,
                                       const GemmeshParams& params, const SumArguments& partials) {
    // The swizzle needs this alignment; with no static shared memory in front of it, it has it.
    extern __shared__ __align__(1024) uint8_t dynamic_shared[];
    Shared<C>& shared = *reinterpret_cast<Shared<C>*>(dynamic_shared);
    const uint32_t warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
    const uint32_t rank = C::kCtas == 1 ? 0 : __shfl_sync(~0u, ptx::cluster_ctarank(), 0);

    if (threadIdx.x == 0) {
        ptx::prefetch_tensormap(&map_a);
        ptx::prefetch_tensormap(&map_b);
        if (map_out != nullptr) ptx::prefetch_tensormap(map_out);
        if constexpr (C::kSums) {
            ptx::prefetch_tensormap(partials.added);
        }
        shared.pipeline.init(kConsumerWarps);
        shared.sum.init();
        shared.entrance.init();
        ptx::fence_mbarrier_init();
    }
    // on its way from memory while the CTAs meet
    TableWalk walk(params, C::kCtas);
    meet<C>();

    if (warpgroup == 0) {
        ptx::setmaxnreg_dec<kProducerRegisters>();
        // Not the producer, whose first loads need not wait for it.
        if (threadIdx.x == 32) shared.entrance.publish(enter_push(params));
        if (threadIdx.x < 32) produce<C>(map_a, map_b, params, partials, walk, shared, rank);
        if (threadIdx.x >= 32) exchange(params, shared);
        __syncwarp();
        if (params.exchange.push_epoch != nullptr) {
            // the other warps of this warpgroup have pushed what they took; and the consumers have got what they exchange
            if (C::kLands && params.landing.share != 0) {
                ptx::barrier_sync<kLeaveBarrier, GEMMESH_THREADS>();
            } else {
                ptx::barrier_sync<kLeaveBarrier, kWarpgroupThreads>();
            }
            if (threadIdx.x == 0) leave_push(params, shared.entrance.get().epoch);
        }
    } else {
        ptx::setmaxnreg_inc<kConsumerRegisters>();
        consume<C>(map_out, params, partials, walk, shared, rank, warpgroup - 1);
    }

    // A neighbour may still signal this CTA's barriers: nobody leaves before everybody is done.
    if constexpr (C::kCtas > 1) meet<C>();
}

}  // namespace gemmesh

// One kernel of the list in cuda/kernels.rs: build.rs writes a source that includes this one and has such a line for each. The
// list says how much shared memory a kernel is launched with, and how many boxes fit into it. The configuration's commas make it
// several arguments of a macro.
#define GEMMESH_CONFIG(Element, TileM, TileN, Stages, Cluster, Split, Boxes, Sums, Trace) \
    gemmesh::Config<gemmesh::Element, TileM, TileN, Stages, Cluster, Split, Boxes, Sums, Trace>

#define GEMMESH_HEAD(name, Cluster, Split, shared_bytes, ...)                                              \
    static_assert(sizeof(gemmesh::Shared<__VA_ARGS__>) == shared_bytes,                                    \
                  #name ": cuda/kernels.rs gives it less shared memory than it uses, or more");            \
    extern "C" __global__ void __cluster_dims__(Cluster * Split, 1, 1) __launch_bounds__(GEMMESH_THREADS, 1) name

#define GEMMESH_MATMUL(name, Element, TileM, TileN, Stages, Cluster, Split, Boxes, Trace, shared_bytes)           \
    GEMMESH_HEAD(name, Cluster, Split, shared_bytes,                                                       \
                 GEMMESH_CONFIG(Element, TileM, TileN, Stages, Cluster, Split, Boxes, false, Trace))              \
    (const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,                         \
     const __grid_constant__ CUtensorMap out, const __grid_constant__ GemmeshParams params) {              \
        gemmesh::matmul<GEMMESH_CONFIG(Element, TileM, TileN, Stages, Cluster, Split, Boxes, false, Trace)>(      \
            a, b, &out, params, gemmesh::SumArguments{});                                                  \
    }

// The same, of one that adds partials.
#define GEMMESH_MATMUL_SUMS(name, Element, TileM, TileN, Stages, Cluster, Split, Boxes, Trace, shared_bytes)      \
    GEMMESH_HEAD(name, Cluster, Split, shared_bytes,                                                       \
                 GEMMESH_CONFIG(Element, TileM, TileN, Stages, Cluster, Split, Boxes, true, Trace))               \
    (const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,                         \
     const __grid_constant__ CUtensorMap added, const __grid_constant__ GemmeshParams params,              \
     const __grid_constant__ gemmesh::Targets targets, const __grid_constant__ GemmeshSums sums) {         \
        gemmesh::matmul<GEMMESH_CONFIG(Element, TileM, TileN, Stages, Cluster, Split, Boxes, true, Trace)>(       \
            a, b, nullptr, params, gemmesh::SumArguments{&added, &targets, &sums});                        \
    }
