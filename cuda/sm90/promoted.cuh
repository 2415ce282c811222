// Products of elements of 8 bits. The tensor cores' accumulators keep about 13 bits of their sums. So sums are promoted:
// after each step through K, which is GEMMESH_SCALE_BLOCK columns, its part is scaled and added to sums of f32.
#pragma once

#include "../abi.h"
#include "config.cuh"
#include "pipeline.cuh"
#include "ptx.cuh"
#include "scales.cuh"
#include "store.cuh"
#include "turn.cuh"
#include "wgmma.cuh"

namespace gemmesh {

// The parts that a consumer makes in a step, one after the other: its bands or, of one wide band, halves of the columns.
// If there are registers for two, one part is multiplied while the one before is promoted. Else the tensor cores have
// the other consumer's parts meanwhile.
template <class C>
class Parts {
public:
    static constexpr int kHalves = C::kBands == 1 && C::kColumns > 128 && C::kColumns % 16 == 0 ? 2 : 1;
    static constexpr int kCount = C::kBands * kHalves;
    static constexpr int kN = C::kColumns / kHalves;  // columns of a part
    static constexpr int kBuffers = C::kBands * C::kColumns / 2 + kN <= 176 ? 2 : 1;
    // Steps that are made at a time, so that there is a part to multiply while one is promoted. The compiler does not let
    // a product run on into the next turn of a loop that reads its registers.
    static constexpr int kSteps = kBuffers / kCount > 1 ? 2 : 1;
    // Whether the columns of a part may have one scale.
    static constexpr bool kMayBeUniform = !C::kSwapAb && GEMMESH_SCALE_BLOCK % kN == 0;

    // Issues the products of a part, and leaves them running. `a` and `b` are the operands' addresses in the stage.
    template <int Part, int Buffer>
    __device__ __forceinline__ void multiply(uint32_t a, uint32_t b) {
        constexpr uint32_t kBand = kHalves == 1 ? operand_distance(Part * kBandRows * GEMMESH_STAGE_ROW) : 0;
        constexpr uint32_t kHalf = kHalves == 1 ? 0 : operand_distance(Part * kN * GEMMESH_STAGE_ROW);
        if constexpr (C::kSwapAb) {
            buffers_[Buffer].template multiply<typename C::Swapped>(b + kBand, a + kHalf, true);
        } else {
            buffers_[Buffer].template multiply<typename C::Element>(a + kBand, b + kHalf, true);
        }
    }

    // Adds a part, which is complete, to the sums. With `Blocks`, it is scaled before. `is_uniform`: by one scale for all
    // of its columns.
    template <int Part, int Buffer, bool Blocks>
    __device__ __forceinline__ void promote(Bands<C>& sums, const StepScales<C>& scales, bool is_uniform) {
        constexpr int kBand = kHalves == 1 ? Part : 0;
        constexpr int kFirst = kHalves == 1 ? 0 : Part * (kN / 8);  // by 8 columns
        float* part = buffers_[Buffer].d;
        float* to = &sums[kBand].d[kFirst * 4];
        // The registers change behind the compiler's back until here.
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) ptx::pin(part[i]);
        if constexpr (!Blocks) {
#pragma unroll
            for (int i = 0; i < kN / 2; ++i) to[i] += part[i];
        } else if (kMayBeUniform && is_uniform) {
            const float4 scale = scales.of(kBand, kFirst);
#pragma unroll
            for (int group = 0; group < kN / 8; ++group) add_scaled(&to[group * 4], &part[group * 4], scale);
        } else {
#pragma unroll
            for (int group = 0; group < kN / 8; ++group) {
                add_scaled(&to[group * 4], &part[group * 4], scales.of(kBand, kFirst + group));
            }
        }
    }

private:
    __device__ static void add_scaled(float* to, const float* part, const float4& scale) {
        to[0] = fmaf(scale.x, part[0], to[0]);
        to[1] = fmaf(scale.y, part[1], to[1]);
        to[2] = fmaf(scale.z, part[2], to[2]);
        to[3] = fmaf(scale.w, part[3], to[3]);
    }

    Accumulators<kN> buffers_[kBuffers];
};

