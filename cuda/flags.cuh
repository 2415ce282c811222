// Waiting for rows that a copy engine is still bringing, and giving up on them.
#pragma once

#include "abi.h"
#include "ptx.cuh"

namespace gemmesh {

// The view that one thread, the producer, has of the flags.
//
// Giving up is for good and never by trap: a thread whose wait passes the deadline records it, sets the abort word and
// waits for nothing more, so the kernel runs through on whatever bytes are there, no barrier is left hanging, and the
// context lives. The output is then declared invalid by the record or by the abort word.
class FlagWaiter {
public:
    __device__ explicit FlagWaiter(const GemmeshParams& params) : params_(params) {}

    // Returns when every flag of the tile has reached the epoch, or has been given up. `index` is the tile's place in
    // the table.
    __device__ void wait(const GemmeshTile& tile, uint32_t index) {
        // Neighbours in the table mostly wait for the same flags, and an epoch once reached stays reached.
        if (tile.flag_begin == begin_ && tile.flag_end == end_) return;
        for (uint32_t flag = tile.flag_begin; flag < tile.flag_end && waiting_; ++flag) {
            waiting_ = arrives(flag, index);
        }
        begin_ = tile.flag_begin;
        end_ = tile.flag_end;
        // The acquire ordered the rows before this thread's own accesses. The loads that follow are made by the async
        // proxy, which only this fence puts after them.
        ptx::fence_proxy_async();
    }

private:
    __device__ bool arrives(uint32_t flag, uint32_t tile) {
        uint32_t seen = ptx::ld_acquire_sys(params_.flags + flag);
        if (reached(seen)) return true;

        const uint64_t begin = ptx::globaltimer();
        while (true) {
            seen = ptx::ld_acquire_sys(params_.flags + flag);
            if (reached(seen)) return true;
            if (ptx::ld_relaxed_sys(params_.abort) != 0) return false;
            const uint64_t waited = ptx::globaltimer() - begin;
            if (waited > params_.deadline_ns) {
                record(flag, seen, waited, tile);
                return false;
            }
            ptx::nanosleep(kPollNanoseconds);
        }
    }

    // Epochs wrap around, so they are compared as distances.
    __device__ bool reached(uint32_t seen) const { return static_cast<int32_t>(seen - params_.epoch) >= 0; }

    __device__ void record(uint32_t flag, uint32_t seen, uint64_t waited, uint32_t tile) {
        GemmeshFault* fault = params_.fault;
        const uint32_t old = ptx::atom_cas_relaxed_sys(&fault->state, GEMMESH_FAULT_NONE, GEMMESH_FAULT_CLAIMED);
        if (old == GEMMESH_FAULT_NONE) {
            fault->flag = flag;
            fault->expected = params_.epoch;
            fault->seen = seen;
            fault->waited_ns = waited;
            fault->tile = tile;
            fault->cta = blockIdx.x;
            // The host may be reading: whoever sees the mark sees the record.
            ptx::st_release_sys(&fault->state, GEMMESH_FAULT_RECORDED);
        }
        ptx::st_release_sys(params_.abort, 1);
    }

    // Short against the microseconds between two chunks, long enough to keep the other CTAs' polls off the L2 cache.
    static constexpr uint32_t kPollNanoseconds = 64;

    const GemmeshParams& params_;
    uint32_t begin_ = 0;  // the last range waited for
    uint32_t end_ = 0;
    bool waiting_ = true;
};

}  // namespace gemmesh
