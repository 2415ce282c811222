// out[M, N] = activation(a[M, K] * b[N, K]^T (+ bias)) (+ residual), while the rows of `a` are still arriving; or while what is made
// of others' rows is on its way to them, and what they have made of this rank's on its way here, to be added.
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
// There may be several `b`, with outputs of their own: an entry says which of them its tile is of. Or a tile is of two of them, gate and up,
// laid out so that each thread has, or gets from one other, both factors of what it stores: Config::kGateRows.
//
// Where few rows of partial sums are exchanged, the warp that has made rows of a tile sends them, adds what comes, and stores the sums:
// landing.cuh.
#pragma once

#include "../abi.h"
#include "../common/flags.cuh"
#include "../common/push.cuh"
#include "../common/schedule.cuh"
#include "epilogue.cuh"
#include "exchanged.cuh"
#include "landing.cuh"
#include "pipeline.cuh"
#include "ptx.cuh"
#include "slices.cuh"
#include "split.cuh"
#include "sums.cuh"
#include "weights.cuh"
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

template <class Element_, int TileM, int TileN, int Stages, int Cluster, int Split, int Boxes, bool Sums>
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
    static_assert(Cluster == 1 || Split == 1);

    static constexpr int kPartN = TileN / Cluster;  // what one CTA loads of the tile's b
    static_assert(TileN % 16 == 0 && TileN <= 256);
    static_assert(kPartN % 8 == 0, "a part of b begins on a whole swizzle pattern");
    static constexpr bool kTakesKn = kPartN % 64 == 0;  // `b` may be given as [K, N]: see WeightLoads

    // A gated tile's rows of `b` are gate's and up's by turns, so many at a time. So the first half of a consumer's columns is gate's, and
    // the second up's; where operands are exchanged, two of its warps have gate's, and the other two up's.
    static constexpr bool kGates = !Sums;
    static constexpr int kGateRows = kSideBySide || kExchanged ? TileN / 4 : TileN / 2;
    static constexpr int kGateBox = kGateRows < kPartN ? kGateRows : kPartN;  // what is loaded at a time
    static_assert(kGateRows % 8 == 0 && kPartN % kGateBox == 0);
    static_assert(!kExchanged || Split <= 2, "SplitSum gives both warps of a pair to one CTA");
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

// The first column of a tile in what is stored of it.
template <class C>
__device__ __forceinline__ uint32_t first_column(const GemmeshParams& params, const GemmeshTile& tile) {
    const bool is_gated = C::kGates && params.is_gated != 0;
    return tile.n * (is_gated ? C::kTileN / 2 : C::kTileN);
}

// The weight that a tile is of.
template <class C>
__device__ __forceinline__ uint32_t weight_of(const GemmeshTile& tile) {
    return C::kSums ? 0 : tile.block;
}

