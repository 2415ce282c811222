// The epilogue of tiles whose operands are swapped (swap_ab). A warp has 16 columns of `out`, and all rows of the tile.
#pragma once

#include "../abi.h"
#include "../common/activation.cuh"
#include "../common/ptx.cuh"
#include "../protocol/push.cuh"
#include "epilogue.cuh"
#include "family.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace gemmesh {

// The first barrier at which two warps of a consumer, one of gate and one of up, meet to multiply their values. 0 is
// __syncthreads().
constexpr uint32_t kPairBarrier = 3;
static_assert(kPairBarrier > Pushers::kBarrier);

// Eight columns of a row of the residual. Zeros if the row is not there, or begins after the last column. A piece that
// begins within the row may be read whole.
template <class Element>
__device__ __forceinline__ uint4 residual_piece(const GemmeshOutput& output, uint32_t row, uint32_t column, bool has_row) {
    const uint8_t* of_row = static_cast<const uint8_t*>(output.residual) + row * output.residual_pitch;
    const uint4* piece = reinterpret_cast<const uint4*>(of_row + column * sizeof(Element));
    return has_row && column < output.n ? *piece : uint4{};
}

// What is added to a warp's 16 columns of a tile of N rows: bias and residual. A tile of few rows has registers for all
// of it, so it is loaded while the tensor cores multiply. Loading it afterwards takes a microsecond, a twentieth of such
// a product. Of higher tiles the residual is loaded afterwards, because to fetch it into the cache takes longer.
template <class Element, int N>
class SwapAbAddends {
public:
    static constexpr bool kHoldsResidual = N <= 48;

    // `bias` is of the warp's weight. `row` and `column` are the warp's first, of `out`.
    __device__ void load(const GemmeshParams& params, const GemmeshOutput& output, const void* bias, uint32_t row,
                         uint32_t column, uint32_t lane) {
        const uint32_t first = column + lane / 4;
        const Element* of_column = static_cast<const Element*>(bias) + first;
        if (bias != nullptr && first < output.n) left = of_column[0];
        if (bias != nullptr && first + 8 < output.n) right = of_column[8];
        if constexpr (kHoldsResidual) {
            if (output.residual == nullptr) return;
#pragma unroll
            for (uint32_t turn = 0; turn < kTurns; ++turn) {
                const uint32_t of_tile = turn * 16 + lane / 2;
                const bool is_there = of_tile < N && row + of_tile < params.m;
                residual[turn] = residual_piece<Element>(output, row + of_tile, column + lane % 2 * 8, is_there);
            }
        }
    }

    Element left{};   // the bias of this lane's accumulators' columns
    Element right{};  // eight columns further
    static constexpr uint32_t kTurns = kHoldsResidual ? (N + 15) / 16 : 1;
    uint4 residual[kTurns];  // by 16 rows: SwapAbTile's pieces
};

// One warp's columns of a tile of N rows. Each four of this lane's accumulators lie in two columns, eight apart, and
// two neighbouring rows. The next four lie eight rows further.
template <class Element, int N>
class SwapAbTile {
public:
    using Box = StoreBox<Element>;

    // `row` and `column` are the warp's first, of `out`.
    __device__ SwapAbTile(Accumulators<N>& accumulators, const GemmeshParams& params, const GemmeshOutput& output,
                             uint32_t row, uint32_t column, uint32_t lane)
        : d_(accumulators.d), params_(params), output_(output), row_(row), column_(column), lane_(lane) {}

