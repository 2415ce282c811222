// The epilogue, from accumulators to the output. It adds the bias, applies the activation, multiplies gate and up, adds
// the residual, rounds once and stores.
#pragma once

#include "../abi.h"
#include "../common/activation.cuh"
#include "../common/quantize.cuh"
#include "abi.h"
#include "family.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace gemmesh {

// A box, in which a warp lays out 16 rows of 128 bytes for a store. The tensor map's swizzle permutes the 16-byte
// pieces of a row by the row's number modulo eight, which also avoids bank conflicts.
template <class Element>
struct alignas(1024) StoreBox {
    static constexpr int kRows = GEMMESH_STORE_ROWS;
    static constexpr int kColumns = GEMMESH_STORE_COLUMNS * 2 / sizeof(Element);
    static constexpr int kPiece = 16 / sizeof(Element);  // elements
    Element elements[kRows * kColumns];

    __device__ Element* piece(uint32_t row, uint32_t index) {
        return elements + row * kColumns + (index ^ row % 8) * kPiece;
    }
};

// The first row and column, in `out`, of a warp's 16 rows of a tile. Only rows from `begin` to `end` are read and
// written, up to the last column.
struct WarpPlace {
    uint32_t row;
    uint32_t column;
    uint32_t begin;
    uint32_t end;
};

// The place, in `out`, of this lane's accumulators. Each four of them lie in two rows, eight apart, and two
// neighbouring columns. The next four lie eight columns further.
struct Place {
    static constexpr uint32_t kRowsApart = 8;
    uint32_t row;     // the upper one
    uint32_t column;  // the left one of the first four
    uint32_t begin;
    uint32_t end;

    __device__ Place(const WarpPlace& place, uint32_t lane)
        : row(place.row + lane / 4), column(place.column + lane % 4 * 2), begin(place.begin), end(place.end) {}

    __device__ uint32_t row_of(uint32_t half) const { return row + half * kRowsApart; }
    __device__ bool has_row(uint32_t half) const { return begin <= row_of(half) && row_of(half) < end; }
};

// The bias of a warp's N columns. Except with block sums it is loaded while the tensor cores multiply,
// because waiting for a load costs more than all additions. In groups of eight columns, lane 4 j + p keeps the p-th
// pair of columns of groups j, j + 8, ..., and hands it to the lanes that have accumulators there. In a gated tile the
// first half of the groups belongs to gate, and the second to up.
template <class Element, int N>
class ColumnBias {
public:
    // `column` is the warp's first, of `output`.
    __device__ void load(const GemmeshParams& params, const GemmeshOutput& output, bool is_gated, uint32_t column, uint32_t lane) {
        if (output.bias == nullptr) return;
#pragma unroll
        for (uint32_t i = 0; i < kHeld; ++i) {
            const uint32_t group = lane / 4 + 8 * i;
            const bool is_up = is_gated && group >= kGroups / 2;
            const Element* bias = static_cast<const Element*>(is_up ? params.outputs[1].bias : output.bias);
            const uint32_t left = column + (is_up ? group - kGroups / 2 : group) * 8 + lane % 4 * 2;
            Element pair[2] = {};
            if (group < kGroups && left < output.n) pair[0] = bias[left];
            if (group < kGroups && left + 1 < output.n) pair[1] = bias[left + 1];
            memcpy(&held_[i], pair, sizeof pair);
        }
    }

    // All lanes of the warp.
    __device__ void add(float* accumulators, const GemmeshOutput& output, uint32_t lane) const {
        if (output.bias == nullptr) return;
#pragma unroll
        for (uint32_t group = 0; group < kGroups; ++group) {
            const uint32_t pair = __shfl_sync(~0u, held_[group / 8], group % 8 * 4 + lane % 4);
            const float2 bias = ptx::unpack<Element>(pair);
            float* d = &accumulators[group * 4];
            d[0] += bias.x;
            d[1] += bias.y;
            d[2] += bias.x;
            d[3] += bias.y;
        }
    }

private:
    static constexpr uint32_t kGroups = N / 8;
    static constexpr uint32_t kHeld = (kGroups + 7) / 8;
    uint32_t held_[kHeld];
};

