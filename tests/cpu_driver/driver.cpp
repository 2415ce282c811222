// A CUDA driver that runs on the CPU. It tests the work that the CUDA backend enqueues, on machines without a GPU. It
// is libcuda.so.1 for the tests' processes. `run` beside it builds and uses it.
//
// There is one GPU, which ranks share, or as many as CPU_DRIVER_GPUS says. With CPU_DRIVER_HANGS the driver never
// starts. A stream is a thread that does one thing after the other. Device memory is host memory, and processes pass
// memfds to one another.
//
// It enforces the rules of capture that this library can break. Streams that a capture has spread to must be joined.
// Events do not cross the border of a capture. A stream that is captured must not be asked whether it is idle. A
// graph's nodes run one after the other, in any order that their edges allow. So kernels that wait for copies of the
// same graph cannot run here.
//
// It has the kernels that it needs: reductions, collectives, alignment, the count of replays, and products whose
// partials are not added by kernels. It says nothing about speed, or about what a GPU may reorder.

#include <cuda.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_fp8.h>

#include "../../cuda/abi.h"

// The same function under the old name, which is the exported one everywhere.
#undef cuEventElapsedTime

namespace {

using Work = std::function<void()>;

double now_ns() {
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A program's mistake, or something that this driver can't do.
CUresult refuse(CUresult result, const char* why, ...) {
    va_list arguments;
    va_start(arguments, why);
    fprintf(stderr, "the CPU's driver: ");
    vfprintf(stderr, why, arguments);
    fprintf(stderr, " (%d)\n", static_cast<int>(result));
    va_end(arguments);
    return result;
}

struct Node {
    Work work;
    std::vector<int> after;
};

// Streams that are being captured into one graph.
struct Capture {
    CUstream origin;
    std::vector<Node> nodes;
    std::vector<CUstream> streams;
    bool active = true;

    int add(Work work, std::vector<int> after) {
        nodes.push_back({std::move(work), std::move(after)});
        return static_cast<int>(nodes.size()) - 1;
    }
};

// Guards all captures, the state of streams and events in them, and the list of streams.
std::mutex capturing;

// A place on a stream that has been recorded.
struct Place {
    std::mutex mutex;
    std::condition_variable passed;
    bool is_passed = false;
    double time = 0;

    void pass() {
        std::lock_guard<std::mutex> lock(mutex);
        is_passed = true;
        time = now_ns();
        passed.notify_all();
    }

    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        passed.wait(lock, [&] { return is_passed; });
    }

    bool look() {
        std::lock_guard<std::mutex> lock(mutex);
        return is_passed;
    }
};

}  // namespace

struct CUstream_st {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Work> queue;
    bool busy = false;
    int priority;
    std::shared_ptr<Capture> capture;
    std::vector<int> last;  // nodes of the capture, which the next one comes after
    std::mt19937 random{std::random_device{}()};

    explicit CUstream_st(int priority) : priority(priority) {
        std::thread([this] { run(); }).detach();
    }

    [[noreturn]] void run() {
        while (true) {
            std::unique_lock<std::mutex> lock(mutex);
            changed.wait(lock, [&] { return !queue.empty(); });
            const Work work = std::move(queue.front());
            queue.pop_front();
            busy = true;
            lock.unlock();
            // Streams drift apart.
            if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 100));
            work();
            lock.lock();
            busy = false;
            changed.notify_all();
        }
    }

    void push(Work work) {
        std::lock_guard<std::mutex> lock(mutex);
        queue.push_back(std::move(work));
        changed.notify_all();
    }

    bool is_idle() {
        std::lock_guard<std::mutex> lock(mutex);
        return queue.empty() && !busy;
    }

    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return queue.empty() && !busy; });
    }
};

struct CUevent_st {
    std::shared_ptr<Place> place;
    std::shared_ptr<Capture> capture;
    std::vector<int> last;
};

struct CUfunc_st {
    std::string name;
};

struct CUgraph_st {
    std::vector<Node> nodes;
};

struct CUgraphExec_st {
    std::vector<Node> nodes;
    std::mt19937 random;

    // One after the other, as a GPU may, for which branches that could run at the same time need not: in any order that
    // is one.
    void run() {
        std::vector<bool> done(nodes.size());
        for (size_t count = 0; count < nodes.size(); ++count) {
            std::vector<int> ready;
            for (size_t index = 0; index < nodes.size(); ++index) {
                const std::vector<int>& after = nodes[index].after;
                const bool is_ready = std::all_of(after.begin(), after.end(), [&](int before) { return done[before]; });
                if (!done[index] && is_ready) ready.push_back(static_cast<int>(index));
            }
            const int next = ready[random() % ready.size()];
            nodes[next].work();
            done[next] = true;
        }
    }
};

