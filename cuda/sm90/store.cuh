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
using Placed = PlacedStores<typename C::Output, C::kColumns, C::kBoxes>;

// The same boxes for another type.
template <class Stored, class Output, int Boxes>
__device__ __forceinline__ StoreBox<Stored> (&boxes_of(StoreBox<Output> (&boxes)[Boxes]))[Boxes] {
    static_assert(sizeof(StoreBox<Stored>) == sizeof(StoreBox<Output>));
    return reinterpret_cast<StoreBox<Stored>(&)[Boxes]>(boxes);
}

// One warp: stores N columns of accumulators, rounded to 16 bits.
template <class Stored, int N, int Boxes>
__device__ __forceinline__ void store_16_bit_rows(const float* accumulators, const CUtensorMap* map,
                                                  StoreBox<Stored> (&boxes)[Boxes], const GemmeshOutput& output,
                                                  const WarpPlace& place, uint32_t lane) {
    if constexpr (N < StoreBox<Stored>::kColumns) {
        store_directly<Stored, N>(accumulators, output, Place(place, lane));
    } else {
        OwnStores<Stored, N, Boxes> stores{map, boxes, place.row, place.column, lane};
        store_rows<Stored, N>(accumulators, stores, lane);
    }
}

// One warp: stores N columns of accumulators, finished, to the output of a weight.
template <class C, int N>
__device__ __forceinline__ void store_own(float* accumulators, const CUtensorMap* map, const GemmeshParams& params,
                                          StoreBox<typename C::Output> (&boxes)[C::kBoxes], const GemmeshOutput& output,
                                          const WarpPlace& place, uint32_t lane) {
    if (is_f32<C>(params)) {
        auto& of_f32 = boxes_of<float>(boxes);
        OwnStores<float, N, C::kBoxes> stores{map, of_f32, place.row, place.column, lane};
        store_f32_rows<N>(accumulators, stores, lane);
        return;
    }
    if constexpr (C::kPromotes && !C::kAlone && N % 16 == 0) {
        if (params.stored_type == GEMMESH_STORED_E4M3) {
            store_e4m3_rows<N>(accumulators, boxes_of<uint8_t>(boxes)[0], output, place, lane);
            return;
        }
    }
    if constexpr (C::kPromotes && !C::kPlain) {
        if (params.stored_type == GEMMESH_STORED_F16) {
            store_16_bit_rows<f16, N>(accumulators, map, boxes_of<f16>(boxes), output, place, lane);
            return;
        }
    }
    store_16_bit_rows<typename C::Output, N>(accumulators, map, boxes, output, place, lane);
}

// One warp: stores N columns of sums, finished, without a box.
template <class C, int N>
__device__ __forceinline__ void store_sums_directly(const float* sums, const GemmeshParams& params, const Place& place) {
    const GemmeshOutput& output = params.outputs[0];
    if (is_f32<C>(params)) {
        store_directly<float, N>(sums, output, place);
    } else if (stored_type<C>(params) == GEMMESH_STORED_F16) {
        store_directly<f16, N>(sums, output, place);
    } else if (stored_type<C>(params) == GEMMESH_STORED_E4M3) {
        store_directly<uint8_t, N>(sums, output, place);
    } else {
        store_directly<typename C::Output, N>(sums, output, place);
    }
}

// What a warp loads while the tensor cores multiply, and adds to a band of its tile afterwards.
template <class C>
using Addends = std::conditional_t<C::kSwapAb, SwapAbAddends<typename C::Output, C::kColumns>,
                                   ColumnBias<typename C::Output, C::kSwapAb ? 8 : C::kConsumerN>>;

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
__device__ __forceinline__ bool add_slices(Accumulators<C::kColumns>& accumulators,
                                           const GemmeshParams& params, const TableWalk& walk,
                                           const ConsumerWarp<C>& self, uint32_t band, bool has_rows) {
    constexpr int kAtATime = C::kBands * C::kColumns > 256 ? 8 : 16;
    const SliceSum<C::kCtas * C::kParts, kAtATime> sum{walk.index(), self.cta * C::kParts + self.part(band)};
    return sum.add(accumulators, params, has_rows, self.lane);
}

