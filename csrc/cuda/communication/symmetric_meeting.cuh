// How the GPUs of a group meet within a kernel: CTA b of every rank waits for CTA b of all others.
//
//   rank r, CTA b      pad of rank p                     rank p, CTA b
//   put epoch     ->   arrived[b][r]                ->   wait until it is there
//
// Each word has one writer and counts up, so that nothing is ever set back: a launch finds its
// epoch where the one before it left it, also when a CUDA graph is run again. Whatever a CTA wrote
// before it came is seen by those that it met, and whatever it read was read before they go on.
//
// A rank that does not come within the timeout is lost. Who finds out writes its number into every
// pad, where all others look while they wait: all end at once and name the same rank. It stays
// there, and nobody waits in these pads again.
#pragma once

#include "system_scope.cuh"

namespace pyops::cuda {

constexpr int MAX_PEERS = 32;
constexpr int MAX_MEETING_CTAS = 64;  // fewer than any GPU holds at once, whatever runs beside

struct PeerSum {
    double sum, non_finite;
};

// One rank's own; all ranks write into it. Zeros before the ranks first meet.
struct Pad {
    uint32_t lost;                                  // 1 + the number of a rank that was lost
    uint32_t ticket;                                // of this rank's CTAs
    uint32_t epoch[MAX_MEETING_CTAS];               // meetings of this rank's CTAs so far
    uint32_t arrived[MAX_MEETING_CTAS][MAX_PEERS];  // the epoch that each rank's CTAs came to
    PeerSum partial[MAX_PEERS][MAX_MEETING_CTAS];   // of each rank's CTAs, for norms
};

struct Peers {
    Pad* pad[MAX_PEERS];
    int rank, size;
    int64_t timeout;    // nanoseconds
    uint32_t* failure;  // in memory that the host sees: 1 + the number of a rank that was lost
};

__device__ __forceinline__ void tell_of_loss(const Peers& peers, int lost) {
#pragma unroll 1  // seldom, and never in a hurry
    for (int p = 0; p < peers.size; ++p)
        store_first(&peers.pad[p]->lost, static_cast<uint32_t>(lost) + 1);
}

// Whether `peer` came to the epoch `when`; false once any rank is lost.
__device__ __forceinline__ bool wait_for(const Peers& peers, int peer, uint32_t when) {
    Pad* mine = peers.pad[peers.rank];
    const uint32_t* word = &mine->arrived[blockIdx.x][peer];
    int64_t began = 0;
    for (;;) {
        // A difference, because epochs wrap around.
        const bool came = static_cast<int32_t>(load_acquire(word) - when) >= 0;
        // Looked at last: whatever loss was told here before the peer came is seen, and this rank
        // does not go on beside others that have given up.
        const uint32_t lost = load_acquire(&mine->lost);
        if (lost != 0) {
            store_release(peers.failure, lost);
            return false;
        }
        if (came) return true;
        const int64_t now = nanoseconds();
        if (began == 0) began = now;
        if (now - began > peers.timeout) tell_of_loss(peers, peer);  // the next turn sees it
        pause();
    }
}

// All threads of CTA b of every rank call it with the same `when`. False: a rank was lost, and
// nothing of the others' memory may be relied on.
__device__ __forceinline__ bool meet(const Peers& peers, uint32_t when) {
    __syncthreads();  // what any thread of this CTA did, comes before the word
    const int peer = static_cast<int>(threadIdx.x);
    bool lost = false;
    if (peer < peers.size && peer != peers.rank) {
        store_release(&peers.pad[peer]->arrived[blockIdx.x][peers.rank], when);
        lost = !wait_for(peers, peer, when);
    }
    return !__syncthreads_or(lost);
}

// A launch meets twice, at epoch_of() + 1 and + 2, and leaves that behind.
__device__ __forceinline__ uint32_t epoch_of(const Peers& peers) {
    return peers.pad[peers.rank]->epoch[blockIdx.x];
}
__device__ __forceinline__ void leave_epoch(const Peers& peers, uint32_t epoch) {
    if (threadIdx.x == 0) peers.pad[peers.rank]->epoch[blockIdx.x] = epoch;
}

}  // namespace pyops::cuda