namespace {

CUresult put(CUstream stream, Work work) {
    std::unique_lock<std::mutex> lock(capturing);
    if (stream->capture) {
        stream->last = {stream->capture->add(std::move(work), stream->last)};
        return CUDA_SUCCESS;
    }
    lock.unlock();
    stream->push(std::move(work));
    return CUDA_SUCCESS;
}

bool is_captured(CUstream stream) {
    std::lock_guard<std::mutex> lock(capturing);
    return stream->capture != nullptr;
}

std::atomic<uint32_t>& word(const volatile void* at) {
    return *static_cast<std::atomic<uint32_t>*>(const_cast<void*>(at));
}

void nap() { std::this_thread::sleep_for(std::chrono::microseconds(10)); }

bool has_reached(uint32_t seen, uint32_t expected) { return static_cast<int32_t>(seen - expected) >= 0; }

// Numbers of 8, 16 and 32 bits.

enum class Kind { bf16, f16, f32, e4m3, e5m2 };

Kind kind_of(const std::string& name) {
    if (name.find("bf16") != std::string::npos) return Kind::bf16;
    return name.find("f16") != std::string::npos ? Kind::f16 : Kind::f32;
}

// What is added to a product, and what it is rounded to.
Kind rounded(Kind operands) { return operands == Kind::e4m3 || operands == Kind::e5m2 ? Kind::bf16 : operands; }

// By their bits.
std::vector<float> numbers_of(__nv_fp8_interpretation_t type) {
    std::vector<float> numbers;
    for (int bits = 0; bits < 256; ++bits) {
        const auto half = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(bits), type);
        _Float16 value;
        memcpy(&value, &half.x, sizeof value);
        numbers.push_back(static_cast<float>(value));
    }
    return numbers;
}

