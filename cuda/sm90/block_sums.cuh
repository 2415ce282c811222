// Stores a tile's rows as partial sums for other ranks, or adds the other ranks' partial sums to the tile's product and
// stores the sums. Then tells the ranks, or the copy engine, that the rows of a block are there.
#pragma once

#include "../abi.h"
#include "../common/ptx.cuh"
#include "../protocol/flags.cuh"
#include "../protocol/push.cuh"
#include "abi.h"
#include "epilogue.cuh"
#include "pipeline.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace gemmesh {

// Where tiles may be stored: first the matrices of partial sums of this rank and of those after it in the ring of
// ranks, then the matrices of sums (abi.h).
struct Targets {
    CUtensorMap maps[2 * GEMMESH_MAX_TARGETS];
};

// Further arguments of kernels with block sums.
struct SumArguments {
    const CUtensorMap* added;
    const Targets* targets;
    const GemmeshSums* sums;
};

__device__ __forceinline__ GemmeshBlock load_block(const GemmeshSums& sums, uint32_t index) {
    union {
        uint4 words[2];
        GemmeshBlock block;
    } loaded;
    const uint4* at = reinterpret_cast<const uint4*>(sums.blocks + index);
    loaded.words[0] = __ldg(at);
    loaded.words[1] = __ldg(at + 1);
    return loaded.block;
}

// Addends are loaded and added in addend boxes of this many columns and the tile's rows. Such a box has the shape of a
// stage's `a`, and is loaded into its room.
constexpr uint32_t kSumColumns = GEMMESH_STAGE_ROW / 2;

// Boxes of one addend in a stage. If the tile has columns for two boxes, the second is loaded into the room of `b`.
// Consumers that are side by side take one box each. Others share all boxes.
template <class C>
constexpr uint32_t kStageBoxes = C::kTileN >= 2 * kSumColumns ? 2 : 1;
template <class C>
constexpr uint32_t kConsumerBoxes = C::kSideBySide ? 1 : kStageBoxes<C>;

// Columns from the first box of a stage to the second.
template <class C>
constexpr uint32_t kNextBox = C::kSideBySide ? C::kConsumerN : kSumColumns;

// Boxes of one addend that a consumer adds to its part of a tile.
template <class C>
constexpr uint32_t kSumBoxes = (C::kConsumerN + kSumColumns - 1) / kSumColumns;

// The producer of `a`: loads a tile's addends through the ring, after its operands: one thread or, with `Blocks`, the
// whole warp, each of whose lanes arrives at a stage. `row` is the tile's first row, counted from the block's first.
template <class C, bool Blocks, class Stages>
__device__ __forceinline__ void load_addends(const CUtensorMap& map_added, const GemmeshBlock& block, const Stages& stages,
                                             RingPosition<C::kStages>& at, uint32_t row, uint32_t column) {
    constexpr uint32_t kBytes = C::kBytesA;
    static_assert(kStageBoxes<C> == 1 || C::kBytesB >= kBytes);
    static_assert(kStageBoxes<C> == 2 || !C::kSideBySide);
    for (uint32_t box = 0; box < kSumBoxes<C>; box += kConsumerBoxes<C>) {
        const uint32_t boxes = C::kSideBySide ? kStageBoxes<C> : min(kStageBoxes<C>, kSumBoxes<C> - box);
        const uint32_t left = column + box * kSumColumns;
        uint32_t first = block.addend + row;
        for (uint32_t index = 0; index < block.addends; ++index, first += block.addend_step) {
            stages.await(at);
            const ptx::SharedAddress full = stages.full(at.stage);
            if (!Blocks || ptx::elect_one()) {
                stages.announce(at, boxes * kBytes);
                ptx::cp_async_bulk_tensor_2d_load(stages.a(at.stage), &map_added, left, first, full);
                if (boxes > 1) {
                    ptx::cp_async_bulk_tensor_2d_load(stages.b(at.stage), &map_added, left + kNextBox<C>, first, full);
                }
            }
            if constexpr (Blocks) ptx::cp_async_mbarrier_arrive(full);
            at.advance();
        }
    }
}

// The producer of `b`: passes through the stages of a tile's addends, to which it has nothing to add. As load_addends.
template <class C, bool Blocks, class Stages>
__device__ __forceinline__ void pass_addends(const GemmeshBlock& block, const Stages& stages,
                                             RingPosition<C::kStages>& at) {
    constexpr uint32_t kOfAddend = (kSumBoxes<C> + kConsumerBoxes<C> - 1) / kConsumerBoxes<C>;
    for (uint32_t left = kOfAddend * block.addends; left > 0; --left, at.advance()) {
        stages.await(at);
        if (!Blocks || ptx::elect_one()) stages.announce(at, 0);
        if constexpr (Blocks) ptx::cp_async_mbarrier_arrive(stages.full(at.stage));
    }
}

