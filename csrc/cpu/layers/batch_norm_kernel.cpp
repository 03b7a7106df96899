// Batch norm over the rows of a matrix: sums of each column in fp32 for a few rows, which stay in
// L1 for the second pass over them, then float64; normalization and its gradient in one pass.
#include "../../math/layers/activation.h"
#include "../../math/layers/batch_norm.h"
#include "batch_norm.h"
#include "../rows/row_sums.h"

namespace pyops::PYOPS_ISA {
namespace {

#define PYOPS_INLINE __attribute__((always_inline))

// Of some rows, n, in T: where the sums are of x, they become the mean of each column.
template <typename S, typename T>
void centred_sums(const S* x, int64_t rows, int64_t stride, int64_t n, T* centre, T* rest,
                  T* squares) {
    memset(centre, 0, static_cast<size_t>(n) * sizeof(T));
    memset(rest, 0, static_cast<size_t>(n) * sizeof(T));
    memset(squares, 0, static_cast<size_t>(n) * sizeof(T));
    for (int64_t r = 0; r < rows; ++r)
        for_each_of<S>(n, [=](auto lane, int64_t i) PYOPS_INLINE {
            typename decltype(lane)::type a;
            load(a, x + r * stride + i);
            add_to(centre, i, a);
        });
    const T part = T(1) / static_cast<T>(rows);
    for (int64_t i = 0; i < n; ++i) centre[i] *= part;
    for (int64_t r = 0; r < rows; ++r)
        for_each_of<S>(n, [=](auto lane, int64_t i) PYOPS_INLINE {
            typename decltype(lane)::type a, c, s;
            load(a, x + r * stride + i);
            load(c, centre + i);
            load(s, squares + i);
            a = a - c;
            add_to(rest, i, a);
            store(squares + i, fused(a, a, s));
        });
}

template <typename S>
void moments(const ChannelRows& p, const RowTile& tile, double* mean, double* squares) {
    using T = Real<S>;
    const int64_t n = tile.end - tile.begin;
    T centre[SUM_COLUMNS], rest[SUM_COLUMNS], few[SUM_COLUMNS];
    memset(mean + tile.begin, 0, static_cast<size_t>(n) * sizeof(double));
    memset(squares + tile.begin, 0, static_cast<size_t>(n) * sizeof(double));
    double* const all = mean + tile.begin;
    double* const all_squares = squares + tile.begin;
    for (int64_t start = tile.first; start < tile.last; start += SUM_ROWS) {
        const int64_t rows = tile.last - start < SUM_ROWS ? tile.last - start : SUM_ROWS;
        centred_sums(static_cast<const S*>(p.x) + start * p.channels + tile.begin, rows, p.channels,
                     n, centre, rest, few);
        const MomentsMerge merge(static_cast<double>(start - tile.first),
                                 static_cast<double>(rows));
        const double part = 1.0 / static_cast<double>(rows);
        PYOPS_VECTORISE
        for (int64_t i = 0; i < n; ++i) {
            const double lacks = static_cast<double>(rest[i]) * part;
            merge(all[i], all_squares[i], static_cast<double>(centre[i]) + lacks,
                  static_cast<double>(few[i]) - static_cast<double>(rest[i]) * lacks);
        }
    }
}

template <typename S>
void sums_of_gradient(const ChannelRows& p, const RowTile& tile, double* sums) {
    using T = Real<S>;
    const int64_t n = tile.end - tile.begin;
    T of_dy[SUM_COLUMNS], of_product[SUM_COLUMNS];
    T *const first = of_dy, *const second = of_product;
    const T* const centre = static_cast<const T*>(p.centre) + tile.begin;
    for (int64_t start = tile.first; start < tile.last; start += SUM_ROWS) {
        const int64_t stop = tile.last - start < SUM_ROWS ? tile.last : start + SUM_ROWS;
        memset(first, 0, static_cast<size_t>(n) * sizeof(T));
        memset(second, 0, static_cast<size_t>(n) * sizeof(T));
        for (int64_t r = start; r < stop; ++r) {
            const S* const x = static_cast<const S*>(p.x) + r * p.channels + tile.begin;
            const S* const dy = static_cast<const S*>(p.dy) + r * p.channels + tile.begin;
            for_each_of<S>(n, [=](auto lane, int64_t i) PYOPS_INLINE {
                typename decltype(lane)::type g, a, c, s;
                load(g, dy + i);
                load(a, x + i);
                load(c, centre + i);
                load(s, second + i);
                add_to(first, i, g);
                store(second + i, fused(g, a - c, s));
            });
        }
        add_up(sums + tile.begin, first, n);
        add_up(sums + p.channels + tile.begin, second, n);
    }
}

template <typename S, typename A>
void normalize(const ChannelRows& p, int64_t first, int64_t last, A act) {
    using T = Real<S>;
    const T *const centre = static_cast<const T*>(p.centre), *const scale =
                                                                 static_cast<const T*>(p.scale);
    const T* const shift = static_cast<const T*>(p.shift);
    for (int64_t r = first; r < last; ++r) {
        const S* const x = static_cast<const S*>(p.x) + r * p.channels;
        S* const out = static_cast<S*>(p.out) + r * p.channels;
        for_each_of<S>(p.channels, [=](auto lane, int64_t i) PYOPS_INLINE {
            typename decltype(lane)::type a, c, s, b;
            load(a, x + i);
            load(c, centre + i);
            load(s, scale + i);
            load(b, shift + i);
            store(out + i, act(channel_affine(a, c, s, b)));
        });
    }
}

template <typename S>
void gradient(const ChannelRows& p, int64_t first, int64_t last) {
    using T = Real<S>;
    const T *const centre = static_cast<const T*>(p.centre), *const scale =
                                                                 static_cast<const T*>(p.scale);
    const T *const slope = static_cast<const T*>(p.slope), *const shift =
                                                               static_cast<const T*>(p.shift);
    for (int64_t r = first; r < last; ++r) {
        const S* const x = static_cast<const S*>(p.x) + r * p.channels;
        const S* const dy = static_cast<const S*>(p.dy) + r * p.channels;
        S* const out = static_cast<S*>(p.out) + r * p.channels;
        for_each_of<S>(p.channels, [=](auto lane, int64_t i) PYOPS_INLINE {
            typename decltype(lane)::type g, a, c, s, k, b;
            load(g, dy + i);
            load(a, x + i);
            load(c, centre + i);
            load(s, scale + i);
            load(k, slope + i);
            load(b, shift + i);
            store(out + i, channel_gradient(g, a, c, s, k, b));
        });
    }
}

}  // namespace

void channel_moments_kernel(const ChannelRows& p, const RowTile& tile, double* mean,
                            double* squares) {
    with_storage(p.dtype, [&](auto storage) {
        moments<typename decltype(storage)::type>(p, tile, mean, squares);
    });
}

void channel_sums_kernel(const ChannelRows& p, const RowTile& tile, double* sums) {
    with_storage(p.dtype, [&](auto storage) {
        sums_of_gradient<typename decltype(storage)::type>(p, tile, sums);
    });
}

void channel_rows_kernel(const ChannelRows& p, int64_t first, int64_t last) {
    with_storage(p.dtype, [&](auto storage) {
        using S = typename decltype(storage)::type;
        if (p.dy) return gradient<S>(p, first, last);
        if (p.activation < 0)
            return normalize<S>(p, first, last, [](auto z) PYOPS_INLINE { return z; });
        with_activation<(sizeof(S) > 2)>(p.activation, [&](auto act) {
            normalize<S>(p, first, last, [act](auto z) PYOPS_INLINE {
                decltype(z) value, slope;
                act(z, value, slope);
                return value;
            });
        });
    });
}

}  // namespace pyops::PYOPS_ISA
