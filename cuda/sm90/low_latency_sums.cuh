// Few rows of partial sums. The warps that make them also send them and add the peers' parts. Each warp sends its part
// of a tile to the low-latency areas of the ranks that own the rows. Of the rows that this rank owns, it adds up all
// ranks' parts. It does not wait until the peer is ready; LowLatencyShare says why. (A unit is two words, each with two
// elements and a tag.)
//
// All ranks have the same tiles in the same order, and each sends its part of a tile before it waits for the others'
// parts. So there is no deadlock: every rank makes, or has sent, its part of the first tile that is unfinished
// anywhere. As with other sums (push.cuh), all CTAs of every rank must run at some time.
#pragma once

#include "../abi.h"
#include "../common/ptx.cuh"
#include "../protocol/flags.cuh"
#include "../protocol/low_latency.cuh"
#include "../protocol/push.cuh"
#include "epilogue.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace gemmesh {

// One warp's rows of a tile, 16 of them by N columns.
template <class Element, int N>
class LowLatencySums {
public:
    // `row` and `column` are the warp's first.
    __device__ LowLatencySums(const GemmeshParams& params, const GemmeshOutput& output, const Entrance& entrance, uint32_t row,
                       uint32_t column, uint32_t lane)
        : params_(params),
          output_(output),
          entrance_(entrance),
          row_(row + lane / 4),
          column_(column),
          lane_(lane) {}

    // The whole warp: turns the accumulators, this rank's part, into the sums of its own rows. Parts are rounded, and
    // added in the order of the ranks. If this has been given up, the sums are meaningless.
    __device__ void send_and_add(Accumulators<Element, N>& accumulators) const {
        const GemmeshPeers& peers = params_.peers;
        // As in block_sums.cuh, the product is kept rounded, and -0.0 is the additive identity.
        uint32_t product[kPairs * 2];
#pragma unroll
        for (uint32_t i = 0; i < kPairs * 2; ++i) {
            product[i] = ptx::cvt_rn_x2<Element>(accumulators.d[2 * i], accumulators.d[2 * i + 1]);
            accumulators.d[2 * i] = accumulators.d[2 * i + 1] = -0.0f;
        }

        // send to the next rank first
        for (uint32_t step = 1; step < peers.world; ++step) {
            const uint32_t peer = (peers.rank + step) % peers.world;
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                if (!has_row(peer, half)) continue;
                const LowLatencyShare share = share_of(peer, peers.rank);
                ulonglong2* to = share.units + unit(half);
#pragma unroll
                for (uint32_t i = 0; i < kPairs; i += 2) {
                    if (has_column(i)) {
                        ptx::st_relaxed_sys_v2(to + i * 2, ulonglong2{share.tagged(product[2 * i + half]), share.tagged(product[2 * i + 2 + half])});
                    }
                }
            }
        }

        // All lanes of the warp send before any lane waits. Otherwise the peers' warps would wait for this one, and it
        // for them.
        __syncwarp();
        for (uint32_t from = 0; from < peers.world; ++from) {
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                if (from == peers.rank) {
#pragma unroll
                    for (uint32_t i = 0; i < kPairs; ++i) add(accumulators, i, half, product[2 * i + half]);
                } else if (has_row(peers.rank, half)) {
                    take(accumulators, from, half);
                }
            }
        }
        __syncwarp();
    }

    // The warp's place, limited to the rows that this rank owns. The warp's first row may lie above them.
    __device__ WarpPlace place() const {
        const uint32_t rank = params_.peers.rank;
        return {row_ - lane_ / 4, column_, params_.low_latency.begin[rank], params_.low_latency.end[rank]};
    }

private:
    static constexpr uint32_t kPairs = N / 8;  // of neighbouring columns that a lane has in each of two rows
    static constexpr uint32_t kRowsApart = Place::kRowsApart;  // these two

    // Whether `rank` gets sums of this lane's upper or lower row.
    __device__ bool has_row(uint32_t rank, uint32_t half) const {
        const uint32_t row = row_ + half * kRowsApart;
        return params_.low_latency.begin[rank] <= row && row < params_.low_latency.end[rank];
    }

    // Whether this lane's pairs i and i + 1, and those of its neighbours in the row, have a column of the output among
    // them.
    __device__ bool has_column(uint32_t i) const { return column_ + i * 8 < output_.n; }

    __device__ LowLatencyShare share_of(uint32_t to, uint32_t from) const {
        return LowLatencyShare(params_.low_latency, entrance_, to, from, params_.peers.world);
    }

    // This lane's first unit of its row. The unit of pairs i and i + 1 is 2 i after it. Units of lanes that share a row
    // lie side by side.
    __device__ uint32_t unit(uint32_t half) const {
        const uint32_t of_row = (output_.n + 15) / 16 * 4;
        return (row_ + half * kRowsApart) * of_row + column_ / 4 + lane_ % 4;
    }

    __device__ static void add(Accumulators<Element, N>& accumulators, uint32_t pair, uint32_t half, uint32_t elements) {
        const float2 addend = ptx::unpack<Element>(elements);
        accumulators.d[4 * pair + 2 * half] += addend.x;
        accumulators.d[4 * pair + 2 * half + 1] += addend.y;
    }

    // One lane: waits for `from`'s part of a row, clears it, and adds it.
    __device__ void take(Accumulators<Element, N>& accumulators, uint32_t from, uint32_t half) const {
        const LowLatencyShare share = share_of(params_.peers.rank, from);
        ulonglong2* at = share.units + unit(half);
        ulonglong2 come[kPairs / 2];
        const auto look = [&](uint32_t& seen) {
#pragma unroll
            for (uint32_t i = 0; i < kPairs; i += 2) {
                if (has_column(i)) come[i / 2] = ptx::ld_relaxed_sys_v2(at + i * 2);
            }
            bool all = true;
#pragma unroll
            for (uint32_t i = 0; i < kPairs; i += 2) {
                all = all && (!has_column(i) || share.is_tagged(come[i / 2]));
            }
            seen = 0;
            return all;
        };
        if (!await_look(params_, entrance_.epoch, GEMMESH_LOW_LATENCY, from, look)) return;
#pragma unroll
        for (uint32_t i = 0; i < kPairs; i += 2) {
            if (!has_column(i)) continue;
            ptx::st_relaxed_sys_v2(at + i * 2, ulonglong2{});
            add(accumulators, i, half, static_cast<uint32_t>(come[i / 2].x));
            add(accumulators, i + 1, half, static_cast<uint32_t>(come[i / 2].y));
        }
    }

    const GemmeshParams& params_;
    const GemmeshOutput& output_;
    Entrance entrance_;
    uint32_t row_;
    uint32_t column_;
    uint32_t lane_;
};

}  // namespace gemmesh
