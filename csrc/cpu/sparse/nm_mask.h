// What the kernel of the N:M mask is told: a contiguous tensor seen as [units, M, inner], of whose
// M numbers N are kept.
#pragma once
#include <cstdint>

namespace pyops {

struct NMSpan {
    const void* w;
    void* masked;   // w where it is kept, else 0
    uint8_t* bits;  // bit i % 8 of byte i / 8: whether element i is kept
    int64_t inner;  // elements from one of a group to the next
    int n, m, dtype;
};

}  // namespace pyops
