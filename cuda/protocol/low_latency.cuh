// Low-latency areas, by which few rows go from rank to rank.
#pragma once

#include "../abi.h"
#include "../common/ptx.cuh"
#include "flags.cuh"
#include "push.cuh"

namespace gemmesh {

// One rank's share of another rank's low-latency area.
//
// No flag follows the data. A unit is two words of 64 bits, each of which has 32 bits of data and a tag, and is written
// at once. So a reader that sees the tag sees the data. This is NCCL's LL protocol. It takes twice the bytes, and saves
// a fence and a trip.
//
// No rank says first that an area may be written. Areas have two halves, which operations use by turns. A kernel ends
// only after every peer's kernel of the same operation has begun. By then every peer's kernel of the last operation
// before it that used areas has ended. That operation read the half that the next operation writes. A reader clears
// each word that it has read, so a word never has the tag of a different operation.
struct LowLatencyShare {
    ulonglong2* units;
    uint32_t tag;

    __device__ LowLatencyShare(const GemmeshLowLatency& low_latency, const Entrance& entrance, uint32_t to, uint32_t from, uint32_t world)
        : units(static_cast<ulonglong2*>(low_latency.areas[to]) + (entrance.low_latency % 2 * world + from) * low_latency.share),
          // not zero, which is what has been cleared
          tag(entrance.low_latency * 2 + 1) {}

    __device__ uint64_t tagged(uint32_t data) const { return uint64_t{tag} << 32 | data; }

    __device__ bool is_tagged(const ulonglong2& unit) const { return unit.x >> 32 == tag && unit.y >> 32 == tag; }

    // A piece of 16 bytes is two units.
    __device__ void send(uint64_t piece, const uint4& data) const {
        ptx::st_relaxed_sys_v2(units + 2 * piece, ulonglong2{tagged(data.x), tagged(data.y)});
        ptx::st_relaxed_sys_v2(units + 2 * piece + 1, ulonglong2{tagged(data.z), tagged(data.w)});
    }

    // One thread: waits for a piece from `from`, and clears it. Returns zeros if the wait has been given up.
    __device__ uint4 take(const GemmeshParams& params, uint32_t epoch, uint32_t from, uint64_t piece) const {
        ulonglong2 come[2];
        const auto has_come = [&](uint32_t& seen) {
            look(piece, come);
            seen = 0;
            return is_tagged(come);
        };
        if (!await_look(params, epoch, GEMMESH_LOW_LATENCY, from, has_come)) return uint4{};
        clear(piece);
        return piece_of(come);
    }

    // The steps of it.
    __device__ void look(uint64_t piece, ulonglong2 (&come)[2]) const {
        come[0] = ptx::ld_relaxed_sys_v2(units + 2 * piece);
        come[1] = ptx::ld_relaxed_sys_v2(units + 2 * piece + 1);
    }
    __device__ bool is_tagged(const ulonglong2 (&come)[2]) const { return is_tagged(come[0]) && is_tagged(come[1]); }
    __device__ void clear(uint64_t piece) const {
        ptx::st_relaxed_sys_v2(units + 2 * piece, ulonglong2{});
        ptx::st_relaxed_sys_v2(units + 2 * piece + 1, ulonglong2{});
    }
    __device__ static uint4 piece_of(const ulonglong2 (&come)[2]) {
        return uint4{static_cast<uint32_t>(come[0].x), static_cast<uint32_t>(come[0].y), static_cast<uint32_t>(come[1].x),
                     static_cast<uint32_t>(come[1].y)};
    }
};

}  // namespace gemmesh
