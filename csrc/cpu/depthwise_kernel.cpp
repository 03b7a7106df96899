// Depthwise 3 x 3 convolution with the channels last. A register holds neighbouring channels of a
// pixel; a block of pixels in a row shares what it reads:
//
//   forward    y[o]  = sum of tap x        4 outputs of one row: 18 registers read for 36 products
//   backward   dx[h] = sum of tap dy       both from the same numbers of dy: x and dy are read once
//              dtap  = sum of x dy
//
// Every sum goes by rows, taps and columns in their order, whatever the block: the bits of an image
// don't depend on its neighbours, nor on threads.
#include "../math/activation.h"
#include "../math/depthwise.h"
#include "rows.h"
#include "row_sums.h"

namespace pyops::PYOPS_ISA {
namespace {

#define PYOPS_INLINE __attribute__((always_inline))
#define PYOPS_UNROLL _Pragma("GCC unroll 8")

constexpr int64_t PIXELS_IN_A_SUM = 128;  // added up in fp32, about, before they go into float64

struct Lines {
    int64_t in, out, channels;  // pixels of a row of x and of y; numbers from a pixel to the next
};

// P outputs from column `o` on. LEFT, RIGHT: the first, the last column read is beyond the image.
template <int STRIDE, int P, bool LEFT, bool RIGHT, typename V, typename T>
inline PYOPS_INLINE void forward_block(const T* const* rows, const V* taps, V start, int64_t o,
                                       int64_t channels, T* y) {
    using Place = TapPlace<STRIDE>;
    constexpr int READ = STRIDE * (P - 1) + TAPS;
    V sums[P];
    PYOPS_UNROLL
    for (int p = 0; p < P; ++p) sums[p] = start;
    PYOPS_UNROLL
    for (int i = 0; i < TAPS; ++i) {
        if (!rows[i]) continue;
        PYOPS_UNROLL
        for (int q = 0; q < READ; ++q) {
            if ((LEFT && q == 0) || (RIGHT && q == READ - 1)) continue;
            V x;
            load(x, rows[i] + (Place::input(o, 0) + q) * channels);
            PYOPS_UNROLL
            for (int p = 0; p < P; ++p) {
                const int tap = q - STRIDE * p;
                if (tap >= 0 && tap < TAPS) sums[p] = fused(taps[TAPS * i + tap], x, sums[p]);
            }
        }
    }
    PYOPS_UNROLL
    for (int p = 0; p < P; ++p) store(y + (o + p) * channels, sums[p]);
}

// P inputs from column `w` on, an even one: dx where it is wanted, and the sums of the taps.
template <int STRIDE, int P, bool LEFT, bool RIGHT, bool DX, bool DW, typename V, typename T>
inline PYOPS_INLINE void backward_block(const T* const* rows, const V* taps, const T* x, int64_t w,
                                        int64_t channels, T* dx, V* sums) {
    using Place = TapPlace<STRIDE>;
    constexpr int READ = STRIDE == 1 ? P + 2 : P / 2 + 1;
    const int64_t first = STRIDE == 1 ? w - 1 : w / 2;
    V in[P], out[P];
    PYOPS_UNROLL
    for (int p = 0; p < P; ++p) {
        if (DW) load(in[p], x + (w + p) * channels);
        out[p] = V(T(0));
    }
    PYOPS_UNROLL
    for (int i = 0; i < TAPS; ++i) {
        if (!rows[i]) continue;
        PYOPS_UNROLL
        for (int q = 0; q < READ; ++q) {
            if ((LEFT && q == 0) || (RIGHT && q == READ - 1)) continue;
            V dy;
            load(dy, rows[i] + (first + q) * channels);
            PYOPS_UNROLL
            for (int p = 0; p < P; ++p) {
                PYOPS_UNROLL
                for (int tap = 0; tap < TAPS; ++tap) {
                    // The block begins at an even column: as if at 0, with dy from -1 on at stride 1
                    if (!Place::meets(p, tap) || Place::output(p, tap) != q - (STRIDE == 1))
                        continue;
                    if (DX) out[p] = fused(taps[TAPS * i + tap], dy, out[p]);
                    if (DW) sums[TAPS * i + tap] = fused(in[p], dy, sums[TAPS * i + tap]);
                    if (DW && i == 1 && tap == 1) sums[TAPS * TAPS] = sums[TAPS * TAPS] + dy;
                }
            }
        }
    }
    if (DX) {
        PYOPS_UNROLL
        for (int p = 0; p < P; ++p) store(dx + (w + p) * channels, out[p]);
    }
}

template <int N>
struct Count {
    static constexpr int value = N;
};

// Calls f(Count<P>{}, start) on blocks of 4 pixels, and of 2 and 1 for the rest.
template <typename F>
inline PYOPS_INLINE void by_blocks(int64_t pixels, const F& f) {
    int64_t start = 0;
    for (; start + 4 <= pixels; start += 4) f(Count<4>{}, start);
    if (pixels & 2) f(Count<2>{}, start);
    if (pixels & 1) f(Count<1>{}, pixels - 1);
}

// Calls f(Flag<left>{}, Flag<right>{}).
template <bool VALUE>
struct Flag {
    static constexpr bool value = VALUE;
};
template <typename F>
inline PYOPS_INLINE void with_edges(bool left, bool right, const F& f) {
    if (left && right)
        f(Flag<true>{}, Flag<true>{});
    else if (left)
        f(Flag<true>{}, Flag<false>{});
    else if (right)
        f(Flag<false>{}, Flag<true>{});
    else
        f(Flag<false>{}, Flag<false>{});
}

// One row of outputs, the channels of one register.
template <int STRIDE, typename V, typename T>
__attribute__((noinline)) void forward_channels(const T* const* rows, const T* taps, const T* bias,
                                                T* y, const Lines& lines) {
    V k[TAPS * TAPS], start(T(0));
    for (int t = 0; t < TAPS * TAPS; ++t) load(k[t], taps + t * lines.channels);
    if (bias) load(start, bias);
    by_blocks(lines.out, [&](auto count, int64_t o) PYOPS_INLINE {
        constexpr int P = decltype(count)::value;
        const bool right = STRIDE * (o + P - 1) + 1 >= lines.in;
        with_edges(o == 0, right, [&](auto at_left, auto at_right) PYOPS_INLINE {
            forward_block<STRIDE, P, decltype(at_left)::value, decltype(at_right)::value>(
                rows, k, start, o, lines.channels, y);
        });
    });
}

// One row of inputs, the channels of one register; adds to sums [10, channels].
template <int STRIDE, bool DX, bool DW, typename V, typename T>
__attribute__((noinline)) void backward_channels(const T* const* rows, const T* taps, const T* x,
                                                 T* dx, T* sums, const Lines& lines) {
    V k[TAPS * TAPS], dtaps[DEPTHWISE_SUMS];
    for (int t = 0; t < TAPS * TAPS; ++t) load(k[t], taps + t * lines.channels);
    for (V& sum : dtaps) sum = V(T(0));
    by_blocks(lines.in, [&](auto count, int64_t w) PYOPS_INLINE {
        constexpr int P = decltype(count)::value;
        const bool right = STRIDE == 1 ? w + P == lines.in : P > 1 && (w + P) / 2 == lines.out;
        with_edges(STRIDE == 1 && w == 0, right, [&](auto at_left, auto at_right) PYOPS_INLINE {
            backward_block<STRIDE, P, decltype(at_left)::value, decltype(at_right)::value, DX, DW>(
                rows, k, x, w, lines.channels, dx, dtaps);
        });
    });
    for (int t = 0; DW && t < DEPTHWISE_SUMS; ++t) add_to(sums, t * lines.channels, dtaps[t]);
}

// Calls f(Lane<V>{}, c) for the registers of all channels, and with single numbers for the rest.
template <typename T, typename F>
inline PYOPS_INLINE void by_channels(int64_t channels, const F& f) {
    int64_t c = 0;
    for (; c + Wide<T>::N <= channels; c += Wide<T>::N) f(Lane<Wide<T>>{}, c);
    for (; c < channels; ++c) f(Lane<T>{}, c);
}

// A row in what it is computed in: where it is, or widened at `place`.
template <typename S>
const Real<S>* widened(Real<S>* place, const S* row, int64_t n) {
    if constexpr (sizeof(S) == sizeof(Real<S>)) {
        return row;
    } else {
        convert(place, row, n);
        return place;
    }
}

// The same for rows that several rows need: each is widened once, into one of four places.
template <typename S>
class WideRows {
public:
    using T = Real<S>;
    WideRows(const void* base, int64_t numbers, T* scratch)
        : base_(static_cast<const S*>(base)), numbers_(numbers), scratch_(scratch) {}

