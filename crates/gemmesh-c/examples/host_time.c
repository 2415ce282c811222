// What a call of all_gather_matmul takes on the host, prepared and not: medians in microseconds.
//
// torchrun, mpirun or srun starts the ranks, each with a GPU. The Rust benchmark `calls` times the same calls.
#define _POSIX_C_SOURCE 199309L
#include <gemmesh.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { M = 128, N = 1792, K = 4096, FLIGHT = 8, FLIGHTS = 128, CALLS = FLIGHT * FLIGHTS };

// Ends the program with the library's sentence.
static void must(gemmesh_status status) {
    if (status == GEMMESH_OK) return;
    fprintf(stderr, "%s\n", gemmesh_last_error());
    exit(1);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Of the second half, when all is warm.
static double median(double *times) {
    qsort(times + CALLS / 2, CALLS / 2, sizeof *times, ascending);
    return times[CALLS * 3 / 4];
}

int main(void) {
    gemmesh_group *group;
    gemmesh_group_options options = gemmesh_group_options_default();
    options.backend = GEMMESH_CUDA;
    must(gemmesh_group_from_env(&options, &group));
    gemmesh_sharded *a;
    gemmesh_matrix *b, *out;
    gemmesh_memory b_memory, out_memory;
    must(gemmesh_sharded_new(group, GEMMESH_BF16, M, K, &a));
    must(gemmesh_matrix_zeros(group, GEMMESH_BF16, N, K, &b));
    must(gemmesh_matrix_zeros(group, GEMMESH_BF16, M, N, &out));
    must(gemmesh_matrix_memory(b, &b_memory));
    must(gemmesh_matrix_memory(out, &out_memory));

    gemmesh_product product = gemmesh_product_default(GEMMESH_ALL_GATHER_MATMUL, GEMMESH_BF16);
    gemmesh_sharded_operand rows = gemmesh_sharded_operand_of(a);
    gemmesh_operand weight = gemmesh_operand_of(b_memory);
    gemmesh_output output = gemmesh_output_of(out_memory);
    gemmesh_product_call call = gemmesh_product_call_default();
    call.sharded_a = &rows;
    call.weights = &weight, call.weight_count = 1;
    call.outputs = &output, call.output_count = 1;
    gemmesh_prepared *prepared;
    size_t n = N;
    must(gemmesh_prepare(group, &product, M, K, a, &n, 1, &prepared));

    static double times[2][CALLS];
    for (int flight = 0; flight < FLIGHTS; flight++) {
        for (int kind = 0; kind < 2; kind++) {
            // The device's queues are empty, and the ranks begin together.
            must(gemmesh_synchronize(group));
            must(gemmesh_barrier(group));
            for (int i = 0; i < FLIGHT; i++) {
                double begin = now();
                must(kind == 0 ? gemmesh_prepared_run(prepared, &call) : gemmesh_run(group, &product, &call));
                times[kind][flight * FLIGHT + i] = now() - begin;
            }
        }
    }
    must(gemmesh_synchronize(group));
    size_t rank;
    must(gemmesh_group_rank(group, &rank));
    if (rank == 0) printf("M = %d: prepared %.2f, not prepared %.2f\n", M, median(times[0]), median(times[1]));
    must(gemmesh_prepared_free(prepared));
    must(gemmesh_matrix_free(out));
    must(gemmesh_matrix_free(b));
    must(gemmesh_sharded_free(a));
    must(gemmesh_group_free(group));
    return 0;
}
