// The starting line of a benchmark: a module of its own.

#include "../abi.h"
#include "../common/ptx.cuh"
#include "flags.cuh"

// A thread for each rank: tells it that this one has come, and waits until it has. Whoever waits in vain goes on: what
// follows waits for the same rank, and says so.
extern "C" __global__ void __launch_bounds__(GEMMESH_MAX_WORLD)
    gemmesh_align(const __grid_constant__ GemmeshAlignment alignment) {
    namespace ptx = gemmesh::ptx;
    const uint32_t peer = threadIdx.x;
    if (peer >= alignment.world) return;
    ptx::st_release_sys(&alignment.words[peer][alignment.rank], alignment.count);

    const uint32_t* word = &alignment.words[alignment.rank][peer];
    const uint64_t begin = ptx::globaltimer();
    while (!gemmesh::reached(ptx::ld_acquire_sys(word), alignment.count)) {
        if (ptx::ld_relaxed_sys(alignment.abort) != 0) return;
        if (ptx::globaltimer() - begin > alignment.deadline_ns) return;
    }
}
