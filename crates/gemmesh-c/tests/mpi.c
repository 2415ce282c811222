// Groups of the ranks of MPI communicators: of all ranks, and of the even and the odd ones at the same time.
#include <gemmesh_mpi.h>
#include <stdio.h>

static int fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, gemmesh_last_error());
    return 1;
}

// Joins the communicator's ranks, and compares their numbers.
static int join(MPI_Comm communicator) {
    int rank, world;
    MPI_Comm_rank(communicator, &rank);
    MPI_Comm_size(communicator, &world);
    gemmesh_group *group;
    if (gemmesh_group_from_mpi(communicator, NULL, &group) != GEMMESH_OK) return fail("join");
    size_t own, size;
    if (gemmesh_group_rank(group, &own) != GEMMESH_OK || gemmesh_group_world_size(group, &size) != GEMMESH_OK)
        return fail("rank");
    if (own != (size_t)rank || size != (size_t)world) return fail("the numbers differ");
    if (gemmesh_barrier(group) != GEMMESH_OK) return fail("barrier");
    if (gemmesh_group_free(group) != GEMMESH_OK) return fail("free");
    return 0;
}

int main(int argc, char **argv) {
    gemmesh_group *none;
    if (gemmesh_group_from_mpi(MPI_COMM_WORLD, NULL, &none) != GEMMESH_ERROR_ARGUMENT) return fail("before MPI_Init");
    MPI_Init(&argc, &argv);
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm part;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &part);
    if (join(MPI_COMM_WORLD) || join(part)) return 1;
    MPI_Comm_free(&part);
    // No communicator.
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (gemmesh_group_from_mpi(MPI_COMM_NULL, NULL, &none) != GEMMESH_ERROR_ARGUMENT) return fail("no communicator");
    MPI_Finalize();
    if (gemmesh_group_from_mpi(MPI_COMM_WORLD, NULL, &none) != GEMMESH_ERROR_ARGUMENT) return fail("after MPI_Finalize");
    return 0;
}
