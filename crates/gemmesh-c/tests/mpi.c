// A group of the ranks of an MPI communicator.
#include <gemmesh_mpi.h>
#include <stdio.h>

int main(void) {
    gemmesh_group *group;
    if (gemmesh_group_from_mpi(MPI_COMM_WORLD, NULL, &group) != GEMMESH_OK || gemmesh_barrier(group) != GEMMESH_OK) {
        fprintf(stderr, "%s\n", gemmesh_last_error());
        return 1;
    }
    // No communicator of MPI.
    gemmesh_group *none;
    if (gemmesh_group_from_mpi(7, NULL, &none) != GEMMESH_ERROR_ARGUMENT) return 1;
    return gemmesh_group_free(group) != GEMMESH_OK;
}
