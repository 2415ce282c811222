// The place of a table entry's tile: its first row and column, its weight, and the steps through K.
#pragma once

#include "../abi.h"
#include "config.cuh"
#include "ptx.cuh"

namespace gemmesh {

// Waits until the kernels before this one have ended. Only a kernel with constant weights may have begun earlier.
__device__ __forceinline__ void await_predecessors(const GemmeshParams& params) {
    if (params.constant_weights != 0) ptx::griddepcontrol_wait();
}

// The steps through K that a CTA makes.
struct Steps {
    uint32_t begin;
    uint32_t end;
};

template <class C>
__device__ __forceinline__ Steps steps_of(const GemmeshParams& params, uint32_t index, uint32_t cta) {
    const uint32_t all = (params.k + GEMMESH_TILE_K - 1) / GEMMESH_TILE_K;
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

// True if results are stored as f32.
template <class C>
__device__ __forceinline__ bool is_f32(const GemmeshParams& params) {
    return !C::kPlain && params.is_f32 != 0;
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

}  // namespace gemmesh
