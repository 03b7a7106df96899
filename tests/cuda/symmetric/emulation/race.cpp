// The kernels over symmetric memory under ThreadSanitizer: three ranks, two CTAs each, all at once.
// Before each launch a rank writes its own rows anew, as backward would, and after it reads its
// result: what a meeting does not order is a race. race: the sums; race step: ZeRO's step.
#include <cuda_runtime.h>

#include <thread>
#include <vector>

#include "csrc/cuda/communication/symmetric_kernel.cuh"
#include "csrc/cuda/communication/symmetric_step.cuh"
#include "csrc/math/optimizers/adam.h"

using namespace pyops;
using namespace pyops::cuda;

namespace {

constexpr int SIZE = 3, ROUNDS = 2;
constexpr unsigned GRID = 2;
constexpr int64_t PART = PIECE + 200, ELEMENTS = SIZE * PART;

std::vector<float> gradients[SIZE], results[SIZE];
std::vector<Pad> pads(SIZE);
uint32_t failures[SIZE];
double norms[SIZE][2];

// One kernel of one CTA, as any that stands before or after the collective on the rank's stream.
template <typename Body>
void elementwise(const Body& body) {
    emulation::launch(1, WARP, [&] {
        for (int64_t i = threadIdx.x; i < ELEMENTS; i += WARP) body(i);
    });
}

enum Kind { ONE_SHOT, REDUCE_SCATTER, TWO_SHOT };

void rank(int r, Kind kind, std::vector<float>* to) {
    for (int round = 0; round < ROUNDS; ++round) {
        float* mine = gradients[r].data();
        elementwise([&](int64_t i) { mine[i] = static_cast<float>(r + round + i % 7); });
        SymmetricSum a{};
        a.peers.rank = r;
        a.peers.size = SIZE;
        a.peers.timeout = int64_t{120} * 1000000000;
        a.peers.failure = &failures[r];
        a.numel = kind == ONE_SHOT ? ELEMENTS : PART;
        const int64_t begin = kind == ONE_SHOT ? 0 : r * PART;
        for (int p = 0; p < SIZE; ++p) {
            a.peers.pad[p] = &pads[p];
            a.row[p] = gradients[p].data() + begin;
            if (kind == TWO_SHOT) a.out[a.outs++] = to[p].data() + begin;
        }
        if (kind != TWO_SHOT) a.out[a.outs++] = to[r].data();
        a.scale = 0.5f;
        a.norm = norms[r];
        a.whole = to[r].data();
        a.whole_numel = ELEMENTS;
        emulation::launch(GRID, THREADS, [&] { symmetric_kernel<FP32, FP32, 4, 0>(a); });
        elementwise([&](int64_t i) {
            if (i >= (kind == REDUCE_SCATTER ? PART : ELEMENTS)) return;
            const volatile float* result = &to[r][i];
            if (!(*result > 0.0f)) std::puts("no sum");
        });
        if (failures[r] || !(norms[r][0] > 0.0)) std::abort();
        for (int64_t i = 0; i < PART; ++i) {
            const int64_t at = kind == REDUCE_SCATTER ? r * PART + i : i;
            if (to[r][i] != 0.5f * static_cast<float>(SIZE * (round + at % 7) + 3))
                std::puts("wrong sum");
        }
    }
}

void step(int r) {
    std::vector<float> moments(2 * PART, 0.0f);
    constexpr int64_t ROWS = 4, EACH = PART / ROWS;  // two rows for each CTA
    float counts[ROWS] = {};
    int64_t table[ROWS * COLUMNS] = {};
    for (int64_t k = 0; k < ROWS; ++k) {
        int64_t* row = table + k * COLUMNS;
        row[PARAM] = reinterpret_cast<int64_t>(results[r].data() + r * PART + k * EACH);
        row[GRAD] = reinterpret_cast<int64_t>(gradients[r].data() + r * PART + k * EACH);
        row[EXP_AVG] = reinterpret_cast<int64_t>(moments.data() + k * EACH);
        row[EXP_AVG_SQ] = reinterpret_cast<int64_t>(moments.data() + PART + k * EACH);
        row[STEP] = reinterpret_cast<int64_t>(&counts[k]);
        row[NUMEL] = EACH;
        row[FIRST_CHUNK] = k;
    }
    SymmetricStep<Adam> a{};
    a.step.table = table;
    a.step.rows = ROWS;
    a.step.options = {0.1, 0.9, 0.99, 1e-8, 0.0, true, false};
    a.peers.rank = r;
    a.peers.size = SIZE;
    a.peers.timeout = int64_t{120} * 1000000000;
    a.peers.failure = &failures[r];
    for (int p = 0; p < SIZE; ++p) {
        a.peers.pad[p] = &pads[p];
        a.grads[p] = reinterpret_cast<int64_t>(gradients[p].data()) -
                     reinterpret_cast<int64_t>(gradients[r].data());
        a.params[p] = reinterpret_cast<int64_t>(results[p].data()) -
                      reinterpret_cast<int64_t>(results[r].data());
    }
    a.scale = 0.5f;
    for (int round = 0; round < ROUNDS; ++round) {
        elementwise(
            [&](int64_t i) { gradients[r][i] = static_cast<float>(1 + r + round + i % 7); });
        emulation::launch(GRID, THREADS, [&] { symmetric_step_kernel<Adam>(a); });
        elementwise([&](int64_t i) {
            const volatile float* result = &results[r][i];
            if (!(*result < 0.0f)) std::puts("no step");
        });
        if (failures[r] || counts[ROWS - 1] != static_cast<float>(round + 1)) std::abort();
    }
}

template <typename Body>
void all_ranks(const Body& body) {
    for (int r = 0; r < SIZE; ++r) {
        gradients[r].assign(ELEMENTS, 0.0f);
        results[r].assign(ELEMENTS, 0.0f);
    }
    std::vector<std::thread> ranks;
    for (int r = 0; r < SIZE; ++r) ranks.emplace_back(body, r);
    for (std::thread& thread : ranks) thread.join();
}

}  // namespace

int main(int arguments, char**) {
    if (arguments > 1) {
        all_ranks(step);
        std::puts("done");
        return 0;
    }
    for (const Kind kind : {ONE_SHOT, REDUCE_SCATTER, TWO_SHOT})
        for (const bool in_place : {false, true}) {
            if (in_place && kind != TWO_SHOT) continue;
            all_ranks([=](int r) { rank(r, kind, in_place ? gradients : results); });
        }
    std::puts("done");
}
