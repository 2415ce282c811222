// Adding up what the CTAs of a cluster that share a tile have each made of their part of K.
#pragma once

#include "abi.h"
#include "pipeline.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace gemmesh {

// Every CTA but the first sends its accumulators to the first one's shared memory. They are added in the order of the
// CTAs, so a result does not depend on which of them is early.
template <int Split, int N, int Consumers>
struct SplitSum {
    static constexpr uint32_t kThreads = 128;  // of a consumer
    static constexpr uint32_t kPieces = N / 2 / 4;  // a thread's accumulators, by four

    // A thread sends to the thread of the same number, whose accumulators are of the same places of the tile.
    float4 parts[Split - 1][Consumers][kPieces][kThreads];
    uint64_t full;   // in the first CTA: all parts of a tile are there
    uint64_t empty;  // in the others: they have been read

    // One thread; as Pipeline::init.
    __device__ void init() {
        ptx::mbarrier_init(&full, 1);
        ptx::mbarrier_init(&empty, Consumers * kThreads / 32);
    }

    // One consumer: returns whether this CTA has the sums, to be stored. `turn` counts the tiles.
    template <class Element>
    __device__ bool gather(Accumulators<Element, N>& accumulators, uint32_t turn, uint32_t rank, uint32_t consumer) {
        const uint32_t thread = threadIdx.x % kThreads;
        const uint32_t parity = turn % 2;
        if (rank > 0) {
            // wait until the parts of the tile before have been read
            wait_phase(&empty, parity ^ 1);
            const uint32_t barrier = ptx::mapa(ptx::shared_address(&full), 0);
#pragma unroll
            for (uint32_t i = 0; i < kPieces; ++i) {
                const float* d = &accumulators.d[4 * i];
                const uint32_t to = ptx::mapa(ptx::shared_address(&parts[rank - 1][consumer][i][thread]), 0);
                ptx::st_async(to, {d[0], d[1], d[2], d[3]}, barrier);
            }
            return false;
        }

        if (consumer == 0 && thread == 0) ptx::mbarrier_arrive_expect_tx(&full, sizeof(parts));
        wait_phase(&full, parity);
        for (uint32_t other = 0; other < Split - 1; ++other) {
#pragma unroll
            for (uint32_t i = 0; i < kPieces; ++i) {
                const float4 part = parts[other][consumer][i][thread];
                float* d = &accumulators.d[4 * i];
                d[0] += part.x;
                d[1] += part.y;
                d[2] += part.z;
                d[3] += part.w;
            }
        }
        // every lane has read
        __syncwarp();
        const uint32_t lane = thread % 32;
        if (lane > 0 && lane < Split) ptx::mbarrier_arrive_cluster(ptx::mapa(ptx::shared_address(&empty), lane));
        return true;
    }
};

// A CTA that has all of K has the sums already.
template <int N, int Consumers>
struct SplitSum<1, N, Consumers> {
    __device__ void init() {}

    template <class Element>
    __device__ bool gather(Accumulators<Element, N>&, uint32_t, uint32_t, uint32_t) {
        return true;
    }
};

}  // namespace gemmesh
