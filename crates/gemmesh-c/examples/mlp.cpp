// A gated MLP with its residual: y = x + (silu(x * gate^T) * (x * up^T)) * down^T. Each rank has a part of the hidden
// features, and own rows of x and y.
//
// Start one process for each rank:  mlp RANK WORLD ADDRESS
// or let torchrun, mpirun or srun start them, without arguments.
#include <gemmesh.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

constexpr std::size_t M = 16, MODEL = 24, PART = 8;  // PART: the hidden features of a rank

static void must(gemmesh_status status) {
    if (status != GEMMESH_OK) throw std::runtime_error(gemmesh_last_error());
}

// Frees a handle when it goes out of scope.
struct Free {
    void operator()(gemmesh_group *group) const { gemmesh_group_free(group); }
    void operator()(gemmesh_sharded *matrix) const { gemmesh_sharded_free(matrix); }
};
using Group = std::unique_ptr<gemmesh_group, Free>;
using Sharded = std::unique_ptr<gemmesh_sharded, Free>;

// A matrix of bf16 in this process's memory. Its values are multiples of 1/16, which bf16 holds exactly.
struct Matrix : gemmesh_memory {
    std::vector<std::uint16_t> bits;
    template <class Value>
    Matrix(std::size_t m, std::size_t n, Value value) : gemmesh_memory{nullptr, GEMMESH_BF16, m, n, 0}, bits(m * n) {
        for (std::size_t i = 0; i < m * n; i++) {
            const auto number = static_cast<float>(value(i / n, i % n));
            std::uint32_t word;
            std::memcpy(&word, &number, sizeof word);
            bits[i] = static_cast<std::uint16_t>(word >> 16);
        }
        address = bits.data();
    }
};

static double x_at(std::size_t i, std::size_t j) { return static_cast<double>((i * 7 + j * 3) % 11) / 8 - 0.5; }
static double weight_at(std::size_t i, std::size_t j) { return static_cast<double>((i * 5 + j) % 13) / 16 - 0.375; }

// This rank's rows of y, of which there are `own.rows`.
static std::vector<float> forward(gemmesh_group *group, gemmesh_sharded *x, gemmesh_memory own, std::size_t rank) {
    const std::size_t first = rank * PART;
    Matrix gate(PART, MODEL, [&](auto i, auto j) { return weight_at(first + i, j); });
    Matrix up(PART, MODEL, [&](auto i, auto j) { return weight_at(first + i, j + 1); });
    Matrix down(MODEL, PART, [&](auto i, auto j) { return weight_at(i, first + j); });
    Matrix hidden(M, PART, [](auto, auto) { return 0; });
    std::vector<float> y(own.rows * MODEL);

    auto product = gemmesh_product_default(GEMMESH_ALL_GATHER_MATMUL, GEMMESH_BF16);
    product.gated = 1;
    product.activation = GEMMESH_SILU;
    const auto a = gemmesh_sharded_operand_of(x);
    const gemmesh_operand weights[] = {gemmesh_operand_of(gate), gemmesh_operand_of(up), gemmesh_operand_of(down)};
    auto out = gemmesh_output_of(hidden);
    auto call = gemmesh_product_call_default();
    call.sharded_a = &a;
    call.weights = weights, call.weight_count = 2;
    call.outputs = &out, call.output_count = 1;
    must(gemmesh_run(group, &product, &call));

    product = gemmesh_product_default(GEMMESH_MATMUL_REDUCE_SCATTER, GEMMESH_BF16);
    const auto rows = gemmesh_operand_of(hidden);
    out = gemmesh_output_of({y.data(), GEMMESH_F32, own.rows, MODEL, 0});
    call = gemmesh_product_call_default();
    call.a = &rows;
    call.weights = &weights[2], call.weight_count = 1;
    call.outputs = &out, call.output_count = 1;
    call.residual = &own;
    must(gemmesh_run(group, &product, &call));
    must(gemmesh_synchronize(group));
    return y;
}

static double exact(std::size_t i, std::size_t j, std::size_t world) {
    double y = x_at(i, j);
    for (std::size_t h = 0; h < world * PART; h++) {
        double gate = 0, up = 0;
        for (std::size_t k = 0; k < MODEL; k++) {
            gate += x_at(i, k) * weight_at(h, k);
            up += x_at(i, k) * weight_at(h, k + 1);
        }
        y += gate / (1 + std::exp(-gate)) * up * weight_at(j, h);
    }
    return y;
}

int main(int argc, char **argv) try {
    gemmesh_group *joined;
    const auto number = [&](int i) { return std::strtoul(argv[i], nullptr, 10); };
    must(argc == 4 ? gemmesh_group_connect(number(1), number(2), argv[3], nullptr, &joined)
                   : gemmesh_group_from_env(nullptr, &joined));
    const Group group(joined);
    std::size_t rank, world;
    must(gemmesh_group_rank(group.get(), &rank));
    must(gemmesh_group_world_size(group.get(), &world));

    gemmesh_sharded *made;
    gemmesh_range rows;
    gemmesh_memory own;
    must(gemmesh_sharded_new(group.get(), GEMMESH_BF16, M, MODEL, &made));
    const Sharded x(made);
    must(gemmesh_sharded_rows_of(made, rank, &rows));
    must(gemmesh_sharded_own_rows(made, &own));
    const Matrix mine(rows.count, MODEL, [&](auto i, auto j) { return x_at(rows.first + i, j); });
    must(gemmesh_copy(joined, &mine, &own));

    const auto y = forward(joined, made, own, rank);
    for (std::size_t i = 0; i < y.size(); i++) {
        const double expected = exact(rows.first + i / MODEL, i % MODEL, world);
        const bool fits = std::abs(y[i] - expected) < 0.02 * (1 + std::abs(expected));
        if (!fits) must(gemmesh_fail(joined, "a result is wrong"));
    }
    std::printf("rank %zu: %zu rows are right\n", rank, rows.count);
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
