// From accumulators to the output: add the bias, round once, store.
#pragma once

#include "../abi.h"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace gemmesh {

// Where a warp lays out rows for a store: 16 rows of 128 bytes. The tensor map's swizzle exchanges the 16-byte pieces
// within a row by the row's number modulo eight, which also spares bank conflicts.
template <class Element>
struct alignas(1024) StoreBox {
    static constexpr int kRows = GEMMESH_STORE_ROWS;
    static constexpr int kColumns = GEMMESH_STORE_COLUMNS;
    static constexpr int kPiece = 16 / sizeof(Element);  // elements
    Element elements[kRows * kColumns];

    __device__ Element* piece(uint32_t row, uint32_t index) {
        return elements + row * kColumns + (index ^ row % 8) * kPiece;
    }
};

// Adds bias[column..] to the accumulators of this lane. `column` is the tile's first.
template <class Element, int N>
__device__ __forceinline__ void add_bias(Accumulators<Element, N>& accumulators, const GemmeshParams& params,
                                         uint32_t column, uint32_t lane) {
    const Element* bias = static_cast<const Element*>(params.bias);
    column += lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < N / 8; ++i, column += 8) {
        const float left = column < params.n ? static_cast<float>(bias[column]) : 0.0f;
        const float right = column + 1 < params.n ? static_cast<float>(bias[column + 1]) : 0.0f;
        float* d = &accumulators.d[i * 4];
        d[0] += left;
        d[1] += right;
        d[2] += left;
        d[3] += right;
    }
}

// The boxes that a warp's rows of a tile take, and where each begins. Where boxes don't divide the tile's width, the last one is
// moved left and holds some columns again, with the same values.
template <class Element, int N>
constexpr int kStoreSteps = (N + StoreBox<Element>::kColumns - 1) / StoreBox<Element>::kColumns;

template <class Element, int N>
__device__ __forceinline__ constexpr int store_column(int step) {
    return step < kStoreSteps<Element, N> - 1 ? step * StoreBox<Element>::kColumns : N - StoreBox<Element>::kColumns;
}

// Stores the warp's 16 rows of the accumulators, box by box, through `stores`: the tensor cores go on with the next tile while TMA
// still reads the last boxes. A warp has boxes of its own, so the warps of a warpgroup never wait for each other.
template <class Element, int N, class Stores>
__device__ __forceinline__ void store_rows(const Accumulators<Element, N>& accumulators, Stores& stores, uint32_t lane) {
    using Box = StoreBox<Element>;
#pragma unroll
    for (int step = 0; step < kStoreSteps<Element, N>; ++step) {
        Box& box = stores.acquire(step);

        // round into the box: lanes 0-15 name the rows of the left piece, lanes 16-31 those of the right one
#pragma unroll
        for (int pair = 0; pair < Box::kColumns / 16; ++pair) {
            const float* d = &accumulators.d[(store_column<Element, N>(step) / 8 + pair * 2) * 4];
            const uint32_t upper_left = ptx::cvt_rn_x2<Element>(d[0], d[1]);
            const uint32_t lower_left = ptx::cvt_rn_x2<Element>(d[2], d[3]);
            const uint32_t upper_right = ptx::cvt_rn_x2<Element>(d[4], d[5]);
            const uint32_t lower_right = ptx::cvt_rn_x2<Element>(d[6], d[7]);
            const uint32_t target = ptx::shared_address(box.piece(lane % 16, pair * 2 + lane / 16));
            ptx::stmatrix_x4(target, upper_left, lower_left, upper_right, lower_right);
        }

        // hand the box to TMA
        ptx::fence_proxy_async_shared_cta();
        __syncwarp();
        stores.commit(step);
    }
}

