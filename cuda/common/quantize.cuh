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
    const float scale = __fdiv_rn(amax, kLargest);
    // the least power of two that is not below a normal number above 0; infinity stays
    return of.power_of_two == 0 ? scale : __uint_as_float((__float_as_uint(scale) + kFraction) & ~kFraction);
}

}  // namespace gemmesh
