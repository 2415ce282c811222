// A gated MLP with its residual, on a part of the hidden features on each rank:
// y = x + (silu(x * gate^T) * (x * up^T)) * down^T. Own rows of x go in, own rows of y come out.
//
// Start one process for each rank:  mlp RANK WORLD ADDRESS
// or let torchrun, mpirun or srun start them, without arguments.
#include <gemmesh.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

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

// A matrix of bf16 in this process's memory.
class Matrix {
public:
    template <class Value>
    Matrix(std::size_t rows, std::size_t columns, Value value) : rows(rows), columns(columns), bits(rows * columns) {
        for (std::size_t i = 0; i < bits.size(); i++) {
            const float number = value(i / columns, i % columns);
            std::uint32_t word;
            std::memcpy(&word, &number, sizeof word);
            bits[i] = static_cast<std::uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
        }
    }
    gemmesh_memory memory() { return {bits.data(), GEMMESH_BF16, rows, columns, 0}; }
    double at(std::size_t row, std::size_t column) const {
        const std::uint32_t word = std::uint32_t{bits[row * columns + column]} << 16;
        float number;
        std::memcpy(&number, &word, sizeof number);
        return number;
    }

private:
    std::size_t rows, columns;
    std::vector<std::uint16_t> bits;
};

constexpr std::size_t M = 16, MODEL = 24, PART = 8;  // PART: the hidden features of a rank

static float x_at(std::size_t i, std::size_t j) { return static_cast<float>((i * 7 + j * 3) % 11) / 8 - 0.5f; }
static float weight_at(std::size_t i, std::size_t j) { return static_cast<float>((i * 5 + j) % 13) / 16 - 0.375f; }

// This rank's rows of y.
static Matrix forward(gemmesh_group *group, gemmesh_sharded *x, std::size_t rank) {
    const auto part = [&](std::size_t i, std::size_t j) { return weight_at(i + rank * PART, j); };
    Matrix gate(PART, MODEL, part), up(PART, MODEL, [&](auto i, auto j) { return part(i, j + 1); });
    Matrix down(MODEL, PART, [&](auto i, auto j) { return weight_at(i, j + rank * PART); });
    const auto zero = [](auto, auto) { return 0.0f; };
    gemmesh_memory own;
    must(gemmesh_sharded_own_rows(x, &own));
    Matrix hidden(M, PART, zero), y(own.rows, MODEL, zero);

    auto product = gemmesh_product_default(GEMMESH_ALL_GATHER_MATMUL, GEMMESH_BF16);
    product.gated = 1;
    product.activation = GEMMESH_SILU;
    const auto a = gemmesh_sharded_operand_of(x);
    const gemmesh_operand weights[] = {gemmesh_operand_of(gate.memory()), gemmesh_operand_of(up.memory())};
    auto out = gemmesh_output_of(hidden.memory());
    auto call = gemmesh_product_call_default();
    call.sharded_a = &a;
    call.weights = weights, call.weight_count = 2;
    call.outputs = &out, call.output_count = 1;
    must(gemmesh_run(group, &product, &call));

    product = gemmesh_product_default(GEMMESH_MATMUL_REDUCE_SCATTER, GEMMESH_BF16);
    const auto rows = gemmesh_operand_of(hidden.memory()), last = gemmesh_operand_of(down.memory());
    out = gemmesh_output_of(y.memory());
    call = gemmesh_product_call_default();
    call.a = &rows;
    call.weights = &last, call.weight_count = 1;
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
            gate += double{x_at(i, k)} * weight_at(h, k);
            up += double{x_at(i, k)} * weight_at(h, k + 1);
        }
        y += gate / (1 + std::exp(-gate)) * up * weight_at(j, h);
    }
    return y;
}

static void run(int argc, char **argv) {
    auto options = gemmesh_group_options_default();
    options.workers = 1;
    gemmesh_group *joined = nullptr;
    if (argc == 4) {
        const auto rank = std::strtoul(argv[1], nullptr, 10), world = std::strtoul(argv[2], nullptr, 10);
        must(gemmesh_group_connect(rank, world, argv[3], &options, &joined));
    } else {
        must(gemmesh_group_from_env(&options, &joined));
    }
    const Group group(joined);
    std::size_t rank = 0, world = 0;
    must(gemmesh_group_rank(group.get(), &rank));
    must(gemmesh_group_world_size(group.get(), &world));

    gemmesh_sharded *made = nullptr;
    must(gemmesh_sharded_new(group.get(), GEMMESH_BF16, M, MODEL, &made));
    const Sharded x(made);
    gemmesh_range rows;
    gemmesh_memory own;
    must(gemmesh_sharded_rows_of(x.get(), rank, &rows));
    must(gemmesh_sharded_own_rows(x.get(), &own));
    Matrix mine(rows.count, MODEL, [&](auto i, auto j) { return x_at(rows.first + i, j); });
    const auto from = mine.memory();
    must(gemmesh_copy(group.get(), &from, &own));

    const Matrix y = forward(group.get(), x.get(), rank);
    for (std::size_t i = 0; i < rows.count * MODEL; i++) {
        const double found = y.at(i / MODEL, i % MODEL), expected = exact(rows.first + i / MODEL, i % MODEL, world);
        if (std::abs(found - expected) > 0.02 * (1 + std::abs(expected))) must(gemmesh_fail(group.get(), "a result is wrong"));
    }
    std::printf("rank %zu: %zu rows are right\n", rank, rows.count);
}

int main(int argc, char **argv) try {
    run(argc, argv);
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