// One warp: adds its rows of a box to the accumulators of the box's columns, the first of which `sum` is.
template <class Element, uint32_t Groups>
__device__ __forceinline__ void add_box(float* sum, const Element* box, uint32_t own_row, uint32_t lane) {
    // As in store_rows, lanes 0-15 name the rows of the left piece, and lanes 16-31 those of the right piece. The
    // swizzle permutes a row's pieces of 16 bytes by the row modulo eight.
    constexpr uint32_t kPiece = 16 / sizeof(Element);
    const uint32_t row = own_row + lane % 16;
    const uint32_t begin = ptx::shared_address(box + row * kSumColumns);
#pragma unroll
    for (uint32_t pair = 0; pair < Groups / 2; ++pair) {
        uint32_t upper_left, lower_left, upper_right, lower_right;
        const uint32_t piece = (pair * 2 + lane / 16) ^ row % 8;
        ptx::ldmatrix_x4(begin + piece * kPiece * sizeof(Element), upper_left, lower_left, upper_right, lower_right);
        const uint32_t words[4] = {upper_left, lower_left, upper_right, lower_right};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const float2 addend = ptx::unpack<Element>(words[i]);
            sum[pair * 8 + i * 2] += addend.x;
            sum[pair * 8 + i * 2 + 1] += addend.y;
        }
        // All that has been read has been added. No more is read ahead than fits in registers.
        if (pair % 2 == 1 || pair + 1 == Groups / 2) {
#pragma unroll
            for (uint32_t i = 0; i < (pair + 1) * 8; ++i) ptx::pin(sum[i]);
        }
    }
}

// One warp of the consumers: turns its accumulators into the sums, from box `Box` on. It adds `block.before` addends,
// then the product, then the other addends. A warp without rows to store passes through the ring's stages too.
// `own_row` is the warp's first row in the tile.
template <class C, uint32_t Box = 0, class Shared>
__device__ __forceinline__ void add(Accumulators<C::kConsumerN>& accumulators,
                                    const GemmeshBlock& block, Shared& shared, RingPosition<C::kStages>& at,
                                    bool has_rows, uint32_t consumer, uint32_t own_row, uint32_t lane) {
    using Output = typename C::Output;
    constexpr uint32_t kGroup = 8;  // columns, of which a thread has two in each of two rows
    constexpr uint32_t kGroupsOfBox = kSumColumns / kGroup;
    constexpr uint32_t kFirst = Box * kGroupsOfBox;
    constexpr uint32_t kLeft = C::kConsumerN / kGroup - kFirst;
    constexpr uint32_t kMost = kConsumerBoxes<C> * kGroupsOfBox;
    constexpr uint32_t kGroups = kLeft < kMost ? kLeft : kMost;
    constexpr uint32_t kOfFirst = kGroups < kGroupsOfBox ? kGroups : kGroupsOfBox;
    // The sums take the place of the product, which is kept rounded, in half of the registers. -0.0 is the additive
    // identity, also for zeros of both signs.
    float* sum = &accumulators.d[kFirst * 4];
    uint32_t product[kGroups * 2];
#pragma unroll
    for (uint32_t i = 0; i < kGroups * 2; ++i) {
        product[i] = ptx::cvt_rn_x2<Output>(sum[2 * i], sum[2 * i + 1]);
        sum[2 * i] = sum[2 * i + 1] = -0.0f;
    }

    for (uint32_t index = 0;; ++index) {
        if (index == block.before) {
#pragma unroll
            for (uint32_t i = 0; i < kGroups * 2; ++i) {
                const float2 rounded = ptx::unpack<Output>(product[i]);
                sum[2 * i] += rounded.x;
                sum[2 * i + 1] += rounded.y;
            }
        }
        if (index == block.addends) break;

        // wait for the boxes' bytes
        shared.pipeline.wait_full(at);
        if (has_rows) {
            const void* first = C::kSideBySide && consumer > 0 ? shared.b[at.stage] : shared.a[at.stage];
            add_box<Output, kOfFirst>(sum, static_cast<const Output*>(first), own_row, lane);
            if constexpr (kGroups > kOfFirst) {
                const void* second = shared.b[at.stage];
                add_box<Output, kGroups - kOfFirst>(sum + kOfFirst * 4, static_cast<const Output*>(second), own_row, lane);
            }
        }
        // After this every lane has read and added its part of the boxes. So the neighbours may be told, and no load of
        // theirs overwrites what is still to be read.
        __syncwarp();
        shared.pipeline.release(at.stage, lane, 0);  // clusters have one column
        at.advance();
    }

    constexpr uint32_t kNext = Box + kConsumerBoxes<C>;
    if constexpr (kNext < kSumBoxes<C>) {
        add<C, kNext>(accumulators, block, shared, at, has_rows, consumer, own_row, lane);
    }
}

