// What the search for a permutation of columns goes by: stripes of four columns, of which each row
// keeps the two largest magnitudes, and windows of two stripes.
//
//   a window of 8 columns has 35 divisions into two stripes; division 0 leaves them as they are
//   subsets    70, of four columns, in lexicographic order; subset 69 - i is the rest of subset i
//   division d puts subset d, one of the 35 with column 0, first, and its rest second
//   kept       the sum over rows, in their order and in float64, of a subset's two largest
#pragma once
#include "../host_device.h"

namespace pyops {

constexpr int STRIPE = 4, WINDOW = 2 * STRIPE, SUBSETS = 70, DIVISIONS = 35, COLUMN_PAIRS = 28;

struct StripeTable {
    int8_t columns[SUBSETS][STRIPE];
    int8_t first[SUBSETS], second[SUBSETS];  // pairs of columns that a subset is made of
    int8_t pairs[COLUMN_PAIRS][2];
};

constexpr int pair_number(int a, int b) { return a * (2 * WINDOW - a - 1) / 2 + b - a - 1; }

constexpr StripeTable stripe_table() {
    StripeTable table{};
    int next = 0;
    for (int a = 0; a < WINDOW; ++a)
        for (int b = a + 1; b < WINDOW; ++b) {
            table.pairs[pair_number(a, b)][0] = static_cast<int8_t>(a);
            table.pairs[pair_number(a, b)][1] = static_cast<int8_t>(b);
            for (int c = b + 1; c < WINDOW; ++c)
                for (int d = c + 1; d < WINDOW; ++d) {
                    table.columns[next][0] = static_cast<int8_t>(a);
                    table.columns[next][1] = static_cast<int8_t>(b);
                    table.columns[next][2] = static_cast<int8_t>(c);
                    table.columns[next][3] = static_cast<int8_t>(d);
                    table.first[next] = static_cast<int8_t>(pair_number(a, b));
                    table.second[next] = static_cast<int8_t>(pair_number(c, d));
                    ++next;
                }
        }
    return table;
}

}  // namespace pyops
