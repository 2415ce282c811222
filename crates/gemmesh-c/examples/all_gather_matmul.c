// A column-parallel layer: y = relu(x * w^T + bias), where the rows of x are spread over the ranks.
//
// Start one process for each rank:  all_gather_matmul RANK WORLD ADDRESS
// or let torchrun, mpirun or srun start them, without arguments.
#include <gemmesh.h>
#include <stdio.h>
#include <stdlib.h>

enum { M = 24, N = 8, K = 32 };

// Ends the program with the library's sentence.
static void must(gemmesh_status status) {
    if (status == GEMMESH_OK) return;
    fprintf(stderr, "%s\n", gemmesh_last_error());
    exit(1);
}

// The upper half of an f32. These values need no more.
static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static float x_at(size_t row, size_t k) { return (float)((row + 2 * k) % 5) - 2; }
static float w_at(size_t n, size_t k) { return (float)((3 * n + k) % 7) - 3; }
static float bias_at(size_t n) { return (float)n / 4; }

static float *product(gemmesh_group *group, gemmesh_sharded *x) {
    static uint16_t w[N * K], bias[N];
    static float y[M * N];
    for (size_t n = 0; n < N; n++) {
        bias[n] = to_bf16(bias_at(n));
        for (size_t k = 0; k < K; k++) w[n * K + k] = to_bf16(w_at(n, k));
    }
    gemmesh_memory bias_memory = {bias, GEMMESH_BF16, 1, N, 0};
    gemmesh_memory w_memory = {w, GEMMESH_BF16, N, K, 0}, y_memory = {y, GEMMESH_F32, M, N, 0};

    gemmesh_product layer = gemmesh_product_default(GEMMESH_ALL_GATHER_MATMUL, GEMMESH_BF16);
    layer.activation = GEMMESH_RELU;
    gemmesh_sharded_operand a = gemmesh_sharded_operand_of(x);
    gemmesh_operand weight = gemmesh_operand_of(w_memory);
    gemmesh_output out = gemmesh_output_of(y_memory);
    gemmesh_product_call call = gemmesh_product_call_default();
    call.sharded_a = &a;
    call.weights = &weight, call.weight_count = 1;
    call.outputs = &out, call.output_count = 1;
    call.bias = &bias_memory;
    must(gemmesh_run(group, &layer, &call));
    must(gemmesh_synchronize(group));
    return y;
}

int main(int argc, char **argv) {
    gemmesh_group *group;
    gemmesh_group_options options = gemmesh_group_options_default();
    options.workers = 1;
    if (argc == 4)
        must(gemmesh_group_connect(strtoul(argv[1], NULL, 10), strtoul(argv[2], NULL, 10), argv[3], &options, &group));
    else
        must(gemmesh_group_from_env(&options, &group));

    // Each rank writes its own rows of x.
    size_t rank;
    gemmesh_range rows;
    gemmesh_memory own;
    gemmesh_sharded *x;
    must(gemmesh_group_rank(group, &rank));
    must(gemmesh_sharded_new(group, GEMMESH_BF16, M, K, &x));
    must(gemmesh_sharded_rows_of(x, rank, &rows));
    must(gemmesh_sharded_own_rows(x, &own));
    uint16_t values[M * K];
    for (size_t i = 0; i < rows.count * K; i++) values[i] = to_bf16(x_at(rows.first + i / K, i % K));
    must(gemmesh_copy_from_host(group, &own, values, rows.count * K * sizeof *values));

    const float *y = product(group, x);
    for (size_t i = 0; i < M * N; i++) {
        double sum = bias_at(i % N);
        for (size_t k = 0; k < K; k++) sum += (double)x_at(i / N, k) * w_at(i % N, k);
        if (y[i] == (sum > 0 ? sum : 0)) continue;
        fprintf(stderr, "rank %zu: row %zu, column %zu is %g, not %g\n", rank, i / N, i % N, y[i], sum);
        must(gemmesh_fail(group, "a result is wrong"));
    }
    printf("rank %zu: %d x %d results are right\n", rank, M, N);
    must(gemmesh_sharded_free(x));
    must(gemmesh_group_free(group));
    return 0;
}
