// What a kernel is: its tile, its ring, its cluster, and how shared memory is laid out for it.
#pragma once

#include "../abi.h"
#include "../protocol/push.cuh"
#include "cluster_split_k.cuh"
#include "epilogue.cuh"
#include "pipeline.cuh"

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
// Or swap_ab: the operands are swapped, and rows of `b` are the wgmma's rows: then a tile may have any number of rows that a wgmma has of
// columns, and fits a product of few of them.
constexpr int kConsumerRows = 64;

template <class Element_, int TileM, int TileN, int Stages, int Cluster, int Split, int Boxes, bool Sums>
struct Config {
    using Element = Element_;
    static constexpr int kTileM = TileM;
    static constexpr int kTileN = TileN;
    static constexpr bool kSideBySide = TileM == kConsumerRows;  // consumers, not one above the other
    static constexpr bool kSwapAb = TileM != kConsumerRows && TileM != kConsumers * kConsumerRows;
    static constexpr int kConsumerN = kSideBySide ? TileN / kConsumers : TileN;
    static constexpr int kColumns = kSwapAb ? TileM : kConsumerN;  // of a consumer's accumulators
    static_assert(!kSwapAb || (TileN == kConsumers * kConsumerRows && TileM % 16 == 0 && TileM <= 256 && !Sums));
    static constexpr int kStages = Stages;
    static constexpr int kCluster = Cluster;        // CTAs that share the loads of b, on rows of their own
    static constexpr int kSplit = Split;            // or: CTAs that share a tile, each with a part of K
    static constexpr int kCtas = Cluster * Split;   // in a cluster, as the hardware sees it
    static constexpr int kBoxes = Boxes;            // that a consumer warp has to store through
    static constexpr bool kSums = Sums;             // adds partials
    static constexpr bool kSliced = Split == 1 && !Sums;  // slices of K may be added through memory
    static constexpr bool kLowLatency = kSideBySide && !Sums;  // few rows of partial sums may be sent as they are made
    static_assert(Cluster == 1 || Split == 1);

    static constexpr int kPartN = TileN / Cluster;  // what one CTA loads of the tile's b
    static_assert(TileN % 16 == 0 && TileN <= 256);
    static_assert(kPartN % 8 == 0, "a part of b begins on a whole swizzle pattern");
    static constexpr bool kTakesKn = kPartN % 64 == 0;  // `b` may be given as [K, N]: see WeightLoads

    // A gated tile's rows of `b` are gate's and up's by turns, so many at a time. So the first half of a consumer's columns is gate's, and
    // the second up's; where operands are swapped, two of its warps have gate's, and the other two up's.
    static constexpr bool kGates = !Sums;
    static constexpr int kGateRows = kSideBySide || kSwapAb ? TileN / 4 : TileN / 2;
    static constexpr int kGateBox = kGateRows < kPartN ? kGateRows : kPartN;  // what is loaded at a time
    static_assert(kGateRows % 8 == 0 && kPartN % kGateBox == 0);
    static_assert(!kSwapAb || Split <= 2, "SplitSum gives both warps of a pair to one CTA");
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

}  // namespace gemmesh