float load(const void* row, uint64_t column, Kind kind) {
    if (kind == Kind::f32) return static_cast<const float*>(row)[column];
    if (kind == Kind::e4m3 || kind == Kind::e5m2) {
        static const auto of_e4m3 = numbers_of(__NV_E4M3), of_e5m2 = numbers_of(__NV_E5M2);
        return (kind == Kind::e4m3 ? of_e4m3 : of_e5m2)[static_cast<const __nv_fp8_storage_t*>(row)[column]];
    }
    const uint16_t bits = static_cast<const uint16_t*>(row)[column];
    if (kind == Kind::f16) {
        _Float16 half;
        memcpy(&half, &bits, sizeof half);
        return static_cast<float>(half);
    }
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

void store(void* row, uint64_t column, float value, Kind kind) {
    if (kind == Kind::f32) {
        static_cast<float*>(row)[column] = value;
        return;
    }
    if (kind == Kind::e4m3) {
        static_cast<__nv_fp8_storage_t*>(row)[column] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
        return;
    }
    uint16_t bits;
    if (kind == Kind::f16) {
        const _Float16 half = static_cast<_Float16>(value);
        memcpy(&bits, &half, sizeof bits);
    } else {
        uint32_t wide;
        memcpy(&wide, &value, sizeof wide);
        // To the nearest, ties to even.
        bits = value != value ? 0x7fff : static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    }
    static_cast<uint16_t*>(row)[column] = bits;
}

// Kernels.

float function(float x, uint32_t activation) {
    const auto sigmoid = [](float s) { return 1.0f / (1.0f + std::exp(-s)); };
    switch (activation) {
        case GEMMESH_RELU: return x < 0 ? 0 : x;
        case GEMMESH_GELU: return 0.5f * x * std::erfc(-x * 0.70710678f);
        case GEMMESH_GELU_TANH: return x * sigmoid(1.5957691f * (x + 0.044715f * x * x * x));
        case GEMMESH_SILU: return x * sigmoid(x);
        default: return x;
    }
}

// The operand may be missing, for a sum of f32.
float addend(const void* rows, uint64_t offset, uint64_t column, Kind kind) {
    return rows == nullptr ? 0 : load(static_cast<const char*>(rows) + offset, column, kind);
}

void reduce(const GemmeshReduction& reduction, Kind kind) {
    for (uint32_t row = 0; row < reduction.rows; ++row) {
        for (uint32_t column = 0; column < reduction.n; ++column) {
            float sum = 0;
            for (uint32_t i = 0; i < reduction.count; ++i) {
                const char* addend = static_cast<const char*>(reduction.addends[i]) + row * reduction.addend_pitches[i];
                sum = i == 0 ? load(addend, column, kind) : sum + load(addend, column, kind);
            }
            sum = function(sum + addend(reduction.bias, 0, column, kind), reduction.activation);
            sum += addend(reduction.residual, row * reduction.residual_pitch, column, kind);
            const Kind stored[] = {kind, Kind::f16, Kind::e4m3, Kind::f32};
            store(static_cast<char*>(reduction.out) + row * reduction.out_pitch, column, sum, stored[reduction.stored_type]);
        }
    }
}

// Quantises values of a row, from its column `first` on.
void quantize(const GemmeshOutputScales& of, std::vector<float>& values, uint64_t row, uint32_t first) {
    for (uint32_t begin = 0, end; begin < values.size(); begin = end) {
        const uint32_t place = of.first_column + first + begin;
        end = std::min<uint32_t>(begin + GEMMESH_SCALE_BLOCK - place % GEMMESH_SCALE_BLOCK, values.size());
        float* scale = of.scales + row * of.row + uint64_t{place / GEMMESH_SCALE_BLOCK} * of.block;
        if (of.row != 0 || of.block != 0) {
            float amax = 1e-4f;
            for (uint32_t i = begin; i < end; ++i) amax = std::fmax(amax, std::fabs(values[i]));
            *scale = amax / 448;
            int exponent;
            if (of.power_of_two != 0 && std::isfinite(*scale) && std::frexp(*scale, &exponent) != 0.5f) {
                *scale = std::ldexp(1.0f, exponent);
            }
        }
        for (uint32_t i = begin; i < end; ++i) values[i] *= 1 / *scale;
    }
}

void quantize(const GemmeshQuantization& of, Kind kind) {
    for (uint32_t row = 0; row < of.rows; ++row) {
        std::vector<float> values(of.columns);
        const char* from = static_cast<const char*>(of.from) + row * of.from_pitch;
        for (uint32_t column = 0; column < of.columns; ++column) values[column] = load(from, column, kind);
        quantize(of.scales, values, row, 0);
        char* to = static_cast<char*>(of.to) + row * of.to_pitch;
        for (uint32_t column = 0; column < of.columns; ++column) store(to, column, values[column], Kind::e4m3);
    }
}

void align(const GemmeshAlignment& alignment) {
    for (uint32_t peer = 0; peer < alignment.world; ++peer) word(&alignment.words[peer][alignment.rank]) = alignment.count;
    const double begin = now_ns();
    for (uint32_t peer = 0; peer < alignment.world; ++peer) {
        while (!has_reached(word(&alignment.words[alignment.rank][peer]), alignment.count)) {
            if (word(alignment.abort) != 0 || now_ns() - begin > alignment.deadline_ns) return;
            nap();
        }
    }
}

// Whether `flag` has reached `epoch` in time; notes what is missing as kernels do.
bool await(const GemmeshParams& params, const volatile uint32_t* flag, uint32_t epoch, uint32_t index, uint32_t peer) {
    const double begin = now_ns();
    while (true) {
        const uint32_t seen = word(flag);
        if (has_reached(seen, epoch)) return true;
        if (word(params.abort) != 0) return false;
        const double waited = now_ns() - begin;
        if (waited > params.deadline_ns) {
            GemmeshFault& fault = *params.fault;
            fault.flag = index;
            fault.expected = epoch;
            fault.seen = seen;
            fault.waited_ns = static_cast<uint64_t>(waited);
            fault.peer = peer;
            fault.pushed = params.peers.push_epoch != nullptr;
            fault.operation = params.epoch;
            fault.recording = params.recording;
            word(&fault.state) = GEMMESH_FAULT_RECORDED;
            word(params.abort) = GEMMESH_GIVEN_UP;
            return false;
        }
        nap();
    }
}

// The part of a kernel that tells its peers of itself and waits for them: cuda/protocol/push.cuh.
struct Entrance {
    uint32_t epoch;
    bool all_ready;
};

Entrance enter(const GemmeshParams& params) {
    const GemmeshPeers& peers = params.peers;
    if (peers.push_epoch == nullptr) return {params.epoch, true};
    GemmeshPushEpoch& push_epoch = *peers.push_epoch;
    const uint32_t epoch = word(&push_epoch.epoch) + 1;
    word(&push_epoch.entered) = 1;
    if (peers.started != nullptr) word(peers.started) = params.epoch;
    GemmeshMailbox& own = *peers.mailboxes[peers.rank];
    if (epoch % GEMMESH_REFRESH == 0) {
        for (uint32_t& flag : own.chunk) word(&flag) = epoch - 1;
    }
    for (uint32_t peer = 0; peer < peers.world; ++peer) word(&peers.mailboxes[peer]->ready[peers.rank]) = epoch;
    bool all_ready = true;
    for (uint32_t peer = 0; peer < peers.world && all_ready; ++peer) {
        all_ready = await(params, &own.ready[peer], epoch, GEMMESH_READY, peer);
    }
    if (peers.copies != 0 && (all_ready || word(params.abort) == GEMMESH_GROUP_FAILED)) {
        if (all_ready) word(&push_epoch.current) = epoch;
        word(&push_epoch.permit) = 1;
    }
    return {epoch, all_ready};
}

void leave(const GemmeshParams& params, uint32_t epoch) {
    const GemmeshPeers& peers = params.peers;
    if (peers.push_epoch == nullptr) return;
    word(&peers.push_epoch->epoch) = epoch;
    word(&peers.push_epoch->entered) = 0;
    if (peers.completed != nullptr) word(peers.completed) = params.epoch;
}

void collective(const GemmeshParams& params, const GemmeshSends& sends, const GemmeshReduction& reduction, Kind kind) {
    const auto [epoch, all_ready] = enter(params);
    for (uint32_t i = 0; i < sends.count && all_ready; ++i) {
        const GemmeshSend& send = sends.sends[i];
        for (uint32_t row = 0; row < send.rows; ++row) {
            const char* from = static_cast<const char*>(sends.from) + (send.from_row + row) * sends.from_pitch + send.column;
            char* to = static_cast<char*>(params.peers.rows[send.peer]) + (send.to_row + row) * sends.to_pitch + send.column;
            memmove(to, from, send.width);
        }
        word(&params.peers.mailboxes[send.peer]->chunk[send.flag]) = epoch;
    }
    bool waiting = all_ready;
    for (uint32_t flag = 0; flag < sends.flags && waiting; ++flag) {
        waiting = await(params, params.flags + flag, epoch, flag, params.sources[flag]);
    }
    if (reduction.count > 0) reduce(reduction, kind);
    leave(params, epoch);
}

struct Matrix {
    char* rows;
    uint64_t pitch;
};

// The shape of a kernel, and how many clusters a launch has.
struct Shape {
    int tile_m, tile_n, cluster_m, cluster_n, split;
    uint32_t clusters;

    uint32_t ctas() const { return cluster_m * cluster_n * split; }
};

// The operands and outputs of a product, by weight.
struct Operands {
    Matrix a, b[GEMMESH_MAX_WEIGHTS], out[GEMMESH_MAX_WEIGHTS];
};

// The scales of a row of `a` and of a column of a weight's output, for a block of K.
struct ElementScales {
    float a = 1, b = 1;

    ElementScales(const GemmeshParams& params, uint32_t weight, uint32_t row, uint32_t column, uint32_t block) {
        const GemmeshScales& of_a = params.scales;
        const GemmeshOutput& output = params.outputs[weight];
        if (of_a.a != nullptr) a = of_a.a[uint64_t{row} * of_a.a_row + uint64_t{block} * of_a.a_block];
        if (output.scales == nullptr) return;
        const uint32_t of_b = of_a.a_block == 0 ? column : (output.scale_first + column) / GEMMESH_SCALE_BLOCK;
        b = output.scales[uint64_t{of_b} * output.scale_row + (of_a.a_block == 0 ? 0 : block)];
    }
};

// An element of a row through which a kernel steps. It is zero in front of the row's first column.
float element_of(const char* row, uint32_t k, const GemmeshParams& params, Kind kind) {
    const uint32_t first = params.scales.first_column;
    return k < first ? 0 : load(row, k - first, kind);
}

// The weights of a product in f32, each [n, k].
struct Weights {
    std::vector<float> values[GEMMESH_MAX_WEIGHTS];

    Weights(const Operands& operands, const GemmeshParams& params, Kind kind) {
        for (uint32_t weight = 0; weight < GEMMESH_MAX_WEIGHTS; ++weight) {
            const Matrix& b = operands.b[weight];
            for (uint32_t column = 0; column < params.outputs[weight].n; ++column) {
                for (uint32_t k = 0; k < params.k; ++k) {
                    const bool is_kn = params.b_is_kn != 0;
                    const char* row = b.rows + (is_kn ? k : column) * b.pitch;
                    values[weight].push_back(is_kn ? load(row, column, kind) : element_of(row, k, params, kind));
                }
            }
        }
    }
};

// An element of the product with one weight, with its bias. `a` are a row's values. Sums of numbers of 8 bits are promoted,
// block by block.
float element(const std::vector<float>& a, const Weights& weights, const GemmeshParams& params, uint32_t weight, uint32_t row, uint32_t column, Kind kind) {
    const float* b = weights.values[weight].data() + uint64_t{column} * params.k;
    const bool is_promoted = rounded(kind) != kind, by_blocks = params.scales.a_block != 0;
    const uint32_t step = is_promoted ? GEMMESH_SCALE_BLOCK : params.k;
    float sum = 0;
    for (uint32_t begin = 0; begin < params.k; begin += step) {
        float part = 0;
        for (uint32_t k = begin; k < std::min(begin + step, params.k); ++k) part += a[k] * b[k];
        const ElementScales scales(params, weight, row, column, begin / GEMMESH_SCALE_BLOCK);
        sum = by_blocks ? std::fma(scales.a * scales.b, part, sum) : sum + part;
    }
    const ElementScales scales(params, weight, row, column, 0);
    if (!by_blocks) sum = scales.a * (scales.b * sum);
    return sum + addend(params.outputs[weight].bias, 0, column, rounded(kind));
}

void multiply(const Operands& operands, const GemmeshParams& params, const Shape& shape, const Kind (&kinds)[2]) {
    const Kind kind = rounded(kinds[0]);
    const Kind stored[] = {params.is_f32 != 0 ? Kind::f32 : kind, Kind::f16, Kind::e4m3};
    const auto [epoch, all_ready] = enter(params);
    for (uint32_t i = 0; i < params.peers.task_count && all_ready; ++i) {
        const GemmeshCopyTask& task = params.peers.tasks[i];
        const char* from = static_cast<const char*>(params.peers.rows[params.peers.rank]) + task.offset;
        memcpy(static_cast<char*>(params.peers.rows[task.peer]) + task.offset, from, task.bytes);
        if (task.beside_bytes > 0) {
            const char* beside = static_cast<const char*>(params.peers.beside[params.peers.rank]) + task.beside_offset;
            memcpy(static_cast<char*>(params.peers.beside[task.peer]) + task.beside_offset, beside, task.beside_bytes);
        }
        word(&params.peers.mailboxes[task.peer]->chunk[task.flag]) = epoch;
    }
    const Weights weights(operands, params, kinds[1]);
    std::vector<float> a(params.k);
    bool waiting = all_ready;
    for (uint32_t i = 0; i < params.tile_count && waiting; ++i) {
        const GemmeshTile& tile = params.tiles[i];
        const double begin = now_ns();
        for (uint32_t flag = tile.flag_begin; flag < tile.flag_end && waiting; ++flag) {
            waiting = await(params, params.flags + flag, epoch, flag, params.sources[flag]);
        }
        // The first slice of K does the others' work too: they wait for the same flags.
        if (!waiting || (params.slices != nullptr && params.slices[i].number != 0)) continue;
        const bool is_gated = params.is_gated != 0;
        const uint32_t rows = shape.tile_m * shape.cluster_m;
        const uint32_t columns = shape.tile_n * shape.cluster_n / (is_gated ? 2 : 1);
        const GemmeshOutput& output = params.outputs[tile.block];
        // Numbers of 8 bits are stored without a map.
        const bool has_map = params.stored_type != GEMMESH_STORED_E4M3;
        const Matrix out = has_map ? operands.out[tile.block] : Matrix{static_cast<char*>(output.out), output.out_pitch};
        for (uint32_t row = tile.m * rows; row < std::min(params.m, (tile.m + 1) * rows); ++row) {
            const uint32_t first = tile.n * columns;
            for (uint32_t k = 0; k < params.k; ++k) a[k] = element_of(operands.a.rows + row * operands.a.pitch, k, params, kinds[0]);
            std::vector<float> sums;
            for (uint32_t column = first; column < std::min(output.n, first + columns); ++column) {
                float sum = function(element(a, weights, params, tile.block, row, column, kinds[0]), params.activation);
                if (is_gated) sum *= element(a, weights, params, 1, row, column, kinds[0]);
                sums.push_back(sum + addend(output.residual, row * output.residual_pitch, column, kind));
            }
            if (output.quantized.scales != nullptr) quantize(output.quantized, sums, row, first);
            for (uint32_t i = 0; i < sums.size(); ++i) {
                store(out.rows + row * out.pitch, first + i, sums[i], stored[params.stored_type]);
            }
        }
        const uint32_t ctas = shape.ctas();
        for (uint32_t cta = 0; params.trace != nullptr && cta < ctas; ++cta) {
            const uint64_t from = static_cast<uint64_t>(begin), to = static_cast<uint64_t>(now_ns());
            // As if each CTA of the grid had a multiprocessor of its own.
            const uint32_t sm = i % shape.clusters * ctas + cta;
            params.trace[i * ctas + cta] = {from, from, from, from, to, to, sm, i};
        }
    }
    leave(params, epoch);
}

template <class Argument>
Argument argument(void** arguments, int index) {
    return *static_cast<const Argument*>(arguments[index]);
}

// Copies its arguments, as launches do. Nothing for a kernel that this driver does not know.
Work work_of(const std::string& name, unsigned grid, void** arguments) {
    const Kind kind = kind_of(name);
    const auto begins = [&](const char* with) { return name.rfind(with, 0) == 0; };
    if (name == "gemmesh_count") {
        auto* count = argument<uint32_t*>(arguments, 0);
        auto* shown = argument<uint32_t*>(arguments, 1);
        return [=] { word(shown) = *count += 1; };
    }
    if (name == "gemmesh_align") {
        return [alignment = argument<GemmeshAlignment>(arguments, 0)] { align(alignment); };
    }
    if (begins("gemmesh_reduce_")) {
        return [reduction = argument<GemmeshReduction>(arguments, 0), kind] { reduce(reduction, kind); };
    }
    const auto params = [&](int index) { return std::make_shared<GemmeshParams>(argument<GemmeshParams>(arguments, index)); };
    if (begins("gemmesh_quantize_")) {
        return [of = argument<GemmeshQuantization>(arguments, 0), kind] { quantize(of, kind); };
    }
    if (begins("gemmesh_collective_")) {
        return [params = params(0), sends = argument<GemmeshSends>(arguments, 1),
                reduction = argument<GemmeshReduction>(arguments, 2), kind] { collective(*params, sends, reduction, kind); };
    }
    Shape shape{};
    // The types of `a` and `b`, or one for both, stand before the tile.
    const size_t tile = name.find_first_of('x') == std::string::npos ? 0 : name.rfind('_', name.find('x')) + 1;
    char rest[32] = "";
    const int found = sscanf(name.c_str() + tile, "%dx%dx%*d_s%*d_c%dx%d_k%d%31s", &shape.tile_m, &shape.tile_n,
                             &shape.cluster_m, &shape.cluster_n, &shape.split, rest);
    if (!begins("matmul_") || found < 5 || strstr(rest, "_sums") != nullptr) return nullptr;
    const auto is_of = [&](const char* types) { return begins((std::string("matmul_") + types).c_str()); };
    const Kind of_a = is_of("e4m3") ? Kind::e4m3 : is_of("e5m2") ? Kind::e5m2 : kind;
    const Kind of_b = is_of("e4m3_e5m2") ? Kind::e5m2 : of_a == Kind::e5m2 ? Kind::e4m3 : of_a;
    shape.clusters = grid / shape.ctas();
    Operands operands{argument<Matrix>(arguments, 0), {argument<Matrix>(arguments, 1)}, {argument<Matrix>(arguments, 2)}};
    const auto* more = static_cast<const CUtensorMap*>(arguments[4]);
    for (int weight = 1; weight < GEMMESH_MAX_WEIGHTS; ++weight) {
        memcpy(&operands.b[weight], &more[weight - 1], sizeof(Matrix));
        memcpy(&operands.out[weight], &more[GEMMESH_MAX_WEIGHTS - 1 + weight - 1], sizeof(Matrix));
    }
    return [operands, params = params(3), shape, of_a, of_b] { multiply(operands, *params, shape, {of_a, of_b}); };
}

// Ordinary memory, with some room after it, because kernels load whole pieces.
CUresult allocate(CUdeviceptr* to, size_t bytes) {
    void* memory;
    if (posix_memalign(&memory, 4096, bytes + 512) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    memset(memory, 0x5a, bytes + 512);
    *to = reinterpret_cast<CUdeviceptr>(memory);
    return CUDA_SUCCESS;
}

char* at(CUdeviceptr address) { return reinterpret_cast<char*>(address); }

// All there have been.
std::vector<CUstream> streams;

thread_local std::vector<CUcontext> contexts;
thread_local CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
const auto THE_CONTEXT = reinterpret_cast<CUcontext>(0x1000);
constexpr size_t DEVICE_BYTES = size_t{1} << 37;

// Page-locked memory of the host: where it begins, and its bytes.
std::mutex pinning;
std::map<const char*, size_t> pinned;

bool is_pinned(const void* memory) {
    std::lock_guard<std::mutex> lock(pinning);
    const char* place = static_cast<const char*>(memory);
    const auto behind = pinned.upper_bound(place);
    if (behind == pinned.begin()) return false;
    const auto& [first, bytes] = *std::prev(behind);
    return place < first + bytes;
}

std::atomic<CUresult> events_answer = CUDA_SUCCESS, streams_answer = CUDA_SUCCESS;

}  // namespace

extern "C" {

// The device and its context.

CUresult cuInit(unsigned) {
    while (getenv("CPU_DRIVER_HANGS") != nullptr) pause();
    return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) {
    const char* gpus = getenv("CPU_DRIVER_GPUS");
    return *count = gpus == nullptr ? 1 : atoi(gpus), CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int length, CUdevice) { return snprintf(name, length, "NVIDIA H200"), CUDA_SUCCESS; }
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return memset(uuid, 7 + device, sizeof *uuid), CUDA_SUCCESS; }
CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) { return *bytes = DEVICE_BYTES, CUDA_SUCCESS; }
CUresult cuDeviceCanAccessPeer(int* can, CUdevice, CUdevice) { return *can = 1, CUDA_SUCCESS; }

CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute, CUdevice, CUdevice) {
    return *value = attribute != CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
        default: *value = 1;
    }
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return *context = THE_CONTEXT, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
CUresult cuCtxGetId(CUcontext, unsigned long long* id) { return *id = 1, CUDA_SUCCESS; }
CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, CUDA_SUCCESS; }
CUresult cuCtxPushCurrent(CUcontext context) { return contexts.push_back(context), CUDA_SUCCESS; }

CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = contexts.empty() ? nullptr : contexts.back();
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    if (!contexts.empty()) contexts.pop_back();
    return cuCtxPushCurrent(context);
}

CUresult cuCtxPopCurrent(CUcontext* context) {
    if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    *context = contexts.back();
    contexts.pop_back();
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() {
    std::unique_lock<std::mutex> lock(capturing);
    const std::vector<CUstream> all = streams;
    lock.unlock();
    for (CUstream stream : all) stream->wait();
    return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* other) { return std::swap(*other, mode), CUDA_SUCCESS; }

CUresult cuGetErrorName(CUresult result, const char** name) {
    static thread_local char words[32];
    snprintf(words, sizeof words, "CUDA_ERROR_%d", static_cast<int>(result));
    return *name = words, CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char** words) { return *words = "of the CPU's driver", CUDA_SUCCESS; }

// Tests say what else than the truth who asks for an event, or for a stream, is told.
void cpuDriverAnswers(CUresult events, CUresult of_streams) { events_answer = events, streams_answer = of_streams; }

// Streams and events. A destroyed one may still be in use, so nothing is freed.

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned, int priority) {
    std::lock_guard<std::mutex> lock(capturing);
    streams.push_back(*stream = new CUstream_st(priority));
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }
CUresult cuStreamDestroy(CUstream) { return CUDA_SUCCESS; }
CUresult cuStreamGetPriority(CUstream stream, int* priority) { return *priority = stream->priority, CUDA_SUCCESS; }

