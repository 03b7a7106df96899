// Between fp32 and 8-bit codes: int8 and the two fp8 formats of Micikevicius et al., "FP8 formats
// for deep learning", arXiv:2209.05433, table 1 (e4m3 without infinities). No branches, so loops
// vectorise. pyops/ops/communication/quantize.py states the formula.
//
//   t = u / scale is within +-quantize_limit;
//   a random half-word of 16 bits rounds it up or down by the part cut off
#pragma once
#include "../host_device.h"

namespace pyops {

enum Format : int { INT8 = 0, E4M3 = 1, E5M2 = 2 };

PYOPS_HOST_DEVICE constexpr float quantize_limit(int format) {
    return format == INT8 ? 127.0f : format == E4M3 ? 448.0f : 57344.0f;
}

// The scale of a block whose largest magnitude has the bits `largest`; nan when that is not finite.
template <int FORMAT>
PYOPS_HOST_DEVICE float quantize_scale(uint32_t largest) {
    return largest < 0x7F800000u ? float_of(largest) / quantize_limit(FORMAT)
                                 : float_of(0x7FC00000u);
}

// t within the format's range.
template <int FORMAT>
PYOPS_HOST_DEVICE float quantize_within(float t) {
    constexpr float LIMIT = quantize_limit(FORMAT);
    const float low = t > -LIMIT ? t : -LIMIT;
    return low < LIMIT ? low : LIMIT;
}

// u / scale within the format's range; 0 for a block without a scale to divide by.
template <int FORMAT>
PYOPS_HOST_DEVICE float quantize_ratio(float u, float scale) {
    const float within = quantize_within<FORMAT>(u / scale);
    return scale > 0.0f ? within : 0.0f;
}

template <int FORMAT>
struct Float8 {
    // Bits of fp32's fraction that are cut off
    static constexpr int CUT = FORMAT == E4M3 ? 20 : 21;
    static constexpr uint32_t REBIAS = FORMAT == E4M3 ? 120u << 3 : 112u << 2;
    // 2^-6, 2^-14
    static constexpr uint32_t SMALLEST_NORMAL = FORMAT == E4M3 ? 0x3C800000u : 0x38800000u;
    // 2^-9, 2^-16: subnormal spacing
    static constexpr float UNIT = FORMAT == E4M3 ? 0.001953125f : 1.52587890625e-5f;
    // Fp32 with that last place
    static constexpr float ROUNDER = FORMAT == E4M3 ? 16384.0f : 128.0f;
};

// To nearest even.
template <int FORMAT>
PYOPS_HOST_DEVICE uint8_t quantize_code(float t) {
    if constexpr (FORMAT == INT8) {
        return static_cast<uint8_t>(bits_of(t + 12582912.0f));  // 1.5 * 2^23: the last place is 1
    } else {
        using F = Float8<FORMAT>;
        const uint32_t bits = bits_of(t), sign = (bits >> 24) & 0x80u,
                       magnitude = bits & 0x7FFFFFFFu;
        const uint32_t half = (1u << (F::CUT - 1)) - 1u + ((magnitude >> F::CUT) & 1u);
        const uint32_t normal = ((magnitude + half) >> F::CUT) - F::REBIAS;
        const uint32_t tiny = bits_of(float_of(magnitude) + F::ROUNDER) - bits_of(F::ROUNDER);
        return static_cast<uint8_t>(sign | (magnitude < F::SMALLEST_NORMAL ? tiny : normal));
    }
}

// Up or down at random, by 16 uniform bits.
template <int FORMAT>
PYOPS_HOST_DEVICE uint8_t quantize_code(float t, uint32_t random) {
    const uint32_t bits = bits_of(t), magnitude = bits & 0x7FFFFFFFu;
    if constexpr (FORMAT == INT8) {
        const int32_t fixed =
            static_cast<int32_t>(float_of(magnitude) * 65536.0f) + static_cast<int32_t>(random);
        const int32_t q = fixed >> 16;
        return static_cast<uint8_t>(t < 0.0f ? -q : q);
    } else {
        using F = Float8<FORMAT>;
        const uint32_t normal = ((magnitude + (random << (F::CUT - 16))) >> F::CUT) - F::REBIAS;
        const float small =
            float_of(magnitude < F::SMALLEST_NORMAL ? magnitude : F::SMALLEST_NORMAL) *
            (65536.0f / F::UNIT);
        const uint32_t tiny =
            static_cast<uint32_t>(static_cast<int32_t>(small) + static_cast<int32_t>(random)) >> 16;
        return static_cast<uint8_t>(((bits >> 24) & 0x80u) |
                                    (magnitude < F::SMALLEST_NORMAL ? tiny : normal));
    }
}

// The number that a code stands for, in units of the scale. Exact.
template <int FORMAT>
PYOPS_HOST_DEVICE float quantize_number(uint8_t code) {
    if constexpr (FORMAT == INT8) {
        return static_cast<float>(static_cast<int32_t>(static_cast<int8_t>(code)));
    } else {
        using F = Float8<FORMAT>;
        const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24, magnitude = code & 0x7Fu;
        const uint32_t normal = (magnitude << F::CUT) + (F::REBIAS << F::CUT);
        const uint32_t tiny =
            bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * F::UNIT);
        return float_of(sign | (magnitude < (1u << (23 - F::CUT)) ? tiny : normal));
    }
}

// Codes 0 .. 255 of numbers from low <= 0 to high >= 0, of which z stands for 0:
//   s = (high - low) / 255, z = round(-low / s), c = round(u / s) + z

PYOPS_HOST_DEVICE float rounded_to_whole(float t) {  // |t| < 2^22
    return (t + 12582912.0f) - 12582912.0f;
}

PYOPS_HOST_DEVICE float affine_scale(float low, float high) {
    const float scale = (high - low) / 255.0f;
    return scale < float_of(0x7F800000u) ? scale : float_of(0x7FC00000u);
}

// 0 where there is no scale to divide by.
PYOPS_HOST_DEVICE float affine_zero(float low, float scale) {
    const float ratio = -low / scale;
    const float within = ratio < 255.0f ? ratio : 255.0f;
    return scale > 0.0f ? rounded_to_whole(within) : 0.0f;
}

PYOPS_HOST_DEVICE uint8_t affine_code(float u, float scale, float zero) {
    const float ratio = u / scale;
    const float low =
        ratio > -511.0f ? ratio : -511.0f;  // beyond, a code is 0 or 255 whatever z is
    const float moved = rounded_to_whole(low < 511.0f ? low : 511.0f) + zero;
    const float above = moved > 0.0f ? moved : 0.0f, within = above < 255.0f ? above : 255.0f;
    return static_cast<uint8_t>(static_cast<int32_t>(scale > 0.0f ? within : 0.0f));
}

}  // namespace pyops
