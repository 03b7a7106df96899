// The exponential function for float, double and, through csrc/cpu/rows/vector.h, registers of
// float. Polynomial: S. Moshier, Cephes, expf; within 1 ulp. A nan stays; below -104 the result is
// 0, above 88.8 it is inf; subnormal results are not flushed.
#pragma once
#include "arithmetic.h"

namespace pyops {

// The larger or smaller of x and a bound that is a number; a nan in x stays.
PYOPS_HOST_DEVICE float at_least(float x, float low) { return x < low ? low : x; }
PYOPS_HOST_DEVICE float at_most(float x, float high) { return x > high ? high : x; }
PYOPS_HOST_DEVICE double at_least(double x, double low) { return x < low ? low : x; }
PYOPS_HOST_DEVICE double at_most(double x, double high) { return x > high ? high : x; }

// p 2^n for a whole n of -152 to 130, in two steps because 2^n itself may not be a float.
PYOPS_HOST_DEVICE float times_power_of_two(float p, float n) {
    // A cast of a nan would be undefined
    const int32_t k = static_cast<int32_t>(bits_of(n + 12582912.0f)) - 0x4B400000;
    const int32_t half = k >> 1;
    const float first = float_of(static_cast<uint32_t>(half + 127) << 23);
    return p * first * float_of(static_cast<uint32_t>(k - half + 127) << 23);
}

// exp x = 2^n exp r with r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2].
template <typename T>
PYOPS_HOST_DEVICE T exponential(T x) {
    x = at_most(at_least(x, T(-104.0f)), T(89.0f));
    // 1.5 2^23: the addition rounds to a whole number
    const T n = fused(x, T(1.44269504f), T(12582912.0f)) - T(12582912.0f);
    const T r = negative_fused(n, T(-2.12194440e-4f), negative_fused(n, T(0.693359375f), x));
    T q = fused(T(1.9875691500e-4f), r, T(1.3981999507e-3f));
    q = fused(q, r, T(8.3334519073e-3f));
    q = fused(q, r, T(4.1665795894e-2f));
    q = fused(q, r, T(1.6666665459e-1f));
    q = fused(q, r, T(5.0000001201e-1f));
    return times_power_of_two(fused(q, r * r, r) + T(1.0f), n);
}

PYOPS_HOST_DEVICE double exponential(double x) { return exp(x); }

}  // namespace pyops
