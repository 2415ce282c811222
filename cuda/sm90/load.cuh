// The producer warps. One waits for a tile's rows or addends, and loads its rows of `a` and its addends into the ring.
// The other loads its rows of `b`, which need no flag.
#pragma once

#include "../abi.h"
#include "../protocol/flags.cuh"
#include "../protocol/tile_table.cuh"
#include "block_sums.cuh"
#include "config.cuh"
#include "pipeline.cuh"
#include "ptx.cuh"
#include "scales.cuh"
#include "tile.cuh"
#include "weights.cuh"

namespace gemmesh {

// One thread, the producer of `a`: loads a CTA's part of a tile's rows of `a`, for all CTAs that share them. Except
// with block sums it loads only the rows that there are. The others of a stage keep what they had, and nothing is
// stored of their products.
template <class C>
class RowLoads {
public:
    // `row` is the first of the tile's rows. The last CTAs of a cluster's column may have none.
    __device__ RowLoads(const Maps& maps, const GemmeshParams& params, uint32_t row, uint32_t cta)
        : params_(params), map_(maps.a), ctas_(C::InCluster::ctas_of_row(C::InCluster::row(cta))), rows_(C::kTileM) {
        if (!C::kSums) rows_ = C::kClusterM > 1 && row >= params.m ? 0 : min(rows_, params.m - row);
        part_ = C::InCluster::column(cta) * C::kPartM;
        row_ = row + part_;
        if (!C::kSums && rows_ < part_ + C::kPartM) map_ = &maps.tails->a;
    }

    // What all CTAs that share them load of the tile.
    __device__ uint32_t bytes() const { return rows_ * kRowBytes; }