// Brings the residual of a warp's rows of N columns into the L2 cache, while the tensor cores multiply.
template <class Element, int N>
__device__ __forceinline__ void prefetch_residual(const GemmeshOutput& output, uint32_t m, uint32_t row, uint32_t column, uint32_t lane) {
    if (output.residual == nullptr) return;
    constexpr uint32_t kLine = 128 / sizeof(Element);
    constexpr uint32_t kLines = (N + kLine - 1) / kLine + 1;
    for (uint32_t index = lane; index < GEMMESH_STORE_ROWS * kLines; index += 32) {
        const uint32_t of_row = row + index / kLines;
        const uint32_t left = column + index % kLines * kLine;
        if (of_row >= m || left >= output.n) continue;
        ptx::prefetch_l2(static_cast<const uint8_t*>(output.residual) + of_row * output.residual_pitch + left * sizeof(Element));
    }
}

// The boxes of a warp's rows of a tile, and the column at which each begins. If boxes don't divide the tile's width,
// the last one is moved left and holds some columns again, with the same values.
template <class Element, int N>
constexpr int kStoreSteps = (N + StoreBox<Element>::kColumns - 1) / StoreBox<Element>::kColumns;

template <class Element, int N>
__device__ __forceinline__ constexpr int store_column(int step) {
    return step < kStoreSteps<Element, N> - 1 ? step * StoreBox<Element>::kColumns : N - StoreBox<Element>::kColumns;
}

// Loads the residual of a warp's rows of N columns through the warp's boxes, as many columns at a time as fit. It is
// the reverse of `store_rows`, which uses the same boxes afterwards. A row of a box is a line of memory, which eight
// lanes copy.
template <class Element, int N, int Boxes>
class Residual {
public:
    using Box = StoreBox<Element>;

    __device__ Residual(const GemmeshOutput& output, StoreBox<Element> (&boxes)[Boxes], const WarpPlace& place, uint32_t lane)
        : output_(output), boxes_(boxes), place_(place), lane_(lane) {}

    // All lanes of the warp: begins to copy. TMA may still be reading the boxes for an earlier store.
    __device__ void begin() {
        if (output_.residual == nullptr) return;
        ptx::cp_async_bulk_wait_group_read<0>();
        __syncwarp();
        copy<0>();
    }

    // All lanes of the warp: adds it to the first `n` columns.
    __device__ void add(float* accumulators, uint32_t n) {
        if (output_.residual != nullptr) add_from<0>(accumulators, n);
    }

private:
    static constexpr int kSteps = kStoreSteps<Element, N>;
    static constexpr int kLanes = Box::kColumns / Box::kPiece;  // that copy a row
    static constexpr int kRows = 32 / kLanes;                   // that are copied by an instruction

    template <int First>
    __device__ void copy() {
        const uint32_t piece = lane_ % kLanes;
        uint32_t of_box = lane_ / kLanes;
        // Computed anew each time, because there are no registers to keep the addresses.
        ptx::pin(of_box);
        const uint32_t column = place_.column + piece * Box::kPiece;
        const uint32_t row = place_.row + of_box;
        const uint8_t* from = static_cast<const uint8_t*>(output_.residual) + row * output_.residual_pitch + column * sizeof(Element);
#pragma unroll
        for (int begin = 0; begin < Box::kRows; begin += kRows, from += kRows * output_.residual_pitch) {
            const bool has_row = place_.begin <= row + begin && row + begin < place_.end;
#pragma unroll
            for (int step = First; step < kSteps && step < First + Boxes; ++step) {
                const int first = store_column<Element, N>(step);
                // a piece that begins within the row may be read whole
                const bool is_there = has_row && column + first < output_.n;
                ptx::cp_async_16(ptx::shared_address(boxes_[step - First].piece(of_box + begin, piece)),
                                 from + first * sizeof(Element), is_there);
            }
        }
    }

    template <int First>
    __device__ void add_from(float* accumulators, uint32_t n) {
        ptx::cp_async_wait_all();
        __syncwarp();
#pragma unroll
        for (int step = First; step < kSteps && step < First + Boxes; ++step) add_box(accumulators, step, boxes_[step - First], n);
        __syncwarp();
        if constexpr (First + Boxes < kSteps) {
            copy<First + Boxes>();
            add_from<First + Boxes>(accumulators, n);
        }
    }

