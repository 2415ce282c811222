// The steps after a tile's products: adding other CTAs' and ranks' parts, the epilogue, and the stores.
#pragma once

#include "../abi.h"
#include "../protocol/tile_table.cuh"
#include "block_sums.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "k_slices.cuh"
#include "low_latency_sums.cuh"
#include "pipeline.cuh"
#include "ptx.cuh"
#include "swap_ab.cuh"
#include "tile.cuh"
#include "weights.cuh"
#include "wgmma.cuh"

namespace gemmesh {

static_assert(kPairBarrier + 2 * kConsumers <= kTurnBarrier);

// What a consumer warp of a kernel with block sums stores through. Other kernels do not use it.
template <class C>
using Placed = PlacedStores<typename C::Element, C::kColumns, C::kBoxes>;

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

// What a warp loads while the tensor cores multiply, and adds to a band of its tile afterwards.
template <class C>
using Addends = std::conditional_t<C::kSwapAb, SwapAbAddends<typename C::Element, C::kColumns>,
                                   ColumnBias<typename C::Element, C::kSwapAb ? 8 : C::kConsumerN>>;

// One warp: turns to the block of a tile that a kernel with block sums is about to make.
template <class C>
__device__ __forceinline__ GemmeshBlock begin_block(Placed<C>& placed, const SumArguments& partials,
                                                    const GemmeshTile& tile, uint32_t lane) {
    if constexpr (C::kSums) {
        const GemmeshBlock block = load_block(*partials.sums, tile.block);
        placed.turn_to(block, lane);
        return block;
    } else {
        return {};
    }
}

// One warp: adds up the slices of K of a band, as SliceSum::add.
template <class C>
__device__ __forceinline__ bool add_slices(Accumulators<typename C::Element, C::kColumns>& accumulators,
                                           const GemmeshParams& params, const TableWalk& walk,
                                           const ConsumerWarp<C>& self, uint32_t band, bool has_rows) {
    constexpr int kAtATime = C::kBands * C::kColumns > 256 ? 8 : 16;
    const SliceSum<C::kCtas * C::kParts, kAtATime> sum{walk.index(), self.cta * C::kParts + self.part(band)};
    return sum.add(accumulators, params, has_rows, self.lane);
}

// One warp: stores its rows of a block's tile: sums if the block is this rank's, else partial sums. `tile_row` is the
// tile's first row in the block. A warp without rows passes through the addends' stages too.
template <class C>
__device__ __forceinline__ void store_sums(Accumulators<typename C::Element, C::kColumns>& accumulators,
                                           const GemmeshParams& params, const GemmeshBlock& block, uint32_t index,
                                           Shared<C>& shared, RingPosition<C::kStages>& at, Placed<C>& placed,
                                           Addends<C>& bias, const ConsumerWarp<C>& self, uint32_t tile_row,
                                           uint32_t left, bool has_all_of_k) {
    using Element = typename C::Element;
    const uint32_t lane = self.lane;
    const uint32_t row = tile_row + self.row(0);
    auto& boxes = shared.boxes[self.box()];
    const bool has_rows = has_all_of_k && row < block.rows;
    // report the tile before, unless multiply had steps enough to do so
    placed.report(lane);
    const bool is_sum = block.sum != 0;
    const bool stores_f32 = is_sum && is_f32<C>(params);
    const GemmeshOutput& output = params.outputs[0];
    const WarpPlace place{block.row + row, left, 0, block.row + block.rows};
    if (is_sum) add<C>(accumulators, block, shared, at, has_rows, self.consumer, self.row(0), lane);
    if (is_sum && has_rows) {
        bias.load(params, output, false, left, lane);
        finish<Element, false, C::kConsumerN>(accumulators.d, params, output, bias, boxes, place, lane);
    }
    placed.await_ready(row, left);
    if (has_rows && stores_f32) store_directly<float, C::kConsumerN>(accumulators.d, output, Place(place, lane));
    if (has_rows && !stores_f32) store_rows<Element, C::kConsumerN>(accumulators.d, placed, lane);
    if (has_all_of_k) placed.note(block, index);
}

// One warp: finishes and stores its rows of a band. `row` and `column` are its first ones.
template <class C>
__device__ __forceinline__ void store_tile(Accumulators<typename C::Element, C::kColumns>& accumulators, const Maps& maps,
                                           const GemmeshParams& params, Shared<C>& shared,
                                           const ColumnBias<typename C::Element, C::kColumns>& bias, uint32_t weight,
                                           const ConsumerWarp<C>& self, uint32_t row, uint32_t column) {
    using Element = typename C::Element;
    constexpr int kN = C::kColumns;
    const GemmeshOutput& output = params.outputs[weight];
    const uint32_t lane = self.lane;
    auto& boxes = shared.boxes[self.box()];
    float* d = accumulators.d;
    if constexpr (C::kLowLatency) {
        const LowLatencySums<Element, kN> low_latency(params, output, shared.entrance.get(), row, column, lane);
        low_latency.send_and_add(accumulators);
        const WarpPlace rows = low_latency.place();
        finish<Element, false, kN>(d, params, output, bias, boxes, rows, lane);
        const Place place(rows, lane);
        if (is_f32<C>(params)) {
            store_directly<float, kN>(d, output, place);
        } else {
            store_directly<Element, kN>(d, output, place);
        }
    } else {
        const WarpPlace place{row, column, 0, params.m};
        const CUtensorMap* map = maps.out_of(weight);
        if constexpr (!C::kPlain) finish<Element, C::kGates, kN>(d, params, output, bias, boxes, place, lane);
        if (is_gated<C>(params)) {
            store_own<C, kN / 2>(d, map, boxes, output, is_f32<C>(params), place, lane);
        } else {
            store_own<C, kN>(d, map, boxes, output, is_f32<C>(params), place, lane);
        }
    }
}

// A warp's part of a band of swapped operands. In a gated tile warps 0 and 1 of each consumer have gate's columns, and
// warps 2 and 3 have the same columns of up.
template <class C>
struct SwapAbPart {
    bool gated;
    bool is_up;
    uint32_t number;  // of its 16 columns in the tile

