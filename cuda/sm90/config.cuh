// A kernel's configuration (tile, ring, cluster), and its layout of shared memory.
#pragma once

#include "../abi.h"
#include "../protocol/push.cuh"
#include "abi.h"
#include "cluster.cuh"
#include "cluster_split_k.cuh"
#include "epilogue.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

namespace gemmesh {

// The element types, as the list names them.
using bf16 = __nv_bfloat16;
using f16 = __half;
using ptx::e4m3;
using ptx::e4m3_e5m2;
using ptx::e5m2_e4m3;

// The types of `b` and `a`, for products with swap_ab.
template <class Element>
using SwappedOf = std::conditional_t<std::is_same_v<Element, e4m3_e5m2>, e5m2_e4m3,
                                     std::conditional_t<std::is_same_v<Element, e5m2_e4m3>, e4m3_e5m2, Element>>;

// The 16-bit type of outputs, partial sums, biases and residuals.
template <class Element>
using OutputOf = std::conditional_t<sizeof(Element) == 1, bf16, Element>;

constexpr int kWarpgroupThreads = 128;
constexpr int kLeaveBarrier = 1;  // 0 is __syncthreads()
static_assert(kLeaveBarrier != Pushers::kBarrier);
constexpr int kTurnBarrier = 7;  // and 8, of the second consumer
constexpr int kConsumers = 2;
constexpr int kConsumerWarps = kConsumers * kWarpgroupThreads / 32;
static_assert(GEMMESH_THREADS == (1 + kConsumers) * kWarpgroupThreads);

// The CTA is launched with 65536 registers over its threads, in steps of 8. The warpgroups share them out, and the
// consumers need most of them. A warpgroup that asks for more than the others have given up waits for ever.
constexpr int kLaunchRegisters = 65536 / GEMMESH_THREADS / 8 * 8;
constexpr int kProducerRegisters = 56;  // with the warps beside the producers
constexpr int kConsumerRegisters = ((1 + kConsumers) * kLaunchRegisters - kProducerRegisters) / kConsumers / 8 * 8;
static_assert(kConsumerRegisters == 224);

// A wgmma multiplies 64 rows, a band, by columns. With swap_ab the operands are swapped: rows of `b` are the wgmma's
// rows, and the tile's rows are its columns. A tile whose height is neither 64 nor 128 has swap_ab. Its height may be
// any other multiple of 8 for which ptx.cuh has a wgmma, so it fits M more closely.
//
// Pingpong: the consumers take tiles by turns. While one stores its tile, the other multiplies. One consumer alone
// multiplies all bands of its tile, so it needs registers for all accumulators.
//
// Else both consumers share each tile (cooperative): each multiplies a band by all columns. Of all ways to split a
// tile in two, this one reads the fewest bytes of shared memory. If a tile has only 64 rows, each consumer takes half
// of its columns.
//
// A warp's part of a band is 16 rows of its consumer's columns or, with swap_ab, 16 columns of all rows. Comments say
// "its rows" for both.
constexpr int kBandRows = 64;

// What a kernel can do beside the product: its code has nothing else.
enum class Variant {
    kForms,       // all forms of a product of this rank's output
    kPlain,       // only products of [N, K] weights, of the element type
    kAlone,       // plain products of rows that are there: no flags, no peers, no slices of K, no trace
    kLowLatency,  // few rows of partial sums, which are sent as they are made, and their sums' forms
    kSums,        // block sums
};

template <class Element_, int TileM, int TileN, int Stages, int ClusterM, int ClusterN, int Split, bool Pingpong,
          int Boxes, Variant Kind>
struct Config {
    using Element = Element_;
    using Swapped = SwappedOf<Element>;
    using Output = OutputOf<Element>;
    static constexpr bool kPromotes = sizeof(Element) == 1;  // sums, and scales them
    static constexpr bool kCanBeFast = TileN <= GEMMESH_FAST_COLUMNS;  // wider tiles have no registers for both loops
    static constexpr uint32_t kTileK = GEMMESH_STAGE_ROW / sizeof(Element);  // columns of a step through K
    static constexpr int kTileM = TileM;
    static constexpr int kTileN = TileN;
    static constexpr bool kSwapAb = TileM != kBandRows && TileM != 2 * kBandRows;
    static constexpr bool kPingpong = Pingpong;
    static constexpr int kSharing = kPingpong ? 1 : kConsumers;  // consumers that multiply a tile
    static constexpr bool kSideBySide = TileM == kBandRows && !kPingpong;  // they split the columns, not the rows
    static constexpr int kBands = kPingpong ? (kSwapAb ? TileN : TileM) / kBandRows : 1;  // that a consumer has
    static constexpr int kParts = kSharing * kBands * 4;  // of a tile, each of a warp
    static constexpr int kConsumerN = kSideBySide ? TileN / kConsumers : TileN;
    static constexpr int kColumns = kSwapAb ? TileM : kConsumerN;  // of the accumulators of a band
    static_assert(kSideBySide || (kSwapAb ? TileN : TileM) == kSharing * kBands * kBandRows);
    static_assert(!kSwapAb || (TileM % 8 == 0 && TileM <= 256 && Kind != Variant::kSums));
    static_assert(!kPingpong || (Split == 1 && Kind != Variant::kLowLatency && Kind != Variant::kSums));
    static constexpr int kStages = Stages;
    static constexpr int kClusterM = ClusterM;  // CTAs that share the loads of b, on rows of their own
    static constexpr int kClusterN = ClusterN;  // CTAs that share the loads of a, on columns of their own
    using InCluster = Cluster<ClusterM, ClusterN>;
    static constexpr int kSplit = Split;        // or: CTAs that share a tile, each with a part of K
    static constexpr int kCtas = ClusterM * ClusterN * Split;  // in a cluster, as the hardware sees it
    static constexpr int kBoxes = Boxes;        // that a consumer warp has to store through
    static constexpr bool kSums = Kind == Variant::kSums;
    static constexpr bool kLowLatency = Kind == Variant::kLowLatency;
    static constexpr bool kAlone = Kind == Variant::kAlone;
    // The other forms together take registers and so much code that a kernel with them needs two to three microseconds
    // more to begin and to end.
    static constexpr bool kPlain = Kind == Variant::kPlain || kAlone;
    // Whether the warps of a tile make scales of its rows together, because each has few columns of a block.
    static constexpr bool kMakesRowScales = kPromotes && kSwapAb && TileN == GEMMESH_SCALE_BLOCK && Split == 1 &&
                                            (Kind == Variant::kForms || Kind == Variant::kPlain);
    // Slices of K may be added through memory.
    static constexpr bool kSliced = Split == 1 && (Kind == Variant::kForms || Kind == Variant::kPlain);
    static_assert(ClusterM * ClusterN == 1 || Split == 1);
    static_assert(ClusterN == 1 || (Kind != Variant::kSums && Kind != Variant::kLowLatency));
    // Whether entries are computed if they can be. Kernels of high tiles and all forms have no registers for it.
    static constexpr bool kComputesEntries = kPlain || (!kSums && TileM < kBandRows);
    // Whether bias and scales of whole sums are loaded after the product, because there are no registers for them.
    static constexpr bool kFinishesLate = kPromotes && (kSums || (!kPlain && kColumns > 224));
    static constexpr uint32_t kBytesA = TileM * GEMMESH_STAGE_ROW;  // of a stage
    static constexpr uint32_t kBytesB = TileN * GEMMESH_STAGE_ROW;