CUresult cuStreamQuery(CUstream stream) {
    if (streams_answer != CUDA_SUCCESS) return streams_answer;
    if (is_captured(stream)) return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "a stream is asked amid its capture");
    return stream->is_idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamSynchronize(CUstream stream) {
    if (is_captured(stream)) return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "a stream is waited for amid its capture");
    return stream->wait(), CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* event, unsigned) { return *event = new CUevent_st, CUDA_SUCCESS; }

// Work that waits for the event has its place.
CUresult cuEventDestroy(CUevent event) {
    std::lock_guard<std::mutex> lock(capturing);
    delete event;
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    std::lock_guard<std::mutex> lock(capturing);
    event->capture = stream->capture;
    event->last = stream->last;
    if (stream->capture) return CUDA_SUCCESS;
    event->place = std::make_shared<Place>();
    stream->push([place = event->place] { place->pass(); });
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
    if (events_answer != CUDA_SUCCESS) return events_answer;
    std::lock_guard<std::mutex> lock(capturing);
    if (event->capture) return refuse(CUDA_ERROR_CAPTURED_EVENT, "an event of a capture is asked");
    return !event->place || event->place->look() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent begin, CUevent end) {
    return *milliseconds = static_cast<float>((end->place->time - begin->place->time) / 1e6), CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
    std::lock_guard<std::mutex> lock(capturing);
    if (event->capture) {
        if (!event->capture->active) return refuse(CUDA_ERROR_CAPTURED_EVENT, "a wait for an event of a capture that has ended");
        if (!stream->capture) {
            stream->capture = event->capture;
            stream->capture->streams.push_back(stream);
            stream->last.clear();
        }
        if (stream->capture != event->capture) return refuse(CUDA_ERROR_STREAM_CAPTURE_MERGE, "two captures meet");
        // A stream that only waits has to be joined too.
        std::vector<int> after = stream->last;
        after.insert(after.end(), event->last.begin(), event->last.end());
        stream->last = {stream->capture->add([] {}, after)};
        return CUDA_SUCCESS;
    }
    if (stream->capture) return refuse(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "a capture waits for an event that is not of it");
    if (event->place) stream->push([place = event->place] { place->wait(); });
    return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
    return put(stream, [=] { function(data); });
}

