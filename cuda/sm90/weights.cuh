// The weights that rows of `a` are multiplied with: one weight, several with tiles of their own, or gate and up, which
// share tiles.
#pragma once

#include "../abi.h"
#include "ptx.cuh"

namespace gemmesh {

// The maps of the weights after the first, and of their outputs.
struct MoreWeights {
    CUtensorMap b[GEMMESH_MAX_WEIGHTS - 1];
    CUtensorMap out[GEMMESH_MAX_WEIGHTS - 1];
};

// The maps that a kernel is launched with.
struct Maps {
    const CUtensorMap* a;
    const CUtensorMap* b;
    const CUtensorMap* out;  // null in a kernel with block sums
    const MoreWeights* more;  // likewise

    __device__ const CUtensorMap* b_of(uint32_t weight) const { return weight == 0 ? b : &more->b[weight - 1]; }
    __device__ const CUtensorMap* out_of(uint32_t weight) const { return weight == 0 ? out : &more->out[weight - 1]; }
};

// One thread, the producer: loads a CTA's part of a tile's `b`, for all CTAs that share it.
template <class C>
struct WeightLoads {
    using Element = typename C::Element;
    static constexpr uint32_t kBlock = 64;  // columns of a row of [K, N]: the width of the swizzle
    const Maps& maps;
    uint32_t cta;  // of the cluster

    // `column` is the tile's first column in its weight, and `step` counts through K.
    __device__ void load(const GemmeshParams& params, Element* b, uint32_t weight, uint32_t column, uint32_t step, uint64_t* full) const {
        const uint32_t k = step * GEMMESH_TILE_K;
        if (C::kTakesKn && params.b_is_kn != 0) {
            const bool is_gated = C::kGates && params.is_gated != 0;
            if constexpr (C::kTakesKn) load_blocks(b, weight, column, k, is_gated, full);
        } else if (C::kGates && params.is_gated != 0) {
            load_groups(b, column, k, full);
        } else {
            const uint32_t part = C::kCluster == 1 ? 0 : cta * C::kPartN;
            load_box(b + part * GEMMESH_TILE_K, C::kSums ? maps.b : maps.b_of(weight), k, column + part, full);
        }
    }

private:
    // The CTA's rows of a tile in which kGateRows rows of gate and of up alternate.
    __device__ void load_groups(Element* b, uint32_t column, uint32_t k, uint64_t* full) const {
#pragma unroll 1
        for (uint32_t of_part = 0; of_part < C::kPartN; of_part += C::kGateBox) {
            const uint32_t row = place() * C::kPartN + of_part;
            const uint32_t group = row / C::kGateRows;
            const uint32_t of_weight = column + group / 2 * C::kGateRows + row % C::kGateRows;
            load_box(b + row * GEMMESH_TILE_K, maps.b_of(group % 2), k, of_weight, full);
        }
    }

    // The CTA's blocks of columns of [K, N]. The CTAs that share loads get blocks in turn, and as many each.
    __device__ void load_blocks(Element* b, uint32_t weight, uint32_t column, uint32_t k, bool is_gated, uint64_t* full) const {
        constexpr uint32_t kTurn = kBlock * C::kCluster;
        const uint32_t own = place() * kBlock;
        if (!is_gated) {
            // A thread that takes long to ask for a stage holds up the tensor cores. So as little as possible is
            // computed here.
            const CUtensorMap* map = C::kSums ? maps.b : maps.b_of(weight);
#pragma unroll
            for (uint32_t begin = 0; begin < C::kTileN; begin += kTurn) {
                load_box(b + (begin + own) * GEMMESH_TILE_K, map, column + begin + own, k, full);
            }
            return;
        }
        // a block is gate's or up's
#pragma unroll 1
        for (uint32_t begin = own; begin < C::kTileN; begin += kTurn) {
            const uint32_t group = begin / C::kGateRows;
            const uint32_t of_weight = group / 2 * C::kGateRows + begin % C::kGateRows;
            load_box(b + begin * GEMMESH_TILE_K, maps.b_of(group % 2), column + of_weight, k, full);
        }
    }

    // The CTA's number among those that share loads. Values that depend on it are computed where they are needed, and
    // take no registers elsewhere.
    __device__ uint32_t place() const {
        if constexpr (C::kCluster == 1) return 0;
        uint32_t place = cta;
        ptx::pin(place);
        return place;
    }

    __device__ static void load_box(Element* to, const CUtensorMap* map, uint32_t left, uint32_t top, uint64_t* full) {
        if constexpr (C::kCluster == 1) {
            ptx::cp_async_bulk_tensor_2d_load(to, map, left, top, full);
        } else {
            constexpr uint16_t kEveryCta = (1 << C::kCluster) - 1;
            ptx::cp_async_bulk_tensor_2d_load_multicast(to, map, left, top, full, kEveryCta);
        }
    }
};

}  // namespace gemmesh
