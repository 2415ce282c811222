// The scales of operands of 8 bits: of parts of sums, by blocks, and of whole sums, by rows and columns.
#pragma once

#include "../abi.h"
#include "config.cuh"
#include "pipeline.cuh"
#include "ptx.cuh"
#include "tile.cuh"

namespace gemmesh {

// One warp, the producer of `a`: copies the scales of the blocks of a tile's rows, stage by stage. Rows past the edge
// have zeros.
template <class C>
class RowScaleCopies {
public:
    // `row` is the tile's first.
    __device__ RowScaleCopies(const GemmeshParams& params, uint32_t row, uint32_t lane)
        : params_(params), row_(row + lane), lane_(lane) {}

    // Copies those of a step through K. Addresses are computed anew each time, because there are no registers to keep
    // them. A CTA without a part of K has a step after its end, whose scales are zeros.
    __device__ void copy(const Stages<C>& stages, uint32_t stage, uint32_t step) {
        const GemmeshScales& scales = params_.scales;
        const uint32_t rows = step * C::kTileK < params_.k ? params_.m : 0;
        const uint32_t to = stages.scales(stage).value + offsetof(StageScales<C>, a) + lane_ * sizeof(float);
        uint32_t from = row_ * scales.a_row + step * scales.a_block;
#pragma unroll
        for (uint32_t first = 0; first < C::kTileM; first += 32, from += 32 * scales.a_row) {
            if (first + lane_ >= C::kTileM) break;
            ptx::cp_async_4(to + first * sizeof(float), scales.a + from, row_ + first < rows);
        }
        ptx::cp_async_mbarrier_arrive(stages.full(stage));
    }

private:
    const GemmeshParams& params_;
    uint32_t row_;  // this lane's first
    uint32_t lane_;
};

// One warp, the producer of `b`: the same for the blocks of a tile's rows of `b`. A lane has the scale of 16 rows.
template <class C>
class WeightScaleCopies {
public:
    // `column` is the tile's first in its output.
    __device__ WeightScaleCopies(const GemmeshParams& params, uint32_t weight, uint32_t column, uint32_t lane)
        : params_(params), lane_(lane) {
        const uint32_t row = lane * StageScales<C>::kRowsOfB;
        const bool gated = is_gated<C>(params);
        const uint32_t group = row / C::kGateRows;  // even ones are gate's
        const GemmeshOutput& output = params.outputs[gated ? group % 2 : weight];
        const uint32_t of_weight = column + (gated ? group / 2 * C::kGateRows + row % C::kGateRows : row);
        is_there_ = of_weight < output.n;
        from_ = output.scales + (of_weight + output.scale_first) / GEMMESH_SCALE_BLOCK * output.scale_row;
    }

