// The place of a table entry's tile (its first row and column, its weight, the steps through K), and a warp's part of
// it.
#pragma once

#include "../abi.h"
#include "config.cuh"

namespace gemmesh {

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
        // If K is too short to be shared, a CTA without a part multiplies zeros: TMA reads them behind K's end.
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

// The first column of a tile in its output.
template <class C>
__device__ __forceinline__ uint32_t first_column(const GemmeshParams& params, const GemmeshTile& tile) {
    const bool is_gated = C::kGates && params.is_gated != 0;
    return tile.n * (is_gated ? C::kTileN / 2 : C::kTileN);
}

// The weight of a tile.
template <class C>
__device__ __forceinline__ uint32_t weight_of(const GemmeshTile& tile) {
    return C::kSums ? 0 : tile.block;
}

// The part of a tile that one warp of the consumers multiplies and stores.
template <class C>
struct WarpPart {
    uint32_t consumer;
    uint32_t warp;  // among all consumers' warps
    uint32_t lane;
    uint32_t consumer_row;  // the consumer's first row in the tile, or 0 if operands are swapped
    uint32_t row;           // the warp's first row in the tile, or 0 if operands are swapped
    uint32_t column;        // the consumer's first column of `b` in the tile

    __device__ explicit WarpPart(uint32_t of)
        : consumer(of),
          warp(of * 4 + threadIdx.x / 32 % 4),
          lane(threadIdx.x % 32),
          consumer_row(C::kSideBySide || C::kSwapAb ? 0 : of * kConsumerRows),
          row(C::kSwapAb ? 0 : consumer_row + threadIdx.x / 32 % 4 * GEMMESH_STORE_ROWS),
          column(C::kSideBySide ? of * C::kConsumerN : C::kSwapAb ? of * kConsumerRows : 0) {}

    // The consumer's first column in the output.
    __device__ uint32_t left(const GemmeshParams& params, const GemmeshTile& tile) const {
        const bool is_gated = C::kGates && params.is_gated != 0;
        return first_column<C>(params, tile) + (is_gated ? column / 2 : column);
    }
};

}  // namespace gemmesh
