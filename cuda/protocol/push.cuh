// Rows that their owner pushes to the peers. Either its copy engine pushes them, and the kernel tells it when to begin.
// Or warps of the kernel push them that have nothing else to do.
//
// Rank r, epoch e. When the kernel begins, the rows that r gathered before have been used. So r writes ready[r] = e at
// every peer. When a peer has written its `ready` here, r's rows are written into the peer's memory, chunk by chunk,
// and the peer's chunk flag after each. The peer's tiles wait for these flags, for all of them by the end of the
// kernel. So nothing is on its way to a rank whose kernel has ended, and its next kernel may write `ready`. r's own
// rows are free when its kernel and its copies have ended, because no peer reads them.
//
// Some of a kernel's CTAs may have to wait for a multiprocessor that a different kernel holds. So no part of this
// belongs to a certain CTA. The CTA that comes first tells the peers, and the CTAs that run take tasks from a counter.
// One running CTA is enough for the peers to get all rows. If CTAs come late, their tiles delay only their own rank.
// Partial sums for the peers are the exception, because the tiles of a late CTA reach the peers late.
#pragma once

#include "../abi.h"
#include "../common/ptx.cuh"
#include "flags.cuh"

namespace gemmesh {

// An operation as a CTA finds it.
struct Entrance {
    uint32_t epoch;
    uint32_t low_latency;  // how many operations before this one used low-latency areas
    bool first;       // whether no CTA has come before this one
};

// One thread of each CTA.
__device__ inline Entrance enter_push(const GemmeshParams& params) {
    GemmeshPushEpoch* push_epoch = params.peers.push_epoch;
    if (push_epoch == nullptr) return {params.epoch, 0, false};
    // three trips to memory at once
    const uint32_t before = ptx::atom_add_relaxed_gpu(&push_epoch->entered, 1);
    const uint32_t low_latency = ptx::ld_relaxed_sys(&push_epoch->low_latency);
    return {ptx::ld_relaxed_sys(&push_epoch->epoch) + 1, low_latency, before == 0};
}

// One thread of each CTA. It is called when the CTA's warps take no more tasks, and when the rows or addends of all its
// tiles have come or have been given up. The last CTA to leave moves the count on for the next kernels, because all
// CTAs have read it.
__device__ inline void leave_push(const GemmeshParams& params, uint32_t epoch) {
    const GemmeshPeers& peers = params.peers;
    if (peers.push_epoch == nullptr) return;
    if (ptx::atom_add_acq_rel_gpu(&peers.push_epoch->left, 1) + 1 < gridDim.x) return;
    peers.push_epoch->taken = 0;
    peers.push_epoch->left = 0;
    if (params.low_latency.share != 0) peers.push_epoch->low_latency += 1;
    // `entered` tells the host whether `epoch` is stale; both are written by one store. Nothing is released, because
    // the next kernel reads them when this one has ended, and the host reads nothing after these words.
    ptx::st_relaxed_sys_pair(&peers.push_epoch->epoch, epoch, 0);
    if (peers.completed != nullptr) ptx::st_relaxed_sys(peers.completed, params.epoch);
}

// One warp: waits until the kernel of every peer of this host runs. Returns false if the wait has been given up.
__device__ inline bool await_peers(const GemmeshParams& params, uint32_t epoch, uint32_t lane) {
    const GemmeshPeers& peers = params.peers;
    const GemmeshMailbox* own = peers.mailboxes[peers.rank];
    bool ready = true;
    for (uint32_t peer = lane; peer < peers.world; peer += 32) {
        if (peers.mailboxes[peer] == nullptr) continue;
        ready = ready && await(params, &own->ready[peer], epoch, GEMMESH_READY, peer);
    }
    const bool all_ready = __all_sync(~0u, ready);
    // A vote orders no memory: what the lanes have acquired comes before what lane 0 releases.
    __syncwarp();
    return all_ready;
}

// One warp of the first CTA: tells the peers, and the copy engine if it is to push.
__device__ inline void announce(const GemmeshParams& params, uint32_t epoch, uint32_t lane) {
    const GemmeshPeers& peers = params.peers;
    if (lane == 0 && peers.started != nullptr) ptx::st_relaxed_sys(peers.started, params.epoch);

    GemmeshMailbox* own = peers.mailboxes[peers.rank];
    if (epoch % GEMMESH_REFRESH == 0) {
        // Peers write this rank's flags only after they know that it is ready.
        for (uint32_t flag = lane; flag < GEMMESH_MAX_FLAGS; flag += 32) own->chunk[flag] = epoch - 1;
        __syncwarp();
        ptx::fence_acq_rel_sys();
    }
    // There is no release, because only kernels that have ended must come before this. Their reads are over, and what
    // they wrote here is in this GPU's memory.
    for (uint32_t peer = lane; peer < peers.world; peer += 32) {
        if (peers.mailboxes[peer] == nullptr) continue;
        ptx::st_relaxed_sys(&peers.mailboxes[peer]->ready[peers.rank], epoch);
    }
    if (peers.copies == 0) return;

    const bool all_ready = await_peers(params, epoch, lane);
    if (lane != 0) return;
    if (all_ready) {
        peers.push_epoch->current = epoch;
    } else if (ptx::ld_relaxed_sys(params.abort) != GEMMESH_GROUP_FAILED) {
        return;
    }
    // After a failure too, because the copies of a graph wait at each of its replays, and the host does not know how
    // many there are.
    ptx::st_release_sys(&peers.push_epoch->permit, 1);
}

__device__ __forceinline__ GemmeshCopyTask load_task(const GemmeshCopyTask* at) {
    union {
        uint4 words[2];
        GemmeshCopyTask task;
    } loaded;
    loaded.words[0] = __ldg(reinterpret_cast<const uint4*>(at));
    loaded.words[1] = __ldg(reinterpret_cast<const uint4*>(at) + 1);
    return loaded.task;
}

// The threads of a CTA that push. Together they take one task at a time.
struct Pushers {
    static constexpr uint32_t kThreads = 64;
    static constexpr int kBarrier = 2;
    uint32_t index;  // of the task

