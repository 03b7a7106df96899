// The arithmetic of collectives: sums of rows in the order given, in fp32 (float64 for float64),
// rounded once.
#include "../rows/vector.h"

namespace pyops::PYOPS_ISA {
namespace {

template <typename T>
void add_two(T* out, const T* a, const T* b, int64_t n, T scale) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) out[i] = (a[i] + b[i]) * scale;
}

template <typename T>
void scale_one(T* out, const T* a, int64_t n, T scale) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) out[i] = a[i] * scale;
}

// Two rows of bf16 to bf16, the heart of the all-reduce over shared memory: everything stays in
// registers.
void add_two_bf16(Bf16* out, const Bf16* a, const Bf16* b, int64_t n, float scale) {
    int64_t i = 0;
#if defined(__AVX2__)
    const Vec factor(scale);
    for (; i + 2 * Vec::N <= n; i += 2 * Vec::N) {
        Vec even_a, odd_a, even_b, odd_b;
        load_split(a + i, even_a, odd_a);
        load_split(b + i, even_b, odd_b);
        store_split(out + i, (even_a + even_b) * factor, (odd_a + odd_b) * factor);
    }
#endif
    PYOPS_VECTORISE
    for (; i < n; ++i)
        out[i].bits = float_to_bf16((bf16_to_float(a[i].bits) + bf16_to_float(b[i].bits)) * scale);
}

void sum_rows_fp64(double* out, const void* const* rows, int num_rows, int64_t n, double scale) {
    if (num_rows == 2)
        return add_two(out, static_cast<const double*>(rows[0]),
                       static_cast<const double*>(rows[1]), n, scale);
    double total[TILE];
    for (int64_t start = 0; start < n; start += TILE) {
        const int64_t count = n - start < TILE ? n - start : TILE;
        memcpy(total, static_cast<const double*>(rows[0]) + start, static_cast<size_t>(count) * 8);
        for (int r = 1; r < num_rows; ++r)
            add_two(total, total, static_cast<const double*>(rows[r]) + start, count, 1.0);
        scale_one(out + start, total, count, scale);
    }
}

}  // namespace

void sum_rows_kernel(void* out, const void* const* rows, int num_rows, int64_t n, int dtype_out,
                     int dtype_in, double scale) {
    if (dtype_out == FP64)
        return sum_rows_fp64(static_cast<double*>(out), rows, num_rows, n, scale);
    const float factor = static_cast<float>(scale);
    if (num_rows == 2 && dtype_in == BF16 && dtype_out == BF16)
        return add_two_bf16(static_cast<Bf16*>(out), static_cast<const Bf16*>(rows[0]),
                            static_cast<const Bf16*>(rows[1]), n, factor);
    float first[TILE], next[TILE], total[TILE];
    for (int64_t start = 0; start < n; start += TILE) {
        const int64_t count = n - start < TILE ? n - start : TILE;
        float* result = dtype_out == FP32 ? static_cast<float*>(out) + start : total;
        const float* sum = as_fp32(first, at(rows[0], start, dtype_in), count, dtype_in);
        if (num_rows == 1) scale_one(result, sum, count, factor);
        for (int r = 1; r < num_rows; ++r) {
            const float* row = as_fp32(next, at(rows[r], start, dtype_in), count, dtype_in);
            const bool last = r + 1 == num_rows;
            // `out` may be a row that is still to be read, so only the last addition goes there.
            add_two(last ? result : total, sum, row, count, last ? factor : 1.0f);
            sum = total;
        }
        from_fp32(at(out, start, dtype_out), result, count, dtype_out);
    }
}

void accumulate_kernel(void* out, const void* a, int64_t n, int dtype_out, int dtype_in,
                       double scale) {
    if (dtype_out == dtype_in) {
        const void* rows[2] = {out, a};
        return sum_rows_kernel(out, rows, 2, n, dtype_out, dtype_in, scale);
    }
    float first[TILE], second[TILE];
    for (int64_t start = 0; start < n; start += TILE) {
        const int64_t count = n - start < TILE ? n - start : TILE;
        const float* x = as_fp32(first, at(out, start, dtype_out), count, dtype_out);
        const float* y = as_fp32(second, at(a, start, dtype_in), count, dtype_in);
        float* result = dtype_out == FP32 ? static_cast<float*>(out) + start : first;
        add_two(result, x, y, count, static_cast<float>(scale));
        from_fp32(at(out, start, dtype_out), result, count, dtype_out);
    }
}

void scale_cast_kernel(void* out, const void* a, int64_t n, int dtype_out, int dtype_in,
                       double scale) {
    const void* rows[1] = {a};
    sum_rows_kernel(out, rows, 1, n, dtype_out, dtype_in, scale);
}

}  // namespace pyops::PYOPS_ISA