CUresult cuStreamBatchMemOp(CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations, unsigned) {
    const std::vector<CUstreamBatchMemOpParams> all(operations, operations + count);
    return put(stream, [all] {
        for (const CUstreamBatchMemOpParams& one : all) {
            if (one.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
                word(at(one.writeValue.address)) = one.writeValue.value;
                continue;
            }
            while (!has_reached(word(at(one.waitValue.address)), one.waitValue.value)) nap();
        }
    });
}

// Captures and graphs.

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
    *status = is_captured(stream) ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode) {
    std::lock_guard<std::mutex> lock(capturing);
    if (stream->capture) return refuse(CUDA_ERROR_ILLEGAL_STATE, "a stream is captured already");
    stream->capture = std::make_shared<Capture>();
    stream->capture->origin = stream;
    stream->capture->streams = {stream};
    stream->last.clear();
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    std::lock_guard<std::mutex> lock(capturing);
    *graph = nullptr;
    const std::shared_ptr<Capture> capture = stream->capture;
    if (!capture || capture->origin != stream) return refuse(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "no capture of this stream");
    std::set<int> joined;
    std::vector<int> next = stream->last;
    while (!next.empty()) {
        const int node = next.back();
        next.pop_back();
        const std::vector<int>& after = capture->nodes[node].after;
        if (joined.insert(node).second) next.insert(next.end(), after.begin(), after.end());
    }
    bool all_joined = true;
    for (CUstream other : capture->streams) {
        for (int node : other->last) all_joined = all_joined && joined.count(node) > 0;
        other->capture = nullptr;
        other->last.clear();
    }
    capture->active = false;
    if (!all_joined) return refuse(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "a stream was not joined with its capture");
    *graph = new CUgraph_st{capture->nodes};
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate(CUgraphExec* executable, CUgraph graph, unsigned long long) {
    return *executable = new CUgraphExec_st{graph->nodes, std::mt19937(7)}, CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
    if (is_captured(stream)) return refuse(CUDA_ERROR_NOT_SUPPORTED, "a graph in a graph");
    return put(stream, [=] { executable->run(); });
}

CUresult cuGraphDestroy(CUgraph) { return CUDA_SUCCESS; }
CUresult cuGraphExecDestroy(CUgraphExec) { return CUDA_SUCCESS; }

// Memory.

CUresult cuMemGetInfo(size_t* free, size_t* total) { return *free = DEVICE_BYTES / 2, *total = DEVICE_BYTES, CUDA_SUCCESS; }
CUresult cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps*) { return *pool = nullptr, CUDA_SUCCESS; }
CUresult cuMemPoolTrimTo(CUmemoryPool, size_t) { return CUDA_SUCCESS; }
CUresult cuMemAlloc(CUdeviceptr* to, size_t bytes) { return allocate(to, bytes); }
CUresult cuMemFree(CUdeviceptr memory) { return free(at(memory)), CUDA_SUCCESS; }

