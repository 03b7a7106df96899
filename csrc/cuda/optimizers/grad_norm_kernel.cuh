// The kernel of squared_norm: the sum of squares in fp64 and the number of non-finite elements of a
// whole list.
//
//   CTA k of a fixed 1024 walks the chunks that are its own  ->  partial[k]
//   the last CTA to finish adds partial[0..1023] in order
//
// Grid and order are the same on every device and in every run, and so are the bits. Bytes per
// element: one read.
#pragma once

#include "../pack.cuh"
#include "../communication/reduce.cuh"
#include "table.cuh"

namespace pyops::cuda {

constexpr int NORM_CTAS = 1024;
// All of them at a time on the 132 multiprocessors of an H100 or H200. At 40 registers six fit, and
// the 232 CTAs that were left ran by themselves, two of a multiprocessor, at half the speed of a
// copy.
constexpr int NORM_RESIDENT = 8;
constexpr int MAX_ROWS = 1200;  // tensors that travel as kernel arguments

struct Partial {
    double sum, non_finite;
};

struct NormWorkspace {
    Partial partial[NORM_CTAS];
    unsigned ticket;
};

// Where the rows come from: a table in device memory, or the arguments of the launch.
struct TableGradients {
    const int64_t* table;
    int count;
    __device__ __forceinline__ const void* data(int row) const {
        return pointer<const void>(table, row, GRAD);
    }
    __device__ __forceinline__ int64_t numel(int row) const { return column(table, row, NUMEL); }
    __device__ __forceinline__ int64_t first(int row) const {
        return column(table, row, FIRST_CHUNK);
    }
    __device__ __forceinline__ int dtype(int row) const {
        return code_of(packed_of(table, row), GRAD_DTYPE);
    }
};

struct ListedTensors {
    const void* address[MAX_ROWS];
    int64_t packed[MAX_ROWS];  // 4 * numel + dtype
    int32_t first_chunk[MAX_ROWS];
    int count;
    __device__ __forceinline__ const void* data(int row) const { return address[row]; }
    __device__ __forceinline__ int64_t numel(int row) const { return packed[row] / 4; }
    __device__ __forceinline__ int64_t first(int row) const { return first_chunk[row]; }
    __device__ __forceinline__ int dtype(int row) const {
        return static_cast<int>(packed[row] % 4);
    }
};

// The exponents of the numbers in a 32-bit word, and the lowest bit of each: a number that is not
// finite has all of them, and the sum then is in the place of its sign.
template <int DTYPE>
struct Exponents {
    static constexpr uint32_t BITS = DTYPE == FP32   ? 0x7F800000u
                                     : DTYPE == BF16 ? 0x7F807F80u
                                                     : 0x7C007C00u;
    static constexpr uint32_t LOWEST = DTYPE == FP32   ? 0x00800000u
                                       : DTYPE == BF16 ? 0x00800080u
                                                       : 0x04000400u;
    static constexpr uint32_t SIGNS = DTYPE == FP32 ? 0x80000000u : 0x80008000u;
};

struct NormSum {
    double sum = 0.0;
    int non_finite = 0;

    // COUNT packs of N, THREADS packs apart, all in flight.
    template <int DTYPE, int N, int COUNT>
    __device__ __forceinline__ void add_loaded(const void* data, int64_t i) {
        using Of = Exponents<DTYPE>;
        Pack<DTYPE, N> packs[COUNT];
#pragma unroll
        for (int u = 0; u < COUNT; ++u) packs[u] = load<DTYPE, N>(data, i + u * THREADS * N);
        uint32_t words[sizeof packs / 4], beyond = 0;
        memcpy(words, packs, sizeof packs);
#pragma unroll
        for (unsigned w = 0; w < sizeof packs / 4; ++w)
            beyond |= (words[w] & Of::BITS) + Of::LOWEST;
#pragma unroll
        for (int u = 0; u < COUNT; ++u) {
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const double value = widen(packs[u].element[j]);
                sum = fma(value, value, sum);
            }
        }
        // A look at each number would take more instructions than its square.
        if (beyond & Of::SIGNS) count<DTYPE, N, COUNT>(data, i);
    }

