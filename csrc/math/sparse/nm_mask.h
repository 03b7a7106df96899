// N of M: which of M numbers are kept, the N largest by magnitude.
//
//   key       the bit pattern of |w| as a whole number, which orders as |w| does; -0 equals 0, and
//             a nan is larger than any number
//   i beats j    key[i] > key[j], or they are equal and i < j: ties go to the lower index
//   kept      less than N of the others beat it
#pragma once
#include "../host_device.h"

namespace pyops {

constexpr int MOST_OF_GROUP = 32;  // M

// Bits of a number without its sign, by the size of the number.
template <int BYTES>
struct MagnitudeKey;
template <>
struct MagnitudeKey<2> {
    using type = int16_t;
    static constexpr type mask = 0x7FFF;
};
template <>
struct MagnitudeKey<4> {
    using type = int32_t;
    static constexpr type mask = 0x7FFFFFFF;
};
template <>
struct MagnitudeKey<8> {
    using type = int64_t;
    static constexpr type mask = 0x7FFFFFFFFFFFFFFF;
};

}  // namespace pyops
