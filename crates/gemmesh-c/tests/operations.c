// Every kind of operation of one rank, of random values and compared with float64, on the host or on GPUs:
//
//     operations RANK WORLD ADDRESS host|cuda
//
// On the driver that runs on the CPU (GEMMESH_TEST_CPU_DRIVER), kernels compute nothing, so products are not compared.
#include <dlfcn.h>
#include <gemmesh.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 128, K = 256, OWN = 64 };

static gemmesh_group *group;
static size_t rank, world, rows;
static int compares = 1, on_gpu;
// cuMemcpyDtoDAsync, for work on a chunk's stream.
static int (*copy_on_stream)(uint64_t to, uint64_t from, size_t bytes, void *stream);

static void must(gemmesh_status status, const char *what) {
    if (status == GEMMESH_OK) return;
    fprintf(stderr, "%s: %s\n", what, gemmesh_last_error());
    exit(1);
}
#define MUST(call) must(call, #call)

// Values.

static float of_bf16(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

static float of_e4m3(uint8_t bits) {
    int exponent = bits >> 3 & 15, fraction = bits & 7;
    float value = exponent ? ldexpf(8.0f + fraction, exponent - 10) : ldexpf(fraction, -9);
    return bits & 128 ? -value : value;
}

static float value_at(gemmesh_dtype dtype, const void *values, size_t index) {
    if (dtype == GEMMESH_BF16) return of_bf16(((const uint16_t *)values)[index]);
    if (dtype == GEMMESH_F8E4M3) return of_e4m3(((const uint8_t *)values)[index]);
    return ((const float *)values)[index];
}

static size_t bytes_of(gemmesh_dtype dtype) { return dtype == GEMMESH_BF16 ? 2 : dtype == GEMMESH_F8E4M3 ? 1 : 4; }

// Finite values of about 1: those of a seed are the same on every rank.
static void *random_values(gemmesh_dtype dtype, size_t count, uint64_t seed) {
    unsigned char *values = malloc(count * bytes_of(dtype));
    uint64_t state = 88172645463325252u + seed * 0x9e3779b97f4a7c15u;
    for (size_t i = 0; i < count; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        float value = (float)(int32_t)(state >> 32) / 2147483648.0f;
        uint32_t word;
        memcpy(&word, &value, sizeof word);
        if (dtype == GEMMESH_BF16) ((uint16_t *)values)[i] = (uint16_t)(word >> 16);
        // Exponents from -3 to 0.
        if (dtype == GEMMESH_F8E4M3) values[i] = (uint8_t)((state >> 40 & 0x87) | (4 + (state >> 50 & 3)) << 3);
        // Whole numbers, whose sums are exact.
        if (dtype == GEMMESH_F32) ((float *)values)[i] = (float)(int32_t)(state >> 56);
    }
    return values;
}

// Matrices.

static gemmesh_memory matrix_of(gemmesh_dtype dtype, size_t m, size_t n, const void *values) {
    gemmesh_matrix *matrix;
    gemmesh_memory memory;
    MUST(gemmesh_matrix_zeros(group, dtype, m, n, &matrix));
    MUST(gemmesh_matrix_memory(matrix, &memory));
    size_t bytes = m * n * bytes_of(dtype);
    void *poison = malloc(bytes);
    memset(poison, 0xff, bytes);
    MUST(gemmesh_copy_from_host(group, &memory, values ? values : poison, bytes));
    free(poison);
    return memory;
}

// A sharded matrix with this rank's rows of `all`, or with poison if there are none.
static gemmesh_sharded *sharded_of(gemmesh_dtype dtype, size_t n, const void *all) {
    gemmesh_sharded *matrix;
    gemmesh_memory own, whole;
    MUST(gemmesh_sharded_new(group, dtype, rows, n, &matrix));
    MUST(gemmesh_sharded_own_rows(matrix, &own));
    MUST(gemmesh_sharded_whole(matrix, &whole));
    size_t bytes = rows * n * bytes_of(dtype);
    void *poison = malloc(bytes);
    memset(poison, 0xff, bytes);
    MUST(gemmesh_copy_from_host(group, &whole, poison, bytes));
    free(poison);
    bytes /= world;
    if (all) MUST(gemmesh_copy_from_host(group, &own, (const char *)all + rank * bytes, bytes));
    // No one writes to it before.
    MUST(gemmesh_synchronize(group));
    MUST(gemmesh_barrier(group));
    return matrix;
}

// Compares a matrix with `expected`, from its row `first` on. `partials`: the sums of the partial sums' sizes, which are
// rounded to bf16 on their way, or NULL.
static void check(const char *what, gemmesh_memory memory, const double *expected, const double *partials, size_t first) {
    size_t count = memory.rows * memory.columns, bytes = count * bytes_of(memory.dtype);
    void *found = malloc(bytes);
    MUST(gemmesh_copy_to_host(group, &memory, found, bytes));
    double own = memory.dtype == GEMMESH_BF16 ? 1.1 / 256 : 1e-6;
    for (size_t i = 0; i < count; i++) {
        size_t at = first * memory.columns + i;
        double right = expected[at], is = value_at(memory.dtype, found, i);
        if (fabs(is - right) <= own * fabs(right) + (partials ? partials[at] * 1.1 / 256 : 0) + 1e-3) continue;
        fprintf(stderr, "rank %zu: %s: row %zu, column %zu is %g, not %g\n", rank, what, i / memory.columns,
                i % memory.columns, is, right);
        MUST(gemmesh_fail(group, "a result is wrong"));
    }
    free(found);
}

// sum over k of scale * a[m, k] * b[n, k], added to `into` [m, n].
static void add_product(double *into, gemmesh_dtype dtype, const void *a, const void *b, size_t m, double scale) {
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < N; j++)
            for (size_t k = 0; k < K; k++)
                into[i * N + j] += scale * value_at(dtype, a, i * K + k) * value_at(dtype, b, j * K + k);
}

