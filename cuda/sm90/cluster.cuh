// Where a CTA is in its cluster, and which CTAs share loads with it.
#pragma once

#include <cstdint>

namespace gemmesh {

// Rows × Columns CTAs, numbered column by column. Those of a row have the same rows of `a`, and those of a column the
// same rows of `b`. (CTAs that share K instead have one tile: a cluster of 1 × 1 here.)
template <int Rows, int Columns>
struct Cluster {
    static constexpr uint32_t kWriters = Rows + Columns - 1;  // CTAs that load for one of them, itself among them

    __device__ static uint32_t row(uint32_t cta) { return cta % Rows; }
    __device__ static uint32_t column(uint32_t cta) { return Columns == 1 ? 0 : cta / Rows; }

    // The CTAs of one column, or row, as a mask for multicasts.
    __device__ static uint16_t ctas_of_column(uint32_t column) {
        constexpr uint32_t kFirst = (1 << Rows) - 1;
        return kFirst << column * Rows;
    }

    __device__ static uint16_t ctas_of_row(uint32_t row) {
        uint32_t first = 0;
#pragma unroll
        for (uint32_t column = 0; column < Columns; ++column) first |= 1 << column * Rows;
        return first << row;
    }

    // The n-th writer to this CTA: peers in its column first, then the rest of its row.
    __device__ static uint32_t writer(uint32_t number, uint32_t cta) {
        if constexpr (Columns == 1) return number;
        if (number < Rows) return column(cta) * Rows + number;
        const uint32_t other = number - Rows;
        return (other < column(cta) ? other : other + 1) * Rows + row(cta);
    }
};

}  // namespace gemmesh
