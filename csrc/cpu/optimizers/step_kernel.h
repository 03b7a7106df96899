// One step of a rule (csrc/math/optimizers/rule.h) on a stretch of memory. The usual dtypes have a
// loop of their own, which converts in registers; all others pass through fp32 tiles in L1, and so
// does stochastic rounding. Each rule has a *_kernel.cpp of its own.
#pragma once
#include "../rows/philox_fill.h"
#include "../rows/vector.h"

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

template <int VARIANT, template <typename> class R, typename P, typename G, typename S,
          typename Shadow>
void steps(const R<float>& scalars, const Tile<P, G, S, Shadow> t, int64_t n) {
    using Rule = R<float>;
    constexpr bool GRADIENT = holds(Rule::COLUMNS, GRAD), MAXIMUM = (VARIANT & Rule::WITH_MAX) != 0;
    constexpr bool FIRST = holds(Rule::COLUMNS, EXP_AVG), SECOND = holds(Rule::COLUMNS, EXP_AVG_SQ);
    const R<Vec> wide(scalars);
    const R<float> narrow(scalars);
    const auto step = [&](const auto& rule, auto lane, int64_t i) __attribute__((always_inline)) {
        using V = typename decltype(lane)::type;
        V p, g{}, m{}, v{}, vmax{};
        load(p, t.p + i);
        if constexpr (GRADIENT) load(g, t.g + i);
        if constexpr (FIRST) load(m, t.m + i);
        if constexpr (SECOND) load(v, t.v + i);
        if constexpr (MAXIMUM) load(vmax, t.vmax + i);
        rule.template operator()<VARIANT>(p, g, m, v, vmax);
        store(t.p + i, p);
        if constexpr (holds(Rule::WRITTEN, EXP_AVG)) store(t.m + i, m);
        if constexpr (holds(Rule::WRITTEN, EXP_AVG_SQ)) store(t.v + i, v);
        if constexpr (MAXIMUM) store(t.vmax + i, vmax);
        store_shadow(t.shadow, i, p);
    };
    int64_t i = 0;
    if (WIDTH<Vec> > 1)
        i = sweep<Vec>(0, n, [&](auto lane, int64_t k) __attribute__((always_inline)) {
            step(wide, lane, k);
        });
    sweep<float>(
        i, n, [&](auto lane, int64_t k) __attribute__((always_inline)) { step(narrow, lane, k); });
}

// Columns that a span does not have: nothing is loaded from them, and their addresses are not to be
// moved.
template <typename T>
inline T* ahead(T* base, int64_t elements) {
    return base ? base + elements : nullptr;
}

// The whole span in one loop; tiles only so that the gradient is zeroed while it is in L1.
template <template <typename> class R, typename P, typename G, typename S, typename Shadow>
void direct(const StepSpan& span, const R<float>& scalars, void* p, void* shadow) {
    P* const primary = static_cast<P*>(p);
    G* const grad = static_cast<G*>(span.grad);
    S *const m = static_cast<S*>(span.exp_avg), *const v = static_cast<S*>(span.exp_avg_sq);
    const int64_t tile = span.zero_grad ? TILE : span.n;
    for (int64_t start = 0; start < span.n; start += tile) {
        const int64_t n = span.n - start < tile ? span.n - start : tile;
        const Tile<P, G, S, Shadow> t{primary + start, ahead(grad, start),
                                      ahead(m, start), ahead(v, start),
                                      nullptr,         ahead(static_cast<Shadow*>(shadow), start)};
        constexpr int VARIANTS = R<float>::WITH_MAX ? R<float>::WITH_MAX : R<float>::VARIANTS;
        with_variant<VARIANTS>(scalars.variant(), [&](auto variant) {
            steps<decltype(variant)::value, R>(scalars, t, n);
        });
        if (span.zero_grad)
            memset(static_cast<void*>(grad + start), 0, static_cast<size_t>(n) * sizeof(G));
    }
}

