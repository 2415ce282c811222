// How values of f32 become e4m3 and a scale.
#pragma once

#include "../abi.h"
#include "ptx.cuh"

namespace gemmesh {

// What the largest absolute value of a block is taken for at the least. It keeps the scale of a block of zeros above 0.
constexpr float kLeastAmax = 1e-4f;

// True if there is one scale, which is given.
__device__ __forceinline__ bool is_given(const GemmeshOutputScales& of) { return of.row == 0 && of.block == 0; }

// The scale of a block whose largest absolute value is this one.
__device__ __forceinline__ float scale_of(const GemmeshOutputScales& of, float amax) {
    constexpr float kLargest = 448.0f;  // of e4m3
    constexpr uint32_t kFraction = (1u << 23) - 1;
    // The quotient, rounded correctly without a division (Markstein, "Computation of elementary functions on the IBM RISC
    // System/6000 processor"). It was compared with the division for each number from kLeastAmax on. Infinity stays.
    const float near = amax * (1.0f / kLargest);
    const float rounded = fmaf(fmaf(-near, kLargest, amax), 1.0f / kLargest, near);
    const float scale = isinf(amax) ? amax : rounded;
    // the least power of two that is not below a normal number above 0; infinity stays
    return of.power_of_two == 0 ? scale : __uint_as_float((__float_as_uint(scale) + kFraction) & ~kFraction);
}

// One over a scale that scale_of made, rounded correctly. It is a normal number or infinity, so it needs none of
// __frcp_rn's care for others. It was compared with that for each of them.
__device__ __forceinline__ float reciprocal(float scale) {
    float near;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(scale));
    const float rounded = fmaf(near, fmaf(-near, scale, 1.0f), near);
    return isinf(scale) ? 0.0f : rounded;
}

}  // namespace gemmesh
