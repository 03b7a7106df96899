// Adam on a stretch of memory. The usual dtypes have a loop of their own, which converts in registers; all others pass through
// fp32 tiles in L1, and so does stochastic rounding.
#include "philox_fill.h"
#include "vector.h"

namespace pyops::PYOPS_ISA {
namespace {

// What the loop needs of one span, at its current tile.
template <typename P, typename G, typename S, typename Shadow>
struct Tile {
    P* p;
    const G* g;
    S *m, *v, *vmax;
    Shadow* shadow;  // receives the rounded result beside p: the parameter of a master, or a copy
};

template <typename Shadow, typename V>
inline void store_shadow(Shadow* to, int64_t i, V x) {
    store(to + i, x);
}
template <typename V>
inline void store_shadow(None*, int64_t, V) {}

template <bool L2, bool AMSGRAD, typename P, typename G, typename S, typename Shadow>
void steps(const Adam<float>& scalars, const Tile<P, G, S, Shadow> t, int64_t n) {
    const Adam<Vec> wide(scalars);
    const Adam<float> narrow(scalars);
    const auto step = [&](const auto& adam, auto lane, int64_t i) __attribute__((always_inline)) {
        using V = typename decltype(lane)::type;
        V p, g, m, v, vmax{};
        load(p, t.p + i);
        load(g, t.g + i);
        load(m, t.m + i);
        load(v, t.v + i);
        if (AMSGRAD) load(vmax, t.vmax + i);
        adam.template operator()<L2, AMSGRAD>(p, g, m, v, vmax);
        store(t.p + i, p);
        store(t.m + i, m);
        store(t.v + i, v);
        if (AMSGRAD) store(t.vmax + i, vmax);
        store_shadow(t.shadow, i, p);
    };
    int64_t i = 0;
    if (WIDTH<Vec> > 1) i = sweep<Vec>(0, n, [&](auto lane, int64_t k) __attribute__((always_inline)) { step(wide, lane, k); });
    sweep<float>(i, n, [&](auto lane, int64_t k) __attribute__((always_inline)) { step(narrow, lane, k); });
}

template <typename P, typename G, typename S, typename Shadow>
void steps(const Adam<float>& scalars, bool l2, const Tile<P, G, S, Shadow>& t, int64_t n) {
    if (l2) steps<true, false>(scalars, t, n);
    else steps<false, false>(scalars, t, n);
}

// The whole span in one loop; tiles only so that the gradient is zeroed while it is in L1.
template <typename P, typename G, typename S, typename Shadow>
void direct(const AdamSpan& span, const Adam<float>& scalars, void* p, void* shadow) {
    P* const primary = static_cast<P*>(p);
    G* const grad = static_cast<G*>(span.grad);
    S *const m = static_cast<S*>(span.exp_avg), *const v = static_cast<S*>(span.exp_avg_sq);
    const int64_t tile = span.zero_grad ? TILE : span.n;
    for (int64_t start = 0; start < span.n; start += tile) {
        const int64_t n = span.n - start < tile ? span.n - start : tile;
        Shadow* const second = shadow ? static_cast<Shadow*>(shadow) + start : nullptr;
        steps(scalars, span.l2, Tile<P, G, S, Shadow>{primary + start, grad + start, m + start, v + start, nullptr, second}, n);
        if (span.zero_grad) memset(static_cast<void*>(grad + start), 0, static_cast<size_t>(n) * sizeof(G));
    }
}

// n <= TILE random half-words of the stream, from element `index` on: the words' halves, low one first.
void random_halves(uint16_t* out, int64_t n, const AdamSpan& span, uint64_t index, uint32_t stream) {
    uint32_t words[4 * PHILOX_LANES];
    for (int64_t done = 0; done < n;) {
        const uint64_t j = index + static_cast<uint64_t>(done);
        const int64_t first = static_cast<int64_t>(j & 7);
        const int64_t count = 8 * PHILOX_LANES - first < n - done ? 8 * PHILOX_LANES - first : n - done;
        philox_fill(words, span.seed, j >> 3, span.step, stream);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        memcpy(out + done, reinterpret_cast<const char*>(words) + 2 * first, static_cast<size_t>(2 * count));
#else
        for (int64_t i = first; i < first + count; ++i)
            out[done + i - first] = static_cast<uint16_t>(words[i >> 1] >> (16 * (i & 1)));
#endif
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
        return const_cast<float*>(as_fp32(scratch, at(base, start, dtype), n, dtype));
    }
    void store_tile(const float* tile, int64_t start, int64_t n, const AdamSpan& span, int stream) {
        if (dtype == FP32) return;
        if (span.stochastic_rounding && stream >= 0)
            store_randomly(at(base, start, dtype), tile, n, dtype, span, span.index + static_cast<uint64_t>(start),
                           static_cast<uint32_t>(stream));
        else
            from_fp32(at(base, start, dtype), tile, n, dtype);
    }
};

enum Stream { NO_STREAM = -1, P_STREAM = 0, M_STREAM = 1, V_STREAM = 2 };

void staged(const AdamSpan& span, const Adam<float>& scalars) {
    const int param_dtype = dtype_of(span.packed, PARAM_DTYPE), grad_dtype = dtype_of(span.packed, GRAD_DTYPE);
    const int copy_dtype = dtype_of(span.packed, COPY_DTYPE);
    Operand p, m, v, vmax;
    p.base = span.master ? span.master : span.param;
    p.dtype = span.master ? dtype_of(span.packed, MASTER_DTYPE) : param_dtype;
    m.base = span.exp_avg;
    v.base = span.exp_avg_sq;
    vmax.base = span.max;
    m.dtype = v.dtype = vmax.dtype = dtype_of(span.packed, MOMENT_DTYPE);
    float gradient[TILE], again[TILE];
    for (int64_t start = 0; start < span.n; start += TILE) {
        const int64_t n = span.n - start < TILE ? span.n - start : TILE;
        const float* g = as_fp32(gradient, at(span.grad, start, grad_dtype), n, grad_dtype);
        const Tile<float, float, float, None> t{p.load_tile(start, n), g, m.load_tile(start, n), v.load_tile(start, n),
                                                span.max ? vmax.load_tile(start, n) : nullptr, nullptr};
        if (!span.max) steps(scalars, span.l2, t, n);
        else if (span.l2) steps<true, true>(scalars, t, n);
        else steps<false, true>(scalars, t, n);
        m.store_tile(t.m, start, n, span, M_STREAM);
        v.store_tile(t.v, start, n, span, V_STREAM);
        if (span.max) vmax.store_tile(t.vmax, start, n, span, V_STREAM);
        p.store_tile(t.p, start, n, span, span.master ? NO_STREAM : P_STREAM);
        const float* result = t.p;
        if (p.dtype != FP32 && (span.master || span.copy)) result = as_fp32(again, at(p.base, start, p.dtype), n, p.dtype);
        if (span.master) {
            from_fp32(at(span.param, start, param_dtype), result, n, param_dtype);
            if (span.copy) result = as_fp32(again, at(span.param, start, param_dtype), n, param_dtype);
        }
        if (span.copy) from_fp32(at(span.copy, start, copy_dtype), result, n, copy_dtype);
        if (span.zero_grad) memset(at(span.grad, start, grad_dtype), 0, static_cast<size_t>(n * size_of(grad_dtype)));
    }
}

// The direct loop for these dtypes, or null.
using Direct = void (*)(const AdamSpan&, const Adam<float>&, void*, void*);
Direct direct_loop(int primary, int grad, int moments, bool shadow_bf16, bool streams) {
    if (primary == FP32 && moments == FP32 && grad == FP32) {
        if (streams) return direct<float, float, float, StreamedBf16>;
        return shadow_bf16 ? direct<float, float, float, Bf16> : direct<float, float, float, None>;
    }
    if (primary == FP32 && moments == FP32 && grad == BF16) {
        if (streams) return direct<float, Bf16, float, StreamedBf16>;
        return shadow_bf16 ? direct<float, Bf16, float, Bf16> : direct<float, Bf16, float, None>;
    }
    if (primary == BF16 && grad == BF16 && !shadow_bf16) {
        if (moments == BF16) return direct<Bf16, Bf16, Bf16, None>;
        if (moments == FP32) return direct<Bf16, Bf16, float, None>;
    }
    return nullptr;
}

}  // namespace

void adam_kernel(const AdamSpan& span, const Adam<float>& scalars) {
    const int param = dtype_of(span.packed, PARAM_DTYPE), grad = dtype_of(span.packed, GRAD_DTYPE);
    const int moments = dtype_of(span.packed, MOMENT_DTYPE), primary = span.master ? dtype_of(span.packed, MASTER_DTYPE) : param;
    void* const shadow = span.master ? span.param : span.copy;
    const int shadow_dtype = span.master ? param : dtype_of(span.packed, COPY_DTYPE);
    const bool rounds = span.stochastic_rounding && (primary != FP32 || moments != FP32);
    const bool simple = !span.max && !rounds && !(span.master && span.copy) && (!shadow || shadow_dtype == BF16);
    const bool streams = shadow && span.streams && reinterpret_cast<uintptr_t>(shadow) % (2 * sizeof(Vec) / sizeof(float)) == 0;
    const Direct loop = simple ? direct_loop(primary, grad, moments, shadow != nullptr, streams) : nullptr;
    if (loop) loop(span, scalars, span.master ? span.master : span.param, shadow);
    else staged(span, scalars);
    if (streams) fence_streams();
}

}  // namespace pyops::PYOPS_ISA
