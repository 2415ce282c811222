// On GPUs of compute capability 8, kernels follow one another, and every load is an ordinary one.
#pragma once

#include <cstdint>
#include <cuda_fp8.h>

namespace gemmesh::family {

__device__ __forceinline__ void launch_dependents() {}
__device__ __forceinline__ void wait_for_predecessors() {}
__device__ __forceinline__ void fence_loads() {}

__device__ __forceinline__ uint16_t round_to_e4m3(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(float2{low, high}, __NV_SATFINITE, __NV_E4M3);
}

}  // namespace gemmesh::family
