// The order in which consumers multiply.
#pragma once

#include "config.cuh"
#include "ptx.cuh"

namespace gemmesh {

// With pingpong, the order in which consumers multiply. A consumer that begins knows that the other has seen all
// stages before. So each wait for a stage is for this phase of its barrier or for the next one.
template <class C>
struct Turn {
    uint32_t consumer;

    // The first turn is consumer 0's.
    __device__ explicit Turn(uint32_t consumer) : consumer(consumer) {
        if (C::kPingpong && consumer == 1) end();
    }

    __device__ bool is_of(uint32_t turn) const { return !C::kPingpong || turn % kConsumers == consumer; }

    __device__ void begin() const {
        if constexpr (C::kPingpong) ptx::barrier_sync<kThreads>(kTurnBarrier + consumer);
    }

    // The next tile's products are issued while the tensor cores end this tile's.
    __device__ void end() const {
        if constexpr (C::kPingpong) ptx::barrier_arrive<kThreads>(kTurnBarrier + (1 - consumer));
    }

    static constexpr int kThreads = kConsumers * kWarpgroupThreads;
};

}  // namespace gemmesh
