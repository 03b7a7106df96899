// Uniform and normal numbers and dropout masks from Philox words. Compiled without contraction: the
// same bits everywhere.
#include "../math/gaussian.h"
#include "isa.h"
#include "rows/philox_fill.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t WORDS = 4 * PHILOX_LANES;

// Calls make(words) for each run of WORDS elements from an aligned start, and hands (make's result,
// first, count, position) on.
template <typename Make, typename Take>
void for_each_run(int64_t n, uint64_t key, uint64_t index, Make make, Take take) {
    uint32_t words[WORDS];
    for (int64_t done = 0; done < n;) {
        const uint64_t j = index + static_cast<uint64_t>(done);
        const int64_t first = static_cast<int64_t>(j & 3);
        const int64_t count = WORDS - first < n - done ? WORDS - first : n - done;
        philox_fill(words, key, j >> 2, 0, 0);
        make(words);
        take(first, count, done);
        done += count;
    }
}

void uniforms(float* __restrict out, const uint32_t* __restrict words) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < WORDS; ++i) out[i] = uniform_of(words[i]);
}

void normals(float* __restrict out, const uint32_t* __restrict words) {
    float even[WORDS / 2], odd[WORDS / 2];
    PYOPS_VECTORISE
    for (int64_t i = 0; i < WORDS / 2; ++i)
        normal_pair(words[2 * i], words[2 * i + 1], even[i], odd[i]);
    PYOPS_VECTORISE
    for (int64_t i = 0; i < WORDS / 2; ++i) {
        out[2 * i] = even[i];
        out[2 * i + 1] = odd[i];
    }
}

}  // namespace

void uniform_kernel(float* out, int64_t n, uint64_t key, uint64_t index) {
    float values[WORDS];
    for_each_run(
        n, key, index, [&](const uint32_t* words) { uniforms(values, words); },
        [&](int64_t first, int64_t count, int64_t done) {
            memcpy(out + done, values + first, static_cast<size_t>(count) * 4);
        });
}

void normal_kernel(float* out, int64_t n, uint64_t key, uint64_t index) {
    float values[WORDS];
    for_each_run(
        n, key, index, [&](const uint32_t* words) { normals(values, words); },
        [&](int64_t first, int64_t count, int64_t done) {
            memcpy(out + done, values + first, static_cast<size_t>(count) * 4);
        });
}

void dropout_mask_kernel(uint8_t* out, int64_t n, float p, uint64_t key, uint64_t index) {
    uint8_t keep[WORDS];
    for_each_run(
        n, key, index,
        [&](const uint32_t* words) {
            for (int64_t i = 0; i < WORDS; ++i) keep[i] = uniform_of(words[i]) >= p;
        },
        [&](int64_t first, int64_t count, int64_t done) {
            memcpy(out + done, keep + first, static_cast<size_t>(count));
        });
}

}  // namespace pyops::PYOPS_ISA
