// Products of elements of 8 bits. The tensor cores' accumulators keep about 13 bits of their sums. So sums are promoted:
// after each step through K, which is GEMMESH_SCALE_BLOCK columns, its part is scaled and added to sums of f32.
#pragma once

#include "../abi.h"
#include "abi.h"
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
template <class C, Scaling S>
class Parts {
public:
    static constexpr int kPieces = C::kBands == 1 && C::kColumns > 128 && C::kColumns % 16 == 0 ? 2 : 1;  // of a band
    static constexpr int kCount = C::kBands * kPieces;
    static constexpr int kN = C::kColumns / kPieces;  // columns of a part
    // Registers that there are for sums and two parts. Scales take some, and so does the other code of a kernel of all forms
    // or of sums.
    static constexpr int kMostOfTwo = S == Scaling::kNone && kPieces == 2 && !C::kGates ? 192
                                      : S != Scaling::kNone && C::kSums                 ? 160
                                                                                        : 176;
    static constexpr int kBuffers = C::kBands * C::kColumns / 2 + kN <= kMostOfTwo ? 2 : 1;
    // Steps that are made at a time, so that there is a part to multiply while one is promoted. The compiler does not let
    // a product run on into the next turn of a loop that reads its registers.
    static constexpr int kSteps = kBuffers / kCount > 1 ? 2 : 1;
    // Whether the columns of a part may have one scale.
    static constexpr bool kMayBeUniform = !C::kSwapAb && GEMMESH_SCALE_BLOCK % kN == 0;

    // Issues the products of a part, and leaves them running. `a` and `b` are the operands' addresses in the stage.
    template <int Part, int Buffer>
    __device__ __forceinline__ void multiply(uint32_t a, uint32_t b) {
        constexpr uint32_t kBand = kPieces == 1 ? operand_distance(Part * kBandRows * GEMMESH_STAGE_ROW) : 0;
        constexpr uint32_t kPiece = kPieces == 1 ? 0 : operand_distance(Part * kN * GEMMESH_STAGE_ROW);
        if constexpr (C::kSwapAb) {
            buffers_[Buffer].template multiply<typename C::Swapped>(b + kBand, a + kPiece, true);
        } else {
            buffers_[Buffer].template multiply<typename C::Element>(a + kBand, b + kPiece, true);
        }
    }

    using Scales = std::conditional_t<C::kSwapAb, SwapAbPartScales<C>, PartScales<C, kN, S>>;

    // Reads the scales of a part from its stage.
    template <int Part>
    __device__ __forceinline__ static void read(Scales& scales, const StageScales<C>& stage, const ConsumerWarp<C>& self) {
        scales.template read<kFirst<Part>>(stage, self, kBand<Part>);
    }

    // Adds a part, which is complete, to the sums, scaled.
    template <int Part, int Buffer>
    __device__ __forceinline__ void promote(Bands<C>& sums, const Scales& scales) {
        float* part = buffers_[Buffer].d;
        float* to = &sums[kBand<Part>].d[kFirst<Part> / 2];
        // The registers change behind the compiler's back until here.
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) ptx::pin(part[i]);
        if constexpr (S == Scaling::kNone) {
#pragma unroll
            for (int i = 0; i < kN / 2; ++i) to[i] += part[i];
        } else {
#pragma unroll
            for (int group = 0; group < kN / 8; ++group) {
                scales.template add<kFirst<Part>>(&to[group * 4], &part[group * 4], group);
            }
        }
    }

private:
    template <int Part>
    static constexpr uint32_t kBand = kPieces == 1 ? Part : 0;
    template <int Part>
    static constexpr int kFirst = kPieces == 1 ? 0 : Part * kN;  // column of the band

    Accumulators<kN> buffers_[kBuffers];
};

// One warpgroup: multiplies and promotes.
template <class C, Scaling S>
class PromotedProduct {
public:
    // `a` and `b` are its operands in the first stage.
    __device__ PromotedProduct(Bands<C>& sums, Shared<C>& shared, const ConsumerWarp<C>& self, uint32_t a, uint32_t b)
        : sums_(sums), shared_(shared), self_(self), a_(a), b_(b) {
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
    using P = Parts<C, S>;
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
            if constexpr (S != Scaling::kNone) {
                // The part's instructions stand together, for the tensor cores wait for what is between them.
                __syncwarp();
                P::template read<Part % P::kCount>(scales_[Part % P::kBuffers], shared_.scales[at.stage], self_);
            }
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
        if constexpr (kOfStage == P::kCount - 1) shared_.pipeline.release(stage, self_.lane, self_.cta);
        parts_.template promote<kOfStage, Part % P::kBuffers>(sums_, scales_[Part % P::kBuffers]);
    }

    static constexpr uint32_t kStageA = operand_distance(C::kBytesA);
    static constexpr uint32_t kStageB = operand_distance(C::kBytesB);
    Bands<C>& sums_;
    Shared<C>& shared_;
    const ConsumerWarp<C>& self_;
    P parts_;
    typename P::Scales scales_[P::kBuffers];
    uint32_t a_;
    uint32_t b_;
};

// Whether the columns of each part have one scale. `left` is as in multiply_promoted.
template <class C>
__device__ __forceinline__ bool has_uniform_parts(const GemmeshParams& params, uint32_t weight, uint32_t left) {
    using Uniform = Parts<C, Scaling::kUniform>;
    constexpr uint32_t kN = Uniform::kN;
    if (!Uniform::kMayBeUniform) return false;
    const auto begins_with_part = [&](const GemmeshOutput& output) { return (left + output.scale_first) % kN == 0; };
    if (!is_gated<C>(params)) return begins_with_part(params.outputs[weight]);
    return C::kGateRows % kN == 0 && begins_with_part(params.outputs[0]) && begins_with_part(params.outputs[1]);
}

// One warpgroup: the products of `count` steps through K, of all its bands, as `multiply`. `left` is the first column of
// its part of the tile, in the weight's output.
template <class C>
__device__ __forceinline__ void multiply_promoted(Bands<C>& sums, const GemmeshParams& params, Shared<C>& shared,
                                                  RingPosition<C::kStages>& at, const Turn<C>& turn, Placed<C>& placed,
                                                  const ConsumerWarp<C>& self, uint32_t a, uint32_t b, uint32_t count,
                                                  uint32_t weight, uint32_t left) {
    if (!has_block_scales<C>(params)) {
        PromotedProduct<C, Scaling::kNone>(sums, shared, self, a, b).multiply(at, placed, count);
    } else if (has_uniform_parts<C>(params, weight, left)) {
        constexpr Scaling kUniform = Parts<C, Scaling::kUniform>::kMayBeUniform ? Scaling::kUniform : Scaling::kBy16;
        PromotedProduct<C, kUniform>(sums, shared, self, a, b).multiply(at, placed, count);
    } else {
        PromotedProduct<C, Scaling::kBy16>(sums, shared, self, a, b).multiply(at, placed, count);
    }
    turn.end();
}

}  // namespace gemmesh