    // `bias` is the one that was loaded.
    __device__ void add_bias(const void* bias, const SwapAbAddends<Element, N>& addends) {
        if (bias == nullptr) return;
        const float left = static_cast<float>(addends.left);
        const float right = static_cast<float>(addends.right);
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
            float* d = &d_[i * 4];
            d[0] += left;
            d[1] += left;
            d[2] += right;
            d[3] += right;
        }
    }

    // The warp of up hands its values to the warp of gate, lane by lane, which multiplies. Both have the same rows and
    // columns. They use two boxes by turns. A warp that fills a box again has met the warp that read it.
    __device__ void give(Box& even, Box& odd, uint32_t barrier) const {
        meet_by_boxes(even, odd, barrier, [](float4* at, const float* d) { *at = float4{d[0], d[1], d[2], d[3]}; }, true);
    }

    __device__ void multiply(Box& even, Box& odd, uint32_t barrier) {
        const auto read = [](const float4* at, float* d) {
            const float4 up = *at;
            d[0] *= up.x;
            d[1] *= up.y;
            d[2] *= up.z;
            d[3] *= up.w;
        };
        meet_by_boxes(even, odd, barrier, read, false);
    }

    // Adds the residual: the reverse of `store`.
    __device__ void add_residual(Box& box, const SwapAbAddends<Element, N>& addends) {
        if (output_.residual == nullptr) return;
#pragma unroll
        for (uint32_t begin = 0; begin < kAllTurns; begin += kTurns) {
            // several loads are under way at a time
            uint4 loaded[kTurns];
#pragma unroll
            for (uint32_t i = 0; i < kTurns && begin + i < kAllTurns; ++i) {
                if constexpr (addends.kHoldsResidual) {
                    loaded[i] = addends.residual[begin + i];
                } else {
                    const uint32_t row = piece_row(begin + i);
                    const bool is_there = has_piece(begin + i) && row < params_.m;
                    loaded[i] = residual_piece<Element>(output_, row, piece_column(), is_there);
                }
            }
            __syncwarp();
#pragma unroll
            for (uint32_t i = 0; i < kTurns && begin + i < kAllTurns; ++i) *piece(box, i) = loaded[i];
            __syncwarp();
#pragma unroll
            for (uint32_t i = 0; i < kTurns && begin + i < kAllTurns; ++i) {
                uint32_t words[4];
                ptx::ldmatrix_x4_trans(matrix_row(box, i), words[0], words[1], words[2], words[3]);
#pragma unroll
                for (uint32_t of = 0; of < 4 && (begin + i) * 8 + of * 2 < N / 2; ++of) {
                    const float2 addend = ptx::unpack<Element>(words[of]);
                    float* d = &d_[(begin + i) * 8 + of * 2];
                    d[0] += addend.x;
                    d[1] += addend.y;
                    ptx::pin(d[0]);
                    ptx::pin(d[1]);
                }
            }
        }
        __syncwarp();
    }

    // Stores 16 rows at a time, a sector of 32 bytes of each, as another type of 16 bits or the same.
    template <class Stored>
    __device__ void store(Box& box) const {
        uint8_t* out = static_cast<uint8_t*>(output_.out) + piece_column() * sizeof(Stored);
        each_piece<Stored>(box, [&](uint32_t turn, const uint4& values) {
            // A piece that begins within the row is written whole, as by TMA: rows are padded to 16 bytes.
            if (piece_row(turn) < params_.m && piece_column() < output_.n) {
                ptx::st_global(out + piece_row(turn) * output_.out_pitch, values);
            }
        });
    }

    // True if the warp's columns are in the output.
    __device__ bool has_columns() const { return column_ < output_.n; }

    // `store` for e4m3. The values of this lane's i-th row are multiplied by `factor(i)`. The warp's columns of a row are a
    // piece. There are a multiple of 16 columns.
    template <class Factor>
    __device__ void store_e4m3(Box& box, const Factor& factor) const {
        constexpr uint32_t kAtATime = sizeof(Box::elements) / kColumns;  // rows
        uint8_t* bytes = reinterpret_cast<uint8_t*>(box.elements);
        uint8_t* out = static_cast<uint8_t*>(output_.out) + column_;
#pragma unroll
        for (uint32_t first = 0; first < N; first += kAtATime) {
            __syncwarp();
#pragma unroll
            for (uint32_t of = 0; of < kAtATime && first + of < N; of += 8) {
                const float* d = &d_[(first + of) / 2];
                uint8_t* at = bytes + (of + lane_ % 4 * 2) * kColumns + lane_ / 4;
#pragma unroll
                for (uint32_t half = 0; half < 2; ++half) {
                    const float upper = d[half * 2] * factor((first + of) / 4);
                    const float lower = d[half * 2 + 1] * factor((first + of) / 4 + 1);
                    const uint16_t pair = family::round_to_e4m3(upper, lower);
                    at[half * 8] = pair & 0xff;
                    at[half * 8 + kColumns] = pair >> 8;
                }
            }
            __syncwarp();
#pragma unroll
            for (uint32_t of = 0; of < kAtATime && first + of < N; of += 32) {
                const uint32_t of_tile = first + of + lane_;
                if (of_tile >= N || row_ + of_tile >= params_.m || column_ >= output_.n) continue;
                const uint4 piece = *reinterpret_cast<const uint4*>(bytes + (of + lane_) * kColumns);
                ptx::st_global(out + (row_ + of_tile) * output_.out_pitch, piece);
            }
        }
        __syncwarp();
    }

    // `store` for f32, without the box. Eight lanes store a sector.
    __device__ void store_f32() const {
        const uint32_t left = column_ + lane_ / 4;
        uint8_t* out = static_cast<uint8_t*>(output_.out) + left * sizeof(float);
        const bool has_left = left < output_.n;
        const bool has_right = left + 8 < output_.n;
#pragma unroll
        for (uint32_t i = 0; i < N / 4; ++i) {
            const uint32_t row = row_ + i / 2 * 8 + lane_ % 4 * 2 + i % 2;
            const float* d = &d_[i / 2 * 4 + i % 2];
            float* at = reinterpret_cast<float*>(out + row * output_.out_pitch);
            if (row < params_.m && has_left) at[0] = d[0];
            if (row < params_.m && has_right) at[8] = d[2];
        }
    }

    static constexpr uint32_t kRows = 16;  // at a time

    // Rounds 16 rows at a time, and calls `use` with their number and this lane's piece of one of them. The last time
    // there may be 8.
    template <class Stored, class Use>
    __device__ void each_piece(Box& box, const Use& use) const {
#pragma unroll
        for (uint32_t i = 0; i < kAllTurns; ++i) {
            const auto pair = [&](uint32_t of) {
                const uint32_t first = i * 8 + of * 2;
                return first < N / 2 ? ptx::cvt_rn_x2<Stored>(d_[first], d_[first + 1]) : 0;
            };
            if (i >= kTurns) __syncwarp();
            ptx::stmatrix_x4_trans(matrix_row(box, i % kTurns), pair(0), pair(1), pair(2), pair(3));
            __syncwarp();
            if (has_piece(i)) use(i, *piece(box, i % kTurns));
        }
        // the box is filled for the next tile only after all lanes have read it
        __syncwarp();
    }

    // The place of this lane's piece, in `out`.
    __device__ uint32_t piece_column() const { return column_ + lane_ % kPieces * Box::kPiece; }
    __device__ uint32_t piece_row(uint32_t turn) const { return row_ + turn * kRows + lane_ / kPieces; }

