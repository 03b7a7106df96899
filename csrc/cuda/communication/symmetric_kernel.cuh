// The sum of n ranks' rows over their symmetric memory, in one kernel:
//
//   meet                                  every rank's row is there
//   out = round(scale * ((row 0 + row 1) + ...))   in fp32, in the order of ranks, rounded once
//   store into one or more outs           this rank's memory, or every rank's
//   meet                                  nobody reads this rank's row any more, and what others
//                                         had to write here is there
//
//   one shot         rows: all that each rank has      outs: this rank's
//   reduce-scatter   rows: this rank's part of each    outs: this rank's
//   two shots        rows: this rank's part of each    outs: this part of every rank's
//
// In place is fine: a part is read by its owner alone, and each element by the thread that writes
// it. The bits are those of two shots on the CPU, wherever the rows are cut. Bytes per element of a
// part over the links: one read for each other rank, one write for each other out.
#pragma once

#include "../optimizers/grad_norm_kernel.cuh"
#include "../pack.cuh"
#include "../partition.cuh"
#include "reduce.cuh"
#include "symmetric_meeting.cuh"

namespace pyops::cuda {

// One access of 16 bytes a thread for 16-bit elements: a small message is spread over all CTAs.
constexpr int64_t PIECE = 8 * THREADS;

struct SymmetricSum {
    Peers peers;
    const void* row[MAX_PEERS];
    void* out[MAX_PEERS];
    int outs;
    int64_t numel;  // of a row, and of an out
    int head;       // elements before the first pack
    float scale;
    double* norm;  // null, or {sum of squares, non-finite elements} of the outs
    void* whole;   // all of this rank's result, which becomes nan when a rank is lost
    int64_t whole_numel;
};

// The sum over ranks in their order. SIZE ranks are known when compiled, so that all loads are in
// flight before the first is added; 0: any number, four at a time.
template <int IN, int N, int SIZE>
__device__ __forceinline__ void sum_of_ranks(const void* const* rows, int size, int64_t i,
                                             float (&sum)[N]) {
    if constexpr (SIZE > 0) {
        Pack<IN, N> loaded[SIZE];
#pragma unroll
        for (int p = 0; p < SIZE; ++p) loaded[p] = load<IN, N>(rows[p], i);
        widen(loaded[0], sum);
#pragma unroll
        for (int p = 1; p < SIZE; ++p)
#pragma unroll
            for (int j = 0; j < N; ++j) sum[j] += widen(loaded[p].element[j]);
    } else {
        widen(load<IN, N>(rows[0], i), sum);
#pragma unroll 4
        for (int p = 1; p < size; ++p) {
            const auto pack = load<IN, N>(rows[p], i);
#pragma unroll
            for (int j = 0; j < N; ++j) sum[j] += widen(pack.element[j]);
        }
    }
}

template <int OUT, int IN, int N, int SIZE>
__device__ __forceinline__ void sum_piece(const SymmetricSum& a, int64_t i, NormSum& norm) {
    float sum[N];
    sum_of_ranks<IN, N, SIZE>(a.row, a.peers.size, i, sum);
    Pack<OUT, N> rounded;
#pragma unroll
    for (int j = 0; j < N; ++j) rounded.element[j] = narrow<OUT>(sum[j] * a.scale);
    if (a.norm) norm.add(rounded);
    for (int p = 0; p < a.outs; ++p) store<OUT, N>(a.out[p], i, rounded);
}

// Calls piece(i) for packs of N and one(i) for the elements around them, of this CTA's share.
template <int N, typename Piece, typename One>
__device__ __forceinline__ void walk_share(int64_t numel, int head, const Piece& piece,
                                           const One& one) {
    for (int64_t c = blockIdx.x; c * PIECE < numel; c += gridDim.x) {
        const Range range = elements_of(c, numel, PIECE, head),
                    packs = packs_of(range, c == 0 ? head : 0, N);
        walk_packs<N, 1>(packs, threadIdx.x, THREADS, piece, piece);
        walk_edges(range, packs, threadIdx.x, THREADS, one);
    }
}

// A result that was never finished must not look like one.
template <int OUT>
__device__ __forceinline__ void spoil(const SymmetricSum& a) {
    Pack<OUT, 1> nan;
    nan.element[0] = narrow<OUT>(float_of(0x7FC00000u));
    for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < a.whole_numel;
         i += static_cast<int64_t>(gridDim.x) * THREADS)
        store<OUT, 1>(a.whole, i, nan);
}

// Before the second meeting: this CTA's sum to every rank that gets the outs.
__device__ __forceinline__ void tell_norm(const SymmetricSum& a, const NormSum& mine) {
    const double sum = block_sum<THREADS>(mine.sum),
                 non_finite = block_sum<THREADS>(static_cast<double>(mine.non_finite));
    if (threadIdx.x != 0) return;
    const PeerSum here{sum, non_finite};
    const int rank = a.peers.rank;
    for (int p = 0; p < a.peers.size; ++p)
        if (p == rank || a.outs > 1) a.peers.pad[p]->partial[rank][blockIdx.x] = here;
}

// After it: the last CTA adds up those of all ranks, or of this one, in order.
__device__ __forceinline__ void add_up_norm(const SymmetricSum& a) {
    Pad* mine = a.peers.pad[a.peers.rank];
    if (!last_cta(&mine->ticket)) return;
    const int first = a.outs > 1 ? 0 : a.peers.rank;
    const int count = (a.outs > 1 ? a.peers.size : 1) * static_cast<int>(gridDim.x);
    PeerSum total{0.0, 0.0};
    for (int k = threadIdx.x; k < count; k += THREADS) {
        const PeerSum& of = mine->partial[first + k / gridDim.x][k % gridDim.x];
        total.sum += __ldcg(&of.sum);
        total.non_finite += __ldcg(&of.non_finite);
    }
    const double sum = block_sum<THREADS>(total.sum),
                 non_finite = block_sum<THREADS>(total.non_finite);
    if (threadIdx.x == 0) {
        a.norm[0] = sum;
        a.norm[1] = non_finite;
    }
}

template <int OUT, int IN, int N, int SIZE>
__global__ __launch_bounds__(THREADS,
                             2) void symmetric_kernel(const __grid_constant__ SymmetricSum a) {
    const uint32_t epoch = epoch_of(a.peers);
    if (!meet(a.peers, epoch + 1)) return spoil<OUT>(a);
    NormSum norm;
    walk_share<N>(
        a.numel, a.head, [&](int64_t i) { sum_piece<OUT, IN, N, SIZE>(a, i, norm); },
        [&](int64_t i) { sum_piece<OUT, IN, 1, SIZE>(a, i, norm); });
    if (a.norm) tell_norm(a, norm);
    if (!meet(a.peers, epoch + 2)) return spoil<OUT>(a);
    leave_epoch(a.peers, epoch + 2);
    if (a.norm) add_up_norm(a);
}

}  // namespace pyops::cuda
