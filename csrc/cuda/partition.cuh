// Who works on which elements: index arithmetic only, the same on the host, where a test visits
// every element.
//
//   rows    |---- row 0 ----|-- row 1 --|r2|------------ row 3 ------------|  one row per tensor
//   chunks  |   0   |   1   |  2  |  3  | 4|   5   |   6   |   7   |   8   |  CHUNK elements
//   CTAs    |<- 0 ->|<- 1 ->|<- 2 ->|<- 3 ->|<- 0 ->| ...                     SPAN chunks each
//
// The last chunk of a row is shorter. A CTA takes SPAN consecutive chunks, then the next slab.
//
// A chunk of consecutive elements is walked in packs of N elements, so that each operand moves 16
// bytes (8 for the 16-bit operands beside 32-bit ones). Operands that are out of line by the same
// number of elements get a scalar head;
// operands that can't be brought into line together are walked one element at a time.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define PYOPS_EVERYWHERE __host__ __device__ __forceinline__
#else
#define PYOPS_EVERYWHERE inline
#endif

namespace pyops::cuda {

// Chunks a CTA walks before it jumps: a row is looked up once per span, and all CTAs together stay
// within a few hundred MiB, which the address translation caches hold
constexpr unsigned SPAN = 16;
constexpr int LANES = 32;

struct Range {
    int64_t begin, end;
};

// The chunks of CTA `cta` in the slab that begins at chunk `first`, a multiple of ctas * SPAN;
// every CTA's share of a slab differs by one chunk at most.
PYOPS_EVERYWHERE Range span_of(int64_t first, unsigned cta, unsigned ctas, int64_t chunks) {
    const int64_t left = chunks - first;
    // 32 bits: a division of 64 is a call of some eighty instructions. cta * here < ctas^2 * SPAN.
    const auto most = static_cast<unsigned>(ctas * SPAN);
    const unsigned here = left < most ? static_cast<unsigned>(left) : most;
    return {first + cta * here / ctas, first + (cta + 1) * here / ctas};
}

// The row that chunk `chunk` belongs to: the last one whose first chunk is not beyond it. Rows
// without elements have no chunk and are passed over. `vote(f)` counts the lanes 0..31 in which
// f(lane) holds: one step narrows 32-fold.
template <typename First, typename Vote>
PYOPS_EVERYWHERE int row_of(const First& first, int rows, int64_t chunk, const Vote& vote) {
    int low = 0, high = rows;
    while (high - low > 1) {
        const int step = (high - low + LANES - 1) / LANES;
        const int below = vote([&](int lane) {
            const int probe = low + lane * step;
            return probe < high && first(probe) <= chunk;
        });
        low += (below - 1) * step;
        high = low + step < high ? low + step : high;
    }
    return low;
}

// Rows that are summed in slices: SLICES of them, or one for each chunk of a shorter row. A slice
// begins at chunk slice * chunks / slices.
constexpr int SLICES = 256;

PYOPS_EVERYWHERE int slices_of(int64_t chunks) {
    return chunks < SLICES ? static_cast<int>(chunks) : SLICES;
}
PYOPS_EVERYWHERE int64_t slice_begin(int slice, int64_t chunks) {
    return chunks <= SLICES ? slice : slice * chunks / SLICES;
}

// How many elements `address` lies beyond the last pack boundary, 0 <= n < pack; -1 if it is no
// multiple of `bytes`: 2, 4 or 8. `pack` is a power of two, everywhere.
PYOPS_EVERYWHERE int misalignment(const void* address, int bytes, int pack) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    // Powers of two, which the compiler can't know: it would call a division of 64 bits.
    const int shift = (bytes >> 2) + 1;  // 2, 4, 8: 1, 2, 3
    return at & (bytes - 1) ? -1 : static_cast<int>(at >> shift) & (pack - 1);
}

// The misalignment that operands share; -1 if they don't, or once one is -1. A null operand has
// none and agrees.
PYOPS_EVERYWHERE int shared_misalignment(int so_far, const void* address, int bytes, int pack) {
    return address == nullptr || misalignment(address, bytes, pack) == so_far ? so_far : -1;
}

// Elements before the first pack boundary.
PYOPS_EVERYWHERE int head_of(int misaligned, int pack) { return (pack - misaligned) & (pack - 1); }

// Elements of the row's chunk number `index`. Chunk boundaries are shifted by the head, so that
// packs stay in line.
PYOPS_EVERYWHERE Range elements_of(int64_t index, int64_t numel, int64_t chunk, int head) {
    const int64_t begin = index == 0 ? 0 : index * chunk + head;
    const int64_t end = (index + 1) * chunk + head;
    return {begin < numel ? begin : numel, end < numel ? end : numel};
}

// The whole packs of a range whose first `head` elements precede the first pack.
PYOPS_EVERYWHERE Range packs_of(Range range, int head, int pack) {
    const int64_t begin = range.begin + head < range.end ? range.begin + head : range.end;
    // The lowest bits alone are needed, so 32 of them are enough.
    return {begin, range.end - (static_cast<int>(range.end - begin) & (pack - 1))};
}

// Visits the packs of N, split over `threads` threads: `many(i)` for UNROLL packs at i, i + threads
// * N, ..., then `pack(i)` for those that are left.
template <int N, int UNROLL, typename Many, typename Pack>
PYOPS_EVERYWHERE void walk_packs(Range packs, int thread, int threads, const Many& many,
                                 const Pack& pack) {
    int64_t i = packs.begin + static_cast<int64_t>(thread) * N;
    const int64_t stride = static_cast<int64_t>(threads) * N;
    for (; i + (UNROLL - 1) * stride < packs.end; i += UNROLL * stride) many(i);
    for (; i < packs.end; i += stride) pack(i);
}

// Visits the elements before and after the packs, fewer than half of `threads` on either side:
// one(i).
template <typename One>
PYOPS_EVERYWHERE void walk_edges(Range range, Range packs, int thread, int threads,
                                 const One& one) {
    const bool before = thread < threads / 2;
    const int64_t i = before ? range.begin + thread : packs.end + (thread - threads / 2);
    if (i < (before ? packs.begin : range.end)) one(i);
}

}  // namespace pyops::cuda
