// A kernel that adds up the ranks' parts of the same rows when all of them have come. It is a module of its own.

#include <family.cuh>

#include "../abi.h"
#include "../common/ptx.cuh"
#include "reduce.cuh"

namespace {

template <class Element>
__device__ void run(const GemmeshReduction& reduction) {
    gemmesh::family::launch_dependents();
    gemmesh::reduce<Element>(reduction);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(GEMMESH_REDUCE_THREADS)
    gemmesh_reduce_bf16(const __grid_constant__ GemmeshReduction reduction) {
    run<__nv_bfloat16>(reduction);
}

extern "C" __global__ void __launch_bounds__(GEMMESH_REDUCE_THREADS)
    gemmesh_reduce_f16(const __grid_constant__ GemmeshReduction reduction) {
    run<__half>(reduction);
}

extern "C" __global__ void __launch_bounds__(GEMMESH_REDUCE_THREADS)
    gemmesh_reduce_f32(const __grid_constant__ GemmeshReduction reduction) {
    run<float>(reduction);
}
