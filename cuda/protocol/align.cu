// A kernel that aligns the ranks' streams for benchmarks. It is a module of its own.

#include "../abi.h"
#include "../common/ptx.cuh"
#include "flags.cuh"

// One thread for each rank: tells it that this rank has come, and waits until it has come. If the wait is in vain, the
// thread goes on, because the next kernel waits for the same rank and reports it.
extern "C" __global__ void __launch_bounds__(GEMMESH_MAX_WORLD)
    gemmesh_align(const __grid_constant__ GemmeshAlignment alignment) {
    namespace ptx = gemmesh::ptx;
    const uint32_t peer = threadIdx.x;
    if (peer >= alignment.world || alignment.words[peer] == nullptr) return;
    ptx::st_release_sys(&alignment.words[peer][alignment.rank], alignment.count);

    const uint32_t* word = &alignment.words[alignment.rank][peer];
    const uint64_t begin = ptx::globaltimer();
    while (!gemmesh::reached(ptx::ld_acquire_sys(word), alignment.count)) {
        if (ptx::ld_relaxed_sys(alignment.abort) != 0) return;
        if (ptx::globaltimer() - begin > alignment.deadline_ns) return;
    }
}