    __device__ void add_box(float* accumulators, int step, Box& box, uint32_t n) {
#pragma unroll
        for (int pair = 0; pair < Box::kColumns / 16; ++pair) {
            const int first = store_column<Element, N>(step) + pair * 16;
            uint32_t words[4];
            const uint32_t source = ptx::shared_address(box.piece(lane_ % 16, pair * 2 + lane_ / 16));
            ptx::ldmatrix_x4(source, words[0], words[1], words[2], words[3]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // a last box that was moved left has columns of the one before
                if (first + i / 2 * 8 < step * Box::kColumns || first + i / 2 * 8 >= n) continue;
                const float2 addend = ptx::unpack<Element>(words[i]);
                float* d = &accumulators[first / 2 + i * 2];
                d[0] += addend.x;
                d[1] += addend.y;
                ptx::pin(d[0]);
                ptx::pin(d[1]);
            }
        }
    }

    const GemmeshOutput& output_;
    StoreBox<Element> (&boxes_)[Boxes];
    const WarpPlace& place_;
    uint32_t lane_;
};

// True if GELU is computed as for an output of f32.
__device__ __forceinline__ bool is_exact(const GemmeshParams& params, const GemmeshOutput& output) {
    return params.is_f32 != 0 || output.quantized.scales != nullptr;
}

// Bias, activation, gating and residual, in place, before rounding. The accumulators have N columns. If the product is
// gated, the first half has gate's columns and the second half up's, and afterwards the first half has the results.
// `Gates` is false if a product is never gated here.
template <class Element, bool Gates, int N, int Boxes>
__device__ __forceinline__ void finish(float* accumulators, const GemmeshParams& params, const GemmeshOutput& output,
                                       const ColumnBias<Element, N>& bias, StoreBox<Element> (&boxes)[Boxes],
                                       const WarpPlace& place, uint32_t lane) {
    constexpr int kHalf = N / 2;     // columns
    constexpr int kOfHalf = N / 4;  // accumulators
    float* second = accumulators + kOfHalf;
    const bool is_gated = Gates && params.is_gated != 0;
    Residual<Element, N, Boxes> residual(output, boxes, place, lane);
    bias.add(accumulators, output, lane);
    residual.begin();
    activate<kOfHalf>(accumulators, params.activation, is_exact(params, output));
    if (is_gated) {
#pragma unroll
        for (int i = 0; i < kOfHalf; ++i) accumulators[i] *= second[i];
    } else {
        activate<kOfHalf>(second, params.activation, is_exact(params, output));
    }
    residual.add(accumulators, is_gated ? kHalf : N);
}

// Stores N columns of this lane's accumulators without a box, rounded or as f32, or as e4m3 if `Stored` is uint8_t. Four
// lanes store a sector of each row as f32, half a sector as 16 bits and a quarter as 8.
template <class Stored, int N>
__device__ __forceinline__ void store_directly(const float* accumulators, const GemmeshOutput& output, const Place& place) {
    uint32_t first = place.column;
    // The columns of each type are computed anew, because there are no registers to keep them.
    ptx::pin(first);
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
        if (!place.has_row(half)) continue;
        uint8_t* row = static_cast<uint8_t*>(output.out) + place.row_of(half) * output.out_pitch;
#pragma unroll
        for (uint32_t i = 0; i < N / 8; ++i) {
            const uint32_t column = first + i * 8;
            const float* d = &accumulators[4 * i + 2 * half];
            uint8_t* at = row + column * sizeof(Stored);
            if constexpr (std::is_same_v<Stored, uint8_t>) {
                // there are an even number of columns
                if (column < output.n) *reinterpret_cast<uint16_t*>(at) = family::round_to_e4m3(d[0], d[1]);
            } else if constexpr (!std::is_same_v<Stored, float>) {
                // after a last odd column there is padding
                if (column < output.n) *reinterpret_cast<uint32_t*>(at) = ptx::cvt_rn_x2<Stored>(d[0], d[1]);
            } else if (column + 1 < output.n) {
                *reinterpret_cast<float2*>(at) = float2{d[0], d[1]};
            } else if (column < output.n) {
                *reinterpret_cast<float*>(at) = d[0];
            }
        }
    }
}

