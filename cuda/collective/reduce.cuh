// Adds up the ranks' parts of the same rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <family.cuh>

#include "../abi.h"
#include "../common/activation.cuh"

namespace gemmesh {

__device__ __forceinline__ __nv_bfloat16 round_to(float value, __nv_bfloat16) { return __float2bfloat16_rn(value); }
__device__ __forceinline__ __half round_to(float value, __half) { return __float2half_rn(value); }
__device__ __forceinline__ float round_to(float value, float) { return value; }

// As many elements as one load takes.
template <class Element>
struct alignas(16) Piece {
    static constexpr uint32_t kLength = 16 / sizeof(Element);
    Element elements[kLength];
};

// A piece of an addend in memory.
template <class Element>
__device__ Piece<Element> load_addend(const GemmeshReduction& reduction, uint32_t addend, uint64_t row, uint32_t column) {
    const char* first = static_cast<const char*>(reduction.addends[addend]) + row * reduction.addend_pitches[addend];
    return *reinterpret_cast<const Piece<Element>*>(first + column * sizeof(Element));
}

// Stores the first `length` of N values, 16 bytes at a time where these are all of them.
template <uint32_t N, class Stored>
__device__ __forceinline__ void store(const float* values, Stored* out, uint32_t length) {
    using Piece = Piece<Stored>;
    for (uint32_t begin = 0; begin < N; begin += Piece::kLength) {
        Piece rounded;
        for (uint32_t i = 0; i < Piece::kLength; ++i) rounded.elements[i] = round_to(values[begin + i], Stored{});
        if (begin + Piece::kLength <= length) {
            *reinterpret_cast<Piece*>(out + begin) = rounded;
        } else {
            for (uint32_t i = 0; i < Piece::kLength; ++i) {
                if (begin + i < length) out[begin + i] = rounded.elements[i];
            }
        }
    }
}

// The same as e4m3.
template <uint32_t N>
__device__ __forceinline__ void store_e4m3(const float* values, uint8_t* out, uint32_t length) {
    for (uint32_t i = 0; i < N; i += 2) {
        const uint16_t pair = family::round_to_e4m3(values[i], values[i + 1]);
        if (i < length) out[i] = pair & 0xff;
        if (i + 1 < length) out[i + 1] = pair >> 8;
    }
}

// A thread makes piece after piece of a row. Its registers hold the same columns of all addends, so the bits depend
// only on the order of the addends. `load` returns a piece of an addend; it gets the addend's number, the row and the
// first column.
template <class Element, class Load>
__device__ void reduce(const GemmeshReduction& reduction, const Load& load) {
    using Piece = Piece<Element>;
    const uint64_t pieces = (reduction.n + Piece::kLength - 1) / Piece::kLength;
    const uint64_t all = pieces * reduction.rows;
    const Element* bias = static_cast<const Element*>(reduction.bias);
    const uint64_t stride = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t index = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; index < all; index += stride) {
        const uint64_t row = index / pieces;
        const uint32_t column = index % pieces * Piece::kLength;
        float sum[Piece::kLength];
        const Piece first = load(0, row, column);
        for (uint32_t i = 0; i < Piece::kLength; ++i) sum[i] = static_cast<float>(first.elements[i]);
        for (uint32_t addend = 1; addend < reduction.count; ++addend) {
            const Piece next = load(addend, row, column);
            for (uint32_t i = 0; i < Piece::kLength; ++i) sum[i] += static_cast<float>(next.elements[i]);
        }
        const uint32_t length = min(Piece::kLength, reduction.n - column);
        if (bias != nullptr) {
            for (uint32_t i = 0; i < Piece::kLength; ++i) {
                if (i < length) sum[i] += static_cast<float>(bias[column + i]);
            }
        }
        const uint32_t stored = reduction.stored_type;
        activate<Piece::kLength>(sum, reduction.activation, stored == GEMMESH_STORED_F32);
        if (reduction.residual != nullptr) {
            const char* residual = static_cast<const char*>(reduction.residual) + row * reduction.residual_pitch;
            const Piece last = *reinterpret_cast<const Piece*>(residual + column * sizeof(Element));
            for (uint32_t i = 0; i < Piece::kLength; ++i) sum[i] += static_cast<float>(last.elements[i]);
        }
        char* out = static_cast<char*>(reduction.out) + row * reduction.out_pitch;
        switch (stored) {
            case GEMMESH_STORED_F32: store<Piece::kLength>(sum, reinterpret_cast<float*>(out) + column, length); break;
            case GEMMESH_STORED_F16: store<Piece::kLength>(sum, reinterpret_cast<__half*>(out) + column, length); break;
            case GEMMESH_STORED_E4M3: store_e4m3<Piece::kLength>(sum, reinterpret_cast<uint8_t*>(out) + column, length); break;
            default: store<Piece::kLength>(sum, reinterpret_cast<Element*>(out) + column, length);
        }
    }
}

// The same for addends that are all in memory.
template <class Element>
__device__ void reduce(const GemmeshReduction& reduction) {
    reduce<Element>(reduction, [&](uint32_t addend, uint64_t row, uint32_t column) {
        return load_addend<Element>(reduction, addend, row, column);
    });
}

}  // namespace gemmesh