// Products.

static void gathers(gemmesh_dtype dtype) {
    void *all = random_values(dtype, rows * K, 1), *b = random_values(dtype, N * K, 2 + rank);
    void *bias = random_values(GEMMESH_BF16, N, 100 + rank);
    double *expected = calloc(rows * N, sizeof *expected);
    int is_fp8 = dtype == GEMMESH_F8E4M3;
    add_product(expected, dtype, all, b, rows, is_fp8 ? 0.125 : 1);
    for (size_t i = 0; i < rows * N; i++) expected[i] += value_at(GEMMESH_BF16, bias, i % N);
    gemmesh_memory out_memory = matrix_of(GEMMESH_BF16, rows, N, NULL);
    gemmesh_memory bias_memory = matrix_of(GEMMESH_BF16, 1, N, bias);
    const float quarter = 0.25f, half = 0.5f;
    gemmesh_memory of_a = matrix_of(GEMMESH_F32, 1, 1, &quarter), of_b = matrix_of(GEMMESH_F32, 1, 1, &half);
    gemmesh_sharded_operand a = gemmesh_sharded_operand_of(sharded_of(dtype, K, all));
    gemmesh_operand weight = gemmesh_operand_of(matrix_of(dtype, N, K, b));
    gemmesh_output out = gemmesh_output_of(out_memory);
    gemmesh_product product = gemmesh_product_default(GEMMESH_ALL_GATHER_MATMUL, dtype);
    if (is_fp8) {
        a.own_scales = &of_a, weight.scales = &of_b;
        a.scaling.kind = weight.scaling.kind = product.scaling.kind = GEMMESH_SCALING_TENSOR;
        product.weight_scaling = &weight.scaling, product.weight_scaling_count = 1;
    }
    gemmesh_product_call call = gemmesh_product_call_default();
    call.sharded_a = &a, call.bias = &bias_memory;
    call.weights = &weight, call.weight_count = 1;
    call.outputs = &out, call.output_count = 1;
    MUST(gemmesh_run(group, &product, &call));
    if (compares) check("all_gather_matmul", out_memory, expected, NULL, 0);

    gemmesh_prepared *prepared;
    const size_t width = N;
    MUST(gemmesh_prepare(group, &product, 0, 0, a.values, &width, 1, &prepared));
    out.values = matrix_of(GEMMESH_BF16, rows, N, NULL);
    MUST(gemmesh_prepared_run(prepared, &call));
    if (compares) check("prepared all_gather_matmul", out.values, expected, NULL, 0);
    MUST(gemmesh_prepared_free(prepared));
    free(all), free(b), free(bias), free(expected);
}

