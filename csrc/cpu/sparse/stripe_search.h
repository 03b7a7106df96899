// What the kernel of the search for a permutation is told: windows of one stripe with several
// others.
#pragma once
#include <cstdint>

namespace pyops {

constexpr int STRIPE_LANES = 8;  // windows at a time

struct StripeWindows {
    const double* columns;  // [channels][rows]: magnitudes, a column after the other
    int64_t rows;
    const int64_t* order;          // which channel stands at each place; a stripe is four places
    int64_t stripe;                // the first of each window
    int64_t others[STRIPE_LANES];  // the second, a number for each lane
};

// What is best of a window: its division, and how much more of the magnitude that keeps than
// division 0 (0 for that one).
struct StripeGain {
    double gain;
    int64_t division;
};

}  // namespace pyops
