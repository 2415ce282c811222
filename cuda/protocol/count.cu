// A kernel that counts replays of recorded operations for the host. It is a module of its own.

#include <stdint.h>

#include "../common/ptx.cuh"

// One thread. Streams can't count, because they write the same value at each replay. `count` is in the device's memory,
// `shown` in the host's.
extern "C" __global__ void __launch_bounds__(1) gemmesh_count(uint32_t* count, uint32_t* shown) {
    *count += 1;
    gemmesh::ptx::st_release_sys(shown, *count);
}