// Stores the warp's 16 rows of N columns, box by box, through `stores`. TMA stores them, and the tensor cores go on
// with the next tile while it still reads the last boxes. Each warp has its own boxes, so the warps of a warpgroup
// never wait for each other.
template <class Element, int N, class Stores>
__device__ __forceinline__ void store_rows(const float* accumulators, Stores& stores, uint32_t lane) {
    using Box = StoreBox<Element>;
#pragma unroll
    for (int step = 0; step < kStoreSteps<Element, N>; ++step) {
        Box& box = stores.acquire(step);

        // round into the box: lanes 0-15 name the rows of the left piece, lanes 16-31 those of the right one
#pragma unroll
        for (int pair = 0; pair < Box::kColumns / 16; ++pair) {
            const float* d = &accumulators[(store_column<Element, N>(step) / 8 + pair * 2) * 4];
            const uint32_t upper_left = ptx::cvt_rn_x2<Element>(d[0], d[1]);
            const uint32_t lower_left = ptx::cvt_rn_x2<Element>(d[2], d[3]);
            const uint32_t upper_right = ptx::cvt_rn_x2<Element>(d[4], d[5]);
            const uint32_t lower_right = ptx::cvt_rn_x2<Element>(d[6], d[7]);
            const uint32_t target = ptx::shared_address(box.piece(lane % 16, pair * 2 + lane / 16));
            ptx::stmatrix_x4(target, upper_left, lower_left, upper_right, lower_right);
        }

        ptx::fence_proxy_async_shared_cta();
        __syncwarp();
        stores.commit(step);
    }
}

// `store_rows` for f32. A box holds half as many columns.
template <int N, class Stores>
__device__ __forceinline__ void store_f32_rows(const float* accumulators, Stores& stores, uint32_t lane) {
    using Box = StoreBox<float>;
#pragma unroll
    for (int step = 0; step < kStoreSteps<float, N>; ++step) {
        Box& box = stores.acquire(step);
#pragma unroll
        for (int block = 0; block < Box::kColumns / 8; ++block) {
            const float* d = &accumulators[(store_column<float, N>(step) / 8 + block) * 4];
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                float* to = box.piece(lane / 4 + half * Place::kRowsApart, block * 2 + lane % 4 / 2) + lane % 2 * 2;
                *reinterpret_cast<float2*>(to) = float2{d[half * 2], d[half * 2 + 1]};
            }
        }
        ptx::fence_proxy_async_shared_cta();
        __syncwarp();
        stores.commit(step);
    }
}

// What values are multiplied by when they become e4m3, if their scales are not made: 1, or one over the scale that is given.
__device__ __forceinline__ float quantizing_factor(const GemmeshOutputScales& of) {
    return of.scales == nullptr ? 1.0f : __frcp_rn(__ldg(of.scales));
}

// One warp: makes and stores the scales of its 16 rows of N columns. `factors` are what the values of each block are
// multiplied by, in this lane's upper and lower row. Columns past the last one become 0, because their numbers have no
// meaning.
template <int N>
__device__ __forceinline__ void make_scales(float2 (&factors)[N / GEMMESH_SCALE_BLOCK], float* accumulators,
                                            const GemmeshOutput& output, const Place& place, uint32_t column, uint32_t lane) {
    constexpr uint32_t kGroup = 8;
    constexpr uint32_t kBlocks = N / GEMMESH_SCALE_BLOCK;
    constexpr uint32_t kOfBlock = GEMMESH_SCALE_BLOCK / kGroup;
    const GemmeshOutputScales& of = output.quantized;
    if (column + N > output.n) {
#pragma unroll
        for (uint32_t group = 0; group < N / kGroup; ++group) {
            if (column + group * kGroup < output.n) continue;
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) accumulators[group * 4 + i] = 0.0f;
        }
    }
    // of each block in two rows; steps of all blocks and rows stand side by side, because each waits for the one before
    float amax[kBlocks * 2];
#pragma unroll
    for (float& value : amax) value = kLeastAmax;
#pragma unroll
    for (uint32_t group = 0; group < kOfBlock; ++group) {
#pragma unroll
        for (uint32_t i = 0; i < kBlocks * 2; ++i) {
            const float* d = &accumulators[(i / 2 * kOfBlock + group) * 4 + i % 2 * 2];
            // `fmaxf` ignores NaN
            amax[i] = fmaxf(fmaxf(amax[i], fabsf(d[0])), fabsf(d[1]));
        }
    }
    // four lanes have a row
#pragma unroll
    for (uint32_t apart = 1; apart <= 2; ++apart) {
#pragma unroll
        for (float& value : amax) value = fmaxf(value, __shfl_xor_sync(~0u, value, apart));
    }
    const uint32_t half = lane % 4;  // the row whose scales this lane stores, if it is 0 or 1
    const bool stores = half < 2 && place.has_row(half);
    float* scales = of.scales + uint64_t{place.row_of(half)} * of.row + uint64_t{column / GEMMESH_SCALE_BLOCK} * of.block;
