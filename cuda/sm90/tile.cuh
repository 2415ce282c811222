// The place of a table entry's tile: its first row and column, its weight, and the steps through K.
#pragma once

#include "../abi.h"
#include "config.cuh"
#include "family.cuh"
#include "ptx.cuh"

namespace gemmesh {

// Waits until the kernels before this one have ended. Only a kernel with constant weights may have begun earlier.
__device__ __forceinline__ void await_predecessors(const GemmeshParams& params) {
    if (params.constant_weights != 0) family::wait_for_predecessors();
}

// The steps through K that a CTA makes.
struct Steps {
    uint32_t begin;
    uint32_t end;
};

template <class C>
__device__ __forceinline__ Steps steps_of(const GemmeshParams& params, uint32_t index, uint32_t cta) {
    const uint32_t all = (params.k + C::kTileK - 1) / C::kTileK;
    if constexpr (C::kSplit > 1) {
        const Steps part{all * cta / C::kSplit, all * (cta + 1) / C::kSplit};
        // If K is too short to be shared, a CTA without a part multiplies zeros: TMA reads them past K's end.
        return part.begin < part.end ? part : Steps{all, all + 1};
    } else if (C::kSliced && params.slices != nullptr) {
        const uint2 steps = __ldg(reinterpret_cast<const uint2*>(params.slices + index));
        return {steps.x, steps.y};
    } else {
        return {0, all};
    }
}

// The first column of a step. It may lie in front of the operands, because blocks of scales begin where steps do.
template <class C>
__device__ __forceinline__ int32_t column_of_step(const GemmeshParams& params, uint32_t step) {
    const uint32_t column = step * C::kTileK;
    return C::kPromotes ? column - params.scales.first_column : column;
}

// The first row of a CTA's tile: of the matrix or, in a kernel with block sums, of the block. An entry has one tile for
// each CTA of the cluster, as they are arranged there.
template <class C>
__device__ __forceinline__ uint32_t first_row(const GemmeshTile& tile, uint32_t cta) {
    return (tile.m * C::kClusterM + C::InCluster::row(cta)) * C::kTileM;
}

template <class C>
__device__ __forceinline__ GemmeshTraceEvent& event_of(const GemmeshParams& params, uint32_t index, uint32_t cta) {
    return params.trace[index * C::kCtas + cta];
}

// True if the product is gated.
template <class C>
__device__ __forceinline__ bool is_gated(const GemmeshParams& params) {
    return C::kGates && params.is_gated != 0;
}

// True if the operands' blocks have scales.
template <class C>
__device__ __forceinline__ bool has_block_scales(const GemmeshParams& params) {
    return C::kPromotes && params.scales.a_block != 0;
}

// True if results are stored as f32.
template <class C>
__device__ __forceinline__ bool is_f32(const GemmeshParams& params) {
    return !C::kPlain && params.is_f32 != 0;
}

// The type that results are stored as, unless it is f32: GEMMESH_STORED_OUTPUT or another.
template <class C>
__device__ __forceinline__ uint32_t stored_type(const GemmeshParams& params) {
    return C::kPromotes && !C::kAlone ? params.stored_type : GEMMESH_STORED_OUTPUT;
}

// True if other ranks' kernels have a part in the operation.
template <class C>
__device__ __forceinline__ bool has_peers(const GemmeshParams& params) {
    return !C::kAlone && params.peers.push_epoch != nullptr;
}

// True if the call is traced.
template <class C>
__device__ __forceinline__ bool is_traced(const GemmeshParams& params) {
    return !C::kAlone && params.trace != nullptr;
}

// The columns that a tile has of its output.
template <class C>
__device__ __forceinline__ uint32_t columns_of(const GemmeshParams& params) {
    return is_gated<C>(params) ? C::kTileN / 2 : C::kTileN;
}

// The first column of a CTA's tile in its output.
template <class C>
__device__ __forceinline__ uint32_t first_column(const GemmeshParams& params, const GemmeshTile& tile, uint32_t cta) {
    return (tile.n * C::kClusterN + C::InCluster::column(cta)) * columns_of<C>(params);
}

// The number of a tile's weight, which an entry of a kernel without block sums has in `block`.
template <class C>
__device__ __forceinline__ uint32_t weight_of(const GemmeshTile& tile) {
    return C::kSums ? 0 : tile.block;
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

}  // namespace gemmesh
