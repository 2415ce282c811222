// Adds up the parts of K of the CTAs of a cluster that share a tile.
#pragma once

#include "../abi.h"
#include "pipeline.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace gemmesh {

// Each CTA adds up and stores some warps' rows of the tile: CTA w / kOwn has the rows of warp w. It sends its part of
// the other rows to their CTAs' shared memory. The parts of K are always added in their order. So a row's bits depend
// neither on its place in the tile nor on which CTA is early.
template <int Split, int N, int Warps>
struct SplitSum {
    static constexpr uint32_t kOwn = Warps / Split;
    static constexpr uint32_t kPieces = N / 2 / 4;  // a thread's accumulators, by four
    static_assert(Warps % Split == 0);

    // The parts that the other CTAs send, by sender; the senders' numbers skip this CTA. A thread sends to the thread
    // of the same number, whose accumulators have the same places in the tile.
    float4 parts[Split - 1][kOwn][kPieces][32];
    uint64_t full;   // all parts of a tile are there
    uint64_t empty;  // what this CTA has sent of a tile has been read

    // One thread; as Pipeline::init.
    __device__ void init() {
        ptx::mbarrier_init(&full, 1);
        ptx::mbarrier_init(&empty, (Split - 1) * kOwn);
    }

    // One warp of the consumers: returns true if it has the sums of its rows and is to store them. `turn` counts the
    // tiles. `warp` is its number as `ConsumerWarp::number` gives it.
    __device__ bool gather(Accumulators<N>& accumulators, uint32_t turn, uint32_t cta, uint32_t warp,
                           uint32_t lane) {
        const uint32_t parity = turn % 2;
        const uint32_t owner = warp / kOwn;
        if (owner != cta) {
            // wait until the parts of the tile before have been read
            wait_phase(&empty, parity ^ 1);
            const uint32_t barrier = ptx::mapa(ptx::shared_address(&full), owner);
            const uint32_t sender = cta < owner ? cta : cta - 1;
            const uint32_t to = ptx::mapa(ptx::shared_address(&parts[sender][warp % kOwn][0][lane]), owner);
#pragma unroll
            for (uint32_t i = 0; i < kPieces; ++i) {
                const float* d = &accumulators.d[4 * i];
                ptx::st_async(to + i * sizeof(parts[0][0][0]), {d[0], d[1], d[2], d[3]}, barrier);
            }
            return false;
        }

        if (warp % kOwn == 0 && lane == 0) ptx::mbarrier_arrive_expect_tx(&full, sizeof(parts));
        wait_phase(&full, parity);
#pragma unroll
        for (uint32_t i = 0; i < kPieces; ++i) {
            float* d = &accumulators.d[4 * i];
            const float4 own = {d[0], d[1], d[2], d[3]};
            const auto part = [&](uint32_t of) {
                return of == cta ? own : parts[of < cta ? of : of - 1][warp % kOwn][i][lane];
            };
            float4 sum = part(0);
#pragma unroll
            for (uint32_t of = 1; of < Split; ++of) {
                const float4 next = part(of);
                sum = {sum.x + next.x, sum.y + next.y, sum.z + next.z, sum.w + next.w};
            }
            d[0] = sum.x;
            d[1] = sum.y;
            d[2] = sum.z;
            d[3] = sum.w;
        }
        // every lane has read
        __syncwarp();
        if (lane < Split - 1) {
            const uint32_t sender = lane < cta ? lane : lane + 1;
            ptx::mbarrier_arrive_cluster(ptx::mapa(ptx::shared_address(&empty), sender));
        }
        return true;
    }
};

// A CTA that has all of K has the sums already.
template <int N, int Warps>
struct SplitSum<1, N, Warps> {
    __device__ void init() {}

    __device__ bool gather(Accumulators<N>&, uint32_t, uint32_t, uint32_t, uint32_t) {
        return true;
    }
};

}  // namespace gemmesh
