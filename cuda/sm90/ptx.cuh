// The inline assembly beside that of ../common/ptx.cuh: one instruction a function, named as the PTX ISA names it.
#pragma once

#include <cstdint>
#include <cuda.h>        // CUtensorMap
#include <cuda_bf16.h>   // __nv_bfloat16
#include <cuda_fp16.h>   // __half
#include <type_traits>

#include "../common/ptx.cuh"

namespace gemmesh::ptx {

// Shared memory addresses are 32 bits wide in the instructions that take them.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// An address in this CTA's shared memory.
struct SharedAddress {
    uint32_t value;

    __device__ __forceinline__ SharedAddress(const void* pointer) : value(shared_address(pointer)) {}
    __device__ __forceinline__ explicit SharedAddress(uint32_t address) : value(address) {}
    __device__ __forceinline__ SharedAddress operator+(uint32_t bytes) const { return SharedAddress(value + bytes); }
};

// The whole warp: true in one of its threads, and always in the same. The compiler knows that a branch on it has one
// thread, and computes the operands of TMA instructions once. On other branches it makes a loop over the threads of
// each such instruction, which takes longer than the instruction.
__device__ __forceinline__ bool elect_one() {
    uint32_t is_elected;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "elect.sync _|p, 0xffffffff;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}\n"
                 : "=r"(is_elected));
    return is_elected != 0;
}

// ---- ordering between the generic proxy (ld, st, stmatrix) and the async proxy (TMA) -------------------------------

__device__ __forceinline__ void fence_proxy_async_shared_cta() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- CTAs and clusters ---------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_ctarank() {
    uint32_t cta;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(cta));
    return cta;
}

__device__ __forceinline__ void barrier_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The address, in the cluster's shared memory, of what lies at `address` in CTA `cta`.
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t cta) {
    uint32_t mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(cta));
    return mapped;
}

// ---- mbarrier ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// `barrier` as mapa gives it. With a wider scope than the default this becomes a fence for the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(SharedAddress barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier.value), "r"(bytes)
                 : "memory");
}

// Stores to a neighbour's shared memory, and counts the bytes at a barrier there. Addresses as mapa gives them.
__device__ __forceinline__ void st_async(uint32_t address, const float4& value, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
        : "memory");
}

// Waits a time that the hardware chooses; true when the phase of this parity is complete.
__device__ __forceinline__ bool mbarrier_try_wait_parity(SharedAddress barrier, uint32_t parity) {
    uint32_t complete;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(complete)
        : "r"(barrier.value), "r"(parity)
        : "memory");
    return complete != 0;
}

// ---- the tensor memory accelerator ---------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_2d_load(
    SharedAddress shared, const CUtensorMap* map, int32_t column, int32_t row, SharedAddress barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared.value),
        "l"(map), "r"(column), "r"(row), "r"(barrier.value)
        : "memory");
}

// Writes to, and signals at, the same offsets in every CTA of the cluster that `ctas` names.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_load_multicast(
    SharedAddress shared, const CUtensorMap* map, int32_t column, int32_t row, SharedAddress barrier, uint16_t ctas) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared.value),
        "l"(map), "r"(column), "r"(row), "r"(barrier.value), "h"(ctas)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_2d_store(
    const CUtensorMap* map, int32_t column, int32_t row, const void* shared) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"(column), "r"(row), "r"(shared_address(shared))
                 : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most `Pending` of this thread's groups still have shared memory to read.
template <int Pending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// Waits until at most `Pending` of this thread's groups still have something to write.
template <int Pending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

// ---- registers -----------------------------------------------------------------------------------------------------

template <int Registers>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// ---- rounding and storing fragments --------------------------------------------------------------------------------

// Rounds to nearest even; `low` goes to the lower address.
template <class Element>
__device__ __forceinline__ uint32_t cvt_rn_x2(float low, float high) {
    uint32_t packed;
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
}

// The other way round.
template <class Element>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
        return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
    } else {
        return __half22float2(*reinterpret_cast<const __half2*>(&packed));
    }
}