// One warp: stores its rows of a block's tile: sums if the block is this rank's, else partial sums. `tile_row` is the
// tile's first row in the block. A warp without rows passes through the addends' stages too.
template <class C>
__device__ __forceinline__ void store_sums(Accumulators<C::kColumns>& accumulators,
                                           const GemmeshParams& params, const GemmeshBlock& block, uint32_t index,
                                           Shared<C>& shared, RingPosition<C::kStages>& at, Placed<C>& placed,
                                           Addends<C>& bias, const ConsumerWarp<C>& self, uint32_t tile_row,
                                           uint32_t left, bool has_all_of_k) {
    using Output = typename C::Output;
    const uint32_t lane = self.lane;
    const uint32_t row = tile_row + self.row(0);
    auto& boxes = shared.boxes[self.box()];
    const bool has_rows = has_all_of_k && row < block.rows;
    // report the tile before, unless multiply had steps enough to do so
    placed.report(lane);
    const bool is_sum = block.sum != GEMMESH_PARTIAL;
    const bool is_finished = block.sum == GEMMESH_FINISHED;
    const bool is_other = is_finished && (is_f32<C>(params) || stored_type<C>(params) != GEMMESH_STORED_OUTPUT);
    const GemmeshOutput& output = params.outputs[0];
    const WarpPlace place{block.row + row, left, 0, block.row + block.rows};
    if (is_sum) add<C>(accumulators, block, shared, at, has_rows, self.consumer, self.row(0), lane);
    if (is_finished && has_rows) {
        bias.load(params, output, false, left, lane);
        finish<Output, false, C::kConsumerN>(accumulators.d, params, output, bias, boxes, place, lane);
    }
    placed.await_ready(row, left);
    if (has_rows && is_other) store_sums_directly<C, C::kConsumerN>(accumulators.d, params, Place(place, lane));
    if (has_rows && !is_other) store_rows<Output, C::kConsumerN>(accumulators.d, placed, lane);
    if (has_all_of_k) placed.note(block, index);
}

// One warp: finishes and stores its rows of a band. `row` and `column` are its first ones.
template <class C>
__device__ __forceinline__ void store_tile(Accumulators<C::kColumns>& accumulators, const Maps& maps,
                                           const GemmeshParams& params, Shared<C>& shared,
                                           const ColumnBias<typename C::Output, C::kColumns>& bias, uint32_t weight,
                                           const ConsumerWarp<C>& self, uint32_t row, uint32_t column) {
    using Output = typename C::Output;
    constexpr int kN = C::kColumns;
    const GemmeshOutput& output = params.outputs[weight];
    const uint32_t lane = self.lane;
    auto& boxes = shared.boxes[self.box()];
    float* d = accumulators.d;
    if constexpr (C::kLowLatency) {
        const LowLatencySums<Output, kN> low_latency(params, output, shared.entrance.get(), row, column, lane);
        low_latency.send_and_add(accumulators);
        const WarpPlace rows = low_latency.place();
        finish<Output, false, kN>(d, params, output, bias, boxes, rows, lane);
        store_sums_directly<C, kN>(d, params, Place(rows, lane));
    } else {
        const WarpPlace place{row, column, 0, params.m};
        const CUtensorMap* map = maps.out_of(weight);
        if constexpr (!C::kPlain) finish<Output, C::kGates, kN>(d, params, output, bias, boxes, place, lane);
        if (is_gated<C>(params)) {
            store_own<C, kN / 2>(d, map, params, boxes, output, place, lane);
        } else {
            store_own<C, kN>(d, map, params, boxes, output, place, lane);
        }
    }
}

