// Adding up, through memory, what several entries of the table have made of one tile, each of a slice of K.
#pragma once

#include "../abi.h"
#include "../common/ptx.cuh"
#include "wgmma.cuh"

namespace gemmesh {

// One warp of the consumers: returns whether it has the sums of its rows, to be stored. `place` is its number among all warps of all
// tiles. Without rows to store, `is_stored`, there is nothing to add, but somebody is the last all the same.
//
// Each warp stores what it has, and counts. The last one of a tile's adds up, in the order of the slices, whoever was when: so bits
// depend on the slices only. Nobody waits, so nothing is asked of which entries run at the same time.
template <class Element, int N>
__device__ __forceinline__ bool add_slices(Accumulators<Element, N>& accumulators, const GemmeshParams& params,
                                           uint32_t place, uint32_t slice, bool is_stored, uint32_t lane) {
    constexpr int kPieces = N / 8;  // of four accumulators
    constexpr int kAtATime = 16;  // as many loads as there are registers for
    if (params.slices == 1) return true;

    // pieces of a warp's lanes lie side by side
    float4* parts = reinterpret_cast<float4*>(params.partials) + size_t(place) * params.slices * (kPieces * 32) + lane;
    if (is_stored) {
        float4* own = parts + slice * (kPieces * 32);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const float* d = &accumulators.d[4 * i];
            __stcg(own + i * 32, float4{d[0], d[1], d[2], d[3]});
        }
    }

    // Every lane's stores come before the count, and who counts the last has all before it.
    __syncwarp();
    uint32_t before = 0;
    if (lane == 0) before = ptx::atom_add_acq_rel_gpu(&params.arrived[place], 1);
    __syncwarp();
    if (__shfl_sync(~0u, before, 0) + 1 < params.slices) return false;
    if (lane == 0) params.arrived[place] = 0;
    if (!is_stored) return true;

    if (slice > 0) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const float4 first = __ldcg(parts + i * 32);
            float* d = &accumulators.d[4 * i];
            d[0] = first.x;
            d[1] = first.y;
            d[2] = first.z;
            d[3] = first.w;
        }
    }
#pragma unroll 1
    for (uint32_t of = 1; of < params.slices; ++of) {
        parts += kPieces * 32;
#pragma unroll
        for (int first = 0; first < kPieces; first += kAtATime) {
            float4 next[kAtATime];
#pragma unroll
            for (int i = 0; i < kAtATime; ++i) {
                if (first + i < kPieces) next[i] = __ldcg(parts + (first + i) * 32);
            }
#pragma unroll
            for (int i = 0; i < kAtATime; ++i) {
                if (first + i == kPieces) break;
                float* d = &accumulators.d[4 * (first + i)];
                d[0] += next[i].x;
                d[1] += next[i].y;
                d[2] += next[i].z;
                d[3] += next[i].w;
            }
        }
    }
    return true;
}

}  // namespace gemmesh
