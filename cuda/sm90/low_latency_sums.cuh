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
#include "family.cuh"
#include "ptx.cuh"
#include "swap_ab.cuh"
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
    __device__ void send_and_add(Accumulators<N>& accumulators) const {
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

    __device__ static void add(Accumulators<N>& accumulators, uint32_t pair, uint32_t half, uint32_t elements) {
        const float2 addend = ptx::unpack<Element>(elements);
        accumulators.d[4 * pair + 2 * half] += addend.x;
        accumulators.d[4 * pair + 2 * half + 1] += addend.y;
    }

    // One lane: waits for `from`'s part of a row, clears it, and adds it.
    __device__ void take(Accumulators<N>& accumulators, uint32_t from, uint32_t half) const {
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

// The same for swapped operands: one warp's 16 columns of a tile of N rows. The warp sends, adds and stores pieces of 16
// bytes, which are eight columns of a row.
template <class Element, int N>
class SwapAbLowLatencySums {
public:
    using Tile = SwapAbTile<Element, N>;

    __device__ SwapAbLowLatencySums(const GemmeshParams& params, const GemmeshOutput& output, const Entrance& entrance,
                                    const Tile& tile)
        : params_(params), output_(output), entrance_(entrance), tile_(tile) {}

    // The whole warp.
    __device__ void send_add_and_store(typename Tile::Box& box) const {
        const GemmeshPeers& peers = params_.peers;
        uint4 product[kTurns];
        tile_.template each_piece<Element>(box, [&](uint32_t turn, const uint4& piece) { product[turn] = piece; });

        // send to the next rank first
        for (uint32_t step = 1; step < peers.world; ++step) {
            const uint32_t peer = (peers.rank + step) % peers.world;
            const LowLatencyShare share = share_of(peer, peers.rank);
#pragma unroll
            for (uint32_t turn = 0; turn < kTurns; ++turn) {
                if (is_of(peer, turn)) share.send(number(turn), product[turn]);
            }
        }
        // As above, all lanes send before any lane waits.
        __syncwarp();
        // these loads take as long as the peers' parts
        Addends addends;
        load(addends);

        float sums[kTurns][kPiece];
#pragma unroll
        for (uint32_t i = 0; i < kTurns * kPiece; ++i) sums[i / kPiece][i % kPiece] = -0.0f;
        for (uint32_t from = 0; from < peers.world; ++from) {
            if (from == peers.rank) {
                add(sums, product);
            } else {
                take(sums, from);
            }
        }
#pragma unroll
        for (uint32_t turn = 0; turn < kTurns; ++turn) {
            if (is_of(peers.rank, turn)) finish_and_store(sums[turn], addends, turn);
        }
        __syncwarp();
    }

private:
    static constexpr uint32_t kTurns = N / Tile::kRows;
    static constexpr uint32_t kPiece = Tile::Box::kPiece;  // elements

    // Whether `rank` gets the sums of this lane's piece.
    __device__ bool is_of(uint32_t rank, uint32_t turn) const {
        const uint32_t row = tile_.piece_row(turn);
        return params_.low_latency.begin[rank] <= row && row < params_.low_latency.end[rank] && tile_.piece_column() < output_.n;
    }

    __device__ LowLatencyShare share_of(uint32_t to, uint32_t from) const {
        return LowLatencyShare(params_.low_latency, entrance_, to, from, params_.peers.world);
    }

    // The number of this lane's piece in a share.
    __device__ uint32_t number(uint32_t turn) const {
        return tile_.piece_row(turn) * ((output_.n + 15) / 16 * 2) + tile_.piece_column() / kPiece;
    }

    __device__ static void add(float (&sums)[kTurns][kPiece], const uint4 (&pieces)[kTurns]) {
#pragma unroll
        for (uint32_t turn = 0; turn < kTurns; ++turn) add_piece(sums[turn], pieces[turn]);
    }

    __device__ static void add_piece(float (&sums)[kPiece], const uint4& piece) {
        const uint32_t words[] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (uint32_t i = 0; i < kPiece / 2; ++i) {
            const float2 addend = ptx::unpack<Element>(words[i]);
            sums[2 * i] += addend.x;
            sums[2 * i + 1] += addend.y;
        }
    }

    // One lane: waits for `from`'s pieces, clears them, and adds them.
    __device__ void take(float (&sums)[kTurns][kPiece], uint32_t from) const {
        const LowLatencyShare share = share_of(params_.peers.rank, from);
        bool awaited[kTurns];
        ulonglong2 come[kTurns][2];
#pragma unroll
        for (uint32_t turn = 0; turn < kTurns; ++turn) awaited[turn] = is_of(params_.peers.rank, turn);
        const auto look = [&](uint32_t& seen) {
#pragma unroll
            for (uint32_t turn = 0; turn < kTurns; ++turn) {
                if (awaited[turn]) share.look(number(turn), come[turn]);
            }
            bool all = true;
#pragma unroll
            for (uint32_t turn = 0; turn < kTurns; ++turn) all = all && (!awaited[turn] || share.is_tagged(come[turn]));
            seen = 0;
            return all;
        };
        if (!await_look(params_, entrance_.epoch, GEMMESH_LOW_LATENCY, from, look)) return;
#pragma unroll
        for (uint32_t turn = 0; turn < kTurns; ++turn) {
            if (!awaited[turn]) continue;
            share.clear(number(turn));
            add_piece(sums[turn], LowLatencyShare::piece_of(come[turn]));
        }
    }

    // What is added to the sums of a lane's pieces.
    struct Addends {
        Element bias[kPiece] = {};
        uint4 residual[kTurns];
    };

    __device__ void load(Addends& addends) const {
        const uint32_t column = tile_.piece_column();
        const Element* bias = static_cast<const Element*>(output_.bias);
#pragma unroll
        for (uint32_t i = 0; i < kPiece; ++i) {
            if (bias != nullptr && column + i < output_.n) addends.bias[i] = bias[column + i];
        }
        if (output_.residual == nullptr) return;
#pragma unroll
        for (uint32_t turn = 0; turn < kTurns; ++turn) {
            const bool is_own = is_of(params_.peers.rank, turn);
            addends.residual[turn] = residual_piece<Element>(output_, tile_.piece_row(turn), column, is_own);
        }
    }

    // One lane: adds bias and residual to the sums of a piece, applies the activation, and stores it.
    __device__ void finish_and_store(float (&sums)[kPiece], const Addends& addends, uint32_t turn) const {
        const uint32_t row = tile_.piece_row(turn);
        const uint32_t column = tile_.piece_column();
        if (output_.bias != nullptr) {
#pragma unroll
            for (uint32_t i = 0; i < kPiece; ++i) sums[i] += static_cast<float>(addends.bias[i]);
        }
        activate<kPiece>(sums, params_.activation, params_.is_f32 != 0);
        if (output_.residual != nullptr) add_piece(sums, addends.residual[turn]);

        uint8_t* out = static_cast<uint8_t*>(output_.out) + row * output_.out_pitch;
        if (params_.is_f32 != 0) {
            float* f32 = reinterpret_cast<float*>(out) + column;
#pragma unroll
            for (uint32_t i = 0; i < kPiece; ++i) {
                if (column + i < output_.n) f32[i] = sums[i];
            }
        } else if (params_.stored_type == GEMMESH_STORED_E4M3) {
            const auto pair = [&](uint32_t i) { return family::round_to_e4m3(sums[2 * i], sums[2 * i + 1]); };
            const uint32_t low = pair(0) | pair(1) << 16;
            *reinterpret_cast<uint2*>(out + column) = uint2{low, static_cast<uint32_t>(pair(2) | pair(3) << 16)};
        } else if (params_.stored_type == GEMMESH_STORED_F16) {
            store_rounded<__half>(sums, out + column * sizeof(Element));
        } else {
            store_rounded<Element>(sums, out + column * sizeof(Element));
        }
    }

    template <class Stored>
    __device__ static void store_rounded(const float (&sums)[kPiece], uint8_t* to) {
        ptx::st_global(to, uint4{ptx::cvt_rn_x2<Stored>(sums[0], sums[1]), ptx::cvt_rn_x2<Stored>(sums[2], sums[3]),
                                 ptx::cvt_rn_x2<Stored>(sums[4], sums[5]), ptx::cvt_rn_x2<Stored>(sums[6], sums[7])});
    }

    const GemmeshParams& params_;
    const GemmeshOutput& output_;
    Entrance entrance_;
    const Tile& tile_;
};

}  // namespace gemmesh