CUresult cuMemFreeHost(void* memory) {
    std::lock_guard<std::mutex> lock(pinning);
    pinned.erase(static_cast<char*>(memory));
    return free(memory), CUDA_SUCCESS;
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* to, size_t bytes, CUmemoryPool, CUstream stream) {
    if (is_captured(stream)) return refuse(CUDA_ERROR_NOT_SUPPORTED, "an allocation in a graph");
    return allocate(to, bytes);
}

CUresult cuMemAllocAsync(CUdeviceptr* to, size_t bytes, CUstream stream) { return cuMemAllocFromPoolAsync(to, bytes, nullptr, stream); }

CUresult cuMemFreeAsync(CUdeviceptr memory, CUstream stream) {
    return put(stream, [=] { free(at(memory)); });
}

CUresult cuMemHostAlloc(void** to, size_t bytes, unsigned) {
    CUdeviceptr memory;
    const CUresult result = allocate(&memory, bytes);
    if (result != CUDA_SUCCESS) return result;
    *to = at(memory);
    std::lock_guard<std::mutex> lock(pinning);
    pinned[at(memory)] = bytes;
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr* to, void* memory, unsigned) {
    return *to = reinterpret_cast<CUdeviceptr>(memory), CUDA_SUCCESS;
}

// A handle is a descriptor, plus 1.

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*, unsigned long long) {
    const int fd = memfd_create("gemmesh-device", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    return *handle = fd + 1, CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* to, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType, unsigned long long) {
    const int fd = fcntl(static_cast<int>(handle - 1), F_DUPFD_CLOEXEC, 3);
    if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
    return *static_cast<int*>(to) = fd, CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* from, CUmemAllocationHandleType) {
    const int fd = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(from)), F_DUPFD_CLOEXEC, 3);
    if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
    return *handle = fd + 1, CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return close(static_cast<int>(handle - 1)), CUDA_SUCCESS; }

