// The few operations a rule needs beyond + - * /, for float and double; csrc/cpu/rows/vector.h has
// the same for registers.
#pragma once
#include "host_device.h"

namespace pyops {

PYOPS_HOST_DEVICE float square_root(float x) { return sqrtf(x); }
PYOPS_HOST_DEVICE double square_root(double x) { return sqrt(x); }

// The larger; a nan on either side stays, as in torch.maximum.
template <typename T>
PYOPS_HOST_DEVICE T larger(T a, T b) {
    return (a > b || a != a) ? a : b;
}

// -1, 0 or 1; a nan stays, so that a broken gradient is seen in the parameter.
template <typename T>
PYOPS_HOST_DEVICE T sign_of(T x) {
    return x > T(0) ? T(1) : x < T(0) ? T(-1) : x;
}

// x where `condition` is not 0 (nan is not), 0 elsewhere, whatever x is there.
template <typename T>
PYOPS_HOST_DEVICE T unless_zero(T condition, T x) {
    return condition == T(0) ? T(0) : x;
}

// x where a < b (a nan is not), y elsewhere.
template <typename T>
PYOPS_HOST_DEVICE T where_less(T a, T b, T x, T y) {
    return a < b ? x : y;
}

PYOPS_HOST_DEVICE float magnitude(float x) { return float_of(bits_of(x) & 0x7FFFFFFFu); }
PYOPS_HOST_DEVICE double magnitude(double x) { return fabs(x); }

// a b + c and c - a b, rounded once where the hardware can. Written out, never left to the
// compiler, which would choose differently for a loop and for its last elements: a shard would then
// differ from the whole in the last bit.
#if defined(__CUDA_ARCH__) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
PYOPS_HOST_DEVICE float fused(float a, float b, float c) { return fmaf(a, b, c); }
PYOPS_HOST_DEVICE double fused(double a, double b, double c) { return fma(a, b, c); }
#else
PYOPS_HOST_DEVICE float fused(float a, float b, float c) { return a * b + c; }
PYOPS_HOST_DEVICE double fused(double a, double b, double c) { return a * b + c; }
#endif
PYOPS_HOST_DEVICE float negative_fused(float a, float b, float c) { return fused(-a, b, c); }
PYOPS_HOST_DEVICE double negative_fused(double a, double b, double c) { return fused(-a, b, c); }

}  // namespace pyops
