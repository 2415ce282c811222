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

// One thread: loads the operands of a tile into the ring, step by step. Except with block sums it loads only those rows
// of `a` that there are, and of `b` those that WeightLoads says. The others of a stage keep what they had, and nothing
// is stored of their products.
template <class C, WeightRows Rows>
class TileLoads {
public:
    // `row` is the first of the CTA's rows of `a`. The last CTAs of a cluster may have none.
    __device__ TileLoads(const Maps& maps, const GemmeshParams& params, const TableWalk& walk, uint32_t row,
                         const Stages<C>& stages, uint32_t cta)
        : a_(maps.a),
          row_(row),
          has_rows_(C::kCluster == 1 || C::kSums || row < params.m),
          weights_(maps, is_gated<C>(params), weight_of<C>(walk.tile()), params.outputs[weight_of<C>(walk.tile())].n,
                   first_column<C>(params, walk.tile()), cta),
          stages_(stages) {
        uint32_t count = has_rows_ ? C::kTileM : 0;
        if (!C::kSums && has_rows_ && params.m - row < C::kTileM) {
            a_ = &maps.tails->a;
            count = params.m - row;
        }
        bytes_ = count * (C::kBytesA / C::kTileM) + weights_.bytes();
    }

    // Waits until the stage is free, and loads `b` into it. `b` needs no flag.
    __device__ void load_b(const RingPosition<C::kStages>& at, uint32_t step) const {
        stages_.acquire(at, bytes_);
        weights_.load(stages_.b(at.stage), step, stages_.full(at.stage));
    }

    __device__ void load_a(const RingPosition<C::kStages>& at, uint32_t step) const {
        if (!has_rows_) return;
        ptx::cp_async_bulk_tensor_2d_load(stages_.a(at.stage), a_, step * GEMMESH_TILE_K, row_, stages_.full(at.stage));
    }

private:
    const CUtensorMap* a_;
    uint32_t row_;
    bool has_rows_;
    uint32_t bytes_;  // of a stage
    WeightLoads<C, Rows> weights_;
    const Stages<C>& stages_;
};

// One thread: calls `load` with the loads of the walk's tile. There is one copy of it for each way in which `b` may
// lie, because no step must find out which it is.
template <class C, class Load>
__device__ __forceinline__ void with_loads(const Maps& maps, const GemmeshParams& params, const TableWalk& walk,
                                           uint32_t row, const Stages<C>& stages, uint32_t cta, const Load& load) {
    if constexpr (C::kTakesKn) {
        if (params.b_is_kn != 0) return load(TileLoads<C, WeightRows::kAlongK>(maps, params, walk, row, stages, cta));
    }
    if constexpr (C::kGates) {
        if (params.is_gated != 0) return load(TileLoads<C, WeightRows::kOfTwo>(maps, params, walk, row, stages, cta));
    }
    load(TileLoads<C, WeightRows::kOfOne>(maps, params, walk, row, stages, cta));
}

// One thread: loads the steps of a tile into the ring: `a` of all steps, and `b` from step `ahead` on, because the
// earlier ones are under way. A flag may be deferred (protocol/flags.cuh): it stands for the columns of `a` from step
// `deferred_step` on, and is awaited just before that step. `traced`: the tile's event, or null.
template <class C, class Loads>
__device__ __forceinline__ void load_steps(const Loads& loads, const TableWalk& walk, Shared<C>& shared, ChunkFlags& flags,
                                           RingPosition<C::kStages>& at, const Steps& steps, uint32_t ahead,
                                           GemmeshTraceEvent* traced) {
    const uint32_t deferred_step = C::kAlone ? UINT32_MAX : max(flags.deferred_step(walk.tile()), steps.begin);
#pragma unroll 1
    for (uint32_t step = steps.begin; step < steps.end; ++step) {
        if (step == deferred_step) flags.wait_deferred(shared.entrance.get().epoch);
        if (step >= ahead) loads.load_b(at, step);
        if (traced != nullptr && step == steps.begin) traced->load_begin = ptx::globaltimer();
        loads.load_a(at, step);
        at.advance();
    }
}

// One warp: waits for each tile's rows. One thread of it loads them, stage by stage.
template <class C>
__device__ __forceinline__ void produce(const Maps& maps, const GemmeshParams& params, const SumArguments& partials,
                                        TableWalk& walk, Shared<C>& shared, uint32_t cta) {
    const uint32_t lane = threadIdx.x % 32;
    const bool tracer = is_traced<C>(params) && lane == 0;
    const Stages<C> stages(shared);
    ChunkFlags flags(params, lane);
    RingPosition<C::kStages> at;
    GemmeshBlock block;
    GemmeshBlock next_block;

    if constexpr (C::kSums) next_block = load_block(*partials.sums, walk.tile().block);
    for (bool first = true; walk.valid(); walk.advance(), first = false) {
        const Steps steps = steps_of<C>(params, walk.index(), cta);
        const bool waits = !C::kAlone && walk.tile().flag_begin < walk.tile().flag_end;
        const auto event = [&]() -> GemmeshTraceEvent& { return event_of<C>(params, walk.index(), cta); };
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
            // wait for the kernels before and for the tile's rows; meanwhile the first tile's `b` fills the ring
            if (first && (waits || params.constant_weights != 0)) {
                ahead = min(steps.end, steps.begin + C::kStages);
                if (ptx::elect_one()) {
                    with_loads<C>(maps, params, walk, row, stages, cta, [&](const auto& loads) {
                        RingPosition<C::kStages> to = at;
                        for (uint32_t step = steps.begin; step < ahead; ++step, to.advance()) loads.load_b(to, step);
                    });
                }
                // The other lanes may not go ahead to a wait, which would hold up the lane that loads.
                __syncwarp();
                await_predecessors(params);
            }
            wait_for_flags();
        }

        if (ptx::elect_one()) {
            GemmeshTraceEvent* traced = is_traced<C>(params) ? &event() : nullptr;
            with_loads<C>(maps, params, walk, row, stages, cta, [&](const auto& loads) {
                load_steps<C>(loads, walk, shared, flags, at, steps, ahead, traced);
            });
        }

        if constexpr (C::kSums) {
            // wait for what is added, while the consumers multiply
            wait_for_flags();
            const uint32_t column = first_column<C>(params, walk.tile());
            if (ptx::elect_one()) load_addends<C>(*partials.added, block, stages, at, row - block.row, column);
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