    static constexpr int kPartM = TileM / ClusterN;  // what one CTA loads of the tile's a
    static constexpr int kPartN = TileN / ClusterM;  // and of its b
    static_assert(TileN % 16 == 0 && TileN <= 256);
    static_assert(kPartM % 8 == 0 && kPartN % 8 == 0, "a part begins on a whole swizzle pattern");
    static constexpr bool kTakesKn = kPartN % 64 == 0 && !kPlain && !kPromotes;  // `b` may be [K, N]: see WeightLoads

    // In a gated tile, kGateRows rows of gate and as many of up alternate in `b`. So the first half of a consumer's
    // columns belongs to gate, and the second half to up. With swap_ab, two of its warps have gate's columns of a
    // band, and the other two have up's.
    static constexpr bool kGates = Kind == Variant::kForms && !(kSwapAb && Split == kConsumerWarps);
    static constexpr int kGateRows = kSwapAb ? kBandRows / 2 : kConsumerN / 2;
    static constexpr int kGateBox = kGateRows < kPartN ? kGateRows : kPartN;  // what is loaded at a time
    static_assert(kGateRows % 8 == 0 && kPartN % kGateBox == 0);
};

// The accumulators of a consumer.
template <class C>
using Bands = Accumulators<C::kColumns>[C::kBands];

// A consumer warp, and its part of each band.
template <class C>
struct ConsumerWarp {
    uint32_t cta;
    uint32_t consumer;
    uint32_t warp;  // in the consumer
    uint32_t lane;

