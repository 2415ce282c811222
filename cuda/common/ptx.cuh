// The inline assembly that families share: clocks, and memory that the whole system sees. Each function is one
// instruction, named as in the PTX ISA.
#pragma once

#include <cstdint>

namespace gemmesh::ptx {

// ---- special registers ---------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t smid() {
    uint32_t sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    return sm;
}

__device__ __forceinline__ uint64_t globaltimer() {
    uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

// ---- barriers ------------------------------------------------------------------------------------------------------

// Meets `Threads` threads of the CTA, whole warps, at barrier `Barrier`.
template <int Barrier, int Threads>
__device__ __forceinline__ void barrier_sync() {
    asm volatile("barrier.sync %0, %1;" ::"n"(Barrier), "n"(Threads) : "memory");
}

// The same at a barrier whose number is known only at run time.
template <int Threads>
__device__ __forceinline__ void barrier_sync(uint32_t barrier) {
    asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "n"(Threads) : "memory");
}

// Arrives at the barrier without waiting.
template <int Barrier, int Threads>
__device__ __forceinline__ void barrier_arrive() {
    asm volatile("barrier.arrive %0, %1;" ::"n"(Barrier), "n"(Threads) : "memory");
}

// The same at a barrier whose number is known only at run time.
template <int Threads>
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "n"(Threads) : "memory");
}

// Meets them. Returns true if all of them say so.
template <int Barrier, int Threads>
__device__ __forceinline__ bool barrier_red_and(bool says) {
    uint32_t all;
    asm volatile("{\n"
                 ".reg .pred p, q;\n"
                 "setp.ne.b32 p, %1, 0;\n"
                 "barrier.red.and.pred q, %2, %3, p;\n"
                 "selp.b32 %0, 1, 0, q;\n"
                 "}\n"
                 : "=r"(all)
                 : "r"(static_cast<uint32_t>(says)), "n"(Barrier), "n"(Threads)
                 : "memory");
    return all != 0;
}

// ---- global memory, seen by the whole system -----------------------------------------------------------------------

__device__ __forceinline__ uint32_t ld_acquire_sys(const volatile uint32_t* address) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint32_t ld_relaxed_sys(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void st_relaxed_sys(uint32_t* address, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_release_sys(uint32_t* address, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Two words side by side, at a multiple of 8 bytes, which are written at once.
__device__ __forceinline__ void st_relaxed_sys_pair(uint32_t* address, uint32_t first, uint32_t second) {
    const uint64_t both = uint64_t{second} << 32 | first;
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(both) : "memory");
}

// Two words of 64 bits, each of which is read or written at once.
__device__ __forceinline__ ulonglong2 ld_relaxed_sys_v2(const ulonglong2* address) {
    ulonglong2 value;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(value.x), "=l"(value.y) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void st_relaxed_sys_v2(ulonglong2* address, const ulonglong2& value) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(value.x), "l"(value.y) : "memory");
}

__device__ __forceinline__ uint32_t atom_cas_relaxed_sys(uint32_t* address, uint32_t expected, uint32_t desired) {
    uint32_t old;
    asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(old)
                 : "l"(address), "r"(expected), "r"(desired)
                 : "memory");
    return old;
}

__device__ __forceinline__ uint32_t atom_add_relaxed_gpu(uint32_t* address, uint32_t value) {
    uint32_t old;
    asm volatile("atom.relaxed.gpu.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
    return old;
}

__device__ __forceinline__ uint32_t atom_add_acq_rel_gpu(uint32_t* address, uint32_t value) {
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
    return old;
}

__device__ __forceinline__ void fence_acq_rel_sys() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Bytes that are read once, so they need no place in the L1 cache.
__device__ __forceinline__ uint4 ld_global_no_allocate(const void* address) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ void st_global(void* address, const uint4& value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

__device__ __forceinline__ void nanosleep(uint32_t nanoseconds) {
    asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds));
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_l2(const void* global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// NaN if one of them is.
__device__ __forceinline__ float max_nan(float a, float b) {
    float value;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
    return value;
}

__device__ __forceinline__ float ex2_approx(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

__device__ __forceinline__ float rcp_approx(float x) {
    float value;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

}  // namespace gemmesh::ptx