// The warp's 16 columns of an exchanged tile, whose rows are the accumulators' columns: adds the bias, and stores 16 rows at a time,
// a sector of 32 bytes of each. `row` and `column` are the tile's first and the warp's.
template <class Element, int N>
__device__ __forceinline__ void store_columns(Accumulators<Element, N>& accumulators, const GemmeshParams& params,
                                              StoreBox<Element>& box, uint32_t row, uint32_t column, uint32_t lane) {
    constexpr uint32_t kColumns = 16;
    constexpr uint32_t kRows = 16;
    constexpr uint32_t kPieces = kColumns / StoreBox<Element>::kPiece;  // of a row
    constexpr uint32_t kTurns = StoreBox<Element>::kRows * StoreBox<Element>::kColumns / (kRows * kColumns);
    if (params.bias != nullptr) {
        const Element* bias = static_cast<const Element*>(params.bias);
        const uint32_t upper = column + lane / 4;
        const float left = upper < params.n ? static_cast<float>(bias[upper]) : 0.0f;
        const float right = upper + 8 < params.n ? static_cast<float>(bias[upper + 8]) : 0.0f;
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
            float* d = &accumulators.d[i * 4];
            d[0] += left;
            d[1] += left;
            d[2] += right;
            d[3] += right;
        }
    }
    const uint32_t piece = lane % kPieces;
    const uint32_t own_column = column + piece * StoreBox<Element>::kPiece;
    uint8_t* out = static_cast<uint8_t*>(params.out) + own_column * sizeof(Element);
#pragma unroll
    for (int i = 0; i < N / kRows; ++i) {
        // lanes 0-7 and 8-15 name the rows of the left and the right piece, the others those eight rows below
        const float* d = &accumulators.d[i * 8];
        Element* rows = box.elements + i % kTurns * (kRows * kColumns);
        Element* target = rows + (lane / 16 * 8 + lane % 8) * kColumns + lane / 8 % 2 * StoreBox<Element>::kPiece;
        if (i >= int(kTurns)) __syncwarp();
        ptx::stmatrix_x4_trans(ptx::shared_address(target), ptx::cvt_rn_x2<Element>(d[0], d[1]),
                               ptx::cvt_rn_x2<Element>(d[2], d[3]), ptx::cvt_rn_x2<Element>(d[4], d[5]),
                               ptx::cvt_rn_x2<Element>(d[6], d[7]));
        __syncwarp();
        const uint32_t own_row = row + i * kRows + lane / kPieces;
        const uint4 values = *reinterpret_cast<const uint4*>(rows + lane / kPieces * kColumns + piece * StoreBox<Element>::kPiece);
        // as TMA: a piece that begins within the row is written whole
        if (own_row < params.m && own_column < params.n) ptx::st_global(out + own_row * params.out_pitch, values);
    }
    // the next tile's come after these have been read
    __syncwarp();
}

// A thread that stores boxes of a tile, one of `Boxes` after the other, before it has the next one filled: waits until TMA has read
// what was in it; for the first one, all of the tile before.
template <int Boxes>
__device__ __forceinline__ void await_box(int step) {
    if (step == 0) {
        ptx::cp_async_bulk_wait_group_read<0>();
    } else if (step >= Boxes) {
        ptx::cp_async_bulk_wait_group_read<Boxes - 1>();
    }
}

// A warp that stores its boxes itself, to one matrix. `row` and `column` are the first of its rows and of the tile.
template <class Element, int N, int Boxes>
struct OwnStores {
    const CUtensorMap* out;
    StoreBox<Element> (&boxes)[Boxes];
    uint32_t row;
    uint32_t column;
    uint32_t lane;

    __device__ StoreBox<Element>& acquire(int step) {
        if (lane == 0) await_box<Boxes>(step);
        __syncwarp();
        return boxes[step % Boxes];
    }

    __device__ void commit(int step) {
        if (lane != 0) return;
        ptx::cp_async_bulk_tensor_2d_store(out, column + store_column<Element, N>(step), row, boxes[step % Boxes].elements);
        ptx::cp_async_bulk_commit_group();
    }
};

}  // namespace gemmesh
