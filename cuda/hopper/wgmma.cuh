// One warpgroup's share of a stage, multiplied by the tensor cores.
#pragma once

#include "../abi.h"
#include "ptx.cuh"

namespace gemmesh {

// Operands are K-major, their rows 128 bytes long and swizzled by 128 bytes, as TMA leaves them: groups of eight rows
// follow each other at 1024 bytes, and the leading dimension plays no role. All that is the upper half of a matrix
// descriptor; the lower half, kept apart because only it varies, holds the address in units of 16 bytes.
__device__ __forceinline__ uint32_t operand(const void* shared) {
    // The shuffle tells the compiler that the whole warp has one value, and keeps it from computing it anew each time.
    return __shfl_sync(~0u, ptx::shared_address(shared) >> 4, 0);
}

__device__ __forceinline__ constexpr uint32_t operand_step(uint32_t bytes) { return bytes >> 4; }

__device__ __forceinline__ uint64_t descriptor(uint32_t operand) {
    constexpr uint64_t kEightRows = 1024;
    constexpr uint64_t kSwizzle128B = 1;
    constexpr uint64_t kLayout = (kEightRows >> 4 << 32) | (kSwizzle128B << 62);
    return kLayout | operand;
}

// The accumulators of one warpgroup: 64 rows, N columns. ptx.cuh says which of them a thread holds.
template <class Element, int N>
struct Accumulators {
    float d[N / 2];

    // Issues the products of one stage, and leaves them running. `a` and `b` are the warpgroup's operands. The first
    // stage of a tile overwrites, which spares clearing the accumulators.
    __device__ void multiply(uint32_t a, uint32_t b, bool first) {
        constexpr int kInstructionK = 16;
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < GEMMESH_TILE_K / kInstructionK; ++k) {
            const uint32_t along_k = operand_step(k * kInstructionK * sizeof(Element));
            ptx::wgmma_mma_async<Element, N>(d, descriptor(a + along_k), descriptor(b + along_k), !first || k > 0);
        }
        ptx::wgmma_commit_group();
    }

    // Waits until at most Pending of the stages issued are still running.
    template <int Pending>
    __device__ void wait() {
        ptx::wgmma_wait_group<Pending>();
        if constexpr (Pending == 0) {
            // The registers change behind the compiler's back until here: keep their readers below.
#pragma unroll
            for (float& value : d) ptx::pin(value);
        }
    }
};

}  // namespace gemmesh