    const T* row(int64_t r) {
        T* const place = scratch_ + (r & 3) * numbers_;
        if (sizeof(S) != sizeof(T) && held_[r & 3] == r) return place;
        held_[r & 3] = r;
        return widened(place, base_ + r * numbers_, numbers_);
    }

private:
    const S* base_;
    int64_t numbers_;
    T* scratch_;
    int64_t held_[4] = {-1, -1, -1, -1};
};

// `row` as it is stored, perhaps after an activation; they are the same row for fp32 and float64.
template <typename S, typename T>
void finish_row(S* out, const T* row, int64_t n, int activation) {
    const auto write = [=](auto change) {
        for_each_of<S>(n, [=](auto lane, int64_t i) PYOPS_INLINE {
            typename decltype(lane)::type a;
            load(a, row + i);
            store(out + i, change(a));
        });
    };
    if (activation >= 0)
        with_activation<(sizeof(S) > 2)>(activation, [&](auto act) {
            write([act](auto z) PYOPS_INLINE {
                decltype(z) value, slope;
                act(z, value, slope);
                return value;
            });
        });
    else if constexpr (sizeof(S) != sizeof(T))
        write([](auto z) PYOPS_INLINE { return z; });
}

template <typename S, int STRIDE>
void forward(const DepthwiseSpan& span, int64_t first, int64_t last, void* scratch) {
    using T = Real<S>;
    const int64_t C = span.channels;
    const Lines lines{span.width, span.out_width, C};
    T* const spare = static_cast<T*>(scratch);
    WideRows<S> inputs(span.x, span.width * C, spare);
    const T* const taps = static_cast<const T*>(span.taps);
    const T* const bias = static_cast<const T*>(span.bias);
    for (int64_t r = first; r < last; ++r) {
        const int64_t image = r / span.out_height, o = r % span.out_height;
        const T* rows[TAPS];
        for (int i = 0; i < TAPS; ++i) {
            const int64_t h = TapPlace<STRIDE>::input(o, i);
            rows[i] = h >= 0 && h < span.height ? inputs.row(image * span.height + h) : nullptr;
        }
        S* const out = static_cast<S*>(span.out) + r * span.out_width * C;
        T* row = spare + 4 * span.width * C;
        if constexpr (sizeof(S) == sizeof(T)) row = out;
        by_channels<T>(C, [&](auto lane, int64_t c) {
            const T* here[TAPS];
            for (int i = 0; i < TAPS; ++i) here[i] = rows[i] ? rows[i] + c : nullptr;
            forward_channels<STRIDE, typename decltype(lane)::type>(
                here, taps + c, bias ? bias + c : nullptr, row + c, lines);
        });
        finish_row(out, row, span.out_width * C, span.activation);
    }
}

template <typename S, int STRIDE, bool DX, bool DW>
void backward(const DepthwiseSpan& span, int64_t first, int64_t last, double* sums, void* scratch) {
    using T = Real<S>;
    const int64_t C = span.channels, line = span.width * C;
    const Lines lines{span.width, span.out_width, C};
    T *const few = static_cast<T*>(scratch), *const spare = few + DEPTHWISE_SUMS * C;
    WideRows<S> gradients(span.dy, span.out_width * C, spare);
    const T* const taps = static_cast<const T*>(span.taps);
    const int64_t together = span.width < PIXELS_IN_A_SUM ? PIXELS_IN_A_SUM / span.width : 1;
    for (int64_t begin = first; begin < last; begin += together) {
        const int64_t end = last - begin < together ? last : begin + together;
        memset(few, 0, static_cast<size_t>(DEPTHWISE_SUMS * C) * sizeof(T));
        for (int64_t r = begin; r < end; ++r) {
            const int64_t image = r / span.height, h = r % span.height;
            const T* rows[TAPS];
            for (int i = 0; i < TAPS; ++i) {
                const int64_t o = TapPlace<STRIDE>::output(h, i);
                const bool reached =
                    h + 1 >= i && TapPlace<STRIDE>::meets(h, i) && o < span.out_height;
                rows[i] = reached ? gradients.row(image * span.out_height + o) : nullptr;
            }
            const T* const x =
                DW ? widened(spare + 4 * line, static_cast<const S*>(span.x) + r * line, line)
                   : nullptr;
            S* const out = DX ? static_cast<S*>(span.out) + r * line : nullptr;
            T* row = spare + 5 * line;
            if constexpr (sizeof(S) == sizeof(T)) row = out;
            by_channels<T>(C, [&](auto lane, int64_t c) {
                const T* here[TAPS];
                for (int i = 0; i < TAPS; ++i) here[i] = rows[i] ? rows[i] + c : nullptr;
                backward_channels<STRIDE, DX, DW, typename decltype(lane)::type>(
                    here, taps + c, x ? x + c : nullptr, row ? row + c : nullptr, few + c, lines);
            });
            if (DX) finish_row(out, row, line, -1);
        }
        if (DW) add_up(sums, few, DEPTHWISE_SUMS * C);
    }
}

template <typename S, int STRIDE>
void backward(const DepthwiseSpan& span, int64_t first, int64_t last, double* sums, void* scratch) {
    if (!sums)
        backward<S, STRIDE, true, false>(span, first, last, sums, scratch);
    else if (!span.out)
        backward<S, STRIDE, false, true>(span, first, last, sums, scratch);
    else
        backward<S, STRIDE, true, true>(span, first, last, sums, scratch);
}

}  // namespace

void depthwise_forward_kernel(const DepthwiseSpan& span, int64_t first, int64_t last,
                              void* scratch) {
    with_storage(span.dtype, [&](auto storage) {
        using S = typename decltype(storage)::type;
        (span.stride == 1 ? forward<S, 1> : forward<S, 2>)(span, first, last, scratch);
    });
}

void depthwise_backward_kernel(const DepthwiseSpan& span, int64_t first, int64_t last, double* sums,
                               void* scratch) {
    with_storage(span.dtype, [&](auto storage) {
        using S = typename decltype(storage)::type;
        (span.stride == 1 ? backward<S, 1> : backward<S, 2>)(span, first, last, sums, scratch);
    });
}

}  // namespace pyops::PYOPS_ISA
