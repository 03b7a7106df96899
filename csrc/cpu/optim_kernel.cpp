// Adam on a stretch of memory: operands that are not fp32 pass through scratch tiles in L1, the arithmetic is one loop.
#include "isa.h"
#include "philox_fill.h"

namespace pyops::PYOPS_ISA {
namespace {

template <bool L2, bool AMSGRAD>
void steps(const Adam<float> adam, float* p, const float* g, float* m, float* v, float* vmax, int64_t n) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) {
        float pi = p[i], mi = m[i], vi = v[i], largest = AMSGRAD ? vmax[i] : 0.0f;
        adam.template operator()<L2, AMSGRAD>(pi, g[i], mi, vi, largest);
        p[i] = pi;
        m[i] = mi;
        v[i] = vi;
        if (AMSGRAD) vmax[i] = largest;
    }
}

// n <= TILE random half-words of the stream, from element `index` on.
void random_halves(uint16_t* out, int64_t n, const AdamSpan& span, uint64_t index, uint32_t stream) {
    uint32_t words[4 * PHILOX_LANES];
    for (int64_t done = 0; done < n;) {
        const uint64_t j = index + static_cast<uint64_t>(done);
        const int64_t first = static_cast<int64_t>(j & 7);
        const int64_t count = 8 * PHILOX_LANES - first < n - done ? 8 * PHILOX_LANES - first : n - done;
        philox_fill(words, span.seed, j >> 3, span.step, stream);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t half = first + i;
            out[done + i] = static_cast<uint16_t>(words[half >> 1] >> (16 * (half & 1)));
        }
        done += count;
    }
}

void store_randomly(void* to, const float* from, int64_t n, int dtype, const AdamSpan& span, uint64_t index, uint32_t stream) {
    uint16_t random[TILE];
    random_halves(random, n, span, index, stream);
    uint16_t* out = static_cast<uint16_t*>(to);
    if (dtype == BF16) {
        PYOPS_VECTORISE
        for (int64_t i = 0; i < n; ++i) out[i] = float_to_bf16(from[i], static_cast<uint32_t>(random[i]));
    } else {
        PYOPS_VECTORISE
        for (int64_t i = 0; i < n; ++i) out[i] = float_to_fp16(from[i], static_cast<uint32_t>(random[i]));
    }
}

// An operand read, changed and written: in place when fp32, else through its scratch tile.
struct Operand {
    void* base;
    int dtype;
    float scratch[TILE];

    float* load_tile(int64_t start, int64_t n) {
        // Only fp32 comes back as the memory itself, and that memory is ours to write.
        return const_cast<float*>(load(scratch, at(base, start, dtype), n, dtype));
    }
    void store_tile(const float* tile, int64_t start, int64_t n, const AdamSpan& span, int stream) {
        if (dtype == FP32) return;
        if (span.stochastic_rounding && stream >= 0)
            store_randomly(at(base, start, dtype), tile, n, dtype, span, span.index + static_cast<uint64_t>(start), stream);
        else
            store(at(base, start, dtype), tile, n, dtype);
    }
};

enum Stream { NONE = -1, P = 0, M = 1, V = 2 };

void adam(const AdamSpan& span, const Adam<float>& a) {
    const int param_dtype = dtype_of(span.packed, PARAM_DTYPE), grad_dtype = dtype_of(span.packed, GRAD_DTYPE);
    const int moment_dtype = dtype_of(span.packed, MOMENT_DTYPE), copy_dtype = dtype_of(span.packed, COPY_DTYPE);
    Operand p, m, v, vmax;
    p.base = span.master ? span.master : span.param;
    p.dtype = span.master ? dtype_of(span.packed, MASTER_DTYPE) : param_dtype;
    m.base = span.exp_avg;
    v.base = span.exp_avg_sq;
    vmax.base = span.max;
    m.dtype = v.dtype = vmax.dtype = moment_dtype;
    float gradient[TILE], again[TILE];
    for (int64_t start = 0; start < span.n; start += TILE) {
        const int64_t n = span.n - start < TILE ? span.n - start : TILE;
        const float* g = load(gradient, at(span.grad, start, grad_dtype), n, grad_dtype);
        float *pt = p.load_tile(start, n), *mt = m.load_tile(start, n), *vt = v.load_tile(start, n);
        float* xt = span.max ? vmax.load_tile(start, n) : nullptr;
        if (span.max) (span.l2 ? steps<true, true> : steps<false, true>)(a, pt, g, mt, vt, xt, n);
        else (span.l2 ? steps<true, false> : steps<false, false>)(a, pt, g, mt, vt, xt, n);
        m.store_tile(mt, start, n, span, M);
        v.store_tile(vt, start, n, span, V);
        if (span.max) vmax.store_tile(xt, start, n, span, V);
        p.store_tile(pt, start, n, span, span.master ? NONE : P);
        const float* result = pt;
        if (p.dtype != FP32 && (span.master || span.copy)) result = load(again, at(p.base, start, p.dtype), n, p.dtype);
        if (span.master) {
            store(at(span.param, start, param_dtype), result, n, param_dtype);
            if (span.copy) result = load(again, at(span.param, start, param_dtype), n, param_dtype);
        }
        if (span.copy) store(at(span.copy, start, copy_dtype), result, n, copy_dtype);
        if (span.zero_grad) memset(at(span.grad, start, grad_dtype), 0, static_cast<size_t>(n * size_of(grad_dtype)));
    }
}

}  // namespace

void adam_kernel(const AdamSpan& span, const Adam<float>& a) { adam(span, a); }

}  // namespace pyops::PYOPS_ISA
