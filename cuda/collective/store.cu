// A kernel that does collectives without a product, for rows so few that a copy engine's start counts. It is a module
// of its own.
//
// The CTA that comes first tells the peers that this rank is ready. When all peers are ready, each CTA stores its part
// of this rank's rows, task after task, with the peer's chunk flag after each. Then it waits for all that comes to this
// rank, and adds up its part. push.cuh says what holds of epochs, and of kernels that must be able to run at the same
// time. Here all CTAs of a grid are needed.
//
// Rows that fit in low-latency areas go there instead. Then no one waits for `ready` first, and no flag follows
// (low_latency.cuh).

#include "../abi.h"
#include "../common/ptx.cuh"
#include "../protocol/flags.cuh"
#include "../protocol/low_latency.cuh"
#include "../protocol/push.cuh"
#include "reduce.cuh"

namespace gemmesh {
namespace {

__device__ __forceinline__ GemmeshSend load_send(const GemmeshSend* at) {
    union {
        uint4 words[2];
        GemmeshSend send;
    } loaded;
    loaded.words[0] = __ldg(reinterpret_cast<const uint4*>(at));
    loaded.words[1] = __ldg(reinterpret_cast<const uint4*>(at) + 1);
    return loaded.send;
}

// The whole CTA stores the rows of a task.
__device__ void store_rows(const GemmeshParams& params, const GemmeshSends& sends, const GemmeshSend& send) {
    // Several loads are under way before the first store.
    constexpr uint32_t kUnroll = 4;
    const char* from = static_cast<const char*>(sends.from) + send.from_row * sends.from_pitch + send.column;
    char* to = static_cast<char*>(params.peers.rows[send.peer]) + send.to_row * sends.to_pitch + send.column;
    const uint32_t pieces = send.width / 16;
    const uint64_t all = uint64_t(pieces) * send.rows;
    const bool dense = sends.from_pitch == send.width && sends.to_pitch == send.width;
    const auto offset = [&](uint64_t index, uint64_t pitch) {
        return dense ? index * 16 : index / pieces * pitch + index % pieces * 16;
    };
    for (uint64_t begin = threadIdx.x; begin < all; begin += uint64_t(kUnroll) * blockDim.x) {
        uint4 loaded[kUnroll];
        for (uint32_t i = 0; i < kUnroll; ++i) {
            const uint64_t index = begin + uint64_t(i) * blockDim.x;
            if (index < all) loaded[i] = *reinterpret_cast<const uint4*>(from + offset(index, sends.from_pitch));
        }
        for (uint32_t i = 0; i < kUnroll; ++i) {
            const uint64_t index = begin + uint64_t(i) * blockDim.x;
            if (index < all) *reinterpret_cast<uint4*>(to + offset(index, sends.to_pitch)) = loaded[i];
        }
    }
}

// The whole CTA sends the rows of a task to the peer's low-latency area.
__device__ void send_rows(const GemmeshSends& sends, const GemmeshSend& send, const LowLatencyShare& share) {
    const char* from = static_cast<const char*>(sends.from) + send.from_row * sends.from_pitch + send.column;
    const uint32_t pieces = send.width / 16;
    for (uint64_t index = threadIdx.x; index < uint64_t(pieces) * send.rows; index += blockDim.x) {
        const uint64_t row = index / pieces;
        const uint32_t piece = index % pieces;
        const uint4 data = *reinterpret_cast<const uint4*>(from + row * sends.from_pitch + piece * 16);
        share.send((send.area_row + row) * sends.pieces + send.column / 16 + piece, data);
    }
}

// The whole CTA takes rows from its low-latency areas to their places.
__device__ void take_rows(const GemmeshParams& params, const GemmeshSends& sends, const GemmeshSend& arrival,
                          const LowLatencyShare& share, uint32_t epoch) {
    char* to = static_cast<char*>(params.peers.rows[params.peers.rank]) + arrival.to_row * sends.to_pitch + arrival.column;
    const uint32_t pieces = arrival.width / 16;
    for (uint64_t index = threadIdx.x; index < uint64_t(pieces) * arrival.rows; index += blockDim.x) {
        const uint64_t row = index / pieces;
        const uint32_t piece = index % pieces;
        const uint64_t unit = (arrival.area_row + row) * sends.pieces + arrival.column / 16 + piece;
        *reinterpret_cast<uint4*>(to + row * sends.to_pitch + piece * 16) = share.take(params, epoch, arrival.peer, unit);
    }
}

// By low-latency areas.
template <class Element>
__device__ void move_few_rows(const GemmeshParams& params, const GemmeshSends& sends, const GemmeshReduction& reduction,
                                 const Entrance& entrance) {
    const uint32_t rank = params.peers.rank;
    const auto share = [&](uint32_t to, uint32_t from) {
        return LowLatencyShare(params.low_latency, entrance, to, from, params.peers.world);
    };
    for (uint32_t task = blockIdx.x; task < sends.count; task += gridDim.x) {
        const GemmeshSend send = load_send(sends.sends + task);
        if (send.peer == rank) {
            store_rows(params, sends, send);
        } else {
            send_rows(sends, send, share(send.peer, rank));
        }
    }
    // All lanes of the warp send before any lane waits. Otherwise the peers' warps would wait for this one, and it for
    // them.
    __syncwarp();
    if (reduction.count > 0) {
        // There is an addend of each rank, in their order.
        reduce<Element>(reduction, [&](uint32_t from, uint64_t row, uint32_t column) {
            if (from == rank) return load_addend<Element>(reduction, from, row, column);
            const uint64_t piece = row * sends.pieces + column / Piece<Element>::kLength;
            const uint4 come = share(rank, from).take(params, entrance.epoch, from, piece);
            return *reinterpret_cast<const Piece<Element>*>(&come);
        });
        return;
    }
    for (uint32_t index = blockIdx.x; index < sends.flags; index += gridDim.x) {
        const GemmeshSend arrival = load_send(sends.sends + sends.count + index);
        if (arrival.peer != rank) take_rows(params, sends, arrival, share(rank, arrival.peer), entrance.epoch);
    }
}

template <class Element>
__device__ void move_rows(const GemmeshParams& params, const GemmeshSends& sends, const GemmeshReduction& reduction) {
    __shared__ Entrance entrance;
    __shared__ bool all_ready;
    const uint32_t lane = threadIdx.x % 32;
    if (threadIdx.x == 0) entrance = enter_push(params);
    __syncthreads();
    const uint32_t epoch = entrance.epoch;
    const bool is_low_latency = params.low_latency.share != 0;
    if (threadIdx.x < 32) {
        if (entrance.first) announce(params, epoch, lane);
        const bool ready = is_low_latency || await_peers(params, epoch, lane);
        if (lane == 0) all_ready = ready;
    }
    if (is_low_latency) {
        move_few_rows<Element>(params, sends, reduction, entrance);
        if (threadIdx.x < 32) await_peers(params, epoch, lane);
        if (threadIdx.x == 0) leave_push(params, epoch);
        return;
    }
    __syncthreads();
    // After giving up, results are void, and peers that are not ready may still read what would be overwritten.
    if (all_ready) {
        for (uint32_t task = blockIdx.x; task < sends.count; task += gridDim.x) {
            const GemmeshSend send = load_send(sends.sends + task);
            store_rows(params, sends, send);
            // The threads' stores come before the barrier, and so before what one of them releases after it.
            __syncthreads();
            if (threadIdx.x == 0) {
                ptx::st_release_sys(&params.peers.mailboxes[send.peer]->chunk[send.flag], epoch);
            }
        }
    }
    bool waiting = all_ready;
    for (uint32_t flag = threadIdx.x; flag < sends.flags; flag += blockDim.x) {
        waiting = waiting && await(params, params.flags + flag, epoch, flag);
    }
    // All threads read after what each thread has acquired.
    __syncthreads();
    if (reduction.count > 0) reduce<Element>(reduction);
    if (threadIdx.x == 0) leave_push(params, epoch);
}

}  // namespace
}  // namespace gemmesh

#define GEMMESH_COLLECTIVE(name, element)                                                                              \
    extern "C" __global__ void __launch_bounds__(GEMMESH_COLLECTIVE_THREADS, 2)                                        \
        name(const __grid_constant__ GemmeshParams params, const __grid_constant__ GemmeshSends sends,               \
             const __grid_constant__ GemmeshReduction reduction) {                                                   \
        gemmesh::move_rows<element>(params, sends, reduction);                                                        \
    }

GEMMESH_COLLECTIVE(gemmesh_collective_bf16, __nv_bfloat16)
GEMMESH_COLLECTIVE(gemmesh_collective_f16, __half)
GEMMESH_COLLECTIVE(gemmesh_collective_f32, float)