    // `step` counts through K.
    __device__ void load(ptx::SharedAddress a, uint32_t step, ptx::SharedAddress full) const {
        if (part_ >= rows_) return;
        const int32_t k = column_of_step<C>(params_, step);
        if constexpr (C::kClusterN == 1) {
            ptx::cp_async_bulk_tensor_2d_load(a, map_, k, row_, full);
        } else {
            ptx::cp_async_bulk_tensor_2d_load_multicast(a + part_ * kRowBytes, map_, k, row_, full, ctas_);
        }
    }

private:
    static constexpr uint32_t kRowBytes = C::kBytesA / C::kTileM;
    const GemmeshParams& params_;
    const CUtensorMap* map_;
    uint16_t ctas_;
    uint32_t rows_;  // that are loaded of the tile
    uint32_t part_;  // where the CTA's part of them begins in the tile,
    uint32_t row_;   // and in the matrix
};

// Loads `a` of a tile's steps: one thread or, with `Blocks`, the whole warp, which copies the scales of blocks. A flag may
// be deferred (protocol/flags.cuh): it stands for the columns of `a` from step `deferred_step` on, and is awaited just
// before that step. `traced`: the tile's event, or null.
template <class C, bool Blocks>
__device__ __forceinline__ void load_rows(const RowLoads<C>& rows, RowScaleCopies<C>& scales, const TableWalk& walk,
                                          Shared<C>& shared, const Stages<C>& stages, ChunkFlags& flags,
                                          RingPosition<C::kStages>& at, const Steps& steps, GemmeshTraceEvent* traced) {
    const uint32_t deferred_step = C::kAlone ? UINT32_MAX : max(flags.deferred_step(walk.tile()), steps.begin);
#pragma unroll 1
    for (uint32_t step = steps.begin; step < steps.end; ++step) {
        if (step == deferred_step) flags.wait_deferred(shared.entrance.get().epoch);
        stages.await(at);
        if (!Blocks || ptx::elect_one()) {
            stages.announce(at, rows.bytes());
            if (traced != nullptr && step == steps.begin) traced->load_begin = ptx::globaltimer();
            rows.load(stages.a(at.stage), step, stages.full(at.stage));
        }
        if constexpr (Blocks) scales.copy(stages, at.stage, step);
        at.advance();
    }
}

// Rows that come to this rank but are no tile's addends, such as the peers' sums of an all-reduce, must have come before
// the kernel ends, because the operation ends with it.
template <class C>
__device__ __forceinline__ void await_other_rows(const GemmeshSums& sums, ChunkFlags& flags, Shared<C>& shared) {
    if (sums.flag_begin < sums.flag_end) flags.wait(sums.flag_begin, sums.flag_end, shared.entrance.get().epoch);
}

// One warp, the producer of `a`: waits for each tile's rows. One thread of it loads them, stage by stage.
template <class C>
__device__ __forceinline__ void produce_rows(const Maps& maps, const GemmeshParams& params,
                                             const SumArguments& partials, TableWalk& walk, Shared<C>& shared,
                                             uint32_t cta) {
    const uint32_t lane = threadIdx.x % 32;
    const bool tracer = is_traced<C>(params) && lane == 0;
    const Stages<C> stages(shared);
    ChunkFlags flags(params, lane);
    RingPosition<C::kStages> at;
    GemmeshBlock block;
    GemmeshBlock next_block;

    await_predecessors(params);
    if constexpr (C::kSums) next_block = load_block(*partials.sums, walk.tile().block);
    for (; walk.valid(); walk.advance()) {
        const auto event = [&]() -> GemmeshTraceEvent& { return event_of<C>(params, walk.index(), cta); };
        const auto wait_for_flags = [&] {
            const bool waits = !C::kAlone && walk.tile().flag_begin < walk.tile().flag_end;
            if (tracer) event().wait_begin = ptx::globaltimer();
            if (waits) flags.wait(walk.tile(), shared.entrance.get().epoch);
            if (tracer) event().wait_end = ptx::globaltimer();
        };
        uint32_t row = first_row<C>(walk.tile(), cta);
        if constexpr (C::kSums) {
            // the next tile's block is on its way while this tile is multiplied
            block = next_block;
            next_block = load_block(*partials.sums, walk.next().block);
            row += block.row;
        } else {
            wait_for_flags();
        }

        const Steps steps = steps_of<C>(params, walk.index(), cta);
        const bool has_blocks = has_block_scales<C>(params);
        if (has_blocks || ptx::elect_one()) {
            GemmeshTraceEvent* traced = is_traced<C>(params) ? &event() : nullptr;
            const RowLoads<C> rows(maps, params, row, cta);
            RowScaleCopies<C> scales(params, row, lane);
            if (has_blocks) {
                load_rows<C, true>(rows, scales, walk, shared, stages, flags, at, steps, traced);
            } else {
                load_rows<C, false>(rows, scales, walk, shared, stages, flags, at, steps, traced);
            }
        }

        if constexpr (C::kSums) {
            // wait for what is added, while the consumers multiply
            wait_for_flags();
            const uint32_t column = first_column<C>(params, walk.tile(), cta);
            if (has_blocks) {
                load_addends<C, true>(*partials.added, block, stages, at, row - block.row, column);
            } else if (ptx::elect_one()) {
                load_addends<C, false>(*partials.added, block, stages, at, row - block.row, column);
            }
        }
    }
    if constexpr (C::kSums) await_other_rows(*partials.sums, flags, shared);
}

// One thread: calls `load` with the loads of `b` of the walk's tile. There is one copy of it for each way in which `b`
// may lie, because no step must find out which it is.
template <class C, class Load>
__device__ __forceinline__ void with_weights(const Maps& maps, const GemmeshParams& params, const TableWalk& walk,
                                             uint32_t cta, const Load& load) {
    const uint32_t weight = weight_of<C>(walk.tile());
    const uint32_t n = params.outputs[weight].n;
    const uint32_t column = first_column<C>(params, walk.tile(), cta);
    const bool gated = is_gated<C>(params);
    if constexpr (C::kTakesKn) {
        if (params.b_is_kn != 0) return load(WeightLoads<C, WeightRows::kAlongK>(maps, params, gated, weight, n, column, cta));
    }
    if constexpr (C::kGates) {
        if (gated) return load(WeightLoads<C, WeightRows::kOfTwo>(maps, params, gated, weight, n, column, cta));
    }
    load(WeightLoads<C, WeightRows::kOfOne>(maps, params, gated, weight, n, column, cta));
}

// Loads `b` of a tile's steps, as load_rows.
template <class C, bool Blocks, class Weights>
__device__ __forceinline__ void load_weights(const Weights& weights, WeightScaleCopies<C>& scales, const Stages<C>& stages,
                                             RingPosition<C::kStages>& at, const Steps& steps) {
#pragma unroll 1
    for (uint32_t step = steps.begin; step < steps.end; ++step) {
        stages.await(at);
        if (!Blocks || ptx::elect_one()) {
            stages.announce(at, weights.bytes());
            weights.load(stages.b(at.stage), step, stages.full(at.stage));
        }
        if constexpr (Blocks) scales.copy(stages, at.stage, step);
        at.advance();
    }
}

// One warp, the producer of `b`: loads each tile's rows of `b`, stage by stage. It waits for nothing but free stages,
// neither for flags nor for the kernels before this one.
template <class C>
__device__ __forceinline__ void produce_weights(const Maps& maps, const GemmeshParams& params,
                                                const SumArguments& partials, TableWalk& walk, Shared<C>& shared,
                                                uint32_t cta) {
    const uint32_t lane = threadIdx.x % 32;
    const Stages<C> stages(shared);
    const bool has_blocks = has_block_scales<C>(params);
    RingPosition<C::kStages> at;
    for (; walk.valid(); walk.advance()) {
        // Without scales of blocks what follows is one thread's, and must not elect again: an election waits for all lanes.
        if (!has_blocks && !ptx::elect_one()) continue;
        const Steps steps = steps_of<C>(params, walk.index(), cta);
        const uint32_t column = first_column<C>(params, walk.tile(), cta);
        WeightScaleCopies<C> scales(params, weight_of<C>(walk.tile()), column, lane);
        with_weights<C>(maps, params, walk, cta, [&](const auto& weights) {
            if (has_blocks) {
                load_weights<C, true>(weights, scales, stages, at, steps);
            } else {
                load_weights<C, false>(weights, scales, stages, at, steps);
            }
        });
        if constexpr (C::kSums) {
            const GemmeshBlock block = load_block(*partials.sums, walk.tile().block);
            if (has_blocks) {
                pass_addends<C, true>(block, stages, at);
            } else {
                pass_addends<C, false>(block, stages, at);
            }
        }
    }
}

}  // namespace gemmesh
