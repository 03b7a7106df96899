// Between fp32 and the 16-bit formats, on bits: to nearest even, or up and down at random. No
// branches, so loops vectorise.
#pragma once
#include "host_device.h"

namespace pyops {

PYOPS_HOST_DEVICE float bf16_to_float(uint16_t h) {
    return float_of(static_cast<uint32_t>(h) << 16);
}

PYOPS_HOST_DEVICE uint16_t float_to_bf16(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40u;  // quiet, and never rounded up to infinity
    return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
}

PYOPS_HOST_DEVICE float fp16_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, magnitude = h & 0x7FFFu;
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    const uint32_t special = normal + (112u << 23);  // inf and nan: exponent 31 becomes 255
    const uint32_t tiny =
        bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 5.9604644775390625e-8f);
    return float_of(sign | (magnitude >= 0x7C00u ? special : magnitude >= 0x400u ? normal : tiny));
}

PYOPS_HOST_DEVICE uint16_t float_to_fp16(float value) {
    const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u,
                   magnitude = bits & 0x7FFFFFFFu;
    const uint32_t normal = ((magnitude + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
    // Below 2^-14 the last place is 2^-24, which is that of 0.5 in fp32: the addition rounds.
    const uint32_t tiny = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
    const uint32_t finite = magnitude < 0x38800000u ? tiny : normal;
    const uint32_t bounded = magnitude >= 0x477FF000u ? 0x7C00u : finite;
    return static_cast<uint16_t>(sign | (magnitude > 0x7F800000u ? 0x7E00u : bounded));
}

// Stochastic rounding, Gupta et al., arXiv:1502.02551, section 3: up with the probability of the
// part cut off. `random` has 16 uniform bits. bf16 cuts off exactly 16 bits; fp16 cuts 13, and
// below 2^-14 up to 24, of which the first 16 count.
PYOPS_HOST_DEVICE uint16_t float_to_bf16(float value, uint32_t random) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFFu;
    // A carry never reaches the sign of a finite number
    const uint32_t rounded = (bits + random) >> 16;
    const uint32_t special = (bits >> 16) | (magnitude > 0x7F800000u ? 0x40u : 0u);
    return static_cast<uint16_t>(magnitude >= 0x7F800000u ? special : rounded);
}

PYOPS_HOST_DEVICE uint16_t float_to_fp16(float value, uint32_t random) {
    const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u,
                   magnitude = bits & 0x7FFFFFFFu;
    const uint32_t normal = ((magnitude + (random >> 3)) >> 13) - (112u << 10);
    const float small = float_of(magnitude < 0x38800000u ? magnitude : 0x38800000u);
    const uint32_t tiny =
        (static_cast<uint32_t>(static_cast<int32_t>(small * 1099511627776.0f)) + random) >> 16;
    const uint32_t finite = magnitude < 0x38800000u ? tiny : normal;
    const uint32_t bounded = finite > 0x7C00u ? 0x7C00u : finite;
    return static_cast<uint16_t>(sign | (magnitude > 0x7F800000u ? 0x7E00u : bounded));
}

}  // namespace pyops