private:
    static constexpr uint32_t kColumns = 16;
    static constexpr uint32_t kPieces = kColumns / Box::kPiece;                          // of a row
    static constexpr uint32_t kTurns = Box::kRows * Box::kColumns / (kRows * kColumns);  // by 16 rows, through a box
    static constexpr uint32_t kAllTurns = (N + kRows - 1) / kRows;
    static constexpr uint32_t kMetAtATime = sizeof(Box::elements) / (32 * sizeof(float4));  // fours of accumulators

    // False for the lanes that would have the other half of 16 rows, where the tile has 8.
    __device__ bool has_piece(uint32_t turn) const { return N % kRows == 0 || turn * kRows + lane_ / kPieces < N; }

    __device__ uint4* piece(Box& box, uint32_t turn) const {
        Element* rows = box.elements + turn * (kRows * kColumns);
        return reinterpret_cast<uint4*>(rows + lane_ / kPieces * kColumns + lane_ % kPieces * Box::kPiece);
    }

    // Lanes 0-7 and 8-15 name the rows of the left and the right piece, the others those eight rows below.
    __device__ uint32_t matrix_row(Box& box, uint32_t turn) const {
        Element* rows = box.elements + turn * (kRows * kColumns);
        return ptx::shared_address(rows + (lane_ / 16 * 8 + lane_ % 8) * kColumns + lane_ / 8 % 2 * Box::kPiece);
    }

    template <class Access>
    __device__ void meet_by_boxes(Box& even, Box& odd, uint32_t barrier, const Access& access, bool gives) const {
#pragma unroll
        for (uint32_t begin = 0; begin < N / 8; begin += kMetAtATime) {
            Box& box = begin / kMetAtATime % 2 == 0 ? even : odd;
            if (!gives) ptx::barrier_sync<64>(barrier);
#pragma unroll
            for (uint32_t i = 0; i < kMetAtATime && begin + i < N / 8; ++i) {
                access(reinterpret_cast<float4*>(box.elements) + i * 32 + lane_, &d_[(begin + i) * 4]);
            }
            if (gives) ptx::barrier_sync<64>(barrier);
        }
        // the boxes are filled for the next tile only after these have been read
        ptx::barrier_sync<64>(barrier);
    }

    float (&d_)[N / 2];
    const GemmeshParams& params_;
    const GemmeshOutput& output_;
    uint32_t row_;
    uint32_t column_;
    uint32_t lane_;
};