// Four 8x8 matrices of 16-bit elements; lanes 8i..8i+7 name the rows of matrix i.
__device__ __forceinline__ void stmatrix_x4(uint32_t shared, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t shared, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t shared, uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                 : "r"(shared)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t shared, uint32_t& r0, uint32_t& r1, uint32_t& r2,
                                                  uint32_t& r3) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                 : "r"(shared)
                 : "memory");
}

// ---- cp.async, one thread's copies ---------------------------------------------------------------------------------

// Copies 16 bytes, or writes zeros if `is_there` is false.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(is_there ? 16 : 0) : "memory");
}

// Copies 4 bytes, or writes zeros if `is_there` is false.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global, bool is_there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(is_there ? 4 : 0) : "memory");
}

// Arrives when all copies that this thread has begun are complete. The barrier counts the arrival.
__device__ __forceinline__ void cp_async_mbarrier_arrive(SharedAddress barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier.value) : "memory");
}

__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- wgmma ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int Pending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// No instruction: what reads `value` later in the program stays below this point.
__device__ __forceinline__ void pin(float& value) {
    asm volatile("" : "+f"(value)::"memory");
}

__device__ __forceinline__ void pin(uint32_t& value) {
    asm volatile("" : "+r"(value)::"memory");
}

// Pairs of types of 8 bits, of which the kernels only know the size: that of `a`, and that of `b` if it differs.
struct e4m3 {
    uint8_t bits;
};
struct e4m3_e5m2 {
    uint8_t bits;
};
struct e5m2_e4m3 {
    uint8_t bits;
};

// d[64, N] = a[64, K] * b[N, K]^T + (accumulate ? d : 0). K is 16 elements of 16 bits or 32 of 8 bits. Both operands are
// in shared memory. An operand is K-major if its transposition is 0, and MN-major if it is 1. Those of 8 bits are
// always K-major.
//
// The thread holds d as N/8 groups of four: rows r, r, r+8, r+8 and columns c, c+1, c, c+1, where r is
// 16 * (warp in warpgroup) + lane / 4 and c is 8 * group + 2 * (lane % 4).
template <class Element, int N>
struct Wgmma;

// The operand lists. Each extends the list for 16 columns fewer or, after those, for 8 fewer.
#define GEMMESH_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define GEMMESH_EIGHT(i) GEMMESH_FOUR(i), GEMMESH_FOUR(i + 4)

#define GEMMESH_NAMES_OF_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define GEMMESH_NAMES_OF_32 GEMMESH_NAMES_OF_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define GEMMESH_NAMES_OF_48 GEMMESH_NAMES_OF_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define GEMMESH_NAMES_OF_64 GEMMESH_NAMES_OF_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define GEMMESH_NAMES_OF_80 GEMMESH_NAMES_OF_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define GEMMESH_NAMES_OF_96 GEMMESH_NAMES_OF_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define GEMMESH_NAMES_OF_112 GEMMESH_NAMES_OF_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define GEMMESH_NAMES_OF_128 GEMMESH_NAMES_OF_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define GEMMESH_NAMES_OF_144 GEMMESH_NAMES_OF_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define GEMMESH_NAMES_OF_160 GEMMESH_NAMES_OF_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define GEMMESH_NAMES_OF_176 GEMMESH_NAMES_OF_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define GEMMESH_NAMES_OF_192 GEMMESH_NAMES_OF_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define GEMMESH_NAMES_OF_208 GEMMESH_NAMES_OF_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define GEMMESH_NAMES_OF_224 GEMMESH_NAMES_OF_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define GEMMESH_NAMES_OF_240 GEMMESH_NAMES_OF_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define GEMMESH_NAMES_OF_256 GEMMESH_NAMES_OF_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define GEMMESH_NAMES_OF_72 GEMMESH_NAMES_OF_64 ", %32, %33, %34, %35"
#define GEMMESH_NAMES_OF_88 GEMMESH_NAMES_OF_80 ", %40, %41, %42, %43"
#define GEMMESH_NAMES_OF_104 GEMMESH_NAMES_OF_96 ", %48, %49, %50, %51"
#define GEMMESH_NAMES_OF_120 GEMMESH_NAMES_OF_112 ", %56, %57, %58, %59"
#define GEMMESH_NAMES_OF_136 GEMMESH_NAMES_OF_128 ", %64, %65, %66, %67"
#define GEMMESH_NAMES_OF_152 GEMMESH_NAMES_OF_144 ", %72, %73, %74, %75"
#define GEMMESH_NAMES_OF_168 GEMMESH_NAMES_OF_160 ", %80, %81, %82, %83"

