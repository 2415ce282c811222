// Which tiles this CTA works on: the host's table, walked.
#pragma once

#include "../abi.h"

namespace gemmesh {

// The entries of one cluster, in order. The entry after the current one is already being loaded, so that moving on
// costs no trip to memory.
class TableWalk {
public:
    __device__ TableWalk(const GemmeshParams& params, uint32_t cluster_size)
        : tiles_(params.tiles),
          count_(params.tile_count),
          stride_(gridDim.x / cluster_size),
          index_(blockIdx.x / cluster_size) {
        tile_ = load(index_);
        next_ = load(index_ + stride_);
    }

    __device__ bool valid() const { return index_ < count_; }
    __device__ uint32_t index() const { return index_; }
    __device__ const GemmeshTile& tile() const { return tile_; }
    __device__ const GemmeshTile& next() const { return next_; }  // block 0 behind the last

    __device__ void advance() {
        index_ += stride_;
        tile_ = next_;
        next_ = load(index_ + stride_);
    }

private:
    __device__ GemmeshTile load(uint32_t index) const {
        if (index >= count_) return GemmeshTile{};
        const uint4 entry = __ldg(reinterpret_cast<const uint4*>(tiles_) + index);
        const uint16_t flag_begin = entry.w & 0xffff;
        const uint16_t flag_end = entry.w >> 16;
        return GemmeshTile{entry.x, entry.y, entry.z, flag_begin, flag_end};
    }

    const GemmeshTile* tiles_;
    uint32_t count_;
    uint32_t stride_;
    uint32_t index_;
    GemmeshTile tile_;
    GemmeshTile next_;
};

}  // namespace gemmesh
