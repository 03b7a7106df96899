// How magnitudes are counted by the bits of their fp32 patterns.
#pragma once

namespace pyops {

constexpr int RADIX_BINS = 65536;  // of the lower 16 bits
constexpr int UPPER_BINS = 32768;  // of the upper 16 bits, of which the sign is 0

}  // namespace pyops