#define GEMMESH_REGISTERS_OF_16 GEMMESH_EIGHT(0)
#define GEMMESH_REGISTERS_OF_32 GEMMESH_REGISTERS_OF_16, GEMMESH_EIGHT(8)
#define GEMMESH_REGISTERS_OF_48 GEMMESH_REGISTERS_OF_32, GEMMESH_EIGHT(16)
#define GEMMESH_REGISTERS_OF_64 GEMMESH_REGISTERS_OF_48, GEMMESH_EIGHT(24)
#define GEMMESH_REGISTERS_OF_80 GEMMESH_REGISTERS_OF_64, GEMMESH_EIGHT(32)
#define GEMMESH_REGISTERS_OF_96 GEMMESH_REGISTERS_OF_80, GEMMESH_EIGHT(40)
#define GEMMESH_REGISTERS_OF_112 GEMMESH_REGISTERS_OF_96, GEMMESH_EIGHT(48)
#define GEMMESH_REGISTERS_OF_128 GEMMESH_REGISTERS_OF_112, GEMMESH_EIGHT(56)
#define GEMMESH_REGISTERS_OF_144 GEMMESH_REGISTERS_OF_128, GEMMESH_EIGHT(64)
#define GEMMESH_REGISTERS_OF_160 GEMMESH_REGISTERS_OF_144, GEMMESH_EIGHT(72)
#define GEMMESH_REGISTERS_OF_176 GEMMESH_REGISTERS_OF_160, GEMMESH_EIGHT(80)
#define GEMMESH_REGISTERS_OF_192 GEMMESH_REGISTERS_OF_176, GEMMESH_EIGHT(88)
#define GEMMESH_REGISTERS_OF_208 GEMMESH_REGISTERS_OF_192, GEMMESH_EIGHT(96)
#define GEMMESH_REGISTERS_OF_224 GEMMESH_REGISTERS_OF_208, GEMMESH_EIGHT(104)
#define GEMMESH_REGISTERS_OF_240 GEMMESH_REGISTERS_OF_224, GEMMESH_EIGHT(112)
#define GEMMESH_REGISTERS_OF_256 GEMMESH_REGISTERS_OF_240, GEMMESH_EIGHT(120)
#define GEMMESH_REGISTERS_OF_72 GEMMESH_REGISTERS_OF_64, GEMMESH_FOUR(32)
#define GEMMESH_REGISTERS_OF_88 GEMMESH_REGISTERS_OF_80, GEMMESH_FOUR(40)
#define GEMMESH_REGISTERS_OF_104 GEMMESH_REGISTERS_OF_96, GEMMESH_FOUR(48)
#define GEMMESH_REGISTERS_OF_120 GEMMESH_REGISTERS_OF_112, GEMMESH_FOUR(56)
#define GEMMESH_REGISTERS_OF_136 GEMMESH_REGISTERS_OF_128, GEMMESH_FOUR(64)
#define GEMMESH_REGISTERS_OF_152 GEMMESH_REGISTERS_OF_144, GEMMESH_FOUR(72)
#define GEMMESH_REGISTERS_OF_168 GEMMESH_REGISTERS_OF_160, GEMMESH_FOUR(80)

// `a_`, `b_` and `p_` are the numbers of the operands that follow the N/2 accumulators, and the others say what is
// transposed.
#define GEMMESH_WGMMA(Element, type, N, a_, b_, p_, trans_a_, trans_b_)                                              \
    template <>                                                                                                      \
    struct Wgmma<Element, N> {                                                                                       \
        template <int TransA, int TransB>                                                                            \
        __device__ __forceinline__ static void mma_async(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) { \
            asm volatile("{\n"                                                                                       \
                         ".reg .pred p;\n"                                                                           \
                         "setp.ne.b32 p, %" #p_ ", 0;\n"                                                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type                             \
                         " {" GEMMESH_NAMES_OF_##N "}, %" #a_ ", %" #b_ ", p, 1, 1, %" #trans_a_ ", %" #trans_b_ ";\n" \
                         "}\n"                                                                                       \
                         : GEMMESH_REGISTERS_OF_##N                                                                  \
                         : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)), "n"(TransA), "n"(TransB));         \
        }                                                                                                            \
    };

