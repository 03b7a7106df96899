// What the depthwise 3 x 3 convolution computes for a block of neighbouring pixels: of a register's
// channels at once, and of one channel.
#pragma once
#include "../../math/layers/depthwise.h"
#include "../rows/rows.h"

#define PYOPS_INLINE __attribute__((always_inline))

namespace pyops::PYOPS_ISA {
namespace {

#define PYOPS_UNROLL _Pragma("GCC unroll 32")

constexpr int PIXELS_OF_A_BLOCK = 8;  // at most

// Neighbouring pixels of a row; left, right: the first, the last column read is beyond the image.
struct Block {
    int pixels;
    bool left, right;

    bool at_an_edge() const { return left || right; }
    // Whether column `q` of those that it reads is in the image.
    bool reads(int q, int columns) const {
        return !(left && q == 0) && !(right && q == columns - 1);
    }
};

// Registers to neighbouring pixels; `streams`: past the caches.
template <int P, typename V, typename S>
inline PYOPS_INLINE void write(S* pixels, int64_t channels, const V* values, bool streams) {
    if constexpr (std::is_same<S, float>::value)
        if (streams) {
            PYOPS_UNROLL
            for (int p = 0; p < P; ++p)
                store(reinterpret_cast<StreamedFloat*>(pixels) + p * channels, values[p]);
            return;
        }
    PYOPS_UNROLL
    for (int p = 0; p < P; ++p) store(pixels + p * channels, values[p]);
}

// P outputs from column `o` on. EDGE: columns that it reads may be beyond the image.
template <int STRIDE, int P, bool EDGE, typename S>
inline PYOPS_INLINE void forward_pixels(const S* const* rows, const Real<S>* taps,
                                        const Real<S>* bias, int64_t channels, int64_t c, S* y,
                                        Block block, bool streams) {
    using T = Real<S>;
    using V = Wide<T>;
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
            if (EDGE && !block.reads(q, READ)) continue;
            V x;
            load(x, rows[i] + q * channels + c);
            PYOPS_UNROLL
            for (int p = 0; p < P; ++p) {
                const int tap = q - STRIDE * p;
                if (tap >= 0 && tap < TAPS) sums[p] = fused(k[tap], x, sums[p]);
            }
        }
    }
    write<P>(y + c, channels, sums, streams);
}

// The same of one channel, for those after the last whole register: one loop for blocks of any
// width, with the sums in the same order.
template <int STRIDE, typename S>
__attribute__((noinline)) void forward_channel(const S* const* rows, const Real<S>* taps,
                                               const Real<S>* bias, int64_t channels, S* y,
                                               Block block) {
    using T = Real<S>;
    const int read = STRIDE * (block.pixels - 1) + TAPS;
    for (int p = 0; p < block.pixels; ++p) {
        T sum = bias ? *bias : T(0);
        for (int i = 0; i < TAPS; ++i) {
            for (int tap = 0; rows[i] && tap < TAPS; ++tap) {
                const int q = STRIDE * p + tap;
                if (!block.reads(q, read)) continue;
                T x;
                load(x, rows[i] + q * channels);
                sum = fused(taps[(TAPS * i + tap) * channels], x, sum);
            }
        }
        store(y + p * channels, sum);
    }
}

// P inputs from an even column on: dx where it is wanted, and sums [10, channels] of the taps.
template <int STRIDE, int P, bool EDGE, bool DX, bool DW, typename S>
inline PYOPS_INLINE void backward_pixels(const S* const* rows, const Real<S>* taps, const S* x,
                                         int64_t channels, int64_t c, S* dx, Real<S>* sums,
                                         Block block, bool streams) {
    using T = Real<S>;
    using V = Wide<T>;
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
            if (EDGE && !block.reads(q, READ)) continue;
            V dy;
            load(dy, rows[i] + q * channels + c);
            PYOPS_UNROLL
            for (int p = 0; p < P; ++p) {
                PYOPS_UNROLL
                for (int tap = 0; tap < TAPS; ++tap) {
                    // The block begins at an even column: as if at 0, and at stride 1 with dy from
                    // -1 on
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
    if (DX) write<P>(dx + c, channels, out, streams);
}

template <int STRIDE, bool DX, bool DW, typename S>
__attribute__((noinline)) void backward_channel(const S* const* rows, const Real<S>* taps,
                                                const S* x, int64_t channels, S* dx, Real<S>* sums,
                                                Block block) {
    using T = Real<S>;
    using Place = TapPlace<STRIDE>;
    const int read = STRIDE == 1 ? block.pixels + 2 : block.pixels / 2 + 1;
    T out[PIXELS_OF_A_BLOCK] = {};
    for (int i = 0; i < TAPS; ++i) {
        for (int q = 0; rows[i] && q < read; ++q) {
            if (!block.reads(q, read)) continue;
            T dy;
            load(dy, rows[i] + q * channels);
            for (int p = 0; p < block.pixels; ++p) {
                for (int tap = 0; tap < TAPS; ++tap) {
                    if (!Place::meets(p, tap) || Place::output(p, tap) != q - (STRIDE == 1))
                        continue;
                    const int64_t place = (TAPS * i + tap) * channels;
                    if (DX) out[p] = fused(taps[place], dy, out[p]);
                    if (DW) {
                        T in;
                        load(in, x + p * channels);
                        sums[place] = fused(in, dy, sums[place]);
                    }
                    if (DW && i == 1 && tap == 1) sums[TAPS * TAPS * channels] += dy;
                }
            }
        }
    }
    for (int p = 0; DX && p < block.pixels; ++p) store(dx + p * channels, out[p]);
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
