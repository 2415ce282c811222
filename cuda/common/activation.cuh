// Activations, which are applied to a product before it is stored: GEMMESH_RELU and the rest.
#pragma once

#include "../abi.h"
#include "ptx.cuh"

namespace gemmesh {

// All but ReLU are x * sigmoid(s(x)) = x / (1 + exp(-s(x))), with s(x) = x * p(x^2). Each result depends on its value
// alone. So a row has the same bits in any batch and by any kernel, and NaN and infinity do not spread. Four values
// that share one reciprocal would cost less, because MUFU's rate is an eighth.
template <class Exponent>
__device__ __forceinline__ float times_sigmoid(float x, const Exponent& exponent) {
    // of a large negative x: x * 1 / (1 + infinity)
    return x * ptx::rcp_approx(1.0f + ptx::ex2_approx(exponent(x)));
}

// The exponent of 2 that makes exp(-s(x)): -x * p(x^2) * log2(e). Functions differ in its numbers alone. The code of each
// would be as long as all else that finishes a tile.
struct Exponent {
    float p0;
    float p1;
    float p2;
    float most;  // of x^2: infinity must not meet a zero

    __device__ __forceinline__ float operator()(float x) const {
        const float square = fminf(x * x, most);
        return x * fmaf(fmaf(p2, square, p1), square, p0);
    }
};

// For the exact GELU, s(x) = log(Phi(x) / Phi(-x)), fitted by linear programming up to x = 5, for the least absolute
// error of x * Phi(x) and a thousandth of that of s. Beyond it the tails go to 0 and x. For an output of 16 bits three
// coefficients are enough: x * Phi(x) is off by less than 2^-15 of x, an eighth of the rounding error of f16.
__device__ __forceinline__ Exponent exponent_of(uint32_t activation) {
    switch (activation) {
        case GEMMESH_SILU: return {-1.44269504f, 0.0f, 0.0f, 1.0f};
        // 2 sqrt(2 / pi) (1 + 0.044715 x^2): tanh, written as a sigmoid
        case GEMMESH_GELU_TANH: return {-2.30220820f, -0.102943240f, 0.0f, 1e6f};
        default: return {-2.3014578f, -0.10662830f, 1.0095847e-3f, 25.0f};
    }
}

// The exact GELU for an output of f32. Seven coefficients leave 2^-19.
struct GeluExponent {
    __device__ __forceinline__ float operator()(float x) const {
        const float square = fminf(x * x, 25.0f);
        float p = -3.233164e-9f;
        p = fmaf(p, square, 2.81341e-7f);
        p = fmaf(p, square, -9.5452015e-6f);
        p = fmaf(p, square, 1.4453246e-4f);
        p = fmaf(p, square, 1.4350045e-4f);
        p = fmaf(p, square, -0.10489373f);
        p = fmaf(p, square, -2.3021927f);
        return x * p;
    }
};

template <int N, class Exponent>
__device__ __forceinline__ void times_sigmoids(float* values, const Exponent& exponent) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = times_sigmoid(values[i], exponent);
}

template <int N>
__device__ __forceinline__ void activate(float* values, uint32_t activation, bool is_f32) {
    if (activation == GEMMESH_IDENTITY) return;
    if (activation == GEMMESH_RELU) {
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = ptx::max_nan(values[i], 0.0f);
    } else if (activation == GEMMESH_GELU && is_f32) {
        times_sigmoids<N>(values, GeluExponent());
    } else {
        times_sigmoids<N>(values, exponent_of(activation));
    }
}

}  // namespace gemmesh
