// Walks the host's table of tiles, for one cluster.
//
// Few rows make one row of tiles, whose entries follow from their numbers. A kernel for few rows computes them, because
// its first loads would wait for the table for half a microsecond.
#pragma once

#include "../abi.h"

namespace gemmesh {

// The entries of one cluster, in order. The next entry is already being loaded, so moving on costs no trip to memory.
class TableWalk {
public:
    // `is_one_row`: whether to compute the entries. Then tiles have `columns` columns of their outputs.
    __device__ TableWalk(const GemmeshParams& params, uint32_t cluster_size, bool is_one_row, uint32_t columns)
        : params_(params),
          is_one_row_(is_one_row),
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
    __device__ GemmeshTile next() const { return tile_of(next_); }  // block 0 behind the last

    __device__ void advance() {
        index_ += stride_;
        entry_ = next_;
        next_ = load(index_ + stride_);
    }

private:
    __device__ uint4 load(uint32_t index) const {
        if (index >= count_) return uint4{};
        if (is_one_row_) return of_one_row(index);
        return __ldg(reinterpret_cast<const uint4*>(tiles_) + index);
    }

    // The tiles of each weight follow those of the weight before.
    __device__ uint4 of_one_row(uint32_t index) const {
        uint32_t weight = 0;
        while (true) {
            const uint32_t count = (params_.outputs[weight].n + columns_ - 1) / columns_;
            if (index < count) return uint4{0, index, weight, params_.row_flags};
            index -= count;
            ++weight;
        }
    }

    __device__ static GemmeshTile tile_of(const uint4& entry) {
        const uint16_t flag_begin = entry.w & 0xffff;
        const uint16_t flag_end = entry.w >> 16;
        return GemmeshTile{entry.x, entry.y, entry.z, flag_begin, flag_end};
    }

    const GemmeshParams& params_;
    bool is_one_row_;
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
