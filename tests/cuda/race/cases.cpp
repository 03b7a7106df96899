// Calls every C++ CUDA kernel, compiled for the host, on small tensors in line and out of line, in
// memory of exactly their size: for ThreadSanitizer, AddressSanitizer and
// UndefinedBehaviorSanitizer. `cases FAMILY...`; check.py compiles and runs it.
#include <cmath>
#include <cstdio>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../../../csrc/math/optimizers/table.h"
#include "../emulation/encode.h"

using namespace pyops;

extern "C" {
void emulated_step(unsigned, int, int64_t*, int, const void*, int, const float*, const float*,
                   const double*, int, uint64_t);
void emulated_layers(unsigned, int, int64_t*, int, const void*, int, const float*, const float*,
                     const double*, int, uint64_t, double*, double*);
void emulated_adafactor(unsigned, int64_t*, int, const int64_t*, const float* const*,
                        const float* const*, const float* const*, const double*, const void*, int,
                        const float*, const float*, const double*, int, uint64_t);
void emulated_norm(unsigned, const int64_t*, int, double*);
void emulated_norm_of_list(unsigned, const void* const*, const int64_t*, int, int, double*);
void emulated_sum(unsigned, void*, const void* const*, int, int, double, int64_t, int, int, int);
void emulated_random(unsigned, int, void*, int64_t, float, uint64_t, int64_t, int64_t, int64_t);
void emulated_onebit_encode(unsigned, const Encode*, int64_t);
void emulated_onebit_scaled(unsigned, const Encode*, const float*);
void emulated_onebit_norm(unsigned, const Encode*, double*);
void emulated_onebit_decode(unsigned, void*, int, const void* const*, int, int64_t, const float*,
                            float, int64_t, int64_t, int);
void emulated_quantize_encode(unsigned, const Encode*, int64_t);
void emulated_quantize_decode(unsigned, void*, int, const void* const*, int, int64_t, float,
                              int64_t, int64_t, int, int);
}

