// The search for a permutation of columns that keeps more of a 2:4 matrix, as NVIDIA's (Pool and
// Yu, "Channel Permutations for N:M Sparsity", NeurIPS 2021) does it: every window of two stripes,
// the best divisions of windows that share no stripe, again for what was touched, until nothing is
// gained; then random exchanges of three columns, each followed by the same.
//
//  gains[s, t] of all windows --> sorted, those without a common stripe applied --> stripes touched
//       ^                                                                              |
//       `----------------------- windows with one of these, anew <---------------------'
#include <algorithm>
#include <vector>

#include "../../host/box.h"
#include "../../math/sparse/stripe_search.h"
#include "../kernels.h"
#include "../calls/layer_tensors.h"
#include "../calls/loop.h"

namespace pyops {
namespace {

constexpr StripeTable TABLE = stripe_table();

// A number for each draw of an escape (splitmix64, Steele et al., 2014), below n.
int64_t drawn(uint64_t seed, uint64_t escape, uint64_t draw, int64_t n) {
    uint64_t z = seed + 0x9E3779B97F4A7C15u * (8 * escape + draw + 1);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return static_cast<int64_t>((z ^ (z >> 31)) % static_cast<uint64_t>(n));
}

class Search {
public:
    Search(const double* columns, int64_t rows, int64_t channels)
        : columns_(columns), rows_(rows), stripes_(channels / STRIPE) {
        for (int64_t c = 0; c < channels; ++c) order.push_back(c);
        gains_.resize(static_cast<size_t>(stripes_ * stripes_));
        touched_.assign(static_cast<size_t>(stripes_), 1);
    }

    std::vector<int64_t> order;

    // Until no window gains. Every division that is applied keeps more, so that this ends.
    void improve() {
        while (evaluate() && apply()) {
        }
    }

    void escape(int64_t escapes, uint64_t seed) {
        if (stripes_ < 3) return;  // one window: nothing is better than its best division
        double best = kept();
        for (int64_t e = 0; e < escapes; ++e) {
            const std::vector<int64_t> before = order;
            const std::vector<StripeGain> gains = gains_;
            exchange(seed, static_cast<uint64_t>(e));
            improve();
            const double found = kept();
            if (found > best) {
                best = found;
            } else {
                order = before;
                gains_ = gains;
            }
        }
    }

private:
    const double* columns_;
    int64_t rows_, stripes_;
    std::vector<StripeGain> gains_;  // [s, t] of s < t
    std::vector<char> touched_;      // stripes whose windows are to be evaluated

    StripeGain& gain(int64_t s, int64_t t) { return gains_[static_cast<size_t>(s * stripes_ + t)]; }

    // The windows with a stripe that was touched, up to STRIPE_LANES of one first stripe together;
    // false: there are none.
    bool evaluate() {
        std::vector<StripeWindows> work;
        std::vector<int64_t> counts;
        for (int64_t s = 0; s < stripes_; ++s) {
            int64_t lanes = STRIPE_LANES;
            for (int64_t t = s + 1; t < stripes_; ++t) {
                if (!touched_[static_cast<size_t>(s)] && !touched_[static_cast<size_t>(t)])
                    continue;
                if (lanes == STRIPE_LANES) {
                    work.push_back({columns_, rows_, order.data(), s, {}});
                    counts.push_back(lanes = 0);
                }
                // What a lane without a window does is not looked at
                for (int64_t lane = lanes; lane < STRIPE_LANES; ++lane)
                    work.back().others[lane] = t;
                counts.back() = ++lanes;
            }
        }
        std::fill(touched_.begin(), touched_.end(), 0);
        const Kernels& kernel = kernels();
        const auto run = [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) {
                const StripeWindows& windows = work[static_cast<size_t>(i)];
                StripeGain found[STRIPE_LANES];
                kernel.stripe_windows(windows, found);
                for (int64_t lane = 0; lane < counts[static_cast<size_t>(i)]; ++lane)
                    gain(windows.stripe, windows.others[lane]) = found[lane];
            }
        };
        const int64_t count = static_cast<int64_t>(work.size());
        if (count * rows_ <= SERIAL / SUBSETS)
            run(0, count);
        else
            torch::stable::parallel_for(0, count, 1, run);
        return count > 0;
    }

