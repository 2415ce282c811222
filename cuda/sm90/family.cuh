// How the kernels that families share do what not all architectures can. Each family has such a file, and nvcc finds the
// one of the family for which it compiles.
#pragma once

#include <cstdint>

namespace gemmesh::family {

// Lets the next kernel on the stream begin, if it may begin early, when every CTA has come here or has ended.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until the kernels before this one have ended and their writes are visible.
__device__ __forceinline__ void wait_for_predecessors() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Orders what this thread has seen, by ordinary loads, before the loads of `a` that it begins, which TMA makes: between
// the generic proxy and the async proxy.
__device__ __forceinline__ void fence_loads() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Rounds to e4m3, to nearest even; `low` goes to the lower address. What is too large becomes the largest number.
__device__ __forceinline__ uint16_t round_to_e4m3(float low, float high) {
    uint16_t packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

}  // namespace gemmesh::family
