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

// One warp's scales of the parts that a step through K makes.
template <class C>
class StepScales {
public:
    __device__ explicit StepScales(const ConsumerWarp<C>& self) : self_(self) {}

    // Reads those of a stage, which are there. Afterwards the stage may be written.
    __device__ __forceinline__ void read(const StageScales<C>& stage) {
        if constexpr (C::kSwapAb) {
#pragma unroll
            for (uint32_t i = 0; i < kOfA; ++i) {
                const float of_a = stage.a[min(self_.lane + i * 32, C::kTileM - 1)];
#pragma unroll
                for (uint32_t band = 0; band < C::kBands; ++band) {
                    float& product = of_a_[band * kOfA + i];
                    product = of_a * stage.b[self_.part(band)];
                    ptx::pin(product);
                }
            }
        } else {
#pragma unroll
            for (uint32_t i = 0; i < kOfA; ++i) {
                of_a_[i] = stage.a[self_.row(i / 2) + self_.lane / 4 + i % 2 * 8];
                ptx::pin(of_a_[i]);
            }
            constexpr uint32_t kOfB = C::kTileN / StageScales<C>::kRowsOfB;
            const uint32_t first = C::kSideBySide ? self_.consumer * (kOfB / kConsumers) : 0;
            of_b_ = stage.b[min(first + self_.lane, kOfB - 1)];
            ptx::pin(of_b_);
        }
    }

    // Those of the four accumulators of the group-th 8 columns of a band.
    __device__ __forceinline__ float4 of(uint32_t band, uint32_t group) const {
        if constexpr (C::kSwapAb) {
            const float rows = of_a_[band * kOfA + group / 4];
            const uint32_t lane = group % 4 * 8 + self_.lane % 4 * 2;
            const float even = __shfl_sync(~0u, rows, lane);
            const float odd = __shfl_sync(~0u, rows, lane + 1);
            return {even, odd, even, odd};
        } else {
            const float of_b = __shfl_sync(~0u, of_b_, group / 2);
            const float upper = of_a_[band * 2] * of_b;
            const float lower = of_a_[band * 2 + 1] * of_b;
            return {upper, upper, lower, lower};
        }
    }

private:
    // A lane reads the scales of its accumulators' rows. With swap_ab, it reads those of every 32nd row, for all lanes,
    // and multiplies them by the scale of the warp's rows of `b`.
    static constexpr uint32_t kOfA = C::kSwapAb ? (C::kTileM + 31) / 32 : C::kBands * 2;

    const ConsumerWarp<C>& self_;
    float of_a_[(C::kSwapAb ? C::kBands : 1) * kOfA];
    float of_b_;  // lane j has that of the consumer's columns 16 j to 16 j + 15
};

// One warp's scales of the whole sums of a band. They are loaded while the tensor cores multiply.
template <class C>
class SumScales {
public:
    // `row` and `column` are the tile's first ones, and `left` is the warp's first column.
    __device__ void load(const GemmeshParams& params, const ConsumerWarp<C>& self, uint32_t weight, uint32_t band, uint32_t row,
                         uint32_t column, uint32_t left) {
        if (has_block_scales<C>(params)) return;
        const uint32_t first = C::kSwapAb ? row + self.lane : row + self.row(band) + self.lane / 4;
#pragma unroll
        for (uint32_t i = 0; i < kOfA; ++i) {
            of_a_[i] = scale_of(params.scales.a, params.scales.a_row, first + i * (C::kSwapAb ? 32 : 8), params.m);
        }
        if constexpr (C::kSwapAb) {
            const SwapAbPart<C> part(params, self, band);
            const GemmeshOutput& output = params.outputs[part.is_up ? 1 : weight];
            load_pair(0, output, column + part.column() + self.lane / 4, 8);
        } else {
#pragma unroll
            for (uint32_t i = 0; i < kOfB; ++i) {
                const uint32_t group = self.lane / 4 + 8 * i;
                const bool is_up = is_gated<C>(params) && group >= kGroups / 2;
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
    // As StepScales and ColumnBias.
    static constexpr uint32_t kOfA = C::kSwapAb ? (C::kTileM + 31) / 32 : 2;
    static constexpr uint32_t kOfB = C::kSwapAb ? 1 : (kGroups + 7) / 8;

    // 1 if there is none.
    __device__ static float scale_of(const float* scales, uint32_t apart, uint32_t index, uint32_t end) {
        return scales == nullptr || index >= end ? 1.0f : __ldg(scales + index * apart);
    }

    // Those of two columns.
    __device__ void load_pair(uint32_t i, const GemmeshOutput& output, uint32_t column, uint32_t apart) {
        of_b_[i].x = scale_of(output.scales, output.scale_row, column, output.n);
        of_b_[i].y = scale_of(output.scales, output.scale_row, column + apart, output.n);
    }

    float of_a_[kOfA];
    float2 of_b_[kOfB];
};

}  // namespace gemmesh