// One warpgroup: multiplies and promotes. With `Blocks`, each step has scales of its own.
template <class C, bool Blocks>
class PromotedProduct {
public:
    // `a` and `b` are its operands in the first stage.
    __device__ PromotedProduct(Bands<C>& sums, Shared<C>& shared, const ConsumerWarp<C>& self, uint32_t a, uint32_t b,
                               bool is_uniform)
        : sums_(sums), shared_(shared), self_(self), scales_(self), a_(a), b_(b), is_uniform_(is_uniform) {
#pragma unroll
        for (auto& band : sums_) {
#pragma unroll
            for (float& value : band.d) value = 0.0f;
        }
    }

    // The products of `count` steps through K.
    __device__ __forceinline__ void multiply(RingPosition<C::kStages>& at, Placed<C>& placed, uint32_t count) {
#pragma unroll 1
        for (uint32_t left = count; left >= P::kSteps; left -= P::kSteps) {
            make<P::kSteps * P::kCount>(at, at.stage);
            if constexpr (C::kSums) {
                if (count - left == placed.kReportStep) placed.report(self_.lane);
            }
        }
        if constexpr (P::kSteps > 1) {
            if (count % P::kSteps != 0) make<P::kCount>(at, at.stage);
        }
    }

private:
    using P = Parts<C>;
    static constexpr bool kOverlaps = P::kBuffers == 2;

    // Makes `Count` parts, from this one on, of the stages from `at` on. `before` is the stage of the part before.
    template <int Count, int Part = 0>
    __device__ __forceinline__ void make(RingPosition<C::kStages>& at, uint32_t before) {
        if constexpr (Part == Count) {
            finish<Part - 1, 0>(before);
            at.advance();
        } else {
            constexpr bool kIsFirst = Part % P::kCount == 0;  // of its stage
            if constexpr (kIsFirst && Part > 0) at.advance();
            if constexpr (kIsFirst) shared_.pipeline.wait_full(at);
            if constexpr (!kOverlaps && Part > 0) finish<Part - 1, 0>(before);
            parts_.template multiply<Part % P::kCount, Part % P::kBuffers>(a_ + at.stage * kStageA, b_ + at.stage * kStageB);
            if constexpr (Blocks && !kOverlaps && kIsFirst) scales_.read(shared_.scales[at.stage]);
            if constexpr (kOverlaps && Part > 0) finish<Part - 1, 1>(before);
            make<Count, Part + 1>(at, at.stage);
        }
    }

    // Waits for a part of a stage, while `Pending` later ones are being multiplied, and promotes it. With its last part,
    // the stage is free.
    template <int Part, int Pending>
    __device__ __forceinline__ void finish(uint32_t stage) {
        constexpr int kOfStage = Part % P::kCount;
        ptx::wgmma_wait_group<Pending>();
        if constexpr (Blocks && kOverlaps && kOfStage == 0) scales_.read(shared_.scales[stage]);
        if constexpr (kOfStage == P::kCount - 1) shared_.pipeline.release(stage, self_.lane, self_.cta);
        parts_.template promote<kOfStage, Part % P::kBuffers, Blocks>(sums_, scales_, is_uniform_);
    }

    static constexpr uint32_t kStageA = operand_distance(C::kBytesA);
    static constexpr uint32_t kStageB = operand_distance(C::kBytesB);
    Bands<C>& sums_;
    Shared<C>& shared_;
    const ConsumerWarp<C>& self_;
    P parts_;
    StepScales<C> scales_;
    uint32_t a_;
    uint32_t b_;
    bool is_uniform_;
};

// One warpgroup: the products of `count` steps through K, of all its bands, as `multiply`. `left` is the first column of
// its part of the tile, in the weight's output.
template <class C>
__device__ __forceinline__ void multiply_promoted(Bands<C>& sums, const GemmeshParams& params, Shared<C>& shared,
                                                  RingPosition<C::kStages>& at, const Turn<C>& turn, Placed<C>& placed,
                                                  const ConsumerWarp<C>& self, uint32_t a, uint32_t b, uint32_t count,
                                                  uint32_t weight, uint32_t left) {
    if (has_block_scales<C>(params)) {
        const uint32_t of_block = left + params.outputs[weight].scale_first;
        const bool is_uniform = !is_gated<C>(params) && of_block % Parts<C>::kN == 0;
        PromotedProduct<C, true>(sums, shared, self, a, b, is_uniform).multiply(at, placed, count);
    } else {
        PromotedProduct<C, false>(sums, shared, self, a, b, false).multiply(at, placed, count);
    }
    turn.end();
}

}  // namespace gemmesh
