// What is added to the rows of a block, in the order that the host's table says: partial sums of other ranks, which have come
// meanwhile, and the tile's own product. And telling the copy engine that the rows of a block may be sent.
#pragma once

#include "../abi.h"
#include "../common/ptx.cuh"
#include "pipeline.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace gemmesh {

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

// Columns that are added at a time: what one stage of the ring takes in the place of `a`, for it has the same box.
constexpr uint32_t kSumColumns = GEMMESH_TILE_K;

template <int N>
constexpr uint32_t kSumBoxes = (N + kSumColumns - 1) / kSumColumns;

// One thread, the producer: loads what is added to a tile through the ring, behind the tile's operands. `row` is the tile's
// first, counted from the block's.
template <class C, class Shared>
__device__ __forceinline__ void load_addends(const CUtensorMap& map_added, const GemmeshSums& sums,
                                             const GemmeshBlock& block, Shared& shared,
                                             RingPosition<C::kStages>& at, uint32_t row, uint32_t column) {
    for (uint32_t box = 0; box < kSumBoxes<C::kTileN>; ++box, column += kSumColumns) {
        for (uint32_t index = block.addend_begin; index < block.addend_end; ++index) {
            const uint32_t addend = __ldg(sums.addends + index);
            if (addend == GEMMESH_PRODUCT) continue;
            shared.pipeline.acquire(at, sizeof(shared.a[0]));
            uint64_t* full = &shared.pipeline.full[at.stage];
            ptx::cp_async_bulk_tensor_2d_load(shared.a[at.stage], &map_added, column, addend + row, full);
            at.advance();
        }
    }
}

// One warp of the consumers: the accumulators of this box and of those behind it become the sums. The ring's stages are passed
// through also by a warp that has no rows to store. `own_row` is the warp's first in the tile.
template <class C, uint32_t Box = 0, class Shared>
__device__ __forceinline__ void add(Accumulators<typename C::Element, C::kTileN>& accumulators, const GemmeshSums& sums,
                                    const GemmeshBlock& block, Shared& shared, RingPosition<C::kStages>& at,
                                    bool has_rows, uint32_t own_row, uint32_t lane) {
    using Element = typename C::Element;
    constexpr uint32_t kGroup = 8;  // columns, of which a thread has two in each of two rows
    constexpr uint32_t kFirst = Box * kSumColumns / kGroup;
    constexpr uint32_t kLeft = C::kTileN / kGroup - kFirst;
    constexpr uint32_t kGroups = kLeft < kSumColumns / kGroup ? kLeft : kSumColumns / kGroup;
    // The sums take the place of the product, which is kept rounded, in half of the registers. To -0 any number may be added
    // without a change, zeros of both signs among them.
    float* sum = &accumulators.d[kFirst * 4];
    uint32_t product[kGroups * 2];
#pragma unroll
    for (uint32_t i = 0; i < kGroups * 2; ++i) {
        product[i] = ptx::cvt_rn_x2<Element>(sum[2 * i], sum[2 * i + 1]);
        sum[2 * i] = sum[2 * i + 1] = -0.0f;
    }

    for (uint32_t index = block.addend_begin; index < block.addend_end; ++index) {
        if (__ldg(sums.addends + index) == GEMMESH_PRODUCT) {
#pragma unroll
            for (uint32_t i = 0; i < kGroups * 2; ++i) {
                const float2 rounded = ptx::unpack<Element>(product[i]);
                sum[2 * i] += rounded.x;
                sum[2 * i + 1] += rounded.y;
            }
            continue;
        }

        // wait for the box's bytes
        shared.pipeline.wait_full(at);
        if (has_rows) {
            // Words of two elements. The swizzle exchanges a row's pieces of four by the row modulo eight, which is the same for
            // the thread's two rows.
            const uint32_t* words = reinterpret_cast<const uint32_t*>(shared.a[at.stage]);
            const uint32_t* upper = words + (own_row + lane / 4) * (kSumColumns / 2) + lane % 4;
            const uint32_t* lower = upper + 8 * (kSumColumns / 2);
#pragma unroll
            for (uint32_t group = 0; group < kGroups; ++group) {
                const uint32_t piece = (group ^ lane / 4) * 4;
                const float2 above = ptx::unpack<Element>(upper[piece]);
                const float2 below = ptx::unpack<Element>(lower[piece]);
                sum[group * 4] += above.x;
                sum[group * 4 + 1] += above.y;
                sum[group * 4 + 2] += below.x;
                sum[group * 4 + 3] += below.y;
            }
        }
        // every lane has read
        __syncwarp();
        shared.pipeline.release(at.stage, lane);
        at.advance();
    }

    if constexpr (Box + 1 < kSumBoxes<C::kTileN>) {
        add<C, Box + 1>(accumulators, sums, block, shared, at, has_rows, own_row, lane);
    }
}

// What one warp has stored of blocks that are sent. It reports a tile when it is through with some of the next one's products:
// by then the stores are mostly over, and waiting for them takes no time.
class Reports {
public:
    static constexpr uint32_t kStep = 4;  // through K of the next tile, when it is time to report

    __device__ void note(const GemmeshBlock& block, uint32_t index) {
        index_ = index;
        all_ = block.reports;
    }

    // The whole warp.
    __device__ void send(const GemmeshSums& sums, uint32_t lane) {
        if (all_ == 0) return;
        if (lane == 0) {
            // Stores by TMA that have completed are seen by the thread that issued them. Each report comes after its own
            // stores, the last one after all others, and the word, by its release, after it.
            ptx::cp_async_bulk_wait_group<0>();
            if (ptx::atom_add_acq_rel_gpu(&sums.reports[index_], 1) + 1 == all_) {
                sums.reports[index_] = 0;
                ptx::st_release_sys(&sums.stored[index_], 1);
            }
        }
        __syncwarp();
        all_ = 0;
    }

private:
    uint32_t index_ = 0;
    uint32_t all_ = 0;  // none: there is nothing to report
};

}  // namespace gemmesh