// Where one warp stores the rows of a tile. Each lane has at most one place and stores the warp's whole StoreBox there,
// so a warp stores to several GPUs at once.
template <class Element, int N, int Boxes>
class PlacedStores {
public:
    __device__ PlacedStores(const GemmeshParams& params, const SumArguments& partials, Published<Entrance>& entrance,
                            StoreBox<Element> (&boxes)[Boxes])
        : params_(params), partials_(partials), entrance_(entrance), boxes_(boxes) {}

    // The whole warp: turns to a tile of this block.
    __device__ void turn_to(const GemmeshBlock& block, uint32_t lane) {
        is_used_ = lane < block.stores;
        if (!is_used_) return;
        const uint4 words = __ldg(reinterpret_cast<const uint4*>(partials_.sums->stores + block.store_begin) + lane);
        place_ = {words.x, words.y, words.z, words.w};
    }

    // The whole warp, before it stores: waits until the rows of other ranks may be written. A wait is given up when the
    // group fails or its deadline passes; then the rows are not written. The stores that follow begin at `row`, the
    // warp's first row in the block, and `column`, the consumer's first column.
    __device__ void await_ready(uint32_t row, uint32_t column) {
        row_ = row;
        column_ = column;
        const GemmeshPeers& peers = params_.peers;
        // A rank that is ready stays ready until the kernel ends.
        const uint32_t bit = 1u << place_.map % GEMMESH_MAX_TARGETS;
        const bool waits = is_used_ && place_.to != peers.rank && (ready_ & bit) == 0;
        if (!__any_sync(~0u, waits)) return;
        const uint32_t* word = &peers.mailboxes[peers.rank]->ready[place_.to];
        const bool is_ready = await_all(params_, waits, word, entrance_.get().epoch, GEMMESH_READY, place_.to);
        if (waits) ready_ |= is_ready ? bit : kGivenUp;
        is_used_ = is_used_ && is_ready;
    }

    // As OwnStores.
    __device__ StoreBox<Element>& acquire(int step) {
        await_box<Boxes>(step);
        __syncwarp();
        return boxes_[step % Boxes];
    }

    __device__ void commit(int step) {
        if (!is_used_) return;
        const CUtensorMap* map = &partials_.targets->maps[place_.map];
        const uint32_t column = column_ + store_column<Element, N>(step);
        ptx::cp_async_bulk_tensor_2d_store(map, column, place_.row + row_, boxes_[step % Boxes].elements);
        ptx::cp_async_bulk_commit_group();
    }

    // The whole warp: notes that its stores of this block are to be reported. If it has given up, they are not, so that
    // no one takes the block for whole.
    __device__ void note(const GemmeshBlock& block, uint32_t index) {
        index_ = index;
        reports_ = __any_sync(~0u, (ready_ & kGivenUp) != 0) ? 0 : block.reports;
        told_ = is_used_ ? place_ : GemmeshStore{0, 0, 0, GEMMESH_UNTOLD};
    }

    // The step through K of the next tile at which to report. By then stores to this GPU's memory have ended, so
    // waiting for them takes no time.
    static constexpr uint32_t kReportStep = 2;

    // The whole warp: reports what has been noted. The last report signals the block.
    __device__ void report(uint32_t lane) {
        if (reports_ == 0) return;
        // A completed TMA store is seen by the thread that issued it. Each report comes after its warp's stores, and
        // the last report after all others. The signal's release orders it after all reports.
        ptx::cp_async_bulk_wait_group<0>();
        __syncwarp();
        const GemmeshSums& sums = *partials_.sums;
        bool is_last = false;
        if (lane == 0) is_last = ptx::atom_add_acq_rel_gpu(&sums.reports[index_], 1) + 1 == reports_;
        if (__any_sync(~0u, is_last)) {
            // A vote orders no memory.
            __syncwarp();
            const uint32_t epoch = entrance_.get().epoch;
            if (lane == 0) sums.reports[index_] = 0;
            // If the wait for addends was given up, no peer is signalled. This rank's own copy is, because the stream
            // that waits for it must run to its end.
            if (told_.flag == GEMMESH_COPIED) {
                ptx::st_release_sys(&sums.stored[index_], 1);
            } else if (told_.flag != GEMMESH_UNTOLD && ptx::ld_relaxed_sys(params_.abort) == 0) {
                ptx::st_release_sys(&params_.peers.mailboxes[told_.to]->chunk[told_.flag], epoch);
            }
        }
        __syncwarp();
        reports_ = 0;
    }

private:
    const GemmeshParams& params_;
    const SumArguments& partials_;
    Published<Entrance>& entrance_;
    StoreBox<Element> (&boxes_)[Boxes];
    static constexpr uint32_t kGivenUp = 1u << 31;
    uint32_t ready_ = 0;  // a bit for each target that this lane has found ready, and kGivenUp once a wait was given up
    GemmeshStore place_{};
    GemmeshStore told_{};
    uint32_t row_ = 0;
    uint32_t column_ = 0;
    uint32_t index_ = 0;
    uint32_t reports_ = 0;  // how many the whole block needs; 0: this warp has nothing to report
    bool is_used_ = false;
};

}  // namespace gemmesh