    __device__ SwapAbPart(const GemmeshParams& params, const ConsumerWarp<C>& self, uint32_t band)
        : gated(is_gated<C>(params)),
          is_up(gated && self.warp >= 2),
          number(gated ? self.part(band) / 4 * 2 + self.warp % 2 : self.part(band)) {}

    __device__ uint32_t column() const { return number * 16; }
    __device__ const void* bias(const GemmeshParams& params, uint32_t weight) const {
        return params.outputs[is_up ? 1 : weight].bias;
    }
};

// One warp: the same for a band of swapped operands. `row` and `column` are the tile's first ones. Of a gated tile, a CTA
// needs the sums of gate's and of up's warp. SplitSum gives both to the same CTA. With SliceSum the two warps may be
// last in different entries, so K of gated products is not cut into slices here.
template <class C>
__device__ __forceinline__ void store_swap_ab(Accumulators<typename C::Element, C::kColumns>& accumulators,
                                              const GemmeshParams& params, Shared<C>& shared, const Addends<C>& addends,
                                              uint32_t weight, const ConsumerWarp<C>& self, uint32_t band, uint32_t row,
                                              uint32_t column) {
    const SwapAbPart<C> part(params, self, band);
    const uint32_t barrier = kPairBarrier + self.consumer * 2 + self.warp % 2;
    const uint32_t gate_box = self.consumer * 4 + self.warp % 2;
    const GemmeshOutput& output = params.outputs[weight];
    auto& own = shared.boxes[self.box()][0];
    auto& gates = shared.boxes[gate_box][0];
    auto& ups = shared.boxes[gate_box + 2][0];
    SwapAbTile<typename C::Element, C::kColumns> tile(accumulators, params, output, row, column + part.column(), self.lane);
    if constexpr (!C::kPlain) {
        tile.add_bias(part.bias(params, weight), addends);
        if (part.is_up) {
            tile.give(ups, gates, barrier);
            return;
        }
        activate<C::kColumns / 2>(accumulators.d, params.activation, is_f32<C>(params));
        if (part.gated) tile.multiply(ups, gates, barrier);
        tile.add_residual(own, addends);
    }
    if (is_f32<C>(params)) {
        tile.store_f32();
    } else {
        tile.store(own);
    }
}

// One warp: sends its rows of a tile of swapped operands, and stores their sums. `row` and `column` are the tile's first
// ones.
template <class C>
__device__ __forceinline__ void send_swap_ab(Accumulators<typename C::Element, C::kColumns>& accumulators,
                                             const GemmeshParams& params, Shared<C>& shared, const ConsumerWarp<C>& self,
                                             uint32_t row, uint32_t column) {
    using Sums = SwapAbLowLatencySums<typename C::Element, C::kColumns>;
    const GemmeshOutput& output = params.outputs[0];
    const typename Sums::Tile tile(accumulators, params, output, row, column + self.part(0) * 16, self.lane);
    Sums(params, output, shared.entrance.get(), tile).send_add_and_store(shared.boxes[self.box()][0]);
}

// One warp: finishes and stores its rows of a band, with or without swap_ab. `row` is its first row. `column` is the
// tile's first column, and `left` the warp's.
template <class C>
__device__ __forceinline__ void store_product(Accumulators<typename C::Element, C::kColumns>& accumulators,
                                              const Maps& maps, const GemmeshParams& params, Shared<C>& shared,
                                              const Addends<C>& addends, uint32_t weight, const ConsumerWarp<C>& self,
                                              uint32_t band, uint32_t row, uint32_t column, uint32_t left) {
    if constexpr (C::kSwapAb && C::kLowLatency) {
        send_swap_ab<C>(accumulators, params, shared, self, row, column);
    } else if constexpr (C::kSwapAb) {
        store_swap_ab<C>(accumulators, params, shared, addends, weight, self, band, row, column);
    } else if (row < params.m) {
        store_tile<C>(accumulators, maps, params, shared, addends, weight, self, row, left);
    }
}

}  // namespace gemmesh
