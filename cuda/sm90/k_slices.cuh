// Slices of K. If several entries of the table have the same tile, each with a slice of its K, this adds up their parts
// through memory.
#pragma once

#include "../abi.h"
#include "../common/ptx.cuh"
#include "wgmma.cuh"

namespace gemmesh {

// One warp's part of an entry's tile. `Parts` is their number in a cluster, and `AtATime` how many loads there are
// registers for.
template <uint32_t Parts, int AtATime>
struct SliceSum {
    uint32_t index;  // of the entry
    uint32_t part;   // in the cluster

    // One warp of the consumers: returns true if it has the sums of its rows and is to store them. `has_rows` is
    // false if none of its rows is in the output. Then it adds nothing, but still counts as arrived.
    //
    // Each warp stores its part and counts. The warp that counts last adds up the parts in the order of the slices. So
    // the bits depend only on the slices. No one waits, so entries need not run at the same time.
    template <int N>
    __device__ __forceinline__ bool add(Accumulators<N>& accumulators, const GemmeshParams& params, bool has_rows,
                                        uint32_t lane) const {
        constexpr int kPieces = N / 8;  // of four accumulators
        // Few pieces leave room for those of several slices.
        constexpr int kSlices = kPieces < AtATime ? AtATime / kPieces : 1;
        constexpr size_t kNext = size_t{Parts} * kPieces * 32;
        if (params.slices == nullptr) return true;
        const uint2 words = __ldg(reinterpret_cast<const uint2*>(params.slices + index) + 1);
        const uint32_t first = words.x;
        const uint32_t slice = words.y & 0xffff;
        const uint32_t count = words.y >> 16;

        // pieces of a warp's lanes lie side by side
        float4* parts = reinterpret_cast<float4*>(params.partials) + (first * kNext + part * (kPieces * 32) + lane);
        if (has_rows) store_part(accumulators, parts + slice * kNext);

        // Every lane's stores come before its count, so the warp that counts last sees all stores.
        __syncwarp();
        uint32_t* arrived = params.arrived + first * Parts + part;
        uint32_t before = 0;
        if (lane == 0) before = ptx::atom_add_acq_rel_gpu(arrived, 1);
        __syncwarp();
        if (__shfl_sync(~0u, before, 0) + 1 < count) return false;
        if (lane == 0) *arrived = 0;
        if (!has_rows) return true;

        if (slice > 0) load_part(accumulators, parts);
#pragma unroll 1
        for (uint32_t of = 1; of < count; of += kSlices) {
            const float4* of_slice = parts + of * kNext;
#pragma unroll
            for (int begin = 0; begin < kPieces; begin += AtATime) {
                float4 next[kSlices][AtATime];
#pragma unroll
                for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
                    for (int i = 0; i < AtATime && begin + i < kPieces; ++i) {
                        const bool is_there = kSlices == 1 || of + slice < count;
                        if (is_there) next[slice][i] = __ldcg(of_slice + slice * kNext + (begin + i) * 32);
                    }
                }
#pragma unroll
                for (int slice = 0; slice < kSlices; ++slice) {
                    if (kSlices > 1 && of + slice >= count) break;
#pragma unroll
                    for (int i = 0; i < AtATime && begin + i < kPieces; ++i) {
                        float* d = &accumulators.d[4 * (begin + i)];
                        d[0] += next[slice][i].x;
                        d[1] += next[slice][i].y;
                        d[2] += next[slice][i].z;
                        d[3] += next[slice][i].w;
                    }
                }
            }
        }
        return true;
    }

private:
    // One lane: loads its pieces of an entry's part.
    template <int N>
    __device__ static __forceinline__ void load_part(Accumulators<N>& accumulators, const float4* part) {
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
            const float4 sums = __ldcg(part + i * 32);
            float* d = &accumulators.d[4 * i];
            d[0] = sums.x;
            d[1] = sums.y;
            d[2] = sums.z;
            d[3] = sums.w;
        }
    }

    // One lane: stores its pieces of its entry's part.
    template <int N>
    __device__ static __forceinline__ void store_part(const Accumulators<N>& accumulators, float4* part) {
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
            const float* d = &accumulators.d[4 * i];
            __stcg(part + i * 32, float4{d[0], d[1], d[2], d[3]});
        }
    }
};

}  // namespace gemmesh
