// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011, section 4.3.
//
//   element j of a stream   block = j / 4, word = j % 4, counter (block low, block high, 0, 0)
//                           for uniform numbers, normal ones and masks
//                           block = j / 8, half-word = j % 8, counter (.., .., step, stream)
//                           for stochastic rounding
#pragma once
#include "host_device.h"

namespace pyops {

struct PhiloxBlock {
    uint32_t word[4];
};

constexpr uint32_t PHILOX_M0 = 0xD2511F53u, PHILOX_M1 = 0xCD9E8D57u;  // multipliers
constexpr uint32_t PHILOX_W0 = 0x9E3779B9u, PHILOX_W1 = 0xBB67AE85u;  // key increments
constexpr int PHILOX_ROUNDS = 10;

PYOPS_HOST_DEVICE void philox_round(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3,
                                    uint32_t k0, uint32_t k1) {
    const uint64_t product0 = static_cast<uint64_t>(PHILOX_M0) * c0;
    const uint64_t product1 = static_cast<uint64_t>(PHILOX_M1) * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(product0);
}

PYOPS_HOST_DEVICE PhiloxBlock philox4x32(uint64_t key, uint64_t block, uint32_t c2 = 0,
                                         uint32_t c3 = 0) {
    uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32);
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < PHILOX_ROUNDS; ++round) {
        philox_round(c0, c1, c2, c3, k0, k1);
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    return PhiloxBlock{{c0, c1, c2, c3}};
}

// Uniform on [0, 1) in steps of 2^-24: every value is exact in fp32.
PYOPS_HOST_DEVICE float uniform_of(uint32_t word) {
    return static_cast<float>(static_cast<int32_t>(word >> 8)) * 5.9604644775390625e-8f;
}

}  // namespace pyops
