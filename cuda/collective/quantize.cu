// A kernel that makes e4m3 and scales of rows. It is a module of its own.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <family.cuh>

#include "../abi.h"
#include "../common/ptx.cuh"
#include "../common/quantize.cuh"

namespace {

// A lane's columns of a block.
constexpr uint32_t kColumns = GEMMESH_SCALE_BLOCK / 32;

template <class Element>
struct alignas(kColumns * sizeof(Element)) Columns {
    Element elements[kColumns];
};

// The whole warp: the largest absolute value of a block. A lane that has no columns has zeros. NaN counts nothing.
__device__ float amax_of(const float (&values)[kColumns]) {
    float amax = gemmesh::kLeastAmax;
    for (uint32_t i = 0; i < kColumns; ++i) amax = fmaxf(amax, fabsf(values[i]));
    for (uint32_t distance = 16; distance > 0; distance /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, distance));
    return amax;
}

// Each warp takes block after block.
template <class Element>
__device__ void quantize(const GemmeshQuantization& of) {
    using gemmesh::family::round_to_e4m3;
    gemmesh::family::launch_dependents();
    // It may have been launched before the kernel that makes the rows has ended.
    gemmesh::family::wait_for_predecessors();
    const uint32_t lane = threadIdx.x % 32;
    // Blocks begin in front of the first column if it lies inside a block. A lane's columns lie on one side of it.
    const uint32_t first = of.scales.first_column;
    const uint32_t end = first + of.columns;
    const uint32_t blocks = (end + GEMMESH_SCALE_BLOCK - 1) / GEMMESH_SCALE_BLOCK;  // of a row
    const uint64_t all = uint64_t{blocks} * of.rows;
    const uint64_t stride = uint64_t{gridDim.x} * (GEMMESH_REDUCE_THREADS / 32);
    const bool is_given = gemmesh::is_given(of.scales);
    for (uint64_t index = (uint64_t{blockIdx.x} * GEMMESH_REDUCE_THREADS + threadIdx.x) / 32; index < all; index += stride) {
        const uint64_t row = index / blocks;
        const uint32_t block = index % blocks;
        const uint32_t place = block * GEMMESH_SCALE_BLOCK + lane * kColumns;
        const uint32_t count = place >= first && place < end ? min(kColumns, end - place) : 0;
        const int64_t column = int64_t{place} - first;
        const Element* from = reinterpret_cast<const Element*>(static_cast<const char*>(of.from) + row * of.from_pitch) + column;
        Columns<Element> loaded{};
        if (count == kColumns) {
            loaded = *reinterpret_cast<const Columns<Element>*>(from);
        } else {
            for (uint32_t i = 0; i < kColumns; ++i) {
                if (i < count) loaded.elements[i] = from[i];
            }
        }
        float values[kColumns];
        for (uint32_t i = 0; i < kColumns; ++i) values[i] = static_cast<float>(loaded.elements[i]);
        float* at = of.scales.scales + row * of.scales.row + uint64_t{block} * of.scales.block;
        const float scale = is_given ? *at : gemmesh::scale_of(of.scales, amax_of(values));
        if (!is_given && lane == 0) *at = scale;
        const float factor = __frcp_rn(scale);
        const uint32_t low = round_to_e4m3(values[0] * factor, values[1] * factor);
        const uint32_t high = round_to_e4m3(values[2] * factor, values[3] * factor);
        const uint32_t bytes = low | high << 16;
        static_assert(sizeof bytes == kColumns);
        uint8_t* to = static_cast<uint8_t*>(of.to) + row * of.to_pitch + column;
        if (count == kColumns) {
            *reinterpret_cast<uint32_t*>(to) = bytes;
        } else {
            for (uint32_t i = 0; i < kColumns; ++i) {
                if (i < count) to[i] = bytes >> i * 8;
            }
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(GEMMESH_REDUCE_THREADS)
    gemmesh_quantize_bf16(const __grid_constant__ GemmeshQuantization of) {
    quantize<__nv_bfloat16>(of);
}

extern "C" __global__ void __launch_bounds__(GEMMESH_REDUCE_THREADS)
    gemmesh_quantize_f16(const __grid_constant__ GemmeshQuantization of) {
    quantize<__half>(of);
}

extern "C" __global__ void __launch_bounds__(GEMMESH_REDUCE_THREADS)
    gemmesh_quantize_f32(const __grid_constant__ GemmeshQuantization of) {
    quantize<float>(of);
}
