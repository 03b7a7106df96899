// What every formula needs: the macro that lets one function serve the CPU and CUDA, and a
// bit-exact cast.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define PYOPS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PYOPS_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace pyops {

PYOPS_HOST_DEVICE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

PYOPS_HOST_DEVICE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace pyops
