// Waits for words that peers or copy engines write, and gives up at the deadline.
#pragma once

#include <family.cuh>

#include "../abi.h"
#include "../common/ptx.cuh"

namespace gemmesh {

// Epochs wrap around, so they are compared as distances.
__device__ __forceinline__ bool reached(uint32_t seen, uint32_t epoch) {
    return static_cast<int32_t>(seen - epoch) >= 0;
}

// Between two looks. This is short compared with the microseconds between two chunks, and long enough to keep other CTAs'
// polls off the L2 cache.
constexpr uint32_t kPollNanoseconds = 64;

// Records the wait that was in vain, and tells all kernels on this GPU to stop waiting.
__device__ inline void give_up(const GemmeshParams& params, uint32_t flag, uint32_t peer, uint32_t epoch,
                               uint32_t seen, uint64_t waited) {
    GemmeshFault* fault = params.fault;
    const uint32_t old = ptx::atom_cas_relaxed_sys(&fault->state, GEMMESH_FAULT_NONE, GEMMESH_FAULT_CLAIMED);
    if (old == GEMMESH_FAULT_NONE) {
        fault->flag = flag;
        fault->expected = epoch;
        fault->seen = seen;
        fault->waited_ns = waited;
        fault->peer = flag == GEMMESH_READY || flag == GEMMESH_LOW_LATENCY ? peer : params.sources[flag];
        fault->pushed = params.peers.push_epoch != nullptr;
        fault->operation = params.epoch;
        fault->recording = params.recording;
        // The host may be reading. If it sees the mark, it sees the record.
        ptx::st_release_sys(&fault->state, GEMMESH_FAULT_RECORDED);
    }
    ptx::atom_cas_relaxed_sys(params.abort, 0, GEMMESH_GIVEN_UP);
}

// One thread: waits until `look` succeeds, and returns true; or returns false if the wait has been given up. `look`
// returns success and the value that it saw. `flag` is the number of a chunk flag, GEMMESH_READY or
// GEMMESH_LOW_LATENCY. `peer` is the rank that writes the word.
//
// Giving up is final, and never a trap. A thread whose wait passes the deadline records it, sets the abort word and
// waits for nothing more. So the kernel runs through on meaningless bytes, no barrier is left hanging, and the context
// lives. The record or the abort word says that the output is invalid.
template <class Look>
__device__ __forceinline__ bool await_look(const GemmeshParams& params, uint32_t epoch, uint32_t flag, uint32_t peer,
                                           const Look& look) {
    uint32_t seen;
    if (look(seen)) return true;

    const uint64_t begin = ptx::globaltimer();
    while (true) {
        // on its way together with the word
        const uint32_t aborted = ptx::ld_relaxed_sys(params.abort);
        if (look(seen)) return true;
        if (aborted != 0) return false;
        const uint64_t waited = ptx::globaltimer() - begin;
        if (waited > params.deadline_ns) {
            give_up(params, flag, peer, epoch, seen, waited);
            return false;
        }
        ptx::nanosleep(kPollNanoseconds);
    }
}

// One thread: waits until a word has reached the epoch.
__device__ inline bool await(const GemmeshParams& params, const volatile uint32_t* word, uint32_t epoch, uint32_t flag,
                             uint32_t peer = 0) {
    return await_look(params, epoch, flag, peer, [&](uint32_t& seen) {
        seen = ptx::ld_acquire_sys(word);
        return reached(seen, epoch);
    });
}

// The whole warp: the same for a word of each lane that `waits`. All lanes leave together, so the compiler knows that the
// warp has not diverged.
__device__ inline bool await_all(const GemmeshParams& params, bool waits, const volatile uint32_t* word, uint32_t epoch,
                                 uint32_t flag, uint32_t peer) {
    bool is_there = !waits;
    const uint64_t begin = ptx::globaltimer();
    while (true) {
        const uint32_t aborted = ptx::ld_relaxed_sys(params.abort);
        uint32_t seen = epoch;
        if (!is_there) seen = ptx::ld_acquire_sys(word);
        is_there = reached(seen, epoch);
        if (__all_sync(~0u, is_there)) return true;
        const uint64_t waited = ptx::globaltimer() - begin;
        const bool is_late = waited > params.deadline_ns;
        if (is_late && !is_there) give_up(params, flag, peer, epoch, seen, waited);
        if (__any_sync(~0u, is_late || aborted != 0)) return is_there;
        ptx::nanosleep(kPollNanoseconds);
    }
}

// The chunk flags as the producer of `a` sees them.
class ChunkFlags {
public:
    __device__ ChunkFlags(const GemmeshParams& params, uint32_t lane) : params_(params), lane_(lane) {}

    // The whole warp: waits until every flag of the tile, but a deferred one, has reached the epoch or has been given
    // up.
    __device__ void wait(const GemmeshTile& tile, uint32_t epoch) {
        // Neighbours in the table mostly wait for the same flags, and an epoch once reached stays reached.
        if (tile.flag_begin == begin_ && tile.flag_end == end_) return;
        begin_ = tile.flag_begin;
        end_ = tile.flag_end;
        wait(begin_, end_, epoch);
    }

    // Waits for these flags. Each lane waits for some of them, so one trip to memory reads 32 flags.
    __device__ void wait(uint32_t begin, uint32_t end, uint32_t epoch) {
        for (uint32_t flag = begin + lane_; flag < end; flag += 32) {
            if (flag != params_.deferred_flag) wait(flag, epoch);
        }
        // What the lanes have acquired comes before what one of them does next.
        __syncwarp();
        family::fence_loads();
    }

    // The step through K of the tile before which `wait_deferred` must be called. No step has the number if it need not
    // be called.
    __device__ uint32_t deferred_step(const GemmeshTile& tile) const {
        const bool needed = tile.flag_begin <= params_.deferred_flag && params_.deferred_flag < tile.flag_end;
        return needed ? params_.deferred_step : UINT32_MAX;
    }

    // One lane: waits until the deferred flag has reached the epoch or has been given up.
    __device__ void wait_deferred(uint32_t epoch) {
        wait(params_.deferred_flag, epoch);
        family::fence_loads();
    }

private:
    // The acquire orders the rows before this thread's own accesses. The loads that follow need the family's fence too.
    __device__ void wait(uint32_t flag, uint32_t epoch) {
        waiting_ = waiting_ && await(params_, params_.flags + flag, epoch, flag);
    }

    const GemmeshParams& params_;
    uint32_t lane_;
    uint32_t begin_ = 0;  // the last range waited for
    uint32_t end_ = 0;
    bool waiting_ = true;
};

}  // namespace gemmesh