// One warp: the same for a band of swapped operands. `row` and `column` are the tile's first ones. Of a gated tile, a CTA
// needs the sums of gate's and of up's warp. SplitSum gives both to the same CTA. With SliceSum the two warps may be
// last in different entries, so K of gated products is not cut into slices here.
template <class C>
__device__ __forceinline__ void store_swap_ab(Accumulators<C::kColumns>& accumulators,
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
    SwapAbTile<typename C::Output, C::kColumns> tile(accumulators, params, output, row, column + part.column(), self.lane);
    if constexpr (!C::kPlain) {
        tile.add_bias(part.bias(params, weight), addends);
        if (part.is_up) {
            tile.give(ups, gates, barrier);
            return;
        }
        activate<C::kColumns / 2>(accumulators.d, params.activation, is_exact(params, output));
        if (part.gated) tile.multiply(ups, gates, barrier);
        tile.add_residual(own, addends);
    }
    if (is_f32<C>(params)) {
        tile.store_f32();
    } else if (!C::kPlain && stored_type<C>(params) == GEMMESH_STORED_F16) {
        tile.template store<f16>(own);
    } else if (stored_type<C>(params) == GEMMESH_STORED_E4M3) {
        const float factor = quantizing_factor(output.quantized);
        tile.store_e4m3(own, [factor](uint32_t) { return factor; });
    } else {
        tile.template store<typename C::Output>(own);
    }
}

// True if the warps of a tile of swapped operands make the scales of its rows together.
template <class C>
__device__ __forceinline__ bool makes_row_scales(const GemmeshParams& params, uint32_t weight) {
    const GemmeshOutputScales& of = params.outputs[weight].quantized;
    return C::kMakesRowScales && of.scales != nullptr && !is_given(of);
}

// One warpgroup: finishes and quantises its bands of a tile of swapped operands, which has no slices of K. `row` and
// `column` are the tile's first ones.
template <class C>
__device__ __forceinline__ void store_quantized(Bands<C>& bands, const GemmeshParams& params, Shared<C>& shared,
                                                SumScales<C> (&scales)[C::kBands], const Addends<C> (&addends)[C::kBands],
                                                uint32_t weight, const ConsumerWarp<C>& self, uint32_t row, uint32_t column) {
    constexpr uint32_t kWarps = 4 * C::kSharing;
    const uint32_t first = C::kSharing == 1 ? self.consumer * 4 : 0;  // of the tile's warps
    const GemmeshOutput& output = params.outputs[weight];
    auto& own = shared.boxes[self.box()][0];
    SwapAbScales<C::kColumns> row_scales;
    const auto tile_of = [&](uint32_t band) {
        const SwapAbPart<C> part(params, self, band);
        return SwapAbTile<typename C::Output, C::kColumns>(bands[band], params, output, row, column + part.column(), self.lane);
    };
#pragma unroll
    for (uint32_t band = 0; band < C::kBands; ++band) {
        auto tile = tile_of(band);
        scales[band].apply(bands[band], params, self.lane);
        if constexpr (!C::kPlain) {
            tile.add_bias(output.bias, addends[band]);
            activate<C::kColumns / 2>(bands[band].d, params.activation, true);
            tile.add_residual(own, addends[band]);
        }
        if (tile.has_columns()) row_scales.take(bands[band].d);
    }
    const GemmeshOutputScales& of = output.quantized;
    float* at = of.scales + uint64_t{row} * of.row + uint64_t{column / GEMMESH_SCALE_BLOCK} * of.block;
    row_scales.template make<kWarps>(&shared.boxes[first], self.box() - first, self.lane, kPairBarrier + first / 2, of, at,
                                     params.m - row);
#pragma unroll
    for (uint32_t band = 0; band < C::kBands; ++band) {
        tile_of(band).store_e4m3(own, [&](uint32_t i) { return row_scales.factor(i); });
    }
}

// One warp: sends its rows of a tile of swapped operands, and stores their sums. `row` and `column` are the tile's first
// ones.
template <class C>
__device__ __forceinline__ void send_swap_ab(Accumulators<C::kColumns>& accumulators,
                                             const GemmeshParams& params, Shared<C>& shared, const ConsumerWarp<C>& self,
                                             uint32_t row, uint32_t column) {
    using Sums = SwapAbLowLatencySums<typename C::Output, C::kColumns>;
    const GemmeshOutput& output = params.outputs[0];
    const typename Sums::Tile tile(accumulators, params, output, row, column + self.part(0) * 16, self.lane);
    Sums(params, output, shared.entrance.get(), tile).send_add_and_store(shared.boxes[self.box()][0]);
}

// One warp: finishes and stores its rows of a band, with or without swap_ab. `row` is its first row. `column` is the
// tile's first column, and `left` the warp's.
template <class C>
__device__ __forceinline__ void store_product(Accumulators<C::kColumns>& accumulators,
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
