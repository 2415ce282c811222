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

// The exponents of 2 that make exp(-s(x)): -x * p(x^2) * log2(e).
struct SiluExponent {
    __device__ __forceinline__ float operator()(float x) const { return x * -1.44269504f; }
};

// 2 sqrt(2 / pi) (1 + 0.044715 x^2): tanh, written as a sigmoid. Infinity must not meet a zero.
struct GeluTanhExponent {
    __device__ __forceinline__ float operator()(float x) const {
        return x * fmaf(-0.102943240f, fminf(x * x, 1e6f), -2.30220820f);
    }
};

// log(Phi(x) / Phi(-x)) / x, fitted by linear programming up to x = 5, for the least absolute error of x * Phi(x) and a
// thousandth of that of s. Beyond it the tails go to 0 and x. For an output of 16 bits three coefficients are enough: x
// * Phi(x) is off by less than 2^-15 of x, an eighth of the rounding error of f16. Seven coefficients, for f32, leave
// 2^-19.
struct GeluExponent16 {
    __device__ __forceinline__ float operator()(float x) const {
        const float square = fminf(x * x, 25.0f);
        return x * fmaf(fmaf(1.0095847e-3f, square, -0.10662830f), square, -2.3014578f);
    }
};

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
    switch (activation) {
        case GEMMESH_RELU:
#pragma unroll
            for (int i = 0; i < N; ++i) values[i] = ptx::max_nan(values[i], 0.0f);
            break;
        case GEMMESH_SILU: times_sigmoids<N>(values, SiluExponent()); break;
        case GEMMESH_GELU_TANH: times_sigmoids<N>(values, GeluTanhExponent()); break;
        case GEMMESH_GELU:
            if (is_f32) {
                times_sigmoids<N>(values, GeluExponent());
            } else {
                times_sigmoids<N>(values, GeluExponent16());
            }
            break;
        default: break;
    }
}

}  // namespace gemmesh
