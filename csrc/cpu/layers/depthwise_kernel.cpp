// Depthwise 3 x 3 convolution with the channels last. A register holds neighbouring channels of a
// pixel; a block of pixels in a row shares what it reads:
//
//   forward    y[o]  = sum of tap x        8 outputs of one row: 30 registers read for 72 products
//   backward   dx[h] = sum of tap dy       both from the same numbers of dy: x and dy are read once
//              dtap  = sum of x dy
//
// The channels of a block are gone through before the next one, so that memory is read in
// stretches. Every sum goes by rows, taps and columns in their order, whatever the block: the bits
// of an image don't depend on its neighbours, nor on threads.
#include "depthwise_pixels.h"
#include "../rows/finish_row.h"
#include "../rows/row_sums.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t CACHE_LINE = 64;        // bytes: of shorter registers several share a line
constexpr int64_t PIXELS_IN_A_SUM = 128;  // added up in fp32, about, before they go into float64

template <int N>
struct Count {
    static constexpr int value = N;
};

#if defined(__x86_64__) && !defined(__AVX2__)
constexpr bool RARE_PROCESSOR = true;  // older than AVX2
#else
constexpr bool RARE_PROCESSOR = false;
#endif

// Pixels of the largest blocks: as many as there are registers for. Every size is compiled anew for
// each dtype, stride and set of results, and takes most of this file's compile time. float64 and
// the processors that few have get small blocks; so does a backward pass for the input or for the
// taps ALONE, which only a frozen layer asks for.
template <typename T, bool ALONE = false>
constexpr int most_pixels() {
    if (sizeof(T) > 4 || RARE_PROCESSOR) return 2;
    return (Wide<T>::N < 16 ? 4 : 8) / (ALONE ? 2 : 1);
}

// Whether blocks of this size check for columns beyond the image wherever they are. Only the
// largest have code without the checks for the inside of an image: in small ones, which are mostly
// at an edge, it gains nothing.
template <typename T, bool ALONE = false>
constexpr bool always_check(int pixels) {
    return most_pixels<T>() <= 2 || ALONE || pixels < most_pixels<T>();
}

// Calls f(Count<P>{}, start) on blocks of MOST pixels, and of 4, 2 and 1 for the rest.
template <int MOST, typename F>
inline PYOPS_INLINE void by_blocks(int64_t pixels, const F& f) {
    int64_t start = 0;
    if constexpr (MOST >= 8)
        for (; start + 8 <= pixels; start += 8) f(Count<8>{}, start);
    if constexpr (MOST >= 4)
        for (; start + 4 <= pixels; start += 4) f(Count<4>{}, start);
    for (; start + 2 <= pixels; start += 2) f(Count<2>{}, start);
    if (pixels & 1) f(Count<1>{}, pixels - 1);
}

// Calls f(c) for the registers of all channels, and rest(c) for each channel after them.
template <typename T, typename F, typename G>
inline PYOPS_INLINE void by_channels(int64_t channels, const F& f, const G& rest) {
    int64_t c = 0;
    for (; c + Wide<T>::N <= channels; c += Wide<T>::N) f(c);
    for (; c < channels; ++c) rest(c);
}

// What one row of outputs is made of; in backward, one row of inputs. Rows of x (of dy) that are
// beyond the image, or meet no tap, are null. Rows are read and written in the dtype S, whose
// numbers registers widen as they read.
template <typename S>
struct Line {
    const S* rows[TAPS];
    const Real<S>*taps, *bias;
    const S* x;
    S* out;
    Real<S>* sums;
    int64_t width, out_width, channels;  // pixels of a row of x and of y
    // What the next line reads first, and its out: null where there is none, or it is in scratch.
    const S *next_row, *next_x;
    S* next_out;
    bool streams;  // out is written past the caches

    // The rows from a column on, perhaps the one before the first.
    void from(const S** places, int64_t column, int64_t channel = 0) const {
        for (int i = 0; i < TAPS; ++i)
            places[i] = rows[i] ? rows[i] + column * channels + channel : nullptr;
    }
};

// Has a register's channels of neighbouring pixels come into L2 one line before they are needed: a
// block is gone through by channels, in steps that the processor does not foresee where an image
// has few of them. At stride 2 the forward pass computes too little beside to gain by it.
template <int PIXELS, bool WRITTEN, typename S>
inline PYOPS_INLINE void fetch(const S* pixels, int64_t channels) {
    if (Wide<Real<S>>::N * sizeof(Real<S>) < CACHE_LINE || !pixels) return;
    PYOPS_UNROLL
    for (int p = 0; p < PIXELS; ++p) __builtin_prefetch(pixels + p * channels, WRITTEN, 2);
}