static void sums(void) {
    size_t count = rows * N;
    double *expected = calloc(count, sizeof *expected), *partials = calloc(count, sizeof *partials);
    double *partial = malloc(count * sizeof *partial);
    void *a = NULL, *b = NULL;
    for (size_t other = 0; other < world; other++) {
        size_t source = (rank + 1 + other) % world;  // this rank's own last
        free(a), free(b);
        a = random_values(GEMMESH_BF16, rows * K, 200 + source), b = random_values(GEMMESH_BF16, N * K, 300 + source);
        memset(partial, 0, count * sizeof *partial);
        add_product(partial, GEMMESH_BF16, a, b, rows, 1);
        for (size_t i = 0; i < count; i++) expected[i] += partial[i], partials[i] += fabs(partial[i]);
    }
    gemmesh_operand operand = gemmesh_operand_of(matrix_of(GEMMESH_BF16, rows, K, a));
    gemmesh_operand weight = gemmesh_operand_of(matrix_of(GEMMESH_BF16, N, K, b));
    gemmesh_output out = gemmesh_output_of(matrix_of(GEMMESH_F32, OWN, N, NULL));
    gemmesh_product product = gemmesh_product_default(GEMMESH_MATMUL_REDUCE_SCATTER, GEMMESH_BF16);
    gemmesh_product_call call = gemmesh_product_call_default();
    call.a = &operand;
    call.weights = &weight, call.weight_count = 1;
    call.outputs = &out, call.output_count = 1;
    MUST(gemmesh_run(group, &product, &call));
    if (compares) check("matmul_reduce_scatter", out.values, expected, partials, rank * OWN);

    gemmesh_sharded *all = sharded_of(GEMMESH_BF16, N, NULL);
    gemmesh_memory whole;
    product.kind = GEMMESH_MATMUL_ALL_REDUCE;
    call.outputs = NULL, call.output_count = 0, call.sharded_output = all;
    MUST(gemmesh_run(group, &product, &call));
    MUST(gemmesh_sharded_whole(all, &whole));
    if (compares) check("matmul_all_reduce", whole, expected, partials, 0);
    free(a), free(b), free(expected), free(partials), free(partial);
}

// Collectives and pipelines, of whole numbers, whose sums are exact.

// What rank `of` has in the collectives: [rows, N].
static float *addend(size_t of) { return random_values(GEMMESH_F32, rows * N, 400 + of); }

static void collects(const double *all, const double *sum, const double *exchanged) {
    gemmesh_sharded *a;
    gemmesh_memory whole, own = matrix_of(GEMMESH_F32, OWN, N, NULL);
    float *mine = addend(rank), *first = addend(0);
    MUST(gemmesh_all_gather(group, a = sharded_of(GEMMESH_F32, N, first)));
    MUST(gemmesh_sharded_whole(a, &whole));
    check("all_gather", whole, all, NULL, 0);
    gemmesh_memory given = matrix_of(GEMMESH_F32, rows, N, mine);
    MUST(gemmesh_reduce_scatter(group, &given, &own));
    check("reduce_scatter", own, sum, NULL, rank * OWN);
    MUST(gemmesh_all_reduce(group, &given, a = sharded_of(GEMMESH_F32, N, NULL)));
    MUST(gemmesh_sharded_whole(a, &whole));
    check("all_reduce", whole, sum, NULL, 0);
    MUST(gemmesh_all_to_all(group, &given, a = sharded_of(GEMMESH_F32, N, NULL), NULL, 0));
    MUST(gemmesh_sharded_whole(a, &whole));
    check("all_to_all", whole, exchanged, NULL, 0);
    a = sharded_of(GEMMESH_F32, N, NULL);
    MUST(gemmesh_sharded_whole(a, &whole));
    size_t root = world - 1;
    if (rank == root) MUST(gemmesh_copy_from_host(group, &whole, first, rows * N * sizeof *first));
    MUST(gemmesh_broadcast(group, a, root));
    check("broadcast", whole, all, NULL, 0);
    free(mine), free(first);
}

// Copies rows where a chunk's work belongs.
static int copy_rows(gemmesh_memory to, gemmesh_memory from, void *stream) {
    size_t bytes = to.rows * to.columns * sizeof(float);
    if (on_gpu) return copy_on_stream((uint64_t)to.address, (uint64_t)from.address, bytes, stream);
    memcpy(to.address, from.address, bytes);
    return 0;
}

static gemmesh_memory part(gemmesh_memory whole, size_t first, size_t count) {
    whole.address = (char *)whole.address + first * N * sizeof(float);
    whole.rows = count;
    return whole;
}

static int consume(const gemmesh_rows *chunk, void *context) {
    const gemmesh_memory *into = context;
    return copy_rows(part(*into, chunk->rows.first, chunk->rows.count), chunk->memory, chunk->stream);
}

