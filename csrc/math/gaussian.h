// Normal numbers by Box and Muller, with logarithm, sine and cosine of our own: each operation is
// one IEEE operation in a fixed order, so the CPU, CUDA and plain torch (pyops/ops/random.py) give
// the same bits. Compile without contraction (-ffp-contract=off, -fmad=false). Polynomials: S.
// Moshier, Cephes, logf, sinf and cosf; each within 1 ulp or so.
#pragma once
#include "philox.h"

namespace pyops {

// Natural logarithm of a normal, positive u.
PYOPS_HOST_DEVICE float gaussian_log(float u) {
    const int32_t bits = static_cast<int32_t>(bits_of(u));
    // So that the fraction is in [sqrt(1/2), sqrt(2))
    const int32_t exponent = (bits - 0x3F3504F3) >> 23;
    const float f = float_of(static_cast<uint32_t>(bits - exponent * (1 << 23))) - 1.0f;
    const float e = static_cast<float>(exponent);
    const float z = f * f;
    float q = 7.0376836292e-2f;
    q = q * f + -1.1514610310e-1f;
    q = q * f + 1.1676998740e-1f;
    q = q * f + -1.2420140846e-1f;
    q = q * f + 1.4249322787e-1f;
    q = q * f + -1.6668057665e-1f;
    q = q * f + 2.0000714765e-1f;
    q = q * f + -2.4999993993e-1f;
    q = q * f + 3.3333331174e-1f;
    float y = f * z;
    y = y * q;
    y = y + e * -2.12194440e-4f;  // ln 2 in two parts: the high one times e is exact
    y = y - z * 0.5f;
    return (f + y) + e * 0.693359375f;
}

// sin(2 pi u) and cos(2 pi u) for u in [0, 1): the quadrant is taken off exactly.
PYOPS_HOST_DEVICE void gaussian_sin_cos(float u, float& sine, float& cosine) {
    const float t = u * 4.0f;
    const int32_t q = static_cast<int32_t>(t + 0.5f);
    const float x = (t - static_cast<float>(q)) * 1.5707963267948966f;
    const float z = x * x;
    float a = -1.9515295891e-4f;
    a = a * z + 8.3321608736e-3f;
    a = a * z + -1.6666654611e-1f;
    float s = x * z;
    s = s * a;
    s = s + x;
    float b = 2.443315711809948e-5f;
    b = b * z + -1.388731625493765e-3f;
    b = b * z + 4.166664568298827e-2f;
    float c = z * z;
    c = c * b;
    c = c - z * 0.5f;
    c = c + 1.0f;
    const int32_t quadrant = q & 3;
    const bool swap = quadrant & 1;
    const float s1 = swap ? c : s, c1 = swap ? s : c;
    sine = quadrant >= 2 ? -s1 : s1;
    cosine = (quadrant == 1 || quadrant == 2) ? -c1 : c1;
}

// Two words to two independent standard normal numbers; the first is the even lane. At most sqrt(62
// ln 2) = 6.56.
PYOPS_HOST_DEVICE void normal_pair(uint32_t word0, uint32_t word1, float& even, float& odd) {
    const float u =
        (static_cast<float>(static_cast<int32_t>(word0 >> 1)) + 1.0f) * 4.656612873077393e-10f;
    const float radius = sqrtf(gaussian_log(u) * -2.0f);
    float sine, cosine;
    gaussian_sin_cos(uniform_of(word1), sine, cosine);
    even = radius * cosine;
    odd = radius * sine;
}

}  // namespace pyops