    // The best divisions of windows that share no stripe; false: nothing gains.
    bool apply() {
        struct Window {
            double gain;
            int64_t s, t;
        };
        std::vector<Window> found;
        for (int64_t s = 0; s < stripes_; ++s)
            for (int64_t t = s + 1; t < stripes_; ++t)
                if (gain(s, t).gain > 0.0) found.push_back({gain(s, t).gain, s, t});
        std::sort(found.begin(), found.end(), [](const Window& a, const Window& b) {
            if (a.gain != b.gain) return a.gain > b.gain;
            return a.s != b.s ? a.s < b.s : a.t < b.t;
        });
        for (const Window& window : found) {
            char &first = touched_[static_cast<size_t>(window.s)],
                 &second = touched_[static_cast<size_t>(window.t)];
            if (first || second) continue;
            first = second = 1;
            divide(window.s, window.t, gain(window.s, window.t).division);
        }
        return !found.empty();
    }

    void divide(int64_t s, int64_t t, int64_t division) {
        int64_t window[WINDOW];
        int64_t* const places[2] = {order.data() + s * STRIPE, order.data() + t * STRIPE};
        for (int i = 0; i < WINDOW; ++i) window[i] = places[i / STRIPE][i % STRIPE];
        for (int half = 0; half < 2; ++half)
            for (int c = 0; c < STRIPE; ++c)
                places[half][c] =
                    window[TABLE.columns[half ? SUBSETS - 1 - division : division][c]];
    }

    // A column of each of three stripes moves on to the next of them: no single window undoes it.
    void exchange(uint64_t seed, uint64_t number) {
        int64_t stripes[3] = {drawn(seed, number, 0, stripes_),
                              drawn(seed, number, 1, stripes_ - 1),
                              drawn(seed, number, 2, stripes_ - 2)};
        if (stripes[1] >= stripes[0]) ++stripes[1];
        const int64_t low = std::min(stripes[0], stripes[1]),
                      high = std::max(stripes[0], stripes[1]);
        if (stripes[2] >= low) ++stripes[2];
        if (stripes[2] >= high) ++stripes[2];
        int64_t places[3];
        for (uint64_t i = 0; i < 3; ++i) {
            touched_[static_cast<size_t>(stripes[i])] = 1;
            places[i] = stripes[i] * STRIPE + drawn(seed, number, 3 + i, STRIPE);
        }
        const int64_t last = order[static_cast<size_t>(places[2])];
        order[static_cast<size_t>(places[2])] = order[static_cast<size_t>(places[1])];
        order[static_cast<size_t>(places[1])] = order[static_cast<size_t>(places[0])];
        order[static_cast<size_t>(places[0])] = last;
    }

    // What all stripes keep: sums by stripes, of sums by rows.
    double kept() const {
        double total = 0.0;
        for (int64_t s = 0; s < stripes_; ++s) {
            double stripe = 0.0;
            for (int64_t r = 0; r < rows_; ++r) {
                double four[STRIPE];
                for (int64_t c = 0; c < STRIPE; ++c)
                    four[c] = columns_[order[static_cast<size_t>(s * STRIPE + c)] * rows_ + r];
                std::sort(four, four + STRIPE);
                stripe += four[3] + four[2];
            }
            total += stripe;
        }
        return total;
    }
};

Tensor stripe_search(const Tensor magnitudes, int64_t escapes, int64_t seed) {
    require(magnitudes.is_cpu() && dtype_code(magnitudes) == FP64 && magnitudes.dim() == 2 &&
                magnitudes.sizes()[1] % STRIPE == 0,
            "pyops::stripe_search: magnitudes must be float64 [rows, columns] on the CPU with a "
            "multiple of 4 columns, got shape ",
            Shape{magnitudes});
    require(escapes >= 0, "pyops::stripe_search: escapes must be 0 or more, got ", escapes);
    const int64_t rows = magnitudes.sizes()[0], channels = magnitudes.sizes()[1];
    const Tensor given = dense(magnitudes);
    const double* const from = static_cast<const double*>(given.data_ptr());
    std::vector<double> columns(static_cast<size_t>(rows * channels));
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < channels; ++c) {
            const double value = from[r * channels + c];
            require(value >= 0.0, "pyops::stripe_search: magnitudes must be 0 or more, got ", value,
                    " at [", r, ", ", c, "]; give w.abs(), without nan");
            columns[static_cast<size_t>(c * rows + r)] = value;
        }
    Search search(columns.data(), rows, channels);
    search.improve();
    search.escape(escapes, static_cast<uint64_t>(seed));
    const std::vector<int64_t> shape = {channels};
    Tensor order = torch::stable::new_empty(magnitudes, shape, torch::headeronly::ScalarType::Long);
    std::copy(search.order.begin(), search.order.end(), static_cast<int64_t*>(order.data_ptr()));
    return order;
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) { PYOPS_IMPL(m, "stripe_search", &pyops::stripe_search); }
