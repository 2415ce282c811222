// Slices of K: what an entry of the table makes of its tile, and adding up, through memory, what several have made of one.
#pragma once

#include "../abi.h"
#include "../common/ptx.cuh"
#include "wgmma.cuh"

namespace gemmesh {

// What one warp has of an entry's tile. `Warps`: consumer warps of a cluster.
template <uint32_t Warps>
struct SliceSum {
    uint32_t index;  // of the entry
    uint32_t warp;   // in the cluster

    // One warp of the consumers: returns whether it has the sums of its rows, to be stored. Without rows to store, `is_stored`, there
    // is nothing to add, but somebody is the last all the same.
    //
    // Each warp stores what it has, and counts. The last one of a tile's adds up, in the order of the slices, whoever was when: so
    // bits depend on the slices only. Nobody waits, so nothing is asked of which entries run at the same time.
    template <class Element, int N>
    __device__ __forceinline__ bool add(Accumulators<Element, N>& accumulators, const GemmeshParams& params, bool is_stored,
                                        uint32_t lane) const {
        constexpr int kPieces = N / 8;  // of four accumulators
        constexpr int kAtATime = 16;    // as many loads as there are registers for
        constexpr size_t kNext = size_t{Warps} * kPieces * 32;
        if (params.slices == nullptr) return true;
        const uint2 words = __ldg(reinterpret_cast<const uint2*>(params.slices + index) + 1);
        const uint32_t first = words.x;
        const uint32_t slice = words.y & 0xffff;
        const uint32_t count = words.y >> 16;
        if (count == 1) return true;

        // pieces of a warp's lanes lie side by side
        float4* parts = reinterpret_cast<float4*>(params.partials) + (first * kNext + warp * (kPieces * 32) + lane);
        if (is_stored) {
            float4* own = parts + slice * kNext;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                const float* d = &accumulators.d[4 * i];
                __stcg(own + i * 32, float4{d[0], d[1], d[2], d[3]});
            }
        }

        // Every lane's stores come before the count, and who counts the last has all before it.
        __syncwarp();
        uint32_t* arrived = params.arrived + first * Warps + warp;
        uint32_t before = 0;
        if (lane == 0) before = ptx::atom_add_acq_rel_gpu(arrived, 1);
        __syncwarp();
        if (__shfl_sync(~0u, before, 0) + 1 < count) return false;
        if (lane == 0) *arrived = 0;
        if (!is_stored) return true;

        if (slice > 0) {
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                const float4 sums = __ldcg(parts + i * 32);
                float* d = &accumulators.d[4 * i];
                d[0] = sums.x;
                d[1] = sums.y;
                d[2] = sums.z;
                d[3] = sums.w;
            }
        }
#pragma unroll 1
        for (uint32_t of = 1; of < count; ++of) {
            parts += kNext;
#pragma unroll
            for (int begin = 0; begin < kPieces; begin += kAtATime) {
                float4 next[kAtATime];
#pragma unroll
                for (int i = 0; i < kAtATime; ++i) {
                    if (begin + i < kPieces) next[i] = __ldcg(parts + (begin + i) * 32);
                }
#pragma unroll
                for (int i = 0; i < kAtATime; ++i) {
                    if (begin + i == kPieces) break;
                    float* d = &accumulators.d[4 * (begin + i)];
                    d[0] += next[i].x;
                    d[1] += next[i].y;
                    d[2] += next[i].z;
                    d[3] += next[i].w;
                }
            }
        }
        return true;
    }
};

}  // namespace gemmesh