namespace {

constexpr unsigned GRID = 3;
const std::vector<int64_t> SIZES = {1, 77, 4101, 9000, 0, 5};

float random_number() {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
}

// `n` elements that begin `shift` elements behind a boundary of 16 bytes, and nothing after them.
template <typename T>
struct Exact {
    std::unique_ptr<T[]> memory;
    T* data;
    Exact(int64_t n, int shift) : memory(new T[n + shift]()), data(memory.get() + shift) {
        for (int64_t i = 0; i < n; ++i) {
            if constexpr (sizeof(T) == 4) data[i] = random_number();
            if constexpr (sizeof(T) == 2) data[i] = 0x3c00;
        }
    }
    int64_t address() const { return reinterpret_cast<int64_t>(data); }
};

template <typename T>
void run_table(const std::string& what, int shift, int64_t packed) {
    constexpr bool WIDE = sizeof(T) == 4;
    std::vector<Exact<T>> tensors;
    std::vector<Exact<float>> counts;
    std::vector<int64_t> table(SIZES.size() * COLUMNS);
    int64_t chunks = 0;
    const int rows = static_cast<int>(SIZES.size());
    for (int r = 0; r < rows; ++r) {
        int64_t* t = &table[r * COLUMNS];
        for (int column : {PARAM, GRAD, EXP_AVG, EXP_AVG_SQ}) {
            tensors.emplace_back(SIZES[r], shift);
            if (WIDE && column == EXP_AVG_SQ)
                for (int64_t i = 0; i < SIZES[r]; ++i)
                    tensors.back().data[i] = tensors.back().data[i] * tensors.back().data[i];
            if (SIZES[r]) t[column] = tensors.back().address();
        }
        counts.emplace_back(1, 0);
        *counts.back().data = static_cast<float>(r % 2);
        t[STEP] = counts.back().address();
        t[NUMEL] = SIZES[r];
        t[PACKED] = packed;
        t[FIRST_CHUNK] = chunks;
        chunks += (SIZES[r] + CHUNK - 1) / CHUNK;
    }
    const float factor = 0.5f, inf = 1.0f;
    const double lr = 0.01;
    const double adam[] = {0.01, 0.9, 0.99, 1e-8, 0.1, 0, 0}, sgd[] = {0.01, 0.9, 0, 0.1};
    if (what == "step") {
        for (int rule : {0, 1, 2, 3, 4, 5})
            for (int flags : {1, 4, 8 | 4}) {
                if ((flags & 8) && rule > 3) continue;
                emulated_step(GRID, rule, table.data(), rows, &lr, 1, &factor, nullptr,
                              rule == 1 ? sgd : adam, flags, 3);
            }
        emulated_step(GRID, 0, table.data(), rows, &lr, 1, &factor, &inf, adam, 4, 3);
    }
    if (what == "layers") {
        std::vector<double> partial(rows * 256 * 2), norms(rows * 2);
        const double lamb[] = {0.01, 0.9, 0.99, 1e-8, 0.1, 0.0, 10.0};
        const double lars[] = {0.01, 0.9, 0, 0.1, 1e-2, 1e-8};
        for (int flags : {4, 8}) {
            emulated_layers(GRID, 0, table.data(), rows, &lr, 1, &factor, nullptr, lamb, flags, 3,
                            partial.data(), norms.data());
            emulated_layers(GRID, 1, table.data(), rows, &lr, 1, &factor, nullptr, lars, flags, 3,
                            partial.data(), norms.data());
        }
        emulated_layers(GRID, 0, table.data(), rows, &lr, 1, &factor, &inf, lamb, 4, 3,
                        partial.data(), norms.data());
    }
    if (what == "adafactor") {
        // Of the sizes: a vector, 7 x 11, 3 matrices of 1 x 1367, 9 x 1000, none, a vector.
        const std::vector<int64_t> shapes = {0, 0, 1,    1, 7, 11, 3, 1, 1367,
                                             1, 9, 1000, 0, 0, 0,  0, 0, 5};
        std::vector<Exact<float>> moments;
        std::vector<const float*> row_vars, col_vars, variances;
        for (int r = 0; r < rows; ++r) {
            const int64_t* const s = &shapes[3 * r];
            for (int64_t n : {s[0] * s[1], s[0] * s[2], s[0] ? 0 : s[2]}) {
                moments.emplace_back(n, 0);
                for (int64_t i = 0; i < n; ++i) moments.back().data[i] = 0.01f;
            }
            row_vars.push_back(moments[3 * r].data);
            col_vars.push_back(moments[3 * r + 1].data);
            variances.push_back(moments[3 * r + 2].data);
        }
        const std::vector<double> leasts(SIZES.size(), 1e-7);
        const double options[] = {0.01, -0.8, -1.0, 1e-3, 1.0, 0.1};
        for (int flags : {4, 8})
            emulated_adafactor(GRID, table.data(), rows, shapes.data(), row_vars.data(),
                               col_vars.data(), variances.data(), leasts.data(), &lr, 1, &factor,
                               nullptr, options, flags, 3);
    }
    if (what == "norm") {
        double out[2];
        for (int turn = 0; turn < 2; ++turn) emulated_norm(GRID, table.data(), rows, out);
        std::vector<const void*> addresses;
        for (int r = 0; r < rows; ++r) addresses.push_back(tensors[4 * r + 1].data);
        emulated_norm_of_list(GRID, addresses.data(), SIZES.data(), WIDE ? FP32 : BF16, rows, out);
    }
}

void run_sum() {
    for (int shift : {0, 1}) {
        const Exact<float> a(9000, shift), b(9000, shift), out(9000, shift);
        const void* rows[] = {a.data, b.data, out.data};
        const int head = shift ? 4 - shift : 0;
        emulated_sum(GRID, out.data, rows, 3, 0, 0.5, 9000, FP32, FP32, head);  // in place
        emulated_sum(GRID, out.data, rows, 2, 1, 0.5, 9000, FP32, FP32, head);
        emulated_sum(GRID, out.data, rows, 2, 1, 0.5, 8999, FP32, FP32, -1);
    }
}

void run_random() {
    const Exact<float> numbers(9000, 1);
    const Exact<uint8_t> mask(9000, 1);
    for (int kind : {0, 1}) emulated_random(GRID, kind, numbers.data, 9000, 0.1f, 7, 3, 100, 333);
    emulated_random(GRID, 2, mask.data, 9000, 0.1f, 7, 3, 100, 333);
}

void run_codecs() {
    for (int64_t block : {64, 256, 2048, 4096})
        for (int64_t n : {2049, 9000}) {
            const int shift = n == 9000;
            const int64_t blocks = (n + block - 1) / block, scales = 4 * blocks;
            const Exact<float> x(n, shift), error(n, shift), out(n, shift), flag(1, 0);
            if (n == 9000) x.data[3] = x.data[n - 1] = NAN;  // several warps see it
            std::vector<Exact<uint8_t>> bits, codes;
            for (int i = 0; i < 4; ++i) {
                bits.emplace_back(scales + (n + 7) / 8, shift);
                codes.emplace_back(scales + n, shift);
            }
            const void* of_bits[] = {bits[0].data, bits[1].data};
            const void* of_codes[] = {codes[0].data, codes[1].data};
            Encode e{n, block, error.data, nullptr, flag.data, 0, 0,
                     5, 3,     x.data,     FP32,    of_bits,   2, 0.5f};
            // Five rows, one more than a block asks for at a time
            const void* of_five[] = {bits[0].data, bits[1].data, bits[0].data, bits[1].data,
                                     bits[0].data};
            const auto encode_bits = [&](int to, const void* source, int64_t count) {
                Encode one = e;
                one.payload = bits[to].data;
                one.x = source;
                one.rows = of_five;
                one.count = count;
                emulated_onebit_encode(GRID, &one, scales);
            };
            encode_bits(0, x.data, 2);
            encode_bits(1, x.data, 2);
            encode_bits(2, nullptr, 2);
            encode_bits(2, nullptr, 5);
            emulated_onebit_decode(GRID, out.data, FP32, of_bits, 2, scales, nullptr, 0.5f, n,
                                   block, 1);
            if (block % 128 == 0) {
                const float scale = 0.3f;
                Encode scaled = e;
                double norms[3];
                scaled.payload = bits[3].data;
                emulated_onebit_scaled(GRID, &scaled, &scale);
                emulated_onebit_norm(GRID, &scaled, norms);
            }
            for (int format : {0, 1, 2})
                for (int stochastic : {0, 1}) {
                    Encode q = e;
                    q.rule = format;
                    q.stochastic = stochastic;
                    q.rows = of_codes;
                    for (int to : {0, 1, 2}) {
                        q.payload = codes[to].data;
                        q.x = to == 2 ? nullptr : x.data;
                        emulated_quantize_encode(GRID, &q, scales);
                    }
                    emulated_quantize_decode(GRID, out.data, FP32, of_codes, 2, scales, 0.5f, n,
                                             block, format, 0);
                }
        }
}

}  // namespace

int main(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
        const std::string what = argv[i];
        if (what == "sum")
            run_sum();
        else if (what == "random")
            run_random();
        else if (what == "codecs")
            run_codecs();
        else
            for (int shift : {0, 1}) {
                run_table<float>(what, shift, 0);
                run_table<uint16_t>(what, shift, BF16 | BF16 << 4 | BF16 << 8);
            }
    }
    std::puts("done");
}