void store_randomly(void* to, const float* from, int64_t n, int dtype, const StepSpan& span,
                    uint64_t index, uint32_t stream) {
    uint16_t random[TILE];
    random_halves(random, n, span.seed, index, span.step, stream);
    uint16_t* out = static_cast<uint16_t*>(to);
    if (dtype == BF16) {
        PYOPS_VECTORISE
        for (int64_t i = 0; i < n; ++i)
            out[i] = float_to_bf16(from[i], static_cast<uint32_t>(random[i]));
    } else {
        PYOPS_VECTORISE
        for (int64_t i = 0; i < n; ++i)
            out[i] = float_to_fp16(from[i], static_cast<uint32_t>(random[i]));
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
    void store_tile(const float* tile, int64_t start, int64_t n, const StepSpan& span, int stream) {
        if (dtype == FP32) return;
        if (span.stochastic_rounding && stream >= 0)
            store_randomly(at(base, start, dtype), tile, n, dtype, span,
                           span.index + static_cast<uint64_t>(start),
                           static_cast<uint32_t>(stream));
        else
            from_fp32(at(base, start, dtype), tile, n, dtype);
    }
};

enum Stream { NO_STREAM = -1, P_STREAM = 0, M_STREAM = 1, V_STREAM = 2 };

// One tile of the span, whose columns may be of any dtypes.
template <template <typename> class R>
void staged_tile(const StepSpan& span, const R<float>& scalars, Operand& p, Operand& m, Operand& v,
                 Operand& vmax, int64_t start, int64_t n) {
    using Rule = R<float>;
    const int param_dtype = dtype_of(span.packed, PARAM_DTYPE),
              grad_dtype = dtype_of(span.packed, GRAD_DTYPE);
    const int copy_dtype = dtype_of(span.packed, COPY_DTYPE);
    float gradient[TILE], again[TILE];
    const float* g =
        span.grad ? as_fp32(gradient, at(span.grad, start, grad_dtype), n, grad_dtype) : nullptr;
    const auto tile = [&](unsigned set, Column column, Operand& from) {
        return holds(set, column) ? from.load_tile(start, n) : nullptr;
    };
    const bool maximum = Rule::WITH_MAX && span.max;
    const Tile<float, float, float, None> t{p.load_tile(start, n),
                                            g,
                                            tile(Rule::COLUMNS, EXP_AVG, m),
                                            tile(Rule::COLUMNS, EXP_AVG_SQ, v),
                                            maximum ? vmax.load_tile(start, n) : nullptr,
                                            nullptr};
    with_variant<Rule::VARIANTS>(
        scalars.variant() | (maximum ? Rule::WITH_MAX : 0),
        [&](auto variant) { steps<decltype(variant)::value, R>(scalars, t, n); });
    if (holds(Rule::WRITTEN, EXP_AVG)) m.store_tile(t.m, start, n, span, M_STREAM);
    if (holds(Rule::WRITTEN, EXP_AVG_SQ)) v.store_tile(t.v, start, n, span, V_STREAM);
    if (maximum) vmax.store_tile(t.vmax, start, n, span, V_STREAM);
    p.store_tile(t.p, start, n, span, span.master ? NO_STREAM : P_STREAM);
    const float* result = t.p;
    if (p.dtype != FP32 && (span.master || span.copy))
        result = as_fp32(again, at(p.base, start, p.dtype), n, p.dtype);
    if (span.master) {
        from_fp32(at(span.param, start, param_dtype), result, n, param_dtype);
        if (span.copy) result = as_fp32(again, at(span.param, start, param_dtype), n, param_dtype);
    }
    if (span.copy) from_fp32(at(span.copy, start, copy_dtype), result, n, copy_dtype);
    if (span.zero_grad)
        memset(at(span.grad, start, grad_dtype), 0, static_cast<size_t>(n * size_of(grad_dtype)));
}

template <template <typename> class R>
void staged(const StepSpan& span, const R<float>& scalars) {
    Operand p, m, v, vmax;
    p.base = span.master ? span.master : span.param;
    p.dtype = dtype_of(span.packed, span.master ? MASTER_DTYPE : PARAM_DTYPE);
    m.base = span.exp_avg;
    v.base = span.exp_avg_sq;
    vmax.base = span.max;
    m.dtype = v.dtype = vmax.dtype = dtype_of(span.packed, MOMENT_DTYPE);
    for (int64_t start = 0; start < span.n; start += TILE)
        staged_tile<R>(span, scalars, p, m, v, vmax, start,
                       span.n - start < TILE ? span.n - start : TILE);
}

// The direct loop for these dtypes, or null.
template <template <typename> class R>
using Direct = void (*)(const StepSpan&, const R<float>&, void*, void*);
template <template <typename> class R>
Direct<R> direct_loop(int primary, int grad, int moments, bool shadow_bf16, bool streams) {
    if (primary == FP32 && moments == FP32 && grad == FP32) {
        if (streams) return direct<R, float, float, float, StreamedBf16>;
        return shadow_bf16 ? direct<R, float, float, float, Bf16>
                           : direct<R, float, float, float, None>;
    }
    if (primary == FP32 && moments == FP32 && grad == BF16) {
        if (streams) return direct<R, float, Bf16, float, StreamedBf16>;
        return shadow_bf16 ? direct<R, float, Bf16, float, Bf16>
                           : direct<R, float, Bf16, float, None>;
    }
    if (primary == BF16 && grad == BF16 && !shadow_bf16) {
        if (moments == BF16) return direct<R, Bf16, Bf16, Bf16, None>;
        if (moments == FP32) return direct<R, Bf16, Bf16, float, None>;
    }
    return nullptr;
}

template <template <typename> class R>
void step_in_memory(const StepSpan& span, const R<float>& scalars) {
    const int param = dtype_of(span.packed, PARAM_DTYPE), grad = dtype_of(span.packed, GRAD_DTYPE);
    const int moments = dtype_of(span.packed, MOMENT_DTYPE),
              primary = span.master ? dtype_of(span.packed, MASTER_DTYPE) : param;
    void* const shadow = span.master ? span.param : span.copy;
    const int shadow_dtype = span.master ? param : dtype_of(span.packed, COPY_DTYPE);
    const bool rounds = span.stochastic_rounding && (primary != FP32 || moments != FP32);
    const bool simple =
        !span.max && !rounds && !(span.master && span.copy) && (!shadow || shadow_dtype == BF16);
    const bool streams =
        shadow && span.streams &&
        reinterpret_cast<uintptr_t>(shadow) % (2 * sizeof(Vec) / sizeof(float)) == 0;
    const Direct<R> loop =
        simple ? direct_loop<R>(primary, grad, moments, shadow != nullptr, streams) : nullptr;
    if (loop)
        loop(span, scalars, span.master ? span.master : span.param, shadow);
    else
        staged<R>(span, scalars);
    if (streams) fence_streams();
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