static int produce_sums(const gemmesh_rows *chunk, void *context) {
    const gemmesh_memory *from = context;
    return copy_rows(chunk->memory, part(*from, chunk->rows.first, chunk->rows.count), chunk->stream);
}

static int produce_blocks(const gemmesh_rows *chunk, void *context) {
    const gemmesh_memory *from = context;
    return copy_rows(chunk->memory, part(*from, chunk->rank * OWN + chunk->rows.first, chunk->rows.count), chunk->stream);
}

static int refuse(const gemmesh_rows *chunk, void *context) {
    (void)chunk, (void)context;
    gemmesh_set_reason("there is no more data");
    return 1;
}

static void pipes(const double *all, const double *sum, const double *exchanged) {
    gemmesh_sharded *a;
    float *mine = addend(rank), *first = addend(0);
    gemmesh_memory whole, given = matrix_of(GEMMESH_F32, rows, N, mine), into = matrix_of(GEMMESH_F32, rows, N, NULL);
    gemmesh_memory own = matrix_of(GEMMESH_F32, OWN, N, NULL);
    MUST(gemmesh_all_gather_and_consume(group, sharded_of(GEMMESH_F32, N, first), 2, 0, consume, &into));
    check("all_gather_and_consume", into, all, NULL, 0);
    MUST(gemmesh_produce_and_reduce_scatter(group, rows, NULL, 0, &own, 2, produce_sums, &given));
    check("produce_and_reduce_scatter", own, sum, NULL, rank * OWN);
    a = sharded_of(GEMMESH_F32, N, NULL);
    MUST(gemmesh_produce_and_all_to_all(group, a, NULL, 0, 2, produce_blocks, &given));
    MUST(gemmesh_sharded_whole(a, &whole));
    check("produce_and_all_to_all", whole, exchanged, NULL, 0);
    free(mine), free(first);
}

// A callback's error ends the group on every rank, which learn why.
static void fails(void) {
    gemmesh_memory into = matrix_of(GEMMESH_F32, rows, N, NULL);
    gemmesh_sharded *a = sharded_of(GEMMESH_F32, N, NULL);  // the ranks wait for one another here
    gemmesh_on_rows function = rank == world - 1 ? refuse : consume;
    gemmesh_status status = gemmesh_all_gather_and_consume(group, a, 2, 0, function, &into);
    if (status == GEMMESH_OK) status = gemmesh_synchronize(group);
    if (status == GEMMESH_OK) status = gemmesh_barrier(group);
    if (status == GEMMESH_ERROR_RANK && gemmesh_last_error_rank() == (int64_t)world - 1 &&
        strstr(gemmesh_last_error(), "there is no more data"))
        return;
    fprintf(stderr, "rank %zu: a failed callback: status %u, %s\n", rank, (unsigned)status, gemmesh_last_error());
    exit(1);
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    gemmesh_group_options options = gemmesh_group_options_default();
    on_gpu = strcmp(argv[4], "cuda") == 0;
    compares = !getenv("GEMMESH_TEST_CPU_DRIVER");
    if (on_gpu) {
        options.backend = GEMMESH_CUDA;
        void *driver = dlopen("libcuda.so.1", RTLD_NOW);
        if (driver) *(void **)&copy_on_stream = dlsym(driver, "cuMemcpyDtoDAsync_v2");
        if (!copy_on_stream) return fprintf(stderr, "no CUDA driver\n"), 1;
    }
    rank = strtoul(argv[1], NULL, 10), world = strtoul(argv[2], NULL, 10), rows = world * OWN;
    MUST(gemmesh_group_connect(rank, world, argv[3], &options, &group));
    gathers(GEMMESH_BF16);
    gathers(GEMMESH_F8E4M3);
    sums();

    size_t count = rows * N;
    double *all = calloc(3 * count, sizeof *all), *sum = all + count, *exchanged = sum + count;
    for (size_t of = 0; of < world; of++) {
        float *theirs = addend(of);
        for (size_t i = 0; i < count; i++) {
            if (of == 0) all[i] = theirs[i];
            sum[i] += theirs[i];
            if (i / (OWN * N) == rank) exchanged[of * OWN * N + i % (OWN * N)] = theirs[i];
        }
        free(theirs);
    }
    collects(all, sum, exchanged);
    pipes(all, sum, exchanged);
    free(all);
    fails();
    MUST(gemmesh_group_free(group));
    printf("rank %zu: all operations are right\n", rank);
    return 0;
}
