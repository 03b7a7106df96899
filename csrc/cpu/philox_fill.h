// Philox words in bulk, for the kernels: consecutive blocks, words in the order of the stream.
#pragma once
#include "../math/philox.h"
#include "isa.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t PHILOX_LANES = 64;  // blocks worked on side by side

// out[4 * b + i] = word i of block `block + b`, for b < PHILOX_LANES. The ten rounds run over all lanes one after the other, so
// that each is a loop without dependencies.
inline void philox_fill(uint32_t* __restrict out, uint64_t key, uint64_t block, uint32_t step, uint32_t stream) {
    PYOPS_VECTORISE
    for (int64_t b = 0; b < PHILOX_LANES; ++b) {
        const uint64_t counter = block + static_cast<uint64_t>(b);
        uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32), c2 = step, c3 = stream;
        uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 10
        for (int round = 0; round < PHILOX_ROUNDS; ++round) {
            philox_round(c0, c1, c2, c3, k0, k1);
            k0 += PHILOX_W0;
            k1 += PHILOX_W1;
        }
        out[4 * b] = c0;
        out[4 * b + 1] = c1;
        out[4 * b + 2] = c2;
        out[4 * b + 3] = c3;
    }
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
