// The weights that rows of `a` are multiplied with: one weight, several with tiles of their own, or gate and up, which
// share tiles.
#pragma once

#include "../abi.h"
#include "abi.h"
#include "config.cuh"
#include "ptx.cuh"
#include "tile.cuh"

namespace gemmesh {

// The maps of the weights after the first, and of their outputs.
struct MoreWeights {
    CUtensorMap b[GEMMESH_MAX_WEIGHTS - 1];
    CUtensorMap out[GEMMESH_MAX_WEIGHTS - 1];
};

// Maps whose boxes end where a matrix ends. TMA takes longer to write a row of zeros past the edge than to load a row.
// Kernels with block sums have no registers for the choice.
struct Tails {
    CUtensorMap a;
    CUtensorMap b[GEMMESH_MAX_WEIGHTS];
};

// The maps that a kernel is launched with.
struct Maps {
    const CUtensorMap* a;
    const CUtensorMap* b;
    const CUtensorMap* out;  // null in a kernel with block sums
    const MoreWeights* more;  // likewise
    const Tails* tails;  // likewise

    __device__ const CUtensorMap* b_of(uint32_t weight) const { return weight == 0 ? b : &more->b[weight - 1]; }
    __device__ const CUtensorMap* out_of(uint32_t weight) const { return weight == 0 ? out : &more->out[weight - 1]; }
};

// How a tile's rows of `b` lie in memory.
enum class WeightRows {
    kOfOne,    // of one weight, [N, K]
    kOfTwo,    // kGateRows rows of gate and of up by turns
    kAlongK,   // as [K, N], of one weight or of gate and up by turns
};

// One thread, the producer of `b`: loads a CTA's part of a tile's `b`, for all CTAs that share it. It loads whole
// boxes, but of one weight [N, K] only the rows that there are, rounded up to a multiple of 8.
template <class C, WeightRows Rows>
class WeightLoads {
public:
    // `column` is the tile's first in its weight, which has `n` columns.
    __device__ WeightLoads(const Maps& maps, const GemmeshParams& params, bool is_gated, uint32_t weight, uint32_t n,
                           uint32_t column, uint32_t cta)
        : maps_(maps),
          params_(params),
          map_(C::kSums ? maps.b : maps.b_of(weight)),
          is_gated_(is_gated),
          column_(column),
          cta_(cta),
          rows_(C::kTileN) {
        if constexpr (Rows == WeightRows::kOfOne && !C::kSums) {
            // the last CTAs of a cluster's row may have no columns
            rows_ = C::kClusterN > 1 && column >= n ? 0 : min(rows_, (n - column + 7) / 8 * 8);
            if (rows_ < (place() + 1) * C::kPartN) map_ = &maps.tails->b[weight];
        }
    }

    // What all CTAs that share it load of the tile.
    __device__ uint32_t bytes() const { return rows_ * kRowBytes; }

    // `step` counts through K.
    __device__ void load(ptx::SharedAddress b, uint32_t step, ptx::SharedAddress full) const {
        const int32_t k = column_of_step<C>(params_, step);
        if constexpr (Rows == WeightRows::kOfOne) {
            const uint32_t part = place() * C::kPartN;
            if (part < rows_) load_box(b + part * kRowBytes, map_, k, column_ + part, full);
        } else if constexpr (Rows == WeightRows::kOfTwo) {
            load_groups(b, k, full);
        } else {
            load_blocks(b, k, full);
        }
    }

private:
    static constexpr uint32_t kBlock = 64;  // columns of a row of [K, N]: the width of the swizzle
    static constexpr uint32_t kRowBytes = GEMMESH_STAGE_ROW;

    // The CTA's rows of a tile in which kGateRows rows of gate and of up alternate.
    __device__ void load_groups(ptx::SharedAddress b, int32_t k, ptx::SharedAddress full) const {
#pragma unroll 1
        for (uint32_t of_part = 0; of_part < C::kPartN; of_part += C::kGateBox) {
            const uint32_t row = place() * C::kPartN + of_part;
            const uint32_t group = row / C::kGateRows;
            const uint32_t of_weight = column_ + group / 2 * C::kGateRows + row % C::kGateRows;
            load_box(b + row * kRowBytes, maps_.b_of(group % 2), k, of_weight, full);
        }
    }

    // The CTA's blocks of columns of [K, N]. The CTAs that share loads get blocks in turn, and as many each.
    __device__ void load_blocks(ptx::SharedAddress b, int32_t k, ptx::SharedAddress full) const {
        constexpr uint32_t kTurn = kBlock * C::kClusterM;
        const uint32_t own = place() * kBlock;
        if (!is_gated_) {
#pragma unroll
            for (uint32_t begin = 0; begin < C::kTileN; begin += kTurn) {
                load_box(b + (begin + own) * kRowBytes, map_, column_ + begin + own, k, full);
            }
            return;
        }
        // a block is gate's or up's
#pragma unroll 1
        for (uint32_t begin = own; begin < C::kTileN; begin += kTurn) {
            const uint32_t group = begin / C::kGateRows;
            const uint32_t of_weight = group / 2 * C::kGateRows + begin % C::kGateRows;
            load_box(b + begin * kRowBytes, maps_.b_of(group % 2), column_ + of_weight, k, full);
        }
    }

    // The CTA's number among those that share loads. Values that depend on it are computed where they are needed, and
    // take no registers elsewhere.
    __device__ uint32_t place() const {
        if constexpr (C::kClusterM == 1) return 0;
        uint32_t cta = cta_;
        ptx::pin(cta);
        return C::InCluster::row(cta);
    }

    __device__ void load_box(ptx::SharedAddress to, const CUtensorMap* map, int32_t left, int32_t top,
                             ptx::SharedAddress full) const {
        if constexpr (C::kClusterM == 1) {
            ptx::cp_async_bulk_tensor_2d_load(to, map, left, top, full);
        } else {
            const uint16_t ctas = C::InCluster::ctas_of_column(C::InCluster::column(cta_));
            ptx::cp_async_bulk_tensor_2d_load_multicast(to, map, left, top, full, ctas);
        }
    }

    const Maps& maps_;
    const GemmeshParams& params_;
    const CUtensorMap* map_;
    bool is_gated_;
    uint32_t column_;
    uint32_t cta_;
    uint32_t rows_;  // that are loaded of the tile; the last ones may be padding of `out`
};

}  // namespace gemmesh
