// Depthwise 3 x 3 convolution with the channels last. A register holds neighbouring channels of a
// pixel; a block of pixels in a row shares what it reads:
//
//   forward    y[o]  = sum of tap x        8 outputs of one row: 30 registers read for 72 products
//   backward   dx[h] = sum of tap dy       both from the same numbers of dy: x and dy are read once
//              dtap  = sum of x dy
//
// The channels of a block are gone through before the next one, so that memory is read in stretches.
// Every sum goes by rows, taps and columns in their order, whatever the block: the bits of an image
// don't depend on its neighbours, nor on threads.
#include "../math/depthwise.h"
#include "finish_row.h"
#include "rows.h"
#include "row_sums.h"

namespace pyops::PYOPS_ISA {
namespace {

#define PYOPS_UNROLL _Pragma("GCC unroll 32")

constexpr int64_t PIXELS_IN_A_SUM = 128;  // added up in fp32, about, before they go into float64

// P outputs from column `o` on. LEFT, RIGHT: the first, the last column read is beyond the image.
template <int STRIDE, int P, bool LEFT, bool RIGHT, typename V, typename T>
inline PYOPS_INLINE void forward_pixels(const T* const* rows, const T* taps, const T* bias,
                                        int64_t channels, int64_t c, T* y) {
    constexpr int READ = STRIDE * (P - 1) + TAPS;
    V sums[P], start(T(0));
    if (bias) load(start, bias + c);
    PYOPS_UNROLL
    for (int p = 0; p < P; ++p) sums[p] = start;
    PYOPS_UNROLL
    for (int i = 0; i < TAPS; ++i) {
        if (!rows[i]) continue;
        V k[TAPS];
        PYOPS_UNROLL
        for (int tap = 0; tap < TAPS; ++tap) load(k[tap], taps + (TAPS * i + tap) * channels + c);
        PYOPS_UNROLL
        for (int q = 0; q < READ; ++q) {
            if ((LEFT && q == 0) || (RIGHT && q == READ - 1)) continue;
            V x;
            load(x, rows[i] + q * channels + c);
            PYOPS_UNROLL
            for (int p = 0; p < P; ++p) {
                const int tap = q - STRIDE * p;
                if (tap >= 0 && tap < TAPS) sums[p] = fused(k[tap], x, sums[p]);
            }
        }
    }
    PYOPS_UNROLL
    for (int p = 0; p < P; ++p) store(y + p * channels + c, sums[p]);
}

// P inputs from an even column on: dx where it is wanted, and sums [10, channels] of the taps.
template <int STRIDE, int P, bool LEFT, bool RIGHT, bool DX, bool DW, typename V, typename T>
inline PYOPS_INLINE void backward_pixels(const T* const* rows, const T* taps, const T* x,
                                         int64_t channels, int64_t c, T* dx, T* sums) {
    using Place = TapPlace<STRIDE>;
    constexpr int READ = STRIDE == 1 ? P + 2 : P / 2 + 1;
    V in[P], out[P], of_bias;
    PYOPS_UNROLL
    for (int p = 0; p < P; ++p) {
        if (DW) load(in[p], x + p * channels + c);
        out[p] = V(T(0));
    }
    if (DW) load(of_bias, sums + TAPS * TAPS * channels + c);
    PYOPS_UNROLL
    for (int i = 0; i < TAPS; ++i) {
        if (!rows[i]) continue;
        V k[TAPS], dk[TAPS];
        PYOPS_UNROLL
        for (int tap = 0; tap < TAPS; ++tap) {
            if (DX) load(k[tap], taps + (TAPS * i + tap) * channels + c);
            if (DW) load(dk[tap], sums + (TAPS * i + tap) * channels + c);
        }
        PYOPS_UNROLL
        for (int q = 0; q < READ; ++q) {
            if ((LEFT && q == 0) || (RIGHT && q == READ - 1)) continue;
            V dy;
            load(dy, rows[i] + q * channels + c);
            PYOPS_UNROLL
            for (int p = 0; p < P; ++p) {
                PYOPS_UNROLL
                for (int tap = 0; tap < TAPS; ++tap) {
                    // The block begins at an even column: as if at 0, with dy from -1 on at stride 1
                    if (!Place::meets(p, tap) || Place::output(p, tap) != q - (STRIDE == 1))
                        continue;
                    if (DX) out[p] = fused(k[tap], dy, out[p]);
                    if (DW) dk[tap] = fused(in[p], dy, dk[tap]);
                    if (DW && i == 1 && tap == 1) of_bias = of_bias + dy;
                }
            }
        }
        PYOPS_UNROLL
        for (int tap = 0; tap < TAPS; ++tap)
            if (DW) store(sums + (TAPS * i + tap) * channels + c, dk[tap]);
    }
    if (DW) store(sums + TAPS * TAPS * channels + c, of_bias);
    if (DX) {
        PYOPS_UNROLL
        for (int p = 0; p < P; ++p) store(dx + p * channels + c, out[p]);
    }
}

template <int N>
struct Count {
    static constexpr int value = N;
};

// Calls f(Count<P>{}, start) on blocks of 8 pixels where there are registers for them, and of 4, 2
// and 1 for the rest.
template <typename F>
inline PYOPS_INLINE void by_blocks(int64_t pixels, const F& f) {
    int64_t start = 0;
    if constexpr (Wide<float>::N >= 16)
        for (; start + 8 <= pixels; start += 8) f(Count<8>{}, start);
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

// Calls f(Lane<V>{}, c) for the registers of all channels, and with single numbers for the rest.
template <typename T, typename F>
inline PYOPS_INLINE void by_channels(int64_t channels, const F& f) {
    int64_t c = 0;
    for (; c + Wide<T>::N <= channels; c += Wide<T>::N) f(Lane<Wide<T>>{}, c);
    for (; c < channels; ++c) f(Lane<T>{}, c);
}

// What one row of outputs is made of; in backward, one row of inputs. Rows of x (of dy) that are
// beyond the image, or meet no tap, are null.
template <typename T>
struct Line {
    const T* rows[TAPS];
    const T *taps, *bias, *x;
    T *out, *sums;
    int64_t width, out_width, channels;  // pixels of a row of x and of y

    // The rows from a column on, perhaps the one before the first.
    void from(const T** places, int64_t column) const {
        for (int i = 0; i < TAPS; ++i) places[i] = rows[i] ? rows[i] + column * channels : nullptr;
    }
};

template <int STRIDE, int P, bool LEFT, bool RIGHT, typename T>
__attribute__((noinline)) void forward_block(const Line<T>& line, int64_t o) {
    const T* rows[TAPS];
    line.from(rows, TapPlace<STRIDE>::input(o, 0));
    const int64_t channels = line.channels;
    const T *const taps = line.taps, *const bias = line.bias;
    T* const y = line.out + o * channels;
    by_channels<T>(channels, [&](auto lane, int64_t c) PYOPS_INLINE {
        forward_pixels<STRIDE, P, LEFT, RIGHT, typename decltype(lane)::type>(rows, taps, bias,
                                                                              channels, c, y);
    });
}

template <int STRIDE, int P, bool LEFT, bool RIGHT, bool DX, bool DW, typename T>
__attribute__((noinline)) void backward_block(const Line<T>& line, int64_t w) {
    const T* rows[TAPS];
    line.from(rows, STRIDE == 1 ? w - 1 : w / 2);
    const int64_t channels = line.channels;
    const T *const taps = line.taps, *const x = DW ? line.x + w * channels : nullptr;
    T *const dx = DX ? line.out + w * channels : nullptr, *const sums = line.sums;
    by_channels<T>(channels, [&](auto lane, int64_t c) PYOPS_INLINE {
        backward_pixels<STRIDE, P, LEFT, RIGHT, DX, DW, typename decltype(lane)::type>(
            rows, taps, x, channels, c, dx, sums);
    });
}

template <int STRIDE, typename T>
void forward_line(const Line<T>& line) {
    by_blocks(line.out_width, [&](auto count, int64_t o) PYOPS_INLINE {
        constexpr int P = decltype(count)::value;
        const bool right = STRIDE * (o + P - 1) + 1 >= line.width;
        with_edges(o == 0, right, [&](auto at_left, auto at_right) PYOPS_INLINE {
            forward_block<STRIDE, P, decltype(at_left)::value, decltype(at_right)::value>(line, o);
        });
    });
}

template <int STRIDE, bool DX, bool DW, typename T>
void backward_line(const Line<T>& line) {
    by_blocks(line.width, [&](auto count, int64_t w) PYOPS_INLINE {
        constexpr int P = decltype(count)::value;
        const bool right =
            STRIDE == 1 ? w + P == line.width : P > 1 && (w + P) / 2 == line.out_width;
        with_edges(STRIDE == 1 && w == 0, right, [&](auto at_left, auto at_right) PYOPS_INLINE {
            backward_block<STRIDE, P, decltype(at_left)::value, decltype(at_right)::value, DX, DW>(
                line, w);
        });
    });
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

template <typename S, int STRIDE>
void forward(const DepthwiseSpan& span, int64_t first, int64_t last, void* scratch) {
    using T = Real<S>;
    const int64_t C = span.channels;
    T* const spare = static_cast<T*>(scratch);
    WideRows<S> inputs(span.x, span.width * C, spare);
    Line<T> line{};
    line.taps = static_cast<const T*>(span.taps);
    line.bias = static_cast<const T*>(span.bias);
    line.width = span.width;
    line.out_width = span.out_width;
    line.channels = C;
    for (int64_t r = first; r < last; ++r) {
        const int64_t image = r / span.out_height, o = r % span.out_height;
        for (int i = 0; i < TAPS; ++i) {
            const int64_t h = TapPlace<STRIDE>::input(o, i);
            line.rows[i] =
                h >= 0 && h < span.height ? inputs.row(image * span.height + h) : nullptr;
        }
        S* const out = static_cast<S*>(span.out) + r * span.out_width * C;
        line.out = spare + 4 * span.width * C;
        if constexpr (sizeof(S) == sizeof(T)) line.out = out;
        forward_line<STRIDE>(line);
        finish_row(out, line.out, span.out_width * C, span.activation);
    }
}

template <typename S, int STRIDE, bool DX, bool DW>
void backward(const DepthwiseSpan& span, int64_t first, int64_t last, double* sums, void* scratch) {
    using T = Real<S>;
    const int64_t C = span.channels, numbers = span.width * C;
    T *const few = static_cast<T*>(scratch), *const spare = few + DEPTHWISE_SUMS * C;
    WideRows<S> gradients(span.dy, span.out_width * C, spare);
    Line<T> line{};
    line.taps = static_cast<const T*>(span.taps);
    line.sums = few;
    line.width = span.width;
    line.out_width = span.out_width;
    line.channels = C;
    const int64_t together = span.width < PIXELS_IN_A_SUM ? PIXELS_IN_A_SUM / span.width : 1;
    for (int64_t begin = first; begin < last; begin += together) {
        const int64_t end = last - begin < together ? last : begin + together;
        memset(few, 0, static_cast<size_t>(DEPTHWISE_SUMS * C) * sizeof(T));
        for (int64_t r = begin; r < end; ++r) {
            const int64_t image = r / span.height, h = r % span.height;
            for (int i = 0; i < TAPS; ++i) {
                const int64_t o = TapPlace<STRIDE>::output(h, i);
                const bool reached =
                    h + 1 >= i && TapPlace<STRIDE>::meets(h, i) && o < span.out_height;
                line.rows[i] = reached ? gradients.row(image * span.out_height + o) : nullptr;
            }
            if (DW)
                line.x = widened(spare + 4 * numbers, static_cast<const S*>(span.x) + r * numbers,
                                 numbers);
            S* const out = DX ? static_cast<S*>(span.out) + r * numbers : nullptr;
            line.out = spare + 5 * numbers;
            if constexpr (sizeof(S) == sizeof(T)) line.out = out;
            backward_line<STRIDE, DX, DW>(line);
            if (DX) finish_row(out, line.out, numbers, -1);
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
