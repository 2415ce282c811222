// The ring of stages between the producers and the consumers.
#pragma once

#include "ptx.cuh"

namespace gemmesh {

// Waits until the phase of this parity is complete.
__device__ __forceinline__ void wait_phase(ptx::SharedAddress barrier, uint32_t parity) {
    while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
    }
}

// A value that one thread of a CTA finds out once, for all threads.
template <class T>
struct Published {
    T value;
    uint64_t there;

    // One thread; as Pipeline::init.
    __device__ void init() { ptx::mbarrier_init(&there, 1); }

    __device__ void publish(const T& found) {
        value = found;
        ptx::mbarrier_arrive(&there);
    }

    // Waits for it.
    __device__ const T& get() {
        wait_phase(&there, 0);
        return value;
    }
};

// A place in the ring. The parity changes with every turn: it names the phase of the stage's barriers.
template <int Stages>
struct RingPosition {
    uint32_t stage = 0;
    uint32_t parity = 0;

    __device__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            parity ^= 1;
        }
    }

    // Passes over `count` places.
    __device__ void skip(uint32_t count) {
        const uint32_t to = stage + count;
        stage = to % Stages;
        parity ^= to / Stages % 2;
    }
};

// One warp for each operand. A step takes a producer longer than the tensor cores need for a small tile, and the one
// for `b` need not wait for rows of `a`.
constexpr int kProducers = 2;

// Two barriers a stage. `full` completes when both producers have announced their bytes and all of them are there.
// `empty` completes when every warp that multiplies the tile has read the stage, in every CTA that this CTA writes to.
template <int Stages, class InCluster>
struct Pipeline {
    uint64_t full[Stages];
    uint64_t empty[Stages];

    // One thread; before a fence for the barriers, and the CTAs of the cluster must meet before anyone uses them.
    __device__ void init(uint32_t warps, uint32_t copies = 0) {
        for (int stage = 0; stage < Stages; ++stage) {
            ptx::mbarrier_init(&full[stage], kProducers + copies);
            ptx::mbarrier_init(&empty[stage], warps * InCluster::kWriters);
        }
    }

    // Consumer: waits until the stage's bytes are there.
    __device__ void wait_full(const RingPosition<Stages>& at) { wait_phase(&full[at.stage], at.parity); }

    // Consumer, whole warp: this warp of CTA `cta` has read the stage. With shared loads the producers of the CTAs in
    // the same row and column of the cluster write here, so each of them is told. All of the warp's reads are over: its
    // wgmmas are complete, and what it loaded with ldmatrix has been used. So the arrival need not order memory for a
    // neighbour, and the default scope, the CTA, is enough.
    __device__ void release(uint32_t stage, uint32_t lane, uint32_t cta) {
        if constexpr (InCluster::kWriters == 1) {
            if (lane == 0) ptx::mbarrier_arrive(&empty[stage]);
        } else {
            if (lane >= InCluster::kWriters) return;
            const uint32_t writer = InCluster::writer(lane, cta);
            ptx::mbarrier_arrive_cluster(ptx::mapa(ptx::shared_address(&empty[stage]), writer));
        }
    }
};

}  // namespace gemmesh