template <int STRIDE, int P, bool EDGE, typename S>
__attribute__((noinline)) void forward_block(const Line<S>& line, int64_t o, Block block) {
    using T = Real<S>;
    const S* rows[TAPS];
    line.from(rows, TapPlace<STRIDE>::input(o, 0));
    const int64_t channels = line.channels;
    const T *const taps = line.taps, *const bias = line.bias;
    S* const y = line.out + o * channels;
    const S* const next = line.next_row ? line.next_row + o * channels : nullptr;
    S* const next_y = line.next_out ? line.next_out + o * channels : nullptr;
    by_channels<T>(
        channels,
        [&](int64_t c) PYOPS_INLINE {
            if constexpr (STRIDE == 1) {
                fetch<P, false>(next ? next + c : nullptr, channels);
                fetch<P, true>(next_y ? next_y + c : nullptr, channels);
            }
            forward_pixels<STRIDE, P, EDGE>(rows, taps, bias, channels, c, y, block, line.streams);
        },
        [&](int64_t c) {
            const S* of_channel[TAPS];
            line.from(of_channel, TapPlace<STRIDE>::input(o, 0), c);
            forward_channel<STRIDE>(of_channel, taps + c, bias ? bias + c : nullptr, channels,
                                    y + c, block);
        });
}

template <int STRIDE, int P, bool EDGE, bool DX, bool DW, typename S>
__attribute__((noinline)) void backward_block(const Line<S>& line, int64_t w, Block block) {
    using T = Real<S>;
    const S* rows[TAPS];
    line.from(rows, STRIDE == 1 ? w - 1 : w / 2);
    const int64_t channels = line.channels;
    const T* const taps = line.taps;
    T* const sums = line.sums;
    const S* const x = DW ? line.x + w * channels : nullptr;
    S* const dx = DX ? line.out + w * channels : nullptr;
    const S* const next = line.next_row ? line.next_row + w / STRIDE * channels : nullptr;
    const S* const next_x = DW && line.next_x ? line.next_x + w * channels : nullptr;
    S* const next_dx = DX && line.next_out ? line.next_out + w * channels : nullptr;
    by_channels<T>(
        channels,
        [&](int64_t c) PYOPS_INLINE {
            fetch<(P + STRIDE - 1) / STRIDE, false>(next ? next + c : nullptr, channels);
            if (DW) fetch<P, false>(next_x ? next_x + c : nullptr, channels);
            if (DX) fetch<P, true>(next_dx ? next_dx + c : nullptr, channels);
            backward_pixels<STRIDE, P, EDGE, DX, DW>(rows, taps, x, channels, c, dx, sums, block,
                                                     line.streams);
        },
        [&](int64_t c) {
            const S* of_channel[TAPS];
            line.from(of_channel, STRIDE == 1 ? w - 1 : w / 2, c);
            backward_channel<STRIDE, DX, DW>(of_channel, taps + c, DW ? x + c : nullptr, channels,
                                             DX ? dx + c : nullptr, sums + c, block);
        });
}

template <int STRIDE, typename S>
void forward_line(const Line<S>& line) {
    by_blocks<most_pixels<Real<S>>()>(line.out_width, [&](auto count, int64_t o) PYOPS_INLINE {
        constexpr int P = decltype(count)::value;
        const Block block{P, o == 0, STRIDE * (o + P - 1) + 1 >= line.width};
        if (block.at_an_edge())
            forward_block<STRIDE, P, true>(line, o, block);
        else
            forward_block<STRIDE, P, always_check<Real<S>>(P)>(line, o, block);
    });
}

template <int STRIDE, bool DX, bool DW, typename S>
void backward_line(const Line<S>& line) {
    constexpr bool ALONE = DX != DW;
    by_blocks<most_pixels<Real<S>, ALONE>()>(line.width, [&](auto count, int64_t w) PYOPS_INLINE {
        constexpr int P = decltype(count)::value;
        const bool right =
            STRIDE == 1 ? w + P == line.width : P > 1 && (w + P) / 2 == line.out_width;
        const Block block{P, STRIDE == 1 && w == 0, right};
        if (block.at_an_edge())
            backward_block<STRIDE, P, true, DX, DW>(line, w, block);
        else
            backward_block<STRIDE, P, always_check<Real<S>, ALONE>(P), DX, DW>(line, w, block);
    });
}

// Rows that several rows of the result need: where they are, or each widened once, into one of four
// places, where E is wider than S.
template <typename S, typename E>
class InputRows {
public:
    InputRows(const void* base, int64_t numbers, E* scratch)
        : base_(static_cast<const S*>(base)), numbers_(numbers), scratch_(scratch) {}

