// Walks the host's table of tiles, for one cluster.
//
// Often the entries follow from their numbers. Then they are computed, because the first loads would wait for the table
// for a third of a microsecond.
#pragma once

#include "../abi.h"

namespace gemmesh {

// The entries of one cluster, in order. The next entry is already being loaded, so moving on costs no trip to memory.
class TableWalk {
public:
    // `rows`: how many rows of tiles there are if the entries are to be computed, or 0. Tiles have `columns` columns of
    // their outputs then.
    __device__ TableWalk(const GemmeshParams& params, uint32_t cluster_size, uint32_t rows, uint32_t columns)
        : params_(params),
          rows_(rows),
          columns_(columns),
          tiles_(params.tiles),
          count_(params.tile_count),
          stride_(gridDim.x / cluster_size),
          index_(blockIdx.x / cluster_size) {
        entry_ = load(index_);
        next_ = load(index_ + stride_);
    }

    __device__ bool valid() const { return index_ < count_; }
    __device__ uint32_t index() const { return index_; }
    __device__ GemmeshTile tile() const { return tile_of(entry_); }
    __device__ GemmeshTile next() const { return tile_of(next_); }  // block 0 after the last

    __device__ void advance() {
        index_ += stride_;
        entry_ = next_;
        next_ = load(index_ + stride_);
    }

private:
    __device__ uint4 load(uint32_t index) const {
        if (index >= count_) return uint4{};
        if (rows_ != 0) return computed(index);
        return __ldg(reinterpret_cast<const uint4*>(tiles_) + index);
    }

    // The tiles of each weight follow those of the weight before, column by column.
    __device__ uint4 computed(uint32_t index) const {
        uint32_t column = rows_ == 1 ? index : index / rows_;
        const uint32_t m = index - column * rows_;
        uint32_t weight = 0;
        while (true) {
            const uint32_t count = (params_.outputs[weight].n + columns_ - 1) / columns_;
            if (column < count) return uint4{m, column, weight, params_.row_flags};
            column -= count;
            ++weight;
        }
    }

    __device__ static GemmeshTile tile_of(const uint4& entry) {
        const uint16_t flag_begin = entry.w & 0xffff;
        const uint16_t flag_end = entry.w >> 16;
        return GemmeshTile{entry.x, entry.y, entry.z, flag_begin, flag_end};
    }

    const GemmeshParams& params_;
    uint32_t rows_;
    uint32_t columns_;
    const GemmeshTile* tiles_;
    uint32_t count_;
    uint32_t stride_;
    uint32_t index_;
    // As they are in memory, in as many registers.
    uint4 entry_;
    uint4 next_;
};

}  // namespace gemmesh
