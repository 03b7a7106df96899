// Bias and activation, plain and gated, forward and backward: everything between one load and one
// store stays in registers.
#include "activation.h"

#include "../../math/layers/activation.h"
#include "../rows/row_sums.h"

namespace pyops::PYOPS_ISA {
namespace {

template <typename V, typename S>
inline __attribute__((always_inline)) V biased(const S* x, const Real<S>* bias, int64_t i) {
    V a, b;
    load(a, x + i);
    load(b, bias + i);
    return a + b;
}

// One row, or a part of one: n elements of y.
template <typename S, typename A>
void forward_row(S* y, const S* x, const Real<S>* bias, int64_t n, A act) {
    for_each_of<S>(n, [=](auto lane, int64_t i) __attribute__((always_inline)) {
        using V = typename decltype(lane)::type;
        V value, slope;
        act(biased<V>(x, bias, i), value, slope);
        store(y + i, value);
    });
}

// `half`: from a number of gate to its number of up.
template <typename S, typename A>
void gated_row(S* y, const S* x, const Real<S>* bias, int64_t half, int64_t n, A act) {
    for_each_of<S>(n, [=](auto lane, int64_t i) __attribute__((always_inline)) {
        using V = typename decltype(lane)::type;
        V value, slope;
        act(biased<V>(x, bias, i), value, slope);
        store(y + i, value * biased<V>(x + half, bias + half, i));
    });
}

template <typename S, typename A>
void backward_row(S* dx, const S* dy, const S* x, const Real<S>* bias, Real<S>* sums, int64_t n,
                  A act) {
    for_each_of<S>(n, [=](auto lane, int64_t i) __attribute__((always_inline)) {
        using V = typename decltype(lane)::type;
        V value, slope, g;
        act(biased<V>(x, bias, i), value, slope);
        load(g, dy + i);
        g = g * slope;
        store(dx + i, g);
        add_to(sums, i, g);
    });
}

template <typename S, typename A>
void gated_backward_row(S* dx, const S* dy, const S* x, const Real<S>* bias, Real<S>* sums,
                        int64_t half, int64_t n, A act) {
    for_each_of<S>(n, [=](auto lane, int64_t i) __attribute__((always_inline)) {
        using V = typename decltype(lane)::type;
        V value, slope, g;
        act(biased<V>(x, bias, i), value, slope);
        load(g, dy + i);
        const V up = g * value, gate = g * biased<V>(x + half, bias + half, i) * slope;
        store(dx + i, gate);
        store(dx + half + i, up);
        add_to(sums, i, gate);
        add_to(sums + SUM_COLUMNS, i, up);
    });
}

}  // namespace

void activation_forward_kernel(const ActivationSpan& span, int64_t begin, int64_t end) {
    const int64_t columns = span.columns;
    with_storage(span.dtype, [&](auto storage) {
        using S = typename decltype(storage)::type;
        with_activation<(sizeof(S) > 2)>(span.activation, [&](auto act) {
            const S* const x = static_cast<const S*>(span.x);
            const Real<S>* const bias = static_cast<const Real<S>*>(span.bias);
            for (int64_t i = begin; i < end;) {
                const int64_t row = i / columns, column = i % columns,
                              n = end - i < columns - column ? end - i : columns - column;
                S* const y = static_cast<S*>(span.out) + i;
                if (span.gated)
                    gated_row(y, x + 2 * row * columns + column, bias + column, columns, n, act);
                else
                    forward_row(y, x + i, bias + column, n, act);
                i += n;
            }
        });
    });
}

void activation_backward_kernel(const ActivationSpan& span, const RowTile& tile, double* sums) {
    const int64_t columns = span.columns, n = tile.end - tile.begin;
    with_storage(span.dtype, [&](auto storage) {
        using S = typename decltype(storage)::type;
        // GELU's slope has a zero, near which only absolute errors count
        with_activation<true>(span.activation, [&](auto act) {
            using W = Real<S>;
            const S *const x = static_cast<const S*>(span.x), *const dy =
                                                                  static_cast<const S*>(span.dy);
            const W* const bias = static_cast<const W*>(span.bias) + tile.begin;
            S* const dx = static_cast<S*>(span.out);
            W total[2 * SUM_COLUMNS];
            for (int64_t start = tile.first; start < tile.last; start += SUM_ROWS) {
                const int64_t stop = tile.last - start < SUM_ROWS ? tile.last : start + SUM_ROWS;
                memset(total, 0, static_cast<size_t>(n) * sizeof(W));
                if (span.gated) memset(total + SUM_COLUMNS, 0, static_cast<size_t>(n) * sizeof(W));
                for (int64_t row = start; row < stop; ++row) {
                    const int64_t from = row * columns + tile.begin,
                                  wide = 2 * row * columns + tile.begin;
                    if (span.gated)
                        gated_backward_row(dx + wide, dy + from, x + wide, bias, total, columns, n,
                                           act);
                    else
                        backward_row(dx + from, dy + from, x + from, bias, total, n, act);
                }
                if (!sums) continue;
                add_up(sums + tile.begin, total, n);
                if (span.gated) add_up(sums + columns + tile.begin, total + SUM_COLUMNS, n);
            }
        });
    });
}

}  // namespace pyops::PYOPS_ISA