    // Of those in shared memory that are this warp's.
    __device__ uint32_t box() const { return consumer * 4 + warp; }

    // The number of its part among the tile's.
    __device__ uint32_t part(uint32_t band) const { return (C::kPingpong ? band : consumer) * 4 + warp; }

    // The part's first row in the tile.
    __device__ uint32_t row(uint32_t band) const {
        return C::kSwapAb ? 0 : (C::kSideBySide ? warp : part(band)) * GEMMESH_STORE_ROWS;
    }

    // Its number for SplitSum. With swap_ab, the warp of up's columns follows that of the same columns of gate, so that
    // SplitSum gives both to one CTA.
    __device__ uint32_t number() const { return consumer * 4 + (C::kSwapAb ? warp % 2 * 2 + warp / 2 : warp); }

    // Whether this CTA stores the warp's rows, if CTAs share K: see SplitSum.
    __device__ bool stores() const { return C::kSplit == 1 || number() / (kConsumerWarps / C::kSplit) == cta; }

    // True for one lane of all that store a tile here: of the first warp whose rows this CTA stores.
    __device__ bool is_first() const {
        const uint32_t first = C::kPingpong ? consumer * 4 : C::kSplit == 1 ? 0 : cta * (kConsumerWarps / C::kSplit);
        return number() == first && lane == 0;
    }
};

// The scales of a stage's blocks: by row of the tile's `a`, and by 16 rows of its `b`.
template <class C>
struct StageScales {
    static constexpr uint32_t kRowsOfB = 16;
    float a[C::kPromotes ? C::kTileM : 1];
    float b[C::kPromotes ? C::kTileN / kRowsOfB : 1];
};

template <class C>
struct Shared {
    alignas(1024) uint8_t a[C::kStages][C::kBytesA];
    alignas(1024) uint8_t b[C::kStages][C::kBytesB];
    StoreBox<typename C::Output> boxes[kConsumerWarps][C::kBoxes];
    StageScales<C> scales[C::kPromotes ? C::kStages : 0];
    SplitSum<C::kSplit, C::kColumns, kConsumerWarps> sum;
    Pipeline<C::kStages, typename C::InCluster> pipeline;
    Published<Entrance> entrance;
    Pushers pushers;
};

// A producer's view of the ring. It asks for stage after stage, and the tensor cores wait for it if it takes long. So
// it computes all addresses from one register. From `Shared` the compiler would compute each anew, with a read of a
// special register.
template <class C>
class Stages {
public:
    __device__ explicit Stages(const Shared<C>& shared) : base_(ptx::shared_address(&shared)) { ptx::pin(base_); }

    // Waits until the stage may be written, here and in the CTAs that share the load. At the start every stage is free, as
    // in the phase before the first, so it waits for the opposite parity.
    __device__ void await(const RingPosition<C::kStages>& at) const {
        wait_phase(at_offset(offsetof(Shared<C>, pipeline.empty), sizeof(uint64_t), at.stage), at.parity ^ 1);
    }

    // Announces this producer's `bytes` to come.
    __device__ void announce(const RingPosition<C::kStages>& at, uint32_t bytes) const {
        ptx::mbarrier_arrive_expect_tx(full(at.stage), bytes);
    }

    __device__ ptx::SharedAddress full(uint32_t stage) const {
        return at_offset(offsetof(Shared<C>, pipeline.full), sizeof(uint64_t), stage);
    }
    __device__ ptx::SharedAddress scales(uint32_t stage) const {
        return at_offset(offsetof(Shared<C>, scales), sizeof(StageScales<C>), stage);
    }
    __device__ ptx::SharedAddress a(uint32_t stage) const { return at_offset(offsetof(Shared<C>, a), C::kBytesA, stage); }
    __device__ ptx::SharedAddress b(uint32_t stage) const { return at_offset(offsetof(Shared<C>, b), C::kBytesB, stage); }

private:
    __device__ ptx::SharedAddress at_offset(uint32_t first, uint32_t bytes, uint32_t stage) const {
        return ptx::SharedAddress(base_ + first + stage * bytes);
    }

    uint32_t base_;
};

}  // namespace gemmesh
