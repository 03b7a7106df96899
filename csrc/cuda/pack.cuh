// N elements in one memory access: raw bits in registers, fp32 in arithmetic.
//
// A dtype is a compile-time code where it is known, DYNAMIC where each row of a table brings its
// own: then it is a branch that all threads of a CTA take alike, and the elements are held as fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../math/round.h"
#include "../math/optimizers/table.h"

namespace pyops::cuda {

constexpr int DYNAMIC = -1;

__host__ __device__ constexpr int bytes_of(int dtype) {
    return dtype == FP64 ? 8 : (dtype == FP32 || dtype == DYNAMIC ? 4 : 2);
}

template <int BYTES>
struct Word;
template <>
struct Word<2> {
    using type = unsigned short;
};
template <>
struct Word<4> {
    using type = unsigned;
};
template <>
struct Word<8> {
    using type = uint2;
};
template <>
struct Word<16> {
    using type = uint4;
};

// What a dtype is in memory; the 16-bit ones are told apart by a tag that costs nothing.
template <int DTYPE>
struct Element {
    uint16_t bits;
};
template <int DTYPE>
struct ElementOf {
    using type = Element<DTYPE>;
};
template <>
struct ElementOf<FP32> {
    using type = float;
};
template <>
struct ElementOf<DYNAMIC> {
    using type = float;
};
template <>
struct ElementOf<FP64> {
    using type = double;
};

template <int DTYPE, int N>
struct alignas(N* bytes_of(DTYPE) > 16 ? 16 : N * bytes_of(DTYPE)) Pack {
    typename ElementOf<DTYPE>::type element[N];
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(Element<BF16> x) { return bf16_to_float(x.bits); }
__device__ __forceinline__ float widen(Element<FP16> x) {
    return __half2float(__ushort_as_half(x.bits));
}

// To nearest even. The hardware's conversions: the bits of math/round.h, except for which nan a nan
// becomes.
template <int DTYPE, typename Scalar>
__device__ __forceinline__ typename ElementOf<DTYPE>::type narrow(Scalar x) {
    if constexpr (DTYPE == BF16) {
        return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
    } else if constexpr (DTYPE == FP16) {
        return {__half_as_ushort(__float2half_rn(x))};
    } else {
        return x;
    }
}

// Up or down at random; fp32 needs no rounding.
template <int DTYPE>
__device__ __forceinline__ typename ElementOf<DTYPE>::type narrow(float x, uint32_t random) {
    if constexpr (DTYPE == BF16) {
        return {float_to_bf16(x, random)};
    } else if constexpr (DTYPE == FP16) {
        return {float_to_fp16(x, random)};
    } else {
        return x;
    }
}

template <int DTYPE>
__device__ __forceinline__ void* at(void* base, int64_t index) {
    return static_cast<char*>(base) + index * bytes_of(DTYPE);
}

// Everything here is touched once: read and written so that the caches evict it first.
template <int DTYPE, int N>
__device__ __forceinline__ Pack<DTYPE, N> load(const void* base, int64_t index) {
    static_assert(DTYPE != DYNAMIC, "give the row's own dtype");
    using P = Pack<DTYPE, N>;
    using W = typename Word<alignof(P)>::type;
    constexpr int WORDS = sizeof(P) / sizeof(W);
    const W* from =
        reinterpret_cast<const W*>(static_cast<const char*>(base) + index * bytes_of(DTYPE));
    W words[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = __ldcs(from + i);
    P pack;
    memcpy(&pack, words, sizeof pack);
    return pack;
}

// Has L2 fetch what lies at `address`, for a load that comes later.
__device__ __forceinline__ void prefetch([[maybe_unused]] const void* address) {
#if defined(__CUDACC__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

template <int DTYPE, int N>
__device__ __forceinline__ void store(void* base, int64_t index, const Pack<DTYPE, N>& pack) {
    using P = Pack<DTYPE, N>;
    using W = typename Word<alignof(P)>::type;
    constexpr int WORDS = sizeof(P) / sizeof(W);
    W words[WORDS];
    memcpy(words, &pack, sizeof pack);
    W* to = static_cast<W*>(at<DTYPE>(base, index));
#pragma unroll
    for (int i = 0; i < WORDS; ++i) __stcs(to + i, words[i]);
}

template <int DTYPE, int N>
__device__ __forceinline__ void widen(const Pack<DTYPE, N>& pack, float (&values)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) values[j] = widen(pack.element[j]);
}

// Calls body(constant of the dtype): a branch at run time, a compile-time code inside.
template <int DTYPE>
struct Code {
    static constexpr int value = DTYPE;
};

template <typename Body>
__device__ __forceinline__ void with_dtype(int dtype, const Body& body) {
    if (dtype == FP32) {
        body(Code<FP32>{});
    } else if (dtype == BF16) {
        body(Code<BF16>{});
    } else {
        body(Code<FP16>{});
    }
}

// N elements that lie EACH apart: one access, or N where they are no neighbours. A warp's accesses
// of single elements then are one stretch of memory each, and all N are in flight.
template <int DTYPE, int N, int EACH>
__device__ __forceinline__ Pack<DTYPE, N> load_each(const void* base, int64_t index) {
    if constexpr (EACH == 1) {
        return load<DTYPE, N>(base, index);
    } else {
        Pack<DTYPE, N> out;
#pragma unroll
        for (int j = 0; j < N; ++j)
            out.element[j] = load<DTYPE, 1>(base, index + j * EACH).element[0];
        return out;
    }
}

template <int DTYPE, int N, int EACH>
__device__ __forceinline__ void store_each(void* base, int64_t index, const Pack<DTYPE, N>& pack) {
    if constexpr (EACH == 1) {
        store<DTYPE, N>(base, index, pack);
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j)
            store<DTYPE, 1>(base, index + j * EACH, Pack<DTYPE, 1>{{pack.element[j]}});
    }
}

// `load_each` where DTYPE may be DYNAMIC, and `dtype` then is the row's.
template <int DTYPE, int N, int EACH = 1>
__device__ __forceinline__ Pack<DTYPE, N> load_as(const void* base, int64_t index, int dtype) {
    if constexpr (DTYPE != DYNAMIC) {
        return load_each<DTYPE, N, EACH>(base, index);
    } else {
        Pack<DYNAMIC, N> out;
        with_dtype(dtype, [&](auto code) {
            widen(load_each<decltype(code)::value, N, EACH>(base, index), out.element);
        });
        return out;
    }
}

// Rounds `values` by `round(value, j)` of each dtype and stores them; leaves what was stored in
// `values`.
template <int DTYPE, int N, int EACH = 1, typename Round>
__device__ __forceinline__ void store_as(void* base, int64_t index, int dtype, float (&values)[N],
                                         const Round& round) {
    const auto store_rounded = [&](auto code) {
        constexpr int KNOWN = decltype(code)::value;
        Pack<KNOWN, N> pack;
#pragma unroll
        for (int j = 0; j < N; ++j) pack.element[j] = round(code, values[j], j);
        widen(pack, values);
        store_each<KNOWN, N, EACH>(base, index, pack);
    };
    if constexpr (DTYPE != DYNAMIC) {
        store_rounded(Code<DTYPE>{});
    } else {
        with_dtype(dtype, store_rounded);
    }
}

struct ToNearest {
    template <int DTYPE>
    __device__ __forceinline__ typename ElementOf<DTYPE>::type operator()(Code<DTYPE>, float value,
                                                                          int) const {
        return narrow<DTYPE>(value);
    }
};

}  // namespace pyops::cuda