#define GEMMESH_WGMMA_8(Element, types, N, a_, b_, p_)                                                               \
    template <>                                                                                                      \
    struct Wgmma<Element, N> {                                                                                       \
        template <int TransA, int TransB>                                                                            \
        __device__ __forceinline__ static void mma_async(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) { \
            static_assert(TransA == 0 && TransB == 0);                                                               \
            asm volatile("{\n"                                                                                       \
                         ".reg .pred p;\n"                                                                           \
                         "setp.ne.b32 p, %" #p_ ", 0;\n"                                                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." types                                     \
                         " {" GEMMESH_NAMES_OF_##N "}, %" #a_ ", %" #b_ ", p, 1, 1;\n"                               \
                         "}\n"                                                                                       \
                         : GEMMESH_REGISTERS_OF_##N                                                                  \
                         : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));                                   \
        }                                                                                                            \
    };

#define GEMMESH_WGMMA_ALL(N, a_, b_, p_, trans_a_, trans_b_)                \
    GEMMESH_WGMMA(__nv_bfloat16, "bf16", N, a_, b_, p_, trans_a_, trans_b_) \
    GEMMESH_WGMMA(__half, "f16", N, a_, b_, p_, trans_a_, trans_b_)         \
    GEMMESH_WGMMA_8(e4m3, "e4m3.e4m3", N, a_, b_, p_)                       \
    GEMMESH_WGMMA_8(e4m3_e5m2, "e4m3.e5m2", N, a_, b_, p_)                  \
    GEMMESH_WGMMA_8(e5m2_e4m3, "e5m2.e4m3", N, a_, b_, p_)

GEMMESH_WGMMA_ALL(16, 8, 9, 10, 11, 12)
GEMMESH_WGMMA_ALL(32, 16, 17, 18, 19, 20)
GEMMESH_WGMMA_ALL(48, 24, 25, 26, 27, 28)
GEMMESH_WGMMA_ALL(64, 32, 33, 34, 35, 36)
GEMMESH_WGMMA_ALL(72, 36, 37, 38, 39, 40)
GEMMESH_WGMMA_ALL(80, 40, 41, 42, 43, 44)
GEMMESH_WGMMA_ALL(88, 44, 45, 46, 47, 48)
GEMMESH_WGMMA_ALL(96, 48, 49, 50, 51, 52)
GEMMESH_WGMMA_ALL(104, 52, 53, 54, 55, 56)
GEMMESH_WGMMA_ALL(112, 56, 57, 58, 59, 60)
GEMMESH_WGMMA_ALL(120, 60, 61, 62, 63, 64)
GEMMESH_WGMMA_ALL(128, 64, 65, 66, 67, 68)
GEMMESH_WGMMA_ALL(136, 68, 69, 70, 71, 72)
GEMMESH_WGMMA_ALL(144, 72, 73, 74, 75, 76)
GEMMESH_WGMMA_ALL(152, 76, 77, 78, 79, 80)
GEMMESH_WGMMA_ALL(160, 80, 81, 82, 83, 84)
GEMMESH_WGMMA_ALL(168, 84, 85, 86, 87, 88)
GEMMESH_WGMMA_ALL(176, 88, 89, 90, 91, 92)
GEMMESH_WGMMA_ALL(192, 96, 97, 98, 99, 100)
GEMMESH_WGMMA_ALL(208, 104, 105, 106, 107, 108)
GEMMESH_WGMMA_ALL(224, 112, 113, 114, 115, 116)
GEMMESH_WGMMA_ALL(240, 120, 121, 122, 123, 124)
GEMMESH_WGMMA_ALL(256, 128, 129, 130, 131, 132)

}  // namespace gemmesh::ptx