    // Copies those of a step through K.
    __device__ void copy(const Stages<C>& stages, uint32_t stage, uint32_t step) {
        const uint32_t to = stages.scales(stage).value + offsetof(StageScales<C>, b) + lane_ * sizeof(float);
        const bool is_there = is_there_ && step * C::kTileK < params_.k;
        if (lane_ < C::kTileN / StageScales<C>::kRowsOfB) ptx::cp_async_4(to, from_ + step, is_there);
        ptx::cp_async_mbarrier_arrive(stages.full(stage));
    }

private:
    const GemmeshParams& params_;
    uint32_t lane_;
    bool is_there_;
    const float* from_;
};

// How a part of a step's sums is scaled before it is added: not at all, all of its N columns by one scale of `b`, or each
// 16 of them by one.
enum class Scaling { kNone, kUniform, kBy16 };

// One warp's scales of a part of a step through K: of N columns of a band. A read from shared memory takes long while the
// tensor cores read their operands there. So all reads stand together, and a scale comes from another lane, which takes as
// long again, only where there are no registers.
template <class C, int N, Scaling S>
class PartScales {
public:
    // Reads those of a stage, which are there. The part's first column is `First`.
    template <int First>
    __device__ __forceinline__ void read(const StageScales<C>& stage, const ConsumerWarp<C>& self, uint32_t band) {
        constexpr int kCount = S == Scaling::kUniform ? 1 : (First % kColumns + N + kColumns - 1) / kColumns;
        const uint32_t column = (C::kSideBySide ? self.consumer * C::kConsumerN : 0) + First;
        const float* of_b = &stage.b[column / kColumns];
        const float* of_a = &stage.a[self.row(band) + self.lane / 4];
        upper_ = of_a[0];
        lower_ = of_a[Place::kRowsApart];
        if constexpr (kIsHeld) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) of_b_[i] = of_b[i];
        } else {
            of_b_[0] = of_b[self.lane % kCount];
        }
        if constexpr (S == Scaling::kUniform) {
            upper_ *= of_b_[0];
            lower_ *= of_b_[0];
        }
        ptx::pin(upper_);
        ptx::pin(lower_);
    }

    // Adds the group-th 8 columns of the part, scaled. `part` and `sums` are those of the group.
    template <int First>
    __device__ __forceinline__ void add(float* sums, const float* part, int group) const {
        float upper = upper_;
        float lower = lower_;
        if constexpr (S == Scaling::kBy16) {
            const int index = (First % kColumns + group * 8) / kColumns;
            const float of_b = kIsHeld ? of_b_[index] : __shfl_sync(~0u, of_b_[0], index);
            upper *= of_b;
            lower *= of_b;
        }
        sums[0] = fmaf(upper, part[0], sums[0]);
        sums[1] = fmaf(upper, part[1], sums[1]);
        sums[2] = fmaf(lower, part[2], sums[2]);
        sums[3] = fmaf(lower, part[3], sums[3]);
    }

private:
    static constexpr int kColumns = StageScales<C>::kRowsOfB;
    // Whether a lane holds all scales of `b`. The widest tiles have no registers for that, so lane j holds the j-th.
    static constexpr bool kIsHeld = S == Scaling::kUniform || C::kColumns <= 224;
    float upper_;  // of a lane's rows, and of the columns too if they have one
    float lower_;
    float of_b_[S == Scaling::kBy16 && kIsHeld ? N / kColumns + 1 : 1];  // by 16 columns
};

// The same with swap_ab: of a band, whose columns are rows of `a`. A lane reads the scale of every 32nd of these, for all
// lanes, and multiplies it by the scale of the warp's rows of `b`.
template <class C>
class SwapAbPartScales {
public:
    template <int First>
    __device__ __forceinline__ void read(const StageScales<C>& stage, const ConsumerWarp<C>& self, uint32_t band) {
        const float of_b = stage.b[self.part(band)];
#pragma unroll
        for (uint32_t i = 0; i < kCount; ++i) {
            scales_[i] = stage.a[min(self.lane + i * 32, C::kTileM - 1)] * of_b;
            ptx::pin(scales_[i]);
        }
    }

    template <int First>
    __device__ __forceinline__ void add(float* sums, const float* part, int group) const {
        const uint32_t lane = group % 4 * 8 + threadIdx.x % 4 * 2;
        const float even = __shfl_sync(~0u, scales_[group / 4], lane);
        const float odd = __shfl_sync(~0u, scales_[group / 4], lane + 1);
        sums[0] = fmaf(even, part[0], sums[0]);
        sums[1] = fmaf(odd, part[1], sums[1]);
        sums[2] = fmaf(even, part[2], sums[2]);
        sums[3] = fmaf(odd, part[3], sums[3]);
    }

private:
    static constexpr uint32_t kCount = (C::kTileM + 31) / 32;
    float scales_[kCount];
};

