// The kernels over symmetric memory as functions of the host: n ranks as n buffers of one process,
// for tests/cuda/symmetric.
#include <cuda_runtime.h>

#include <atomic>
#include <thread>
#include <vector>

#include "../../../../csrc/cuda/communication/symmetric_kernel.cuh"
#include "../../../../csrc/cuda/communication/symmetric_step.cuh"
#include "../../../../csrc/math/optimizers/adam.h"

using namespace pyops;
using namespace pyops::cuda;

namespace {

template <int OUT, int IN, int N>
void run(unsigned grid, const SymmetricSum& a) {
    const auto with = [&](auto size) {
        emulation::launch(grid, THREADS,
                          [&] { symmetric_kernel<OUT, IN, N, decltype(size)::value>(a); });
    };
    switch (a.peers.size) {
        case 2: return with(Code<2>{});
        case 4: return with(Code<4>{});
        case 8: return with(Code<8>{});
        default: return with(Code<0>{});
    }
}

Peers peers_of(int rank, int size, void* const* pads, uint32_t* failure, int64_t timeout) {
    Peers peers{};
    peers.rank = rank;
    peers.size = size;
    peers.timeout = timeout;
    peers.failure = failure;
    for (int p = 0; p < size; ++p) peers.pad[p] = static_cast<Pad*>(pads[p]);
    return peers;
}

// body(rank) for all ranks at once but those of the set `absent`, which never come.
template <typename Body>
void for_ranks(int size, unsigned absent, const Body& body) {
    std::vector<std::thread> ranks;
    for (int r = 0; r < size; ++r)
        if (!(absent >> r & 1)) ranks.emplace_back([&body, r] { body(r); });
    for (std::thread& rank : ranks) rank.join();
}

}  // namespace

extern "C" {

int64_t emulated_pad_bytes() { return sizeof(Pad); }

// Of the launches that follow: before look number `look`, from 0, at a word that other ranks write,
// `rank` comes to `epoch`, and the owner of `pad` is told right before that it is lost, if it is
// `late`. look < 0: nothing ever happens between looks.
void emulated_between_looks(int64_t look, void* pad, int rank, bool late, uint32_t epoch) {
    static std::atomic<int64_t> looks;
    looks = 0;
    emulation::between_looks = nullptr;
    if (look < 0) return;
    emulation::between_looks = [=] {
        if (looks++ != look) return;
        Pad& of = *static_cast<Pad*>(pad);
        if (late) store_first(&of.lost, static_cast<uint32_t>(rank) + 1);
        for (auto& cta : of.arrived) store_release(&cta[rank], epoch);
    };
}

// One rank's launch of `times` kernels. outs end at the first null; head < 0: one element at a
// time.
void emulated_symmetric_rank(unsigned grid, int r, int size, int times, const void* const* rows,
                             void* const* outs, void* const* pads, int64_t numel, int head,
                             double scale, int dtype_out, int dtype_in, double* norm, void* whole,
                             int64_t whole_numel, uint32_t* failure, int64_t timeout) {
    SymmetricSum a{};
    a.peers = peers_of(r, size, pads, failure, timeout);
    for (int p = 0; p < size; ++p) {
        a.row[p] = rows[p];
        if (outs[p]) a.out[a.outs++] = outs[p];
    }
    a.numel = numel;
    a.head = head < 0 ? 0 : head;
    a.scale = static_cast<float>(scale);
    a.norm = norm;
    a.whole = whole;
    a.whole_numel = whole_numel;
    with_dtype(dtype_out, [&](auto to) {
        with_dtype(dtype_in, [&](auto from) {
            constexpr int OUT = decltype(to)::value, IN = decltype(from)::value;
            constexpr int N = 16 / (bytes_of(OUT) > bytes_of(IN) ? bytes_of(OUT) : bytes_of(IN));
            for (int k = 0; k < times; ++k)
                head < 0 ? run<OUT, IN, 1>(grid, a) : run<OUT, IN, N>(grid, a);
        });
    });
}

// All ranks at once. rows, outs: [size, size] addresses. absent: a set of ranks that never come.
void emulated_symmetric(unsigned grid, int size, int times, const void* const* rows,
                        void* const* outs, void* const* pads, const int64_t* numels,
                        const int* heads, double scale, int dtype_out, int dtype_in, double* norms,
                        void* const* wholes, const int64_t* whole_numels, uint32_t* failures,
                        int64_t timeout, unsigned absent) {
    for_ranks(size, absent, [=](int r) {
        emulated_symmetric_rank(grid, r, size, times, rows + r * size, outs + r * size, pads,
                                numels[r], heads[r], scale, dtype_out, dtype_in,
                                norms ? norms + 2 * r : nullptr, wholes[r], whole_numels[r],
                                failures + r, timeout);
    });
}

// Adam over the table of one rank. shifts: [size] bytes from its gradients, then parameters, to
// those of each. options: the numbers of AdamOptions; flags: 1 decoupled, 2 maximize, 4 the sum is
// not rounded.
void emulated_symmetric_step_rank(unsigned grid, int r, int size, int64_t* table, int rows,
                                  void* const* pads, const int64_t* grad_shifts,
                                  const int64_t* param_shifts, double scale, const double* o,
                                  int flags, const float* grad_factor, const float* found_inf,
                                  uint32_t* failure, int64_t timeout) {
    SymmetricStep<Adam> a{};
    a.step.table = table;
    a.step.rows = rows;
    a.step.grad_factor = grad_factor;
    a.step.found_inf = found_inf;
    a.step.options = {o[0], o[1], o[2], o[3], o[4], (flags & 1) != 0, (flags & 2) != 0};
    a.peers = peers_of(r, size, pads, failure, timeout);
    for (int p = 0; p < size; ++p) {
        a.grads[p] = grad_shifts[p];
        a.params[p] = param_shifts[p];
    }
    a.scale = static_cast<float>(scale);
    a.in_fp32 = flags & 4;
    emulation::launch(grid, THREADS, [&] { symmetric_step_kernel<Adam>(a); });
}

// All ranks at once; shifts: [size, size].
void emulated_symmetric_step(unsigned grid, int size, int64_t* const* tables, const int* rows,
                             void* const* pads, const int64_t* grad_shifts,
                             const int64_t* param_shifts, double scale, const double* o, int flags,
                             const float* grad_factor, const float* found_inf, uint32_t* failures,
                             int64_t timeout, unsigned absent) {
    for_ranks(size, absent, [=](int r) {
        emulated_symmetric_step_rank(grid, r, size, tables[r], rows[r], pads,
                                     grad_shifts + r * size, param_shifts + r * size, scale, o,
                                     flags, grad_factor, found_inf, failures + r, timeout);
    });
}

}  // extern "C"