    const E* row(int64_t r) {
        const S* const found = base_ + r * numbers_;
        if constexpr (sizeof(S) == sizeof(E)) {
            return found;
        } else {
            E* const place = scratch_ + (r & 3) * numbers_;
            if (held_[r & 3] != r) convert(place, found, numbers_);
            held_[r & 3] = r;
            return place;
        }
    }

private:
    const S* base_;
    int64_t numbers_;
    E* scratch_;
    int64_t held_[4] = {-1, -1, -1, -1};
};

// Whether rows may be written past the caches: each pixel must begin where a register may.
template <typename S>
bool streams(const DepthwiseSpan& span) {
    return std::is_same<S, float>::value && span.streams &&
           reinterpret_cast<uintptr_t>(span.out) % sizeof(Wide<float>) == 0 &&
           span.channels % Wide<float>::N == 0;
}

// E: what rows are read and written in. An activation is computed of the wide sums, so that of
// 16-bit images is a pass of its own over a wide row.
template <typename S, typename E, int STRIDE>
void forward(const DepthwiseSpan& span, int64_t first, int64_t last, void* scratch) {
    using T = Real<S>;
    const int64_t C = span.channels;
    E* const spare = static_cast<E*>(scratch);
    InputRows<S, E> inputs(span.x, span.width * C, spare);
    Line<E> line{};
    line.taps = static_cast<const T*>(span.taps);
    line.bias = static_cast<const T*>(span.bias);
    line.width = span.width;
    line.out_width = span.out_width;
    line.channels = C;
    line.streams = span.activation < 0 && streams<S>(span);
    for (int64_t r = first; r < last; ++r) {
        const int64_t image = r / span.out_height, o = r % span.out_height;
        for (int i = 0; i < TAPS; ++i) {
            const int64_t h = TapPlace<STRIDE>::input(o, i);
            line.rows[i] =
                h >= 0 && h < span.height ? inputs.row(image * span.height + h) : nullptr;
        }
        S* const out = static_cast<S*>(span.out) + r * span.out_width * C;
        line.out = reinterpret_cast<E*>(out);
        if constexpr (sizeof(S) != sizeof(E)) {
            line.out = spare + 4 * span.width * C;
        } else {
            const int64_t h = o + TAPS - 1;
            const bool more = STRIDE == 1 && r + 1 < last && h < span.height;
            line.next_row = more ? inputs.row(image * span.height + h) : nullptr;
            line.next_out = more && !line.streams ? out + span.out_width * C : nullptr;
        }
        forward_line<STRIDE>(line);
        finish_row(out, line.out, span.out_width * C, span.activation);
    }
    if (line.streams) fence_streams();
}

template <typename S, int STRIDE>
void forward(const DepthwiseSpan& span, int64_t first, int64_t last, void* scratch) {
    if (span.activation < 0)
        forward<S, S, STRIDE>(span, first, last, scratch);
    else
        forward<S, Real<S>, STRIDE>(span, first, last, scratch);
}

template <typename S, int STRIDE, bool DX, bool DW>
void backward(const DepthwiseSpan& span, int64_t first, int64_t last, double* sums, void* scratch) {
    using T = Real<S>;
    const int64_t C = span.channels, numbers = span.width * C;
    T* const few = static_cast<T*>(scratch);
    const int64_t dy_numbers = span.out_width * C;
    const S *const x = static_cast<const S*>(span.x), *const dy = static_cast<const S*>(span.dy);
    Line<S> line{};
    line.taps = static_cast<const T*>(span.taps);
    line.sums = few;
    line.width = span.width;
    line.out_width = span.out_width;
    line.channels = C;
    line.streams = DX && streams<S>(span);
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
                line.rows[i] = reached ? dy + (image * span.out_height + o) * dy_numbers : nullptr;
            }
            line.x = x + r * numbers;
            line.out = DX ? static_cast<S*>(span.out) + r * numbers : nullptr;
            const bool more = r + 1 < last && h + 1 < span.height;
            const int64_t o = TapPlace<STRIDE>::output(h + 1, 0);
            const bool comes = more && TapPlace<STRIDE>::meets(h + 1, 0) && o < span.out_height;
            line.next_row = comes ? dy + (image * span.out_height + o) * dy_numbers : nullptr;
            line.next_x = more && DW ? line.x + numbers : nullptr;
            line.next_out = more && DX && !line.streams ? line.out + numbers : nullptr;
            backward_line<STRIDE, DX, DW>(line);
        }
        if (DW) add_up(sums, few, DEPTHWISE_SUMS * C);
    }
    if (line.streams) fence_streams();
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