    // All of them have reached this point.
    __device__ static void meet() { ptx::barrier_sync<kBarrier, kThreads>(); }

    // All of them have reached this point. Returns true if all say so.
    __device__ static bool meet_all(bool says) { return ptx::barrier_red_and<kBarrier, kThreads>(says); }
};

// Bytes in the registers of a CTA's pushers, 16 a thread at a time.
struct Words {
    static constexpr uint32_t kInFlight = 4;
    static constexpr uint32_t kStep = Pushers::kThreads * sizeof(uint4);
    static constexpr uint32_t kBytes = kInFlight * kStep;
    uint4 words[kInFlight];

    // From `at` on, up to byte `end`. `thread` counts the pushers.
    __device__ __forceinline__ void load(const uint8_t* from, uint32_t at, uint32_t end, uint32_t thread) {
        at += thread * sizeof(uint4);
#pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i) {
            if (at + i * kStep < end) words[i] = ptx::ld_global_no_allocate(from + at + i * kStep);
        }
    }

    __device__ __forceinline__ void store(uint8_t* to, uint32_t at, uint32_t end, uint32_t thread) const {
        at += thread * sizeof(uint4);
#pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i) {
            if (at + i * kStep < end) ptx::st_global(to + at + i * kStep, words[i]);
        }
    }
};

// The pushers of a CTA, `thread` among them: push task after task, each with its flag. `epoch` returns the operation's
// epoch, and may wait for it. Meanwhile the first bytes are being read.
template <class Epoch>
__device__ __forceinline__ void push(const GemmeshParams& params, Pushers& shared, const Epoch& epoch, uint32_t thread) {
    const GemmeshPeers& peers = params.peers;
    if (peers.task_count == 0) return;
    while (true) {
        // take the next task that no one has taken
        if (thread == 0) shared.index = ptx::atom_add_relaxed_gpu(&peers.push_epoch->taken, 1);
        Pushers::meet();
        const uint32_t index = shared.index;
        if (index >= peers.task_count) return;
        const GemmeshCopyTask task = load_task(peers.tasks + index);
        const uint8_t* from = static_cast<const uint8_t*>(peers.rows[peers.rank]) + task.offset;
        uint8_t* to = static_cast<uint8_t*>(peers.rows[task.peer]) + task.offset;
        Words words;
        words.load(from, 0, task.bytes, thread);

        // Wait until the peer's memory may be written. If a thread has given up, it stores nothing, and the flag is not
        // written.
        const uint32_t* ready = &peers.mailboxes[peers.rank]->ready[task.peer];
        const bool is_ready = await(params, ready, epoch(), GEMMESH_READY, task.peer);
        if (is_ready) words.store(to, 0, task.bytes, thread);
        // the rest of the rows, and then those beside them
        uint32_t at = Words::kBytes;
        uint32_t bytes = task.bytes;
#pragma unroll 1
        for (uint32_t matrix = 0; is_ready && matrix < 2; ++matrix) {
#pragma unroll 1
            for (; at < bytes; at += Words::kBytes) {
                words.load(from, at, bytes, thread);
                words.store(to, at, bytes, thread);
            }
            // loaded again, because there are no registers to keep it
            const GemmeshCopyTask same = load_task(peers.tasks + shared.index);
            from = static_cast<const uint8_t*>(peers.beside[peers.rank]) + same.beside_offset;
            to = static_cast<uint8_t*>(peers.beside[same.peer]) + same.beside_offset;
            bytes = same.beside_bytes;
            at = 0;
        }

        // The release is cumulative. It covers the other threads' stores, which the barrier has shown to this thread.
        const bool is_there = Pushers::meet_all(is_ready);
        if (thread == 0 && is_there) ptx::st_release_sys(&peers.mailboxes[task.peer]->chunk[task.flag], epoch());
    }
}

}  // namespace gemmesh
