// Dropout with its mask made here, tile by tile in L1: Philox words -> a factor for each element, 0
// or 1 / (1 - p).
#include "dropout.h"
#include "../rows/philox_fill.h"
#include "../rows/row_sums.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t WORDS = 4 * PHILOX_LANES;

// factor[i] for the elements with the global indices index, index + 1, ...
template <typename W>
void draw_factors(W* factor, int64_t n, const DropoutSpan& span, uint64_t index) {
    uint32_t words[WORDS];
    const W scale = static_cast<W>(span.scale);
    const float p = span.p;
    for (int64_t done = 0; done < n;) {
        const uint64_t j = index + static_cast<uint64_t>(done);
        const int64_t first = static_cast<int64_t>(j & 3),
                      count = WORDS - first < n - done ? WORDS - first : n - done;
        philox_fill(words, span.key, j >> 2, 0, 0);
        W* const out = factor + done;
        PYOPS_VECTORISE
        for (int64_t i = 0; i < count; ++i)
            out[i] = uniform_of(words[first + i]) >= p ? scale : W(0);
        done += count;
    }
}

template <typename W>
void factors_of(W* factor, int64_t n, const DropoutSpan& span, uint64_t index) {
    if (span.drops) return draw_factors(factor, n, span, index);
    for (int64_t i = 0; i < n; ++i) factor[i] = W(1);
}

// out = residual + factor (x + bias); what is dropped is 0 whatever it was.
template <bool RESIDUAL, typename S>
void combine(S* out, const S* x, const Real<S>* bias, const S* residual, const Real<S>* factor,
             int64_t n) {
    for_each_of<S>(n, [=](auto lane, int64_t i) __attribute__((always_inline)) {
        using V = typename decltype(lane)::type;
        V a, b, f;
        load(a, x + i);
        load(b, bias + i);
        load(f, factor + i);
        a = unless_zero(f, (a + b) * f);
        if constexpr (RESIDUAL) {
            V r;
            load(r, residual + i);
            a = r + a;
        }
        store(out + i, a);
    });
}

template <typename S>
void scale_and_sum(S* out, const S* dy, const Real<S>* factor, Real<S>* sums, int64_t n) {
    for_each_of<S>(n, [=](auto lane, int64_t i) __attribute__((always_inline)) {
        using V = typename decltype(lane)::type;
        V a, f;
        load(a, dy + i);
        load(f, factor + i);
        a = unless_zero(f, a * f);
        if (out) store(out + i, a);
        add_to(sums, i, a);
    });
}

template <typename S>
void apply(const DropoutSpan& span, int64_t begin, int64_t end, uint64_t index) {
    using W = Real<S>;
    const S *const x = static_cast<const S*>(span.x), *const residual =
                                                          static_cast<const S*>(span.residual);
    const W* const bias = static_cast<const W*>(span.bias);
    S* const out = static_cast<S*>(span.out);
    W factor[TILE], zeros[TILE];
    if (!bias) memset(zeros, 0, sizeof zeros);
    if (!span.drops) factors_of(factor, TILE, span, 0);
    for (int64_t start = begin; start < end; start += TILE) {
        const int64_t stop = end - start < TILE ? end : start + TILE;
        if (span.drops)
            draw_factors(factor, stop - start, span, index + static_cast<uint64_t>(start - begin));
        for (int64_t i = start; i < stop;) {
            const int64_t column = bias ? i % span.columns : 0,
                          left = bias ? span.columns - column : stop - i;
            const int64_t n = stop - i < left ? stop - i : left;
            const W *const b = bias ? bias + column : zeros, *const f = factor + (i - start);
            if (residual)
                combine<true>(out + i, x + i, b, residual + i, f, n);
            else
                combine<false>(out + i, x + i, b, static_cast<const S*>(nullptr), f, n);
            i += n;
        }
    }
}

template <typename S>
void backward(const DropoutSpan& span, const RowTile& tile, uint64_t offset, double* sums) {
    using W = Real<S>;
    const int64_t n = tile.end - tile.begin;
    W factor[SUM_COLUMNS], total[SUM_COLUMNS];
    for (int64_t start = tile.first; start < tile.last; start += SUM_ROWS) {
        const int64_t stop = tile.last - start < SUM_ROWS ? tile.last : start + SUM_ROWS;
        memset(total, 0, static_cast<size_t>(n) * sizeof(W));
        for (int64_t row = start; row < stop; ++row) {
            const int64_t at = row * span.columns + tile.begin;
            factors_of(factor, n, span, offset + static_cast<uint64_t>(at));
            S* const out = span.out ? static_cast<S*>(span.out) + at : nullptr;
            scale_and_sum(out, static_cast<const S*>(span.x) + at, factor, total, n);
        }
        if (sums) add_up(sums + tile.begin, total, n);
    }
}

}  // namespace

void dropout_kernel(const DropoutSpan& span, int64_t begin, int64_t end, uint64_t index) {
    with_storage(span.dtype, [&](auto storage) {
        apply<typename decltype(storage)::type>(span, begin, end, index);
    });
}

void dropout_backward_kernel(const DropoutSpan& span, const RowTile& tile, uint64_t offset,
                             double* sums) {
    with_storage(span.dtype, [&](auto storage) {
        backward<typename decltype(storage)::type>(span, tile, offset, sums);
    });
}

}  // namespace pyops::PYOPS_ISA