CUresult cuMemAddressReserve(CUdeviceptr* to, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    return *to = reinterpret_cast<CUdeviceptr>(memory), CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) { return munmap(at(address), bytes), CUDA_SUCCESS; }

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
    const int fd = static_cast<int>(handle - 1);
    void* mapped = mmap(at(address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    return mapped == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap(at(address), bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return put(stream, [=] { memmove(at(to), at(from), bytes); });
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    if (is_pinned(from)) return put(stream, [=] { memcpy(at(to), from, bytes); });
    // Of other memory of the host a copy is made before the call returns, which may go then.
    const char* first = static_cast<const char*>(from);
    return put(stream, [to, values = std::vector<char>(first, first + bytes)] { memcpy(at(to), values.data(), values.size()); });
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    const CUresult result = put(stream, [=] { memcpy(to, at(from), bytes); });
    // To other memory of the host a copy is done when the call returns.
    if (result == CUDA_SUCCESS && !is_captured(stream) && !is_pinned(to)) stream->wait();
    return result;
}

CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) { return memcpy(to, at(from), bytes), CUDA_SUCCESS; }
CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t bytes) { return memset(at(to), value, bytes), CUDA_SUCCESS; }

CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* what, CUstream stream) {
    return put(stream, [copy = *what] {
        const bool from_host = copy.srcMemoryType == CU_MEMORYTYPE_HOST, to_host = copy.dstMemoryType == CU_MEMORYTYPE_HOST;
        const char* from = from_host ? static_cast<const char*>(copy.srcHost) : at(copy.srcDevice);
        char* to = to_host ? static_cast<char*>(copy.dstHost) : at(copy.dstDevice);
        for (size_t row = 0; row < copy.Height; ++row) {
            memcpy(to + row * copy.dstPitch, from + row * copy.srcPitch, copy.WidthInBytes);
        }
    });
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    return put(stream, [=] { memset(at(to), value, bytes); });
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t words, CUstream stream) {
    return put(stream, [=] {
        for (size_t index = 0; index < words; ++index) word(at(to) + index * sizeof(uint32_t)) = value;
    });
}

// Kernels.

CUresult cuModuleLoadData(CUmodule* module, const void*) { return *module = nullptr, CUDA_SUCCESS; }

CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    return *function = new CUfunc_st{name}, CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) { return *value = 32, CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
    return *clusters = 66, CUDA_SUCCESS;
}

// Where a matrix lies, as `multiply` reads it.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void* memory, const cuuint64_t*,
                                const cuuint64_t* pitches, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    const Matrix matrix{static_cast<char*>(memory), pitches[0]};
    memcpy(map, &matrix, sizeof matrix);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        CUstream stream, void** arguments, void**) {
    Work work = work_of(function->name, grid, arguments);
    if (!work) return refuse(CUDA_ERROR_NOT_SUPPORTED, "it does not know %s", function->name.c_str());
    return put(stream, std::move(work));
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void** extra) {
    for (unsigned index = 0; index < config->numAttrs; ++index) {
        if (config->attrs[index].id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
            return refuse(CUDA_ERROR_NOT_SUPPORTED, "it does not know launch attribute %d", config->attrs[index].id);
        }
    }
    // Work of a stream runs one by one, also if it may begin early.
    return cuLaunchKernel(function, config->gridDimX, 1, 1, 1, 1, 1, 0, config->hStream, arguments, extra);
}

}  // extern "C"
