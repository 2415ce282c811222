// The producer warp: waits for a tile's rows or addends, and loads its operands and addends into the ring.
#pragma once

#include "../abi.h"
#include "../protocol/flags.cuh"
#include "../protocol/tile_table.cuh"
#include "block_sums.cuh"
#include "config.cuh"
#include "pipeline.cuh"
#include "ptx.cuh"
#include "tile.cuh"
#include "weights.cuh"

namespace gemmesh {

// One thread: loads the steps of a tile into the ring: `a` of all steps, and `b` from step `ahead` on, because the
// earlier ones are under way. A flag may be deferred (protocol/flags.cuh): it stands for the columns of `a` from step
// `deferred_step` on, and is awaited just before that step.
template <class C, class LoadB, class Event>
__device__ __forceinline__ void load_steps(const Maps& maps, const TableWalk& walk, Shared<C>& shared, ChunkFlags& flags,
                                           RingPosition<C::kStages>& at, const Steps& steps, uint32_t ahead, uint32_t row,
                                           bool tracer, const LoadB& load_b, const Event& event) {
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

// One warp: waits for each tile's rows. One thread of it loads them, stage by stage.
template <class C>
__device__ __forceinline__ void produce(const Maps& maps, const GemmeshParams& params, const SumArguments& partials,
                                        TableWalk& walk, Shared<C>& shared, uint32_t cta) {
    constexpr uint32_t kStageBytes = sizeof(shared.a[0]) + sizeof(shared.b[0]);
    const uint32_t lane = threadIdx.x % 32;
    const bool tracer = params.trace != nullptr && lane == 0;
    const WeightLoads<C> weights{maps, cta};
    ChunkFlags flags(params, lane);
    RingPosition<C::kStages> at;
    GemmeshBlock block;
    GemmeshBlock next_block;

    // Waits until the stage is free, and loads `b` into it. `b` needs no flag.
    const auto load_b = [&](const RingPosition<C::kStages>& to, uint32_t step) {
        shared.pipeline.acquire(to, kStageBytes);
        const GemmeshTile tile = walk.tile();
        const uint32_t column = first_column<C>(params, tile);
        weights.load(params, shared.b[to.stage], weight_of<C>(tile), column, step, &shared.pipeline.full[to.stage]);
    };
    const auto event = [&]() -> GemmeshTraceEvent& { return event_of<C>(params, walk.index(), cta); };

    if constexpr (C::kSums) next_block = load_block(*partials.sums, walk.tile().block);
    for (bool first = true; walk.valid(); walk.advance(), first = false) {
        const Steps steps = steps_of<C>(params, walk.index(), cta);
        const bool waits = walk.tile().flag_begin < walk.tile().flag_end;
        const auto wait_for_flags = [&] {
            if (tracer) event().wait_begin = ptx::globaltimer();
            if (waits) flags.wait(walk.tile(), shared.entrance.get().epoch);
            if (tracer) event().wait_end = ptx::globaltimer();
        };
        uint32_t row = first_row<C>(walk.tile(), cta);
        uint32_t ahead = steps.begin;  // the first step whose `b` has not been asked for
        if constexpr (C::kSums) {
            // the next tile's block is on its way while this tile is multiplied
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

        if (lane == 0) load_steps<C>(maps, walk, shared, flags, at, steps, ahead, row, tracer, load_b, event);

        if constexpr (C::kSums) {
            // wait for what is added, while the consumers multiply
            wait_for_flags();
            const uint32_t column = first_column<C>(params, walk.tile());
            if (lane == 0) load_addends<C>(*partials.added, block, shared, at, row - block.row, column);
        }
    }
    if constexpr (C::kSums) {
        // Rows that come to this rank but are no tile's addends, such as the peers' sums of an all-reduce, must have
        // come before the kernel ends, because the operation ends with it.
        const GemmeshSums& sums = *partials.sums;
        if (sums.flag_begin < sums.flag_end) flags.wait(sums.flag_begin, sums.flag_end, shared.entrance.get().epoch);
    }
}

}  // namespace gemmesh