// One warp's scales of the whole sums of a band.
template <class C>
class SumScales {
public:
    // Those of rows of `a`, which may come with the rows. `row` is the tile's first.
    __device__ void load_rows(const GemmeshParams& params, const ConsumerWarp<C>& self, uint32_t band, uint32_t row) {
        const uint32_t first = C::kSwapAb ? row + self.lane : row + self.row(band) + self.lane / 4;
#pragma unroll
        for (uint32_t i = 0; i < kOfA; ++i) {
            const uint32_t of_a = first + i * (C::kSwapAb ? 32 : 8);
            of_a_[i] = params.scales.a == nullptr || of_a >= params.m ? 1.0f : params.scales.a[of_a * params.scales.a_row];
        }
    }

    // Those of the weight. `column` is the tile's first column, and `left` the warp's.
    __device__ void load_columns(const GemmeshParams& params, const ConsumerWarp<C>& self, uint32_t weight, uint32_t band,
                                 uint32_t column, uint32_t left) {
        if constexpr (C::kSwapAb) {
            const SwapAbPart<C> part(params, self, band);
            const GemmeshOutput& output = params.outputs[part.is_up ? 1 : weight];
            load_pair(0, output, column + part.column() + self.lane / 4, 8);
        } else {
#pragma unroll
            for (uint32_t i = 0; i < kOfB; ++i) {
                const uint32_t group = self.lane / 4 + 8 * i;
                // all lanes alike, if half of the groups are a multiple of eight
                const bool is_up = is_gated<C>(params) && (kGroups % 16 == 0 ? 8 * i : group) >= kGroups / 2;
                const uint32_t of_weight = left + (is_up ? group - kGroups / 2 : group) * 8 + self.lane % 4 * 2;
                load_pair(i, params.outputs[is_up ? 1 : weight], of_weight, 1);
            }
        }
    }

    // All lanes of the warp: scales the band's sums, by the weight's scale first.
    __device__ __forceinline__ void apply(Accumulators<C::kColumns>& sums, const GemmeshParams& params, uint32_t lane) const {
        if (has_block_scales<C>(params)) return;
#pragma unroll
        for (uint32_t group = 0; group < kGroups; ++group) {
            float* d = &sums.d[group * 4];
            if constexpr (C::kSwapAb) {
                const uint32_t of_row = group % 4 * 8 + lane % 4 * 2;
                const float even = __shfl_sync(~0u, of_a_[group / 4], of_row);
                const float odd = __shfl_sync(~0u, of_a_[group / 4], of_row + 1);
                d[0] = even * (of_b_[0].x * d[0]);
                d[1] = odd * (of_b_[0].x * d[1]);
                d[2] = even * (of_b_[0].y * d[2]);
                d[3] = odd * (of_b_[0].y * d[3]);
            } else {
                const uint32_t of_column = group % 8 * 4 + lane % 4;
                const float left = __shfl_sync(~0u, of_b_[group / 8].x, of_column);
                const float right = __shfl_sync(~0u, of_b_[group / 8].y, of_column);
                d[0] = of_a_[0] * (left * d[0]);
                d[1] = of_a_[0] * (right * d[1]);
                d[2] = of_a_[1] * (left * d[2]);
                d[3] = of_a_[1] * (right * d[3]);
            }
        }
    }

private:
    static constexpr uint32_t kGroups = C::kColumns / 8;
    // As SwapAbPartScales and ColumnBias.
    static constexpr uint32_t kOfA = C::kSwapAb ? (C::kTileM + 31) / 32 : 2;
    static constexpr uint32_t kOfB = C::kSwapAb ? 1 : (kGroups + 7) / 8;

    // Those of two columns, 1 if there is none.
    __device__ void load_pair(uint32_t i, const GemmeshOutput& output, uint32_t column, uint32_t apart) {
        const float* scales = output.scales;
        const uint32_t scale_row = output.scale_row;
        const uint32_t n = output.n;
        const auto scale_of = [&](uint32_t of) { return scales == nullptr || of >= n ? 1.0f : __ldg(scales + of * scale_row); };
        of_b_[i].x = scale_of(column);
        of_b_[i].y = scale_of(column + apart);
    }

    float of_a_[kOfA];
    float2 of_b_[kOfB];
};

}  // namespace gemmesh