    // Loaded once more, so that no register is kept for what nearly never happens.
    template <int DTYPE, int N, int COUNT>
    __device__ __forceinline__ void count(const void* data, int64_t i) {
#pragma unroll 1
        for (int u = 0; u < COUNT; ++u) {
            const Pack<DTYPE, N> pack = load<DTYPE, N>(data, i + u * THREADS * N);
#pragma unroll
            for (int j = 0; j < N; ++j) count_one(widen(pack.element[j]));
        }
    }

    __device__ __forceinline__ void count_one(float value) {
        non_finite += (bits_of(value) & 0x7F800000u) == 0x7F800000u;
    }

    // Numbers that are in registers for another reason.
    template <int DTYPE, int N>
    __device__ __forceinline__ void add(const Pack<DTYPE, N>& pack) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float value = widen(pack.element[j]);
            count_one(value);
            sum = fma(static_cast<double>(value), static_cast<double>(value), sum);
        }
    }

    // One chunk: 16 KiB of fp32 are four loads per thread.
    template <int DTYPE>
    __device__ __forceinline__ void add_chunk(const void* data, int64_t numel, int64_t index) {
        constexpr int N = 16 / bytes_of(DTYPE), UNROLL = CHUNK / (THREADS * N);
        const int head = head_of(misalignment(data, bytes_of(DTYPE), N), N);
        const int64_t whole = index * CHUNK + head;
        if ((index > 0 || head == 0) && whole + CHUNK <= numel) {
            add_loaded<DTYPE, N, UNROLL>(data, whole + threadIdx.x * N);
            return;
        }
        // A row's last chunk, or its first one where packs begin behind its first element.
        const Range range = elements_of(index, numel, CHUNK, head),
                    packs = packs_of(range, index == 0 ? head : 0, N);
        const auto pack = [&](int64_t i) { add_loaded<DTYPE, N, 1>(data, i); };
        walk_packs<N, 1>(packs, threadIdx.x, THREADS, pack, pack);
        walk_edges(range, packs, threadIdx.x, THREADS,
                   [&](int64_t i) { add(load<DTYPE, 1>(data, i)); });
    }
};

// `out` receives {sum, non-finite}; `more` adds to what it holds (a list of more than MAX_ROWS
// tensors).
template <typename Rows>
__global__ __launch_bounds__(THREADS,
                             NORM_RESIDENT) void norm_kernel(const __grid_constant__ Rows rows,
                                                             NormWorkspace* workspace, double* out,
                                                             bool more) {
    NormSum mine;
    const void* data = nullptr;
    int64_t numel = 0;
    int dtype = FP32;
    const auto enter = [&](int row) {
        data = rows.data(row);
        numel = rows.numel(row);
        dtype = rows.dtype(row);
    };
    sweep(rows, enter, [&](int64_t index) {
        with_dtype(dtype, [&](auto code) {
            mine.template add_chunk<decltype(code)::value>(data, numel, index);
        });
    });
    const double sum = block_sum<THREADS>(mine.sum);
    const double non_finite = block_sum<THREADS>(static_cast<double>(mine.non_finite));
    if (threadIdx.x == 0) workspace->partial[blockIdx.x] = {sum, non_finite};
    if (!last_cta(&workspace->ticket)) return;
    Partial total{0.0, 0.0};
    for (int k = threadIdx.x; k < static_cast<int>(gridDim.x); k += THREADS) {
        total.sum += __ldcg(&workspace->partial[k].sum);
        total.non_finite += __ldcg(&workspace->partial[k].non_finite);
    }
    const double all = block_sum<THREADS>(total.sum),
                 all_non_finite = block_sum<THREADS>(total.non_finite);
    if (threadIdx.x == 0) {
        out[0] = more ? out[0] + all : all;
        out[1] = more ? out[1] + all_non_finite : all_non_finite;
    }
}

}  // namespace pyops::cuda
