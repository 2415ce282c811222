// One warpgroup's share of a stage, multiplied by the tensor cores.
#pragma once

#include "../abi.h"
#include "abi.h"
#include "ptx.cuh"

namespace gemmesh {

// An operand's layout in shared memory, as TMA leaves it: rows of 128 bytes, swizzled by 128 bytes, in groups of eight
// rows at 1024 bytes. Each has a step of K. In a transposed (MN-major) operand, whose elements have 16 bits, each of
// these rows has one k and 64 consecutive m or n. The next 64 lie 64 rows further. That distance is the descriptor's
// leading dimension, which is unused otherwise.
//
// Only the address in a descriptor (bits 0 to 13, in units of 16 bytes) varies at run time, so it is kept apart.
template <bool IsTransposed>
struct Layout {
    static constexpr uint32_t kNext64 = IsTransposed ? 64 * 128 : 0;  // bytes from 64 m or n to the next
    static constexpr uint32_t kAlongK = IsTransposed ? 16 * 128 : 32;  // bytes from one instruction's k to the next
};

// The address of an operand, as its descriptor has it.
__device__ __forceinline__ uint32_t operand_address(const void* shared) {
    // The upper bits of the address name the CTA of a cluster. In a descriptor the leading dimension stands there.
    constexpr uint32_t kOfCta = (1 << 18) - 1;
    // The shuffle tells the compiler that the whole warp has one value, and keeps it from computing it anew each time.
    return __shfl_sync(~0u, (ptx::shared_address(shared) & kOfCta) >> 4, 0);
}

// A distance between operands, in the descriptor's units.
__device__ __forceinline__ constexpr uint32_t operand_distance(uint32_t bytes) { return bytes >> 4; }

template <bool IsTransposed>
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    constexpr uint64_t kEightRows = 1024;
    constexpr uint64_t kSwizzle128B = 1;
    constexpr uint64_t kNext64 = Layout<IsTransposed>::kNext64;
    constexpr uint64_t kLayout = (kNext64 >> 4 << 16) | (kEightRows >> 4 << 32) | (kSwizzle128B << 62);
    return kLayout | address;
}

// The accumulators of one warpgroup: 64 rows, N columns. ptx.cuh says which of them a thread holds.
template <int N>
struct Accumulators {
    float d[N / 2];

    // Issues the products of one stage, and leaves them running. `a` and `b` are the addresses of the warpgroup's
    // operands, whose layouts may be transposed. The first stage of a tile overwrites, which spares clearing the
    // accumulators.
    template <class Element, bool TransA = false, bool TransB = false>
    __device__ void multiply(uint32_t a, uint32_t b, bool first) {
        constexpr int kInstructionBytes = 32;  // of K
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < GEMMESH_STAGE_ROW / kInstructionBytes; ++k) {
            const uint64_t k_of_a = descriptor<TransA>(a + operand_distance(k * Layout<TransA>::kAlongK));
            const uint64_t k_of_b = descriptor<TransB>(b + operand_distance(k * Layout<TransB>::kAlongK));
            ptx::Wgmma<Element, N>::template mma_async<TransA, TransB>(d, k_of_a, k_of_b, !first || k > 0);
        }
        ptx::wgmma_commit_group();
    }

    // Waits until nothing that was issued is still running.
    __device__ void wait() {
        ptx::wgmma_wait_group<0>();
        // The registers change behind the compiler's back until here: keep their readers below.
#pragma unroll
        for (float& value : d) ptx::pin(value);
    }
};

}  // namespace gemmesh