#pragma unroll
    for (uint32_t block = 0; block < kBlocks; ++block, scales += of.block) {
        const float upper = scale_of(of, amax[block * 2]);
        const float lower = scale_of(of, amax[block * 2 + 1]);
        if (stores && column + block * GEMMESH_SCALE_BLOCK < output.n) *scales = half == 0 ? upper : lower;
        factors[block] = {reciprocal(upper), reciprocal(lower)};
    }
}

// Stores the warp's 16 rows of N columns as e4m3, 128 columns at a time through a box, without TMA. There are a multiple
// of 16 columns. The scales of whole blocks may be made.
template <int N>
__device__ __forceinline__ void store_e4m3_rows(float* accumulators, StoreBox<uint8_t>& box, const GemmeshOutput& output,
                                                const WarpPlace& place, uint32_t lane) {
    using Box = StoreBox<uint8_t>;
    static_assert(N % Box::kPiece == 0 && Box::kColumns == GEMMESH_SCALE_BLOCK);
    const GemmeshOutputScales& of = output.quantized;
    constexpr bool kHasBlocks = N % GEMMESH_SCALE_BLOCK == 0;
    float2 factors[kHasBlocks ? N / GEMMESH_SCALE_BLOCK : 1];
    if (!kHasBlocks || of.scales == nullptr || is_given(of)) {
        const float factor = quantizing_factor(of);
#pragma unroll
        for (float2& both : factors) both = {factor, factor};
    } else if constexpr (kHasBlocks) {
        make_scales<N>(factors, accumulators, output, Place(place, lane), place.column, lane);
    }
#pragma unroll
    for (int first = 0; first < N; first += Box::kColumns) {
        constexpr int kGroup = 8;
        const int columns = N - first < Box::kColumns ? N - first : Box::kColumns;
        const float* block = &accumulators[first / 2];
        const float2& both = factors[kHasBlocks ? first / Box::kColumns : 0];
        // all lanes have read what was in the box
        __syncwarp();
#pragma unroll
        for (int column = 0; column < columns; column += kGroup) {
            const float* d = &block[column / 2];
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const float factor = half == 0 ? both.x : both.y;
                uint8_t* piece = box.piece(lane / 4 + half * Place::kRowsApart, column / Box::kPiece);
                uint8_t* at = piece + column % Box::kPiece + lane % 4 * 2;
                *reinterpret_cast<uint16_t*>(at) =
                    family::round_to_e4m3(d[half * 2] * factor, d[half * 2 + 1] * factor);
            }
        }
        __syncwarp();
        const uint32_t pieces = columns / Box::kPiece;  // of a row
#pragma unroll
        for (uint32_t index = lane; index < Box::kRows * pieces; index += 32) {
            const uint32_t row = index / pieces;
            const uint32_t piece = index % pieces;
            const uint32_t column = place.column + first + piece * Box::kPiece;
            if (place.row + row >= place.end || column >= output.n) continue;
            uint8_t* to = static_cast<uint8_t*>(output.out) + (place.row + row) * output.out_pitch + column;
            ptx::st_global(to, *reinterpret_cast<const uint4*>(box.piece(row, piece)));
        }
    }
    __syncwarp();
}

// A thread that stores a tile's boxes, `Boxes` of them in turn, calls this before it fills the next one. It waits until
// TMA has read the box, and before the first box until TMA has read all of the tile before.
template <int Boxes>
__device__ __forceinline__ void await_box(int step) {
    if (step == 0) {
        ptx::cp_async_bulk_wait_group_read<0>();
    } else if (step >= Boxes) {
        ptx::cp_async_bulk_wait_group_read<Boxes - 1>();
    }
}

// A warp's own stores, to one matrix, by TMA. `row` is its first row, and `column` the consumer's first column.
template <class Element, int N, int Boxes>
struct OwnStores {
    const CUtensorMap* out;
    StoreBox<Element> (&boxes)[Boxes];
    uint32_t row;
    uint32_t column;
    uint32_t lane;

    __device__ StoreBox<Element>& acquire(int step) {
        if (ptx::elect_one()) await_box<Boxes>(step);
        __syncwarp();
        return boxes[step % Boxes];
    }

    __device__ void commit(int step) {
        if (!ptx::elect_one()) return;
        ptx::cp_async_bulk_tensor_2d_store(out, column + store_column<Element, N>(step), row, boxes[step % Boxes].elements);
        ptx::cp_async_bulk_commit_group();
    }
};

}  // namespace gemmesh
