// What gemmesh_mpi.h uses of MPI, for one rank.
#pragma once

#include <string.h>

typedef int MPI_Comm;
#define MPI_COMM_WORLD 1
#define MPI_BYTE 1
#define MPI_SUCCESS 0

static inline int MPI_Comm_rank(MPI_Comm communicator, int *rank) { return *rank = 0, communicator != MPI_COMM_WORLD; }
static inline int MPI_Comm_size(MPI_Comm communicator, int *size) { return *size = 1, communicator != MPI_COMM_WORLD; }
static inline int MPI_Allgather(const void *mine, int bytes, int type, void *all, int room, int of,
                                MPI_Comm communicator) {
    memcpy(all, mine, (size_t)bytes);
    return bytes != room || type != of || communicator != MPI_COMM_WORLD;
}