// The scales of the N rows of a tile whose columns are one block. Several warps have columns of it, some of them twice.
template <int N>
class SwapAbScales {
public:
    __device__ SwapAbScales() {
#pragma unroll
        for (float& value : of_row_) value = kLeastAmax;
    }

    // One warp: takes account of 16 columns. `d` are this lane's accumulators.
    __device__ void take(const float* d) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            // `fmaxf` ignores NaN
            const float* pair = &d[i / 2 * 4 + i % 2];
            of_row_[i] = fmaxf(fmaxf(of_row_[i], fabsf(pair[0])), fabsf(pair[2]));
        }
    }

    // All `Warps` warps: make the scales, and exchange what each has found through the first of its boxes, which begin at
    // `boxes`. `number` is the warp's. The first warp stores the scales of rows before `end`. `at` is the place of the
    // tile's first.
    template <int Warps, class Boxes>
    __device__ void make(Boxes* boxes, uint32_t number, uint32_t lane, uint32_t barrier, const GemmeshOutputScales& of,
                         float* at, uint32_t end) {
        const auto maxima = [&](uint32_t warp) { return reinterpret_cast<float*>(boxes[warp][0].elements); };
        // eight lanes have columns of a row
#pragma unroll
        for (uint32_t apart = 4; apart < 32; apart *= 2) {
#pragma unroll
            for (float& value : of_row_) value = fmaxf(value, __shfl_xor_sync(~0u, value, apart));
        }
        if (lane < 4) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) maxima(number)[i / 2 * 8 + lane * 2 + i % 2] = of_row_[i];
        }
        ptx::barrier_sync<Warps * 32>(barrier);
        // lane j has rows j, j + 32, ...
        float factors[(N + 31) / 32];
#pragma unroll
        for (uint32_t first = 0; first < N; first += 32) {
            const uint32_t row = min(first + lane, N - 1);
            float amax = kLeastAmax;
#pragma unroll
            for (uint32_t warp = 0; warp < Warps; ++warp) amax = fmaxf(amax, maxima(warp)[row]);
            const float scale = scale_of(of, amax);
            if (number == 0 && first + lane < min(end, N)) at[uint64_t{row} * of.row] = scale;
            factors[first / 32] = reciprocal(scale);
        }
        // the boxes are filled after all have read them
        ptx::barrier_sync<Warps * 32>(barrier);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const uint32_t row = i / 2 * 8 % 32 + lane % 4 * 2 + i % 2;
            of_row_[i] = __shfl_sync(~0u, factors[i / 2 * 8 / 32], row);
        }
    }

    // What the values of this lane's i-th row are multiplied by, when the scales are made.
    __device__ float factor(uint32_t i) const { return of_row_[i]; }

private:
    static constexpr int kRows = N / 4;  // of a lane
    float of_row_[kRows];  // the largest absolute value, and then the factor
};

}  // namespace gemmesh
