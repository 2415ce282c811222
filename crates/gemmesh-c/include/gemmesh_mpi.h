// Groups of the ranks of an MPI communicator. Header only: the library needs no MPI.

#pragma once

#include <gemmesh.h>
#include <mpi.h>

// A gemmesh_gather over the communicator to which `context` points.
static inline int gemmesh_gather_by_mpi(const void *mine, void *all, size_t bytes, void *context) {
    return MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, *(MPI_Comm *)context) != MPI_SUCCESS;
}

// Joins a group of the ranks of `communicator`, which run on one host. MPI is used in this call only. `options` may be
// NULL. The result is a gemmesh_status, as of gemmesh_group_connect_with. Collective. GEMMESH_ERROR_ARGUMENT before
// MPI_Init and after MPI_Finalize, where no communicator has ranks.
static inline gemmesh_status gemmesh_group_from_mpi(MPI_Comm communicator, const gemmesh_group_options *options,
                                                    gemmesh_group **group) {
    // No group has such a size, so a communicator that MPI does not know is refused.
    int rank = 0, world = 0, is_initialised = 0, is_finalised = 0;
    MPI_Initialized(&is_initialised);
    MPI_Finalized(&is_finalised);
    if (is_initialised && !is_finalised) {
        if (MPI_Comm_size(communicator, &world) != MPI_SUCCESS) world = 0;
        if (MPI_Comm_rank(communicator, &rank) != MPI_SUCCESS) world = 0;
    }
    return gemmesh_group_connect_with((size_t)rank, (size_t)world, gemmesh_gather_by_mpi, &communicator, options,
                                      group);
}