// One warp: waits for each tile's rows, and one thread of it loads them, stage by stage.
template <class C>
__device__ __forceinline__ void produce(const Maps& maps, const GemmeshParams& params, const SumArguments& partials,
                                        TableWalk& walk, Shared<C>& shared, uint32_t rank) {
    constexpr uint32_t kStageBytes = sizeof(shared.a[0]) + sizeof(shared.b[0]);
    const uint32_t lane = threadIdx.x % 32;
    const bool tracer = params.trace != nullptr && lane == 0;
    const WeightLoads<C> weights{maps, rank};
    ChunkFlags flags(params, lane);
    RingPosition<C::kStages> at;
    GemmeshBlock block;
    GemmeshBlock next_block;

    // Waits until the stage is free, and loads `b` into it, whose rows nobody waits for.
    const auto load_b = [&](const RingPosition<C::kStages>& to, uint32_t step) {
        shared.pipeline.acquire(to, kStageBytes);
        const GemmeshTile tile = walk.tile();
        const uint32_t column = first_column<C>(params, tile);
        weights.load(params, shared.b[to.stage], weight_of<C>(tile), column, step, &shared.pipeline.full[to.stage]);
    };
    const auto event = [&]() -> GemmeshTraceEvent& { return event_of<C>(params, walk.index(), rank); };

    if constexpr (C::kSums) next_block = load_block(*partials.sums, walk.tile().block);
    for (bool first = true; walk.valid(); walk.advance(), first = false) {
        const Steps steps = steps_of<C>(params, walk.index(), rank);
        const bool waits = walk.tile().flag_begin < walk.tile().flag_end;
        const auto wait_for_flags = [&] {
            if (tracer) event().wait_begin = ptx::globaltimer();
            if (waits) flags.wait(walk.tile(), shared.entrance.get().epoch);
            if (tracer) event().wait_end = ptx::globaltimer();
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
                if (tracer && step == steps.begin) event().load_begin = ptx::globaltimer();
                uint64_t* full = &shared.pipeline.full[at.stage];
                ptx::cp_async_bulk_tensor_2d_load(shared.a[at.stage], maps.a, step * GEMMESH_TILE_K, row, full);
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

// What a warp of a consumer stores through. Only kernels that add partials have places for its stores.
template <class C>
using Placed = PlacedStores<typename C::Element, C::kColumns, C::kBoxes>;

// One warpgroup: the products of `count` steps through K. `a` and `b` are its operands in the first stage. Where `b` is [K, N], the
// instructions say so: there is a loop for each of both.
template <class C, bool BIsKn>
__device__ __forceinline__ void multiply(Accumulators<typename C::Element, C::kColumns>& accumulators, Shared<C>& shared,
                                         RingPosition<C::kStages>& at, Placed<C>& placed, uint32_t a, uint32_t b,
                                         uint32_t count, uint32_t lane) {
    constexpr uint32_t kStepA = operand_step(sizeof(shared.a[0]));
    constexpr uint32_t kStepB = operand_step(sizeof(shared.b[0]));
    uint32_t previous = 0;
    uint32_t step = 0;
    // There is one step at least, and that the compiler knows it keeps other instructions off the accumulators.
    do {
        // wait for the stage's bytes
        shared.pipeline.wait_full(at);

        // multiply; meanwhile the stage before is finished and can be loaded again
        const uint32_t stage_a = a + at.stage * kStepA;
        const uint32_t stage_b = b + at.stage * kStepB;
        if constexpr (C::kExchanged) {
            accumulators.template multiply<BIsKn, false>(stage_b, stage_a, step == 0);
        } else {
            accumulators.template multiply<false, BIsKn>(stage_a, stage_b, step == 0);
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
    } while (++step < count);
    accumulators.template wait<0>();
    shared.pipeline.release(previous, lane);
}

// One warp: stores N columns of accumulators, finished, to the output of a weight.
template <class C, int N>
__device__ __forceinline__ void store_own(const float* accumulators, const CUtensorMap* map,
                                          StoreBox<typename C::Element> (&boxes)[C::kBoxes], const GemmeshOutput& output,
                                          bool is_f32, const WarpPlace& place, uint32_t lane) {
    using Element = typename C::Element;
    if (is_f32) {
        static_assert(sizeof(StoreBox<float>) == sizeof(StoreBox<Element>));
        auto& of_f32 = reinterpret_cast<StoreBox<float>(&)[C::kBoxes]>(boxes);
        OwnStores<float, N, C::kBoxes> stores{map, of_f32, place.row, place.column, lane};
        store_f32_rows<N>(accumulators, stores, lane);
    } else if constexpr (N < StoreBox<Element>::kColumns) {
        store_directly<Element, N>(accumulators, output, Place(place, lane));
    } else {
        OwnStores<Element, N, C::kBoxes> stores{map, boxes, place.row, place.column, lane};
        store_rows<Element, N>(accumulators, stores, lane);
    }
}

// One warp: finishes and stores its rows of a tile. `row` and `column` are its first.
template <class C>
__device__ __forceinline__ void store_tile(Accumulators<typename C::Element, C::kColumns>& accumulators, const Maps& maps,
                                           const GemmeshParams& params, Shared<C>& shared,
                                           const ColumnBias<typename C::Element, C::kColumns>& bias, uint32_t weight,
                                           uint32_t row, uint32_t column, uint32_t warp, uint32_t lane) {
    using Element = typename C::Element;
    constexpr int kN = C::kColumns;
    const GemmeshOutput& output = params.outputs[weight];
    const bool is_gated = params.is_gated != 0;
    const bool is_f32 = params.is_f32 != 0;
    auto& boxes = shared.boxes[warp];
    float* d = accumulators.d;
    if (C::kLands && params.landing.share != 0) {
        const Landing<Element, kN> landing(params, output, shared.entrance.get(), row, column, lane);
        landing.exchange(accumulators);
        const WarpPlace rows = landing.place();
        finish<Element, false, kN>(d, params, output, bias, boxes, rows, lane);
        const Place place(rows, lane);
        if (is_f32) {
            store_directly<float, kN>(d, output, place);
        } else {
            store_directly<Element, kN>(d, output, place);
        }
        return;
    }
    const WarpPlace place{row, column, 0, params.m};
    const CUtensorMap* map = maps.out_of(weight);
    finish<Element, true, kN>(d, params, output, bias, boxes, place, lane);
    if (is_gated) {
        store_own<C, kN / 2>(d, map, boxes, output, is_f32, place, lane);
    } else {
        store_own<C, kN>(d, map, boxes, output, is_f32, place, lane);
    }
}

// One warp: the same of a tile of exchanged operands, whose first row and column are given. Of a gated one, warps 0 and 1 of each
// consumer have gate's columns, and warps 2 and 3 have up's of the same number. Both have their sums, for SplitSum gives them to one CTA; not
// so SliceSum, so K of gated products is not cut into slices here.
template <class C>
__device__ __forceinline__ void store_exchanged(Accumulators<typename C::Element, C::kColumns>& accumulators,
                                                const GemmeshParams& params, Shared<C>& shared, uint32_t weight, uint32_t row,
                                                uint32_t column, uint32_t warp, uint32_t lane) {
    const bool is_gated = params.is_gated != 0;
    const bool is_up = is_gated && warp % 4 >= 2;
    const uint32_t pair = warp / 4 * 2 + warp % 2;
    const GemmeshOutput& output = params.outputs[weight];
    auto& own = shared.boxes[warp][0];
    auto& gates = shared.boxes[pair / 2 * 4 + pair % 2][0];
    auto& ups = shared.boxes[pair / 2 * 4 + pair % 2 + 2][0];
    ExchangedTile<typename C::Element, C::kColumns> tile(accumulators, params, output, row, column + (is_gated ? pair : warp) * 16, lane);
    tile.add_bias(is_up ? params.outputs[1].bias : output.bias);
    if (is_up) {
        tile.give(ups, gates, kPairBarrier + pair);
        return;
    }
    activate<C::kColumns / 2>(accumulators.d, params.activation, params.is_f32 != 0);
    if (is_gated) tile.multiply(ups, gates, kPairBarrier + pair);
    tile.add_residual(own);
    if (params.is_f32 != 0) {
        tile.store_f32();
    } else {
        tile.store(own);
    }
}

// One warpgroup: multiplies its rows of each tile and stores them.
template <class C>
__device__ __forceinline__ void consume(const Maps& maps, const GemmeshParams& params, const SumArguments& partials,
                                        TableWalk& walk, Shared<C>& shared, uint32_t rank, uint32_t consumer) {
    using Element = typename C::Element;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = threadIdx.x / 32 % 4;
    const uint32_t own_row = C::kSideBySide || C::kExchanged ? 0 : consumer * kConsumerRows;
    const uint32_t own_column = C::kSideBySide ? consumer * C::kConsumerN : C::kExchanged ? consumer * kConsumerRows : 0;
    const uint32_t a = operand(&shared.a[0][own_row * GEMMESH_TILE_K]);
    const uint32_t b = operand(&shared.b[0][own_column * GEMMESH_TILE_K]);
    // The first warp whose rows this CTA stores.
    const uint32_t first_warp = C::kSplit == 1 ? 0 : rank * (kConsumerWarps / C::kSplit);
    const bool tracer = params.trace != nullptr && consumer * 4 + warp == first_warp && lane == 0;
    auto& boxes = shared.boxes[consumer * 4 + warp];
    Accumulators<Element, C::kColumns> accumulators;
    RingPosition<C::kStages> at;
    Placed<C> placed(params, partials, shared.entrance, boxes);

    uint32_t turn = 0;
    for (; walk.valid(); walk.advance(), ++turn) {
        GemmeshBlock block;
        if constexpr (C::kSums) {
            block = load_block(*partials.sums, walk.tile().block);
            placed.turn_to(block, lane);
        }

        const Steps steps = steps_of<C>(params, walk.index(), rank);
        const uint32_t count = steps.end - steps.begin;
        // what follows the product comes while it is made
        const uint32_t column = first_column<C>(params, walk.tile());
        const uint32_t weight = weight_of<C>(walk.tile());
        const bool is_gated = C::kGates && params.is_gated != 0;
        const uint32_t left = column + (is_gated ? own_column / 2 : own_column);
        ColumnBias<Element, C::kExchanged ? 8 : C::kConsumerN> bias;
        if constexpr (!C::kExchanged) {
            if constexpr (!C::kSums) bias.load(params, params.outputs[weight], is_gated, left, lane);
            if (!C::kSums && C::kSplit == 1 && params.landing.share == 0) {
                const uint32_t row = first_row<C>(walk.tile(), rank) + own_row + warp * GEMMESH_STORE_ROWS;
                prefetch_residual<Element, C::kConsumerN>(params.outputs[weight], params.m, row, left, lane);
            }
        }
        if (params.trace != nullptr) {
            shared.pipeline.wait_full(at);
            if (tracer) event_of<C>(params, walk.index(), rank).math_begin = ptx::globaltimer();
        }
        if constexpr (C::kTakesKn) {
            if (params.b_is_kn != 0) {
                multiply<C, true>(accumulators, shared, at, placed, a, b, count, lane);
            } else {
                multiply<C, false>(accumulators, shared, at, placed, a, b, count, lane);
            }
        } else {
            multiply<C, false>(accumulators, shared, at, placed, a, b, count, lane);
        }
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
        if constexpr (C::kExchanged) {
            if (has_sums) store_exchanged<C>(accumulators, params, shared, weight, row, column, consumer * 4 + warp, lane);
        } else if constexpr (C::kSums) {
            const bool has_rows = has_sums && row < block.rows;
            // a tile of few steps through K has not reported the one before
            placed.report(lane);
            const bool is_sum = block.sum != 0;
            const bool is_f32 = is_sum && params.is_f32 != 0;
            const GemmeshOutput& output = params.outputs[0];
            const WarpPlace place{block.row + row, left, 0, block.row + block.rows};
            if (is_sum) add<C>(accumulators, block, shared, at, has_rows, consumer, own, lane);
            if (is_sum && has_rows) {
                bias.load(params, output, false, left, lane);
                finish<Element, false, C::kConsumerN>(accumulators.d, params, output, bias, boxes, place, lane);
            }
            placed.await_ready(row, left);
            if (has_rows && is_f32) store_directly<float, C::kConsumerN>(accumulators.d, output, Place(place, lane));
            if (has_rows && !is_f32) store_rows<Element, C::kConsumerN>(accumulators.d, placed, lane);
            if (has_sums) placed.note(block, walk.tile().block);
        } else if (has_sums && row < params.m) {
            store_tile<C>(accumulators, maps, params, shared, bias, weight, row, left, consumer * 4 + warp, lane);
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
__device__ __forceinline__ void matmul(const Maps& maps, const GemmeshParams& params, const SumArguments& partials) {
    // The swizzle needs this alignment; with no static shared memory in front of it, it has it.
    extern __shared__ __align__(1024) uint8_t dynamic_shared[];
    Shared<C>& shared = *reinterpret_cast<Shared<C>*>(dynamic_shared);
    const uint32_t warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
    const uint32_t rank = C::kCtas == 1 ? 0 : __shfl_sync(~0u, ptx::cluster_ctarank(), 0);

    if (threadIdx.x == 0) {
        ptx::prefetch_tensormap(maps.a);
        ptx::prefetch_tensormap(maps.b);
        if constexpr (C::kSums) {
            ptx::prefetch_tensormap(partials.added);
        } else {
            if (params.is_f32 == 0) ptx::prefetch_tensormap(maps.out);
            if (params.is_gated != 0) ptx::prefetch_tensormap(maps.b_of(1));
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
        if (threadIdx.x < 32) produce<C>(maps, params, partials, walk, shared, rank);
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
        consume<C>(maps, params, partials, walk, shared, rank, warpgroup - 1);
    }

    // A neighbour may still signal this CTA's barriers: nobody leaves before everybody is done.
    if constexpr (C::kCtas > 1) meet<C>();
}

}  // namespace gemmesh

// One kernel of the list in cuda/kernels.rs: build.rs writes a source that includes this one and has such a line for each. The
// list says how much shared memory a kernel is launched with, and how many boxes fit into it. The configuration's commas make it
// several arguments of a macro.
#define GEMMESH_CONFIG(Element, TileM, TileN, Stages, Cluster, Split, Boxes, Sums) \
    gemmesh::Config<gemmesh::Element, TileM, TileN, Stages, Cluster, Split, Boxes, Sums>

#define GEMMESH_HEAD(name, Cluster, Split, shared_bytes, ...)                                              \
    static_assert(sizeof(gemmesh::Shared<__VA_ARGS__>) == shared_bytes,                                    \
                  #name ": cuda/kernels.rs gives it less shared memory than it uses, or more");            \
    extern "C" __global__ void __cluster_dims__(Cluster * Split, 1, 1) __launch_bounds__(GEMMESH_THREADS, 1) name

#define GEMMESH_MATMUL(name, Element, TileM, TileN, Stages, Cluster, Split, Boxes, shared_bytes)           \
    GEMMESH_HEAD(name, Cluster, Split, shared_bytes,                                                       \
                 GEMMESH_CONFIG(Element, TileM, TileN, Stages, Cluster, Split, Boxes, false))              \
    (const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,                         \
     const __grid_constant__ CUtensorMap out, const __grid_constant__ GemmeshParams params,                \
     const __grid_constant__ gemmesh::Weights more) {                                                      \
        gemmesh::matmul<GEMMESH_CONFIG(Element, TileM, TileN, Stages, Cluster, Split, Boxes, false)>(      \
            gemmesh::Maps{&a, &b, &out, &more}, params, gemmesh::SumArguments{});                          \
    }

// The same, of one that adds partials.
#define GEMMESH_MATMUL_SUMS(name, Element, TileM, TileN, Stages, Cluster, Split, Boxes, shared_bytes)      \
    GEMMESH_HEAD(name, Cluster, Split, shared_bytes,                                                       \
                 GEMMESH_CONFIG(Element, TileM, TileN, Stages, Cluster, Split, Boxes, true))               \
    (const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,                         \
     const __grid_constant__ CUtensorMap added, const __grid_constant__ GemmeshParams params,              \
     const __grid_constant__ gemmesh::Targets targets, const __grid_constant__ GemmeshSums sums) {         \
        gemmesh::matmul<GEMMESH_CONFIG(Element, TileM, TileN, Stages, Cluster, Split, Boxes, true)>(       \
            gemmesh::Maps{&a, &b, nullptr, nullptr}, params, gemmesh::SumArguments{&added, &targets, &sums}); \
    }
